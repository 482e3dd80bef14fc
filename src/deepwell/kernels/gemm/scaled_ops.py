"""FP8 with one scale per tensor and with 1x128 blocks as torch ops, with the shapes that tracing needs.

    quantize_tensor[_both]              x, dy: an amax pass, then codes along the rows, or both ways from one read
    quantize_1x128[_both]               x, dy: blocks along the rows, or along rows and tokens from one read
    quantize_weights_128x128            weights side by side in squares, along K; _transposed: along N
    fp8_gemm_blocks                     their product; that of tensors is library's fp8_gemm

Weights with one scale for the tensor are library's quantize_weights and quantize_weights_transposed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepwell.kernels import library
from deepwell.kernels.gemm.fp8_blocks import fp8_gemm_blocks
from deepwell.kernels.quantize.fp8 import quantize_weight
from deepwell.kernels.quantize.fp8_blocks import (
    BLOCK,
    SCALE_LINE,
    Blocks,
    empty_128x128,
    quantize_1x128,
    quantize_1x128_both,
    quantize_128x128,
)
from deepwell.kernels.quantize.weights import as_stored

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# ---- one scale per tensor ----


def _tensor_rows(x: Tensor, e5m2: bool) -> tuple[Tensor, Tensor]:
    q, _, scale = quantize_weight(library._dense(x), dtype=_E5M2 if e5m2 else _E4M3, write="rows")
    assert q is not None
    return q, scale


def _tensor_both(x: Tensor, e5m2: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, q_t, scale = quantize_weight(library._dense(x), dtype=_E5M2 if e5m2 else _E4M3)
    assert q is not None and q_t is not None
    return q, q_t, scale


def _fake_tensor(x: Tensor, e5m2: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=_E5M2 if e5m2 else _E4M3), x.new_empty((), dtype=torch.float32)


def _fake_tensor_both(x: Tensor, e5m2: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, scale = _fake_tensor(x, e5m2)
    return q, q.new_empty((x.shape[1], x.shape[0])), scale


library._register("quantize_tensor(Tensor x, bool e5m2) -> (Tensor, Tensor)", _tensor_rows, _fake_tensor)
library._register(
    "quantize_tensor_both(Tensor x, bool e5m2) -> (Tensor, Tensor, Tensor)", _tensor_both, _fake_tensor_both
)

# ---- 1x128 ----


def _block_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[1] % BLOCK == 0:
        codes, scale_TB = quantize_1x128(library._dense(x))
        return codes, scale_TB.T.contiguous()
    q, scale, _, _ = quantize_1x128_both(library._dense(x), columns=False)
    assert q is not None and scale is not None
    return q, scale


def _block_both(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, scale, q_t, scale_t = quantize_1x128_both(library._dense(x))
    assert q is not None and scale is not None and q_t is not None and scale_t is not None
    return q, scale, q_t, scale_t


def _blocks(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK


def _fake_blocks(x: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((rows, _blocks(length) * BLOCK), dtype=_E4M3)
    return codes, x.new_empty((_blocks(length), rows), dtype=torch.float32)


library._register(
    "quantize_1x128(Tensor x) -> (Tensor, Tensor)", _block_rows, lambda x: _fake_blocks(x, x.shape[0], x.shape[1])
)
library._register(
    "quantize_1x128_both(Tensor x) -> (Tensor, Tensor, Tensor, Tensor)",
    _block_both,
    lambda x: (*_fake_blocks(x, x.shape[0], x.shape[1]), *_fake_blocks(x, x.shape[1], x.shape[0])),
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
    for w in weights:
        stop = start + w.shape[0]
        blocks = slice(start // BLOCK, _blocks(stop))
        if along_k:
            assert made.q is not None and made.scale is not None
            part = (made.q[start:stop], made.scale[blocks])
        else:
            assert made.q_t is not None and made.scale_t is not None
            part = (made.q_t[:, start : blocks.stop * BLOCK], made.scale_t[:, blocks])
        stored = as_stored(w)
        is_turned = stored.shape != w.shape or stored.stride() != w.stride()
        # Of a weight that is stored as [K, N] the copy along N is the one along its rows.
        out = Blocks(*part, None, None) if along_k != is_turned else Blocks(None, None, *part)
        quantize_128x128(stored, out=out)
        start = stop
    codes, scale = made[:2] if along_k else made[2:]
    assert codes is not None and scale is not None
    return codes, scale


def _fake_weights(weights: Sequence[Tensor], *, along_k: bool) -> tuple[Tensor, Tensor]:
    n, k = sum(w.shape[0] for w in weights), weights[0].shape[1]
    rows, length = (n, k) if along_k else (k, n)
    lines = (_blocks(length) + SCALE_LINE - 1) // SCALE_LINE * SCALE_LINE
    codes = weights[0].new_empty((rows, _blocks(length) * BLOCK), dtype=_E4M3)
    return codes, weights[0].new_empty((_blocks(rows), lines), dtype=torch.float32)


library._register(
    "quantize_weights_128x128(Tensor[] weights) -> (Tensor, Tensor)",
    lambda weights: _weights(weights, along_k=True),
    lambda weights: _fake_weights(weights, along_k=True),
)
# `after` is any tensor of the backward: it keeps a compiler from moving this forward.
library._register(
    "quantize_weights_128x128_transposed(Tensor[] weights, Tensor after) -> (Tensor, Tensor)",
    lambda weights, after: _weights(weights, along_k=False),
    lambda weights, after: _fake_weights(weights, along_k=False),
)

# ---- product ----

library._register(
    "fp8_gemm_blocks(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, bool square) -> Tensor",
    lambda a, scale_a, b, scale_b, square: fp8_gemm_blocks(a, scale_a, b, scale_b, square=square),
    lambda a, scale_a, b, scale_b, square: a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16),
)
