"""The rows between an expert's two products: hidden rows where a GEMM's epilogue does not make them, and gradients.

    hidden    h[p] = act(H[p])
    grads     dH[p] = w[p] dh[p] act'(H[p]),  h'[p] = w[p] act(H[p]),  dw[p] = <dh[p], act(H[p])>

Numerics: fp32 inside, rounded once; dw stays fp32.
Cost: memory bound. Bytes per element of h in bf16, gated: forward 4 + 2, backward 6 + 6.
"""

# Shapes: P rows, F hidden width of an expert, G = 2F where experts are gated, else F, S choices.

from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.checks import check_vector
from deepwell.kernels.device.triton_support import launch, next_power_of_2, on_device, runs_kernel, tl, triton
from deepwell.kernels.experts.activation import (
    ExpertActivation,
    constants,
    gated_hidden,
    gated_slopes,
    hidden_and_slopes_ref,
    hidden_width,
    load_gate_and_up,
    plain_hidden,
    store_gate_and_up,
)
from deepwell.kernels.experts.swiglu import weights_of_rows

_BLOCK, _WARPS = 1024, 4


class HiddenGrads(NamedTuple):
    """Gradients of gate and up, the weighted hidden rows again, and the gradient of each row's router weight."""

    d_gate_up_PG: Tensor
    hidden_PF: Tensor
    dw_P: Tensor


# ---- reference: what the kernels must compute, in the plainest torch ----


def weighted_grads_ref(dh_PF: Tensor, gate_up_PG: Tensor, weight_P: Tensor, how: ExpertActivation) -> HiddenGrads:
    """Reference for `weighted_grads`, given the weight of each row; in fp32, rounded once."""
    h, slopes = hidden_and_slopes_ref(gate_up_PG, how)
    dh, w = dh_PF.float(), weight_P[:, None]
    both = dh * w
    if how.gated:
        both = both.repeat_interleave(2, 1) if how.interleaved else torch.cat([both, both], 1)
    dtype = gate_up_PG.dtype
    return HiddenGrads((both * slopes).to(dtype), (h * w).to(dtype), (dh * h).sum(1))


# ---- kernels: one program, one row ----


@triton.jit
def _hidden_kernel(
    gu_ptr, h_ptr, F,
    ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64)
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        gate, up = load_gate_and_up(gu_ptr + p * (2 * F if GATED else F), f, F, GATED, INTERLEAVED)
        if GATED:
            h = gated_hidden(gate, up, ACT, ALPHA, LIMIT, SHIFT)
        else:
            h, _ = plain_hidden(gate, ACT, ALPHA)
        tl.store(h_ptr + p * F + f, h.to(h_ptr.dtype.element_ty), mask=f < F)


@triton.jit
def _grads_kernel(
    dh_ptr, gu_ptr, weight_ptr, slot_ptr, dgu_ptr, h_ptr, dw_ptr, F,
    ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = gu_ptr.dtype.element_ty
    G = 2 * F if GATED else F
    p = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + p)
    w = tl.load(weight_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        dh = tl.load(dh_ptr + p * F + f, mask=f < F, other=0.0).to(tl.float32)
        gate, up = load_gate_and_up(gu_ptr + p * G, f, F, GATED, INTERLEAVED)
        if GATED:
            h, slope_gate, slope_up = gated_slopes(gate, up, ACT, ALPHA, LIMIT, SHIFT)
        else:
            h, slope_gate = plain_hidden(gate, ACT, ALPHA)
            slope_up = slope_gate
        d_gate = (dh * w * slope_gate).to(DTYPE)
        d_up = (dh * w * slope_up).to(DTYPE)
        store_gate_and_up(dgu_ptr + p * G, d_gate, d_up, f, F, GATED, INTERLEAVED)
        tl.store(h_ptr + p * F + f, (h * w).to(DTYPE), mask=f < F)
        dw += dh * h
    tl.store(dw_ptr + p, tl.sum(dw, axis=0))


# ---- public wrappers: check, allocate, launch ----


def hidden_rows(gate_up_PG: Tensor, how: ExpertActivation) -> Tensor:
    """`h_PF`. Raises ConfigError on a wrong argument."""
    f = hidden_width(gate_up_PG, how)
    if not runs_kernel(gate_up_PG, _hidden_kernel):
        return hidden_and_slopes_ref(gate_up_PG, how)[0].to(gate_up_PG.dtype)
    h_PF = gate_up_PG.new_empty((gate_up_PG.shape[0], f))
    with on_device(gate_up_PG):
        launch(_hidden_kernel, (max(1, h_PF.shape[0]),))(
            gate_up_PG, h_PF, f, **constants(how), BLOCK=_block(f), num_warps=_WARPS
        )
    return h_PF


def weighted_grads(
    dh_PF: Tensor, gate_up_PG: Tensor, weight_S: Tensor, slot_P: Tensor, how: ExpertActivation
) -> HiddenGrads:
    """What follows from dh, with the router's weight of the choice that each row holds.

    The hidden rows lie where dh lay, which nobody reads again: that is the moment at which a backward holds most.
    """
    f, p = hidden_width(gate_up_PG, how), gate_up_PG.shape[0]
    check_vector("slot_P", slot_P, p, gate_up_PG)
    if dh_PF.shape != (p, f) or not dh_PF.is_contiguous():
        raise ConfigError(f"dh_PF is {tuple(dh_PF.shape)}; it must be contiguous and {(p, f)}")
    if not runs_kernel(gate_up_PG, _grads_kernel):
        return weighted_grads_ref(dh_PF, gate_up_PG, weights_of_rows(weight_S, slot_P), how)
    # Numbers may change threads on the way (interleaved gates; F % 16 == 8 above 128), yet what is written at a place
    # is made of the one number that was read there.
    made = HiddenGrads(torch.empty_like(gate_up_PG), dh_PF, dh_PF.new_empty(p, dtype=torch.float32))
    with on_device(gate_up_PG):
        launch(_grads_kernel, (max(1, p),))(
            dh_PF, gate_up_PG, weight_S, slot_P, *made, f, **constants(how), BLOCK=_block(f), num_warps=_WARPS
        )
    return made


def _block(f: int) -> int:
    return min(_BLOCK, max(128, next_power_of_2(f)))
