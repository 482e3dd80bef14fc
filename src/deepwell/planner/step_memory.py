"""Memory of every pipeline rank over one step of a plan: bytes by kind at each moment, not only their sum. Pure.

`rank_memory` adds up what a rank may need; here the schedule's actions are played: a forward adds a micro-batch's
activations layer by layer, a backward frees them and leaves gradients, and head, loss and the backward's own tensors
stand on top of that for a moment. The peak is the highest of these moments, and the moment has a name.

What an engine keeps (`Keeps`) decides as much as the layout. Deepwell's makes norm outputs, activation outputs and
FP8 codes again in the backward, and computes head and loss in chunks whose gradients are made in the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepwell.planner.estimate import Job, read_job
from deepwell.planner.layout import Recompute
from deepwell.planner.memory import backward_bytes, saved_bytes
from deepwell.planner.rank_memory import rank_memory
from deepwell.planner.schedule import Timeline
from deepwell.planner.shard import HALF, LocalBlock
from deepwell.planner.stack import Stack
from deepwell.planner.trace import plan_timeline

if TYPE_CHECKING:
    from deepwell.planner.plan import Plan

KINDS = ("weights", "optimizer", "gradients", "copies", "activations", "head", "working", "buffers")

# Bytes of logits that a fused head holds at a time: kernels/linear_cross_entropy.py, CHUNK_BYTES.
_CHUNK_BYTES = 1 << 30
# cuBLAS and cuDNN keep tens of megabytes inside torch's allocator on Hopper.
_LIBRARIES = 32 << 20
_GATES = ("gate", "gate_up")
# More layers x micro-batches than this on one rank, and an action is two moments instead of one for each layer.
_DETAIL = 256
_MOST_POINTS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeps:
    """What an engine holds on to between forward and backward."""

    # Norm outputs, activation outputs and FP8 codes come again in the backward; None: as the stack's switches say.
    remakes: bool | None = True
    fuses_head: bool = True  # head and loss in chunks; their gradients are made in the forward
    caches_weights: bool = False  # FP8 codes of the weights, 2 bytes each
    late_gradients: bool = True  # gradients appear with the first backward; False: their buffers are always there
    element_bytes: float = HALF  # of activations and gradients

    @classmethod
    def of_stack(cls, name: str) -> Keeps:
        """Deepwell's own habits, or those of frameworks that keep what autograd saves and own gradient buffers."""
        if name == "deepwell":
            return cls()
        return cls(remakes=None, fuses_head=False, late_gradients=False)

    def applied_to(self, stack: Stack) -> Stack:
        """The stack with the switches that these habits mean."""
        if self.remakes is None:
            return stack
        # Where codes are made again from what is kept anyway, they themselves are not kept.
        kept = {"compile": "on", "keeps_fp8": "off"} if self.remakes else {"compile": "off"}
        return stack.with_switches(**kept, weight_copies=self.caches_weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Bytes of one rank at one time, by kind."""

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
    """Every pipeline rank's memory over one step of the plan."""
    keeps = keeps or Keeps.of_stack(plan.stack.name)
    job = read_job(plan.workload, plan.layout, keeps.applied_to(plan.stack))
    timeline = plan_timeline(plan)
    is_gpu = plan.hardware.kind == "cuda"
    return tuple(_Player(job, keeps, rank, timeline).play(is_gpu=is_gpu) for rank in range(plan.layout.pp))


# ---- one layer ----


def kept_bytes(block: LocalBlock, recompute: Recompute, job: Job, keeps: Keeps) -> float:
    """What one layer holds of one micro-batch between its forward and its backward."""
    kept = sum(saved_bytes(block, recompute, job.kernel, job.dropout).values())
    return kept * keeps.element_bytes / HALF


def working_bytes(block: LocalBlock, recompute: Recompute, job: Job, keeps: Keeps) -> float:
    """The most that one layer's backward holds besides: gradients around the MLP's activation, and what it redoes."""
    scale = keeps.element_bytes / HALF
    downs = [gemm for gemm in block.gemms if gemm.part == "down"]
    if not (keeps.remakes and downs):
        return scale * backward_bytes(block, recompute, job.kernel, job.dropout)
    inputs = 2 if any(gemm.part in _GATES for gemm in block.gemms) else 1
    # The gradient of the activation's output, those of its inputs, the stream's, and the weight's that was just made.
    widest = max(HALF * gemm.groups * ((1 + inputs) * gemm.m * gemm.k + gemm.k * gemm.n) for gemm in downs)
    working = widest + block.input_bytes
    if recompute.kind in ("full", "block"):
        working += sum(saved_bytes(block, Recompute(), job.kernel, job.dropout).values())
    return scale * working


# ---- head and loss ----


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    forward: float  # while the loss is computed
    between: float  # from there to the backward, gradients of the weight apart
    backward: float  # when the backward begins
    weight_gradient: float  # made in the forward already


def _head(job: Job, keeps: Keeps, logits: float) -> _Head:
    gemm = next((gemm for gemm in job.tail.gemms if gemm.role == "head"), None)
    size = keeps.element_bytes
    if gemm is None or not keeps.fuses_head or not logits:
        whole = logits * size / HALF
        return _Head(forward=whole, between=whole, backward=whole, weight_gradient=0.0)
    rows = max(1, int(_CHUNK_BYTES // (gemm.n * size)))
    chunks = max(1, -(-int(gemm.m) // rows))
    chunk = size * gemm.m / chunks * gemm.n
    hidden, weight = size * gemm.m * gemm.k, size * gemm.n * gemm.k
    if gemm.is_low:
        # Logits and their gradient's codes of a chunk, all of that gradient transposed, both codes of the weight.
        forward = 1.5 * chunk + gemm.m * gemm.n + 2.0 * gemm.n * gemm.k + 2 * hidden
        return _Head(forward=forward, between=hidden, backward=weight + 2 * hidden, weight_gradient=weight)
    # The backward scales the gradients that the forward made: old and new stand beside each other.
    return _Head(
        forward=chunk + weight + 2 * hidden, between=hidden, backward=weight + 2 * hidden, weight_gradient=weight
    )


# ---- the step ----


class _Player:
    """Plays the actions of one rank and notes its memory at each moment."""

    def __init__(self, job: Job, keeps: Keeps, rank: int, timeline: Timeline) -> None:
        self.job, self.keeps, self.rank, self.timeline = job, keeps, rank, timeline
        self.memory = rank_memory(job, rank)
        self.stages = job.rank_stages(rank)
        self.activations = self.gradients = self.held_head = 0.0
        self.done: set[int] = set()  # stages whose gradients exist
        self.moments: list[Moment] = []
        self.libraries = 0
        self.head = _head(job, keeps, self.memory.logits)
        total = sum(self._params(stage) for stage in self.stages)
        scale = keeps.element_bytes / HALF if keeps.late_gradients else 1.0
        self.per_param = scale * self.memory.grads / total if total else 0.0
        if not keeps.late_gradients:
            self.gradients, self.per_param = self.memory.grads, 0.0
        layers = sum(sum(job.stages[stage].counts) for stage in self.stages)
        self.is_detailed = layers * job.micro_batches <= _DETAIL

    def play(self, *, is_gpu: bool) -> RankTimeline:
        self.libraries = _LIBRARIES if is_gpu else 0
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
                self._free(event.stage)
                self._note(event.end, label)
        self._note(self.timeline.makespan, "optimizer")
        overhead = self.memory.context + self.memory.fragmentation if is_gpu else 0.0
        return RankTimeline(rank=self.rank, moments=tuple(_thinned(self.moments)), overhead=overhead)

    def _note(self, time: float, phase: str, head: float = 0.0, working: float = 0.0) -> None:
        memory = self.memory
        on_device = 1 - self.job.layout.offload.activations
        sizes = (
            memory.params, memory.master + memory.moments, self.gradients, memory.quantized_copies,
            self.activations * on_device, head or self.held_head, working,
            memory.comm_buffers + self.libraries,
        )  # fmt: skip
        shown = tuple((kind, size) for kind, size in zip(KINDS, sizes, strict=True) if size > 0)
        self.moments.append(Moment(time_s=time, phase=phase, nbytes=shown))

    def _params(self, stage: int) -> float:
        here, job = self.job.stages[stage], self.job
        blocks = zip(here.counts, job.blocks, strict=True)
        inside = sum(count * (block.dense_params + block.expert_params) for count, block in blocks)
        return inside + job.stem.dense_params * here.has_stem + job.tail.dense_params * here.has_tail

    def _layers(self, stage: int) -> Iterator[tuple[LocalBlock, Recompute]]:
        """The stage's layers: those that recompute first, as block recomputation takes them."""
        chosen = self.job.layout.recompute
        light = Recompute() if chosen.kind == "block" else chosen
        here = self.job.stages[stage]
        for block, count, again in zip(self.job.blocks, here.counts, here.recomputed, strict=True):
            yield from ((block, chosen) for _ in range(again))
            yield from ((block, light) for _ in range(count - again))

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
            self._add_gradient(self.head.weight_gradient, stage)
        self._note(end, label)

    def _backward(self, stage: int, label: str, start: float, end: float, *, frees: bool) -> None:
        here = self.job.stages[stage]
        if here.has_tail:
            self._note(start, f"head {label}", head=self.held_head + self.head.backward)
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

    def _free(self, stage: int) -> None:
        self.activations = max(0.0, self.activations - sum(self._stage_bytes(stage)))

    def _add_gradient(self, size: float, stage: int) -> None:
        """The head's weight gradient exists from its first forward on; later micro-batches add theirs to it."""
        if self.per_param and stage not in self.done:
            self.gradients = max(self.gradients, size)


def _thinned(moments: list[Moment]) -> list[Moment]:
    """At most a few hundred moments, the highest of each stretch: the peak and the shape stay."""
    if len(moments) <= _MOST_POINTS:
        return moments
    each = -(-len(moments) // _MOST_POINTS)
    stretches = (moments[i : i + each] for i in range(0, len(moments), each))
    return [max(stretch, key=lambda moment: moment.allocated) for stretch in stretches]
