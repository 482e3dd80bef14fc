"""RMSNorm of each head of q and k, then their rotary embedding, of merged q, k, v rows in one pass each way (Qwen3).

    n = x / sqrt(mean_d x^2 + eps) for each head   u = w * round(n) ("llama") or w * n ("torch"), rounded   y = rope(u)
    backward   du = the transposed rotation of dy, rounded      g = du * w
               dx = rstd * (g - n * mean_d(g * n))              dw = sum over tokens and heads of du * n
    v is copied; dqkv holds dq, dk, dv where the forward found q, k, v; (q, scale) = its FP8 rows, one scale a token

Numerics: fp32 inside, rounded where norm and rotation apart would round: u, y, du, dx. dw is deterministic: a program
    adds its tokens in order, a second small kernel the programs. The FP8 rows are bit-equal to quantizing dqkv.
Cost: memory bound; bytes per element of a row in bf16: forward 2 + 2, backward 2 + 2 + 2 (v: 2 + 2), to FP8 2 + 2 + 1.
    Apart, the norms read and write q and k once more each way, and the merged gradient is put together by a copy.
    Floors at 4.25 TB/s: 16384 tokens of 48 heads x 128: forward 95 us, backward 134 us, to FP8 110 us.
"""

# ruff: noqa: RET505 (the compiler reads what follows a return; only a whole if-else chain of constexprs ends it)

# Shapes: B batch, S sequence, T = B * S tokens, H heads, D head width, W row width, P programs of the backward.

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.checks import check_shape, check_vector
from deepwell.kernels.device.bf16_words import floats, product, rounded
from deepwell.kernels.device.fp8 import row_scale
from deepwell.kernels.device.triton_support import (
    cdiv,
    next_power_of_2,
    num_sms,
    on_device,
    runs_kernel,
    runs_ptx,
    tl,
    triton,
)
from deepwell.kernels.norm.rms_norm import ROUNDINGS, BackwardConfig, mean_of
from deepwell.kernels.quantize.fp8 import RowOptions
from deepwell.kernels.rope.head_tiles import (
    heads_of,
    largest_of_groups,
    load_group,
    load_groups,
    load_of_heads,
    load_pairs,
    load_two,
    pairs_of,
    rotated,
    row_of,
    store_groups,
    store_groups_codes,
    store_of_heads,
    store_two,
)
from deepwell.kernels.rope.rope import (
    MAX_WIDTH,
    Heads,
    RopeConfig,
    blocks,
    check_operand,
    check_tables,
    heads_of_grads,
    rope_qkv_backward_ref,
    rotate_ref,
    table_strides,
)


class NormedHeads(NamedTuple):
    """What the forward gives: q and k normed and rotated, v, each [B, S, H, D], and 1 / rms of each head, [T, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    rstd_q: Tensor
    rstd_k: Tensor


class NormedHeadsGrads(NamedTuple):
    """What the backward gives, one row a token, and the weights' gradients; None for what was not asked for."""

    grad: Tensor | None
    q: Tensor | None
    scale: Tensor | None
    dw_q: Tensor
    dw_k: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class QkNorm:
    """Which norm: its eps, and what is rounded before the weight (`rms_norm.NormOptions`)."""

    eps: float = 1e-6
    rounding: str = "llama"

    def __post_init__(self) -> None:
        if self.rounding not in ROUNDINGS:
            raise ConfigError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {self.rounding!r}")


# ---- reference: what the kernels must compute, in the plainest torch ----


def qk_norm_rope_ref(
    qkv_BSW: Tensor, weights: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, heads: Heads, norm: QkNorm
) -> NormedHeads:
    """Reference for `qk_norm_rope`."""
    q, k, v = heads.parts(qkv_BSW, qkv_BSW.shape[-1] // heads.total)
    out, rstds = [], []
    for x, w in ((q, weights[0]), (k, weights[1])):
        rstd = torch.rsqrt(x.float().square().mean(-1) + norm.eps)
        n = x.float() * rstd[..., None]
        n = n.to(x.dtype).float() if norm.rounding == "llama" else n
        out.append(rotate_ref((n * w.float()).to(x.dtype), cos, sin, heads.convention))
        rstds.append(rstd.flatten(0, 1))
    return NormedHeads(out[0], out[1], v.clone(memory_format=torch.contiguous_format), rstds[0], rstds[1])


def qk_norm_rope_backward_ref(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv_BSW: Tensor,
    weights: tuple[Tensor, Tensor],
    rstds: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    heads: Heads,
    options: RowOptions,
) -> NormedHeadsGrads:
    """Reference for `qk_norm_rope_backward`."""
    q, k, _ = heads.parts(qkv_BSW, grads[0].shape[-1])
    found, dws = [], []
    for dy, x, w, rstd in zip(grads, (q, k), weights, rstds, strict=False):
        du = rotate_ref(dy, *tables, heads.convention, backward=True).float()
        r = rstd.unflatten(0, x.shape[:2])[..., None]
        n, g = x.float() * r, du * w.float()
        found.append(((g - n * (g * n).mean(-1, keepdim=True)) * r).to(dy.dtype))
        dws.append((du * n).sum((0, 1, 2)).to(w.dtype))
    still = (torch.ones_like(tables[0]), torch.zeros_like(tables[1]))  # a rotation by nothing puts the rows together
    merged = rope_qkv_backward_ref((*found, grads[2]), *still, heads, options)
    return NormedHeadsGrads(*merged, *dws)


# ---- configs: what the tuner may choose from ----


FORWARD_CONFIGS = tuple(RopeConfig(rows=1, num_warps=n) for n in (2, 4, 1, 8))
BACKWARD_CONFIGS = (
    BackwardConfig(num_warps=4, programs_per_sm=4, num_stages=2),
    BackwardConfig(num_warps=4, programs_per_sm=4),
    BackwardConfig(num_warps=2, programs_per_sm=4, num_stages=2),
    BackwardConfig(num_warps=4, programs_per_sm=4, num_stages=3),
    BackwardConfig(num_warps=2, programs_per_sm=4),
)


def default_forward_config(columns: int) -> RopeConfig:
    """At most 96 elements a thread: what a thread does once is shared by many, and 16 warps fit. Not timed yet."""
    return RopeConfig(rows=1, num_warps=min(16, next_power_of_2(cdiv(columns, 32 * 96))))


def default_backward_config(heads: Heads, width: int) -> BackwardConfig:
    """48 to 96 elements of a row a thread, the more the fewer heads k has: each thread takes four columns of some.

    16 warps of 128 registers then hold gradient, tables, weights and their gradients without a spill, 8 warps where
    threads have eight columns in each half of a head. Not timed yet.
    """
    power = next_power_of_2
    fewest, most = (power(cdiv(heads.total * width, 32 * elements)) for elements in (96, 48))
    columns = power(heads.k) * power(width)
    num_warps = min(16, max(fewest, min(most, columns // 256)))
    is_wide = heads.convention == "half" and 512 * num_warps <= columns
    programs_per_sm = max(1, (8 if is_wide else 16) // num_warps)
    # Shared memory holds one token of each program, also in fp32.
    num_stages = 2 if heads.total * width <= 16384 else 1
    return BackwardConfig(num_warps=num_warps, programs_per_sm=programs_per_sm, num_stages=num_stages)


# ---- kernels: a pointer that is None is a result that was not asked for ----


@triton.jit
def _mean_of_heads(x1, x2, D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The mean over the columns of each head of two tiles, or of the one that holds all: [1, heads, 1, 1]."""
    total = tl.sum(x1 if INTERLEAVED else x1 + x2, axis=3)
    return mean_of(total, D, D, D & (D - 1) == 0)[:, :, :, None]


@triton.jit
def _weighted(x, rstd, w, DTYPE: tl.constexpr, ROUND_FIRST: tl.constexpr, ASM: tl.constexpr):
    """A normed tile in DTYPE."""
    n = x * rstd
    if ROUND_FIRST:
        n = rounded(n, DTYPE, ASM)
    if ROUND_FIRST and w.dtype == DTYPE:
        return product(n, w, ASM)
    else:
        return rounded(floats(n, ASM) * floats(w, ASM), DTYPE, ASM)


@triton.jit
def _normed(
    x1, x2, w1, w2, eps, D: tl.constexpr, INTERLEAVED: tl.constexpr, ROUND_FIRST: tl.constexpr, ASM: tl.constexpr
):
    """Heads normed and rounded, and 1 / rms of each; masked columns of x must be 0."""
    DTYPE: tl.constexpr = x1.dtype
    x1, x2 = floats(x1, ASM), floats(x2, ASM)
    rstd = tl.rsqrt(_mean_of_heads(x1 * x1, x2 * x2, D, INTERLEAVED) + eps)
    u1 = _weighted(x1, rstd, w1, DTYPE, ROUND_FIRST, ASM)
    if INTERLEAVED:
        return u1, u1, rstd
    else:
        return u1, _weighted(x2, rstd, w2, DTYPE, ROUND_FIRST, ASM), rstd


@triton.jit
def _norm_and_rotate(
    x, h, live, w_ptr, c1, c2, s1, s2, y_row, r_row, eps, H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, RUN: tl.constexpr, ROUND_FIRST: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store heads group by group: few of them are in registers in fp32 then."""
    w1, w2 = load_two(w_ptr, h, 0, live, D // 2, D, PAIRS, INTERLEAVED, RUN)
    for i in tl.static_range(0, len(x), 2):
        start = i // 2 * h.shape[1]
        is_live = live & (h < H - start) if i // 2 * h.shape[1] + h.shape[1] > H else live
        u1, u2, rstd = _normed(x[i], x[i + 1], w1, w2, eps, D, INTERLEAVED, ROUND_FIRST, ASM)
        u1, u2 = pairs_of(u1, u2, INTERLEAVED, ASM)
        y1, y2 = rotated(u1, u2, c1, c2, s1, s2, x[i].dtype, False, INTERLEAVED, ASM)
        store_two(y_row + start * D, h, D, is_live, y1, y2, D // 2, D, PAIRS, INTERLEAVED, RUN)
        store_of_heads(r_row + start, h, is_live, rstd, ASM)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, yq_ptr, yk_ptr, yv_ptr, rq_ptr, rk_ptr,
    T, S, stride_b, stride_s, stride_cos_b, stride_cos_s, stride_sin_b, stride_sin_s, eps,
    HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, INTERLEAVED: tl.constexpr, ROUND_FIRST: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    # One program, one token with all its heads.
    t32 = tl.program_id(0)
    t, b, s = t32.to(tl.int64), (t32 // S).to(tl.int64), (t32 % S).to(tl.int64)
    h, live = heads_of(GROUP, GROUP), tl.full([1, 1, 1, 1], True, tl.int1)
    row = row_of(v_ptr, t, b, s, stride_b, stride_s)
    v = load_groups(row, h, None, live, HV, D, PAIRS, INTERLEAVED, RUN)
    row = row_of(q_ptr, t, b, s, stride_b, stride_s)
    q = load_groups(row, h, None, live, HQ, D, PAIRS, INTERLEAVED, RUN)
    row = row_of(k_ptr, t, b, s, stride_b, stride_s)
    k = load_groups(row, h, None, live, HK, D, PAIRS, INTERLEAVED, RUN)
    # Every thread reads the columns it has of q: no exchange.
    row = row_of(cos_ptr, s, b, s, stride_cos_b, stride_cos_s)
    c1, c2 = load_pairs(row, h, 0, live, D, PAIRS, INTERLEAVED, RUN, ASM)
    row = row_of(sin_ptr, s, b, s, stride_sin_b, stride_sin_s)
    s1, s2 = load_pairs(row, h, 0, live, D, PAIRS, INTERLEAVED, RUN, ASM)
    store_groups(yv_ptr + t * (HV * D), h, live, v, HV, D, PAIRS, INTERLEAVED, RUN)
    _norm_and_rotate(
        q, h, live, wq_ptr, c1, c2, s1, s2, yq_ptr + t * (HQ * D), rq_ptr + t * HQ, eps, HQ, D, PAIRS, INTERLEAVED, RUN,
        ROUND_FIRST, ASM,
    )  # fmt: skip
    _norm_and_rotate(
        k, h, live, wk_ptr, c1, c2, s1, s2, yk_ptr + t * (HK * D), rk_ptr + t * HK, eps, HK, D, PAIRS, INTERLEAVED, RUN,
        ROUND_FIRST, ASM,
    )  # fmt: skip


@triton.jit
def _group_gradients(
    d1, d2, x1, x2, rstd, w1, w2, c1, c2, s1, s2, live, D: tl.constexpr, INTERLEAVED: tl.constexpr, ASM: tl.constexpr
):
    """The gradients of a group of heads before their norm, rounded, and what they add to the weight's.

    `live` is None where all heads are there: one past the last is 0 * NaN where w or a table holds one.
    """
    DTYPE: tl.constexpr = d1.dtype
    d1, d2 = pairs_of(d1, d2, INTERLEAVED, ASM)
    d1, d2 = rotated(d1, d2, c1, c2, s1, s2, DTYPE, True, INTERLEAVED, ASM)
    d1, n1 = floats(d1, ASM), floats(x1, ASM) * rstd
    g1 = d1 * floats(w1, ASM)
    if INTERLEAVED:
        d2, n2, g2 = d1, n1, g1
    else:
        d2, n2 = floats(d2, ASM), floats(x2, ASM) * rstd
        g2 = d2 * floats(w2, ASM)
    mean = _mean_of_heads(g1 * n1, g2 * n2, D, INTERLEAVED)
    y1, y2, a1, a2 = (g1 - n1 * mean) * rstd, (g2 - n2 * mean) * rstd, d1 * n1, d2 * n2
    if live is not None:
        y1, y2 = tl.where(live, y1, 0.0), tl.where(live, y2, 0.0)
        a1, a2 = tl.where(live, a1, 0.0), tl.where(live, a2, 0.0)
    y1 = rounded(y1, DTYPE, ASM)
    if INTERLEAVED:
        return (y1, y1), a1, a1
    else:
        return (y1, rounded(y2, DTYPE, ASM)), a1, a2


@triton.jit
def _head_gradients(
    d_row, h, stride_h, live, x_row, r_row, w1, w2, c1, c2, s1, s2, dw1, dw2, H: tl.constexpr, D: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, RUN: tl.constexpr, NUM_STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Gradients of one token's heads before their norm, rounded, two tiles a group, and the weight's so far."""
    found = ()
    for start in tl.static_range(0, H, h.shape[1]):
        d1, d2 = load_group(d_row, h, stride_h, live, start, H, D, PAIRS, INTERLEAVED, RUN)
        x1, x2 = load_group(x_row, h, None, live, start, H, D, PAIRS, INTERLEAVED, RUN)
        rstd = load_of_heads(r_row + start, h, H - start, ASM and NUM_STAGES == 1)
        is_live = h < H - start if start + h.shape[1] > H else None
        two, a1, a2 = _group_gradients(d1, d2, x1, x2, rstd, w1, w2, c1, c2, s1, s2, is_live, D, INTERLEAVED, ASM)
        dw1 += a1
        dw2 += a2
        found = found + two
    return found, dw1, dw2


@triton.jit
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, q_ptr, k_ptr, wq_ptr, wk_ptr, rq_ptr, rk_ptr, cos_ptr, sin_ptr, grad_ptr, code_ptr,
    scale_ptr, dw_ptr,
    T, S, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_b,
    stride_s, stride_cos_b, stride_cos_s, stride_sin_b, stride_sin_s,
    HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, INTERLEAVED: tl.constexpr, FP8_MAX: tl.constexpr, POW2: tl.constexpr, NUM_STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    # A program walks over tokens and adds up what they give to the weights' gradients, dq's before dk's.
    HALF: tl.constexpr = D // 2
    W: tl.constexpr = (HQ + HK + HV) * D
    h, live = heads_of(GROUP, GROUP), tl.full([1, 1, 1, 1], True, tl.int1)
    wq1, wq2 = load_two(wq_ptr, h, 0, live, HALF, D, PAIRS, INTERLEAVED, RUN)
    wk1, wk2 = load_two(wk_ptr, h, 0, live, HALF, D, PAIRS, INTERLEAVED, RUN)
    dwq1 = tl.zeros([1, GROUP, 1, 2 * PAIRS if INTERLEAVED else PAIRS], dtype=tl.float32)
    dwq2, dwk1, dwk2 = dwq1, dwq1, dwq1
    for token in tl.range(tl.program_id(0), T, tl.num_programs(0), num_stages=NUM_STAGES):
        t32 = tl.cast(token, tl.int32)  # the interpreter's token is a plain int
        t, b, s = t32.to(tl.int64), (t32 // S).to(tl.int64), (t32 % S).to(tl.int64)
        row = row_of(cos_ptr, s, b, s, stride_cos_b, stride_cos_s)
        c1, c2 = load_pairs(row, h, 0, live, D, PAIRS, INTERLEAVED, RUN, ASM)
        row = row_of(sin_ptr, s, b, s, stride_sin_b, stride_sin_s)
        s1, s2 = load_pairs(row, h, 0, live, D, PAIRS, INTERLEAVED, RUN, ASM)
        row, x_row = row_of(dq_ptr, t, b, s, stride_qb, stride_qs), row_of(q_ptr, t, b, s, stride_b, stride_s)
        q, dwq1, dwq2 = _head_gradients(
            row, h, stride_qh, live, x_row, rq_ptr + t * HQ, wq1, wq2, c1, c2, s1, s2, dwq1, dwq2, HQ, D, PAIRS,
            INTERLEAVED, RUN, NUM_STAGES, ASM,
        )  # fmt: skip
        row, x_row = row_of(dk_ptr, t, b, s, stride_kb, stride_ks), row_of(k_ptr, t, b, s, stride_b, stride_s)
        k, dwk1, dwk2 = _head_gradients(
            row, h, stride_kh, live, x_row, rk_ptr + t * HK, wk1, wk2, c1, c2, s1, s2, dwk1, dwk2, HK, D, PAIRS,
            INTERLEAVED, RUN, NUM_STAGES, ASM,
        )  # fmt: skip
        row = row_of(dv_ptr, t, b, s, stride_vb, stride_vs)
        v = load_groups(row, h, stride_vh, live, HV, D, PAIRS, INTERLEAVED, RUN)
        if grad_ptr is not None:
            row = grad_ptr + t * W
            store_groups(row, h, live, q, HQ, D, PAIRS, INTERLEAVED, RUN)
            store_groups(row + HQ * D, h, live, k, HK, D, PAIRS, INTERLEAVED, RUN)
            store_groups(row + (HQ + HK) * D, h, live, v, HV, D, PAIRS, INTERLEAVED, RUN)
        if code_ptr is not None:
            # Nothing saturates: the multiplier is of the row's own largest.
            enc, scale = row_scale(largest_of_groups(q + k + v, ASM), FP8_MAX, POW2)
            e, row = enc[:, None, None, None], code_ptr + t * W
            store_groups_codes(row, h, live, q, e, HQ, D, PAIRS, INTERLEAVED, RUN, POW2, ASM)
            store_groups_codes(row + HQ * D, h, live, k, e, HK, D, PAIRS, INTERLEAVED, RUN, POW2, ASM)
            store_groups_codes(row + (HQ + HK) * D, h, live, v, e, HV, D, PAIRS, INTERLEAVED, RUN, POW2, ASM)
            tl.store(scale_ptr + t + tl.arange(0, 1), scale)
    out, one = dw_ptr + tl.program_id(0).to(tl.int64) * (2 * D), heads_of(1, 1)
    dwq1, dwq2 = tl.sum(dwq1, axis=1)[:, None, :, :], tl.sum(dwq2, axis=1)[:, None, :, :]
    dwk1, dwk2 = tl.sum(dwk1, axis=1)[:, None, :, :], tl.sum(dwk2, axis=1)[:, None, :, :]
    store_two(out, one, 0, live, dwq1, dwq2, HALF, D, PAIRS, INTERLEAVED, RUN)
    store_two(out + D, one, 0, live, dwk1, dwk2, HALF, D, PAIRS, INTERLEAVED, RUN)


@triton.jit
def _sum_kernel(partial_ptr, dwq_ptr, dwk_ptr, P, D, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    # The programs' sums [P, 2, D]; the second number of a program says whose weight.
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_P, BLOCK_D], dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        place = (2 * p + tl.program_id(1))[:, None] * D + d[None, :]
        total += tl.load(partial_ptr + place, mask=(p[:, None] < P) & (d[None, :] < D), other=0.0)
    dw = tl.sum(total, axis=0)
    if tl.program_id(1) == 0:
        tl.store(dwq_ptr + d, dw.to(dwq_ptr.dtype.element_ty), mask=d < D)
    else:
        tl.store(dwk_ptr + d, dw.to(dwk_ptr.dtype.element_ty), mask=d < D)


# ---- public wrappers: check, allocate, launch ----


def qk_norm_rope(
    qkv_BSW: Tensor,
    weights: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    heads: Heads,
    norm: QkNorm | None = None,
    config: RopeConfig | None = None,
) -> NormedHeads:
    """Norm and rotate the heads of q and k of merged rows; `weights` are those of q's and k's norm, [D].

    `cos` and `sin` are [S, D], [1, S, D] or [B, S, D]: whole heads are rotated. Raises ConfigError on a wrong argument,
    UnsupportedError on heads that lie otherwise or rows that registers do not hold.
    """
    norm = norm or QkNorm()
    width = _check(qkv_BSW, weights, (cos, sin), heads)
    b, s, w = qkv_BSW.shape
    if not runs_kernel(qkv_BSW, _forward_kernel):
        return qk_norm_rope_ref(qkv_BSW, weights, cos, sin, heads, norm)
    out = [qkv_BSW.new_empty((b, s, h, width)) for h in (heads.q, heads.k, heads.v)]
    rstds = [qkv_BSW.new_empty((b * s, h), dtype=torch.float32) for h in (heads.q, heads.k)]
    config = config or default_forward_config(w)
    if b * s:
        with on_device(qkv_BSW):
            _forward_kernel[(b * s,)](
                *heads.parts(qkv_BSW, width),
                *weights,
                cos,
                sin,
                *out,
                *rstds,
                b * s,
                s,
                *_row_strides(qkv_BSW),
                *(stride for table in (cos, sin) for stride in _strides_of(table)),
                norm.eps,
                **sizes(heads, width, num_warps=config.num_warps),
                ROUND_FIRST=norm.rounding == "llama",
                ASM=runs_ptx(qkv_BSW, _forward_kernel),
                num_warps=config.num_warps,
            )
    return NormedHeads(out[0], out[1], out[2], rstds[0], rstds[1])


def qk_norm_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv_BSW: Tensor,
    weights: tuple[Tensor, Tensor],
    rstds: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    *,
    convention: str = "half",
    options: RowOptions | None = None,
    config: BackwardConfig | None = None,
) -> NormedHeadsGrads:
    """Gradients of `qk_norm_rope` at its merged rows, [T, W], and at both weights, from those of q, k, v.

    `grads` are [B, S, H, D] of any strides, D dense; `rstds` are the forward's, `tables` its cos and sin.
    """
    options = options or RowOptions()
    dq, heads = grads[0], heads_of_grads(grads, "blocks", convention)
    width = _check(qkv_BSW, weights, tables, heads)
    b, s, w = qkv_BSW.shape
    for name, rstd, h in (("rstd_q", rstds[0], heads.q), ("rstd_k", rstds[1], heads.k)):
        check_shape(name, rstd, (b * s, h), qkv_BSW)
    if not runs_kernel(dq, _backward_kernel):
        return qk_norm_rope_backward_ref(grads, qkv_BSW, weights, rstds, tables, heads, options)
    rows = options.empty_rows(dq, b * s, w)
    dws = [torch.empty_like(weight) for weight in weights]
    if b * s == 0:
        return NormedHeadsGrads(*rows, dws[0].zero_(), dws[1].zero_())
    config = config or default_backward_config(heads, width)
    num_programs = min(b * s, config.programs_per_sm * num_sms(dq))
    partials = dq.new_empty((num_programs, 2 * width), dtype=torch.float32)
    with on_device(dq):
        _backward_kernel[(num_programs,)](
            *grads,
            *heads.parts(qkv_BSW, width)[:2],
            *weights,
            *(rstd.contiguous() for rstd in rstds),
            *tables,
            *rows,
            partials,
            b * s,
            s,
            *(stride for x in grads for stride in (*_row_strides(x), None if x.stride(2) == width else x.stride(2))),
            *_row_strides(qkv_BSW),
            *(stride for table in tables for stride in _strides_of(table)),
            **sizes(heads, width, num_warps=config.num_warps),
            FP8_MAX=options.fp8_max,
            POW2=options.pow2,
            NUM_STAGES=config.num_stages,
            ASM=runs_ptx(dq, _backward_kernel),
            num_warps=config.num_warps,
            maxnreg=config.max_registers,
        )
        # Rows of one sector, and all of them on their way at once or nearly.
        _sum_kernel[(cdiv(width, 8), 2)](partials, *dws, num_programs, width, BLOCK_P=256, BLOCK_D=8, num_warps=8)
    return NormedHeadsGrads(*rows, *dws)


def sizes(heads: Heads, width: int, *, num_warps: int) -> dict[str, int | bool]:
    """The constexprs that follow from the heads and from how many threads share a token."""
    is_interleaved = heads.convention == "interleaved"
    each = (heads.q, heads.k, heads.v)
    tiles = blocks(each, width, width, RopeConfig(rows=1, num_warps=num_warps), interleaved=is_interleaved)
    return {
        **dict(zip(("HQ", "HK", "HV"), each, strict=True)),
        "D": width,
        "PAIRS": tiles["BLOCK_PAIRS"],
        "GROUP": tiles["GROUP"],
        "RUN": tiles["RUN"],
        "INTERLEAVED": is_interleaved,
    }


def _row_strides(x: Tensor) -> tuple[int | None, int]:
    """Distances of [B, S, ...] from sequence to sequence, None where they follow each other, and row to row."""
    between, step = x.stride()[:2]
    return None if between == x.shape[1] * step or len(x) == 1 else between, step


def _strides_of(table: Tensor) -> tuple[int | None, int]:
    between, step = table_strides(table)
    return between or None, step


def _check(qkv_BSW: Tensor, weights: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], heads: Heads) -> int:
    """The width of a head; raises ConfigError or UnsupportedError on what the kernels do not take."""
    check_operand("qkv_BSW", qkv_BSW, 3)
    w = qkv_BSW.shape[-1]
    if w % heads.total:
        raise ConfigError(f"qkv_BSW has {w} columns, no multiple of its {heads.total} heads")
    if heads.packing != "blocks":
        raise UnsupportedError(f"heads.packing is {heads.packing!r}; norms of q and k are for 'blocks'")
    if w > MAX_WIDTH:
        raise UnsupportedError(f"rows of {w} columns do not fit registers; at most {MAX_WIDTH}")
    width = w // heads.total
    check_tables(*tables, qkv_BSW, width)
    if tables[0].shape[-1] != width:
        raise UnsupportedError(f"cos has {tables[0].shape[-1]} columns; norms of q and k rotate whole heads of {width}")
    for name, weight in zip(("w_q", "w_k"), weights, strict=True):
        check_vector(name, weight, width, qkv_BSW)
    return width
