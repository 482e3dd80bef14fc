"""autoplan: the best layout for a model on a machine, with what was not chosen and why. Pure.

Goals: `fastest` is the shortest step; `smallest` the fewest GPUs of the machine that hold the job, then the fastest on
those; `cheapest` the fewest GPU-seconds per step over all machine sizes that hold it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from deepwell.errors import ConfigError
from deepwell.graph.ir import IR
from deepwell.hardware.model import Hardware
from deepwell.planner.catalog import kernel_choices
from deepwell.planner.executable import is_executed_here, why_not_offload
from deepwell.planner.layout import Layout, Offload, Overlap
from deepwell.planner.measured_steps import read_ratio
from deepwell.planner.overlap import OVERLAPS
from deepwell.planner.overlap import WORDS as HIDDEN
from deepwell.planner.plan import Plan
from deepwell.planner.plan_values import Searched
from deepwell.planner.search.constraints import OFFLOADS, Constraints, read_constraints
from deepwell.planner.search.explore import Explorer, Found, Progress, Scored, planning_bar
from deepwell.planner.search.nofit import no_fit
from deepwell.planner.search.precision_choice import choose_precision, is_choice
from deepwell.planner.search.rejected import alternative, rejected_families
from deepwell.planner.search.request import (
    arch_notes,
    moe_settings,
    read_machine,
    read_model,
    read_policy,
    read_stack,
)
from deepwell.planner.search.space import Space, divisors, make_space
from deepwell.planner.stack import Stack
from deepwell.planner.workload import Workload
from deepwell.precision.policy import PrecisionPolicy

__all__ = ["Plan", "autoplan", "fewer_gpus"]

GOALS = ("fastest", "smallest", "cheapest")


def autoplan(
    ir: IR | str | Mapping[str, Any],
    hw: Hardware | str | None = None,
    *,
    seq_len: int,
    global_batch: int,
    arch: str | None = None,
    moe: Mapping[str, Any] | None = None,
    precision: str | PrecisionPolicy | Sequence[str | PrecisionPolicy] | None = None,
    goal: str = "fastest",
    stack: Stack | str | None = None,
    optimizer: str = "adamw",
    progress: bool | None = None,
    **constraints: Any,
) -> Plan:
    """Plan one training job.

    `ir` is a captured model, a published one's name ("llama3-70b") or a Hugging Face config; `hw` a machine or its name
    (None: this one). `arch` is checked against it and noted; `moe` may set `capacity_factor` and `imbalance` and is
    checked for `experts` and `top_k`. `precision` is a recipe's name or a policy; "auto" or a list leaves the choice to
    the planner, which keeps single layers in bf16 where that is faster. Constraints narrow the search: tp, pp, cp, ep,
    etp, dp, dp_replicate, micro_batch, virtual_stages, gpus (a count or a list), sharding, schedule, recompute (a name
    or a list), sequence_parallel, max_memory (GiB per GPU), offload, overlap, stage_layers, kernels, cuda_graphs,
    context_parallel_kind. Raises ConfigError where the request is wrong and PlanError, with the nearest miss, where
    nothing fits.
    """
    if goal not in GOALS:
        raise ConfigError(f"goal: got {goal!r}; accepted: {', '.join(GOALS)}")
    model = read_model(ir)
    machine = read_machine(hw)
    if is_choice(precision):

        def plan_for(policy: str | PrecisionPolicy) -> Plan:
            return autoplan(
                model, machine, seq_len=seq_len, global_batch=global_batch, arch=arch, moe=moe, precision=policy,
                goal=goal, stack=stack, optimizer=optimizer, progress=progress, **constraints,
            )  # fmt: skip

        return choose_precision(plan_for, precision, machine, goal)
    notes: list[str] = []
    policy, policy_note = read_policy(cast(str | PrecisionPolicy | None, precision), machine)
    notes += [policy_note] if policy_note else []
    notes += arch_notes(arch, machine)
    capacity, moe_notes = moe_settings(model, moe)
    notes += moe_notes
    workload = Workload(
        ir=model, seq_len=seq_len, global_batch=global_batch, policy=policy, optimizer=optimizer, **capacity
    )
    chosen_stack = replace(read_stack(stack), measured=None)  # another plan's, if any; this one's is found below
    limits = read_constraints(constraints)
    with planning_bar(progress) as report:
        space, found, best = _search(workload, machine, chosen_stack, limits, goal, report)
    return _plan(space, found, best, machine, goal, notes, limits)


# ---- machine sizes ----


def fewer_gpus(hw: Hardware, count: int) -> Hardware:
    """The first `count` GPUs of a machine as a machine: whole nodes, or part of one node."""
    if count == hw.num_gpus:
        return hw
    nodes, rest = divmod(count, hw.gpus_per_node)
    if count > hw.num_gpus or (nodes and rest):
        raise ConfigError(
            f"gpus: got {count}; {hw.name} has {hw.num_gpus} in nodes of {hw.gpus_per_node}: whole nodes or part of one"
        )
    gpus = hw.gpus if nodes else hw.gpus[:count]
    return replace(hw, name=f"{count} of {hw.name}", num_nodes=max(1, nodes), gpus=gpus)


def _sizes(hw: Hardware, goal: str, limits: Constraints) -> list[int]:
    """Numbers of GPUs to plan for, the whole machine first."""
    named = limits.allowed("gpus")
    if named is not None:
        return list(named)
    whole = hw.num_gpus
    if goal == "fastest":
        # A rack of 72 has factors that few models and batches have; 64 of them may be faster than all.
        power = 1 << (whole.bit_length() - 1)
        can_halve = power >= hw.gpus_per_node and power % hw.gpus_per_node == 0
        return [whole] if power == whole or not can_halve else [whole, power]
    nodes = [d * hw.gpus_per_node for d in divisors(hw.num_nodes)]
    return sorted({*nodes, *divisors(hw.gpus_per_node)}, reverse=True)


def _search(
    workload: Workload, hw: Hardware, stack: Stack, limits: Constraints, goal: str, progress: Progress
) -> tuple[Space, Found, Scored]:
    """The best over the machine sizes that the goal allows."""
    sizes = _sizes(hw, goal, limits)
    if goal != "fastest":
        sizes = sorted(sizes)
    best: tuple[tuple[Any, ...], Space, Found, Scored] | None = None
    tried: list[tuple[Space, Found]] = []
    for count in sizes:
        space = make_space(workload, fewer_gpus(hw, count), stack, limits)
        # What costs more GPU-seconds than a smaller machine is of no use to the cheapest.
        enough = best[0][0] / count if best is not None and goal == "cheapest" else float("inf")
        explorer = Explorer(space, progress, enough)
        if count != max(sizes) and goal != "fastest" and explorer.first_fit() is None:
            continue
        found = explorer.run()
        tried.append((space, found))
        if found.ranked:
            top = found.ranked[0]
            cost = count * top.estimate.step_s if goal == "cheapest" else top.estimate.step_s
            if best is None or (cost, count) < best[0]:
                best = ((cost, count), space, found, top)
            if goal == "smallest":
                break
    if best is not None:
        return best[1:]
    if limits.offload is None and any(found.misses for _, found in tried):
        # Nothing fits in HBM: the optimizer's state or the activations may live in host memory, and last of all both.
        for names in (("optimizer", "activations"), ("both",)):
            ways = []
            for name in names:
                if not (is_executed_here(stack) and why_not_offload(OFFLOADS[name])):
                    space = make_space(workload, fewer_gpus(hw, max(sizes)), stack, replace(limits, offload=name))
                    ways.append((space, Explorer(space, progress).run()))
            held = [(found.ranked[0].key, i) for i, (_, found) in enumerate(ways) if found.ranked]
            if held:
                space, found = ways[min(held)[1]]
                return space, found, found.ranked[0]
    raise no_fit(*max(tried, key=lambda one: one[0].hw.num_gpus))


# ---- the plan ----


def _plan(
    space: Space, found: Found, best: Scored, machine: Hardware, goal: str, notes: list[str], limits: Constraints
) -> Plan:
    workload, layout = space.workload, best.layout
    notes += _layout_notes(layout, machine, goal, limits)
    others = [s for s in found.ranked if s.layout != layout]
    stack = space.stack
    if space.is_executed_here:
        # What steps on this GPU really took, as one factor: it changes no ranks.
        ratio, note = read_ratio(space.hw.gpus[0], workload, layout)
        stack = replace(stack, measured=ratio)
        notes += [note] if note else []
    rejected = rejected_families(space, found, best)
    best = corrected(best, stack)
    return Plan(
        model=workload.ir.name,
        goal=goal,
        machine=machine.name,
        machine_gpus=machine.num_gpus,
        constraints=space.constraints.describe(),
        workload=workload,
        hardware=space.hw,
        stack=stack,
        layout=layout,
        estimate=best.estimate,
        kernels=kernel_choices(workload, layout, space.hw.gpus[0], limits.kernels),
        runners_up=tuple(alternative(corrected(s, stack), best) for s in others[:12]),
        rejected=rejected,
        searched=Searched(found.num_families, found.num_layouts),
        limit_gib=space.limit_gib,
        warnings=tuple(_warnings(space, best)),
        notes=tuple(notes),
        limits=space.constraints,
    )


def corrected(scored: Scored, stack: Stack) -> Scored:
    """The same with its seconds times what was measured."""
    if stack.measured is None:
        return scored
    return replace(scored, estimate=scored.estimate.corrected(stack.measured))


def _layout_notes(layout: Layout, machine: Hardware, goal: str, limits: Constraints) -> Iterator[str]:
    if layout.gpus < machine.num_gpus:
        why = {
            "fastest": "the whole has factors that the batch or the model lacks, and fewer are faster",
            "smallest": "they are enough",
            "cheapest": "more would cost more GPU-seconds per step",
        }[goal]
        if limits.allowed("gpus") is not None and goal == "fastest":
            why = "gpus= asks for it"
        yield f"{layout.gpus} of {machine.num_gpus} GPUs are used: {why}"
    if layout.offload != Offload():
        shares = (("the optimizer's state", layout.offload.optimizer), ("the activations", layout.offload.activations))
        what = " and ".join(word for word, share in shares if share)
        yield f"{what} in host memory" + ("" if limits.offload is not None else ": nothing fits without")
    by_search = [name for name in OVERLAPS if getattr(layout.overlap, name) is not None
                 and getattr(limits.overlap or Overlap(), name) is None]  # fmt: skip
    if by_search:
        what = " and ".join(HIDDEN[name] for name in by_search)
        yield f"not beside computation: {what}; hiding would cost more than it saves"
    asked = [name for name in ("schedule", "virtual_stages") if limits.allowed(name) is not None]
    if asked and layout.pp == 1:
        yield f"{' and '.join(asked)} had nothing to decide: one pipeline stage is best; pp= asks for more"


def _warnings(space: Space, best: Scored) -> Iterator[str]:
    workload = space.workload
    positions = workload.ir.max_positions
    if positions and workload.seq_len > positions:
        yield f"seq_len {workload.seq_len:,} is over the model's {positions:,} positions: extend them before training"
    formats = dict.fromkeys(f for v in workload.variants() for _, each in v.formats for f in each)
    for name in formats:
        reason = "" if name in ("bf16", "fp16", "fp32") else space.hw.gpus[0].why_not(name)
        if reason:
            yield f"{name} is not native to {space.hw.gpus[0].name} ({reason}): it runs by emulation, to try accuracy"
    headroom = -best.over_gib
    if headroom < 0.03 * best.estimate.limit_gib:
        yield f"only {headroom:.1f} GiB are left on the fullest rank; max_memory= asks for more room"
