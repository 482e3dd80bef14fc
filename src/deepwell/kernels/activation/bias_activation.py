"""A linear's bias and the activation after it, forward and backward, with FP8 rows written in the same pass.

    h = act(x + b)        dx = dh * act'(x + b)        db = sum_t dx        x: the product, without its bias
    (q, scale) = FP8 rows of h or dx, rounded to x's dtype first

Numerics: fp32 inside; x + b is not rounded on its way into the activation; h and dx are rounded once. (q, scale) are
    bit-equal to quantizing them. db adds the unrounded dx and is deterministic: each program adds its rows in order, a
    second small kernel adds the programs in order.
Cost: memory bound; bytes per element in bf16: forward x 2, q 1 (h 2); backward dh 2, x 2, q 1 (dx 2). Apart, the bias,
    the activation, its quantization and the column sum move 7 forward and 11 backward. 16384 x 6144 at 4.25 TB/s:
    forward to q 71 us, backward to q and db 118 us.
"""

# Shapes: T tokens, F hidden width, P programs of the backward kernel.

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.kernels.activation.functions import act_and_slope, act_ref
from deepwell.kernels.activation.swiglu import Activated, GluOptions, activation_backward, forward
from deepwell.kernels.checks import check_matrix, check_shape, check_vector
from deepwell.kernels.device.fp8 import quantize_row
from deepwell.kernels.device.triton_support import (
    cdiv,
    launch,
    next_power_of_2,
    num_sms,
    on_device,
    runs_kernel,
    tl,
    triton,
)
from deepwell.kernels.norm.rms_norm import BackwardConfig, sum_programs_kernel
from deepwell.kernels.quantize.fp8 import RowConfig

# Rows whose gradient, bias and column sums one program holds in registers; wider ones are computed step by step.
MAX_COLUMNS = 16384


class BiasActivationGrads(NamedTuple):
    """What the backward gives; None for what was not asked for."""

    grad: Tensor | None
    q: Tensor | None
    scale: Tensor | None
    db: Tensor


# ---- reference: what the kernel must compute, in the plainest torch ----


def bias_activation_backward_ref(dh_TF: Tensor, x_TF: Tensor, b_F: Tensor, options: GluOptions) -> BiasActivationGrads:
    _, slope = act_ref(x_TF.float() + b_F.float(), options.act)
    exact = dh_TF.float() * slope
    return BiasActivationGrads(*options.rows_of(exact.to(x_TF.dtype)), exact.sum(0).to(b_F.dtype))


# ---- config ----


def default_backward_config(columns: int) -> BackwardConfig:
    """Eight elements of each row a thread, 32 warps on a multiprocessor in all."""
    num_warps = min(32, max(4, next_power_of_2(columns) // 256))
    return BackwardConfig(num_warps=num_warps, programs_per_sm=32 // num_warps, num_stages=2)


# ---- kernel: a pointer that is None is a result that was not asked for ----


@triton.jit
def _bias_activation_backward_kernel(
    dh_ptr,
    x_ptr,
    b_ptr,
    grad_ptr,
    q_ptr,
    scale_ptr,
    db_ptr,
    T,
    F,
    stride_dht,
    stride_xt,
    FP8_MAX: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    # A program stays on its multiprocessor and walks over rows, so that db is summed in registers.
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    f = tl.arange(0, BLOCK)
    mask = f < F
    b = tl.load(b_ptr + f, mask=mask, other=0.0).to(tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for row in tl.range(tl.program_id(0), T, tl.num_programs(0), num_stages=NUM_STAGES):
        t = tl.cast(row, tl.int64)
        dh = tl.load(dh_ptr + t * stride_dht + f, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + t * stride_xt + f, mask=mask, other=0.0).to(tl.float32)
        if BLOCK > 8192:  # no register is left to hold it
            b = tl.load(b_ptr + f, mask=mask, other=0.0).to(tl.float32)
        _, slope = act_and_slope(x + b, ACT)
        grad = dh * slope
        db += grad
        rounded = grad.to(DTYPE)
        if grad_ptr is not None:
            tl.store(grad_ptr + t * F + f, rounded, mask=mask)
        if q_ptr is not None:
            q, scale = quantize_row(rounded.to(tl.float32), q_ptr.dtype.element_ty, FP8_MAX)
            tl.store(q_ptr + t * F + f, q, mask=mask)
            tl.store(scale_ptr + t, scale)
    tl.store(db_ptr + tl.program_id(0) * F + f, db, mask=mask)


# ---- public wrappers: check, allocate, launch ----


def bias_activation(
    x_TF: Tensor, b_F: Tensor, *, options: GluOptions | None = None, config: RowConfig | None = None
) -> Activated:
    """The activation of `x_TF + b_F`, GELU (tanh) unless `options` says otherwise."""
    check_matrix("x_TF", x_TF)
    check_vector("b_F", b_F, x_TF.shape[1], x_TF)
    return forward(x_TF, None, options or GluOptions(act="gelu_tanh"), config, bias_F=b_F)


def bias_activation_backward(
    dh_TF: Tensor, x_TF: Tensor, b_F: Tensor, *, options: GluOptions | None = None, config: BackwardConfig | None = None
) -> BiasActivationGrads:
    """Gradients of `bias_activation` at x: of x, as values or FP8 rows, and of the bias."""
    options = options or GluOptions(act="gelu_tanh")
    check_matrix("x_TF", x_TF)
    check_vector("b_F", b_F, x_TF.shape[1], x_TF)
    check_matrix("dh_TF", dh_TF)
    check_shape("dh_TF", dh_TF, tuple(x_TF.shape), x_TF)
    if not runs_kernel(x_TF, _bias_activation_backward_kernel):
        return bias_activation_backward_ref(dh_TF, x_TF, b_F, options)
    t, f = x_TF.shape
    if f > MAX_COLUMNS:
        return _step_by_step(dh_TF, x_TF, b_F, options)
    made = BiasActivationGrads(*options.empty_rows(x_TF, t, f), (torch.empty_like if t else torch.zeros_like)(b_F))
    if not x_TF.numel():
        return made
    config = config or default_backward_config(f)
    num_programs = min(t, config.programs_per_sm * num_sms(x_TF))
    db_PF = torch.empty((num_programs, f), dtype=torch.float32, device=x_TF.device)
    with on_device(x_TF):
        launch(_bias_activation_backward_kernel, (num_programs,))(
            dh_TF,
            x_TF,
            b_F,
            *made[:3],
            db_PF,
            t,
            f,
            dh_TF.stride(0),
            x_TF.stride(0),
            FP8_MAX=options.fp8_max,
            ACT=options.act,
            BLOCK=max(128, next_power_of_2(f)),
            NUM_STAGES=config.num_stages,
            num_warps=config.num_warps,
        )
        launch(sum_programs_kernel, (cdiv(f, 32),))(
            db_PF, made.db, num_programs, f, BLOCK_P=32, BLOCK_D=32, num_warps=4
        )
    return made


def _step_by_step(dh_TF: Tensor, x_TF: Tensor, b_F: Tensor, options: GluOptions) -> BiasActivationGrads:
    """Rows too wide for registers: the sum, the activation's gradient and its columns' sums one after the other."""
    both = activation_backward(dh_TF, x_TF + b_F.to(x_TF.dtype), options=replace(options, write=True))
    assert both.grad is not None
    db = both.grad.sum(0, dtype=torch.float32).to(b_F.dtype)
    return BiasActivationGrads(both.grad if options.write else None, both.q, both.scale, db)
