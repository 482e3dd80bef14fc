"""The gradient of an embedding: rows of equal tokens added up in a fixed order, each row of dW written once.

    dW[v] = sum over t with index[t] = v of dy[t]             rows of tokens that do not occur, and of padding, are zero
    sorted, order = sort(index), stably: a token's positions are a run of `sorted`, and order[p] is the t of position p
    pieces   a run is cut at multiples of 64 positions; a piece that is a whole run is written to dW, others are kept
    long     the pieces of a run that was cut are added from its first to its last

Numerics: fp32 sums, one rounding to the gradient's dtype. The order is given by the indices alone, so that two
    runs agree bit for bit; nothing is added atomically. No token is a chain of more than 64 rows, then one of pieces.
Cost: memory bound. Bytes for dW [V, D], T tokens of which R differ, in bf16: 2 V D zeros, 2 T D read, 2 R D written;
    8 D for each piece that is kept, at most two in 64 tokens. No wait for the host, no size that depends on data.
    V = 128256, D = 4096, T = 16384: 1.05 + 0.13 + 0.13 GB, 310 us at 4.25 TB/s; zeros, atomic sums and a conversion of
    an fp32 dW move 5.25 GB.
"""

# Shapes: T tokens, D width of a row, V rows of the weight; positions p of the sorted indices, pieces of CHUNK of them.

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.checks import check_matrix, check_shape
from deepwell.kernels.device.triton_support import (
    TileConfig,
    cdiv,
    launch,
    next_power_of_2,
    on_device,
    runs_kernel,
    tl,
    triton,
)

# Rows that one program adds up at most: a token that fills half a batch is many programs' work.
CHUNK = 64
# What `padding_idx` is where no row is left out, as for `torch.embedding`.
NO_PADDING = -1
_INT32_MAX = 2**31 - 1
_INDICES = (torch.int32, torch.int64)

# ---- reference: what the kernels must compute, in the plainest torch ----


def embedding_backward_ref(grad_TD: Tensor, index_T: Tensor, num_weights: int, padding_idx: int) -> Tensor:
    grad = grad_TD.float()
    if padding_idx >= 0:
        grad = torch.where((index_T == padding_idx)[:, None], 0.0, grad)
    total = torch.zeros((num_weights, grad.shape[1]), dtype=torch.float32, device=grad.device)
    return total.index_add_(0, index_T, grad).to(grad_TD.dtype)


# ---- configs: what the tuner may choose from ----

CONFIGS = (
    TileConfig(rows=4, columns=2048, num_warps=8),
    TileConfig(rows=4, columns=1024, num_warps=4),
    TileConfig(rows=16, columns=256, num_warps=4),
)


def default_config(columns: int) -> TileConfig:
    """Few long rows: each waits for its own reads alone.

    One H200, 2026-11-15 (benchmarks/bench_embedding.py), 16384 tokens by Zipf's law, 128256 x 4096: 4 x 2048 444 us,
    8 x 1024 467, 16 x 256 1471; torch eager 1034, compiled 1324.
    """
    return CONFIGS[0] if columns > 1024 else CONFIGS[1] if columns > 512 else CONFIGS[2]


# ---- kernels ----


@triton.jit
def _embedding_pieces_kernel(
    grad_ptr,
    sorted_ptr,
    order_ptr,
    dw_ptr,
    piece_ptr,
    T,
    D,
    V,
    padding_idx,
    stride_gt,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program: the piece that begins at one position, if one does.
    p = tl.program_id(0)
    key = tl.load(sorted_ptr + p)
    is_first = (p == 0) | (tl.load(sorted_ptr + p - 1, mask=p > 0, other=-1) != key)
    # An index outside the weight was an error in the forward; it is none of memory here.
    is_wanted = (key != padding_idx) & (key >= 0) & (key < V)
    if is_wanted & (is_first | (p % CHUNK == 0)):
        at = p + tl.arange(0, CHUNK)
        inside = (at < T) & (at < (p // CHUNK + 1) * CHUNK)
        same = inside & (tl.load(sorted_ptr + at, mask=inside, other=-1) == key)
        end = p + tl.sum(same.to(tl.int32), axis=0)
        is_last = (end >= T) | (tl.load(sorted_ptr + end, mask=end < T, other=-1) != key)
        d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(p, end, ROWS):
            row = start + tl.arange(0, ROWS)
            t = tl.load(order_ptr + row, mask=row < end, other=0).to(tl.int64)
            there = (row < end)[:, None] & (d < D)[None, :]
            grad = tl.load(grad_ptr + t[:, None] * stride_gt + d[None, :], mask=there, other=0.0)
            total += tl.sum(grad.to(tl.float32), axis=0)
        if is_first & is_last:
            tl.store(dw_ptr + key.to(tl.int64) * D + d, total.to(dw_ptr.dtype.element_ty), mask=d < D)
        else:
            # Of a block's pieces of runs that were cut, one may begin with the block, another end with it.
            slot = (p // CHUNK).to(tl.int64) * 2 + (p % CHUNK != 0).to(tl.int64)
            tl.store(piece_ptr + slot * D + d, total, mask=d < D)


@triton.jit
def _embedding_long_kernel(
    sorted_ptr, dw_ptr, piece_ptr, T, D, V, padding_idx, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # One program: the run that begins in block k and goes on in block k + 1, if one does. There is a block k + 1.
    k = tl.program_id(0)
    key = tl.load(sorted_ptr + k * CHUNK + CHUNK - 1)
    goes_on = tl.load(sorted_ptr + k * CHUNK + CHUNK) == key
    fills = tl.load(sorted_ptr + k * CHUNK) == key
    is_first = (k == 0) | (tl.load(sorted_ptr + k * CHUNK - 1, mask=k > 0, other=-1) != key)
    is_wanted = (key != padding_idx) & (key >= 0) & (key < V)
    if is_wanted & goes_on & (is_first | (fills == 0)):
        d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        slot = k.to(tl.int64) * 2 + (fills == 0).to(tl.int64)
        total = tl.load(piece_ptr + slot * D + d, mask=d < D, other=0.0)
        block = k + 1
        more = True
        while more:
            j = block + tl.arange(0, ROWS).to(tl.int64)
            same = (j * CHUNK < T) & (tl.load(sorted_ptr + j * CHUNK, mask=j * CHUNK < T, other=-1) == key)
            there = same[:, None] & (d < D)[None, :]
            total += tl.sum(tl.load(piece_ptr + j[:, None] * 2 * D + d[None, :], mask=there, other=0.0), axis=0)
            block += ROWS
            more = tl.sum(same.to(tl.int32), axis=0) == ROWS
        tl.store(dw_ptr + key.to(tl.int64) * D + d, total.to(dw_ptr.dtype.element_ty), mask=d < D)


# ---- public wrapper: check, allocate, launch ----


def embedding_backward(
    grad_TD: Tensor,
    index_T: Tensor,
    num_weights: int,
    padding_idx: int = NO_PADDING,
    *,
    config: TileConfig | None = None,
) -> Tensor:
    """`dW_VD` in the gradient's dtype for `num_weights` rows; the row `padding_idx`, unless it is -1, stays zero.

    Raises ConfigError on a wrong argument, UnsupportedError past 2^31 - 1 tokens.
    """
    check_matrix("grad_TD", grad_TD)
    if not isinstance(index_T, Tensor) or index_T.dim() != 1 or index_T.dtype not in _INDICES:
        got = f"{index_T.dtype} {tuple(index_T.shape)}" if isinstance(index_T, Tensor) else type(index_T).__name__
        raise ConfigError(f"index_T must be a vector of int32 or int64, got {got}; flatten it")
    t, d = grad_TD.shape
    check_shape("index_T", index_T, (t,), grad_TD)
    if num_weights < 0:
        raise ConfigError(f"num_weights is {num_weights}; pass the rows of the weight")
    if not NO_PADDING <= padding_idx < max(num_weights, 1):
        raise ConfigError(f"padding_idx is {padding_idx}; pass a row of the {num_weights}, or -1 for none")
    if t > _INT32_MAX:
        raise UnsupportedError(f"grad_TD has {t} rows; the kernels count at most {_INT32_MAX}")
    if not runs_kernel(grad_TD, _embedding_pieces_kernel):
        return embedding_backward_ref(grad_TD, index_T, num_weights, padding_idx)
    dw_VD = torch.zeros((num_weights, d), dtype=grad_TD.dtype, device=grad_TD.device)
    if t and d and num_weights:
        _launch(grad_TD, index_T, dw_VD, padding_idx, config or default_config(d))
    return dw_VD


def _launch(grad_TD: Tensor, index_T: Tensor, dw_VD: Tensor, padding_idx: int, config: TileConfig) -> None:
    (t, d), v = grad_TD.shape, dw_VD.shape[0]
    # A radix sort makes a pass for every few bits of a key.
    keys = (index_T.to(torch.int32) if v <= _INT32_MAX else index_T).contiguous()
    with on_device(grad_TD):
        sorted_T, order_T = torch.sort(keys, stable=True)
        blocks, block = cdiv(t, CHUNK), min(config.columns, max(16, next_power_of_2(d)))
        pieces = torch.empty((2 * blocks, d), dtype=torch.float32, device=grad_TD.device)
        sizes = {"CHUNK": CHUNK, "ROWS": config.rows, "BLOCK": block, "num_warps": config.num_warps}
        launch(_embedding_pieces_kernel, (t, cdiv(d, block)))(
            grad_TD, sorted_T, order_T, dw_VD, pieces, t, d, v, padding_idx, grad_TD.stride(0), **sizes
        )
        if blocks > 1:
            launch(_embedding_long_kernel, (blocks - 1, cdiv(d, block)))(
                sorted_T, dw_VD, pieces, t, d, v, padding_idx, **sizes
            )
