"""A validation as text: one line per source and one for all, then why rows were not used."""

from collections.abc import Mapping
from typing import Any

Scores = Mapping[str, Any]  # what `validate.score` returns

_COLUMNS = (
    ("source", 44), ("rows", 5), ("used", 5), ("n", 5), ("median", 7), ("mean", 7), ("bias", 7), ("<10%", 6),
    ("mem n", 6), ("err", 6), ("OOM n", 6), ("acc", 6), ("prec", 6), ("rec", 6),
    ("groups", 7), ("rho", 6), ("<5%", 6), ("regret", 7), ("random", 7), ("rule", 7),
)  # fmt: skip


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def _cells(name: str, scores: Scores, *, cut: bool = True) -> list[str]:
    step, memory, oom = scores["step_time"], scores["memory"], scores["oom"]
    regret, rank, rows = scores["regret"], scores["rank"], scores["rows"]
    tier = "" if scores["tiers"] == "A" else f" ({'+'.join(scores['tiers'])})"
    width = _COLUMNS[0][1] - len(tier)
    label = (name if len(name) <= width or not cut else name[: width - 2] + "..") + tier
    rho = "-" if rank["spearman"] is None else f"{rank['spearman']:.2f}"
    return [
        label, str(rows["total"]), str(rows["predicted"]), str(step["n"]), _percent(step["median_abs_rel_err"]),
        _percent(step["mean_abs_rel_err"]), _percent(step["bias"]), _percent(step["within_10pct"], 0),
        str(memory["n"]), _percent(memory["mean_abs_rel_err"]), str(oom["n"]), _percent(oom["accuracy"]),
        _percent(oom["precision"], 0), _percent(oom["recall"], 0), str(regret["groups"]), rho,
        _percent(regret["within_5pct"], 0), _percent(regret["mean"]), _percent(regret["random_mean"]),
        _percent(regret["rule_mean"]),
    ]  # fmt: skip


def _line(cells: list[str]) -> str:
    first, *rest = zip(cells, (width for _, width in _COLUMNS), strict=True)
    return first[0].ljust(first[1]) + "".join(cell.rjust(width + 1) for cell, width in rest)


def scores_markdown(sources: Mapping[str, Scores], overall: Scores) -> str:
    """The same table as docs/planner.md holds it."""
    names = [name for name, _ in _COLUMNS]
    rows = [_cells(name, scores, cut=False) for name, scores in sources.items()]
    rows.append(_cells("**overall (tier A)**", overall, cut=False))
    lines = [names, ["---", *("---:" for _ in names[1:])], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def scores_table(sources: Mapping[str, Scores], overall: Scores, tier_a: Scores, tiers_ab: Scores) -> str:
    """What `print(validation)` shows."""
    lines = [_line([name for name, _ in _COLUMNS])]
    lines += [_line(_cells(name, scores)) for name, scores in sources.items()]
    lines.append(_line(_cells("overall (tier A)", overall)))
    rows, smi, regret = overall["rows"], overall["memory_nvidia_smi"], overall["regret"]
    lines += [
        "",
        f"{rows['tier_a_nvidia_predicted']:,} of {rows['tier_a_nvidia']:,} tier-A rows of NVIDIA GPUs are predicted "
        f"({_percent(rows['tier_a_nvidia_predicted'] / max(1, rows['tier_a_nvidia']))})",
        f"nvidia-smi memory: {smi['n']} rows, mean error {_percent(smi['mean_abs_rel_err'])}",
        f"picks that ran out of memory: {regret['misses']} of {regret['groups']} (the rule's: {regret['rule_misses']})",
        f"picks within 5% of the best: {_percent(regret['within_5pct'], 0)}, at random "
        f"{_percent(regret['random_within_5pct'], 0)}, by the rule {_percent(regret['rule_within_5pct'], 0)}",
    ]
    lines += ["", *_by_tiers(tier_a, tiers_ab)]
    if overall["not_used"]:
        lines.append("rows not used:")
        lines += [f"  {count:4d}  {reason}" for reason, count in overall["not_used"].items()]
    return "\n".join(lines)


def _by_tiers(*both: Scores) -> list[str]:
    """What is asked of the planner on tier A alone and on A and B, side by side."""

    def with_n(part: str, name: str) -> list[str]:
        return [f"{_percent(s[part][name])} of {s[part].get('n', s[part].get('groups', 0)):,}" for s in both]

    means = [[_percent(scores["regret"][name]) for name in ("mean", "rule_mean", "random_mean")] for scores in both]
    medians = [_percent(scores["step_time"]["median_abs_rel_err"]) for scores in both]
    steps = zip(medians, with_n("step_time", "mean_abs_rel_err"), strict=True)
    rows = (
        ("", [f"tier{'s' if len(scores['tiers']) > 1 else ''} {'+'.join(scores['tiers'])}" for scores in both]),
        ("step time, median / mean error", [f"{median} / {mean}" for median, mean in steps]),
        ("memory, mean error", with_n("memory", "mean_abs_rel_err")),
        ("out of memory, accuracy", with_n("oom", "accuracy")),
        ("picks within 5% of the best", with_n("regret", "within_5pct")),
        ("mean regret: ours / rule / random", [" / ".join(regrets) for regrets in means]),
    )
    return [name.ljust(36) + "".join(cell.rjust(26) for cell in cells) for name, cells in rows]
