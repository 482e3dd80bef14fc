"""FP8 values of an engine's weights that live from call to call, for `cache_weights=True`.

Every run of a compiled graph begins with a refresh of the values that it reads: two launches look at the weights it
was given, wherever they lie now, and quantize the groups whose content is not that of their values. So a weight may be
changed in any way between two runs, and is quantized once, however many runs come before it changes again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.quantize.weight_cache_launches import Codes, CodesRefresh

# The key of a group: for each weight its names, shape, and whether it is stored as [K, N]; their dtype and device.
Key = tuple[Any, ...]


@dataclass(slots=True, kw_only=True)
class WeightCache:
    """The values of all groups, shared by all graphs of an engine: training, evaluation, other shapes, other steps."""

    groups: dict[Key, Codes] = field(default_factory=dict)
    # Where each group's weights lay at its last refresh, and their version counters.
    seen: dict[Key, tuple[Any, ...]] = field(default_factory=dict)

    def codes_of(self, key: Key, k: int, widths: Sequence[int], is_kn: Sequence[bool], device: torch.device) -> Codes:
        """The FP8 values of a group, made empty where it is new."""
        if key not in self.groups:
            self.groups[key] = Codes.empty(k, widths, is_kn, device)
        return self.groups[key]

    @property
    def num_bytes(self) -> int:
        return sum(codes.num_bytes for codes in self.groups.values())

    def times_quantized(self) -> int:
        """How many groups were quantized so far, each time counted; waits for the device."""
        return sum(codes.times_quantized for codes in self.groups.values())

    def note_versions(self, key: Key, weights: Sequence[Tensor]) -> None:
        """Tell autograd where values are about to be other values: the backward of an earlier forward would read them.

        It then raises, as it does for a weight that was changed before the backward. Two forwards of the same weights
        may both be waiting for their backward.
        """
        now = tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights)
        if now != self.seen.get(key):
            self.seen[key] = now
            codes = self.groups[key]
            torch.autograd.graph.increment_version((codes.rows, codes.columns, codes.scale))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroup:
    """A group that a graph reads, and which of the graph's inputs its weights are."""

    key: Key
    codes: Codes
    inputs: tuple[int, ...]


def refreshing(run: Callable[..., Any], groups: Sequence[KeptGroup], cache: WeightCache) -> Callable[..., Any]:
    """The compiled graph with a refresh before each run."""
    refresh = CodesRefresh([group.codes for group in groups])

    def wrapped(*inputs: Any) -> Any:
        weights = [[inputs[i] for i in group.inputs] for group in groups]
        for group, given in zip(groups, weights, strict=True):
            cache.note_versions(group.key, given)
        refresh.refresh(weights)
        return run(*inputs)

    return wrapped
