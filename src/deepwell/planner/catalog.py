"""The kernel catalog: which GEMM and grouped-GEMM configurations exist, as data, and which one suits a shape. Pure.

A configuration is chosen by the tiles it leaves idle: a shape is cut into tiles, tiles run in waves over the SMs, and
the last wave and the ragged edges compute nothing useful. The planner never imports kernels; the registry has the last
word on the device.
"""

import functools
import math
from dataclasses import dataclass

from deepwell.hardware.codec import decode, packaged_json
from deepwell.hardware.parts import Gpu
from deepwell.planner.layout import Layout
from deepwell.planner.shard import LocalGemm, RankSizes, local_block
from deepwell.planner.workload import Workload

DEFAULT_SMS = 132


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    name: str
    op: str  # "gemm" or "grouped_gemm"
    formats: tuple[str, ...]
    capability: tuple[int, ...]  # major compute capabilities that run it
    tile: tuple[int, int, int]
    alignment: int  # of the contracted and the contiguous dimension
    source: str
    cluster: tuple[int, int] = (1, 1)

    def useful(self, m: int, n: int, groups: int, num_sms: int) -> float:
        """Share of the tensor cores' time in which useful numbers are computed."""
        tiles = math.ceil(m / self.tile[0]) * math.ceil(n / self.tile[1]) * groups
        slots = max(1, num_sms // (self.cluster[0] * self.cluster[1]))
        waves = math.ceil(tiles / slots)
        return m * n * groups / (waves * slots * self.tile[0] * self.tile[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """The configuration for one linear layer's forward product on one rank."""

    layer: str
    op: str
    format: str
    m: int
    n: int
    k: int
    groups: int
    kernel: str
    tile: tuple[int, int, int]
    useful: float
    note: str = ""

    def __str__(self) -> str:
        shape = f"{self.m}x{self.n}x{self.k}" + (f" x{self.groups}" if self.groups > 1 else "")
        tile = "x".join(map(str, self.tile)) or "-"
        note = f"; {self.note}" if self.note else ""
        return f"{self.layer}: {self.format} {shape} by {self.kernel} (tile {tile}, {self.useful:.0%} useful{note})"


@functools.cache
def catalog() -> tuple[KernelConfig, ...]:
    configs = packaged_json("deepwell.planner", "catalog.json")["configs"]
    return tuple(decode(KernelConfig, item, f"catalog.json[{i}]") for i, item in enumerate(configs))


def choose_kernel(gemm: LocalGemm, gpu: Gpu, allowed: tuple[str, ...] | None = None) -> KernelChoice:
    """The configuration that wastes least on this shape; where the catalog has none, a line that says so."""
    op = "grouped_gemm" if gemm.role == "experts" else "gemm"
    fmt = gemm.formats[0]
    m, n, k, groups = max(1, round(gemm.m)), gemm.n, gemm.k, gemm.groups
    major = gpu.compute_capability[0] if gpu.compute_capability else None
    any_fits = [c for c in catalog() if c.op == op and fmt in c.formats and major in c.capability]
    fitting = [c for c in any_fits if allowed is None or c.name in allowed]
    shape = {"layer": gemm.name, "op": op, "format": fmt, "m": m, "n": n, "k": k, "groups": groups}
    if not fitting:
        why = "the CPU computes it by torch" if gpu.kind == "cpu" else f"no configuration of the catalog for {gpu.name}"
        why += " that the constraint kernels= leaves" if any_fits else ""
        return KernelChoice(**shape, kernel="torch", tile=(1, 1, 1), useful=1.0, note=why)  # type: ignore[arg-type]
    sms = gpu.num_sms or DEFAULT_SMS
    # max() keeps the first of equals, which is the one that the catalog prefers.
    best = max(fitting, key=lambda c: round(c.useful(m, n, groups, sms), 2))
    ragged = [name for name, size in (("n", n), ("k", k)) if size % best.alignment]
    note = f"{' and '.join(ragged)} padded to a multiple of {best.alignment}" if ragged else ""
    useful = best.useful(m, n, groups, sms)
    return KernelChoice(**shape, kernel=best.name, tile=best.tile, useful=useful, note=note)  # type: ignore[arg-type]


def kernel_choices(
    workload: Workload, layout: Layout, gpu: Gpu, allowed: tuple[str, ...] | None = None
) -> tuple[KernelChoice, ...]:
    """One choice for every distinct linear layer of the model's blocks on one rank, of the `allowed` configurations."""
    sizes = RankSizes(
        micro_batch=layout.micro_batch, seq_len=workload.seq_len, tp=layout.tp, cp=layout.cp, ep=layout.ep,
        etp=layout.etp, sequence_parallel=layout.sequence_parallel,
    )  # fmt: skip
    chosen: dict[tuple[str, int, int, int, str], KernelChoice] = {}
    for variant in workload.variants():
        block = local_block(workload.ir.blocks[variant.block].ops, variant.formats, sizes)
        for gemm in block.gemms:
            choice = choose_kernel(gemm, gpu, allowed)
            chosen.setdefault((choice.layer, choice.m, choice.n, choice.k, choice.format), choice)
    return tuple(chosen.values())
