"""Time every algorithm that cuBLASLt's heuristic names for the products of a layer or a head, against torch's choice.

    python benchmarks/bench_algorithms.py [--model 1b|8b|head] [--tokens 16384] [--one-scale] [--json FILE]

A layer: its four linears in FP8, forward and input gradient with a scale per row and fast sums, weight gradient with
one scale a tensor and sums in fp32 (`--one-scale`: all of them, to see what scales of rows cost). The head: its three
products in bf16, 4096 tokens of a width of 4096 and 2048.
Algorithms take turns; operands of a layer rotate, and whole laps are CUDA graphs.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from deepwell.bench.environment import environment
from deepwell.kernels.cublaslt import Product, fp8_gemm_ranked, mm_ranked, num_algorithms, product_of
from deepwell.kernels.gemm import fp8_gemm
from deepwell.kernels.proof import codes
from deepwell.kernels.registry import Problem
from deepwell.kernels.timing import recorded, times_us

# [N, K] of the merged linears.
LAYERS = {
    "1b": {"qkv": (3072, 2048), "out": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)},
    "8b": {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
}
VOCAB, CHUNK = 128256, 4096
COPIES, ROUNDS = 3, 4
# Of each entrant the laps that are timed.
Laps = dict[str, Callable[[], object]]


def layer_products(model: str, tokens: int, one_scale: bool) -> Iterator[tuple[str, Product, Laps, int]]:
    for name, (n, k) in LAYERS[model].items():
        shapes = {"fwd": (tokens, n, k), "dgrad": (tokens, k, n), "wgrad": (n, k, tokens)}
        for role, (rows, width, depth) in shapes.items():
            is_wgrad = role == "wgrad"
            has_one = is_wgrad or one_scale
            sizes = {"m": rows, "n": width, "k": depth}
            problem = Problem(op="fp8_gemm", **sizes, precision="fp8", one_scale=has_one, device="cuda")
            operands = [codes(problem, seed) for seed in range(COPIES)]
            product = Product(
                **sizes,
                scales="tensor" if has_one else "row",
                fast=not is_wgrad,
                device=torch.cuda.current_device(),
            )

            def lap(run: Callable[..., Tensor], operands: list[tuple[Tensor, ...]] = operands) -> None:
                for given in operands:
                    run(*given)

            laps: Laps = {"torch": partial(lap, partial(fp8_gemm, fast=product.fast))}
            for label, how in ranks(product):
                laps[label] = partial(lap, partial(fp8_gemm_ranked, fast=product.fast, **how))
            yield f"{role} {name}", product, laps, COPIES


def head_products() -> Iterator[tuple[str, Product, Laps, int]]:
    for width in (4096, 2048):
        x, w, z = (
            torch.randn(shape, device="cuda").bfloat16() for shape in ((CHUNK, width), (VOCAB, width), (CHUNK, VOCAB))
        )
        for name, (a, b) in {"logits": (x, w.T), "dx": (z, w), "dw": (z.T, x)}.items():
            out = torch.empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16, device="cuda")
            product = product_of(a, b, out)
            assert product is not None
            laps: Laps = {"torch": partial(torch.mm, a, b, out=out)}
            for label, how in ranks(product):
                laps[label] = partial(mm_ranked, a, b, out=out, **how)
            yield f"{name} {width}", product, laps, 1


def ranks(product: Product) -> Iterator[tuple[str, dict[str, int | bool]]]:
    for is_static in (False, True):
        for rank in range(num_algorithms(replace(product, is_static=is_static))):
            yield f"{'static' * is_static}{rank}", {"rank": rank, "is_static": is_static}


def measure(laps: Laps, copies: int) -> dict[str, float]:
    """Microseconds by entrant."""
    device = torch.device("cuda", torch.cuda.current_device())
    times: dict[str, list[float]] = {name: [] for name in laps}
    for _ in range(ROUNDS):
        for name, lap in laps.items():
            with recorded(lap, device) as replay:
                replay()
                times[name] += [us / copies for us in times_us(replay, device, 0.03)]
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*LAYERS, "head"], default="8b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--one-scale", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    print(f"{'product':14} {'shape':>18} {'torch us':>9} {'best us':>9} {'':>6}  algorithm (of)")
    found = head_products() if given.model == "head" else layer_products(given.model, given.tokens, given.one_scale)
    for name, product, laps, copies in found:
        us = measure(laps, copies)
        best = min((one for one in us if one != "torch"), key=lambda one: us[one])
        shape = f"{product.m}x{product.n}x{product.k}"
        print(
            f"{name:14} {shape:>18} {us['torch']:9.1f} {us[best]:9.1f} {us['torch'] / us[best]:5.3f}x  "
            f"{best} ({len(us) - 1})",
            flush=True,
        )
        rows.append({"product": name, "m": product.m, "n": product.n, "k": product.k, "us": us})
    if given.json:
        given.json.write_text(json.dumps({"model": given.model, "environment": environment(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
