"""Layers per stage: an even split, corrected for what embedding and head cost the ranks that hold them. Pure."""

import functools

from deepwell.graph.ops import GEMM_KINDS, InputSizes, Op
from deepwell.planner.layout import Layout
from deepwell.planner.schedule.actions import stage_rank
from deepwell.planner.workload import Workload

# Time of a GEMM's flops over that of bf16 ones, by format: the ratio of peaks, less what quantizing takes back.
_SPEED = {"fp8": 0.6, "mxfp8": 0.6, "nvfp4": 0.4, "mxfp6": 0.6, "mxfp4": 0.4}


def balanced_layers(workload: Workload, schedule: str, pp: int, virtual_stages: int) -> tuple[int, ...] | None:
    """Layers of each stage such that no rank has much more to do than another; None where the even split does that."""
    if "tail" not in workload._resolved:
        workload._resolved["tail"] = round(_ends_in_layers(workload), 2)
    return _balanced(workload.ir.num_layers, schedule, pp, virtual_stages, workload._resolved["tail"])


def _ends_in_layers(workload: Workload) -> float:
    """What the tail (norm, head and loss) costs, counted in layers of the model."""
    work = InputSizes(batch=1, seq_len=workload.seq_len)
    layers = [0.0]
    for variant in workload.variants():
        formats = dict(variant.formats)
        ops = workload.ir.blocks[variant.block].ops
        cost = sum(_cost(op, work, formats.get(op.name, ("bf16",))[0]) for op in ops)
        layers.append(cost * len(variant.layers))
    tail = sum(_cost(op, work, workload.end_formats(op)[0]) for op in workload.ir.tail)
    mean = sum(layers) / max(1, workload.ir.num_layers)
    return tail / mean if mean else 0.0


def _cost(op: Op, work: InputSizes, fmt: str) -> float:
    return op.train_flops(work) * (_SPEED.get(fmt, 1.0) if op.kind in GEMM_KINDS else 1.0)


@functools.lru_cache(maxsize=1024)
def _balanced(layers: int, schedule: str, pp: int, virtual_stages: int, tail: float) -> tuple[int, ...] | None:
    if pp == 1 or pp * virtual_stages > layers:
        return None
    even = Layout(dp=1, pp=pp, virtual_stages=virtual_stages).layers_of_stages(layers)
    ranks = [stage_rank(schedule, pp, stage) for stage in range(len(even))]
    counts = list(even)

    def loads() -> list[float]:
        total = [0.0] * pp
        for stage, count in enumerate(counts):
            total[ranks[stage]] += count + (tail if stage == len(counts) - 1 else 0.0)
        return total

    for _ in range(layers):
        now = loads()
        fullest = max(range(pp), key=lambda r: (now[r], r))
        emptiest = min(range(pp), key=lambda r: (now[r], r))
        if now[fullest] - now[emptiest] <= 1:
            break  # moving a layer would only swap them
        # Give from the fullest rank's last stage that has two; take at the emptiest rank's smallest.
        givers = [s for s, r in enumerate(ranks) if r == fullest and counts[s] > 1]
        if not givers:
            break
        counts[givers[-1]] -= 1
        counts[min((s for s, r in enumerate(ranks) if r == emptiest), key=lambda s: (counts[s], s))] += 1
    return tuple(counts) if tuple(counts) != even else None
