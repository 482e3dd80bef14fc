"""Time every algorithm that cuBLASLt's heuristic names for the products of a layer or a head, against torch's choice.

    python benchmarks/bench_algorithms.py [--model 1b|8b|head] [--tokens 16384] [--one-scale] [--sustained 0.5]
                                          [--json FILE]

A layer: its four linears in FP8, forward and input gradient with a scale per row and fast sums, weight gradient with
one scale a tensor and sums in fp32 (`--one-scale`: all of them, to see what scales of rows cost, which run as "rows").
The head: its three products in bf16, 4096 tokens of a width of 4096 and 2048.
Algorithms take turns; operands of a layer rotate, and whole laps are CUDA graphs.
`--sustained`: those that lead then run for so many seconds each, without a pause: a GPU at its power limit is as
fast as a product is frugal. Of a layer also all products in a row, by the algorithms that either measurement prefers.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from deepwell.bench.environment import environment
from deepwell.kernels.gemm.cases import codes
from deepwell.kernels.gemm.cublaslt import LtProduct, fp8_gemm_ranked, mm_ranked, num_algorithms, product_of
from deepwell.kernels.gemm.fp8 import fp8_gemm
from deepwell.kernels.registry import Problem
from deepwell.kernels.tune.timing import recorded, times_us

# [N, K] of the merged linears.
LAYERS = {
    "1b": {"qkv": (3072, 2048), "out": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)},
    "8b": {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
}
VOCAB, CHUNK = 128256, 4096
COPIES, ROUNDS = 3, 4
# Of those that are timed in turns, as many besides torch's also run for long; how often each.
LEADERS, LONG_ROUNDS = 5, 2
# Entrants that are not cuBLASLt's ranked ones.
TORCH, ROWS = "torch", "rows"
# Of each entrant the laps that are timed.
Laps = dict[str, Callable[[], object]]


def layer_products(model: str, tokens: int, one_scale: bool) -> Iterator[tuple[str, LtProduct, Laps, int]]:
    for name, (n, k) in LAYERS[model].items():
        shapes = {"fwd": (tokens, n, k), "dgrad": (tokens, k, n), "wgrad": (n, k, tokens)}
        for role, (rows, width, depth) in shapes.items():
            is_wgrad = role == "wgrad"
            has_one = is_wgrad or one_scale
            sizes = {"m": rows, "n": width, "k": depth}
            problem = Problem(op="fp8_gemm", **sizes, precision="fp8", one_scale=has_one, device="cuda")
            operands = [codes(problem, seed) for seed in range(COPIES)]
            product = LtProduct(
                **sizes,
                scales="tensor" if has_one else "row",
                fast=not is_wgrad,
                device=torch.cuda.current_device(),
            )

            def lap(run: Callable[..., Tensor], operands: list[tuple[Tensor, ...]] = operands) -> None:
                for given in operands:
                    run(*given)

            laps: Laps = {TORCH: partial(lap, partial(fp8_gemm, fast=product.fast))}
            for label, how in ranks(product):
                laps[label] = partial(lap, partial(fp8_gemm_ranked, fast=product.fast, **how))
            if one_scale and not is_wgrad:
                scaled = replace(problem, one_scale=False)
                laps[ROWS] = partial(lap, partial(fp8_gemm, fast=True), [codes(scaled, seed) for seed in range(COPIES)])
            yield f"{role} {name}", product, laps, COPIES


def head_products() -> Iterator[tuple[str, LtProduct, Laps, int]]:
    for width in (4096, 2048):
        x, w, z = (
            torch.randn(shape, device="cuda").bfloat16() for shape in ((CHUNK, width), (VOCAB, width), (CHUNK, VOCAB))
        )
        for name, (a, b) in {"logits": (x, w.T), "dx": (z, w), "dw": (z.T, x)}.items():
            out = torch.empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16, device="cuda")
            product = product_of(a, b, out)
            assert product is not None
            laps: Laps = {TORCH: partial(torch.mm, a, b, out=out)}
            for label, how in ranks(product):
                laps[label] = partial(mm_ranked, a, b, out=out, **how)
            yield f"{name} {width}", product, laps, 1


def ranks(product: LtProduct) -> Iterator[tuple[str, dict[str, int | bool]]]:
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


class Meter:
    """Energy that the GPU has used, where NVML tells."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self.nvml = pynvml
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())

    def joules(self) -> float:
        return 1e-3 * float(self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle))

    def clock_mhz(self) -> float:
        return float(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))


def endure(lap: Callable[[], object], seconds: float, meter: Meter) -> dict[str, float]:
    """Milliseconds, watts and the clock of a lap that follows itself; the first third of the time does not count."""
    device = torch.device("cuda", torch.cuda.current_device())
    with recorded(lap, device) as replay:
        lap_s = 1e-6 * statistics.median(times_us(replay, device, 0.02))
        for _ in range(int(seconds / 3 / lap_s) + 1):
            replay()
        torch.cuda.synchronize()
        count = int(2 * seconds / 3 / lap_s) + 1
        before, begin = meter.joules(), time.perf_counter()
        for _ in range(count):
            replay()
        clock = meter.clock_mhz()
        torch.cuda.synchronize()
        spent_s, used = time.perf_counter() - begin, meter.joules() - before
    return {"ms": 1e3 * spent_s / count, "watts": used / spent_s, "mhz": clock}


def endured(laps: Laps, us: dict[str, float], copies: int, seconds: float, meter: Meter) -> dict[str, dict[str, float]]:
    """The leaders and torch's choice, each for long, in turns."""
    others = sorted((name for name in us if name not in (TORCH, ROWS)), key=lambda name: us[name])[:LEADERS]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in (TORCH, ROWS, *others) if name in us}
    for _ in range(LONG_ROUNDS):
        for name, found in runs.items():
            found.append(endure(laps[name], seconds, meter))
    means = {
        name: {key: statistics.mean(one[key] for one in found) for key in found[0]} for name, found in runs.items()
    }
    return {
        name: {"us": 1e3 * one["ms"] / copies, "watts": one["watts"], "mhz": one["mhz"]} for name, one in means.items()
    }


def race_of_layers(ways: dict[str, list[Callable[[], object]]], seconds: float, meter: Meter) -> dict[str, list[float]]:
    """All products of a layer in a row, chosen in several ways; milliseconds of a layer by way, round by round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3):
        for name, laps in ways.items():

            def layer(laps: list[Callable[[], object]] = laps) -> None:
                for lap in laps:
                    lap()

            times[name].append(endure(layer, seconds, meter)["ms"] / COPIES)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*LAYERS, "head"], default="8b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--one-scale", action="store_true")
    parser.add_argument("--sustained", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, object]] = []
    meter = Meter() if given.sustained else None
    layers: dict[str, list[Callable[[], object]]] = {way: [] for way in (TORCH, ROWS, "in turns", "sustained")}
    print(f"{'product':14} {'shape':>18} {'torch us':>9} {'best us':>9} {'':>6}  algorithm (of)")
    found = head_products() if given.model == "head" else layer_products(given.model, given.tokens, given.one_scale)
    for name, product, laps, copies in found:
        us = measure(laps, copies)
        best = min((one for one in us if one not in (TORCH, ROWS)), key=lambda one: us[one])
        shape = f"{product.m}x{product.n}x{product.k}"
        print(
            f"{name:14} {shape:>18} {us['torch']:9.1f} {us[best]:9.1f} {us['torch'] / us[best]:5.3f}x  "
            f"{best} ({len(us) - 1})",
            flush=True,
        )
        row = {"product": name, "m": product.m, "n": product.n, "k": product.k, "us": us}
        if meter:
            long = endured(laps, us, copies, given.sustained, meter)
            row["sustained"] = long
            for one, sustained in long.items():
                print(
                    f"    {one:9} {us[one]:8.1f} us in turns, {sustained['us']:8.1f} sustained, "
                    f"{sustained['watts']:4.0f} W, {1e-3 * sustained['us'] * sustained['watts']:6.1f} mJ, "
                    f"{sustained['mhz']:.0f} MHz",
                    flush=True,
                )
            frugal = min((one for one in long if one != ROWS), key=lambda one: long[one]["us"])
            with_rows = ROWS if ROWS in laps else best
            for way, one in {TORCH: TORCH, ROWS: with_rows, "in turns": best, "sustained": frugal}.items():
                layers[way].append(laps[one])
        rows.append(row)
    result: dict[str, object] = {"model": given.model, "environment": environment(), "rows": rows}
    if meter and given.model != "head":
        layer_ms = race_of_layers(layers, 3 * given.sustained, meter)
        result["layer_ms"] = layer_ms
        for way, times in layer_ms.items():
            print(f"layer, {way:9} {statistics.median(times):8.3f} ms", [round(one, 3) for one in times])
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
