"""Every stage of a block of experts by every kernel that may run it: compared with torch's own, then timed."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepwell.bench.moe.block import GPT_OSS, milliseconds
from deepwell.bench.moe.shapes import MoEShape
from deepwell.formats.metrics import sqnr_db
from deepwell.kernels.experts import stages
from deepwell.kernels.experts.activation import ExpertActivation
from deepwell.kernels.experts.group_rows import COMBINE_CONFIGS, combine_rows, group_columns, group_layout
from deepwell.kernels.experts.quantize_weights import quantize_experts
from deepwell.kernels.experts.row_products import FP8_TILES, PRODUCT_TILES, UP_TILES
from deepwell.kernels.experts.row_tiles import Rows
from deepwell.kernels.experts.token_products import WEIGHT_TILES
from deepwell.kernels.quantize.fp8 import quantize_rows
from deepwell.kernels.quantize.wgrad_operands import wgrad_operands
from deepwell.kernels.tune.verify import FAILURES, why_failed

_FLOOR_DB = 35.0


def rows_of(shape: MoEShape, device: str, budget_s: float = 0.2) -> list[dict[str, Any]]:
    """A row for each stage and kernel: ms, TFLOP/s, dB against torch's way, or why it does not run."""
    torch.manual_seed(0)
    t, k, e, d, f = shape.tokens, shape.top_k, shape.experts, shape.width, shape.ffn
    is_kn = shape.family == "gpt_oss"
    how = GPT_OSS if is_kn else ExpertActivation()

    def unit(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device).bfloat16()

    def weight(n: int, width: int) -> Tensor:
        stored = unit(e, width, n) if is_kn else unit(e, n, width)
        stored *= width**-0.5
        return stored.transpose(1, 2) if is_kn else stored

    ids = torch.rand(t, e, device=device).topk(k).indices.flatten()
    sorted_ids, order = torch.sort(ids, stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(e, device=device), right=True).int()
    groups = group_layout(ends, order, t * k)
    rows, lying = Rows(groups.ends, groups.slot, k), Rows(groups.ends)
    p = groups.slot.shape[0]
    x, up, down = unit(t, d), weight(2 * f, d), weight(d, f)
    wide, hidden, dy, chosen = unit(p, 2 * f), unit(p, f), unit(p, d), torch.rand(t * k, device=device)
    live = groups.slot >= 0
    flops = 2 * t * k * d * f
    calls: list[tuple[str, Callable[[], Any], Sequence[Any], int]] = [
        ("up", lambda: stages.up(x, up, rows, how), UP_TILES, 2 * flops),
        ("down", lambda: stages.product(hidden, down, lying), PRODUCT_TILES, flops),
        ("dH", lambda: stages.grads(dy, down.transpose(1, 2), wide, chosen, rows, how), PRODUCT_TILES, flops),
        ("dX", lambda: stages.product(wide, up.transpose(1, 2), lying), PRODUCT_TILES, 2 * flops),
    ]
    if not is_kn:
        (q, scale), (q_w, scale_w) = quantize_rows(x), quantize_experts(up)
        calls.append(("FP8 up", lambda: stages.product(q, q_w, rows, scales=(scale, scale_w)), FP8_TILES, 2 * flops))
    columns, blocks = group_columns(groups.ends, p)
    sides = wgrad_operands(*quantize_rows(wide), *quantize_rows(dy), groups.ends, blocks=blocks)
    calls.append(("FP8 dW1", lambda: stages.wgrad_of_codes(*sides, columns), WEIGHT_TILES, 2 * flops))
    found = []
    for stage, call, tiles, count in calls:
        names = [stages.TORCH, *(tile.name for tile in tiles)] if device == "cuda" else [stages.TORCH]
        found += _stage_rows(stage, call, names, count, live, budget_s)
    y = unit(p, d)
    for config in COMBINE_CONFIGS:
        run = partial(combine_rows, y, groups.place, k, chosen, config=config)
        ms = milliseconds(run, device, budget_s)
        found.append({"stage": "sum", "kernel": f"{config.rows}x{config.columns}", "ms": ms})
    return found


def _stage_rows(
    stage: str, call: Callable[[], Any], names: Sequence[str], flops: int, live: Tensor, budget_s: float
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    wanted: list[Tensor] = []
    for name in names:
        row: dict[str, Any] = {"stage": stage, "kernel": name}
        try:
            with stages.only(name):
                made = call()
                parts = [_compared(part, live) for part in (made if isinstance(made, tuple) else (made,))]
                wanted = wanted or parts
                row["dB"] = min(999.0, *(sqnr_db(ref, part) for ref, part in zip(wanted, parts, strict=True)))
                del made, parts
                row["ms"] = milliseconds(call, live.device.type, budget_s)
                row["TFLOP/s"] = 1e-9 * flops / row["ms"]
        except FAILURES as error:
            row["note"] = why_failed(error)
        if row.get("dB", _FLOOR_DB) < _FLOOR_DB:
            row["problems"] = [f"wrong: {row['dB']:.1f} dB against torch's"]
        found.append(row)
    return found


def _compared(part: Tensor, live: Tensor) -> Tensor:
    """Rows of choices, every hundredth where there are many; those without a choice are not read by anybody."""
    part = part.flatten(0, 1) if part.dim() == 3 else part
    part = part[live] if part.shape[0] == live.shape[0] else part
    return part[:: max(1, part.shape[0] // 4096)].clone()
