"""Both operands of an FP8 wgrad from values with a scale per token: transposed, the tokens' scales split between them.

    dW[n, k] = sum_t a[t, n] b[t, k] * scale_a[t] * scale_b[t]        C = max_t scale_a[t] * scale_b[t]
    d = log2(C / (scale_a[t] * scale_b[t]))
    a'[n, t] = RNE(a[t, n] / 2^floor(d/2))        b'[k, t] = RNE(b[t, k] / 2^ceil(d/2))

Tensor cores sum over tokens, so a token's scale has to go into its values, and what falls below E4M3's smallest number
is lost. Under uniform attention the first token's gradient of v is thousands of times the last one's. A product has
two factors to carry the difference: half of it each keeps 2^28 between the loudest and the faintest token that still
counts, instead of 2^14 with each operand under its own largest scale, and a token loud in one operand and faint in the
other, as outliers are, is not shifted at all.
Numerics: scales must be powers of 2 ("fp8_e4m3_row_pow2"); values then move exactly but for underflow, which rounds to
    nearest even. A NaN scale makes its group's FP8 values and scales NaN.
Cost: memory bound, two bytes per code of either operand and 16 per token; with groups (experts) the same, each group by
    itself.
"""

# Shapes: T tokens (P padded rows of experts), N and K the widths of the linear, E groups.

from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.checks import check_vector
from deepwell.kernels.device.fp8 import ZERO_ROW_MULTIPLIER
from deepwell.kernels.device.triton_support import cdiv, launch, next_power_of_2, on_device, runs_kernel, tl, triton
from deepwell.kernels.quantize.transpose import Gathered, transpose_two_by_ratio

# A dense product: each program reads all scales, whose maximum it needs, in one go if it can, and writes its share.
_BLOCK, _WARPS = 16384, 32
_SLICE, _SLICES = 1024, 16
# Of a group, all by one program.
_GROUP_BLOCK, _GROUP_WARPS = 1024, 4
_ZERO_SCALE = 1.0 / ZERO_ROW_MULTIPLIER


class Balanced(NamedTuple):
    """Factors of the FP8 values' rows, at most 1, and what the product of each group has to be multiplied by."""

    ratio_a_T: Tensor
    ratio_b_T: Tensor
    scale_a: Tensor
    scale_b: Tensor


# ---- reference: what the kernel must compute, in the plainest torch ----


def balance_scales_ref(scale_a_T: Tensor, scale_b_T: Tensor, ends_E: Tensor | None = None) -> Balanced:
    ends = [scale_a_T.shape[0]] if ends_E is None else ends_E.tolist()
    groups = [_balance_group(scale_a_T[i:j], scale_b_T[i:j]) for i, j in zip([0, *ends], ends, strict=False)]
    scales = [torch.stack([group[i] for group in groups]) for i in (2, 3)]
    shape = () if ends_E is None else (len(ends),)
    return Balanced(
        torch.cat([group.ratio_a_T for group in groups]),
        torch.cat([group.ratio_b_T for group in groups]),
        *(scale.reshape(shape) for scale in scales),
    )


def _balance_group(a: Tensor, b: Tensor) -> Balanced:
    if not bool((a.isfinite() & b.isfinite()).all()):
        nan = torch.full_like(a, float("nan"))
        return Balanced(nan, nan, nan[0], nan[0])
    # Biased exponents: those of powers of two are all there is to know of them.
    total = a.view(torch.int32) // 2**23 + b.view(torch.int32) // 2**23
    largest = total.amax() if total.numel() else total.new_zeros(())
    fall = largest - total
    half, rest = fall // 2, fall - fall // 2
    return Balanced(_two_to(-half), _two_to(-rest), _from_biased(largest // 2), _from_biased(largest - largest // 2))


def _two_to(power: Tensor) -> Tensor:
    return _from_biased((power + 127).clamp(min=0))


def _from_biased(exponent: Tensor) -> Tensor:
    return (exponent * 2**23).to(torch.int32).view(torch.float32)


# ---- kernel ----


@triton.jit
def _exponents(scale_ptr, slot_ptr, t, end, TOP_K: tl.constexpr, ZERO_SCALE: tl.constexpr):
    """Of the scales of rows t, which are positive or NaN; found through their slots where there are any."""
    if slot_ptr is None:
        scale = tl.load(scale_ptr + t, mask=t < end, other=0.0)
    else:
        slot = tl.load(slot_ptr + t, mask=t < end, other=-1)
        scale = tl.load(scale_ptr + tl.maximum(slot, 0) // TOP_K, mask=slot >= 0, other=ZERO_SCALE)
    return (scale.to(tl.int32, bitcast=True) >> 23) & 255


@triton.jit
def _balance_kernel(
    a_ptr, b_ptr, slot_a_ptr, slot_b_ptr, ends_ptr, ratio_a_ptr, ratio_b_ptr, scale_a_ptr, scale_b_ptr, T,
    TOP_K: tl.constexpr, ZERO_SCALE: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    # Program (e, s): slice s of group e; without groups all tokens are one.
    e = tl.program_id(0)
    if ends_ptr is None:
        begin = 0
        end = T
    else:
        begin = tl.load(ends_ptr + e - 1, mask=e > 0, other=0)
        end = tl.load(ends_ptr + e)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    single = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(begin, end, BLOCK):
        t = start + lane
        a = _exponents(a_ptr, slot_a_ptr, t, end, TOP_K, ZERO_SCALE)
        b = _exponents(b_ptr, slot_b_ptr, t, end, TOP_K, ZERO_SCALE)
        total = tl.maximum(total, a + b)
        single = tl.maximum(single, tl.maximum(a, b))
    largest = tl.max(total, axis=0)
    is_bad = tl.max(single, axis=0) == 255
    half = largest // 2
    if tl.program_id(1) == 0:
        nan = float("nan")
        tl.store(scale_a_ptr + e, tl.where(is_bad, nan, (half << 23).to(tl.float32, bitcast=True)))
        tl.store(scale_b_ptr + e, tl.where(is_bad, nan, ((largest - half) << 23).to(tl.float32, bitcast=True)))
    for start in range(begin + tl.program_id(1) * SLICE, end, tl.num_programs(1) * SLICE):
        t = start + tl.arange(0, SLICE)
        a = _exponents(a_ptr, slot_a_ptr, t, end, TOP_K, ZERO_SCALE)
        b = _exponents(b_ptr, slot_b_ptr, t, end, TOP_K, ZERO_SCALE)
        fall = largest - a - b
        down_a = fall // 2
        ratio_a = (tl.maximum(127 - down_a, 0) << 23).to(tl.float32, bitcast=True)
        ratio_b = (tl.maximum(127 - (fall - down_a), 0) << 23).to(tl.float32, bitcast=True)
        tl.store(ratio_a_ptr + t, tl.where(is_bad, float("nan"), ratio_a), mask=t < end)
        tl.store(ratio_b_ptr + t, tl.where(is_bad, float("nan"), ratio_b), mask=t < end)


# ---- public wrappers: check, allocate, launch ----


def balance_scales(
    scale_a_T: Tensor, scale_b_T: Tensor, ends_E: Tensor | None = None, gathered: Gathered | None = None
) -> Balanced:
    """Split the products of two operands' token scales (powers of two) between them, for each group by itself.

    `ends_E` (int32) are the ends of the groups, which cover all rows; without it there is one and scales are scalars.
    Those of one side may be `gathered`. Raises ConfigError on a wrong argument.
    """
    runs = runs_kernel(scale_a_T, _balance_kernel)
    slots: list[Tensor | None] = [None, None]
    if gathered is not None and runs and scale_a_T.shape[0] and scale_b_T.shape[0]:
        slots[gathered.is_other] = gathered.slot_T
    elif gathered is not None:
        scale_a_T, scale_b_T = (
            _gathered_scales(scale, gathered) if is_other == gathered.is_other else scale
            for scale, is_other in ((scale_a_T, False), (scale_b_T, True))
        )
    rows = scale_a_T if gathered is None or gathered.is_other else gathered.slot_T
    t = rows.shape[0] if rows.dim() else 0
    for name, scale, slot in (("scale_a_T", scale_a_T, slots[0]), ("scale_b_T", scale_b_T, slots[1])):
        check_vector(name, scale, t if slot is None else scale.shape[0], scale_a_T, torch.float32)
    if ends_E is not None and (ends_E.dtype != torch.int32 or ends_E.dim() != 1):
        raise ConfigError(f"ends_E must be a vector of int32, got {ends_E.dtype} {tuple(ends_E.shape)}")
    if not runs:
        return balance_scales_ref(scale_a_T, scale_b_T, ends_E)
    shape = () if ends_E is None else (ends_E.shape[0],)
    made = Balanced(*(scale_a_T.new_empty(size) for size in ((t,), (t,), shape, shape)))
    if ends_E is None:
        grid = (1, max(1, min(_SLICES, cdiv(t, _SLICE))))
        block = min(_BLOCK, max(_SLICE, next_power_of_2(t)))
        num_warps = _WARPS * block // _BLOCK
    else:
        grid, block, num_warps = (ends_E.shape[0], 1), _GROUP_BLOCK, _GROUP_WARPS
    with on_device(scale_a_T):
        launch(_balance_kernel, grid)(
            scale_a_T, scale_b_T, *slots, ends_E, *made, t, TOP_K=1 if gathered is None else gathered.top_k,
            ZERO_SCALE=_ZERO_SCALE, BLOCK=block, SLICE=min(block, _SLICE), num_warps=num_warps,
        )  # fmt: skip
    return made


def wgrad_operands(
    q_a_TN: Tensor,
    scale_a_T: Tensor,
    q_b_TK: Tensor,
    scale_b_T: Tensor,
    ends_E: Tensor | None = None,
    gathered: Gathered | None = None,
    blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(a_NT, scale_a, b_KT, scale_b)` as `fp8_gemm` (with groups `grouped_wgrad`) reads them.

    FP8 values and scales of one side may lie by token and be `gathered` on the way in; columns of the results may be
    `blocks` of rows and zeros between them (`group_columns`). Raises ConfigError on a wrong argument.
    """
    balanced = balance_scales(scale_a_T, scale_b_T, ends_E, gathered)
    a_NT, b_KT = transpose_two_by_ratio(q_a_TN, balanced.ratio_a_T, q_b_TK, balanced.ratio_b_T, gathered, blocks)
    return a_NT, balanced.scale_a, b_KT, balanced.scale_b


def _gathered_scales(scale: Tensor, gathered: Gathered) -> Tensor:
    """Of rows that are zeros, the scale of a row of zeros: it makes no other row fainter."""
    slot = gathered.slot_T
    if not scale.shape[0]:
        return scale.new_full(slot.shape, _ZERO_SCALE)
    return torch.where(slot >= 0, scale[slot.clamp(min=0) // gathered.top_k], _ZERO_SCALE)
