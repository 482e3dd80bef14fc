"""Candidates for a problem, what became of each, and the choice among them. Values without torch.

Each op lives in one module, its room, which lists Deepwell's own candidates (`built_in`) and makes the cases that any
candidate must pass (`cases`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from deepwell.errors import ConfigError
from deepwell.kernels.tune.out_of_memory import says_shortage

if TYPE_CHECKING:
    from deepwell.kernels.tune.problem import Problem

_ROOMS = {
    "gemm": "deepwell.kernels.gemm.cases",
    "fp8_gemm": "deepwell.kernels.gemm.cases",
    "block_scaled_gemm": "deepwell.kernels.gemm.native_candidates",
    "block_scaled_quantize": "deepwell.kernels.gemm.native_candidates",
    "fp8_gemm_blocks": "deepwell.kernels.gemm.fp8_blocks",
    "attention": "deepwell.kernels.attention.flash",
    "narrow_values": "deepwell.kernels.attention.narrow_values",
    "flex_attention": "deepwell.kernels.attention.flex",
    "grouped_gemm": "deepwell.kernels.experts.grouped_gemm",
    "experts_tiles": "deepwell.kernels.experts.tiles_proof",
}


def room_of(op: str) -> Any:
    """The module of an op, None where candidates of it are checked by what they are compared with."""
    return importlib.import_module(_ROOMS[op]) if op in _ROOMS else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """One kernel that may compute an op. `fn` follows the op's signature (see its room).

    With `prepare`, `fn` gets `prepare(b)` in the place of b. `trusted` candidates are tried in this process, others
    first in one of their own that can be killed; a user's then also at each size that it competes for. `refuses` says
    in words why a problem is not for it.
    """

    name: str
    op: str
    precision: str
    fn: Callable[..., Any]
    origin: str  # "reference", "vendor", "triton", "cutlass", "transformer_engine" or "user"
    prepare: Callable[..., Any] | None = None
    min_size: int = 0
    trusted: bool = False
    # Sums in the tensor cores' shorter accumulator: it has a floor of its own.
    fast: bool = False
    refuses: Callable[[Problem], str] | None = None
    # Hash of the sources; None where they cannot be distinguished, and then nothing about it is kept on disk.
    fingerprint: str | None = None

    @property
    def key(self) -> str:
        return f"{self.name}@{self.fingerprint}"

    def why_not(self, problem: Problem) -> str:
        """Why this candidate does not compete for `problem`, "" where it does."""
        if problem.exact_sums and self.fast:
            return "it sums in the tensor cores' short accumulator, and this product needs fp32"
        smallest = min(problem.m, problem.n, problem.k)
        if smallest < self.min_size:
            return f"the smallest of M, N, K is {smallest}, below its min_size of {self.min_size}"
        return self.refuses(problem) if self.refuses else ""

    def verdict(self, **what: Any) -> Verdict:
        return Verdict(name=self.name, precision=self.precision, origin=self.origin, **what)

    def __repr__(self) -> str:
        size = f", min_size={self.min_size}" if self.min_size else ""
        return f"Candidate({self.name!r}, {self.op}, {self.precision}, {self.origin}{size})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one candidate: its time where it competed, else the reason why it was rejected."""

    name: str
    precision: str
    origin: str
    us: float | None = None
    sqnr_db: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The kernel chosen for a problem's bucket, its microseconds where it was timed, and every candidate's verdict."""

    problem: str
    device: str
    kernel: str
    us: float | None
    how: str  # "measured", "cached" or "only one"
    verdicts: tuple[Verdict, ...]

    def rejected(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.reason)

    def skipped(self) -> tuple[Verdict, ...]:
        """Of those rejected, the ones that lacked memory to compete: with more of it they may win."""
        return tuple(verdict for verdict in self.verdicts if says_shortage(verdict.reason))

    def ranking(self) -> tuple[str, ...]:
        """Names of those that may run, the fastest first, untimed ones last."""
        able = [verdict for verdict in self.verdicts if not verdict.reason]
        return tuple(v.name for v in sorted(able, key=lambda v: float("inf") if v.us is None else v.us))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdicts": [asdict(verdict) for verdict in self.verdicts]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Choice:
        try:
            verdicts = tuple(Verdict(**row) for row in data["verdicts"])
            return cls(**{**data, "verdicts": verdicts})
        except (KeyError, TypeError) as error:
            raise ConfigError(f"not a choice of kernels: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        lines = [f"{self.problem} on {self.device}: {self.kernel} ({self.how})"]
        for verdict in sorted(self.verdicts, key=lambda v: (bool(v.reason), v.us or 0.0, v.name)):
            figures = "" if verdict.us is None else f"{verdict.us:.1f} us"
            if verdict.sqnr_db is not None:
                figures += f"{', ' * bool(figures)}{verdict.sqnr_db:.1f} dB"
            lines.append(f"  {verdict.name:<36} {verdict.precision:<6} {verdict.reason or figures}".rstrip())
        return "\n".join(lines)
