"""A tensor times a number that lies on the device: what a gradient made in the forward takes from the loss' own.

    y = round(x * factor)

Numerics: the product in fp32, rounded once. (On a GPU torch's own rounds an fp32 number to a bf16 tensor's dtype first:
    a loss divided by three micro-batches gives 0.334 of the gradient.)
Cost: memory bound, 2 + 2 bytes per element of bf16: 63 us for 16384 x 4096 at 4.25 TB/s. Torch's own converts element
    by element where the number is fp32 and the tensor is not, 275 us in the step of an 8B shape
    (`step-8b-4l-h200-2026-11-15.json`).
"""

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.device.triton_support import cdiv, launch, on_device, runs_kernel, tl, triton

_BLOCK = 4096


# ---- reference: what the kernel must compute, in the plainest torch ----


def scale_by_ref(x: Tensor, factor: Tensor) -> Tensor:
    return (x.float() * factor.float()).to(x.dtype)


# ---- kernel ----


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, y_ptr, numel, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < numel, other=0.0).to(tl.float32)
    y = x * tl.load(factor_ptr).to(tl.float32)
    tl.store(y_ptr + i, y.to(y_ptr.dtype.element_ty), mask=i < numel)


# ---- public wrapper ----


def scale_by(x: Tensor, factor: Tensor) -> Tensor:
    """x times one number on its device, rounded once to x's dtype. Raises ConfigError unless it is one number."""
    if factor.numel() != 1 or factor.device != x.device:
        raise ConfigError(
            f"factor must be one number on {x.device}, got {tuple(factor.shape)} on {factor.device}; move or reduce it"
        )
    if not runs_kernel(x, _scale_kernel) or not x.is_contiguous() or x.dtype == torch.float64:
        return scale_by_ref(x, factor.reshape(()))
    y = torch.empty_like(x)
    if x.numel():
        with on_device(x):
            launch(_scale_kernel, (cdiv(x.numel(), _BLOCK),))(x, factor, y, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return y
