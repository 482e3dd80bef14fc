"""Large products by the fastest of cuBLASLt's algorithms: timed where a shape is first met, then kept on disk.

Torch takes the heuristic's first. In bf16, 4096 x 128256 x 4096, another is 8 % faster, of the gradient of the same
weight 4 % (one H200, 2026-11-15, `benchmarks/bench_algorithms.py --model head`). Each algorithm is compared with
torch's product before it is timed; the operands are those of the call, so that nothing is held besides them, and
whatever was tried before it, the result is that of the one that won. While a CUDA graph is recorded nothing can be
timed: a shape that is new then is torch's.
Numerics: those of `cublaslt`. Which algorithm wins changes the order of sums, so the choice is kept with the others of
    this device, torch and CUDA (`tune/cache.py`): the next process takes the same one.
Cost: the first call of a shape some hundred calls, later ones a look into a dictionary.
"""

# Shapes: M rows of the result, N columns, K contraction.

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from deepwell.errors import UnsupportedError
from deepwell.kernels.gemm import cublaslt
from deepwell.kernels.gemm import fp8 as gemm
from deepwell.kernels.gemm.cublaslt import LtProduct
from deepwell.kernels.gemm.fp8 import fp8_gemm
from deepwell.kernels.tune import timing
from deepwell.kernels.tune.candidate import Candidate
from deepwell.kernels.tune.choose import Rules, TimingSetup, fastest_or_default, known_choice
from deepwell.kernels.tune.out_of_memory import is_shortage
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.sources import sources_hash
from deepwell.kernels.tune.verify import Case, some_rows

_log = logging.getLogger("deepwell.kernels")

TORCH = "torch"
# Below that, some 100 us of an H200 in bf16, a choice would drown in the noise of its measurement.
LEAST_FLOPS = 1e11
# What another algorithm must gain on torch's; as many as lead after the first round are timed again. A product of this
# size is longer than its launch.
_RULES = Rules(default=TORCH, least_gain=0.01, leaders=4, budget_s=0.06, record=False)
# Both round the same sums in fp32 to bf16, in another order; short accumulators (`fast`) differ more.
_FLOOR_DB, _FAST_FLOOR_DB = 45.0, 35.0
# Of a weight as many lengths of M are timed; where they differ from batch to batch the others are torch's.
_MOST_LENGTHS = 4

Run = Callable[[], Tensor]
# The algorithm that was chosen, by product; and how many lengths of M were timed in this process.
_chosen: dict[LtProduct, str] = {}
_lengths: Counter[LtProduct] = Counter()


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
    if not a_MK.is_cuda or out_dtype != torch.bfloat16 or 2.0 * a_MK.numel() * b_NK.shape[0] < LEAST_FLOPS:
        return by_torch()
    product = cublaslt.product_of_codes(*operands, fast=fast, device=a_MK.device)
    return _by_the_fastest(product, by_torch, partial(cublaslt.fp8_gemm_ranked, *operands, fast=fast), may_time=True)


def _torch_mm(a_MK: Tensor, b_KN: Tensor, *, out: Tensor, accumulate: bool) -> Tensor:
    return out.addmm_(a_MK, b_KN) if accumulate else torch.mm(a_MK, b_KN, out=out)


def _is_large(product: LtProduct) -> bool:
    return 2.0 * product.m * product.n * product.k >= LEAST_FLOPS


# ---- choosing ----


def _by_the_fastest(product: LtProduct, by_torch: Run, run: Callable[..., Tensor], *, may_time: bool) -> Tensor:
    algorithm = _chosen.get(product)
    if algorithm is None:
        algorithm = _choose(product, by_torch, run, may_time=may_time and not torch.cuda.is_current_stream_capturing())
        if algorithm is None:
            return by_torch()
        _chosen[product] = algorithm
    if algorithm == TORCH:
        return by_torch()
    try:
        return run(**_ranked(algorithm))
    except (UnsupportedError, RuntimeError) as error:
        if is_shortage(error):
            raise
        # It refused before anything was launched.
        _log.warning("cuBLASLt's algorithm %s was rejected: %s", algorithm, error)
        _chosen[product] = TORCH
        return by_torch()


def _choose(product: LtProduct, by_torch: Run, run: Callable[..., Tensor], *, may_time: bool) -> str | None:
    """The fastest algorithm that an earlier process found or this one finds; None where nothing may be timed now."""
    problem, candidates = _problem(product), _candidates(product, by_torch, run)
    known = known_choice(problem, candidates)
    if known is not None or not may_time:
        return known.kernel if known else None
    any_length = replace(product, m=0)
    _lengths[any_length] += 1
    if _lengths[any_length] > _MOST_LENGTHS:
        return TORCH
    return fastest_or_default(problem, candidates, partial(_setup, product, by_torch), _RULES)


def algorithm_of(product: LtProduct) -> str:
    """The algorithm that runs a product: torch's, or its rank and whether it is static."""
    return _chosen.get(product, TORCH)


def _problem(product: LtProduct) -> Problem:
    types = "x".join(str(dtype).removeprefix("torch.") for dtype in product.types)
    transposed = "".join("t" if along else "n" for along in product.along_k)
    return Problem(
        op="algorithm",
        m=product.m,
        n=product.n,
        k=product.k,
        precision=types,
        exact_sums=not product.fast,
        details=f"{transposed} {product.scales}",
        exact_m=True,
        device=f"cuda:{product.device}",
    )


@lru_cache(maxsize=1)
def _source_hash() -> str:
    """Of what asks for the algorithms, of torch's product and of how both are timed."""
    return sources_hash(cublaslt, gemm, timing)[:8]


def _candidates(product: LtProduct, by_torch: Run, run: Callable[..., Tensor]) -> list[Candidate]:
    """Torch's product and cuBLASLt's algorithms besides the one that torch takes, the first of those with workspace."""
    runs: dict[str, Run] = {TORCH: by_torch}
    runs |= {name: partial(run, **_ranked(name)) for name in _algorithms(product) if name != "0"}
    precision, sources = str(product.types[0]).removeprefix("torch."), _source_hash()
    return [
        Candidate(name=name, op="algorithm", precision=precision, fn=fn, origin="vendor", fingerprint=sources)
        for name, fn in runs.items()
    ]


def _algorithms(product: LtProduct) -> list[str]:
    try:
        counts = {label: cublaslt.num_algorithms(replace(product, is_static=bool(label))) for label in ("", "static")}
    except (UnsupportedError, RuntimeError, AttributeError) as error:
        _log.info("cuBLASLt's algorithms cannot be asked for: %s", error)
        return []
    return [f"{label}{rank}" for label, count in counts.items() for rank in range(count)]


def _ranked(algorithm: str) -> dict[str, int | bool]:
    return {"rank": int(algorithm.removeprefix("static")), "is_static": algorithm.startswith("static")}


def _setup(product: LtProduct, by_torch: Run) -> TimingSetup:
    """The operands are those of the call. Algorithms are compared with torch's product, which they may overwrite."""
    first = by_torch()
    rows = some_rows(product.m, first.device)
    case = Case(
        label=f"{product.m}x{product.n}x{product.k}",
        operands=(),
        wanted=first[rows].float(),
        floor_db=_FAST_FLOOR_DB if product.fast else _FLOOR_DB,
        rows=rows,
        shape=tuple(first.shape),
    )
    del first  # before another result stands beside it
    return TimingSetup(inputs=[()], call=lambda candidate, given: candidate.fn, case=lambda candidate: case)
