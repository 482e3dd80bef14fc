"""Whatever the search varies can be fixed and forbidden, in Python and on the command line; nonsense has a name."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from deepwell.cli import app
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.planner.estimate import estimate
from deepwell.planner.layout import Overlap
from deepwell.planner.plan import Plan
from deepwell.planner.search.autoplan import autoplan
from deepwell.planner.search.constraints import CONSTRAINTS, read_constraints
from deepwell.precision.policy import PrecisionPolicy

TINY = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_hidden_layers": 6, "vocab_size": 1024, "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}  # fmt: skip
TINY_MOE = {**TINY, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


def tiny(**changes: Any) -> Plan:
    request: dict[str, Any] = {"ir": TINY, "hw": "8xH100", "seq_len": 2048, "global_batch": 32, **changes}
    return autoplan(request.pop("ir"), **request)


def big(**changes: Any) -> Plan:
    request: dict[str, Any] = {"hw": "8xH100", "seq_len": 2048, "global_batch": 64, **changes}
    return autoplan("llama3-8b", **request)


# ---- what is asked for holds ----


@pytest.mark.parametrize(
    ("given", "holds"),
    [
        ({"dp_replicate": 2, "sharding": "zero3"}, lambda p: p.layout.dp_replicate == 2),
        ({"dp": 4}, lambda p: p.layout.dp == 4),
        ({"gpus": 4}, lambda p: p.gpus == 4),
        ({"schedule": "interleaved", "pp": 2}, lambda p: p.layout.schedule == "interleaved"),
        ({"virtual_stages": 3, "pp": 2, "schedule": "interleaved"}, lambda p: p.layout.virtual_stages == 3),
        ({"recompute": ["none", "block"]}, lambda p: p.layout.recompute.kind in ("none", "block")),
        ({"offload": "optimizer"}, lambda p: (p.layout.offload.optimizer, p.layout.offload.activations) == (1.0, 0.0)),
        ({"offload": "none"}, lambda p: p.layout.offload.optimizer == p.layout.offload.activations == 0.0),
        ({"overlap": False}, lambda p: p.layout.overlap == Overlap(tp=False, grad_reduce=False, param_gather=False,
                                                                   ep=False, pp=False)),
        ({"overlap": {"tp": True}}, lambda p: p.layout.overlap == Overlap(tp=True)),
        ({"overlap": ["ep"]}, lambda p: (p.layout.overlap.ep, p.layout.overlap.tp) == (True, False)),
        ({"stage_layers": [2, 4], "pp": 2}, lambda p: p.stage_layers == (2, 4)),
        ({"stage_layers": "even", "pp": 2, "schedule": "1f1b"}, lambda p: p.stage_layers == (3, 3)),
        ({"kernels": ["cublaslt-fp8-rowwise"]}, lambda p: {k.kernel for k in p.kernels} <= {"cublaslt-fp8-rowwise",
                                                                                          "torch"}),
        ({"cuda_graphs": True, "gpus": 1}, lambda p: p.layout.cuda_graphs),
        ({"sequence_parallel": True, "tp": 2}, lambda p: p.layout.sequence_parallel),
    ],
)  # fmt: skip
def test_a_constraint_holds_and_stands_in_the_plan(given: dict[str, Any], holds: Any) -> None:
    found = tiny(**given)
    assert holds(found)
    for name in given:
        assert name in found.constraints
    assert Plan.from_json(found.to_json()) == found


def test_splits_inside_experts_can_be_asked_for_and_forbidden() -> None:
    assert tiny(ir=TINY_MOE, tp=2, etp=2, stack="generic").layout.etp == 2
    assert tiny(ir=TINY_MOE, tp=2, etp=1, stack="generic").layout.etp == 1


def test_forbidden_overlap_is_never_faster() -> None:
    # The same layout, priced both ways: the constraint reaches the cost model, not only the plan's words.
    found = big(sharding="zero3", tp=2)
    hidden, plain = (
        estimate(found.workload, found.hardware, replace(found.layout, overlap=overlap), found.stack).step_s
        for overlap in (Overlap(), Overlap(tp=False, grad_reduce=False, param_gather=False))
    )
    assert plain > hidden


def test_block_recomputation_alone_goes_as_far_as_memory_asks_for() -> None:
    # One layer of each stage is not enough here; the ladder must not end there.
    found = big(recompute="block", seq_len=8192, max_memory=60, pp=1, tp=1, cp=1, micro_batch=4, offload="none")
    assert found.layout.recompute.kind == "block" and (found.layout.recompute.layers or 0) > 1
    assert found.peak_gib <= 60


def test_a_limit_above_the_gpus_memory_promises_no_more_than_there_is() -> None:
    found = big(max_memory=500)
    assert found.limit_gib == pytest.approx((found.hardware.memory_bytes or 0) / 2**30)
    assert found.peak_gib <= found.limit_gib


def test_what_needs_a_pipeline_says_so_where_there_is_none() -> None:
    assert any("schedule had nothing to decide" in note for note in tiny(pp=1, schedule="interleaved").notes)
    assert any("gpus= asks for it" in note for note in tiny(gpus=4).notes)


# ---- what is wrong has a name ----


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sharding": 5}, "sharding: got 5"),
        ({"recompute": ()}, "empty list"),
        ({"max_memory": float("nan")}, "max_memory: got nan"),
        ({"max_memory": float("inf")}, "max_memory: got inf"),
        ({"overlap": "dp"}, "overlap: got 'dp'; accepted: tp, grad_reduce"),
        ({"overlap": {"tp": 1}}, "True or False"),
        ({"stage_layers": 3}, "layers of each stage"),
        ({"stage_layers": [0, 6]}, "stage_layers: got 0"),
        ({"kernels": "cuda"}, "kernels: got 'cuda'; accepted: cublaslt-bf16"),
        ({"offload": 7}, "offload: got 7"),
        ({"sequence_parallel": "no"}, "True or False"),
    ],
)
def test_constraints_that_make_no_sense_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_constraints(given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dp_replicate": 3}, "HSDP 3: DP 8 does not divide"),
        ({"dp_replicate": 2, "tp": 4, "pp": 2}, "HSDP 2: DP 1 does not divide"),
        ({"micro_batch": 3}, "MBS 3: the 4 sequences of each of DP 8 do not divide"),
        ({"stage_layers": [3, 4], "pp": 2}, "adds up to 7; llama has 6 layers"),
        ({"moe": 5}, "moe: got 5; a mapping"),
        ({"arch": 5}, "arch: got 5"),
        ({"stack": 5}, "stack: got 5"),
        ({"optimizer": [1]}, "optimizer is"),
        ({"precision": []}, "precision: got an empty list"),
        ({"ir": TINY_MOE, "moe": {"capacity_factor": float("nan")}}, "capacity_factor is nan"),
    ],
)
def test_requests_that_cannot_be_met_are_config_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny(**changes)


def test_a_capacity_that_drops_nothing_is_noted() -> None:
    found = tiny(ir=TINY_MOE, moe={"capacity_factor": 1.25})
    assert any("drops nothing" in note for note in found.notes)
    tight = tiny(ir=TINY_MOE, moe={"capacity_factor": 1.1, "imbalance": 1.5})
    assert not any("drops nothing" in note for note in tight.notes)


def test_a_format_that_the_gpu_has_not_is_a_warning() -> None:
    assert any("nvfp4 is not native to H100" in w for w in tiny(precision="nvfp4").warnings)
    assert not tiny(precision="fp8").warnings


def test_a_cpu_is_not_advised_to_buy_gpus() -> None:
    from deepwell.errors import PlanError
    from deepwell.hardware.probe import probe

    here = probe()
    if here.kind != "cpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(PlanError) as caught:
        autoplan("llama3-405b", here, seq_len=512, global_batch=4)
    assert "GPUs" not in str(caught.value)


# ---- placement ----


def test_activations_alone_move_to_the_host_where_that_is_enough() -> None:
    # One long sequence on one GPU: the state fits, what the backward needs does not; moving the state is slower.
    request: dict[str, Any] = {"seq_len": 1 << 20, "global_batch": 1, "recompute": "none", "precision": "bf16"}
    # Two of the 24 layers' stay on the GPU.
    found = autoplan({**TINY, "num_hidden_layers": 24}, "1xH100", stack="generic", **request)
    assert (found.layout.offload.optimizer, found.layout.offload.activations) == (0.0, 1.0)
    assert any(note.startswith("the activations in host memory: nothing fits") for note in found.notes)


# ---- reasons ----


def test_what_a_bound_leaves_out_is_not_given_as_the_reason() -> None:
    # DualPipeV's pairs may hide the experts' exchanges, so the bound of a pipeline does not count them.
    found = autoplan("deepseek-v3", "32x8xH800", seq_len=4096, global_batch=960, precision="fp8", stack="generic")
    slower = [one for one in found.rejected if one.kind == "slower" and "PP" in one.family]
    assert slower
    assert not any("expert dispatch" in one.reason for one in slower)
    # Nor is a family left shut whose bound is below what the plan takes once it is simulated.
    assert not any("at best -" in one.reason for one in slower)


# ---- exports drop nothing in silence ----


def test_what_an_export_has_no_words_for_is_refused() -> None:
    plan = big(stack="megatron", precision="fp8")
    mixed = PrecisionPolicy.recipe("fp8")
    mixed.set_layer_precision("attention", "bf16")
    assert plan.export("megatron")
    for changed, words in (
        (replace(plan, workload=replace(plan.workload, policy=mixed.freeze())), "rules of its own"),
        (replace(plan, layout=replace(plan.layout, cuda_graphs=True)), "cuda_graphs"),
        (replace(plan, layout=replace(plan.layout, overlap=Overlap(tp=True))), "overlap"),
    ):
        for target in ("megatron", "megatron-bridge", "torchtitan"):
            with pytest.raises(UnsupportedError, match=words):
                changed.export(target)
        assert Plan.from_json(changed.export("deepwell")) == changed


# ---- sensitivity and diff ----


def test_sensitivity_steps_the_experts_split_and_the_copies_too() -> None:
    found = tiny(ir=TINY_MOE, tp=2, etp=1, sharding="zero3", stack="generic")
    steps = {change.what for change in found.sensitivity().changes}
    assert {"ETP 1 -> 2", "HSDP 1 -> 2"} <= steps


def test_diff_names_what_a_request_changed() -> None:
    plain = tiny(gpus=1)
    for changes, word in (({"optimizer": "adamw_8bit"}, "optimizer"), ({"cuda_graphs": True}, "cuda_graphs"),
                          ({"overlap": False}, "overlap"), ({"precision": "bf16"}, "precision")):  # fmt: skip
        rows = [line.split()[0] for line in plain.diff(tiny(gpus=1, **changes)).splitlines()]
        assert word in rows


# ---- formats ----


def test_formats_are_chosen_among_those_that_were_named() -> None:
    slow, fast = big(precision="bf16"), big(precision="fp8")
    chosen = big(precision=["bf16", "fp8"])
    assert chosen.step_s <= min(slow.step_s, fast.step_s)
    assert any("chosen for speed among bf16" in note for note in chosen.notes)
    assert big(precision="auto").layout == chosen.layout


def test_single_layers_stay_in_bf16_where_that_is_faster() -> None:
    # Width 512: quantizing costs more than FP8 saves in some of the products.
    request: dict[str, Any] = {"hw": "8xH100", "seq_len": 1024, "global_batch": 64}
    found = autoplan("gpt2", precision="auto", **request)
    assert isinstance(found.workload.policy, PrecisionPolicy)
    each = [autoplan("gpt2", precision=name, **request).step_s for name in ("bf16", "fp8")]
    assert found.step_s < min(each)
    formats = {fmt for variant in found.workload.variants() for _, fs in variant.formats for fmt in fs}
    assert formats == {"bf16", "fp8"}
    assert Plan.from_json(found.to_json()) == found


# ---- the command line ----


def run(*arguments: str):
    small = ("--model", "llama3-8b", "--hw", "8xH100", "--seq", "2048", "--batch", "64")
    return CliRunner().invoke(app, ["plan", *small, *arguments])


def test_every_constraint_has_an_option() -> None:
    shown = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200"}).stdout
    names = {"context_parallel_kind": "cp-kind"}
    missing = [name for name in CONSTRAINTS if f"--{names.get(name, name.replace('_', '-'))}" not in shown]
    assert not missing


@pytest.mark.parametrize(
    ("arguments", "holds"),
    [
        (("--offload", "both", "--stack", "generic"), lambda p: p.layout.offload.activations == 1.0),
        (
            ("--tp", "2,4", "--no-sequence-parallel", "--stack", "generic"),
            lambda p: p.layout.tp in (2, 4) and not p.layout.sequence_parallel,
        ),
        (("--sharding", "zero2,zero3", "--dp-replicate", "2"), lambda p: p.layout.dp_replicate == 2),
        (("--pp", "2", "--stage-layers", "15,17"), lambda p: p.stage_layers == (15, 17)),
        (("--overlap", "none", "--gpus", "4"), lambda p: p.layout.overlap.pp is False and p.gpus == 4),
        (("--precision", "bf16,fp8", "--arch", "hopper"), lambda p: p.workload.policy == "fp8"),
        (("--moe", "experts=8"), lambda p: any("changes nothing" in note for note in p.notes)),
    ],
)
def test_options_reach_the_plan(arguments: tuple[str, ...], holds: Any) -> None:
    found = run(*arguments, "--json")
    assert found.exit_code == 0, found.output
    assert holds(Plan.from_json(found.stdout))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tp", "two"), "--tp: got 'two'"),
        (("--offload", "disk"), "offload: got 'disk'"),
        (("--moe", "experts"), "--moe: got 'experts'"),
        (("--stage-layers", "a,b"), "--stage-layers: got 'a,b'"),
        (("--overlap", "everything"), "overlap: got 'everything'"),
    ],
)
def test_options_that_make_no_sense_are_one_line(arguments: tuple[str, ...], words: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 2 and words in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_a_dry_run_that_cannot_be_planned_says_so_in_json() -> None:
    arguments = ["dryrun", "--model", "llama3-405b", "--hw", "8xH100", "--seq", "8192", "--batch", "64", "--json"]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 3
    assert json.loads(found.stdout)["fits"] is False
