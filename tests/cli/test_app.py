"""The command line: outputs, errors, exit statuses, and how fast it starts."""

import json
import re
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from deepwell import __version__
from deepwell.cli import app
from deepwell.hardware.model import Hardware


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_probe_json_is_the_hardware_and_nothing_else():
    result = run("probe", "64x8xH100", "--json")
    assert result.exit_code == 0
    hw = Hardware.from_json(result.stdout)
    assert (hw.num_gpus, hw.num_nodes) == (512, 64)


def test_probe_prints_devices_speeds_and_the_topology():
    result = run("probe", "8xB200")
    assert result.exit_code == 0
    for piece in ("8 GPUs (1 node of 8)", "sm_100", "fp4 peak, dense", "GPU7  NV18", "nvfp4", "900 GB/s"):
        assert piece in result.stdout, piece


def test_probe_without_a_name_is_this_machine():
    hw = Hardware.from_json(run("probe", "--json").stdout)
    assert hw.host is not None and hw.num_nodes == 1


def test_probe_measures_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPWELL_CACHE_DIR", str(tmp_path))
    # A budget this short measures at most the first thing, which is enough to see it kept.
    result = run("probe", "--measure", "--budget", "0.01", "--json")
    assert result.exit_code == 0, result.output
    assert len(list(tmp_path.glob("measure-*.json"))) == 1
    gpu = Hardware.from_json(result.stdout).gpus[0]
    assert gpu.figure("copy_gb_per_s").tier == "measured"
    assert Hardware.from_json(run("probe", "--json").stdout).gpus[0].copy_gb_per_s == gpu.copy_gb_per_s


# Each a request that is wrong, and what the one line must say.
@pytest.mark.parametrize(
    ("arguments", "piece"),
    [
        (("probe", "8xB20"), "did you mean B200"),
        (("probe", "0xB200"), "is no count"),
        (("probe", "8xB200", "--measure"), "only this machine can be measured"),
        (("probe", "--measure", "--budget", "0"), "budget_s"),
    ],
)
def test_errors_are_one_line_on_stderr_with_status_2(arguments, piece):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == "" and result.stderr.count("\n") == 1 and piece in result.stderr
    assert "Traceback" not in result.output


def test_debug_shows_the_traceback():
    result = run("--debug", "probe", "8xB20")
    assert result.exit_code == 1 and type(result.exception).__name__ == "ConfigError"


def test_version_and_only_commands_that_exist():
    assert run("--version").stdout.strip() == f"deepwell {__version__}"
    commands = {command.name for command in app.registered_commands}
    assert {"probe", "doctor"} <= commands
    for command in commands:
        assert run(command, "--help").exit_code == 0
    assert run("levitate").exit_code == 2


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_importing_deepwell_and_its_pure_parts_loads_no_torch():
    # Times vary with the machine's load, so the best of three counts; a stray import of torch costs seconds.
    code = (
        "import sys, time; t = time.perf_counter(); import deepwell; took = time.perf_counter() - t\n"
        "import deepwell.hardware.probe, deepwell.hardware.measure, deepwell.cli\n"
        "deepwell.probe('8xB200')\n"
        "heavy = [m for m in ('torch', 'numpy', 'triton', 'pynvml') if m in sys.modules]\n"
        "print(took, heavy)"
    )
    runs = [_python("-c", code).stdout.split(" ", 1) for _ in range(3)]
    assert {heavy.strip() for _, heavy in runs} == {"[]"}
    assert min(float(took) for took, _ in runs) < 0.3


def test_the_module_runs_and_probe_without_a_gpu_is_fast_and_needs_no_torch():
    start = time.perf_counter()
    done = _python("-X", "importtime", "-m", "deepwell", "probe", "--json")
    took = time.perf_counter() - start
    assert done.returncode == 0
    if Hardware.from_json(done.stdout).kind == "cpu":
        imported = set(re.findall(r"^import time: .*\|\s+(\S+)$", done.stderr, flags=re.MULTILINE))
        assert "deepwell.hardware.probe" in imported and "torch" not in imported
        assert took < 4


def test_doctor_json_is_valid_and_its_status_is_its_verdict():
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == (0 if report["healthy"] else 1)
    assert {"python", "torch", "formats", "cache"} <= {check["name"] for check in report["checks"]}
    assert report["healthy"] == all(check["status"] != "fail" for check in report["checks"])


def test_help_shows_the_extra_that_a_build_needs_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for arguments in (("--help",), ("build", "--help")):
        assert "deepwell[cutlass]" in run(*arguments).stdout
