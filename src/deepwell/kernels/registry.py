"""KernelRegistry: the kernels that compete for an op, built in and users' own, and what was decided about them.

A kernel of a user is a function of one of two ops:

    "gemm"       fn(a, b, *, bias=None, activation=None, out_dtype=None) -> C [M, N]
                 a [M, K] and b [K, N] in bf16, fp16 or fp32, as for torch.mm (b is often a transposed weight: stride
                 (1, K)). The whole chain: what it quantizes and how is its own affair. Keywords that the function does
                 not take are applied afterwards, so `fn(a, b)` is enough.
    "fp8_gemm"   fn(a, scale_a, b, scale_b, *, out_dtype=torch.bfloat16) -> C [M, N]
                 a [M, K] and b [N, K] FP8 values along the contraction, fp32 scales, one or one per row.

It competes where the policy asks for its `precision` and none of M, N, K is smaller than `min_size`. A kernel says that
it does not take a shape by raising UnsupportedError. It is chosen where it matched the reference on this device, left
its operands as they were, and was the fastest; else it is rejected with the reason, which `explain` and the engine's
report show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.tune.candidate import Candidate, Choice, Verdict, room_of
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.sources import fingerprint_of
from deepwell.kernels.tune.table import KernelRow, kernel_table, row_of
from deepwell.precision.gemm_format import precision as parse_precision

OPS = ("gemm", "fp8_gemm")
# What a candidate may stand in for besides its own format: FP8 hardware runs what a policy calls mxfp8.
_SUBSTITUTES = {"mxfp8": ("fp8",)}


@dataclass(slots=True)
class KernelRegistry:
    """Candidates by op. A new one holds Deepwell's own; `register` adds users' kernels, which compete on equal terms.

    `proof_timeout_s` is how long an unknown kernel may take to prove itself, and a user's for its first product of a
    real size, before it counts as hanging.
    """

    proof_timeout_s: float = 60.0
    _own: dict[tuple[str, str], Candidate] = field(default_factory=dict)
    _aside: dict[str, str] = field(default_factory=dict)
    _choices: dict[tuple[str, str, tuple[str, ...]], Choice] = field(default_factory=dict)
    _asked: Counter[Problem] = field(default_factory=Counter)

    def register(
        self,
        name: str,
        fn: Callable[..., Any] | None = None,
        *,
        precision: str = "bf16",
        min_size: int = 0,
        op: str = "gemm",
        prepare: Callable[..., Any] | None = None,
        trusted: bool = False,
        fast: bool = False,
    ) -> Any:
        """Let `fn` compete for `op` (signatures: this module's docstring). Without `fn`, a decorator.

        `min_size` is the least that each of M, N, K must be. `prepare(b)`, where given, makes what `fn` gets instead of
        b. `fast` says that an "fp8_gemm" sums in the tensor cores' own shorter accumulator. `trusted` skips the
        separate process in which an unknown kernel proves itself; a kernel that is neither in a module nor trusted
        cannot be tried on a GPU. Raises ConfigError on a wrong argument.
        """
        how: dict[str, Any] = {"min_size": min_size, "op": op, "prepare": prepare, "trusted": trusted, "fast": fast}
        if fn is None:
            return lambda function: self.register(name, function, precision=precision, **how)
        self._check(name, fn, op, min_size)
        fingerprint = fingerprint_of(fn, *([prepare] if prepare else []))
        fmt = parse_precision(precision).format
        self._own[op, name] = Candidate(name=name, precision=fmt, fn=fn, origin="user", fingerprint=fingerprint, **how)
        self._choices.clear()
        return fn

    def _check(self, name: str, fn: object, op: str, min_size: object) -> None:
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"name is {name!r}; a kernel needs a name of its own")
        if not callable(fn):
            raise ConfigError(f"fn of kernel {name!r} is a {type(fn).__name__}; pass a function")
        if op not in OPS:
            raise ConfigError(f"op of kernel {name!r} is {op!r}; it takes {' or '.join(OPS)}")
        if not isinstance(min_size, int) or isinstance(min_size, bool) or min_size < 0:
            raise ConfigError(f"min_size of kernel {name!r} is {min_size!r}; it must be a whole number of at least 0")
        if (op, name) in self._own or any(built.name == name for built in room_of(op).built_in(op)):
            raise ConfigError(f"kernel {name!r} is registered for {op} already; choose another name")

    def candidates(self, op: str = "gemm", precision: str | None = None) -> tuple[Candidate, ...]:
        """Those of an op, or those that may serve one precision of it (see `formats_for`)."""
        if op not in OPS:
            raise ConfigError(f"op is {op!r}; it takes {' or '.join(OPS)}")
        every = (*room_of(op).built_in(op), *(candidate for (of, _), candidate in self._own.items() if of == op))
        if precision is None:
            return every
        served = formats_for(precision)
        return tuple(candidate for candidate in every if candidate.precision in served)

    def users(self) -> tuple[Candidate, ...]:
        """The kernels that were registered, in order."""
        return tuple(self._own.values())

    def choose(self, problem: Problem) -> Choice:
        """The fastest candidate that is right here. Measured once per bucket and device, then remembered on disk."""
        self._asked[problem] += 1
        key = self._key(problem)
        known = self._choices.get(key)
        if known is not None and known.kernel not in self._aside:
            return known
        from deepwell.kernels.tune.choose import choose

        competing, rejected = self._competitors(problem)
        if not competing:
            reasons = "; ".join(f"{verdict.name}: {verdict.reason}" for verdict in rejected) or "none is registered"
            raise UnsupportedError(f"no kernel computes {problem.key} on {problem.device}: {reasons}")
        choice = choose(
            problem,
            competing,
            partial(room_of(problem.op).setup, problem.bucket),
            rejected=rejected,
            substitutes=_stand_ins(problem, competing),
            timeout_s=self.proof_timeout_s,
        )
        self._choices[key] = choice
        return choice

    def _key(self, problem: Problem) -> tuple[str, str, tuple[str, ...]]:
        """What a choice holds for: within one bucket of M some sizes may be below a kernel's min_size, others not."""
        out = tuple(candidate.name for candidate in self._own.values() if candidate.why_not(problem))
        return problem.device, problem.key, out

    def _competitors(self, problem: Problem) -> tuple[list[Candidate], list[Verdict]]:
        """Those that take part, and verdicts on users' kernels that do not, so that nobody wonders where one is."""
        competing, rejected = [], []
        for candidate in self.candidates(problem.op, problem.precision):
            # Emulation is exact in its own format; it stands in for no other.
            if candidate.origin == "reference" and candidate.precision != formats_for(problem.precision)[0]:
                continue
            reason = self._aside.get(candidate.name) or candidate.why_not(problem)
            if not reason:
                competing.append(candidate)
            elif candidate.origin == "user" or candidate.name in self._aside:
                rejected.append(candidate.verdict(reason=reason))
        # Exact emulation stands in only where nothing else is there: on a GPU it is orders slower.
        if not problem.device.startswith("cpu") and any(item.origin not in ("reference", "user") for item in competing):
            competing = [candidate for candidate in competing if candidate.origin != "reference"]
        return competing, rejected

    def candidate(self, op: str, name: str) -> Candidate:
        """The candidate of that name. Raises ConfigError where there is none."""
        for candidate in self.candidates(op):
            if candidate.name == name:
                return candidate
        raise ConfigError(f"no kernel {name!r} for {op}; there are {', '.join(c.name for c in self.candidates(op))}")

    def set_aside(self, name: str, reason: str) -> None:
        """Let a candidate compete no more in this process; choices that it won are repeated."""
        self._aside[name] = reason

    def aside(self) -> Mapping[str, str]:
        """Candidates that were rejected while they ran, with the reasons."""
        return dict(self._aside)

    def forget_skipped(self) -> None:
        """Drop choices in which a kernel lacked memory to compete: they are repeated when they are asked for."""
        self._choices = {key: choice for key, choice in self._choices.items() if not choice.skipped()}

    def choices(self) -> tuple[Choice, ...]:
        """What was decided so far, in order."""
        return tuple(self._choices.values())

    def explain(self, problem: Problem | None = None) -> str:
        """Why each kernel was chosen: of one problem, or of all so far, first as the table of an engine's report.

        All are also those that engines without a registry chose in this process: algorithms of large products, FP8
        against bf16, tiles of experts, attention.
        """
        if problem is not None:
            return str(self.choose(problem))
        from deepwell.kernels.tune.choose import decided

        own = {(device, key) for device, key, _ in self._choices}
        others = [row for row in decided() if (row[0].device, row[0].key) not in own]
        rows = [*self.rows(), *(row_of(*row) for row in others)]
        choices = [*self._choices.values(), *(choice for _, choice, _ in others)]
        return "\n\n".join(["\n".join(kernel_table(rows)), *map(str, choices)]) if rows else "nothing was chosen yet"

    def rows(self) -> list[KernelRow]:
        """Every problem that was asked for, how often, and what was chosen."""
        decided = [(problem, self._choices.get(self._key(problem)), count) for problem, count in self._asked.items()]
        return [row_of(problem, choice, count) for problem, choice, count in decided if choice is not None]

    def to_dict(self) -> dict[str, Any]:
        """Every decision so far, as JSON has it."""
        return {"choices": [choice.to_dict() for choice in self._choices.values()], "set_aside": dict(self._aside)}

    def __iter__(self) -> Iterator[Candidate]:
        for op in OPS:
            yield from self.candidates(op)

    def __repr__(self) -> str:
        own = ", ".join(name for _, name in self._own) or "none"
        return f"KernelRegistry({sum(1 for _ in self)} candidates, registered: {own})"


@lru_cache(maxsize=1)
def default_registry() -> KernelRegistry:
    """The one that entry points without a registry of their own share, so that a choice is made once in a process."""
    return KernelRegistry()


def formats_for(precision: str) -> tuple[str, ...]:
    """The candidate formats that may serve what was asked for. Raises ConfigError on an unknown name.

    "auto" is the operands' own dtype or FP8, whichever chain is faster; without an FP8 GPU that is their own dtype.
    """
    if precision == "auto":
        return ("bf16", "fp16", "fp32", "fp8")
    name = parse_precision(precision).format
    return (name, *_SUBSTITUTES.get(name, ()))


def _stand_ins(problem: Problem, competing: list[Candidate]) -> set[str]:
    """Deepwell's own kernels of another format: they run only where none of the very format is right."""
    if problem.precision == "auto":
        return set()
    asked = formats_for(problem.precision)[0]
    return {item.name for item in competing if item.precision != asked and item.origin != "user"}


__all__ = [
    "OPS",
    "Candidate",
    "Choice",
    "KernelRegistry",
    "Problem",
    "Verdict",
    "default_registry",
    "fingerprint_of",
    "formats_for",
]
