"""The order of an epoch: a permutation that is computed, not stored.

A Feistel network over a grid of a x b >= n points, keyed by seed and epoch; points beyond n are walked through again.
Integer arithmetic only, so the order is the same on every machine and for ever.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepwell.errors import ConfigError

ORDER = 1  # the version of this permutation: part of a loader's fingerprint
_ROUNDS = 8
_LONGEST = 2**62


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection of 64-bit words that looks random. Takes arrays, which wrap silently."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def words(*parts: object) -> NDArray[np.uint64]:
    """Eight 64-bit words from the text of `parts`."""
    text = " ".join(map(str, ("deepwell", *parts)))
    return np.frombuffer(hashlib.sha512(text.encode()).digest(), dtype="<u8").astype(np.uint64)


class Order:
    """The permutation of range(length) that belongs to (seed, epoch)."""

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        if not 0 < length <= _LONGEST:
            raise ConfigError(f"an order of {length} samples: give 1 to 2^62")
        self.length = length
        side = math.isqrt(length - 1) + 1
        self._sides = (np.uint64(side), np.uint64(-(-length // side)))
        self._keys = words("order", ORDER, length, seed, epoch)[:_ROUNDS]

    def __call__(self, positions: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples that stand at `positions` of the epoch. Takes time per position, and no memory for the others."""
        values = np.asarray(positions, dtype=np.uint64).reshape(-1)
        if len(values) and int(values.max()) >= self.length:
            raise ConfigError(f"position {int(values.max())} is outside an epoch of {self.length} samples")
        found = self._once(values)
        outside = np.flatnonzero(found >= self.length)
        while len(outside):
            found[outside] = self._once(found[outside])
            outside = outside[found[outside] >= self.length]
        return found.astype(np.int64)

    def _once(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        rows, columns = self._sides
        left, right = values // columns, values % columns
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + mix(left + key) % columns) % columns
            else:
                left = (left + mix(right + key) % rows) % rows
        return left * columns + right
