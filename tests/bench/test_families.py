"""Hugging Face families as models of the race: real widths, config files, and rows that are kept and resumed."""

import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from deepwell.bench import model_table
from deepwell.bench.families import WIDTHS, family_model
from deepwell.bench.gradients import against_eager
from deepwell.bench.models import race_model
from deepwell.bench.step import StepOptions
from deepwell.bench.variants import Variant
from deepwell.cli import app
from deepwell.errors import ConfigError

pytest.importorskip("transformers")

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}
# Layers and billions of parameters of the whole models, as their makers state them.
WHOLE = {
    "gpt2-xl": (48, 1.558),
    "llama3-8b": (32, 8.030),
    "qwen3-8b": (36, 8.191),
    "qwen2.5-1.5b": (28, 1.544),
    "mistral-7b": (32, 7.242),
    "gemma2-9b": (42, 9.242),
    "gemma3-4b": (34, 3.880),
    "olmo2-7b": (32, 7.299),
    "gpt-neox-6.9b": (32, 6.857),
    "phi3-mini": (32, 3.821),
    "granite-2b": (40, 2.534),
    "qwen3-30b-a3b": (48, 30.532),
    "mixtral": (32, 46.703),
    "olmoe": (16, 6.919),
    "gpt-oss-20b": (24, 20.915),
}


@pytest.fixture
def folder(tmp_path):
    """A folder with the config.json of a tiny Llama."""
    place = tmp_path / "tiny-llama"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(TINY))
    return place


@pytest.mark.parametrize("name", WHOLE)
def test_a_width_has_the_parameters_of_the_real_model(name):
    layers, billions = WHOLE[name]
    assert family_model(f"hf:{name}:{layers}").num_params / 1e9 == pytest.approx(billions, abs=6e-4)
    row = family_model(f"hf:{name}")
    assert row.settings.num_hidden_layers == WIDTHS[name]["layers"] < layers
    assert row.settings.max_position_embeddings >= row.seq_len


def test_one_width_is_like_a_model_and_not_one():
    assert WIDTHS.keys() - WHOLE.keys() == {"deepseek-v3-like"}
    settings = family_model("hf:deepseek-v3-like").settings
    assert (settings.n_routed_experts, settings.n_group, settings.kv_lora_rank) == (64, 8, 512)


def test_a_config_file_and_a_model_type_are_read(folder):
    for name in (f"hf:{folder}", f"hf:{folder}/config.json"):
        model = race_model(name)
        assert (model.name, model.settings.num_hidden_layers) == ("hf:tiny-llama", 3)
        assert (model.batch, model.seq_len, model.head) == (2, 32, "lm_head")
    model = race_model(f"hf:{folder}:1", batch=1, seq_len=8)
    assert (model.name, model.settings.num_hidden_layers, model.tokens) == ("hf:tiny-llama:1", 1, 8)
    assert race_model("hf:gemma2:2").settings.layer_types == ["sliding_attention", "full_attention"]


def test_lists_of_a_config_file_are_cut_with_its_layers(tmp_path):
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma2", "num_hidden_layers": 4, "layer_types": types}))
    assert family_model(f"hf:{path}:3").settings.layer_types == types[:3]


def test_wrong_names_are_errors_that_say_so(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    wrong = {
        "hf:no-such-model": "no model type of transformers",
        "hf:llama:0": "hf:NAME:layers",
        f"hf:{tmp_path}": "no config.json with a model_type",
        "hf:clip_text_model:1": "no causal language model",
        "llama9": "hf:NAME",
    }
    for name, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            _ = race_model(name).num_params
    with pytest.raises(ConfigError, match="--batch is 0"):
        race_model("hf:llama", batch=0)
    with pytest.raises(ConfigError, match="has no policy"):
        Variant.parse("default").policy()


def test_gradients_are_compared_with_eagers(folder):
    model = race_model(f"hf:{folder}:2")
    found, wrong = against_eager(model, Variant.parse("bf16"), "cpu")
    assert not wrong and found["cosine"] > 0.999 and found["tokens"] == 32

    class Wrong:
        """The gradient of one parameter is lost, and the others are those of the negative loss."""

        @staticmethod
        def engine(net, _example):
            def call(**batch):
                out = net(**batch)
                out.loss = -out.loss + 0 * net.lm_head.weight.sum()
                return out

            net.model.norm.weight.requires_grad_(False)
            return call

    found, wrong = against_eager(model, Wrong(), "cpu")
    assert found["cosine"] == pytest.approx(-1.0, abs=0.01)
    assert [line.split(":")[0] for line in wrong[:2]] == ["gradients", "gradients"] and "loss" in wrong[2]


@pytest.fixture
def in_process(monkeypatch):
    """Rows run here and not in a process of their own, beside eager and not beside torch.compile: both take longer."""

    def run(command, **_options):
        done = CliRunner().invoke(app, command[3:])
        return SimpleNamespace(returncode=done.exit_code, stderr=done.stderr)

    monkeypatch.setattr(model_table.subprocess, "run", run)
    monkeypatch.setattr(model_table, "PEER", "eager")


def race_one_row(folder, tmp_path, peer):
    arguments = (
        "bench",
        "models",
        "--only",
        f"{folder}:1",
        "--out",
        str(tmp_path / "out"),
        "--device",
        "cpu",
        "--quick",
    )
    shown = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "all.json")])
    assert shown.exit_code == 0, shown.output
    assert "geometric mean of 1 rows" in shown.stdout
    (row,) = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert row["model"] == "hf:tiny-llama:1" and row["batch"] == "2 x 32" and not row["problems"]
    assert row["speed"] == pytest.approx(row[f"{peer} ms"] / row["default ms"])
    assert row["cosine"] > 0.99 and row["default loss"] == pytest.approx(row[f"{peer} loss"], rel=0.02)
    return row


def test_rows_are_kept_resumed_and_summed_up(folder, tmp_path, monkeypatch, in_process):
    row = race_one_row(folder, tmp_path, "eager")
    out, options = tmp_path / "out", StepOptions(device="cpu", rounds=2, burst=1)
    # What is kept is not run again; what is not, and what was measured otherwise, is.
    calls = []
    monkeypatch.setattr(model_table, "_run", lambda name, *_: calls.append(name) or "failed: not here")
    again = model_table.run_models([f"{folder}:1", f"{folder}:2"], out, options, resume=True)
    assert calls == [f"{folder}:2"] and again["rows"][0] == row
    assert again["rows"][1]["problems"] == ["failed: not here"]
    assert again["geometric_mean"] == pytest.approx(row["speed"])
    model_table.run_models([f"{folder}:1"], out, StepOptions(device="cpu", rounds=3, burst=1), resume=True)
    assert len(calls) == 2


@pytest.mark.parametrize(("ours", "is_wrong"), [([10.0, 8.0, 6.0], False), ([10.5, 9.0, 7.5], True)])
def test_losses_are_compared_before_the_first_update(folder, tmp_path, monkeypatch, ours, is_wrong):
    def run(name, path, options, timeout):
        rows = [
            {"name": "torch", "ms": 2.0, "peak_gb": 0, "losses": [10.0, 9.0, 7.5]},
            {"name": "default", "ms": 1.0, "peak_gb": 0, "losses": ours, "problems": [], "gradients": None},
        ]
        samples = options.rounds * options.burst
        result = {"bench": "step", "model": "hf:tiny-llama:1", "samples": samples, "device": "cpu", "batch": "1 x 1"}
        path.write_text(json.dumps(result | {"rows": rows}))
        return ""

    monkeypatch.setattr(model_table, "_run", run)
    (row,) = model_table.run_models([f"{folder}:1"], tmp_path, StepOptions(device="cpu"))["rows"]
    assert row["default loss"] == ours[0] and row["torch loss"] == 10.0
    assert row["problems"] == (["the first losses differ by 5.00%"] if is_wrong else [])


@pytest.mark.slow
def test_a_row_runs_in_a_process_of_its_own_beside_torch_compile(folder, tmp_path):
    race_one_row(folder, tmp_path, "torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, and the row runs")
def test_a_row_that_fails_leaves_its_reason(folder, tmp_path, in_process):
    done = model_table.run_models([f"{folder}:1"], tmp_path / "out", StepOptions(device="cuda"))
    assert done["geometric_mean"] is None
    assert done["rows"][0]["note"].startswith("failed: deepwell: no CUDA GPU here")
