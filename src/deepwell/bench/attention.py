"""Causal attention, forward and backward: softmax written out, torch's flash, cuDNN, and what the engine calls.

FLOPs are those of the lower triangle: 2 GEMMs forward and 5 backward, each 2 * B * H * S^2 * D / 2. The same sizes are
timed for attention beyond plain causal (`bench/attention_variants.py`), each variant's first row being its 1.
"""

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deepwell.bench.attention_variants import Variant, through_the_engine, variants
from deepwell.bench.environment import environment
from deepwell.bench.ran import attention_claims, problems, profile
from deepwell.errors import ConfigError
from deepwell.formats.metrics import sqnr_db
from deepwell.hardware.progress import bar

BURST = 3  # timed calls of a turn on a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """B batch, H query heads, G key-value heads, S sequence, D head width."""

    B: int = 2
    H: int = 32
    G: int = 8
    S: int = 8192
    D: int = 128

    def __post_init__(self) -> None:
        if min(self.B, self.H, self.G, self.S, self.D) < 1 or self.H % self.G:
            raise ConfigError(f"attention shape {self} is not one: sizes are positive and G divides H")

    @property
    def flops(self) -> float:
        return 7 * self.B * self.H * self.S**2 * self.D


def unfused(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> Tensor:
    """Attention as the formula says: scores, mask, softmax, values."""
    repeat = q_BHSD.shape[1] // k_BGSD.shape[1]
    k_BHSD, v_BHSD = k_BGSD.repeat_interleave(repeat, 1), v_BGSD.repeat_interleave(repeat, 1)
    scores = q_BHSD @ k_BHSD.transpose(-2, -1) / math.sqrt(q_BHSD.shape[-1])
    length = scores.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v_BHSD


def _sdpa(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, is_causal=True, enable_gqa=True)


def _with(backend: SDPBackend) -> Callable[..., Tensor]:
    def call(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return _sdpa(q_BHSD, k_BGSD, v_BGSD)

    return call


def _ways(device: str) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    # What Inductor makes of it matters on a GPU only.
    compiled = {"softmax, torch.compile": lambda: torch.compile(unfused)} if device == "cuda" else {}
    return {
        "softmax, eager": lambda: unfused,
        **compiled,
        "torch flash": lambda: _with(SDPBackend.FLASH_ATTENTION),
        "cuDNN": lambda: _with(SDPBackend.CUDNN_ATTENTION),
        "Deepwell": lambda: through_the_engine(_sdpa),
    }


def run_attention(shape: AttentionShape, device: str = "cuda", *, rounds: int = 10) -> dict[str, Any]:
    """Forward and backward in turns; milliseconds, TFLOP/s, memory, SQNR against fp32, the kernels that ran."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = tuple((shape.B, heads, shape.S, shape.D) for heads in (shape.H, shape.G, shape.G))
    plain = Variant(name="", sizes=sizes, ways=_ways(device), exact=unfused, flops=shape.flops)
    todo = [plain, *variants(shape.B, shape.H, shape.G, shape.S, shape.D)]
    with bar("attention", len(todo) * (rounds + 1)) as advance:
        rows = [row for variant in todo for row in _rows(variant, device, dtype, rounds, advance)]
    how = f"medians of {rounds}, in turns of changing order"
    title = f"causal attention, forward + backward, {str(dtype)[6:]}, {shape}; {how}"
    return {"bench": "attention", "title": title, "environment": environment(), "rows": rows}


def _rows(
    variant: Variant, device: str, dtype: torch.dtype, rounds: int, advance: Callable[[float], None]
) -> list[dict[str, Any]]:
    """All ways of one variant, in turns."""
    generator = torch.Generator(device).manual_seed(0)
    made = (torch.randn(size, generator=generator, device=device, dtype=dtype) for size in variant.sizes)
    inputs = [tensor.requires_grad_() for tensor in made]
    with torch.no_grad():
        exact = variant.exact(*(tensor[:1, :1].float() for tensor in inputs))
    grad_size = (*variant.sizes[0][:3], variant.sizes[2][3])
    grad = torch.randn(grad_size, generator=generator, device=device, dtype=dtype)
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[], Tensor]] = {}
    for name, make in variant.ways.items():
        row: dict[str, Any] = {"attention": f"{variant.name}: {name}" if variant.name else name}
        rows.append(row)
        try:
            step = _step(make(), inputs, grad)
            row |= _first(step, device, exact)
            calls[row["attention"]] = step
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            # A backend that is not there, or scores that do not fit, say so by a RuntimeError.
            row["note"] = f"not here: {str(error).splitlines()[0][:100]}"
    advance(1)
    times = in_turns(calls, rounds, device, advance)
    for row in rows:
        found = times.get(row["attention"])
        if found:
            row["ms"] = statistics.median(found)
            row["TFLOP/s"] = variant.flops / row["ms"] / 1e9
    base = next((row["ms"] for row in rows if "ms" in row), None)
    for row in rows:
        if base and "ms" in row:
            row["speed"] = base / row["ms"]
            if device == "cuda":
                kernels = profile(calls[row["attention"]])
                row["kernels ms"] = sum(kernel.ms for kernel in kernels)
                row["kernels"] = sum(kernel.count for kernel in kernels)
                row["kernel"] = kernels[0].name[:60]
                row["problems"] = problems(attention_claims(row["attention"]), kernels)
    return rows


def _step(call: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        for tensor in inputs:
            tensor.grad = None
        out = call(*inputs)
        out.backward(grad)
        return out.detach()

    return step


def _first(step: Callable[[], Tensor], device: str, exact: Tensor) -> dict[str, Any]:
    """Compile and warm up; the first head's output against fp32, and the peak of memory."""
    row: dict[str, Any] = {"SQNR dB": sqnr_db(exact, step()[:1, :1].float())}
    if device != "cuda":
        return row
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return row | {"peak GB": (torch.cuda.max_memory_allocated() - before) / 1e9}


def in_turns(
    calls: dict[str, Callable[[], Any]], rounds: int, device: str, advance: Callable[[float], None]
) -> dict[str, list[float]]:
    """Milliseconds of every call. Each round has an order of its own: what ran before may leave a GPU at another clock.

    In one order for all, cuDNN's kernels after torch's flash attention took 6.8 ms, and the same after cuDNN's own 7.2
    (`attention-h200-2026-11-15.json`).
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(milliseconds(calls[name], device))
        advance(1)
    return times


def milliseconds(call: Callable[[], Any], device: str) -> float:
    """One call; on a GPU the mean of a burst by CUDA events, after a call that lets the host run ahead of them."""
    if device != "cuda":
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    first.record()
    for _ in range(BURST):
        call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / BURST
