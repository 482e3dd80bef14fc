"""FP8 by row, by tensor and by 1x128 blocks, side by side: what a linear's quantization and products cost, and keep.

PYTHONPATH=src python3 benchmarks/bench_scalings.py [--tokens 16384] [--json FILE]

One linear of an 8B-class layer at a time, forward and backward. Every quantization is compared with its reference
before it is timed; the products' decibels are against bf16's on the same numbers. `x` and `dy` are what is made of each
(rows: values; `turn`: their transposes for the wgrad), `w` both copies of the weight, at once (an engine makes one in
the forward, one in the backward). Rows are shown as kernels of their own: in an engine norms, activations and RoPE
write most of them on the way.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepwell.bench.environment import environment, one_line
from deepwell.formats.metrics import sqnr_db
from deepwell.kernels.gemm.fp8 import fp8_gemm
from deepwell.kernels.gemm.fp8_blocks import fp8_gemm_blocks
from deepwell.kernels.quantize.fp8 import amax, quantize_rows, quantize_weight
from deepwell.kernels.quantize.fp8_blocks import (
    quantize_1x128_both,
    quantize_1x128_both_ref,
    quantize_128x128,
    quantize_128x128_ref,
)
from deepwell.kernels.quantize.wgrad_operands import wgrad_operands
from deepwell.kernels.tune.timing import median_us

# (N, K) of q, k and v together, of o, of gate and up together, of down.
LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def us(run: Callable[[], object]) -> float:
    return round(median_us(run, "cuda", budget_s=0.05), 1)


def numbers(tokens: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and dy at realistic magnitudes; tokens of dy differ by octaves."""
    torch.manual_seed(0)
    x, w = torch.randn(tokens, k, device="cuda"), torch.randn(n, k, device="cuda") * 0.02
    dy = torch.randn(tokens, n, device="cuda") * torch.exp2(torch.randint(-16, -9, (tokens, 1), device="cuda"))
    return x.bfloat16(), w.bfloat16(), dy.bfloat16()


def by_rows(x: Tensor, w: Tensor, dy: Tensor) -> tuple[dict[str, float], tuple[Tensor, ...]]:
    of_x, of_dy = quantize_rows(x), quantize_rows(dy)
    q, q_t, s = quantize_weight(w)
    assert q is not None and q_t is not None
    transposed = wgrad_operands(*of_dy, *of_x)
    times = {
        "x": us(lambda: quantize_rows(x)),
        "dy": us(lambda: quantize_rows(dy)),
        "turn": us(lambda: wgrad_operands(*of_dy, *of_x)),
        "w": us(lambda: quantize_weight(w)),
        "fwd": us(lambda: fp8_gemm(*of_x, q, s)),
        "dgrad": us(lambda: fp8_gemm(*of_dy, q_t, s)),
        "wgrad": us(lambda: fp8_gemm(*transposed, fast=False)),
    }
    return times, (fp8_gemm(*of_x, q, s), fp8_gemm(*of_dy, q_t, s), fp8_gemm(*transposed, fast=False))


def by_tensor(x: Tensor, w: Tensor, dy: Tensor, dtype: torch.dtype) -> tuple[dict[str, float], tuple[Tensor, ...]]:
    (q_x, t_x, s_x), (q_w, t_w, s_w), (q_dy, t_dy, s_dy) = (
        quantize_weight(x),
        quantize_weight(w),
        quantize_weight(dy, dtype=dtype),
    )
    assert q_x is not None and t_x is not None and q_w is not None
    assert t_w is not None and q_dy is not None and t_dy is not None
    times = {
        "x": us(lambda: quantize_weight(x)),
        "amax": us(lambda: amax(x)),
        "dy": us(lambda: quantize_weight(dy, dtype=dtype)),
        "w": us(lambda: quantize_weight(w)),
        "fwd": us(lambda: fp8_gemm(q_x, s_x, q_w, s_w)),
        "dgrad": us(lambda: fp8_gemm(q_dy, s_dy, t_w, s_w)),
        "wgrad": us(lambda: fp8_gemm(t_dy, s_dy, t_x, s_x, fast=False)),
    }
    made = (fp8_gemm(q_x, s_x, q_w, s_w), fp8_gemm(q_dy, s_dy, t_w, s_w))
    return times, (*made, fp8_gemm(t_dy, s_dy, t_x, s_x, fast=False))


def by_blocks(x: Tensor, w: Tensor, dy: Tensor) -> tuple[dict[str, float], tuple[Tensor, ...]]:
    of_x, of_w, of_dy = quantize_1x128_both(x), quantize_128x128(w), quantize_1x128_both(dy)
    for name, few, make, ref in (
        ("1x128", x[:300, :1100], quantize_1x128_both, quantize_1x128_both_ref),
        ("128x128", w[:300, :1100], quantize_128x128, quantize_128x128_ref),
    ):
        for mine, wanted in zip(make(few), ref(few), strict=True):
            assert mine is not None and wanted is not None
            if not torch.equal(mine.view(torch.uint8), wanted.view(torch.uint8)):
                raise SystemExit(f"{name} is not the reference")
    rows, columns = list[Any](of_x[:2]), list[Any](of_x[2:])
    d_rows, d_columns = list[Any](of_dy[:2]), list[Any](of_dy[2:])
    w_rows, w_columns = list[Any](of_w[:2]), list[Any](of_w[2:])
    products = (
        lambda: fp8_gemm_blocks(*rows, *w_rows, square=True),
        lambda: fp8_gemm_blocks(*d_rows, *w_columns, square=True),
        lambda: fp8_gemm_blocks(*d_columns, *columns, square=False),
    )
    times = {name: us(lambda t=t: quantize_1x128_both(t)) for name, t in (("x", x), ("dy", dy))}
    times["w"] = us(lambda: quantize_128x128(w))
    times |= {name: us(run) for name, run in zip(("fwd", "dgrad", "wgrad"), products, strict=True)}
    return times, tuple(run() for run in products)


def linear(name: str, tokens: int, n: int, k: int) -> list[dict[str, Any]]:
    x, w, dy = numbers(tokens, n, k)
    exact = (x @ w.T, dy @ w, dy.T @ x)
    plain = {"fwd": us(lambda: x @ w.T), "dgrad": us(lambda: dy @ w), "wgrad": us(lambda: dy.T @ x)}
    ways: list[tuple[str, dict[str, float], tuple[Tensor, ...]]] = [("bf16", plain, exact)]
    ways.append(("row", *by_rows(x, w, dy)))
    ways.append(("tensor", *by_tensor(x, w, dy, torch.float8_e4m3fn)))
    ways.append(("tensor, e5m2 dy", *by_tensor(x, w, dy, torch.float8_e5m2)))
    ways.append(("1x128", *by_blocks(x, w, dy)))
    rows: list[dict[str, Any]] = []
    for way, times, made in ways:
        total = round(sum(time for what, time in times.items() if what != "amax"), 1)  # it is part of x's time
        db = [round(sqnr_db(ref.float(), got.float()), 1) for ref, got in zip(exact, made, strict=True)]
        db = [] if made is exact else db
        rows.append({"linear": name, "n": n, "k": k, "way": way, "us": times, "total_us": total, "db": db})
    for row in rows:
        row["speed"] = round(rows[0]["total_us"] / row["total_us"], 2)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, (n, k) in LINEARS.items():
        rows += linear(name, arguments.tokens, n, k)
        torch.cuda.empty_cache()
    where = environment()
    print(one_line(where))
    parts = ("x", "amax", "dy", "turn", "w", "fwd", "dgrad", "wgrad")
    print(
        f"{'linear':<8} {'scaling':<16}"
        + "".join(f"{part:>8}" for part in parts)
        + "   total us  speed  dB fwd dgrad wgrad"
    )
    for row in rows:
        cells = "".join(f"{row['us'][part]:8.0f}" if part in row["us"] else f"{'':8}" for part in parts)
        db = " ".join(f"{value:6.1f}" for value in row["db"])
        print(f"{row['linear']:<8} {row['way']:<16}{cells} {row['total_us']:10.0f} {row['speed']:6.2f}  {db}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"environment": where, "tokens": arguments.tokens, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
