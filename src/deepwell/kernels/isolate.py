"""Try an unknown kernel in a process of its own, which can be killed when it hangs and may crash without harm.

On a GPU that is a fresh interpreter: a hung kernel ends with its context. On a CPU a forked one, so that functions of a
notebook or a closure can be tried too.
"""

import importlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from deepwell.kernels.proof import Proof, prove
from deepwell.kernels.registry import Candidate

_ENTRY = "from deepwell.kernels.isolate import main; main()"
_NOT_IMPORTABLE = (
    "cannot be tried in a process of its own: it is no function of a module; move it to one or pass trusted=True"
)


def prove_apart(candidate: Candidate, device: str, dtype: str, timeout_s: float) -> Proof:
    """The proof of an untrusted candidate; a process that hangs, crashes or says nothing is a reason too."""
    if torch.device(device).type == "cpu" and sys.platform == "linux":
        return _in_fork(candidate, device, dtype, timeout_s)
    where = _address(candidate)
    if where is None:
        return Proof(reason=_NOT_IMPORTABLE)
    return _in_fresh_process({**where, "device": device, "dtype": dtype}, timeout_s)


# ---- a forked process ----


def _in_fork(candidate: Candidate, device: str, dtype: str, timeout_s: float) -> Proof:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(writer, candidate, device, dtype), daemon=True)
    with warnings.catch_warnings():
        # Python warns of threads that a fork leaves behind; the child starts none and waits for none.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    writer.close()
    try:
        if not reader.poll(timeout_s):
            return Proof(reason=f"hangs: no answer within {timeout_s:g} s")
        return Proof(**reader.recv())
    except EOFError:
        process.join()
        return Proof(reason=f"ended its process with status {process.exitcode}")
    finally:
        process.kill()
        process.join()
        reader.close()


def _child(writer: Connection, candidate: Candidate, device: str, dtype: str) -> None:
    # A second thread would wait for a pool that stayed in the parent.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    writer.send(asdict(prove(candidate, device, dtype)))
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


def _in_fresh_process(request: dict[str, Any], timeout_s: float) -> Proof:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ENTRY],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Proof(reason=f"hangs: no answer within {timeout_s:g} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        return Proof(
            reason=f"ended its process with status {done.returncode}" + (f": {said[-1][:200]}" if said else "")
        )
    try:
        return Proof(**json.loads(lines[-1]))
    except (json.JSONDecodeError, TypeError):
        return Proof(reason=f"its process answered {lines[-1][:200]!r} instead of a proof")


def main() -> None:
    """The fresh interpreter: read a request, find the candidate, print its proof as JSON."""
    request = json.loads(sys.stdin.read())
    candidate = _find(request)
    proof = prove(candidate, request["device"], request["dtype"])
    print(json.dumps(asdict(proof)), flush=True)


def _find(request: dict[str, Any]) -> Candidate:
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
