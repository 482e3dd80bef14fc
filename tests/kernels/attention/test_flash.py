"""Attention in a window: the reference against masked attention, torch's flash attention against it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from deepwell.formats.metrics import assert_no_worse_than
from deepwell.kernels.attention import flash
from deepwell.kernels.attention.autograd import windowed_attention
from deepwell.kernels.tune.choose import check
from deepwell.kernels.tune.problem import Problem

CASES = [(4, 2, 24, 16, 5, False), (4, 4, 17, 8, -1, True), (6, 2, 33, 32, 1, True), (4, 1, 12, 16, 40, False)]
CASES += [(4, 2, 21, (24, 16), 6, True)]  # values narrower than keys


def _widths(width):
    return width if isinstance(width, tuple) else (width, width)


def _operands(heads, groups, size, width, dtype, device="cpu"):
    width, of_values = _widths(width)
    shapes = ((heads, width), (groups, width), (groups, of_values))
    made = [torch.randn(2, n, size, w, device=device) for n, w in shapes]
    return [t.to(dtype).requires_grad_() for t in made], torch.randn(heads, device=device).to(dtype).requires_grad_()


def _masked(q, k, v, sinks, scale, window):
    """With a mask and, for the sink, one more key whose value is 0."""
    size, times = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    at = torch.arange(size, device=q.device)
    d = at[:, None] - at[None]
    mask = torch.zeros(size, size, device=q.device, dtype=q.dtype).masked_fill(
        (d < 0) | (d >= window) & (window > 0), -torch.inf
    )
    scores = q @ k.mT * scale + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :size] @ v


@pytest.mark.parametrize(("heads", "groups", "size", "width", "window", "has_sinks"), CASES)
def test_the_reference_is_masked_attention(heads, groups, size, width, window, has_sinks) -> None:
    leaves, sinks = _operands(heads, groups, size, width, torch.float64)
    leaves += [sinks] if has_sinks else []
    given = (*leaves[:3], sinks if has_sinks else None, 0.3, window)
    grad = torch.randn(2, heads, size, _widths(width)[1], dtype=torch.float64)
    wanted, got = _masked(*given), windowed_attention(*given)
    # (lse is handed on in fp32, as the kernels write it.)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)
    for mine, theirs in zip(*(torch.autograd.grad(out, leaves, grad) for out in (got, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_plain_causal_attention_is_sdpas() -> None:
    (q, k, v), _ = _operands(4, 2, 20, 16, torch.float32)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(windowed_attention(q, k, v, None, 0.25, flash.NO_WINDOW), wanted)


@pytest.mark.parametrize("wrong", range(4))
def test_a_result_that_is_off_by_a_factor_is_rejected(monkeypatch, wrong) -> None:
    problem = Problem(op="attention", precision="bf16", device="cpu")
    (candidate,) = flash.built_in("attention")
    assert check(candidate, problem).is_passed

    def off(*given):
        return tuple(t * 1.1 if i == wrong else t for i, t in enumerate(candidate.fn(*given)))

    assert "dB" in check(replace(candidate, fn=off), problem).reason


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "groups", "size", "width", "window", "has_sinks"),
    [
        (8, 2, 512, 128, 200, False),
        (8, 8, 300, 64, 128, True),
        (4, 1, 256, 256, -1, True),
        (4, 2, 1024, 96, 1000, False),
        (4, 2, 300, (192, 128), 77, True),
    ],
)
def test_flash_attention_is_the_reference_on_a_gpu(heads, groups, size, width, window, has_sinks) -> None:
    leaves, sinks = _operands(heads, groups, size, width, torch.bfloat16, "cuda")
    leaves += [sinks] if has_sinks else []
    assert not flash.why_not_flash(*leaves[:3])
    width, of_values = _widths(width)
    scale, grad = width**-0.5, torch.randn(2, heads, size, of_values, device="cuda").bfloat16()

    def run(function, tensors):
        given = tensors[3] if has_sinks else None
        out = function(*tensors[:3], given, scale, window)
        return out, *torch.autograd.grad(out, tensors, grad.to(out.dtype))

    exact = run(_masked, [t.detach().double().requires_grad_() for t in leaves])
    own = run(_masked, leaves)
    for mine, theirs, ref in zip(run(windowed_attention, leaves), own, exact, strict=True):
        assert_no_worse_than(mine, theirs, ref.float())
