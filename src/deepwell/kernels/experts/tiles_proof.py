"""Whether the tiles of the experts' stages are right on a device: tried in a process of their own before any competes.

A tile that hangs or reads where it should not ends that process and not the one that trains; then all stages are
torch's, with the reason in the log. The proof is kept with the others of the device, torch and sources.
"""

# Shapes: as in `row_products`.

import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.experts.activation import ExpertActivation, parse_activation
from deepwell.kernels.experts.group_rows import group_layout_ref
from deepwell.kernels.experts.quantize_weights import quantize_experts
from deepwell.kernels.experts.row_products import (
    FP8_TILES,
    GRADS_TILES,
    PRODUCT_TILES,
    UP_TILES,
    Rows,
    hidden_grads,
    hidden_grads_ref,
    row_product,
    row_product_ref,
    up_product,
    up_product_ref,
)
from deepwell.kernels.experts.token_products import WEIGHT_TILES, token_product, token_product_ref
from deepwell.kernels.quantize.fp8 import quantize_rows_ref
from deepwell.kernels.tune.candidate import Candidate
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.sources import sources_hash
from deepwell.kernels.tune.verify import Case

OP = "experts_tiles"
_FLOOR_DB = 40.0
_COUNTS, _TOP_K, _D, _F = (300, 0, 65, 1), 2, 192, 160
_ACTIVATIONS = (
    (ExpertActivation(), False),
    (ExpertActivation(interleaved=True, limit=0.9, alpha=1.702, up_shift=1.0), True),
)


def _run(stage: str, tile: int, how: str, ends: Tensor, slot: Tensor, *given: Any) -> Tensor:
    """The results of one tile of a stage, rows that hold a choice, side by side; on a CPU those of the reference."""
    rows, live = Rows(ends, slot, _TOP_K), slot >= 0
    if stage == "up":
        parts = up_product(given[0], given[1], rows, parse_activation(how), tile=UP_TILES[tile])
        return torch.cat(parts, 1)[live].float()
    if stage == "grads":
        dy, down, gate_up, weight = given
        made = hidden_grads(dy, down, gate_up, weight, rows, parse_activation(how), tile=GRADS_TILES[tile])
        d_rows, hidden, dw = made
        return torch.cat([d_rows.float(), hidden.float(), dw[:, None] * dw.shape[0] ** -0.5], 1)[live]
    if stage == "product":
        return row_product(given[0], given[1], rows, tile=PRODUCT_TILES[tile])[live].float()
    if stage == "codes":
        a, scale, w, scale_w = given
        return row_product(a, w, rows, scales=(scale, scale_w), tile=FP8_TILES[tile])[live].float()
    return token_product(given[0], given[1], rows, stage, tile=WEIGHT_TILES[tile]).flatten(0, 1).float()


@lru_cache(maxsize=1)
def built_in(op: str) -> tuple[Candidate, ...]:
    """All tiles as one: a process of its own takes seconds to start."""
    sources = sources_hash(sys.modules[__name__])
    return (Candidate(name="tiles", op=op, precision="bf16", fn=_run, origin="triton", fingerprint=sources),)


def cases(candidate: Candidate, problem: Problem) -> Iterator[Case]:
    """Every tile of every stage: ragged groups, one of them empty, widths that tiles do not divide, unit scale."""
    generator = torch.Generator().manual_seed(0)

    def unit(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).bfloat16()

    choices = sum(_COUNTS)
    order = torch.randperm(choices, generator=generator)
    ends, slot, _ = group_layout_ref(torch.tensor(_COUNTS).cumsum(0).int(), order, choices)
    rows, live = Rows(ends, slot, _TOP_K), slot >= 0
    p, x, weight = slot.shape[0], unit(choices // _TOP_K, _D), torch.rand(choices, generator=generator)

    def of(stage: str, tiles: int, wanted: Tensor, *given: Tensor, how: str = "") -> Iterator[Case]:
        for tile in range(tiles):
            yield Case(
                label=f"{stage} {tile}",
                operands=(stage, tile, how, *(part.to(problem.device) for part in (ends, slot, *given))),
                wanted=wanted.float().to(problem.device),
                floor_db=_FLOOR_DB,
            )

    for how, is_kn in _ACTIVATIONS:
        up = unit(4, _D, 2 * _F).mT * _D**-0.5 if is_kn else unit(4, 2 * _F, _D) * _D**-0.5
        down = unit(4, _D, _F).mT * _D**-0.5 if is_kn else unit(4, _F, _D) * _D**-0.5
        yield from of("up", len(UP_TILES), torch.cat(up_product_ref(x, up, rows, how), 1)[live], x, up, how=str(how))
        yield from of("product", len(PRODUCT_TILES), row_product_ref(x, up, rows)[live], x, up)
        gate_up = unit(p, 2 * _F)
        d_rows, hidden, dw = hidden_grads_ref(x, down, gate_up, weight, rows, how)
        wanted = torch.cat([d_rows.float(), hidden.float(), dw[:, None] * p**-0.5], 1)[live]
        yield from of("grads", len(GRADS_TILES), wanted, x, down, gate_up, weight, how=str(how))
    by_row = unit(p, _F)
    for side, given in (("left", (x, by_row)), ("right", (by_row, x))):
        yield from of(side, len(WEIGHT_TILES), token_product_ref(*given, rows, side).flatten(0, 1), *given)
    (q, scale), (q_w, scale_w) = quantize_rows_ref(x), quantize_experts(unit(4, _F, _D))
    wanted = row_product_ref(q, q_w, rows, scales=(scale, scale_w), dtype=torch.bfloat16)[live]
    yield from of("codes", len(FP8_TILES), wanted, q, scale, q_w, scale_w)
