"""Experts that a model computes for every token are computed for the tokens that chose them, to the same numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.engine.passes.experts.dense import has_kernels
from deepwell.formats.metrics import sqnr_db
from deepwell.kernels.experts.autograd import FP8_METHOD

E, D, HIDDEN = 4, 32, 48
MXFP8 = "|".join(["emulate:mxfp8"] * 3)


class Dense(nn.Module):
    """A block as Llama 4 has it, in parts that near misses change."""

    tokens, top_k = 8, 2

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(E, D))
        self.gate_up = nn.Parameter(torch.randn(E, D, 2 * HIDDEN) / 6)
        self.down = nn.Parameter(torch.randn(E, HIDDEN, D) / 7)

    def forward(self, x: Tensor) -> Any:
        x = x.reshape(-1, D)
        scores = self.scores(F.linear(x, self.router))
        return self.total(self.products(self.rows(x, scores)))

    def scores(self, logits: Tensor) -> Tensor:
        values, index = torch.topk(logits, self.top_k, dim=1)
        spread = torch.full_like(logits, float("-inf")).scatter_(1, index, values)
        return torch.sigmoid(spread.float()).to(spread.dtype)

    def rows(self, x: Tensor, scores: Tensor) -> Tensor:
        return x.repeat(E, 1) * scores.transpose(0, 1).reshape(-1, 1)

    def products(self, rows: Tensor) -> Tensor:
        gate, up = torch.bmm(rows.view(E, -1, D), self.gate_up).chunk(2, dim=-1)
        return torch.bmm(up * F.silu(gate), self.down).view(-1, D)

    def total(self, y: Tensor) -> Tensor:
        return y.reshape(E, -1, D).sum(dim=0)


def compiled(model: nn.Module, scheme: str = "", **options: Any) -> tuple[Callable[..., Any], BackendOptions]:
    made = BackendOptions(
        schemes={"gate_up": scheme, "down": scheme} if scheme else {},
        parameters=lambda: model.named_parameters(remove_duplicate=False),
    )
    return torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, made), **options), made


def with_gradients(function: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor]:
    out = function(x)
    outs = out if isinstance(out, tuple) else (out,)
    loss = sum(one.float().mul(torch.linspace(-1, 1, one.numel()).view_as(one)).sum() for one in outs)
    return [*outs, *torch.autograd.grad(loss, (x, *model.parameters()))]


class Top1(Dense):
    top_k = 1


class All(Dense):
    top_k = E


class AlsoReturned(Dense):
    """The dense scores are an output of the model, and learn from what is made of it."""

    def forward(self, x: Tensor) -> Any:
        x = x.reshape(-1, D)
        logits = F.linear(x, self.router)
        scores = self.scores(logits)
        return self.total(self.products(self.rows(x, scores))), scores, logits


class Spelled(Dense):
    """The same in other words: methods, a scatter that writes nowhere, weights stored [E, N, K]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = (nn.Parameter(w.detach().mT.contiguous()) for w in (self.gate_up, self.down))

    def scores(self, logits: Tensor) -> Tensor:
        values, index = logits.topk(self.top_k)
        return torch.full_like(logits, -torch.inf).scatter(-1, index, values).sigmoid()

    def rows(self, x: Tensor, scores: Tensor) -> Tensor:
        return scores.t().contiguous().view(-1, 1) * x.repeat((E, 1))

    def products(self, rows: Tensor) -> Tensor:
        gate, up = (rows.reshape(E, -1, D) @ self.gate_up.transpose(1, 2)).chunk(2, -1)
        return (F.silu(gate) * up) @ self.down.mT

    def total(self, y: Tensor) -> Tensor:
        return y.sum(0)


class Checkpointed(Dense):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


# The second size is open, one token leaves experts without rows.
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (Dense, (19, 23, 1)),
        (Top1, (19,)),
        (All, (19,)),
        (Spelled, (19, 23)),
        (AlsoReturned, (19,)),
        (Checkpointed, (19,)),
    ],
)
def test_values_and_gradients_are_those_of_all_experts(kind, sizes) -> None:
    torch.manual_seed(0)
    model = kind()
    run, options = compiled(model)
    for tokens in sizes:
        x = torch.randn(tokens, D, requires_grad=True)
        for mine, theirs in zip(with_gradients(run, model, x), with_gradients(model, model, x), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert options.counts["dense_experts"] == options.graphs == len(sizes)


def test_bf16_rounds_no_more_than_all_experts_did() -> None:
    torch.manual_seed(0)
    model, x = Dense().bfloat16(), torch.randn(64, D).bfloat16().requires_grad_()
    run, options = compiled(model)
    got, wanted = with_gradients(run, model, x), with_gradients(model, model, x)
    exact = with_gradients(model.float(), model, x.detach().float().requires_grad_())
    for mine, theirs, true in zip(got, wanted, exact, strict=True):
        error, own = ((made - true).norm() / true.norm() for made in (mine.float(), theirs.float()))
        assert error <= 2 * own and own < 0.03  # the same experts were chosen
    assert options.counts["dense_experts"] == 1


@torch.no_grad()
def test_nothing_learns_and_many_experts_have_no_row() -> None:
    torch.manual_seed(0)
    model, x = Top1(), torch.randn(3, D)
    run, options = compiled(model)
    torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
    assert options.counts["dense_experts"] == 1


def test_the_rows_of_each_expert_have_the_policys_formats() -> None:
    torch.manual_seed(0)
    model, x = Dense(), torch.randn(64, D, requires_grad=True)
    run, options = compiled(model, MXFP8)
    got, wanted = with_gradients(run, model, x), with_gradients(model, model, x)
    for mine, theirs in zip(got, wanted, strict=True):
        assert 20 < sqnr_db(theirs, mine) < 45
    assert options.rewritten == {"gate_up", "down"} and options.counts["experts"] == 2


# ---- near misses ----


class FiniteFill(Dense):
    def scores(self, logits: Tensor) -> Tensor:
        values, index = torch.topk(logits, self.top_k, dim=1)
        return torch.sigmoid(torch.full_like(logits, -3.0).scatter_(1, index, values))


class Softmax(Dense):
    def scores(self, logits: Tensor) -> Tensor:
        values, index = torch.topk(logits, self.top_k, dim=1)
        return torch.softmax(torch.full_like(logits, float("-inf")).scatter_(1, index, values), 1)


class OtherExperts(Dense):
    """Some expert twice."""

    def scores(self, logits: Tensor) -> Tensor:
        values, index = torch.topk(logits, self.top_k, dim=1)
        return torch.sigmoid(torch.full_like(logits, float("-inf")).scatter_(1, index // 2, values))


class ByExpert(Dense):
    """Each expert orders the tokens, so that a token may have the same one twice."""

    tokens = top_k = E

    def scores(self, logits: Tensor) -> Tensor:
        values, index = torch.topk(logits, self.top_k, dim=0)
        return torch.sigmoid(torch.full_like(logits, float("-inf")).scatter_(1, index, values))


class Down(Dense):
    def scores(self, logits: Tensor) -> Tensor:
        values, index = torch.topk(logits, self.top_k, dim=1)
        return torch.sigmoid(torch.full_like(logits, float("-inf")).scatter_(0, index, values))


class ShiftedScores(Dense):
    def scores(self, logits: Tensor) -> Tensor:
        return super().scores(logits) + 0.1


class NotTransposed(Dense):
    def rows(self, x: Tensor, scores: Tensor) -> Tensor:
        return x.repeat(E, 1) * scores.reshape(-1, 1)


class Interleaved(Dense):
    def rows(self, x: Tensor, scores: Tensor) -> Tensor:
        return x.repeat_interleave(E, 0) * scores.transpose(0, 1).reshape(-1, 1)


class Added(Dense):
    def rows(self, x: Tensor, scores: Tensor) -> Tensor:
        return x.repeat(E, 1) + scores.transpose(0, 1).reshape(-1, 1)


class Across(Dense):
    """As many scores as columns."""

    def rows(self, x: Tensor, scores: Tensor) -> Tensor:
        return x.repeat(E, 1) * scores.transpose(0, 1).reshape(1, -1)


class OneToken(Dense):
    def rows(self, x: Tensor, scores: Tensor) -> Tensor:
        return x[:1].repeat(E * self.tokens, 1) * scores.transpose(0, 1).reshape(-1, 1)


class Folded(Dense):
    """Each half of a row of twice the width is a row of its own."""

    def rows(self, x: Tensor, scores: Tensor) -> Tensor:
        return torch.cat([x, x], 1).repeat(E, 1) * scores.transpose(0, 1).reshape(-1, 1)


class WrittenBetween(Dense):
    def rows(self, x: Tensor, scores: Tensor) -> Tensor:
        rows = super().rows(x, scores)
        x.mul_(2)
        return rows


class ScoresAfter(Dense):
    def forward(self, x: Tensor) -> Any:
        scores = self.scores(F.linear(x, self.router))
        y = self.products(x.repeat(E, 1))
        return self.total(y * scores.transpose(0, 1).reshape(-1, 1))


class RowsRead(Dense):
    def forward(self, x: Tensor) -> Any:
        rows = self.rows(x, self.scores(F.linear(x, self.router)))
        return self.total(self.products(rows)), rows


class ProductsRead(Dense):
    def forward(self, x: Tensor) -> Any:
        y = self.products(self.rows(x, self.scores(F.linear(x, self.router))))
        return self.total(y), y


class Biased(Dense):
    def products(self, rows: Tensor) -> Tensor:
        gate, up = (torch.bmm(rows.view(E, -1, D), self.gate_up) + self.gate_up[:, :1]).chunk(2, dim=-1)
        return torch.bmm(up * F.silu(gate), self.down).view(-1, D)


class BiasedBelow(Dense):
    def products(self, rows: Tensor) -> Tensor:
        gate, up = torch.bmm(rows.view(E, -1, D), self.gate_up).chunk(2, dim=-1)
        return torch.baddbmm(self.down[:, :1], up * F.silu(gate), self.down).view(-1, D)


class OtherGate(Dense):
    def products(self, rows: Tensor) -> Tensor:
        up, gate = torch.bmm(rows.view(E, -1, D), self.gate_up).chunk(2, dim=-1)
        return torch.bmm(up * F.silu(gate), self.down).view(-1, D)


class WithoutGate(Dense):
    def products(self, rows: Tensor) -> Tensor:
        hidden = F.silu(torch.bmm(rows.view(E, -1, D), self.gate_up))
        return torch.bmm(hidden, self.down.repeat(1, 2, 1)).view(-1, D)


class Halved(Dense):
    """Halves of rows meet half of the weight."""

    def products(self, rows: Tensor) -> Tensor:
        gate, up = torch.bmm(rows.view(E, -1, D // 2), self.gate_up[:, : D // 2]).chunk(2, dim=-1)
        return torch.bmm(up * F.silu(gate), self.down).view(-1, D)


class Wider(Dense):
    def products(self, rows: Tensor) -> Tensor:
        gate, up = torch.bmm(rows.view(E, -1, D), self.gate_up).chunk(2, dim=-1)
        return torch.bmm(up * F.silu(gate), self.down.repeat(1, 1, 2))

    def total(self, y: Tensor) -> Tensor:
        return y.sum(0)


class Shared(Dense):
    """One weight for two experts' rows."""

    def products(self, rows: Tensor) -> Tensor:
        gate, up = torch.bmm(rows.view(E // 2, -1, D), self.gate_up[: E // 2]).chunk(2, dim=-1)
        return torch.bmm(up * F.silu(gate), self.down[: E // 2])

    def total(self, y: Tensor) -> Tensor:
        return y.sum(0)


class Mixed(Dense):
    """Rows of several experts meet one weight."""

    def products(self, rows: Tensor) -> Tensor:
        return super().products(rows.view(-1, E, D).transpose(0, 1).reshape(-1, D))


class Mean(Dense):
    def total(self, y: Tensor) -> Tensor:
        return y.reshape(E, -1, D).mean(dim=0)


class ByTokens(Dense):
    def total(self, y: Tensor) -> Tensor:
        return y.reshape(E, -1, D).sum(dim=1)


class Pairs(Dense):
    """Two experts' rows are one row."""

    def total(self, y: Tensor) -> Tensor:
        return y.reshape(E // 2, -1, D).sum(dim=0)


class Kept(Dense):
    def total(self, y: Tensor) -> Tensor:
        return y.reshape(E, -1, D).sum(dim=0, keepdim=True)


_NEAR_MISSES = [
    *(FiniteFill, Softmax, OtherExperts, ByExpert, Down, ShiftedScores, NotTransposed, Interleaved, Added, Across),
    *(OneToken, Folded, WrittenBetween, ScoresAfter, RowsRead, ProductsRead, Biased, BiasedBelow, OtherGate),
    *(WithoutGate, Halved, Wider, Shared, Mixed, Mean, ByTokens, Pairs, Kept),
]


@torch.no_grad()
@pytest.mark.parametrize("kind", _NEAR_MISSES)
def test_what_is_no_such_block_is_left_as_it_was(kind) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(kind.tokens, D)
    run, options = compiled(model)
    torch.testing.assert_close(run(x.clone()), model(x), rtol=1e-5, atol=1e-5)
    assert options.counts["dense_experts"] == 0


@torch.no_grad()
def test_what_is_no_such_block_runs_product_by_product_in_fp8() -> None:
    torch.manual_seed(0)
    model, x = Mean(), torch.randn(8, D)
    run, options = compiled(model, "|".join([FP8_METHOD] * 3))
    assert 20 < sqnr_db(model(x), run(x)) < 45
    assert options.counts["experts"] == 2 and options.counts["fused_experts"] == 0
    (note,) = options.remarks
    assert note.endswith("padded for each: they are a batch of products with as many rows for each expert")


def test_grouped_products_that_a_gpu_runs_in_fp32_are_left_to_the_model() -> None:
    def asked(dtype: torch.dtype, ffn: int = 48, device: str = "cuda") -> bool:
        shapes = ((8, D), (E, 2 * ffn, D), (E, D, ffn))
        return has_kernels(*(torch.empty(shape, dtype=dtype, device=device) for shape in shapes))

    with FakeTensorMode():
        assert asked(torch.float32) and asked(torch.bfloat16) and asked(torch.float16, device="cpu")
        assert not asked(torch.float16) and not asked(torch.bfloat16, ffn=46)
