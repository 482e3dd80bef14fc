"""Linears that have a format and do not run in it: their rows and the notes say how they ran, and why."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepwell as dw
from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.engine.binding import Binding
from deepwell.engine.engine import Engine
from deepwell.engine.report import EngineReport
from deepwell.engine.torch_backend import last_report
from deepwell.formats.metrics import sqnr_db


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def _rows(report: EngineReport) -> dict[str, Binding]:
    """The fwd rows by path, after a way through JSON."""
    rows = {row.path: row for row in EngineReport.from_json(report.to_json()).bindings if row.gemm == "fwd"}
    assert all(str(row.binding) in str(report) for row in rows.values())
    return rows


def _left(engine: Engine) -> dict[str, str]:
    return {path: row.scheme for path, row in _rows(engine.report()).items() if row.binding == "substitute"}


def test_before_a_call_rows_say_what_is_bound() -> None:
    engine = dw.compile(MLP().double())
    assert {row.scheme for row in _rows(engine.report()).values()} == {"emulate:mxfp8"}


def test_a_call_that_is_to_run_eagerly_is_no_reason_to_warn(recwarn) -> None:
    engine = dw.compile(nn.Sequential(nn.Linear(32, 32)), precision="mxfp8")
    with torch.compiler.set_stance("force_eager"):
        engine(torch.randn(4, 32))
    assert not engine.deepwell.options.was_called
    assert not [warning for warning in recwarn if "deepwell" in str(warning.message)]
    engine(torch.randn(4, 32))
    assert engine.deepwell.options.was_called and engine.deepwell.options.graphs == 1


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.relu(self.up(x)))


def test_a_second_use_of_a_weight_runs_as_the_first(recwarn) -> None:
    engine = dw.compile(Twice(), precision="mxfp8", inductor=False)
    engine(torch.randn(4, 32))
    assert set(_rows(engine.report())) == {"up", "up_2"} and not _left(engine)
    assert engine.deepwell.options.counts["linear"] == 2


def test_a_float64_model_is_said_to_run_in_fp64() -> None:
    model, x = MLP().double(), torch.randn(4, 32).double()
    engine = dw.compile(model)
    torch.testing.assert_close(engine(x), model(x))
    assert _left(engine) == {"up": "fp64", "down": "fp64"}
    assert {row.scheme for row in engine.report().bindings} == {"fp64"}  # all three GEMMs
    text = " ".join(str(engine.report()).split())
    assert "as the model has it, in fp64" in text and "emulate" not in text
    assert "not met as a product with a parameter in what ran so far, in fp64: up, down" in text
    timed = _rows(engine.report(measure=True))
    assert timed["up"].us is not None and timed["up"].shape == "4x64x32"


def test_the_backend_of_torch_compile_says_so_too() -> None:
    torch.compile(MLP().double(), backend="deepwell")(torch.randn(4, 32).double())
    assert {row.scheme for row in last_report().bindings} == {"fp64"}


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_reported_with_the_dtype_that_it_runs_and_is_advised_against(inside) -> None:
    class Casting(MLP):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside or torch.is_autocast_enabled("cpu")):
                return super().forward(x)

    engine = dw.compile(Casting())
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        assert engine(torch.randn(4, 32)).dtype is torch.bfloat16
    rows = _rows(engine.report())
    assert rows["up"].scheme == "emulate:mxfp8" and rows["down"].scheme == "bf16"
    assert "its input is in bf16 and its weight in fp32" in rows["down"].reason
    notes = "\n".join(engine.report().notes)
    assert "torch.autocast was on" in notes and "leave it out" in notes
    assert "so far, in bf16: down" in notes and "fp32: down" not in notes


class Autocast(nn.Module):
    """Gives what its products return to an op that takes one dtype alone, and logits with their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 48)
        self.experts = nn.Parameter(torch.randn(4, 32, 32) / 6)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, b, c = self.up(x), self.gate(x), torch.bmm(x.view(4, 2, 32), self.experts)
        rows = torch.zeros(8, 32, dtype=torch.bfloat16).index_copy(0, torch.arange(8), a * b + c.flatten(0, 1))
        logits = self.head(rows.float())
        loss = F.cross_entropy(self.head(rows.float() * 2), y)
        return F.cross_entropy(logits.float(), y) + loss, logits


@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp8"])
def test_products_have_the_dtype_that_autocast_gives_them(precision) -> None:
    model, x, y = Autocast(), torch.randn(8, 32), torch.arange(8)
    schemes = {"up": "fp8_row|fp8_row|fp8_row", "gate": "fp8_row|fp8_row|fp8_row", "experts": "|".join(["bf16"] * 3)}
    options = BackendOptions(schemes=schemes, parameters=model.named_parameters)
    fp8 = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))
    run = fp8 if precision == "fp8" else dw.compile(model, precision=precision)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, got = model(x, y), run(x, y)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.2)
    grads = [torch.autograd.grad(out[0], [*model.parameters()]) for out in (got, wanted)]
    assert all(sqnr_db(one, other) > 15 for other, one in zip(*grads, strict=True))


def test_autocast_that_is_switched_off_is_no_note() -> None:
    class Exact(MLP):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                return super().forward(x)

    engine = dw.compile(Exact())
    engine(torch.randn(4, 32))
    assert _left(engine) == {} and "autocast" not in str(engine.report())


def test_attention_that_is_one_op_is_named() -> None:
    engine = dw.compile(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True))
    engine(torch.randn(4, 5, 32))
    assert _left(engine) == {"self_attn.in_proj_weight": "fp32", "self_attn.out_proj": "fp32"}
    assert "multi_head_attention_forward" in _rows(engine.report())["self_attn.out_proj"].reason


def test_a_layer_that_evaluation_runs_as_one_op_is_reported_beside_its_format_in_training() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    engine = dw.compile(layer)
    with torch.no_grad():
        engine(torch.randn(4, 5, 32))
    assert set(_left(engine).values()) == {"fp32"} and {"linear1", "linear2"} <= set(_left(engine))
    engine.train()(torch.randn(4, 5, 32)).sum().backward()
    row = _rows(engine.report())["linear1"]
    assert row.scheme == "emulate:mxfp8"
    assert "at times as the model has it, in fp32: its weight is read by _transformer_enc" in row.reason


def test_a_weight_that_is_normed_first_is_named() -> None:
    model = MLP()
    nn.utils.parametrizations.weight_norm(model.up)
    engine = dw.compile(model)
    engine(torch.randn(4, 32))
    ((path, scheme),) = _left(engine).items()
    assert path.startswith("up.") and scheme == "fp32"
    assert "its weight is read by _weight_norm, which is no linear" in _rows(engine.report())[path].reason


def test_linears_that_share_a_weight_are_both_met() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    model[2].weight = model[0].weight
    engine = dw.compile(model)
    engine(torch.randn(4, 32))
    assert _left(engine) == {} and "not met" not in str(engine.report())


def test_what_no_graph_held_is_distinguished_from_what_a_graph_left() -> None:
    class Unused(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.up(x)

    model = Unused()
    engine = dw.compile(dw.capture(MLP()).attach(model))
    engine(torch.randn(4, 32))
    row = _rows(engine.report())["down"]
    assert (row.binding, row.scheme) == ("substitute", "fp32")
    assert row.reason == "as the model has it, in fp32: no product with its weight was met in what was compiled"


class Mapped(nn.Module):
    """Each sequence by itself, and many products of one input, by `torch.vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(16, 16)
        self.many = nn.Parameter(torch.randn(4, 16, 16) / 4)

    def one(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        gate, up = self.up(h).chunk(2, -1)
        return x + nn.functional.silu(gate) * up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.vmap(self.one)(x)
        return self.down(x) + torch.vmap(lambda w: nn.functional.linear(x, w))(self.many).sum(0)


def test_what_is_inside_a_vmap_stays_as_it_was_written() -> None:
    model, x = Mapped(), torch.randn(3, 8, 16)
    model(x).pow(2).sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    engine = dw.compile(model, precision="bf16")
    engine(x).pow(2).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name])
    engine = dw.compile(model, precision_policy=dw.PrecisionPolicy("mxfp8"))
    engine(x)
    rows = {row.path: row for row in engine.report().bindings if row.gemm == "fwd"}
    assert "torch.vmap" in rows["up"].reason and rows["down"].scheme == "emulate:mxfp8"


class Ragged(nn.Module):
    """Sequences of different lengths, as torch's nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.RMSNorm(16), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.up(self.norm(torch.nested.nested_tensor_from_jagged(x, ends))).values()
        return out


def test_a_linear_of_a_nested_tensor_stays_and_the_report_says_why() -> None:
    model, given = Ragged(), (torch.randn(8, 16), torch.tensor([0, 3, 8]))
    engine = dw.compile(model, precision_policy=dw.PrecisionPolicy("mxfp8"))
    torch.testing.assert_close(engine(*given), model(*given))
    (row,) = (row for row in engine.report().bindings if row.gemm == "fwd")
    assert row.binding == "substitute" and "its input is a NestedTensor, which no kernel takes" in row.reason
