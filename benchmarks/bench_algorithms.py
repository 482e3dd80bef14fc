"""Time every algorithm that cuBLASLt's heuristic names for the FP8 products of a layer, against torch's own choice.

    python benchmarks/bench_algorithms.py [--model 1b|8b] [--tokens 16384] [--json FILE]

Products of a layer's four linears: forward and input gradient with a scale per row and fast sums, weight gradient with
one scale a tensor and sums in fp32. Algorithms take turns; operands rotate, and whole laps are CUDA graphs.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from deepwell.bench.environment import environment
from deepwell.kernels.cublaslt import Product, fp8_gemm_ranked, num_algorithms
from deepwell.kernels.gemm import fp8_gemm
from deepwell.kernels.proof import codes
from deepwell.kernels.registry import Problem
from deepwell.kernels.timing import recorded, times_us

# [N, K] of the merged linears.
LAYERS = {
    "1b": {"qkv": (3072, 2048), "out": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)},
    "8b": {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
}
COPIES, ROUNDS = 3, 4


def products(model: str, tokens: int) -> Iterator[tuple[str, Problem]]:
    for name, (n, k) in LAYERS[model].items():
        shapes = {"fwd": (tokens, n, k), "dgrad": (tokens, k, n), "wgrad": (n, k, tokens)}
        for role, (m, width, depth) in shapes.items():
            is_wgrad = role == "wgrad"
            yield f"{role} {name}", Problem(
                op="fp8_gemm", m=m, n=width, k=depth, precision="fp8",
                exact_sums=is_wgrad, one_scale=is_wgrad, device="cuda",
            )  # fmt: skip


def entrants(problem: Problem) -> dict[str, Callable[..., Tensor]]:
    fast = not problem.exact_sums
    found: dict[str, Callable[..., Tensor]] = {"torch": partial(fp8_gemm, fast=fast)}
    for is_static in (False, True):
        product = Product(
            m=problem.m, n=problem.n, k=problem.k, has_rows=not problem.one_scale, fast=fast,
            is_static=is_static, device=torch.cuda.current_device(),
        )  # fmt: skip
        for rank in range(num_algorithms(product)):
            run = partial(fp8_gemm_ranked, fast=fast, rank=rank, is_static=is_static)
            found[f"{'static ' * is_static}{rank}"] = run
    return found


def measure(problem: Problem) -> dict[str, float]:
    """Microseconds by entrant."""
    operands = [codes(problem, seed) for seed in range(COPIES)]
    device = operands[0][0].device
    times: dict[str, list[float]] = {}
    runs = entrants(problem)
    for _ in range(ROUNDS):
        for name, run in runs.items():

            def lap(run: Callable[..., Tensor] = run) -> None:
                for given in operands:
                    run(*given)

            with recorded(lap, device) as replay:
                replay()
                times.setdefault(name, []).extend(us / COPIES for us in times_us(replay, device, 0.03))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=LAYERS, default="8b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    print(f"{'product':14} {'shape':>18} {'torch us':>9} {'best us':>9} {'':>6}  algorithm (of)")
    for name, problem in products(given.model, given.tokens):
        us = measure(problem)
        best = min((one for one in us if one != "torch"), key=lambda one: us[one])
        shape = f"{problem.m}x{problem.n}x{problem.k}"
        print(
            f"{name:14} {shape:>18} {us['torch']:9.1f} {us[best]:9.1f} {us['torch'] / us[best]:5.3f}x  "
            f"{best} ({len(us) - 1})",
            flush=True,
        )
        rows.append({"product": name, "m": problem.m, "n": problem.n, "k": problem.k, "us": us})
    if given.json:
        given.json.write_text(json.dumps({"model": given.model, "environment": environment(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
