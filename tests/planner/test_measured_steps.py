"""Steps that a trainer measured correct plans for that GPU, by one factor, and touch nothing else."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepwell.errors import ConfigError
from deepwell.graph.ir import IR
from deepwell.hardware.model import Hardware
from deepwell.hardware.names import named_hardware
from deepwell.planner.layout import Layout
from deepwell.planner.measured_steps import read_ratio, read_steps, record_step, steps_path
from deepwell.planner.plan import Plan
from deepwell.planner.search.autoplan import autoplan
from deepwell.planner.workload import Workload

TINY = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_hidden_layers": 6, "vocab_size": 1024, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip
ONE = Layout(dp=1, sharding="ddp")


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPWELL_CACHE_DIR", str(tmp_path))


def here(count: int = 1) -> Hardware:
    """This machine, as if NVML had answered for some H100."""
    named = named_hardware(f"{count}xH100")
    gpus = tuple(
        replace(gpu, name="NVIDIA H100 80GB HBM3", driver="580.1", index=i) for i, gpu in enumerate(named.gpus)
    )
    return replace(named, gpus=gpus, name="here")


GPU = here().gpus[0]


def measured_ratio(*problem: Any) -> float | None:
    return read_ratio(*problem)[0]


def work(seq_len: int = 2048, policy: Any = "bf16", **changes: Any) -> Workload:
    return Workload(ir=IR.from_config({**TINY, **changes}), seq_len=seq_len, global_batch=8, policy=policy)


def record(workload: Workload, ratio: float, layout: Layout = ONE) -> None:
    record_step(GPU, workload, layout, 2.0, 2.0 * ratio, "2026-11-20")


def test_a_problem_has_its_own_ratio_whatever_its_names_and_batch() -> None:
    assert measured_ratio(GPU, work(), ONE) is None
    record(work(), 1.25)
    assert measured_ratio(GPU, work(), ONE) == 1.25
    same = replace(work(), ir=replace(work().ir, name="another"), global_batch=64)
    assert measured_ratio(GPU, same, ONE) == 1.25
    record(work(), 0.9)  # the last one counts
    assert measured_ratio(GPU, work(), ONE) == 0.9
    assert len(read_steps(GPU)[0]) == 1


@pytest.mark.parametrize(
    ("other", "layout"),
    [
        (work(seq_len=1024), ONE),
        (work(policy="fp8"), ONE),
        (work(num_hidden_layers=7), ONE),
        (work(intermediate_size=2048), ONE),
        (work(vocab_size=2048), ONE),
        (replace(work(), optimizer="adamw_8bit"), ONE),
        (work(), replace(ONE, micro_batch=2)),
        (work(), Layout(dp=2)),
    ],
)
def test_another_problem_has_not(other: Workload, layout: Layout) -> None:
    record(work(), 1.25)
    assert measured_ratio(GPU, other, layout) is None


def test_three_problems_on_one_device_give_others_in_their_formats_the_median() -> None:
    for seq_len, ratio in ((256, 1.3), (512, 1.1), (512, 1.15)):
        record(work(seq_len), ratio)
    assert measured_ratio(GPU, work(), ONE) is None  # two problems: one was measured again
    record(work(1024), 0.9)
    assert measured_ratio(GPU, work(), ONE) == 1.15
    assert measured_ratio(GPU, work(256), ONE) == 1.3
    assert measured_ratio(GPU, work(policy="fp8"), ONE) is None
    assert measured_ratio(GPU, work(), Layout(dp=2)) is None  # what joins GPUs was not measured
    assert measured_ratio(replace(GPU, driver="590.0"), work(), ONE) is None


@pytest.mark.parametrize(("ratio", "cut"), [(7.0, 2.0), (0.1, 0.5)])
def test_ratios_are_cut(ratio: float, cut: float) -> None:
    record(work(), ratio)
    assert measured_ratio(GPU, work(), ONE) == cut


def test_a_file_stays_small() -> None:
    known = record_step(GPU, work(), ONE, 1.0, 1.0, "2026-11-20")
    (one,) = json.loads(steps_path(GPU).read_text())["steps"]
    steps = [{**one, "problem": str(i)} for i in range(100)]
    steps_path(GPU).write_text(json.dumps({"schema": 1, "steps": steps}))
    record(work(), 1.1)
    kept = read_steps(GPU)[0]
    assert len(kept) == 64 and kept[-1].problem == known.problem and kept[0].problem == "37"


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"schema": 2, "steps": []}', '{"schema": 1}', '{"schema": 1, "steps": [5]}',
        '{"schema": 1, "steps": [{"problem": "x"}]}', "\x00\xff", "[" * 100_000,
        '{"schema": 1, "steps": [{"problem": "x", "what": "", "precision": "", "gpus": 1, "predicted_s": 0.0, '
        '"real_s": 1.0, "date": ""}]}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_ignored_with_a_note_and_written_anew(text: str) -> None:
    steps_path(GPU).write_bytes(text.encode("latin-1"))
    ratio, note = read_ratio(GPU, work(), ONE)
    assert ratio is None and "were ignored" in note and steps_path(GPU).name in note
    record(work(), 1.5)
    assert read_ratio(GPU, work(), ONE)[0] == 1.5


def test_wrong_steps_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (0.0, -1.0, float("nan"), float("inf"), "1", True):
        with pytest.raises(ConfigError, match="real_s: got"):
            record_step(GPU, work(), ONE, 1.0, seconds, "2026-11-20")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gpu: H100 is a named machine"):
        record_step(named_hardware("H100").gpus[0], work(), ONE, 1.0, 1.0, "2026-11-20")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEPWELL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="DEEPWELL_CACHE_DIR"):
        record(work(), 1.0)


# ---- plans ----


def plan(hw: Hardware | str, **changes: Any) -> Plan:
    return autoplan(TINY, hw, **{"seq_len": 2048, "global_batch": 8, "precision": "bf16", **changes})


def test_a_plan_for_this_gpu_is_corrected_and_says_measured() -> None:
    before = plan(here())
    record_step(GPU, before.workload, before.layout, before.estimate.uncorrected_s, 1.2 * before.step_s, "2026-11-20")
    after = plan(here())
    assert after.layout == before.layout and after.rejected == before.rejected
    assert after.step_s == pytest.approx(1.2 * before.step_s)
    assert sum(seconds for _, seconds in after.estimate.breakdown) == pytest.approx(after.step_s)
    assert (before.estimate.tier, after.estimate.tier) == ("table", "measured")
    assert after.estimate.error_band < before.estimate.error_band
    assert any("as measured here on 2026-11-20: 1.200 times" in note for note in after.notes)
    assert after.mfu == pytest.approx(before.mfu / 1.2)
    assert Plan.from_json(after.to_json()) == after
    # What is compared with the plan is corrected alike, and what is recorded next is the model's own word.
    assert after.estimate.uncorrected_s == pytest.approx(before.step_s)
    old, new = (
        {c.what: c.slower for c in one.sensitivity().changes if c.slower is not None} for one in (before, after)
    )
    assert new == pytest.approx(old)
    # A plan made from another one's stack is measured afresh.
    assert plan(here(), stack=after.stack, seq_len=1024).estimate.correction == 1.0


def test_ranks_do_not_change_on_several_gpus() -> None:
    before = plan(here(8), global_batch=64)
    record_step(GPU, before.workload, before.layout, before.step_s, 2 * before.step_s, "2026-11-20")
    after = plan(here(8), global_batch=64)
    assert after.estimate.tier == "measured" and after.step_s == pytest.approx(2 * before.step_s)
    assert [one.layout for one in after.runners_up] == [one.layout for one in before.runners_up]
    assert [one.why_not for one in after.runners_up] == [one.why_not for one in before.runners_up]
    assert all(one.step_s >= after.step_s for one in after.runners_up)


def test_named_machines_and_other_stacks_are_left_alone() -> None:
    named, titan = plan("1xH100"), plan(here(), stack="torchtitan")
    for seq_len in (256, 512, 1024, 2048):
        record(work(seq_len), 1.5)
    assert plan("1xH100") == named
    assert plan(here(), stack="torchtitan") == titan
    assert plan(here()).estimate.tier == "measured"


def test_a_damaged_file_leaves_the_plan_as_it_is_with_a_note() -> None:
    before = plan(here())
    steps_path(GPU).write_text("{")
    after = plan(here())
    assert after.estimate == before.estimate
    assert any("were ignored" in note for note in after.notes)
