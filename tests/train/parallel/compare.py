"""A parallel run against one process: the largest differences, and a table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import cases
from cases import Case, Outcome
from processes import Run, run_groups

from deepwell.planner.layout import Layout

# Of a gradient whose true value is nothing (the bias of keys: softmax does not see it), only rounding is left.
_LEAST = 1e-6
_SECONDS = 120  # that a case may take: ten times what it does where nothing else runs


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Between a run and the same in one process."""

    loss: float
    grad: float  # of the first step, the parameter that differs most, by the norm of its gradient
    parameter: str
    norm: float
    evaluated: float
    weights: float


def difference(found: Outcome, alone: Outcome) -> Difference:
    assert found.grads.keys() == alone.grads.keys()
    least = _LEAST * max(float(g.norm()) for g in alone.grads.values())
    grads = {n: float((found.grads[n] - g).norm() / max(float(g.norm()), least)) for n, g in alone.grads.items()}
    worst = max(grads, key=lambda name: grads[name])
    weights = [float((found.weights[n] - w).norm() / w.norm()) for n, w in alone.weights.items() if w.norm()]
    return Difference(
        loss=max(abs(a - b) / b for a, b in zip(found.losses, alone.losses, strict=True)),
        grad=grads[worst],
        parameter=worst,
        norm=max(abs(a - b) / b for a, b in zip(found.norms, alone.norms, strict=True)),
        evaluated=abs(found.evaluated - alone.evaluated) / alone.evaluated,
        weights=max(weights),
    )


def outcomes(wanted: Sequence[Case], run: Run = cases.run) -> dict[str, tuple[Outcome, Outcome]]:
    """By name, (on the layout, in one process) of each case; a group of processes for each number of ranks."""
    singles = {_key(case.alone): case.alone for case in wanted}
    groups: dict[int, list[Case]] = {1: list(singles.values())}
    for case in sorted(wanted, key=lambda case: Layout(**case.layout).gpus):
        groups.setdefault(Layout(**case.layout).gpus, []).append(case)
    of_world = [(cases, world) for world, cases in groups.items()]
    first, *others = run_groups(run, of_world, _SECONDS * len(singles) + 900 * (len(groups) - 1))
    alone = dict(zip(singles, first, strict=True))
    found = {
        case.name: result
        for (cases, _), results in zip(of_world[1:], others, strict=True)
        for case, result in zip(cases, results, strict=True)
    }
    return {case.name: (found[case.name], alone[_key(case.alone)]) for case in wanted}


def table(wanted: Sequence[Case], found: Mapping[str, tuple[Outcome, Outcome]]) -> str:
    """Markdown: what was run, and how far it is from one process."""
    lines = [
        "| layout | model | formats | micro-batches | steps, optimizer | losses | gradients of step 1 | norm |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in wanted:
        far = difference(*found[case.name])
        what = f"{case.steps}, {case.optimizer}{', recomputed' if case.recompute else ''}"
        lines.append(
            f"| {case.name} | {case.model} | {case.precision} | {case.accumulation} | {what} | {far.loss:.0e} | "
            f"{far.grad:.0e} | {far.norm:.0e} |"
        )
    return "\n".join(lines)


def _key(case: Case) -> str:
    return f"{case.model} {case.precision} {case.optimizer} {case.steps} {case.labels} {case.clip} {case.first}"
