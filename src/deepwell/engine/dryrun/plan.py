"""The plan behind a dry run: the engine's own, or one made of what the engine will do on the device it is on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deepwell.engine.engine import Engine
from deepwell.errors import ConfigError
from deepwell.graph.ir import IR
from deepwell.graph.ops import DTYPE_BYTES
from deepwell.hardware.host import cpu_device, read_host
from deepwell.hardware.model import Hardware
from deepwell.hardware.probe import probe
from deepwell.planner.calibrate import measured_constants
from deepwell.planner.catalog import kernel_choices
from deepwell.planner.estimate import STEP_S, estimate
from deepwell.planner.layout import Layout, Recompute
from deepwell.planner.plan import Plan
from deepwell.planner.plan_values import Searched
from deepwell.planner.stack import Stack, deepwell_stack
from deepwell.planner.step_memory import Keeps, memory_timeline
from deepwell.planner.workload import Workload

# The planner's optimizers as options of adamw_dw. Parameters in fp32 need no master weights: there it is adamw_fp32.
OPTIMIZERS: dict[str, dict[str, str | None]] = {
    "adamw": {"master_weights": "fp32", "moments": "fp32"},
    "adamw_bf16_moments": {"master_weights": "fp32", "moments": "bf16"},
    "adamw_8bit": {"master_weights": "fp32", "moments": "fp8"},
    "adamw_pure_bf16": {"master_weights": None, "moments": "bf16"},
    "adamw_fp32": {"master_weights": None, "moments": "fp32"},
}

# Tokens of a sequence where neither a plan nor a batch says: short enough for any device, long enough to be typical.
DEFAULT_SEQ_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a trial will take, said before it runs."""

    plan: Plan
    step_s: float
    peak_bytes: float
    tier: str


def given_plan(workload: Workload, hw: Hardware, layout: Layout, stack: Stack, goal: str = "given") -> Plan:
    """A plan of one layout that nobody searched for."""
    return Plan(
        model=workload.ir.name,
        goal=goal,
        machine=hw.name,
        machine_gpus=hw.num_gpus,
        constraints="none",
        workload=workload,
        hardware=hw,
        stack=stack,
        layout=layout,
        estimate=estimate(workload, hw, layout, stack),
        kernels=kernel_choices(workload, layout, hw.gpus[0]),
        runners_up=(),
        rejected=(),
        searched=Searched(1, 1),
        limit_gib=None,
    )


def local_hardware(device: torch.device) -> Hardware:
    """The one device that an engine runs on, as a machine of one."""
    here = probe()
    if device.type == "cpu":
        gpu = here.gpus[0] if here.kind == "cpu" else cpu_device(read_host())
        return Hardware(name=gpu.name, gpus=(gpu,), host=here.host)
    index = torch.cuda.current_device() if device.index is None else device.index
    if here.kind != "cuda" or index >= len(here.gpus):
        raise ConfigError(f"the engine is on {device}, and this machine shows {len(here.gpus)} {here.kind} devices")
    gpu = here.gpus[index]
    return replace(here, name=gpu.name, gpus=(gpu,), num_nodes=1)


def engine_device(engine: Engine) -> torch.device:
    """Where the engine's parameters lie."""
    parameter = next(engine.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def optimizer_of(engine: Engine, plan: Plan | None = None) -> str:
    """What the trial's adamw_dw keeps, in the planner's words: as planned, else moments in the parameters' dtype."""
    if engine.deepwell.ir.dtype != "bf16":
        return "adamw_fp32"
    planned = "" if plan is None else plan.workload.optimizer
    return planned if planned in OPTIMIZERS and planned != "adamw_fp32" else "adamw_pure_bf16"


def engine_keeps(engine: Engine) -> Keeps:
    """What this engine holds between forward and backward."""
    options = engine.deepwell.options
    return Keeps(
        remakes=options.recompute if options.use_inductor else "nothing",
        fuses_head=options.fuse_head and not options.is_as_written,
        caches_weights=options.cache_weights,
        element_bytes=float(DTYPE_BYTES[engine.deepwell.ir.dtype]),
    )


def engine_plan(engine: Engine, batch: int, seq_len: int, micro_batches: int = 1, optimizer: str | None = None) -> Plan:
    """The step that the engine takes by itself: one device, `micro_batches` batches of this shape."""
    layers = engine.deepwell.recomputed
    recompute = Recompute()
    if layers is not None:
        count = len(layers.paths)
        recompute = (
            Recompute(kind="full") if count == engine.deepwell.ir.num_layers else Recompute(kind="block", layers=count)
        )
    workload = Workload(
        ir=replace(engine.deepwell.ir, module=None, graph=None),  # a plan is a value: it keeps no live module
        seq_len=seq_len, global_batch=batch * micro_batches,
        policy=engine.deepwell.policy, optimizer=optimizer or optimizer_of(engine),
    )  # fmt: skip
    layout = Layout(
        dp=1,
        micro_batch=batch,
        sharding="ddp",
        recompute=recompute,
        cuda_graphs=engine.deepwell.options.cuda_graphs is not False,
    )
    return given_plan(workload, local_hardware(engine_device(engine)), layout, deepwell_stack())


def predict(
    engine: Engine, batch: int, seq_len: int, micro_batches: int = 1, optimizer: str | None = None
) -> Prediction:
    """Time and memory of a trial: a step without data loading, logging and the gradient's norm."""
    plan = engine_plan(engine, batch, seq_len, micro_batches, optimizer)
    constants = measured_constants(plan.hardware.gpus[0])
    found = plan.estimate
    if constants is not None:
        found = estimate(plan.workload, plan.hardware, plan.layout, plan.stack, constants=constants)
    (rank,) = memory_timeline(plan, engine_keeps(engine))
    return Prediction(
        plan=plan,
        step_s=found.step_s - STEP_S,
        peak_bytes=rank.peak.allocated,
        tier=found.tier if constants is None else "measured",
    )


def shape_of(plan: Plan | None, ir: IR) -> tuple[int, int]:
    """Batch and length of one micro-batch: the plan's, or a small one that the model's positions hold."""
    if plan is not None:
        return plan.layout.micro_batch, plan.workload.seq_len
    return 1, min(DEFAULT_SEQ_LEN, ir.max_positions or DEFAULT_SEQ_LEN)
