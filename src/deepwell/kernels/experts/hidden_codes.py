"""FP8 rows of what lies between the experts' products, for any activation, weighted by the router.

    h[p] = w[p] * act(H[p])                       w[p] the router's weight of the choice that row p holds
    dH = w dh act'(H),  dw[p] = <dh[p], act(H[p])>
    (q, scale) = FP8 rows of h, or of dH

What `swiglu` does for act(first half) * second half; here gates may be interleaved, clamped or absent (`activation`).
Numerics: as there. fp32 inside; h and dH are rounded once to the input's dtype and quantized from there, dw stays fp32.
Cost: memory bound; a row is read twice, the second time out of L2.
"""

# Shapes: P padded rows, F hidden width, S choices, G = 2F where experts are gated, else F.

from torch import Tensor

from deepwell.kernels.checks import check_matrix, check_shape, check_vector
from deepwell.kernels.device.bf16_words import bits_of, encoded, larger_bits, rounded
from deepwell.kernels.device.fp8 import ZERO_ROW, multiplier_from_bits
from deepwell.kernels.device.triton_support import (
    cdiv,
    constant,
    launch,
    next_power_of_2,
    on_device,
    runs_kernel,
    runs_ptx,
    tl,
    triton,
)
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
from deepwell.kernels.experts.hidden_rows import weighted_grads_ref
from deepwell.kernels.experts.swiglu import ExpertGrads, no_grads, weights_of_rows
from deepwell.kernels.quantize.fp8 import empty_codes, quantize_rows_ref

_E4M3_MAX = constant(448.0)
_BLOCK, _WARPS = 1024, 4
# Of a row that stays in registers.
_MAX_TILES = 4

# ---- reference: what the kernels must compute, in the plainest torch ----


def hidden_codes_ref(
    gate_up_PG: Tensor, weight_S: Tensor, slot_P: Tensor, how: ExpertActivation
) -> tuple[Tensor, Tensor]:
    h = hidden_and_slopes_ref(gate_up_PG, how)[0] * weights_of_rows(weight_S, slot_P)[:, None]
    return quantize_rows_ref(h.to(gate_up_PG.dtype))


def grad_codes_ref(
    dh_PF: Tensor, gate_up_PG: Tensor, weight_S: Tensor, slot_P: Tensor, how: ExpertActivation
) -> ExpertGrads:
    made = weighted_grads_ref(dh_PF, gate_up_PG, weights_of_rows(weight_S, slot_P), how)
    dw, is_live = no_grads(weight_S), slot_P >= 0
    dw[slot_P[is_live].long()] = made.dw_P[is_live]
    return ExpertGrads(*quantize_rows_ref(made.d_gate_up_PG), *quantize_rows_ref(made.hidden_PF), dw)


# ---- kernels ----


@triton.jit
def _hidden(
    row, f, F, w, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """h of columns f, rounded to the rows' dtype."""
    gate, up = load_gate_and_up(row, f, F, GATED, INTERLEAVED)
    if GATED:
        h = gated_hidden(gate, up, ACT, ALPHA, LIMIT, SHIFT)
    else:
        h, _ = plain_hidden(gate, ACT, ALPHA)
    return rounded(tl.where(f < F, h * w, 0.0), row.dtype.element_ty, ASM)


@triton.jit
def _hidden_codes_kernel(
    gu_ptr, weight_ptr, slot_ptr, q_ptr, scale_ptr, F,
    ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    # One program, one row: its tiles stay in registers, or where TILES is 0 they are recomputed for their FP8 values.
    FP8: tl.constexpr = q_ptr.dtype.element_ty
    p = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + p)
    w = tl.load(weight_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)
    row = gu_ptr + p * (2 * F if GATED else F)
    columns = tl.arange(0, BLOCK)
    bits = tl.zeros([BLOCK], dtype=tl.int32)
    if TILES:
        tiles = ()
        for i in tl.static_range(TILES):
            h = _hidden(row, i * BLOCK + columns, F, w, ACT, ALPHA, LIMIT, SHIFT, GATED, INTERLEAVED, ASM)
            bits = tl.maximum(bits, bits_of(h, ASM))
            tiles = tiles + (h,)  # type: ignore[assignment]  # noqa: RUF005 (the compiler knows no star)
        enc = multiplier_from_bits(tl.max(bits, axis=0), _E4M3_MAX, ZERO_ROW)
        for i in tl.static_range(TILES):
            f = i * BLOCK + columns
            tl.store(q_ptr + p * F + f, encoded(tiles[i], enc, FP8, ASM), mask=f < F)
    else:
        for start in range(0, F, BLOCK):
            h = _hidden(row, start + columns, F, w, ACT, ALPHA, LIMIT, SHIFT, GATED, INTERLEAVED, ASM)
            bits = tl.maximum(bits, bits_of(h, ASM))
        enc = multiplier_from_bits(tl.max(bits, axis=0), _E4M3_MAX, ZERO_ROW)
        for start in range(0, F, BLOCK):
            f = start + columns
            h = _hidden(row, f, F, w, ACT, ALPHA, LIMIT, SHIFT, GATED, INTERLEAVED, ASM)
            tl.store(q_ptr + p * F + f, encoded(h, enc, FP8, ASM), mask=f < F)
    tl.store(scale_ptr + p, tl.div_rn(1.0, enc))


@triton.jit
def _grads(
    dh_row, row, f, F, w, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """(dgate, dup, h) of columns f, rounded to the rows' dtype; and the terms of dw in fp32."""
    DTYPE: tl.constexpr = row.dtype.element_ty
    gate, up = load_gate_and_up(row, f, F, GATED, INTERLEAVED)
    dh = tl.load(dh_row + f, mask=f < F, other=0.0).to(tl.float32)
    if GATED:
        h, slope_gate, slope_up = gated_slopes(gate, up, ACT, ALPHA, LIMIT, SHIFT)
    else:
        h, slope_gate = plain_hidden(gate, ACT, ALPHA)
        slope_up = slope_gate
    h = tl.where(f < F, h, 0.0)
    dg = rounded(dh * w * slope_gate, DTYPE, ASM)
    du = rounded(dh * w * slope_up, DTYPE, ASM)
    return dg, du, rounded(h * w, DTYPE, ASM), dh * h


@triton.jit
def _store_grads(
    q_row, qh_row, f, F, dg, du, h, enc, enc_h, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ASM: tl.constexpr
):
    FP8: tl.constexpr = q_row.dtype.element_ty
    dg = encoded(dg, enc, FP8, ASM)
    du = encoded(du, enc, FP8, ASM)
    store_gate_and_up(q_row, dg, du, f, F, GATED, INTERLEAVED)
    tl.store(qh_row + f, encoded(h, enc_h, FP8, ASM), mask=f < F)


@triton.jit
def _grad_codes_kernel(
    dh_ptr, gu_ptr, weight_ptr, slot_ptr, q_ptr, scale_ptr, qh_ptr, scale_h_ptr, dw_ptr, F,
    ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    # One program, one row, as above.
    p = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + p)
    w = tl.load(weight_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)
    G = 2 * F if GATED else F
    row, dh_row, q_row = gu_ptr + p * G, dh_ptr + p * F, q_ptr + p * G
    columns = tl.arange(0, BLOCK)
    bits = tl.zeros([BLOCK], dtype=tl.int32)
    bits_h = tl.zeros([BLOCK], dtype=tl.int32)
    terms = tl.zeros([BLOCK], dtype=tl.float32)
    tiles = ()
    for i in tl.static_range(TILES):
        f = i * BLOCK + columns
        dg, du, h, term = _grads(dh_row, row, f, F, w, ACT, ALPHA, LIMIT, SHIFT, GATED, INTERLEAVED, ASM)
        bits = tl.maximum(bits, larger_bits(dg, du, ASM))
        bits_h = tl.maximum(bits_h, bits_of(h, ASM))
        terms += term
        tiles = tiles + (dg, du, h)  # type: ignore[assignment]  # noqa: RUF005
    if not TILES:
        for start in range(0, F, BLOCK):
            f = start + columns
            dg, du, h, term = _grads(dh_row, row, f, F, w, ACT, ALPHA, LIMIT, SHIFT, GATED, INTERLEAVED, ASM)
            bits = tl.maximum(bits, larger_bits(dg, du, ASM))
            bits_h = tl.maximum(bits_h, bits_of(h, ASM))
            terms += term
    tl.store(dw_ptr + slot, tl.sum(terms, axis=0), mask=slot >= 0)
    enc = multiplier_from_bits(tl.max(bits, axis=0), _E4M3_MAX, ZERO_ROW)
    enc_h = multiplier_from_bits(tl.max(bits_h, axis=0), _E4M3_MAX, ZERO_ROW)
    qh_row = qh_ptr + p * F
    for i in tl.static_range(TILES):
        f = i * BLOCK + columns
        _store_grads(
            q_row, qh_row, f, F, tiles[3 * i], tiles[3 * i + 1], tiles[3 * i + 2], enc, enc_h, GATED, INTERLEAVED, ASM
        )
    if not TILES:
        for start in range(0, F, BLOCK):
            f = start + columns
            dg, du, h, term = _grads(dh_row, row, f, F, w, ACT, ALPHA, LIMIT, SHIFT, GATED, INTERLEAVED, ASM)
            _store_grads(q_row, qh_row, f, F, dg, du, h, enc, enc_h, GATED, INTERLEAVED, ASM)
    tl.store(scale_ptr + p, tl.div_rn(1.0, enc))
    tl.store(scale_h_ptr + p, tl.div_rn(1.0, enc_h))


# ---- public wrappers: check, allocate, launch ----


def hidden_codes(gate_up_PG: Tensor, weight_S: Tensor, slot_P: Tensor, how: ExpertActivation) -> tuple[Tensor, Tensor]:
    """`(q_PF, scale_P)` of the weighted hidden rows. Raises ConfigError on a wrong argument."""
    f = _checked_width(gate_up_PG, weight_S, slot_P, how)
    if not runs_kernel(gate_up_PG, _hidden_codes_kernel):
        return hidden_codes_ref(gate_up_PG, weight_S, slot_P, how)
    q, scale = empty_codes(gate_up_PG, gate_up_PG.shape[0], f)
    if gate_up_PG.shape[0]:
        with on_device(gate_up_PG):
            launch(_hidden_codes_kernel, (gate_up_PG.shape[0],))(
                gate_up_PG, weight_S, slot_P, q, scale, f, **_constants(gate_up_PG, f, how), num_warps=_WARPS
            )
    return q, scale


def grad_codes(
    dh_PF: Tensor, gate_up_PG: Tensor, weight_S: Tensor, slot_P: Tensor, how: ExpertActivation
) -> ExpertGrads:
    """Gradients of `hidden_codes`, and h's FP8 rows again for the wgrad of the down projection. Raises as it does."""
    f = _checked_width(gate_up_PG, weight_S, slot_P, how)
    check_matrix("dh_PF", dh_PF, (gate_up_PG.dtype,))
    check_shape("dh_PF", dh_PF, (gate_up_PG.shape[0], f), gate_up_PG)
    if not runs_kernel(gate_up_PG, _grad_codes_kernel):
        return grad_codes_ref(dh_PF, gate_up_PG, weight_S, slot_P, how)
    codes = (empty_codes(gate_up_PG, gate_up_PG.shape[0], columns) for columns in (gate_up_PG.shape[1], f))
    made = ExpertGrads(*next(codes), *next(codes), no_grads(weight_S))
    if gate_up_PG.shape[0]:
        with on_device(gate_up_PG):
            launch(_grad_codes_kernel, (gate_up_PG.shape[0],))(
                dh_PF.contiguous(), gate_up_PG, weight_S, slot_P, *made, f,
                **_constants(gate_up_PG, f, how), num_warps=_WARPS,
            )  # fmt: skip
    return made


def _constants(rows: Tensor, f: int, how: ExpertActivation) -> dict[str, object]:
    block = min(_BLOCK, max(128, next_power_of_2(f)))
    tiles = cdiv(f, block)
    return {
        **constants(how),
        "BLOCK": block,
        "TILES": tiles if tiles <= _MAX_TILES else 0,
        "ASM": runs_ptx(rows, _hidden_codes_kernel),
    }


def _checked_width(gate_up: Tensor, weight_S: Tensor, slot_P: Tensor, how: ExpertActivation) -> int:
    check_vector("weight_S", weight_S, weight_S.shape[0], gate_up)
    check_vector("slot_P", slot_P, gate_up.shape[0], gate_up)
    return hidden_width(gate_up, how)
