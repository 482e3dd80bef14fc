"""Runs the tests: `python test.py [arguments of pytest]`.

In an environment that has what the tests need (a GPU host, an activated .venv) they run there; otherwise setup.sh
makes .venv first and they run in it. `make test` runs the linters and type checks as well.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent

# What the tests import besides the standard library. Oracles of single tests are not in it: those skip without them.
REQUIRED = ("torch", "numpy", "safetensors", "rich", "typer", "jinja2", "pynvml", "pytest", "hypothesis", "ml_dtypes")


def missing() -> list[str]:
    """The required packages that this Python does not have."""
    return [name for name in REQUIRED if importlib.util.find_spec(name) is None]


def main(arguments: list[str]) -> int:
    """Run pytest on the tree with `arguments` and return its exit status."""
    python = sys.executable
    absent = missing()
    if absent:
        print(f"test: this Python lacks {', '.join(absent)}; the tests run in .venv", flush=True)
        status = subprocess.run([str(ROOT / "setup.sh")], check=False).returncode
        if status != 0:
            return status
        python = str(ROOT / ".venv" / "bin" / "python")
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ
    # Minutes-long and browser tests only when asked for; pytest takes the last -m, so the caller's wins.
    command = [python, "-m", "pytest", "-m", "not slow and not browser", *arguments]
    return subprocess.run(command, check=False, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
