"""`deepwell validate parity` on the command line: a pair of tiny runs, its files, and its status."""

import json
import os
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
        (("--arms", "bf16"), "--arms"),
        (("--seeds", "a"), "--seeds"),
        (("--seeds", ""), "--seeds"),
        (("--seeds", "99999999999999999999"), "--seeds"),
        (("--model", "huge"), "768-12l"),
        (("--tokens", "1e9"), "at most 4 times"),
        (("--tokens", "nan"), "--tokens"),
        (("--tokens", "inf"), "--tokens"),
        (("--tokens", "0"), "--tokens"),
        (("--log-every", "0"), "--log-every"),
        (("--checkpoint-every", "0"), "--checkpoint-every"),
        (("--lr", "-1"), "--lr"),
        (("--lr", "nan"), "--lr"),
        (("--warmup", "2"), "--warmup"),
        (("--evals", "-1"), "--evals"),
        (("--bound", "nan"), "--bound"),
        (("--budget", "nan"), "--budget"),
        (("--megabytes", "nan"), "--megabytes"),
        (("--seq-len", "4096", "--batch", "1", "--tokens", "4096"), "--seq-len"),
        (("--text", "nowhere"), "nowhere"),
        (("--tokenizer", "nowhere.json"), "nowhere.json"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, tmp_path: Path, arguments: tuple[str, ...], piece: str) -> None:
    # 192 tokens are three steps: a check that comes too late would leave a result.
    shown = run(*TINY, "--text", text, "--tokens", "192", "--out", str(tmp_path), *arguments)
    assert shown.exit_code == 2 and piece in shown.stderr and shown.stderr.count("\n") == 1
    assert not (tmp_path / "parity.json").exists()


def refused_before_the_text_is_read(text: str, out: Path) -> str:
    shown = run(*TINY, "--text", text, "--tokens", "192", "--out", str(out))
    assert shown.exit_code == 2 and shown.stderr.count("\n") == 1 and not shown.stdout
    return shown.stderr


@pytest.mark.parametrize("below", [".", "deeper", "deeper/still"])
def test_a_file_where_the_folder_should_be_is_refused_before_anything_is_trained(
    text: str, tmp_path: Path, below: str
) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    assert "--out" in refused_before_the_text_is_read(text, path / below)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x81 no text",
        b"[]",
        b'{"schema": 7, "corpora": {}, "runs": []}',
        b'{"schema": 1, "corpora": {}, "runs": [1]}',
        b'{"schema": 1, "corpora": {}, "runs": {"a": 1}}',
        b'{"schema": 1, "corpora": [], "runs": []}',
    ],
)
def test_a_result_that_is_none_is_refused_by_name_and_kept(text: str, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "parity.json"
    path.write_bytes(content)
    told = refused_before_the_text_is_read(text, tmp_path)
    assert str(path) in told and "another folder" in told
    assert path.read_bytes() == content


def test_a_policy_that_cannot_be_read_is_refused_before_bf16_is_trained(text: str, tmp_path: Path) -> None:
    policy = tmp_path / "policy.json"
    policy.write_text("{}")
    shown = run(*TINY, "--text", text, "--tokens", "192", "--out", str(tmp_path), "--arms", str(policy))
    assert shown.exit_code == 2 and not (tmp_path / "parity.json").exists()


def test_a_budget_that_the_text_uses_up_says_so_and_keeps_the_tokens(text: str, tmp_path: Path) -> None:
    shown = run(*TINY, "--text", text, "--tokens", "192", "--out", str(tmp_path), "--budget", "0.001")
    assert shown.exit_code == 2 and shown.stderr.count("\n") == 1
    assert "--budget" in shown.stderr and "preparing the text took" in shown.stderr
    assert list((Path(os.environ["DEEPWELL_CACHE_DIR"]) / "corpus").glob("train-*.npy"))


def test_the_baseline_may_be_named_among_the_arms(text: str, tmp_path: Path) -> None:
    # Two steps: what matters is which runs there are.
    arguments = ("--text", text, "--tokens", "128", "--evals", "0", "--out", str(tmp_path), "--bound", "0.5")
    shown = run(*TINY, *arguments, "--arms", "bf16,fp8")
    assert shown.exit_code == 0, shown.output
    assert "bf16 is the baseline and always runs" in shown.stdout
    assert [one["arm"] for one in json.loads((tmp_path / "parity.json").read_text())["runs"]] == ["bf16", "fp8"]


def test_help_loads_no_torch() -> None:
    code = "import sys; from deepwell.cli import main\ntry:\n main(['validate', 'parity', '--help'])\n"
    code += "except SystemExit: pass\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
