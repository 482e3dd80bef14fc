"""What a GPU ran, from the profiler, and whether that is what a row of the table claims.

A claim follows from what the engine says it did: its bindings and the passes that fired. It fails where the kernels
that do such a thing are not among those that ran, or run too seldom.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepwell.hardware.codec import packaged_json

# cuBLASLt names operands ("q": E4M3, "r": E5M2), CUTLASS and torch their types; the last are our own kernels.
FP8_GEMM = r"nvjet_sm\d+_[qr]{2}|gemm_e4m3|gemm_e5m2|e4m3_?e4m3|f8f6f4|float_e4m3|_fp8_gemm_kernel|scaled_mm_kernel"
BF16_GEMM = r"nvjet_sm\d+_(?![qr]{2})[a-z]|gemm_bf16|bf16gemm|_s16816gemm_bf16|gemmSN|cublasLt.*bf16"
# What cuBLASLt calls a scale per row of both operands.
ONE_SCALE_GEMM = rf"^(?!.*ovscale).*({FP8_GEMM})"
# Blackwell's block-scaled products; nobody has seen their names in a profile yet, so that any of sm_100 will do.
BLOCK_SCALED_GEMM = r"_block_scaled_kernel|nvjet_sm1\d\d|sm100"
ATTENTION = r"flash|fmha|sdpa|attention"
FLEX_ATTENTION = r"flex_attention|triton_tem"  # Inductor's templates

_PASS_KERNELS: dict[str, str] = packaged_json("deepwell.bench", "pass_kernels.json")["passes"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel by name: how often it ran in one step, and for how long altogether."""

    name: str
    count: int
    ms: float


@dataclass(frozen=True, slots=True)
class Claim:
    """At least `at_least` (or, where `none` is set, none) of the kernels whose names match `pattern` ran."""

    text: str
    pattern: str
    at_least: int = 1
    none: bool = False

    def problem(self, kernels: Iterable[Kernel]) -> str:
        """Why the claim does not hold, "" where it does."""
        count = sum(kernel.count for kernel in kernels if re.search(self.pattern, kernel.name))
        if self.none:
            return f"{self.text}: {count} kernels match {self.pattern}" if count else ""
        return "" if count >= self.at_least else f"{self.text}: {count} of at least {self.at_least} kernels ran"


_NO_FP8 = Claim("no FP8", FP8_GEMM, none=True)


def profile(step: Callable[[], Any]) -> list[Kernel]:
    """The kernels of one step on the GPU, longest first."""
    return watch(step, steps=1)[0]


def watch(step: Callable[[], Any], steps: int) -> tuple[list[Kernel], float]:
    """(the kernels of a step, longest first; milliseconds of it in which the GPU had nothing to run).

    Both are means of `steps` that follow each other: one alone runs at clocks that a GPU at its power limit does not
    hold, some percent faster than the steps of a training run.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    rows = [event for event in trace.key_averages() if event.self_device_time_total > 0]
    rows.sort(key=lambda event: -event.self_device_time_total)
    kernels = [
        Kernel(row.key, max(1, round(row.count / steps)), row.self_device_time_total / 1e3 / steps) for row in rows
    ]
    ranges = [event.time_range for event in trace.events() if event.device_type == DeviceType.CUDA]
    return kernels, idle_us([(one.start, one.end) for one in ranges]) / 1e3 / steps


def idle_us(spans: Iterable[tuple[float, float]]) -> float:
    """Time between the first start and the last end in which no span runs; spans of two streams may overlap."""
    idle, busy_until = 0.0, math.inf
    for start, end in sorted(spans):
        idle += max(0.0, start - busy_until)
        busy_until = end if busy_until == math.inf else max(busy_until, end)
    return idle


def engine_claims(schemes: Mapping[str, str], passes: Mapping[str, int], head: str) -> list[Claim]:
    """What must have run on a GPU for an engine with these schemes and passes. `head` is the path of the head."""
    # How many of a linear's products are FP8 GEMMs: neither emulated ones nor those of Blackwell's block formats.
    parts = {path: scheme.split("|") for path, scheme in schemes.items()}
    products = {path: sum(one.startswith(("fp8_", "grouped_fp8")) for one in each) for path, each in parts.items()}
    fp8 = {path for path, count in products.items() if count}
    claims = []
    if fp8 - {head}:
        # A merged GEMM does the work of two or three linears, forward and backward.
        linears = passes.get("linear", 0) - 2 * passes.get("merged_linear", 0)
        steps = min(products[path] for path in fp8 - {head})
        claims.append(Claim("linears in FP8", FP8_GEMM, max(1, steps * linears)))
        claims.append(Claim("quantization", r"(quantize|norm|swiglu|transpose)\w*_kernel"))
        if left := passes.get("row_factors", 0):
            # Weight gradients have one scale in any case.
            wgrads = linears if steps == 3 else 0
            claims.append(Claim("pass row_factors", ONE_SCALE_GEMM, left + wgrads))
    elif not schemes:
        claims.append(Claim("everything in bf16", FP8_GEMM, none=True))
    if any("_native" in scheme for scheme in schemes.values()):
        claims.append(Claim("block-scaled products", BLOCK_SCALED_GEMM))
    if head in fp8:
        claims.append(Claim("head in FP8", FP8_GEMM, 3))
    fired = {name: pattern for name, pattern in _PASS_KERNELS.items() if passes.get(name)}
    return claims + [Claim(f"pass {name}", pattern) for name, pattern in fired.items()]


def candidate_claims(origin: str, precision: str) -> list[Claim]:
    """What must have run for a candidate of the registry; nothing is known of users' own."""
    if precision in ("bf16", "fp16", "fp32"):
        return [_NO_FP8]
    by_origin = {
        "triton": r"_fp8_gemm_kernel|_block_scaled_kernel",
        "cutlass": r"cutlass",
        "vendor": FP8_GEMM if precision == "fp8" else BLOCK_SCALED_GEMM,
    }
    return [Claim(f"a product of {origin}", by_origin[origin])] if origin in by_origin else []


def attention_claims(name: str) -> list[Claim]:
    """What must have run for a way to attend, by its name in the table."""
    patterns = {
        "torch flash": r"flash_\w*(fwd|bwd)|pytorch_flash",
        "cuDNN": r"cudnn.*(sdpa|fmha|flash)",
        "flex": FLEX_ATTENTION,
        "Deepwell": f"{ATTENTION}|{FLEX_ATTENTION}",
    }
    way = name.rpartition(": ")[2]
    if way.startswith("softmax"):
        return [Claim("nothing fused", ATTENTION, none=True)]
    if way == "as written":
        return []  # SDPA's choice, or products and a softmax
    return [Claim(name, patterns.get(way, ATTENTION))]


def peer_claims(uses_fp8: bool) -> list[Claim]:
    """What must have run for a peer: FP8 GEMMs where it says so, none where it does not."""
    if uses_fp8:
        return [Claim("linears in FP8", FP8_GEMM)]
    return [_NO_FP8]


def problems(claims: Iterable[Claim], kernels: Iterable[Kernel]) -> list[str]:
    """The claims that do not hold, each with its reason."""
    ran = list(kernels)
    return [problem for claim in claims if (problem := claim.problem(ran))]


def shares(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Milliseconds by kind of work: GEMMs by format, attention, optimizer, the rest."""
    kinds = {"fp8 gemm": FP8_GEMM, "attention": ATTENTION, "bf16 gemm": BF16_GEMM, "adamw": r"adam|multi_tensor_apply"}
    found = dict.fromkeys((*kinds, "rest"), 0.0)
    for kernel in kernels:
        kind = next((kind for kind, pattern in kinds.items() if re.search(pattern, kernel.name)), "rest")
        found[kind] += kernel.ms
    return {kind: round(ms, 3) for kind, ms in found.items()}
