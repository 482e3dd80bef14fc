"""Concrete sizes of a traced graph read back as functions of batch and sequence length.

The example's sequence length is a prime that no dimension of the model shares, so a size that holds it follows the
sequence. Sizes off by a few (labels shifted by one, a convolution's padding) count as the sequence itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deepwell.graph.ops import Extent


@dataclass(frozen=True, slots=True)
class Sizes:
    """Reads extents for one batch and sequence length; None where the example has no such axis."""

    batch: int | None
    seq: int | None

    def size(self, size: int) -> Extent:
        """One axis of a product: a multiple of the sequence, or a plain number (a small one may equal the batch)."""
        found = self.rows((size,), is_data=False)
        return found if found.seq else Extent(size)

    def rows(self, dims: Sequence[int], *, is_data: bool = True, slack: int = 1) -> Extent:
        """The product of some axes. `is_data`: the value follows from the input, so a batch of one is still a batch."""
        batch, seq = 0, 0
        rest: list[int] = []
        for size in dims:
            if self.seq is not None and 0 <= abs(size - self.seq) <= min(slack, self.seq // 3):
                seq += 1
            elif self.batch is not None and self.batch > 1 and size == self.batch and not batch:
                batch = 1
            else:
                rest.append(size)
        factor = 1
        for size in rest:
            found = self._folded(size, batch, seq, slack)
            factor *= found.factor
            batch, seq = batch + found.batch, seq + found.seq
        if self.batch == 1 and is_data:
            batch = 1
        return Extent(factor, batch, seq)

    def split(self, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Rows and width of a value: the last axis is the width, unless it is the sequence behind channels."""
        if len(shape) >= 3 and self.size(shape[-1]).seq and not any(self.size(s).seq for s in shape[:-1]):
            return (*shape[:1], *shape[2:]), shape[1]
        if shape and self.size(shape[-1]).seq:
            return tuple(shape), 1  # scores: one number for each pair of positions
        return tuple(shape[:-1]), shape[-1] if shape else 1

    def _folded(self, size: int, batch: int, seq: int, slack: int) -> Extent:
        """An axis into which batch or sequence may be folded together with a plain factor."""
        has_batch = self.batch is not None and self.batch > 1 and not batch
        if self.seq is not None and self.seq > 1 and not seq:
            for length in (self.seq, *(self.seq + d for off in range(1, slack + 1) for d in (-off, off))):
                if length < 2 or size % length or (length != self.seq and size != length * (self.batch or 1)):
                    continue
                each = size // length
                if has_batch and self.batch and each % self.batch == 0:
                    return Extent(each // self.batch, 1, 1)
                return Extent(each, 0, 1)
        if has_batch and self.batch and seq and size % self.batch == 0:
            return Extent(size // self.batch, 1, 0)
        if has_batch and self.batch and size % self.batch == 0 and self.seq is None:
            return Extent(size // self.batch, 1, 0)
        return Extent(size, 0, 0)
