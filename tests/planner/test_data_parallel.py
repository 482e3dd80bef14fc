"""Weights and gradients of the deepwell stack are whole, sharded, gathered and reduced as its trainer has them."""

from dataclasses import replace
from typing import Any

import pytest

from deepwell.graph.configs import published_config
from deepwell.graph.ir import IR
from deepwell.hardware.names import named_hardware
from deepwell.planner.comm import Network, all_reduce_s, gather_s
from deepwell.planner.data_parallel import data_parallel_s
from deepwell.planner.efficiency import device
from deepwell.planner.estimate import estimate
from deepwell.planner.job import StepJob, read_job
from deepwell.planner.keeps import Keeps
from deepwell.planner.layout import SHARDINGS, Layout, Overlap
from deepwell.planner.rank_memory import rank_memory, rank_params
from deepwell.planner.schedule.stages import stage_times
from deepwell.planner.sharding import Parts, shards, state_rules
from deepwell.planner.stack import get_stack
from deepwell.planner.workload import Workload

DEEPWELL = get_stack("deepwell")
HW = named_hardware("2x8xH100")
LLAMA = IR.from_config(published_config("llama3-8b"), dtype="bf16")
PARAMS, ENDS, LAYER = 8_030_261_248, 2 * 128256 * 4096 + 4096, 218_112_000
OPEN = Overlap(grad_reduce=False, param_gather=False)  # everything is waited for: seconds can be counted


def job(layout: Layout, batch: int = 64, stack: Any = DEEPWELL) -> StepJob:
    return read_job(Workload(ir=LLAMA, seq_len=4096, global_batch=batch), layout, stack)


def net() -> Network:
    constants = DEEPWELL.constants
    return Network.of(HW, device(HW.gpus[0]).constants, constants.comm_scale, constants.network_scale)


def waited(layout: Layout, batch: int = 64) -> float:
    here = job(replace(layout, overlap=OPEN), batch)
    params = rank_params(here, here.rank_stages(0))
    return data_parallel_s(here, net(), params, 1.0, 2.0, 1.0)


# ---- seconds ----


def test_each_sharding_travels_as_often_as_it_is_executed() -> None:
    # 16 ranks, 4 micro-batches, bf16 weights and gradients; layers in one group, embedding and head in the root's.
    layers, ends = 2.0 * (PARAMS - ENDS), 2.0 * ENDS
    once = gather_s(net(), layers, 16) + gather_s(net(), ends, 16)
    found = {kind: waited(Layout(dp=16, sharding=kind)) for kind in SHARDINGS}
    assert found["ddp"] == pytest.approx(all_reduce_s(net(), layers, 16) + all_reduce_s(net(), ends, 16))
    assert found["zero1"] == pytest.approx(2 * once)  # gathered once, reduced once
    assert found["zero2"] == pytest.approx(once + 4 * once)  # gathered once, reduced in every micro-batch
    # gathered in every forward and, but for the root, in every backward; reduced in every micro-batch
    assert found["zero3"] == pytest.approx(4 * (once + gather_s(net(), layers, 16) + once))


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_more_accumulation_costs_only_what_travels_in_every_micro_batch(kind: Any) -> None:
    few, many = (waited(Layout(dp=16, sharding=kind), batch) for batch in (32, 128))
    assert (many > 1.5 * few) == (kind != "zero1")


def test_copies_add_an_all_reduce_of_the_shard_once_a_step() -> None:
    layout = Layout(dp=16, sharding="zero2", dp_replicate=2)
    inner, outer, once = 0.0, 0.0, 0.0
    for size in (2.0 * (PARAMS - ENDS), 2.0 * ENDS):
        inner += gather_s(net(), size, 8)
        outer += all_reduce_s(net(), size / 8, 2, 8)
        once += gather_s(net(), size, 8)
    assert waited(layout) == pytest.approx(4 * inner + outer + once)


def test_a_pipeline_stage_reduces_once_after_its_last_backward() -> None:
    layouts = {kind: Layout(dp=8, pp=2, sharding=kind) for kind in ("zero1", "zero2")}
    assert waited(layouts["zero1"]) == waited(layouts["zero2"])
    rules = state_rules(layouts["zero2"], DEEPWELL)
    assert rules.whole_grads and rules.whole_weights and not rules.reduces_each and not rules.hides_reduce
    here = job(layouts["zero2"])
    params = rank_params(here, here.rank_stages(1))
    hidden = data_parallel_s(here, net(), params, 1e3, 1e3, 1.0)
    reduce = gather_s(net(), 2 * params.dense, 8) + gather_s(net(), 2 * params.ends, 8)
    assert hidden > reduce  # no computation hides it, however much there is


def test_more_than_three_stages_of_a_rank_are_gathered_in_every_round() -> None:
    three, four = (waited(Layout(dp=8, pp=2, virtual_stages=v, schedule="interleaved"), batch=64) for v in (2, 4))
    rounds = 8 / 2  # micro-batches by ranks of the pipeline
    params = rank_params(job(Layout(dp=8, pp=2)), [0])
    assert four - three == pytest.approx((2 * rounds - 1) * gather_s(net(), 2 * params.dense, 8), rel=0.02)


def test_other_stacks_keep_their_own_meaning_of_zero2() -> None:
    rules = state_rules(Layout(dp=8, sharding="zero2", pp=2), get_stack("megatron"))
    assert not rules.whole_grads and not rules.reduces_each and not rules.keeps_shards
    for pp in (1, 2):
        layout = Layout(dp=16 // pp, pp=pp, sharding="zero2")
        seconds = [estimate(Workload(ir=LLAMA, seq_len=4096, global_batch=n), HW, layout, get_stack("megatron")).seconds
                   for n in (64, 128)]  # fmt: skip
        assert seconds[0]["dp"] == pytest.approx(seconds[1]["dp"])


# ---- bytes ----


def memory(layout: Layout) -> Any:
    return rank_memory(job(layout), 0)


def test_bytes_of_each_sharding_are_those_of_fsdp2() -> None:
    ddp, zero1, zero2, zero3 = (memory(Layout(dp=16, sharding=kind)) for kind in SHARDINGS)
    assert ddp.params == 2 * PARAMS and ddp.comm_buffers == 0
    assert zero1.params == zero2.params == pytest.approx(2 * PARAMS * (1 + 1 / 16))  # shards beside the whole
    assert zero3.params == pytest.approx(2 * PARAMS / 16)
    assert ddp.grads == zero1.grads == 2 * PARAMS
    assert zero2.grads == zero3.grads == pytest.approx(2 * PARAMS / 16)
    assert zero1.comm_buffers == zero2.comm_buffers == 4 * LAYER
    assert zero3.comm_buffers == 2 * (2 * LAYER + ENDS) + 4 * LAYER  # the root stays whole with two layers
    for one in (zero1, zero2, zero3):
        assert one.master + one.moments == pytest.approx(12 * PARAMS / 16)


def test_one_device_holds_no_shards_and_no_buffers() -> None:
    for kind in SHARDINGS:
        layout = Layout(dp=1, sharding=kind)
        found = rank_memory(read_job(Workload(ir=LLAMA, seq_len=4096, global_batch=4), layout, DEEPWELL), 0)
        assert found.comm_buffers == 0 or kind == "zero3"
        assert found.params == 2 * PARAMS


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_a_pipeline_stage_holds_whole_weights_and_gradients(kind: Any) -> None:
    found = memory(Layout(dp=8, pp=2, sharding=kind))
    here = job(Layout(dp=8, pp=2))
    whole = sum(rank_params(here, [0]))
    assert found.grads == 2 * whole
    assert found.params == pytest.approx(2 * whole * (1 + 1 / 8))


# ---- tensor parallelism: embedding and head ----


def test_under_tp_the_ends_are_whole_and_sharded_over_every_rank_of_the_stage() -> None:
    layout = Layout(dp=8, tp=2, sequence_parallel=True)
    here, plain = job(layout), job(Layout(dp=16))
    assert here.tail.dense_params == plain.tail.dense_params == ENDS - 128256 * 4096
    head, whole = here.tail.gemms[0], plain.tail.gemms[0]
    assert (head.m, head.n, head.k) == (whole.m / 2, whole.n, whole.k)
    assert here.tail.gathers == here.tail.reduces == 0
    # Experts that take the tokens of single ranks have no copies: with tp, and with ep.
    assert shards(layout, DEEPWELL) == Parts(8, 16, 16)
    assert shards(replace(layout, dp_replicate=2), DEEPWELL) == Parts(4, 16, 8)
    assert shards(replace(layout, sharding="ddp"), DEEPWELL) == Parts(1, 16, 1)
    assert shards(replace(layout, ep=4), DEEPWELL) == Parts(8, 4, 16)
    assert shards(Layout(dp=16, ep=4, dp_replicate=2), DEEPWELL) == Parts(8, 4, 8)
    # The loss sees as many logits as a head that is split by columns has.
    split = read_job(here.workload, layout, get_stack("generic"))
    assert [one.forward for one in here.tail.passes if one.kind == "loss"] == [
        one.forward for one in split.tail.passes if one.kind == "loss"
    ]


@pytest.mark.parametrize(("kind", "times"), [("zero1", 1), ("zero2", 1), ("zero3", 8)])
def test_the_ends_are_gathered_as_often_as_they_are_let_go(kind: Any, times: int) -> None:
    # 8 micro-batches; the root group is let go after a backward under zero3, else at the step's end.
    layout = Layout(dp=8, tp=2, sequence_parallel=True, sharding=kind, overlap=OPEN)
    here = job(layout)
    params = rank_params(here, [0])
    bare = params._replace(ends=0.0)
    gather = gather_s(net(), 2.0 * ENDS, 16)
    reduces = 1 if kind == "zero1" else 8
    more = data_parallel_s(here, net(), params, 1.0, 2.0, 1.0) - data_parallel_s(here, net(), bare, 1.0, 2.0, 1.0)
    assert more == pytest.approx((times + reduces) * gather)


def test_what_fsdp2_wraps_has_shards_beside_whole_weights_also_under_ddp() -> None:
    assert not state_rules(Layout(dp=8, sharding="ddp"), DEEPWELL).keeps_shards  # DDP proper
    assert not state_rules(Layout(dp=1, pp=8), DEEPWELL).keeps_shards  # nothing to shard over
    for layout in (Layout(dp=4, cp=2, sharding="ddp"), Layout(dp=8, ep=2, sharding="ddp"), Layout(dp=4, pp=2)):
        assert state_rules(layout, DEEPWELL).keeps_shards
    twice = memory(Layout(dp=8, cp=2, sharding="ddp", context_parallel_kind="ulysses"))
    assert twice.params == 4 * PARAMS


def test_the_peak_counts_a_whole_head_under_tp() -> None:
    keeps = Keeps()
    one, two = (
        rank_memory(read_job(job(layout).workload, layout, keeps.applied_to(DEEPWELL)), 0, keeps)
        for layout in (Layout(dp=16, sharding="zero2"), Layout(dp=8, tp=2, sharding="zero2", sequence_parallel=True))
    )
    head = 2 * 128256 * 4096
    assert one.logits > head and two.logits > head  # dW of the head alone is whole
    assert two.params == pytest.approx(2 * ((PARAMS - ENDS) / 2 * (1 + 1 / 8) + ENDS * (1 + 1 / 16)), rel=1e-3)


# ---- split backwards ----


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv", "dualpipev"])
def test_a_split_backward_runs_twice(schedule: Any) -> None:
    stages = 1 if schedule == "zero_bubble" else 2
    layout = Layout(dp=4, pp=4, schedule=schedule, virtual_stages=stages)
    twice, halves = (
        stage_times(job(layout, stack=stack), device(HW.gpus[0]), net())[0]
        for stack in (DEEPWELL, DEEPWELL.with_switches(split_backward="halves"))
    )
    assert twice.b == pytest.approx(2 * halves.b) and twice.w == pytest.approx(halves.b)
    assert twice.f == halves.f
    plain = Layout(dp=4, pp=4, schedule="1f1b" if stages == 1 else "interleaved", virtual_stages=stages)
    work = Workload(ir=LLAMA, seq_len=4096, global_batch=64)
    assert estimate(work, HW, layout, DEEPWELL).step_s > 1.3 * estimate(work, HW, plain, DEEPWELL).step_s


# ---- context parallelism ----


def attention(layout: Layout) -> Any:
    return stage_times(job(layout), device(HW.gpus[0]), net())[0]


def test_gathered_keys_compute_the_whole_square_and_keep_a_mask() -> None:
    ulysses, gathered = (Layout(dp=8, cp=2, context_parallel_kind=kind) for kind in ("ulysses", "allgather"))
    assert attention(gathered).forward["attention"] > 1.8 * attention(ulysses).forward["attention"]
    assert attention(gathered).forward["cp"] > 0 and attention(ulysses).forward["cp"] > 0
    kept = [dict(memory(layout).activations)["attention"] for layout in (ulysses, gathered)]
    mask, keys = 2 * 2048 * 4096, 2 * 2048 * 2 * 1024
    assert kept[1] - kept[0] == pytest.approx(32 * (mask + keys))  # one more rank's keys and values


def test_fewer_key_heads_than_ranks_are_repeated() -> None:
    kept = [
        dict(memory(Layout(dp=16 // cp, cp=cp, context_parallel_kind="ulysses")).activations)["attention"]
        for cp in (8, 16)
    ]
    # A layer and token: q and the result of 4096 each, k and v of 1024; 8 key heads over 16 ranks are there twice.
    once, twice = (2 * 32 * 4096 * (2 * 4096 + times * 2 * 1024) for times in (1, 2))
    assert kept[1] / kept[0] == pytest.approx((twice / 16) / (once / 8), rel=1e-6)
