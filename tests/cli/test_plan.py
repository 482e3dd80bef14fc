"""`deepwell plan`: what it prints and writes, and its exit statuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepwell.cli import app
from deepwell.graph.configs import published_config
from deepwell.planner.plan import Plan

SMALL = ("--hw", "8xH100", "--seq", "2048", "--batch", "64")


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_a_plan_is_printed_as_a_table_and_as_json() -> None:
    table = run("--model", "llama3-8b", *SMALL)
    assert table.exit_code == 0, table.output
    for word in ("plan for llama3-8b", "predicted step", "ranked", "GiB"):
        assert word in table.stdout
    as_json = run("--model", "llama3-8b", *SMALL, "--json")
    assert Plan.from_json(as_json.stdout).gpus == 8


def test_options_fix_degrees_and_words_explain() -> None:
    found = run("--model", "llama3-8b", *SMALL, "--tp", "2", "--recompute", "full", "--explain", "--sensitivity")
    assert found.exit_code == 0, found.output
    assert "TP2" in found.stdout
    assert "Where the time goes" in found.stdout
    assert "HBM -10%" in found.stdout


def test_a_config_file_works_like_a_name(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(published_config("llama3-8b")), encoding="utf-8")
    named = Plan.from_json(run("--model", "llama3-8b", *SMALL, "--json").stdout)
    for argument in (str(file), str(tmp_path)):
        from_file = Plan.from_json(run("--model", argument, *SMALL, "--json").stdout)
        assert from_file.layout == named.layout


def test_files_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    html, trace, save = tmp_path / "plan.html", tmp_path / "trace.json", tmp_path / "plan.json"
    found = run("--model", "llama3-8b", *SMALL, "--html", str(html), "--trace", str(trace), "--save", str(save))
    assert found.exit_code == 0, found.output
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert Plan.from_json(save.read_text(encoding="utf-8")).model == "llama3-8b"


def test_an_export_is_planned_for_its_engine() -> None:
    megatron = run("--model", "llama3-8b", *SMALL, "--export", "megatron")
    assert megatron.exit_code == 0, megatron.output
    assert "--tensor-model-parallel-size" in megatron.stdout
    titan = run("--model", "llama3-8b", *SMALL, "--export", "torchtitan")
    assert titan.exit_code == 0, titan.output
    assert "ParallelismConfig(" in titan.stdout


def test_status_3_says_that_nothing_fits() -> None:
    found = run("--model", "llama3-70b", "--hw", "1xH100", "--seq", "4096", "--batch", "8")
    assert found.exit_code == 3
    assert "the nearest is" in found.stderr
    as_json = run("--model", "llama3-70b", "--hw", "1xH100", "--seq", "4096", "--batch", "8", "--json")
    assert as_json.exit_code == 3
    assert json.loads(as_json.stdout)["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "llama3-8b", "--hw", "8xH10000"), "no machine is called"),
        (("--model", "llama99", *SMALL), "no published model"),
        (("--model", "nothing.json", *SMALL), "cannot read"),
        (("--model", "llama3-8b", *SMALL, "--goal", "best"), "accepted: fastest"),
        (("--model", "llama3-8b", *SMALL, "--tp", "3"), "do not divide"),
        (("--model", "llama3-8b", *SMALL, "--export", "jax"), "accepted: deepwell"),
        (("--model", "llama3-8b", *SMALL, "--html", "no/such/folder/plan.html"), "cannot write"),
    ],
)
def test_a_wrong_request_is_one_line_and_status_2(arguments: tuple[str, ...], words: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 2
    assert words in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
