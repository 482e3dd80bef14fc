"""What candidates of "gemm" and "fp8_gemm" are tried and timed with, and how they are called.

Activations have a few loud columns, weights are small, gradients smaller still. One shape of whole tiles, one that ends
inside every tile; with and without bias and activation; a NaN and an infinity that must stay visible.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.gemm.candidates import built_in, gemm_ref
from deepwell.kernels.gemm.fp8 import fp8_gemm_ref
from deepwell.kernels.gemm.triton_fp8 import activate_ref
from deepwell.kernels.quantize.fp8 import quantize_rows
from deepwell.kernels.tune.candidate import Candidate
from deepwell.kernels.tune.choose import TimingSetup
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.verify import FLOORS_DB, LOWEST_DB, Case, some_rows

# Against the product of the same FP8 values, the reference rounded to the result's dtype.
CODES_DB = 60.0
_NAMES = {"gemm": ("a", "b", "bias"), "fp8_gemm": ("a", "scale_a", "b", "scale_b")}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_OWN_DTYPES = {"fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}
_L2_BYTES = 128 << 20
_MAX_COPIES = 8


def codes_floor_db(candidate: Candidate, k: int, device: str) -> float:
    """The floor of a GEMM of FP8 values over K. Sums in Hopper's own accumulator lose bits with every step.

    It keeps about 14 bits (arXiv 2412.19437, 3.3.2) and cuts off the rest. One H200, 2026-11-15
    (benchmarks/bench_accumulation.py), terms of very different size: 62.7 dB at 512, 55.4 at 4096, 49.4 at 16384, 41.7
    at 131072. The floor is 12 dB below that line. Sums that drift one way lose far more; products that have them ask
    for fp32 (`Problem.exact_sums`).
    """
    if not candidate.fast or torch.device(device).type == "cpu":
        return CODES_DB
    return min(CODES_DB, 50.7 - 8.7 * math.log10(max(k, 32) / 512))


# ---- calling ----


def accepts(fn: Callable[..., Any], name: str) -> bool:
    """Whether `fn` can be called with that keyword."""
    try:
        parameters = signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return any(p.kind is Parameter.VAR_KEYWORD or p.name == name for p in parameters)


def prepared(candidate: Candidate, b: Tensor) -> Any:
    """b as the candidate's function takes it."""
    return candidate.prepare(b) if candidate.prepare else b


def run_gemm(
    candidate: Candidate,
    a: Tensor,
    b: Any,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The chain of one candidate; what its function does not take is done after it. `b` must be prepared."""
    asked = {"bias": bias, "activation": activation, "out_dtype": out_dtype}
    # Bias comes before the activation: a function that takes the second alone must not get it.
    takes_bias = bias is None or accepts(candidate.fn, "bias")
    given: dict[str, Any] = {
        name: value
        for name, value in asked.items()
        if value is not None and accepts(candidate.fn, name) and (name != "activation" or takes_bias)
    }
    c = candidate.fn(a, b, **given)
    if bias is not None and "bias" not in given:
        c = c + bias.to(c.dtype)
    if activation is not None and "activation" not in given:
        c = activate_ref(c, activation)
    return c if out_dtype is None or c.dtype == out_dtype else c.to(out_dtype)


def run_fp8_gemm(candidate: Candidate, operands: tuple[Tensor, ...], out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A candidate of "fp8_gemm" on (a, scale_a, b, scale_b)."""
    given = {"out_dtype": out_dtype} if accepts(candidate.fn, "out_dtype") else {}
    c = candidate.fn(*operands, **given)
    return c if c.dtype == out_dtype else c.to(out_dtype)


def _run(candidate: Candidate, given: tuple[Any, ...], activation: str | None = None) -> Any:
    if candidate.op == "fp8_gemm":
        return run_fp8_gemm(candidate, given)
    a, b, bias = given
    return run_gemm(candidate, a, prepared(candidate, b), bias=bias, activation=activation)


def check_dtype(dtype: torch.dtype) -> str:
    """The name of an operand's dtype. Raises ConfigError where no chain takes it."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"operands of {dtype} cannot be multiplied here; pass {', '.join(_DTYPES)}")
    return name


# ---- operands ----


def operands(problem: Problem, seed: int = 0, *, gradients: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """(a [M, K], b [K, N], bias) as training has them: activations with loud columns, small weights or gradients."""
    generator = torch.Generator(device=problem.device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=problem.device)

    dtype = _DTYPES[problem.dtype]
    a = normal(problem.m, problem.k)
    # In place and by slices: at the size of a real layer a second copy in fp32 would be felt.
    a[:, :: max(1, problem.k // 4)] *= 20.0
    if gradients:
        a *= 1e-5 if dtype is not torch.float16 else 1e-2
    b = (0.02 * normal(problem.n, problem.k)).to(dtype).T
    return a.to(dtype), b, normal(problem.n).to(dtype) if problem.bias else None


def codes(problem: Problem, seed: int = 0) -> tuple[Tensor, ...]:
    """(a, scale_a, b, scale_b) for "fp8_gemm", a scale per row of both or, where the problem says so, one each."""
    a, b, _ = operands(problem, seed)
    made = (*quantize_rows(a), *quantize_rows(b.T))
    return _with_one_scale(made) if problem.one_scale else made


def _with_one_scale(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same FP8 values under the first row's scale: what they stand for does not matter to an FP8 GEMM."""
    a, scale_a, b, scale_b = given
    return a, scale_a[:1].clone(), b, scale_b[:1].clone()


def inputs_of(problem: Problem, seed: int = 0) -> tuple[Any, ...]:
    """The operands of a problem as its op takes them."""
    return codes(problem, seed) if problem.op == "fp8_gemm" else operands(problem, seed)


def rotating_inputs(problem: Problem) -> list[tuple[Any, ...]]:
    """Sets of operands, enough of them that none is still in the L2 cache when its turn comes."""
    if torch.device(problem.device).type == "cpu":
        copies = 1
    else:
        size = 2 * (problem.m * problem.k + problem.k * problem.n + problem.m * problem.n)
        copies = max(1, min(_MAX_COPIES, -(-_L2_BYTES // size)))
    return [inputs_of(problem, seed) for seed in range(copies)]


# ---- small shapes: what every candidate must pass ----


def shapes(min_size: int) -> tuple[tuple[int, int, int], ...]:
    """Whole tiles, and one that ends inside them in every direction; none smaller than the candidate takes."""
    base = -(-max(min_size - 1, 0) // 128) * 128 if min_size > 128 else 0
    return (base + 256, base + 384, base + 512), (base + 197, base + 208, base + 336)


def cases(candidate: Candidate, problem: Problem) -> Iterator[Case]:
    """All that a candidate must compute on a problem's device, in its dtype; the problem's sizes do not matter."""
    of = _cases_of_codes if candidate.op == "fp8_gemm" else _cases_of_chain
    for seed, (m, n, k) in enumerate(shapes(candidate.min_size)):
        dtype = _OWN_DTYPES.get(candidate.precision, problem.dtype)
        asked = Problem(
            op=candidate.op, m=m, n=n, k=k, precision=candidate.precision, dtype=dtype, device=problem.device
        )
        yield from of(candidate, asked, seed)


def _cases_of_chain(candidate: Candidate, problem: Problem, seed: int) -> Iterator[Case]:
    epilogues: tuple[Mapping[str, Any], ...] = ({}, {"bias": True, "activation": "gelu"}, {"activation": "silu"})
    common: dict[str, Any] = {"label": problem.size, "names": _NAMES["gemm"], "may_refuse": True}
    floor = FLOORS_DB.get(candidate.precision, LOWEST_DB)
    for number, epilogue in enumerate(epilogues):
        asked = replace(problem, **epilogue)
        a, b, bias = operands(asked, seed, gradients=number == 2)
        wanted = gemm_ref(a, b, bias=bias, activation=asked.activation, out_dtype=torch.float32)
        call = partial(_run, activation=asked.activation)
        yield Case(**common, operands=(a, b, bias), wanted=wanted, floor_db=floor, call=call)
    a = a.clone()
    a[0, 3], a[1, 2] = math.inf, math.nan
    wanted = gemm_ref(a, b, out_dtype=torch.float32)
    yield Case(**common, operands=(a, b, None), wanted=wanted, floor_db=floor, call=_run, only_spoiled=True)


def _cases_of_codes(candidate: Candidate, problem: Problem, seed: int) -> Iterator[Case]:
    floor = codes_floor_db(candidate, problem.k, problem.device)
    given = codes(problem, seed)
    spoiled = tuple(x.clone() for x in given)
    spoiled[1][1] = math.nan
    # One scale per tensor is what weight gradients have.
    for scales in (given, _with_one_scale(given), spoiled):
        yield Case(
            label=problem.size,
            names=_NAMES["fp8_gemm"],
            operands=scales,
            wanted=fp8_gemm_ref(*scales, out_dtype=torch.bfloat16),
            floor_db=floor,
            call=_run,
            only_spoiled=scales is spoiled,
            may_refuse=True,
        )


# ---- the problem's own size ----


def case_at(candidate: Candidate, problem: Problem, given: tuple[Any, ...] | None = None) -> Case:
    """Some rows of the problem itself; `given` are operands that the candidate never had."""
    given = inputs_of(problem) if given is None else given
    rows = some_rows(problem.m, problem.device)
    if problem.op == "fp8_gemm":
        a, scale_a, b, scale_b = given
        scale = scale_a[rows] if scale_a.numel() > 1 else scale_a
        picked = a.view(torch.uint8)[rows].view(a.dtype)
        wanted = ((picked.float() * scale.reshape(-1, 1)) @ (b.float() * scale_b.reshape(-1, 1)).T).bfloat16()
        floor = codes_floor_db(candidate, problem.k, problem.device)
    else:
        a, b, bias = given
        wanted = gemm_ref(a[rows], b, bias=bias, activation=problem.activation, out_dtype=torch.float32)
        floor = FLOORS_DB.get(candidate.precision, LOWEST_DB)
    return Case(
        label=problem.size,
        names=_NAMES[problem.op],
        operands=given,
        wanted=wanted,
        floor_db=floor,
        call=partial(_run, activation=problem.activation),
        rows=rows,
        shape=(problem.m, problem.n),
    )


def call_of(candidate: Candidate, problem: Problem, given: tuple[Any, ...]) -> Callable[[], Tensor]:
    """The candidate's chain on one set of operands; of a weight that many products share, without its preparation."""
    if problem.op == "fp8_gemm" or not problem.static_b:
        return partial(_run, candidate, given, problem.activation)
    a, b, bias = given
    return partial(run_gemm, candidate, a, prepared(candidate, b), bias=bias, activation=problem.activation)


def setup(problem: Problem) -> TimingSetup:
    """What is timed: whole chains over operands that rotate."""
    inputs = rotating_inputs(problem)
    return TimingSetup(
        inputs=inputs,
        call=lambda candidate, given: call_of(candidate, problem, given),
        case=lambda candidate: case_at(candidate, problem, inputs[0]),
    )


__all__ = ["built_in", "case_at", "cases", "setup"]
