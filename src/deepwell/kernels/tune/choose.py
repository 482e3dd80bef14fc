"""How a kernel is chosen: candidates that match the reference on this device, timed, the fastest first.

What is timed is what a layer pays: quantizing what it must, the product, bias and activation. Times are medians;
candidates take turns, so that a clock that drifts hits all alike. A candidate that raises, hangs, is wrong or writes
into its operands is rejected with its reason. One that lacks memory is skipped, and a choice without it is not kept on
disk; where no candidate has enough memory, OutOfMemoryError is raised. A user's kernel never gets a model's memory
before it was chosen.
"""

import logging
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from deepwell.errors import UnsupportedError
from deepwell.kernels.tune import cache
from deepwell.kernels.tune.cache import cache_of
from deepwell.kernels.tune.candidate import Candidate, Choice, Verdict, room_of
from deepwell.kernels.tune.out_of_memory import is_shortage, says_shortage, skipped
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.sandbox import cases_for, verify_apart, verify_together
from deepwell.kernels.tune.timing import recorded, times_us
from deepwell.kernels.tune.verify import (
    FAILURES,
    REFUSES,
    Case,
    Proof,
    copies_of,
    judge,
    verify,
    why_failed,
    wrote_into,
)

_log = logging.getLogger("deepwell.kernels")
_ROUNDS = 3
# Seconds of timing per candidate; a GPU needs far less for a steady median than a CPU that others use too.
_BUDGET_S = {"cuda": 0.02, "cpu": 0.05}
# How long an unknown kernel may take to prove itself before it counts as hanging, where nobody says.
_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingSetup:
    """A problem at its own size: sets of operands that take turns, a candidate's call on one of them, and the case
    that its call on the first must pass."""

    inputs: Sequence[tuple[Any, ...]]
    call: Callable[[Candidate, tuple[Any, ...]], Callable[[], Any]]
    case: Callable[[Candidate], Case]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How times are taken and compared.

    `default` wins unless another gains `least_gain` on it. After the first round only as many as `leaders` are timed
    again, and the default. `record` has launches recorded in a CUDA graph, so that the host's time does not count.
    """

    default: str = ""
    least_gain: float = 0.0
    leaders: int | None = None
    budget_s: float | None = None
    record: bool = True


RULES = Rules()
# By device and problem: what was decided in this process, or found decided, and how often it was asked for.
_decided: dict[tuple[str, str], tuple[Problem, Choice, int]] = {}


def decided() -> tuple[tuple[Problem, Choice, int], ...]:
    """Every problem that this process chose a kernel for, on the default path or a registry's, in order."""
    return tuple(_decided.values())


def _note(problem: Problem, choice: Choice) -> Choice:
    key = problem.device, problem.key
    _decided[key] = (problem, choice, 1 + (_decided[key][2] if key in _decided else 0))
    return choice


def forget() -> None:
    """Drop what this process remembers, so that the files are read again."""
    cache.forget()
    _decided.clear()
    first_right.cache_clear()


def on_real_tensors() -> AbstractContextManager[object]:
    """Real tensors without gradients, also while a compiler traces with fake ones, as it does when an engine asks."""
    stack = ExitStack()
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch.no_grad())
    return stack


# ---- choosing ----


def choose(
    problem: Problem,
    candidates: Sequence[Candidate],
    setup: Callable[[], TimingSetup],
    *,
    rules: Rules = RULES,
    rejected: Iterable[Verdict] = (),
    substitutes: Collection[str] = (),
    proofs: Mapping[str, Proof] = MappingProxyType({}),
    timeout_s: float = _TIMEOUT_S,
) -> Choice:
    """The choice for a problem's bucket: from the cache where the same candidates competed, else measured now.

    `rejected` are verdicts on others, for the record. `substitutes` names candidates that compete only where no kernel
    of the very format is right here; `proofs` of candidates, by name, were made before. Raises UnsupportedError where
    nobody is left, OutOfMemoryError where memory was short.
    """
    known = known_choice(problem, candidates)
    if known is not None:
        return known
    verdicts = list(rejected)
    passed: list[tuple[Candidate, Proof]] = []
    with on_real_tensors():
        for candidate in candidates:
            proof = proofs.get(candidate.name) or _tried(candidate, problem, timeout_s)
            if proof.is_passed:
                passed.append((candidate, proof))
            else:
                verdicts.append(candidate.verdict(reason=proof.reason, sqnr_db=proof.sqnr_db))
        passed, dropped = _without_substitutes(passed, substitutes)
        verdicts += dropped
        if not passed:
            raise _nobody(f"no kernel for {problem.key} is right on {problem.device}", verdicts)
        how = "measured" if len(passed) > 1 else "only one"
        candidate, proof = passed[0]
        if len(passed) == 1 and candidate.origin != "user":
            timed = [candidate.verdict(sqnr_db=proof.sqnr_db)]
        else:
            timed = race(problem, passed, setup(), rules)
    choice = _choice(problem, [*timed, *verdicts], how, rules)
    cache_of(problem.device).keep_choice(problem.key, candidates, choice)
    return _note(problem, choice)


def fastest_or_default(
    problem: Problem,
    candidates: Sequence[Candidate],
    setup: Callable[[], TimingSetup],
    rules: Rules,
    proofs: Mapping[str, Proof] = MappingProxyType({}),
) -> str:
    """The kernel of `choose`; the default's for this process where memory is short: the next one may have more."""
    try:
        choice = choose(problem, candidates, setup, rules=rules, proofs=proofs)
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        _log.info("%s: not timed, %s", problem.key, skipped(error))
        return rules.default
    _log.info("%s", choice)
    return choice.kernel


def known_choice(problem: Problem, candidates: Sequence[Candidate]) -> Choice | None:
    """The kept choice among these very candidates, or None."""
    known = cache_of(problem.device).choice(problem.key, candidates)
    # A file serves all GPUs of one kind: what one of them measured holds for the others.
    return None if known is None else _note(problem, replace(known, device=problem.device))


def _tried(candidate: Candidate, problem: Problem, timeout_s: float) -> Proof:
    """The proof of a candidate; a user's must also be right at this very size, in a process of its own.

    Only afterwards may it run here, where a kernel that hangs would hang the training.
    """
    proof = proof_of(candidate, problem, timeout_s)
    if proof.is_passed and candidate.origin == "user" and not candidate.trusted:
        trial = proof_of(candidate, problem.bucket, timeout_s, at_size=True)
        return proof if trial.is_passed else trial
    return proof


def proof_of(candidate: Candidate, problem: Problem, timeout_s: float = _TIMEOUT_S, *, at_size: bool = False) -> Proof:
    """The kept proof of these sources on this device, or a new one, at small shapes or at the problem's own size.

    References need none, nor do candidates of an op without cases.
    """
    room = room_of(candidate.op)
    if candidate.origin == "reference" or room is None:
        return Proof()
    kept, of = cache_of(problem.device), problem.key if at_size else problem.dtype
    known = kept.proof(candidate, of)
    if known is not None:
        return known
    proof = check(candidate, problem, timeout_s, at_size=at_size)
    _warn(candidate, problem, proof.reason)
    kept.keep_proof(candidate, of, proof)
    return proof


def proofs_of(asked: Sequence[tuple[Candidate, Problem]], timeout_s: float = _TIMEOUT_S) -> list[Proof]:
    """The kept proofs of several candidates for the details of their problems; what is new is tried together."""
    of = [f"{problem.dtype} {problem.details}".rstrip() for _, problem in asked]
    found = [
        cache_of(problem.device).proof(candidate, what) for (candidate, problem), what in zip(asked, of, strict=True)
    ]
    new = [i for i, proof in enumerate(found) if proof is None]
    made = verify_together([asked[i] for i in new], timeout_s) if new else []
    for i, proof in zip(new, made, strict=True):
        candidate, problem = asked[i]
        _warn(candidate, problem, proof.reason)
        cache_of(problem.device).keep_proof(candidate, of[i], proof)
        found[i] = proof
    return [proof for proof in found if proof is not None]


def check(candidate: Candidate, problem: Problem, timeout_s: float = _TIMEOUT_S, *, at_size: bool = False) -> Proof:
    """A new proof: of trusted candidates in this process, of others in one of their own."""
    if not candidate.trusted:
        return verify_apart(candidate, problem, timeout_s, at_size=at_size)
    return verify(candidate, cases_for(candidate, problem, at_size))


def _without_substitutes(
    passed: list[tuple[Candidate, Proof]], substitutes: Collection[str]
) -> tuple[list[tuple[Candidate, Proof]], list[Verdict]]:
    is_native = any(c.name not in substitutes and c.origin not in ("reference", "user") for c, _ in passed)
    if not substitutes or not is_native:
        return passed, []
    reason = "stands in only where the format asked for has no kernel of its own"
    dropped = [c.verdict(reason=reason, sqnr_db=p.sqnr_db) for c, p in passed if c.name in substitutes]
    return [(c, p) for c, p in passed if c.name not in substitutes], dropped


def _warn(candidate: Candidate, problem: Problem, reason: str) -> None:
    """Say in the log that a candidate does not run, and why; a shape that it refuses by itself is no news."""
    if reason and not reason.startswith(REFUSES):
        what = "skipped" if says_shortage(reason) else "rejected"
        level = logging.INFO if room_of(problem.op) is None else logging.WARNING
        _log.log(level, "kernel %s was %s on %s: %s", candidate.name, what, problem.device, reason)


def _nobody(what: str, verdicts: Sequence[Verdict]) -> Exception:
    """The error where no candidate is left: lack of memory where that kept one out, for it may pass."""
    text = f"{what}: " + "; ".join(f"{verdict.name} {verdict.reason}" for verdict in verdicts)
    is_short = any(says_shortage(verdict.reason) for verdict in verdicts)
    return torch.OutOfMemoryError(text) if is_short else UnsupportedError(text)


def _choice(problem: Problem, verdicts: Sequence[Verdict], how: str, rules: Rules) -> Choice:
    able = {verdict.name: verdict for verdict in verdicts if not verdict.reason}
    if not able:
        raise _nobody(f"no kernel for {problem.key} ran on {problem.device}", verdicts)
    best = min(able.values(), key=lambda verdict: math.inf if verdict.us is None else verdict.us)
    default = able.get(rules.default)
    if default and default.us and best.us and best.us >= (1.0 - rules.least_gain) * default.us:
        best = default
    return Choice(
        problem=problem.key, device=problem.device, kernel=best.name, us=best.us, how=how, verdicts=tuple(verdicts)
    )


# ---- without times: whether anybody is right ----


@lru_cache(maxsize=64)
def first_right(op: str, precision: str, device: str) -> tuple[str, str]:
    """(the first of an op's candidates that matches its reference on a device, how near it came).

    Those behind it are not tried. Where none does, ("", why each was rejected). Lack of memory is no finding: it is
    raised, and the check is repeated when it is asked for again.
    """
    problem = Problem(op=op, precision=precision, device=device)
    reasons = []
    with on_real_tensors():
        for candidate in room_of(op).built_in(op):
            if candidate.precision != precision:
                continue
            proof = proof_of(candidate, problem)
            if proof.is_passed:
                return candidate.name, f"at least {proof.sqnr_db:.0f} dB against the reference"
            if says_shortage(proof.reason):
                raise torch.OutOfMemoryError(
                    f"{candidate.name} could not be checked for {op} on {device}: {proof.reason}"
                )
            reasons.append(f"{candidate.name} {proof.reason}")
    return "", "; ".join(reasons)


def why_rejected(op: str, device: torch.device, precision: str = "fp8") -> str:
    """Why an op cannot be used on a device: "" where a candidate matches the reference on it."""
    kernel, reason = first_right(op, precision, str(device))
    return "" if kernel else reason


# ---- timing ----


@dataclass(slots=True)
class _Runner:
    """A candidate's calls over rotating operands; `lap` makes each once."""

    candidate: Candidate
    proof: Proof
    operands: Sequence[tuple[Any, ...]]
    calls: list[Callable[[], Any]]
    times_us: list[float] = field(default_factory=list)

    def lap(self) -> None:
        for call in self.calls:
            call()

    def wrote_into(self, names: Sequence[str], inputs: Sequence[tuple[Any, ...]]) -> str:
        """What a user's kernel wrote into, "" where its copies still are what the inputs are."""
        pairs = zip(self.operands, inputs, strict=True) if self.candidate.origin == "user" else ()
        return next(filter(None, (wrote_into(names, own, given) for own, given in pairs)), "")


def race(
    problem: Problem, passed: Sequence[tuple[Candidate, Proof]], setup: TimingSetup, rules: Rules = RULES
) -> list[Verdict]:
    """Every candidate's time at the problem's own shape; one that fails or is wrong there gets the reason instead.

    Signal to noise is the proof's, or that of some rows at this shape where the proof says nothing.
    """
    runners: list[_Runner] = []
    verdicts: list[Verdict] = []
    names: Sequence[str] = ()
    for candidate, proof in passed:
        runner, wrong, names = _starter(candidate, proof, setup)
        if runner is None:
            _warn(candidate, problem, wrong)
            verdicts.append(candidate.verdict(reason=wrong, sqnr_db=proof.sqnr_db))
        else:
            runners.append(runner)
    failed = _take_turns(runners, torch.device(problem.device), rules)
    for runner in runners:
        reason = failed.get(runner.candidate.name, "") or runner.wrote_into(names, setup.inputs)
        if reason != SLOWER:
            _warn(runner.candidate, problem, reason)
        us = statistics.median(runner.times_us) if reason in ("", SLOWER) else None
        verdicts.append(runner.candidate.verdict(us=us, sqnr_db=runner.proof.sqnr_db, reason=reason))
    return verdicts


SLOWER = "slower in the first round"


def _starter(candidate: Candidate, proof: Proof, setup: TimingSetup) -> tuple[_Runner | None, str, Sequence[str]]:
    """A runner that was right once at this shape, or None and the reason. What a failed one held is free again."""
    names: Sequence[str] = ()
    try:
        # A user's kernel may write where it should only read, at any call: what others are compared by is not its own.
        own = [copies_of(given) for given in setup.inputs] if candidate.origin == "user" else setup.inputs
        runner = _Runner(candidate, proof, own, [setup.call(candidate, given) for given in own])
        got = runner.calls[0]()
        case = setup.case(candidate)
        names = case.names
        wrong = runner.wrote_into(names, setup.inputs)
        wrong, db = (wrong, math.nan) if wrong else judge(got, case)
    except FAILURES as error:
        return None, why_failed(error, " at this shape"), names
    if wrong:
        return None, wrong, names
    if proof.sqnr_db is None:
        runner.proof = Proof(sqnr_db=min(db, 999.0))
    return runner, "", names


def _take_turns(runners: Sequence[_Runner], device: torch.device, rules: Rules) -> dict[str, str]:
    """Time all in turns. Returns why some did not finish, by name: they raised, lacked memory, or fell behind."""
    budget = (rules.budget_s or _BUDGET_S[device.type]) / _ROUNDS
    out: dict[str, str] = {}
    laps: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:
        # Their results may lie in the same memory: one candidate runs at a time.
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" and rules.record else None
        for number in range(1 + _ROUNDS):
            for runner in runners:
                name = runner.candidate.name
                if name in out:
                    continue
                try:
                    if number == 0:
                        runner.lap()
                        lap = runner.lap
                        laps[name] = lap if pool is None else stack.enter_context(recorded(lap, device, pool))
                    else:
                        runner.times_us += [us / len(runner.calls) for us in times_us(laps[name], device, budget)]
                except FAILURES as error:
                    out[name] = why_failed(error, " while it was timed")
                    runner.operands, runner.calls = (), []
            if number == 1 and rules.leaders is not None:
                racing = [r for r in runners if r.candidate.name not in (*out, rules.default)]
                racing.sort(key=lambda runner: statistics.median(runner.times_us))
                out |= {runner.candidate.name: SLOWER for runner in racing[rules.leaders :]}
    return out
