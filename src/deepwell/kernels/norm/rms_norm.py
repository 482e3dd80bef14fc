"""RMSNorm and LayerNorm, forward and backward in one pass each, a residual added before and FP8 rows after.

    s = x + r (rounded to x's dtype; s = x without a residual)      rstd = 1 / sqrt(mean_d s^2 + eps)      n = s * rstd
    y = w * round(n) ("llama": n is rounded to x's dtype first) or round(w * n) ("torch": F.rms_norm)
    dx = rstd * (g - n * mean_d(g * n)) + dr,   g = dy * w;        dw = sum_t dy * n  (n in fp32)
    LayerNorm takes the mean off: s - mean_d s for s in rstd and n, + b in y, - rstd * mean_d(g) in dx;  db = sum_t dy
    (q, scale) = FP8 rows of y or dx as `quantize_rows` makes them of the rounded values
    x before a residual is added, and dy, may come with factors of their rows (`row_factors`)

Numerics: fp32 inside; one rounding of each result. (q, scale) are bit-equal to quantizing y (dx). dw is deterministic:
    each program adds its rows in order, a second small kernel adds the programs in order.
Cost: memory bound; bytes per element in bf16: forward x 2, residual 2 + 2 for the sum, y 2, q 1; backward dy 2, x 2,
    dr 2, dx 2, q 1. With residual and q only the forward moves 7 B: 16384 x 4096 in 111 us at 4.25 TB/s; the backward
    with dr, dx and q 9 B: 142 us.
"""

# ruff: noqa: RET505 (the compiler reads what follows a return; only a whole if-else chain of constexprs ends it)
# Shapes: T tokens, D model width, P programs of the backward kernel.

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.checks import check_matrix, check_shape, check_vector
from deepwell.kernels.device.bf16_words import encoded, floats, product, product_plus, rounded, row_bits
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
from deepwell.kernels.gemm.row_factors import check_factor, factor_like, times_factor, times_rows
from deepwell.kernels.quantize.fp8 import RowConfig, RowOptions

# A row lies in registers as a whole.
MAX_COLUMNS = 32768
ROUNDINGS = ("llama", "torch")


class Normed(NamedTuple):
    """What a norm's forward gives; None for what was not asked for."""

    y: Tensor | None
    q: Tensor | None
    scale: Tensor | None
    # x + residual: the new residual stream, and the input that backward needs.
    total: Tensor | None
    rstd: Tensor
    mean: Tensor | None


class NormGrads(NamedTuple):
    """What a norm's backward gives; None for what was not asked for."""

    dx: Tensor | None
    q: Tensor | None
    scale: Tensor | None
    dw: Tensor
    db: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NormOptions(RowOptions):
    """What to compute and to write of y (dx); the same for forward and backward of one norm."""

    eps: float = 1e-6
    rounding: str = "llama"
    center: bool = False

    def __post_init__(self) -> None:
        RowOptions.__post_init__(self)
        if self.rounding not in ROUNDINGS:
            raise ConfigError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {self.rounding!r}")


# ---- reference: what the kernels must compute, in the plainest torch ----


def norm_ref(
    x_TD: Tensor,
    w_D: Tensor,
    b_D: Tensor | None,
    residual_TD: Tensor | None,
    options: NormOptions,
    factor_T: Tensor | None = None,
) -> Normed:
    total = x_TD if residual_TD is None else (times_rows(x_TD, factor_T) + residual_TD.float()).to(x_TD.dtype)
    x = total.float()
    mean = x.mean(1) if options.center else None
    if mean is not None:
        x = x - mean[:, None]
    rstd = torch.rsqrt(x.square().mean(1) + options.eps)
    n = x * rstd[:, None]
    if options.rounding == "llama":
        n = n.to(x_TD.dtype).float()
    y = n * w_D.float()
    if b_D is not None:
        y = y + b_D.float()
    written = options.rows_of(y.to(x_TD.dtype))
    return Normed(*written, None if residual_TD is None else total, rstd, mean)


def norm_backward_ref(
    dy_TD: Tensor,
    saved: Normed,
    w_D: Tensor,
    dr_TD: Tensor | None,
    options: NormOptions,
    factor_T: Tensor | None = None,
) -> NormGrads:
    """Reference for `norm_backward`; `saved.total` is the input of the norm."""
    assert saved.total is not None
    x, dy = saved.total.float(), times_rows(dy_TD, factor_T)
    if saved.mean is not None:
        x = x - saved.mean[:, None]
    n = x * saved.rstd[:, None]
    g = dy * w_D.float()
    dx = g - n * (g * n).mean(1, keepdim=True)
    if options.center:
        dx = dx - g.mean(1, keepdim=True)
    dx = dx * saved.rstd[:, None]
    if dr_TD is not None:
        dx = dx + dr_TD.float()
    db = dy.sum(0).to(w_D.dtype) if options.center else None
    return NormGrads(*options.rows_of(dx.to(saved.total.dtype)), (dy * n).sum(0).to(w_D.dtype), db)


# ---- configs ----


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardConfig:
    """Programs stay on their multiprocessor and walk over rows, so that dw is summed in registers."""

    num_warps: int
    programs_per_sm: int
    # Loads of the next rows that are under way while this one is computed (through shared memory); 1: none.
    num_stages: int = 1

    @property
    def max_registers(self) -> int:
        """What a thread may have for all programs to be there at once: a second wave would run nearly alone."""
        return min(255, 65536 // (32 * self.num_warps * self.programs_per_sm) // 8 * 8)


def default_forward_config(columns: int) -> RowConfig:
    """Sixteen elements a thread or more."""
    return RowConfig(tile=0, num_warps=4 if columns <= 2048 else 8 if columns <= 8192 else 16)


def default_backward_config(columns: int) -> BackwardConfig:
    """The fastest of 16384 rows in bf16 to dx and FP8 on an H200 (`benchmarks/bench_rows.py --only rms_norm`).

    4096 columns: 163 us, 174 with 16 warps twice; 2048: 87 us, 119 with 16 warps and three stages; floors 142 and 71.
    Wider rows keep eight elements of each row a thread: weight, its gradient and three rows fit 64 registers.
    """
    width = next_power_of_2(columns)
    if width <= 1024:
        return BackwardConfig(num_warps=4, programs_per_sm=8, num_stages=2)
    if width == 2048:
        return BackwardConfig(num_warps=4, programs_per_sm=4, num_stages=2)
    if width == 4096:
        return BackwardConfig(num_warps=8, programs_per_sm=1, num_stages=3)
    return BackwardConfig(num_warps=min(32, width // 256), programs_per_sm=1, num_stages=2)


# ---- kernels: a pointer that is None is an operand or a result that was not asked for ----


@triton.jit
def within(d, D, FULL: tl.constexpr):
    """The mask of columns; FULL: all of them are there, and the compiler drops it."""
    if FULL:
        return tl.full(d.shape, True, tl.int1)
    else:
        return d < D


@triton.jit
def row_start(t, D, BLOCK: tl.constexpr, FULL: tl.constexpr):
    if FULL:
        return t * BLOCK
    else:
        return t * D


@triton.jit
def mean_of(total, D, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """total / D; FULL: D is BLOCK, a power of two, and a product has the same bits."""
    if FULL:
        return total * (1.0 / BLOCK)
    else:
        return total / D


@triton.jit
def _norm_kernel(
    x_ptr,
    factor_ptr,
    residual_ptr,
    w_ptr,
    b_ptr,
    total_ptr,
    y_ptr,
    q_ptr,
    scale_ptr,
    mean_ptr,
    rstd_ptr,
    T,
    D,
    stride_xt,
    stride_rt,
    eps,
    FP8_MAX: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    RUN: tl.constexpr,
    ASM: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    live = within(t, T, ROWS == 1)
    here = within(d, D, FULL)
    mask = live[:, None] & here[None, :]
    packed = t[:, None] * D + d[None, :]
    x = tl.load(x_ptr + t[:, None] * stride_xt + d[None, :], mask=mask, other=0.0)
    w = tl.load(w_ptr + d, mask=here, other=0.0)[None, :]
    if residual_ptr is not None:
        r = tl.load(residual_ptr + t[:, None] * stride_rt + d[None, :], mask=mask, other=0.0)
        if factor_ptr is not None:
            factor = tl.load(factor_ptr + t, mask=live, other=0.0)[:, None]
            x = product_plus(x, factor_like(x, factor), r, ASM)
        else:
            # The compiler adds two at a time in bf16, to the same bits.
            x = (x.to(tl.float32) + r.to(tl.float32)).to(DTYPE)
        tl.store(total_ptr + packed, x, mask=mask)
    x = floats(x, ASM)
    if mean_ptr is not None:
        mean = mean_of(tl.sum(x, axis=1), D, BLOCK, FULL)
        tl.store(mean_ptr + t, mean, mask=live)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(mean_of(tl.sum(x * x, axis=1), D, BLOCK, FULL) + eps)
    tl.store(rstd_ptr + t, rstd, mask=live)
    n = x * rstd[:, None]
    if ROUND_FIRST:
        n = rounded(n, DTYPE, ASM)
    if ROUND_FIRST and b_ptr is None and w.dtype == DTYPE:
        y = product(n, w, ASM)
    else:
        y = floats(n, ASM) * floats(w, ASM)
        if b_ptr is not None:
            y += floats(tl.load(b_ptr + d, mask=here, other=0.0), ASM)[None, :]
        y = rounded(y, DTYPE, ASM)
    if y_ptr is not None:
        tl.store(y_ptr + packed, y, mask=mask)
    if q_ptr is not None:
        # A masked column holds 0 * rstd = NaN where rstd is not finite; the whole row is NaN then.
        enc, scale = row_scale(row_bits(y, RUN, ASM), FP8_MAX)
        tl.store(q_ptr + packed, encoded(y, enc[:, None], q_ptr.dtype.element_ty, ASM, True), mask=mask)
        tl.store(scale_ptr + t, scale, mask=live)


@triton.jit
def _norm_backward_kernel(
    dy_ptr,
    factor_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dr_ptr,
    dx_ptr,
    q_ptr,
    scale_ptr,
    dw_ptr,
    db_ptr,
    T,
    D,
    stride_dyt,
    stride_xt,
    stride_drt,
    FP8_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    DENSE: tl.constexpr,
    FULL: tl.constexpr,
    RUN: tl.constexpr,
    ASM: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    # Runs of 16 bytes of bf16 also of FP8 values, which so stay with their threads.
    d = tl.max_contiguous(tl.arange(0, BLOCK), RUN)
    mask = within(d, D, FULL)
    w = tl.load(w_ptr + d, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    if db_ptr is not None:
        db = tl.zeros([BLOCK], dtype=tl.float32)
    for row in tl.range(tl.program_id(0), T, tl.num_programs(0), num_stages=NUM_STAGES):
        t = tl.cast(row, tl.int64)  # the interpreter's row is a plain int
        place = row_start(t, D, BLOCK, FULL) + d
        if DENSE:
            dy_at, x_at, dr_at = place, place, place
        else:
            dy_at, x_at, dr_at = t * stride_dyt + d, t * stride_xt + d, t * stride_drt + d
        dy = floats(times_factor(tl.load(dy_ptr + dy_at, mask=mask, other=0.0), factor_ptr, t, ASM), ASM)
        x = floats(tl.load(x_ptr + x_at, mask=mask, other=0.0), ASM)
        rstd = tl.load(rstd_ptr + t)
        if dr_ptr is not None:
            dr = floats(tl.load(dr_ptr + dr_at, mask=mask, other=0.0), ASM)
        if mean_ptr is not None:
            x = tl.where(mask, x - tl.load(mean_ptr + t), 0.0)
        n = x * rstd
        g = dy * w
        dx = g - n * mean_of(tl.sum(g * n, axis=0), D, BLOCK, FULL)
        if mean_ptr is not None:
            dx -= mean_of(tl.sum(g, axis=0), D, BLOCK, FULL)
        dx *= rstd
        if dr_ptr is not None:
            dx += dr
        dw += dy * n
        if db_ptr is not None:
            db += dy
        y = rounded(tl.where(mask, dx, 0.0), DTYPE, ASM)
        if dx_ptr is not None:
            tl.store(dx_ptr + place, y, mask=mask)
        if q_ptr is not None:
            enc, scale = row_scale(row_bits(tl.reshape(y, [1, BLOCK]), RUN, ASM), FP8_MAX)
            # Nothing saturates: the multiplier is of the row's own largest.
            tl.store(q_ptr + place, encoded(y, enc, q_ptr.dtype.element_ty, ASM, True), mask=mask)
            tl.store(scale_ptr + t + tl.arange(0, 1), scale)
    tl.store(dw_ptr + tl.program_id(0) * D + d, dw, mask=mask)
    if db_ptr is not None:
        tl.store(db_ptr + tl.program_id(0) * D + d, db, mask=mask)


@triton.jit
def sum_programs_kernel(partial_ptr, out_ptr, P, D, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_P, BLOCK_D], dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        mask = (p[:, None] < P) & (d[None, :] < D)
        total += tl.load(partial_ptr + p[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + d, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=d < D)


# ---- public wrappers: check, allocate, launch ----


def _check_columns(d: int) -> None:
    if d == 0:
        raise ConfigError("x_TD has no columns; there is nothing to normalise")
    if d > MAX_COLUMNS:
        raise UnsupportedError(f"x_TD has {d} columns; the norm kernels hold a row in registers, up to {MAX_COLUMNS}")


def norm(
    x_TD: Tensor,
    w_D: Tensor,
    b_D: Tensor | None = None,
    *,
    residual_TD: Tensor | None = None,
    factor_T: Tensor | None = None,
    options: NormOptions | None = None,
    config: RowConfig | None = None,
) -> Normed:
    """Normalise the rows of `x_TD` (+ `residual_TD`, whose sum is returned as `total`). See `NormOptions` for the rest.

    `factor_T` multiplies the rows of x before a residual is added.

    Raises ConfigError on a wrong argument, UnsupportedError on rows of more than 32768 columns.
    """
    options = options or NormOptions()
    check_matrix("x_TD", x_TD)
    t, d = x_TD.shape
    _check_columns(d)
    check_vector("w_D", w_D, d, x_TD)
    if b_D is not None:
        check_vector("b_D", b_D, d, x_TD)
    if residual_TD is not None:
        check_matrix("residual_TD", residual_TD, (x_TD.dtype,))
        check_shape("residual_TD", residual_TD, (t, d), x_TD)
    if factor_T is not None and residual_TD is None:
        raise ConfigError("factor_T is for an x that a residual is added to; multiply x itself")
    check_factor("factor_T", factor_T, t, x_TD)
    if not runs_kernel(x_TD, _norm_kernel):
        return norm_ref(x_TD, w_D, b_D, residual_TD, options, factor_T)
    y, q, scale = options.empty_rows(x_TD, t, d)
    total = torch.empty((t, d), dtype=x_TD.dtype, device=x_TD.device) if residual_TD is not None else None
    rstd = torch.empty(t, dtype=torch.float32, device=x_TD.device)
    mean = torch.empty_like(rstd) if options.center else None
    config = config or default_forward_config(d)
    rows = config.rows_per_program(d)
    if x_TD.numel():
        with on_device(x_TD):
            launch(_norm_kernel, (cdiv(t, rows),))(
                x_TD,
                factor_T,
                residual_TD,
                w_D,
                b_D,
                total,
                y,
                q,
                scale,
                mean,
                rstd,
                t,
                d,
                x_TD.stride(0),
                residual_TD.stride(0) if residual_TD is not None else 0,
                options.eps,
                FP8_MAX=options.fp8_max,
                ROUND_FIRST=options.rounding == "llama",
                ROWS=rows,
                BLOCK=config.block(d),
                **_layout(config.block(d), d, config.num_warps),
                ASM=runs_ptx(x_TD, _norm_kernel),
                num_warps=config.num_warps,
            )
    return Normed(y, q, scale, total, rstd, mean)


def _layout(block: int, columns: int, num_warps: int) -> dict[str, int | bool]:
    """What a kernel may know of a row: whether it fills its block, and how many columns in a row a thread has of it."""
    return {"FULL": block == columns, "RUN": max(1, min(8, block // (32 * num_warps)))}


def norm_backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    w_D: Tensor,
    rstd_T: Tensor,
    mean_T: Tensor | None = None,
    *,
    d_residual_TD: Tensor | None = None,
    factor_T: Tensor | None = None,
    options: NormOptions | None = None,
    config: BackwardConfig | None = None,
) -> NormGrads:
    """Gradients of `norm`: `x_TD` is what was normalised (`total` where there was a residual).

    `d_residual_TD` is the gradient that reaches the residual stream past this norm; dx has it added, and is then the
    gradient of x and of the residual both. `factor_T` multiplies the rows of dy.
    """
    options = options or NormOptions()
    check_matrix("x_TD", x_TD)
    t, d = x_TD.shape
    _check_columns(d)
    check_matrix("dy_TD", dy_TD)
    check_shape("dy_TD", dy_TD, (t, d), x_TD)
    check_vector("w_D", w_D, d, x_TD)
    check_vector("rstd_T", rstd_T, t, x_TD)
    if d_residual_TD is not None:
        check_matrix("d_residual_TD", d_residual_TD)
        check_shape("d_residual_TD", d_residual_TD, (t, d), x_TD)
    check_factor("factor_T", factor_T, t, x_TD)
    if not runs_kernel(x_TD, _norm_backward_kernel):
        saved = Normed(None, None, None, x_TD, rstd_T, mean_T)
        return norm_backward_ref(dy_TD, saved, w_D, d_residual_TD, options, factor_T)
    dx, q, scale = options.empty_rows(x_TD, t, d)
    dw = torch.empty_like(w_D)
    db = torch.empty_like(w_D) if options.center else None
    if x_TD.numel() == 0:
        return NormGrads(dx, q, scale, dw.zero_(), db.zero_() if db is not None else None)
    config = config or default_backward_config(d)
    num_programs = min(t, config.programs_per_sm * num_sms(x_TD))
    dw_PD = torch.empty((num_programs, d), dtype=torch.float32, device=x_TD.device)
    db_PD = torch.empty_like(dw_PD) if options.center else None
    block = max(128, next_power_of_2(d))
    with on_device(x_TD):
        launch(_norm_backward_kernel, (num_programs,))(
            dy_TD,
            factor_T,
            x_TD,
            w_D,
            mean_T,
            rstd_T,
            d_residual_TD,
            dx,
            q,
            scale,
            dw_PD,
            db_PD,
            t,
            d,
            dy_TD.stride(0),
            x_TD.stride(0),
            d_residual_TD.stride(0) if d_residual_TD is not None else 0,
            FP8_MAX=options.fp8_max,
            BLOCK=block,
            NUM_STAGES=config.num_stages,
            DENSE=all(x is None or x.stride(0) == d for x in (dy_TD, x_TD, d_residual_TD)),
            **_layout(block, d, config.num_warps),
            ASM=runs_ptx(x_TD, _norm_backward_kernel),
            num_warps=config.num_warps,
        )
        for partial, out in ((dw_PD, dw), (db_PD, db)):
            if partial is not None:
                launch(sum_programs_kernel, (cdiv(d, 32),))(
                    partial, out, num_programs, d, BLOCK_P=32, BLOCK_D=32, num_warps=4
                )
    return NormGrads(dx, q, scale, dw, db)
