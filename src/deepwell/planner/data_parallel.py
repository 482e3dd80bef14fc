"""Weights and gradients over data-parallel ranks: what a rank holds of them, how often they travel, for how long. Pure.

    rules = state_rules(layout, stack)                     whole or sharded, gathered and reduced how often
    data_parallel_s(job, net, ranks, f, b, trained)        seconds that a step waits for

Deepwell's trainer runs on FSDP2 (switch `data_parallel: fsdp2`), where

    ddp      everything whole; gradients reduced once, in the last micro-batch
    zero1    weights gathered once a step; gradients whole until the last micro-batch, then reduced once
    zero2    weights gathered once a step; gradients reduced in every micro-batch and kept as shards
    zero3    weights gathered in every forward and again in every backward; gradients as under zero2
    with pp  a stage keeps weights and gradients whole until its last backward and reduces after it, whatever the kind:
             torch's pipeline stages are so

Copies (HSDP) agree on their shards once a step. Embedding, final norm and head are FSDP2's root group.

Other stacks keep what their names mean there: gradients under zero2 are shards that are reduced once a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from deepwell.planner.comm import Network, all_reduce_s, gather_s
from deepwell.planner.layout import Layout
from deepwell.planner.overlap import hides
from deepwell.planner.stack import Stack

if TYPE_CHECKING:
    from deepwell.planner.estimate import Job

# Share of overlapped gradient reduction and weight gathering that stays visible: the first and last buckets.
_EXPOSED = 0.25

# Share of hidden communication by which the computation beside it slows down: NCCL's kernels hold SMs and bandwidth
# (Calculon's a100_80g.json has 15% for NVLink and 2% for InfiniBand; most of what is hidden crosses the network).
_THEFT = 0.05

# One broadcast per owner of a shard, where weights come back that way and not by an all-gather (InternEvo's published
# scaling: 2.7 ms for each rank of the shard group).
_BROADCAST_S = 2.7e-3

# Stages of a rank that torch's interleaved schedules keep gathered; of more, each is gathered anew in every round.
_ACTIVE_STAGES = 3

REDUCE_BYTES = {"fp32": 4.0, "bf16": 2.0}


class Parts(NamedTuple):
    """One figure for each set of weights that has its own ranks."""

    dense: float
    expert: float
    ends: float = 0.0  # embedding, final norm and head, where they are a group of their own (FSDP2's root)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRules:
    """How weights and gradients of one rank live during a step."""

    whole_weights: bool  # all of them at once, not only the layers that run
    keeps_shards: bool  # beside whole weights stand the shards that they were gathered from
    whole_grads: bool
    gathers_each: bool  # in every micro-batch, forward and backward; else once a step
    reduces_each: bool  # in every micro-batch; else once a step
    hides_reduce: bool  # reduction may run beside the backward


def is_fsdp2(stack: Stack) -> bool:
    """Whether the stack shards as Deepwell's trainer does."""
    return stack.switch("data_parallel") == "fsdp2"


def state_rules(layout: Layout, stack: Stack) -> StateRules:
    """What a layout's sharding means on a stack."""
    kind = layout.sharding
    if not is_fsdp2(stack):
        each = kind == "zero3"
        return StateRules(
            whole_weights=not each, keeps_shards=False, whole_grads=kind in ("ddp", "zero1"), gathers_each=each,
            reduces_each=each and stack.switch("reduce_each", "on") == "on", hides_reduce=True,
        )  # fmt: skip
    is_piped = layout.pp > 1
    return StateRules(
        whole_weights=kind != "zero3" or is_piped,
        keeps_shards=_is_sharded(layout),
        whole_grads=kind in ("ddp", "zero1") or is_piped,
        gathers_each=kind == "zero3",
        reduces_each=kind in ("zero2", "zero3") and not is_piped,
        hides_reduce=not is_piped,
    )


def _is_sharded(layout: Layout) -> bool:
    """Whether FSDP2 is in the model: DDP proper is plain data parallelism alone, elsewhere `ddp` is shards of one."""
    if layout.pp > 1:
        return layout.dp * layout.cp > 1
    return layout.tp * layout.cp * layout.ep > 1 or (layout.dp > 1 and layout.sharding != "ddp")


def splits_ends(layout: Layout, stack: Stack) -> bool:
    """Whether embedding, final norm and head are whole weights with their tokens split over tp, not tensor-parallel."""
    return layout.tp > 1 and is_fsdp2(stack)


def shards(layout: Layout, stack: Stack) -> Parts:
    """Ranks over which each set of weights (its optimizer state, where weights are whole) is spread."""
    copies = layout.dp_replicate
    dense = 1 if layout.sharding == "ddp" else layout.dp * layout.cp // copies
    if is_fsdp2(stack):
        # Experts that are spread are groups of their own, without copies; the ends' tokens are split over tp as well.
        expert = layout.expert_dp if layout.ep > 1 else dense
        return Parts(dense, expert, 1 if layout.sharding == "ddp" else dense * layout.tp)
    expert = layout.expert_dp // copies if layout.expert_dp % copies == 0 else layout.expert_dp
    return Parts(dense, 1 if layout.sharding == "ddp" else max(1, expert), dense)


# ---- seconds of a step ----


def data_parallel_s(job: Job, net: Network, params: Parts, f: float, b: float, trained: float) -> float:
    """Seconds of gradient reduction and weight gathering that the step waits for, for a rank with these weights.

    `f` and `b` are the seconds of one micro-batch that they may run beside, `trained` the share of the weights that has
    gradients.
    """
    layout, stack, m = job.layout, job.stack, job.micro_batches
    rules = state_rules(layout, stack)
    hides_grad = hides(layout, stack, "grad_reduce") and rules.hides_reduce
    hides_param = hides(layout, stack, "param_gather")
    grad = trained * REDUCE_BYTES[stack.switch("reduce_dtype", "fp32")]
    is_low = any(g.is_low for block in job.blocks for g in block.gemms)
    gathers_fp8 = is_low and "on" in (stack.switch("fp8_params"), stack.switch("fp8_all_gather"))
    # Where only an optimizer's shard comes back, frozen weights stay where they are.
    moved = 1.0 if rules.gathers_each or is_fsdp2(stack) else trained
    weight = (1.0 if gathers_fp8 else 2.0) * moved
    if is_fsdp2(stack):
        return _fsdp2_s(job, net, params, grad, weight, f, b)
    reduce, gather = _classic_s(job, net, params, grad, weight)
    if rules.gathers_each:
        forward = _exposed(gather, f, hides_param)
        each = reduce if rules.reduces_each else reduce / m
        return m * (forward + _exposed(gather + each, b, hides_grad))
    return _exposed(reduce, b, hides_grad) + _exposed(gather, f, hides_param)


def _classic_s(job: Job, net: Network, params: Parts, grad: float, weight: float) -> tuple[float, float]:
    """One reduction and one gathering of everything, as stacks do whose ends are sharded like the layers."""
    layout, stack = job.layout, job.stack
    dense, expert = params.dense, params.expert
    group, stride = layout.dp * layout.cp, layout.tp
    shard = group // layout.dp_replicate
    e_group, e_stride = layout.expert_dp, layout.ep * layout.etp
    if layout.sharding == "ddp":
        return all_reduce_s(net, grad * dense, group, stride) + all_reduce_s(net, grad * expert, e_group, e_stride), 0.0
    inner = gather_s(net, grad * dense, shard, stride) + gather_s(net, grad * expert, e_group, e_stride)
    outer = all_reduce_s(net, grad * dense / shard, layout.dp_replicate, stride * shard)
    gather = gather_s(net, weight * dense, shard, stride) + gather_s(net, weight * expert, e_group, e_stride)
    if stack.switch("weights_return", "all-gather") == "broadcast":
        gather += _BROADCAST_S * shard
    return inner + outer, gather


class _Group(NamedTuple):
    params: float
    shard: int
    stride: int
    copies: int  # of the shards: HSDP, or all ranks under DDP


def _groups(job: Job, params: Parts) -> Iterator[_Group]:
    """The layers, the experts and the ends with the ranks that they travel among."""
    layout = job.layout
    over = shards(layout, job.stack)
    ranks = layout.dp * layout.cp
    yield _Group(params.dense, int(over.dense), layout.tp, ranks // int(over.dense))
    yield _Group(params.expert, int(over.expert), layout.ep * layout.etp, layout.expert_dp // int(over.expert))
    yield _Group(params.ends, int(over.ends), 1, ranks * layout.tp // int(over.ends))


def _fsdp2_s(job: Job, net: Network, params: Parts, grad: float, weight: float, f: float, b: float) -> float:
    layout, stack, m = job.layout, job.stack, job.micro_batches
    rules = state_rules(layout, stack)
    groups = list(_groups(job, params))
    scatter = sum(gather_s(net, grad * g.params, g.shard, g.stride) for g in groups)
    # Copies agree once a step: until then each adds up its own shards.
    agree = sum(all_reduce_s(net, grad * g.params / g.shard, g.copies, g.stride * g.shard) for g in groups)
    *inner, ends = (gather_s(net, weight * g.params, g.shard, g.stride) for g in groups)
    gather = sum(inner)
    hides_grad = hides(layout, stack, "grad_reduce") and rules.hides_reduce
    hides_param = hides(layout, stack, "param_gather")
    often, again = (m - 1 if rules.reduces_each else 0), (m if rules.gathers_each else 1)
    # Nothing runs before the embedding, so the ends' weights are waited for.
    seconds = again * ends
    if rules.gathers_each and rules.hides_reduce:
        backward = [gather + scatter] * often + [gather + scatter + agree]
        seconds += sum(_exposed(one, b, hides_grad) for one in backward)
    else:
        seconds += often * _exposed(scatter, b, hides_grad) + _exposed(scatter + agree, b, hides_grad)
        seconds += m * _exposed(gather, b, hides_param) if rules.gathers_each else 0.0
    if layout.pp > 1 and layout.virtual_stages > _ACTIVE_STAGES and not rules.gathers_each:
        rounds, each = m / layout.pp, layout.pp  # micro-batches of a round
        return seconds + rounds * sum(_exposed(gather, each * window, hides_param) for window in (f, b))
    return seconds + again * _exposed(gather, f, hides_param)


def _exposed(comm: float, window: float, is_hidden: bool) -> float:
    """What is left visible of communication beside `window` seconds of computation."""
    if not is_hidden:
        return comm
    hidden = min((1 - _EXPOSED) * comm, window)
    return comm - hidden + _THEFT * hidden
