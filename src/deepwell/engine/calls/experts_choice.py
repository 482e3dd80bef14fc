"""Let Hugging Face's experts run as grouped products while the engine calls the model.

Each expert by itself in a Python loop breaks the graph at every block, and a copy of an expert's weights for every
token fills the memory. The setting is the model's config's, and is put back after the call: called by itself, the model
computes as its user chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from deepwell.engine.calls.overlap import Overlap

GROUPED = "grouped_mm"
# What the engine takes the place of; other choices are kernels that somebody asked for.
_REPLACED = (None, "eager", "batched_mm")


class GroupedExperts:
    """The configs of a model that say how experts run, and what each says."""

    def __init__(self, model: nn.Module) -> None:
        found: dict[int, Any] = {id(m.config): m.config for m in model.modules() if _chooses_experts(m)}
        self._configs = tuple(found.values())
        self.applied = Overlap(self._apply)  # while the engine calls the model

    @contextmanager
    def _apply(self) -> Iterator[None]:
        before = [(config, config._experts_implementation) for config in self._configs]
        replaced = [(config, chosen) for config, chosen in before if chosen in _REPLACED]
        for config, _ in replaced:
            config._experts_implementation_internal = GROUPED
        try:
            yield
        finally:
            for config, chosen in replaced:
                config._experts_implementation_internal = chosen

    def notes(self) -> list[str]:
        """A line for each choice of the user's that the engine replaces or keeps."""
        notes = []
        for chosen in dict.fromkeys(config._experts_implementation for config in self._configs):
            if chosen in _REPLACED:
                notes.append(f"experts run as {GROUPED!r} in the engine; the model's own setting, {chosen!r}, is kept")
            elif chosen != GROUPED:
                notes.append(
                    f"experts run as the model's setting says, {chosen!r}, in its dtype; {GROUPED!r} has formats"
                )
        return notes


def _chooses_experts(module: Any) -> bool:
    """Whether a module's forward asks its config which of Hugging Face's implementations of experts to run."""
    has_flags = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))
    return has_flags and hasattr(getattr(module, "config", None), "_experts_implementation_internal")
