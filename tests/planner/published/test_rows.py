"""Published runs as planner inputs: strict reading, switches, shapes, and a row of every source."""

import csv
import io

import pytest

from deepwell.errors import ConfigError
from deepwell.planner.published import packaged_runs, read_runs
from deepwell.planner.published.models import build_ir
from deepwell.planner.published.record import COUNTS, NUMBERS, OPTIONAL_TEXTS, TEXTS, parse_records
from deepwell.planner.published.run import build_run, parse_pp_layout

LLAMA = {
    "source": "a lab", "version": "2025", "model": "llama3-8b", "params_b": "8.03", "layers": "32", "hidden": "4096",
    "ffn": "14336", "heads": "32", "kv_heads": "8", "vocab": "128256", "gpu": "H100", "num_gpus": "16",
    "seq_len": "8192", "global_batch": "64", "micro_batch": "2", "tp": "2", "pp": "2", "cp": "1", "dp": "4",
    "dp_kind": "ZeRO-1", "precision": "BF16", "recompute": "none", "step_time_s": "2.5", "status": "ok", "tier": "A",
}  # fmt: skip
COLUMNS = (*TEXTS, *COUNTS, *NUMBERS, *OPTIONAL_TEXTS)


def as_csv(*rows, columns=COLUMNS):
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({column: row.get(column, "") for column in columns} for row in rows)
    return out.getvalue()


def run_of(**changes):
    (record,) = parse_records(as_csv({**LLAMA, **changes}), "runs.csv")
    return build_run(record)


@pytest.fixture(scope="module")
def runs():
    return packaged_runs()


# ---- the file ----


def test_a_row_becomes_workload_machine_layout_and_stack():
    run = run_of()
    assert run.reason is None
    assert (run.layout.tp, run.layout.pp, run.layout.dp, run.layout.micro_batch) == (2, 2, 4, 2)
    assert run.layout.gpus == run.hardware.num_gpus == 16
    assert (run.workload.seq_len, run.workload.global_batch) == (8192, 64)
    assert run.workload.ir.num_params == pytest.approx(8.03e9, rel=0.001)
    assert run.measured.step_s == 2.5 and run.measured.outcome == "ok"


def test_a_plus_behind_a_tier_is_still_that_tier():
    assert run_of(tier="A+").tier == "A"


def test_tokens_stand_in_for_a_step_time_that_is_not_given():
    # 64 * 8192 tokens over 16 GPUs at 4,096 a second each take 8 s.
    assert run_of(step_time_s="", tokens_per_s_per_gpu="4096").measured.step_s == pytest.approx(8.0)


def test_published_tflops_order_layouts_but_are_no_step_time():
    run = run_of(step_time_s="", model_tflops_per_gpu="400")
    flops = run.workload.ir.train_flops(64, 8192)
    assert run.measured.step_s is None and run.measured.ranking_s == pytest.approx(flops / (400e12 * 16))
    assert run_of().measured.ranking_s == 2.5


# Each: the text, and pieces that the message must hold; line and column are what a user needs to find the mistake.
MALFORMED = [
    ("", ("empty",)),
    ("source,gpu\na,b\n", ("line 1", "columns missing", "tier")),
    (as_csv(LLAMA).replace("source,version", "version,version", 1), ("line 1", "'version'", "twice")),
    (as_csv(LLAMA, {**LLAMA, "tp": "two"}), ("line 3", "'tp'", "'two'")),
    (as_csv({**LLAMA, "tp": "2.5"}), ("line 2", "'tp'", "whole number")),
    (as_csv({**LLAMA, "dp": "-4"}), ("line 2", "'dp'", "above 0")),
    (as_csv({**LLAMA, "step_time_s": "inf"}), ("line 2", "'step_time_s'", "inf")),
    (as_csv({**LLAMA, "tier": "D"}), ("line 2", "'tier'", "A, B, C")),
    (as_csv({**LLAMA, "status": ""}), ("line 2", "'status'", "blank")),
    (as_csv({**LLAMA, "gpu": ""}), ("line 2", "'gpu'", "blank")),
    (as_csv(LLAMA) + "one,two\n", ("line 3", "2 cells")),
    (as_csv(LLAMA) + '"open\n', ("line 3", "not CSV")),
]


@pytest.mark.parametrize(("text", "pieces"), MALFORMED)
def test_a_malformed_file_is_refused_with_line_and_column(text, pieces):
    with pytest.raises(ConfigError) as error:
        parse_records(text, "runs.csv")
    assert "runs.csv" in str(error.value)
    for piece in pieces:
        assert piece in str(error.value)


def test_files_that_are_not_there_or_not_text_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.csv"):
        read_runs(tmp_path / "nowhere.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_runs(tmp_path / "binary.csv")


def test_other_columns_and_a_byte_order_mark_do_no_harm(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(as_csv({**LLAMA, "extra": "x"}, columns=(*COLUMNS, "extra")), encoding="utf-8-sig")
    (run,) = read_runs(path)
    assert run.reason is None and run.row_id == "2"  # without an id the line is it


# ---- what cannot be predicted says why ----


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "TPUv4"}, "not an NVIDIA GPU"),
        ({"gpu": "GB200/GB300 (not stated)"}, "does not say which"),
        ({"gpu": "X900"}, "no machine of that name"),
        ({"tp": "", "pp": "", "dp": ""}, "does not publish the layout"),
        ({"num_gpus": "12", "tp": "8"}, "no multiple of tp"),
        ({"global_batch": ""}, "global_batch: is blank"),
        ({"global_batch": "63"}, "no multiple of dp"),
        ({"seq_len": ""}, "seq_len: is blank"),
        ({"hidden": "", "layers": "", "ffn": "", "vocab": "", "model": "secret-1"}, "neither in the row"),
        ({"status": "Kernel not available"}, "nothing was measured"),
        ({"precision": "INT3"}, "'INT3' is not known"),
        ({"model": "deepseek-v4-flash"}, "no ops in the IR"),
        ({"pp": "16", "dp": "", "tp": "1", "vpp": "8"}, "is more than 32 layers"),
    ],
)
def test_a_row_that_cannot_be_predicted_carries_its_reason(changes, reason):
    run = run_of(**changes)
    assert run.workload is None and reason in run.reason


# ---- switches ----


@pytest.mark.parametrize(
    ("changes", "switch", "value"),
    [
        ({"notes": "trial 1; kernel=flash_attention2 + RMS kernel"}, "attention", "flash2"),
        ({"notes": "trial 1; kernel=flash_attention2 + RMS kernel"}, "norms", "fused"),
        ({"notes": "trial 1; kernel=flash_attention2"}, "norms", "unfused"),
        ({"notes": "kernel=flash_attentionv1.0.8"}, "attention", "flash1"),
        ({"notes": "kernel=torch"}, "attention", "unfused"),
        ({"notes": "kernel=fused"}, "attention", "fused_softmax"),
        ({"source": "Megatron-LM SC21", "version": "2021", "gpu": "A100-80G"}, "attention", "fused_softmax"),
        ({"source": "NeMo perf summary"}, "attention", "cudnn"),
        ({"notes": "cuda_graph=full_iteration:[]"}, "cuda_graphs", "full"),
        ({"notes": "cuda_graph=transformer_engine:['attn', 'moe_router']"}, "cuda_graphs", "attn+moe_router"),
        ({"notes": "dispatcher=hybridep", "experts": "8", "topk": "2", "model": "m"}, "dispatcher", "hybridep"),
        ({"precision": "FP8 (delayed scaling)"}, "fp8_scaling", "delayed"),
        ({"precision": "FP8-CS"}, "fp8_scaling", "tensor"),
        ({"precision": "FP8 blockwise"}, "fp8_scaling", "blockwise"),
        ({"notes": "CUDA_LAUNCH_BLOCKING=1 used"}, "launch_blocking", "on"),
        ({"notes": "MP mode PURE"}, "reduce_dtype", "bf16"),
        ({"version": "NeMo 24.07 (vboost)"}, "vboost", "on"),
    ],
)
def test_switches_are_read_from_notes_version_and_precision(changes, switch, value):
    assert run_of(**changes).stack.switch(switch) == value


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("none", "none"),
        ("none (ACT_CKPT_* unset -> null)", "none"),
        ("none set in perf config", "none"),
        ("full (every layer)", "full"),
        ('selective:["mla_up_proj"]', "selective:mla_up_proj"),
        ("selective:layernorm+moe_act", "selective:layernorm+moe_act"),
        ("selective(attention core) + sequence parallel", "selective:core_attn"),
        ("selective layer", "block:8"),  # every second one of the 16 layers of a stage
    ],
)
def test_recompute_is_read_from_its_column(text, shown):
    assert str(run_of(recompute=text).layout.recompute) == shown


@pytest.mark.parametrize(
    ("kind", "sharding", "copies"),
    [
        ("DDP + distributed optimizer (ZeRO-1)", "zero1", 1),
        ("FSDP1 FULL_SHARD (ZeRO-3)", "zero3", 1),
        ("FSDP1 SHARD_GRAD_OP (ZeRO-2)", "zero2", 1),
        ("ZeRO-1 sharded within 2 GPUs", "zero1", 2),
        ("none (DP=1, no optimizer sharding)", "ddp", 1),
    ],
)
def test_sharding_is_read_from_its_column(kind, sharding, copies):
    layout = run_of(dp_kind=kind).layout
    assert (layout.sharding, layout.dp_replicate) == (sharding, copies)


def test_gpus_that_are_no_whole_nodes_are_spread_evenly():
    hw = run_of(num_gpus="12", tp="2", pp="2", global_batch="66", micro_batch="1").hardware
    assert (hw.num_nodes, hw.gpus_per_node) == (2, 6)


@pytest.mark.parametrize(
    ("gpu", "machine"),
    [
        ("H100-80G", "H100"),
        ("H100 SXM", "H100"),
        ("NVIDIA H200", "H200"),
        ("GB200 NVL72", "GB200"),
        ("B200 (DGX)", "B200"),
        ("A100-40G", "A100-40"),
        ("H100-95G-HBM2e", "H100-96G-500W"),
    ],
)
def test_gpus_are_found_however_a_source_writes_them(gpu, machine):
    assert run_of(gpu=gpu).hardware.gpus[0].name == machine


# Sources that the packaged file does not hold, as they would call themselves.
@pytest.mark.parametrize(
    ("source", "stack"),
    [
        ("Megatron-MoE-ModelZoo", "megatron"),
        ("arXiv 2603.07685 Table 11", "megatron"),
        ("MLPerf Training v5.1", "mlperf"),
        ("nanotron best-config heatmap", "nanotron"),
        ("torchtitan asyncTP 2025-06", "torchtitan"),
        ("GPT-NeoX benchmarks", "gpt-neox"),
        ("A Lab of its own", "a-lab-of-its-own"),
    ],
)
def test_sources_that_are_new_get_a_stack(source, stack):
    run = run_of(source=source)
    assert run.reason is None and run.stack.name == stack


def test_a_model_that_is_only_named_has_its_published_shape():
    run = run_of(model="llama3-70b", layers="", hidden="", ffn="", heads="", kv_heads="", vocab="", params_b="")
    assert run.workload.ir.num_params == pytest.approx(70.55e9, rel=0.001)


def test_large_jobs_of_nvl72_racks_use_64_gpus_of_each():
    assert run_of(gpu="GB200", num_gpus="256", global_batch="256").hardware.nvlink_domain == 64
    assert run_of(gpu="GB200", num_gpus="72", global_batch="144", tp="2", pp="1").hardware.nvlink_domain == 72


def test_networks_that_a_source_states_replace_the_machines():
    assert run_of(notes="Jean Zay: 8xA100, 4 OmniPath links/node").hardware.fabric.nic_gb_per_s == 6.25
    assert run_of(notes="4x100Gb RoCE per node").hardware.fabric.nic_gb_per_s == 6.25
    assert run_of(notes="400Gb/s RDMA per GPU").hardware.fabric.nic_gb_per_s == 50
    assert run_of(notes="inter-node 400Gbps/node").hardware.fabric.nic_gb_per_s == 6.25
    assert run_of().hardware.fabric.nic_gb_per_s == 50  # the H100's own


def test_pipeline_layouts_are_counted_by_stage():
    assert parse_pp_layout("Et*4|(t*4|)*14tmL") == (4, *([4] * 14), 2)
    assert parse_pp_layout("Et|t|tL") == (1, 1, 1)
    with pytest.raises(ConfigError, match="pp_layout"):
        parse_pp_layout("Ex*4|L")


def test_embedding_and_head_count_as_a_layer_where_that_makes_stages_even():
    # Llama-3 405B has 126 layers so that 128 divide over 64 chunks: the first and last hold one layer less.
    layers = run_of(
        model="llama3.1-405b", params_b="405.85", layers="126", hidden="16384", ffn="53248", heads="128",
        num_gpus="512", tp="8", pp="8", vpp="8", dp="8", global_batch="512", micro_batch="1",
    ).layout.stage_layers  # fmt: skip
    assert layers == (1, *([2] * 62), 1)


def test_memory_units_are_distinguished():
    gib = run_of(peak_mem_gb="60", mem_unit="GiB").measured
    assert (gib.memory_bytes, gib.memory_kind) == (60 * 2**30, "allocated")
    assert run_of(peak_mem_gb="60", mem_unit="GB rank-0").measured.memory_bytes == 60e9
    assert run_of(peak_mem_gb="60", mem_unit="GB rank-0").measured.memory_kind == "rank0"
    assert run_of(peak_mem_gb="60", mem_unit="GB (nvidia-smi, max)").measured.memory_kind == "nvidia-smi"
    assert run_of(mem_unit="GiB").measured.memory_bytes is None


def test_a_micro_batch_that_is_not_published_is_assumed_and_said():
    run = run_of(micro_batch="", recompute="full")
    assert run.layout.micro_batch == 1 and any("micro-batch" in text for text in run.assumptions)


# ---- the packaged file ----


def test_almost_every_row_of_the_packaged_file_is_predicted(runs):
    tier_a = [run for run in runs if run.tier == "A" and run.is_nvidia]
    assert len(runs) == 1700 and len(tier_a) > 1400
    assert sum(run.reason is None for run in tier_a) / len(tier_a) > 0.97


def test_every_source_has_a_row_that_is_predicted(runs):
    expected = {run.source for run in runs} - {"PaLM"}  # which ran on TPUs
    assert {run.source for run in runs if run.reason is None} == expected


# A row of each kind of source with what its texts say, so that a change of a rule shows where it bites.
@pytest.mark.parametrize(
    ("row_id", "stack", "layout"),
    [
        ("40", "megatron-bridge", "TP1 PP2 VPP8 EP32 DP128 MBS1"),
        ("296", "nemo", "TP4+SP PP8 VPP6 DP4 MBS1"),
        ("423", "megatron", "TP8+SP DP1 ddp MBS4 recompute selective:core_attn"),
        ("422", "megatron", "TP8 DP1 ddp MBS4 recompute full"),
        ("445", "torchtitan", "TP1 DP8 zero3 MBS2 recompute selective:layernorm+mlp_act+half_matmuls"),
        ("1855", "nanotron", "TP4+SP DP1 ddp MBS9"),
        ("1860", "megatron", "TP8+SP PP8 VPP6 DP8 MBS1"),
        ("1864", "megascale", "TP8+SP PP8 VPP6 DP8 MBS1"),
        ("1881", "megatron-deepspeed", "TP8 PP35 DP8 MBS1 recompute full"),
        ("2089", "maxtext", "TP1 DP512(4 copies) zero3 MBS2 recompute full"),
        ("2157", "mlperf", "TP8+SP PP8 VPP8 CP2 DP19 MBS1"),
        ("2293", "fms-fsdp", "TP1 DP128(16 copies) zero3 MBS2"),
        ("2301", "internevo", "TP1 DP8 MBS2"),
    ],
)
def test_a_row_of_each_source_reads_as_it_was_run(runs, row_id, stack, layout):
    (run,) = [run for run in runs if run.row_id == row_id]
    assert (run.stack.name, str(run.layout)) == (stack, layout)


def test_built_models_have_the_parameters_that_were_published(runs):
    # Nominal sizes ("30B" with another vocabulary) and proxies aside, the shapes that rows give add up.
    exact = {
        "llama3-8b": 8.03e9, "llama3-70b": 70.55e9, "llama3.1-405b": 405.85e9, "llama2-7b": 6.74e9,
        "nemotron4-340b": 341e9, "nemotron4-15b": 15.6e9, "gpt3-175b": 175e9, "qwen3-30b-a3b": 30.5e9,
        "qwen3-235b-a22b": 235e9, "gpt-oss-120b": 116.8e9, "deepseek-v3": 671e9, "kimi-k2": 1040e9,
        "moonlight-16b-a3b": 16e9, "nemotron-3-nano": 31.6e9, "grok1-314b": 314e9, "GPT 1T": 1008e9,
        "Llama-arch 3.57B (MHA)": 3.57e9, "MPT-70b": 64.8624e9, "GPT 32B": 32e9,
    }  # fmt: skip
    for name, params in exact.items():
        run = next(run for run in runs if run.model == name and run.reason is None)
        assert run.workload.ir.num_params == pytest.approx(params, rel=0.02), name


def test_prediction_heads_add_a_layer_and_a_loss(runs):
    with_heads = next(run.workload.ir for run in runs if run.row_id == "40")
    assert with_heads.num_layers == 62 and sum(op.kind == "loss" for op in with_heads.tail) == 2
    with_heads.check()
    # Megatron-Bridge prints 260 GFLOP for each token with one prediction head.
    assert with_heads.train_flops(1, 4096) / 4096 == pytest.approx(260e9, rel=0.01)


def test_reading_twice_gives_equal_runs(runs):
    again = packaged_runs()
    assert [(run.row_id, run.layout, run.stack, run.group) for run in again] == [
        (run.row_id, run.layout, run.stack, run.group) for run in runs
    ]


def test_equal_models_share_one_ir():
    (record,) = parse_records(as_csv(LLAMA), "runs.csv")
    assert build_ir(record) is build_ir(record)
