"""Experts that a model multiplies one by one become one grouped product in the policy's formats."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo_models
from torch import Tensor, nn

import deepwell as dw
from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.experts.autograd import FP8_METHOD
from deepwell.kernels.gemm.linear import low_precision_linear

E, N, K = 4, 48, 32
MXFP8, FP8 = ("|".join([method] * 3) for method in ("emulate:mxfp8", FP8_METHOD))


class Loop(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, N, K, dtype=dtype))

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        rows = x.split(sizes, dim=0)
        return torch.cat([F.linear(rows[e], self.weight[e]) for e in range(E)], dim=0)


def compiled(model: nn.Module, scheme: str = MXFP8) -> tuple[Callable[..., Any], BackendOptions]:
    options = BackendOptions(
        # The parameters are the module's own: their paths are their names.
        schemes=dict.fromkeys((name for name, _ in model.named_parameters()), scheme) if scheme else {},
        parameters=lambda: model.named_parameters(remove_duplicate=False),
    )
    return torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options)), options


def by_expert(model: Loop, x: Tensor, sizes: list[int]) -> Tensor:
    """Each expert's rows by themselves, as a linear of the scheme."""
    pairs = zip(x.split(sizes), model.weight, strict=True)
    return torch.cat([low_precision_linear(rows, [w], None, MXFP8) for rows, w in pairs if len(rows)])


# An expert without a row, with one, with all; sizes that change from call to call.
@pytest.mark.parametrize(
    "all_sizes", [[[5, 0, 1, 10]], [[0, 0, 0, 16]], [[3, 4, 5, 6], [7, 2, 6, 3], [2, 3, 9, 4]]], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loop_computes_what_each_expert_would_by_itself(all_sizes, dtype) -> None:
    torch.manual_seed(0)
    model = Loop(dtype)
    run, options = compiled(model)
    for sizes in all_sizes:
        x = torch.randn(sum(sizes), K, dtype=dtype, requires_grad=True)
        got, wanted = run(x, sizes), by_expert(model, x, sizes)
        assert_bitwise_equal(got, wanted)
        grads = [torch.autograd.grad(y.float().square().sum(), (x, model.weight)) for y in (got, wanted)]
        for mine, theirs in zip(*grads, strict=True):
            assert_bitwise_equal(mine, theirs)
    assert options.counts["looped_experts"] == options.counts["experts"] == options.graphs == min(len(all_sizes), 2)
    assert options.rewritten == {"weight"}


class Alike(Loop):
    """A loop over experts by some function of the rows, the weight and the sizes."""

    def __init__(self, function: Callable[..., Tensor], dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.function = function

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        return self.function(x * 1, self.weight, sizes)


def product(rows: Any, weight: Tensor, expert: int) -> Tensor:
    return F.linear(rows[expert], weight[expert])


def each(rows: Any, weight: Tensor, of: Callable[..., Tensor] = product) -> list[Tensor]:
    return [of(rows, weight, e) for e in range(E)]


def looped(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, w, sizes: torch.cat(each(x.split(sizes), w, of))


def read_elsewhere(x: Tensor, w: Tensor, sizes: list[int]) -> Tensor:
    products = each(x.split(sizes), w)
    return torch.cat(products) + products[0].sum()


def written(x: Tensor, w: Tensor, sizes: list[int]) -> Tensor:
    rows = x.split(sizes)
    first = product(rows, w, 0)
    x.mul_(2)
    return torch.cat([first, *(product(rows, w, e) for e in range(1, E))])


def result_written(x: Tensor, w: Tensor, sizes: list[int]) -> Tensor:
    products = each(x.split(sizes), w)
    products[1].mul_(2)
    return torch.cat(products)


def one_without_gradient(x: Tensor, w: Tensor, sizes: list[int]) -> Tensor:
    rows = x.split(sizes)
    with torch.no_grad():
        first = product(rows, w, 0)
    return torch.cat([first, *(product(rows, w, e) for e in range(1, E))])


def two_loops_of_one_split(x: Tensor, w: Tensor, sizes: list[int]) -> Tensor:
    rows = x.split(sizes)
    return torch.cat(each(rows, w)) + torch.cat(each(rows, w))


def one_in_bf16(x: Tensor, w: Tensor, sizes: list[int]) -> Tensor:
    rows = x.split(sizes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = product(rows, w, 0)
    return torch.cat([first.to(x.dtype), *(product(rows, w, e) for e in range(1, E))])


ALIKE: dict[str, Callable[..., Tensor]] = {
    "another order": looped(lambda r, w, e: F.linear(r[e], w[E - 1 - e])),
    "from the end": looped(lambda r, w, e: F.linear(r[e], w[e - E])),
    "some": lambda x, w, sizes: torch.cat(each(x.split(sizes), w)[:-1]),
    "one twice": lambda x, w, sizes: torch.cat([*each(x.split(sizes), w)[:-1], product(x.split(sizes), w, 0)]),
    "more beside them": lambda x, w, sizes: torch.cat([*each(x.split(sizes), w), x[:, :1].expand(-1, N)]),
    "a bias": looped(lambda r, w, e: F.linear(r[e], w[e], w[e, :, 0])),
    "a part of each": looped(lambda r, w, e: F.linear(r[e], w[e, 1:])),
    "weights that are scaled": looped(lambda r, w, e: F.linear(r[e], 2 * w[e])),
    "all weights scaled": lambda x, w, sizes: torch.cat(each(x.split(sizes), w * 2)),
    "one weight for all": lambda x, w, sizes: torch.cat(each(x.split(sizes), w[:1].expand(E, N, K))),
    "a dropout": looped(lambda r, w, e: F.linear(F.dropout(r[e], 0.5), w[e])),
    "side by side": lambda x, w, sizes: torch.cat(each(x.split([4] * E), w), dim=1),
    "columns": lambda x, w, sizes: torch.cat(each(torch.cat([x] * E, dim=1).split([K] * E, dim=1), w)),
    "equal parts": lambda x, w, sizes: torch.cat(each(x.split(4), w)),
    "two splits": lambda x, w, sizes: torch.cat([*each(x.split(sizes), w)[:2], *each(x.flip(0).split(sizes), w)[2:]]),
    "read elsewhere": read_elsewhere,
    "written": written,
    "a result that is written": result_written,
    "one without a gradient": one_without_gradient,
    "one in bf16": one_in_bf16,
    "two loops of one split": two_loops_of_one_split,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ALIKE)
def test_what_is_no_such_loop_is_left_as_it_was(name, dtype) -> None:
    torch.manual_seed(0)
    model, x = Alike(ALIKE[name], dtype), torch.randn(16, K, dtype=dtype)
    run, options = compiled(model)
    results = []
    for call in (model, run):
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        with torch.set_grad_enabled(name != "written"):  # autograd keeps the rows
            out = call(leaf, [4, 3, 4, 5])
        grads = torch.autograd.grad(out.float().square().sum(), (leaf, model.weight)) if out.requires_grad else ()
        results.append((out.detach(), *grads))
    for mine, theirs in zip(*results, strict=True):
        assert_bitwise_equal(mine, theirs)
    assert not options.counts["looped_experts"] and not options.rewritten


@pytest.mark.parametrize(("scheme", "dtype"), [("", torch.float32), (MXFP8, torch.float64)], ids=["bf16", "float64"])
def test_loops_without_a_format_stay_loops(scheme, dtype) -> None:
    model, x, sizes = Loop(dtype), torch.randn(16, K, dtype=dtype), [4, 3, 4, 5]
    run, options = compiled(model, scheme)
    with torch.no_grad():
        assert_bitwise_equal(run(x, sizes), model(x, sizes))
    assert not options.counts["looped_experts"]


class Chain(nn.Module):
    """JetMoE's MLP: tokens gathered by expert, two loops with a gate between them, rows weighted and added up."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, 2 * N, K) / 6)
        self.down = nn.Parameter(torch.randn(E, K, N) / 7)

    def forward(self, x: Tensor, sizes: list[int], token: Tensor, gates: Tensor) -> Any:
        gate, up = self.loop(x[token], self.up, sizes).chunk(2, dim=-1)
        hidden = self.hidden(gate, up)
        rows = self.loop(hidden, self.down, self.others(sizes))
        return self.total(torch.zeros_like(x).index_add(0, token, rows * gates[:, None]), hidden)

    def loop(self, x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        rows = x.split(sizes)
        return torch.cat([F.linear(rows[e], weight[e]) for e in range(E)])

    def hidden(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def others(self, sizes: list[int]) -> list[int]:
        return sizes

    def total(self, y: Tensor, hidden: Tensor) -> Tensor:
        return y


class OtherGroups(Chain):
    def others(self, sizes: list[int]) -> list[int]:
        return sizes[::-1]


class OtherGate(Chain):
    def hidden(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.tanh(gate) * up


class HiddenRead(Chain):
    def total(self, y: Tensor, hidden: Tensor) -> Tensor:
        return y + hidden.mean()


@pytest.mark.parametrize(
    ("kind", "scheme", "fused"),
    [(Chain, FP8, 1), (Chain, MXFP8, 0), (OtherGroups, FP8, 0), (OtherGate, FP8, 0), (HiddenRead, FP8, 0)],
)
def test_two_loops_and_their_gate_are_one_fp8_block(kind, scheme, fused) -> None:
    torch.manual_seed(0)
    model = kind()
    run, options = compiled(model, scheme)
    for sizes in ([20, 0, 1, 27], [10, 14, 11, 13]):
        x, token = torch.randn(24, K, requires_grad=True), torch.randperm(48) // 2
        gates, dy = torch.rand(48, requires_grad=True), torch.randn(24, K)
        grads = []
        for function in (run, model):
            y = function(x, sizes, token, gates)
            grads.append((y, *torch.autograd.grad(y, (x, gates, *model.parameters()), dy)))
        for mine, theirs in zip(*grads, strict=True):
            assert 20 < sqnr_db(theirs, mine) < 45
    assert options.counts["looped_experts"] == 2 * options.graphs and options.rewritten == {"up", "down"}
    assert options.counts["fused_experts"] == fused * options.graphs
    assert bool(options.remarks) == (scheme == FP8 and not fused)


class Counted(nn.Module):
    """Grouped products that count the ends of their groups each by itself, of weights [E, K, N] (Aria)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter((torch.randn(E, K, 2 * N) / 6).bfloat16())
        self.down = nn.Parameter((torch.randn(E, N, K) / 7).bfloat16())

    def forward(self, x: Tensor, counts: Tensor, others: Tensor) -> Tensor:
        gate, up = torch._grouped_mm(x, self.up, offs=torch.cumsum(counts, 0).to(torch.int32)).chunk(2, dim=-1)
        return torch._grouped_mm(F.silu(gate) * up, self.down, offs=torch.cumsum(others, 0).to(torch.int32))


@pytest.mark.parametrize("are_same", [True, False])
def test_groups_that_are_counted_twice_are_the_same_groups(are_same) -> None:
    torch.manual_seed(0)
    model, counts = Counted(), torch.tensor([20, 0, 1, 27])
    run, options = compiled(model, FP8)
    x, others = torch.randn(48, K).bfloat16().requires_grad_(), counts if are_same else counts.flip(0)
    dy, grads = torch.randn(48, K).bfloat16(), []
    for function in (run, model):
        y = function(x, counts, others)
        grads.append((y, *torch.autograd.grad(y, (x, *model.parameters()), dy)))
    for mine, theirs in zip(*grads, strict=True):
        assert 20 < sqnr_db(theirs.float(), mine.float()) < 45
    assert options.counts["fused_experts"] == are_same and options.counts["experts"] == 2


@pytest.mark.slow
def test_jetmoe_trains_in_the_formats_of_each_layer(batch, monkeypatch) -> None:
    # Its router reads sizes from the device, which breaks the graph: layers of unlike formats share code, not graphs.
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts

    model = zoo_models.tiny_model("jetmoe")
    policy = dw.PrecisionPolicy("bf16")
    names = ("self_attention.experts.input_linear", "self_attention.experts.output_linear")
    names += ("mlp.input_linear", "mlp.output_linear")
    low = [f"model.layers.1.{name}" for name in names]
    for path in low:
        policy.set_layer_precision(f"path:{path}", "mxfp8")
    engine = dw.compile(dw.capture(model), precision_policy=policy)
    loss = engine(**batch).loss
    got = torch.autograd.grad(loss, list(model.parameters()))
    rows = {row.path: row.scheme for row in engine.report().bindings}
    assert {path for path, scheme in rows.items() if scheme != "bf16"} == set(low) == engine.options.rewritten
    assert not any("not met" in note for note in engine.report().notes)
    # The model itself, with these products in their formats and nothing else changed.
    modules = {model.get_submodule(path) for path in low}
    plain = JetMoeParallelExperts.forward

    def forward(self: Any, inputs: Tensor, expert_size: list[int]) -> Tensor:
        if self not in modules:
            return plain(self, inputs, expert_size)
        pairs = zip(inputs.split(expert_size), self.weight, strict=True)
        return torch.cat([low_precision_linear(x, [w], None, MXFP8) for x, w in pairs if len(x)])

    assert abs(loss - model(**batch).loss) > 1e-5
    monkeypatch.setattr(JetMoeParallelExperts, "forward", forward)
    wanted = model(**batch).loss
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    for mine, theirs in zip(got, torch.autograd.grad(wanted, list(model.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
