"""Which layout a run has on the processes that are there, and how a step's batch is cut for it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepwell.engine.engine import Engine
from deepwell.errors import ConfigError, DeepwellError, PlanError, UnsupportedError
from deepwell.planner.estimate import estimate
from deepwell.planner.executable import why_not_executable
from deepwell.planner.layout import Layout
from deepwell.planner.plan import Plan
from deepwell.planner.stack import deepwell_stack
from deepwell.train.settings import TrainSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """One step: `global_batch` sequences, `accumulation` micro-batches of `micro_batch` on each of `dp` ranks."""

    global_batch: int
    micro_batch: int
    dp: int

    @property
    def accumulation(self) -> int:
        return self.global_batch // (self.micro_batch * self.dp)

    def indices(self, dp_rank: int, micro: int) -> range:
        """Which of a step's samples are in a micro-batch of a rank. The step's own do not depend on `dp`."""
        first = (micro * self.dp + dp_rank) * self.micro_batch
        return range(first, first + self.micro_batch)


def batch_sizes(settings: TrainSettings, plan: Plan | None, dp: int, rows: int | None) -> BatchSizes:
    """Sizes from the settings, else from the plan, else from the data (`rows` of a batch that it comes in).

    Raises ConfigError where they do not divide.
    """
    micro = settings.micro_batch or (None if plan is None else plan.layout.micro_batch) or rows
    total = settings.global_batch or (None if plan is None else plan.workload.global_batch)
    if rows is not None and micro != rows:
        raise ConfigError(
            f"micro_batch is {micro} and the data comes in batches of {rows}; give batches of that size, "
            "or single samples"
        )
    if micro is None:
        micro = 1 if total is None else max(1, total // dp)
    if total is None:
        total = micro * dp
    if total % (micro * dp):
        raise ConfigError(f"global_batch {total} is no multiple of micro_batch {micro} x {dp} data-parallel ranks")
    return BatchSizes(global_batch=total, micro_batch=micro, dp=dp)


def layout_for(
    engine: Engine, world: int, elastic: bool, given: Layout | Mapping[str, Any] | None = None
) -> tuple[Layout, Plan | None, str]:
    """(the layout, the plan it is of, a note). The plan is kept; where the processes are others, it is made anew.

    `given` replaces the plan's layout: whole, or some of its fields, dp then being what is left of the processes.

    Raises ConfigError where a plan is of another number of processes and the run is not elastic, and PlanError where
    no layout of these processes is possible.
    """
    plan = engine.deepwell.plan
    if given is not None:
        if not isinstance(given, Layout):
            left = max(1, world // math.prod(given.get(name, 1) for name in ("tp", "pp", "cp")))
            given = Layout.from_dict({"dp": left, **given})
        layout = given
        if layout.gpus != world:
            raise ConfigError(f"layout {layout} is of {layout.gpus} GPUs and {world} processes run; start as many")
        return layout, None, "" if plan is None else f"layout {layout} replaces the plan's {plan.layout}"
    if plan is None:
        # Data parallelism with sharded states: what fits most models on few GPUs.
        return Layout(dp=world, sharding="zero2" if world > 1 else "ddp"), None, ""
    if plan.gpus == world:
        if reason := why_not_executable(plan.layout, plan.workload, deepwell_stack()):
            raise UnsupportedError(f"the plan {plan.layout} cannot be executed: {reason}; plan with stack='deepwell'")
        return plan.layout, plan, ""
    if not elastic:
        raise ConfigError(
            f"the plan is of {plan.gpus} GPUs ({plan.layout}) and {world} process{'es' * (world != 1)} run: start as "
            f"many (torchrun), plan for {world}, or pass elastic=True to plan anew"
        )
    found = replanned(plan, world)
    return found.layout, found, f"planned anew for {world} processes: {plan.layout} became {found.layout}"


def replanned(plan: Plan, world: int) -> Plan:
    """The plan's job on another number of GPUs of the same kind, with the same global batch.

    First with the same tensor, pipeline, context and expert parallelism and other data parallelism; where that does not
    divide or fit, whatever the planner finds. Raises PlanError with the reason.
    """
    from deepwell.planner.search.autoplan import autoplan, fewer_gpus

    old, work = plan.layout, plan.workload
    per_copy = old.tp * old.pp * old.cp
    hardware = plan.hardware
    try:
        hardware = fewer_gpus(hardware, world)
    except ConfigError:  # more nodes than were planned for
        hardware = replace(hardware, num_nodes=-(-world // hardware.gpus_per_node))
    if world % per_copy == 0 and hardware.num_gpus == world:
        dp = world // per_copy
        for micro in range(min(old.micro_batch, max(1, work.global_batch // dp)), 0, -1):
            if work.global_batch % (dp * micro) or (dp * old.cp * old.tp) % (old.ep * old.etp):
                continue
            replicate = old.dp_replicate if dp % old.dp_replicate == 0 else 1
            layout = replace(old, dp=dp, dp_replicate=replicate, micro_batch=micro)
            found = estimate(work, hardware, layout, plan.stack)
            if found.fits or hardware.kind == "cpu":
                return replace(
                    plan, hardware=hardware, layout=layout, estimate=found, machine_gpus=world, runners_up=(),
                    rejected=(),
                )  # fmt: skip
    try:
        return autoplan(
            work.ir, hardware, seq_len=work.seq_len, global_batch=work.global_batch, precision=work.precision_policy,
            goal=plan.goal if plan.goal in ("fastest", "smallest", "cheapest") else "fastest", stack=plan.stack,
            optimizer=work.optimizer, progress=False, gpus=world,
        )  # fmt: skip
    except DeepwellError as error:
        raise PlanError(f"no plan of {world} GPUs for {plan.model}: {error}") from error
