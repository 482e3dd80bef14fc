"""Cross entropy of a chunk of logits: the loss of each row and its gradient, in place or as FP8 rows.

    x[t, v] = factor[t] * logits[t, v]     where the product that made them left a factor to its reader (`row_factors`)
    z[t, v] = a (x[t, v] + b[v])           with a soft cap k: z = k tanh(a (x + b) / k)
    lse[t] = log sum_v exp(z[t, v])        loss[t] = lse[t] - z[t, target]
    grad[t, v] = (exp(z[t, v] - lse[t]) - [v == target]) * c a, with a soft cap * (1 - tanh^2): the gradient of x
                 c: the gradient that reaches the loss, one number; summed over t it is the gradient of b
    (q, scale) = FP8 rows of grad

Numerics: fp32 inside, one rounding of grad, also to FP8 (under a soft cap two: to the logits' dtype first). A row whose
    target is `ignore_index` has loss 0 and gradient 0. A target outside 0 .. V-1 gives NaN in loss and gradient: a GPU
    cannot raise. A NaN or +inf logit makes its row NaN (+inf under a soft cap is k). The scale of a row is known before
    its gradient is written: the largest magnitude is that of the target or of the largest other logit, through the same
    instructions. Under a soft cap it is not, and the gradient is written first and quantized after.
    Factors are positive. By powers of two the result has the bits that it has of logits multiplied beforehand (but for
    those below bf16's normal numbers), by others the digits.
Cost: bytes per logit in bf16: one read for the sum, one read (from L2 where a row per multiprocessor fits in it) and
    one write for the gradient: 2 + 2 + 2, FP8 2 + 2 + 1. 4096 x 128256 at 4.25 TB/s: 741 us, FP8 618 us; with the
    second read from L2 494 and 371 us. Instructions (SASS of sm_90): 7 for the sum, 6 for the gradient, 7 for that in
    FP8; one in each pass is an exponential, of which a multiprocessor makes 16 a clock: 293 us at 1.7 GHz.
    A factor is four bytes a row and no instruction a logit: it goes into the one that an exponential is asked by. With
    a bias, a scale or a soft cap, whose logits are not x, it is a multiplication in each pass.
"""

# Shapes: T tokens of the chunk, V vocabulary.

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.checks import check_fp8, check_matrix, check_number, check_vector
from deepwell.kernels.device.bf16_words import floats, rounded
from deepwell.kernels.device.fp8 import ZERO_ROW, magnitude_bits, multiplier_from_bits
from deepwell.kernels.device.triton_support import constant, launch, on_device, runs_kernel, runs_ptx, tl, triton
from deepwell.kernels.gemm.row_factors import check_factor, times_rows
from deepwell.kernels.quantize.fp8 import quantize_rows, quantize_rows_ref

GRADIENTS = ("none", "in_place", "new", "fp8")


class Losses(NamedTuple):
    """The loss of each row and the gradient in the form asked for; None for the others."""

    loss: Tensor
    grad: Tensor | None
    q: Tensor | None
    scale: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """Where the gradient goes: nowhere, over the logits, into a new tensor, or into FP8 rows."""

    gradient: str = "in_place"
    fp8: torch.dtype = torch.float8_e4m3fn
    ignore_index: int = -100
    logit_scale: float = 1.0
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.gradient not in GRADIENTS:
            raise ConfigError(f"gradient must be one of {', '.join(GRADIENTS)}, got {self.gradient!r}")
        check_fp8("fp8", self.fp8)
        if not math.isfinite(self.logit_scale) or self.logit_scale == 0:
            raise ConfigError(f"logit_scale is {self.logit_scale}; it must be a finite number other than 0")
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            raise ConfigError(f"soft_cap is {self.soft_cap}; it must be a positive number, or None for no cap")


# ---- reference: what the kernel must compute, in the plainest torch ----


def logits_ref(
    logits_TV: Tensor, bias_V: Tensor | None, options: LossOptions, factor_T: Tensor | None = None
) -> tuple[Tensor, Tensor | float]:
    """The logits that the loss sees, in fp32, and their slope against those that were given, times their factors."""
    z = times_rows(logits_TV, factor_T)
    if bias_V is not None:
        z = z + bias_V.float()
    z = z * options.logit_scale
    if options.soft_cap is None:
        return z, options.logit_scale
    bent = torch.tanh(z / options.soft_cap)
    return bent * options.soft_cap, (1 - bent * bent) * options.logit_scale


def cross_entropy_ref(
    logits_TV: Tensor,
    targets_T: Tensor,
    bias_V: Tensor | None,
    grad_scale: Tensor,
    options: LossOptions,
    factor_T: Tensor | None = None,
    *,
    vocab: int | None = None,
) -> Losses:
    if vocab is not None and vocab < logits_TV.shape[1]:
        return _padded_ref(logits_TV, targets_T, bias_V, grad_scale, options, factor_T, vocab)
    (x, slope), v = logits_ref(logits_TV, bias_V, options, factor_T), logits_TV.shape[1]
    ignored = targets_T == options.ignore_index
    valid = (targets_T >= 0) & (targets_T < v)
    index = torch.where(valid, targets_T, 0).long()[:, None]
    x_target = torch.where(valid, x.gather(1, index)[:, 0], float("nan"))
    top = x.amax(1)
    # Not log_softmax: where the target is the largest logit by far, its max + log sum cancels against the target.
    loss = torch.where(ignored, 0.0, (x - top[:, None]).exp().sum(1).log() + (top - x_target))
    if options.gradient == "none":
        return Losses(loss, None, None, None)
    grad = x.softmax(1).scatter_add(1, index, torch.full_like(index, -1, dtype=torch.float32))
    grad = torch.where(valid[:, None], grad * (grad_scale * slope), float("nan"))
    grad = torch.where(ignored[:, None], 0.0, grad)
    if options.gradient != "fp8" or options.soft_cap is not None:
        grad = grad.to(logits_TV.dtype)
    if options.gradient == "fp8":
        return Losses(loss, None, *quantize_rows_ref(grad, dtype=options.fp8))
    return Losses(loss, logits_TV.copy_(grad) if options.gradient == "in_place" else grad, None, None)


def _padded_ref(
    logits_TW: Tensor,
    targets_T: Tensor,
    bias_V: Tensor | None,
    grad_scale: Tensor,
    options: LossOptions,
    factor_T: Tensor | None,
    vocab: int,
) -> Losses:
    """That of the words alone; columns behind them have a gradient of 0."""
    made = cross_entropy_ref(logits_TW[:, :vocab], targets_T, bias_V, grad_scale, options, factor_T)
    if options.gradient == "in_place":
        logits_TW[:, vocab:] = 0
        return made._replace(grad=logits_TW)
    more = (0, logits_TW.shape[1] - vocab)
    grad = None if made.grad is None else F.pad(made.grad, more)
    q = None if made.q is None else F.pad(made.q.view(torch.uint8), more).view(made.q.dtype)
    return made._replace(grad=grad, q=q)


# ---- configs: what the tuner may choose from ----


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Logits of one step of the loop over a row, and the warps that share them."""

    block: int
    num_warps: int


# With 32 warps one row is under way on a multiprocessor: 132 rows of 256 KB stay in the 50 MB L2 of an H200 until their
# second pass; with 16 warps twice as many do not.
CONFIGS = (
    LossConfig(block=32768, num_warps=32),
    LossConfig(block=8192, num_warps=16),
    LossConfig(block=8192, num_warps=8),
    LossConfig(block=2048, num_warps=4),
)


def default_config(vocabulary: int, options: LossOptions) -> LossConfig:
    """Large steps for large vocabularies. A soft cap takes more registers than 32 warps have.

    One H200, 2026-11-15, 4096 x 128256 to bf16 and to FP8 with 20 and 22 instructions a logit, 14 and 15 now:
    32768 by 32 warps 647 and 584 us alone (benchmarks/bench_rows.py), 689 and 666 inside a training step, where the
    clock is lower and instructions count; 8192 by 16 warps 748 and 628 alone, 756 and 623 inside.
    """
    if vocabulary >= 32768:
        return CONFIGS[1] if options.soft_cap is not None else CONFIGS[0]
    return CONFIGS[2] if vocabulary >= 8192 else CONFIGS[3]


# ---- kernel ----

_LOG2E = constant(1.4426950408889634)
_LN2 = constant(0.6931471805599453)
# The largest of nothing: finite, without the NaN of inf - inf. What is not there has a logit of -inf.
_LOWEST = constant(-(2.0**127))
# Logits of one thread's load.
_WIDE = constant(8)


# Without the cases of results below 2^-126, which count as 0 here.
_EXP2 = constant("ex2.approx.ftz.f32 $0, $1;")


@triton.jit
def _exp2(y, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(_EXP2, "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1)
    return tl.exp2(y)


# e^(x - top) takes a subtraction, a product and the power; 2^(x log2 e - top log2 e) one instruction less. The second
# product is rounded, which moves all that share a top alike, by 2^excess: what they are multiplied with takes it back.
# (In PTX of its own: the compiler would leave the rounding out here, where that spares an instruction, and not there.)
# `rate` is log2 e, for logits that wait for a row's factor that many times: by a power of two the same numbers.
_PRODUCT = constant("mul.rn.f32 $0, $1, $2;")


@triton.jit
def _log2_of_exp(top, rate):
    return tl.inline_asm_elementwise(_PRODUCT, "=f,f,f", [top, rate], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _exp_from(x, top, rate, ASM: tl.constexpr):
    """e^(x - top) * 2^excess; `top` broadcasts to x."""
    if ASM:
        y = tl.fma(x, tl.full(x.shape, rate, tl.float32), tl.broadcast_to(-_log2_of_exp(top, rate), x.shape))
        return _exp2(y, ASM)
    return _exp2((x - top) * rate, ASM)


@triton.jit
def _exp_between(top, other, rate, ASM: tl.constexpr):
    """What takes a sum of `_exp_from(..., top)` to one of `_exp_from(..., other)`."""
    if ASM:
        return _exp2(_log2_of_exp(top, rate) - _log2_of_exp(other, rate), ASM)
    return _exp2((top - other) * rate, ASM)


@triton.jit
def _without_excess(y, top, rate, ASM: tl.constexpr):
    """y / 2^excess."""
    if ASM:
        y *= tl.exp2(-tl.fma(top, rate, -_log2_of_exp(top, rate)))
    return y


@triton.jit
def _tanh_and_slope(y):
    """tanh(y) and 1 - tanh(y)^2, neither by cancellation: a series near 0, exponentials beyond."""
    size = tl.abs(y)
    e = tl.exp2(size * (-2.0 * _LOG2E))
    s = size * size
    series = size * (1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835)))))
    t = tl.where(size < 0.25, series, (1.0 - e) / (1.0 + e))
    return tl.where(y < 0, -t, t), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _logit_and_slope(x, factor, b_row, v, is_valid, SCALE: tl.constexpr, CAP: tl.constexpr):
    """The logit that the loss sees, and its slope against x times its factor, without SCALE."""
    slope = 1.0
    if factor is not None:
        x *= factor
    if b_row is not None:
        x += tl.load(b_row + v, mask=is_valid, other=0.0).to(tl.float32)
    if SCALE != 1.0:
        x *= SCALE
    if CAP > 0.0:
        bent, slope = _tanh_and_slope(x / CAP)
        x = bent * CAP
    return x, slope


@triton.jit
def _cross_entropy_kernel(
    x_ptr,
    target_ptr,
    b_ptr,
    factor_ptr,
    loss_ptr,
    grad_ptr,
    q_ptr,
    scale_ptr,
    c_ptr,
    V,
    W,
    stride_xt,
    stride_gt,
    ignore_index,
    FP8_MAX: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    PADDED: tl.constexpr,
    ASM: tl.constexpr,
):
    # V words, W columns: a row of whole 16-byte lines is read in whole lines, whatever V is.
    if not PADDED:
        W = V
    # One program, one row. The target stands apart: the others' maximum alone tells the largest gradient beside it.
    t = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + t * stride_xt
    target = tl.load(target_ptr + t)
    is_valid = (target >= 0) & (target < V)
    is_ignored = target == ignore_index
    # Where nothing else is done to the logits, their factor waits: the largest is the same one. Or else it goes first.
    waiting = 1.0
    first = None
    rate = _LOG2E
    lowest = _LOWEST
    if factor_ptr is not None:
        # (Of a row that is ignored it may be NaN.)
        factor = tl.where(is_ignored, 1.0, tl.load(factor_ptr + t))
        if (b_ptr is None) and (SCALE == 1.0) and (CAP == 0.0):
            waiting = factor
            rate = _LOG2E * factor
            lowest = tl.div_rn(_LOWEST, tl.maximum(factor, 1.0))
        else:
            first = factor
    x_target = tl.load(x_row + target, mask=is_valid, other=float("nan")).to(tl.float32)
    x_target, slope_target = _logit_and_slope(x_target, first, b_ptr, target, is_valid, SCALE, CAP)
    # In 32 bits: it is compared with every logit.
    place = tl.where(is_valid, target, -1).to(tl.int32)
    lane = tl.arange(0, BLOCK // _WIDE)[:, None] * _WIDE + tl.arange(0, _WIDE)[None, :]

    # All that a thread reads in a step has one maximum: no exchange between threads, and one rescaling for all.
    top = tl.full([THREADS], lowest, dtype=tl.float32)
    total = tl.zeros([THREADS], dtype=tl.float32)
    for start in range(0, W, BLOCK):
        v = start + lane
        x = floats(tl.load(x_row + v, mask=v < W, other=float("-inf"), eviction_policy="evict_last"), ASM)
        x, slope_first = _logit_and_slope(x, first, b_ptr, v, v < V, SCALE, CAP)  # noqa: RUF059 - one name each: a loop carries its type
        if (SCALE != 1.0) or (CAP > 0.0) or PADDED:
            x = tl.where(v < V, x, float("-inf"))
        # Few steps have the target in them: the others do not ask every logit.
        if (place >= start) & (place < start + BLOCK):
            x = tl.where(v == place, float("-inf"), x)
        x = tl.reshape(x, [BLOCK // (THREADS * _WIDE), THREADS, _WIDE])
        new_top = tl.maximum(top, tl.max(tl.max(x, axis=0), axis=1))
        e = _exp_from(x, new_top[None, :, None], rate, ASM)
        total = total * _exp_between(top, new_top, rate, ASM) + tl.sum(tl.sum(e, axis=0), axis=1)
        top = new_top
    top_other = tl.max(top, axis=0)
    total_other = tl.sum(total * _exp_between(top, top_other, rate, ASM), axis=0)
    total_other = _without_excess(total_other, top_other, rate, ASM)
    highest = tl.maximum(top_other, x_target)
    sum_all = total_other * _exp2((top_other - highest) * rate, ASM) + _exp2((x_target - highest) * rate, ASM)
    one_over_sum = tl.div_rn(1.0, sum_all)
    # Not lse - x_target: where the target is the largest logit by far, that would cancel.
    loss = tl.fma(tl.log2(sum_all), _LN2, (highest - x_target) * waiting)
    tl.store(loss_ptr + t, tl.where(is_ignored, 0.0, loss))

    if (grad_ptr is not None) or (q_ptr is not None):
        DTYPE: tl.constexpr = x_ptr.dtype.element_ty
        c = tl.load(c_ptr)
        if SCALE != 1.0:
            c *= SCALE
        # The target's share is exactly 1 where no other logit counts. What every logit is multiplied with is said once.
        at_target = (_exp2((x_target - highest) * rate, ASM) * one_over_sum - 1.0) * c * slope_target
        share = _without_excess(one_over_sum * c, highest, rate, ASM)
        if q_ptr is not None:
            at_other = tl.where(total_other == 0.0, 0.0, _exp_from(top_other, highest, rate, ASM) * share)
            bits = tl.maximum(magnitude_bits(at_other), magnitude_bits(at_target))
            enc = multiplier_from_bits(tl.where(is_ignored, 0, bits), FP8_MAX, ZERO_ROW)
            tl.store(scale_ptr + t, tl.div_rn(1.0, enc))
            at_target *= enc
        # Of a row that is ignored nothing is read, and its gradient is 0 without a question about every logit.
        highest = tl.where(is_ignored, 0.0, highest)
        share = tl.where(is_ignored, 0.0, share)
        for start in range(0, W, BLOCK):
            v = start + lane
            is_live = (v < W) & (is_ignored == 0)
            x = floats(tl.load(x_row + v, mask=is_live, other=0.0, eviction_policy="evict_first"), ASM)
            x, slope = _logit_and_slope(x, first, b_ptr, v, is_live & (v < V), SCALE, CAP)
            grad = _exp_from(x, highest, rate, ASM) * share
            if CAP > 0.0:
                grad *= slope
            if PADDED:
                grad = tl.where(v < V, grad, 0.0)
            if grad_ptr is not None:
                tl.store(grad_ptr + t * stride_gt + v, rounded(grad, DTYPE, ASM), mask=v < W)
            if q_ptr is not None:
                # (Not by one number for both: of a row that is sure of its target it would be inf.)
                # Nothing but the target saturates: the multiplier is of the row's own largest.
                tl.store(q_ptr + t * stride_gt + v, (grad * enc).to(q_ptr.dtype.element_ty), mask=v < W)
        # Over what the loop wrote there: cheaper than to ask every logit whether it is the target.
        tl.debug_barrier()
        has_target = is_valid & (is_ignored == 0)
        if grad_ptr is not None:
            tl.store(grad_ptr + t * stride_gt + target, at_target.to(DTYPE), mask=has_target)
        if q_ptr is not None:
            tl.store(q_ptr + t * stride_gt + target, at_target.to(q_ptr.dtype.element_ty), mask=has_target)


# ---- public wrapper: check, allocate, launch ----


def cross_entropy(
    logits_TV: Tensor,
    targets_T: Tensor,
    *,
    vocab: int | None = None,
    bias_V: Tensor | None = None,
    factor_T: Tensor | None = None,
    grad_scale: Tensor | None = None,
    options: LossOptions | None = None,
    config: LossConfig | None = None,
) -> Losses:
    """The loss of each row of a chunk of logits, in fp32, and its gradient times `grad_scale`.

    Of the columns the first `vocab` are words, all where it is None. Those behind are padding: no loss counts them, and
    their gradient is 0.
    `grad_scale`, one number on the device, is 1 / (number of targets that count) for the mean of a batch; 1 where None.
    `factor_T`, positive numbers, multiplies the rows of logits, `bias_V` is added to them, before the scale and the
    soft cap of `options`. The gradient is that of the logits as they were given, times their factors.
    With the default options the logits are overwritten by their gradient. Raises ConfigError on a wrong argument.
    """
    options = options or LossOptions()
    check_matrix("logits_TV", logits_TV)
    t, columns = logits_TV.shape
    v = columns if vocab is None else vocab
    if not 0 <= v <= columns:
        raise ConfigError(f"vocab is {v}; logits_TV has {columns} columns")
    check_vector("targets_T", targets_T, t, logits_TV)
    if targets_T.dtype not in {torch.int64, torch.int32}:
        raise ConfigError(f"targets_T has dtype {targets_T.dtype}; pass int64 or int32")
    if bias_V is not None:
        check_vector("bias_V", bias_V, v, logits_TV)
    check_factor("factor_T", factor_T, t, logits_TV)
    if v == 0 and t:
        raise ConfigError("logits_TV has no columns; a vocabulary has at least one entry")
    if grad_scale is None:
        grad_scale = torch.ones((), dtype=torch.float32, device=logits_TV.device)
    check_number("grad_scale", grad_scale, logits_TV)
    if not runs_kernel(logits_TV, _cross_entropy_kernel):
        return cross_entropy_ref(logits_TV, targets_T, bias_V, grad_scale.reshape(()), options, factor_T, vocab=v)
    config = config or default_config(v, options)
    given = (logits_TV, targets_T, bias_V, factor_T, grad_scale)
    if options.gradient == "fp8" and options.soft_cap is not None:
        high = _launch(*given, replace(options, gradient="new"), config, v)
        assert high.grad is not None
        return Losses(high.loss, None, *quantize_rows(high.grad, dtype=options.fp8))
    return _launch(*given, options, config, v)


def _launch(
    logits_TW: Tensor,
    targets_T: Tensor,
    bias_V: Tensor | None,
    factor_T: Tensor | None,
    grad_scale: Tensor,
    options: LossOptions,
    config: LossConfig,
    vocab: int,
) -> Losses:
    t, columns = logits_TW.shape
    loss = torch.empty(t, dtype=torch.float32, device=logits_TW.device)
    grad = q = scale = None
    if options.gradient == "in_place":
        grad = logits_TW
    elif options.gradient == "new":
        grad = torch.empty((t, columns), dtype=logits_TW.dtype, device=logits_TW.device)
    elif options.gradient == "fp8":
        q = torch.empty((t, columns), dtype=options.fp8, device=logits_TW.device)
        scale = torch.empty_like(loss)
    written = q if grad is None else grad
    if t:
        with on_device(logits_TW):
            launch(_cross_entropy_kernel, (t,))(
                logits_TW,
                targets_T,
                bias_V,
                factor_T,
                loss,
                grad,
                q,
                scale,
                grad_scale,
                vocab,
                columns,
                logits_TW.stride(0),
                written.stride(0) if written is not None else 0,
                options.ignore_index,
                FP8_MAX=check_fp8("fp8", options.fp8),
                SCALE=options.logit_scale,
                CAP=options.soft_cap or 0.0,
                BLOCK=config.block,
                THREADS=32 * config.num_warps,
                PADDED=vocab < columns,
                ASM=runs_ptx(logits_TW, _cross_entropy_kernel),
                num_warps=config.num_warps,
            )
    return Losses(loss, grad, q, scale)
