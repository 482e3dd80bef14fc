"""Exported engines: the file computes what the engine did, in a process that has no code of the user's, and every file
that is not exactly one of ours is refused by name.
"""

import errno
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from typer.testing import CliRunner

import deepwell as dw
from deepwell.artifacts.export.container import MANIFEST, MEMBERS, TENSORS, Container, Member, Writer
from deepwell.artifacts.export.manifest import inspect
from deepwell.artifacts.export.read import load_engine
from deepwell.artifacts.export.weights import Form, expected, pack, unpack
from deepwell.artifacts.export.write import export
from deepwell.artifacts.tensor_file import tensor_pieces
from deepwell.bench.llama import Llama
from deepwell.bench.llama import LlamaConfig as BenchConfig
from deepwell.errors import CaptureError, CheckpointError, ConfigError, UnsupportedError
from deepwell.formats.quantize import quantize
from warm import run_python

transformers = pytest.importorskip("transformers")


# ---- models ----


class Odd(nn.Module):
    """What no library has: a keyword argument, a constant tensor, tied weights, a dict of results, a bound on sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.position = nn.Parameter(torch.randn(48, 32) * 0.1)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.plain = torch.linspace(0, 1, 32)  # neither parameter nor buffer
        self.register_buffer("mask", torch.ones(32), persistent=False)

    def forward(self, ids: Tensor, scale: float = 1.0, labels: Tensor | None = None) -> dict[str, Any]:
        x = self.embed(ids) + self.position[: ids.shape[1]] * scale + self.plain
        x = x * self.mask + self.down(torch.nn.functional.gelu(self.up(x)))
        x = x + torch.arange(ids.shape[1], device=ids.device)[:, None] * 0.01
        logits = self.head(x)
        if labels is None:
            return {"logits": logits, "parts": (x, None, 3)}
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 32, bias=False))


def bench_llama(width: int = 64) -> nn.Module:
    config = BenchConfig(
        width=width, num_heads=4, num_kv_heads=2, hidden=width * 3 // 2, num_layers=1, vocab=128, max_positions=64
    )
    return Llama(config).init_weights()


def hf_llama(width: int = 64, layers: int = 1) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=width * 3 // 2, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def qwen_moe(width: int = 64) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        hidden_size=width, intermediate_size=width * 3 // 2, moe_intermediate_size=width // 2,
        num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=128, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


@dataclass(frozen=True, kw_only=True)
class Case:
    build: Callable[[], nn.Module]
    format: str
    dtype: torch.dtype = torch.bfloat16
    kind: str = "tokens"
    new_tokens: int = 0

    def call(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        if self.kind == "floats":
            return {"input": torch.randn(3, 5, 32, generator=generator).to(self.dtype)}
        name = {"bench": "tokens_BS", "ids": "ids"}.get(self.kind, "input_ids")
        return {name: torch.randint(3, 64, (3, 11), generator=generator)}

    @property
    def example(self) -> dict[str, Tensor] | None:
        """What to capture with, where nobody could guess it."""
        return {"ids": torch.arange(18).view(2, 9)} if self.kind == "ids" else None


CASES = {
    "sequential": Case(build=sequential, format="mxfp8", dtype=torch.float32, kind="floats"),
    "nvfp4": Case(build=sequential, format="nvfp4", kind="floats"),
    "llama": Case(build=hf_llama, format="mxfp8", new_tokens=2),
}
SLOW_CASES = {
    "odd": Case(build=Odd, format="mxfp8", dtype=torch.float32, kind="ids"),
    "bench": Case(build=bench_llama, format="nvfp4", kind="bench"),
    "llama_bf16": Case(build=hf_llama, format="bf16"),
    "llama_nvfp4": Case(build=hf_llama, format="nvfp4", dtype=torch.float32),
    "llama_fp8": Case(build=hf_llama, format="fp8"),
    "gpt2": Case(build=gpt2, format="mxfp8", new_tokens=4),
    "gpt2_nvfp4": Case(build=gpt2, format="nvfp4"),
    "qwen_moe": Case(build=qwen_moe, format="mxfp8", new_tokens=4),
    "qwen_moe_nvfp4": Case(build=qwen_moe, format="nvfp4"),
    "qwen_moe_fp8": Case(build=qwen_moe, format="fp8"),
    "bench_fp32": Case(build=bench_llama, format="mxfp8", dtype=torch.float32, kind="bench"),
}


def engine_of(case: Case) -> dw.Engine:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = case.build().to(case.dtype).eval()
    return dw.compile(dw.capture(model, case.example), precision_policy=dw.PrecisionPolicy(case.format))


def logits_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result["logits"]


# Runs where nothing of this file can be imported, and where reading Python objects from files is an error.
FRESH = """
import json, os, pickle, sys
import safetensors.torch, torch
from deepwell.artifacts.export.read import load_engine

def forbidden(*args, **kwargs):
    raise AssertionError("objects were read from a file")

folder, names = sys.argv[1], json.loads(sys.argv[2])
answers = {}
import deepwell.engine.compile as compiling
compiling.PLAIN_ON_CPU = False  # as in the tests' own process
for name, new_tokens in names.items():
    kept = pickle.load, pickle.loads, pickle.Unpickler, torch.load
    pickle.load = pickle.loads = pickle.Unpickler = torch.load = forbidden
    try:
        engine = load_engine(f"{folder}/{name}.engine")
    finally:
        pickle.load, pickle.loads, pickle.Unpickler, torch.load = kept
    stored = safetensors.torch.load_file(f"{folder}/{name}.answers")
    call = {key[3:]: value for key, value in stored.items() if key.startswith("in.")}
    assert not engine.training
    with torch.no_grad():
        result = engine(**call)
    logits = result if isinstance(result, torch.Tensor) else result["logits"]
    same = torch.equal(logits.contiguous().view(torch.uint8), stored["logits"].view(torch.uint8))
    tokens = True
    if new_tokens:
        made = engine.generate(**call, max_new_tokens=new_tokens, do_sample=False)
        tokens = torch.equal(made, stored["tokens"])
    answers[name] = [same, tokens, len(engine.bound.schemes)]
assert "test_export" not in sys.modules
print(json.dumps(answers))
"""


def check_in_a_fresh_process(tmp_path: Path, cases: dict[str, Case]) -> dict[str, Any]:
    written = {}
    for name, case in cases.items():
        engine = engine_of(case)
        call = case.call()
        with torch.no_grad():
            answers = {f"in.{key}": value for key, value in call.items()}
            answers["logits"] = logits_of(engine(**call)).contiguous().clone()
            if case.new_tokens:
                answers["tokens"] = engine.generate(**call, max_new_tokens=case.new_tokens, do_sample=False)
        torch._dynamo.reset()  # or the sizes above would make open ones of the example's, which takes longer
        before = {key: value.clone() for key, value in engine.deepwell.model.state_dict().items()}
        written[name] = export(engine, tmp_path / f"{name}.engine", example_inputs=case.example)
        after = engine.deepwell.model.state_dict()
        assert all(torch.equal(value, after[key]) for key, value in before.items()), "exporting changed the model"
        safetensors.torch.save_file(answers, tmp_path / f"{name}.answers")
    wanted = json.dumps({name: case.new_tokens for name, case in cases.items()})
    run = run_python(FRESH, str(tmp_path), wanted, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    answers = json.loads(run.stdout.splitlines()[-1])
    for name, (same, tokens, schemes) in answers.items():
        assert same, f"{name}: the loaded engine computes something else"
        assert tokens, f"{name}: the loaded engine generates something else"
        assert (schemes > 0) == (cases[name].format != "bf16")
    return written


def test_a_loaded_engine_equals_the_exported_one_bit_for_bit(tmp_path: Path) -> None:
    written = check_in_a_fresh_process(tmp_path, CASES)
    for name, fmt, count in (("sequential", "mxfp8", 2), ("nvfp4", "nvfp4_16x16", 2), ("llama", "mxfp8", 7)):
        assert written[name].formats[fmt]["tensors"] == count
        assert not [note for note in written[name].notes if "whole" in note]
    llama = written["llama"]
    assert llama.model["class"] == "LlamaForCausalLM" and llama.manifest["checked"]
    weights = sum(row["bytes"] for row in llama.formats.values())
    assert weights < 0.75 * 2 * sum(row["elements"] for row in llama.formats.values())
    with zipfile.ZipFile(llama.path) as file:  # any zip reader reads it, and safetensors its tensors
        assert file.testzip() is None
        assert set(file.namelist()) <= set(MEMBERS)
        tensors = safetensors.torch.load(file.read(TENSORS))
        place = file.getinfo(TENSORS).header_offset
    assert tensors["model.layers.0.mlp.up_proj.weight:codes"].dtype == torch.float8_e4m3fn
    assert place == 0
    assert "sha256" in str(llama) and json.loads(llama.to_json())["formats"] == llama.formats


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_every_kind_of_model_and_format_loads_equal(tmp_path: Path, name: str) -> None:
    written = check_in_a_fresh_process(tmp_path, {name: SLOW_CASES[name]})[name]
    stored = set(written.formats)
    wanted = {"nvfp4": "nvfp4_16x16", "fp8": "fp8_e4m3_tensor_pow2"}.get(SLOW_CASES[name].format, "mxfp8")
    assert (wanted in stored) == (SLOW_CASES[name].format != "bf16")


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["mxfp8", "fp8", "nvfp4", "fp8_tensor", "fp8_1x128"])
@pytest.mark.parametrize("build", [hf_llama, bench_llama, qwen_moe])
def test_on_a_gpu_a_loaded_engine_equals_the_exported_one(
    tmp_path: Path,
    build: Callable[[int], nn.Module],
    format: str,  # noqa: A002
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    policy = dw.PrecisionPolicy()
    options = {"gradients": "e4m3"} if format == "fp8_tensor" else {}  # named gradients: tensor scales are meant
    policy.set_default(format, **options)
    width = 256 if format == "fp8_1x128" else 64  # its scales are of squares of 128
    model = build(width).bfloat16().cuda().eval()
    engine = dw.compile(dw.capture(model), precision_policy=policy, measure=False)
    written = export(engine, tmp_path / "x.engine")
    tokens = torch.randint(3, 64, (4, 32), device="cuda")
    with torch.no_grad():
        ours, theirs = logits_of(engine(tokens)), logits_of(load_engine(written.path)(tokens))
    assert torch.equal(ours, theirs), str(written)
    assert len(written.formats) > 1, f"nothing was stored in a format: {written}"


# ---- graphs of models that no library has ----


def test_a_model_without_a_library_is_a_graph_with_open_sizes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Odd().eval()
    engine = dw.compile(dw.capture(model, torch.randint(0, 64, (2, 9))), precision="bf16")
    ids, labels = torch.randint(0, 64, (2, 9)), torch.randint(0, 64, (2, 9))
    written = export(engine, tmp_path / "odd.engine", example_inputs={"ids": ids, "scale": 0.5, "labels": labels})
    assert any("graph" in note for note in written.notes)
    loaded = load_engine(tmp_path / "odd.engine").model
    for batch, length in ((2, 9), (1, 1), (3, 48)):
        call = {"ids": torch.randint(0, 64, (batch, length)), "labels": torch.randint(0, 64, (batch, length))}
        with torch.no_grad():
            ours, theirs = loaded(**call), model(**call, scale=0.5)
        assert list(ours) == list(theirs)
        assert torch.equal(ours["loss"], theirs["loss"]) and torch.equal(ours["logits"], theirs["logits"])
    assert set(loaded.state_dict()) == set(model.state_dict())
    assert loaded.head.weight is loaded.embed.weight
    with pytest.raises(ConfigError, match="sizes"):
        loaded(ids=torch.zeros(1, 49, dtype=torch.long), labels=torch.zeros(1, 49, dtype=torch.long))
    with pytest.raises(ConfigError, match="outside"):
        loaded(ids=torch.zeros(1, 4, dtype=torch.long), labels=torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(ConfigError, match=r"exported with 0\.5"):
        loaded(**call, scale=1.0)
    with pytest.raises(ConfigError, match="takes"):
        loaded(ids=ids)


class Prints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(self.linear(x) @ self.linear(x).mT)


def test_what_has_no_form_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    engine = dw.compile(dw.capture(Prints(), torch.randn(2, 8, 8)), precision="bf16")
    with pytest.raises(UnsupportedError, match="inv"):
        export(engine, tmp_path / "x.engine", example_inputs=torch.randn(2, 8, 8))
    with pytest.raises(CaptureError, match="example_inputs"):
        export(engine, tmp_path / "x.engine", example_inputs=torch.randn(2, 7, 9))
    with pytest.raises(UnsupportedError, match="Hugging Face"):
        export(engine, tmp_path / "x", format="hf")
    with pytest.raises(ConfigError, match="engine or hf"):
        export(engine, tmp_path / "x.engine", format="onnx")
    with pytest.raises(ConfigError, match=r"dw\.compile"):
        export(engine.deepwell.model, tmp_path / "x.engine")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="folder"):
        export(engine, tmp_path)
    assert not list(tmp_path.iterdir())


# ---- weights ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "fmt",
    ["mxfp8", "nvfp4", "nvfp4_16x16", "mxfp4", "mxfp6"] + [f"fp8_e4m3_{g}_pow2" for g in ("tensor", "row", "128x128")],
)
def test_what_is_read_back_quantizes_to_the_same_numbers(fmt: str, dtype: torch.dtype) -> None:
    whole = 0
    shapes = (((64, 96), 1, False), ((70, 50), 0, False), ((3, 48, 64), 2, True), ((3, 32, 48), 1, True))
    for shape, axis, by_expert in shapes:
        for kind in range(6):
            w = torch.randn(shape) * 0.02
            spread = torch.exp(torch.randn(shape) * 4)
            w = w * (1, spread, torch.logspace(-9, 0, shape[-1]), 0, torch.rand(shape) > 0.5, 1e-4)[kind]
            w, form = w.to(dtype), Form(format=fmt, axis=axis, by_expert=by_expert)
            packed = pack([w], form)
            if packed is None:
                whole += 1
                continue
            parts = packed[0].parts
            for name, (wanted, size) in expected(form, shape).items():
                assert (parts[name].dtype, tuple(parts[name].shape)) == (wanted, size)
            back = unpack(parts, form, shape, dtype)
            for a, b in zip(w if by_expert else [w], back if by_expert else [back], strict=True):
                ours, theirs = (quantize(t, fmt, axis=axis - by_expert).dequantize() for t in (a, b))
                assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32)), (shape, kind)
    assert whole <= 2, "only weights that span many powers of two may be stored whole"


def test_weights_that_share_a_scale_are_packed_under_it() -> None:
    form = Form(format="fp8_e4m3_tensor_pow2", axis=1)
    a, b = torch.randn(32, 64).bfloat16(), (torch.randn(16, 64) * 1e-3).bfloat16()
    packed = pack([a, b], form)
    assert packed is not None
    before, after = (max(float(t.abs().max()) for t in pair) for pair in ((a, b), [p.restored for p in packed]))
    ours = quantize(b, form.format, amax=torch.tensor(before)).dequantize()
    theirs = quantize(packed[1].restored, form.format, amax=torch.tensor(after)).dequantize()
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, quantize(b, form.format).dequantize()), "its own scale would give other numbers"
    assert pack([torch.full((4, 32), float("nan"))], Form(format="mxfp8", axis=1)) is not None


class ReadsTwice(nn.Module):
    """A weight that is read beside its product: its codes are not all there is of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64, bias=False)
        self.second = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) + self.first.weight.sum()


def test_a_weight_that_something_else_reads_is_stored_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine = dw.compile(dw.capture(ReadsTwice(), torch.randn(2, 5, 32)), precision="mxfp8").eval()
    written = export(engine, tmp_path / "x.engine", example_inputs=torch.randn(2, 5, 32))
    entries = written.manifest["tensors"]
    assert "format" not in entries["first.weight"] and "reads it" in entries["first.weight"]["reason"]
    assert entries["second.weight"]["format"] == "mxfp8"
    x = torch.randn(4, 3, 32)
    with torch.no_grad():
        assert torch.equal(engine(x), load_engine(written.path)(x))


# ---- folders, steps, pins ----


def test_steps_and_formats_that_were_taken_back_are_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy = dw.PrecisionPolicy("bf16")
    policy.set_default("nvfp4", steps="10:")
    model = sequential().eval()
    engine = dw.compile(dw.capture(model), precision_policy=policy).at_step(20)
    engine.check_fragile(torch.randn(2, 5, 32), floor_db=1000.0)  # nothing is good enough
    assert all(scheme.startswith("bf16|") for scheme in engine.bound.schemes.values())
    first = export(engine, tmp_path / "a.engine")
    assert first.manifest["step"] == 10 and len(first.manifest["pins"]) == 2 and set(first.formats) == {"float32"}
    loaded = load_engine(tmp_path / "a.engine")
    assert loaded.step == 10 and loaded.bound.schemes == engine.bound.schemes
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        assert torch.equal(engine(x), loaded(x))
    assert loaded.policy.resolve(loaded.ir, 0)["0"]["fwd"].format == "bf16"


def test_a_hugging_face_folder_is_what_from_pretrained_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_llama().bfloat16()
    model.generation_config.max_new_tokens = 7
    engine = dw.compile(dw.capture(model), precision="bf16")
    written = export(engine, tmp_path / "folder", format="hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype="auto")
    assert again.generation_config.max_new_tokens == 7
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert written.format == "hf" and set(written.formats) == {"bfloat16"} and "LlamaForCausalLM" in str(written)
    with pytest.raises(ConfigError, match="new folder"):
        export(engine, tmp_path / "folder", format="hf")

    def full(*_: object, **__: object) -> None:  # what the library of safetensors says of a full disk
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(model, "save_pretrained", full)
    with pytest.raises(ConfigError, match="No space left"):
        export(engine, tmp_path / "other", format="hf")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_command_writes_and_shows_files(tmp_path: Path) -> None:
    import typer

    from deepwell.cli.export import export_command

    app = typer.Typer()
    app.command()(export_command)
    hf_llama().bfloat16().save_pretrained(tmp_path / "folder")
    runner, out = CliRunner(), tmp_path / "x.engine"
    done = runner.invoke(app, [str(tmp_path / "folder"), "-o", str(out), "--precision", "bf16", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["model"]["class"] == "LlamaForCausalLM"
    shown = runner.invoke(app, [str(out), "--inspect"])
    assert shown.exit_code == 0 and "bfloat16" in shown.output
    for arguments, words in (
        ([str(out), "-o", str(out)], "no folder"),
        ([str(tmp_path / "folder")], "-o is missing"),
        ([str(tmp_path / "folder"), "-o", str(out), "--format", "gguf"], "engine or hf"),
        ([str(tmp_path / "none.engine"), "--inspect"], "cannot read"),
    ):
        failed = runner.invoke(app, arguments)
        assert isinstance(failed.exception, ConfigError) and words in str(failed.exception)
    saved = dw_save(hf_llama().bfloat16(), tmp_path / "run")
    done = runner.invoke(app, [str(saved), "-o", str(out), "--precision", "bf16"])
    assert done.exit_code == 0, done.exception


def dw_save(model: nn.Module, folder: Path) -> Path:
    from deepwell.artifacts.checkpoint.public import save

    return save(model, folder)


# ---- refusals ----


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small, sound file; its model is a graph and one of its weights has codes."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("export") / "good.engine"
    export(dw.compile(dw.capture(sequential().eval()), precision="mxfp8"), path)
    return path


@pytest.fixture(scope="module")
def good_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("export_hf") / "good.engine"
    export(dw.compile(dw.capture(hf_llama().bfloat16().eval()), precision="bf16"), path)
    return path


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def forge(path: Path, members: dict[str, bytes], change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """A file whose form and hashes are right and whose contents are not: what somebody could make on purpose."""
    manifest = json.loads(members[MANIFEST])
    with path.open("wb") as file:
        writer = Writer(file)
        for name, data in members.items():
            if name != MANIFEST:
                writer.add(name, len(data), [data])
        manifest["members"] = writer.hashes
        if change is not None:
            change(manifest)
        writer.finish(json.dumps(manifest).encode())
    return path


def refused(path: Path, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_engine(path)
    assert str(path) in str(caught.value) and words in str(caught.value), str(caught.value)


def test_every_changed_byte_and_every_cut_is_refused(good: Path, tmp_path: Path) -> None:
    data, bad = good.read_bytes(), tmp_path / "bad.engine"
    for at in [*range(0, len(data), 131), *range(len(data) - 700, len(data), 3)]:
        bad.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match=r"bad\.engine"):
            load_engine(bad)
    for end in [0, 1, 21, 100, *range(1000, len(data), 997), len(data) - 1]:
        bad.write_bytes(data[:end])
        with pytest.raises(CheckpointError, match=r"bad\.engine"):
            load_engine(bad)
    for longer in (data + b"\0", b"\0" + data, data + data):
        bad.write_bytes(longer)
        with pytest.raises(CheckpointError, match=r"bad\.engine"):
            inspect(bad)
    bad.write_bytes(data[:-40])
    refused(bad, "cut short")


def test_foreign_files_are_named_for_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.engine"
    torch.save({"a": torch.ones(2)}, path)
    refused(path, "torch.save")
    path.write_bytes(pickle.dumps({"a": 1}))
    refused(path, "could run code")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("hello.txt", "hello")
    refused(path, "a zip, but no engine")
    path.write_text("hello")
    refused(path, "no engine")
    path.write_bytes(b"")
    refused(path, "empty")
    with pytest.raises(ConfigError, match="cannot read"):
        load_engine(tmp_path / "none.engine")
    with pytest.raises(ConfigError, match="cannot read"):
        load_engine(tmp_path)


def as_zip(path: Path, members: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> Path:
    """A zip of somebody else's making that ends as ours do."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file, pytest.warns(UserWarning) if _twice(members) else _quiet():
        for name, data in members:
            file.writestr(name, data)
        file.comment = b"deepwell engine, manifest sha256 " + b"0" * 64
    path.write_bytes(buffer.getvalue())
    return path


def _twice(members: list[tuple[str, bytes]]) -> bool:
    return len({name for name, _ in members}) < len(members)


def _quiet() -> Any:
    import contextlib

    return contextlib.nullcontext()


def test_zips_that_are_no_engine_are_refused(good: Path, tmp_path: Path) -> None:
    members, path = members_of(good), tmp_path / "x.engine"
    refused(as_zip(path, list(members.items())), "header")
    refused(as_zip(path, [*members.items(), ("model.json", b"{}")]), "twice")
    for name in ("/etc/passwd", "../evil", "..\\evil", "C:evil", "a/../../b"):
        refused(as_zip(path, [(name, b"x")]), "a path out of")
    refused(as_zip(path, [("evil.py", b"x")]), "no member of an engine")
    refused(as_zip(path, [(f"m{i}", b"") for i in range(5000)]), "5000 members")
    bomb = as_zip(path, [("tensors.safetensors", bytes(1 << 26))], zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 1 << 17
    refused(bomb, "compressed")
    # A directory that lies: absurd sizes, and two members in one place.
    data = good.read_bytes()
    central = data.rindex(b"PK\x01\x02")
    path.write_bytes(data[: central + 20] + b"\xf0\xff\xff\x7f" * 2 + data[central + 28 :])
    refused(path, "cut short or changed")
    first = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", first + 4)
    path.write_bytes(data[: second + 42] + bytes(4) + data[second + 46 :])
    refused(path, "overlaps")


def test_members_must_be_there_and_be_those_of_the_manifest(good: Path, tmp_path: Path) -> None:
    members, path = members_of(good), tmp_path / "x.engine"
    for name in ("model.json", "ir.json", "policy.json", TENSORS):
        refused(forge(path, {key: value for key, value in members.items() if key != name}), f"{name} is missing")
    more = {**members, "generation.json": b"{}"}
    refused(forge(path, more, lambda m: m["members"].pop("generation.json")), "not in its manifest")
    refused(forge(path, members, lambda m: m["members"]["ir.json"].update(sha256="0" * 64)), "does not match its hash")
    with path.open("wb") as file:
        writer = Writer(file)
        writer.add("model.json", 2, [b"{}"])
        from deepwell.artifacts.export import container

        file.write(container._end_of_directory(writer._members, "0" * 64))
    refused(path, "manifest.json is missing")
    for text in (b"[]", b"{", b"\xff", b'{"a": NaN}', b'{"kind": 1, "kind": 2}', b"[" * 100_000):
        refused(forge(path, {**members, "model.json": text}), "model.json")


def test_manifests_that_are_damaged_or_newer_are_refused(good: Path, tmp_path: Path) -> None:
    members, path = members_of(good), tmp_path / "x.engine"

    def changed(words: str, **fields: Any) -> None:
        refused(forge(path, members, lambda m: m.update(fields)), words)

    changed("newer Deepwell", schema=2)
    changed("no engine", kind="deepwell.checkpoint")
    changed("schema", schema="1")
    changed("options", options={"inductor": "yes"})
    changed("pinned", pins=[{"path": "0", "gemm": "fwd", "format": "int3", "reason": ""}])
    changed("formats do not fit", pins=[{"path": "nowhere", "gemm": "fwd", "format": "bf16", "reason": ""}])
    changed("step", step=-1)
    changed("model", model={"parameters": "many"})
    changed("tied", tied={"a": "nowhere"})
    changed("tensors", tensors=[])
    entry = json.loads(members[MANIFEST])["tensors"]

    def tensor(words: str, name: str, **fields: Any) -> None:
        changed(words, tensors={**entry, name: {**entry.get(name, {}), **fields}})

    tensor("damaged", "0.weight", dtype="object")
    tensor("damaged", "0.weight", shape=[-1, 2])
    tensor("format 'int3'", "0.weight", format="int3")
    tensor("axis 7", "0.weight", axis=7)
    tensor("its manifest says", "0.weight", shape=[48, 64])
    tensor("its manifest says", "0.bias", dtype="float16")
    tensor("is missing", "9.weight", kind="buffer", dtype="float32", shape=[2])
    for name in ("../evil", "a b", "a..b", "x'y"):
        tensor("is none", name, kind="buffer", dtype="float32", shape=[2])
    changed("is not in its manifest", tensors={key: value for key, value in entry.items() if key != "0.bias"})


def test_tensor_files_that_lie_are_refused(good: Path, tmp_path: Path) -> None:
    members, path = members_of(good), tmp_path / "x.engine"

    def tensors(header: dict[str, Any], data: bytes) -> bytes:
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data

    def one(**fields: Any) -> dict[str, Any]:
        return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}}

    for data, words in (
        (b"", "cut short"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "claims"),
        (tensors(one(shape=[3]), bytes(8)), "does not fit"),
        (tensors(one(data_offsets=[0, 1 << 40], shape=[1 << 38]), bytes(8)), "does not fit"),
        (tensors(one(dtype="OBJ"), bytes(8)), "dtype"),
        (tensors(one(shape=[True, 2]), bytes(8)), "dtype"),
        (tensors(one(shape=[1 << 61, 1 << 61, 0], data_offsets=[0, 0]), b""), "dtype"),
        (tensors(one(data_offsets=[8, 0]), bytes(8)), "lies at"),
        (tensors({**one(), "b": one()["a"]}, bytes(8)), "overlap"),
        (tensors(one(), bytes(9)), "behind"),
        (tensors({"a": 3}, b""), "described"),
        (tensors(one(), bytes(8)), "is missing"),
    ):
        refused(forge(path, {**members, TENSORS: data}), words)
    stored = safetensors.torch.load(members[TENSORS])
    size, pieces = tensor_pieces({**stored, "extra": torch.ones(2)})
    data = b"".join(pieces)
    assert len(data) == size
    refused(forge(path, {**members, TENSORS: data}), "extra is not in its manifest")
    for kept in (torch.tensor([99_999_999], dtype=torch.int32), torch.tensor([-1], dtype=torch.int32)):
        more = {**stored, "0.weight:kept_at": kept, "0.weight:kept": torch.ones(1)}
        refused(forge(path, {**members, TENSORS: b"".join(tensor_pieces(more)[1])}), "kept beside")


def test_graphs_that_name_what_they_may_not_are_refused(good: Path, tmp_path: Path) -> None:
    members, path = members_of(good), tmp_path / "x.engine"

    def graph(words: str, change: Callable[[dict[str, Any]], None]) -> None:
        form = json.loads(members["model.json"])
        change(form["graphs"][0])
        refused(forge(path, {**members, "model.json": json.dumps(form).encode()}), words)

    reaching = "os.system torch.load operator.attrgetter builtins.eval .__class__ .__reduce__ nn.Module getattr"
    for op in reaching.split():
        graph("no op that a file may name", lambda g, op=op: g["nodes"][0].update(op=op))  # type: ignore[misc]
    graph("no op", lambda g: g["nodes"].append({"op": "getattr", "args": [{"n": 0}, "__class__"]}))
    graph("damaged", lambda g: g["nodes"].append(3))
    graph("not known", lambda g: g["nodes"][0]["args"].append({"n": 10_000}))
    graph("not known", lambda g: g["nodes"][0]["args"].append({"dtype": "__class__"}))
    for name in ("a b", "class"):
        graph("damaged", lambda g, name=name: g["nodes"][0].update(kwargs={name: 1}))  # type: ignore[misc]
    for result in ({"output": 7}, {"output": 0, "x": 1}, {"dict": [1]}, {"list": {}}, {"float": "x"}, {}):
        graph("damaged", lambda g, result=result: g.update(result=result))  # type: ignore[misc]
    graph("is of no argument", lambda g: g["sizes"].update(s9=["nobody", 0]))
    graph("conditions", lambda g: g["conditions"].append(["system", "ls"]))
    graph("is missing", lambda g: g["tensors"].append("nowhere"))
    graph("lacks a field", lambda g: g.pop("nodes"))
    refused(forge(path, {**members, "model.json": b'{"form": "python"}'}), "'python'")
    refused(forge(path, {**members, "model.json": b'{"form": "graph", "graphs": []}'}), "no graph")


def test_hugging_face_forms_that_reach_outside_are_refused(good_hf: Path, tmp_path: Path) -> None:
    members, path = members_of(good_hf), tmp_path / "x.engine"

    def form(words: str, **fields: Any) -> None:
        changed = {**json.loads(members["model.json"]), **fields}
        refused(forge(path, {**members, "model.json": json.dumps(changed).encode()}), words)

    config = json.loads(members["model.json"])["config"]
    for name in ("Trainer", "os.system", "AutoModelForCausalLM", "PreTrainedModel", "pipeline", "__import__", 3):
        form("its model class is", **{"class": name})
    form("code from elsewhere", config={**config, "auto_map": {"AutoModel": "evil.Model"}})
    form("code from elsewhere", config={**config, "quantization_config": {"quant_method": "gptq"}})
    form("not in transformers itself", attention={"": "somebody/kernel"})
    form("not in transformers itself", experts={"": "somebody/kernel"})
    form("the config", config=[])
    form("in the model", config={**config, "hidden_size": 32})
    form("the model does not", config={**config, "num_hidden_layers": 0})
    form("and the file does not", config={**config, "num_hidden_layers": 2})
    assert "_name_or_path" not in config


def test_an_interrupted_write_leaves_what_was_there(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.engine"
    path.write_bytes(good.read_bytes())
    engine = load_engine(good)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        export(engine, path, example_inputs=torch.randn(2, 5, 32))
    monkeypatch.undo()
    assert path.read_bytes() == good.read_bytes() and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="is not there"):
        export(engine, tmp_path / "none" / "x.engine", example_inputs=torch.randn(2, 5, 32))


def test_a_loaded_engine_exports_to_the_same_file_and_can_be_trained(good: Path, tmp_path: Path) -> None:
    engine = load_engine(good)
    again = export(engine, tmp_path / "again.engine", example_inputs=torch.randn(2, 5, 32))
    before, after = members_of(good), members_of(tmp_path / "again.engine")
    for name in (TENSORS, "policy.json", "ir.json"):
        assert before[name] == after[name], f"{name} changed"
    assert again.formats["mxfp8"]["tensors"] == 2
    engine.train()
    loss = engine(torch.randn(2, 5, 32)).square().mean()
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in engine.parameters())
    with pytest.raises(UnsupportedError, match="CUDA GPUs and on the CPU"):
        load_engine(good, device="meta")
    with pytest.raises(ConfigError, match="device"):
        load_engine(good, device="toaster")


def test_large_files_have_records_of_64_bits() -> None:
    # Sizes beyond 4 GiB are never written in a test; the headers that name them are.
    big = Member(name=TENSORS, size=5 << 30, crc=7, header_offset=0)
    behind = Member(name=MANIFEST, size=10, crc=7, header_offset=big.end)
    assert big.offset % 64 == 0 and behind.offset % 64 == 0
    assert len(big.header) == big.offset and (5 << 30).to_bytes(8, "little") in big.header
    assert behind.header_offset.to_bytes(8, "little") in behind.entry
    assert Container.__doc__
