"""KernelRegistry: the kernels that compete for an op, built in and users' own, and what was decided about them.

A kernel of a user is a function of one of two ops:

    "gemm"       fn(a, b, *, bias=None, activation=None, out_dtype=None) -> C [M, N]
                 a [M, K] and b [K, N] in bf16, fp16 or fp32, as for torch.mm (b is often a transposed weight: stride
                 (1, K)). The whole chain: what it quantizes and how is its own affair. Keywords that the function does
                 not take are applied afterwards, so `fn(a, b)` is enough.
    "fp8_gemm"   fn(a, scale_a, b, scale_b, *, out_dtype=torch.bfloat16) -> C [M, N]
                 a [M, K] and b [N, K] FP8 codes along the contraction, fp32 scales, one or one per row.

It competes where the policy asks for its `precision` and none of M, N, K is smaller than `min_size`. A kernel says that
it does not take a shape by raising UnsupportedError. It is chosen where it matched the reference on this device, left
its operands as they were, and was the fastest; else it is set aside with the reason, which `explain` and the engine's
report show.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepwell.errors import ConfigError
from deepwell.kernels.tune.out_of_memory import says_shortage
from deepwell.precision.gemm_format import precision as parse_precision

if TYPE_CHECKING:
    import torch

OPS = ("gemm", "fp8_gemm")
ORIGINS = ("reference", "vendor", "triton", "cutlass", "transformer_engine", "user")
# What a candidate may stand in for besides its own format: FP8 hardware runs what a policy calls mxfp8.
_SUBSTITUTES = {"mxfp8": ("fp8",)}
_SIMPLE = (int, float, str, bool, bytes, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be computed where: the op, its sizes, the format asked for, the epilogue, the device."""

    op: str
    m: int
    n: int
    k: int
    precision: str
    dtype: str = "bfloat16"
    bias: bool = False
    activation: str | None = None
    # Whether b is quantized once for many products (a weight), so that its preparation is not part of the chain.
    static_b: bool = False
    # Whether sums must be in fp32: those over tokens drift one way, and a short accumulator cuts off what is added.
    exact_sums: bool = False
    # Whether codes come with one scale a tensor, as those of weight gradients, instead of one a row.
    one_scale: bool = False
    device: str = "cpu"

    @property
    def bucket(self) -> Problem:
        """The same with M rounded up to a power of two: what is measured for one M holds for its bucket."""
        return replace(self, m=1 << max(self.m - 1, 0).bit_length())

    @property
    def key(self) -> str:
        """The bucket as a string, without the device: the name of a choice in a device's cache."""
        bucket = self.bucket
        parts = [self.op, f"{bucket.m}x{bucket.n}x{bucket.k}", self.precision, self.dtype]
        parts += ["bias"] * self.bias + [self.activation or ""] * bool(self.activation) + ["static_b"] * self.static_b
        parts += ["exact_sums"] * self.exact_sums + ["one_scale"] * self.one_scale
        return " ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """One kernel that may compute an op. `fn` follows the op's signature (see the module); a value without torch.

    With `prepare`, `fn` gets `prepare(b)` in the place of b. `trusted` candidates are tried in this process, others
    first in one of their own that can be killed; a user's then also at each size that it competes for. `refuses` says
    in words why a problem is not for it.
    """

    name: str
    op: str
    precision: str
    fn: Callable[..., Any]
    origin: str
    prepare: Callable[..., Any] | None = None
    min_size: int = 0
    trusted: bool = False
    # Sums in the tensor cores' shorter accumulator: it has a floor of its own.
    fast: bool = False
    refuses: Callable[[Problem], str] | None = None
    # Hash of the sources; None where they cannot be told apart, and then nothing about it is kept on disk.
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

    def __repr__(self) -> str:
        size = f", min_size={self.min_size}" if self.min_size else ""
        return f"Candidate({self.name!r}, {self.op}, {self.precision}, {self.origin}{size})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one candidate: its time where it competed, else the reason why it was set aside."""

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

    def set_aside(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.reason)

    def skipped(self) -> tuple[Verdict, ...]:
        """Of those set aside, the ones that lacked memory to compete: with more of it they may win."""
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
        if fn is None:
            return lambda function: self.register(
                name,
                function,
                precision=precision,
                min_size=min_size,
                op=op,
                prepare=prepare,
                trusted=trusted,
                fast=fast,
            )
        self._check(name, fn, op, min_size)
        self._own[op, name] = Candidate(
            name=name,
            op=op,
            precision=parse_precision(precision).format,
            fn=fn,
            origin="user",
            prepare=prepare,
            min_size=min_size,
            trusted=trusted,
            fast=fast,
            fingerprint=fingerprint_of(fn, *([prepare] if prepare else [])),
        )
        self._choices.clear()
        return fn

    def _check(self, name: str, fn: object, op: str, min_size: object) -> None:
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"name is {name!r}; a kernel needs a name to be told apart by")
        if not callable(fn):
            raise ConfigError(f"fn of kernel {name!r} is a {type(fn).__name__}; pass a function")
        if op not in OPS:
            raise ConfigError(f"op of kernel {name!r} is {op!r}; it takes {' or '.join(OPS)}")
        if not isinstance(min_size, int) or isinstance(min_size, bool) or min_size < 0:
            raise ConfigError(f"min_size of kernel {name!r} is {min_size!r}; it must be a whole number of at least 0")
        if (op, name) in self._own or any(built.name == name for built in _built_in(op)):
            raise ConfigError(f"kernel {name!r} is registered for {op} already; choose another name")

    def candidates(self, op: str = "gemm", precision: str | None = None) -> tuple[Candidate, ...]:
        """Those of an op, or those that may serve one precision of it (see `formats_for`)."""
        if op not in OPS:
            raise ConfigError(f"op is {op!r}; it takes {' or '.join(OPS)}")
        every = (*_built_in(op), *(candidate for (of, _), candidate in self._own.items() if of == op))
        if precision is None:
            return every
        served = formats_for(precision)
        return tuple(candidate for candidate in every if candidate.precision in served)

    def users(self) -> tuple[Candidate, ...]:
        """The kernels that were registered, in order."""
        return tuple(self._own.values())

    def choose(self, problem: Problem) -> Choice:
        """The fastest candidate that is right here. Measured once per bucket and device, then remembered on disk."""
        # Within one bucket of M some sizes may be below a kernel's min_size and others not.
        out = tuple(candidate.name for candidate in self._own.values() if candidate.why_not(problem))
        known = self._choices.get((problem.device, problem.key, out))
        if known is not None and known.kernel not in self._aside:
            return known
        from deepwell.kernels.tune.select import choose

        choice = choose(self, problem)
        self._choices[problem.device, problem.key, out] = choice
        return choice

    def candidate(self, op: str, name: str) -> Candidate:
        """The candidate of that name. Raises ConfigError where there is none."""
        for candidate in self.candidates(op):
            if candidate.name == name:
                return candidate
        raise ConfigError(f"no kernel {name!r} for {op}; there are {', '.join(c.name for c in self.candidates(op))}")

    def set_aside(self, name: str, reason: str) -> None:
        """Let a candidate compete no more in this process; choices that it won are made again."""
        self._aside[name] = reason

    def aside(self) -> Mapping[str, str]:
        """Candidates that were set aside while they ran, with the reasons."""
        return dict(self._aside)

    def forget_skipped(self) -> None:
        """Drop choices in which a kernel lacked memory to compete: they are made again when they are asked for."""
        self._choices = {key: choice for key, choice in self._choices.items() if not choice.skipped()}

    def choices(self) -> tuple[Choice, ...]:
        """What was decided so far, in order."""
        return tuple(self._choices.values())

    def explain(self, problem: Problem | None = None) -> str:
        """Why each kernel was chosen: of one problem, or of all that were decided so far."""
        if problem is not None:
            return str(self.choose(problem))
        return "\n\n".join(map(str, self._choices.values())) or "nothing was chosen yet"

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
    """The one that doors without a registry of their own share, so that a choice is made once in a process."""
    return KernelRegistry()


def formats_for(precision: str) -> tuple[str, ...]:
    """The candidate formats that may serve what was asked for. Raises ConfigError on an unknown name.

    "auto" is the operands' own dtype or FP8, whichever chain is faster; without an FP8 GPU that is their own dtype.
    """
    if precision == "auto":
        return ("bf16", "fp16", "fp32", "fp8")
    name = parse_precision(precision).format
    return (name, *_SUBSTITUTES.get(name, ()))


def _built_in(op: str) -> tuple[Candidate, ...]:
    from deepwell.kernels.gemm.candidates import built_in

    return built_in(op)


# ---- telling sources apart ----


def fingerprint_of(*functions: Callable[..., Any]) -> str | None:
    """A hash of the files that hold the functions, their names and what they closed over; None where that is unclear.

    A file is hashed whole: a kernel and the code it calls usually live together. What the file imports is not followed.
    """
    digest = hashlib.sha256()
    for function in functions:
        parts = _identity_of(function)
        if parts is None:
            return None
        for part in parts:
            digest.update(part)
    return digest.hexdigest()[:16]


def _identity_of(function: Callable[..., Any]) -> list[bytes] | None:
    wrapped = inspect.unwrap(function)
    code = getattr(wrapped, "__code__", None)
    if code is None:
        return None
    source = Path(code.co_filename)
    body = file_hash(source) if source.is_file() else repr((code.co_code, code.co_names, code.co_consts))
    values = [*(wrapped.__defaults__ or ()), *(wrapped.__kwdefaults__ or {}).values()]
    values += [cell.cell_contents for cell in (wrapped.__closure__ or ())]
    if not all(isinstance(value, _SIMPLE) or _is_dtype(value) for value in values):
        return None
    return [body.encode(), wrapped.__qualname__.encode(), repr(values).encode()]


def _is_dtype(value: object) -> bool:
    return type(value).__name__ == "dtype"


@lru_cache(maxsize=256)
def file_hash(path: Path) -> str:
    """Of a source file as it was when first asked for."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def problem_of(
    a: torch.Tensor, b: torch.Tensor, *, precision: str, bias: bool = False, activation: str | None = None
) -> Problem:
    """The problem of `a [M, K] @ b [K, N]`."""
    return Problem(
        op="gemm",
        m=a.shape[0],
        n=b.shape[1],
        k=a.shape[1],
        precision=precision,
        dtype=str(a.dtype).removeprefix("torch."),
        bias=bias,
        activation=activation,
        device=str(a.device),
    )


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
