"""Seconds of every virtual stage for one micro-batch: what a step's estimate and its trace are both made of. Pure."""

from dataclasses import dataclass, replace

from deepwell.planner.comm import Network, send_s
from deepwell.planner.cost import OVERLAPPED, BlockTime, Pricing, price_block
from deepwell.planner.efficiency import DeviceSpeed
from deepwell.planner.job import StageLayers, StepJob
from deepwell.planner.layout import Recompute
from deepwell.planner.overlap import hides
from deepwell.planner.schedule.actions import SPLIT_BACKWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """One stage and micro-batch: seconds by part, forward and backward."""

    forward: dict[str, float]
    backward: dict[str, float]
    wgrad: float  # the part of the backward that only the weights need
    f: float
    b: float

    @property
    def w(self) -> float:
        """What a schedule that splits the backward may put off."""
        return min(self.wgrad, self.b)


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


def pair_savings_s(job: StepJob, stages: list[StageTime]) -> list[float]:
    """Seconds that DualPipeV saves on each rank where a forward runs beside a backward: each exchanges tokens with its
    experts while the other computes (DeepSeek-V3 report, section 3.2.1), all but the share that any overlap leaves.

    Nothing under other schedules, and nothing where the stack overlaps these exchanges anyway.
    """
    layout = job.layout
    if layout.pp == 1 or layout.runs_as != "dualpipev" or _hides_experts(job):
        return [0.0] * layout.pp
    exchanged = [stage.forward.get("ep", 0.0) + stage.backward.get("ep", 0.0) for stage in stages]
    # A rank's pairs take turns between its two stages.
    return [(1 - OVERLAPPED) * sum(exchanged[i] for i in job.rank_stages(rank)) / 2 for rank in range(layout.pp)]


def _hides_experts(job: StepJob) -> bool:
    return hides(job.layout, job.stack, "ep")


def _pricing(job: StepJob, dev: DeviceSpeed, net: Network, recompute: Recompute) -> Pricing:
    return Pricing(
        device=dev, network=net, stack=job.stack, layout=job.layout, kernel=job.kernel, recompute=recompute,
        fp8_scaling=job.stack.switch("fp8_scaling", "delayed"), dropout=job.dropout, loss=job.loss,
        tp_overlap=hides(job.layout, job.stack, "tp"), ep_overlap=_hides_experts(job),
        is_frozen=job.workload.lora is not None,
    )  # fmt: skip


def stage_times(job: StepJob, dev: DeviceSpeed, net: Network) -> list[StageTime]:
    """Every virtual stage in model order; equal ones are priced once."""
    chosen = job.layout.recompute
    light = Recompute() if chosen.kind == "block" else chosen
    plain = [price_block(block, _pricing(job, dev, net, light)) for block in job.blocks]
    again = plain
    if chosen.kind == "block":
        again = [price_block(block, _pricing(job, dev, net, chosen)) for block in job.blocks]
    ends = _pricing(job, dev, net, Recompute())
    stem, tail = price_block(job.stem, ends), price_block(job.tail, ends)
    known: dict[StageLayers, StageTime] = {}
    found = []
    for stage in job.stages:
        if stage not in known:
            known[stage] = _split(job, _stage_time(stage, plain, again, stem, tail))
        found.append(known[stage])
    return found


def _split(job: StepJob, stage: StageTime) -> StageTime:
    """The stage under a schedule that splits the backward, where each half runs all of it (a compiled graph)."""
    is_split = job.layout.pp > 1 and job.layout.runs_as in SPLIT_BACKWARD
    if not is_split or job.stack.switch("split_backward", "halves") == "halves":
        return stage
    backward = {part: 2 * seconds for part, seconds in stage.backward.items()}
    return replace(stage, backward=backward, wgrad=stage.b, b=2 * stage.b)


def _stage_time(
    stage: StageLayers, plain: list[BlockTime], again: list[BlockTime], stem: BlockTime, tail: BlockTime
) -> StageTime:
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
    return StageTime(forward=forward, backward=backward, wgrad=wgrad, f=sum(forward.values()), b=sum(backward.values()))
