"""The scalars of an AdamW step, worked out on the device: norm of the gradients, clipping, bias corrections, skips.

    norm = sqrt(sum g^2)        clip = min(1, clip_norm / (norm + 1e-6))        skipped where norm is not finite
    decay = 1 - lr * wd         step size = lr / (1 - b1^t)                     1 / sqrt(1 - b2^t)

Numerics: fp64 with powers by squaring, each scalar rounded to fp32 once: bit-equal to `hyper_ref`. Squares are
          summed in fp32 along 16 elements of a thread and in fp64 beyond, always in the same order; a norm that leaves
          fp32's range counts as not finite.
Cost:     the norm reads each gradient once, 2 bytes a bf16 parameter; the scalars are one small launch.
"""


# Shapes: S slots (parameters), G parameter groups, C chunks.

import math

import torch

from deepwell.kernels.device.triton_support import tl, triton

# What `clip_norm` divides by besides the norm, as in torch.nn.utils.clip_grad_norm_.
CLIP_EPS = 1e-6

# Columns of the table of slots, int64: addresses of parameter, gradient, moments, their scales and the master copy,
# then the number of elements, the slot's row and the key of its random bits.
TABLE_COLUMNS = 10
# Scalars of a group, seven in fp64: lr, beta1, beta2, eps, weight decay, sign of the gradient, clip_norm. Columns of
# those of a slot, in fp32, which follow from them.
HYPER_COLUMNS = 8  # decay, step size, 1 / sqrt(1 - b2^t), 1 - b1, b2, 1 - b2, eps, factor of the gradient
# int64 words that stay on the device: the seed, whether this step is skipped, how many were.
CONTROL_SKIPPED = 2


# ---- reference ----


def hyper_ref(step: int, group: list[float], coefficient: float) -> list[float]:
    """The scalars of step number `step` (from 1) of a group's row, each rounded to fp32 once.

    `coefficient` is what clipping multiplies by.
    """
    lr, beta1, beta2, eps, weight_decay, sign, _ = group
    step_size, correction = lr / (1.0 - _power(beta1, step)), 1.0 / math.sqrt(1.0 - _power(beta2, step))
    moments = (1.0 - beta1, beta2, 1.0 - beta2)
    exact = [1.0 - lr * weight_decay, step_size, correction, *moments, eps, sign * coefficient]
    return torch.tensor(exact, dtype=torch.float64).float().tolist()


def _power(base: float, exponent: int) -> float:
    """base ** exponent by squaring, product for product what the device computes."""
    result = 1.0
    for bit in range(31):
        if (exponent >> bit) & 1:
            result = result * base
        base = base * base
    return result


# ---- configs ----

# Of a program of the norm: ROWS x 128 elements at a time, TILES times. Long chunks leave few partial sums.
NORM_ROWS = 32
NORM_TILES = 16
NORM_WARPS = 8


# ---- kernels ----


@triton.jit
def pointer_at(table_ptr, row, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """An address of the table as a pointer; ALIGNED promises 16 bytes, and so gets 16-byte accesses."""
    pointer = tl.load(table_ptr + row * 10 + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def number_at(table_ptr, row, COLUMN: tl.constexpr, ALIGNED: tl.constexpr):
    """A length of the table; ALIGNED promises a multiple of 16, and so masks hold for whole vectors."""
    number = tl.load(table_ptr + row * 10 + COLUMN)
    if ALIGNED:
        number = tl.multiple_of(number, 16)
    return number


@triton.jit
def _norm_kernel(
    table_ptr,
    chunk_row_ptr,
    chunk_place_ptr,
    partial_ptr,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    # One program sums the squares of one chunk; inf and NaN carry through to the sum.
    pid = tl.program_id(0)
    row = tl.load(chunk_row_ptr + pid)
    start = tl.load(chunk_place_ptr + pid).to(tl.int64) * (ROWS * 128 * TILES)
    numel = number_at(table_ptr, row, 7, ALIGNED)
    grad_ptr = pointer_at(table_ptr, row, 1, GRAD, ALIGNED)
    total = tl.zeros((ROWS * 128,), tl.float32)
    for i in tl.range(TILES):
        e = start + i * (ROWS * 128) + tl.arange(0, ROWS * 128)
        g = tl.load(grad_ptr + e, mask=e < numel, other=0.0, eviction_policy="evict_first").to(tl.float32)
        total += g * g
    tl.store(partial_ptr + pid, tl.sum(total.to(tl.float64), axis=0))


@triton.jit(do_not_specialize=["num_partials", "num_active"])
def _prepare_kernel(
    partial_ptr,
    num_partials,
    active_ptr,
    num_active,
    slot_group_ptr,
    step_ptr,
    group_ptr,
    hyper_ptr,
    control_ptr,
    norm_ptr,
    HAS_NORM: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    SLOTS: tl.constexpr,
):
    # Each program adds up the partial sums by itself and writes the scalars of SLOTS slots; the first one counts.
    s = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    is_live = s < num_active
    slot = tl.load(active_ptr + s, mask=is_live, other=0)
    group = group_ptr + tl.load(slot_group_ptr + slot, mask=is_live, other=0) * 7
    coefficient = tl.full((), 1.0, tl.float64)
    skip = tl.full((), 0, tl.int64)
    if HAS_NORM:
        total = tl.zeros((1024,), tl.float64)
        for first in tl.range(0, num_partials, 1024):
            i = first + tl.arange(0, 1024)
            total += tl.load(partial_ptr + i, mask=i < num_partials, other=0.0)
        norm = tl.sqrt(tl.sum(total, axis=0))
        # False for inf and NaN alike.
        skip = tl.where(norm < float("inf"), 0, 1).to(tl.int64)
        if HAS_CLIP:
            limit = tl.load(group_ptr + 6) / (norm + 1e-6)
            coefficient = tl.where(limit < 1.0, limit, 1.0)
        if tl.program_id(0) == 0:
            tl.store(norm_ptr, norm.to(tl.float32))
            tl.store(control_ptr + 1, skip)
            tl.store(control_ptr + 2, tl.load(control_ptr + 2) + skip)
    step = tl.load(step_ptr + slot, mask=is_live, other=0) + (1 - skip)
    lr = tl.load(group + 0, mask=is_live, other=0.0)
    beta1 = tl.load(group + 1, mask=is_live, other=0.0)
    beta2 = tl.load(group + 2, mask=is_live, other=0.0)
    power1 = tl.full((SLOTS,), 1.0, tl.float64)
    power2 = tl.full((SLOTS,), 1.0, tl.float64)
    base1, base2 = beta1, beta2
    for bit in tl.static_range(31):
        is_set = ((step >> bit) & 1) == 1
        power1 = tl.where(is_set, power1 * base1, power1)
        power2 = tl.where(is_set, power2 * base2, power2)
        base1 = base1 * base1
        base2 = base2 * base2
    decay = 1.0 - lr * tl.load(group + 4, mask=is_live, other=0.0)
    out = hyper_ptr + slot * 8
    tl.store(out + 0, decay.to(tl.float32), mask=is_live)
    tl.store(out + 1, (lr / (1.0 - power1)).to(tl.float32), mask=is_live)
    tl.store(out + 2, (1.0 / tl.sqrt(1.0 - power2)).to(tl.float32), mask=is_live)
    tl.store(out + 3, (1.0 - beta1).to(tl.float32), mask=is_live)
    tl.store(out + 4, beta2.to(tl.float32), mask=is_live)
    tl.store(out + 5, (1.0 - beta2).to(tl.float32), mask=is_live)
    tl.store(out + 6, tl.load(group + 3, mask=is_live, other=0.0).to(tl.float32), mask=is_live)
    factor = tl.load(group + 5, mask=is_live, other=0.0) * coefficient
    tl.store(out + 7, factor.to(tl.float32), mask=is_live)
    tl.store(step_ptr + slot, step, mask=is_live)
