"""Time the norm and rotation of q's and k's heads in one pass, in every config, against the kernels apart and torch.

    PYTHONPATH=src python3 benchmarks/bench_qk_norm_rope.py [--tokens 16384] [--json FILE]

Each row says microseconds (median), GB/s of the bytes the operation must move, and that as a share of the copy
bandwidth measured in the same run. Every config is compared with the reference first; a wrong one says WRONG.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels import qk_norm_rope as fused
from deepwell.kernels import rope
from deepwell.kernels.quantize import quantize_rows
from deepwell.kernels.rms_norm import rms_norm, rms_norm_backward
from deepwell.kernels.timing import cold_median_us, copy_gbps

E4M3 = torch.float8_e4m3fn
# (q, k, v heads, head width) of Qwen3 0.6B and 8B and of 32B.
HEADS = {"qwen3-0.6b": (16, 8, 8, 128), "qwen3-8b": (32, 8, 8, 128), "qwen3-32b": (64, 8, 8, 128)}


def difference(got: Any, wanted: Any) -> str | None:
    """What differs by more than roundings of bf16 and of sums in another order; codes may differ at a tie."""
    for name in wanted._fields:
        a, b = getattr(got, name), getattr(wanted, name)
        if b is None or b.dtype is E4M3:
            continue
        error = (a.float() - b.float()).norm() / b.float().norm()
        if not error < 5e-3:
            return f"WRONG: {name} off by {error:.1e}"
    return None


def forward_apart(qkv: Tensor, weights: tuple[Tensor, ...], tables: tuple[Tensor, ...], heads: rope.Heads) -> None:
    """Two norms of heads and two rotations, as the engine ran them before."""
    width = weights[0].numel()
    parts = heads.parts(qkv, width)
    for x, w in zip(parts, weights, strict=False):
        y = rms_norm(x.reshape(-1, width), w).y
        assert y is not None
        rope.rope(y.view(x.shape), *tables)


def backward_apart(
    grads: tuple[Tensor, ...], qkv: Tensor, weights: tuple[Tensor, ...], made: Any, tables: tuple[Tensor, ...]
) -> None:
    """Two rotations, two norms' backward, the merged rows put together and quantized."""
    width = weights[0].numel()
    heads = rope.Heads(q=grads[0].shape[2], k=grads[1].shape[2], v=grads[2].shape[2])
    found = []
    for dy, x, w, rstd in zip(grads, heads.parts(qkv, width), weights, (made.rstd_q, made.rstd_k), strict=False):
        du = rope.rope(dy, *tables, backward=True)
        out = rms_norm_backward(du.view(-1, width), x.reshape(-1, width), w, rstd.view(-1)).dx
        assert out is not None
        found.append(out.view(dy.shape))
    quantize_rows(torch.cat((*found, grads[2]), dim=2).flatten(2).flatten(0, 1))


def rows_of(model: str, tokens: int) -> list[dict[str, Any]]:
    hq, hk, hv, d = HEADS[model]
    heads, b, s = rope.Heads(q=hq, k=hk, v=hv), 2, tokens // 2
    w = heads.total * d
    qkv = torch.randn(b, s, w, device="cuda").bfloat16()
    weights = (torch.rand(d, device="cuda").bfloat16() + 0.5, torch.rand(d, device="cuda").bfloat16() + 0.5)
    angle = torch.outer(torch.arange(s, device="cuda").float(), 1e6 ** -torch.linspace(0, 1, d // 2, device="cuda"))
    tables = (angle.cos().repeat(1, 2).bfloat16(), angle.sin().repeat(1, 2).bfloat16())
    grads = tuple(torch.randn(b, s, h, d, device="cuda").bfloat16() for h in (hq, hk, hv))
    options = rope.GradOptions(write=False, fp8=E4M3)
    made = fused.qk_norm_rope_ref(qkv, weights, *tables, heads, fused.QkNorm())
    rstds = (made.rstd_q.contiguous(), made.rstd_k.contiguous())
    wanted = fused.qk_norm_rope_backward_ref(grads, qkv, weights, rstds, tables, heads, options)
    rotated = (hq + hk) * d
    rows = []

    def row(op: str, variant: str, num_bytes: int, run: Callable[[], Any], ref: Any = None) -> None:
        problem = None if ref is None else difference(run(), ref)
        rows.append({"model": model, "op": op, "variant": variant, "bytes": num_bytes, "us": cold_median_us(run),
                     "problem": problem})  # fmt: skip

    for config in rope.CONFIGS:
        forward = partial(fused.qk_norm_rope, qkv, weights, *tables, heads=heads, config=config)
        row("forward", str(config), 4 * tokens * w, forward, made)
    row("forward", "apart", 4 * tokens * w, lambda: forward_apart(qkv, weights, tables, heads))
    moved = tokens * (3 * w + 2 * rotated)
    given = (grads, qkv, weights, rstds, tables)
    for chosen in fused.BACKWARD_CONFIGS:
        backward = partial(fused.qk_norm_rope_backward, *given, options=options, config=chosen)
        row("backward -> q", str(chosen), moved, backward, wanted)
    row("backward -> q", "apart", moved, lambda: backward_apart(grads, qkv, weights, made, tables))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    copy = copy_gbps()
    print(f"copy {copy:.0f} GB/s")
    rows = [row for model in HEADS for row in rows_of(model, chosen.tokens)]
    for row in rows:
        row["gbps"] = row["bytes"] / row["us"] / 1e3
        row["share_of_copy"] = row["gbps"] / copy
        speed = f"{row['us']:8.1f} us {row['gbps']:6.0f} GB/s {row['share_of_copy']:6.1%}"
        print(f"{row['model']:11} {row['op']:14} {speed} {row['variant']} {row['problem'] or ''}")
    if chosen.json:
        chosen.json.write_text(json.dumps({"copy_gbps": copy, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
