"""One training step's time and memory on one layout: the planner's answer to "how fast, and does it fit?". Pure.

    estimate(workload, hw, layout, stack) -> Estimate

    step = (pipeline of m micro-batches + exposed data parallelism + optimizer + overhead) * (1 + jitter log2 nodes)

Blocks are priced once each (`cost.py`), stages are sums of blocks, and the schedule's event simulation puts the stages
together. Equations and constants stand in docs/planner.md.
"""

import functools
import math

from deepwell.errors import ConfigError
from deepwell.hardware.model import Hardware
from deepwell.planner.comm import Network
from deepwell.planner.cost import BlockTime, optimizer_s
from deepwell.planner.data_parallel import data_parallel_s
from deepwell.planner.efficiency import DeviceSpeed, GpuConstants, device
from deepwell.planner.estimate_values import BANDS, GIB, PARTS, Estimate, StageMemory
from deepwell.planner.job import StepJob, read_job
from deepwell.planner.keeps import Keeps
from deepwell.planner.layout import Layout
from deepwell.planner.memory import saved_bytes
from deepwell.planner.overlap import hides
from deepwell.planner.rank_memory import rank_memory, rank_params, sharded, trained_share
from deepwell.planner.schedule.actions import why_not
from deepwell.planner.schedule.simulate import simulate as simulate_schedule
from deepwell.planner.schedule.stages import add_parts, message_s, pair_savings_s, stage_times
from deepwell.planner.sharding import shards
from deepwell.planner.stack import Stack, deepwell_stack
from deepwell.planner.workload import Workload

__all__ = ["GIB", "PARTS", "Estimate", "StageMemory", "estimate"]

# Once per step: the next batch, the gradient's norm, the host side of the optimizer, logging. Grows with the ranks that
# agree on something.
STEP_S, STEP_S_PER_DOUBLING = 0.002, 0.008

# Pinned copies reach about 85% of PCIe; generation 4 with 16 lanes where the machine does not say.
_PCIE_GB_PER_S = 31.5
_PCIE_SHARE = 0.85


def estimate(
    workload: Workload,
    hw: Hardware,
    layout: Layout,
    stack: Stack | None = None,
    *,
    simulate: bool = True,
    constants: GpuConstants | None = None,
) -> Estimate:
    """Predict one step. Raises ConfigError where the layout cannot run this workload on this machine.

    `simulate=False` replaces the schedule's event simulation by its closed form; `constants` overrides the GPU's own.
    """
    stack = stack or deepwell_stack()
    if layout.gpus != hw.num_gpus:
        raise ConfigError(f"layout needs {layout.gpus} GPUs ({layout}); {hw.name} has {hw.num_gpus}")
    keeps = Keeps.of_stack(stack.name)
    job = read_job(workload, layout, keeps.applied_to(stack))
    dev = device(hw.gpus[0], constants)
    net = Network.of(hw, dev.constants, stack.constants.comm_scale, stack.constants.network_scale)
    seconds = step_seconds(job, dev, net, hw, simulate=simulate)
    step = sum(seconds.values())
    tokens = workload.tokens_per_step
    flops = workload.flops_per_sequence * workload.global_batch
    bf16 = dev.rate("bf16") / dev.constants.gemm_bf16
    positions = workload.ir.max_positions
    notes = [*stack.notes]
    if positions and workload.seq_len > positions:
        notes.append(f"seq_len {workload.seq_len:,} is over the model's {positions:,} positions")
    found = Estimate(
        step_s=step,
        breakdown=tuple((part, seconds.get(part, 0.0)) for part in PARTS),
        tokens_per_s_per_gpu=tokens / step / layout.gpus,
        mfu_bf16=flops / layout.gpus / step / bf16,
        mfu_weighted=_ideal_s(job, hw) / step,
        model_flops_per_token=flops / tokens,
        memory=tuple(rank_memory(job, rank, keeps) for rank in range(layout.pp)),
        limit_gib=(hw.memory_bytes or 0) / GIB,
        tier=dev.tier,
        error_band=BANDS[dev.tier],
        notes=tuple(notes),
    )
    return found if stack.measured is None else found.corrected(stack.measured)


def _ideal_s(job: StepJob, hw: Hardware) -> float:
    """Seconds of the model's own flops at the dense peak of each one's format, for MFU by formats."""
    gpu, total = hw.gpus[0], 0.0
    bf16 = gpu.peak_tflops("bf16") or gpu.peak_tflops("fp32")
    assert bf16 is not None  # device() has refused a GPU without one

    @functools.cache
    def peak(fmt: str) -> float:
        own = gpu.peak_tflops(fmt)
        return (own or bf16).value * 1e12

    for index, block in enumerate(job.blocks):
        layers = sum(stage.counts[index] for stage in job.stages)
        gemms = sum(g.flops * sum(1 / peak(f) for f in g.formats) for g in block.gemms)
        rest = 3 * (sum(a.flops for a in block.attention) + block.matmul_flops) / peak("bf16")
        total += layers * (gemms + rest)
    for block in (job.stem, job.tail):
        total += sum(g.flops * sum(1 / peak(f) for f in g.formats) for g in block.gemms)
    return total * job.micro_batches / job.layout.pp


# ---- time ----


def step_seconds(
    job: StepJob, dev: DeviceSpeed, net: Network, hw: Hardware, *, simulate: bool = True
) -> dict[str, float]:
    """Seconds of the step by part, as the busiest pipeline rank spends them."""
    layout, m = job.layout, job.micro_batches
    stages = stage_times(job, dev, net)
    ranks = [job.rank_stages(rank) for rank in range(layout.pp)]
    work = [sum(stages[i].f + stages[i].b for i in mine) for mine in ranks]
    busiest = max(range(layout.pp), key=lambda rank: work[rank])
    seconds: dict[str, float] = {}
    for index in ranks[busiest]:
        add_parts(seconds, stages[index].forward, m)
        add_parts(seconds, stages[index].backward, m)
    if layout.pp > 1:
        span, messages, hidden = _pipeline(job, net, stages, work, busiest, simulate=simulate)
        seconds["pp"] = messages
        if hidden:
            seconds["ep"] -= hidden
        seconds["bubble"] = max(0.0, span - (m * work[busiest] - hidden) - messages)
    f = sum(stages[i].f for i in ranks[busiest])
    b = sum(stages[i].b for i in ranks[busiest])
    trained = trained_share(job)
    fullest = max((rank_params(job, mine) for mine in ranks), key=sum)
    seconds["dp"] = data_parallel_s(job, net, fullest, f, b, trained)
    mine = sharded(rank_params(job, ranks[busiest]), shards(layout, job.stack))
    state = job.per_param.master + job.per_param.moments
    seconds["optimizer"] = trained * optimizer_s(dev, mine, state)
    # State in host memory crosses PCIe both ways in every step; nothing is left to hide it behind.
    seconds["optimizer"] += 2 * layout.offload.optimizer * (state * trained * mine) / _pcie(hw)
    seconds["host"] = (
        seconds.get("host", 0.0)
        + STEP_S
        + STEP_S_PER_DOUBLING * math.log2(layout.gpus)
        + _activation_offload_s(job, hw, ranks[busiest], f, b)
    )
    nodes = max(1.0, layout.gpus / hw.gpus_per_node)
    seconds["straggler"] = dev.constants.jitter * math.log2(nodes) * sum(seconds.values())
    return seconds


def _pipeline(
    job: StepJob, net: Network, stages: list[BlockTime], work: list[float], busiest: int, *, simulate: bool
) -> tuple[float, float, float]:
    """Seconds of the whole pipeline, those that messages add to the busiest rank, and those that its pairs hide."""
    layout, m = job.layout, job.micro_batches
    message, savings = message_s(job, net), pair_savings_s(job, stages)
    # Sends run beside computation, receives are posted early: a quarter of the messages is waited for.
    waits = 0.0 if hides(layout, job.stack, "pp") else 0.5 * m * layout.virtual_stages * message
    if simulate and not why_not(layout.runs_as, layout.pp, m, layout.virtual_stages):
        f, b = [stage.f for stage in stages], [stage.b for stage in stages]
        line = simulate_schedule(
            layout.runs_as, layout.pp, m, layout.virtual_stages, f=f, b=b, w=[stage.w for stage in stages],
            p2p=message, pair_saving=savings,
        )  # fmt: skip
        hidden = max(0.0, m * work[busiest] - line.busy[busiest]) if savings[busiest] else 0.0
        return max(line.makespan, m * work[busiest] - hidden + waits), waits, hidden
    fill = sum(sorted(work)[:-1]) / layout.virtual_stages + 2 * (layout.pp - 1) * message
    if layout.schedule in ("zero_bubble", "zbv"):
        fill *= 0.25
    elif layout.schedule == "dualpipev":
        fill *= 0.5
    hidden = 2 * max(0, m - layout.pp) * savings[busiest]  # warm-up and cool-down run unpaired
    return m * max(work) - hidden + waits + fill, waits, hidden


def _pcie(hw: Hardware) -> float:
    return (hw.fabric.pcie_gb_per_s or _PCIE_GB_PER_S) * 1e9 * _PCIE_SHARE


def _activation_offload_s(job: StepJob, hw: Hardware, stages: tuple[int, ...], f: float, b: float) -> float:
    """Activations go to the host beside a micro-batch's forward: what does not fit beside it. They come back beside its
    backward, or, where the stack fetches a layer's when it needs them, before it."""
    share = job.layout.offload.activations
    if not share:
        return 0.0
    kept = 0.0
    for index, block in enumerate(job.blocks):
        layers = sum(job.stages[s].counts[index] for s in stages)
        kept += layers * sum(saved_bytes(block, job.layout.recompute, job.kernel, job.dropout).values())
    copy = share * kept / _pcie(hw)
    beside = b if job.stack.switch("fetches_ahead", "on") == "on" else 0.0
    return job.micro_batches * (max(0.0, copy - f) + max(0.0, copy - beside))
