"""Whole estimates: parts add up, more of a machine never hurts, values survive JSON, mistakes are named."""

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepwell.errors import ConfigError
from deepwell.graph.configs import published_config
from deepwell.graph.ir import IR
from deepwell.hardware.model import Hardware
from deepwell.hardware.names import named_hardware
from deepwell.planner import Estimate, Layout, Recompute, Stack, Workload, estimate, get_stack
from deepwell.planner.estimate_values import PARTS
from deepwell.planner.stack import StackConstants, known_stacks
from deepwell.precision.policy import PrecisionPolicy

LAYOUTS = (
    Layout(dp=64, sharding="zero3"),
    Layout(dp=8, tp=8, sequence_parallel=True),
    Layout(dp=4, tp=4, pp=4, virtual_stages=5, schedule="interleaved", sequence_parallel=True),
    Layout(dp=4, tp=8, pp=2, recompute=Recompute(kind="full")),
    Layout(dp=4, tp=2, pp=4, cp=2, sequence_parallel=True),
)


@pytest.fixture(scope="module")
def llama() -> IR:
    return IR.from_config(published_config("llama3-70b"), dtype="bf16")


@pytest.fixture(scope="module")
def qwen() -> IR:
    return IR.from_config(published_config("qwen3-30b-a3b"), dtype="bf16")


@pytest.fixture(scope="module")
def h100s() -> Hardware:
    return named_hardware("8x8xH100")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_parts_add_up_to_the_step(llama: IR, h100s: Hardware, layout: Layout) -> None:
    found = estimate(Workload(ir=llama, seq_len=8192, global_batch=128), h100s, layout)
    assert tuple(name for name, _ in found.breakdown) == PARTS
    assert sum(found.seconds.values()) == pytest.approx(found.step_s)
    assert all(value >= 0 for value in found.seconds.values())
    assert found.tokens_per_s_per_gpu == pytest.approx(128 * 8192 / found.step_s / 64)


def test_mfu_is_the_irs_flops_over_the_peak(llama: IR, h100s: Hardware) -> None:
    work = Workload(ir=llama, seq_len=8192, global_batch=128)
    found = estimate(work, h100s, LAYOUTS[2])
    flops = llama.train_flops(128, 8192)
    assert found.model_flops_per_token * 128 * 8192 == pytest.approx(flops)
    assert found.mfu_bf16 == pytest.approx(flops / 64 / found.step_s / 989e12)
    assert found.mfu_weighted == pytest.approx(found.mfu_bf16, rel=1e-3)  # all in bf16: one peak
    low = estimate(replace(work, policy="fp8"), h100s, LAYOUTS[2])
    assert low.mfu_weighted < low.mfu_bf16  # FP8 GEMMs are measured by their own peak


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("figure", ["nvlink_gb_per_s", "nic_gb_per_s"])
def test_a_faster_fabric_is_never_slower(llama: IR, h100s: Hardware, layout: Layout, figure: str) -> None:
    work = Workload(ir=llama, seq_len=8192, global_batch=128)
    fabric = replace(h100s.fabric, **{figure: 1.7 * getattr(h100s.fabric, figure)})
    assert estimate(work, replace(h100s, fabric=fabric), layout).step_s <= estimate(work, h100s, layout).step_s * (
        1 + 1e-12
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_faster_memory_and_more_of_it_never_hurt(llama: IR, h100s: Hardware, layout: Layout) -> None:
    work = Workload(ir=llama, seq_len=8192, global_batch=128)
    gpu = h100s.gpus[0]
    better = replace(gpu, memory_gb_per_s=1.5 * gpu.memory_gb_per_s, memory_bytes=2 * gpu.memory_bytes)
    base, fast = estimate(work, h100s, layout), estimate(work, replace(h100s, gpus=(better,) * 8), layout)
    assert fast.step_s <= base.step_s
    assert fast.fits or not base.fits


@settings(max_examples=25, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4]), micro=st.sampled_from([1, 2]),
    again=st.sampled_from(["none", "selective", "full"]), sp=st.booleans(),
)  # fmt: skip
def test_any_layout_has_a_sound_estimate(tp: int, pp: int, micro: int, again: str, sp: bool) -> None:
    ir = IR.from_config(published_config("llama3-8b"), dtype="bf16")
    layout = Layout(
        dp=64 // tp // pp, tp=tp, pp=pp, micro_batch=micro, recompute=Recompute(kind=again),  # type: ignore[arg-type]
        sequence_parallel=sp,
    )  # fmt: skip
    work = Workload(ir=ir, seq_len=4096, global_batch=128)
    hw = named_hardware("8x8xH100")
    found = estimate(work, hw, layout)
    ideal = ir.train_flops(128, 4096) / 64 / 989e12
    assert ideal < found.step_s < 40 * ideal
    assert len(found.memory) == pp and max(stage.allocated for stage in found.memory) <= found.peak_gib * 2**30
    assert found == estimate(work, hw, layout)  # deterministic


def test_the_closed_form_of_a_pipeline_is_near_its_simulation(llama: IR, h100s: Hardware) -> None:
    work = Workload(ir=llama, seq_len=8192, global_batch=128)
    for layout in LAYOUTS[2:]:
        simulated, closed = (estimate(work, h100s, layout, simulate=on).step_s for on in (True, False))
        assert closed == pytest.approx(simulated, rel=0.05)


def test_overlap_full_recompute_and_graphs_work_in_their_direction(llama: IR, h100s: Hardware) -> None:
    work = Workload(ir=llama, seq_len=8192, global_batch=128)

    def step(layout: Layout, **switches: str) -> float:
        return estimate(work, h100s, layout, get_stack("megatron", **switches)).step_s

    base = LAYOUTS[2]
    assert step(base, tp_overlap="on") < step(base)
    assert step(replace(base, recompute=Recompute(kind="full"))) > 1.2 * step(base)
    assert step(base, cuda_graphs="full") <= step(base)
    assert step(LAYOUTS[0], overlap_grads="off", overlap_params="off") > step(LAYOUTS[0])


def test_dualpipev_hides_what_its_pairs_exchange_and_the_parts_still_add_up(qwen: IR, h100s: Hardware) -> None:
    work = Workload(ir=qwen, seq_len=4096, global_batch=512)
    vee = Layout(dp=16, pp=4, ep=16, schedule="zbv", virtual_stages=2)
    apart, paired = (estimate(work, h100s, replace(vee, schedule=name)) for name in ("zbv", "dualpipev"))
    # 32 micro-batches, of which warm-up and cool-down run unpaired: between a third and all of 70% is hidden.
    assert 0.3 * apart.seconds["ep"] <= paired.seconds["ep"] < 0.8 * apart.seconds["ep"]
    assert sum(paired.seconds.values()) == pytest.approx(paired.step_s)
    closed = estimate(work, h100s, replace(vee, schedule="dualpipev"), simulate=False)
    assert closed.step_s == pytest.approx(paired.step_s, rel=0.1)
    # A stack that overlaps these exchanges anyway has nothing left to hide, and says the same for both schedules.
    hides = get_stack("megatron", ep_overlap="on")
    both = [estimate(work, h100s, replace(vee, schedule=name), hides).seconds["ep"] for name in ("zbv", "dualpipev")]
    assert both[0] == pytest.approx(both[1])


def test_experts_inside_nvlink_are_faster_than_across_nodes(qwen: IR, h100s: Hardware) -> None:
    work = Workload(ir=qwen, seq_len=4096, global_batch=512)
    near, far = (estimate(work, h100s, Layout(dp=64, ep=ep)).seconds["ep"] for ep in (8, 64))
    assert 0 < near < far


def test_low_precision_pays_for_quantization_and_saves_more(llama: IR) -> None:
    hw = named_hardware("8x8xB200")
    steps = {}
    for policy in ("bf16", "mxfp8", "nvfp4"):
        everywhere = PrecisionPolicy(policy)  # the nvfp4 recipe keeps the ends in bf16, which is another matter
        found = estimate(Workload(ir=llama, seq_len=8192, global_batch=128, policy=everywhere), hw, LAYOUTS[2])
        steps[policy] = found.step_s
        assert (found.seconds["quantize"] > 0) == (policy != "bf16")
    assert steps["nvfp4"] < steps["mxfp8"] < steps["bf16"]


def test_a_changed_workload_forgets_the_formats_of_the_old_one(llama: IR) -> None:
    # The answer is cached on the workload; a copy with another policy must not inherit it.
    work = Workload(ir=llama, seq_len=8192, global_batch=8)
    assert work.main_format == "bf16"
    assert replace(work, policy="mxfp8").main_format == "mxfp8"


def test_values_survive_json(llama: IR, h100s: Hardware) -> None:
    found = estimate(Workload(ir=llama, seq_len=8192, global_batch=128, policy="fp8"), h100s, LAYOUTS[2])
    assert Estimate.from_json(found.to_json()) == found
    for layout in LAYOUTS:
        assert Layout.from_json(layout.to_json()) == layout
    stack = get_stack("nemo", version="25.02", attention="cudnn")
    assert Stack.from_dict(json.loads(json.dumps(stack.to_dict()))) == stack
    work = Workload(ir=llama, seq_len=4096, global_batch=8, policy="nvfp4")
    assert Workload.from_dict(json.loads(json.dumps(work.to_dict()))) == work


def test_mistakes_are_named(llama: IR, qwen: IR, h100s: Hardware) -> None:
    work = Workload(ir=llama, seq_len=8192, global_batch=128)
    with pytest.raises(ConfigError, match="needs 32 GPUs"):
        estimate(work, h100s, Layout(dp=32))
    with pytest.raises(ConfigError, match="global_batch 128 is no multiple of dp 64 x micro_batch 4"):
        estimate(work, h100s, Layout(dp=64, micro_batch=4))
    with pytest.raises(ConfigError, match="more than 80 layers"):
        estimate(work, h100s, Layout(dp=1, pp=64, virtual_stages=2, schedule="interleaved"))
    with pytest.raises(ConfigError, match="no experts"):
        estimate(work, h100s, Layout(dp=64, ep=8))
    with pytest.raises(ConfigError, match="does not divide the model's 128 experts"):
        estimate(Workload(ir=qwen, seq_len=4096, global_batch=96), named_hardware("6x8xH100"), Layout(dp=48, ep=48))
    with pytest.raises(ConfigError, match="ep 3 x etp 1 does not divide"):
        Layout(dp=8, ep=3)
    with pytest.raises(ConfigError, match="sharding is 'zero4'"):
        Layout(dp=8, sharding="zero4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="optimizer is 'lion'"):
        Workload(ir=llama, seq_len=8192, global_batch=8, optimizer="lion")


def test_an_unknown_stack_gets_the_generic_constants_and_says_so(llama: IR, h100s: Hardware) -> None:
    stack = get_stack("somebody-elses-trainer")
    assert stack.constants == get_stack("generic").constants
    found = estimate(Workload(ir=llama, seq_len=8192, global_batch=128), h100s, LAYOUTS[1], stack)
    assert any("somebody-elses-trainer" in note for note in found.notes)


def test_every_stack_has_at_most_six_constants_and_says_what_they_were_fitted_on() -> None:
    assert len(StackConstants.__dataclass_fields__) <= 6
    for name in known_stacks():
        assert get_stack(name).fitted_on, name


def test_a_sequence_over_the_models_positions_is_a_note(llama: IR, h100s: Hardware) -> None:
    long = Workload(ir=llama, seq_len=1 << 20, global_batch=64)
    assert any("positions" in note for note in estimate(long, h100s, Layout(dp=64)).notes)


def test_a_cpu_can_be_estimated_for() -> None:
    ir = IR.from_config(published_config("gpt2"), dtype="fp32")
    gpu = replace(named_hardware("H100").gpus[0], name="a CPU", kind="cpu", machine=None, compute_capability=None)
    found = estimate(Workload(ir=ir, seq_len=512, global_batch=4), Hardware(name="laptop", gpus=(gpu,)), Layout(dp=1))
    assert found.tier == "spec" and found.step_s > 0


def test_an_estimate_takes_milliseconds(llama: IR, h100s: Hardware) -> None:
    work = Workload(ir=llama, seq_len=8192, global_batch=128)
    estimate(work, h100s, LAYOUTS[2])  # shapes of blocks are built once
    spent = []
    for _ in range(20):
        start = time.perf_counter()
        estimate(work, h100s, LAYOUTS[2], simulate=False)
        spent.append(time.perf_counter() - start)
    assert min(spent) < 0.01
