"""Time the quantization of all FP8 weights of a decoder: cached (changed, unchanged) against one by one.

    PYTHONPATH=src python3 benchmarks/bench_weight_codes.py [--model 8b|1b] [--layers N] [--json FILE]

A row for each config of the cached weights says milliseconds (median) for all weights, the bytes that must move, GB/s,
and that as a share of the copy bandwidth measured in the same run. "apart" is what an engine without cached weights
launches in each forward and backward. FP8 values are compared with the single quantizer's first; a wrong config is a
row that says WRONG.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from deepwell.bench.environment import environment
from deepwell.kernels.quantize.fp8 import amax, quantize_weight
from deepwell.kernels.quantize.weight_cache import CODES_CONFIGS, CodesConfig
from deepwell.kernels.quantize.weight_cache_launches import Codes, CodesRefresh

# (layers, [(K, widths of the weights that share a scale)]) of a Llama-8B and a 1B.
MODELS = {
    "8b": (32, [(4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,))]),
    "1b": (16, [(2048, (2048, 512, 512)), (2048, (2048,)), (2048, (8192, 8192)), (8192, (2048,))]),
}


def median_ms(run: Callable[[], object]) -> float:
    return triton.testing.do_bench(run, warmup=20, rep=100, return_mode="median")


def copy_gbps(device: str) -> float:
    x = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.numel() / median_ms(lambda: y.copy_(x)) / 1e6


def quantize_apart(weights: list[list[Tensor]], codes: list[Codes]) -> None:
    """What `quantize_weights` and `quantize_weights_transposed` launch."""
    for group, made in zip(weights, codes, strict=True):
        largest = amax(group)
        for w, (along, transposed) in zip(group, made.parts(), strict=True):
            quantize_weight(w, largest, out=along, write="rows")
            quantize_weight(w, largest, out_t=transposed, write="columns")


def problem_of(codes: list[Codes], wanted: list[Codes]) -> str | None:
    for i, (mine, ref) in enumerate(zip(codes, wanted, strict=True)):
        for name in ("rows", "columns"):
            if not torch.equal(getattr(mine, name).view(torch.uint8), getattr(ref, name).view(torch.uint8)):
                return f"WRONG: {name} of group {i}"
    return None


def rows_of(
    config: CodesConfig, weights: list[list[Tensor]], codes: list[Codes], wanted: list[Codes]
) -> list[dict[str, Any]]:
    """Two rows of one config: nothing changed, all changed."""
    numel = sum(w.numel() for group in weights for w in group)
    refresh = CodesRefresh(codes, config=config)
    for made in codes:
        made.state.zero_()
        made.rows.view(torch.uint8).zero_()
        made.columns.view(torch.uint8).zero_()
    refresh.refresh(weights)
    problem = problem_of(codes, wanted)
    before = sum(c.times_quantized for c in codes)
    unchanged = median_ms(lambda: refresh.refresh(weights))
    if problem is None and sum(c.times_quantized for c in codes) != before:
        problem = "WRONG: quantized although nothing changed"
    states = [made.state for made in codes]

    def all_changed() -> None:
        torch._foreach_zero_(states)  # no codes yet, as far as the device knows
        refresh.refresh(weights)

    changed = median_ms(all_changed)
    return [
        {
            "row": "kept, nothing changed",
            "config": str(config),
            "ms": unchanged,
            "bytes": 2 * numel,
            "problem": problem,
        },
        {"row": "kept, all changed", "config": str(config), "ms": changed, "bytes": 6 * numel, "problem": problem},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--layers", type=int, default=8, help="how many layers' weights; time grows with them")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    _, shapes = MODELS[chosen.model]
    groups = shapes * chosen.layers
    weights = [[torch.randn(n, k, device="cuda").mul_(0.02).bfloat16() for n in widths] for k, widths in groups]
    codes, wanted = (
        [Codes.empty(k, widths, [False] * len(widths), torch.device("cuda")) for k, widths in groups] for _ in range(2)
    )
    copy = copy_gbps("cuda")
    quantize_apart(weights, wanted)
    numel = sum(w.numel() for group in weights for w in group)
    apart = median_ms(lambda: quantize_apart(weights, wanted))
    rows: list[dict[str, Any]] = [{"row": "apart", "config": "", "ms": apart, "bytes": 8 * numel, "problem": None}]
    for config in CODES_CONFIGS:
        rows += rows_of(config, weights, codes, wanted)
    print(f"{numel / 1e9:.2f}e9 weights in {len(groups)} groups; copy {copy:.0f} GB/s")
    for row in rows:
        row["gbps"] = row["bytes"] / row["ms"] / 1e6
        row["share_of_copy"] = row["gbps"] / copy
        print(f"{row['row']:24} {row['ms']:8.3f} ms {row['gbps']:7.0f} GB/s {row['share_of_copy']:6.1%} {row['config']}"
              f" {row['problem'] or ''}")  # fmt: skip
    if chosen.json:
        result = {"environment": environment(), "copy_gbps": copy, "weights": numel, "rows": rows}
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
