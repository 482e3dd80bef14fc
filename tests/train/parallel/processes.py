"""Processes of a gloo group that run cases one after another, against one process that runs the same.

Starting processes and importing costs more than a case: groups are forked from a process that a warm server started and
serve many cases. Every wait has a limit.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepwell.engine.compile as compiling
from warm import CONTEXT

FORK = multiprocessing.get_context("fork")
Case = Any
Run = Callable[[Case], Any]


def run_cases(run: Run, cases: Sequence[Case], world: int, timeout: float = 300.0) -> list[Any]:
    """What `run(case)` returned on rank 0 of a group of `world` processes, for each case. A case that raised on any
    rank fails here with that rank's traceback."""
    return run_groups(run, [(cases, world)], timeout)[0]


def run_groups(run: Run, groups: Sequence[tuple[Sequence[Case], int]], timeout: float = 300.0) -> list[list[Any]]:
    """The same of several groups, (cases, world), one after the other: what they import is imported once."""
    with tempfile.TemporaryDirectory() as folder:
        process = CONTEXT.Process(target=_start_groups, args=(run, list(groups), folder, time.monotonic() + timeout))
        process.start()
        process.join()
        failed = Path(folder) / "failed.txt"
        assert process.exitcode == 0, failed.read_text() if failed.exists() else f"exit code {process.exitcode}"
        return [torch.load(Path(folder) / f"{n}" / "found.pt", weights_only=False) for n in range(len(groups))]


def _start_groups(run: Run, groups: list[tuple[list[Case], int]], folder: str, end: float) -> None:
    """Fork each group's ranks; this process has imported what they need, and has no threads."""
    for number, (cases, world) in enumerate(groups):
        own = Path(folder) / str(number)
        own.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        arguments = [(run, list(cases), rank, world, port, str(own)) for rank in range(world)]
        processes = [FORK.Process(target=_serve, args=each, daemon=True) for each in arguments]
        for process in processes:
            process.start()
        problem = _wait(processes, own, end)
        if problem:
            (Path(folder) / "failed.txt").write_text(problem)
            raise SystemExit(1)


def _wait(processes: list[Any], folder: Path, end: float) -> str:
    """Wait for a group; what went wrong, "" where nothing did."""
    while any(process.is_alive() for process in processes):
        if any(folder.glob("error-*.txt")) or time.monotonic() > end:
            time.sleep(0.5)
            for process in processes:
                process.kill()
            return _errors(folder) or "the group took too long"
        time.sleep(0.02)
    codes = [process.exitcode for process in processes]
    return _errors(folder) or (f"exit codes {codes}" if any(codes) else "")


def _errors(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("error-*.txt")))


def _serve(run: Run, cases: list[Case], rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    compiling.PLAIN_ON_CPU = False  # as in the tests' own process
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), CUDA_VISIBLE_DEVICES="")
    case: Case = None
    try:
        if world > 1:
            dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
        found = []
        for case in cases:
            torch._dynamo.reset()
            found.append(run(case))
        if rank == 0:
            torch.save(found, Path(folder) / "found.pt")
        if world > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"error-{rank}.txt").write_text(f"rank {rank} of {world}, {case}\n{traceback.format_exc()}")
        os._exit(1)
