"""`deepwell dryrun`: what it prints and writes, and its exit statuses."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deepwell.cli import app
from deepwell.engine.dryrun.values import DryRun
from deepwell.graph.configs import published_config
from deepwell.planner.search.autoplan import autoplan

SMALL = ("--hw", "8xH100", "--seq", "2048", "--batch", "64")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    torch.set_num_threads(1)


def run(*arguments: str):
    return CliRunner().invoke(app, ["dryrun", *arguments])


def test_a_machine_that_is_not_here_is_simulated_and_every_figure_says_so(tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    found = run("--model", "llama3-8b", *SMALL, "--trace", str(trace))
    assert found.exit_code == 0, found.output
    assert "dry run of llama3-8b on 8xH100" in found.stdout
    assert "simulated, table tier" in found.stdout
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


def test_a_plan_and_a_config_file_work_like_a_name(tmp_path: Path) -> None:
    plan = autoplan("llama3-8b", hw="8xH100", seq_len=2048, global_batch=64)
    file, config = tmp_path / "plan.json", tmp_path / "config.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    config.write_text(json.dumps(published_config("llama3-8b")), encoding="utf-8")
    from_plan = DryRun.from_json(run("--plan", str(file), "--json").stdout)
    assert from_plan.plan == plan
    from_config = DryRun.from_json(run("--model", str(config), *SMALL, "--json").stdout)
    assert from_config.layout == from_plan.layout
    assert from_config.trial is None


def test_a_small_model_here_takes_real_steps() -> None:
    found = run("--model", "tiny", "--precision", "bf16", "--steps", "1", "--json")
    assert found.exit_code == 0, found.output
    report = DryRun.from_json(found.stdout)
    assert report.trial is not None
    assert report.trial.step_s is not None
    assert report.figure("step").how == "measured"
    quiet = DryRun.from_json(run("--model", "tiny", "--precision", "bf16", "--no-measure", "--json").stdout)
    assert quiet.trial is None
    assert quiet.figure("step").how == "simulated"


def test_what_does_not_fit_ends_with_status_3(tmp_path: Path) -> None:
    nowhere = run("--model", "llama3-405b", "--hw", "H100", "--seq", "8192", "--batch", "8")
    assert nowhere.exit_code == 3
    # A plan that was made for more memory than the machine in it has.
    plan = autoplan("llama3-8b", hw="8xH200", seq_len=8192, global_batch=64, recompute="none", micro_batch=4)
    data = plan.to_dict()
    data["estimate"]["limit_gib"] = 40.0
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    found = run("--plan", str(file))
    assert found.exit_code == 3
    assert "does not fit" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--model: name a model"),
        (("--model", "no-such-model", "--hw", "8xH100"), "no-such-model"),
        (("--model", "llama3-8b", "--hw", "8xZ9"), "Z9"),
        (("--model", "llama3-8b", "--hw", "8xH100", "--measure"), "--measure"),
        (("--plan", "nowhere.json"), "--plan: cannot read"),
        (("--model", "llama3-8b", *SMALL, "--trace", "/nowhere/step.json"), "--trace: cannot write"),
    ],
)
def test_wrong_requests_end_with_one_line_and_status_2(arguments: tuple[str, ...], words: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 2, found.output
    assert words in found.output
    assert "Traceback" not in found.output
