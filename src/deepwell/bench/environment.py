"""Where and with what a number was measured: versions, GPU, driver, date, the commit of the sources."""

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepwell
from deepwell.hardware.cache import package_version

_PACKAGES = ("torch", "triton", "torchao", "liger-kernel", "transformers", "tokenizers", "numpy")


def environment() -> dict[str, Any]:
    """Facts that belong beside every measured number, ready for JSON."""
    import torch

    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "deepwell": deepwell.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "device": "cpu",
    }
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
        facts["capability"] = list(torch.cuda.get_device_capability())
        facts["driver"] = deepwell.probe().gpus[0].driver
    return facts


def child_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a process that finds these very sources, installed or not."""
    env = {**os.environ, **(more or {})}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return env


def last_line(arguments: Sequence[str], timeout_s: float, more: Mapping[str, str] | None = None) -> Any:
    """The JSON of the last line that `python -m ARGUMENTS` prints; in words why there is none."""
    command, env = [sys.executable, "-m", *arguments], child_environment(more)
    try:
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"not done after {timeout_s:.0f} s"
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        return f"failed: {(run.stderr.strip().splitlines() or ['no output'])[-1][:200]}"
    try:
        return json.loads(lines[-1])
    except json.JSONDecodeError:
        return lines[-1][:200]


def one_line(facts: dict[str, Any]) -> str:
    """The facts that a table's caption names."""
    packages = " ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    driver = f", driver {facts['driver']}" if facts.get("driver") else ""
    return f"{facts['device']}{driver}, cuda {facts['cuda']}, {packages}, {facts['date']}, commit {facts['commit']}"


def _commit() -> str | None:
    """The commit of the checkout that these sources lie in, with a + where files differ; None outside of one."""
    git, folder = shutil.which("git"), Path(__file__).resolve().parent
    if git is None:
        return None

    def ask(*arguments: str) -> str | None:
        run = subprocess.run([git, *arguments], cwd=folder, capture_output=True, text=True, check=False)
        return run.stdout.strip() if run.returncode == 0 else None

    commit = ask("rev-parse", "--short", "HEAD")
    return commit and commit + ("+" if ask("status", "--porcelain", "--untracked-files=no") else "")
