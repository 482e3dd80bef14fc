"""What a search did not choose, in words: runners-up with what they lose, and families with what binds them. Pure."""

from collections.abc import Iterator

from deepwell.planner.estimate_values import PARTS
from deepwell.planner.plan_values import COMMUNICATION, Alternative, Rejected
from deepwell.planner.search.explore import WORDS, FamilyBound, Found, Scored
from deepwell.planner.search.nofit import over_text
from deepwell.planner.search.space import Space

_COMPUTATION = "computation of the busiest rank"
_MOST_SHOWN = 24  # families of one kind; the rest is counted


def rejected_families(space: Space, found: Found, best: Scored) -> tuple[Rejected, ...]:
    """The families that a rule forbids, that do not fit, and that are slower at best."""
    return (*_refused(found.refused), *_missed(space, found.misses), *_slower(space, found.slower, best))


def alternative(scored: Scored, best: Scored) -> Alternative:
    """A runner-up with what it loses against the best."""
    found, losses = scored.estimate, _losses(scored, best)
    seconds = found.seconds
    slower = f"{found.step_s / best.estimate.step_s - 1:.1%} slower"
    return Alternative(
        layout=scored.layout,
        gpus=scored.layout.gpus,
        step_s=found.step_s,
        tokens_per_s_per_gpu=found.tokens_per_s_per_gpu,
        mfu_bf16=found.mfu_bf16,
        peak_gib=found.peak_gib,
        bubble=seconds.get("bubble", 0.0) / found.step_s,
        exposed=sum(seconds.get(axis, 0.0) for axis in COMMUNICATION) / found.step_s,
        why_not=f"{slower}: {losses}" if losses else slower,
    )


def _losses(scored: Scored, best: Scored, without: tuple[str, ...] = ()) -> str:
    """The two parts of the step that lose most against the best, as shares of the best's step."""
    mine, theirs = scored.estimate, best.estimate
    parts = {_loss_word(name): 0.0 for name in PARTS}
    for name, value in mine.breakdown:
        if name not in without:
            parts[_loss_word(name)] += (value - theirs.seconds.get(name, 0.0)) / theirs.step_s
    worst = sorted(parts, key=lambda word: -parts[word])[:2]
    return ", ".join(f"{word} +{parts[word]:.1%}" for word in worst if parts[word] > 0.0005)


def _loss_word(name: str) -> str:
    is_waiting = name in (*COMMUNICATION, "bubble", "recompute", "host", "optimizer", "straggler")
    return WORDS[name] if is_waiting else _COMPUTATION


def _refused(refused: list[str]) -> list[Rejected]:
    """Refusals with the same reason in one line: "PP 128, 256: 126 layers"."""
    merged: dict[tuple[str, str], list[str]] = {}
    for one in refused:
        degree, _, reason = one.partition(": ")
        axis, _, value = degree.partition(" ")
        merged.setdefault((axis, reason), []).append(value)
    out = []
    for (axis, reason), values in merged.items():
        shown = sorted(dict.fromkeys(values), key=lambda v: (not v.isdigit(), int(v) if v.isdigit() else 0, v))
        text = ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")
        out.append(Rejected(f"{axis} {text}", "rule", reason))
    return out


def _missed(space: Space, misses: list[Scored]) -> Iterator[Rejected]:
    for one in misses[:_MOST_SHOWN]:
        yield Rejected(one.family.describe(), "memory", over_text(space, one))
    if len(misses) > _MOST_SHOWN:
        reason = f"at least {misses[_MOST_SHOWN].over_gib:.1f} GiB over in their leanest form"
        yield Rejected(f"{len(misses) - _MOST_SHOWN} more families", "memory", reason)


def _slower(space: Space, slower: list[FamilyBound], best: Scored) -> Iterator[Rejected]:
    has_pairs = "dualpipev" in space.schedules
    for place, bound in enumerate(slower[: _MOST_SHOWN + 1]):
        family, reason = (
            bound.scored.family.describe(),
            f"at best {bound.seconds / best.estimate.step_s - 1:.0%} slower",
        )
        # What the bound leaves out cannot be why it is slower: waiting, and exchanges that DualPipeV's pairs may hide.
        hidden = ("ep",) if has_pairs and bound.scored.family.pp > 1 else ()
        losses = _losses(bound.scored, best, without=("bubble", "pp", "straggler", *hidden))
        if place == _MOST_SHOWN:
            family, losses = f"{len(slower) - _MOST_SHOWN} more families", ""
        yield Rejected(family, "slower", f"{reason}: {losses}" if losses else reason)
