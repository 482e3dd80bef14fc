"""Try an unknown kernel in a process of its own, which can be killed when it hangs and may crash without harm.

On a GPU that is a fresh interpreter: a hung kernel ends with its context. On a CPU a forked one, so that functions of a
notebook or a closure can be tried too.
"""

import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from deepwell.kernels.registry import Candidate
from deepwell.kernels.tune.out_of_memory import SKIPPED
from deepwell.kernels.tune.verify import Proof, prove

_ENTRY = "from deepwell.kernels.tune.sandbox import main; main()"
_NOT_IMPORTABLE = (
    "cannot be tried in a process of its own: it is no function of a module; move it to one or pass trusted=True"
)


def prove_apart(candidate: Candidate, device: str, dtype: str, timeout_s: float) -> Proof:
    """The proof of an untrusted candidate, made in a process of its own."""
    request = {"device": device, "dtype": dtype}
    return run_apart(candidate, lambda: prove(candidate, device, dtype), _ENTRY, request, timeout_s)


def run_apart(
    candidate: Candidate,
    work: Callable[[], Proof],
    entry: str,
    request: dict[str, Any],
    timeout_s: float,
    *,
    where: str = "",
) -> Proof:
    """What `work` finds of a candidate; a process that hangs, crashes or says nothing is a reason too.

    A fork runs `work` itself. A fresh interpreter runs `entry`, which reads the request and whose candidate it is
    (`find`), and prints a proof as JSON. `where` goes into the reasons, as " at 16x16x16".
    """
    if torch.device(request["device"]).type == "cpu" and sys.platform == "linux":
        return _in_fork(work, timeout_s, where)
    address = _address(candidate)
    if address is None:
        return Proof(reason=_NOT_IMPORTABLE)
    return _in_fresh_process(entry, {**address, **request}, timeout_s, where)


def _hangs(timeout_s: float, where: str) -> Proof:
    return Proof(reason=f"hangs{where}: no answer within {timeout_s:g} s")


def _ended(status: int | None, where: str, said: str = "") -> Proof:
    if status == -signal.SIGKILL:
        # Not by us: a system that runs out of memory ends the process that asks for it so.
        return Proof(reason=f"{SKIPPED}: its process was killed{where}")
    last = "".join(f": {line[:200]}" for line in said.strip().splitlines()[-1:])
    return Proof(reason=f"ended its process with status {status}{where}{last}")


# ---- a forked process ----


def _in_fork(work: Callable[[], Proof], timeout_s: float, where: str) -> Proof:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(writer, work), daemon=True)
    with warnings.catch_warnings():
        # Python warns of threads that a fork leaves behind; the child starts none and waits for none.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    writer.close()
    try:
        if not reader.poll(timeout_s):
            return _hangs(timeout_s, where)
        return Proof(**reader.recv())
    except EOFError:
        process.join()
        return _ended(process.exitcode, where)
    finally:
        process.kill()
        process.join()
        reader.close()


def _child(writer: Connection, work: Callable[[], Proof]) -> None:
    # A second thread would wait for a pool that stayed in the parent.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    writer.send(asdict(work()))
    writer.close()


# ---- a fresh interpreter ----


def _address(candidate: Candidate) -> dict[str, Any] | None:
    """How another process finds the candidate: by name where it is built in, else by its functions' modules."""
    common = {
        "name": candidate.name,
        "op": candidate.op,
        "precision": candidate.precision,
        "min_size": candidate.min_size,
        "fast": candidate.fast,
    }
    if candidate.origin != "user":
        return {**common, "built_in": True}
    places = {"fn": _place(candidate.fn), "prepare": _place(candidate.prepare) if candidate.prepare else ""}
    if None in places.values():
        return None
    return {**common, "built_in": False, **places}


def _place(function: Callable[..., Any]) -> list[str] | None:
    """[module, qualified name, file], None where another process could not import it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    if not module or module == "__main__" or "<" in name or not file:
        return None
    return [module, name, str(Path(file).resolve())]


def _in_fresh_process(entry: str, request: dict[str, Any], timeout_s: float, where: str) -> Proof:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", entry],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return _hangs(timeout_s, where)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return _ended(done.returncode, where, done.stderr)
    try:
        return Proof(**json.loads(lines[-1]))
    except (ValueError, TypeError):
        return Proof(reason=f"its process answered {lines[-1][:200]!r} instead of a proof{where}")


def main() -> None:
    """The fresh interpreter: read a request, find the candidate, print its proof as JSON."""
    request = json.loads(sys.stdin.read())
    candidate = find(request)
    proof = prove(candidate, request["device"], request["dtype"])
    print(json.dumps(asdict(proof)), flush=True)


def find(request: dict[str, Any]) -> Candidate:
    """The candidate that a request to a fresh interpreter is about."""
    if request["built_in"]:
        from deepwell.kernels.registry import KernelRegistry

        return KernelRegistry().candidate(request["op"], request["name"])
    return Candidate(
        name=request["name"],
        op=request["op"],
        precision=request["precision"],
        min_size=request["min_size"],
        fast=request["fast"],
        origin="user",
        fn=_load(*request["fn"]),
        prepare=_load(*request["prepare"]) if request["prepare"] else None,
    )


def _load(module: str, name: str, file: str) -> Callable[..., Any]:
    """The function of a module, by its name or, where that is not on the path, by its file."""
    found: Any = None
    if importlib.util.find_spec(module.partition(".")[0]) is not None:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            found = None
    if found is None:
        spec = importlib.util.spec_from_file_location(module, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} cannot be imported")
        found = importlib.util.module_from_spec(spec)
        sys.modules[module] = found
        spec.loader.exec_module(found)
    for part in name.split("."):
        found = getattr(found, part)
    return found
