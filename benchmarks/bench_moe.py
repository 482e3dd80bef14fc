"""Times of the kernels of an FP8 block of experts that stand between its products, configs as rows.

    PYTHONPATH=src python3 benchmarks/bench_moe.py [--json FILE] [--only qwen3|mixtral]

Blocks, their products and whole steps: `deepwell bench moe`. "share" is of the copy bandwidth measured in the same run,
TFLOP/s count 2 * rows * N * K of the rows that are routed.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from deepwell.bench.environment import environment
from deepwell.kernels.experts import group_rows, grouped_gemm
from deepwell.kernels.experts import quantize_weights as expert_weights
from deepwell.kernels.experts import swiglu as expert_swiglu
from deepwell.kernels.quantize.fp8 import quantize_rows
from deepwell.kernels.quantize.wgrad_operands import wgrad_operands
from deepwell.kernels.tune.choose import why_rejected


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One MoE block: tokens, model width, experts, choices of a token, hidden width of an expert."""

    name: str
    tokens: int
    width: int
    experts: int
    top_k: int
    hidden: int


SHAPES = {
    "qwen3": Shape(name="Qwen3-30B-A3B", tokens=32768, width=2048, experts=128, top_k=8, hidden=768),
    "mixtral": Shape(name="Mixtral 8x7B", tokens=16384, width=4096, experts=8, top_k=2, hidden=14336),
}


def milliseconds(run: Callable[[], Any], *, warmup: int = 10, rep: int = 40) -> float:
    return float(triton.testing.do_bench(run, warmup=warmup, rep=rep, return_mode="median"))


class Table:
    """Rows as they are measured, printed at once."""

    def __init__(self) -> None:
        x = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
        y = torch.empty_like(x)
        self.copy = 2 * x.numel() / milliseconds(lambda: y.copy_(x))
        self.rows: list[dict[str, Any]] = []
        print(f"{torch.cuda.get_device_name()}, copy {self.copy / 1e9:.2f} TB/s")

    def add(self, op: str, variant: str, run: Callable[[], Any], *, flops: float = 0, num_bytes: float = 0) -> None:
        took = milliseconds(run)
        row: dict[str, Any] = {"op": op, "variant": variant, "ms": took}
        text = f"{op:30} {variant:44} {took:9.3f} ms"
        if flops:
            row["tflops"] = flops / took / 1e9
            text += f" {row['tflops']:8.0f} TFLOP/s"
        if num_bytes:
            row |= {"gb_s": num_bytes / took / 1e6, "share": num_bytes / took / self.copy}
            text += f" {row['gb_s']:8.0f} GB/s {row['share']:6.1%}"
        self.rows.append(row)
        print(text, flush=True)


def bench_kernels(table: Table, shape: Shape) -> None:
    t, k, e, d, f = shape.tokens, shape.top_k, shape.experts, shape.width, shape.hidden
    s, bf16 = t * k, torch.bfloat16
    ids = torch.rand(t, e, device="cuda").topk(k).indices.flatten()
    order = torch.sort(ids).indices
    offs = torch.cumsum(torch.bincount(ids, minlength=e), 0).int()
    ends, slot, place = group_rows.group_layout(offs, order, s)
    p = slot.shape[0]
    name = shape.name
    table.add(name, "layout", lambda: group_rows.group_layout(offs, order, s))
    x = torch.randn(t, d, device="cuda", dtype=bf16)
    q_x, s_x = quantize_rows(x)
    for gather in group_rows.GATHER_CONFIGS:
        run = lambda c=gather: group_rows.gather_rows(q_x, s_x, slot, k, config=c)  # noqa: E731
        table.add(name, f"gather codes {gather.rows}x{gather.columns}", run, num_bytes=2 * p * d)
    run = lambda: group_rows.gather_rows(*quantize_rows(x), slot, k)  # noqa: E731
    table.add(name, "quantize, gather codes", run, num_bytes=2 * p * d + 3 * t * d)
    y = torch.randn(p, d, device="cuda", dtype=bf16)
    for combine in group_rows.COMBINE_CONFIGS:
        run = lambda c=combine: group_rows.combine_rows(y, place, k, config=c)  # noqa: E731
        table.add(name, f"combine {combine.rows}x{combine.columns}", run, num_bytes=2 * s * d + 2 * t * d)
    rows = group_rows.gather_rows(q_x, s_x, slot, k)
    run = lambda: wgrad_operands(*rows, *rows, ends)  # noqa: E731
    table.add(name, "operands of a wgrad", run, num_bytes=4 * p * d)
    weight = torch.rand(s, device="cuda", dtype=bf16)
    gate_up, dh = torch.randn(p, 2 * f, device="cuda", dtype=bf16), torch.randn(p, f, device="cuda", dtype=bf16)
    for config in (expert_swiglu.FORWARD_CONFIGS[i] for i in (0, 1, 2, 3)):
        run = lambda c=config: expert_swiglu.expert_swiglu(gate_up, weight, slot, config=c)  # noqa: E731
        table.add(name, f"swiglu tile {config.tile} warps {config.num_warps}", run, num_bytes=5 * p * f)
    for config in (expert_swiglu.BACKWARD_CONFIGS[i] for i in (0, 2, 3, 4)):
        run = lambda c=config: expert_swiglu.expert_swiglu_backward(dh, gate_up, weight, slot, config=c)  # noqa: E731
        table.add(name, f"swiglu backward tile {config.tile} warps {config.num_warps}", run, num_bytes=9 * p * f)
    bench_products(table, shape, rows, ends, offs)


def bench_products(table: Table, shape: Shape, rows: tuple[Tensor, Tensor], ends: Tensor, offs: Tensor) -> None:
    """Quantization of the weights and the grouped products of gate and up, beside bf16's."""
    e, d, f, s = shape.experts, shape.width, shape.hidden, shape.tokens * shape.top_k
    name, flops = shape.name, 2 * s * 2 * f * d
    w = torch.randn(e, 2 * f, d, device="cuda", dtype=torch.bfloat16)
    q_w, s_w = expert_weights.quantize_experts(w)
    scale = s_w.amax(1)
    table.add(name, "weights along rows", lambda: expert_weights.quantize_experts(w), num_bytes=3 * w.numel())
    run = lambda: expert_weights.quantize_experts_transposed(w, scale)  # noqa: E731
    table.add(name, "weights transposed", run, num_bytes=3 * w.numel())
    for fast in (True, False):
        run = lambda fast=fast: grouped_gemm.grouped_gemm(*rows, q_w, s_w, ends, fast=fast)  # noqa: E731
        table.add(name, f"gate-up FP8 {'fast' if fast else 'fp32 sums'}", run, flops=flops)
    dy = torch.randn(ends.tolist()[-1], 2 * f, device="cuda", dtype=torch.bfloat16)
    transposed = wgrad_operands(*quantize_rows(dy), *rows, ends)
    for fast in (True, False):
        run = lambda fast=fast: grouped_gemm.grouped_wgrad(*transposed, ends, fast=fast)  # noqa: E731
        table.add(name, f"gate-up wgrad FP8 {'fast' if fast else 'fp32 sums'}", run, flops=flops)
    x = torch.randn(s, d, device="cuda", dtype=torch.bfloat16)
    table.add(name, "gate-up bf16", lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=offs), flops=flops)
    table.add(name, "gate-up wgrad bf16", lambda: torch._grouped_mm(dy[:s].T, x, offs=offs), flops=flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=SHAPES)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    reason = why_rejected("grouped_gemm", torch.device("cuda", torch.cuda.current_device()))
    if reason:
        raise SystemExit(f"grouped FP8 products fail their self-check here: {reason}")
    table = Table()
    for shape in (SHAPES[args.only],) if args.only else SHAPES.values():
        bench_kernels(table, shape)
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "rows": table.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
