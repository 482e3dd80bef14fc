"""Let Hugging Face's experts run as one function, or as grouped products, while the engine calls the model.

Each expert by itself in a Python loop breaks the graph at every block, and a copy of an expert's weights for every
token fills the memory. The setting is the model's config's, and is put back after the call: called by itself, the model
computes as its user chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from deepwell.engine.calls.overlap import Overlap
from deepwell.kernels.experts import stages
from deepwell.kernels.experts.mlp import run_experts
from deepwell.kernels.experts.spelled_out import spelled_out
from deepwell.moe.hugging_face import NAME, chooses_experts, read_activations, register
from deepwell.moe.loops import forward_of, keeps_loop, read_loops

GROUPED = "grouped_mm"
# What the engine takes the place of; other choices are kernels that somebody asked for.
_REPLACED = (None, "eager", "batched_mm", GROUPED, NAME)


class GroupedExperts:
    """The configs of a model that say how experts run, and what each says."""

    def __init__(self, model: nn.Module) -> None:
        found: dict[int, Any] = {id(m.config): m.config for m in model.modules() if chooses_experts(m)}
        self._configs = tuple(found.values())
        self.applied = Overlap(self._apply)  # while the engine calls the model
        self._unknown = [path for path, how in read_activations(model).items() if how is None]
        loops = read_loops(model)
        self._loops = {path: model.get_submodule(path) for path, how in loops.items() if how is not None}
        self._unread = [path for path, how in loops.items() if how is None]
        if found:
            register()
        torch._dynamo.allow_in_graph(run_experts)  # one node, whose precision the pass on experts decides

    @contextmanager
    def _apply(self) -> Iterator[None]:
        before = [(config, config._experts_implementation) for config in self._configs]
        replaced = [(config, chosen) for config, chosen in before if chosen in _REPLACED]
        for config, _ in replaced:
            config._experts_implementation_internal = NAME
        looped = [module for module in self._loops.values() if not keeps_loop(module)]
        for module in looped:
            vars(module)["forward"] = MethodType(forward_of(module), module)
        try:
            yield
        finally:
            for module in looped:
                del vars(module)["forward"]
            for config, chosen in replaced:
                config._experts_implementation_internal = chosen

    @contextmanager
    def as_products(self) -> Iterator[None]:
        """While the model runs as it was written and its single products are looked at."""
        with self.applied(), spelled_out():
            yield

    def notes(self) -> list[str]:
        """A line for each choice of the user's that the engine replaces or keeps."""
        notes = []
        for chosen in dict.fromkeys(config._experts_implementation for config in self._configs):
            if chosen in _REPLACED and chosen != NAME:
                notes.append(f"experts run as {NAME!r} in the engine; the model's own setting, {chosen!r}, is kept")
            elif chosen not in _REPLACED:
                notes.append(f"experts run as the model's setting says, {chosen!r}, in its dtype; {NAME!r} has formats")
        if self._unknown:
            more = f" and {len(self._unknown) - 1} more" if len(self._unknown) > 1 else ""
            notes.append(f"{self._unknown[0]}{more}: the gate is none that {NAME!r} knows; it runs as {GROUPED!r}")
        kept = [path for path, module in self._loops.items() if keeps_loop(module)]
        for paths, what in (
            ([path for path in self._loops if path not in kept], f"the loop over its experts runs as {NAME!r}"),
            (kept, "its loop over experts is kept, for the sake of hooks, changed weights or a dtype without kernels"),
            (self._unread, f"its loop over experts is kept: it computes nothing that {NAME!r} knows"),
        ):
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            notes += [f"{paths[0]}{more}: {what}"] if paths else []
        notes += [f"kernel of experts {name} was rejected: {reason}" for name, reason in stages.rejected().items()]
        return notes
