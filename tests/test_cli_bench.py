"""`deepwell bench` on the command line: tables, JSON, one line for an error."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from deepwell.cli import app

torch = pytest.importorskip("torch")


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments])


def test_a_step_is_timed_and_kept(tmp_path) -> None:
    path = tmp_path / "step.json"
    arguments = ("--model", "tiny", "--device", "cpu", "--peers", "eager", "--variants", "", "--quick")
    shown = run("step", *arguments, "--json", str(path))
    assert shown.exit_code == 0, shown.output
    assert "eager" in shown.stdout and "tokens/s" in shown.stdout
    kept = json.loads(path.read_text())
    assert kept["model"] == "tiny" and kept["rows"][0]["name"] == "eager"


def test_json_alone_goes_to_stdout() -> None:
    shown = run("adamw", "--model", "tiny", "--device", "cpu", "--quick", "--json", "-")
    assert json.loads(shown.stdout)["bench"] == "adamw"


def test_gemms_are_timed_beside_bf16() -> None:
    shown = run("gemm", "--device", "cpu", "--json", "-")
    assert shown.exit_code == 0, shown.output
    assert any(row["kernel"] == "torch_bf16" and row["us"] for row in json.loads(shown.stdout)["rows"])


def test_a_claim_that_fails_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepwell.bench import adamw

    rows = [{"optimizer": "adamw_dw", "ms": 1.0, "problems": ["another kernel ran"]}]
    facts = {"packages": {}, "device": "x", "cuda": None, "date": "", "commit": ""}
    monkeypatch.setattr(adamw, "run_adamw", lambda *_a, **_k: {"title": "t", "rows": rows, "environment": facts})
    shown = run("adamw", "--device", "cpu")
    assert shown.exit_code == 1 and "another kernel ran" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "piece"),
    [
        (("step", "--model", "9b", "--device", "cpu"), "8b-4l"),
        (("step", "--model", "tiny", "--device", "cpu", "--peers", "jax"), "--peers"),
        (("step", "--model", "tiny", "--device", "cpu", "--variants", "fp9"), "fp9"),
        (("step", "--device", "tpu"), "--device"),
        (("attention", "--heads", "3", "--kv-heads", "2", "--device", "cpu"), "G divides H"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: tuple[str, ...], piece: str) -> None:
    shown = run(*arguments)
    assert shown.exit_code == 2 and piece in shown.stderr and shown.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("command", ["step", "gemm", "attention", "adamw", "compile"])
def test_without_a_gpu_the_error_says_what_to_try(command: str) -> None:
    shown = run(command)
    assert shown.exit_code == 2 and "--device cpu --model tiny" in shown.stderr


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; from deepwell.cli import main\ntry:\n main(['bench', 'step', '--help'])\nexcept SystemExit: pass\n"
    )
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
