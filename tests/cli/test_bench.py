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
        (("step", "--model", "tiny", "--device", "cpu", "--checkpoint-layers", "-3"), "--checkpoint-layers is -3"),
        (("step", "--model", "tiny", "--device", "cpu", "--checkpoint-layers", "99"), "tiny has 2 layers"),
        (("compile", "--model", "tiny", "--device", "cpu", "--entrants", " ,"), "--entrants is empty"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: tuple[str, ...], piece: str) -> None:
    shown = run(*arguments)
    assert shown.exit_code == 2 and piece in shown.stderr and shown.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("command", ["step", "gemm", "attention", "adamw", "compile"])
def test_without_a_gpu_the_error_says_what_to_try(command: str) -> None:
    shown = run(command)
    assert shown.exit_code == 2 and "--device cpu" in shown.stderr
    assert ("--model tiny" in shown.stderr) == (command not in ("gemm", "attention"))


def test_attention_is_tried_out_on_a_cpu_at_a_length_that_fits() -> None:
    shown = run(
        "attention", "--device", "cpu", "--quick", "--batch", "1", "--heads", "2", "--kv-heads", "1", "--json", "-"
    )
    assert shown.exit_code == 0, shown.output
    assert "S=512" in json.loads(shown.stdout)["title"]


@pytest.mark.parametrize("command", ["step", "gemm", "attention", "adamw", "compile"])
def test_a_file_that_cannot_be_written_is_found_before_anything_is_timed(command: str, tmp_path, monkeypatch) -> None:
    from deepwell.bench import devices

    monkeypatch.setattr(devices, "pick_device", lambda *_a: pytest.fail("it went on"))
    blocked = tmp_path / "a file"
    blocked.write_text("")
    shown = run(command, "--device", "cpu", "--json", str(blocked / "result.json"))
    assert shown.exit_code == 2 and "--json" in shown.stderr and shown.stderr.count("\n") == 1


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_was(tmp_path) -> None:
    from deepwell.bench.report import check_writable

    kept, new = tmp_path / "kept.json", tmp_path / "folder" / "new.json"
    kept.write_text("{}")
    check_writable(kept)
    check_writable(new)
    assert kept.read_text() == "{}" and not new.exists()


def test_a_policy_file_that_is_none_is_found_before_a_process_compiles_with_it(tmp_path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("{")
    shown = run("compile", "--model", "tiny", "--device", "cpu", "--entrants", str(path))
    assert shown.exit_code == 2 and shown.stderr.count("\n") == 1


def test_an_entrant_of_our_own_that_does_not_compile_is_status_1(monkeypatch) -> None:
    from deepwell.bench import compile_time

    monkeypatch.setattr(compile_time, "last_line", lambda *_a: "failed: it is broken")
    assert run("compile", "--model", "tiny", "--device", "cpu", "--entrants", "fp8").exit_code == 1
    assert run("compile", "--model", "tiny", "--device", "cpu", "--entrants", "torchao").exit_code == 0


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; from deepwell.cli import main\ntry:\n main(['bench', 'step', '--help'])\nexcept SystemExit: pass\n"
    )
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
