"""`deepwell validate parity` on the command line: a pair of tiny runs, its files, and its status."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepwell.cli import app

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")


def run(*arguments: str):
    return CliRunner().invoke(app, ["validate", "parity", *arguments])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("text")
    for number in range(300):
        body = "\n".join(f"value_{number} = {line * number} + {line}" for line in range(20))
        (folder / f"{number}.py").write_text(body, encoding="utf-8")
    return str(folder)


TINY = (
    "--model",
    "tiny",
    "--device",
    "cpu",
    "--vocab",
    "320",
    "--batch",
    "2",
    "--seq-len",
    "32",
    "--eval-tokens",
    "256",
)


def test_a_pair_of_runs_gives_a_verdict_a_file_and_a_picture(text: str, tmp_path: Path) -> None:
    arguments = (*TINY, "--text", text, "--tokens", "192", "--evals", "1", "--log-every", "1", "--out", str(tmp_path))
    shown = run(*arguments, "--arms", "fp8", "--bound", "0.5")
    assert shown.exit_code == 0, shown.output
    assert "pass" in shown.stdout and "fp8" in shown.stdout and "tokenizer:" in shown.stdout
    kept = json.loads((tmp_path / "parity.json").read_text())
    assert [one["arm"] for one in kept["runs"]] == ["bf16", "fp8"] and all(one["done"] for one in kept["runs"])
    if (tmp_path / "parity.png").is_file():
        assert (tmp_path / "parity.png").read_bytes()[:4] == b"\x89PNG"
    else:
        assert "matplotlib" in shown.stdout

    # Once more: nothing is run again, and a bound that no run can meet is status 1.
    again = run(*arguments, "--arms", "fp8", "--bound", "-0.5", "--json")
    assert again.exit_code == 1
    answer = json.loads(again.stdout)
    assert answer["left"] == 0 and answer["verdicts"][0]["answer"] == "fail"
    assert "done earlier" in again.stderr


def test_prepare_says_where_the_tokenizer_is(text: str) -> None:
    shown = run("--prepare", "--text", text, "--vocab", "320", "--json")
    facts = json.loads(shown.stdout)
    assert Path(facts["tokenizer"]).is_file() and facts["num_held"] > 0


@pytest.mark.parametrize(
    ("arguments", "piece"),
    [
        (("--arms", "fp9"), "fp9"),
        (("--seeds", "a"), "--seeds"),
        (("--model", "huge"), "768-12l"),
        (("--tokens", "1e9"), "at most 4 times"),
        (("--tokenizer", "nowhere.json"), "nowhere.json"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, tmp_path: Path, arguments: tuple[str, ...], piece: str) -> None:
    shown = run(*TINY, "--text", text, "--out", str(tmp_path), *arguments)
    assert shown.exit_code == 2 and piece in shown.stderr and shown.stderr.count("\n") == 1


def test_help_loads_no_torch() -> None:
    code = "import sys; from deepwell.cli import main\ntry:\n main(['validate', 'parity', '--help'])\n"
    code += "except SystemExit: pass\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
