"""Seconds of single kernels on one GPU: GEMM, attention, passes over memory. Pure.

    gemm       waves * (2 tile_m tile_n k / (peak * eff / SMs) + tile_us)      or its bytes, whichever is longer
    attention  pairs * flops / (peak * eff * depth(d)), diagonal tiles counted whole; unfused: three GEMMs and passes
    pass       bytes / (bandwidth * eff)

`GpuConstants` are the only fitted numbers here, at most ten per GPU; they live in `gpus.json` with what they were
fitted on. Everything else is a data sheet's figure or carries its source.
"""

import functools
import math
from dataclasses import dataclass

from deepwell.errors import ConfigError
from deepwell.hardware.codec import packaged_json
from deepwell.hardware.parts import Gpu
from deepwell.planner.shard import HALF, LocalAttention, LocalGemm

# Time between two kernels of one stream that the GPU cannot hide: drain, launch, fill.
KERNEL_S = 2.5e-6

# Output tiles that vendor GEMMs choose from, with their slow-down against the largest: a smaller tile reads its
# operands more often (arithmetic intensity 128*128/(128+128) = 64 against 85).
_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 1.06), (64, 128, 1.25), (64, 64, 1.6))

_FULL_TILE = 128 * 256
_SPLIT_DEPTH, _SPLIT_COST = 1024, 1.15

# Share of the tail wave that persistent kernels and the overlap with the next kernel cannot fill.
_TAIL = 0.5

# Forward speed of attention kernels against the best one of the generation, and backward against the same: the
# FlashAttention 2 paper (arXiv 2307.08691, A100: 1 reaches 0.6 of 2), the FlashAttention 3 paper (arXiv 2407.08608,
# H100) and one H200 measured by Deepwell (cuDNN 577/553 TFLOP/s, torch's flash backend 337/289).
_KERNELS: dict[tuple[str, int], tuple[float, float]] = {
    ("flash1", 8): (0.62, 0.58),
    ("triton", 8): (0.75, 0.65),
    ("flash2", 8): (1.0, 0.9),
    ("flash1", 9): (0.40, 0.36),
    ("triton", 9): (0.45, 0.40),
    ("flash2", 9): (0.60, 0.52),
}
_BEST_KERNEL = (1.0, 0.92)

# Bytes per score that unfused attention moves besides its GEMMs' own operands, forward and backward: every pass reads
# and writes a square of 2-byte (half) or 4-byte (fp32 softmax) scores.
UNFUSED_BYTES = {"unfused": (34.0, 30.0), "fused_softmax": (6.0, 8.0)}
DROPOUT_BYTES = (5.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConstants:
    gemm_bf16: float = 0.72  # share of the dense peak that a large GEMM reaches under the power limit
    gemm_fp8: float = 0.66
    gemm_fp4: float = 0.55
    tile_us: float = 1.0  # prologue and epilogue of one output tile
    attention: float = 0.58  # share of the bf16 peak that the best forward kernel reaches at length
    bandwidth: float = 0.80  # share of the data sheet's memory bandwidth
    nvlink: float = 0.75  # share of NVLink's rate in collectives
    network: float = 0.75  # share of the NICs' rate in collectives
    latency_us: float = 12.0  # of one collective
    jitter: float = 0.006  # of a step, for each doubling of nodes: the slowest rank sets the pace


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    name: str
    generation: int  # major compute capability, 0 for a CPU
    sms: int
    rates: dict[str, float]  # format -> flop/s of a large GEMM
    bytes_per_s: float
    constants: GpuConstants
    tier: str

    def rate(self, name: str) -> float:
        return self.rates[name]


_CLASS = {
    "fp32": "bf16", "tf32": "bf16", "bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "mxfp6": "fp8",
    "nvfp4": "fp4", "mxfp4": "fp4",
}  # fmt: skip
_RATES = {"fp8": "fp8", "mxfp8": "fp8", "mxfp6": "fp6", "nvfp4": "fp4", "mxfp4": "fp4"}
FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "mxfp6", "nvfp4", "mxfp4")


_TABLE = packaged_json("deepwell.planner", "gpus.json")


def constants_key(gpu: Gpu) -> str:
    """Which entry of gpus.json serves a GPU: its own, or its generation's."""
    name = (gpu.machine or gpu.name).lower()
    entries = _TABLE["gpus"]
    for key, entry in entries.items():
        if name in entry["machines"]:
            return str(key)
    if gpu.kind == "cpu":
        return "cpu"
    major = gpu.compute_capability[0] if gpu.compute_capability else 0
    return {8: "a100", 9: "h100", 10: "b200"}.get(major, "generic")


def gpu_constants(key: str) -> GpuConstants:
    return GpuConstants(**_TABLE["gpus"][key]["constants"])


def device(gpu: Gpu, constants: GpuConstants | None = None) -> DeviceSpeed:
    """The GPU with its constants. Raises ConfigError where its peak or bandwidth is not known."""
    key = constants_key(gpu)
    own = constants or gpu_constants(key)
    known = {peak.rate: peak.tflops * 1e12 for peak in gpu.peaks}
    base = known.get("bf16") or known.get("fp32")
    if base is None or gpu.memory_gb_per_s is None:
        raise ConfigError(f"{gpu.name}: peak or memory bandwidth is not known; name a machine or probe --measure")
    share = {"bf16": own.gemm_bf16, "fp8": own.gemm_fp8, "fp4": own.gemm_fp4}
    rates = {}
    for name in FORMATS:
        peak = known.get(_RATES[name]) if name in _RATES else base
        # A format that the tensor cores lack runs as its bf16 copy.
        rates[name] = peak * share[_CLASS[name]] if peak else base * own.gemm_bf16
    return DeviceSpeed(
        name=gpu.name,
        generation=gpu.compute_capability[0] if gpu.compute_capability else 0,
        sms=gpu.num_sms or (148 if (gpu.compute_capability or (0,))[0] >= 10 else 108),
        rates=rates,
        bytes_per_s=gpu.memory_gb_per_s * 1e9 * own.bandwidth,
        constants=own,
        tier="table" if key not in ("generic", "cpu") else "spec",
    )


_BYTES = {
    "fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "mxfp8": 1.03, "mxfp6": 1.03, "nvfp4": 0.56,
    "mxfp4": 0.53,
}  # fmt: skip


@functools.lru_cache(maxsize=200_000)
def _work(m: float, n: float, k: float, groups: int, sms: int) -> tuple[float, float]:
    """Output area that one SM computes for the whole product with the best tile: with its slow-down, and plain."""
    best = (math.inf, math.inf)
    for tile_m, tile_n, slow in _TILES:
        tiles = groups * math.ceil(m / tile_m) * math.ceil(n / tile_n)
        waves, share = tiles / sms, 1.0
        if waves > 1:
            waves += _TAIL * (math.ceil(waves) - waves)
        else:
            # Fewer tiles than SMs: a deep product is split along k, which costs a second pass over the sums.
            waves, share = 1.0, min(1.0, _SPLIT_COST / min(1 / waves, max(1.0, k / _SPLIT_DEPTH)))
        area = waves * tile_m * tile_n
        best = min(best, (share * area * slow, area))
    return best


def gemm_s(dev: DeviceSpeed, fmt: str, m: float, n: float, k: float, groups: int = 1) -> float:
    """Seconds of `groups` products [m, k] x [k, n] in one launch."""
    if m <= 0:
        return 0.0
    slowed, area = _work(m, n, k, groups, dev.sms)
    busy = 2.0 * slowed * k * dev.sms / dev.rates[fmt] + area * dev.constants.tile_us * 1e-6 / _FULL_TILE
    moved = groups * (_BYTES[fmt] * (m * k + k * n) + HALF * m * n)
    # Grouped products of today's stacks are loops of launches over a few streams.
    return max(busy, moved / dev.bytes_per_s) + KERNEL_S * max(1.0, groups / 4)


def linear_s(dev: DeviceSpeed, gemm: LocalGemm) -> tuple[float, float, float]:
    """Seconds of one linear layer: forward, gradient of the input, gradient of the weight."""
    fwd, dgrad, wgrad = gemm.formats
    return (
        gemm_s(dev, fwd, gemm.m, gemm.n, gemm.k, gemm.groups),
        gemm_s(dev, dgrad, gemm.m, gemm.k, gemm.n, gemm.groups),
        gemm_s(dev, wgrad, gemm.n, gemm.k, gemm.m, gemm.groups),
    )


def _depth(dim: float, generation: int) -> float:
    """Softmax work per pair does not shrink with the head, so short heads waste tensor-core time. 1 at 128.

    Blackwell doubled the tensor cores and not the exponentials (16 a cycle and SM), which makes it steeper.
    """
    softmax = 32.0 if generation < 10 else 96.0
    return (1 + softmax / 128) * dim / (dim + softmax)


def attention_s(dev: DeviceSpeed, att: LocalAttention, kernel: str, dropout: bool = False) -> tuple[float, float]:
    if kernel in UNFUSED_BYTES:
        return _unfused_s(dev, att, kernel, dropout)
    fwd, bwd = _KERNELS.get((kernel, dev.generation), _BEST_KERNEL)
    # Tiles on the mask's edge are computed whole: half a tile of 128 per query row.
    pairs = min(att.pairs + 64 * att.q_len, att.q_len * att.kv_len) if att.causal else att.pairs
    flops = 2.0 * att.batch * att.heads * pairs * (att.qk_dim + att.v_dim)
    bf16_peak = dev.rate("bf16") / dev.constants.gemm_bf16
    rate = bf16_peak * dev.constants.attention * _depth((att.qk_dim + att.v_dim) / 2, dev.generation)
    moved = HALF * att.batch * att.heads * att.q_len * (att.qk_dim + att.v_dim)
    floor = moved / dev.bytes_per_s
    # Backward: five products for the forward's two (scores are recomputed).
    return (
        max(flops / (rate * fwd), floor) + KERNEL_S,
        max(2.5 * flops / (rate * bwd), 3 * floor) + 2 * KERNEL_S,
    )


def _unfused_s(dev: DeviceSpeed, att: LocalAttention, kernel: str, dropout: bool) -> tuple[float, float]:
    groups = max(1, round(att.batch * att.heads))
    qk = gemm_s(dev, "bf16", att.q_len, att.kv_len, att.qk_dim, groups)
    pv = gemm_s(dev, "bf16", att.q_len, att.v_dim, att.kv_len, groups)
    extra = DROPOUT_BYTES if dropout else (0.0, 0.0)
    fwd, bwd = (a + b for a, b in zip(UNFUSED_BYTES[kernel], extra, strict=True))
    return (
        qk + pv + att.scores * fwd / dev.bytes_per_s + 4 * KERNEL_S,
        2 * (qk + pv) + att.scores * bwd / dev.bytes_per_s + 4 * KERNEL_S,
    )


def bytes_s(dev: DeviceSpeed, nbytes: float) -> float:
    return nbytes / dev.bytes_per_s + KERNEL_S if nbytes > 0 else 0.0
