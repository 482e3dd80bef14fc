"""Exports use only names that the other engines publish, and say what the plan says."""

import ast
import inspect
import json
import re
import shlex
from dataclasses import replace
from importlib import resources
from types import ModuleType
from typing import Any

import pytest

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.planner.export import megatron as export_megatron
from deepwell.planner.export import torchtitan as export_torchtitan
from deepwell.planner.export.low_layers import low_layers
from deepwell.planner.export.megatron import bridge_overrides, megatron_arguments, stage_string
from deepwell.planner.export.targets import export
from deepwell.planner.export.torchtitan import MODELS, torchtitan_config
from deepwell.planner.layout import Offload
from deepwell.planner.plan import Plan
from deepwell.planner.search.autoplan import autoplan
from deepwell.precision.policy import PrecisionPolicy

NAMES = json.loads((resources.files("deepwell.planner") / "export_names.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def dense() -> Plan:
    return autoplan("llama3-70b", "8x8xH100", seq_len=4096, global_batch=256, stack="megatron", tp=4, pp=4)


@pytest.fixture(scope="module")
def experts() -> Plan:
    fixed: dict[str, Any] = {"tp": 1, "pp": 8, "ep": 64, "cp": 1, "micro_batch": 1}
    moe = {"capacity_factor": 1.25}
    return autoplan("deepseek-v3", "64x8xH100", seq_len=4096, global_batch=4096, stack="megatron", moe=moe, **fixed)


def test_the_names_carry_their_source_and_commit() -> None:
    for engine in ("megatron-lm", "megatron-bridge", "torchtitan"):
        assert re.fullmatch(r"[0-9a-f]{40}", NAMES[engine]["commit"])
        assert NAMES[engine]["source"]


def parsed(arguments: list[str]) -> dict[str, str]:
    pairs = {}
    for line in arguments:
        words = shlex.split(line)
        pairs[words[0]] = " ".join(words[1:])
    return pairs


def test_megatron_arguments_are_published_and_true(dense: Plan, experts: Plan) -> None:
    for plan in (dense, experts):
        found = parsed(megatron_arguments(plan))
        unknown = set(found) - set(NAMES["megatron-lm"]["arguments"])
        assert not unknown
        layout = plan.layout
        assert found["--tensor-model-parallel-size"] == str(layout.tp)
        assert found["--pipeline-model-parallel-size"] == str(layout.pp)
        assert found["--micro-batch-size"] == str(layout.micro_batch)
        assert found["--global-batch-size"] == str(plan.workload.global_batch)
        assert found["--num-layers"] == str(plan.workload.ir.num_layers)
        # Megatron accepts one way of saying how stages are cut, not two.
        assert ("--pipeline-model-parallel-layout" in found) + ("--num-virtual-stages-per-pipeline-rank" in found) <= 1


def test_the_model_shape_is_read_from_the_ir(dense: Plan, experts: Plan) -> None:
    llama = parsed(megatron_arguments(dense))
    assert (llama["--hidden-size"], llama["--ffn-hidden-size"]) == ("8192", "28672")
    assert llama["--num-query-groups"] == "8"
    assert {"--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"} <= set(llama)
    deepseek = parsed(megatron_arguments(experts))
    assert deepseek["--num-experts"] == "256"
    assert deepseek["--moe-router-topk"] == "8"
    assert deepseek["--q-lora-rank"] == "1536"
    assert deepseek["--kv-lora-rank"] == "512"
    assert (deepseek["--qk-head-dim"], deepseek["--qk-pos-emb-head-dim"], deepseek["--v-head-dim"]) == (
        "128",
        "64",
        "128",
    )
    assert deepseek["--moe-layer-freq"].startswith("([0,0,0,1,1")
    assert deepseek["--moe-expert-capacity-factor"] == "1.25"
    assert "--num-query-groups" not in deepseek


def test_uneven_stages_are_written_as_megatron_reads_them(experts: Plan) -> None:
    # Its grammar: E embedding, t a layer, L the loss, "|" between stages, "*n" repeats.
    text = stage_string(experts)
    stages = [re.sub(r"t\*(\d+)", lambda m: "t" * int(m[1]), stage) for stage in text.split("|")]
    assert len(stages) == experts.layout.num_stages
    assert sum(stage.count("t") for stage in stages) == 61
    assert stages[0].startswith("E")
    assert stages[-1].endswith("L")


def test_bridge_overrides_are_published_and_true(dense: Plan, experts: Plan) -> None:
    allowed = {*NAMES["megatron-bridge"]["overrides"], "mixed_precision"}
    for plan in (dense, experts):
        pairs = dict(item.split("=", 1) for item in bridge_overrides(plan))
        assert set(pairs) <= allowed
        assert pairs["mixed_precision"] in NAMES["megatron-bridge"]["mixed_precision"]
        assert pairs["model.tensor_model_parallel_size"] == str(plan.layout.tp)
        assert pairs["train.global_batch_size"] == str(plan.workload.global_batch)


@pytest.mark.parametrize("model", ["llama3-70b", "qwen3-30b-a3b"])
def test_torchtitan_configs_use_published_names(model: str) -> None:
    plan = autoplan(model, "8x8xH100", seq_len=4096, global_batch=256, stack="torchtitan")
    tree = ast.parse(torchtitan_config(plan))
    calls = {ast.unparse(n.func): n for n in ast.walk(tree) if isinstance(n, ast.Call)}
    parallelism = {k.arg: ast.unparse(k.value) for k in calls["ParallelismConfig"].keywords}
    assert set(parallelism) <= set(NAMES["torchtitan"]["parallelism"])
    assert parallelism["tensor_parallel_degree"] == str(plan.layout.tp)
    assert parallelism["expert_parallel_degree"] == str(plan.layout.ep)
    shards, copies = parallelism["data_parallel_shard_degree"], parallelism["data_parallel_replicate_degree"]
    assert int(shards) * int(copies) == plan.layout.dp
    assigned = {ast.unparse(t) for n in ast.walk(tree) if isinstance(n, ast.Assign) for t in n.targets}
    training = {name.removeprefix("config.training.") for name in assigned if name.startswith("config.training.")}
    assert training <= set(NAMES["torchtitan"]["training"])
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    converters = {name for name in imported if name.endswith("Converter")}
    assert converters
    assert converters <= set(NAMES["torchtitan"]["converters"])


def test_torchtitan_stages_hold_every_module_once() -> None:
    plan = autoplan("llama3-8b", "8xH100", seq_len=4096, global_batch=64, stack="torchtitan", pp=2, sharding="zero3")
    tree = ast.parse(torchtitan_config(plan))
    value = next(
        k.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Call)
        for k in n.keywords
        if k.arg == "module_fqns_per_model_part"
    )
    parts = ast.literal_eval(value)
    flat = [name for part in parts for name in part]
    assert flat == ["tok_embeddings", *(f"layers.{i}" for i in range(32)), "norm", "lm_head"]
    assert len(parts) == plan.layout.num_stages


def test_every_known_model_is_in_torchtitans_registry() -> None:
    for known in MODELS.values():
        registry = NAMES["torchtitan"]["models"][known.module]
        assert known.base in registry["configs"]
        assert known.flavor in registry["flavors"]


def test_what_an_engine_cannot_run_is_refused_with_what_to_plan_instead() -> None:
    request: dict[str, Any] = {"seq_len": 4096, "global_batch": 64}
    zbv = autoplan("llama3-8b", "8xH100", pp=2, schedule="zbv", stack="generic", **request)
    with pytest.raises(UnsupportedError, match="stack='megatron'"):
        export(zbv, "megatron")
    zero1 = autoplan("llama3-8b", "8xH100", sharding="zero1", **request)
    with pytest.raises(UnsupportedError, match="FSDP2"):
        export(zero1, "torchtitan")
    unknown = autoplan("gpt2", "8xH100", seq_len=1024, global_batch=64, stack="torchtitan")
    with pytest.raises(UnsupportedError, match="registry has no such model"):
        export(unknown, "torchtitan")
    with pytest.raises(ConfigError, match="accepted: deepwell"):
        export(zbv, "jax")


def literals(module: ModuleType) -> set[str]:
    """Every string in the module's code, f-strings by their pieces, docstrings apart."""
    tree = ast.parse(inspect.getsource(module))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = {
        id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, documented) and isinstance(n.body[0], ast.Expr)
    }
    constants = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return {n.value for n in constants if id(n) not in docs}


def test_no_name_that_the_code_could_write_is_missing_from_the_published_ones() -> None:
    # Plans reach only some branches; the code itself has them all.
    texts = literals(export_megatron)
    flags = {word for text in texts for word in re.findall(r"--[a-z0-9][a-z0-9-]+", text)}
    assert len(flags) > 50 and flags <= set(NAMES["megatron-lm"]["arguments"])
    recompute = {text for text in texts if text.startswith("recompute_")}
    assert {"--" + name.replace("_", "-") for name in recompute} <= set(NAMES["megatron-lm"]["arguments"])
    allowed = {*NAMES["megatron-bridge"]["overrides"]}
    sections = {text for text in texts if re.fullmatch(r"(model|train|ddp|dist|dataset|optimizer)\.[a-z0-9_]+", text)}
    assert len(sections) > 15 and sections <= allowed
    assert {f"model.{name}" for name in recompute} <= allowed
    titan = literals(export_torchtitan)
    arguments = {found[1] for text in titan if (found := re.match(r'([a-z_]+)="?$', text))}
    assert len(arguments) > 8 and arguments <= set(NAMES["torchtitan"]["parallelism"])
    training = {name for text in titan for name in re.findall(r"config\.training\.([a-z_]+)", text)}
    assert len(training) == 5 and training <= set(NAMES["torchtitan"]["training"])
    converters = {name for text in titan for name in re.findall(r"\w+Converter", text)}
    assert len(converters) == 5 and converters <= set(NAMES["torchtitan"]["converters"])


def test_what_the_optimizer_keeps_is_exported_or_refused(dense: Plan) -> None:
    lean = replace(dense, workload=replace(dense.workload, optimizer="adamw_bf16_moments"))
    found = parsed(megatron_arguments(lean))
    assert set(found) <= set(NAMES["megatron-lm"]["arguments"])
    assert (found["--exp-avg-dtype"], found["--exp-avg-sq-dtype"]) == ("bf16", "bf16")
    assert "--use-precision-aware-optimizer" in found and "--exp-avg-dtype" not in parsed(megatron_arguments(dense))
    with pytest.raises(UnsupportedError, match="adamw_bf16_moments"):
        bridge_overrides(lean)
    for name in ("muon", "sgd", "adamw_pure_bf16"):
        other = replace(dense, workload=replace(dense.workload, optimizer=name))
        with pytest.raises(UnsupportedError, match=name):
            megatron_arguments(other)


def test_activations_in_host_memory_are_not_dropped_in_silence(dense: Plan) -> None:
    away = replace(dense, layout=replace(dense.layout, offload=Offload(activations=1.0)))
    for target in ("megatron", "megatron-bridge"):
        with pytest.raises(UnsupportedError, match="host memory"):
            export(away, target)


def test_deepwells_own_export_is_the_plan(dense: Plan) -> None:
    assert Plan.from_json(dense.export("deepwell")) == dense


# ---- formats: head, router and a recipe's ends stay in bf16 there too ----


def planned(model: str, hw: str, **changes: Any) -> Plan:
    return autoplan(model, hw, **{"seq_len": 4096, "global_batch": 256, **changes})


@pytest.mark.parametrize(
    ("model", "ends"),
    [
        ("llama3-8b", ("2", "5")),  # 15% of 32 layers is 4.8
        ("llama3-70b", ("2", "12")),
        ("deepseek-v3", ("2", "10")),  # dense and expert layers count alike
    ],
)
def test_megatron_keeps_the_ends_of_nvfp4_in_bf16(model: str, ends: tuple[str, str]) -> None:
    plan = planned(model, "32x8xB200", stack="megatron", precision="nvfp4", global_batch=1024)
    found = parsed(megatron_arguments(plan))
    assert set(found) <= set(NAMES["megatron-lm"]["arguments"])
    assert (found["--fp4-format"], found["--first-last-layers-bf16"]) == ("e2m1", "")
    assert (found["--num-layers-at-start-in-bf16"], found["--num-layers-at-end-in-bf16"]) == ends
    low = {i for v in plan.workload.variants() for i in v.layers if any("nvfp4" in each for _, each in v.formats)}
    assert low == set(range(int(ends[0]), plan.workload.ir.num_layers - int(ends[1])))
    with pytest.raises(UnsupportedError, match="one precision for all layers; export 'megatron'"):
        bridge_overrides(plan)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8"])
def test_megatron_gets_no_ends_where_the_recipe_has_none(precision: str) -> None:
    plan = planned("llama3-8b", "8xB200", stack="megatron", precision=precision)
    found = parsed(megatron_arguments(plan))
    assert not {name for name in found if "layers-" in name and "bf16" in name}
    # Deepwell's fp8 has E5M2 gradients, its mxfp8 has none.
    assert found.get("--fp8-format") == {"bf16": None, "fp8": "hybrid", "mxfp8": "e4m3"}[precision]


def converter_arguments(plan: Plan) -> dict[str, dict[str, str]]:
    calls = [n for n in ast.walk(ast.parse(torchtitan_config(plan))) if isinstance(n, ast.Call)]
    named = {ast.unparse(n.func).removesuffix(".Config"): n for n in calls}
    return {
        name: {k.arg or "": ast.unparse(k.value) for k in call.keywords}
        for name, call in named.items()
        if name.endswith("Converter")
    }


def test_torchtitan_converts_the_layers_that_the_recipe_lowers() -> None:
    plan = planned("llama3-8b", "8xB200", stack="torchtitan", precision="nvfp4")
    found = converter_arguments(plan)["NVFP4LinearConverter"]
    assert ast.literal_eval(found["fqns"]) == [f"layers.{i}." for i in range(2, 27)]


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_torchtitan_leaves_head_and_router_in_bf16(model: str, precision: str) -> None:
    found = converter_arguments(planned(model, "8x8xB200", stack="torchtitan", precision=precision))
    paths = ["lm_head", "layers.3.attention.wq", "layers.3.feed_forward.w1", "layers.3.moe.router.gate"]
    paths = paths[:3] if model.startswith("llama") else [*paths[:2], paths[3]]
    for name, arguments in found.items():
        assert set(arguments) <= set(NAMES["torchtitan"]["converter_arguments"][name])
        if name.endswith("LinearConverter"):
            words = ast.literal_eval(arguments.get("fqns") or arguments["filter_fqns"])
            matched = {path for path in paths if any(word in path for word in words)}
            lowered = matched if "fqns" in arguments else set(paths) - matched
            assert lowered == {path for path in paths if "attention" in path or "feed_forward" in path}


def test_torchtitan_has_no_nvfp4_experts() -> None:
    plan = planned("qwen3-30b-a3b", "8x8xB200", stack="torchtitan", precision="nvfp4")
    with pytest.raises(UnsupportedError, match="no converter for experts"):
        torchtitan_config(plan)


def test_a_low_run_with_a_gap_is_refused(dense: Plan) -> None:
    mixed = PrecisionPolicy.recipe("mxfp8")
    mixed.set_layer_precision("model.layers.7.*", "bf16")
    with pytest.raises(UnsupportedError, match="layer 7 stays in bf16 between lower ones"):
        low_layers(replace(dense, workload=replace(dense.workload, policy=mixed.freeze())))
