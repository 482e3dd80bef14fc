"""Python processes that start warm: forked from a server that has imported torch and transformers, and nothing of ours.

Importing both takes longer than most of what the tests do in a process of their own. The server starts with the first
process, has no threads and has not touched CUDA, so a child may use a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.tensor", "transformers", "transformers.models.llama.modeling_llama"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def run_python(code: str | Path, *arguments: str, cwd: Path | None = None, timeout: float = 600) -> Done:
    """Run code, or the file of a script, as `python` would: its exit code, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        given = (code, list(arguments), str(cwd or Path.cwd()), dict(os.environ), str(out), str(err))
        process = CONTEXT.Process(target=_child, args=given)
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise AssertionError(f"still running after {timeout:g} s\n{err.read_text(errors='replace')[-4000:]}")
        code_ = process.exitcode
        assert code_ is not None
        return Done(returncode=code_, stdout=out.read_text(errors="replace"), stderr=err.read_text(errors="replace"))


def start_python(code: str, *arguments: str) -> ForkServerProcess:
    """Start code as `python -c` would, and go on; its output goes nowhere."""
    given = (code, list(arguments), str(Path.cwd()), dict(os.environ), os.devnull, os.devnull)
    process = CONTEXT.Process(target=_child, args=given)
    process.start()
    return process


def _child(code: str | Path, arguments: list[str], cwd: str, env: dict[str, str], out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    if isinstance(code, Path):
        sys.argv = [str(code), *arguments]
        runpy.run_path(str(code), run_name="__main__")
    else:
        sys.argv = ["-c", *arguments]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
    sys.stderr.flush()
