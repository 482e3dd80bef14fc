"""What only looks like a pattern: spellings close to those that passes know compute what the model wrote.

All passes on Dynamo's graph run on a small function, which must then give eager's values and gradients. Findings have
names; the rest comes from a seeded generator of spellings, in both dtypes, with fixed and with open sizes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from deepwell.engine.passes import pipeline
from deepwell.engine.passes.work import BackendOptions, Work

Case = tuple[Callable[..., Any], list[Tensor]]


def rewritten(
    function: Callable[..., Any], *, dynamic: bool | None = None
) -> tuple[Callable[..., Any], dict[str, int]]:
    """A function whose graph all passes of Dynamo's level rewrite, and what they counted."""
    options = BackendOptions(fuse_head=True)

    def backend(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        work = Work(options=options)
        pipeline.run(pipeline.DYNAMO, graph_module.graph, work)
        graph_module.graph.lint()
        graph_module.recompile()
        assert not work.deferred
        return graph_module.forward

    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic), options.counts


def outcome(function: Callable[..., Any], inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Values and gradients of a function; it may write into what it gets."""
    torch.manual_seed(7)
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    out = function(*(x * 1 if x.is_floating_point() and x.requires_grad else x for x in leaves))
    outs = list(out) if isinstance(out, tuple) else [out]
    total = sum((o.float() * torch.linspace(0.5, 1.5, o.numel()).view(o.shape)).sum() for o in outs)
    if isinstance(total, Tensor) and total.requires_grad:
        total.backward()
    return [o.detach() for o in outs], [x.grad for x in leaves]


def check(function: Callable[..., Any], inputs: list[Tensor], *, dynamic: bool | None = None) -> dict[str, int]:
    """Assert that the rewritten function gives what eager gives. Returns what passes counted."""
    torch._dynamo.reset()
    run, counts = rewritten(function, dynamic=dynamic)
    want, got = outcome(function, inputs), outcome(run, inputs)
    low = any(x.dtype is torch.bfloat16 for x in inputs)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if low else {"rtol": 1e-4, "atol": 1e-5}
    for ours, theirs in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.dtype == theirs.dtype
            scale = max(1.0, float(theirs.float().abs().max())) if low and theirs.numel() else 1.0
            torch.testing.assert_close(ours.float() / scale, theirs.float() / scale, equal_nan=True, **tolerance)
    return {name: count for name, count in counts.items() if count}


# ---- attention ----


def qkv(heads: int = 4, kv_heads: int = 4, size: int = 10) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    shapes = ((2, heads, size, 8), (2, kv_heads, size, 8), (2, kv_heads, size, 8))
    return [torch.randn(*shape, generator=g).requires_grad_() for shape in shapes]


def masked(make: Callable[[int], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=make(q.shape[2]))


def triangle(size: int) -> Tensor:
    at = torch.arange(size)
    return at[:, None] >= at[None]


def within(rule: Callable[[Tensor, Tensor], Tensor]) -> Callable[[int], Tensor]:
    def make(size: int) -> Tensor:
        at = torch.arange(size)
        return triangle(size) & rule(at[:, None], at[None])

    return make


WINDOWS = {
    "float": lambda i, j: i - j < 16.0,
    "scaled": lambda i, j: (i - j) * 0.05 < 1,
    "shifted": lambda i, j: (i >> 4) == (j >> 4),
    "divided": lambda i, j: i // 16 == j // 16,
    "squared": lambda i, j: (i - j) ** 2 < 256,
    "two numbers": lambda i, j: i - 8 < j + 8,
    "remainder": lambda i, j: (i % 16) >= (j % 16),
    "small dtype": lambda i, j: i.to(torch.bfloat16) - j.to(torch.bfloat16) < 16,
    "bytes": lambda i, j: i.to(torch.int8) + 110 >= 0,
    "a tensor": lambda i, j: i - j < torch.tensor(16),
    "alpha": lambda i, j: torch.add(i, j, alpha=-1) < 16,
}


@pytest.mark.parametrize("rule", WINDOWS)
def test_a_window_that_no_whole_number_tells_stays_at_open_sizes(rule: str) -> None:
    function = masked(within(WINDOWS[rule]))
    run, counts = rewritten(function, dynamic=True)
    for size in (10, 40):  # at 10 each is a triangle
        inputs = qkv(size=size)
        torch.testing.assert_close(run(*inputs), function(*inputs))
    assert counts["causal_mask"] == 0


def test_a_triangle_of_shifted_positions_is_dropped_at_open_sizes() -> None:
    run, counts = rewritten(masked(within(lambda i, j: i + 3 >= j + 3)), dynamic=True)
    for size in (10, 40):
        inputs = qkv(size=size)
        torch.testing.assert_close(run(*inputs), masked(triangle)(*inputs))
    assert counts["causal_mask"] == 1


def test_a_mask_of_one_entry_is_no_triangle() -> None:
    for mask in (lambda n: torch.ones(1, 1, dtype=torch.bool), lambda n: torch.zeros(1, 1)):
        assert "causal_mask" not in check(masked(mask), qkv())


def test_a_random_mask_stays_and_takes_its_own_numbers() -> None:
    assert "causal_mask" not in check(masked(lambda n: (torch.rand(n, n) < 2.0) & triangle(n)), qkv())


def test_a_mask_is_evaluated_in_the_order_of_its_writes() -> None:
    def mask(n: int) -> Tensor:
        ones = torch.ones(n, n, dtype=torch.bool)
        before = ones.clone()
        return ones.tril_() | ~before

    assert check(masked(mask), qkv())["causal_mask"] == 1

    def late(n: int) -> Tensor:
        ones = torch.ones(n, n, dtype=torch.bool)
        before = ones.clone()
        return before & (ones.tril_() | before)

    assert "causal_mask" not in check(masked(late), qkv())


def test_a_window_of_the_smaller_of_two_sizes_stays() -> None:
    def mask(n: int) -> Tensor:
        return within(lambda i, j: i - j < torch.sym_min(n, 16))(n)

    run, counts = rewritten(masked(mask), dynamic=True)
    for size in (10, 40):
        inputs = qkv(size=size)
        torch.testing.assert_close(run(*inputs), masked(within(lambda i, j: i - j < 16))(*inputs))
    assert counts["causal_mask"] == 0


def grown(x: Tensor, times: int, pick: Any = slice(None)) -> Tensor:
    x = x[:, pick]
    batch, heads, size, dim = x.shape
    return x[:, :, None].expand(batch, heads, times, size, dim).reshape(batch, heads * times, size, dim)


def test_some_of_the_heads_repeated_are_not_all() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[:, 0:1, None].expand(2, 1, 4, 10, 8).reshape(2, 4, 10, 8) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    assert "kv_heads" not in check(attend, qkv(kv_heads=2))
    alike = check(lambda q, k, v: F.scaled_dot_product_attention(q, grown(k, 2), grown(v, 2)), qkv(kv_heads=2))
    assert alike["kv_heads"] == 1


def test_one_head_of_queries_for_all_repeated_ones_stays() -> None:
    check(lambda q, k, v: F.scaled_dot_product_attention(q[:, :1], grown(k, 2), grown(v, 2)), qkv(kv_heads=2))
