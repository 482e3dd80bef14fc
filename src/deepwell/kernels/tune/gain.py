"""Whether a linear layer is faster in FP8 than in bf16 here: measured, never guessed.

    rows     rows of x*; the weight, twice; x w^T; rows of dy*; dy w; both transposed; dy^T x
    tensor   amax and both copies of x; the weight, twice; x w^T; amax and both copies of dy; dy w; dy^T x
    1x128    both copies of x; the weight, twice; x w^T; both copies of dy; dy w; dy^T x
    bf16     x w^T; dy w; dy^T x

The whole of a training step's work on one layer, quantization included. Rows (*) that the engine makes in the kernel
before (a norm, an activation, RoPE's backward) cost no kernel of their own, and less to write than bf16 (a byte more
beside a gradient that is read): they are left out. To count them kept layers of width 768 in bf16 that gain by FP8.
"""

# Shapes: T tokens, K and N the widths of the linear.

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.gemm import fp8 as gemm
from deepwell.kernels.gemm import fp8_blocks as gemm_blocks
from deepwell.kernels.gemm.fp8 import ALIGNMENT, fp8_gemm
from deepwell.kernels.gemm.fp8_blocks import fp8_gemm_blocks
from deepwell.kernels.quantize import fp8 as quantize
from deepwell.kernels.quantize import fp8_blocks as quantize_blocks
from deepwell.kernels.quantize import wgrad_operands as wgrads
from deepwell.kernels.quantize.fp8 import amax, quantize_rows, quantize_weight
from deepwell.kernels.quantize.fp8_blocks import quantize_1x128_both, quantize_128x128
from deepwell.kernels.quantize.wgrad_operands import wgrad_operands
from deepwell.kernels.registry import Problem, fingerprint_of
from deepwell.kernels.tune import timing
from deepwell.kernels.tune.select import cache_of, on_real_tensors
from deepwell.kernels.tune.sources import sources_hash
from deepwell.kernels.tune.timing import median_us
from deepwell.kernels.tune.verify import operands

# What the times depend on: another build of these, or of what they import, is measured anew.
_SOURCES = (gemm, gemm_blocks, quantize, quantize_blocks, timing, wgrads)
_FIGURES = {"fp8_us", "bf16_us"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Microseconds of forward and backward of one linear in both precisions, at a number of tokens."""

    n: int
    k: int
    tokens: int
    fp8_us: float
    bf16_us: float

    @property
    def gains(self) -> bool:
        return self.fp8_us < self.bf16_us

    @property
    def reason(self) -> str:
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
    tokens = 1 << max(tokens - 1, 0).bit_length()
    cache = cache_of(device)
    way = f"fused:{fused}" if method == "fp8_row" else method
    key = f"linear {tokens}x{n}x{k} {way} {sources()}"
    figures = cache.figures(key)
    if figures is None or set(figures) != _FIGURES:
        with on_real_tensors():
            figures = measure(n, k, tokens, device, fused, method)
        cache.keep_figures(key, figures)
    return Gain(n=n, k=k, tokens=tokens, fp8_us=figures["fp8_us"], bf16_us=figures["bf16_us"])


def sources() -> str:
    """Hash of this file, of the kernels that are timed, and of what they import from Deepwell."""
    return f"{fingerprint_of(measure)} {sources_hash(*_SOURCES)}"


def measure(n: int, k: int, tokens: int, device: str, fused: str, method: str = "fp8_row") -> dict[str, float]:
    """Times of both ways. FP8 operands are whole 16-byte lines, as the engine fills them up."""
    whole = (-(-size // ALIGNMENT) * ALIGNMENT for size in (n, k, tokens))
    if method == "fp8_row":
        fp8_us = _fp8_us(*whole, device=device, fused=fused.split())
    else:
        fp8_us = {"fp8_tensor": _tensor_us, "fp8_1x128": _blocks_us}[method](*whole, device=device)
    return {
        "fp8_us": fp8_us,
        "bf16_us": _bf16_us(n, k, tokens, device=device),
    }


def _tensors(n: int, k: int, tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, w [N, K], dy) in bf16."""
    problem = Problem(op="gemm", m=tokens, n=n, k=k, precision="bf16", device=device)
    x, w_KN, _ = operands(problem)
    dy = operands(Problem(op="gemm", m=tokens, n=k, k=n, precision="bf16", device=device), gradients=True)[0]
    return x, w_KN.T, dy


def _fp8_us(n: int, k: int, tokens: int, *, device: str, fused: Sequence[str]) -> float:
    x, w, dy = _tensors(n, k, tokens, device)
    rows_x, rows_dy = quantize_rows(x), quantize_rows(dy)

    def step() -> object:
        q_x, s_x = rows_x if "x" in fused else quantize_rows(x)
        largest = amax(w)
        q_w, _, s_w = quantize_weight(w, largest, write="rows")
        assert q_w is not None
        y = fp8_gemm(q_x, s_x, q_w, s_w)
        q_dy, s_dy = rows_dy if "dy" in fused else quantize_rows(dy)
        _, q_wt, _ = quantize_weight(w, largest, write="columns")
        assert q_wt is not None
        dx = fp8_gemm(q_dy, s_dy, q_wt, s_w)
        dw = fp8_gemm(*wgrad_operands(q_dy, s_dy, q_x, s_x), fast=False)
        return y, dx, dw

    return median_us(step, device)


def _tensor_us(n: int, k: int, tokens: int, *, device: str) -> float:
    x, w, dy = _tensors(n, k, tokens, device)

    def step() -> object:
        q_x, q_xt, s_x = quantize_weight(x)
        largest = amax(w)
        q_w, _, s_w = quantize_weight(w, largest, write="rows")
        assert q_x is not None and q_xt is not None and q_w is not None
        y = fp8_gemm(q_x, s_x, q_w, s_w)
        q_dy, q_dyt, s_dy = quantize_weight(dy)
        _, q_wt, _ = quantize_weight(w, largest, write="columns")
        assert q_dy is not None and q_dyt is not None and q_wt is not None
        return y, fp8_gemm(q_dy, s_dy, q_wt, s_w), fp8_gemm(q_dyt, s_dy, q_xt, s_x, fast=False)

    return median_us(step, device)


def _blocks_us(n: int, k: int, tokens: int, *, device: str) -> float:
    x, w, dy = _tensors(n, k, tokens, device)

    def product(a: Sequence[Tensor | None], b: Sequence[Tensor | None], square: bool) -> Tensor:
        given = [tensor for tensor in (*a, *b) if tensor is not None]
        return fp8_gemm_blocks(*given, square=square)

    def step() -> object:
        of_x = quantize_1x128_both(x)
        y = product(of_x[:2], quantize_128x128(w, columns=False)[:2], True)
        of_dy = quantize_1x128_both(dy)
        dx = product(of_dy[:2], quantize_128x128(w, rows=False)[2:], True)
        return y, dx, product(of_dy[2:], of_x[2:], False)

    return median_us(step, device)


def _bf16_us(n: int, k: int, tokens: int, *, device: str) -> float:
    x, w, dy = _tensors(n, k, tokens, device)
    return median_us(lambda: (x @ w.T, dy @ w, dy.T @ x), device)
