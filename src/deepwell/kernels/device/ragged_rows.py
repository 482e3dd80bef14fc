"""Rows of groups that lie one after the other, by TMA: a tile that reaches past its group ends where that ends.

TMA drops what lies past the end of a tensor and knows no other mask. So the rows are seen as a tensor that has two
dimensions more, both without a practical end. A row is [_ROWS, end, _ROWS - (end - row)]: its last coordinate reaches
its limit where the row reaches its group's end. The address is that of

    _ROWS * (_WRAP - width) + end * width + (_ROWS - (end - row)) * width = row * width + _ROWS * _WRAP

and the last summand is a multiple of 2^64, which addresses do not have.
"""

from typing import Any

from torch import Tensor

from deepwell.kernels.device.triton_support import constant, tl, triton

_ROWS = constant(2**30)
_WRAP = 2**34
# Longer than any group ends; TMA's own limit is 2^32.
_ENDLESS = 2**31 - 2**16


def ragged_descriptor(x: Tensor, block_m: int, block_n: int) -> Any:
    """A TMA descriptor of blocks of the rows of `x`, for `load_rows` and `store_rows`."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    width = x.stride(0)
    shape = [_ENDLESS, _ENDLESS, _ROWS.value, x.shape[1]]
    return TensorDescriptor(x, shape, [_WRAP - width, width, width, 1], [1, 1, block_m, block_n])


@triton.jit
def store_rows(desc, tile, row, end, column):
    """Store a tile at `row`, as far as its rows lie before `end` and its columns in the matrix."""
    block = tl.reshape(tile.to(desc.dtype), (1, 1, tile.shape[0], tile.shape[1]))
    desc.store([_ROWS, end, _ROWS - (end - row), column], block)


@triton.jit
def load_rows(desc, row, end, column):
    """A tile of the rows from `row` on, zeros from `end` on and where the matrix has no column."""
    block = desc.load([_ROWS, end, _ROWS - (end - row), column])
    return tl.reshape(block, (block.shape[2], block.shape[3]))
