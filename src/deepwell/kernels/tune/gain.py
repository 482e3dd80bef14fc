"""Whether a linear layer is faster in FP8 than in bf16 here: measured, never guessed.

    rows     rows of x*; the weight, twice; x w^T; rows of dy*; dy w; both transposed; dy^T x
    tensor   amax and both copies of x; the weight, twice; x w^T; amax and both copies of dy; dy w; dy^T x
    1x128    both copies of x; the weight, twice; x w^T; both copies of dy; dy w; dy^T x
    bf16     x w^T; dy w; dy^T x

The whole of a training step's work on one layer by the kernels that the engine runs: weights in two launches and one
more for the backward, large products by the fastest of cuBLASLt's algorithms. Rows (*) that the engine makes in the
kernel before (a norm, an activation, RoPE's backward) cost no kernel of their own, and less to write than bf16 (a byte
more beside a gradient that is read): they are left out. To count them kept layers of width 768 in bf16 that gain.
"""

# Shapes: T tokens, K and N the widths of the linear.

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.gemm import linear
from deepwell.kernels.gemm.cases import operands
from deepwell.kernels.gemm.fp8 import ALIGNMENT
from deepwell.kernels.gemm.linear import copies, gemms
from deepwell.kernels.tune import timing
from deepwell.kernels.tune.candidate import Candidate, Choice
from deepwell.kernels.tune.choose import Rules, TimingSetup, choose
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.sources import fingerprint_of, sources_hash
from deepwell.kernels.tune.verify import FLOORS_DB, Case, some_rows

# What the times depend on: another build of these, or of what they import, is measured anew.
_SOURCES = (linear, timing)
_RULES = Rules(budget_s=0.1)
_BF16 = "bf16"
Step = Callable[[Tensor, Tensor, Tensor], Callable[[], Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Microseconds of forward and backward of one linear in both precisions, at a number of tokens."""

    n: int
    k: int
    tokens: int
    fp8_us: float
    bf16_us: float
    rejected: str = ""  # why FP8 is wrong or does not run here

    @property
    def gains(self) -> bool:
        return self.fp8_us < self.bf16_us

    @property
    def reason(self) -> str:
        if self.rejected:
            return f"FP8 was rejected: {self.rejected}"
        verdict = "faster" if self.gains else "would not gain"
        figures = f"FP8 {self.fp8_us:.0f} us, bf16 {self.bf16_us:.0f} us"
        return f"{verdict}: {figures} forward and backward at {self.tokens} tokens"


def would_gain(n: int, k: int, tokens: int, device: str = "cuda", fused: str = "", method: str = "fp8_row") -> Gain:
    """Measure one linear [N, K] both ways, once per shape, bucket of tokens and machine; then it is remembered.

    `fused` names the rows that another kernel writes: "", "x", "dy" or "x dy"; only `method` "fp8_row" has such,
    "fp8_tensor" and "fp8_1x128" quantize in kernels of their own.

    Raises ConfigError on sizes below 1, UnsupportedError off a GPU: emulation is not about speed.
    """
    for name, value in (("n", n), ("k", k), ("tokens", tokens)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    place = torch.device(device)
    if place.type != "cuda":
        raise UnsupportedError(f"on a {place.type} FP8 is emulated and its speed says nothing: formats run as asked")
    device = str(place if place.index is not None else torch.device("cuda", torch.cuda.current_device()))
    choice = measure(n, k, tokens, device, fused, method)
    found = {verdict.name: verdict for verdict in choice.verdicts}
    if choice.skipped():
        raise torch.OutOfMemoryError(f"{choice.problem}: {choice.skipped()[0].reason}")
    fp8_us, bf16_us = (found[name].us or math.inf for name in (method, _BF16))
    tokens = _problem(n, k, tokens, device, fused, method).bucket.m
    return Gain(n=n, k=k, tokens=tokens, fp8_us=fp8_us, bf16_us=bf16_us, rejected=found[method].reason)


def measure(n: int, k: int, tokens: int, device: str, fused: str = "", method: str = "fp8_row") -> Choice:
    """The choice between both ways, on any device."""
    problem = _problem(n, k, tokens, device, fused, method)
    written = fused.split() if method == "fp8_row" else ()
    steps: dict[str, Step] = {method: partial(_fp8_step, method=method, fused=written), _BF16: _bf16_step}
    candidates = [
        Candidate(
            name=name,
            op="linear",
            precision="bf16" if name == _BF16 else "fp8",
            fn=step,
            origin="vendor",
            fingerprint=sources(),
        )
        for name, step in steps.items()
    ]
    return choose(problem, candidates, partial(_setup, problem.bucket), rules=_RULES)


def _problem(n: int, k: int, tokens: int, device: str, fused: str, method: str) -> Problem:
    details = f"fused:{fused}" if method == "fp8_row" else ""
    return Problem(op="linear", m=tokens, n=n, k=k, precision=method, details=details, device=device)


def sources() -> str:
    """Hash of this file, of the kernels that are timed, and of what they import from Deepwell."""
    return f"{fingerprint_of(measure)} {sources_hash(*_SOURCES)}"


# ---- what is timed ----


def _setup(problem: Problem) -> TimingSetup:
    """x, w and dy in bf16; for FP8 of whole 16-byte lines, as the engine fills them up. Rows of y are checked."""
    whole = {name: -(-getattr(problem, name) // ALIGNMENT) * ALIGNMENT for name in ("m", "n", "k")}
    filled = replace(problem, **whole)
    plain = _tensors(problem)
    given = {"bf16": plain, "fp8": plain if filled == problem else _tensors(filled)}
    rows = some_rows(problem.m, problem.device)

    def case(candidate: Candidate) -> Case:
        x, w, _ = given[candidate.precision]
        return Case(
            label=problem.size,
            operands=(),
            wanted=x[rows].float() @ w.T.float(),
            floor_db=FLOORS_DB[candidate.precision],
            rows=rows,
            shape=(x.shape[0], w.shape[0]),
        )

    return TimingSetup(inputs=[()], call=lambda candidate, _: candidate.fn(*given[candidate.precision]), case=case)


def _tensors(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    x, w_KN, _ = operands(problem)
    dy = operands(replace(problem, n=problem.k, k=problem.n), gradients=True)[0]
    return x, w_KN.T, dy


def _fp8_step(x: Tensor, w: Tensor, dy: Tensor, *, method: str, fused: Sequence[str]) -> Callable[[], Tensor]:
    fwd, dgrad, wgrad = gemms("|".join([method] * 3))
    of_x, of_dy = partial(copies, x, "activation", fwd, wgrad), partial(copies, dy, "gradient", dgrad, wgrad)
    made_x, made_dy = of_x() if "x" in fused else None, of_dy() if "dy" in fused else None

    def step() -> Tensor:
        x_rows, x_columns = made_x or of_x()
        w_rows, kept = fwd.method.weights([w], True)
        y = fwd.method.multiply(fwd.how, x_rows, w_rows, x.dtype)
        dy_rows, dy_columns = made_dy or of_dy()
        w_columns = dgrad.method.transposed([w], dy_rows[0], *kept)
        dgrad.method.multiply(dgrad.how, dy_rows, w_columns, dy.dtype)
        wgrad.method.wgrad(wgrad.how, dy_columns, x_columns, dy.dtype)
        return y

    return step


def _bf16_step(x: Tensor, w: Tensor, dy: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        y = x @ w.T
        dy @ w
        dy.T @ x
        return y

    return step
