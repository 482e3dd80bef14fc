"""SwiGLU between the two products of the experts, weighted by the router, forward and backward, to FP8 rows.

    h[p] = w[p] * act(g[p]) * u[p]                        w[p] the router's weight of the choice that row p holds
    dw[p] = sum_f dh[p] act(g) u       dg = w dh u act'(g),  du = w dh act(g)
    (q, scale) = FP8 rows of h, or of [dg, du] with one scale for both halves of a row

The router's weight goes in before the down projection instead of after it: W (w h) = w (W h). So the output rows are
added up as they are, the gradient that comes back is one row per token and not one per choice (quantized once, gathered
as values), and the router's gradient needs h, which is at hand, instead of the down projection's output, which need not
be kept.

Numerics: fp32 inside; h, dg and du are rounded once to the input's dtype and quantized from there, dw stays fp32.
    Rows without a choice (slot -1) have weight 0.
Cost: memory bound; bytes per element of h in bf16: forward 4 + 1; backward 6 + 2 (q) + 1 (q of h again). At 4.25 TB/s:
    Qwen3-30B-A3B (262144 x 768) 237 and 426 us, Mixtral (32768 x 14336) 553 and 995 us.
"""

# Shapes: P padded rows, F hidden width, S choices; gate_up_P2F holds the gate in its first half, up in its second.

from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.activation.functions import ACTIVATIONS, act_and_slope, act_of, act_ref
from deepwell.kernels.activation.swiglu import (
    BACKWARD_CONFIGS,
    FORWARD_CONFIGS,
    MAX_WHOLE_ROW,
    default_backward_config,
    default_forward_config,
)
from deepwell.kernels.checks import check_matrix, check_shape, check_vector
from deepwell.kernels.device.bf16_words import bits_of, encoded, floats, larger_bits, rounded
from deepwell.kernels.device.fp8 import ZERO_ROW, multiplier_from_bits
from deepwell.kernels.device.triton_support import constant, launch, on_device, runs_kernel, runs_ptx, tl, triton
from deepwell.kernels.experts.kept_rows import (
    load_packed,
    pack_rows_ref,
    store_packed,
    top_of,
    unpack_rows_ref,
)
from deepwell.kernels.quantize.fp8 import RowConfig, empty_codes, quantize_rows_ref

__all__ = ["BACKWARD_CONFIGS", "FORWARD_CONFIGS", "expert_swiglu", "expert_swiglu_backward", "expert_swiglu_kept"]

_E4M3_MAX = constant(448.0)


class ExpertGrads(NamedTuple):
    """FP8 rows of [dg, du] and of h recomputed, and the gradient of the router's weights in fp32."""

    q: Tensor
    scale: Tensor
    q_h: Tensor
    scale_h: Tensor
    dw_S: Tensor


# ---- reference: what the kernels must compute, in the plainest torch ----


def weights_of_rows(weight_S: Tensor, slot_P: Tensor) -> Tensor:
    """The router's weight of each padded row in fp32, 0 where it holds no choice."""
    if not weight_S.shape[0]:
        return slot_P.new_zeros(slot_P.shape, dtype=torch.float32)
    return torch.where(slot_P >= 0, weight_S.float()[slot_P.clamp(min=0).long()], 0.0)


def no_grads(weight_S: Tensor) -> Tensor:
    """Gradients of the router's weights, for a kernel to write: a choice that no expert took keeps its zero."""
    return torch.zeros(weight_S.shape, dtype=torch.float32, device=weight_S.device)


def expert_swiglu_ref(gate_up_P2F: Tensor, weight_S: Tensor, slot_P: Tensor, act: str) -> tuple[Tensor, Tensor]:
    g, u = gate_up_P2F.float().chunk(2, dim=1)
    h = act_ref(g, act)[0] * u * weights_of_rows(weight_S, slot_P)[:, None]
    return quantize_rows_ref(h.to(gate_up_P2F.dtype))


def expert_swiglu_backward_ref(
    dh_PF: Tensor, gate_up_P2F: Tensor, weight_S: Tensor, slot_P: Tensor, act: str
) -> ExpertGrads:
    (g, u), dh = gate_up_P2F.float().chunk(2, dim=1), dh_PF.float()
    w = weights_of_rows(weight_S, slot_P)[:, None]
    a, slope = act_ref(g, act)
    dtype = gate_up_P2F.dtype
    grads = torch.cat([dh * w * u * slope, dh * w * a], dim=1).to(dtype)
    dw, is_live = no_grads(weight_S), slot_P >= 0
    dw[slot_P[is_live].long()] = (dh * (a * u)).sum(1)[is_live]
    return ExpertGrads(*quantize_rows_ref(grads), *quantize_rows_ref((a * u * w).to(dtype)), dw)


# ---- configs ----


# A warp a row: nothing is exchanged between warps. One H200, 2026-11-18, us of one warp, of SwiGLU's own config, and of
# copying as many bytes: 264,192 rows of 768 columns forward 419, 455, 382, backward 487, 598, 382; of 1024 columns
# forward 526, 530, 509, backward 527, 617, 509.
_ONE_WARP = RowConfig(tile=0, num_warps=1)
_ONE_WARP_COLUMNS = 1024


def expert_forward_config(columns: int) -> RowConfig:
    """SwiGLU's own, but for short rows and long ones (33,024 of 14,336: 32 warps 917 us, 16 warps 987)."""
    if columns <= _ONE_WARP_COLUMNS:
        return _ONE_WARP
    return BACKWARD_CONFIGS[0] if 8192 < columns <= MAX_WHOLE_ROW else default_forward_config(columns)


def expert_backward_config(columns: int, *, in_words: bool = True) -> RowConfig:
    """SwiGLU's own, but that two rows of more than 8192 columns do not fit at once: the router's terms are held too."""
    if columns <= _ONE_WARP_COLUMNS:
        return _ONE_WARP
    config = default_backward_config(columns, in_words=in_words)
    return BACKWARD_CONFIGS[0] if config.max_registers else config


# ---- kernels ----


@triton.jit
def _weight_of(weight_ptr, slot):
    return tl.load(weight_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)


@triton.jit
def _hidden(gu_row, f, F, w, ACT: tl.constexpr, EVICT: tl.constexpr, ASM: tl.constexpr):
    """h of one tile, rounded to the input's dtype."""
    g = tl.load(gu_row + f, mask=f < F, other=0.0, eviction_policy=EVICT)
    u = tl.load(gu_row + F + f, mask=f < F, other=0.0, eviction_policy=EVICT).to(tl.float32)
    return rounded(act_of(g.to(tl.float32), ACT, ASM) * u * w, g.dtype, ASM)


@triton.jit
def _expert_swiglu_kernel(
    gu_ptr,
    weight_ptr,
    slot_ptr,
    q_ptr,
    scale_ptr,
    kept_ptr,
    top_ptr,
    F,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO_PASSES: tl.constexpr,
    ASM: tl.constexpr,
):
    # One program, one row.
    FP8: tl.constexpr = q_ptr.dtype.element_ty
    p = tl.program_id(0).to(tl.int64)
    w = _weight_of(weight_ptr, tl.load(slot_ptr + p))
    gu_row = gu_ptr + p * 2 * F
    columns = tl.arange(0, BLOCK)
    if TWO_PASSES:
        bits = tl.zeros([BLOCK], dtype=tl.int32)
        for start in range(0, F, BLOCK):
            bits = tl.maximum(bits, bits_of(_hidden(gu_row, start + columns, F, w, ACT, "evict_last", ASM), ASM))
        enc = multiplier_from_bits(tl.max(bits, axis=0), _E4M3_MAX, ZERO_ROW)
        for start in range(0, F, BLOCK):
            f = start + columns
            h = _hidden(gu_row, f, F, w, ACT, "evict_first", ASM)
            tl.store(q_ptr + p * F + f, encoded(h, enc, FP8, ASM), mask=f < F)
    else:
        h = _hidden(gu_row, columns, F, w, ACT, "", ASM)
        enc = multiplier_from_bits(tl.max(bits_of(h, ASM), axis=0), _E4M3_MAX, ZERO_ROW)
        tl.store(q_ptr + p * F + columns, encoded(h, enc, FP8, ASM), mask=columns < F)
    tl.store(scale_ptr + p, tl.div_rn(1.0, enc))
    if kept_ptr is not None:
        _keep(gu_row, kept_ptr + p * 3 * F, top_ptr + p, F, BLOCK, TWO_PASSES, ASM)


@triton.jit
def _keep(gu_row, kept_row, top_ptr, F, BLOCK: tl.constexpr, TWO_PASSES: tl.constexpr, ASM: tl.constexpr):
    """Gate and up of a row once more, out of the cache, for the backward (`kept_rows`)."""
    columns = tl.arange(0, BLOCK)
    if TWO_PASSES:
        largest = tl.zeros([BLOCK], dtype=tl.int32)
        for start in range(0, F, BLOCK):
            f = start + columns
            g = tl.load(gu_row + f, mask=f < F, other=0.0)
            u = tl.load(gu_row + F + f, mask=f < F, other=0.0)
            largest = tl.maximum(largest, larger_bits(g, u, ASM))
        top = top_of(tl.max(largest, axis=0))
        for start in range(0, F, BLOCK):
            f = start + columns
            g = floats(tl.load(gu_row + f, mask=f < F, other=0.0), ASM)
            u = floats(tl.load(gu_row + F + f, mask=f < F, other=0.0), ASM)
            store_packed(kept_row, g, u, f, F, top, ASM)
    else:
        g = tl.load(gu_row + columns, mask=columns < F, other=0.0)
        u = tl.load(gu_row + F + columns, mask=columns < F, other=0.0)
        top = top_of(tl.max(larger_bits(g, u, ASM), axis=0))
        store_packed(kept_row, floats(g, ASM), floats(u, ASM), columns, F, top, ASM)
    tl.store(top_ptr, top.to(tl.uint8))


@triton.jit
def _expert_grads(dh_row, gu_row, top, f, F, w, ACT: tl.constexpr, EVICT: tl.constexpr, ASM: tl.constexpr):
    """(dg, du, h) of one tile, rounded to the dtype of dh; and the terms of dw in fp32."""
    DTYPE: tl.constexpr = dh_row.dtype.element_ty
    if top is not None:
        g, u = load_packed(gu_row, f, F, top, EVICT, ASM)
    else:
        g = tl.load(gu_row + f, mask=f < F, other=0.0, eviction_policy=EVICT).to(tl.float32)
        u = tl.load(gu_row + F + f, mask=f < F, other=0.0, eviction_policy=EVICT).to(tl.float32)
    dh = tl.load(dh_row + f, mask=f < F, other=0.0, eviction_policy=EVICT).to(tl.float32)
    a, slope = act_and_slope(g, ACT, ASM)
    dg = rounded(dh * w * u * slope, DTYPE, ASM)
    du = rounded(dh * w * a, DTYPE, ASM)
    h = rounded(a * u * w, DTYPE, ASM)
    return dg, du, h, dh * (a * u)


@triton.jit
def _store_codes(row, x, f, F, enc, FP8: tl.constexpr, ASM: tl.constexpr):
    tl.store(row + f, encoded(x, enc, FP8, ASM), mask=f < F)


@triton.jit
def _expert_swiglu_backward_kernel(
    dh_ptr,
    gu_ptr,
    top_ptr,
    weight_ptr,
    slot_ptr,
    q_ptr,
    scale_ptr,
    qh_ptr,
    scale_h_ptr,
    dw_ptr,
    F,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO_PASSES: tl.constexpr,
    ASM: tl.constexpr,
):
    # One program, one row.
    FP8: tl.constexpr = q_ptr.dtype.element_ty
    p = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + p)
    w = _weight_of(weight_ptr, slot)
    top = None
    gu_row = gu_ptr + p * 2 * F
    if top_ptr is not None:
        top = tl.load(top_ptr + p).to(tl.int32)
        gu_row = gu_ptr + p * 3 * F
    dh_row = dh_ptr + p * F
    q_row = q_ptr + p * 2 * F
    columns = tl.arange(0, BLOCK)
    if TWO_PASSES:
        bits = tl.zeros([BLOCK], dtype=tl.int32)
        bits_h = tl.zeros([BLOCK], dtype=tl.int32)
        terms = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, F, BLOCK):
            dg, du, h, term = _expert_grads(dh_row, gu_row, top, start + columns, F, w, ACT, "evict_last", ASM)
            bits = tl.maximum(bits, larger_bits(dg, du, ASM))
            bits_h = tl.maximum(bits_h, bits_of(h, ASM))
            terms += term
        tl.store(dw_ptr + slot, tl.sum(terms, axis=0), mask=slot >= 0)
        enc = multiplier_from_bits(tl.max(bits, axis=0), _E4M3_MAX, ZERO_ROW)
        enc_h = multiplier_from_bits(tl.max(bits_h, axis=0), _E4M3_MAX, ZERO_ROW)
        for start in range(0, F, BLOCK):
            f = start + columns
            dg, du, h, term = _expert_grads(dh_row, gu_row, top, f, F, w, ACT, "evict_first", ASM)
            _store_codes(q_row, dg, f, F, enc, FP8, ASM)
            _store_codes(q_row + F, du, f, F, enc, FP8, ASM)
            _store_codes(qh_ptr + p * F, h, f, F, enc_h, FP8, ASM)
    else:
        dg, du, h, terms = _expert_grads(dh_row, gu_row, top, columns, F, w, ACT, "", ASM)
        # At once: held until the end, the terms alone would take half of the registers.
        tl.store(dw_ptr + slot, tl.sum(terms, axis=0), mask=slot >= 0)
        enc = multiplier_from_bits(tl.max(larger_bits(dg, du, ASM), axis=0), _E4M3_MAX, ZERO_ROW)
        enc_h = multiplier_from_bits(tl.max(bits_of(h, ASM), axis=0), _E4M3_MAX, ZERO_ROW)
        _store_codes(q_row, dg, columns, F, enc, FP8, ASM)
        _store_codes(q_row + F, du, columns, F, enc, FP8, ASM)
        _store_codes(qh_ptr + p * F, h, columns, F, enc_h, FP8, ASM)
    tl.store(scale_ptr + p, tl.div_rn(1.0, enc))
    tl.store(scale_h_ptr + p, tl.div_rn(1.0, enc_h))


# ---- public wrappers: check, allocate, launch ----


def expert_swiglu(
    gate_up_P2F: Tensor, weight_S: Tensor, slot_P: Tensor, *, act: str = "silu", config: RowConfig | None = None
) -> tuple[Tensor, Tensor]:
    """`(q_PF, scale_P)` of the weighted hidden rows. Raises ConfigError on a wrong argument."""
    return _hidden_codes(gate_up_P2F, weight_S, slot_P, act, config, None)


def expert_swiglu_kept(
    gate_up_P2F: Tensor, weight_S: Tensor, slot_P: Tensor, *, act: str = "silu", config: RowConfig | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`expert_swiglu` of bf16 rows, and `(kept_P3F, top_P)`: the rows of gate and up for its backward."""
    check_matrix("gate_up_P2F", gate_up_P2F, (torch.bfloat16,))
    if not runs_kernel(gate_up_P2F, _expert_swiglu_kernel):
        hidden = expert_swiglu(gate_up_P2F, weight_S, slot_P, act=act, config=config)
        return *hidden, *pack_rows_ref(gate_up_P2F)
    p, width = gate_up_P2F.shape[0], gate_up_P2F.shape[1] // 2
    kept = torch.empty((p, 3 * width), dtype=torch.uint8, device=gate_up_P2F.device)
    top = torch.empty(p, dtype=torch.uint8, device=gate_up_P2F.device)
    return *_hidden_codes(gate_up_P2F, weight_S, slot_P, act, config, (kept, top)), kept, top


def _hidden_codes(
    gate_up_P2F: Tensor,
    weight_S: Tensor,
    slot_P: Tensor,
    act: str,
    config: RowConfig | None,
    kept: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    width = _check(gate_up_P2F, weight_S, slot_P, act)
    if not runs_kernel(gate_up_P2F, _expert_swiglu_kernel):
        return expert_swiglu_ref(gate_up_P2F, weight_S, slot_P, act)
    q, scale = empty_codes(gate_up_P2F, gate_up_P2F.shape[0], width)
    config = _fit(config or expert_forward_config(width), width)
    if gate_up_P2F.shape[0]:
        with on_device(gate_up_P2F):
            launch(_expert_swiglu_kernel, (gate_up_P2F.shape[0],))(
                gate_up_P2F,
                weight_S,
                slot_P,
                q,
                scale,
                *(kept or (None, None)),
                width,
                ACT=act,
                BLOCK=config.block(width),
                TWO_PASSES=config.tile > 0,
                ASM=runs_ptx(gate_up_P2F, _expert_swiglu_kernel),
                num_warps=config.num_warps,
            )
    return q, scale


def expert_swiglu_backward(
    dh_PF: Tensor,
    gate_up: Tensor,
    weight_S: Tensor,
    slot_P: Tensor,
    *,
    top_P: Tensor | None = None,
    act: str = "silu",
    config: RowConfig | None = None,
) -> ExpertGrads:
    """Gradients of `expert_swiglu`, and h's FP8 rows again for the wgrad of the down projection.

    `gate_up` is what `expert_swiglu` got, or with `top_P` what `expert_swiglu_kept` kept of it.
    """
    width = _check(gate_up, weight_S, slot_P, act, halves=2 if top_P is None else 3)
    if top_P is not None:
        check_vector("top_P", top_P, gate_up.shape[0], gate_up)
    check_matrix("dh_PF", dh_PF, (gate_up.dtype,) if top_P is None else (torch.bfloat16,))
    check_shape("dh_PF", dh_PF, (gate_up.shape[0], width), gate_up)
    if not runs_kernel(gate_up, _expert_swiglu_backward_kernel):
        rows = gate_up if top_P is None else unpack_rows_ref(gate_up, top_P)
        return expert_swiglu_backward_ref(dh_PF, rows, weight_S, slot_P, act)
    p = gate_up.shape[0]
    made = ExpertGrads(*empty_codes(gate_up, p, 2 * width), *empty_codes(gate_up, p, width), no_grads(weight_S))
    has_ptx = runs_ptx(gate_up, _expert_swiglu_backward_kernel)
    in_words = has_ptx and dh_PF.dtype == torch.bfloat16
    config = _fit(config or expert_backward_config(width, in_words=in_words), width)
    if p:
        with on_device(gate_up):
            launch(_expert_swiglu_backward_kernel, (p,))(
                dh_PF.contiguous(),
                gate_up,
                top_P,
                weight_S,
                slot_P,
                *made,
                width,
                ACT=act,
                BLOCK=config.block(width),
                TWO_PASSES=config.tile > 0,
                ASM=has_ptx,
                num_warps=config.num_warps,
                maxnreg=config.max_registers,
            )
    return made


def _check(gate_up: Tensor, weight_S: Tensor, slot_P: Tensor, act: str, *, halves: int = 2) -> int:
    """F, after checking what forward and backward share."""
    if halves == 2:
        check_matrix("gate_up_P2F", gate_up)
    elif gate_up.dtype != torch.uint8 or gate_up.dim() != 2:
        raise ConfigError(f"kept rows are bytes [P, 3 F], got {gate_up.dtype} {tuple(gate_up.shape)}")
    if gate_up.shape[1] % halves or not gate_up.is_contiguous():
        parts = "two equal halves" if halves == 2 else "three equal parts"
        raise ConfigError(f"gate_up_P2F must be contiguous with {parts}, got {tuple(gate_up.shape)}")
    check_vector("weight_S", weight_S, weight_S.shape[0], gate_up)
    check_vector("slot_P", slot_P, gate_up.shape[0], gate_up)
    if act not in ACTIVATIONS:
        raise ConfigError(f"act must be one of {', '.join(ACTIVATIONS)}, got {act!r}")
    return gate_up.shape[1] // halves


def _fit(config: RowConfig, width: int) -> RowConfig:
    if not config.tile and width > 2 * MAX_WHOLE_ROW:
        raise UnsupportedError(f"config takes whole rows, and {width} columns do not fit registers; give it a tile")
    return config
