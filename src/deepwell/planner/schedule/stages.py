"""Seconds of every virtual stage for one micro-batch: what a step's estimate and its trace are both made of. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from deepwell.planner.comm import Network, send_s
from deepwell.planner.cost import OVERLAPPED, BlockTime, Pricing, price_block
from deepwell.planner.efficiency import DeviceSpeed
from deepwell.planner.job import StageLayers, StepJob
from deepwell.planner.layout import Recompute
from deepwell.planner.overlap import hides
from deepwell.planner.schedule.actions import SPLIT_BACKWARD
from deepwell.planner.shard import LocalBlock


def add_parts(into: dict[str, float], seconds: dict[str, float], times: float = 1.0) -> None:
    """Add seconds by part to a sum of them."""
    for part, value in seconds.items():
        into[part] = into.get(part, 0.0) + times * value


def message_s(job: StepJob, net: Network) -> float:
    """Seconds of the message that one stage sends the next for a micro-batch; nothing without a pipeline."""
    layout = job.layout
    if layout.pp == 1:
        return 0.0
    split = layout.tp if layout.sequence_parallel or job.stack.switch("scatter_gather", "on") == "on" else 1
    return send_s(net, job.blocks[0].boundary_bytes / split, layout.tp * layout.cp * layout.dp)


def pair_savings_s(job: StepJob, stages: list[BlockTime]) -> list[float]:
    """Seconds that DualPipeV saves on each rank where a forward runs beside a backward: each exchanges tokens with its
    experts while the other computes (DeepSeek-V3 report, section 3.2.1), all but the share that any overlap leaves.

    Nothing under other schedules, and nothing where the stack overlaps these exchanges anyway.
    """
    layout = job.layout
    if layout.pp == 1 or layout.runs_as != "dualpipev" or hides(layout, job.stack, "ep"):
        return [0.0] * layout.pp
    exchanged = [stage.forward.get("ep", 0.0) + stage.backward.get("ep", 0.0) for stage in stages]
    # A rank's pairs take turns between its two stages.
    return [(1 - OVERLAPPED) * sum(exchanged[i] for i in job.rank_stages(rank)) / 2 for rank in range(layout.pp)]


def stage_times(job: StepJob, dev: DeviceSpeed, net: Network) -> list[BlockTime]:
    """Every virtual stage in model order; equal ones are priced once."""

    def priced(blocks: Sequence[LocalBlock], recompute: Recompute) -> list[BlockTime]:
        pricing = Pricing(job=job, device=dev, network=net, recompute=recompute)
        return [price_block(block, pricing) for block in blocks]

    chosen = job.layout.recompute
    plain = priced(job.blocks, Recompute() if chosen.kind == "block" else chosen)
    again = priced(job.blocks, chosen) if chosen.kind == "block" else plain
    stem, tail = priced((job.stem, job.tail), Recompute())
    known: dict[StageLayers, BlockTime] = {}
    found = []
    for stage in job.stages:
        if stage not in known:
            known[stage] = _split(job, _stage_time(stage, plain, again, stem, tail))
        found.append(known[stage])
    return found


def _split(job: StepJob, stage: BlockTime) -> BlockTime:
    """The stage under a schedule that splits the backward, where each half runs all of it (a compiled graph)."""
    is_split = job.layout.pp > 1 and job.layout.runs_as in SPLIT_BACKWARD
    if not is_split or job.stack.switch("split_backward", "halves") == "halves":
        return stage
    backward = {part: 2 * seconds for part, seconds in stage.backward.items()}
    return replace(stage, backward=backward, wgrad=stage.b)


def _stage_time(
    stage: StageLayers, plain: list[BlockTime], again: list[BlockTime], stem: BlockTime, tail: BlockTime
) -> BlockTime:
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    wgrad = 0.0
    for index, count in enumerate(stage.counts):
        redone = stage.recomputed[index]
        for block, times in ((again[index], redone), (plain[index], count - redone)):
            if times:
                add_parts(forward, block.forward, times)
                add_parts(backward, block.backward, times)
                wgrad += times * block.wgrad
    for end, is_here in ((stem, stage.has_stem), (tail, stage.has_tail)):
        if is_here:
            add_parts(forward, end.forward)
            add_parts(backward, end.backward)
            wgrad += end.wgrad
    return BlockTime(forward=forward, backward=backward, wgrad=wgrad)
