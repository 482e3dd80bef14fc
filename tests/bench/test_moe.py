"""`deepwell bench moe` on a CPU: rows run in processes of their own, are kept as they come, and say what failed."""

import json

import pytest
from typer.testing import CliRunner

from deepwell.bench.moe import block, race
from deepwell.bench.moe.block import row_of
from deepwell.bench.moe.kernels import rows_of
from deepwell.bench.moe.shapes import SHAPES, STEPS, TINY, WAYS
from deepwell.cli.bench import app
from deepwell.errors import ConfigError


@pytest.mark.parametrize("way", ["hf-eager", "deepwell", "deepwell-fp8"])
@pytest.mark.parametrize("name", TINY)
def test_a_row_is_compared_with_hugging_faces_and_timed(name, way):
    row = row_of(TINY[name], way, "cpu")
    assert "problems" not in row, row
    assert min(row["ms"], row["forward ms"], row["zipf"]) > 0
    assert row["dB"] < 40 or not way.endswith("fp8")


def test_every_stage_of_a_block_has_a_row():
    found = rows_of(TINY["tiny"], "cpu")
    assert [row["stage"] for row in found[:6]] == ["up", "down", "dH", "dX", "FP8 up", "FP8 dW1"]
    assert all(row["ms"] > 0 and "problems" not in row for row in found)


def test_rows_are_named_by_blocks_and_ways():
    every = race.row_names("cuda", [])
    assert len(every) == len(SHAPES) * (len(WAYS) + 1) + len(STEPS)
    assert race.row_names("cuda", ["qwen3-8k", "deepwell"]) == [("qwen3-8k", "deepwell")]
    assert race.row_names("cuda", ["step"]) == [(model, "step") for model in STEPS]
    with pytest.raises(ConfigError, match="qwen9"):
        race.row_names("cuda", ["qwen9"])


@pytest.mark.parametrize(
    ("names", "ways", "wrong"), [("tiny", "deepwel", "deepwel"), ("tiny,qwen9", "deepwell", "qwen9")]
)
def test_blocks_and_ways_that_nobody_knows_are_named_before_anything_runs(names, ways, wrong):
    with pytest.raises(ConfigError, match=wrong):
        block.main(names, ways, "cpu")


def test_the_command_keeps_each_row_and_fails_where_ours_does_not_run(tmp_path, monkeypatch):
    file, kept = tmp_path / "moe.json", []

    def last_line(command, timeout_s):
        kept.append(json.loads(file.read_text())["rows"] if file.exists() else [])
        block, way = command[-3:-1]
        if way == "hf-grouped":
            return {"block": block, "way": way, "ms": 4.0}
        return (
            {"block": block, "way": way, "ms": 2.0, "chosen": {"up": "torch"}}
            if way == "deepwell"
            else "failed: no memory"
        )

    monkeypatch.setattr(race, "last_line", last_line)
    made = CliRunner().invoke(app, ["moe", "--device", "cpu", "--only", "tiny", "--json", str(file)])
    result = json.loads(file.read_text())
    rows = {row["way"]: row for row in result["rows"]}
    assert result["chosen"] == {"tiny deepwell": {"up": "torch"}} and "chosen" not in rows["deepwell"]
    assert [len(rows) for rows in kept[:3]] == [0, 1, 2]
    assert rows["deepwell"]["speed"] == 2.0
    assert made.exit_code == 1 and rows["deepwell-fp8"]["problems"] == ["failed: no memory"]
    assert "problems" not in rows["liger"] and rows["liger"]["note"] == "failed: no memory"


@pytest.mark.slow
def test_a_row_in_its_own_process():
    made = race.run_moe("cpu", ["tiny", "deepwell"])
    assert [row["way"] for row in made["rows"]] == ["deepwell"] and made["rows"][0]["ms"] > 0
