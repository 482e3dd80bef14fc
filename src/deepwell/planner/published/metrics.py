"""How good predictions are: relative errors, memory verdicts, rank correlation and the regret of a pick. Pure.

All are fractions. A relative error is predicted / measured - 1; regret is the picked layout's measured time over the
best measured one's, minus 1, so that 0 is a perfect pick.
"""

import itertools
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

Summary = dict[str, float | None]  # counts and fractions; None where there is nothing to take them of


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def summarize_errors(errors: Sequence[float]) -> Summary:
    """Summary of relative errors; bias is their mean, so a model that is too slow on average has a positive one."""
    sizes = [abs(error) for error in errors]
    return {
        "n": len(sizes),
        "median_abs_rel_err": statistics.median(sizes) if sizes else None,
        "mean_abs_rel_err": _mean(sizes),
        "bias": _mean(errors),
        "within_10pct": _mean([float(size <= 0.10) for size in sizes]),
    }


def summarize_verdicts(verdicts: Sequence[tuple[bool, bool]]) -> Summary:
    """Summary of (predicted out of memory, ran out of memory) pairs; running out is the positive class."""
    both = sum(predicted and measured for predicted, measured in verdicts)
    false_alarm = sum(predicted and not measured for predicted, measured in verdicts)
    missed = sum(measured and not predicted for predicted, measured in verdicts)
    neither = len(verdicts) - both - false_alarm - missed
    return {
        "n": len(verdicts),
        "accuracy": (both + neither) / len(verdicts) if verdicts else None,
        "precision": both / (both + false_alarm) if both + false_alarm else None,
        "recall": both / (both + missed) if both + missed else None,
        "true_oom": both,
        "false_oom": false_alarm,
        "true_fit": neither,
        "missed_oom": missed,
    }


# ---- ranks ----


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    order = sorted(values)
    return [(bisect_left(order, value) + bisect_right(order, value) + 1) / 2 for value in values]


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None where one side is constant or there are fewer than two."""
    try:
        return statistics.correlation(ranks(a), ranks(b))
    except statistics.StatisticsError:
        return None


def kendall(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Kendall's tau-b; None where one side is constant or there are fewer than two."""
    steps = [(p - q, r - s) for (p, r), (q, s) in itertools.combinations(zip(a, b, strict=True), 2)]
    ties_a, ties_b = (sum(step[side] == 0 for step in steps) for side in (0, 1))
    spread = (len(steps) - ties_a) * (len(steps) - ties_b)
    agree = sum((x * y > 0) - (x * y < 0) for x, y in steps)
    return float(agree / spread**0.5) if spread > 0 else None


# ---- picks ----

# Predicted memory is a few percent off, and running out costs more than the last percents of speed bring: a pick
# leaves that much room where it can.
ROOM = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTimes:
    """One layout of a group: what was predicted, and the measured step or None where it ran out of memory.

    `rule_key` orders choices for the rule of thumb, best first.
    """

    predicted_s: float
    predicted_bytes: float
    fits: bool
    measured_s: float | None
    limit_bytes: float = float("inf")
    rule_key: tuple[float, ...] = ()


def _candidates(choices: Sequence[LayoutTimes]) -> list[LayoutTimes]:
    """Choices predicted to fit with room to spare, else those that fit at all, else the one nearest to fitting."""
    fitting = [choice for choice in choices if choice.fits]
    roomy = [choice for choice in fitting if choice.predicted_bytes <= ROOM * choice.limit_bytes]
    return roomy or fitting or [min(choices, key=lambda choice: choice.predicted_bytes)]


def pick_fastest(choices: Sequence[LayoutTimes]) -> LayoutTimes:
    """The choice that is predicted fastest among those predicted to fit; where none is, the one nearest to fitting."""
    return min(_candidates(choices), key=lambda choice: choice.predicted_s)


def pick_by_rule(choices: Sequence[LayoutTimes]) -> LayoutTimes:
    """The rule of thumb's choice, given the same verdicts on memory as ours."""
    return min(_candidates(choices), key=lambda choice: choice.rule_key)


def regret_of(choice: LayoutTimes, choices: Sequence[LayoutTimes]) -> float:
    """Measured time over the best measured, minus 1. A choice that ran out of memory costs what the slowest does."""
    times = [other.measured_s for other in choices if other.measured_s is not None]
    taken = max(times) if choice.measured_s is None else choice.measured_s
    return taken / min(times) - 1


def _is_hit(choice: LayoutTimes, choices: Sequence[LayoutTimes]) -> bool:
    return choice.measured_s is not None and regret_of(choice, choices) <= 0.05


def summarize_regret(groups: Sequence[Sequence[LayoutTimes]]) -> Summary:
    """Regret over groups: our pick's, the expected one of a random pick, and the rule of thumb's."""
    ours = [(pick_fastest(group), group) for group in groups]
    rule = [(pick_by_rule(group), group) for group in groups]
    random_means = [_mean([regret_of(choice, group) for choice in group]) or 0.0 for group in groups]
    random_hits = [_mean([float(_is_hit(choice, group)) for choice in group]) or 0.0 for group in groups]
    return {
        "groups": len(groups),
        "within_5pct": _mean([float(_is_hit(choice, group)) for choice, group in ours]),
        "mean": _mean([regret_of(choice, group) for choice, group in ours]),
        "misses": sum(choice.measured_s is None for choice, _ in ours),
        "random_within_5pct": _mean(random_hits),
        "random_mean": _mean(random_means),
        "rule_within_5pct": _mean([float(_is_hit(choice, group)) for choice, group in rule]),
        "rule_mean": _mean([regret_of(choice, group) for choice, group in rule]),
        "rule_misses": sum(choice.measured_s is None for choice, _ in rule),
    }


def summarize_ranks(groups: Sequence[Sequence[LayoutTimes]]) -> Summary:
    """Mean rank correlation of predicted and measured time, over groups with at least three measured layouts."""
    rho: list[float] = []
    tau: list[float] = []
    for group in groups:
        ran = [(choice.predicted_s, choice.measured_s) for choice in group if choice.measured_s is not None]
        if len(ran) >= 3:
            predicted, measured = zip(*ran, strict=True)
            r, t = spearman(predicted, measured), kendall(predicted, measured)
            if r is not None and t is not None:
                rho.append(r)
                tau.append(t)
    return {"groups": len(rho), "spearman": _mean(rho), "kendall": _mean(tau)}
