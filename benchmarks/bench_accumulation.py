"""How many decibels an FP8 product keeps over long contractions, with and without fast accumulation.

PYTHONPATH=src python3 benchmarks/bench_accumulation.py [--json FILE]

Against the exact product of the same FP8 values in fp64. Rows of the left operand are scaled by a lognormal spread, as
gradients of tokens are; "drift" is the mean of both operands in units of their deviation: with it the sums grow with
every term, as those over tokens do where tokens agree (early in training, or along directions that all share).
"""

import argparse
import json
from pathlib import Path

import torch

from deepwell.bench.environment import environment
from deepwell.formats.metrics import sqnr_db
from deepwell.kernels.gemm.fp8 import fp8_gemm
from deepwell.kernels.quantize.fp8 import quantize_rows


def measure(k: int, spread: float, drift: float) -> dict[str, float]:
    """Signal to noise of both ways at one length of the contraction."""
    torch.manual_seed(0)
    a = (torch.randn(256, k, device="cuda") + drift) * torch.exp(spread * torch.randn(1, k, device="cuda"))
    b = torch.randn(256, k, device="cuda") + drift
    (q_a, s_a), (q_b, s_b) = quantize_rows(a), quantize_rows(b)
    exact = (q_a.double() * s_a[:, None].double()) @ (q_b.double() * s_b[:, None].double()).T
    row = {"k": k, "spread": spread, "drift": drift}
    for name, fast in (("fast_db", True), ("exact_db", False)):
        got = fp8_gemm(q_a, s_a, q_b, s_b, fast=fast, out_dtype=torch.float32)
        row[name] = round(float(sqnr_db(exact, got.double())), 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lengths = (512, 4096, 16384, 32768, 131072)
    cases = ((0.0, 0.0), (2.0, 0.0), (0.0, 0.1), (0.0, 0.3), (0.0, 1.0), (2.0, 1.0))
    rows = [measure(k, *case) for k in lengths for case in cases]
    print(f"{'K':>8} {'spread':>7} {'drift':>5} {'fast dB':>8} {'not fast dB':>12}")
    for row in rows:
        print(f"{row['k']:8d} {row['spread']:7.1f} {row['drift']:5.1f} {row['fast_db']:8.1f} {row['exact_db']:12.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
