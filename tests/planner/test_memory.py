"""Memory of a rank: Korthikanti's activation formulas as goldens, bytes per parameter, what is in flight."""

from dataclasses import replace

import pytest

from deepwell.engine.dryrun.plan import given_plan
from deepwell.graph.configs import published_config
from deepwell.graph.ir import IR
from deepwell.hardware.names import named_hardware
from deepwell.kernels.head import linear_cross_entropy
from deepwell.planner.estimate_values import StageMemory
from deepwell.planner.job import read_job
from deepwell.planner.keeps import Keeps, chunk_bytes, head_bytes
from deepwell.planner.layout import Layout, Offload, Recompute
from deepwell.planner.memory import in_flight, saved_bytes
from deepwell.planner.rank_memory import rank_memory
from deepwell.planner.schedule.simulate import peak_live
from deepwell.planner.shard import RankSizes, local_block
from deepwell.planner.stack import get_stack
from deepwell.planner.step_memory import memory_timeline
from deepwell.planner.workload import Lora, Workload
from deepwell.precision.policy import PrecisionPolicy

# GPT 22B of arXiv 2205.05198, table 3: 48 layers, hidden 6144, 64 heads, sequence 2048.
HIDDEN, HEADS, SEQ = 6144, 64, 2048
GPT = {
    "model_type": "gpt2", "n_embd": HIDDEN, "n_head": HEADS, "n_layer": 48, "n_positions": SEQ, "vocab_size": 51200,
    "n_inner": 4 * HIDDEN,
}  # fmt: skip


@pytest.fixture(scope="module")
def gpt() -> IR:
    return IR.from_config(GPT, dtype="bf16")


def layer_bytes(ir: IR, tp: int, sequence_parallel: bool, recompute: Recompute, batch: int = 4) -> float:
    sizes = RankSizes(micro_batch=batch, seq_len=SEQ, tp=tp, sequence_parallel=sequence_parallel, dropout=True)
    block = local_block(ir.blocks[0].ops, (), sizes)
    return sum(saved_bytes(block, recompute, "fused_softmax", dropout=True).values())


# Equations 1, 2, 4 and 6 of the paper, in bytes of one layer: s b h times ...
@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "recompute", "factor"),
    [
        (1, False, Recompute(), 34 + 5 * HEADS * SEQ / HIDDEN),  # no parallelism
        (8, False, Recompute(), 10 + 24 / 8 + 5 * HEADS * SEQ / HIDDEN / 8),  # tensor parallel
        (8, True, Recompute(), (34 + 5 * HEADS * SEQ / HIDDEN) / 8),  # and sequence parallel
        (8, True, Recompute(kind="selective"), 34 / 8),  # and selective recomputation of the attention core
        (8, False, Recompute(kind="full"), 2),  # the input alone
    ],
)
def test_activations_of_a_gpt_layer_are_korthikantis(
    gpt: IR, tp: int, sequence_parallel: bool, recompute: Recompute, factor: float
) -> None:
    golden = factor * SEQ * 4 * HIDDEN
    assert layer_bytes(gpt, tp, sequence_parallel, recompute) == pytest.approx(golden, rel=1e-9)


@pytest.mark.parametrize(("pp", "m", "v"), [(4, 8, 1), (8, 32, 1), (4, 8, 2), (4, 16, 5), (1, 4, 1)])
def test_what_is_in_flight_is_what_the_schedule_holds(pp: int, m: int, v: int) -> None:
    schedule = "interleaved" if v > 1 else "1f1b"
    layout = Layout(dp=1, pp=pp, virtual_stages=v, schedule=schedule)
    for rank, moments in enumerate(peak_live(schedule, pp, m, v)):
        held = max(sum(live) for live in moments) / v
        assert in_flight(layout, m, rank) == pytest.approx(held)


def job_memory(layout: Layout, **changes: object) -> list[StageMemory]:
    ir = IR.from_config(published_config("llama3-8b"), dtype="bf16")
    work = Workload(ir=ir, seq_len=4096, global_batch=64, **changes)  # type: ignore[arg-type]
    job = read_job(work, layout, get_stack("megatron"))
    return [rank_memory(job, rank) for rank in range(layout.pp)]


def test_optimizer_state_is_spread_as_the_sharding_says() -> None:
    params = 8_030_261_248
    ddp, zero1, zero2, zero3 = (
        job_memory(Layout(dp=8, sharding=sharding))[0] for sharding in ("ddp", "zero1", "zero2", "zero3")
    )
    assert ddp.params == pytest.approx(2 * params) and ddp.grads == pytest.approx(4 * params)
    assert ddp.master + ddp.moments == pytest.approx(12 * params)
    assert zero1.master + zero1.moments == pytest.approx(12 * params / 8) and zero1.grads == ddp.grads
    assert zero2.grads == pytest.approx(4 * params / 8) and zero2.params == ddp.params
    assert zero3.params == pytest.approx(2 * params / 8) and zero3.comm_buffers > 0
    copies = job_memory(Layout(dp=8, sharding="zero3", dp_replicate=2))[0]
    assert copies.params == pytest.approx(2 * params / 4)  # shards are spread over one copy only


def test_the_first_stage_holds_more_activations_and_the_last_one_the_logits() -> None:
    stages = job_memory(Layout(dp=1, pp=4))
    held = [stage.activation_bytes for stage in stages]
    assert held == sorted(held, reverse=True)
    assert [stage.logits > 0 for stage in stages] == [False, False, False, True]


def test_recomputing_more_keeps_less() -> None:
    none, mlp, full = (
        job_memory(Layout(dp=1, recompute=recompute))[0].activation_bytes
        for recompute in (Recompute(), Recompute(kind="selective", modules=("mlp",)), Recompute(kind="full"))
    )
    half = job_memory(Layout(dp=1, recompute=Recompute(kind="block", layers=16)))[0].activation_bytes
    assert full < mlp < none
    assert half == pytest.approx((full + none) / 2)


def test_offloading_moves_state_and_activations_off_the_device() -> None:
    here = job_memory(Layout(dp=1))[0]
    away = job_memory(Layout(dp=1, offload=Offload(optimizer=1.0, activations=0.5)))[0]
    assert away.master == away.moments == 0
    # Of the half that goes, two of the 32 layers are on the GPU at any time.
    assert away.activation_bytes == pytest.approx(here.activation_bytes * (1 - 0.5 * 30 / 32))


def test_lora_has_gradients_for_its_adapters_only() -> None:
    whole = job_memory(Layout(dp=1))[0]
    adapters = job_memory(Layout(dp=1), lora=Lora(rank=16))[0]
    assert adapters.params == whole.params
    assert adapters.grads < 0.02 * whole.grads and adapters.moments < 0.02 * whole.moments


def test_fp8_inputs_are_kept_in_one_byte() -> None:
    wide, narrow = (job_memory(Layout(dp=1), policy=policy)[0].activation_bytes for policy in ("bf16", "fp8"))
    assert 0.7 * wide < narrow < wide


def test_routing_imbalance_grows_the_experts_activations() -> None:
    ir = IR.from_config(published_config("qwen3-30b-a3b"), dtype="bf16")
    layout, stack = Layout(dp=8, ep=8), get_stack("megatron")
    even = Workload(ir=ir, seq_len=4096, global_batch=8)
    busy = replace(even, forced_balance=False, imbalance=1.5)
    sizes = [dict(rank_memory(read_job(work, layout, stack), 0).activations) for work in (even, busy)]
    assert sizes[1]["experts"] > 1.3 * sizes[0]["experts"]
    assert sizes[1]["attention"] == sizes[0]["attention"]


def fp8_with_its_head() -> PrecisionPolicy:
    policy = PrecisionPolicy.recipe("fp8")
    policy.set_layer_precision("head", "fp8")
    return policy


@pytest.mark.parametrize("policy", ["bf16", "fp8", "fp8 with its head"])
@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b"])
def test_deepwells_estimate_and_its_timeline_have_the_same_peak(model: str, policy: str) -> None:
    # What is planned must be what the dry run shows: played action by action, the sum may not be exceeded, and in a
    # pipeline, where the sum takes every rank's gradients and activations at their most, it may be a little over.
    ir = IR.from_config(published_config(model), dtype="bf16")
    hw = named_hardware("2x8xH100")
    for layout in (
        Layout(dp=16),
        Layout(dp=16, sharding="zero3"),
        Layout(dp=16, sharding="zero2", micro_batch=4),  # one micro-batch: gradients come when activations go
        Layout(dp=16, recompute=Recompute(kind="block", layers=8)),
        Layout(dp=8, pp=2, recompute=Recompute(kind="full")),
        Layout(dp=4, pp=4, schedule="interleaved", virtual_stages=2),
        Layout(dp=4, pp=4, schedule="zbv", virtual_stages=2),
        Layout(dp=4, pp=4, schedule="dualpipev", virtual_stages=2, sharding="zero2"),
        Layout(dp=4, pp=4, schedule="zero_bubble"),
    ):
        chosen = fp8_with_its_head() if policy == "fp8 with its head" else policy
        work = Workload(ir=ir, seq_len=4096, global_batch=64, policy=chosen)
        plan = given_plan(work, hw, layout, get_stack("deepwell"))
        summed = max(stage.allocated for stage in plan.estimate.memory)
        played = max(line.peak.allocated for line in memory_timeline(plan))
        assert played * (1 - 1e-6) <= summed <= played * 1.02, str(layout)


@pytest.mark.parametrize(
    ("policy", "waiting"),
    [
        ("fp8", 2 * 128256 * 4096 + 2 * 4096 * 4096),  # dW and dx, to be scaled by the loss' gradient
        (fp8_with_its_head(), 4096 * (128256 + 4096 + 2 * 4096)),  # codes of du and x, and dx
    ],
    ids=["bf16 head", "FP8 head"],
)
def test_gpipes_last_rank_holds_what_every_micro_batchs_head_waits_with(policy, waiting: int) -> None:
    ir = IR.from_config(published_config("llama3-8b"), dtype="bf16")
    work = Workload(ir=ir, seq_len=4096, global_batch=64, policy=policy)
    layout = Layout(dp=8, pp=2, schedule="gpipe", sharding="zero2", recompute=Recompute(kind="full"))
    plan = given_plan(work, named_hardware("2x8xH100"), layout, get_stack("deepwell"))
    last = memory_timeline(plan)[1]
    assert max(dict(moment.nbytes).get("head", 0.0) for moment in last.moments) > 8 * waiting
    assert plan.estimate.memory[1].logits > 8 * waiting
    assert plan.estimate.memory[1].allocated >= last.peak.allocated * (1 - 1e-6)


@pytest.mark.parametrize(("model", "d"), [("llama3-8b", 4096), ("llama3-70b", 8192)])
@pytest.mark.parametrize("micro_batch", [1, 4, 8])
def test_codes_that_wait_do_not_raise_the_peak_of_an_fp8_head(model: str, d: int, micro_batch: int) -> None:
    # From 2 D tokens on the codes of du are larger than the dW that is made from them; the forward, with a chunk of
    # logits and the codes of the weight beside them, is the higher moment all the same until x outgrows the chunk.
    ir = IR.from_config(published_config(model), dtype="bf16")
    work = Workload(ir=ir, seq_len=4096, global_batch=micro_batch, policy=fp8_with_its_head())
    keeps, stack = Keeps(), get_stack("deepwell")
    job = read_job(work, Layout(dp=1, micro_batch=micro_batch), keeps.applied_to(stack))
    head = head_bytes(job, keeps, rank_memory(job, 0).logits)
    t, v = 4096 * micro_batch, 128256
    assert head.between == t * v + t * d + 2 * t * d
    assert head.weight_gradient == 2 * v * d
    assert head.between + 2 * t * d + head.weight_gradient < head.forward  # dx once more: the scaled one


@pytest.mark.parametrize("width", [64, 768, 2048, 4096, 5120, 16384])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_head_is_counted_in_the_chunks_its_kernel_takes(width: int, fp8: bool) -> None:
    assert chunk_bytes(width, fp8) == linear_cross_entropy.chunk_bytes(width, fp8)
