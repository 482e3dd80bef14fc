"""The residual addition and the norm after it become one op, forward and backward, and nothing else does."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.engine.passes.before_linear import rewrite_before_linears
from deepwell.engine.passes.residual import rewrite_residual_norm
from deepwell.engine.passes.rms_norm import rewrite_rms_norm
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.norm.autograd import layer_norm

W, B = torch.randn(32), torch.randn(32)


def _rewrite(graph: fx.Graph) -> int:
    rewrite_rms_norm(graph)
    for node in list(graph.nodes):  # as the pass before it does where an FP8 linear follows
        if node.target in (F.layer_norm, torch.layer_norm):
            x, _, weight, bias, eps = (*node.args, *node.kwargs.values())[:5]
            node.target, node.args, node.kwargs = layer_norm, (x, weight, bias, eps), {}
    assert rewrite_before_linears(graph) == (0, 0, 0)
    return rewrite_residual_norm(graph)


def _rms(h: Tensor) -> Tensor:
    return F.rms_norm(h, (32,), W, 1e-6)


def _layer(h: Tensor) -> Tensor:
    return F.layer_norm(h, (32,), W, B, 1e-5)


@pytest.mark.parametrize("norm", [_rms, _layer])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_sum_and_its_norm_become_one(run_pass, norm, dynamic) -> None:
    # h goes on past the norm, as a residual stream does.
    def block(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = h + y
        return h * 2, norm(h)

    h, y = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    done = run_pass(block, _rewrite, h, y, dynamic=dynamic)
    assert done.found == 1
    assert [name for name in done.names() if "norm" in name] == [f"add_{norm.__name__[1:]}_norm"]
    assert "add" not in done.names()
    for got, ref in zip(done.out, block(h, y), strict=True):
        torch.testing.assert_close(got, ref)


def test_the_sum_is_rounded_as_torch_rounds_it(run_pass) -> None:
    w = W.bfloat16()
    h, y = torch.randn(5, 32).bfloat16(), torch.randn(5, 32).bfloat16()

    def block(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (total := h + y), F.rms_norm(total, (32,), w, 1e-6)

    done = run_pass(block, _rewrite, h, y)
    assert done.found == 1
    assert_bitwise_equal(done.out[0], h + y)


def test_views_between_sum_and_norm_are_kept(run_pass) -> None:
    # OPT folds the batch into rows between the two, and goes on with the unfolded sum as well.
    def block(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = h + y
        return h, _layer(h.reshape(-1, 32)).view(2, 5, 32)

    h, y = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    done = run_pass(block, _rewrite, h, y)
    assert done.found == 1
    for got, ref in zip(done.out, block(h, y), strict=True):
        torch.testing.assert_close(got, ref)


def test_a_weight_that_is_computed_beside_the_norm_moves_before_the_sum(run_pass) -> None:
    # Gemma multiplies by 1 + w; two norms of one weight share what was moved.
    def block(h: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        def norm(x: Tensor, scale: Tensor) -> Tensor:
            n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return n * scale

        first = h + y
        scale = 1.0 + w.float()
        a = norm(first, scale)
        second = first + a
        return norm(second, scale), second

    h, y = torch.randn(5, 32), torch.randn(5, 32)
    done = run_pass(block, _rewrite, h, y, W)
    assert done.found == 2
    for got, ref in zip(done.out, block(h, y, W), strict=True):
        torch.testing.assert_close(got, ref)


def test_of_two_norms_of_one_sum_the_first_takes_it(run_pass) -> None:
    # GPT-NeoX: attention and MLP side by side, a norm each.
    def block(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = h + y
        return _layer(h), F.layer_norm(h, (32,), B, W, 1e-5)

    h, y = torch.randn(5, 32), torch.randn(5, 32)
    done = run_pass(block, _rewrite, h, y)
    assert done.found == 1
    for got, ref in zip(done.out, block(h, y), strict=True):
        torch.testing.assert_close(got, ref)


def _in_place(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = h * 1.0
    before = h.view(-1)
    h += y  # whoever holds a view of h sees the sum
    return _rms(h), before


def _broadcast(h: Tensor, y: Tensor) -> Tensor:
    return _rms(h + y[:1])


def _scaled(h: Tensor, y: Tensor) -> Tensor:
    return _rms(torch.add(h, y, alpha=2))


def _number(h: Tensor, y: Tensor) -> Tensor:
    return _rms(h + 1.0)


def _mixed(h: Tensor, y: Tensor) -> Tensor:
    return _rms(h + y.bfloat16())


def _across_rows(h: Tensor, y: Tensor) -> Tensor:
    # The norm's rows are not the sum's.
    return F.rms_norm((h + y).view(-1, 16), (16,), W[:16].clone(), 1e-6)


def _weight_from_the_sum(h: Tensor, y: Tensor) -> Tensor:
    h = h + y
    return F.rms_norm(h, (32,), h.mean(0), 1e-6)


@pytest.mark.parametrize("block", [_in_place, _broadcast, _scaled, _number, _mixed, _across_rows, _weight_from_the_sum])
def test_another_sum_stays(run_pass, block) -> None:
    h, y = torch.randn(5, 32), torch.randn(5, 32)
    done = run_pass(block, _rewrite, h, y)
    assert done.found == 0
    torch.testing.assert_close(done.out, block(h, y))


class Blocks(torch.nn.Module):
    """Two pre-norm blocks and a last norm: a residual stream as models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(32, eps=1e-6) for _ in range(5))
        self.linears = torch.nn.ModuleList(torch.nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, h: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=False):
            h = h + linear(norm(h))
        return self.norms[-1](h)


def _graphs(model: Callable[..., Tensor], x: Tensor, monkeypatch: pytest.MonkeyPatch, on: bool) -> list[Any]:
    """The forward and backward that AOTAutograd made, each as its nodes' targets."""
    from deepwell.engine.passes import pipeline

    torch._dynamo.reset()
    seen: list[list[Any]] = []

    def look(graph: fx.Graph) -> int:
        seen.append([node.target for node in graph.nodes])
        return 0

    monkeypatch.setattr(pipeline, "PASSES", pipeline.swapped("fused_quantize", look))
    if not on:
        monkeypatch.setattr(pipeline, "PASSES", pipeline.swapped("residual_norm", lambda graph: 0))
    options = BackendOptions()
    torch.compile(model, backend=lambda g, i: compile_graph(g, i, options))(x).sum().backward()
    assert options.counts["residual_norm"] == (4 if on else 0)
    return seen


def test_no_addition_of_the_residual_stream_is_left_in_either_graph(monkeypatch) -> None:
    model, x = Blocks(), torch.randn(7, 32)
    add = torch.ops.aten.add.Tensor
    with monkeypatch.context() as patch:
        before = _graphs(model, x, patch, on=False)
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    after = _graphs(model, x, monkeypatch, on=True)
    # Four sums forward. Backward: the stream's gradient meets that of a norm at three sums; past the fourth nothing
    # reads the stream but the last norm.
    assert [graph.count(add) for graph in before] == [4, 3]
    assert [graph.count(add) for graph in after] == [0, 0]
    assert operator.getitem in after[0]
    for p, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad)
