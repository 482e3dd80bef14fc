"""AdamW over all tensors of a model in one pass: the update, its scalars on the device, and the gradients' norm.

    g = g * clip                    m = m + (1 - b1) * (g - m)          v = b2 * v + (1 - b2) * g^2
    p = p * (1 - lr * wd) - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

Parameters are fp32 or bf16 (optionally with an fp32 master copy), moments fp32, bf16 or FP8. What is stored in bf16 or
FP8 is rounded at random where the caller asks for it: an update below half a step is then right on average instead of
lost (bf16 keeps 8 bits: with b2 = 0.999 a second moment changes by a quarter of a step and never moves to nearest).

FP8 moments are E4M3 with an fp32 scale (amax / 448) per block of 128 elements in memory order, m and sqrt(v).
  * The root, because E4M3 spans 2^18 within a block and v spans the square of what g does; of the root the same codes
    hold 2^36 of v, and its relative error is that of the denominator. It is why E5M2 is not needed.
  * A root that is not zero never becomes zero (the smallest code holds it up), else m / eps would blow up.
  * fp32 and not power-of-two scales: a block that decays by b2 = 0.999 must be able to say so.
COAT (ICLR 2025) trains with E4M3 moments in groups of 128 and expands their range by a power; the root is such a power.

Numerics: fp32 with IEEE division and root and without contraction, in the order above (FP8 moments as `moments.py`
says), so that the kernel is bit-equal to `adamw_ref` on any device. Two exceptions: the norm has another order of sums;
and bf16 parameters without a master take the GPU's own inverse, and root where moments are not FP8, and round their
update once less (off by three units in the 24th bit, so that less than one in 10^4 of the stored parameters rounds the
other way; a v below 2^-126 counts as 2^-126, which only an eps below 1e-19 would show, and a step below 2^-100 as
none): the exact ones are a third of all instructions, and the update waited for them.
Cost:     memory bound where instructions allow it. An H200 issues about 29.6e12 instructions of a thread a second (132
          multiprocessors, 4 x 32 lanes, 1.75 GHz) while it copies 4.25 TB: 7 for a byte. Counted in the SASS of sm_90,
          default configs, an element's share; warps are those a multiprocessor holds:

          moved by the update                       bytes   can issue   issues   warps
          bf16, bf16 moments, random                   14          98       44      36
          bf16, FP8 moments, nearest                 10.1          71       40      28
          bf16, FP8 moments, random                  10.1          71       51      24
          fp32 master, FP8 moments                   16.1         112       73      16

          Two thirds of what can be issued is what 16 to 24 warps reached (H200, FP8 moments, 2026-11-15).
          The norm reads 2 bytes more. 1.92e9 parameters at 14 bytes and 4.25 TB/s: 6.3 ms.
"""


# Shapes: S slots (parameters), G parameter groups, C chunks; a tile is ROWS x 128 elements in memory order.

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.device.bf16_words import floats
from deepwell.kernels.device.philox import neighbour_bits_ref, random_bits, random_bits_ref, random_words
from deepwell.kernels.device.stores import store_alike
from deepwell.kernels.device.triton_support import constant, tl, triton
from deepwell.train.adamw.moments import (
    FP8,
    blend_e4m3,
    blend_ref,
    encode_e4m3,
    encode_ref,
    magnitude_max,
    root_exact,
    scale_of,
)
from deepwell.train.adamw.scalars import number_at, pointer_at


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slot:
    """One parameter and its state, dense and laid out alike on one device (the optimizer checks it).

    FP8 moments have fp32 scales, one for each 128 elements in memory order.
    """

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scales: Tensor | None = None
    exp_avg_sq_scales: Tensor | None = None
    master: Tensor | None = None
    # The row of scalars it uses, and its number among all parameters: the key of its random bits.
    group: int = 0
    index: int = 0

    def tensors(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """In the order of the table of addresses."""
        moments = (self.exp_avg, self.exp_avg_sq, self.exp_avg_scales, self.exp_avg_sq_scales)
        return (self.param, grad, *moments, self.master)


def flat(tensor: Tensor) -> Tensor:
    """All elements in memory order, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


# ---- reference: what the kernels must compute, in the plainest torch ----

# 16 random bits an element (int32) of parameter, first and second moment; None rounds to nearest.
Noise = tuple[Tensor | None, Tensor | None, Tensor | None]


def noise_ref(slot: Slot, seed: int, step: int, for_param: bool, for_moments: bool) -> Noise:
    """The random bits of a step. The moments take those of two neighbours of the parameter: one draw for all three."""
    key: dict[str, Any] = {"seed": seed, "tensor": slot.index, "step": step, "device": slot.param.device, "stream": 0}
    count = slot.param.numel()
    near = [neighbour_bits_ref(count, distance=d, **key) if for_moments else None for d in (2, 1)]
    return random_bits_ref(count, **key) if for_param else None, near[0], near[1]


def adamw_ref(slot: Slot, grad: Tensor, hyper: list[float], noise: Noise) -> None:
    """Reference for the update of one tensor, in place; `hyper` is its row of scalars."""
    decay, step_size, correction, weight1, beta2, weight2, eps, factor = hyper
    exp_avg, exp_avg_sq = flat(slot.exp_avg), flat(slot.exp_avg_sq)
    p = flat(slot.param if slot.master is None else slot.master).float()
    if slot.exp_avg_scales is None or slot.exp_avg_sq_scales is None:
        g = flat(grad).float() * factor
        m, v = exp_avg.float(), exp_avg_sq.float()
        m = m + (g - m) * weight1
        v = v * beta2 + (g * g) * weight2
        # torch's fp32 root on a CPU is not correctly rounded (0.6 % of results are off by a bit); through fp64 it is.
        root = v.double().sqrt().float()
        exp_avg.copy_(_round_ref(m, exp_avg.dtype, None))
        exp_avg_sq.copy_(_round_ref(v, exp_avg_sq.dtype, noise[2]))
    else:
        scales = (slot.exp_avg_scales, slot.exp_avg_sq_scales)
        m, root = blend_ref((exp_avg, exp_avg_sq), scales, flat(grad), (weight1, beta2, weight2, factor))
        encode_ref(m, exp_avg, scales[0], noise[1], is_root=False)
        encode_ref(root, exp_avg_sq, scales[1], noise[2], is_root=True)
    p = p * decay - (m / (root * correction + eps)) * step_size
    if slot.master is not None:
        flat(slot.master).copy_(p)
    flat(slot.param).copy_(_round_ref(p, slot.param.dtype, noise[0]))


def _round_ref(x: Tensor, dtype: torch.dtype, noise: Tensor | None) -> Tensor:
    if dtype == torch.float32 or noise is None:
        return x.to(dtype)
    # As formats.elements.stochastic_round_bf16, with bits that are given.
    largest = torch.finfo(torch.bfloat16).max
    rounded = ((x.view(torch.int32) + noise) & -65536).view(torch.float32).clamp(-largest, largest)
    return torch.where(x.isfinite(), rounded, x).to(dtype)


# ---- configs: what the tuner may choose from; none changes a bit of the result ----


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateConfig:
    rows: int  # of 128 elements in a tile
    tiles: int  # that one program works through, one after the other
    num_warps: int
    # Pieces of a row, of which a thread has eight elements each: the more, the less work a block of FP8 moments takes.
    pieces: int = 1
    # A cap on the registers of a thread, where the compiler would trade occupancy for them.
    max_registers: int | None = None


# A limit that is never reached (56 of 64) lets the assembler load all four tensors before it computes; without one it
# saves registers, 48, and half of the loads wait for the others (SASS for sm_90, ptxas of Triton 3.6).
CONFIGS = (
    UpdateConfig(rows=8, tiles=1, num_warps=4, max_registers=64),
    UpdateConfig(rows=16, tiles=1, num_warps=8, max_registers=64),
    UpdateConfig(rows=8, tiles=1, num_warps=8),
    UpdateConfig(rows=16, tiles=1, num_warps=8),
    UpdateConfig(rows=32, tiles=1, num_warps=8),
    UpdateConfig(rows=16, tiles=4, num_warps=8),
    # For FP8 moments; none of these spills.
    UpdateConfig(rows=16, tiles=1, num_warps=4, pieces=2),
    UpdateConfig(rows=16, tiles=1, num_warps=4, pieces=2, max_registers=128),
    UpdateConfig(rows=32, tiles=1, num_warps=4, pieces=4),
    UpdateConfig(rows=32, tiles=1, num_warps=8, pieces=2, max_registers=128),
)


def configs_for_moments(moment: torch.dtype) -> tuple[UpdateConfig, ...]:
    """The configs for moments of a dtype, the default first."""
    return tuple(config for config in CONFIGS if (config.pieces > 1) == (moment == FP8))


# ---- kernels ----

# Root and inverse for what is stored in 8 bits of mantissa: the GPU's own, without the cases of subnormal numbers.
_ROOT = constant("sqrt.approx.ftz.f32 $0, $1;")
_INVERSE = constant("rcp.approx.ftz.f32 $0, $1;")
# Newton's step for it: correctly rounded within 2^-126 .. 2^126.
_EXACT_INVERSE = constant(
    """{ .reg .f32 y, e;
    rcp.approx.ftz.f32 y, $1;
    neg.f32 e, $1;
    fma.rn.f32 e, e, y, 0f3F800000;
    fma.rn.f32 $0, y, e, y; }"""
)
# Two numbers as bf16: the half of a word is added below the upper half unless nothing may be (a dot product of halves
# and bytes, one of which is 1, takes it out and adds it at once); then the upper halves are put together.
_ROUND_TEXT = """{ .reg .b32 a, b, cut, least, may;
    mov.b32 a, $1;
    mov.b32 b, $2;
    prmt.b32 cut, a, b, 0x7632;
    abs.bf16x2 may, cut;
    mov.b32 least, 0x7F7F7F7F;
    set.lt.u32.bf16x2 may, may, least;
    dp2a.lo.u32.u32 a, $3, EVEN, a;
    dp2a.lo.u32.u32 b, $4, ODD, b;
    prmt.b32 a, a, b, 0x7632;
    lop3.b32 $0, a, cut, may, 0xE4; }"""
_ROUND = constant(_ROUND_TEXT.replace("EVEN", "0x1").replace("ODD", "0x100"))
_ROUND_SWAPPED = constant(_ROUND_TEXT.replace("EVEN", "0x100").replace("ODD", "0x1"))


@triton.jit
def _minus_step(p, m, root, step_size, correction, eps, EXACT: tl.constexpr, ASM: tl.constexpr):
    """p - m / (root * correction + eps) * step_size; where not EXACT with the GPU's inverse and rounded less often."""
    if ASM and not EXACT:
        # The step is a part of the denominator: its two scalars are divided by it, and not every m multiplied with it.
        # No step is a denominator of inf.
        is_none = tl.abs(step_size) < 7.888609052210118e-31
        per_step = tl.where(is_none, 1.0, -step_size)
        per_step = tl.inline_asm_elementwise(_EXACT_INVERSE, "=f,f", [per_step], dtype=tl.float32, is_pure=True, pack=1)
        correction = tl.where(is_none, float("inf"), correction * per_step)
        eps = tl.where(is_none, float("inf"), eps * per_step)
        denominator = tl.fma(root, tl.full(root.shape, correction, tl.float32), tl.full(root.shape, eps, tl.float32))
        inverse = tl.inline_asm_elementwise(_INVERSE, "=f,f", [denominator], dtype=tl.float32, is_pure=True, pack=1)
        p = tl.fma(m, inverse, p)
    else:
        p = p - tl.div_rn(m, root * correction + eps) * step_size
    return p


@triton.jit
def _root(v, EXACT: tl.constexpr, ASM: tl.constexpr):
    if ASM and not EXACT:
        # Subnormal numbers would count as zero, and an eps of zero would make inf of them.
        v = tl.maximum(v, 1.1754943508222875e-38, propagate_nan=tl.PropagateNan.ALL)
        return tl.inline_asm_elementwise(_ROOT, "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)
    return tl.sqrt_rn(v)


@triton.jit
def round_bf16_at_random(x, noise, IS_SWAPPED: tl.constexpr, ASM: tl.constexpr):
    """fp32 x as bf16, up with the probability of its distance; 16 random bits an element. Inf and NaN stay.

    In PTX `noise` are words: even elements take the lower half, or the upper one where it IS_SWAPPED.
    What is beyond bf16's largest number is cut instead: to that number, or it is inf or NaN (quiet, as arithmetic
    leaves it: the bit that says so is in the upper half).
    """
    if ASM:
        text: tl.constexpr = _ROUND_SWAPPED if IS_SWAPPED else _ROUND
        return tl.inline_asm_elementwise(text, "=r,f,f,r,r", [x, noise], dtype=tl.bfloat16, is_pure=True, pack=2)
    bits = x.to(tl.int32, bitcast=True)
    upper = (bits + tl.where(tl.abs(x) < 3.3895313892515355e38, noise, 0)) >> 16
    return upper.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _adamw_kernel(
    table_ptr,
    chunk_row_ptr,
    chunk_place_ptr,
    hyper_ptr,
    step_ptr,
    control_ptr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    RANDOM_PARAM: tl.constexpr,
    RANDOM_MOMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    TILES: tl.constexpr,
):
    # One program updates TILES tiles of one tensor. A skipped step touches nothing.
    pid = tl.program_id(0)
    row = tl.load(chunk_row_ptr + pid)
    place = tl.load(chunk_place_ptr + pid)
    HAS_FP8: tl.constexpr = MOMENT == tl.uint8
    # Where p is stored in 8 bits of mantissa, two units in the 24th do not show.
    EXACT: tl.constexpr = HAS_MASTER or PARAM == tl.float32
    # A policy takes five instructions of each two loads, which an update with FP8 moments would wait for.
    POLICY: tl.constexpr = "" if HAS_FP8 else "evict_first"
    # (Neither is negative. Asking for both loads them before the branch, not after another wait.)
    if tl.load(control_ptr + 1) == 0 and (row | place) >= 0:
        start = place.to(tl.int64) * (ROWS * 128 * TILES)
        numel = number_at(table_ptr, row, 7, ALIGNED)
        slot = tl.load(table_ptr + row * 10 + 8)
        seed, index, step = tl.load(control_ptr), tl.load(table_ptr + row * 10 + 9), tl.load(step_ptr + slot)
        # Read before anything is stored: afterwards the compiler could not know that the table is still the same.
        p_ptr = pointer_at(table_ptr, row, 0, PARAM, ALIGNED)
        g_ptr = pointer_at(table_ptr, row, 1, GRAD, ALIGNED)
        m_ptr = pointer_at(table_ptr, row, 2, MOMENT, ALIGNED)
        v_ptr = pointer_at(table_ptr, row, 3, MOMENT, ALIGNED)
        m_scale_ptr = pointer_at(table_ptr, row, 4, tl.float32, ALIGNED)
        v_scale_ptr = pointer_at(table_ptr, row, 5, tl.float32, ALIGNED)
        master_ptr = pointer_at(table_ptr, row, 6, tl.float32, ALIGNED)
        # The pieces of a row are one block of 128 elements where moments are FP8.
        COLUMNS: tl.constexpr = 128 // PIECES
        r = tl.arange(0, ROWS)[:, None, None]
        piece = tl.arange(0, PIECES)[None, :, None]
        # Eight elements a thread: 16 bytes of bf16, and one draw. More would be stored by way of shared memory.
        e = tl.max_contiguous(r * 128 + piece * COLUMNS + tl.arange(0, COLUMNS)[None, None, :], [1, 1, 8])
        call = r * 16 + piece * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)[None, None, :]
        for i in tl.range(TILES):
            # Addresses of the tile first: offsets in it then fit 32 bits.
            first = start + i * (ROWS * 128)
            left = tl.minimum(numel - first, ROWS * 128).to(tl.int32)
            if ALIGNED:
                left = tl.multiple_of(left, 16)
            is_live, is_live_block = e < left, r * 128 < left
            weight_ptr = master_ptr if HAS_MASTER else p_ptr
            g = tl.load(g_ptr + first + e, mask=is_live, other=0.0, eviction_policy=POLICY)
            p = tl.load(weight_ptr + first + e, mask=is_live, other=0.0, eviction_policy=POLICY)
            m = tl.load(m_ptr + first + e, mask=is_live, other=0, eviction_policy=POLICY)
            v = tl.load(v_ptr + first + e, mask=is_live, other=0, eviction_policy=POLICY)
            if HAS_FP8:
                m_scale = tl.load(m_scale_ptr + first // 128 + r, mask=is_live_block, other=0.0)
                v_scale = tl.load(v_scale_ptr + first // 128 + r, mask=is_live_block, other=0.0)
                # No load may sink below it: the assembler put a third of them amid the arithmetic, where each waits.
                tl.debug_barrier()
            hyper = hyper_ptr + slot * 8
            decay, step_size, correction = tl.load(hyper), tl.load(hyper + 1), tl.load(hyper + 2)
            weight1, beta2, weight2 = tl.load(hyper + 3), tl.load(hyper + 4), tl.load(hyper + 5)
            eps, factor = tl.load(hyper + 6), tl.load(hyper + 7)
            g = floats(g, ASM)
            p = floats(p, ASM) * decay
            if HAS_FP8:
                m, v = blend_e4m3(m, v, m_scale, v_scale, g, weight1, beta2, weight2, factor, ASM)
                root, root_max = root_exact(v, ASM)
            else:
                g = g * factor
                m = floats(m, ASM)
                m = m + (g - m) * weight1
                v = floats(v, ASM) * beta2 + (g * g) * weight2
                root = _root(v, EXACT, ASM)
            p = _minus_step(p, m, root, step_size, correction, eps, EXACT, ASM)

            p_noise, m_noise, v_noise = 0, 0, 0
            if RANDOM_MOMENT or RANDOM_PARAM:
                # A draw for each eight elements.
                if ASM and ALIGNED:
                    # A thread loads whole words, so that it has an even element and the next one side by side.
                    p_noise, v_noise, m_noise = random_words(first // 8 + call, seed, index, step, 0, HAS_FP8)
                else:
                    p_noise, v_noise, m_noise = random_bits(first // 8 + call, seed, index, step, 0, HAS_FP8, ASM)
                    if ASM:
                        # Either half of the word will do. (FP8's bits are in their place already.)
                        p_noise = p_noise * 0x10001
                        if not HAS_FP8:
                            v_noise, m_noise = v_noise * 0x10001, m_noise * 0x10001
            if not HAS_FP8:
                # A bf16 first moment moves by a tenth of its distance to the gradient: nearest loses nothing. The
                # second moves by a thousandth, less than half a step of bf16, and would stand still.
                tl.store(m_ptr + first + e, m.to(MOMENT), mask=is_live)
                new_v = round_bf16_at_random(v, v_noise, True, ASM) if RANDOM_MOMENT else v.to(MOMENT)
                tl.store(v_ptr + first + e, new_v, mask=is_live)
            if HAS_MASTER:
                tl.store(master_ptr + first + e, p, mask=is_live)
            stored = round_bf16_at_random(p, p_noise, False, ASM) if RANDOM_PARAM else p.to(PARAM)
            tl.store(p_ptr + first + e, stored, mask=is_live)
            if HAS_FP8:
                # What was masked is 0 still (its root the smallest), so nothing beyond the end raises a block's scale.
                block = tl.reshape(r, (ROWS,))
                is_live_block = tl.reshape(is_live_block, (ROWS,))
                scale, encode, drop = scale_of(magnitude_max(m), ASM)
                encode, drop = encode[:, None, None], drop[:, None, None]
                codes = encode_e4m3(m, encode, drop, m_noise, False, RANDOM_MOMENT, ASM)
                tl.store(m_ptr + first + e, codes, mask=is_live)
                store_alike(m_scale_ptr + first // 128 + block, scale, is_live_block, tl.float32, ASM)
                scale, encode, drop = scale_of(root_max, ASM)
                encode, drop = encode[:, None, None], drop[:, None, None]
                codes = encode_e4m3(root, encode, drop, v_noise, True, RANDOM_MOMENT, ASM)
                tl.store(v_ptr + first + e, codes, mask=is_live)
                store_alike(v_scale_ptr + first // 128 + block, scale, is_live_block, tl.float32, ASM)
