"""Large products by the fastest of cuBLASLt's algorithms: timed where a shape is first met, then kept on disk.

Torch takes the heuristic's first. In bf16, 4096 x 128256 x 4096, another is 8 % faster, of the gradient of the same
weight 4 % (one H200, 2026-11-15, `benchmarks/bench_algorithms.py --model head`). Each algorithm is compared with
torch's product before it is timed; the operands are those of the call, so that nothing is held besides them, and
whatever was tried before it, the result is that of the one that won. While a CUDA graph is recorded nothing can be
timed: a shape that is new then is torch's.
Numerics: those of `cublaslt`. Which algorithm wins changes the order of sums, so the choice is kept with the others of
    this device, torch and CUDA (`choice_cache`): the next process takes the same one.
Cost: the first call of a shape some hundred calls, later ones a look into a dictionary.
"""

# Shapes: M rows of the result, N columns, K contraction.

import logging
import re
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from deepwell.errors import UnsupportedError
from deepwell.formats.metrics import sqnr_db
from deepwell.kernels.gemm import cublaslt
from deepwell.kernels.gemm import fp8 as gemm
from deepwell.kernels.gemm.cublaslt import Product
from deepwell.kernels.gemm.fp8 import fp8_gemm
from deepwell.kernels.tune import timing
from deepwell.kernels.tune.out_of_memory import is_shortage, skipped
from deepwell.kernels.tune.select import cache_of
from deepwell.kernels.tune.sources import sources_hash
from deepwell.kernels.tune.timing import times_us

_log = logging.getLogger("deepwell.kernels")

TORCH = "torch"
_WAY = re.compile(rf"{TORCH}|(static)?\d+")
# Below that, some 100 us of an H200 in bf16, a choice would drown in the noise of its measurement.
LEAST_FLOPS = 1e11
# What another algorithm must gain on torch's.
_LEAST_GAIN = 0.01
# As many as lead after the first round are timed again.
_LEADERS, _ROUNDS, _BUDGET_S = 4, 3, 0.02
# Both round the same sums in fp32 to bf16, in another order; short accumulators (`fast`) differ more.
_FLOOR_DB, _FAST_FLOOR_DB = 45.0, 35.0
_CHECKED_ROWS = 64
# Of a weight as many lengths of M are timed; where they differ from batch to batch the others are torch's.
_MOST_LENGTHS = 4

Run = Callable[[], Tensor]
# The way that was chosen, by product; and how many lengths of M were timed in this process.
_chosen: dict[Product, str] = {}
_lengths: Counter[Product] = Counter()


def forget() -> None:
    """Drop what this process remembers, so that the files are read again."""
    _chosen.clear()
    _lengths.clear()


# ---- public wrappers ----


def fastest_mm(a_MK: Tensor, b_KN: Tensor, *, out: Tensor, accumulate: bool = False) -> Tensor:
    """`out = a @ b`, or `out += a @ b`, written in place. What cuBLASLt's ranked algorithms do not take is torch's."""
    product = cublaslt.product_of(a_MK, b_KN, out)
    by_torch = partial(_torch_mm, a_MK, b_KN, out=out, accumulate=accumulate)
    if product is None or not _is_large(product):
        return by_torch()

    def run(rank: int, is_static: bool) -> Tensor:
        return cublaslt.mm_ranked(a_MK, b_KN, out=out, accumulate=accumulate, rank=rank, is_static=is_static)

    # A sum over chunks would count what was tried: the first of them, which adds to nothing, decides for all.
    return _by_the_fastest(product, by_torch, run, may_time=not accumulate)


def fastest_fp8_gemm(
    a_MK: Tensor,
    scale_a: Tensor | None,
    b_NK: Tensor,
    scale_b: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast: bool = True,
) -> Tensor:
    """As `gemm.fp8_gemm`."""
    operands = (a_MK, scale_a, b_NK, scale_b)
    by_torch = partial(fp8_gemm, *operands, out_dtype=out_dtype, fast=fast)
    if not a_MK.is_cuda or out_dtype != torch.bfloat16:
        return by_torch()
    product = cublaslt.product_of_codes(*operands, fast=fast, device=a_MK.device)
    if not _is_large(product):
        return by_torch()
    return _by_the_fastest(product, by_torch, partial(cublaslt.fp8_gemm_ranked, *operands, fast=fast), may_time=True)


def _torch_mm(a_MK: Tensor, b_KN: Tensor, *, out: Tensor, accumulate: bool) -> Tensor:
    return out.addmm_(a_MK, b_KN) if accumulate else torch.mm(a_MK, b_KN, out=out)


def _is_large(product: Product) -> bool:
    return 2.0 * product.m * product.n * product.k >= LEAST_FLOPS


# ---- choosing ----


def _by_the_fastest(product: Product, by_torch: Run, run: Callable[..., Tensor], *, may_time: bool) -> Tensor:
    way = _chosen.get(product)
    if way is None:
        way = _known(product)
        if way is None and may_time and not torch.cuda.is_current_stream_capturing():
            way = _first_met(product, by_torch, run)
        if way is None:
            return by_torch()
        _chosen[product] = way
    if way == TORCH:
        return by_torch()
    try:
        return run(**_ranked(way))
    except (UnsupportedError, RuntimeError) as error:
        if is_shortage(error):
            raise
        # It refused before anything was launched.
        _log.warning("cuBLASLt's algorithm %s was set aside: %s", way, error)
        _chosen[product] = TORCH
        return by_torch()


def _first_met(product: Product, by_torch: Run, run: Callable[..., Tensor]) -> str:
    any_length = replace(product, m=0)
    _lengths[any_length] += 1
    if _lengths[any_length] > _MOST_LENGTHS:
        return TORCH
    try:
        return _measured(product, by_torch, run)
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        # For this process; the next one may have more memory.
        _log.info("%s: not timed, %s", _key(product), skipped(error))
        return TORCH


def way_of(product: Product) -> str:
    """The algorithm that runs a product: torch's, or its rank and whether it is static."""
    return _chosen.get(product, TORCH)


def _key(product: Product) -> str:
    types = "x".join(str(dtype).removeprefix("torch.") for dtype in product.types)
    turned = "".join("t" if along else "n" for along in product.along_k)
    sums = "fast" if product.fast else "fp32"
    return f"algorithm {product.m}x{product.n}x{product.k} {types} {turned} {product.scales} {sums} {_source_hash()}"


@lru_cache(maxsize=1)
def _source_hash() -> str:
    """Of what asks for the algorithms, of torch's way and of how both are timed."""
    return sources_hash(cublaslt, gemm, timing)[:8]


def _ways(product: Product) -> list[str]:
    """Algorithms besides torch's, which is the first of those with a workspace."""
    try:
        counts = {label: cublaslt.num_algorithms(replace(product, is_static=bool(label))) for label in ("", "static")}
    except (UnsupportedError, RuntimeError, AttributeError) as error:
        _log.info("cuBLASLt's algorithms cannot be asked for: %s", error)
        return []
    ways = [f"{label}{rank}" for label, count in counts.items() for rank in range(count)]
    return [way for way in ways if way != "0"]


def _ranked(way: str) -> dict[str, int | bool]:
    return {"rank": int(way.removeprefix("static")), "is_static": way.startswith("static")}


def _known(product: Product) -> str | None:
    """The way that an earlier process found the fastest; None where its figures are not what is written here."""
    figures = cache_of(f"cuda:{product.device}").figures(_key(product))
    if figures is None or TORCH not in figures or not all(map(_WAY.fullmatch, figures)):
        return None
    return _best(figures)


def _best(figures: dict[str, float]) -> str:
    best = min(figures, key=lambda way: figures[way])
    return best if figures[best] < (1.0 - _LEAST_GAIN) * figures[TORCH] else TORCH


def _measured(product: Product, by_torch: Run, run: Callable[..., Tensor]) -> str:
    """Time all algorithms that are right, those that lead three times; keeps the figures. Any result is left behind."""
    runs: dict[str, Run] = {TORCH: by_torch}
    first = by_torch()
    rows = torch.linspace(0, product.m - 1, min(_CHECKED_ROWS, product.m), device=first.device).long()
    wanted = first[rows].float()
    device = first.device
    del first  # before another result stands beside it
    for way in _ways(product):
        if _is_right(candidate := partial(run, **_ranked(way)), rows, wanted, product):
            runs[way] = candidate
    times: dict[str, list[float]] = {way: [] for way in runs}
    racing = list(runs)
    for _ in range(_ROUNDS):
        for way in racing:
            times[way] += times_us(runs[way], device, _BUDGET_S)
        others = sorted(racing[1:], key=lambda way: statistics.median(times[way]))
        racing = [TORCH, *others[:_LEADERS]]
    figures = {way: float(statistics.median(times[way])) for way in racing}
    cache_of(f"cuda:{product.device}").keep_figures(_key(product), figures)
    best = _best(figures)
    _log.info("%s: %s, %.0f us; torch %.0f us", _key(product), best, figures[best], figures[TORCH])
    return best


def _is_right(run: Run, rows: Tensor, wanted: Tensor, product: Product) -> bool:
    """Whether an algorithm's product is torch's but for rounding. One that cannot run is not."""
    try:
        got = run()[rows].float()
    except (UnsupportedError, RuntimeError) as error:
        if is_shortage(error):
            raise
        _log.info("an algorithm of cuBLASLt was set aside: %s", error)
        return False
    if not bool(wanted.isfinite().all()):
        return bool((got.isnan() == wanted.isnan()).all())
    return sqnr_db(wanted, got) >= (_FAST_FLOOR_DB if product.fast else _FLOOR_DB)
