"""SwiGLU, GEGLU and plain activations, forward and backward, with FP8 rows written in the same pass.

    gated    h = act(g) * u        dg = dh * u * act'(g),  du = dh * act(g)
    plain    h = act(g)            dg = dh * act'(g)
    with a bias: g + b in the place of g (`bias_activation.py`, which has the backward)
    (q, scale) = FP8 rows of h, or of [dg, du] with one scale for both halves of a row
    gate and up, and dh, may come with factors of their rows (`row_factors`)

Numerics: fp32 inside; h, dg and du are rounded once to the input's dtype and quantized from there, so that (q, scale)
    are bit-equal to quantizing them.
Cost: memory bound; bytes per element of h in bf16: forward 4 + 2 (h) + 1 (q); backward 6 + 4 (dg, du) + 2 (q) + 1 (q of
    h recomputed). 16384 x 14336 at 4.25 TB/s: forward to q 276 us, to h 332 us; backward to q 442 us, to q and q of h
    497 us.
"""

# ruff: noqa: RET505 (the compiler reads what follows a return; only a whole if-else chain of constexprs ends it)
# Shapes: T tokens, F hidden width; gate_up_T2F holds the gate in its first half, up in its second.

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.activation.functions import ACTIVATIONS, act_and_slope, act_of, act_ref
from deepwell.kernels.checks import check_matrix, check_shape
from deepwell.kernels.device.bf16_words import bits_of, encoded, floats, larger_bits, rounded
from deepwell.kernels.device.fp8 import ZERO_ROW, multiplier_from_bits
from deepwell.kernels.device.triton_support import constant, launch, on_device, runs_kernel, runs_ptx, tl, triton
from deepwell.kernels.gemm.row_factors import check_factor, times_factor, times_rows
from deepwell.kernels.quantize.fp8 import RowConfig, RowOptions, empty_codes, quantize_rows_ref

# The widest row a whole-row config takes; wider ones go in two passes.
MAX_WHOLE_ROW = 16384
_E4M3_MAX = constant(448.0)


class Activated(NamedTuple):
    """What the forward gives; None for what was not asked for."""

    h: Tensor | None
    q: Tensor | None
    scale: Tensor | None


class RowFactors(NamedTuple):
    """What the rows of inputs are to be multiplied with (`row_factors`); None for 1."""

    gate_up: Tensor | None = None
    dh: Tensor | None = None


class ActivationGrads(NamedTuple):
    """What the backward gives; None for what was not asked for. `grad` and `q` hold [dg, du] side by side if gated."""

    grad: Tensor | None
    q: Tensor | None
    scale: Tensor | None
    q_h: Tensor | None
    scale_h: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GluOptions(RowOptions):
    """Which activation, and what is written of its result."""

    act: str = "silu"
    # Backward only: also the FP8 rows of h (E4M3), which the wgrad of the next GEMM wants.
    recompute_h: bool = False

    def __post_init__(self) -> None:
        RowOptions.__post_init__(self)
        if self.act not in ACTIVATIONS:
            raise ConfigError(f"act must be one of {', '.join(ACTIVATIONS)}, got {self.act!r}")


# ---- reference: what the kernels must compute, in the plainest torch ----


def swiglu_ref(
    g_TF: Tensor,
    u_TF: Tensor | None,
    options: GluOptions,
    bias_F: Tensor | None = None,
    factors: RowFactors = RowFactors(),  # noqa: B008 (a tuple)
) -> Activated:
    """Reference for `swiglu`, `activation` and, with a bias, `bias_activation`."""
    g = times_rows(g_TF, factors.gate_up)
    a, _ = act_ref(g if bias_F is None else g + bias_F.float(), options.act)
    h = a if u_TF is None else a * times_rows(u_TF, factors.gate_up)
    return Activated(*options.rows_of(h.to(g_TF.dtype)))


def swiglu_backward_ref(
    dh_TF: Tensor,
    g_TF: Tensor,
    u_TF: Tensor | None,
    options: GluOptions,
    factors: RowFactors = RowFactors(),  # noqa: B008 (a tuple)
) -> ActivationGrads:
    """Reference for `swiglu_backward` and `activation_backward`."""
    dh, (a, slope) = times_rows(dh_TF, factors.dh), act_ref(times_rows(g_TF, factors.gate_up), options.act)
    if u_TF is None:
        grad, h = dh * slope, a
    else:
        u = times_rows(u_TF, factors.gate_up)
        grad, h = torch.cat([dh * u * slope, dh * a], dim=1), a * u
    rows_of_h = quantize_rows_ref(h.to(g_TF.dtype)) if options.recompute_h else (None, None)
    return ActivationGrads(*options.rows_of(grad.to(g_TF.dtype)), *rows_of_h)


# ---- configs: what the tuner may choose from ----

FORWARD_CONFIGS = (
    RowConfig(tile=0, num_warps=16),
    RowConfig(tile=0, num_warps=8),
    RowConfig(tile=0, num_warps=4),
    RowConfig(tile=2048, num_warps=4),
)
BACKWARD_CONFIGS = (
    RowConfig(tile=0, num_warps=32),
    RowConfig(tile=0, num_warps=16, max_registers=64),
    RowConfig(tile=0, num_warps=8),
    RowConfig(tile=0, num_warps=4),
    RowConfig(tile=4096, num_warps=16),
)


def default_forward_config(columns: int) -> RowConfig:
    """Whole rows up to 16384 columns, 16 to 32 elements a thread; two passes beyond."""
    if columns > MAX_WHOLE_ROW:
        return FORWARD_CONFIGS[3]
    return FORWARD_CONFIGS[0] if columns > 8192 else FORWARD_CONFIGS[1] if columns > 2048 else FORWARD_CONFIGS[2]


def default_backward_config(columns: int, *, in_words: bool = True) -> RowConfig:
    """Whole rows up to 16384 columns, two on a multiprocessor at once; 8192 where no two numbers share a register.

    One H200, 2026-11-15 (benchmarks/bench_rows.py --only swiglu), us to q, and to q and q of h; copying as many bytes
    takes 254 and 286, 445 and 501:
    16384 x 8192: 8 warps 258, 304; 16 warps of 64 registers 249, 282; 32 warps 248, 284; two passes 294, 331
    16384 x 14336: 16 warps of 64 registers 459, 517; 8 warps 455, 528; 32 warps 459, 554; two passes 546, 640
    """
    if columns > (MAX_WHOLE_ROW if in_words else 8192):
        return BACKWARD_CONFIGS[4]
    if columns > 4096 and in_words:
        return BACKWARD_CONFIGS[1]
    return BACKWARD_CONFIGS[2] if columns > 1024 else BACKWARD_CONFIGS[3]


# ---- kernels: a pointer that is None is an operand or a result that was not asked for ----


@triton.jit
def _load(row, f, mask, factor_ptr, t, EVICT: tl.constexpr, ASM: tl.constexpr):
    """Of row t, times its factor."""
    x = tl.load(row + f, mask=mask, other=0.0, eviction_policy=EVICT)
    if factor_ptr is None:
        # The compiler's own takes more instructions and fewer registers: 14336 columns would spill without factors.
        return x.to(tl.float32)
    else:
        return floats(times_factor(x, factor_ptr, t, ASM), ASM)


@triton.jit
def _load_h(
    g_row, u_ptr, u_start, b_ptr, factor_ptr, t, f, mask,
    DTYPE: tl.constexpr, ACT: tl.constexpr, EVICT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """h of one tile of row t, rounded to the input's dtype."""
    g = _load(g_row, f, mask, factor_ptr, t, EVICT, ASM)
    if b_ptr is not None:
        g += tl.load(b_ptr + f, mask=mask, other=0.0).to(tl.float32)
    h = act_of(g, ACT, ASM)
    if u_ptr is not None:
        h *= _load(u_ptr + u_start, f, mask, factor_ptr, t, EVICT, ASM)
    return rounded(h, DTYPE, ASM)


@triton.jit
def _swiglu_kernel(
    g_ptr,
    u_ptr,
    b_ptr,
    factor_ptr,
    h_ptr,
    q_ptr,
    scale_ptr,
    F,
    stride_gt,
    stride_ut,
    FP8_MAX: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO_PASSES: tl.constexpr,
    ASM: tl.constexpr,
):
    # One program, one row.
    DTYPE: tl.constexpr = g_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    g_row = g_ptr + t * stride_gt
    columns = tl.arange(0, BLOCK)
    # Not `u_ptr + start` here: a name for "no pointer or a row of it" Triton puts in no tuple.
    row = (g_row, u_ptr, t * stride_ut, b_ptr, factor_ptr, t)
    if TWO_PASSES:
        bits = tl.zeros([BLOCK], dtype=tl.int32)
        for start in range(0, F, BLOCK):
            f = start + columns
            h = _load_h(*row, f, f < F, DTYPE, ACT, "evict_last", ASM)
            if h_ptr is not None:
                tl.store(h_ptr + t * F + f, h, mask=f < F)
            bits = tl.maximum(bits, bits_of(h, ASM))
        if q_ptr is not None:
            enc = multiplier_from_bits(tl.max(bits, axis=0), FP8_MAX, ZERO_ROW)
            for start in range(0, F, BLOCK):
                f = start + columns
                h = _load_h(*row, f, f < F, DTYPE, ACT, "evict_first", ASM)
                tl.store(q_ptr + t * F + f, encoded(h, enc, q_ptr.dtype.element_ty, ASM), mask=f < F)
            tl.store(scale_ptr + t, tl.div_rn(1.0, enc))
    else:
        mask = columns < F
        h = _load_h(*row, columns, mask, DTYPE, ACT, "", ASM)
        if h_ptr is not None:
            tl.store(h_ptr + t * F + columns, h, mask=mask)
        if q_ptr is not None:
            enc = multiplier_from_bits(tl.max(bits_of(h, ASM), axis=0), FP8_MAX, ZERO_ROW)
            tl.store(q_ptr + t * F + columns, encoded(h, enc, q_ptr.dtype.element_ty, ASM), mask=mask)
            tl.store(scale_ptr + t, tl.div_rn(1.0, enc))


@triton.jit
def _load_grads(
    dh_row, g_row, u_ptr, u_start, factor_ptrs, t, f, mask,
    DTYPE: tl.constexpr, ACT: tl.constexpr, EVICT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """(dg, du, h) of one tile of row t, rounded to the input's dtype; du and h are one value where there is no up."""
    dh = _load(dh_row, f, mask, factor_ptrs[0], t, EVICT, ASM)
    g = _load(g_row, f, mask, factor_ptrs[1], t, EVICT, ASM)
    a, slope = act_and_slope(g, ACT, ASM)
    if u_ptr is not None:
        u = _load(u_ptr + u_start, f, mask, factor_ptrs[1], t, EVICT, ASM)
        return rounded(dh * u * slope, DTYPE, ASM), rounded(dh * a, DTYPE, ASM), rounded(a * u, DTYPE, ASM)
    else:
        h = rounded(a, DTYPE, ASM)
        return rounded(dh * slope, DTYPE, ASM), h, h


@triton.jit
def _largest_bits(dg, du, GATED: tl.constexpr, ASM: tl.constexpr):
    if GATED:
        return larger_bits(dg, du, ASM)
    else:
        return bits_of(dg, ASM)


@triton.jit
def _store_pair(row, dg, du, f, F, GATED: tl.constexpr):
    """Store one tile of [dg, du], or of dg alone."""
    tl.store(row + f, dg, mask=f < F)
    if GATED:
        tl.store(row + F + f, du, mask=f < F)


@triton.jit
def _backward_row(
    t,
    dh_ptr,
    g_ptr,
    u_ptr,
    dh_factor_ptr,
    factor_ptr,
    grad_ptr,
    q_ptr,
    scale_ptr,
    qh_ptr,
    scale_h_ptr,
    F,
    stride_dht,
    stride_gt,
    stride_ut,
    FP8_MAX: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
    ASM: tl.constexpr,
):
    """Row t of the gradients, in registers from end to end."""
    DTYPE: tl.constexpr = g_ptr.dtype.element_ty
    GATED: tl.constexpr = u_ptr is not None
    WIDTH: tl.constexpr = 2 if GATED else 1
    columns = tl.arange(0, BLOCK)
    mask = columns < F
    row = (dh_ptr + t * stride_dht, g_ptr + t * stride_gt, u_ptr, t * stride_ut, (dh_factor_ptr, factor_ptr), t)
    dg, du, h = _load_grads(*row, columns, mask, DTYPE, ACT, "", ASM)
    if grad_ptr is not None:
        _store_pair(grad_ptr + t * F * WIDTH, dg, du, columns, F, GATED)
    if q_ptr is not None:
        enc = multiplier_from_bits(tl.max(_largest_bits(dg, du, GATED, ASM), axis=0), FP8_MAX, ZERO_ROW)
        # Nothing saturates: the multiplier is of the row's own largest.
        dg_q = encoded(dg, enc, q_ptr.dtype.element_ty, ASM)
        du_q = encoded(du, enc, q_ptr.dtype.element_ty, ASM)
        _store_pair(q_ptr + t * F * WIDTH, dg_q, du_q, columns, F, GATED)
        tl.store(scale_ptr + t, tl.div_rn(1.0, enc))
    if qh_ptr is not None:
        enc_h = multiplier_from_bits(tl.max(bits_of(h, ASM), axis=0), _E4M3_MAX, ZERO_ROW)
        tl.store(qh_ptr + t * F + columns, encoded(h, enc_h, qh_ptr.dtype.element_ty, ASM), mask=mask)
        tl.store(scale_h_ptr + t, tl.div_rn(1.0, enc_h))


@triton.jit
def _swiglu_backward_kernel(
    dh_ptr,
    g_ptr,
    u_ptr,
    dh_factor_ptr,
    factor_ptr,
    grad_ptr,
    q_ptr,
    scale_ptr,
    qh_ptr,
    scale_h_ptr,
    F,
    stride_dht,
    stride_gt,
    stride_ut,
    FP8_MAX: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO_PASSES: tl.constexpr,
    ASM: tl.constexpr,
):
    # One program, one row. Results are rows of [dg, du], 2F wide, or of dg alone.
    DTYPE: tl.constexpr = g_ptr.dtype.element_ty
    GATED: tl.constexpr = u_ptr is not None
    WIDTH: tl.constexpr = 2 if GATED else 1
    t = tl.program_id(0).to(tl.int64)
    if TWO_PASSES:
        dh_row = dh_ptr + t * stride_dht
        g_row = g_ptr + t * stride_gt
        columns = tl.arange(0, BLOCK)
        row = (dh_row, g_row, u_ptr, t * stride_ut, (dh_factor_ptr, factor_ptr), t)
        bits = tl.zeros([BLOCK], dtype=tl.int32)
        bits_h = tl.zeros([BLOCK], dtype=tl.int32)
        for start in range(0, F, BLOCK):
            f = start + columns
            dg, du, h = _load_grads(*row, f, f < F, DTYPE, ACT, "evict_last", ASM)
            bits = tl.maximum(bits, _largest_bits(dg, du, GATED, ASM))
            bits_h = tl.maximum(bits_h, bits_of(h, ASM))
            if grad_ptr is not None:
                _store_pair(grad_ptr + t * F * WIDTH, dg, du, f, F, GATED)
        if (q_ptr is not None) or (qh_ptr is not None):
            enc = multiplier_from_bits(tl.max(bits, axis=0), FP8_MAX, ZERO_ROW)
            enc_h = multiplier_from_bits(tl.max(bits_h, axis=0), _E4M3_MAX, ZERO_ROW)
            for start in range(0, F, BLOCK):
                f = start + columns
                dg, du, h = _load_grads(*row, f, f < F, DTYPE, ACT, "evict_first", ASM)
                if q_ptr is not None:
                    dg_q = encoded(dg, enc, q_ptr.dtype.element_ty, ASM)
                    du_q = encoded(du, enc, q_ptr.dtype.element_ty, ASM)
                    _store_pair(q_ptr + t * F * WIDTH, dg_q, du_q, f, F, GATED)
                if qh_ptr is not None:
                    tl.store(qh_ptr + t * F + f, encoded(h, enc_h, qh_ptr.dtype.element_ty, ASM), mask=f < F)
            if q_ptr is not None:
                tl.store(scale_ptr + t, tl.div_rn(1.0, enc))
            if qh_ptr is not None:
                tl.store(scale_h_ptr + t, tl.div_rn(1.0, enc_h))
    else:
        _backward_row(
            t, dh_ptr, g_ptr, u_ptr, dh_factor_ptr, factor_ptr, grad_ptr, q_ptr, scale_ptr, qh_ptr, scale_h_ptr,
            F, stride_dht, stride_gt, stride_ut, FP8_MAX, ACT, BLOCK, ASM,
        )  # fmt: skip


# ---- public wrappers: check, allocate, launch ----


def swiglu(
    gate_up_T2F: Tensor,
    up_TF: Tensor | None = None,
    *,
    factors: RowFactors | None = None,
    options: GluOptions | None = None,
    config: RowConfig | None = None,
) -> Activated:
    """act(gate) * up of `gate_up_T2F` (gate first), or of a gate and an up given apart."""
    g, u = _split("gate_up_T2F", gate_up_T2F, up_TF)
    return forward(g, u, options or GluOptions(), config, factors=factors)


def activation(
    x_TF: Tensor,
    *,
    factors: RowFactors | None = None,
    options: GluOptions | None = None,
    config: RowConfig | None = None,
) -> Activated:
    """The plain activation of `x_TF`, GELU (tanh) unless `options` says otherwise."""
    check_matrix("x_TF", x_TF)
    return forward(x_TF, None, options or GluOptions(act="gelu_tanh"), config, factors=factors)


def swiglu_backward(
    dh_TF: Tensor,
    gate_up_T2F: Tensor,
    up_TF: Tensor | None = None,
    *,
    factors: RowFactors | None = None,
    options: GluOptions | None = None,
    config: RowConfig | None = None,
) -> ActivationGrads:
    """Gradients of `swiglu`: [d gate, d up] side by side, T x 2F, with one FP8 scale for a whole row of it."""
    g, u = _split("gate_up_T2F", gate_up_T2F, up_TF)
    return _backward(dh_TF, g, u, options or GluOptions(), config, factors)


def activation_backward(
    dy_TF: Tensor,
    x_TF: Tensor,
    *,
    factors: RowFactors | None = None,
    options: GluOptions | None = None,
    config: RowConfig | None = None,
) -> ActivationGrads:
    """Gradient of `activation` at x."""
    check_matrix("x_TF", x_TF)
    return _backward(dy_TF, x_TF, None, options or GluOptions(act="gelu_tanh"), config, factors)


def _split(name: str, gate_up: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    check_matrix(name, gate_up)
    if up is None:
        if gate_up.shape[1] % 2:
            raise ConfigError(f"{name} has {gate_up.shape[1]} columns; gate and up must be equally wide")
        half = gate_up.shape[1] // 2
        return gate_up[:, :half], gate_up[:, half:]
    check_matrix("up_TF", up, (gate_up.dtype,))
    check_shape("up_TF", up, tuple(gate_up.shape), gate_up)
    return gate_up, up


def _checked(factors: RowFactors | None, x_TF: Tensor) -> RowFactors:
    factors = factors or RowFactors()
    check_factor("factors.gate_up", factors.gate_up, x_TF.shape[0], x_TF)
    check_factor("factors.dh", factors.dh, x_TF.shape[0], x_TF)
    return factors


def _check_config(config: RowConfig, columns: int) -> RowConfig:
    if not config.tile and columns > 2 * MAX_WHOLE_ROW:
        raise UnsupportedError(f"config takes whole rows, and {columns} columns do not fit registers; give it a tile")
    return config


def forward(
    g_TF: Tensor,
    u_TF: Tensor | None,
    options: GluOptions,
    config: RowConfig | None,
    *,
    bias_F: Tensor | None = None,
    factors: RowFactors | None = None,
) -> Activated:
    """The forward of all activations; `bias_F` is added to the gate."""
    factors = _checked(factors, g_TF)
    if not runs_kernel(g_TF, _swiglu_kernel):
        return swiglu_ref(g_TF, u_TF, options, bias_F, factors)
    t, f = g_TF.shape
    made = Activated(*options.empty_rows(g_TF, t, f))
    config = _check_config(config or default_forward_config(f), f)
    if t:
        with on_device(g_TF):
            launch(_swiglu_kernel, (t,))(
                g_TF,
                u_TF,
                bias_F,
                factors.gate_up,
                *made,
                f,
                g_TF.stride(0),
                u_TF.stride(0) if u_TF is not None else 0,
                FP8_MAX=options.fp8_max,
                ACT=options.act,
                BLOCK=config.block(f),
                TWO_PASSES=config.tile > 0,
                ASM=runs_ptx(g_TF, _swiglu_kernel),
                num_warps=config.num_warps,
            )
    return made


def _backward(
    dh_TF: Tensor,
    g_TF: Tensor,
    u_TF: Tensor | None,
    options: GluOptions,
    config: RowConfig | None,
    factors: RowFactors | None = None,
) -> ActivationGrads:
    check_matrix("dh_TF", dh_TF)
    check_shape("dh_TF", dh_TF, tuple(g_TF.shape), g_TF)
    factors = _checked(factors, g_TF)
    if not runs_kernel(g_TF, _swiglu_backward_kernel):
        return swiglu_backward_ref(dh_TF, g_TF, u_TF, options, factors)
    t, f = g_TF.shape
    rows = options.empty_rows(g_TF, t, f if u_TF is None else 2 * f)
    made = ActivationGrads(*rows, *(empty_codes(g_TF, t, f) if options.recompute_h else (None, None)))
    has_ptx = runs_ptx(g_TF, _swiglu_backward_kernel)
    in_words = has_ptx and g_TF.dtype == torch.bfloat16
    config = _check_config(config or default_backward_config(f, in_words=in_words), f)
    if t:
        with on_device(g_TF):
            launch(_swiglu_backward_kernel, (t,))(
                dh_TF,
                g_TF,
                u_TF,
                factors.dh,
                factors.gate_up,
                *made,
                f,
                dh_TF.stride(0),
                g_TF.stride(0),
                u_TF.stride(0) if u_TF is not None else 0,
                FP8_MAX=options.fp8_max,
                ACT=options.act,
                BLOCK=config.block(f),
                TWO_PASSES=config.tile > 0,
                ASM=has_ptx,
                num_warps=config.num_warps,
                maxnreg=config.max_registers,
            )
    return made
