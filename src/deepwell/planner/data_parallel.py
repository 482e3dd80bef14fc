"""Seconds that a step waits for gradient reduction and weight gathering over data-parallel ranks. Pure."""

from deepwell.planner.comm import Network, all_reduce_s, gather_s
from deepwell.planner.job import StepJob
from deepwell.planner.overlap import hides
from deepwell.planner.sharding import REDUCE_BYTES, Parts, is_fsdp2, shards, state_rules

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


def data_parallel_s(job: StepJob, net: Network, params: Parts, f: float, b: float, trained: float) -> float:
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


def _classic_s(job: StepJob, net: Network, params: Parts, grad: float, weight: float) -> tuple[float, float]:
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


def _fsdp2_s(job: StepJob, net: Network, params: Parts, grad: float, weight: float, f: float, b: float) -> float:
    layout, stack, m = job.layout, job.stack, job.micro_batches
    rules = state_rules(layout, stack)
    over, ranks = shards(layout, stack), layout.dp * layout.cp
    # The layers, the experts and the ends: parameters, ranks of a shard, their stride, and copies of the shards (HSDP,
    # or all ranks under DDP).
    groups = [
        (params.dense, int(over.dense), layout.tp, ranks // int(over.dense)),
        (params.expert, int(over.expert), layout.ep * layout.etp, layout.expert_dp // int(over.expert)),
        (params.ends, int(over.ends), 1, ranks * layout.tp // int(over.ends)),
    ]
    scatter = sum(gather_s(net, grad * count, shard, stride) for count, shard, stride, _ in groups)
    # Copies agree once a step: until then each adds up its own shards.
    agree = sum(
        all_reduce_s(net, grad * count / shard, copies, stride * shard) for count, shard, stride, copies in groups
    )
    *inner, ends = (gather_s(net, weight * count, shard, stride) for count, shard, stride, _ in groups)
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
