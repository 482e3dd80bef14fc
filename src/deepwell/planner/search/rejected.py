"""What a search did not choose, in words: runners-up with what they lose, and families with what binds them. Pure."""

from __future__ import annotations

from deepwell.planner.estimate_values import PARTS
from deepwell.planner.plan_values import COMMUNICATION, Alternative, Rejected
from deepwell.planner.search.explore import WORDS, FamilyBound, Found, Scored
from deepwell.planner.search.nofit import over_text
from deepwell.planner.search.space import Refusal, Space

_COMPUTATION = "computation of the busiest rank"
_MOST_SHOWN = 24  # families of one kind; the rest is counted


def rejected_families(space: Space, found: Found, best: Scored) -> tuple[Rejected, ...]:
    """The families that a rule forbids, that do not fit, and that are slower at best."""
    return (*_refused(found.refused), *_missed(space, found.misses), *_slower(space, found.slower, best))


def alternative(scored: Scored, best: Scored) -> Alternative:
    """A runner-up with what it loses against the best."""
    found = scored.estimate
    seconds = found.seconds
    return Alternative(
        layout=scored.layout,
        gpus=scored.layout.gpus,
        step_s=found.step_s,
        tokens_per_s_per_gpu=found.tokens_per_s_per_gpu,
        mfu_bf16=found.mfu_bf16,
        peak_gib=found.peak_gib,
        bubble=seconds.get("bubble", 0.0) / found.step_s,
        exposed=sum(seconds.get(axis, 0.0) for axis in COMMUNICATION) / found.step_s,
        why_not=_why_slower(scored, best),
    )


def _why_slower(scored: Scored, best: Scored) -> str:
    losses = _losses(scored, best)
    gap = scored.estimate.step_s / best.estimate.step_s - 1
    return f"{gap:.1%} slower" + (f": {losses}" if losses else "")


def _losses(scored: Scored, best: Scored, without: tuple[str, ...] = ()) -> str:
    """The two parts of the step that lose most against the best, as shares of the best's step."""
    mine, theirs = scored.estimate, best.estimate
    parts = {_loss_word(name): 0.0 for name in PARTS}
    for name, value in mine.breakdown:
        if name in without:
            continue
        word = _loss_word(name)
        parts[word] += (value - theirs.seconds.get(name, 0.0)) / theirs.step_s
    worst = sorted(parts, key=lambda word: -parts[word])[:2]
    return ", ".join(f"{word} +{parts[word]:.1%}" for word in worst if parts[word] > 0.0005)


def _loss_word(name: str) -> str:
    is_waiting = name in (*COMMUNICATION, "bubble", "recompute", "host", "optimizer", "straggler")
    return WORDS[name] if is_waiting else _COMPUTATION


def _refused(refused: list[Refusal]) -> list[Rejected]:
    """Refusals with the same reason in one line: "PP 128, 256: 126 layers"."""
    merged: dict[tuple[str, str], list[str]] = {}
    for one in refused:
        degree, _, reason = one.reason.partition(": ")
        axis, _, value = degree.partition(" ")
        merged.setdefault((axis, reason), []).append(value)
    out = []
    for (axis, reason), values in merged.items():
        shown = sorted(dict.fromkeys(values), key=lambda v: (not v.isdigit(), int(v) if v.isdigit() else 0, v))
        text = ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")
        out.append(Rejected(family=f"{axis} {text}", kind="rule", reason=reason))
    return out


def _missed(space: Space, misses: list[Scored]) -> list[Rejected]:
    shown = [
        Rejected(family=s.family.describe(), kind="memory", reason=over_text(space, s)) for s in misses[:_MOST_SHOWN]
    ]
    if len(misses) > _MOST_SHOWN:
        reason = f"at least {misses[_MOST_SHOWN].over_gib:.1f} GiB over in their leanest form"
        shown.append(Rejected(family=f"{len(misses) - _MOST_SHOWN} more families", kind="memory", reason=reason))
    return shown


def _slower(space: Space, slower: list[FamilyBound], best: Scored) -> list[Rejected]:
    def gap(bound: FamilyBound) -> float:
        return bound.seconds / best.estimate.step_s - 1

    has_pairs = "dualpipev" in space.schedules

    def why(bound: FamilyBound) -> str:
        # What the bound leaves out cannot be why it is slower: waiting, and exchanges that DualPipeV's pairs may hide.
        hidden = ("ep",) if has_pairs and bound.family.pp > 1 else ()
        losses = _losses(bound.scored, best, without=("bubble", "pp", "straggler", *hidden))
        return f": {losses}" if losses else ""

    shown = [
        Rejected(family=b.family.describe(), kind="slower", reason=f"at best {gap(b):.0%} slower{why(b)}")
        for b in slower[:_MOST_SHOWN]
    ]
    if len(slower) > _MOST_SHOWN:
        reason = f"at best {gap(slower[_MOST_SHOWN]):.0%} slower"
        shown.append(Rejected(family=f"{len(slower) - _MOST_SHOWN} more families", kind="slower", reason=reason))
    return shown
