"""Causal attention in a window, by torch's flash attention, which skips the blocks that lie outside.

    s[i, j] = scale * q[i] . k[j]        for j <= i and, with a window w, j > i - w; other pairs have no share
    lse[i] = log(sum_j exp s[i, j] + exp(sink))       a sink is a logit of its own for each head, without a value
    out[i] = sum_j exp(s[i, j] - lse[i]) v[j]

    dv = p^T dout    ds = p * (dout v^T - delta), delta[i] = out[i] . dout[i]    dq = scale ds k    dk = scale ds^T q
    dsink = -sum_i exp(sink - lse[i]) delta[i]

A sink changes lse and scales the rows of out; nothing else of the kernels. The backward recomputes p from lse, so with
the lse that has the sink in it, it is the backward of attention with the sink.
Values narrower than keys (latent attention has 128 and 192) are padded with zeros for the kernels, which take one
width; what is padded of out and dv is dropped.
Numerics: bf16 or fp16 operands, fp32 sums and softmax, p rounded to the operands' dtype for its GEMM.
Cost: 4 flops a pair in the window and a head's width forward, 10 backward; nothing of the size S x S is held.
"""

# Shapes: B batch, H query heads, G key-value heads, S tokens, D width of a head, V width of its values.

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.kernels.attention.proof import case_of
from deepwell.kernels.tune.candidate import Candidate
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.sources import sources_hash
from deepwell.kernels.tune.verify import Case

_aten = torch.ops.aten
NO_WINDOW = -1
_MAX_WIDTH = 256


# ---- reference: what the kernels must compute, in the plainest torch ----


def _scores(q_BHSD: Tensor, k_BGSD: Tensor, scale: float, window: int) -> Tensor:
    """Scores of all pairs in fp32, or the operands' own dtype where that is wider; -inf outside the window."""
    size, times = q_BHSD.shape[2], q_BHSD.shape[1] // k_BGSD.shape[1]
    wide = torch.promote_types(q_BHSD.dtype, torch.float32)
    s = q_BHSD.to(wide) @ k_BGSD.repeat_interleave(times, 1).to(wide).mT * scale
    at = torch.arange(size, device=s.device)
    d = at[:, None] - at[None, :]
    is_open = (d >= 0) if window == NO_WINDOW else (d >= 0) & (d < window)
    return s.masked_fill(~is_open, -math.inf)


def attention_ref(
    q_BHSD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, sinks_H: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Reference for `attention`: (out, lse)."""
    s = _scores(q_BHSD, k_BGSD, scale, window)
    lse = s.logsumexp(-1)
    if sinks_H is not None:
        lse = torch.logaddexp(lse, sinks_H.to(lse.dtype)[None, :, None])
    p = (s - lse[..., None]).exp()
    v = v_BGSV.repeat_interleave(q_BHSD.shape[1] // v_BGSV.shape[1], 1)
    return (p @ v.to(p.dtype)).to(q_BHSD.dtype), lse


def attention_backward_ref(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference for `attention_backward`: (dq, dk, dv)."""
    batch, groups, size, width = k.shape
    p = (_scores(q, k, scale, window) - lse[..., None].to(torch.promote_types(q.dtype, torch.float32))).exp()
    times = q.shape[1] // groups
    dout_wide, v_all, k_all = dout.to(p.dtype), v.repeat_interleave(times, 1), k.repeat_interleave(times, 1)
    delta = (dout_wide * out.to(p.dtype)).sum(-1, keepdim=True)
    ds = p * (dout_wide @ v_all.to(p.dtype).mT - delta) * scale
    dq = ds @ k_all.to(p.dtype)
    dk, dv = (grad.reshape(batch, groups, times, size, -1).sum(2) for grad in (ds.mT @ q.to(p.dtype), p.mT @ dout_wide))
    assert dk.shape[-1] == width
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# ---- what runs ----


def why_not_flash(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why torch's flash attention does not take these operands: "" where it does."""
    if any(t.device.type != "cuda" or t.dim() != 4 for t in (q, k, v)):
        return "flash attention takes [batch, heads, tokens, width] on a GPU"
    if {t.dtype for t in (q, k, v)} not in ({torch.bfloat16}, {torch.float16}):
        return f"flash attention takes bf16 or fp16, these are {q.dtype}, {k.dtype} and {v.dtype}"
    width, of_values = q.shape[-1], v.shape[-1]
    if not isinstance(width, int) or not isinstance(of_values, int) or k.shape[-1] != width or of_values > width:
        return "flash attention takes one known width of queries and keys, and values that are no wider"
    if width % 8 or width > _MAX_WIDTH:
        return f"flash attention takes a width that is a multiple of 8 up to {_MAX_WIDTH}"
    if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1] or k.shape[2] != q.shape[2]:
        return "flash attention needs as many keys as queries, and query heads that key-value heads divide"
    return ""


def _ends(window: int) -> dict[str, int]:
    return {} if window == NO_WINDOW else {"window_size_left": window - 1, "window_size_right": 0}


def _by_tokens(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, H, S, D] as flash attention reads it: [B, S, H, D] with contiguous rows."""
    views = (t.transpose(1, 2) for t in tensors)
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in views)


def padded(x: Tensor, width: int) -> Tensor:
    """x with columns of zeros up to a width: itself where it has it."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def attention(
    q_BHSD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, sinks_H: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """(out, lse in fp32). `window` counts the query's own key; `NO_WINDOW` is all that came before."""
    if why_not_flash(q_BHSD, k_BGSD, v_BGSV):
        return attention_ref(q_BHSD, k_BGSD, v_BGSV, sinks_H, scale, window)
    q, k, v = _by_tokens(q_BHSD, k_BGSD, padded(v_BGSV, q_BHSD.shape[-1]))
    size = q.shape[1]
    out, lse, *_ = _aten._flash_attention_forward(
        q, k, v, None, None, size, size, 0.0, True, False, scale=scale, **_ends(window)
    )
    out = out.transpose(1, 2)[..., : v_BGSV.shape[-1]]
    if sinks_H is None:
        return out, lse
    with_sink = torch.logaddexp(lse, sinks_H.float()[None, :, None])
    return out * (lse - with_sink).exp()[..., None].to(out.dtype), with_sink


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `attention`, whose sinks are in `out` and `lse`."""
    if why_not_flash(q, k, v):
        return attention_backward_ref(dout, q, k, v, out, lse, scale, window)
    width, size = q.shape[-1], q.shape[2]
    operands = _by_tokens(padded(dout, width), q, k, padded(v, width), padded(out, width))
    # Dropout's state, which a backward without dropout does not read.
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    grads = _aten._flash_attention_backward(
        *operands, lse, None, None, size, size, 0.0, True, state, state, scale=scale, **_ends(window)
    )
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    return dq, dk, dv[..., : v.shape[-1]]


# ---- the proof on a device: forward and backward at once ----


def _all_of(run: tuple[Callable[..., Any], Callable[..., Any]], given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv)."""
    (q, k, v, sinks, dout), scale, window = given[:5], given[0].shape[-1] ** -0.5, given[5]
    out, lse = run[0](q, k, v, sinks, scale, window)
    return out, *run[1](dout, q, k, v, out, lse, scale, window)


def built_in(op: str) -> tuple[Candidate, ...]:
    """torch's own flash attention, forward and backward."""
    return (
        Candidate(
            name="torch_flash",
            op=op,
            precision="bf16",
            fn=lambda *given: _all_of((attention, attention_backward), given),
            origin="vendor",
            trusted=True,
            fingerprint=sources_hash(sys.modules[__name__]),
        ),
    )


def cases(candidate: Candidate, problem: Problem) -> Iterator[Case]:
    """A window, all that came before, sinks, fewer key-value heads, narrow values, a ragged length."""
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (2, 200, 64, 64, 48, False),
        (1, 131, 128, 128, NO_WINDOW, True),
        (4, 160, 192, 128, NO_WINDOW, False),
    )
    for groups, size, width, of_values, window, has_sinks in shapes:
        sizes = ((4, width), (groups, width), (groups, of_values), (4, of_values))
        made = [torch.randn(2, n, size, w, generator=generator).bfloat16() for n, w in sizes]
        sinks = torch.randn(4, generator=generator).bfloat16() if has_sinks else None
        given = tuple(t if t is None else t.to(problem.device) for t in (*made[:3], sinks, made[3]))
        wide = (t if t is None else t.double() for t in given)
        yield case_of(
            f"{size} tokens, widths {width} and {of_values}, window {window}",
            (*given, window),
            ("q", "k", "v", "sinks", "dout", "window"),
            _all_of((attention_ref, attention_backward_ref), (*wide, window)),
        )
