"""Files of runs as other people write them: order, gaps and units differ, and every row is predicted or says why."""

import csv
import io
import json
import random

import pytest
from typer.testing import CliRunner

from deepwell.cli import app
from deepwell.errors import ConfigError
from deepwell.planner.published import read_runs
from deepwell.planner.published.cluster import hardware_of, is_nvidia
from deepwell.planner.published.record import NEEDED_COLUMNS, parse_records
from deepwell.planner.published.run import build_run
from deepwell.planner.published.validate import check_run, validate

ROW = {
    "source": "someones-fork v3", "version": "2026-01", "model": "llama3-8b", "params_b": "8.03", "layers": "32",
    "hidden": "4096", "ffn": "14336", "heads": "32", "kv_heads": "8", "vocab": "128256", "gpu": "H100",
    "num_gpus": "16", "seq_len": "8192", "global_batch": "64", "micro_batch": "2", "tp": "2", "pp": "2", "cp": "1",
    "dp": "4", "dp_kind": "ZeRO-1", "precision": "BF16", "recompute": "none", "step_time_s": "4.0", "status": "ok",
    "tier": "A", "peak_mem_gb": "40", "mem_unit": "GiB", "notes": "", "row_id": "1", "url": "",
    "experts": "", "topk": "", "ep": "",
}  # fmt: skip


def text_of(*rows, columns=None):
    out = io.StringIO()
    writer = csv.DictWriter(out, columns or list(ROW), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def runs_of(text):
    return tuple(build_run(record) for record in parse_records(text, "runs.csv"))


def one(**changes):
    (run,) = runs_of(text_of({**ROW, **changes}))
    return run


def test_the_order_of_columns_does_not_matter():
    columns = list(ROW)
    random.Random(7).shuffle(columns)
    (shuffled,) = runs_of(text_of(ROW, columns=columns))
    assert shuffled == one()


def test_a_file_with_only_the_needed_columns_is_read_and_each_row_says_what_is_missing():
    (run,) = runs_of(text_of(ROW, columns=NEEDED_COLUMNS))
    assert "does not publish the layout" in run.reason
    # With a layout and a model that is known by name that is enough.
    (run,) = runs_of(text_of(ROW, columns=(*NEEDED_COLUMNS, "tp", "pp", "step_time_s")))
    assert run.reason is None and run.layout.dp == 4 and run.workload.ir.num_layers == 32
    assert any("micro-batch" in text for text in run.assumptions)
    assert check_run(run).estimate.step_s > 0


@pytest.mark.parametrize("column", NEEDED_COLUMNS)
def test_a_needed_column_that_is_missing_is_named(column):
    with pytest.raises(ConfigError, match=rf"runs\.csv, line 1: columns missing: {column};"):
        parse_records(text_of(ROW, columns=[c for c in ROW if c != column]), "runs.csv")


@pytest.mark.parametrize("absent", ["nan", "NaN", "N/A", "null", "<NA>", "None", "-", " "])
def test_a_number_that_is_not_there_is_blank_however_it_is_written(absent):
    run = one(ep=absent, cp=absent, params_b=absent, peak_mem_gb=absent, step_time_s="4.0")
    assert run.reason is None and run.layout.cp == 1 and run.measured.memory_bytes is None


def test_none_is_a_word_where_texts_stand():
    # "none" in `recompute` says that nothing is recomputed, "nan" says that nobody knows.
    assert one(recompute="none").is_recompute_known and not one(recompute="nan").is_recompute_known


def test_thousands_may_be_grouped_and_counts_written_as_fractions():
    assert one(vocab="128,256", global_batch="64.0") == one()
    with pytest.raises(ConfigError, match="'vocab'"):
        one(vocab="12,82,56")


@pytest.mark.parametrize(
    ("size", "unit", "gib"),
    [
        ("40", "GiB", 40), ("40960", "MiB", 40), ("42.94967296", "GB (peak)", 40), ("42949.67296", "MB allocated", 40),
        ("42949672960", "B", 40), ("0.04294967296", "TB", 40), ("51", "% of HBM", None), ("40", "", None),
        ("40", "gigs", None),
    ],
)  # fmt: skip
def test_memory_is_read_in_its_unit_and_left_out_where_the_unit_is_no_number_of_bytes(size, unit, gib):
    measured = one(peak_mem_gb=size, mem_unit=unit).measured
    assert measured.memory_bytes == (None if gib is None else pytest.approx(gib * 2**30))


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        ("ok", "ok"), ("OK", "ok"), ("success", "ok"), ("completed", "ok"), ("OOM", "oom"),
        ("CUDA out of memory", "oom"),
        ("torch.OOM on rank 3", "oom"), ("memory-only (OOM)", "memory"), ("crashed", "other"), ("okra", "other"),
    ],
)  # fmt: skip
def test_words_for_how_a_run_ended(status, outcome):
    assert one(status=status).measured.outcome == outcome


@pytest.mark.parametrize(
    ("written", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("Nvidia h100", "H100"), ("DGX H100", "H100"), ("8xH100", "H100"),
        ("H100 x8", "H100"), ("A100 SXM 40GB", "A100-40"), ("A100-SXM4-80GB", "A100-80"), ("H100-PCIe", "H100-PCIe"),
        ("GB200 NVL72", "GB200"), ("H200 SXM 141GB", "H200"),
    ],
)  # fmt: skip
def test_gpus_are_known_by_the_names_that_people_give_them(written, machine):
    (record,) = parse_records(text_of({**ROW, "gpu": written}), "runs.csv")
    assert hardware_of(record).gpus[0].machine == machine


@pytest.mark.parametrize("name", ["TPU v5p", "AMD MI300X", "MI250X", "Trainium2", "Gaudi 3", "Ascend 910B"])
def test_accelerators_of_others_are_not_counted_among_nvidias(name):
    assert not is_nvidia(name) and "not an NVIDIA GPU" in one(gpu=name).reason


def test_an_unknown_stack_is_predicted_with_generic_constants_and_says_so():
    run = one()
    assert run.stack.name == "someones-fork-v3" and run.reason is None
    assert any("no fitted constants" in note for note in check_run(run).estimate.notes)


@pytest.mark.parametrize(
    ("changes", "stack"),
    [
        # An engine may be named in the notes or in the address; a model in the notes is no engine.
        ({"notes": "trained with Megatron-LM core 0.12"}, "megatron"),
        ({"url": "https://github.com/pytorch/torchtitan/blob/main/x.md"}, "torchtitan"),
        ({"notes": "same shape as DeepSeek-V3 and BLOOM; Nemotron data"}, "someones-fork-v3"),
        ({"dp_kind": "ZeRO-3 (DeepSpeed)"}, "someones-fork-v3"),  # BLOOM's fork of 2022 is not every DeepSpeed
        ({"source": "Megatron-DeepSpeed 2022"}, "megatron-deepspeed"),
    ],
)
def test_the_stack_is_read_from_where_an_engine_is_named(changes, stack):
    assert one(**changes).stack.name == stack


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "H9000"}, "gpu 'H9000': no machine of that name"),
        ({"layers": "100000000"}, "layers is 100,000,000"),
        ({"experts": "100000000", "topk": "2"}, "experts is 100,000,000"),
        ({"heads": "8000"}, "heads is 8,000, over 4,096"),
        ({"tp": "3"}, "no multiple of tp 3"),
        ({"ep": "7", "experts": "8", "topk": "2"}, "ep 7"),
        ({"notes": "pp_layout=E?L"}, "pp_layout"),
    ],
)
def test_a_row_that_makes_no_sense_says_so_and_the_others_are_predicted(changes, reason):
    result = validate(runs_of(text_of(ROW, {**ROW, **changes, "row_id": "2"})))
    good, bad = result.checked
    assert good.estimate is not None and bad.estimate is None and reason in bad.reason
    assert result.to_dict()["rows"][1]["reason"] == bad.reason


def test_rows_that_stand_twice_change_no_figure_but_their_number():
    rows = [{**ROW, "row_id": str(i), "tp": str(tp), "pp": "1", "dp": ""} for i, tp in enumerate((1, 2, 4, 8))]
    once, twice = (validate(runs_of(text_of(*rows, *(rows * again)))).overall for again in (0, 1))
    assert twice["step_time"]["n"] == 2 * once["step_time"]["n"] == 8
    for name in ("median_abs_rel_err", "mean_abs_rel_err", "bias"):
        assert twice["step_time"][name] == pytest.approx(once["step_time"][name])
    assert twice["regret"] == once["regret"] and once["regret"]["groups"] == 1


def test_marks_line_ends_and_lines_of_commas_do_no_harm(tmp_path):
    path = tmp_path / "runs.csv"
    text = text_of(ROW).replace("\n", "\r\n") + "," * (len(ROW) - 1) + "\r\n\r\n"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    (run,) = read_runs(path)
    assert run.source == "someones-fork v3" and run.reason is None


@pytest.mark.parametrize("text", ["", "\n\n", ",,,\n", text_of()])
def test_a_file_without_rows_ends_with_status_two_and_one_line(text, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(app, ["validate", "planner", str(path)])
    assert result.exit_code == 2 and "Traceback" not in result.output and len(result.output.strip()) > 20


def test_picks_of_tier_a_stand_apart_from_those_of_a_and_b(tmp_path):
    # Three layouts of tier A and one of tier B: a group of four for both tiers, none for tier A.
    tiers = {1: "A", 2: "A", 4: "A", 8: "B"}
    rows = [{**ROW, "row_id": str(tp), "tp": str(tp), "pp": "1", "dp": "", "tier": tier} for tp, tier in tiers.items()]
    path, out = tmp_path / "runs.csv", tmp_path / "out.json"
    path.write_text(text_of(*rows), encoding="utf-8")
    result = CliRunner().invoke(app, ["validate", "planner", str(path), "--json", str(out)])
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["overall"]["regret"]["groups"] == data["tiers_ab"]["regret"]["groups"] == 1
    assert data["overall"]["regret_tier_a"]["groups"] == data["tier_a"]["regret"]["groups"] == 0
    assert (data["tier_a"]["step_time"]["n"], data["tiers_ab"]["step_time"]["n"]) == (3, 4)
    assert "tiers A+B" in result.output


def test_who_runs_megatron_has_its_defaults_and_its_own_recipes_have_theirs():
    # Megatron-LM's tables of 2024 keep gradients in bf16; --bf16 alone keeps and reduces them in fp32.
    theirs, others = (one(source=name, notes="Megatron-LM core 0.12") for name in ("Megatron-LM README", "a lab"))
    assert theirs.stack.name == others.stack.name == "megatron"
    assert (theirs.stack.switch("grad_dtype"), others.stack.switch("grad_dtype", "fp32")) == ("bf16", "fp32")
