"""`dw.dryrun`: what it says is marked, what it runs leaves no trace, and its memory model knows what was measured."""

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import deepwell as dw
from deepwell.bench.models import MODELS, RaceModel
from deepwell.engine.dryrun.dry_run import simulated
from deepwell.engine.dryrun.plan import engine_plan, given_plan, local_hardware
from deepwell.engine.dryrun.risks import risks
from deepwell.engine.dryrun.values import DryRun, Trial
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.hardware.parts import Curve, GemmPoint
from deepwell.planner.calibrate import measured_constants
from deepwell.planner.efficiency import device as planner_device
from deepwell.planner.efficiency import gemm_s
from deepwell.planner.estimate import estimate
from deepwell.planner.layout import Layout
from deepwell.planner.plan import Plan
from deepwell.planner.stack import deepwell_stack, get_stack
from deepwell.planner.step_memory import Keeps, memory_timeline
from deepwell.planner.workload import Workload

GB = 1e9
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


class Net(nn.Module):
    """A tiny language model with everything a step may change: weights, a buffer, dropout's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.register_buffer("seen", torch.zeros(()))
        self.drop = nn.Dropout(0.5)
        self.up = nn.Linear(32, 96, bias=False)
        self.head = nn.Linear(96, 64, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.training:
            self.seen += 1
        logits = self.head(self.drop(torch.nn.functional.gelu(self.up(self.embed(input_ids)))))
        if labels is None:
            return logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.fixture
def engine() -> dw.Engine:
    torch.manual_seed(0)
    net = Net()
    return dw.compile(dw.capture(net), precision="bf16")


def tiny_engine(precision: str = "bf16") -> dw.Engine:
    """A Llama as Hugging Face builds it, so that the batch is guessed and the loss is the model's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return dw.compile(dw.capture(LlamaForCausalLM(LlamaConfig(**CONFIG))), precision=precision)


def race_plan(model: RaceModel, policy: Any, *, head: bool = False) -> Plan:
    """The step of one of the race's models on one H200, as its engine takes it."""
    c = model.config
    config = {
        "model_type": "llama", "hidden_size": c.width, "intermediate_size": c.hidden,
        "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads, "vocab_size": c.vocab, "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": False,
    }  # fmt: skip
    chosen = dw.PrecisionPolicy.recipe(policy)
    if head:
        chosen.set_layer_precision("head", policy)
    workload = Workload(
        ir=dw.IR.from_config(config), seq_len=model.seq_len, global_batch=model.batch, policy=chosen,
        optimizer="adamw_pure_bf16",
    )  # fmt: skip
    layout = Layout(dp=1, micro_batch=model.batch, sharding="ddp")
    return given_plan(workload, dw.probe("H200"), layout, deepwell_stack())


# ---- real steps ----


def test_everything_of_the_users_is_bitwise_the_same_afterwards(engine: dw.Engine) -> None:
    # Weights, buffers, gradients, the optimizer's state, modes and all three random states, with a half-done step.
    net = engine.deepwell.model
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    ids = torch.randint(0, 64, (2, 16))
    engine(input_ids=ids, labels=ids).backward()
    optimizer.step()
    engine(input_ids=ids, labels=ids).backward()
    net.drop.eval()
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    grads = {name: (p.grad, p.grad.clone()) for name, p in net.named_parameters()}
    state = json.dumps([[v.tolist() for v in s.values()] for s in optimizer.state_dict()["state"].values()])
    buffers = {name: id(buffer) for name, buffer in net.named_buffers()}
    random_states = torch.get_rng_state().clone(), random.getstate(), np.random.get_state()[1].copy()

    run = dw.dryrun(engine, steps=1)

    assert run.trial is not None and run.trial.step_s is not None
    assert len(set(run.trial.losses)) > 1, "the steps trained nothing, so that nothing was put to the test"
    assert all(torch.equal(weights[name], value) for name, value in net.state_dict().items())
    for name, parameter in net.named_parameters():
        assert parameter.grad is grads[name][0]
        assert torch.equal(parameter.grad, grads[name][1])
    assert json.dumps([[v.tolist() for v in s.values()] for s in optimizer.state_dict()["state"].values()]) == state
    assert {name: id(buffer) for name, buffer in net.named_buffers()} == buffers
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]
    assert np.array_equal(np.random.get_state()[1], random_states[2])
    assert net.training and not net.drop.training


def test_weights_come_back_also_when_a_step_fails(engine: dw.Engine) -> None:
    # A wrong batch is the user's mistake; their weights must not pay for it.
    before = {name: value.clone() for name, value in engine.deepwell.model.state_dict().items()}
    mode = engine.training
    bad = torch.full((2, 16), 64)  # one past the vocabulary
    with pytest.raises(IndexError):
        dw.dryrun(engine, batch={"input_ids": bad, "labels": bad}, steps=1)
    assert all(torch.equal(before[name], value) for name, value in engine.deepwell.model.state_dict().items())
    assert engine.training == mode
    assert all(p.grad is None for p in engine.parameters())


def test_the_prediction_stands_beside_the_measurement() -> None:
    run = dw.dryrun(tiny_engine(), steps=2)
    trial = run.trial
    assert trial is not None and trial.steps == 2
    assert trial.step_s is not None and trial.fastest_s <= trial.step_s <= trial.slowest_s  # type: ignore[operator]
    assert trial.time_ratio == trial.predicted_s / trial.step_s
    assert run.figure("step").how == "measured" and run.figure("step").value == trial.step_s
    assert run.figure("bubble").how == "simulated"
    # The prediction does not know the measurement: the same engine without steps predicts the same.
    quiet = dw.dryrun(tiny_engine(), measure=False)
    assert quiet.trial is None
    assert quiet.figure("step").value == trial.predicted_s
    assert quiet.figure("step").mark == "simulated, spec tier"


def test_memory_on_a_cpu_is_counted_not_guessed(engine: dw.Engine) -> None:
    # Weights with their two moments stay; a step adds at least its gradients and its activations.
    ids = torch.zeros(2, 16, dtype=torch.long)
    run = dw.dryrun(engine, steps=1, batch={"input_ids": ids, "labels": ids})
    resident = 3 * sum(p.numel() * p.element_size() for p in engine.parameters())
    grads = resident / 3
    assert run.trial is not None and run.trial.peak_bytes is not None
    assert resident + grads < run.trial.peak_bytes < 3 * resident
    assert "allocator" in run.trial.memory_by


def test_hooks_of_the_user_are_not_run(engine: dw.Engine) -> None:
    # A hook that steps an optimizer inside the backward would train for real.
    next(engine.parameters()).register_post_accumulate_grad_hook(lambda p: pytest.fail("a hook of the user ran"))
    run = dw.dryrun(engine)
    assert run.trial is None
    assert any("has hooks" in note for note in run.notes)
    with pytest.raises(UnsupportedError, match="has hooks"):
        dw.dryrun(engine, measure=True)


def test_where_nothing_can_be_run_the_reason_is_said() -> None:
    heavy = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.GELU(), nn.Linear(4096, 64, bias=False))
    run = dw.dryrun(dw.compile(dw.capture(heavy), precision="bf16"), batch=torch.zeros(1024, 4096))
    assert run.trial is None
    assert any("TFLOP a step are many for a CPU" in note for note in run.notes)


def test_arguments_are_checked(engine: dw.Engine) -> None:
    with pytest.raises(ConfigError, match="engine is a Net"):
        dw.dryrun(engine.deepwell.model)
    with pytest.raises(ConfigError, match="steps is 0"):
        dw.dryrun(engine, steps=0)
    with pytest.raises(ConfigError, match="plan is of"):
        dw.dryrun(engine, plan=dw.autoplan("llama3-8b", hw="8xH100", seq_len=2048, global_batch=64))
    with pytest.raises(ConfigError, match="plan is a str"):
        simulated("plan")  # type: ignore[arg-type]


def test_a_plan_for_a_cluster_is_simulated_and_one_device_is_tried() -> None:
    engine = tiny_engine()
    plan = dw.autoplan(replace(engine.ir, module=None, graph=None), hw="2xH100", seq_len=32, global_batch=8, tp=1)
    run = dw.dryrun(engine, plan=plan, steps=1)
    assert run.figure("step").how == "simulated" and run.figure("step").value == plan.step_s
    assert run.trial is not None and run.trial.step_s is not None
    assert f"{plan.layout.micro_batch} x 32 tokens" in run.trial.what
    assert any("its figures are simulated" in note for note in run.notes)


# ---- values ----


def test_a_dry_run_survives_json_and_prints_its_marks() -> None:
    run = dw.dryrun(tiny_engine("mxfp8"), steps=1)
    assert DryRun.from_json(run.to_json()) == run
    text = str(run)
    for words in (
        "predicted before",
        "measured",
        "simulated, spec tier",
        "risks, gravest first",
        "emulated",
        "peak in",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 130
    for broken in ("{}", "[]", "no", json.dumps({**run.to_dict(), "fits": "yes"}), json.dumps({"schema": 1})):
        with pytest.raises(ConfigError):
            DryRun.from_json(broken)


def test_the_trace_is_the_simulated_step() -> None:
    plan = dw.autoplan("llama3-8b", hw="8xH100", seq_len=2048, global_batch=32, pp=4)
    trace = json.loads(simulated(plan).trace_json())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2, 3}
    assert "not a measurement" in trace["otherData"]["what"]


# ---- memory over the step ----


@pytest.mark.parametrize(
    ("name", "policy", "head", "remakes", "measured"),
    [
        # Peaks of 2026-11-15 on one H200: step-*.json under benchmarks/results.
        ("8b-4l", "bf16", False, "hidden", 21.52),
        ("8b-4l", "fp8", False, "hidden", 21.04),
        ("8b-4l", "fp8", True, "hidden", 22.96),
        ("1b-16l", "fp8", False, "hidden", 25.85),
        ("1b-16l", "fp8", True, "hidden", 28.56),
        ("1b-16l", "fp8", False, "copies", 24.62),
        ("1b-16l", "fp8", False, "nothing", 28.01),
        ("768-12l", "fp8", False, "hidden", 11.27),
        ("768-12l", "fp8", False, "copies", 10.66),
        ("768-12l", "fp8", True, "copies", 12.83),
    ],
)
def test_peaks_come_within_three_percent_of_the_h200(name, policy, head, remakes, measured) -> None:
    (rank,) = memory_timeline(race_plan(MODELS[name], policy, head=head), Keeps(remakes=remakes))
    assert rank.peak.allocated / GB == pytest.approx(measured, rel=0.03)


def test_memory_begins_and_ends_with_what_stays() -> None:
    # After the last backward nothing of the activations is left, and every gradient is there.
    plan = race_plan(MODELS["1b-16l"], "fp8")
    (rank,) = memory_timeline(plan)
    start, end = dict(rank.moments[0].nbytes), dict(rank.moments[-1].nbytes)
    assert "activations" not in start and "gradients" not in start
    assert end.get("activations", 0.0) == pytest.approx(0.0, abs=1.0)
    assert end["gradients"] == pytest.approx(2 * plan.workload.ir.num_params, rel=1e-6)
    times = [moment.time_s for moment in rank.moments]
    assert times == sorted(times)


def test_what_an_engine_keeps_shows() -> None:
    plan = race_plan(MODELS["8b-4l"], "fp8")

    def peak(**habits: Any) -> float:
        return memory_timeline(plan, Keeps(**habits))[0].peak.allocated

    lean = peak()
    # Hidden values of four layers, and with all copies recomputed the three inputs of width 4096 less.
    assert peak(remakes="nothing") > lean + 0.8 * GB
    assert peak(remakes="copies") == pytest.approx(lean - 4 * 3 * 16384 * 4096, rel=0.01)
    # All logits: 2 x 8192 x 128256 in bf16, where a chunk holds a quarter.
    assert peak(fuses_head=False) > lean + 1 * GB
    # Two codes for every weight.
    assert peak(caches_weights=True) == pytest.approx(lean + 2 * plan.workload.ir.num_params, rel=0.01)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv"])
def test_pipelines_hold_what_their_schedule_has_in_flight(schedule: str) -> None:
    # The first rank of 1F1B holds a micro-batch for each rank, the last holds one.
    plan = dw.autoplan(
        "llama3-8b", hw="8xH100", seq_len=2048, global_batch=32, pp=4, tp=1, micro_batch=1, schedule=schedule,
        virtual_stages=2 if schedule == "zbv" else 1, recompute="none",
        stack="deepwell" if schedule == "1f1b" else "generic",  # Deepwell's trainer splits no backward
    )  # fmt: skip
    found = memory_timeline(plan)
    held = [max(dict(m.nbytes).get("activations", 0.0) for m in rank.moments) for rank in found]
    assert len(found) == 4
    if schedule == "1f1b":
        assert held[0] == pytest.approx(4 * held[3] * plan.stage_layers[0] / plan.stage_layers[3], rel=1e-6)
    for rank in found:
        assert dict(rank.moments[-1].nbytes).get("activations", 0.0) == pytest.approx(0.0, abs=16.0)


def test_other_stacks_keep_their_own_habits() -> None:
    plan = race_plan(MODELS["8b-4l"], "bf16")
    other = given_plan(plan.workload, plan.hardware, plan.layout, get_stack("megatron"))
    start = dict(memory_timeline(other)[0].moments[0].nbytes)
    assert start["gradients"] == other.estimate.memory[0].grads  # buffers that are always there
    assert memory_timeline(other)[0].peak.allocated > memory_timeline(plan)[0].peak.allocated


# ---- risks ----


def texts(plan: Plan, trial: Trial | None = None) -> str:
    return "\n".join(risk.text for risk in risks(plan, memory_timeline(plan), None, trial))


def test_what_does_not_fit_is_the_first_risk() -> None:
    big = replace(MODELS["8b-4l"], batch=64)
    plan = race_plan(big, "fp8")
    run = simulated(plan)
    assert not run.fits and run.verdict.startswith("does not fit")
    assert run.risks[0].weight == 0 and "GiB over on pipeline rank 0" in run.risks[0].text
    assert [risk.weight for risk in run.risks] == sorted(risk.weight for risk in run.risks)


def test_a_narrow_margin_is_a_risk_and_a_wide_one_is_none() -> None:
    plan = race_plan(MODELS["8b-4l"], "fp8")
    assert "are left on pipeline rank" not in texts(plan)
    needed = memory_timeline(plan)[0].device_bytes
    for room, is_narrow in ((1.03, True), (1.08, False)):
        found = replace(plan.estimate, limit_gib=room * needed / 2**30)
        assert ("are left on pipeline rank" in texts(replace(plan, estimate=found))) == is_narrow


def test_risks_name_positions_routing_fabric_and_trust() -> None:
    moe = dw.autoplan("mixtral-8x7b", hw="4x8xH100", seq_len=65536, global_batch=32, ep=8)
    found = texts(moe)
    assert "is over the model's 32,768 positions" in found
    assert "the plan counts on even routing" in found
    assert "nothing was measured on H100" in found
    wide = replace(moe.layout, tp=16, dp=2, cp=1, ep=1, pp=1, etp=1, sharding="ddp", schedule="1f1b", virtual_stages=1,
                   stage_layers=None, dp_replicate=1)  # fmt: skip
    crossing = given_plan(moe.workload, moe.hardware, wide, moe.stack)
    assert "TP 16 reaches over NVLink domains of 8" in texts(crossing)


def test_a_prediction_that_was_off_is_a_risk() -> None:
    plan = race_plan(MODELS["8b-4l"], "fp8")
    trial = Trial(
        what="", device="", steps=1, predicted_s=1.2, predicted_bytes=1.0, tier="table", step_s=1.0, peak_bytes=1.0
    )
    assert "step time was predicted +20% off" in texts(plan, trial)
    assert "memory was predicted" not in texts(plan, trial)
    failed = replace(trial, step_s=None, peak_bytes=None, problem="out of memory: tried to allocate")
    assert "the real steps did not run: out of memory" in texts(plan, failed)


# ---- measured curves ----


def test_curves_measured_on_the_device_correct_the_rates() -> None:
    gpu = dw.probe("H200").gpus[0]
    assert measured_constants(gpu) is None  # a table is no measurement
    base = planner_device(gpu)
    shape = (8192, 8192, 8192)
    slow = 2 * 8192**3 / gemm_s(base, "bf16", *shape) / 1.25e12  # this card takes a quarter longer
    curve = Curve(
        format="bf16", tier="measured", source="test", points=(GemmPoint(m=8192, n=8192, k=8192, tflops=slow),)
    )
    found = measured_constants(replace(gpu, curves=(curve, *gpu.curves)))
    assert found is not None and found.gemm_bf16 == pytest.approx(base.constants.gemm_bf16 / 1.25, rel=1e-3)
    assert found.gemm_fp8 == base.constants.gemm_fp8


def test_the_engines_plan_says_what_the_engine_does() -> None:
    engine = tiny_engine()
    plan = engine_plan(engine, 2, 32, 3)
    assert plan.accumulation == 3 and plan.layout.micro_batch == 2 and plan.gpus == 1
    assert plan.workload.optimizer == "adamw_fp32"
    assert plan.workload.ir.module is None
    assert plan.estimate == estimate(plan.workload, plan.hardware, plan.layout, plan.stack)
    again = dw.compile(dw.capture(engine.deepwell.model), precision="bf16", recompute=True)
    assert engine_plan(again, 2, 32).layout.recompute.kind == "full"


def test_a_plan_of_one_device_is_tried_as_planned() -> None:
    # The optimizer's state, the micro-batches and the batch of the plan: then the measured figures are the plan's own.
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).bfloat16()
    ir = dw.capture(model)
    plan = dw.autoplan(
        replace(ir, module=None, graph=None), hw=local_hardware(torch.device("cpu")), seq_len=32, global_batch=4,
        precision="bf16", micro_batch=2,
    )  # fmt: skip
    run = dw.dryrun(dw.compile(ir, plan=plan), steps=1)
    assert plan.workload.optimizer == "adamw"
    assert run.trial is not None and "2 x 32 tokens, 2 micro-batches, adamw" in run.trial.what
    assert run.figure("step").how == "measured" and run.figure("peak_allocated").how == "measured"
    # bf16 weights, fp32 master weights and two fp32 moments.
    assert run.trial.peak_bytes > 14 * plan.workload.ir.num_params  # type: ignore[operator]


@pytest.mark.gpu
def test_on_a_gpu_steps_are_measured_and_leave_no_trace() -> None:
    model = replace(MODELS["tiny"], batch=4, seq_len=256)
    net = model.build("cuda")
    example = model.example("cuda")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.cuda.get_rng_state()
    run = dw.dryrun(dw.compile(dw.capture(net, example), precision="fp8"), batch=example, steps=2)
    assert run.trial is not None and run.trial.memory_by == "torch.cuda.max_memory_allocated"
    assert run.trial.peak_bytes > 6 * sum(p.numel() for p in net.parameters())  # type: ignore[operator]
    assert len(set(run.trial.losses)) > 1
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(p.grad is None for p in net.parameters())
