"""Time the norm and rotation of q's and k's heads in one pass, in every config, against the kernels apart.

    PYTHONPATH=src python3 benchmarks/bench_qk_norm_rope.py [--models qwen3-8b,...] [--apart] [--json FILE]

Each row says microseconds (median, nothing in L2), GB/s of the bytes the operation must move, and that as a share of
the copy bandwidth measured in the same run. Every config is compared with the reference first; a wrong one says WRONG.
Rows that the time budget (--seconds) does not reach are counted at the end.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepwell.bench.environment import environment
from deepwell.kernels.norm.rms_norm import norm, norm_backward
from deepwell.kernels.quantize.fp8 import RowOptions, quantize_rows, quantize_rows_ref
from deepwell.kernels.rope import qk_norm_rope as fused
from deepwell.kernels.rope import rope
from deepwell.kernels.tune.timing import cold_median_us, copy_gbps

E4M3 = torch.float8_e4m3fn
# (q, k, v heads, head width) of Qwen3.
HEADS = {"qwen3-8b": (32, 8, 8, 128), "qwen3-0.6b": (16, 8, 8, 128), "qwen3-32b": (64, 8, 8, 128)}


class Case(NamedTuple):
    """One row of the table; `check` returns what is wrong with a result."""

    op: str
    variant: str
    num_bytes: int
    run: Callable[[], Any]
    check: Callable[[Any], str | None] = lambda result: None


def difference(wanted: Any, got: Any) -> str | None:
    """What differs by more than roundings of bf16 and of sums in another order; FP8 values count dequantized."""
    pairs = {name: (getattr(got, name), getattr(wanted, name)) for name in wanted._fields if name != "q"}
    if getattr(wanted, "scale", None) is not None:
        pairs["codes"] = tuple(x.q.float() * x.scale[:, None] for x in (got, wanted))
    elif isinstance(wanted, fused.NormedHeads):
        pairs["q"] = (got.q, wanted.q)
    for name, (a, b) in pairs.items():
        if b is not None and not (error := (a.float() - b.float()).norm() / b.float().norm()) < 5e-3:
            return f"WRONG: {name} off by {error:.1e}"
    return None


def beside(wanted: Any, got: Any) -> str | None:
    """FP8 values and scales must be those of the gradient beside them, bit for bit."""
    codes, scales = quantize_rows_ref(got.grad, dtype=E4M3)
    if not (torch.equal(codes.view(torch.uint8), got.q.view(torch.uint8)) and torch.equal(scales, got.scale)):
        return "WRONG: FP8 values are not those of the gradient"
    return difference(wanted, got)


def forward_apart(qkv: Tensor, weights: tuple[Tensor, ...], tables: tuple[Tensor, ...], heads: rope.Heads) -> None:
    """Two norms of heads and two rotations."""
    width = weights[0].numel()
    parts = heads.parts(qkv, width)
    for x, w in zip(parts, weights, strict=False):
        y = norm(x.reshape(-1, width), w).y
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
        out = norm_backward(du.view(-1, width), x.reshape(-1, width), w, rstd.view(-1)).dx
        assert out is not None
        found.append(out.view(dy.shape))
    quantize_rows(torch.cat((*found, grads[2]), dim=2).flatten(2).flatten(0, 1))


def cases_of(model: str, tokens: int, apart: bool) -> Iterator[Case]:
    hq, hk, hv, d = HEADS[model]
    heads, b, s = rope.Heads(q=hq, k=hk, v=hv), 2, tokens // 2
    w = heads.total * d
    qkv = torch.randn(b, s, w, device="cuda").bfloat16()
    weights = (torch.rand(d, device="cuda").bfloat16() + 0.5, torch.rand(d, device="cuda").bfloat16() + 0.5)
    angle = torch.outer(torch.arange(s, device="cuda").float(), 1e6 ** -torch.linspace(0, 1, d // 2, device="cuda"))
    tables = (angle.cos().repeat(1, 2).bfloat16(), angle.sin().repeat(1, 2).bfloat16())
    grads = tuple(torch.randn(b, s, h, d, device="cuda").bfloat16() for h in (hq, hk, hv))
    made = fused.qk_norm_rope_ref(qkv, weights, *tables, heads, fused.QkNorm())
    given: tuple[Any, Any, Any, Any, Any] = (
        grads,
        qkv,
        weights,
        (made.rstd_q.contiguous(), made.rstd_k.contiguous()),
        tables,
    )
    run: Callable[[], Any]
    both = RowOptions(fp8=E4M3)
    wanted = fused.qk_norm_rope_backward_ref(*given, heads, both)
    coded = wanted._replace(grad=None)

    for config in fused.FORWARD_CONFIGS:
        run = partial(fused.qk_norm_rope, qkv, weights, *tables, heads=heads, config=config)
        yield Case("forward", f"w{config.num_warps}", 4 * tokens * w, run, partial(difference, made))
    read = tokens * (2 * w + 2 * (hq + hk) * d)
    for chosen in fused.BACKWARD_CONFIGS:
        name = f"w{chosen.num_warps} programs{chosen.programs_per_sm} stages{chosen.num_stages}"
        options = RowOptions(write=False, fp8=E4M3)
        run = partial(fused.qk_norm_rope_backward, *given, options=options, config=chosen)
        yield Case("backward -> q", name, read + tokens * w, run, partial(difference, coded))
    run = partial(fused.qk_norm_rope_backward, *given)
    plain = partial(difference, wanted._replace(q=None, scale=None))
    yield Case("backward", "default", read + 2 * tokens * w, run, plain)
    run = partial(fused.qk_norm_rope_backward, *given, options=both)
    yield Case("backward -> both", "default", read + 3 * tokens * w, run, partial(beside, wanted))
    if apart:
        yield Case("forward", "apart", 4 * tokens * w, lambda: forward_apart(qkv, weights, tables, heads))
        run = partial(backward_apart, grads, qkv, weights, made, tables)
        yield Case("backward -> q", "apart", read + tokens * w, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-8b,qwen3-0.6b", help=f"of {', '.join(HEADS)}")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--apart", action="store_true", help="also the kernels that this one replaces")
    parser.add_argument("--seconds", type=float, default=32.0, help="no row is begun after that")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    begin, copy = time.perf_counter(), copy_gbps()
    rows: list[dict[str, Any]] = []
    num_left = 0
    for model in chosen.models.split(","):
        for case in cases_of(model, chosen.tokens, chosen.apart):
            if time.perf_counter() - begin > chosen.seconds:
                num_left += 1
                continue
            problem = case.check(case.run())
            us = cold_median_us(case.run)
            rows.append({"model": model, "op": case.op, "variant": case.variant, "us": us, "problem": problem,
                         "gbps": case.num_bytes / us / 1e3})  # fmt: skip
    print(
        f"copy {copy:.0f} GB/s; {chosen.tokens} tokens; {time.perf_counter() - begin:.0f} s, {num_left} rows left out"
    )
    for row in rows:
        row["share_of_copy"] = row["gbps"] / copy
        speed = f"{row['us']:7.1f} us {row['gbps']:5.0f} GB/s {row['share_of_copy']:6.1%}"
        print(f"{row['model']:10} {row['op']:16} {speed}  {row['variant']} {row['problem'] or ''}")
    if chosen.json:
        chosen.json.write_text(
            json.dumps({"environment": environment(), "copy_gbps": copy, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
