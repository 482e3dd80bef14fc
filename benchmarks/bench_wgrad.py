"""What FP8 leaves of weight gradients along a real training run: fast sums, fp32 sums, and other scalings in fp32.

PYTHONPATH=src python3 benchmarks/bench_wgrad.py [--tokenizer FILE] [--json FILE]          one GPU, about a minute

A 135M model trains in bf16 (as `deepwell validate parity` does); at some steps the operands of its linears' wgrads are
taken and their products recomputed. Against the product of the same bf16 operands in fp32: decibels of the whole
matrix, of the weakest twentieth of its rows, and how long the gradient is along the true one (1 = as long).
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from deepwell.bench.corpus import make_corpus
from deepwell.bench.environment import environment
from deepwell.bench.parity.run import PairSetup, ParityRun
from deepwell.bench.variants import Variant
from deepwell.formats.metrics import sqnr_db
from deepwell.formats.quantize import quantize
from deepwell.kernels.gemm.fp8 import fp8_gemm
from deepwell.kernels.quantize.fp8 import quantize_rows
from deepwell.kernels.quantize.wgrad_operands import wgrad_operands

STEPS = (1, 15, 40, 90)
LAYERS = (0, 5, 11)
GROUPS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
Operands = dict[tuple[int, str], tuple[Tensor, Tensor]]


def products(x: Tensor, dy: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The gradient dy^T x made in several ways."""
    transposed = wgrad_operands(*quantize_rows(dy), *quantize_rows(x))
    for name, fast in (("rows, fast sums", True), ("rows, fp32 sums", False)):
        yield name, fp8_gemm(*transposed, fast=fast, out_dtype=torch.float32)
    for name, left, right in (
        ("tensor, E5M2 gradients", "fp8_e5m2_tensor_pow2", "fp8_e4m3_tensor_pow2"),
        ("channels", "fp8_e4m3_row_pow2", "fp8_e4m3_row_pow2"),
        ("1x128", "fp8_e4m3_1x128_pow2", "fp8_e4m3_1x128_pow2"),
    ):
        yield name, rounded(dy.T, left) @ rounded(x.T, right).T


def rounded(x: Tensor, fmt: str) -> Tensor:
    return quantize(x.contiguous(), fmt).dequantize().float()


def operands(run: ParityRun) -> Operands:
    """x and dy of each linear of some layers, in one batch."""
    found: dict[tuple[int, str], dict[str, Tensor]] = {}
    hooks = []
    for number in LAYERS:
        layer = run.model.layers[number]
        for name in (name for names in GROUPS.values() for name in names):
            linear = getattr(layer.attention if name[0] in "qkvo" else layer.mlp, name)
            kept = found.setdefault((number, name), {})
            hooks += [
                linear.register_forward_hook(lambda _m, args, _y, kept=kept: kept.update(x=_rows(args[0]))),
                linear.register_full_backward_hook(lambda _m, _dx, dy, kept=kept: kept.update(dy=_rows(dy[0]))),
            ]
    tokens, targets = run._batch(run.setup.steps - 1)
    run.model(tokens, targets).backward()
    run.model.zero_grad(set_to_none=True)
    for hook in hooks:
        hook.remove()
    return {key: (kept["x"], kept["dy"]) for key, kept in found.items()}


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1])


def measure(step: int, taken: Operands) -> Iterator[dict[str, object]]:
    for number in LAYERS:
        for names in GROUPS.values():
            x = taken[number, names[0]][0]
            dy = torch.cat([taken[number, name][1] for name in names], dim=1)
            exact = dy.float().T @ x.float()
            for way, made in products(x, dy):
                for name, ref, got in zip(names, *(m.chunk(len(names)) for m in (exact, made)), strict=True):
                    rows = torch.tensor([sqnr_db(r, g) for r, g in zip(ref[::8], got[::8], strict=True)])
                    yield {
                        "step": step, "layer": number, "linear": name, "way": way,
                        "db": round(float(sqnr_db(ref, got)), 1),
                        "weak_rows_db": round(float(rows.quantile(0.05)), 1),
                        "length": round(float((got * ref).sum() / ref.square().sum()), 3),
                    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    corpus = make_corpus(None, megabytes=45.0, vocab=32768, tokenizer=arguments.tokenizer)
    run = ParityRun(Variant.parse("bf16"), 0, PairSetup(tokens=25_000_000), corpus, "cuda")
    rows: list[dict[str, object]] = []
    done = 0
    for step in STEPS:
        while done < step:
            run._step(done)
            done += 1
        rows += measure(step, operands(run))
    print(f"{'step':>4} {'layer':>5} {'linear':10} {'way':24} {'dB':>6} {'weak rows':>9} {'length':>7}")
    for row in rows:
        if row["layer"] == LAYERS[1]:
            print(
                f"{row['step']:4} {row['layer']:5} {row['linear']:10} {row['way']:24} {row['db']:6} "
                f"{row['weak_rows_db']:9} {row['length']:7}"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
