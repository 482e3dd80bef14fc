"""Event simulation of pipeline schedules: when every action of every rank runs, the bubble, and what is in flight.

    end(a) = max(end of the action before it on its rank, end(what it needs) + p2p where that is elsewhere) + time(a)

A forward needs the forward of the stage before, a backward that of the stage after, the last stage's backward its own
forward. A pair that dualpipev overlaps is one action: it needs both inputs and hands on both results at its end. The
order on each rank is the schedule's (`actions.py`), so this is what runs, not a formula. Where there are
many microbatches the steady state is found and carried on: once every action of a whole window of rounds comes exactly
one constant later than in the round before, all further rounds do (the recurrence above is linear in max and plus).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from deepwell.errors import ConfigError
from deepwell.planner.schedule.actions import SPLIT_BACKWARD, Action, rank_actions, rank_stages, why_not

_KINDS = "FBIW"
_SAME = 1e-9  # two rounds take equally long when they differ by less than this share


class Event(NamedTuple):
    """One action with its times in seconds from the start of the step."""

    rank: int
    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of a pipeline. Seconds; `bubble` is the share of makespan x ranks in which nothing runs."""

    schedule: str
    microbatches: int
    makespan: float
    bubble: float
    busy: tuple[float, ...]  # of each rank
    finish: tuple[float, ...]  # end of each rank's last action
    in_flight: tuple[float, ...]  # peak of each rank in microbatches; one stage of a rank's v counts 1/v
    simulated: int  # microbatches that were simulated; the rest is steady state carried on exactly
    events: tuple[Event, ...] = ()

    def __str__(self) -> str:
        flight = ", ".join(f"{x:g}" for x in self.in_flight)
        return (
            f"{self.schedule}, {len(self.busy)} ranks, {self.microbatches} microbatches: {self.makespan:.4g} s, "
            f"bubble {self.bubble:.1%}, in flight {flight}"
        )


def simulate(
    schedule: str,
    pp: int,
    microbatches: int,
    virtual_stages: int = 1,
    *,
    f: float | Sequence[float] = 1.0,
    b: float | Sequence[float] = 2.0,
    w: float | Sequence[float] | None = None,
    p2p: float = 0.0,
    pair_saving: float | Sequence[float] = 0.0,
    events: bool = False,
) -> Timeline:
    """Run one step of a schedule.

    `f` and `b` are seconds of a stage's forward and whole backward, one number or one per stage in model order; `w` is
    the weights' part of `b` (half of it unless given), which matters where the schedule splits the backward. `p2p` is
    the time of a message between ranks; `pair_saving` is what a forward and a backward of dualpipev save by running
    beside each other, one number or one per rank. `events` keeps every action and its times (then nothing is carried
    on). Raises ConfigError where the schedule cannot run with these counts.
    """
    reason = why_not(schedule, pp, microbatches, virtual_stages)
    if reason:
        raise ConfigError(f"schedule: {reason}")
    durations = _durations(schedule, pp * virtual_stages, f, b, w)
    savings = _per_stage("pair_saving", pair_saving, pp)
    if p2p < 0 or min(savings) < 0:
        raise ConfigError(f"p2p, pair_saving: got {p2p}, {pair_saving}; seconds of at least 0")
    count = microbatches if events else _enough(schedule, pp, microbatches, virtual_stages)
    while True:
        program = _program(schedule, pp, count, virtual_stages)
        run = _run(program, durations, p2p, savings)
        if count == microbatches:
            timeline = _timeline(schedule, pp, program, run, None)
            return replace(timeline, events=_events(program, run)) if events else timeline
        rhythm = _rhythm(schedule, pp, virtual_stages)
        steady = _carry_on(program, run, rhythm, pp, microbatches - count)
        if steady is not None:
            return _timeline(schedule, pp, program, run, steady)
        count = min(microbatches, 2 * count - microbatches % pp)


def peak_live(
    schedule: str, pp: int, microbatches: int, virtual_stages: int = 1
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each rank the heaviest moments: how many microbatches each of its stages holds activations of.

    A stage holds a microbatch from its forward to the end of its backward (of W where that is split). Only moments that
    no other moment exceeds in every stage are kept, so the peak for any bytes per stage is the maximum over these.
    """
    reason = why_not(schedule, pp, microbatches, virtual_stages)
    if reason:
        raise ConfigError(f"schedule: {reason}")
    if schedule == "gpipe":
        return (((microbatches,),),) * pp
    return _peak_live(schedule, pp, _enough(schedule, pp, microbatches, virtual_stages), virtual_stages)


def bubble_floor(schedule: str, pp: int, microbatches: int, virtual_stages: int = 1) -> float:
    """The closed-form bubble of even stages without messages as a share of busy time: a quick bound for searching.

    (pp - 1)/m for gpipe and 1f1b, over v for interleaved (arXiv:2104.04473); split backwards fill at least two thirds
    of what interleaved leaves when F, I and W take equally long (arXiv:2401.10241).
    """
    whole = (pp - 1) / (microbatches * virtual_stages)
    return whole / 3 if schedule in SPLIT_BACKWARD else whole


# ---- the program: actions of all ranks in an order in which every need comes first ----


class _Step(NamedTuple):
    """One action for the simulation. Needs are positions in the program or -1; `cost` indexes the durations."""

    rank: int
    need: int
    is_remote: bool  # the need is on another rank
    need_too: int  # of the backward that this forward runs beside
    is_remote_too: bool
    cost: int


class _Program(NamedTuple):
    """The actions of all ranks in an order in which every need comes first, and each rank's positions in it."""

    actions: tuple[Action, ...]
    steps: tuple[_Step, ...]
    by_rank: tuple[tuple[int, ...], ...]


class _ActionTimes(NamedTuple):
    """Start of each action and the moment at which its result is there."""

    starts: list[float]
    ends: list[float]


def _need(action: Action, last: int) -> tuple[str, int, int] | None:
    kind, stage, microbatch, _ = action
    if kind == "F":
        return ("F", stage - 1, microbatch) if stage else None
    if kind == "W":
        return None  # its own I stands before it on the same rank
    return ("B", stage + 1, microbatch) if stage < last else ("F", stage, microbatch)


@functools.lru_cache(maxsize=256)
def _program(schedule: str, pp: int, microbatches: int, virtual_stages: int) -> _Program:
    """The ranks' lists merged into one."""
    lists = [rank_actions(schedule, pp, microbatches, virtual_stages, rank) for rank in range(pp)]
    num_stages = pp * virtual_stages
    position: dict[tuple[str, int, int] | None, int] = {None: -1}  # of what each action gives; nothing needed is there
    actions: list[Action] = []
    steps: list[_Step] = []
    by_rank: list[list[int]] = [[] for _ in range(pp)]

    def add(rank: int, action: Action, beside: Action | None) -> None:
        need = position[_need(action, num_stages - 1)]
        need_too = position[_need(beside, num_stages - 1)] if beside else -1
        steps.append(
            _Step(
                rank=rank,
                need=need,
                is_remote=need >= 0 and steps[need].rank != rank,
                need_too=need_too,
                is_remote_too=need_too >= 0 and steps[need_too].rank != rank,
                cost=_KINDS.index(action.kind) * num_stages + action.stage,
            )
        )
        if action.kind != "W":
            position["F" if action.kind == "F" else "B", action.stage, action.microbatch] = len(actions)
        by_rank[rank].append(len(actions))
        actions.append(action)

    cursors = [0] * pp
    while len(actions) < sum(map(len, lists)):
        before = len(actions)
        for rank, todo in enumerate(lists):
            while cursors[rank] < len(todo):
                first = cursors[rank]
                together = todo[first : first + (2 if todo[first].paired else 1)]
                if any(_need(action, num_stages - 1) not in position for action in together):
                    break
                for i, action in enumerate(together):
                    add(rank, action, together[1] if action.paired and i == 0 else None)
                cursors[rank] += len(together)
        assert len(actions) > before, f"{schedule} pp {pp} m {microbatches} v {virtual_stages} waits for itself"
    return _Program(tuple(actions), tuple(steps), tuple(map(tuple, by_rank)))


@functools.lru_cache(maxsize=256)
def _peak_live(
    schedule: str, pp: int, microbatches: int, virtual_stages: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    found = []
    for rank in range(pp):
        stages = rank_stages(schedule, pp, virtual_stages, rank)
        live = dict.fromkeys(stages, 0)
        moments: set[tuple[int, ...]] = set()
        for action in rank_actions(schedule, pp, microbatches, virtual_stages, rank):
            if action.kind == "F":
                live[action.stage] += 1
                moments.add(tuple(live.values()))
            elif action.kind in "BW":
                live[action.stage] -= 1
        kept = [m for m in moments if not any(other != m and all(map(operator.ge, other, m)) for other in moments)]
        found.append(tuple(sorted(kept)))
    return tuple(found)


# ---- running it ----


def _per_stage(name: str, value: float | Sequence[float], stages: int) -> list[float]:
    times = [float(value)] * stages if isinstance(value, (int, float)) else [float(x) for x in value]
    if len(times) != stages:
        raise ConfigError(f"{name}: got {len(times)} times; there are {stages} stages")
    if min(times) < 0:
        raise ConfigError(f"{name}: got {min(times)}; seconds of at least 0")
    return times


def _durations(
    schedule: str,
    stages: int,
    f: float | Sequence[float],
    b: float | Sequence[float],
    w: float | Sequence[float] | None,
) -> tuple[float, ...]:
    """Seconds by kind and stage, in the order of _KINDS."""
    forward, backward = _per_stage("f", f, stages), _per_stage("b", b, stages)
    weight = [x / 2 for x in backward] if w is None else _per_stage("w", w, stages)
    split = [x - y for x, y in zip(backward, weight, strict=True)]
    if schedule in SPLIT_BACKWARD and min(split) < 0:
        raise ConfigError("w: the weights' part is more than the whole backward b")
    return (*forward, *backward, *split, *weight)


def _run(program: _Program, durations: Sequence[float], p2p: float, saving: Sequence[float]) -> _ActionTimes:
    """`saving` is of each rank."""
    free = [0.0] * len(saving)
    starts: list[float] = []
    ends: list[float] = []
    beside = -1.0  # seconds of the forward that the next action runs beside; below 0: none
    for rank, need, is_remote, need_too, is_remote_too, cost in program.steps:
        start = free[rank]
        if need >= 0:
            ready = ends[need] + p2p if is_remote else ends[need]
            if ready > start:  # noqa: PLR1730 - twice as fast as max() in the loop that decides how fast planning is
                start = ready
        if need_too >= 0:
            ready = ends[need_too] + p2p if is_remote_too else ends[need_too]
            beside = durations[cost]
            starts.append(max(start, ready))
            ends.append(start)  # replaced when the pair ends
            free[rank] = starts[-1]
            continue
        end = start + durations[cost]
        if beside >= 0:
            end = max(start, end + beside - saving[rank])
            ends[-1] = end
            start = max(start, end - durations[cost])
            beside = -1.0
        starts.append(start)
        ends.append(end)
        free[rank] = end
    return _ActionTimes(starts, ends)


def _spans(program: _Program, run: _ActionTimes) -> list[tuple[float, float]]:
    """What each action takes of its rank's time; a pair's forward ends where its backward is drawn to begin."""
    return [
        (start, run.starts[i + 1] if step.need_too >= 0 else end)
        for i, (step, start, end) in enumerate(zip(program.steps, run.starts, run.ends, strict=True))
    ]


class _Rhythm(NamedTuple):
    """How a schedule repeats: after so many microbatches, which are so many actions of a rank."""

    microbatches: int
    actions: int
    windows: int  # repeats that together hold everything in flight (2 pp + 1 microbatches at most), and one more


def _rhythm(schedule: str, pp: int, virtual_stages: int) -> _Rhythm:
    if schedule in ("interleaved", "zero_bubble"):
        return _Rhythm(pp, pp * virtual_stages * (3 if schedule == "zero_bubble" else 2), 4)
    return _Rhythm(1, {"1f1b": 2, "zbv": 6, "dualpipev": 4}[schedule], 2 * pp + 2)


def _enough(schedule: str, pp: int, microbatches: int, virtual_stages: int) -> int:
    """Microbatches to simulate first: warm-up, the windows to compare, the end. All of them where few are left."""
    if schedule == "gpipe":
        return microbatches  # two phases, no steady state of both
    rhythm = _rhythm(schedule, pp, virtual_stages)
    if microbatches % rhythm.microbatches:
        return microbatches  # its rounds are longer than pp, and fewer rounds would be cut differently
    # A multiple of pp less than all: rounds of messages through the whole pipeline repeat after pp microbatches.
    return min(microbatches, 8 * pp + microbatches % pp)


def _last_first(program: _Program, positions: tuple[int, ...]) -> int:
    """Where a rank's list has the last forward of its first stage: there its steady state ends."""
    stage = min(program.actions[p].stage for p in positions)
    return max(i for i, p in enumerate(positions) if program.actions[p][:2] == ("F", stage))


def _steady_step(program: _Program, ends: list[float], rhythm: _Rhythm, repeats: int) -> float | None:
    """Seconds that `repeats` more repeats take, if the last windows of every rank's steady state agree; else None."""
    step: float | None = None
    span, length = rhythm.windows * rhythm.actions, repeats * rhythm.actions
    for positions in program.by_rank:
        last = _last_first(program, positions)
        if last - span - length < 0:
            return None
        for i in range(last - span, last + 1):
            now, then = positions[i], positions[i - length]
            if program.steps[now].cost != program.steps[then].cost:
                return None
            gap = ends[now] - ends[then]
            if step is None:
                step = gap
            elif abs(gap - step) > _SAME * max(step, gap):
                return None
    return step


def _timeline(schedule: str, pp: int, program: _Program, run: _ActionTimes, steady: _Steady | None) -> Timeline:
    """What was run, longer by the steady state that was not."""
    spans = _spans(program, run)
    busy, finish = [], []
    for positions in program.by_rank:
        spent = [spans[p][1] - spans[p][0] for p in positions]
        total, end = sum(spent), run.ends[positions[-1]]
        if steady is not None:
            last = _last_first(program, positions)
            total += steady.times * sum(spent[last - steady.actions + 1 : last + 1])
            end += steady.times * steady.step
        busy.append(total)
        finish.append(end)
    makespan = max(finish)
    simulated = 1 + max(action.microbatch for action in program.actions)
    microbatches = simulated + (steady.microbatches * steady.times if steady else 0)
    virtual_stages = (1 + max(action.stage for action in program.actions)) // pp
    live = peak_live(schedule, pp, microbatches, virtual_stages)
    return Timeline(
        schedule=schedule,
        microbatches=microbatches,
        makespan=makespan,
        bubble=1 - sum(busy) / (pp * makespan) if makespan else 0.0,
        busy=tuple(busy),
        finish=tuple(finish),
        in_flight=tuple(max(map(sum, moments)) / virtual_stages for moments in live),
        simulated=simulated,
    )


class _Steady(NamedTuple):
    """`times` further repeats of so many microbatches, actions and seconds."""

    times: int
    microbatches: int
    actions: int
    step: float


def _carry_on(program: _Program, run: _ActionTimes, rhythm: _Rhythm, pp: int, missing: int) -> _Steady | None:
    """The steady state that brings `missing` microbatches more, or None where it is not reached yet."""
    for repeats in dict.fromkeys((1, max(1, pp // rhythm.microbatches))):
        size = repeats * rhythm.microbatches
        if missing % size == 0:
            step = _steady_step(program, run.ends, rhythm, repeats)
            if step is not None:
                return _Steady(missing // size, size, repeats * rhythm.actions, step)
    return None


def _events(program: _Program, run: _ActionTimes) -> tuple[Event, ...]:
    spans = _spans(program, run)
    return tuple(
        Event(step.rank, action.kind, action.stage, action.microbatch, *span)
        for action, step, span in zip(program.actions, program.steps, spans, strict=True)
    )
