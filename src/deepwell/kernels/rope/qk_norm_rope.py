"""RMSNorm of q and k, then their rotary embedding, of merged q, k, v rows in one pass each way.

    n = x / sqrt(mean x^2 + eps)                  u = w * round(n) ("llama") or w * n ("torch"), rounded   y = rope(u)
    backward   du = the transposed rotation of dy, rounded      g = du * w
               dx = rstd * (g - n * mean(g * n))                dw = sum of du * n over all that share w
    The mean is over each head, whose weight [D] all heads share (Qwen3, Gemma 3), or over all heads of a token, with
    a weight of their width (OLMo 2, OLMoE): the width of the weights says which.
    v is copied; dqkv holds dq, dk, dv where the forward found q, k, v; (q, scale) = its FP8 rows, one scale a token

Numerics: fp32 inside, rounded where norm and rotation apart would round: u, y, du, dx. dw is deterministic: a program
    adds its tokens in order, a second small kernel the programs. The FP8 rows are bit-equal to quantizing dqkv.
Cost: memory bound; bytes per element of a row in bf16: forward 2 + 2, backward 2 + 2 + 2 (v: 2 + 2), to FP8 2 + 2 + 1.
    Apart, the norms read and write q and k once more each way, and the merged gradient is put together by a copy.
    Floors at 4.25 TB/s: 16384 tokens of 48 heads x 128: forward 95 us, backward 134 us, to FP8 110 us.
"""

# Shapes: B batch, S sequence, T = B * S tokens, H heads, D head width, W row width, P programs of the backward.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.checks import check_shape, check_vector
from deepwell.kernels.device.fp8 import row_scale
from deepwell.kernels.device.triton_support import (
    cdiv,
    launch,
    next_power_of_2,
    num_sms,
    on_device,
    runs_kernel,
    runs_ptx,
    tl,
    triton,
)
from deepwell.kernels.norm.rms_norm import ROUNDINGS, BackwardConfig
from deepwell.kernels.quantize.fp8 import RowOptions
from deepwell.kernels.rope.head_tiles import (
    heads_of,
    largest_of_groups,
    load_groups,
    load_pairs,
    load_two,
    row_of,
    store_groups,
    store_groups_codes,
    store_two,
)
from deepwell.kernels.rope.normed_tiles import head_gradients, norm_and_rotate, row_gradients, zeros_like
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

# Columns of q, of a norm of all heads: 40 heads of 128 with their weights' gradients spill 144 bytes.
MAX_WHOLE = 4096


class NormedHeads(NamedTuple):
    """What the forward gives: q and k normed and rotated, v, each [B, S, H, D], and 1 / rms of each norm.

    That is [T, H], and [T, 1] of norms of all heads.
    """

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
        rows = _normed_together(x, w)
        rstd = torch.rsqrt(rows.float().square().mean(-1) + norm.eps)
        n = rows.float() * rstd[..., None]
        n = n.to(x.dtype).float() if norm.rounding == "llama" else n
        out.append(rotate_ref((n * w.float()).to(x.dtype).view(x.shape), cos, sin, heads.convention))
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
        du = _normed_together(rotate_ref(dy, *tables, heads.convention, backward=True), w).float()
        r = rstd.unflatten(0, x.shape[:2])[..., None]
        n, g = _normed_together(x, w).float() * r, du * w.float()
        found.append(((g - n * (g * n).mean(-1, keepdim=True)) * r).to(dy.dtype).view(x.shape))
        dws.append((du * n).sum((0, 1, 2)).to(w.dtype))
    still = (torch.ones_like(tables[0]), torch.zeros_like(tables[1]))  # a rotation by nothing puts the rows together
    merged = rope_qkv_backward_ref((*found, grads[2]), *still, heads, options)
    return NormedHeadsGrads(*merged, *dws)


def _normed_together(x_BSHD: Tensor, weight: Tensor) -> Tensor:
    """Rows as long as the weight, [B, S, H, D] or [B, S, 1, H * D]."""
    together = len(weight) // x_BSHD.shape[3]
    return x_BSHD.reshape(*x_BSHD.shape[:2], x_BSHD.shape[2] // together, len(weight))


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


def default_backward_config(heads: Heads, width: int, *, is_whole: bool = False) -> BackwardConfig:
    """48 to 96 elements of a row a thread, the more the fewer heads k has: each thread takes four columns of some.

    16 warps of 128 registers then hold gradient, tables, weights and their gradients without a spill, 8 warps where
    threads have eight columns in each half of a head. Not timed yet. With norms of all heads together a thread also
    has the weights of all its heads and their gradients: 24 elements.
    """
    power = next_power_of_2
    if is_whole:
        num_warps = min(16, power(cdiv(heads.total * width, 32 * 24)))
        return BackwardConfig(num_warps=num_warps, programs_per_sm=16 // num_warps, num_stages=2)
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
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, yq_ptr, yk_ptr, yv_ptr, rq_ptr, rk_ptr,
    T, S, stride_b, stride_s, stride_cos_b, stride_cos_s, stride_sin_b, stride_sin_s, eps,
    HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr, ROUND_FIRST: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    # One program, one token with all its heads. WHOLE: one norm of all heads of q, and one of k's.
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
    norm_and_rotate(
        q, h, live, wq_ptr, c1, c2, s1, s2, yq_ptr + t * (HQ * D), rq_ptr + t * (1 if WHOLE else HQ), eps, HQ, D, PAIRS,
        INTERLEAVED, RUN, WHOLE, ROUND_FIRST, ASM,
    )  # fmt: skip
    norm_and_rotate(
        k, h, live, wk_ptr, c1, c2, s1, s2, yk_ptr + t * (HK * D), rk_ptr + t * (1 if WHOLE else HK), eps, HK, D, PAIRS,
        INTERLEAVED, RUN, WHOLE, ROUND_FIRST, ASM,
    )  # fmt: skip


@triton.jit
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, q_ptr, k_ptr, wq_ptr, wk_ptr, rq_ptr, rk_ptr, cos_ptr, sin_ptr, grad_ptr, code_ptr,
    scale_ptr, dw_ptr,
    T, S, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_b,
    stride_s, stride_cos_b, stride_cos_s, stride_sin_b, stride_sin_s,
    HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr, FP8_MAX: tl.constexpr,
    NUM_STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    # A program walks over tokens and adds up what they give to the weights' gradients, dq's before dk's.
    HALF: tl.constexpr = D // 2
    W: tl.constexpr = (HQ + HK + HV) * D
    h, live = heads_of(GROUP, GROUP), tl.full([1, 1, 1, 1], True, tl.int1)
    if WHOLE:
        wq = load_groups(wq_ptr, h, None, live, HQ, D, PAIRS, INTERLEAVED, RUN)
        wk = load_groups(wk_ptr, h, None, live, HK, D, PAIRS, INTERLEAVED, RUN)
    else:
        wq = load_two(wq_ptr, h, 0, live, HALF, D, PAIRS, INTERLEAVED, RUN)
        wk = load_two(wk_ptr, h, 0, live, HALF, D, PAIRS, INTERLEAVED, RUN)
    dwq, dwk = zeros_like(wq), zeros_like(wk)
    for token in tl.range(tl.program_id(0), T, tl.num_programs(0), num_stages=NUM_STAGES):
        t32 = tl.cast(token, tl.int32)  # the interpreter's token is a plain int
        t, b, s = t32.to(tl.int64), (t32 // S).to(tl.int64), (t32 % S).to(tl.int64)
        row = row_of(cos_ptr, s, b, s, stride_cos_b, stride_cos_s)
        c1, c2 = load_pairs(row, h, 0, live, D, PAIRS, INTERLEAVED, RUN, ASM)
        row = row_of(sin_ptr, s, b, s, stride_sin_b, stride_sin_s)
        s1, s2 = load_pairs(row, h, 0, live, D, PAIRS, INTERLEAVED, RUN, ASM)
        row, x_row = row_of(dq_ptr, t, b, s, stride_qb, stride_qs), row_of(q_ptr, t, b, s, stride_b, stride_s)
        if WHOLE:
            q, dwq = row_gradients(
                row, h, stride_qh, live, x_row, rq_ptr + t, wq, c1, c2, s1, s2, dwq, HQ, D, PAIRS, INTERLEAVED, RUN, ASM
            )
        else:
            q, dwq = head_gradients(
                row, h, stride_qh, live, x_row, rq_ptr + t * HQ, wq, c1, c2, s1, s2, dwq, HQ, D, PAIRS, INTERLEAVED,
                RUN, NUM_STAGES, ASM,
            )  # fmt: skip
        row, x_row = row_of(dk_ptr, t, b, s, stride_kb, stride_ks), row_of(k_ptr, t, b, s, stride_b, stride_s)
        if WHOLE:
            k, dwk = row_gradients(
                row, h, stride_kh, live, x_row, rk_ptr + t, wk, c1, c2, s1, s2, dwk, HK, D, PAIRS, INTERLEAVED, RUN, ASM
            )
        else:
            k, dwk = head_gradients(
                row, h, stride_kh, live, x_row, rk_ptr + t * HK, wk, c1, c2, s1, s2, dwk, HK, D, PAIRS, INTERLEAVED,
                RUN, NUM_STAGES, ASM,
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
            enc, scale = row_scale(largest_of_groups(q + k + v, ASM), FP8_MAX)
            e, row = enc[:, None, None, None], code_ptr + t * W
            store_groups_codes(row, h, live, q, e, HQ, D, PAIRS, INTERLEAVED, RUN, ASM)
            store_groups_codes(row + HQ * D, h, live, k, e, HK, D, PAIRS, INTERLEAVED, RUN, ASM)
            store_groups_codes(row + (HQ + HK) * D, h, live, v, e, HV, D, PAIRS, INTERLEAVED, RUN, ASM)
            tl.store(scale_ptr + t + tl.arange(0, 1), scale)
    out, one = dw_ptr + tl.program_id(0).to(tl.int64) * ((HQ + HK if WHOLE else 2) * D), heads_of(1, 1)
    if WHOLE:
        store_groups(out, h, live, dwq, HQ, D, PAIRS, INTERLEAVED, RUN)
        store_groups(out + HQ * D, h, live, dwk, HK, D, PAIRS, INTERLEAVED, RUN)
    else:
        dwq1, dwq2 = tl.sum(dwq[0], axis=1)[:, None, :, :], tl.sum(dwq[1], axis=1)[:, None, :, :]
        dwk1, dwk2 = tl.sum(dwk[0], axis=1)[:, None, :, :], tl.sum(dwk[1], axis=1)[:, None, :, :]
        store_two(out, one, 0, live, dwq1, dwq2, HALF, D, PAIRS, INTERLEAVED, RUN)
        store_two(out + D, one, 0, live, dwk1, dwk2, HALF, D, PAIRS, INTERLEAVED, RUN)


@triton.jit
def _sum_kernel(partial_ptr, dwq_ptr, dwk_ptr, P, NQ, NK, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    # The programs' sums, rows of NQ + NK; the second number of a program says whose weight.
    is_k = tl.program_id(1)
    d, limit = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D), tl.where(is_k == 1, NK, NQ)
    total = tl.zeros([BLOCK_P, BLOCK_D], dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        place = p[:, None] * (NQ + NK) + is_k * NQ + d[None, :]
        total += tl.load(partial_ptr + place, mask=(p[:, None] < P) & (d[None, :] < limit), other=0.0)
    dw = tl.sum(total, axis=0)
    if is_k == 0:
        tl.store(dwq_ptr + d, dw.to(dwq_ptr.dtype.element_ty), mask=d < NQ)
    else:
        tl.store(dwk_ptr + d, dw.to(dwk_ptr.dtype.element_ty), mask=d < NK)


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
    """Norm and rotate the heads of q and k of merged rows.

    `weights` are those of q's and k's norm: [D], or [H * D] of one norm of all heads. `cos` and `sin` are [S, D],
    [1, S, D] or [B, S, D]: whole heads are rotated. Raises ConfigError on a wrong argument, UnsupportedError on heads
    that lie otherwise or rows that registers do not hold.
    """
    norm = norm or QkNorm()
    width, is_whole = _check(qkv_BSW, weights, (cos, sin), heads)
    b, s, w = qkv_BSW.shape
    if not runs_kernel(qkv_BSW, _forward_kernel):
        return qk_norm_rope_ref(qkv_BSW, weights, cos, sin, heads, norm)
    out = [qkv_BSW.new_empty((b, s, h, width)) for h in (heads.q, heads.k, heads.v)]
    rstds = [qkv_BSW.new_empty((b * s, n), dtype=torch.float32) for n in norms_of(qkv_BSW, weights, heads)]
    config = config or default_forward_config(w)
    if b * s:
        with on_device(qkv_BSW):
            launch(_forward_kernel, (b * s,))(
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
                **sizes(heads, width, is_whole=is_whole, num_warps=config.num_warps),
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
    width, is_whole = _check(qkv_BSW, weights, tables, heads)
    b, s, w = qkv_BSW.shape
    for name, rstd, n in zip(("rstd_q", "rstd_k"), rstds, norms_of(qkv_BSW, weights, heads), strict=True):
        check_shape(name, rstd, (b * s, n), qkv_BSW)
    if not runs_kernel(dq, _backward_kernel):
        return qk_norm_rope_backward_ref(grads, qkv_BSW, weights, rstds, tables, heads, options)
    rows = options.empty_rows(dq, b * s, w)
    dws = [torch.empty_like(weight) for weight in weights]
    if b * s == 0:
        return NormedHeadsGrads(*rows, dws[0].zero_(), dws[1].zero_())
    config = config or default_backward_config(heads, width, is_whole=is_whole)
    num_programs = min(b * s, config.programs_per_sm * num_sms(dq))
    n_q, n_k = map(len, weights)
    partials = dq.new_empty((num_programs, n_q + n_k), dtype=torch.float32)
    with on_device(dq):
        launch(_backward_kernel, (num_programs,))(
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
            **sizes(heads, width, is_whole=is_whole, num_warps=config.num_warps),
            FP8_MAX=options.fp8_max,
            NUM_STAGES=config.num_stages,
            ASM=runs_ptx(dq, _backward_kernel),
            num_warps=config.num_warps,
            maxnreg=config.max_registers,
        )
        # Rows of one sector, and all of them on their way at once or nearly.
        grid = (cdiv(max(n_q, n_k), 8), 2)
        launch(_sum_kernel, grid)(partials, *dws, num_programs, n_q, n_k, BLOCK_P=256, BLOCK_D=8, num_warps=8)
    return NormedHeadsGrads(*rows, *dws)


def norms_of(qkv: Tensor, weights: tuple[Tensor, Tensor], heads: Heads) -> tuple[int, int]:
    """How many norms a token has of q, and how many of k."""
    width = qkv.shape[-1] // heads.total
    return heads.q * width // len(weights[0]), heads.k * width // len(weights[1])


def is_of_all_heads(heads: Heads, width: int, weights: Sequence[Tensor]) -> bool:
    """Whether weights are those of one norm of all heads of q, and one of k's."""
    of_all = [(h * width,) for h in (heads.q, heads.k)]
    return of_all != [(width,)] * 2 and [tuple(weight.shape) for weight in weights] == of_all


def sizes(heads: Heads, width: int, *, num_warps: int, is_whole: bool = False) -> dict[str, int | bool]:
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
        "WHOLE": is_whole,
    }


def _row_strides(x: Tensor) -> tuple[int | None, int]:
    """Distances of [B, S, ...] from sequence to sequence, None where they follow each other, and row to row."""
    between, step = x.stride()[:2]
    return None if between == x.shape[1] * step or len(x) == 1 else between, step


def _strides_of(table: Tensor) -> tuple[int | None, int]:
    between, step = table_strides(table)
    return between or None, step


def _check(
    qkv_BSW: Tensor, weights: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], heads: Heads
) -> tuple[int, bool]:
    """The width of a head, whether one norm is of all heads.

    Raises ConfigError or UnsupportedError on what the kernels do not take.
    """
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
    is_whole = is_of_all_heads(heads, width, weights)
    for name, weight, h in zip(("w_q", "w_k"), weights, (heads.q, heads.k), strict=True):
        check_vector(name, weight, h * width if is_whole else width, qkv_BSW)
    if is_whole and max(map(len, weights)) > MAX_WHOLE:
        raise UnsupportedError(f"weights of norms of all heads have at most {MAX_WHOLE} columns")
    return width, is_whole
