"""What a training step costs the host: Python and launches, on a GPU that is not there.

    python benchmarks/bench_host.py                                GPT-2 by torch.compile and by an engine
    python benchmarks/bench_host.py --models hf:llama3-8b,hf:olmoe  other families, named as for `deepwell bench step`
    python benchmarks/bench_host.py --launches                     and what is launched
    python benchmarks/bench_host.py --json host.json               the table as JSON too

Both run as on an H200, kernel by kernel (no CUDA graphs), in processes of their own; the CUDA runtime below them does
nothing (absent_gpu/). So a step takes what the host takes, and memory is what the GPU's would be but for attention,
which is torch's flash attention here. Milliseconds are of one thread's processor time, the least of some steps, since
other work on the machine only adds. Times are of this machine's CPU: compare entrants and trees, not machines. Needs a
CUDA build of torch.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks" / "absent_gpu")]

import build  # noqa: E402

_WARM_STEPS, _STEPS = 4, 30
_PARTS = ("forward", "backward", "optimizer")


def measure(model: str, entrant: str) -> dict[str, Any]:
    """One entrant's row, in a process that runs under the absent GPU."""
    import torch

    import deepwell as dw
    from deepwell.bench.families import family_model

    build.stand_in()
    torch.manual_seed(0)
    family = family_model(model)
    net = family.build("cuda")
    tokens = torch.zeros((family.batch, family.seq_len), dtype=torch.long, device="cuda")
    call: Any
    if entrant == "torch":
        call, optimizer = torch.compile(net), torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    else:
        call = dw.compile(net, cuda_graphs=False)
        optimizer = dw.AdamWDW(call.parameters(), lr=1e-4)

    def step() -> list[float]:
        started = [time.thread_time()]
        loss = call(input_ids=tokens, labels=tokens).loss
        started.append(time.thread_time())
        loss.backward()
        started.append(time.thread_time())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        started.append(time.thread_time())
        return [1e3 * (stop - start) for start, stop in itertools.pairwise(started)]

    # The backward in this thread, whose time is counted.
    with torch.autograd.set_multithreading_enabled(False):
        began = time.perf_counter()
        for _ in range(_WARM_STEPS):
            step()
        first_s = time.perf_counter() - began
        torch.cuda.reset_peak_memory_stats()
        build.library().absent_reset()
        step()
        names = build.launched()
        peak = torch.cuda.max_memory_allocated()
        rows = [step() for _ in range(_STEPS)]
    least = dict(zip(_PARTS, map(min, zip(*rows, strict=True)), strict=True))
    return {
        "model": model,
        "entrant": entrant,
        "host ms": sum(least.values()),
        **{f"{part} ms": value for part, value in least.items()},
        "launches": len(names),
        "peak GB": peak / 1e9,
        "first steps s": first_s,
        "by name": dict(Counter(names).most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="hf:gpt2-xl", help="families, separated by commas")
    parser.add_argument("--entrants", default="torch,deepwell", help="of torch, deepwell")
    parser.add_argument("--launches", action="store_true", help="what each launches, by name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.models, args.entrants)))
        return
    environment, rows = {**build.environment(), "OMP_NUM_THREADS": "1"}, []
    print(f"{'model':20} {'entrant':10} {'host ms':>8} {'fwd':>6} {'bwd':>6} {'opt':>6} {'launches':>9} {'peak GB':>8}")
    for model in args.models.split(","):
        for entrant in args.entrants.split(","):
            command = [sys.executable, __file__, "--one", "--models", model, "--entrants", entrant]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                said = done.stderr.strip().splitlines()[-1:] or [f"ended with status {done.returncode}"]
                raise SystemExit(f"{model} {entrant}: {said[0]}")
            row = json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
            parts = " ".join(f"{row[f'{part} ms']:6.2f}" for part in _PARTS)
            print(
                f"{model:20} {entrant:10} {row['host ms']:8.2f} {parts} {row['launches']:9} {row['peak GB']:8.2f}",
                flush=True,
            )
            if args.launches:
                for name, count in row["by name"].items():
                    print(f"  {count:5} {name[:110]}")
    if args.json:
        args.json.write_text(json.dumps({"machine": os.uname().machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
