"""`torch.compile(model, backend="deepwell")` is known in both import orders, and decides by the graph alone."""

import os
import subprocess
import sys

import pytest
import torch
import zoo_models
from torch._dynamo.exc import BackendCompilerFailed

import deepwell as dw
from deepwell.engine.backend import parameter_names
from deepwell.engine.torch_backend import ir_of_graph

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


@pytest.mark.parametrize("order", ORDERS)
def test_the_backend_is_found_by_name_in_any_order_of_imports(order) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    code = f"{ORDERS[order]}\n{RUN}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
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
        ("qwen3_moe", {"model.layers.0.mlp.gate": "router", "lm_head": "head"}),
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


def test_options_are_checked() -> None:
    model, x = torch.nn.Linear(16, 16), torch.randn(4, 16)
    for options, message in (
        ({"precison": "mxfp8"}, "precison.*takes precision"),
        ({"precision": "mxfp9"}, "mxfp9"),
        ({"fallback": "never"}, "fallback is 'never'"),
        ({"precision_policy": dw.PrecisionPolicy("mxfp8"), "fallback": "strict"}, "emulated here"),
    ):
        torch._dynamo.reset()
        with pytest.raises(BackendCompilerFailed, match=message):
            torch.compile(model, backend="deepwell", options=options)(x)
