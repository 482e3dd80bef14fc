"""The fused optimizer against torch's fused AdamW: milliseconds, bytes, share of the copy bandwidth, ratio.

    PYTHONPATH=src python3 benchmarks/bench_adamw.py [--json FILE] [--layers 4] [--defaults] [--quick] [--only TEXT]

First each variant and config is checked bit for bit against the CPU reference; one that differs is rejected. Then
Llama-8B's shapes with 4 layers (1.92e9 parameters, 39 tensors), 16 equal tensors, and 300 small ones (`--quick`: the
first alone, with random bf16 moments and with FP8 ones, under a minute). Bytes are counted, not measured: each tensor
once for every time it must be read or written. The last table has the best config of each variant beside a copy of as
many bytes.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from deepwell.bench.environment import environment
from deepwell.train.adamw.moments import BLOCK, FP8
from deepwell.train.adamw.tables import FusedAdamW
from deepwell.train.adamw.update import Slot, UpdateConfig, configs_for_moments

BF16, FP32 = torch.bfloat16, torch.float32
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to keep parameters and moments."""

    name: str
    param: torch.dtype = BF16
    moment: torch.dtype = BF16
    has_master: bool = False
    random_params: bool = False
    random_moments: bool = False
    clip_norm: float | None = None

    def bytes_per_parameter(self) -> float:
        """Gradient read (twice with a norm), the rest read and written; a master makes the parameter write-only."""
        grad, param = self.param.itemsize, self.param.itemsize
        moments = 2 * 2 * (1 + 4 / BLOCK if self.moment == FP8 else self.moment.itemsize)
        weights = param + 2 * 4 if self.has_master else 2 * param
        return grad * (2 if self.clip_norm is not None else 1) + weights + moments


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    shapes: str
    name: str
    config: str
    ms: float
    gbps: float
    copy_share: float
    torch_ratio: float | None
    host_us: float | None


PLAIN = Variant(name="bf16, bf16 moments, nearest")
RANDOM = Variant(name="bf16 random, bf16 moments nearest", random_params=True)
VARIANTS = (
    Variant(name="bf16 random, bf16 moments random", random_params=True, random_moments=True),
    Variant(name="bf16 random, fp8 moments random", moment=FP8, random_params=True, random_moments=True),
    Variant(name="bf16, fp8 moments nearest", moment=FP8),
    Variant(name="bf16 + master, bf16 moments", has_master=True),
    Variant(name="bf16 + master, bf16 moments random", has_master=True, random_moments=True),
    Variant(name="bf16 + master, fp8 moments random", has_master=True, moment=FP8, random_moments=True),
    Variant(name="bf16 + master, fp32 moments", has_master=True, moment=FP32),
    Variant(name="bf16 random, bf16 moments random, clipped", random_params=True, random_moments=True, clip_norm=1.0),
    Variant(name="fp32, fp32 moments", param=FP32, moment=FP32),
)


def llama_shapes(num_layers: int = 4) -> list[Shape]:
    """The parameters of a Llama-8B with fewer layers and an untied head."""
    layer = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    return [(128256, 4096), *((*layer, (4096,), (4096,)) * num_layers), (4096,), (128256, 4096)]


def make_slots(shapes: list[Shape], variant: Variant, device: str) -> tuple[list[Slot], list[Tensor]]:
    """Parameters, moments and gradients at realistic magnitudes."""
    slots, grads = [], []
    for i, shape in enumerate(shapes):
        param = torch.empty(shape, dtype=variant.param, device=device).normal_(std=0.02)
        has_scales = variant.moment == FP8
        num_blocks = -(-param.numel() // BLOCK)
        scales = [torch.ones(num_blocks, device=device) if has_scales else None for _ in range(2)]
        slots.append(
            Slot(
                param=param,
                exp_avg=_zeros(param, variant.moment),
                exp_avg_sq=_zeros(param, variant.moment),
                exp_avg_scales=scales[0],
                exp_avg_sq_scales=scales[1],
                master=param.float() if variant.has_master else None,
                index=i,
            )
        )
        grads.append(torch.empty_like(param).normal_(std=1e-3))
    return slots, grads


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return (
        torch.zeros(like.shape, dtype=torch.uint8, device=like.device).view(dtype)
        if dtype == FP8
        else (torch.zeros_like(like, dtype=dtype))
    )


def group_table(device: str) -> Tensor:
    return torch.tensor([[3e-4, 0.9, 0.95, 1e-8, 0.1, 1.0, 1.0]], dtype=torch.float64, device=device)


def make_optimizer(slots: list[Slot], variant: Variant, device: str, config: UpdateConfig | None) -> FusedAdamW:
    return FusedAdamW(
        slots,
        steps=torch.zeros(len(slots), dtype=torch.int64, device=device),
        seed=1,
        clip_norm=variant.clip_norm,
        random_params=variant.random_params,
        random_moments=variant.random_moments,
        config=config,
    )


def check(variant: Variant, config: UpdateConfig | None) -> str:
    """Two steps on the GPU against two on the CPU, bit for bit (with a norm: its sum has another order).

    Returns what differs, or nothing.
    """
    torch.manual_seed(0)
    # Ragged and unaligned tensors are other kernels: compiling them once, in the default config, is enough.
    is_default = config == configs_of(variant, every=False)[0]
    shapes = [(304, 128), (77,), (4096,), (13, 40)] if is_default else [(304, 128)]
    cpu_slots, cpu_grads = make_slots(shapes, variant, "cpu")
    names = ("param", "exp_avg", "exp_avg_sq", "exp_avg_scales", "exp_avg_sq_scales", "master")
    gpu_slots = [Slot(**{n: _to_gpu(getattr(s, n)) for n in names}, index=s.index) for s in cpu_slots]
    gpu_grads = [g.cuda() for g in cpu_grads]
    cpu, gpu = make_optimizer(cpu_slots, variant, "cpu", None), make_optimizer(gpu_slots, variant, "cuda", config)
    for _ in range(2):
        cpu.step(cpu_grads, group_table("cpu"))
        gpu.step(gpu_grads, group_table("cuda"))
    pairs = [
        (f"{n} of tensor {s.index}", getattr(t, n), getattr(s, n))
        for s, t in zip(cpu_slots, gpu_slots, strict=True)
        for n in names
    ]
    # bf16 parameters without a master take the GPU's own quotient: of 10^4 one may round the other way.
    is_approximate = variant.param == BF16 and not variant.has_master
    for name, got, wanted in pairs:
        if got is None or torch.equal(_bytes(got), _bytes(wanted)):
            continue
        differing = int((_bytes(got) != _bytes(wanted)).sum())
        is_close = torch.allclose(got.cpu().float(), wanted.float(), rtol=2**-6, atol=1e-9)
        is_rare = "param" in name and differing <= max(2, got.numel() // 10_000)
        if not (is_close and variant.clip_norm is not None) and not (is_approximate and is_rare):
            return f"{name} differs in {differing} of {got.nbytes} bytes"
    return ""


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def _to_gpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cuda()


def check_all(pairs: list[tuple[Variant, UpdateConfig]]) -> set[tuple[Variant, UpdateConfig]]:
    """Check every row's variant and config, many at a time: it is the compiler that takes the time, not the GPU.

    Returns those that are not right, and prints why.
    """
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    wrong = set()
    spawn = multiprocessing.get_context("spawn")
    # One thread each: all of them with a thread for every core would wait for each other.
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for pair, verdict in zip(pairs, pool.map(check, *zip(*pairs, strict=True)), strict=True):
            if verdict:
                print(f"WRONG: {pair[0].name}, {show(pair[1])}: {verdict}")
                wrong.add(pair)
    return wrong


def copy_bandwidth() -> float:
    """Bytes a second of torch's device copy, read and write counted."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (median_ms(lambda: target.copy_(source)) / 1e3)


def median_ms(function: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return do_bench(function, warmup=15, rep=60, return_mode="median")


def host_us(function: Callable[[], object], repeats: int = 7) -> float:
    """Host time of a call while the GPU is kept waiting for nothing: what the step costs the training loop."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return sorted(times)[repeats // 2] * 1e6


class Table:
    """Rows as they are measured, printed at once."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self.rows: list[Row] = []
        head = f"{'shapes':<10} {'variant':<44} {'config':<24}"
        print(f"{head} {'ms':>8} {'GB/s':>7} {'copy':>6} {'torch':>6} {'host us':>8}")

    def add(
        self,
        names: tuple[str, str, str],
        function: Callable[[], object],
        num_bytes: float,
        torch_ms: float = 0.0,
    ) -> float:
        """Measure one row, named (shapes, variant, config); returns its milliseconds."""
        shapes, name, config = names
        ms = median_ms(function)
        gbps = num_bytes / ms / 1e6
        row = Row(
            shapes=shapes,
            name=name,
            config=config,
            ms=ms,
            gbps=gbps,
            copy_share=gbps * 1e9 / self.bandwidth,
            torch_ratio=torch_ms / ms if torch_ms else None,
            host_us=host_us(function),
        )
        self.rows.append(row)
        ratio = f"{row.torch_ratio:6.2f}" if row.torch_ratio else f"{'-':>6}"
        share = f"{100 * row.copy_share:5.1f}%"
        print(
            f"{shapes:<10} {name:<44} {config:<24} {ms:8.3f} {gbps:7.0f} {share} {ratio} {row.host_us:8.1f}", flush=True
        )
        return ms


def torch_step(shapes: list[Shape], dtype: torch.dtype) -> Callable[[], object]:
    """One step of torch's fused AdamW over such parameters."""
    params = [torch.empty(shape, dtype=dtype, device="cuda").normal_(std=0.02).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.empty_like(param).normal_(std=1e-3)
    return torch.optim.AdamW(params, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True).step


def bench_torch(table: Table, label: str, shapes: list[Shape], dtypes: tuple[torch.dtype, ...]) -> dict:
    """torch's fused AdamW over such parameters, milliseconds by dtype."""
    count = sum(torch.Size(shape).numel() for shape in shapes)
    torch_ms = {}
    for dtype in dtypes:
        step = torch_step(shapes, dtype)
        name = f"torch fused, all {str(dtype).removeprefix('torch.')}"
        torch_ms[dtype] = table.add((label, name, "-"), step, 7 * dtype.itemsize * count)
        del step
        torch.cuda.empty_cache()
    return torch_ms


def bench_shapes(
    table: Table, label: str, shapes: list[Shape], pairs: list[tuple[Variant, UpdateConfig]], torch_ms: dict
) -> None:
    """Every variant in each of its configs."""
    count = sum(torch.Size(shape).numel() for shape in shapes)
    for variant in dict.fromkeys(variant for variant, _ in pairs):
        slots, grads = make_slots(shapes, variant, "cuda")
        groups = group_table("cuda")
        for config in (c for v, c in pairs if v == variant):
            optimizer = make_optimizer(slots, variant, "cuda", config)
            num_bytes = variant.bytes_per_parameter() * count
            step = partial(optimizer.step, grads, groups)
            table.add((label, variant.name, show(config)), step, num_bytes, torch_ms.get(variant.param, 0.0))
            del optimizer, step
        del slots, grads
        torch.cuda.empty_cache()


def configs_of(variant: Variant, *, every: bool) -> tuple[UpdateConfig, ...]:
    """All configs that suit a variant, or its default one."""
    return configs_for_moments(variant.moment)[: None if every else 1]


def show(config: UpdateConfig) -> str:
    capped = f", {config.max_registers} regs" if config.max_registers else ""
    return f"{config.rows} x {config.tiles}, p{config.pieces}, {config.num_warps}{capped}"


def print_best(table: Table) -> None:
    """The best and the default config of each variant on the first shapes."""
    print(f"\n{'variant':<44} {'best config':<24} {'ms':>7} {'of copy':>8}  default")
    label = table.rows[0].shapes
    for name in dict.fromkeys(row.name for row in table.rows if row.shapes == label):
        rows = [row for row in table.rows if (row.shapes, row.name) == (label, name)]
        best = min(rows, key=lambda row: row.ms)
        default = f"{100 * rows[0].copy_share:5.1f}%"
        print(f"{name:<44} {best.config:<24} {best.ms:7.3f} {100 * best.copy_share:7.1f}%  {default}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--layers", type=int, default=4, help="layers of the Llama-8B shapes (default 4)")
    parser.add_argument("--defaults", action="store_true", help="only the default config of each variant")
    parser.add_argument("--quick", action="store_true", help="only random bf16 and FP8 moments, on the Llama-8B shapes")
    parser.add_argument("--only", default="", help="only variants with this in their name, such as 'fp8 moments'")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_adamw needs a CUDA GPU")
    variants = (PLAIN, RANDOM, *VARIANTS)
    if arguments.quick:
        variants = (VARIANTS[0], *(v for v in VARIANTS if v.moment == FP8))
    variants = tuple(v for v in variants if arguments.only in v.name)
    if not variants:
        raise SystemExit(f"--only {arguments.only}: no variant has that in its name")
    pairs = [(v, c) for v in variants for c in configs_of(v, every=not arguments.defaults)]
    if arguments.quick:
        pairs = [(v, c) for v in variants for c in [c for u, c in pairs if u == v][:3]]
    wrong = check_all(pairs)
    print(f"{len(pairs) - len(wrong)} of {len(pairs)} variants and configs agree with the CPU reference")
    pairs = [pair for pair in pairs if pair not in wrong]
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, device copy {bandwidth / 1e9:.0f} GB/s")
    table = Table(bandwidth)
    shapes = llama_shapes(arguments.layers)
    dtypes = () if arguments.quick else (BF16, FP32)
    bench_shapes(table, "llama", shapes, pairs, bench_torch(table, "llama", shapes, dtypes))
    if not arguments.quick:
        plain = [(v, configs_of(v, every=False)[0]) for v in (PLAIN, VARIANTS[0])]
        for label, other in (("16 large", [(30000, 4000)] * 16), ("300 small", [(4096,)] * 300)):
            bench_shapes(table, label, other, plain, bench_torch(table, label, other, (BF16,)))
    if arguments.json:
        rows = [asdict(row) for row in table.rows]
        result = {"environment": environment(), "copy_gbps": bandwidth / 1e9, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print_best(table)


if __name__ == "__main__":
    main()
