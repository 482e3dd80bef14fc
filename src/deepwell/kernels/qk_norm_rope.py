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

# Shapes: B batch, S sequence, T = B * S tokens, H heads, D head width, W row width, P programs of the backward.

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels._fp8 import ZERO_ROW, magnitude_bits, multiplier_from_bits, saturate
from deepwell.kernels._head_tiles import turn
from deepwell.kernels._triton import num_sms, on_device, runs_kernel, tl, triton
from deepwell.kernels.checks import check_fp8, check_shape, check_vector
from deepwell.kernels.rms_norm import ROUNDINGS, sum_programs_kernel
from deepwell.kernels.rope import (
    MAX_WIDTH,
    GradOptions,
    Heads,
    RopeConfig,
    _table_strides,
    check_operand,
    check_tables,
    rope_qkv_backward_ref,
    rotate_ref,
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
    """Which norm: its eps, and what is rounded before the weight (`rms_norm.Options`)."""

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
    options: GradOptions,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardConfig:
    """Programs stay on their multiprocessor and walk over tokens, so that dw is summed in registers."""

    num_warps: int
    programs_per_sm: int


# Not measured yet.
BACKWARD_CONFIGS = (
    BackwardConfig(num_warps=16, programs_per_sm=1),
    BackwardConfig(num_warps=8, programs_per_sm=2),
    BackwardConfig(num_warps=4, programs_per_sm=4),
    BackwardConfig(num_warps=32, programs_per_sm=1),
    BackwardConfig(num_warps=8, programs_per_sm=1),
)


def default_config(columns: int) -> RopeConfig:
    """About 48 elements a thread: loads of 8 or 16 bytes also of the few heads of k and v, all of a row in flight."""
    if columns <= 3072:
        return RopeConfig(rows=4 if columns <= 768 else 2, num_warps=4)
    return RopeConfig(rows=1, num_warps=4 if columns <= 12288 else 8 if columns <= 24576 else 16)


def default_backward_config(columns: int) -> BackwardConfig:
    """About 12 elements of a row a thread: gradient, input and the weights' gradient lie in registers together."""
    num_warps = 4 if columns <= 1536 else 8 if columns <= 3072 else 16 if columns <= 8192 else 32
    return BackwardConfig(num_warps=num_warps, programs_per_sm=max(1, 16 // num_warps))


# ---- kernels: a pointer that is None is a result that was not asked for ----


@triton.jit
def _load_pairs(row, h, stride_h, live, R: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The rotated columns of a tile of heads [rows, heads, P] as fp32: first and second of each pair."""
    if INTERLEAVED:
        d = tl.arange(0, 2 * P)[None, None, :]
        x = tl.load(row + h * stride_h + d, mask=live & (d < R), other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], P, 2]))
    else:
        i = tl.arange(0, P)[None, None, :]
        mask = live & (i < R // 2)
        x1 = tl.load(row + h * stride_h + i, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(row + h * stride_h + i + R // 2, mask=mask, other=0.0).to(tl.float32)
    return x1, x2


@triton.jit
def _store_pairs(row, h, stride_h, live, y1, y2, R: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    DTYPE: tl.constexpr = row.dtype.element_ty
    if INTERLEAVED:
        d = tl.arange(0, 2 * P)[None, None, :]
        y = tl.reshape(tl.join(y1, y2), [y1.shape[0], y1.shape[1], 2 * P])
        tl.store(row + h * stride_h + d, y.to(DTYPE), mask=live & (d < R))
    else:
        i = tl.arange(0, P)[None, None, :]
        mask = live & (i < R // 2)
        tl.store(row + h * stride_h + i, y1.to(DTYPE), mask=mask)
        tl.store(row + h * stride_h + i + R // 2, y2.to(DTYPE), mask=mask)


@triton.jit
def _load_rest(row, h, stride_h, live, START: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Columns START .. D of a tile of heads, which nothing rotates, as fp32."""
    d = START + tl.arange(0, P)[None, None, :]
    return tl.load(row + h * stride_h + d, mask=live & (d < D), other=0.0).to(tl.float32)


@triton.jit
def _store_rest(row, h, stride_h, live, y, START: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    d = START + tl.arange(0, P)[None, None, :]
    tl.store(row + h * stride_h + d, y.to(row.dtype.element_ty), mask=live & (d < D))


@triton.jit
def _rotate(x1, x2, c1, c2, s1, s2, DTYPE: tl.constexpr, BACKWARD: tl.constexpr):
    """One rotation, rounded to DTYPE."""
    y1, y2 = turn(x1, x2, c1, c2, s1, s2, BACKWARD)
    return y1.to(DTYPE).to(tl.float32), y2.to(DTYPE).to(tl.float32)


@triton.jit
def _largest(bits):
    """The largest magnitude of each row of a tile [rows, heads, columns]."""
    return tl.max(tl.max(bits, axis=2), axis=1)


@triton.jit
def _pair_bits(y1, y2):
    return tl.maximum(magnitude_bits(y1), magnitude_bits(y2))


@triton.jit
def _encode(y, enc, FP8_MAX: tl.constexpr):
    return saturate(y * enc[:, None, None], FP8_MAX)


@triton.jit
def _norm_pairs(x1, x2, w1, w2, eps, D: tl.constexpr, DTYPE: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """Normed heads, rounded to DTYPE, and 1 / rms; masked columns of x must be 0."""
    rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=2) / D + eps)
    n1, n2 = x1 * rstd[:, :, None], x2 * rstd[:, :, None]
    if ROUND_FIRST:
        n1, n2 = n1.to(DTYPE).to(tl.float32), n2.to(DTYPE).to(tl.float32)
    return (n1 * w1).to(DTYPE).to(tl.float32), (n2 * w2).to(DTYPE).to(tl.float32), rstd


@triton.jit
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    wq_ptr,
    wk_ptr,
    cos_ptr,
    sin_ptr,
    yq_ptr,
    yk_ptr,
    yv_ptr,
    rq_ptr,
    rk_ptr,
    T,
    S,
    stride_b,
    stride_s,
    stride_cos_b,
    stride_cos_s,
    stride_sin_b,
    stride_sin_s,
    eps,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK_HK: tl.constexpr,
    BLOCK_HV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    # One program, ROWS tokens with all their heads; tiles are [token, head, column].
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    PAIRS: tl.constexpr = BLOCK_D // 2
    t32 = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None, None]
    live = t32 < T
    b, s, t = (t32 // S).to(tl.int64), (t32 % S).to(tl.int64), t32.to(tl.int64)
    place = b * stride_b + s * stride_s
    hq, hk = tl.arange(0, BLOCK_HQ)[None, :, None], tl.arange(0, BLOCK_HK)[None, :, None]
    hv = tl.arange(0, BLOCK_HV)[None, :, None]
    live_q, live_k, live_v = live & (hq < HQ), live & (hk < HK), live & (hv < HV)
    q1, q2 = _load_pairs(q_ptr + place, hq, D, live_q, D, PAIRS, INTERLEAVED)
    k1, k2 = _load_pairs(k_ptr + place, hk, D, live_k, D, PAIRS, INTERLEAVED)
    v = _load_rest(v_ptr + place, hv, D, live_v, 0, D, BLOCK_D)
    c1, c2 = _load_pairs(cos_ptr + b * stride_cos_b + s * stride_cos_s, 0, 0, live, D, PAIRS, INTERLEAVED)
    s1, s2 = _load_pairs(sin_ptr + b * stride_sin_b + s * stride_sin_s, 0, 0, live, D, PAIRS, INTERLEAVED)
    wq1, wq2 = _load_pairs(wq_ptr + tl.zeros_like(place), 0, 0, live, D, PAIRS, INTERLEAVED)
    wk1, wk2 = _load_pairs(wk_ptr + tl.zeros_like(place), 0, 0, live, D, PAIRS, INTERLEAVED)
    q1, q2, rq = _norm_pairs(q1, q2, wq1, wq2, eps, D, DTYPE, ROUND_FIRST)
    k1, k2, rk = _norm_pairs(k1, k2, wk1, wk2, eps, D, DTYPE, ROUND_FIRST)
    q1, q2 = _rotate(q1, q2, c1, c2, s1, s2, DTYPE, False)
    k1, k2 = _rotate(k1, k2, c1, c2, s1, s2, DTYPE, False)
    _store_pairs(yq_ptr + t * (HQ * D), hq, D, live_q, q1, q2, D, PAIRS, INTERLEAVED)
    _store_pairs(yk_ptr + t * (HK * D), hk, D, live_k, k1, k2, D, PAIRS, INTERLEAVED)
    _store_rest(yv_ptr + t * (HV * D), hv, D, live_v, v, 0, D, BLOCK_D)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    q_head, k_head = tl.arange(0, BLOCK_HQ)[None, :], tl.arange(0, BLOCK_HK)[None, :]
    tl.store(rq_ptr + token * HQ + q_head, rq, mask=(token < T) & (q_head < HQ))
    tl.store(rk_ptr + token * HK + k_head, rk, mask=(token < T) & (k_head < HK))


@triton.jit
def _head_gradients(
    dy_row, x_row, r_ptr, w1, w2, c1, c2, s1, s2, live, t, stride_h, H: tl.constexpr, BLOCK_H: tl.constexpr,
    D: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The gradients of one token's heads before their norm, rounded, and what they add to the weight's."""
    DTYPE: tl.constexpr = dy_row.dtype.element_ty
    h = tl.arange(0, BLOCK_H)[None, :, None].to(tl.int64)
    is_live = live & (h < H)
    d1, d2 = _load_pairs(dy_row, h, stride_h, is_live, D, PAIRS, INTERLEAVED)
    x1, x2 = _load_pairs(x_row, h, D, is_live, D, PAIRS, INTERLEAVED)
    d1, d2 = _rotate(d1, d2, c1, c2, s1, s2, DTYPE, True)
    rstd = tl.load(r_ptr + t * H + h, mask=is_live, other=0.0)
    n1, n2 = x1 * rstd, x2 * rstd
    g1, g2 = d1 * w1, d2 * w2
    mean = (tl.sum(g1 * n1 + g2 * n2, axis=2) / D)[:, :, None]
    dx1, dx2 = (g1 - n1 * mean) * rstd, (g2 - n2 * mean) * rstd
    # A masked head is 0 * NaN where w or a table holds one: it must not count.
    dx1, dx2 = tl.where(is_live, dx1, 0.0), tl.where(is_live, dx2, 0.0)
    dw1, dw2 = tl.where(is_live, d1 * n1, 0.0), tl.where(is_live, d2 * n2, 0.0)
    return dx1.to(DTYPE).to(tl.float32), dx2.to(DTYPE).to(tl.float32), dw1, dw2


@triton.jit
def _backward_kernel(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    q_ptr,
    k_ptr,
    wq_ptr,
    wk_ptr,
    rq_ptr,
    rk_ptr,
    cos_ptr,
    sin_ptr,
    grad_ptr,
    code_ptr,
    scale_ptr,
    dw_ptr,
    T,
    S,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_b,
    stride_s,
    stride_cos_b,
    stride_cos_s,
    stride_sin_b,
    stride_sin_s,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK_HK: tl.constexpr,
    BLOCK_HV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POW2: tl.constexpr,
):
    # A program walks over tokens and adds up what they give to the weights' gradients, dq's before dk's.
    PAIRS: tl.constexpr = BLOCK_D // 2
    W: tl.constexpr = (HQ + HK + HV) * D
    one = tl.zeros([1, 1, 1], dtype=tl.int64)
    always = one == 0
    hq, hk = tl.arange(0, BLOCK_HQ)[None, :, None], tl.arange(0, BLOCK_HK)[None, :, None]
    hv = tl.arange(0, BLOCK_HV)[None, :, None]
    live_q, live_k, live_v = hq < HQ, hk < HK, hv < HV
    wq1, wq2 = _load_pairs(wq_ptr + one, 0, 0, always, D, PAIRS, INTERLEAVED)
    wk1, wk2 = _load_pairs(wk_ptr + one, 0, 0, always, D, PAIRS, INTERLEAVED)
    dwq1 = tl.zeros([1, BLOCK_HQ, PAIRS], dtype=tl.float32)
    dwq2 = tl.zeros([1, BLOCK_HQ, PAIRS], dtype=tl.float32)
    dwk1 = tl.zeros([1, BLOCK_HK, PAIRS], dtype=tl.float32)
    dwk2 = tl.zeros([1, BLOCK_HK, PAIRS], dtype=tl.float32)
    for token in range(tl.program_id(0), T, tl.num_programs(0)):
        t = one + token
        b, s = t // S, t % S
        c1, c2 = _load_pairs(cos_ptr + b * stride_cos_b + s * stride_cos_s, 0, 0, always, D, PAIRS, INTERLEAVED)
        s1, s2 = _load_pairs(sin_ptr + b * stride_sin_b + s * stride_sin_s, 0, 0, always, D, PAIRS, INTERLEAVED)
        place = b * stride_b + s * stride_s
        q1, q2, a1, a2 = _head_gradients(
            dq_ptr + b * stride_qb + s * stride_qs, q_ptr + place, rq_ptr, wq1, wq2, c1, c2, s1, s2, always, t,
            stride_qh, HQ, BLOCK_HQ, D, PAIRS, INTERLEAVED,
        )  # fmt: skip
        dwq1 += a1
        dwq2 += a2
        k1, k2, a1, a2 = _head_gradients(
            dk_ptr + b * stride_kb + s * stride_ks, k_ptr + place, rk_ptr, wk1, wk2, c1, c2, s1, s2, always, t,
            stride_kh, HK, BLOCK_HK, D, PAIRS, INTERLEAVED,
        )  # fmt: skip
        dwk1 += a1
        dwk2 += a2
        v = _load_rest(dv_ptr + b * stride_vb + s * stride_vs, hv.to(tl.int64), stride_vh, live_v, 0, D, BLOCK_D)
        if grad_ptr is not None:
            row = grad_ptr + t * W
            _store_pairs(row, hq, D, live_q, q1, q2, D, PAIRS, INTERLEAVED)
            _store_pairs(row + HQ * D, hk, D, live_k, k1, k2, D, PAIRS, INTERLEAVED)
            _store_rest(row + (HQ + HK) * D, hv, D, live_v, v, 0, D, BLOCK_D)
        if code_ptr is not None:
            bits = tl.maximum(_largest(_pair_bits(q1, q2)), _largest(_pair_bits(k1, k2)))
            bits = tl.maximum(bits, _largest(magnitude_bits(v)))
            enc = multiplier_from_bits(bits, FP8_MAX, POW2, ZERO_ROW)
            row = code_ptr + t * W
            q1, q2 = _encode(q1, enc, FP8_MAX), _encode(q2, enc, FP8_MAX)
            _store_pairs(row, hq, D, live_q, q1, q2, D, PAIRS, INTERLEAVED)
            k1, k2 = _encode(k1, enc, FP8_MAX), _encode(k2, enc, FP8_MAX)
            _store_pairs(row + HQ * D, hk, D, live_k, k1, k2, D, PAIRS, INTERLEAVED)
            _store_rest(row + (HQ + HK) * D, hv, D, live_v, _encode(v, enc, FP8_MAX), 0, D, BLOCK_D)
            tl.store(scale_ptr + token + tl.arange(0, 1), tl.div_rn(1.0, enc))
    out = dw_ptr + (one + tl.program_id(0)) * (2 * D)
    q1, q2 = tl.sum(dwq1, axis=1)[:, None, :], tl.sum(dwq2, axis=1)[:, None, :]
    _store_pairs(out, 0, 0, always, q1, q2, D, PAIRS, INTERLEAVED)
    k1, k2 = tl.sum(dwk1, axis=1)[:, None, :], tl.sum(dwk2, axis=1)[:, None, :]
    _store_pairs(out + D, 0, 0, always, k1, k2, D, PAIRS, INTERLEAVED)


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
    config = config or default_config(w)
    if b * s:
        with on_device(qkv_BSW):
            _forward_kernel[(triton.cdiv(b * s, config.rows),)](
                *heads.parts(qkv_BSW, width),
                *weights,
                cos,
                sin,
                *out,
                *rstds,
                b * s,
                s,
                *qkv_BSW.stride()[:2],
                *(stride for table in (cos, sin) for stride in _table_strides(table)),
                norm.eps,
                **_sizes(heads, width),
                ROWS=config.rows,
                ROUND_FIRST=norm.rounding == "llama",
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
    options: GradOptions | None = None,
    config: BackwardConfig | None = None,
) -> NormedHeadsGrads:
    """Gradients of `qk_norm_rope` at its merged rows, [T, W], and at both weights, from those of q, k, v.

    `grads` are [B, S, H, D] of any strides, D dense; `rstds` are the forward's, `tables` its cos and sin.
    """
    options = options or GradOptions()
    dq = grads[0]
    for name, x in zip(("dq", "dk", "dv"), grads, strict=True):
        check_operand(name, x, 4)
        if (x.shape[:2], x.shape[3], x.dtype, x.device) != (dq.shape[:2], dq.shape[3], dq.dtype, dq.device):
            raise ConfigError(f"{name} must be like dq, {tuple(dq.shape)} {dq.dtype}, but for its heads; got {x.shape}")
    heads = Heads(q=dq.shape[2], k=grads[1].shape[2], v=grads[2].shape[2], convention=convention)
    width = _check(qkv_BSW, weights, tables, heads)
    b, s, w = qkv_BSW.shape
    for name, rstd, h in (("rstd_q", rstds[0], heads.q), ("rstd_k", rstds[1], heads.k)):
        check_shape(name, rstd, (b * s, h), qkv_BSW)
    if not runs_kernel(dq, _backward_kernel):
        return qk_norm_rope_backward_ref(grads, qkv_BSW, weights, rstds, tables, heads, options)
    grad = dq.new_empty((b * s, w)) if options.write else None
    q = dq.new_empty((b * s, w), dtype=options.fp8) if options.fp8 else None
    scale = dq.new_empty(b * s, dtype=torch.float32) if options.fp8 else None
    dws = [torch.zeros_like(weight) for weight in weights]
    if b * s == 0:
        return NormedHeadsGrads(grad, q, scale, dws[0], dws[1])
    config = config or default_backward_config(w)
    num_programs = min(b * s, config.programs_per_sm * num_sms(dq))
    partials = dq.new_empty((num_programs, 2 * width), dtype=torch.float32)
    with on_device(dq):
        _backward_kernel[(num_programs,)](
            *grads,
            *heads.parts(qkv_BSW, width)[:2],
            *weights,
            *(rstd.contiguous() for rstd in rstds),
            *tables,
            grad,
            q,
            scale,
            partials,
            b * s,
            s,
            *(stride for x in grads for stride in x.stride()[:3]),
            *qkv_BSW.stride()[:2],
            *(stride for table in tables for stride in _table_strides(table)),
            **_sizes(heads, width),
            FP8_MAX=check_fp8("fp8", options.fp8) if options.fp8 else 1.0,
            POW2=options.pow2,
            num_warps=config.num_warps,
        )
        both = partials.new_empty(2 * width)
        sum_programs_kernel[(triton.cdiv(2 * width, 32),)](
            partials, both, num_programs, 2 * width, BLOCK_P=32, BLOCK_D=32, num_warps=4
        )
    dws = [part.to(w.dtype) for part, w in zip(both.split(width), weights, strict=True)]
    return NormedHeadsGrads(grad, q, scale, dws[0], dws[1])


def _sizes(heads: Heads, width: int) -> dict[str, object]:
    """The constexprs that follow from the heads."""
    return {
        "HQ": heads.q,
        "HK": heads.k,
        "HV": heads.v,
        "D": width,
        "BLOCK_HQ": triton.next_power_of_2(heads.q),
        "BLOCK_HK": triton.next_power_of_2(heads.k),
        "BLOCK_HV": triton.next_power_of_2(heads.v),
        "BLOCK_D": triton.next_power_of_2(width),
        "INTERLEAVED": heads.convention == "interleaved",
    }


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
