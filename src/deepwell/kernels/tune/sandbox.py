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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from deepwell.kernels.device.triton_support import compile_ahead
from deepwell.kernels.tune.candidate import Candidate, room_of
from deepwell.kernels.tune.out_of_memory import SKIPPED, says_shortage
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.verify import Case, Proof, verify

_ENTRY = "from deepwell.kernels.tune.sandbox import main; main()"
_ENTRY_TOGETHER = "from deepwell.kernels.tune.sandbox import main_together; main_together()"
# Of a candidate, what a request to another process names.
_COMMON = ("name", "op", "precision", "min_size", "fast")
_NOT_IMPORTABLE = (
    "cannot be tried in a process of its own: it is no function of a module; move it to one or pass trusted=True"
)


def verify_apart(candidate: Candidate, problem: Problem, timeout_s: float, *, at_size: bool = False) -> Proof:
    """The proof of a candidate, made in a process of its own; one that hangs, crashes or says nothing is a reason too.

    `at_size` tries it at the problem's own size: a kernel may be right at small shapes and wrong, or hang, at others.
    """
    where = f" at {problem.size}" if at_size else ""
    if torch.device(problem.device).type == "cpu" and sys.platform == "linux":
        return _in_fork(lambda: verify(candidate, cases_for(candidate, problem, at_size)), timeout_s, where)
    address = _address(candidate)
    if address is None:
        return Proof(reason=_NOT_IMPORTABLE)
    request = {**address, "problem": asdict(problem), "at_size": at_size}
    return _in_fresh_process(_ENTRY, request, timeout_s, where)


def verify_together(asked: Sequence[tuple[Candidate, Problem]], timeout_s: float) -> list[Proof]:
    """The proofs of several candidates, in their order: one process compiles their kernels side by side, then tries
    one after the other.

    One that hangs or crashes is rejected, and those behind it are tried in another process.
    """
    if torch.device(asked[0][1].device).type == "cpu":
        return [verify_apart(candidate, problem, timeout_s) for candidate, problem in asked]
    proofs: list[Proof] = []
    compiles_ahead = True
    while len(proofs) < len(asked):
        left = asked[len(proofs) :]
        requests = [{**(_address(candidate) or {}), "problem": asdict(problem)} for candidate, problem in left]
        said, ended = _answers(_ENTRY_TOGETHER, {"asked": requests, "compiles_ahead": compiles_ahead}, timeout_s)
        found = [Proof(**line["proof"]) for line in said if "proof" in line]
        proofs += found
        if ended is None and found:
            continue
        if not said and compiles_ahead:
            compiles_ahead = False  # the process ended before it tried anybody: one by one shows who ends it
        elif len(found) < len(left):
            proofs.append(ended or Proof(reason="its process answered nothing"))
    return proofs


def main_together() -> None:
    """The fresh interpreter of `verify_together`: a line of JSON before and after each candidate."""
    request = json.loads(sys.stdin.read())
    asked = [(find(one), Problem(**one["problem"])) for one in request["asked"]]
    cases = [(candidate, list(cases_for(candidate, problem, False))) for candidate, problem in asked]
    if request["compiles_ahead"]:
        compile_ahead([partial(case.run, candidate, case.operands) for candidate, some in cases for case in some])
    for candidate, some in cases:
        print(json.dumps({"tries": candidate.name}), flush=True)
        proof = verify(candidate, some)
        print(json.dumps({"proof": asdict(proof)}), flush=True)
        if not proof.is_passed and _is_lost():
            return  # the others are tried in another process


def _is_lost() -> bool:
    """Whether an error of a kernel, which CUDA keeps, spoils all that follows in this process."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def cases_for(candidate: Candidate, problem: Problem, at_size: bool) -> Iterable[Case]:
    room = room_of(candidate.op)
    return [room.case_at(candidate, problem)] if at_size else room.cases(candidate, problem)


def main() -> None:
    """The fresh interpreter: read a request, find the candidate, print its proof as JSON."""
    request = json.loads(sys.stdin.read())
    candidate, problem = find(request), Problem(**request["problem"])
    proof = verify(candidate, cases_for(candidate, problem, request["at_size"]))
    print(json.dumps(asdict(proof)), flush=True)


def _hangs(timeout_s: float, where: str) -> Proof:
    return Proof(reason=f"hangs{where}: no answer within {timeout_s:g} s")


def _ended(status: int | None, where: str, said: str = "") -> Proof:
    last = "".join(f": {line[:200]}" for line in said.strip().splitlines()[-1:])
    # Killed, but not by us: a system that runs out of memory ends the process that asks for it so.
    if status == -signal.SIGKILL or says_shortage(last):
        return Proof(reason=f"{SKIPPED}: its process was killed{where}{last}")
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
    address = {name: getattr(candidate, name) for name in _COMMON} | {"built_in": candidate.origin != "user"}
    if address["built_in"]:
        return address
    places = {"fn": _place(candidate.fn), "prepare": _place(candidate.prepare) if candidate.prepare else ""}
    return None if None in places.values() else {**address, **places}


def _place(function: Callable[..., Any]) -> list[str] | None:
    """[module, qualified name, file], None where another process could not import it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    if not module or module == "__main__" or "<" in name or not file:
        return None
    return [module, name, str(Path(file).resolve())]


def _start(entry: str, request: dict[str, Any], timeout_s: float) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, "-c", entry],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment,
    )


def _answers(entry: str, request: dict[str, Any], timeout_s: float) -> tuple[list[dict[str, Any]], Proof | None]:
    """(the lines of JSON that a process printed, why it ended where it did not end well)."""
    try:
        done = _start(entry, request, timeout_s)
        said, ended = done.stdout, _ended(done.returncode, "", done.stderr) if done.returncode else None
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        said = printed.decode() if isinstance(printed, bytes) else printed
        ended = _hangs(timeout_s, "")
    lines = []
    for line in said.splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict)], ended


def ask_fresh_process(entry: str, request: dict[str, Any], timeout_s: float) -> tuple[dict[str, Any] | None, str]:
    """(the last line of JSON that a fresh interpreter printed, or None and why there is none)."""
    said, ended = _answers(entry, request, timeout_s)
    if said and ended is None:
        return said[-1], ""
    return None, "its process answered nothing" if ended is None else ended.reason


def _in_fresh_process(entry: str, request: dict[str, Any], timeout_s: float, where: str) -> Proof:
    try:
        done = _start(entry, request, timeout_s)
    except subprocess.TimeoutExpired:
        return _hangs(timeout_s, where)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return _ended(done.returncode, where, done.stderr)
    try:
        return Proof(**json.loads(lines[-1]))
    except (ValueError, TypeError):
        return Proof(reason=f"its process answered {lines[-1][:200]!r} instead of a proof{where}")


def find(request: dict[str, Any]) -> Candidate:
    """The candidate that a request to a fresh interpreter is about."""
    if request["built_in"]:
        (found,) = [
            candidate
            for candidate in room_of(request["op"]).built_in(request["op"])
            if (candidate.name, candidate.precision) == (request["name"], request["precision"])
        ]
        return found
    prepare = _load(*request["prepare"]) if request["prepare"] else None
    common = {name: request[name] for name in _COMMON}
    return Candidate(**common, origin="user", fn=_load(*request["fn"]), prepare=prepare)


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
