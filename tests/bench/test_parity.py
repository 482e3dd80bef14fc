"""Paired runs: equal starts, verdicts, and a run that is killed goes on to the very same numbers."""

import json
import math
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from deepwell.bench import variants
from deepwell.bench.corpus import Corpus
from deepwell.bench.parity.compare import ArmVerdict, Results, WantedRuns, run_plan
from deepwell.bench.parity.run import Pace, PairSetup, ParityRun, RunRecord, _eval_steps, _order
from deepwell.bench.variants import Variant, parse_variants
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.precision import PrecisionPolicy
from warm import start_python

SETUP = PairSetup(model="tiny", tokens=12 * 64, batch=2, seq_len=32, lr=3e-3, evals=2, eval_tokens=512)


def record(arm: str, seed: int, own: float, bf16: float | None = None) -> RunRecord:
    held = [{"step": SETUP.steps, "own": own, "bf16": own if bf16 is None else bf16, "tokens": 512}]
    return RunRecord(arm=arm, seed=seed, setup=SETUP, data="d", steps_done=SETUP.steps, losses=[(1, own)], held=held)


# ---- verdicts ----


def verdicts(*records: RunRecord) -> list[ArmVerdict]:
    return Results(path=Path("none.json"), records=list(records), corpora={}).verdicts()


def test_a_small_mean_gap_passes() -> None:
    runs = [record("bf16", s, 3.0 + 0.001 * s) for s in range(3)] + [
        record("fp8", s, 3.005 + 0.001 * s) for s in range(3)
    ]
    (verdict,) = verdicts(*runs)
    assert verdict.answer == "pass" and verdict.seeds == (0, 1, 2)
    assert verdict.gap == pytest.approx(0.005 / 3.001, rel=1e-3)
    assert verdict.spread == pytest.approx(0.002 / 3.001, rel=1e-3)


def test_a_large_gap_fails_also_where_seeds_differ_less() -> None:
    runs = [record("bf16", s, 3.0 + 0.001 * s) for s in range(3)] + [record("fp8_head", s, 3.07) for s in range(3)]
    assert [verdict.answer for verdict in verdicts(*runs)] == ["fail"]


def test_seeds_that_differ_more_than_the_bound_cannot_tell() -> None:
    # 1% between seeds of bf16: a gap of 0.4% may be chance, and so may one of 0.1%.
    base = [record("bf16", 0, 3.0), record("bf16", 1, 3.03)]
    for gap in (0.004, 0.001):
        (verdict,) = verdicts(*base, *(record("fp8", s, run.final["own"] * (1 + gap)) for s, run in enumerate(base)))
        assert verdict.answer == "cannot tell" and "cannot tell" in str(verdict)


def test_the_worse_of_both_evaluations_decides() -> None:
    (verdict,) = verdicts(record("bf16", 0, 3.0), record("fp8", 0, 3.0, bf16=3.03))
    assert verdict.answer == "fail" and verdict.spread is None and "not known" in str(verdict)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["own", "bf16", "baseline", "other seed of the baseline"])
def test_a_loss_that_is_no_number_fails_whichever_it_is(loss: float, which: str) -> None:
    base, run = record("bf16", 0, 3.0), record("fp8", 0, 3.003)
    spare = record("bf16", 1, loss if "seed" in which else 3.3)
    if which == "baseline":
        base.final["own"] = loss
    elif which in run.final:
        run.final[which] = loss
    (verdict,) = verdicts(base, run, spare)
    if "seed" in which:  # it is in no pair, and says nothing of the spread
        assert verdict.answer == "pass" and verdict.spread is None
    else:
        assert verdict.answer == "fail" and "NaN or infinite" in str(verdict)


def test_a_line_says_cannot_tell_only_where_that_is_the_answer() -> None:
    # The spread is larger than the gap, but both are within the bound.
    base = [record("bf16", 0, 3.0), record("bf16", 1, 3.006)]
    (verdict,) = verdicts(*base, *(record("fp8", s, run.final["own"] * 1.001) for s, run in enumerate(base)))
    assert verdict.answer == "pass" and verdict.gap < verdict.spread < verdict.bound
    assert "cannot tell" not in str(verdict)


def test_runs_are_paired_within_one_setup_and_one_text_only() -> None:
    other = replace(SETUP, tokens=2 * SETUP.tokens)
    longer = record("fp8", 0, 3.0)
    longer.setup = other
    assert verdicts(record("bf16", 0, 3.0), longer) == []
    elsewhere = record("fp8", 0, 3.0)
    elsewhere.data = "another"
    assert verdicts(record("bf16", 0, 3.0), elsewhere) == []


def test_results_come_back_from_json_and_foreign_files_are_refused(tmp_path: Path) -> None:
    results = Results.read(tmp_path / "parity.json")
    results.put(record("bf16", 0, 3.0))
    results.put(record("fp8", 0, 3.001))
    again = Results.read(tmp_path / "parity.json")
    assert [asdict(one) for one in again.records] == [asdict(one) for one in results.records]
    assert json.loads((tmp_path / "parity.json").read_text())["verdicts"][0]["answer"] == "pass"
    (tmp_path / "other.json").write_text('{"schema": 1}')
    with pytest.raises(ConfigError, match="no parity result"):
        Results.read(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", "a"),
        ("steps_done", 13),
        ("steps_done", -1),
        ("held", [1]),
        ("held", [{"step": 1}]),
        ("held", [{"step": 1, "own": "3", "bf16": 1}]),
        ("losses", [1]),
        ("policy", 1),
        ("setup", {"tokens": math.inf}),
        ("setup", {"model": []}),
        ("setup", 1),
    ],
)
def test_a_run_that_is_none_is_refused_with_the_file(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "parity.json"
    run = record("bf16", 0, 3.0).to_dict() | {name: value}
    path.write_text(json.dumps({"schema": 1, "corpora": {}, "runs": [run]}))
    with pytest.raises(ConfigError, match=r"parity\.json is no parity result"):
        Results.read(path)


# ---- what a pair shares ----


def test_the_schedule_warms_up_and_ends_at_a_tenth() -> None:
    setup = replace(SETUP, tokens=1000 * 64, warmup=0.05)
    rates = setup.learning_rates()
    assert len(rates) == setup.steps == 1000
    assert rates[0] < rates[25] < rates[49] == rates.max() == pytest.approx(setup.lr)
    assert rates[-1] == pytest.approx(0.1 * setup.lr, rel=1e-3)


def test_an_epoch_reads_every_window_once_and_seeds_differ() -> None:
    order = _order(12 * 2 * 32 + 1, SETUP, seed=0)
    assert sorted(order.tolist()) == [32 * i for i in range(24)]
    assert not torch.equal(order, _order(12 * 2 * 32 + 1, SETUP, seed=1))
    assert torch.equal(order, _order(12 * 2 * 32 + 1, SETUP, seed=0))


def test_text_is_read_four_times_at_most() -> None:
    with pytest.raises(ConfigError, match="at most 4 times"):
        _order(5 * 32 + 1, SETUP, seed=0)


def test_the_last_step_is_evaluated_and_few_before_it() -> None:
    assert _eval_steps(SETUP) == {6, 12}
    assert _eval_steps(replace(SETUP, evals=0)) == {12}


def test_a_pair_starts_from_the_same_weights_and_reads_the_same_tokens(corpus: Corpus) -> None:
    first, second = (ParityRun(Variant.parse(name), 3, SETUP, corpus, "cpu") for name in ("bf16", "fp8"))
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    for step in (0, 5, 11):
        assert torch.equal(first._batch(step)[0], second._batch(step)[0])
    assert torch.equal(first._batch(0)[0][:, 1:], first._batch(0)[1][:, :-1])


# ---- runs ----


def curve(results: Results, arm: str) -> list[tuple[int, float]]:
    (found,) = [one for one in results.records if one.arm == arm]
    assert found.is_done
    return found.losses


ARM = "everywhere"


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """NVFP4 in every layer: it rounds gradients at random, so a run goes on only if the random state comes back."""
    path = tmp_path_factory.mktemp("policy") / f"{ARM}.json"
    path.write_text(PrecisionPolicy("nvfp4").to_json(), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def uninterrupted(corpus: Corpus, policy_file: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """bf16 and the policy, from the first to the last step in one go."""
    plan = WantedRuns(arms=parse_variants(policy_file), seeds=(0,), setup=SETUP, device="cpu")
    results, left = run_plan(plan, corpus, tmp_path_factory.mktemp("whole"), Pace(log_every=1))
    assert left == 0
    return results


def test_training_lowers_the_loss_and_the_files_say_how(uninterrupted: Results) -> None:
    losses = curve(uninterrupted, "bf16")
    assert [step for step, _ in losses] == list(range(1, SETUP.steps + 1))
    assert losses[-1][1] < losses[0][1] - 0.1
    (run,) = [one for one in uninterrupted.records if one.arm == "bf16"]
    assert [entry["step"] for entry in run.held] == [6, 12]
    assert run.final["own"] == run.final["bf16"] < run.held[0]["own"]
    assert run.machine["packages"]["torch"] and run.runs_as
    assert not list((uninterrupted.path.parent / "checkpoints").glob("*"))


def test_experts_are_trained_in_the_arm_s_format(corpus: Corpus, tmp_path: Path) -> None:
    setup = replace(SETUP, model="moe-tiny")
    plan = WantedRuns(arms=parse_variants("fp8"), seeds=(0,), setup=setup, device="cpu")
    results, left = run_plan(plan, corpus, tmp_path, Pace(log_every=1))
    assert left == 0
    for arm in ("bf16", "fp8"):
        losses = curve(results, arm)
        assert losses[-1][1] < losses[0][1] - 0.1
    (run,) = [one for one in results.records if one.arm == "fp8"]
    # Two layers, each with four linears of attention and two of the experts, of three products.
    assert sum(count for way, count in run.runs_as.items() if way.startswith("fp8")) == 36, run.runs_as
    (verdict,) = results.verdicts()
    assert abs(verdict.gap) < 0.01


def test_a_deadline_stops_after_a_checkpoint_and_the_next_call_goes_on_to_the_same_numbers(
    corpus: Corpus, tmp_path: Path, uninterrupted: Results
) -> None:
    stopped = ParityRun(Variant.parse("bf16"), 0, SETUP, corpus, "cpu")
    path = tmp_path / "bf16.safetensors"
    assert not stopped.train(Pace(log_every=2, deadline=time.perf_counter()), lambda run: run.save(path))
    assert stopped.record.steps_done == 1 and path.is_file()
    # The loss of step 1 is not in the curve yet: it must not be lost.
    assert stopped.record.losses == []
    going_on = ParityRun(Variant.parse("bf16"), 0, SETUP, corpus, "cpu")
    going_on.load(path)
    assert going_on.train(Pace(log_every=2), lambda run: run.save(path))
    whole = [loss for _, loss in curve(uninterrupted, "bf16")]
    assert [step for step, _ in going_on.record.losses] == list(range(2, SETUP.steps + 1, 2))
    means = [(first + second) / 2 for first, second in zip(whole[::2], whole[1::2], strict=True)]
    assert [loss for _, loss in going_on.record.losses] == pytest.approx(means, rel=1e-6)
    assert going_on.record.final == next(one.final for one in uninterrupted.records if one.arm == "bf16")


def test_no_run_is_begun_after_the_deadline(corpus: Corpus, tmp_path: Path) -> None:
    plan = WantedRuns(arms=parse_variants("fp8"), seeds=(0, 1), setup=SETUP, device="cpu")
    results, left = run_plan(plan, corpus, tmp_path, Pace(deadline=time.perf_counter() - 1))
    assert left == 4 and not results.records


def test_an_arm_that_the_device_lacks_is_found_before_bf16_is_trained(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(variant: Variant, bound: object) -> None:
        raise UnsupportedError(f"{variant.name} is not for this GPU")

    monkeypatch.setattr(variants, "_check_scaling", lacks)
    plan = WantedRuns(arms=parse_variants("fp8_1x128"), seeds=(0,), setup=SETUP, device="cpu")
    with pytest.raises(UnsupportedError, match="fp8_1x128 is not for this GPU"):
        run_plan(plan, corpus, tmp_path, Pace())
    assert not (tmp_path / "parity.json").exists()


def test_a_damaged_or_foreign_checkpoint_is_refused_by_name(corpus: Corpus, tmp_path: Path) -> None:
    run = ParityRun(Variant.parse("bf16"), 0, SETUP, corpus, "cpu")
    run.save(tmp_path / "a.safetensors")
    other = ParityRun(Variant.parse("bf16"), 1, SETUP, corpus, "cpu")
    with pytest.raises(ConfigError, match="another run"):
        other.load(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"half a file")
    with pytest.raises(ConfigError, match="delete it"):
        run.load(tmp_path / "b.safetensors")


@pytest.fixture(scope="module")
def begun(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[ParityRun, Path]:
    """A run after one step, and its checkpoint."""
    run = ParityRun(Variant.parse("bf16"), 0, SETUP, corpus, "cpu")
    path = tmp_path_factory.mktemp("begun") / "whole.safetensors"
    assert not run.train(Pace(deadline=time.perf_counter()), lambda one: one.save(path))
    return run, path


@pytest.mark.parametrize(
    "damage",
    [
        lambda tensors, facts: (_without(tensors, "model."), facts),
        lambda tensors, facts: (_without(tensors, "optimizer."), facts),
        lambda tensors, facts: (_without(tensors, "random.cpu"), facts),
        lambda tensors, facts: (_without(tensors, "pending"), facts),
        lambda tensors, facts: ({name: t for name, t in tensors.items() if "optimizer" not in name}, facts),
        lambda tensors, facts: ({**tensors, "pending": torch.zeros(3)}, facts),
        lambda tensors, facts: ({**tensors, "optimizer.x": torch.zeros(3)}, facts),
        lambda tensors, facts: ({**tensors, "random.cpu": torch.zeros_like(tensors["random.cpu"])}, facts),
        lambda tensors, facts: (tensors, {"record": facts["record"]}),
        lambda tensors, facts: (tensors, {**facts, "num_pending": "many"}),
        lambda tensors, facts: (tensors, {**facts, "record": "1"}),
    ],
)
def test_a_checkpoint_that_lacks_something_is_refused_by_name(
    begun: tuple[ParityRun, Path], tmp_path: Path, damage: Callable[..., tuple[dict[str, torch.Tensor], dict[str, str]]]
) -> None:
    run, whole = begun
    with safe_open(whole, framework="pt") as file:
        tensors, facts = damage({name: file.get_tensor(name) for name in file.keys()}, file.metadata())
    path = tmp_path / "damaged.safetensors"
    save_file(tensors, path, metadata=facts)
    with pytest.raises(ConfigError, match=r"damaged\.safetensors cannot be read .*delete it"):
        run.load(path)
    run.load(whole)


def _without(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors without the first one of that name."""
    first = min(name for name in tensors if name.startswith(prefix))
    return {name: tensor for name, tensor in tensors.items() if name != first}


def test_a_killed_run_goes_on_to_the_very_same_numbers(
    corpus: Corpus, policy_file: str, tmp_path: Path, uninterrupted: Results
) -> None:
    # SIGKILL leaves no chance to tidy up; what the last checkpoint holds must be enough.
    code = (
        "import json, sys, torch\n"
        "from pathlib import Path\n"
        "from deepwell.bench.corpus import Corpus\n"
        "from deepwell.bench.parity.compare import WantedRuns, run_plan\n"
        "from deepwell.bench.parity.run import Pace, PairSetup\n"
        "from deepwell.bench.variants import parse_variants\n"
        "import deepwell.engine.compile as compiling\n"
        "compiling.PLAIN_ON_CPU = False\n"  # as in the tests' own process
        "torch.set_num_threads(1)\n"
        "corpus, setup, out, arm = json.loads(sys.argv[1])\n"
        "plan = WantedRuns(arms=parse_variants(arm), seeds=(0,), setup=PairSetup(**setup), device='cpu')\n"
        "run_plan(plan, Corpus(**corpus), Path(out), Pace(log_every=1, checkpoint_every=2))\n"
    )
    process = start_python(code, json.dumps([asdict(corpus), asdict(SETUP), str(tmp_path), policy_file]))
    checkpoint = f"{ARM}-0-*.safetensors"
    try:
        end = time.monotonic() + 300
        while not list((tmp_path / "checkpoints").glob(checkpoint)) and time.monotonic() < end:
            assert process.is_alive(), "it ended before it was killed"
            time.sleep(0.01)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    (kept,) = (tmp_path / "checkpoints").glob(checkpoint)
    plan = WantedRuns(arms=parse_variants(policy_file), seeds=(0,), setup=SETUP, device="cpu")
    lines: list[str] = []
    results, left = run_plan(plan, corpus, tmp_path, Pace(log_every=1), lines.append)
    assert left == 0 and not kept.exists()
    # bf16 was done before the kill and is not run again; the other went on in the middle.
    assert any("bf16 seed 0: done earlier" in line for line in lines)
    for arm in ("bf16", ARM):
        assert curve(results, arm) == curve(uninterrupted, arm)
    finals = [[one.final for one in every.records if one.arm == ARM] for every in (results, uninterrupted)]
    assert finals[0] == finals[1]
