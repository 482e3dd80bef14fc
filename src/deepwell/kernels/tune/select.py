"""Chooses among a registry's candidates: proved right on this device, then timed as whole chains, fastest first.

A chain is what a layer pays: quantizing what it must, the product, bias and activation. Times are medians; candidates
take turns, so that a clock that drifts hits all alike, and operands rotate through more memory than the L2 cache holds.
A candidate that raises, hangs, is wrong or writes into its operands is set aside with its reason; the reference stays.
One that lacks memory is skipped, and a choice without it is not kept on disk; where none has memory enough, that is
raised. All operands are made here: a candidate that may yet be set aside never gets a model's memory.
"""

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from deepwell.errors import UnsupportedError
from deepwell.kernels.registry import Candidate, Choice, KernelRegistry, Problem, Verdict, formats_for
from deepwell.kernels.tune.cache import ChoiceCache
from deepwell.kernels.tune.out_of_memory import says_shortage
from deepwell.kernels.tune.sandbox import prove_apart
from deepwell.kernels.tune.timing import recorded, times_us
from deepwell.kernels.tune.trial import REFUSES, calls_of, check_rows, inputs_of, try_apart, why_failed
from deepwell.kernels.tune.verify import FAILURES, Proof, copies_of, prove, wrote_into

_log = logging.getLogger("deepwell.kernels")
_ROUNDS = 3
# Seconds of timing per candidate; a GPU needs far less for a steady median than a CPU that others use too.
_BUDGET_S = {"cuda": 0.02, "cpu": 0.05}
_L2_BYTES = 128 << 20
_MAX_COPIES = 8

_caches: dict[str, ChoiceCache] = {}


def cache_of(device: str) -> ChoiceCache:
    """The cache of a device in this process, one per file."""
    fresh = ChoiceCache(device=device)
    return _caches.setdefault(str(fresh.path), fresh)


def forget() -> None:
    """Drop what this process remembers, so that the files are read again."""
    _caches.clear()


# ---- choosing ----


def on_real_tensors() -> AbstractContextManager[object]:
    """Real tensors without gradients, also while a compiler traces with fake ones, as it does when an engine asks."""
    stack = ExitStack()
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch.no_grad())
    return stack


def choose(registry: KernelRegistry, problem: Problem) -> Choice:
    """The choice for a problem's bucket: from the cache where the same candidates competed, else measured now."""
    with on_real_tensors():
        return _choose(registry, problem)


def _choose(registry: KernelRegistry, problem: Problem) -> Choice:
    bucket = problem.bucket
    competing, verdicts = _competitors(registry, problem)
    if not competing:
        reasons = "; ".join(f"{verdict.name}: {verdict.reason}" for verdict in verdicts) or "none is registered"
        raise UnsupportedError(f"no kernel computes {problem.key} on {problem.device}: {reasons}")
    cache = cache_of(problem.device)
    known = cache.choice(problem.key, competing)
    if known is not None and known.kernel not in registry.aside():
        # A file serves all GPUs of one kind: what one of them measured holds for the others.
        return replace(known, device=problem.device)
    passed: list[tuple[Candidate, Proof]] = []
    for candidate in competing:
        proof = proof_of(candidate, problem, cache, registry.proof_timeout_s)
        trial = trial_of(candidate, bucket, cache, registry.proof_timeout_s) if proof.is_passed else proof
        if trial.is_passed:
            passed.append((candidate, proof))
        else:
            verdicts.append(_verdict(candidate, reason=trial.reason, sqnr_db=trial.sqnr_db))
    passed, substitutes = _prefer_native(problem, passed)
    verdicts += substitutes
    if not passed:
        raise _nobody(f"no kernel for {problem.key} is right on {problem.device}", verdicts)
    how = "measured" if len(passed) > 1 else "only one"
    candidate, proof = passed[0]
    if len(passed) == 1 and candidate.origin != "user":
        timed = [_verdict(candidate, sqnr_db=proof.sqnr_db)]
    else:
        timed = race(bucket, passed)
    choice = _choice(problem, [*timed, *verdicts], how)
    cache.keep_choice(problem.key, competing, choice)
    return choice


def _competitors(registry: KernelRegistry, problem: Problem) -> tuple[list[Candidate], list[Verdict]]:
    """Those that take part, and verdicts on users' kernels that do not, so that nobody wonders where one is."""
    competing, verdicts = [], []
    for candidate in registry.candidates(problem.op, problem.precision):
        # Emulation is exact in its own format; it stands in for no other.
        if candidate.origin == "reference" and candidate.precision != formats_for(problem.precision)[0]:
            continue
        reason = registry.aside().get(candidate.name) or candidate.why_not(problem)
        if not reason:
            competing.append(candidate)
        elif candidate.origin == "user" or candidate.name in registry.aside():
            verdicts.append(_verdict(candidate, reason=reason))
    # Exact emulation stands in only where nothing else is there: on a GPU it is orders slower and need not be timed.
    fast = [candidate for candidate in competing if candidate.origin not in ("reference", "user")]
    if fast and torch.device(problem.device).type != "cpu":
        competing = [candidate for candidate in competing if candidate.origin != "reference"]
    return competing, verdicts


def _prefer_native(
    problem: Problem, passed: list[tuple[Candidate, Proof]]
) -> tuple[list[tuple[Candidate, Proof]], list[Verdict]]:
    """Where a kernel of the very format is right here, Deepwell's own of another format do not stand in for it."""
    asked = formats_for(problem.precision)[0]
    is_native = any(
        candidate.precision == asked and candidate.origin not in ("reference", "user") for candidate, _ in passed
    )
    if problem.precision == "auto" or not is_native:
        return passed, []
    kept = [
        (candidate, proof) for candidate, proof in passed if candidate.precision == asked or candidate.origin == "user"
    ]
    reason = f"stands in for {asked} only where that has no kernel of its own"
    dropped = [_verdict(c, reason=reason, sqnr_db=p.sqnr_db) for c, p in passed if (c, p) not in kept]
    return kept, dropped


def proof_of(candidate: Candidate, problem: Problem, cache: ChoiceCache, timeout_s: float) -> Proof:
    """The kept proof of these sources on this device, or a new one; references need none."""
    if candidate.origin == "reference":
        return Proof()
    known = cache.proof(candidate, problem.dtype)
    if known is not None:
        return known
    if candidate.trusted:
        proof = prove(candidate, problem.device, problem.dtype)
    else:
        proof = prove_apart(candidate, problem.device, problem.dtype, timeout_s)
    _warn(candidate, problem, proof.reason)
    cache.keep_proof(candidate, problem.dtype, proof)
    return proof


def trial_of(candidate: Candidate, problem: Problem, cache: ChoiceCache, timeout_s: float) -> Proof:
    """Of a user's kernel, the kept or a new trial at this very size in a process of its own; others need none.

    Only afterwards may it run here, where a kernel that hangs would hang the training.
    """
    if candidate.origin != "user" or candidate.trusted:
        return Proof()
    known = cache.proof(candidate, problem.key)
    if known is not None:
        return known
    trial = try_apart(candidate, problem, timeout_s)
    _warn(candidate, problem, trial.reason)
    cache.keep_proof(candidate, problem.key, trial)
    return trial


def _warn(candidate: Candidate, problem: Problem, reason: str) -> None:
    """Say in the log that a candidate does not run, and why; a shape that it refuses by itself is no news."""
    if reason and not reason.startswith(REFUSES):
        what = "skipped" if says_shortage(reason) else "set aside"
        _log.warning("kernel %s was %s on %s: %s", candidate.name, what, problem.device, reason)


def _verdict(candidate: Candidate, **what: Any) -> Verdict:
    return Verdict(name=candidate.name, precision=candidate.precision, origin=candidate.origin, **what)


def _nobody(what: str, verdicts: Sequence[Verdict]) -> Exception:
    """The error where no candidate is left: lack of memory where that kept one out, for it may pass."""
    text = f"{what}: " + "; ".join(f"{verdict.name} {verdict.reason}" for verdict in verdicts)
    is_short = any(says_shortage(verdict.reason) for verdict in verdicts)
    return torch.OutOfMemoryError(text) if is_short else UnsupportedError(text)


def _choice(problem: Problem, verdicts: Sequence[Verdict], how: str) -> Choice:
    able = [verdict for verdict in verdicts if not verdict.reason]
    if not able:
        raise _nobody(f"no kernel for {problem.key} ran on {problem.device}", verdicts)
    best = min(able, key=lambda verdict: math.inf if verdict.us is None else verdict.us)
    return Choice(
        problem=problem.key,
        device=problem.device,
        kernel=best.name,
        us=best.us,
        how=how,
        verdicts=tuple(verdicts),
    )


# ---- timing ----


@dataclass(slots=True)
class _Runner:
    """A candidate's chain over rotating operands; `lap` runs it on each."""

    candidate: Candidate
    proof: Proof
    operands: Sequence[tuple[Any, ...]]
    calls: list[Callable[[], Tensor]]
    times_us: list[float]

    def lap(self) -> None:
        for call in self.calls:
            call()

    def wrote_into(self, inputs: Sequence[tuple[Any, ...]]) -> str:
        """What a user's kernel wrote into, "" where its copies still are what the inputs are."""
        op = self.candidate.op
        pairs = zip(self.operands, inputs, strict=True) if self.candidate.origin == "user" else ()
        return next(filter(None, (wrote_into(op, own, given) for own, given in pairs)), "")


def race(problem: Problem, passed: Sequence[tuple[Candidate, Proof]]) -> list[Verdict]:
    """Every candidate's time at the problem's own shape; one that fails or is wrong there gets the reason instead.

    Signal to noise is the proof's, or that of some rows at this shape where the proof says nothing.
    """
    inputs = _inputs(problem)
    runners: list[_Runner] = []
    verdicts: list[Verdict] = []
    for candidate, proof in passed:
        runner, wrong = _starter(candidate, proof, problem, inputs)
        if runner is None:
            _warn(candidate, problem, wrong)
            verdicts.append(_verdict(candidate, reason=wrong, sqnr_db=proof.sqnr_db))
        else:
            runners.append(runner)
    failed = _take_turns(runners, torch.device(problem.device))
    for runner in runners:
        reason = failed.get(runner.candidate.name, "") or runner.wrote_into(inputs)
        _warn(runner.candidate, problem, reason)
        us = None if reason else statistics.median(runner.times_us)
        verdicts.append(_verdict(runner.candidate, us=us, sqnr_db=runner.proof.sqnr_db, reason=reason))
    return verdicts


def _starter(
    candidate: Candidate, proof: Proof, problem: Problem, inputs: Sequence[tuple[Any, ...]]
) -> tuple[_Runner | None, str]:
    """A runner that was right once at this shape, or None and the reason. What a failed one held is free again."""
    try:
        # A user's kernel may write where it should only read, at any call: what others are compared by is not its own.
        own = [copies_of(given) for given in inputs] if candidate.origin == "user" else inputs
        runner = _Runner(candidate, proof, own, calls_of(candidate, problem, own), [])
        got = runner.calls[0]()
        wrong = runner.wrote_into(inputs)
        if wrong:
            return None, wrong
        wrong, db = check_rows(candidate, problem, inputs[0], got)
    except FAILURES as error:
        return None, why_failed(error)
    if wrong:
        return None, wrong
    if proof.sqnr_db is None:
        runner.proof = Proof(sqnr_db=min(db, 999.0))
    return runner, ""


def _inputs(problem: Problem) -> list[tuple[Any, ...]]:
    """Sets of operands, enough of them that none is still in the L2 cache when its turn comes."""
    if torch.device(problem.device).type == "cpu":
        copies = 1
    else:
        size = 2 * (problem.m * problem.k + problem.k * problem.n + problem.m * problem.n)
        copies = max(1, min(_MAX_COPIES, -(-_L2_BYTES // size)))
    return [inputs_of(problem, seed) for seed in range(copies)]


def _take_turns(runners: Sequence[_Runner], device: torch.device) -> dict[str, str]:
    """Time all in turns. Returns why some did not finish, by name: they raised, or lacked memory beside the others."""
    budget = _BUDGET_S[device.type] / _ROUNDS
    failed: dict[str, str] = {}
    laps: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:
        # Their results may lie in the same memory: one candidate runs at a time.
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        for number in range(1 + _ROUNDS):
            for runner in runners:
                name = runner.candidate.name
                if name in failed:
                    continue
                try:
                    if number == 0:
                        runner.lap()
                        laps[name] = (
                            stack.enter_context(recorded(runner.lap, device, pool)) if pool is not None else runner.lap
                        )
                    else:
                        runner.times_us += [us / len(runner.calls) for us in times_us(laps[name], device, budget)]
                except FAILURES as error:
                    failed[name] = why_failed(error, "while it was timed")
                    runner.operands, runner.calls = (), []
    return failed
