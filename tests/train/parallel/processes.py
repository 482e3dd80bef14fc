"""Processes of a gloo group that run cases one after another, against one process that runs the same.

Starting processes and importing torch costs more than a case: each group is forked from a warm server and serves many
cases. Every wait has a limit.
"""

from __future__ import annotations

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

Case = Any
Run = Callable[[Case], Any]


def run_cases(run: Run, cases: Sequence[Case], world: int, timeout: float = 300.0) -> list[Any]:
    """What `run(case)` returned on rank 0 of a group of `world` processes, for each case. A case that raised on any
    rank fails here with that rank's traceback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(run, list(cases), rank, world, port, folder) for rank in range(world)]
        processes = [CONTEXT.Process(target=_serve, args=each, daemon=True) for each in arguments]
        for process in processes:
            process.start()
        _wait(processes, Path(folder), time.monotonic() + timeout)
        found: list[Any] = torch.load(Path(folder) / "found.pt", weights_only=False)
    return found


def _wait(processes: list[Any], folder: Path, end: float) -> None:
    while any(process.is_alive() for process in processes):
        failed = sorted(folder.glob("error-*.txt"))
        if failed or time.monotonic() > end:
            time.sleep(0.5)
            for process in processes:
                process.kill()
            texts = [path.read_text() for path in sorted(folder.glob("error-*.txt"))] or ["the group took too long"]
            raise AssertionError("\n".join(texts))
        time.sleep(0.02)
    failed = sorted(folder.glob("error-*.txt"))
    if failed or any(process.exitcode for process in processes):
        codes = [process.exitcode for process in processes]
        raise AssertionError("\n".join(path.read_text() for path in failed) or f"exit codes {codes}")


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
