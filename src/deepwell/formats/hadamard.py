"""The 16-point random Hadamard transform: spreads an outlier over its block before it is quantized to four bits.

    y = x . diag(signs) . H / 4        H the 16x16 Sylvester matrix, orthogonal after the division

Both operands of a GEMM are transformed along the contraction with the same signs, so that the product stays what it
was. Numerics: fp32 butterflies in the order of strides 1, 2, 4, 8, an exact quarter, one rounding to the dtype of x.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.formats.elements import check_input

SIZE = 16
# The sign vector that NVIDIA's NVFP4 recipe fixes; one vector for both operands and for every rank of a tensor-parallel
# group.
DEFAULT_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def check_signs(signs: Sequence[int]) -> tuple[int, ...]:
    """`signs` as a tuple. Raises ConfigError unless they are sixteen of +1 and -1."""
    values = tuple(int(sign) for sign in signs)
    if len(values) != SIZE or any(value not in {1, -1} for value in values):
        raise ConfigError(f"signs must be {SIZE} values of +1 and -1, got {tuple(signs)}")
    return values


def hadamard16(x: Tensor, signs: Sequence[int] = DEFAULT_SIGNS, axis: int = -1) -> Tensor:
    """Transform blocks of 16 along `axis`; returns the dtype of `x`. Raises ConfigError on a ragged axis."""
    blocks, signs_16 = _blocks(x, signs, axis)
    return _butterfly(blocks * signs_16).flatten(-2).to(x.dtype).movedim(-1, axis)


def inverse_hadamard16(x: Tensor, signs: Sequence[int] = DEFAULT_SIGNS, axis: int = -1) -> Tensor:
    """Undo `hadamard16` with the same signs; exact but for the rounding of fp32 sums and of the dtype."""
    blocks, signs_16 = _blocks(x, signs, axis)
    return (_butterfly(blocks) * signs_16).flatten(-2).to(x.dtype).movedim(-1, axis)


def _blocks(x: Tensor, signs: Sequence[int], axis: int) -> tuple[Tensor, Tensor]:
    """`x` in fp32 as blocks of 16 along its last dimension, and the signs as a tensor."""
    check_input("x", x)
    values = check_signs(signs)
    if x.ndim == 0 or not -x.ndim <= axis < x.ndim:
        raise ConfigError(f"axis {axis} is not an axis of x with shape {tuple(x.shape)}")
    length = x.shape[axis]
    if length % SIZE:
        raise ConfigError(
            f"x has {length} elements along axis {axis}; the Hadamard transform needs a multiple of {SIZE}"
        )
    blocks = x.movedim(axis, -1).float().unflatten(-1, (length // SIZE, SIZE))
    return blocks, torch.tensor(values, dtype=torch.float32, device=x.device)


def _butterfly(blocks: Tensor) -> Tensor:
    shape = blocks.shape
    for stride in (1, 2, 4, 8):
        pairs = blocks.reshape(*shape[:-1], SIZE // (2 * stride), 2, stride)
        first, second = pairs.unbind(-2)
        blocks = torch.stack((first + second, first - second), dim=-2)
    return blocks.reshape(shape) * 0.25
