"""`deepwell data`: what it prints, in words and in JSON, and how it fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepwell.cli.data import app
from deepwell.errors import ConfigError


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(f"document {number}\n" * 5)
    (tmp_path / "x.jsonl").write_text('{"body": "hello"}\n')
    return folder


def test_prepare_and_info_in_words_and_in_json(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("prepare", inputs, "-o", out, "--val-fraction", 0.1, "--seq-len", 32, "--shard-tokens", 1000)
    first = run(*arguments)
    assert first.exit_code == 0, first.output
    for words in (
        "40 documents; ",
        "train ",
        "val ",
        "windows of 32",
        "vocabulary 257 (bytes, uint16)",
        "end token 256",
    ):
        assert words in first.stdout
    again = json.loads(run(*arguments, "--json").stdout)
    assert (again["read"], again["wrote"], again["resumed"], again["empty"]) == (40, 0, 0, 0)
    assert "everything was there already" in run(*arguments).stdout
    found = json.loads(run("info", out, "--verify", "--json").stdout)
    assert found["verified"] and found["splits"] == again["splits"]
    train, val = found["splits"]["train"], found["splits"]["val"]
    assert train["documents"] + val["documents"] == 40 and train["shards"] > 1
    assert train["tokens"] + val["tokens"] == sum(path.stat().st_size + 1 for path in inputs.iterdir())
    assert train["seq_len"] == 32 and len(train["sha256"]) == 64
    assert "hashes agree" in run("info", out, "--verify").stdout
    assert json.loads(run("info", out / "val", "--json").stdout)["splits"]["all"]["sha256"] == val["sha256"]


def test_text_keys_restarts_and_mistakes(inputs: Path, tmp_path: Path) -> None:
    out, lines = tmp_path / "out", tmp_path / "x.jsonl"
    missing = run("prepare", lines, "-o", out)
    assert isinstance(missing.exception, ConfigError) and "give --text-key" in str(missing.exception)
    other = run("prepare", lines, "-o", out, "--text-key", "body")
    assert isinstance(other.exception, ConfigError) and "input files are others" in str(other.exception)
    found = json.loads(run("prepare", lines, "-o", out, "--text-key", "body", "--restart", "--json").stdout)
    assert found["splits"]["train"]["tokens"] == 6
    for arguments, words in (
        (("info", tmp_path / "absent"), "no file or folder"),
        (("info", inputs), "no token files"),
    ):
        failed = run(*arguments)
        assert isinstance(failed.exception, ConfigError) and words in str(failed.exception)


def test_the_standard_library_is_there_on_every_machine(tmp_path: Path) -> None:
    found = json.loads(run("prepare", "stdlib", "-o", tmp_path / "out", "--json").stdout)
    assert found["splits"]["train"]["documents"] > 100
    assert found["splits"]["train"]["tokens"] > 1_000_000


def test_preparing_loads_no_torch(inputs: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from deepwell.cli.data import app; "
        f"app(['prepare', {str(inputs)!r}, '-o', {str(tmp_path / 'out')!r}], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
