"""The process that agents are forked from: it has imported everything, so that a start costs a second, not ten.

    python -m deepwell.bench.faults.host     # reads "start {...}" and "quit"; writes "started PID", "ended PID N"

Agents are torch's own (`elastic_launch`), and their workers processes of their own; what is left out of a start is the
import of torch. The processes of an agent that was killed become children of this one, which reaps them.
"""

import ctypes
import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

# Everything a worker imports on its way is imported here, once.
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from deepwell.bench.faults.worker import work
from deepwell.train.elastic import AGENT_ENVIRONMENT, end_with_parent

_RENDEZVOUS = {"last_call_timeout": 2, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
_ADOPT_ORPHANS = 36  # prctl's PR_SET_CHILD_SUBREAPER


def run_agent(job: dict[str, Any], processes: int, nodes: tuple[int, int] = (1, 1), endpoint: str = "") -> int:
    """An agent of one node: starts the workers, and starts them again when one dies; its exit status.

    Of several nodes, the one that is started first has the rendezvous at `endpoint`.
    """
    os.environ.update(AGENT_ENVIRONMENT)
    logs = Path(job["folder"]) / "logs"
    config = LaunchConfig(
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        nproc_per_node=processes,
        run_id="faults" if endpoint else f"faults-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint or "127.0.0.1:0",
        rdzv_configs=_RENDEZVOUS if endpoint else {"is_host": True},
        max_restarts=1_000_000,
        monitor_interval=0.05,
        start_method="fork",
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    elastic_launch(config, work)(job)
    return 0


def _agent_process(given: dict[str, Any]) -> None:
    """In the forked process: never returns."""
    status = 1
    try:
        end_with_parent(signal.SIGTERM)
        with (Path(given["job"]["folder"]) / "agent.log").open("a", encoding="utf-8") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        status = run_agent(**given)
    finally:  # whatever happened, this process ends here and does not go back into the host's loop
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    end_with_parent(signal.SIGTERM)
    torch.set_num_threads(1)
    print("ready", flush=True)
    agents: set[int] = set()
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 0.02)
        if ready:
            line = sys.stdin.readline()
            if not line or line.startswith("quit"):
                break
            pid = os.fork()
            if pid == 0:
                _agent_process(json.loads(line.partition(" ")[2]))
            agents.add(pid)
            print(f"started {pid}", flush=True)
        _reap(agents)
    for pid in agents:
        os.kill(pid, signal.SIGTERM)


def _reap(agents: set[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if pid in agents:
            agents.discard(pid)
            print(f"ended {pid} {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main()
