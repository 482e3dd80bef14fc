"""Pipeline schedules as the action lists that each rank runs, in order.

An action is (kind, stage, microbatch): F forward, B whole backward, I the backward of the input, W of the weights.
Stages are counted in model order over all ranks. Looped schedules put stage s on rank s mod pp; V-shaped ones (zbv,
dualpipev) fold the model back, so that rank 0 holds the first and the last stage.

Sources: gpipe arXiv:1811.06965, 1f1b and interleaved arXiv:2104.04473, zero_bubble and zbv arXiv:2401.10241,
dualpipev the V-shaped half of DualPipe (arXiv:2412.19437). The lists equal those of torch.distributed.pipelining,
which runs them; a test compares them action by action.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from deepwell.errors import ConfigError
from deepwell.planner.layout import SCHEDULES

Kind = Literal["F", "B", "I", "W"]
SPLIT_BACKWARD = ("zero_bubble", "zbv", "dualpipev")  # these run I and W apart, at least in places
V_SHAPED = ("zbv", "dualpipev")


class Action(NamedTuple):
    """One piece of work of one rank. `paired` marks a forward that dualpipev runs beside the backward after it."""

    kind: Kind
    stage: int
    microbatch: int
    paired: bool = False


def why_not(schedule: str, pp: int, microbatches: int, virtual_stages: int = 1) -> str:
    """Why a schedule cannot run with these counts; empty where it can. Raises ConfigError for what is no schedule."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule: got {schedule!r}; accepted: {', '.join(SCHEDULES)}")
    for name, value in (("pp", pp), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}: got {value!r}; a whole number of at least 1")
    if schedule in ("gpipe", "1f1b") and virtual_stages != 1:
        return f"{schedule} has one stage per rank, not {virtual_stages}"
    if schedule in V_SHAPED and virtual_stages != 2:
        return f"{schedule} has two stages per rank, not {virtual_stages}"
    if schedule == "interleaved" and virtual_stages < 2:
        return "interleaved needs at least two stages per rank"
    if schedule in ("interleaved", "zero_bubble") and microbatches % rounds(pp, microbatches):
        return f"{microbatches} microbatches do not fill {rounds(pp, microbatches)} equal rounds of at least {pp}"
    if schedule == "dualpipev" and microbatches < 2 * pp:
        return f"dualpipev needs a microbatch for each of its {2 * pp} stages, not {microbatches}"
    return ""


def rounds(pp: int, microbatches: int) -> int:
    """How often interleaved schedules go through a rank's stages with one group of microbatches."""
    return max(1, microbatches // pp)


def stage_rank(schedule: str, pp: int, stage: int) -> int:
    if schedule in V_SHAPED:
        return stage if stage < pp else 2 * pp - 1 - stage
    return stage % pp


def rank_stages(schedule: str, pp: int, virtual_stages: int, rank: int) -> tuple[int, ...]:
    if schedule in V_SHAPED:
        return (rank, 2 * pp - 1 - rank)
    return tuple(range(rank, rank + virtual_stages * pp, pp))


def rank_actions(schedule: str, pp: int, microbatches: int, virtual_stages: int, rank: int) -> list[Action]:
    """The actions of one rank in order. Raises ConfigError where the schedule cannot run with these counts."""
    reason = why_not(schedule, pp, microbatches, virtual_stages)
    if reason:
        raise ConfigError(f"schedule: {reason}")
    if not 0 <= rank < pp:
        raise ConfigError(f"rank: got {rank}; 0 to {pp - 1}")
    if schedule == "gpipe":
        forward = [Action("F", rank, m) for m in range(microbatches)]
        return forward + [Action("B", rank, m) for m in range(microbatches)]
    if schedule == "1f1b":
        return list(_one_f_one_b(pp, microbatches, rank))
    if schedule in ("interleaved", "zero_bubble"):
        return list(_in_rounds(pp, microbatches, virtual_stages, rank, splits=schedule == "zero_bubble"))
    if schedule == "zbv":
        return [a for a in _zbv(pp, microbatches, rank) if a.microbatch < microbatches]
    return _DualPipeV(pp, microbatches, rank).actions


def _one_f_one_b(pp: int, microbatches: int, rank: int) -> Iterator[Action]:
    ahead = min(microbatches, pp - rank)  # forwards before the first backward
    for m in range(ahead):
        yield Action("F", rank, m)
    for m in range(microbatches):
        yield Action("B", rank, m)
        if m + ahead < microbatches:
            yield Action("F", rank, m + ahead)


def _in_rounds(pp: int, microbatches: int, virtual_stages: int, rank: int, *, splits: bool) -> Iterator[Action]:
    """Interleaved 1F1B, or ZB1P, which splits the backward: W follows I after `rank` further steps, so that the
    weights' work fills the waiting at the end."""
    group = microbatches // rounds(pp, microbatches)  # microbatches that pass a stage before the next one
    total = microbatches * virtual_stages

    def act(kind: Kind, n: int) -> Action:
        """The n-th forward or backward of the rank."""
        turn, within = divmod(n, group)
        loop, local = divmod(turn, virtual_stages)
        local = local if kind == "F" else virtual_stages - 1 - local
        return Action(kind, local * pp + rank, loop * group + within)

    # Forwards before the first backward; each rank nearer to the end needs fewer.
    ahead = min(total, (virtual_stages - 1) * group + (1 if splits else 2) * (pp - 1 - rank))
    for n in range(ahead):
        yield act("F", n)
    for n in range(total):
        if n + ahead < total:
            yield act("F", n + ahead)
        yield act("I" if splits else "B", n)
        if splits and n >= rank:
            yield act("W", n - rank)
    for n in range(max(0, total - rank), total if splits else 0):
        yield act("W", n)


def _zbv(pp: int, microbatches: int, rank: int) -> Iterator[Action]:
    """ZB-V for at least 2 pp - 1 microbatches; the caller drops those that are not there."""
    count = max(2 * pp - 1, microbatches)
    first, last = rank, 2 * pp - 1 - rank
    counts = {(kind, stage): 0 for kind in "FIW" for stage in (first, last)}

    def act(kind: Kind, stage: int) -> Action:
        counts[kind, stage] += 1
        return Action(kind, stage, counts[kind, stage] - 1)

    def backward(stage: int) -> Iterator[Action]:
        yield act("I", stage)
        yield act("W", stage)

    for _ in range(2 * (pp - rank) - 1):
        yield act("F", first)
    for _ in range(rank):
        yield act("F", last)
        yield act("F", first)
    for _ in range(pp - rank):
        yield act("F", last)
        yield from backward(last)
    while counts["F", last] < counts["F", first] or counts["F", first] < count:
        if counts["F", first] < count:
            yield act("F", first)
        yield from backward(first)
        yield act("F", last)
        yield from backward(last)
    for _ in range(rank):
        yield act("I", first)
        yield act("I", last)
    for _ in range(pp - rank):
        yield act("I", first)
        yield act("W", first)
    for stage in (last, first):
        while counts["W", stage] < counts["I", stage]:
            yield act("W", stage)


class _DualPipeV:
    """The eight phases of DualPipeV for one rank; what runs as an overlapped pair is written F then B."""

    def __init__(self, pp: int, microbatches: int, rank: int) -> None:
        self.first, self.last = rank, 2 * pp - 1 - rank
        self.counts: dict[tuple[str, int], int] = {}
        self.waiting: list[tuple[int, int]] = []  # weight gradients put off
        self.actions: list[Action] = []
        later = pp - rank - 1
        for _ in range(2 * later):
            self.add("F", self.first)
        for _ in range(rank + 1):
            self.add("F", self.first)
            self.add("F", self.last)
        for _ in range(later):
            self.add("I", self.last)
            self.add_waiting()
            self.add("F", self.last)
        for i in range(microbatches - 2 * pp + rank + 1):
            # The very first pair of the last rank runs apart: nothing is there yet to overlap with.
            self.add_pair(self.first, self.last, paired=not (i == 0 and rank == pp - 1))
            self.add_pair(self.last, self.first)
        for _ in range(later):
            self.add("B", self.last)
            self.add_pair(self.last, self.first)
        self.cool_down(rank, later)

    def cool_down(self, rank: int, later: int) -> None:
        """The second half of these backwards is split, so that weight gradients fill the waiting at the end."""
        steps = rank + 1
        split_from = 2 * (steps // 2) + (1 if rank % 2 == 0 else 0)
        for i in range(2 * steps):
            self.add("I" if i >= split_from else "B", self.last if i % 2 == 0 else self.first)
        for _ in range(later):
            self.add_waiting()
            self.add("I", self.first)
        while self.waiting:
            self.add_waiting()

    def add(self, kind: Kind, stage: int, paired: bool = False) -> None:
        counter = ("F" if kind == "F" else "B", stage)
        microbatch = self.counts.get(counter, 0)
        self.counts[counter] = microbatch + 1
        if kind == "I":
            self.waiting.append((stage, microbatch))
        self.actions.append(Action(kind, stage, microbatch, paired))

    def add_pair(self, forward: int, backward: int, paired: bool = True) -> None:
        self.add("F", forward, paired)
        self.add("B", backward)

    def add_waiting(self) -> None:
        if self.waiting:
            stage, microbatch = self.waiting.pop(0)
            self.actions.append(Action("W", stage, microbatch))
