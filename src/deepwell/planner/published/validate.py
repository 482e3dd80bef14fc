"""Predictions against published runs: `deepwell validate planner`. Pure.

Step time and verdicts on memory are scored on tier A; memory on tiers A and B with allocated units (nvidia-smi figures
apart); picks on groups of tiers A and B: rows that share source, model, GPU, count, sequence, batch, precision, version
and kernels, with at least four distinct layouts. Beside `overall`, `tier_a` has every figure on tier A alone,
`tiers_ab` on A and B, and `all_tiers` on every row; `overall.regret_tier_a` is the regret of tier A's groups.

The rule of thumb that our pick is held against: of the layouts that fit (by our own memory model) with TP inside an
NVLink domain, no recomputation before recomputation, then the smallest TP x PP x CP, then the largest micro-batch,
then the smallest TP.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deepwell.errors import ConfigError, PlanError, UnsupportedError
from deepwell.hardware.model import Hardware
from deepwell.planner.estimate import GIB, Estimate, estimate
from deepwell.planner.layout import Layout
from deepwell.planner.published import RunRow, recompute_candidates
from deepwell.planner.published.metrics import (
    LayoutTimes,
    summarize_errors,
    summarize_ranks,
    summarize_regret,
    summarize_verdicts,
)
from deepwell.planner.published.table import scores_markdown, scores_table
from deepwell.planner.stack import Stack
from deepwell.planner.workload import Workload

SCHEMA = 1
MIN_LAYOUTS = 4
_COLUMNS = ("row_id", "source", "version", "model", "gpu", "num_gpus", "tier")  # of a row, those that a report repeats
Predict = Callable[[Workload, Hardware, Layout, Stack], Estimate]


@dataclass(frozen=True, slots=True)
class Checked:
    """A published run with its prediction, or with the reason why there is none."""

    run: RunRow
    estimate: Estimate | None
    reason: str | None = None

    @property
    def step_error(self) -> float | None:
        measured = self.run.measured.step_s
        return None if self.estimate is None or measured is None else self.estimate.step_s / measured - 1

    @property
    def predicted_bytes(self) -> float | None:
        """The counterpart of the measured memory: allocated on the fullest or the first rank, or on the device."""
        if self.estimate is None:
            return None
        kind, stages = self.run.measured.memory_kind, self.estimate.memory
        if kind == "nvidia-smi":
            return max(stages[0].device, stages[-1].device)
        return stages[0].allocated if kind == "rank0" else max(stage.allocated for stage in stages)

    @property
    def memory_error(self) -> float | None:
        measured, predicted = self.run.measured.memory_bytes, self.predicted_bytes
        if measured is None or predicted is None or self.run.measured.outcome == "oom":
            return None
        return predicted / measured - 1

    @property
    def verdict(self) -> tuple[bool, bool] | None:
        """(predicted out of memory, ran out of memory)."""
        outcome = self.run.measured.outcome
        if self.estimate is None or outcome not in ("ok", "oom"):
            return None
        return not self.estimate.fits, outcome == "oom"

    def to_dict(self) -> dict[str, Any]:
        run, found = self.run, self.estimate
        measured = run.measured
        return {
            **{name: getattr(run, name) for name in _COLUMNS},
            "layout": None if run.layout is None else str(run.layout),
            "stack": None if run.stack is None else str(run.stack),
            "predicted": None if found is None else {
                "step_s": found.step_s, "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
                "memory_gib": _gib(self.predicted_bytes), "device_gib": found.peak_gib,
                "limit_gib": found.limit_gib, "fits": found.fits,
            },
            "measured": {
                "outcome": measured.outcome, "step_s": measured.step_s,
                "memory_gib": _gib(measured.memory_bytes), "memory_kind": measured.memory_kind,
            },
            "step_error": self.step_error,
            "memory_error": self.memory_error,
            "reason": self.reason,
            "assumptions": list(run.assumptions),
        }  # fmt: skip


def _gib(size: float | None) -> float | None:
    return None if size is None else size / GIB


def check_run(run: RunRow, predict: Predict = estimate) -> Checked:
    """One run with its prediction; what the planner refuses becomes the reason.

    Where the source does not publish what was recomputed, the least recomputation that is predicted to fit is taken.
    """
    if run.layout is None:
        return Checked(run, None, run.reason)
    first: Checked | None = None
    for candidate in recompute_candidates(run):
        assert candidate.workload and candidate.hardware and candidate.layout and candidate.stack
        try:
            found = predict(candidate.workload, candidate.hardware, candidate.layout, candidate.stack)
        except (ConfigError, UnsupportedError, PlanError) as error:
            return Checked(run, None, str(error))
        except (ArithmeticError, LookupError) as error:
            # A mistake of ours on one row: it is counted as not predicted, and the other thousands still are.
            return Checked(run, None, f"the planner failed: {type(error).__name__}: {error}")
        checked = Checked(candidate, found)
        if found.fits:
            return checked
        first = first or checked
    assert first is not None
    return first


# ---- groups ----


def rule_key(layout: Layout, nvlink_domain: int) -> tuple[float, ...]:
    """The order in which the rule of thumb prefers layouts (see the module's docstring)."""
    return (
        float(layout.tp > nvlink_domain),
        float(layout.recompute.kind != "none"),
        float(layout.tp * layout.pp * layout.cp),
        -float(layout.micro_batch),
        float(layout.tp),
    )


def layout_groups(checked: Iterable[Checked]) -> dict[tuple[str, ...], tuple[LayoutTimes, ...]]:
    """Groups of at least four distinct layouts of which at least one ran; repeated trials of a layout are averaged."""
    members: dict[tuple[str, ...], dict[Layout, list[Checked]]] = {}
    for one in checked:
        if one.verdict is not None and one.run.layout is not None:
            members.setdefault(one.run.group, {}).setdefault(one.run.layout, []).append(one)
    groups = {}
    for key, layouts in members.items():
        choices = tuple(_choice(layout, trials) for layout, trials in layouts.items())
        if len(choices) >= MIN_LAYOUTS and any(choice.measured_s is not None for choice in choices):
            groups[key] = choices
    return groups


def _choice(layout: Layout, trials: Sequence[Checked]) -> LayoutTimes:
    first = trials[0]
    assert first.estimate is not None and first.run.hardware is not None
    times = [one.run.measured.ranking_s for one in trials if one.run.measured.ranking_s is not None]
    return LayoutTimes(
        predicted_s=first.estimate.step_s,
        predicted_bytes=first.estimate.peak_gib * GIB,
        fits=first.estimate.fits,
        measured_s=sum(times) / len(times) if times else None,
        limit_bytes=first.estimate.limit_gib * GIB,
        rule_key=rule_key(layout, first.run.hardware.nvlink_domain),
    )


# ---- scores ----


def score(checked: Sequence[Checked], tiers: str = "A", wider: str = "AB") -> dict[str, Any]:
    """Every metric over the given rows: those of `tiers`, for memory and for groups of layouts those of `wider`."""
    rows = [one for one in checked if one.run.tier in tiers]
    wide = [one for one in checked if one.run.tier in wider]
    memory: dict[bool, list[float]] = {True: [], False: []}  # by whether nvidia-smi counted
    for one in wide:
        if one.memory_error is not None:
            memory[one.run.measured.memory_kind == "nvidia-smi"].append(one.memory_error)
    groups = list(layout_groups(wide).values())
    tier_a = [one for one in checked if one.run.tier == "A"]
    nvidia = [one for one in tier_a if one.run.is_nvidia]
    return {
        "tiers": tiers,
        "rows": {
            "total": len(checked),
            "predicted": sum(one.estimate is not None for one in checked),
            "tier_a_nvidia": len(nvidia),
            "tier_a_nvidia_predicted": sum(one.estimate is not None for one in nvidia),
        },
        "step_time": summarize_errors([one.step_error for one in rows if one.step_error is not None]),
        "memory": summarize_errors(memory[False]),
        "memory_nvidia_smi": summarize_errors(memory[True]),
        "oom": summarize_verdicts([one.verdict for one in rows if one.verdict is not None]),
        "rank": summarize_ranks(groups),
        "regret": summarize_regret(groups),
        "regret_tier_a": summarize_regret(list(layout_groups(tier_a).values())),
        "not_used": dict(sorted(Counter(one.reason for one in checked if one.reason is not None).items())),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The outcome of checking the planner against published runs. Prints as a table; `to_dict` is its JSON."""

    checked: tuple[Checked, ...]

    @property
    def overall(self) -> dict[str, Any]:
        return score(self.checked)

    @property
    def tier_a(self) -> dict[str, Any]:
        return score(self.checked, tiers="A", wider="A")

    @property
    def tiers_ab(self) -> dict[str, Any]:
        return score(self.checked, tiers="AB", wider="AB")

    @property
    def sources(self) -> dict[str, dict[str, Any]]:
        """The same per source: on its tier A, or on what it has where it has none."""
        found: dict[str, dict[str, Any]] = {}
        for name in sorted({one.run.source for one in self.checked}):
            rows = [one for one in self.checked if one.run.source == name]
            has_a = any(one.run.tier == "A" for one in rows)
            found[name] = score(rows, tiers="A" if has_a else "ABC", wider="AB" if has_a else "ABC")
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "overall": self.overall,
            "tier_a": self.tier_a,
            "tiers_ab": self.tiers_ab,
            "all_tiers": score(self.checked, tiers="ABC", wider="ABC"),
            "sources": self.sources,
            "rows": [one.to_dict() for one in self.checked],
        }

    def to_json(self, indent: int | None = 1) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return scores_table(self.sources, self.overall, self.tier_a, self.tiers_ab)

    def to_markdown(self) -> str:
        """The table of the sources as docs/planner.md holds it."""
        return scores_markdown(self.sources, self.overall)


def validate(
    runs: Sequence[RunRow], *, predict: Predict = estimate, tick: Callable[[], None] | None = None
) -> Validation:
    """Predict every run and compare. `tick` is called after each, for a progress bar."""
    if not runs:
        raise ConfigError("runs: there are none; the file has a header and no rows")
    checked = []
    for run in runs:
        checked.append(check_run(run, predict))
        if tick is not None:
            tick()
    return Validation(checked=tuple(checked))
