"""Steps are measured for whoever can run, and whoever cannot leaves a line that says why."""

import json
from importlib.metadata import version

import pytest
import torch

from deepwell.bench.adamw import run_adamw, shapes_of
from deepwell.bench.attention import AttentionShape, run_attention, unfused
from deepwell.bench.compile_time import first_step, run_compile
from deepwell.bench.models import MODELS, RaceModel, race_model
from deepwell.bench.peers import PEERS, Peer, parse_peers
from deepwell.bench.report import has_problems, kernel_table, step_table, write
from deepwell.bench.step import StepOptions, fits_together, run_steps
from deepwell.bench.variants import parse_variants
from deepwell.errors import ConfigError, UnsupportedError

CPU = StepOptions(device="cpu", rounds=2, burst=2)


@pytest.fixture(scope="module")
def result() -> dict:
    """One race on the CPU: a peer that runs, one that is not installed, and Deepwell."""

    def build(_model: torch.nn.Module) -> None:
        raise UnsupportedError("no such package here: pip install it")

    missing = Peer(name="missing", about="not there", build=build)
    return run_steps(MODELS["tiny"], [PEERS["eager"], missing, *parse_variants("bf16,fp8")], CPU)


def test_every_entrant_has_a_row_and_starts_from_the_same_loss(result: dict) -> None:
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["eager", "missing", "bf16", "fp8"]
    assert rows["missing"]["ms"] is None and "pip install" in rows["missing"]["note"]
    first = {name: row["losses"][0] for name, row in rows.items() if row["ms"]}
    # bf16 products in another order, and FP8's rounding.
    assert first["bf16"] == pytest.approx(first["eager"], rel=2e-3)
    assert first["fp8"] == pytest.approx(first["eager"], rel=1e-2)
    assert result["samples"] == 4 and result["order"] == "in turns"
    assert rows["fp8"]["tokens_per_s"] == pytest.approx(128 / rows["fp8"]["ms"] * 1e3)
    assert rows["fp8"]["passes"]["linear"] == 14


def test_the_table_compares_with_the_first_row_and_keeps_the_reason(result: dict) -> None:
    text = step_table(result)
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "1.000x" in lines["eager"] and "pip install" in lines["missing"]
    assert "in turns" in text and version("torch") in text


def test_a_result_is_plain_json_with_its_versions(result: dict, tmp_path) -> None:
    write(result, tmp_path / "results" / "step.json")
    again = json.loads((tmp_path / "results" / "step.json").read_text())
    assert again == json.loads(json.dumps(result))
    assert {"date", "commit", "packages", "cuda", "device"} <= set(again["environment"])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--json"):
        write(result, tmp_path / "file" / "step.json")


def test_one_by_one_measures_the_same_entrants() -> None:
    options = StepOptions(device="cpu", rounds=1, burst=1, order="one by one", optimizer="torch")
    done = run_steps(MODELS["tiny"], [PEERS["eager"]], options)
    assert done["order"] == "one by one" and done["rows"][0]["ms"] > 0


def test_a_claim_that_does_not_hold_is_seen() -> None:
    assert not has_problems({"rows": [{"problems": []}, {}]})
    assert has_problems({"rows": [{}, {"problems": ["linears in FP8: 0 of at least 36 kernels ran"]}]})


def test_entrants_take_turns_only_where_they_fit_together() -> None:
    # Five of 8b-4l keep 58 GB on an H200; two whole 8B models would leave nothing for a step.
    free = 139 << 30
    assert fits_together(MODELS["8b-4l"], 5, free)
    assert not fits_together(MODELS["llama3-8b"], 2, free)


@pytest.mark.parametrize(
    ("name", "billions"), [("8b-4l", 1.923), ("llama3-8b", 8.030), ("1b-16l", 1.498), ("tiny", 0.0)]
)
def test_parameters_are_counted_as_the_models_have_them(name: str, billions: float) -> None:
    # Llama-3 8B has 8.03e9 parameters (its model card).
    shapes = shapes_of(MODELS[name])
    assert MODELS[name].num_params == sum(torch.Size(shape).numel() for shape in shapes)
    assert MODELS[name].num_params / 1e9 == pytest.approx(billions, abs=6e-4)


def test_checkpointed_layers_change_memory_and_not_the_loss() -> None:
    plain, less = MODELS["tiny"], MODELS["tiny"].with_layers_checkpointed(1)
    losses, grads = [], []
    for model in (plain, less):
        net, example = model.build("cpu"), model.example("cpu")
        loss = model.loss_of(net, example)
        loss.backward()
        losses.append(loss.item())
        grads.append([p.grad for p in net.parameters()])
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with pytest.raises(ConfigError, match="Hugging Face"):
        MODELS["hf-tiny"].with_layers_checkpointed(1)


def test_hugging_face_builds_the_same_sizes() -> None:
    pytest.importorskip("transformers")
    model: RaceModel = MODELS["hf-tiny"]
    net = model.build("cpu")
    assert sum(p.numel() for p in net.parameters()) == model.num_params
    assert net.config.rope_parameters["rope_theta"] == model.config.rope_theta
    assert torch.isfinite(model.loss_of(net, model.example("cpu")))


def test_wrong_names_and_numbers_are_errors() -> None:
    for wrong in (lambda: race_model("9b"), lambda: parse_peers("torch,jax"), lambda: StepOptions(rounds=0)):
        with pytest.raises(ConfigError):
            wrong()
    with pytest.raises(ConfigError, match="no entrant"):
        run_steps(MODELS["tiny"], [], CPU)


@pytest.mark.parametrize("name", ["torchao", "torchao-row", "liger"])
def test_a_peer_that_is_not_installed_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    real = importlib.import_module

    def without(module: str, *rest: object) -> object:
        if module.split(".", maxsplit=1)[0] in ("torchao", "liger_kernel"):
            raise ImportError(f"No module named {module!r}")
        return real(module, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(UnsupportedError, match="not installed"):
        PEERS[name].build(MODELS["tiny"].build("cpu"))


def test_a_peer_that_patches_hugging_face_patches_it_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    rotate, norm, calls = modeling.apply_rotary_pos_emb, modeling.LlamaRMSNorm, []

    def counting(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return rotate(*args, **kwargs)

    class Liger:
        @staticmethod
        def apply_liger_kernel_to_llama(model: torch.nn.Module) -> None:
            modeling.apply_rotary_pos_emb, modeling.LlamaRMSNorm = counting, torch.nn.Identity

    monkeypatch.setattr("deepwell.bench.peers._need", lambda module, package: Liger)
    model = MODELS["hf-tiny"]
    example, peer = model.example("cpu"), PEERS["liger"].build(model.build("cpu"))
    assert (modeling.apply_rotary_pos_emb, modeling.LlamaRMSNorm) == (rotate, norm)
    model.loss_of(peer, example)
    assert len(calls) == model.config.num_layers
    model.loss_of(model.build("cpu"), example)
    assert len(calls) == model.config.num_layers and modeling.LlamaRMSNorm is norm


def test_attention_ways_agree_with_softmax_written_out() -> None:
    done = run_attention(AttentionShape(B=1, H=4, G=2, S=32, D=16), "cpu", rounds=1)
    rows = {row["attention"]: row for row in done["rows"]}
    for name in ("softmax, eager", "torch flash", "Deepwell"):
        if "ms" in rows[name]:
            assert rows[name]["SQNR dB"] > 100
    assert "ms" in rows["softmax, eager"] and "ms" in rows["Deepwell"]
    variants = [name for name in rows if ": " in name]
    assert all(rows[name]["SQNR dB"] > 100 and rows[name]["ms"] > 0 for name in variants)
    assert {name.partition(": ")[2] for name in variants} >= {"sdpa", "padded_flash", "Deepwell"}
    # cuDNN is a GPU's: the row stays, with the reason.
    assert "note" in rows["cuDNN"] and "cuDNN" in kernel_table(done)


def test_attention_written_out_sees_no_future() -> None:
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    before = unfused(q, k, v)[:, :, :5]
    k[:, :, 6:], v[:, :, 6:] = 9.0, 9.0
    assert torch.equal(before, unfused(q, k, v)[:, :, :5])


def test_adamw_is_timed_over_a_models_parameters() -> None:
    done = run_adamw(MODELS["tiny"], "cpu", rounds=1)
    assert [row["optimizer"] for row in done["rows"]][:2] == ["torch fused", "adamw_dw, nearest"]
    assert done["rows"][0]["speed"] == 1.0 and f"{len(shapes_of(MODELS['tiny']))} tensors" in done["title"]


def test_the_first_step_is_timed_in_a_process_of_its_own() -> None:
    done = run_compile("tiny", ["eager"], "cpu", timeout=240)
    rows = {row["entrant"]: row for row in done["rows"]}
    assert rows["eager"]["cold s"] > 0 and rows["eager"]["warm s"] > 0
    assert "cold s" in kernel_table(done)
    assert first_step("tiny", "eager", "cpu")["first_step_s"] > 0
