"""A candidate proves itself: its results against the reference on this device, at realistic magnitudes.

Activations have a few loud columns, weights are small, gradients smaller still. One shape of whole tiles, one that ends
inside every tile; with and without bias and activation; a NaN and an infinity that must stay visible. The floors in
dB are those of docs/numerics.md. A candidate works on copies: the operands that the reference reads are never in its
hands, and tell afterwards whether it wrote where it should only read.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import sqnr_db
from deepwell.kernels.gemm.candidates import gemm_ref
from deepwell.kernels.gemm.fp8 import fp8_gemm_ref
from deepwell.kernels.gemm.triton_fp8 import activate_ref
from deepwell.kernels.quantize.fp8 import quantize_rows
from deepwell.kernels.registry import Candidate, Problem
from deepwell.kernels.tune.out_of_memory import is_shortage, skipped

# Against the high-precision product. bf16 and fp16 round the result once; FP8 and below round the operands.
FLOORS_DB = {"fp32": 90.0, "fp16": 60.0, "bf16": 45.0, "fp8": 27.0, "mxfp8": 27.0, "mxfp6": 20.0, "nvfp4": 14.0}
_LOWEST_DB = 12.0  # mxfp4 and what else has four bits
# Against the product of the same codes, the reference rounded to the result's dtype.
CODES_DB = 60.0

# What a kernel may raise in the course of its work: anything that is an error, also one of its own kind, and lack of
# memory (`is_shortage`). What is meant to end a program, Ctrl-C say, is not among them.
FAILURES: tuple[type[Exception], ...] = (Exception,)

# The operands of an op by name, in the order in which `operands` and `codes` make them.
_NAMES = {"gemm": ("a", "b", "bias"), "fp8_gemm": ("a", "scale_a", "b", "scale_b")}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Whether a candidate is right on a device: the lowest signal to noise that was seen, or the reason why not."""

    reason: str = ""
    sqnr_db: float | None = None

    @property
    def is_passed(self) -> bool:
        return not self.reason


def codes_floor_db(candidate: Candidate, k: int, device: str) -> float:
    """The floor of a GEMM of codes over K. Sums in Hopper's own accumulator lose bits with every step.

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
    """The same codes under the first row's scale: what they stand for does not matter to a product of codes."""
    a, scale_a, b, scale_b = given
    return a, scale_a[:1].clone(), b, scale_b[:1].clone()


def copies_of(given: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The same operands, with the same strides, in memory that a kernel may spoil."""
    return tuple(None if x is None else x.clone() for x in given)


def wrote_into(op: str, got: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> str:
    """The reason of a kernel that changed its operands, `got`, which were `given` before; "" where no bit differs."""
    for name, now, before in zip(_NAMES[op], got, given, strict=True):
        if now is not None and before is not None and not _same_bits(now, before):
            return f"wrote into its operand {name}"
    return ""


def _same_bits(x: Tensor, y: Tensor) -> bool:
    # As numbers a NaN would differ from itself, and -0 would not from 0.
    return x.dtype == y.dtype and torch.equal(_bits(x), _bits(y))


def _bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


# ---- the proof ----


def prove(candidate: Candidate, device: str, dtype: str = "bfloat16") -> Proof:
    """Try a candidate in this process. A failure of any expected kind is a reason, not an error."""
    try:
        if candidate.op == "fp8_gemm":
            return _prove_codes(candidate, device)
        return _prove_chain(candidate, device, dtype)
    except FAILURES as error:
        return Proof(reason=skipped(error) if is_shortage(error) else _said(error))


def _said(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"raised {type(error).__name__}" + (f": {text[0][:200]}" if text else "")


def shapes(min_size: int) -> tuple[tuple[int, int, int], ...]:
    """Whole tiles, and one that ends inside them in every direction; none smaller than the candidate takes."""
    base = -(-max(min_size - 1, 0) // 128) * 128 if min_size > 128 else 0
    return (base + 256, base + 384, base + 512), (base + 197, base + 208, base + 336)


def _prove_chain(candidate: Candidate, device: str, dtype: str) -> Proof:
    floor = FLOORS_DB.get(candidate.precision, _LOWEST_DB)
    lowest = math.inf
    own = {"fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}.get(candidate.precision, dtype)
    epilogues: tuple[Mapping[str, Any], ...] = ({}, {"bias": True, "activation": "gelu"}, {"activation": "silu"})
    tried = 0
    for index, (m, n, k) in enumerate(shapes(candidate.min_size)):
        for number, epilogue in enumerate(epilogues):
            problem = Problem(
                op="gemm", m=m, n=n, k=k, precision=candidate.precision, dtype=own, device=device, **epilogue
            )
            given = a, b, bias = operands(problem, seed=index, gradients=number == 2)
            try:
                got, wrote = _run_on_copies(candidate, given, problem.activation)
            except UnsupportedError:
                continue
            if wrote:
                return Proof(reason=wrote)
            ref = gemm_ref(a, b, bias=bias, activation=problem.activation, out_dtype=torch.float32)
            wrong, db = _compare(got, ref, floor, f"{m}x{n}x{k}", a)
            if wrong:
                return Proof(reason=wrong, sqnr_db=db)
            lowest, tried = min(lowest, db), tried + 1
        reason = _hides_non_finite(candidate, a, b)
        if reason:
            return Proof(reason=reason, sqnr_db=lowest)
    return _summary(lowest, tried)


def _prove_codes(candidate: Candidate, device: str) -> Proof:
    lowest, tried = math.inf, 0
    for index, (m, n, k) in enumerate(shapes(candidate.min_size)):
        problem = Problem(op="fp8_gemm", m=m, n=n, k=k, precision="fp8", device=device)
        given = codes(problem, seed=index)
        floor = codes_floor_db(candidate, k, device)
        # One scale per tensor is what weight gradients have.
        for scales in (given, _with_one_scale(given)):
            try:
                got, wrote = _run_on_copies(candidate, scales)
            except UnsupportedError:
                continue
            if wrote:
                return Proof(reason=wrote)
            ref = fp8_gemm_ref(*scales, out_dtype=torch.bfloat16)
            wrong, db = _compare(got, ref, floor, f"{m}x{n}x{k}", scales[0])
            if wrong:
                return Proof(reason=wrong, sqnr_db=db)
            lowest, tried = min(lowest, db), tried + 1
        given[1][1] = math.nan
        try:
            got, wrote = _run_on_copies(candidate, given)
        except UnsupportedError:
            continue
        if wrote or not bool(got[1].isnan().all()):
            return Proof(reason=wrote or "hides a NaN of its input", sqnr_db=lowest)
    return _summary(lowest, tried)


def _run_on_copies(candidate: Candidate, given: tuple[Any, ...], activation: str | None = None) -> tuple[Tensor, str]:
    """(its result, what it wrote into or ""). `given` itself stays out of its reach."""
    own = copies_of(given)
    if candidate.op == "fp8_gemm":
        got = run_fp8_gemm(candidate, own)
    else:
        a, b, bias = own
        got = run_gemm(candidate, a, prepared(candidate, b), bias=bias, activation=activation)
    return got, wrote_into(candidate.op, own, given)


def _summary(lowest: float, tried: int) -> Proof:
    if not tried:
        return Proof(reason="takes none of the shapes it was tried with")
    return Proof(sqnr_db=min(lowest, 999.0))  # equal bit for bit: JSON knows no infinity


def compare_rows(got: Tensor, ref: Tensor, floor: float, label: str) -> tuple[str, float]:
    """(why `got` is wrong or "", its dB): finite where the reference is, and above the floor."""
    if not bool(got.isfinite().all()):
        return f"gives infinities or NaN at {label} where the reference is finite", -math.inf
    db = sqnr_db(ref, got)
    if not db >= floor:
        return f"wrong at {label}: {db:.1f} dB against the reference, {floor:g} are needed", db
    return "", db


def _compare(got: object, ref: Tensor, floor: float, label: str, a: Tensor) -> tuple[str, float]:
    if not isinstance(got, Tensor):
        return f"returns a {type(got).__name__}, not a tensor", -math.inf
    if got.shape != ref.shape or got.device != a.device:
        where = f"{tuple(got.shape)} on {got.device}"
        return f"returns {where} at {label}, it should be {tuple(ref.shape)} on {a.device}", -math.inf
    return compare_rows(got, ref, floor, label)


def _hides_non_finite(candidate: Candidate, a: Tensor, b: Tensor) -> str:
    """A row with a NaN or an infinity must come out without one finite number."""
    a = a.clone()
    a[0, 3], a[1, 2] = math.inf, math.nan
    try:
        got, wrote = _run_on_copies(candidate, (a, b, None))
    except UnsupportedError:
        return ""
    if wrote:
        return wrote
    if not bool(got[1].isnan().all()):
        return "hides a NaN of its input"
    return "" if not bool(got[0].isfinite().any()) else "hides an infinity of its input"


def check_dtype(dtype: torch.dtype) -> str:
    """The name of an operand's dtype. Raises ConfigError where no chain takes it."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"operands of {dtype} cannot be multiplied here; pass {', '.join(_DTYPES)}")
    return name
