"""The stages of a block of experts, each by the fastest of its kernels: timed where a shape is first met, then kept.

A stage is a whole chain: torch's gathers the rows, multiplies them (`torch._grouped_mm`, `_scaled_grouped_mm`) and
makes the activation in a kernel of its own; Deepwell's does all of it in one kernel, in one of several tiles. Torch's
runs unless another is faster by more than its noise. Before a tile competes, it is tried in a process of its own
(`tiles_proof`). Each tile's results are compared with torch's, at the call's own operands, before it is timed; while a
CUDA graph is recorded nothing can be timed, and a shape that is new then is torch's. On a CPU the references run.
"""

# Shapes: as in `row_products`.

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from deepwell.errors import UnsupportedError
from deepwell.formats.metrics import sqnr_db
from deepwell.kernels.device.triton_support import compile_ahead
from deepwell.kernels.experts import grouped_gemm, hidden_rows, row_products, tiles_proof, token_products
from deepwell.kernels.experts.activation import ExpertActivation
from deepwell.kernels.experts.group_rows import gather_rows
from deepwell.kernels.experts.hidden_rows import HiddenGrads
from deepwell.kernels.experts.row_products import (
    FP8_TILES,
    PRODUCT_TILES,
    UP_TILES,
)
from deepwell.kernels.experts.row_tiles import Rows, expert_of_rows, is_kn
from deepwell.kernels.experts.token_products import ROW_TILES, WEIGHT_TILES
from deepwell.kernels.tune import timing
from deepwell.kernels.tune.candidate import Candidate
from deepwell.kernels.tune.choose import Rules, TimingSetup, fastest_or_default, known_choice
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.sources import sources_hash
from deepwell.kernels.tune.verify import Case, some_rows

TORCH = "torch"
# Below that a choice would drown in the noise of its measurement.
LEAST_FLOPS = 1e11
_RULES = Rules(default=TORCH, least_gain=0.02, leaders=2, budget_s=0.06, record=False)
# Against torch's own kernels: the same sums in another order, rounded to bf16 once or (h of H) twice; FP8 sums in the
# tensor cores' short accumulator, and those of wgrads in fp32.
_FLOOR_DB, _FP8_FLOOR_DB, _EXACT_FLOOR_DB = 40.0, 35.0, 50.0

# A kernel by its name, and a call that gives its result: a tensor or several.
Ways = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStage:
    """One stage at one size: rows, columns and contraction of its product, and what else distinguishes it.

    `kernel` and `form` name the tiles' proof (`tiles_proof.proofs`).
    """

    name: str
    m: int
    n: int
    k: int
    details: str
    precision: str
    device: str
    kernel: str
    form: str = ""
    floor_db: float = _FLOOR_DB

    @property
    def problem(self) -> Problem:
        return Problem(
            op=f"experts_{self.name}",
            m=self.m,
            n=self.n,
            k=self.k,
            precision=self.precision,
            details=self.details,
            device=self.device,
        )


# The kernel that was chosen for each bucket of sizes; why tiles were rejected; and what `only` asks for.
_chosen: dict[str, str] = {}
_rejected: dict[str, str] = {}
_only: list[str] = []


def forget() -> None:
    """Drop what this process remembers, so that the files are read again."""
    _chosen.clear()
    _rejected.clear()


def chosen() -> dict[str, str]:
    """The kernel of every stage that was chosen in this process."""
    return dict(_chosen)


def rejected() -> dict[str, str]:
    """Why a tile is not right on this device, by stage and tile, as far as this process asked."""
    return dict(_rejected)


@contextmanager
def only(way: str) -> Iterator[None]:
    """Run all stages by one kernel, unmeasured: "torch", a tile's name, or "own" for each stage's first tile."""
    _only.append(way)
    try:
        yield
    finally:
        _only.pop()


# ---- the stages ----


def up(
    x: Tensor, w_EGD: Tensor, rows: Rows, how: ExpertActivation, *, bias_EG: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`(gate_up_PG, hidden_PF)`."""
    own = partial(row_products.up_product, x, w_EGD, rows, how, bias_EG=bias_EG)
    if not x.is_cuda:
        return own()
    ways = _ways(partial(_torch_up, x, w_EGD, rows, how, bias_EG), own, UP_TILES)
    stage = _stage("up", x, w_EGD, rows, f"{how}{' bias' * (bias_EG is not None)}", form=f"{how} ")
    return by_the_fastest(stage, ways, rows)


def product(
    a: Tensor,
    w_ENK: Tensor,
    rows: Rows,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    bias_EN: Tensor | None = None,
) -> Tensor:
    """`c_PN`."""
    own = partial(row_products.row_product, a, w_ENK, rows, scales=scales, bias_EN=bias_EN)
    if not a.is_cuda:
        return own()
    by_torch = partial(_torch_product, a, w_ENK, rows, scales, bias_EN)
    ways = _ways(by_torch, own, PRODUCT_TILES if scales is None else FP8_TILES)
    details = ("gathered " * (rows.slot is not None)) + "bias" * (bias_EN is not None)
    kernel = "product" if scales is None else "codes"
    return by_the_fastest(_stage("product", a, w_ENK, rows, details, kernel=kernel), ways, rows)


def grads(
    dy: Tensor, w_EFD: Tensor, gate_up_PG: Tensor, weight_S: Tensor, rows: Rows, how: ExpertActivation
) -> HiddenGrads:
    """Gradients between the products. `dy` lies by row: down's gradient reads the same copy.

    Tiles that had all of it in their epilogue lost to a product and a kernel behind it (docs/gotchas.md).
    """
    assert rows.slot is not None
    dh_PF = product(dy, w_EFD, Rows(rows.ends))
    return hidden_rows.weighted_grads(dh_PF, gate_up_PG, weight_S, rows.slot, how)


def wgrad(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    """`dw_ENK`, summed over the rows of each expert: both sides lie by row."""
    own = partial(token_products.wgrad_of_rows, left, right, ends_E)
    if not left.is_cuda:
        return own()
    stage = _wgrad_stage(left.shape, right.shape[1], ends_E, left.dtype, "rows")
    by_torch = partial(torch._grouped_mm, left.T, right, offs=ends_E)
    return by_the_fastest(stage, _ways(by_torch, own, ROW_TILES), Rows(ends_E))


def wgrad_of_codes(a_NC: Tensor, scale_a_E: Tensor, b_KC: Tensor, scale_b_E: Tensor, ends_E: Tensor) -> Tensor:
    """`dw_ENK`, summed over the columns of each expert; of operands as `token_products` takes them."""
    given = (a_NC, scale_a_E, b_KC, scale_b_E, ends_E)
    own = partial(token_products.token_product, *given)
    if not a_NC.is_cuda:
        return own()
    stage = _wgrad_stage(a_NC.T.shape, b_KC.shape[0], ends_E, a_NC.dtype, "wgrad")
    ways = _ways(partial(grouped_gemm.grouped_wgrad, *given), own, WEIGHT_TILES)
    return by_the_fastest(stage, ways, Rows(ends_E))


def _wgrad_stage(left: torch.Size, k: int, ends_E: Tensor, dtype: torch.dtype, kernel: str) -> ExpertStage:
    return ExpertStage(
        name="wgrad",
        m=left[0],
        n=left[1],
        k=k,
        details=f"{ends_E.shape[0]} experts",
        precision=str(dtype).removeprefix("torch."),
        device=str(ends_E.device),
        kernel=kernel,
        floor_db=_EXACT_FLOOR_DB,
    )


def _ways(by_torch: Callable[[], Any], own: Callable[..., Any], tiles: Sequence[Any]) -> dict[str, Callable[[], Any]]:
    return {TORCH: by_torch, **{tile.name: partial(own, tile=tile) for tile in tiles}}


# ---- torch's way ----


def _torch_product(
    a: Tensor, w_ENK: Tensor, rows: Rows, scales: tuple[Tensor, Tensor] | None, bias_EN: Tensor | None
) -> Tensor:
    if scales is None:
        c_PN = torch._grouped_mm(rows.gathered(a), w_ENK.transpose(1, 2), offs=rows.ends)
    else:
        gathered = (a, scales[0]) if rows.slot is None else gather_rows(a, scales[0], rows.slot, rows.top_k)
        c_PN = grouped_gemm.grouped_gemm(*gathered, w_ENK, scales[1], rows.ends)
    return c_PN if bias_EN is None else c_PN.add_(bias_EN[expert_of_rows(rows.ends, c_PN.shape[0])])


def _torch_up(
    x: Tensor, w_EGD: Tensor, rows: Rows, how: ExpertActivation, bias_EG: Tensor | None
) -> tuple[Tensor, Tensor]:
    gate_up = _torch_product(x, w_EGD, rows, None, bias_EG)
    return gate_up, hidden_rows.hidden_rows(gate_up, how)


# ---- choosing ----


def _stage(
    name: str, a: Tensor, w_ENK: Tensor, rows: Rows, details: str, *, kernel: str = "", form: str = ""
) -> ExpertStage:
    stored = "kn" if is_kn(w_ENK) else "nk"
    return ExpertStage(
        name=name,
        m=rows.count(a),
        n=w_ENK.shape[1],
        k=w_ENK.shape[2],
        details=f"{w_ENK.shape[0]} experts {stored} {details}".strip(),
        precision=str(a.dtype).removeprefix("torch."),
        device=str(a.device),
        kernel=kernel or name,
        form=form + stored,
        floor_db=_FLOOR_DB if a.dtype == torch.bfloat16 else _FP8_FLOOR_DB,
    )


def by_the_fastest(stage: ExpertStage, ways: Ways, rows: Rows) -> Any:
    """The results of the way that is fastest for a stage."""
    if _only:
        way = _only[-1]
        return ways[next((name for name in ways if name != TORCH), TORCH) if way == "own" else way]()
    is_large = 2.0 * stage.m * stage.n * stage.k >= LEAST_FLOPS
    if not is_large or stage.precision not in ("bfloat16", "float8_e4m3fn"):
        return ways[TORCH]()
    problem = stage.problem
    key = f"{problem.device} {problem.key}"
    way_or_none = _chosen.get(key)
    if way_or_none is None:
        way_or_none = _choose(stage, ways, rows, may_time=not torch.cuda.is_current_stream_capturing())
        if way_or_none is None:
            return ways[TORCH]()
        _chosen[key] = way_or_none
    return ways[way_or_none]()


def _choose(stage: ExpertStage, ways: Ways, rows: Rows, *, may_time: bool) -> str | None:
    """The fastest way that an earlier process found or this one finds; None where nothing may be timed now."""
    problem = stage.problem
    candidates = [
        Candidate(
            name=name,
            op=problem.op,
            precision=problem.precision,
            fn=run,
            origin="vendor" if name == TORCH else "triton",
            trusted=True,
            fingerprint=_source_hash(),
        )
        for name, run in ways.items()
    ]
    known = known_choice(problem, candidates)
    if known is not None or not may_time:
        return known.kernel if known else None
    proofs = tiles_proof.proofs(stage.kernel, stage.form, stage.device)
    _rejected.update({f"{stage.kernel} {name}": proof.reason for name, proof in proofs.items() if proof.reason})
    able = {name: run for name, run in ways.items() if name not in proofs or proofs[name].is_passed}
    return fastest_or_default(problem, candidates, partial(_setup, stage, able, rows), _RULES, proofs)


def _setup(stage: ExpertStage, ways: Ways, rows: Rows) -> TimingSetup:
    """The operands are those of the call; some rows of every part are compared with torch's before a way is timed."""
    parts = _flat(ways[TORCH]())
    picked = [_picked(part, rows) for part in parts]
    wanted = [part[where] for part, where in zip(parts, picked, strict=True)]
    shape = tuple(parts[0].shape)
    del parts  # before another result stands beside it
    if stage.device.startswith("cuda"):
        compile_ahead([run for name, run in ways.items() if name != TORCH])
    floor = stage.floor_db

    def call(candidate: Candidate, given: tuple[object, ...]) -> Callable[[], Tensor]:
        is_checked = candidate.name == TORCH

        def run() -> Tensor:
            nonlocal is_checked
            got = _flat(candidate.fn())
            if not is_checked:
                _compare(got, wanted, picked, floor)
                is_checked = True
            return got[0]

        return run

    case = Case(
        label=stage.problem.size, operands=(), wanted=wanted[0].float(), floor_db=floor, rows=picked[0], shape=shape
    )
    return TimingSetup(inputs=[()], call=call, case=lambda candidate: case)


def _flat(made: Any) -> list[Tensor]:
    """The tensors that a way gave, a weight's gradient as rows of all experts."""
    parts = [made] if isinstance(made, Tensor) else made
    return [part.flatten(0, 1) if part.dim() == 3 else part for part in parts]


def _picked(part: Tensor, rows: Rows) -> Tensor:
    """Some rows of a part; of those that lie by choice, ones that hold a choice: the others are not read by anybody."""
    if rows.slot is None or part.shape[0] != rows.slot.shape[0]:
        return some_rows(part.shape[0], part.device)
    live = (rows.slot >= 0).nonzero().flatten()
    return live[some_rows(live.shape[0], part.device)]


def _compare(got: Sequence[Tensor], wanted: Sequence[Tensor], picked: Sequence[Tensor], floor: float) -> None:
    """Raise UnsupportedError where a part is not what torch's way gives."""
    for i, (part, ref, where) in enumerate(zip(got, wanted, picked, strict=True)):
        db = sqnr_db(ref, part[where])
        if not db >= floor:
            raise UnsupportedError(f"its result {i} has {db:.1f} dB against torch's, {floor:g} are needed")


@lru_cache(maxsize=1)
def _source_hash() -> str:
    """Of the kernels, of torch's way and of how both are timed."""
    return sources_hash(sys.modules[__name__], timing)[:8]
