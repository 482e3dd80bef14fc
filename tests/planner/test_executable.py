"""What Deepwell's trainer does not execute is in no default plan, has its reason, and is refused where asked for."""

from dataclasses import replace
from typing import Any

import pytest

from deepwell.errors import ConfigError
from deepwell.graph.configs import published_config
from deepwell.graph.ir import IR
from deepwell.hardware.names import named_hardware
from deepwell.planner.executable import check_constraints, why_not_executable
from deepwell.planner.layout import Layout, Offload, Recompute
from deepwell.planner.plan import Plan
from deepwell.planner.search.autoplan import autoplan
from deepwell.planner.search.constraints import read_constraints
from deepwell.planner.search.space import context_kind, make_space
from deepwell.planner.stack import get_stack
from deepwell.planner.workload import Workload
from deepwell.precision.policy import PrecisionPolicy

DEEPWELL = get_stack("deepwell")
TINY = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_hidden_layers": 6, "vocab_size": 1024, "max_position_embeddings": 1 << 20,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MOE = {**TINY, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


def work(config: dict[str, Any] | None = None, policy: Any = "bf16", seq_len: int = 2048) -> Workload:
    return Workload(ir=IR.from_config(config or TINY), seq_len=seq_len, global_batch=32, policy=policy)


def fp8_by_blocks() -> PrecisionPolicy:
    policy = PrecisionPolicy.recipe("fp8")
    policy.set_layer_precision("*", "fp8_1x128")
    return policy.freeze()


def tp2(**changes: Any) -> Layout:
    return Layout(dp=2, **{"tp": 2, "sequence_parallel": True, **changes})


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(dp=2, pp=2, schedule="zero_bubble"), "schedule zero_bubble: the compiled backward is one graph"),
        (Layout(dp=2, pp=2, schedule="zbv", virtual_stages=2), "schedule zbv"),
        (Layout(dp=2, pp=2, schedule="dualpipev", virtual_stages=2), "schedule dualpipev"),
        (Layout(dp=1, tp=8, sequence_parallel=True), "TP 8: 4 KV heads"),
        (Layout(dp=2, cp=2), "CP 2: kind ring is not executed, ulysses and allgather are"),
        (Layout(dp=1, cp=16, context_parallel_kind="ulysses"), "CP 16: 8 heads and 4 KV heads (ulysses)"),
        (tp2(cp=8, context_parallel_kind="ulysses"), "CP 8: 4 heads and 2 KV heads on each of TP 2 (ulysses)"),
        (tp2(cp=2048, context_parallel_kind="allgather"), "CP 2048 x TP 2: a sequence of 2,048 does not divide"),
        (tp2(etp=2), "ETP 2: experts are not split inside"),
        (Layout(dp=1, cp=3, context_parallel_kind="allgather"), "CP 3: a sequence of 2,048 does not divide"),
        (Layout(dp=2, etp=2), "ETP 2: experts are not split inside"),
        (Layout(dp=8, pp=8), "PP 8: 1F1B with 4 micro-batches, one for each rank at least"),
        (Layout(dp=1, offload=Offload(optimizer=1.0)), "offload optimizer: only where states are sharded"),
        (Layout(dp=2, sharding="ddp", offload=Offload(optimizer=1.0)), "offload optimizer: only where states"),
        (Layout(dp=2, cuda_graphs=True), "cuda_graphs on 2 GPUs: one process only"),
        (Layout(dp=2, offload=Offload(activations=0.5)), "offload activations 0.5: all of them or none"),
        (Layout(dp=2, offload=Offload(optimizer=0.5)), "offload optimizer 0.5: all of them or none"),
        (
            Layout(dp=2, offload=Offload(activations=1.0), recompute=Recompute(kind="full")),
            "offload activations with recompute full",
        ),
        (Layout(dp=1, offload=Offload(activations=1.0), cuda_graphs=True), "offload activations with cuda_graphs"),
        (Layout(dp=2, recompute=Recompute(kind="selective", modules=("mlp",))), "recompute selective:mlp"),
    ],
)
def test_what_is_not_executed_has_its_reason_here_and_none_elsewhere(layout: Layout, words: str) -> None:
    assert why_not_executable(layout, work(MOE), DEEPWELL).startswith(words)
    assert why_not_executable(layout, work(MOE), get_stack("generic")) == ""


@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(dp=4, sharding=kind) for kind in ("ddp", "zero1", "zero2", "zero3")),
        Layout(dp=4, sharding="zero3", dp_replicate=2),
        Layout(dp=2, pp=2),
        Layout(dp=2, pp=2, schedule="gpipe"),
        Layout(dp=2, pp=2, schedule="interleaved", virtual_stages=3),
        Layout(dp=1, cuda_graphs=True),
        Layout(dp=2, cp=8, context_parallel_kind="ulysses"),  # each key head is repeated
        Layout(dp=2, cp=32, context_parallel_kind="allgather"),
        Layout(dp=4, ep=4),
        tp2(),
        tp2(ep=4),
        tp2(pp=2, ep=2),
        tp2(cp=2, ep=8, context_parallel_kind="ulysses"),
        tp2(cp=4, context_parallel_kind="ulysses"),  # 2 key heads of a rank are repeated
        tp2(cp=16, context_parallel_kind="allgather"),
        Layout(dp=2, pp=2, cp=2, ep=4, context_parallel_kind="ulysses"),
        Layout(dp=4, offload=Offload(optimizer=1.0, activations=1.0)),
        Layout(dp=1, offload=Offload(activations=1.0), recompute=Recompute(kind="selective")),
        Layout(dp=4, recompute=Recompute(kind="selective")),
        Layout(dp=4, recompute=Recompute(kind="block", layers=2)),
        Layout(dp=4, recompute=Recompute(kind="full")),
    ],
    ids=str,
)
def test_what_is_executed_has_no_reason(layout: Layout) -> None:
    assert why_not_executable(layout, work(MOE, "mxfp8"), DEEPWELL) == ""


@pytest.mark.parametrize(
    ("policy", "width", "tp", "reason"),
    [
        ("bf16", 1032, 4, ""),
        ("mxfp8", 1024, 4, ""),
        ("mxfp8", 1088, 4, "TP 4: 1088 columns of mlp.gate_proj in 4 parts are no whole blocks of 32 (mxfp8)"),
        ("nvfp4", 1088, 4, ""),  # 272 is 17 blocks of 16
        ("nvfp4", 1056, 4, "TP 4: 1056 columns of mlp.gate_proj in 4 parts are no whole blocks of 16 (nvfp4)"),
        (fp8_by_blocks(), 1024, 2, ""),
        (fp8_by_blocks(), 1280, 4, "TP 4: 256 columns of self_attn.k_proj in 4 parts are no whole blocks of 128 (fp8)"),
        ("fp8", 1280, 4, ""),  # one scale for a tensor or a row
    ],
)
def test_tensor_parallelism_leaves_whole_blocks_on_every_rank(policy: Any, width: int, tp: int, reason: str) -> None:
    config = {**TINY, "intermediate_size": width, "num_hidden_layers": 40}  # nvfp4 keeps the outer layers in bf16
    layout = Layout(dp=1, tp=tp, sequence_parallel=True)
    assert why_not_executable(layout, work(config, policy), DEEPWELL) == reason


def test_tensor_parallelism_splits_plain_layers_and_their_tokens() -> None:
    assert why_not_executable(tp2(), work(), DEEPWELL) == ""
    assert why_not_executable(tp2(pp=2), work(), DEEPWELL) == ""
    assert why_not_executable(tp2(), work(seq_len=1001), DEEPWELL) == "TP 2: a sequence of 1,001 does not divide"
    alone = tp2(sequence_parallel=False)
    assert why_not_executable(alone, work(), DEEPWELL) == "TP 2: only with sequence parallelism"
    for model, words in (("gpt-oss-20b", "sinks"), ("deepseek-v3", "q_a_proj is no"), ("gpt2", "no single projection")):
        assert words in why_not_executable(tp2(), work(published_config(model)), DEEPWELL)
    sinks = Layout(dp=1, cp=2, context_parallel_kind="ulysses")
    assert "sinks" in why_not_executable(sinks, work(published_config("gpt-oss-20b")), DEEPWELL)


# ---- constraints ----


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "zbv"},
        {"schedule": ["zero_bubble", "dualpipev"]},
        {"etp": 2},
        {"context_parallel_kind": "ring"},
    ],
)
def test_a_constraint_that_asks_for_it_is_refused_by_name(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=f"^{name}: Deepwell's trainer does not execute this"):
        autoplan(MOE, "8xH100", seq_len=2048, global_batch=32, **given)
    check_constraints(read_constraints(given), get_stack("generic"))


def test_of_a_list_the_executable_part_is_planned_with() -> None:
    found = autoplan(TINY, "8xH100", seq_len=2048, global_batch=32, pp=2, schedule=["zbv", "1f1b"])
    assert found.layout.schedule == "1f1b"
    assert any(str(one).startswith("schedule zbv: the compiled backward") for one in found.rejected)


def test_degrees_that_leave_nothing_to_execute_say_why() -> None:
    request: dict[str, Any] = {"seq_len": 2048, "global_batch": 32}
    with pytest.raises(ConfigError, match="TP 2: only with sequence parallelism"):
        autoplan(TINY, "8xH100", tp=2, sequence_parallel=False, **request)
    with pytest.raises(ConfigError, match=r"CP 16: 8 heads and 4 KV heads \(ulysses\)"):
        autoplan(TINY, "2x8xH100", cp=16, context_parallel_kind="ulysses", **request)
    with pytest.raises(ConfigError, match=r"CP 8: 4 heads and 2 KV heads on each of TP 2 \(ulysses\)"):
        autoplan(TINY, "2x8xH100", tp=2, cp=8, context_parallel_kind="ulysses", **request)
    with pytest.raises(ConfigError, match="cuda_graphs on 8 GPUs: one process only"):
        autoplan(TINY, "8xH100", cuda_graphs=True, **request)
    with pytest.raises(ConfigError, match="offload optimizer: only where states are sharded"):
        autoplan(TINY, "1xH100", offload=True, **request)
    # Without tp there is nothing to split: the constraint decides nothing and is no error.
    assert autoplan(TINY, "8xH100", sequence_parallel=False, **request).layout.tp == 1


# ---- default plans ----


def plans() -> list[Plan]:
    big: dict[str, Any] = {"seq_len": 32_768, "global_batch": 64}
    return [
        autoplan("llama3-8b", "2x8xH100", **big),
        autoplan("mixtral-8x7b", "8xB200", seq_len=4096, global_batch=64),
        autoplan(MOE, "8xH100", pp=2, seq_len=4096, global_batch=64),
        autoplan("llama3-8b", "2x8xH100", cp=2, **big),
        autoplan("llama3-8b", "2x8xH100", tp=2, **big),
        autoplan("llama3-8b", "2x8xH100", tp=2, cp=4, **big),
        autoplan("qwen3-30b-a3b", "8xB200", tp=2, ep=4, seq_len=4096, global_batch=64),
    ]


def test_default_plans_and_their_runners_up_are_executable() -> None:
    for plan in plans():
        layouts = [plan.layout, *(one.layout for one in plan.runners_up)]
        assert not any(why_not_executable(layout, plan.workload, plan.stack) for layout in layouts)
        rules = [str(one) for one in plan.rejected if one.kind == "rule"]
        has_pipelines = plan.limits.allowed("pp") is not None or plan.layout.pp > 1
        assert not has_pipelines or any(one.startswith("schedule dualpipev, zbv, zero_bubble") for one in rules)
        fast = [change for change in plan.sensitivity().changes if change.slower is not None]
        assert not any("selective:layernorm" in change.what for change in fast)


def test_on_one_gpu_activations_move_to_the_host_and_states_do_not() -> None:
    # As on other stacks (tests/planner/search/test_constraints.py), but for the states, which are not sharded here.
    found = autoplan(TINY, "1xH100", seq_len=1 << 21, global_batch=1, recompute="none", precision="bf16")
    assert found.layout.offload == Offload(activations=1.0)
    asked = autoplan(TINY, "1xH100", seq_len=2048, global_batch=8, offload="activations")
    assert asked.layout.offload == Offload(activations=1.0) and asked.layout.recompute == Recompute()
    with pytest.raises(ConfigError, match="no layout"):
        autoplan(TINY, "1xH100", seq_len=2048, global_batch=8, offload="activations", recompute="full")
    layouts = [found.layout, *(one.layout for one in found.runners_up)]
    assert not any(why_not_executable(layout, found.workload, found.stack) for layout in layouts)


@pytest.mark.parametrize(
    ("model", "cp", "kind"),
    [("llama3-70b", 2, "ulysses"), ("llama3-70b", 64, "ulysses"), ("gpt3-175b", 64, "allgather")],
)
def test_a_sequence_is_spread_by_heads_where_they_divide(model: str, cp: int, kind: str) -> None:
    problem = replace(work(published_config(model)), seq_len=1 << 17)
    hw = named_hardware("64x8xH100")
    assert context_kind(make_space(problem, hw, DEEPWELL, read_constraints({})), cp) == kind
    assert context_kind(make_space(problem, hw, get_stack("generic"), read_constraints({})), cp) == "ring"
