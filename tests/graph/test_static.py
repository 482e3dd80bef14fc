"""The static walk: the same linears, parameters and flops as the graph where the module tree can tell them."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from deepwell.errors import CaptureError
from deepwell.graph.configs import published_config
from deepwell.graph.ir import IR
from deepwell.graph.ops import Activation, Attention, Extent, GroupedLinear, Linear, Loss
from deepwell.graph.static import static_walk

transformers = pytest.importorskip("transformers")


def _load_zoo_models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zoo_models", Path(__file__).with_name("zoo_models.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo = _load_zoo_models()


def short_config(name: str) -> dict[str, object]:
    """A published config with a few layers: every kind of layer, but no forward of a hundred."""
    config = published_config(name)
    depth = {"num_hidden_layers": 4, "n_layer": 4}
    config |= {key: value for key, value in depth.items() if key in config}
    return config | ({"layer_types": config["layer_types"][:4]} if "layer_types" in config else {})


def meta_model(name: str) -> nn.Module:
    config = {k: v for k, v in short_config(name).items() if k not in ("_source", "torch_dtype")}
    dtype = torch.float32 if name == "gpt2" else torch.bfloat16
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config), dtype=dtype)


def linears(ir: IR) -> list[tuple[object, ...]]:
    found = [(site.path, site.op) for site in ir.sites()]
    return [
        (path, op.role, op.part, op.k, op.n, op.rows, op.params)
        for path, op in found
        if isinstance(op, (Linear, GroupedLinear))
    ]


# Dense, Conv1D with a fused projection, and experts behind latent attention.
@pytest.mark.parametrize("name", ["llama3-8b", "gpt2", "deepseek-v3", "gpt-oss-120b"])
def test_linears_parameters_and_flops_are_those_of_the_config(name: str) -> None:
    want = IR.from_config(short_config(name))
    ir = static_walk(meta_model(name))
    assert ir.source == "static"
    assert linears(ir) == linears(want)
    assert ir.num_params == want.num_params
    assert ir.active_params == want.active_params
    assert ir.flops(1, 4096) == pytest.approx(want.flops(1, 4096), rel=0.03)
    assert any(isinstance(op, Loss) for op in ir.tail)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "bloom", "opt", "mixtral", "mamba2", "phi3", "bert"])
def test_parameters_are_exact_and_edges_stand(model_type: str) -> None:
    model = zoo.tiny_model(model_type)
    ir = static_walk(model, reasons=("no tracer took it",))
    assert ir.num_params == sum(p.numel() for p in model.parameters())
    ir.check()
    assert IR.from_json(ir.to_json()) == ir
    assert ir.notes[0] == "not traced: no tracer took it"
    paths = {site.path for site in ir.sites() if isinstance(site.op, (Linear, GroupedLinear))}
    assert {path for path, m in model.named_modules() if isinstance(m, nn.Linear)} <= paths


class TwoSpeeds(nn.Module):
    """Runs its layers in another order than it names them, the second on every fourth position."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 8)
        self.act = nn.GELU(approximate="tanh")
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.first(x))[:, :1])


def test_order_and_rows_come_from_the_forward_where_it_runs() -> None:
    ir = static_walk(TwoSpeeds(), torch.randn(2, 37, 8))
    assert [op.name for op in ir.stem] == ["first", "act", "last"]
    assert [op.rows for op in ir.stem if isinstance(op, Linear)] == [Extent(1, 1, 1), Extent(1, 1, 0)]
    act = ir.stem[1]
    assert isinstance(act, Activation) and act.function == "gelu_tanh"


def test_torchs_own_attention_keeps_its_projections() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 3)
    ir = static_walk(model)
    assert (ir.num_layers, len(ir.blocks)) == (3, 1)
    assert [op.part for op in ir.blocks[0].ops if op.role == "attention"][:2] == ["qkv", ""]
    attention = next(op for op in ir.blocks[0].ops if isinstance(op, Attention))
    assert (attention.q_heads, attention.qk_dim, attention.causal) == (4, 16, False)
    assert ir.num_params == sum(p.numel() for p in model.parameters())


def test_a_convolution_whose_weight_is_normed_is_no_stack_of_experts() -> None:
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 16, 3), dim=2), nn.ReLU())
    ir = static_walk(model, torch.randn(2, 8, 37))
    assert not any(isinstance(site.op, GroupedLinear) for site in ir.sites())
    assert ir.num_params == sum(p.numel() for p in model.parameters())


def test_tied_weights_count_once() -> None:
    model = zoo.tiny_model("gpt2")
    ir = static_walk(model)
    head = next(op for op in ir.tail if op.role == "head")
    assert head.params[0].tied_to == "transformer.wte.weight"


def test_a_module_with_nothing_to_read_is_an_error_that_names_it() -> None:
    with pytest.raises(CaptureError, match="Flatten"):
        static_walk(nn.Flatten())
