"""What a user fixes or forbids of a plan, checked: `tp=8, recompute=["none", "full"], overlap=False`. Pure.

Counts and names are the allowed values, so leaving one out of a list forbids it. What is not named stays open.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from deepwell.errors import ConfigError
from deepwell.planner.layout import SCHEDULES, SHARDINGS, Offload, Overlap
from deepwell.planner.overlap import OVERLAPS

COUNTS = ("dp", "tp", "pp", "cp", "ep", "etp", "dp_replicate", "micro_batch", "virtual_stages", "gpus")
RECOMPUTE_KINDS = ("none", "selective", "full", "block")
OFFLOADS = {
    "none": Offload(),
    "optimizer": Offload(optimizer=1.0),
    "activations": Offload(activations=1.0),
    "both": Offload(optimizer=1.0, activations=1.0),
}
EVEN = "even"
_NAMES = {"sharding": SHARDINGS, "schedule": SCHEDULES, "recompute": RECOMPUTE_KINDS}
_LISTS = (*COUNTS, *_NAMES)
_SHOWN = (  # after those, in this order
    "max_memory", "offload", "sequence_parallel", "overlap", "stage_layers", "kernels", "cuda_graphs",
    "context_parallel_kind",
)  # fmt: skip
_FLAGS = ("sequence_parallel", "cuda_graphs")
_KINDS = ("ring", "ulysses", "allgather")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the user fixed; None or empty leaves it open. Counts and names are the allowed ones."""

    counts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    names: tuple[tuple[str, tuple[str, ...]], ...] = ()
    sequence_parallel: bool | None = None
    max_memory: float | None = None  # GiB per GPU
    offload: str | None = None  # one of OFFLOADS; None: only where nothing fits without
    stage_layers: tuple[int, ...] | str | None = None  # of each stage in model order, or "even"
    kernels: tuple[str, ...] | None = None  # configurations of the catalog that may be proposed
    overlap: Overlap | None = None  # what it leaves out: as the engine does, or without where that is faster
    cuda_graphs: bool = False
    context_parallel_kind: str | None = None  # None: ring, or what the engine executes instead

    def allowed(self, name: str) -> tuple[Any, ...] | None:
        """The values that `name` may have, or None where anything goes."""
        return dict((*self.counts, *self.names)).get(name)

    def keywords(self) -> dict[str, Any]:
        """The constraints as JSON data that `read_constraints` reads back to an equal value."""
        found: dict[str, Any] = {name: list(values) for name, values in (*self.counts, *self.names)}
        for one in fields(self)[2:]:
            value = getattr(self, one.name)
            if isinstance(value, Overlap):
                value = {name: getattr(value, name) for name in OVERLAPS if getattr(value, name) is not None}
            if value != one.default:
                found[one.name] = list(value) if isinstance(value, tuple) else value
        return found

    def describe(self) -> str:
        found = self.keywords()
        if self.max_memory is not None:
            found["max_memory"] = f"{self.max_memory:g} GiB"
        if self.overlap is not None:
            found["overlap"] = [f"{name}:{'on' if is_on else 'off'}" for name, is_on in found["overlap"].items()]
        texts = {name: "|".join(map(str, value)) if isinstance(value, list) else value for name, value in found.items()}
        shown = [name for name in texts if name in _LISTS] + [name for name in _SHOWN if name in texts]
        return ", ".join(f"{name}={texts[name]}" for name in shown) or "none"


def read_constraints(given: Mapping[str, Any]) -> Constraints:
    """Check keyword constraints, e.g. `tp=8, recompute="full", max_memory=70`. Raises ConfigError."""
    counts: list[tuple[str, tuple[int, ...]]] = []
    names: list[tuple[str, tuple[str, ...]]] = []
    other: dict[str, Any] = {}
    for name, value in given.items():
        if name not in CONSTRAINTS:
            near = difflib.get_close_matches(name, CONSTRAINTS, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"accepted: {', '.join(CONSTRAINTS)}"
            raise ConfigError(f"{name}: no such constraint; {hint}")
        if value is None:
            continue
        if name in COUNTS:
            counts.append((name, tuple(sorted(set(_counts(name, value))))))
        elif name in _NAMES:
            names.append((name, _names(name, value, _NAMES[name])))
        else:
            other[name] = _READERS[name](name, value)
    return Constraints(counts=tuple(sorted(counts)), names=tuple(sorted(names)), **other)


def _counts(name: str, value: Any) -> list[int]:
    values = list(value) if isinstance(value, (list, tuple, set, range)) else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, int) or one < 1:
            raise ConfigError(f"{name}: got {one!r}; a whole number of at least 1, or a list of them")
    if not values:
        raise ConfigError(f"{name}: got an empty list; leave it out to allow any")
    return values


def _names(name: str, value: Any, known: Iterable[str]) -> tuple[str, ...]:
    values = tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    for one in values:
        if one not in known:
            raise ConfigError(f"{name}: got {one!r}; accepted: {', '.join(known)}")
    if not values:
        raise ConfigError(f"{name}: got an empty list; leave it out to allow any")
    return tuple(dict.fromkeys(values))


def _max_memory(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name}: got {value!r}; GiB per GPU, above 0")
    return float(value)


def _offload(name: str, value: Any) -> str:
    word = ("optimizer" if value else "none") if isinstance(value, bool) else value
    if not isinstance(word, str) or word not in OFFLOADS:
        raise ConfigError(f"{name}: got {value!r}; accepted: True, False, {', '.join(OFFLOADS)}")
    return word


def _overlap(name: str, value: Any) -> Overlap:
    """True or False for all of it, names for those alone, or a mapping from name to True or False."""
    if isinstance(value, Overlap):
        return value
    if isinstance(value, bool):
        return Overlap(**dict.fromkeys(OVERLAPS, value))
    if isinstance(value, Mapping):
        _names(name, list(value), OVERLAPS)
        return Overlap(**{key: _flag(f"{name}[{key!r}]", is_on) for key, is_on in value.items()})
    wanted = _names(name, value, OVERLAPS)
    return Overlap(**{key: key in wanted for key in OVERLAPS})


def _stage_layers(name: str, value: Any) -> tuple[int, ...] | str:
    if value == EVEN:
        return EVEN
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{name}: got {value!r}; the layers of each stage in model order, or {EVEN!r}")
    return tuple(_counts(name, value))


def _kernels(name: str, value: Any) -> tuple[str, ...]:
    from deepwell.planner.catalog import catalog

    return _names(name, value, [config.name for config in catalog()])


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: got {value!r}; True or False")
    return value


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "max_memory": _max_memory,
    "offload": _offload,
    "overlap": _overlap,
    "stage_layers": _stage_layers,
    "kernels": _kernels,
    "context_parallel_kind": lambda name, value: _names(name, value, _KINDS)[0],
    **dict.fromkeys(_FLAGS, _flag),
}
CONSTRAINTS = (*COUNTS, *_NAMES, *_READERS)
