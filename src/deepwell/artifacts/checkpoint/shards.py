"""Which part of a whole tensor this rank holds.

A tensor's part is a box: where it begins in each dimension, and how far it reaches. Parts are found from a DTensor's
placements alone; whatever the layout of a run was, a checkpoint knows only names, whole shapes and boxes.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

from deepwell.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BLOCK = 128  # elements that share a scale in FP8 moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a tensor of shape `whole`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def is_dtensor(tensor: Tensor) -> TypeGuard["DTensor"]:
    """Whether a tensor is spread over ranks. Importing DTensor to ask takes seconds; who has one has imported it."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_of(tensor: Tensor) -> Tensor:
    """The memory of this rank's part of a tensor, without the DTensor or subclass around it."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    flatten = getattr(local, "__tensor_flatten__", None)
    if flatten is not None:  # a subclass that FSDP2 gathers in its own way holds the plain tensor
        inner = [getattr(local, name) for name in flatten()[0]]
        if len(inner) == 1 and inner[0].shape == local.shape and inner[0].dtype == local.dtype:
            return inner[0].detach()
    return local.detach()


def box_of(tensor: Tensor, name: str) -> Box:
    """The part of a tensor that this rank holds. Raises UnsupportedError for parts that are no box."""
    whole = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return Box(offsets=(0,) * len(whole), sizes=whole, whole=whole)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedError(f"{name} lies on a mesh ({tensor.device_mesh}) that this rank is not part of")
    begin, size = [0] * len(whole), list(whole)
    for dim in range(len(whole)):
        for mesh_dim in _order(tensor, dim, name):
            step = -(-size[dim] // tensor.device_mesh.size(mesh_dim))
            low = min(coordinate[mesh_dim] * step, size[dim])
            begin[dim] += low
            size[dim] = min(step, size[dim] - low)
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedError(f"{name} is a DTensor of partial sums ({tensor.placements}); reduce it before saving")
    if tuple(size) != tuple(tensor.to_local().shape):
        raise UnsupportedError(
            f"{name}: this rank holds {tuple(tensor.to_local().shape)} of {whole}, but {tensor.placements} gives "
            f"{tuple(size)}; only parts that are boxes can be saved"
        )
    empty = 0 in size and 0 not in whole
    return Box(offsets=tuple(0 if empty else b for b in begin), sizes=tuple(size), whole=whole)


def _order(tensor: "DTensor", dim: int, name: str) -> list[int]:
    """The mesh dimensions that split a tensor's dimension, in the order in which they do.

    Left to right; but FSDP2 over tensor parallelism splits what the mesh dimensions to its right have left, which its
    strided placement says by their number.
    """
    factors = {
        i: getattr(placement, "split_factor", None) or 0
        for i, placement in enumerate(tensor.placements)
        if getattr(placement, "dim", None) == dim and not placement.is_partial()
    }
    for i, factor in factors.items():
        if factor and factor != math.prod(tensor.device_mesh.size(j) for j in factors if j > i):
            raise UnsupportedError(f"{name} is split in strides ({tensor.placements}); its parts are no boxes")
    return sorted(factors, key=lambda i: (factors[i] > 0, -i if factors[i] else i))


def overlap(a: Box, b: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What two parts share, as slices of the one and of the other; None if nothing."""
    in_a, in_b = [], []
    for a0, an, b0, bn in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        low, high = max(a0, b0), min(a0 + an, b0 + bn)
        if low >= high:
            return None
        in_a.append(slice(low - a0, high - a0))
        in_b.append(slice(low - b0, high - b0))
    return tuple(in_a), tuple(in_b)
