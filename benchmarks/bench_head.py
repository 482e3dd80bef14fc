"""Time head and loss, forward and backward, in bf16 and FP8 by the size of their chunks, with the memory they hold.

    PYTHONPATH=src python3 benchmarks/bench_head.py [--tokens 16384] [--width 4096] [--vocab 128256] [--json FILE]

A chunk is what exists of the logits at a time. Small ones save memory; each reads the weight again, and in bf16 adds to
its gradient again. "held" is what the op allocates at its peak beside x, the weight and the targets. Sizes take turns
over several rounds, so that a clock that drifts hits all alike; the loss of each is compared with the largest chunk's.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from deepwell.bench.environment import environment
from deepwell.kernels.head.linear_cross_entropy import HeadOptions, chunk_bytes, linear_cross_entropy
from deepwell.kernels.tune.timing import recorded, times_us

MEBIBYTES = (1024, 512, 256, 128)
ROUNDS = 4


def held_bytes(run: partial[object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(x_TD: Tensor, w_VD: Tensor, target_T: Tensor, head: HeadOptions) -> list[dict[str, object]]:
    device = x_TD.device
    row_bytes = w_VD.shape[0] * x_TD.element_size()
    runs = {
        mib: partial(linear_cross_entropy, x_TD, w_VD, target_T, head=head, chunk=max(16, (mib << 20) // row_bytes))
        for mib in MEBIBYTES
    }
    loss = {mib: float(run().loss) for mib, run in runs.items()}
    held = {mib: held_bytes(run) for mib, run in runs.items()}
    times: dict[int, list[float]] = {mib: [] for mib in runs}
    for _ in range(ROUNDS):
        for mib, run in runs.items():
            with recorded(run, device) as replay:
                replay()
                times[mib] += times_us(replay, device, 0.4)
    wanted = loss[max(loss)]
    return [
        {
            "head": "fp8" if head.fp8 else "bf16",
            "chunk_mib": mib,
            "ms": statistics.median(times[mib]) / 1e3,
            "held_gb": held[mib] / 1e9,
            # Rows do not know of each other: chunks change no bit of a row's logits, at most the order of the sum.
            "problem": "" if abs(loss[mib] - wanted) < 1e-5 * abs(wanted) else f"loss {loss[mib]}, not {wanted}",
        }
        for mib in runs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    x_TD = torch.randn(given.tokens, given.width, device="cuda").bfloat16()
    w_VD = (torch.randn(given.vocab, given.width, device="cuda") * given.width**-0.5).bfloat16()
    target_T = torch.randint(0, given.vocab, (given.tokens,), device="cuda")
    rows = [row for fp8 in (False, True) for row in measure(x_TD, w_VD, target_T, HeadOptions(fp8=fp8))]
    print(
        f"{given.tokens} tokens, width {given.width}, {given.vocab} words;"
        f" by default chunks of {chunk_bytes(given.width, False) >> 20} MiB, in FP8 of"
        f" {chunk_bytes(given.width, True) >> 20}"
    )
    print(f"{'head':5} {'chunk MiB':>9} {'ms':>8} {'held GB':>8}")
    for row in rows:
        print(f"{row['head']:5} {row['chunk_mib']:9} {row['ms']:8.2f} {row['held_gb']:8.2f}  {row['problem']}")
    if given.json:
        arguments = {name: value for name, value in vars(given).items() if name != "json"}
        given.json.write_text(
            json.dumps({"environment": environment(), "arguments": arguments, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
