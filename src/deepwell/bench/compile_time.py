"""How long the first step takes: in a fresh process with empty caches, and in another one with the caches it left.

Run as a module it is that process: it makes one model and one entrant, takes a step and prints the seconds as JSON.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from deepwell.bench.environment import environment, last_line
from deepwell.bench.peers import PEERS
from deepwell.hardware.progress import bar

_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "DEEPWELL_CACHE_DIR": "deepwell"}


def run_compile(model: str, entrants: list[str], device: str, *, timeout: float = 900.0) -> dict[str, Any]:
    """Cold and warm seconds of each entrant, each in a process of its own."""
    rows = []
    with bar("compile", 2 * len(entrants)) as advance:
        for entrant in entrants:
            with tempfile.TemporaryDirectory() as folder:
                row: dict[str, Any] = {"entrant": entrant}
                for label in ("cold s", "warm s"):
                    variables = {name: str(Path(folder) / place) for name, place in _CACHES.items()}
                    found = last_line(["deepwell.bench.compile_time", model, entrant, device], timeout, variables)
                    advance(1)
                    if not isinstance(found, dict):
                        row["note"] = found
                        if entrant not in PEERS:
                            row["problems"] = [found]  # a peer may not be installed; ours must run
                        break
                    row[label] = found["first_step_s"]
                    row["model and optimizer s"] = found["build_s"]
            rows.append(row)
    title = f"{model}: seconds to the end of the first step, caches empty and as the first process left them"
    return {"bench": "compile", "title": title, "model": model, "environment": environment(), "rows": rows}


def first_step(model_name: str, entrant_name: str, device: str) -> dict[str, Any]:
    import torch

    from deepwell.bench.models import race_model
    from deepwell.bench.step import StepOptions, Trainee
    from deepwell.bench.variants import Variant

    model = race_model(model_name)
    entrant = PEERS[entrant_name] if entrant_name in PEERS else Variant.parse(entrant_name)
    started = time.perf_counter()
    trainee = Trainee(entrant, model, StepOptions(device=device), warmup=0)
    built = time.perf_counter()
    trainee.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return {"build_s": built - started, "first_step_s": time.perf_counter() - built}


if __name__ == "__main__":
    print(json.dumps(first_step(*sys.argv[1:])))
