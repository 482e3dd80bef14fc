"""Validation against published runs: what is scored on which rows, groups, JSON, and the command."""

import json

import pytest
from typer.testing import CliRunner

from deepwell.cli import app
from deepwell.errors import ConfigError
from deepwell.planner.estimate_values import PARTS, Estimate, StageMemory
from deepwell.planner.published.record import parse_records
from deepwell.planner.published.run import build_run
from deepwell.planner.published.validate import check_run, layout_groups, rule_key, validate

GIB = 2**30
HEADER = (
    "source,version,model,gpu,dp_kind,precision,recompute,notes,status,mem_unit,tier,layers,hidden,ffn,heads,kv_heads,"
    "vocab,experts,topk,num_gpus,seq_len,global_batch,micro_batch,tp,pp,cp,vpp,ep,etp,dp,params_b,tokens_per_s_per_gpu,"
    "model_tflops_per_gpu,step_time_s,peak_mem_gb,row_id"
)


def line(row_id, *, step="", memory="", **changes):
    cell = {"tp": 1, "mbs": 1, "status": "ok", "unit": "", "tier": "A", "source": "a lab", "notes": "", "gpu": "H100"}
    cell.update(changes)
    return (
        f"{cell['source']},v1,llama,{cell['gpu']},ZeRO-1,BF16,none,{cell['notes']},{cell['status']},{cell['unit']},"
        f"{cell['tier']},4,1024,4096,8,8,32000,,,8,2048,64,{cell['mbs']},{cell['tp']},1,1,,,,{8 // cell['tp']},,,,"
        f"{step},{memory},{row_id}"
    )


def runs_of(*lines):
    return tuple(build_run(record) for record in parse_records("\n".join([HEADER, *lines]) + "\n", "runs.csv"))


def estimate_of(step_s, *, gib=10.0, limit=80.0):
    stage = StageMemory(
        stage=0, params=gib * GIB, master=0, moments=0, grads=0, quantized_copies=0, activations=(), logits=0,
        comm_buffers=0, workspace=0, context=1.0 * GIB, fragmentation=1.0 * GIB,
    )  # fmt: skip
    return Estimate(
        step_s=step_s, breakdown=tuple((part, 0.0) for part in PARTS), tokens_per_s_per_gpu=1.0, mfu_bf16=0.5,
        mfu_weighted=0.5, model_flops_per_token=1.0, memory=(stage,), limit_gib=limit, tier="spec", error_band=0.1,
    )  # fmt: skip


def by_tp(steps, sizes=None):
    """A predictor that answers by the layout's TP."""
    return lambda workload, hw, layout, stack: estimate_of(steps[layout.tp], gib=(sizes or {}).get(layout.tp, 10.0))


FOUR = (
    line(1, tp=1, status="OOM"),
    line(2, tp=2, step="2.0"),
    line(3, tp=4, step="2.05"),
    line(4, tp=8, step="4.0"),
)


def test_scores_of_a_tiny_file_by_hand():
    runs = runs_of(
        line(1, step="1.0", memory="10", unit="GiB"),
        line(2, tp=2, step="2.0"),
        line(3, tp=4, step="1.0", tier="B", memory="20", unit="GiB"),
        line(4, tp=8, step="1.0", tier="C"),
        line(5, tp=2, mbs=2, status="OOM"),
    )
    # TP 1: 1.2 over 1.0; TP 2: 2.0 over 2.0, and it is not seen that it runs out at a larger micro-batch.
    overall = validate(runs, predict=by_tp({1: 1.2, 2: 2.0, 4: 5.0, 8: 5.0}, {4: 15.0})).overall
    assert overall["step_time"]["n"] == 2  # tier A alone
    assert overall["step_time"]["mean_abs_rel_err"] == pytest.approx(0.1)
    assert overall["step_time"]["bias"] == pytest.approx(0.1)
    assert overall["step_time"]["within_10pct"] == pytest.approx(0.5)
    assert overall["memory"]["n"] == 2  # tiers A and B: 10 of 10 and 15 of 20 GiB
    assert overall["memory"]["mean_abs_rel_err"] == pytest.approx(0.125)
    assert (overall["oom"]["n"], overall["oom"]["accuracy"], overall["oom"]["recall"]) == (3, pytest.approx(2 / 3), 0.0)
    assert overall["rows"] == {"total": 5, "predicted": 5, "tier_a_nvidia": 3, "tier_a_nvidia_predicted": 3}


def test_device_figures_of_nvidia_smi_are_kept_apart_and_held_against_the_device():
    runs = runs_of(line(1, step="1.0", memory="12.884901888", unit="GB (nvidia-smi)"))  # 12 GiB
    overall = validate(runs, predict=by_tp({1: 1.0})).overall
    assert overall["memory"]["n"] == 0
    assert overall["memory_nvidia_smi"]["mean_abs_rel_err"] == pytest.approx(0.0)  # 10 allocated + 1 + 1


def test_memory_of_a_run_that_ran_out_is_no_measurement():
    runs = runs_of(line(1, status="OOM after iter 1", memory="60", unit="GiB"))
    assert validate(runs, predict=by_tp({1: 1.0})).overall["memory"]["n"] == 0


def test_regret_of_a_group_by_hand():
    # Predicted fastest that fits is TP 4: 2.05 over 2.0. The rule takes TP 1, which ran out: a miss at 4.0 over 2.0.
    overall = validate(runs_of(*FOUR), predict=by_tp({1: 3.0, 2: 2.0, 4: 1.9, 8: 2.5})).overall
    regret = overall["regret"]
    assert regret["groups"] == 1 and regret["within_5pct"] == 1.0 and regret["mean"] == pytest.approx(0.025)
    assert (regret["rule_mean"], regret["rule_misses"]) == (pytest.approx(1.0), 1)
    assert regret["random_mean"] == pytest.approx((1.0 + 0.0 + 0.025 + 1.0) / 4)
    assert overall["rank"]["groups"] == 1 and overall["rank"]["spearman"] == pytest.approx(0.5)


def test_three_layouts_are_no_group_and_trials_of_one_layout_are_averaged():
    assert not layout_groups(check_run(run, by_tp({1: 1, 2: 1, 4: 1, 8: 1})) for run in runs_of(*FOUR[:3]))
    checked = [
        check_run(run, by_tp({1: 1, 2: 1, 4: 1, 8: 1}))
        for run in runs_of(*FOUR, line(5, tp=2, step="3.0"), line(6, tp=2, status="OOM"))
    ]
    (group,) = layout_groups(checked).values()
    assert len(group) == 4 and sorted(c.measured_s for c in group if c.measured_s) == [2.05, 2.5, 4.0]


def test_rows_of_another_kernel_or_source_are_another_group():
    other = [line(i, tp=tp, step="1.0", source="another") for i, tp in ((7, 1), (8, 2))]
    kernel = [line(i, tp=tp, step="1.0", notes="kernel=torch") for i, tp in ((9, 1), (10, 2))]
    checked = [check_run(run, by_tp({1: 1, 2: 1, 4: 1, 8: 1})) for run in runs_of(*FOUR, *other, *kernel)]
    assert len(layout_groups(checked)) == 1


def test_the_rule_of_thumb_prefers_little_model_parallelism_then_large_micro_batches():
    runs = runs_of(line(1, tp=2), line(2, tp=1, mbs=1), line(3, tp=1, mbs=4), line(4, tp=8))
    order = sorted(runs, key=lambda run: rule_key(run.layout, 8))
    assert [run.row_id for run in order] == ["3", "2", "1", "4"]
    crossing = sorted(runs, key=lambda run: rule_key(run.layout, 4))
    assert crossing[-1].row_id == "4"  # TP over the domain's border is the last resort


def test_what_the_planner_refuses_becomes_the_rows_reason():
    def refuse(workload, hw, layout, stack):
        raise ConfigError("tp 3 does not divide 8 heads")

    result = validate(runs_of(line(1, step="1.0"), line(2, step="1.0", gpu="TPUv4")), predict=refuse)
    rows = result.to_dict()["rows"]
    assert [row["reason"] for row in rows] == ["tp 3 does not divide 8 heads", "gpu 'TPUv4': not an NVIDIA GPU"]
    assert result.overall["rows"]["tier_a_nvidia"] == 1 and result.overall["step_time"]["n"] == 0
    assert sum(result.overall["not_used"].values()) == 2


def test_a_row_that_breaks_the_planner_is_reported_and_the_others_are_predicted():
    def breaks(workload, hw, layout, stack):
        return estimate_of([1.0][layout.tp - 1])  # IndexError above TP 1

    first, second = validate(runs_of(line(1, step="1.0"), line(2, tp=2, step="1.0")), predict=breaks).checked
    assert first.estimate is not None and "IndexError" in second.reason


def test_a_file_without_rows_is_refused():
    with pytest.raises(ConfigError, match="there are none"):
        validate(())


def test_sources_are_scored_on_tier_a_or_on_what_they_have():
    runs = runs_of(line(1, step="1.0"), line(2, tp=2, step="1.0", tier="B"), line(3, step="1.0", tier="B", source="x"))
    sources = validate(runs, predict=by_tp({1: 1.5, 2: 9.0})).sources
    assert (sources["a lab"]["tiers"], sources["a lab"]["step_time"]["n"]) == ("A", 1)
    assert (sources["x"]["tiers"], sources["x"]["step_time"]["n"]) == ("ABC", 1)


def test_json_has_the_agreed_names_and_survives_a_round_trip():
    data = validate(runs_of(*FOUR), predict=by_tp({1: 3.0, 2: 2.0, 4: 1.9, 8: 2.5})).to_dict()
    assert json.loads(json.dumps(data)) == data
    wanted = {
        "step_time": {"n", "median_abs_rel_err", "mean_abs_rel_err", "bias", "within_10pct"},
        "memory": {"n", "mean_abs_rel_err"},
        "oom": {"n", "accuracy", "precision", "recall"},
        "regret": {"groups", "within_5pct", "mean", "random_mean", "rule_mean"},
    }
    for scores in (data["overall"], data["sources"]["a lab"]):
        for part, names in wanted.items():
            assert names <= set(scores[part]), part
    row = data["rows"][1]
    assert row["predicted"]["step_s"] == 2.0 and row["measured"]["step_s"] == 2.0 and row["step_error"] == 0.0


def test_the_real_planner_is_deterministic_on_a_file(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEADER, *FOUR]) + "\n", encoding="utf-8")
    outputs = []
    for name in ("a.json", "b.json"):
        result = CliRunner().invoke(app, ["validate", "planner", str(path), "--json", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        outputs.append((tmp_path / name).read_text(encoding="utf-8"))
    assert outputs[0] == outputs[1]
    assert "overall (tier A)" in result.output and "a lab" in result.output
    data = json.loads(outputs[0])
    assert all(row["reason"] is None and row["predicted"]["step_s"] > 0 for row in data["rows"])


def test_the_table_can_be_written_as_markdown(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEADER, *FOUR]) + "\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["validate", "planner", str(path), "--markdown"])
    lines = result.output.strip().splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["source", "---", "a lab", "**overall (tier A)**"]
    assert len({line.count("|") for line in lines}) == 1


def test_the_command_refuses_a_malformed_file_in_one_line(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEADER, FOUR[0].replace(",64,", ",sixty,")]) + "\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["validate", "planner", str(path)])
    assert result.exit_code == 2
    assert "line 2" in result.output and "'global_batch'" in result.output and "Traceback" not in result.output


def test_the_command_writes_json_to_stdout_for_a_dash(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEADER, *FOUR]) + "\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["validate", "planner", str(path), "--json", "-"])
    assert json.loads(result.output)["overall"]["regret"]["groups"] == 1


def test_recomputation_that_is_not_published_is_the_least_that_fits():
    # With none 100 GiB are predicted, with some 90, with full recomputation 60: only the last fits into 80.
    sizes = {"none": 100.0, "selective": 90.0, "full": 60.0}

    def predict(workload, hw, layout, stack):
        return estimate_of(1.0, gib=sizes[layout.recompute.kind])

    silent = runs_of(line(1, step="1.0").replace(",none,", ",,"))[0]
    checked = check_run(silent, predict)
    assert checked.run.layout.recompute.kind == "full" and checked.estimate.fits
    assert "recompute full: not published" in checked.run.assumptions
    # What is published stays, fitting or not.
    said = check_run(runs_of(line(1, step="1.0"))[0], predict)
    assert said.run.layout.recompute.kind == "none" and not said.estimate.fits
