"""A candidate at the size of a real problem: its calls, whether a first one is right, and that one run apart.

A kernel may be right at the proof's sizes and wrong, or hang, at others. A user's kernel therefore meets the problem's
own size first in a process that can be killed, with the limits of its proof (see `deepwell.kernels.tune.sandbox`).
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from deepwell.errors import UnsupportedError
from deepwell.kernels.gemm.candidates import gemm_ref
from deepwell.kernels.registry import Candidate, Problem
from deepwell.kernels.tune.out_of_memory import is_shortage, skipped
from deepwell.kernels.tune.sandbox import find, run_apart
from deepwell.kernels.tune.verify import (
    FAILURES,
    FLOORS_DB,
    Proof,
    codes,
    codes_floor_db,
    compare_rows,
    copies_of,
    operands,
    prepared,
    run_fp8_gemm,
    run_gemm,
    wrote_into,
)

REFUSES = "does not take this shape"
# Rows of the real shape that are compared with the reference: the first, the last and some between.
_CHECKED_ROWS = 64
_ENTRY = "from deepwell.kernels.tune.trial import main; main()"


# ---- one call ----


def inputs_of(problem: Problem, seed: int = 0) -> tuple[Any, ...]:
    """The operands of a problem as its op takes them."""
    return codes(problem, seed) if problem.op == "fp8_gemm" else operands(problem, seed)


def calls_of(candidate: Candidate, problem: Problem, inputs: Sequence[tuple[Any, ...]]) -> list[Callable[[], Tensor]]:
    """The candidate's chain on each set of operands."""
    if problem.op == "fp8_gemm":
        return [lambda given=given: run_fp8_gemm(candidate, given) for given in inputs]  # type: ignore[misc]
    calls: list[Callable[[], Tensor]] = []
    for a, b, bias in inputs:
        ready = prepared(candidate, b) if problem.static_b else None

        def call(a: Tensor = a, b: Tensor = b, bias: Tensor | None = bias, ready: Any = ready) -> Tensor:
            right = ready if problem.static_b else prepared(candidate, b)
            return run_gemm(candidate, a, right, bias=bias, activation=problem.activation)

        calls.append(call)
    return calls


def check_rows(candidate: Candidate, problem: Problem, given: tuple[Any, ...], got: Tensor) -> tuple[str, float]:
    """(why some rows of `got` are wrong or "", their dB). `given` are operands that the candidate never had."""
    if tuple(got.shape) != (problem.m, problem.n):
        return f"returns shape {tuple(got.shape)} for {problem.m}x{problem.n}", -math.inf
    rows = torch.linspace(0, problem.m - 1, min(_CHECKED_ROWS, problem.m), device=got.device).long()
    if problem.op == "fp8_gemm":
        a, scale_a, b, scale_b = given
        scale = scale_a[rows] if scale_a.numel() > 1 else scale_a
        picked = a.view(torch.uint8)[rows].view(a.dtype)
        ref = (picked.float() * scale.reshape(-1, 1)) @ (b.float() * scale_b.reshape(-1, 1)).T
        floor = codes_floor_db(candidate, problem.k, problem.device)
        return compare_rows(got[rows], ref.to(got.dtype), floor, _size(problem))
    a, b, bias = given
    ref = gemm_ref(a[rows], b, bias=bias, activation=problem.activation, out_dtype=torch.float32)
    return compare_rows(got[rows], ref, FLOORS_DB.get(candidate.precision, 12.0), _size(problem))


def why_failed(error: BaseException, when: str = "at this shape") -> str:
    """The reason of a candidate that raised."""
    if is_shortage(error):
        return skipped(error)
    if isinstance(error, UnsupportedError):
        return f"{REFUSES}: {error}"
    return f"raised {type(error).__name__} {when}: {str(error)[:200]}"


def _size(problem: Problem) -> str:
    return f"{problem.m}x{problem.n}x{problem.k}"


def try_once(candidate: Candidate, problem: Problem) -> Proof:
    """Run a candidate once at a problem's size, in this process."""
    try:
        given = inputs_of(problem)
        own = copies_of(given)
        (call,) = calls_of(candidate, problem, [own])
        got = call()
        wrote = wrote_into(problem.op, own, given)
        if wrote:
            return Proof(reason=wrote)
        wrong, db = check_rows(candidate, problem, given, got)
    except FAILURES as error:
        return Proof(reason=why_failed(error))
    return Proof(reason=wrong, sqnr_db=min(db, 999.0))


# ---- in another process ----


def try_apart(candidate: Candidate, problem: Problem, timeout_s: float) -> Proof:
    """As `try_once`, in the kind of process in which the candidate was proved."""
    request = {"device": problem.device, "problem": asdict(problem)}
    where = f" at {_size(problem)}"
    return run_apart(candidate, lambda: try_once(candidate, problem), _ENTRY, request, timeout_s, where=where)


def main() -> None:
    """The fresh interpreter: read a request, find the candidate, print how its one call went as JSON."""
    request = json.loads(sys.stdin.read())
    proof = try_once(find(request), Problem(**request["problem"]))
    print(json.dumps(asdict(proof)), flush=True)
