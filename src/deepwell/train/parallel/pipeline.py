"""Pipeline parallelism: ranks hold stages of the model and send micro-batches along, by torch's schedules.

GPipe, 1F1B and interleaved 1F1B. Head and loss are in the last stage, which takes the labels as the others take their
positions: every rank of a pipeline reads the same samples. Schedules that split the backward are refused: a compiled
backward gives the gradients of inputs and weights at once, and they would run it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from deepwell.engine.engine import Engine
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.planner.layout import Layout
from deepwell.train.feed import Batch, Feed, to_device
from deepwell.train.parallel.context import spread_attention
from deepwell.train.parallel.experts import spread_experts
from deepwell.train.parallel.mesh import Meshes
from deepwell.train.parallel.runner import DistributedRunner, local
from deepwell.train.parallel.shard import shard
from deepwell.train.parallel.stages import Cut, StageModule, spans
from deepwell.train.parallel.tensor import split_tokens, split_weights

_SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def check_schedule(layout: Layout) -> None:
    """Raise UnsupportedError where the layout's schedule is not executed."""
    name = layout.runs_as
    if name not in _SCHEDULES:
        raise UnsupportedError(
            f"schedule {name} splits the backward into gradients of inputs and of weights, and a compiled backward "
            f"gives both at once: it would run twice. Choose one of {', '.join(_SCHEDULES)}"
        )
    if name == "gpipe" and layout.virtual_stages > 1:
        raise UnsupportedError("schedule gpipe has one stage a rank; take interleaved for virtual_stages above 1")


def check_micro_batches(layout: Layout, count: int) -> None:
    """Raise ConfigError where a step has a number of micro-batches that the schedule does not go with."""
    more = "raise global_batch, or lower micro_batch"
    if layout.runs_as == "1f1b" and count < layout.num_stages:
        raise ConfigError(f"schedule 1f1b of {layout.num_stages} stages has {count} micro-batches a step; {more}")
    rounds = max(1, count // layout.pp)
    if layout.runs_as == "interleaved" and count % rounds:
        raise ConfigError(
            f"schedule interleaved over {layout.pp} ranks takes micro-batches in {rounds} equal rounds and a step has "
            f"{count}; take a multiple of {layout.pp}"
        )


class PipelineRunner(DistributedRunner):
    """Runs a rank's stages. The engine's model keeps this rank's layers, under the names that they had."""

    def __init__(self, engine: Engine, feed: Feed, device: torch.device, meshes: Meshes) -> None:
        super().__init__(engine, feed, device, meshes)
        layout = meshes.layout
        check_schedule(layout)
        self.group = meshes.ranks["pp"].get_group()
        self.pp_rank = meshes.ranks.get_local_rank("pp")
        self._spans = spans(layout, engine.deepwell.ir.num_layers)
        own = tuple(span for span in self._spans if span.index % layout.pp == self.pp_rank)
        split = split_weights(engine, meshes, self.notes) if layout.tp > 1 else None
        self.cut = Cut(engine, own, layout.tp)
        self._dtype = next(engine.deepwell.model.parameters()).dtype
        self._tied_group = _group_of_ends(meshes) if self.cut.is_tied else None
        if layout.cp > 1:
            spread_attention(engine, meshes, self.notes)
        inner = spread_experts(engine, meshes)
        if split is not None:
            split_tokens(engine, meshes, split, [engine.deepwell.ir.layers[span.layers[0]].path for span in own])
        self.stages = [StageModule(engine, feed, self.cut, span) for span in own]
        # The stage is FSDP2's root: torch's schedule then reduces gradients once, behind the last micro-batch.
        for stage in self.stages if layout.dp * layout.cp * layout.tp > 1 else ():
            shard(engine, meshes, inner, stage)
        self._schedules: dict[tuple[int, ...], Any] = {}

    def run(self, batches: Sequence[Batch], *, num_items: float) -> Tensor:
        check_micro_batches(self.meshes.layout, len(batches))
        found = [self.counted(batch) for batch in batches]
        shares = torch.tensor([items / num_items for _, items in found], device=self.device)
        whole = to_device(_joined([batch for batch, _ in found]), self.device)
        schedule = self._schedule(len(batches), whole["input_ids"].shape)
        losses: list[Tensor] = []
        given = (whole["input_ids"],) if self.stages[0].span.is_first else ()
        self.routers.set_loss_scale(sum(items for _, items in found) / num_items / len(batches))
        # The schedule asks for a target where there is a loss; the last stage has made it already.
        with torch.enable_grad():
            schedule.step(*given, target=shares, losses=losses, return_outputs=False, share=shares, **whole)
        total = torch.zeros((), device=self.device)
        for loss in losses:
            total += loss.detach().float().sum()
        self._add_tied()
        return self.all_reduce(total)

    def _schedule(self, count: int, shape: torch.Size) -> Any:
        """The schedule of a step of so many micro-batches; torch's stages know the sizes of what they are sent."""
        key = (count, *shape)
        if key not in self._schedules:
            layout = self.meshes.layout
            stages = [self._torch_stage(stage, shape[0] // count, shape[1]) for stage in self.stages]
            kind = _SCHEDULES[layout.runs_as]
            single = kind is not ScheduleInterleaved1F1B
            self._schedules[key] = kind(
                stages[0] if single else stages,
                n_microbatches=count,
                loss_fn=lambda out, _: out.sum(),
                scale_grads=False,
            )
        return self._schedules[key]

    def _torch_stage(self, stage: StageModule, rows: int, length: int) -> PipelineStage:
        span = stage.span
        hidden = self._hidden(rows, length).requires_grad_()
        tokens = torch.zeros(rows, length, dtype=torch.int64, device=self.device)
        loss = torch.zeros(1, device=self.device, requires_grad=True)
        return PipelineStage(
            stage, span.index, span.count, self.device, group=self.group,
            input_args=(tokens if span.is_first else hidden,), output_args=(loss if span.is_last else hidden,),
        )  # fmt: skip

    def _hidden(self, rows: int, length: int) -> Tensor:
        """Room for what a stage sends to the next: the ranks of tp send their tokens each."""
        size = (rows, length // self.meshes.layout.tp, self.cut.width)
        return torch.zeros(size, dtype=self._dtype, device=self.device)

    @torch.no_grad()
    def _add_tied(self) -> None:
        """Embedding and head have one weight, in two copies: both get the sum of both gradients."""
        for stage in self.stages:
            weight = self.cut.tied_weight(stage.span)
            if weight is not None and self._tied_group is not None and weight.grad is not None:
                dist.all_reduce(local(weight.grad), group=self._tied_group)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        part, items = self.counted(batch)
        loss = self._through(to_device(part, self.device))
        total = self.all_reduce(torch.stack((loss * items, torch.tensor(float(items), device=self.device))))
        return total[0], total[1] / self.meshes.layout.pp

    def sample(self, batch: Batch) -> Tensor:
        raise UnsupportedError("single layers are not looked at under pipeline parallelism; switch the check off")

    def _through(self, batch: Batch) -> Tensor:
        """The forward of one batch, stage after stage; the mean loss on the last stage's ranks, 0 on others."""
        rows, length = batch["input_ids"].shape
        pp, stages = self.meshes.layout.pp, {stage.span.index: stage for stage in self.stages}
        x: Tensor = batch["input_ids"]
        for span in self._spans:
            if span.index not in stages:
                continue
            if not span.is_first:
                x = self._hidden(rows, length)
                dist.recv(x, group=self.group, group_src=(span.index - 1) % pp)
            x = stages[span.index](x, **batch)
            if not span.is_last:
                dist.send(x.contiguous(), group=self.group, group_dst=(span.index + 1) % pp)
        has_loss = self._spans[-1].index in stages
        return x.float().sum() if has_loss else torch.zeros((), device=self.device)

    def once(self, grads: list[Tensor]) -> list[Tensor]:
        last = self.stages[-1].span
        twice = self.cut.tied_weight(last) if last.is_last else None  # counted with the embedding
        return [grad for grad in grads if twice is None or grad is not twice.grad]


def _joined(batches: Sequence[Batch]) -> dict[str, Tensor]:
    """One batch of several; torch's schedule cuts it again."""
    first = batches[0]
    if "input_ids" not in first:
        raise ConfigError(f"pp: the batch has {', '.join(first)} and no input_ids")
    for batch in batches[1:]:
        if batch.keys() != first.keys() or any(batch[name].shape != first[name].shape for name in first):
            raise ConfigError("pp: the micro-batches of a step must have the same fields, rows and lengths")
    return {name: torch.cat([batch[name] for batch in batches]) for name in first}


def _group_of_ends(meshes: Meshes) -> Any:
    """The ranks of the first and the last stage of this rank's pipeline; None on ranks between. All ranks must call."""
    pipelines = meshes.ranks.mesh.flatten(1).T.tolist()  # one row for each pipeline, its ranks in order
    found = None
    for ranks in pipelines:
        ends = sorted({ranks[0], ranks[-1]})
        group = dist.new_group(ends)
        found = group if dist.get_rank() in ends else found
    return found
