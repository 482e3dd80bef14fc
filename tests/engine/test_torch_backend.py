"""`torch.compile(model, backend="deepwell")` is known in both import orders, and decides by the graph alone."""

import subprocess
import sys

import pytest
import torch
import zoo_models
from torch._dynamo.exc import BackendCompilerFailed

import deepwell as dw
from deepwell.engine.backend import parameter_names
from deepwell.engine.torch_backend import forget_reports, ir_of_graph, last_report
from deepwell.errors import ConfigError
from warm import run_python

RUN = """
import torch.nn as nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
x = torch.randn(4, 32)
got = torch.compile(model, backend="deepwell", options={"precision": "mxfp8"})(x)
assert not torch.equal(got, model(x)) and torch.allclose(got, model(x), rtol=0.2, atol=0.1), (got, model(x))
"""
ORDERS = {
    "deepwell first": "import sys, deepwell\nassert 'torch' not in sys.modules\nimport torch",
    "torch first": "import torch\nimport deepwell",
    # Dynamo has read the entry points once and for all.
    "after dynamo": "import torch\ntorch._dynamo.list_backends()\nimport deepwell",
    # What the user calls loads the engine before torch is asked for the name.
    "after use": "import torch, deepwell\ndeepwell.compile\ntorch._dynamo.list_backends()",
}


@pytest.mark.parametrize(
    "order", [pytest.param(o, marks=[pytest.mark.slow] if o.startswith("after") else []) for o in ORDERS]
)
def test_the_backend_is_found_by_name_in_any_order_of_imports(order) -> None:
    code = f"{ORDERS[order]}\n{RUN}"
    if order == "deepwell first":
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    else:  # where torch has been imported
        run = run_python(code)
    assert run.returncode == 0, run.stderr[-3000:]


def test_the_name_is_listed_and_declared_for_installations() -> None:
    from importlib.metadata import entry_points
    from pathlib import Path

    from deepwell.engine.entry_point import TARGET

    found = entry_points(group="torch_dynamo_backends", name="deepwell")
    assert found and all(point.value == TARGET for point in found)
    assert "deepwell" in torch._dynamo.list_backends()
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.entry-points.torch_dynamo_backends]\ndeepwell = "{TARGET}"' in text


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_it_trains_and_agrees_with_the_engine(model_type, batch) -> None:
    # bf16: in fp32 the experts' products fall back to an op that Dynamo cannot trace.
    model = zoo_models.tiny_model(model_type).bfloat16()
    if model_type == "qwen3_moe":
        model.set_experts_implementation(
            "deepwell"
        )  # the engine does so by itself, and looks at gates before it traces
        model(**batch)
    compiled = torch.compile(model, backend="deepwell", options={"precision": "mxfp8"})
    loss = compiled(**batch).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    torch._dynamo.reset()
    engine = dw.compile(model, precision="mxfp8")
    torch.testing.assert_close(loss, engine(**batch).loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("model_type", "roles"),
    [
        (
            "llama",
            {"model.layers.0.self_attn.q_proj": "attention", "model.layers.1.mlp.up_proj": "mlp", "lm_head": "head"},
        ),
        ("gpt2", {"transformer.h.0.attn.c_attn": "attention", "transformer.h.1.mlp.c_fc": "mlp"}),
        (
            "qwen3_moe",
            {"model.layers.0.mlp.gate": "router", "model.layers.1.mlp.experts.down_proj": "experts", "lm_head": "head"},
        ),
    ],
)
def test_roles_are_read_from_the_graph(model_type, roles, batch) -> None:
    found: dict[str, str] = {}

    def look(graph_module, example_inputs):
        ir = ir_of_graph(graph_module.graph, parameter_names(graph_module.graph, example_inputs))
        found.update({site.path: site.op.role for site in ir.sites()})
        return graph_module.forward

    torch.compile(zoo_models.tiny_model(model_type), backend=look)(**batch)
    assert {path: found[path] for path in roles} == roles


class Stack(torch.nn.Module):
    """Six layers with a graph break after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(16, 16)) for _ in range(6))

    def forward(self, x):
        x = self.layers[1](self.layers[0](x))
        torch._dynamo.graph_break()
        for layer in self.layers[2:]:
            x = layer(x)
        return x


def _formats(report) -> dict[int, str]:
    return {row.layer: row.format for row in report.bindings if row.gemm == "fwd"}


def test_positions_are_the_models_over_several_graphs() -> None:
    policy = dw.PrecisionPolicy("mxfp8")
    policy.set_layer_precision("first 3 blocks", "bf16")
    torch.compile(Stack(), backend="deepwell", options={"precision_policy": policy})(torch.randn(4, 16))
    report = last_report()
    assert report.graphs == 2 and report.passes["linear"] == 3
    assert _formats(report) == {n: "bf16" if n < 3 else "mxfp8" for n in range(6)}


@pytest.mark.parametrize("told", [True, False])
def test_the_last_layers_are_known_where_their_number_is_given(told) -> None:
    policy = dw.PrecisionPolicy("mxfp8")
    policy.set_layer_precision("last 2 blocks", "bf16")
    options = {"precision_policy": policy, **({"num_layers": 6} if told else {})}
    torch.compile(Stack(), backend="deepwell", options=options)(torch.randn(4, 16))
    report = last_report()
    if told:
        assert _formats(report) == {n: "bf16" if n >= 4 else "mxfp8" for n in range(6)}
        assert not any("the first graph showed" in note for note in report.notes)
    else:  # the first graph takes its own last two for the model's, and the report says so
        assert _formats(report)[0] == "bf16"
        assert any("the first graph showed 2 layers and this one 6" in note for note in report.notes)


def test_the_report_is_the_last_calls_own(batch) -> None:
    forget_reports()
    with pytest.raises(ConfigError, match="call the compiled model once"):
        last_report()
    model = zoo_models.tiny_model("llama")
    torch.compile(model, backend="deepwell", options={"precision": "mxfp8"})(**batch)
    report = last_report()
    assert report.passes["linear"] == 14 and report.passes["cross_entropy"] == 1 and report.graphs == 1
    assert {row.format for row in report.bindings} == {"mxfp8", "bf16"}
    assert "self_attn: q_proj, k_proj, v_proj" in str(report)
    torch._dynamo.reset()
    small, x = torch.nn.Sequential(torch.nn.Linear(16, 16)), torch.randn(4, 16)
    torch.compile(small, backend="deepwell", options={"precision": "bf16"})(x)
    assert last_report().passes["linear"] == 0 and len(last_report().bindings) == 3


def test_options_are_checked() -> None:
    model, x = torch.nn.Linear(16, 16), torch.randn(4, 16)
    for options, message in (
        ({"precison": "mxfp8"}, "precison.*takes precision"),
        ({"precision": "mxfp9"}, "mxfp9"),
        ({"fallback": "never"}, "fallback is 'never'"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"precision_policy": dw.PrecisionPolicy("mxfp8"), "fallback": "strict"}, "emulated here"),
    ):
        torch._dynamo.reset()
        with pytest.raises(BackendCompilerFailed, match=message):
            torch.compile(model, backend="deepwell", options=options)(x)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_the_modes_of_torch_compile_are_taken(mode) -> None:
    forget_reports()
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 16)), torch.randn(4, 16)
    torch.compile(model, backend="deepwell", mode=mode)(x).sum().backward()
    told = [note for note in last_report().notes if note.startswith("mode=")]
    wants_graphs = mode in ("reduce-overhead", "max-autotune")
    assert len(told) == wants_graphs and all(mode in note and "on the cpu it changes nothing" in note for note in told)


@pytest.mark.parametrize(
    ("mode", "recorded"), [(None, False), ("reduce-overhead", True), ("max-autotune-no-cudagraphs", False)]
)
def test_on_a_gpu_a_mode_may_mean_cuda_graphs(mode, recorded, monkeypatch) -> None:
    from deepwell.engine import torch_backend
    from deepwell.engine.binding import Target

    forget_reports()
    seen = []
    monkeypatch.setattr(torch_backend, "device_of", lambda tensors: Target(kind="cuda", capability=(8, 0)))
    monkeypatch.setattr(torch_backend, "compile_graph", lambda graph, x, options: seen.append(options) or graph.forward)
    torch.compile(torch.nn.Linear(16, 16), backend="deepwell", mode=mode)(torch.randn(4, 16))
    assert [options.cuda_graphs for options in seen] == [recorded]
    assert not any("mode" in note for note in last_report().notes)


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(BackendCompilerFailed, match=r"ConfigError: mode is 'fastest'; .*reduce-overhead"):
        torch.compile(torch.nn.Linear(16, 16), backend="deepwell", mode="fastest")(torch.randn(4, 16))


def test_under_ddp_each_bucket_is_a_graph_and_gradients_are_the_same() -> None:
    """torch splits the graph at DDP's buckets and runs the pieces on fake tensors before it runs them."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=8192)
    ids = torch.randint(0, 8192, (2, 32), generator=torch.Generator().manual_seed(0))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    found = []
    try:
        for is_wrapped in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = transformers.LlamaForCausalLM(config)
            called = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1) if is_wrapped else model
            out = torch.compile(called, backend="deepwell", options={"precision": "mxfp8"})(input_ids=ids, labels=ids)
            out.loss.backward()
            assert out.logits._value is None  # the head is fused with the loss, in its bucket too
            found.append([out.loss.detach(), *(parameter.grad for parameter in model.parameters())])
    finally:
        torch.distributed.destroy_process_group()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
