"""Formats changed at run time: GEMMs of single layers that run in more bits than the policy asks for.

An override is a floor. It holds while the policy's own format at that step has as many bits or fewer; where a step
range of the policy asks for more bits, the policy stands. So an override never makes a GEMM coarser, and one that was
set while a GEMM was nvfp4 does no harm once the policy says bf16.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepwell.engine.binding import Bound
from deepwell.errors import ConfigError
from deepwell.precision.gemm_format import GEMMS, Precision, precision
from deepwell.precision.guard import BITS
from deepwell.precision.resolve import Decision, Resolution

SCHEMA = 1
Key = tuple[str, str]  # (module path, "fwd", "dgrad" or "wgrad")


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """The format that one GEMM has at least, and why."""

    path: str
    gemm: str
    precision: Precision
    reason: str

    @property
    def rule(self) -> str:
        """How a decision cites it."""
        return f"override: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"path": self.path, "gemm": self.gemm, "format": self.precision.format}
        if self.precision.options:
            out["options"] = dict(self.precision.options)
        return {**out, "reason": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """All overrides of an engine, in the order they were set; JSON by `to_dict` and `from_dict`."""

    rows: tuple[Override, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, key: Key) -> bool:
        return any((row.path, row.gemm) == key for row in self.rows)

    def changed(self, changes: Mapping[Key, str | Precision | None], reason: str, known: Resolution) -> Overrides:
        """With these formats set, or taken back where they are None. Raises ConfigError on a GEMM that is none."""
        if not isinstance(changes, Mapping):
            raise ConfigError(f"changes is a {type(changes).__name__}; pass {{(path, gemm): format or None}}")
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError("reason is empty; the report and the log show why a format was changed: say it")
        rows = {(row.path, row.gemm): row for row in self.rows}
        for key, asked in changes.items():
            path, gemm = _checked(key, known)
            rows.pop((path, gemm), None)
            if asked is not None:
                row = Override(path=path, gemm=gemm, precision=precision(asked), reason=" ".join(reason.split()))
                rows[path, gemm] = row
        return Overrides(rows=tuple(rows.values()))

    def applied(self, resolution: Resolution) -> Resolution:
        """The policy's decisions with those of the overrides that hold."""
        if not self.rows:
            return resolution
        table = {path: dict(row) for path, row in resolution.table.items()}
        for row in self.rows:
            policy = table.get(row.path, {}).get(row.gemm)
            if policy is not None and BITS[row.precision.format] >= BITS[policy.format]:
                table[row.path][row.gemm] = Decision(gemm=row.gemm, precision=row.precision, rule=row.rule)
        return Resolution(step=resolution.step, table=table, notes=resolution.notes)

    def explained(self, bound: Bound, resolution: Resolution) -> Bound:
        """Bindings whose reasons name the override that decided them."""
        rules = {(row.path, row.gemm): row.rule for row in self.rows}
        rows = []
        for row in bound.bindings:
            rule = rules.get((row.path, row.gemm))
            holds = rule is not None and resolution[row.path][row.gemm].rule == rule
            rows.append(replace(row, reason=f"{rule}; {row.reason}") if holds and row.reason != rule else row)
        return replace(bound, bindings=tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "overrides": [row.to_dict() for row in self.rows]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Overrides:
        """What `to_dict` wrote. Raises ConfigError where it is something else."""
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            got = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            raise ConfigError(f"overrides have schema {got!r}; this Deepwell reads schema {SCHEMA}")
        rows = []
        for row in data.get("overrides", ()):
            try:
                how = precision(row["format"], row.get("options"))
                found = Override(path=row["path"], gemm=row["gemm"], precision=how, reason=row["reason"])
            except (KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"override {row!r} is none: {type(error).__name__}: {error}") from error
            if found.gemm not in GEMMS:
                raise ConfigError(f"override {row!r}: gemm is {found.gemm!r}; it takes {', '.join(GEMMS)}")
            rows.append(found)
        return cls(rows=tuple(rows))


def formats_of(bound: Bound) -> dict[str, str]:
    """What each linear layer runs in, as fwd|dgrad|wgrad by path: "mxfp8|mxfp8|bf16"."""
    parts: dict[str, list[str]] = {}
    for row in bound.bindings:
        parts.setdefault(row.path, []).append("bf16" if row.scheme == "bf16" else row.format)
    return {path: "|".join(names) for path, names in parts.items()}


def _checked(key: Any, known: Resolution) -> Key:
    if not isinstance(key, tuple) or len(key) != 2:
        raise ConfigError(f"changes has the key {key!r}; a key is (module path, gemm)")
    path, gemm = key
    if path not in known:
        near = difflib.get_close_matches(str(path), list(known), n=3)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise ConfigError(f"changes names {path!r}, which is no linear layer of the model{hint}")
    if gemm not in GEMMS:
        raise ConfigError(f"changes names gemm {gemm!r} of {path}; a linear layer has {', '.join(GEMMS)}")
    return path, gemm
