"""Memory of every pipeline rank over one step of a plan: bytes by kind at each moment, not only their sum. Pure.

`rank_memory` adds up what a rank needs at its peak; here the schedule's actions are played: a forward adds a
micro-batch's activations layer by layer, a backward frees them and leaves gradients, and head, loss and the backward's
own tensors stand on top of that for a moment. The peak is the highest of these moments, and the moment has a name.
Both count what the engine keeps by the same rules (`keeps.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepwell.planner.job import StepJob, read_job
from deepwell.planner.keeps import LIBRARIES, Keeps, head_bytes, kept_bytes, working_bytes
from deepwell.planner.layout import Recompute
from deepwell.planner.rank_memory import counted, on_device_share, rank_memory, rank_params
from deepwell.planner.schedule.simulate import Timeline
from deepwell.planner.schedule.trace import plan_timeline
from deepwell.planner.shard import HALF, LocalBlock

if TYPE_CHECKING:
    from deepwell.planner.plan import Plan

__all__ = ["KINDS", "Keeps", "Moment", "RankTimeline", "memory_timeline"]

KINDS = ("weights", "optimizer", "gradients", "copies", "activations", "head", "working", "buffers")

# More layers x micro-batches than this on one rank, and an action is two moments instead of one for each layer.
_DETAIL = 256
_MOST_POINTS = 400


@dataclass(frozen=True, slots=True)
class Moment:
    time_s: float
    phase: str  # "F2.0" is the forward of stage 2 and micro-batch 0; "B...", "head ...", "optimizer"
    nbytes: tuple[tuple[str, float], ...]

    @property
    def allocated(self) -> float:
        return sum(size for _, size in self.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """A pipeline rank's memory over the step; `overhead` is what lies beside the allocator's tensors."""

    rank: int
    moments: tuple[Moment, ...]
    overhead: float  # CUDA context, communicators, fragmentation

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.allocated)

    @property
    def device_bytes(self) -> float:
        return self.peak.allocated + self.overhead


def memory_timeline(plan: Plan, keeps: Keeps | None = None) -> tuple[RankTimeline, ...]:
    keeps = keeps or Keeps.of_stack(plan.stack.name)
    job = read_job(plan.workload, plan.layout, keeps.applied_to(plan.stack))
    timeline = plan_timeline(plan)
    is_gpu = plan.hardware.kind == "cuda"
    return tuple(_Player(job, keeps, rank, timeline).play(is_gpu=is_gpu) for rank in range(plan.layout.pp))


# ---- the step ----


class _Player:
    """Plays the actions of one rank and notes its memory at each moment."""

    def __init__(self, job: StepJob, keeps: Keeps, rank: int, timeline: Timeline) -> None:
        self.job, self.keeps, self.rank, self.timeline = job, keeps, rank, timeline
        self.memory, self.on_device = rank_memory(job, rank), on_device_share(job, rank)
        self.stages = job.rank_stages(rank)
        self.activations = self.gradients = self.held_head = 0.0
        self.done: set[int] = set()  # stages whose gradients exist
        self.moments: list[Moment] = []
        self.libraries = 0
        self.head = head_bytes(job, keeps, self.memory.logits)
        total = sum(sum(rank_params(job, (stage,))) for stage in self.stages)
        scale = keeps.element_bytes / HALF if keeps.late_gradients else 1.0
        self.per_param = scale * self.memory.grads / total if total else 0.0
        if not keeps.late_gradients:
            self.gradients, self.per_param = self.memory.grads, 0.0
        layers = sum(sum(job.stages[stage].counts) for stage in self.stages)
        self.is_detailed = layers * job.micro_batches <= _DETAIL

    def play(self, *, is_gpu: bool) -> RankTimeline:
        self.libraries = LIBRARIES if is_gpu else 0
        self._note(0.0, "start")
        for event in self.timeline.events:
            if event.rank != self.rank:
                continue
            label = f"{event.kind}{event.stage}.{event.microbatch}"
            if event.kind == "F":
                self._forward(event.stage, label, event.start, event.end)
            elif event.kind in "BI":
                self._backward(event.stage, label, event.start, event.end, frees=event.kind == "B")
            else:
                self.activations = max(0.0, self.activations - sum(self._stage_bytes(event.stage)))
                self._note(event.end, label)
        self._note(self.timeline.makespan, "optimizer")
        overhead = self.memory.context + self.memory.fragmentation if is_gpu else 0.0
        return RankTimeline(rank=self.rank, moments=tuple(_thinned(self.moments)), overhead=overhead)

    def _note(self, time: float, phase: str, head: float = 0.0, working: float = 0.0) -> None:
        memory = self.memory
        sizes = (
            memory.params, memory.master + memory.moments, self.gradients, memory.quantized_copies,
            self.activations * self.on_device, head or self.held_head, working,
            memory.comm_buffers + self.libraries,
        )  # fmt: skip
        shown = tuple((kind, size) for kind, size in zip(KINDS, sizes, strict=True) if size > 0)
        self.moments.append(Moment(time, phase, shown))

    def _layers(self, stage: int) -> Iterator[tuple[LocalBlock, Recompute]]:
        for index, again, count in counted(self.job, self.job.stages[stage]):
            yield from itertools.repeat((self.job.blocks[index], again), count)

    def _stage_bytes(self, stage: int) -> list[float]:
        return [kept_bytes(block, again, self.job, self.keeps) for block, again in self._layers(stage)]

    def _forward(self, stage: int, label: str, start: float, end: float) -> None:
        sizes = self._stage_bytes(stage)
        for index, size in enumerate(sizes):
            self.activations += size
            if self.is_detailed:
                self._note(start + (end - start) * (index + 1) / (len(sizes) + 1), label)
        if self.job.stages[stage].has_tail:
            self._note(end, f"head {label}", head=self.held_head + self.head.forward)
            self.held_head += self.head.between
        self._note(end, label)

    def _backward(self, stage: int, label: str, start: float, end: float, *, frees: bool) -> None:
        here = self.job.stages[stage]
        if here.has_tail:
            added = self._new_head_gradient(stage)
            self._note(start, f"head {label}", head=self.held_head + self.head.backward + added)
            self.held_head = max(0.0, self.held_head - self.head.between)
        layers = list(self._layers(stage))
        sizes = self._stage_bytes(stage)
        is_first = stage not in self.done
        for index in reversed(range(len(layers))):
            block, again = layers[index]
            place = start + (end - start) * (len(layers) - index) / (len(layers) + 1)
            if self.is_detailed or index in (0, len(layers) - 1):
                self._note(place, label, working=working_bytes(block, again, self.job, self.keeps))
            if frees:
                self.activations -= sizes[index]
            if is_first:
                self.gradients += self.per_param * (block.dense_params + block.expert_params)
        if is_first:
            ends = self.job.stem.dense_params * here.has_stem
            if here.has_tail:
                ends += self.job.tail.dense_params
                ends -= self.head.weight_gradient / self.per_param if self.per_param else 0.0
            self.gradients += self.per_param * max(0.0, ends)
            self.done.add(stage)
        self.activations = max(0.0, self.activations)
        self._note(end, label)

    def _new_head_gradient(self, stage: int) -> float:
        """The head's weight gradient is there from the first backward on; bytes of a later one, to be added to it."""
        size = self.head.weight_gradient
        if not self.per_param or stage in self.done:
            return size
        self.gradients = max(self.gradients, size)
        return 0.0


def _thinned(moments: list[Moment]) -> list[Moment]:
    """At most a few hundred moments, the highest of each stretch: the peak and the shape stay."""
    if len(moments) <= _MOST_POINTS:
        return moments
    each = -(-len(moments) // _MOST_POINTS)
    stretches = (moments[i : i + each] for i in range(0, len(moments), each))
    return [max(stretch, key=lambda moment: moment.allocated) for stretch in stretches]
