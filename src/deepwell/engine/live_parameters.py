"""The parameters of a model as it is now, under the names that their formats have.

A policy gives formats to paths of the model that was compiled. Afterwards adapters may be put around its linears, which
gives their weights other paths; they are the same weights, and keep their formats. The model is held weakly: compiled
graphs, which outlive an engine, keep no weights alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn


class LiveParameters:
    """`named_parameters` of a model, tied ones under each name, renamed ones also under those that they had first."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._first: dict[int, tuple[weakref.ref[Tensor], tuple[str, ...]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._add(parameter, name)
        self._names = {name for _, names in self._first.values() for name in names}

    def _add(self, parameter: Tensor, *names: str) -> None:
        before = self._first.get(id(parameter), (None, ()))[1]
        self._first[id(parameter)] = (weakref.ref(parameter), (*before, *names))

    def copied(self, model: nn.Module, memo: Mapping[int, Any]) -> LiveParameters:
        """Those of a deep copy of the model; `memo` is what copied it."""
        new = LiveParameters(model)
        new._first.clear()
        for parameter, names in self._first.values():
            if (old := parameter()) is not None and id(old) in memo:
                new._add(memo[id(old)], *names)
        new._names = set(self._names)
        return new

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        model = self._model()
        now = list(model.named_parameters(remove_duplicate=False)) if model is not None else []
        yield from now
        held: dict[int, tuple[Tensor, set[str]]] = {}
        for name, parameter in now:
            held.setdefault(id(parameter), (parameter, set()))[1].add(name)
        for key, (tensor, names) in held.items():
            found = self._first.get(key)
            if found is not None and found[0]() is tensor:
                yield from ((name, tensor) for name in found[1] if name not in names)

    def gone(self) -> set[str]:
        """Names that a parameter had at first and none has now."""
        return self._names - {name for name, _ in self()}

    def added(self) -> list[str]:
        """Names of weights that the model did not have at first, under any name."""
        held: dict[int, list[str]] = {}
        weights = [(name, parameter) for name, parameter in self() if parameter.dim() > 1]
        for name, parameter in weights:
            held.setdefault(id(parameter), []).append(name)
        return [names[0] for names in held.values() if self._names.isdisjoint(names)]
