"""The quantizers as torch ops, with the shapes that tracing needs.

quantize_rows                       x, dy: one scale a row
quantize_weights                    weights side by side under one scale, along K; _transposed: along N
wgrad_operands                      FP8 rows of dy and x transposed, each under one scale
round_to                            x rounded to a format, for its emulation
quantize_tensor[_both]              x, dy: an amax pass, then values along the rows, or both ways from one read
quantize_1x128[_both]               x, dy: blocks along the rows, or along rows and tokens from one read
quantize_weights_128x128            weights side by side in squares, along K; _transposed: along N
mx_quantize_rows, _both             x, w, dy in MXFP8, along the rows, or both ways from one read
nv_quantize_rows                    x, w, dy in NVFP4
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.formats.hadamard import DEFAULT_SIGNS, hadamard16
from deepwell.formats.layout import padded_shape
from deepwell.formats.quantize import quantize
from deepwell.formats.spec import get_format
from deepwell.kernels.quantize.fp8 import quantize_rows, quantize_weight
from deepwell.kernels.quantize.fp8_blocks import (
    BLOCK,
    Blocks,
    empty_128x128,
    num_blocks,
    num_lines,
    quantize_1x128,
    quantize_1x128_both,
    quantize_128x128,
)
from deepwell.kernels.quantize.microscaled import quantize_mxfp8, quantize_nvfp4
from deepwell.kernels.quantize.round_to import round_to
from deepwell.kernels.quantize.transpose import BLOCK_ROWS, Gathered
from deepwell.kernels.quantize.weights import as_stored, num_partials, partial_maxima, quantize_group
from deepwell.kernels.quantize.wgrad_operands import wgrad_operands
from deepwell.kernels.torch_library import FP8, dense, fp8_rows_like, not_none, register_op

ops = torch.ops.deepwell

# ---- rows and weights under one scale ----


def _quantize_weights(weights: Sequence[Tensor], scale_per_row: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Several weights side by side under one scale, for the forward: (q [N, K], scale, partial maxima)."""
    partials = partial_maxima(weights)
    return *quantize_group(weights, partials, transposed=False, scale_per_row=scale_per_row), partials


def _fake_quantize_weights(weights: Sequence[Tensor], scale_per_row: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    k, n = weights[0].shape[1], sum(w.shape[0] for w in weights)
    scale, partials = (
        weights[0].new_empty(shape, dtype=torch.float32)
        for shape in (n if scale_per_row else (), num_partials(weights))
    )
    return weights[0].new_empty((n, k), dtype=FP8), scale, partials


def _fake_quantize_weights_transposed(
    weights: Sequence[Tensor], partials: Tensor, after: Tensor, scale_per_row: bool = False
) -> tuple[Tensor, Tensor]:
    k, n = weights[0].shape[1], sum(w.shape[0] for w in weights)
    scale = weights[0].new_empty(k if scale_per_row else (), dtype=torch.float32)
    return weights[0].new_empty((k, n), dtype=FP8), scale


def rounded(x: Tensor, fmt: str, rounding: str, hadamard: bool) -> Tensor:
    """x rounded along its last dimension; what padded the last run of the Hadamard transform stays."""
    x, signs = hadamard_operand(x, hadamard)
    return round_to(x, fmt, rounding=rounding, hadamard=signs)


def hadamard_operand(x: Tensor, hadamard: bool) -> tuple[Tensor, tuple[int, ...] | None]:
    """(x, the transform's signs): its last run is padded with zeros. Without the transform x and None."""
    if not hadamard:
        return x.contiguous(), None
    return F.pad(x, (0, _hadamard_width(x) - x.shape[-1])).contiguous(), DEFAULT_SIGNS


def _hadamard_width(x: Tensor) -> int:
    run = len(DEFAULT_SIGNS)
    return -(-x.shape[-1] // run) * run


def _fake_round_to(x: Tensor, fmt: str, rounding: str, hadamard: bool) -> Tensor:
    width = _hadamard_width(x) if hadamard else x.shape[-1]
    return x.new_empty((*x.shape[:-1], width), dtype=torch.float32)


def _how(
    slot: Tensor | None = None, top_k: int = 1, gathers_b: bool = False, blocks: Tensor | None = None
) -> tuple[Gathered | None, Tensor | None]:
    return None if slot is None else Gathered(slot, top_k, gathers_b), blocks


def _wgrad_operands(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor | None = None, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return wgrad_operands(a, scale_a, b, scale_b, offs, *_how(*how))


def _fake_wgrad_operands(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor | None = None, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = () if offs is None else (offs.shape[0],)
    gathered, blocks = _how(*how)
    rows = a.shape[0] if gathered is None else gathered.slot_T.shape[0]
    columns = rows if blocks is None else BLOCK_ROWS * blocks.shape[0]
    transposed = (q.new_empty((q.shape[1], columns)) for q in (a, b))
    return next(transposed), scale_a.new_empty(shape), next(transposed), scale_b.new_empty(shape)


register_op(
    "quantize_rows(Tensor x) -> (Tensor, Tensor)", lambda x: quantize_rows(dense(x)), fp8_rows_like, caches=True
)
# Once more in the backward: `after`, which is not read, keeps a compiler from keeping the forward's FP8 values instead.
register_op(
    "quantize_rows_again(Tensor x, Tensor after) -> (Tensor, Tensor)",
    lambda x, after: quantize_rows(dense(x)),
    lambda x, after: fp8_rows_like(x),
    caches=True,
)
register_op(
    "quantize_weights(Tensor[] weights, bool scale_per_row=False) -> (Tensor, Tensor, Tensor)",
    _quantize_weights,
    _fake_quantize_weights,
    caches=True,
)
# The transposed copy of the same values, for the backward: (q [K, N], scale). Made when the backward asks for it, from
# weights that are there anyway: kept from the forward it would cost a byte per parameter at the peak. `after` is any
# tensor of the backward: it keeps a compiler from moving this forward.
register_op(
    "quantize_weights_transposed(Tensor[] weights, Tensor partials, Tensor after, bool scale_per_row=False)"
    " -> (Tensor, Tensor)",
    lambda weights, partials, after, scale_per_row=False: quantize_group(
        weights, partials, transposed=True, scale_per_row=scale_per_row
    ),
    _fake_quantize_weights_transposed,
    caches=True,
)
register_op(
    "wgrad_operands(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor? offs=None, Tensor? slot=None,"
    " int top_k=1, bool gathers_b=False, Tensor? blocks=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _wgrad_operands,
    _fake_wgrad_operands,
    caches=True,
)
register_op("round_to(Tensor x, str fmt, str rounding, bool hadamard) -> Tensor", rounded, _fake_round_to)

# ---- one scale per tensor ----


def _element(e5m2: bool) -> torch.dtype:
    return torch.float8_e5m2 if e5m2 else FP8


def _fake_tensor(x: Tensor, e5m2: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=_element(e5m2)), x.new_empty((), dtype=torch.float32)


def _fake_tensor_both(x: Tensor, e5m2: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, scale = _fake_tensor(x, e5m2)
    return q, q.new_empty((x.shape[1], x.shape[0])), scale


register_op(
    "quantize_tensor(Tensor x, bool e5m2) -> (Tensor, Tensor)",
    lambda x, e5m2: not_none(quantize_weight(dense(x), dtype=_element(e5m2), write="rows")),
    _fake_tensor,
    caches=True,
)
register_op(
    "quantize_tensor_both(Tensor x, bool e5m2) -> (Tensor, Tensor, Tensor)",
    lambda x, e5m2: quantize_weight(dense(x), dtype=_element(e5m2)),
    _fake_tensor_both,
    caches=True,
)

# ---- 1x128 ----


def _block_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[1] % BLOCK:
        return not_none(quantize_1x128_both(dense(x), columns=False))
    codes, scale_TB = quantize_1x128(dense(x))
    return codes, scale_TB.T.contiguous()


def _fake_blocks(x: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((rows, num_blocks(length) * BLOCK), dtype=FP8)
    return codes, x.new_empty((num_blocks(length), rows), dtype=torch.float32)


register_op(
    "quantize_1x128(Tensor x) -> (Tensor, Tensor)",
    _block_rows,
    lambda x: _fake_blocks(x, x.shape[0], x.shape[1]),
    caches=True,
)
register_op(
    "quantize_1x128_both(Tensor x) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x: tuple(quantize_1x128_both(dense(x))),
    lambda x: (*_fake_blocks(x, x.shape[0], x.shape[1]), *_fake_blocks(x, x.shape[1], x.shape[0])),
    caches=True,
)

# ---- 128x128 ----


def _weights(weights: Sequence[Tensor], *, along_k: bool) -> tuple[Tensor, Tensor]:
    """One copy of weights side by side: [N, K'] or [K, N'], with its scales.

    Where one that is not the last ends inside a square, all are joined first: squares then reach over its end.
    """
    if any(w.shape[0] % BLOCK for w in weights[:-1]):
        weights = [torch.cat([w.detach() for w in weights])]
    n, k = sum(w.shape[0] for w in weights), weights[0].shape[1]
    made = empty_128x128(n, k, weights[0], rows=along_k, columns=not along_k)
    start = 0
    codes, scale = not_none(made)
    for w in weights:
        stop = start + w.shape[0]
        blocks = slice(start // BLOCK, num_blocks(stop))
        if along_k:
            part = (codes[start:stop], scale[blocks])
        else:
            part = (codes[:, start : blocks.stop * BLOCK], scale[:, blocks])
        stored = as_stored(w)
        is_transposed = stored.shape != w.shape or stored.stride() != w.stride()
        # Of a weight that is stored as [K, N] the copy along N is the one along its rows.
        out = Blocks(*part, None, None) if along_k != is_transposed else Blocks(None, None, *part)
        quantize_128x128(stored, out=out)
        start = stop
    return codes, scale


def _fake_weights(weights: Sequence[Tensor], *, along_k: bool) -> tuple[Tensor, Tensor]:
    n, k = sum(w.shape[0] for w in weights), weights[0].shape[1]
    rows, length = (n, k) if along_k else (k, n)
    codes, _ = _fake_blocks(weights[0], rows, length)
    return codes, weights[0].new_empty((num_blocks(rows), num_lines(num_blocks(length))), dtype=torch.float32)


register_op(
    "quantize_weights_128x128(Tensor[] weights) -> (Tensor, Tensor)",
    lambda weights: _weights(weights, along_k=True),
    lambda weights: _fake_weights(weights, along_k=True),
)
# `after` is any tensor of the backward: it keeps a compiler from moving this forward.
register_op(
    "quantize_weights_128x128_transposed(Tensor[] weights, Tensor after) -> (Tensor, Tensor)",
    lambda weights, after: _weights(weights, along_k=False),
    lambda weights, after: _fake_weights(weights, along_k=False),
)

_MX_DTYPES = {"mxfp8": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}

# ---- MXFP8 ----


def _fake_mx(x: Tensor, rows: int, length: int, fmt: str) -> tuple[Tensor, Tensor]:
    high, wide = padded_shape(rows, (length + 31) // 32)
    codes = x.new_empty((rows, length), dtype=_MX_DTYPES[fmt])
    return codes, x.new_empty(high * wide, dtype=torch.float8_e8m0fnu)


register_op(
    "mx_quantize_rows(Tensor x, str fmt) -> (Tensor, Tensor)",
    lambda x, fmt: not_none(quantize_mxfp8(dense(x), columns=False, dtype=_MX_DTYPES[fmt])),
    lambda x, fmt: _fake_mx(x, x.shape[0], x.shape[1], fmt),
    caches=True,
)
register_op(
    "mx_quantize_both(Tensor x, str fmt) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, fmt: tuple(quantize_mxfp8(dense(x), dtype=_MX_DTYPES[fmt])),
    lambda x, fmt: (*_fake_mx(x, x.shape[0], x.shape[1], fmt), *_fake_mx(x, x.shape[1], x.shape[0], fmt)),
    caches=True,
)

# ---- NVFP4 ----


def _nv_rows(x: Tensor, fmt: str, rounding: str, hadamard: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of x in NVFP4; the last run of the Hadamard transform is padded with zeros, as in the emulation."""
    if hadamard:
        x = hadamard16(hadamard_operand(x, hadamard)[0])
    x = dense(x)
    if not x.is_cuda and rounding == "stochastic":
        # The emulation's own draws: the same generator in the same order gives the same FP8 values.
        q = quantize(x, fmt, rounding=rounding)
        assert q.global_scale is not None
        return q.data, q.scale_swizzled(), q.global_scale
    bits = torch.randint(0, 256, x.shape, dtype=torch.uint8, device=x.device) if rounding == "stochastic" else None
    return quantize_nvfp4(x, square=get_format(fmt).is_transposable, random_bits=bits)


def _fake_nv(x: Tensor, fmt: str, rounding: str, hadamard: bool) -> tuple[Tensor, Tensor, Tensor]:
    length = (x.shape[1] + 15) // 16 * 16 if hadamard else x.shape[1]
    high, wide = padded_shape(x.shape[0], (length + 15) // 16)
    codes = x.new_empty((x.shape[0], (length + 1) // 2), dtype=torch.uint8)
    return codes, x.new_empty(high * wide, dtype=torch.float8_e4m3fn), x.new_empty((), dtype=torch.float32)


register_op(
    "nv_quantize_rows(Tensor x, str fmt, str rounding, bool hadamard) -> (Tensor, Tensor, Tensor)", _nv_rows, _fake_nv
)
