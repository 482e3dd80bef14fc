"""Whether the tiles of the experts' stages are right on a device: tried in a process of their own before any competes.

A tile that hangs or reads where it should not ends that process and not the one that trains; it is rejected with its
reason, and the others are tried in the next. When a model's first stage is met, the tiles of all stages that follow
from it are tried together, for its activation and the storage of its weights, so that one process serves a model.
Proofs are kept with the others of the device, torch and sources.
"""

# Shapes: as in `row_products`.

import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.experts.activation import parse_activation
from deepwell.kernels.experts.group_rows import GROUP_ALIGNMENT, group_columns_ref, group_layout_ref
from deepwell.kernels.experts.grouped_gemm import grouped_wgrad_ref
from deepwell.kernels.experts.quantize_weights import quantize_experts
from deepwell.kernels.experts.row_products import (
    FP8_TILES,
    PRODUCT_TILES,
    UP_TILES,
    row_product,
    row_product_ref,
    up_product,
    up_product_ref,
)
from deepwell.kernels.experts.row_tiles import Rows
from deepwell.kernels.experts.token_products import (
    ROW_TILES,
    WEIGHT_TILES,
    token_product,
    wgrad_of_rows,
    wgrad_of_rows_ref,
)
from deepwell.kernels.quantize.fp8 import quantize_rows_ref
from deepwell.kernels.quantize.wgrad_operands import wgrad_operands
from deepwell.kernels.tune.candidate import Candidate
from deepwell.kernels.tune.choose import on_real_tensors, proofs_of
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.sources import sources_hash
from deepwell.kernels.tune.verify import Case, Proof

OP = "experts_tiles"
# Some twenty kernels are compiled, side by side.
_TIMEOUT_S = 240.0
_FLOOR_DB = 40.0
# Of weight gradients, whose sums over so many rows with a mean a tensor core's own accumulator would not hold.
_WGRAD_FLOOR_DB, _LONG = 50.0, 16384
_COUNTS, _TOP_K, _D, _F = (300, 0, 65, 1), 2, 192, 160
_TILES: dict[str, tuple[Any, ...]] = {
    "up": UP_TILES,
    "product": PRODUCT_TILES,
    "codes": FP8_TILES,
    "wgrad": WEIGHT_TILES,
    "rows": ROW_TILES,
}


def proofs(stage: str, form: str, device: str) -> dict[str, Proof]:
    """The proof of each tile of a stage, by the tile's name; new ones are made with those of the stages that follow.

    `form` says what of a kernel depends on the model: "ACTIVATION nk" or "ACTIVATION kn" for up, "nk" or
    "kn" for products.
    """
    asked = [
        (candidate, Problem(op=OP, precision=candidate.precision, details=its_form, device=device))
        for name, its_form in _with_its_followers(stage, form)
        for candidate in built_in(OP)
        if candidate.name.split()[0] == name
    ]
    with on_real_tensors():
        made = proofs_of(asked, _TIMEOUT_S)
    return {
        candidate.name.split()[1]: proof
        for (candidate, problem), proof in zip(asked, made, strict=True)
        if candidate.name.split()[0] == stage and problem.details == form
    }


def _with_its_followers(stage: str, form: str) -> list[tuple[str, str]]:
    """A stage, and behind the first one those of the rest of the block and of its backward."""
    if stage == "codes":
        return [(stage, form), ("wgrad", "")]
    if stage != "up":
        return [(stage, form)]
    # The backward multiplies by the same weights the other way round.
    return [(stage, form), ("product", "nk"), ("product", "kn"), ("rows", "")]


@lru_cache(maxsize=1)
def built_in(op: str) -> tuple[Candidate, ...]:
    """Every tile of every stage; what it computes with comes from the details of the problem."""
    sources = sources_hash(sys.modules[__name__])
    return tuple(
        Candidate(
            name=f"{stage} {tile.name}",
            op=op,
            precision="fp8" if stage in ("codes", "wgrad") else "bf16",
            fn=_run,
            origin="triton",
            fingerprint=sources,
        )
        for stage, tiles in _TILES.items()
        for tile in tiles
    )


def _run(name: str, how: str, ends: Tensor, slot: Tensor, *given: Any) -> Tensor:
    """The results of one tile of a stage, rows that hold a choice, side by side; on a CPU those of the reference."""
    stage, tile_name = name.split()
    tile = next(tile for tile in _TILES[stage] if tile.name == tile_name)
    rows, live = Rows(ends, slot, _TOP_K), slot >= 0
    if stage == "up":
        return torch.cat(up_product(given[0], given[1], rows, parse_activation(how), tile=tile), 1)[live].float()
    if stage == "product":
        return row_product(given[0], given[1], rows, tile=tile)[live].float()
    if stage == "codes":
        a, scale, w, scale_w = given
        return row_product(a, w, rows, scales=(scale, scale_w), tile=tile)[live].float()
    if stage == "rows":
        left, right = given
        return wgrad_of_rows(left, right, ends, tile=tile).flatten(0, 1).float()
    return token_product(*given, tile=tile).flatten(0, 1).float()


def cases(candidate: Candidate, problem: Problem) -> Iterator[Case]:
    """One tile of a stage: ragged groups, one of them empty, widths that tiles do not divide, unit scale."""
    generator = torch.Generator().manual_seed(0)

    def unit(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).bfloat16()

    def weights(n: int, is_kn: bool) -> Tensor:
        return unit(4, _D, n).mT * _D**-0.5 if is_kn else unit(4, n, _D) * _D**-0.5

    choices = sum(_COUNTS)
    order = torch.randperm(choices, generator=generator)
    ends, slot, _ = group_layout_ref(torch.tensor(_COUNTS).cumsum(0).int(), order, choices)
    rows, live = Rows(ends, slot, _TOP_K), slot >= 0
    p, x = slot.shape[0], unit(choices // _TOP_K, _D)

    def case(wanted: Tensor, *given: Tensor, how: str = "") -> Case:
        return Case(
            label=f"{candidate.name} {how}".rstrip(),
            operands=(candidate.name, how, *(part.to(problem.device) for part in (ends, slot, *given))),
            wanted=wanted.float().to(problem.device),
            floor_db=_WGRAD_FLOOR_DB if candidate.name.split()[0] in ("wgrad", "rows") else _FLOOR_DB,
        )

    stage, form = candidate.name.split()[0], problem.details.split()
    is_kn = form[-1:] == ["kn"]
    if stage == "up":
        how = parse_activation(form[0])
        x = x * (how.limit or 1.0)  # so that some values are cut off
        up = weights(_F * (1 + how.gated), is_kn)
        yield case(torch.cat(up_product_ref(x, up, rows, how), 1)[live], x, up, how=form[0])
    elif stage == "product":
        w = weights(2 * _F, is_kn)
        yield case(row_product_ref(x, w, rows)[live], x, w)
    elif stage == "codes":
        (q, scale), (q_w, scale_w) = quantize_rows_ref(x), quantize_experts(unit(4, _F, _D))
        wanted = row_product_ref(q, q_w, rows, scales=(scale, scale_w), dtype=torch.bfloat16)[live]
        yield case(wanted, q, scale, q_w, scale_w)
    elif stage == "rows":
        left, right = unit(p, _F), unit(p, _D)
        yield case(wgrad_of_rows_ref(left, right, ends).flatten(0, 1), left, right)
    else:
        both = [quantize_rows_ref(unit(p, width)) for width in (_F, _D)]
        yield _wgrad_case(case, both, ends, "ragged")
        both = [quantize_rows_ref(unit(_LONG, width).abs()) for width in (_F, _D)]
        yield _wgrad_case(case, both, torch.tensor([GROUP_ALIGNMENT, _LONG], dtype=torch.int32), "long")


def _wgrad_case(case: Any, both: list[tuple[Tensor, Tensor]], ends: Tensor, how: str) -> Case:
    columns, blocks = group_columns_ref(ends, both[0][0].shape[0])
    given = (*wgrad_operands(*both[0], *both[1], ends, blocks=blocks), columns)
    made: Case = case(grouped_wgrad_ref(*given).flatten(0, 1), *given, how=how)
    return made
