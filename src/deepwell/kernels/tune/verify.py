"""The one check of a candidate: its results against the reference on this device, at realistic magnitudes.

A case holds operands and what their result must be; the ops' own modules make them. A candidate works on copies: the
operands that the reference read are never given to it, and show afterwards whether it wrote where it should only read.
The floors in dB are those of docs/numerics.md.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepwell.errors import UnsupportedError
from deepwell.formats.metrics import sqnr_db
from deepwell.kernels.tune.candidate import Candidate
from deepwell.kernels.tune.out_of_memory import is_shortage, skipped

# Against the high-precision product. bf16 and fp16 round the result once; FP8 and below round the operands.
FLOORS_DB = {"fp32": 90.0, "fp16": 60.0, "bf16": 45.0, "fp8": 27.0, "mxfp8": 27.0, "mxfp6": 20.0, "nvfp4": 14.0}
LOWEST_DB = 12.0  # mxfp4 and what else has four bits
BITWISE = math.inf

# What a kernel may raise in the course of its work: anything that is an error, also one of its own kind, and lack of
# memory (`is_shortage`). What is meant to end a program, Ctrl-C say, is not among them.
FAILURES: tuple[type[Exception], ...] = (Exception,)

REFUSES = "does not take this shape"
# Rows of a result of real size that are compared with the reference: the first, the last and some between.
_COMPARED_ROWS = 64
_REASON_LENGTH = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Whether a candidate is right on a device: the lowest signal to noise that was seen, or the reason why not."""

    reason: str = ""
    sqnr_db: float | None = None

    @property
    def is_passed(self) -> bool:
        return not self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Operands (tensors, tuples of them, anything else) to try a candidate with, and what its result must be."""

    label: str
    operands: tuple[Any, ...]
    wanted: Tensor
    floor_db: float
    names: Sequence[str] = ()  # of the operands, in order
    call: Callable[[Candidate, tuple[Any, ...]], Any] | None = None  # fn(*operands) where it is None
    dtype: torch.dtype | None = None  # of the result, where that matters
    # Where `wanted` is some rows of the result: which ones, and the whole result's shape.
    rows: Tensor | None = None
    shape: tuple[int, ...] | None = None
    # An operand holds a NaN or an infinity, and numbers that do not depend on it may be spoiled too.
    only_spoiled: bool = False
    may_refuse: bool = False  # whether a candidate may say by UnsupportedError that this shape is not for it

    def run(self, candidate: Candidate, operands: tuple[Any, ...]) -> Any:
        return self.call(candidate, operands) if self.call else candidate.fn(*operands)


def some_rows(count: int, device: torch.device | str) -> Tensor:
    return torch.linspace(0, count - 1, min(_COMPARED_ROWS, count), device=device).long()


def verify(candidate: Candidate, cases: Iterable[Case]) -> Proof:
    """Try a candidate in this process. An error is a reason; a shape that it may and does refuse is left out."""
    lowest, tried, refused = math.inf, 0, ""
    try:
        for case in cases:
            own = copies_of(case.operands)
            try:
                got = case.run(candidate, own)
            except UnsupportedError as error:
                if not case.may_refuse:
                    raise
                refused = str(error)
                continue
            reason, db = wrote_into(case.names, own, case.operands), None
            if not reason:
                reason, db = judge(got, case)
            if reason:
                return Proof(reason=reason, sqnr_db=db)
            lowest, tried = min(lowest, db or lowest), tried + 1
    except FAILURES as error:
        return Proof(reason=why_failed(error))
    return Proof(sqnr_db=min(lowest, 999.0)) if tried else Proof(reason=f"{REFUSES}: {refused}")  # JSON has no infinity


def judge(got: Any, case: Case) -> tuple[str, float]:
    """(why a result is wrong or "", its dB). Where the reference is not finite the result must not be either."""
    ref, label = case.wanted, case.label
    shape = ref.shape if case.shape is None else case.shape
    if not isinstance(got, Tensor):
        return f"returns a {type(got).__name__}, not a tensor", -math.inf
    if tuple(got.shape) != tuple(shape) or got.device != ref.device:
        where = f"{tuple(got.shape)} on {got.device}"
        return f"returns {where} at {label}, it should be {tuple(shape)} on {ref.device}", -math.inf
    if case.dtype not in (None, got.dtype):
        return f"returns {got.dtype} at {label}, it should be {case.dtype}", -math.inf
    got = got if case.rows is None else got[case.rows]
    if bool((ref.isnan() & ~got.isnan()).any()):
        return f"hides a NaN of its input at {label}", -math.inf
    if bool((ref.isinf() & got.isfinite()).any()):
        return f"hides an infinity of its input at {label}", -math.inf
    if case.only_spoiled:
        return "", math.inf
    finite = ref.isfinite()
    if not bool(finite.all()):
        got, ref = got[finite], ref[finite]
    if not bool(got.isfinite().all()):
        return f"gives infinities or NaN at {label} where the reference is finite", -math.inf
    db = sqnr_db(ref, got)
    if not db >= case.floor_db:
        needed = "equal bits" if case.floor_db == BITWISE else f"{case.floor_db:g}"
        return f"wrong at {label}: {db:.1f} dB against the reference, {needed} are needed", db
    return "", db


def why_failed(error: BaseException, when: str = "") -> str:
    """The reason of a candidate that raised."""
    if is_shortage(error):
        return skipped(error)
    if isinstance(error, UnsupportedError):
        return f"{REFUSES}: {error}"
    text = _gist(error)[:_REASON_LENGTH]
    return f"raised {type(error).__name__}{when}" + (f": {text}" if text else "")


def _gist(error: BaseException) -> str:
    """What an error says, in one line: its first one; of Triton's compiler the message, and the code it is about."""
    if type(error).__module__.partition(".")[0] != "triton":
        return (str(error).strip().splitlines() or [""])[0]
    while error.__cause__ is not None:  # from the kernel to the function inside it that was not compiled
        error = error.__cause__
    node, source = getattr(error, "node", None), getattr(error, "src", None)
    if node is None or source is None or not hasattr(node, "lineno"):
        return " ".join(str(error).split())
    function = re.search(r"def (\w+)", source)
    code = " ".join(source.splitlines()[node.lineno - 1].split())
    message = " ".join((getattr(error, "error_message", None) or "").split())
    return f"{message or 'not compiled'}, in {function[1] if function else 'a kernel'}: {code}"


# ---- operands are read, not written ----


def copies_of(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same operands, with the same strides, in memory that a kernel may spoil."""
    return tuple(_copy(x) for x in given)


def _copy(x: Any) -> Any:
    if isinstance(x, tuple):
        parts = copies_of(x)
        return type(x)(*parts) if hasattr(x, "_fields") else parts
    return x.clone() if isinstance(x, Tensor) else x


def wrote_into(names: Sequence[str], got: Sequence[Any], given: Sequence[Any]) -> str:
    """The reason of a kernel that changed its operands, `got`, which were `given` before; "" where no bit differs."""
    for name, now, before in zip(names, got, given, strict=False):
        if not _same_bits(now, before):
            return f"wrote into its operand {name}"
    return ""


def _same_bits(x: Any, y: Any) -> bool:
    if isinstance(x, tuple):
        return all(map(_same_bits, x, y))
    if not isinstance(x, Tensor):
        return True
    # As numbers a NaN would differ from itself, and -0 would not from 0.
    return x.dtype == y.dtype and torch.equal(_bits(x), _bits(y))


def _bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
