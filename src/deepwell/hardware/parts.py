"""The parts of a machine: Gpu, Fabric, Host, and where each of their figures comes from.

Pure and frozen: no torch, no NVML, no files. Units stand in the names: `_bytes`, `_gb_per_s` (1e9 bytes a second),
`_tflops` (1e12 a second, dense), `_mhz`, `_w`. A figure that nobody knows is None, and `Hardware.notes` says why.

Every figure has a tier: "spec" (datasheet, driver or a formula over them), "table" (measured by others and shipped
here) or "measured" (on this very machine by `deepwell probe --measure`). Better tiers win.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from deepwell.errors import ConfigError
from deepwell.hardware.capability import (
    FORMATS,
    PEAK_CLASS,
    Capability,
    canonical_format,
    capability_of,
    reason_not_native,
)

Tier = Literal["spec", "table", "measured"]
_TIERS: tuple[Tier, ...] = ("measured", "table", "spec")  # best first


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the figure `figure` of a value comes from."""

    figure: str
    tier: Tier
    text: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its tier and source: what a planner multiplies with and what a report prints."""

    value: float
    tier: Tier
    source: str


@dataclass(frozen=True, slots=True)
class Peak:
    """Dense tensor-core peak of one rate class: fp32, tf32, bf16, fp8, fp6 or fp4."""

    rate: str
    tflops: float
    source: str


@dataclass(frozen=True, slots=True)
class GemmPoint:
    """One measured GEMM, C[m, n] = A[m, k] B[k, n], at 2*m*n*k flops."""

    m: int
    n: int
    k: int
    tflops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """GEMM speed by shape in one format: the points, and who measured them when."""

    format: str
    tier: Tier
    source: str
    points: tuple[GemmPoint, ...]


class _Sourced:
    """A part whose figures say where they come from."""

    __slots__ = ()
    sources: tuple[Origin, ...]

    def figure(self, name: str) -> Figure | None:
        """The numeric field `name` with its tier and source, or None where it is not known."""
        if name not in {f.name for f in dataclasses.fields(self)}:  # type: ignore[arg-type]
            raise ConfigError(f"name: a {type(self).__name__} has no figure {name!r}")
        value = getattr(self, name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        given = Origin(name, "spec", "given without a source")
        source = next((source for source in self.sources if source.figure == name), given)
        return Figure(value, source.tier, source.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu(_Sourced):
    """One device that can be planned for: an NVIDIA GPU (`kind="cuda"`) or, where there is none, the CPU."""

    name: str
    kind: Literal["cuda", "cpu"] = "cuda"
    machine: str | None = None  # the named machine whose constants were used
    index: int = 0
    uuid: str | None = None
    compute_capability: tuple[int, int] | None = None
    num_sms: int | None = None  # of a CPU: its cores
    memory_bytes: int | None = None
    memory_gb_per_s: float | None = None
    copy_gb_per_s: float | None = None  # achieved by a plain copy, bytes read plus bytes written
    l2_bytes: int | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    max_memory_clock_mhz: int | None = None
    power_limit_w: float | None = None
    driver: str | None = None
    cuda_driver: str | None = None
    mig_enabled: bool | None = None
    pci_bus_id: str | None = None
    numa_node: int | None = None
    instruction_sets: tuple[str, ...] = ()
    peaks: tuple[Peak, ...] = ()
    curves: tuple[Curve, ...] = ()
    unavailable: tuple[tuple[str, str], ...] = ()  # (format, reason) pairs that measuring found
    sources: tuple[Origin, ...] = ()

    @property
    def is_blackwell(self) -> bool:
        return self.compute_capability is not None and self.compute_capability[0] in (10, 11, 12)

    @property
    def is_hopper(self) -> bool:
        return self.compute_capability is not None and self.compute_capability[0] == 9

    @property
    def has_tcgen05(self) -> bool:
        """Tensor memory and tcgen05.mma: data-centre Blackwell and Thor, not the 12.x cards."""
        return self.compute_capability is not None and self.compute_capability[0] in (10, 11)

    @property
    def sm(self) -> str:
        """Its architecture as compilers name it, "sm_90"; "sm_?" where it is not known."""
        return "sm_" + ("?" if self.compute_capability is None else "".join(map(str, self.compute_capability)))

    @property
    def capability(self) -> Capability | None:
        return None if self.compute_capability is None else capability_of(self.compute_capability)

    @property
    def native_formats(self) -> tuple[str, ...]:
        """Formats its tensor cores multiply as stored. A CPU has fp32, and bf16 or fp16 if it has the instructions."""
        if self.kind == "cpu":
            has_bf16 = {"avx512_bf16", "amx_bf16", "bf16"} & set(self.instruction_sets)
            has_fp16 = {"avx512_fp16", "amx_fp16", "asimdhp"} & set(self.instruction_sets)
            return ("fp32", *(("bf16",) if has_bf16 else ()), *(("fp16",) if has_fp16 else ()))
        return () if self.capability is None else self.capability.native_formats

    def supports(self, format_name: str) -> bool:
        """True where `format_name` is native. Raises `ConfigError` for a name that is no format."""
        return not self.why_not(format_name)

    def why_not(self, format_name: str) -> str:
        """Why `format_name` is not native here; empty where it is. Raises `ConfigError` for what is no format."""
        exact = _known_format(format_name)
        if exact in self.native_formats:
            return ""
        if self.kind == "cpu":
            return f"a CPU runs {exact} by emulation only"
        if self.compute_capability is None:
            return "the compute capability is not known"
        return reason_not_native(exact, self.compute_capability)

    def peak_tflops(self, format_name: str) -> Figure | None:
        """The dense peak in `format_name`, or None where the format is not native or nobody published one."""
        exact = _known_format(format_name)
        if exact not in self.native_formats:
            return None
        for peak in self.peaks:
            if peak.rate == PEAK_CLASS[exact]:
                return Figure(peak.tflops, "spec", peak.source)
        return None

    def gemm_tflops(self, format_name: str, m: int, n: int, k: int) -> Figure | None:
        """The speed to expect of an (m, n, k) GEMM: from the best tier's curve, else the peak, else None.

        Between points: weights 1/d^2 in log2 of the shape, so a point itself is returned exactly and nothing leaves the
        range of the points. That range says nothing of launch time or of memory-bound shapes; a caller bounds those.
        """
        exact = _known_format(format_name)
        for curve in self._curves_for(exact):
            speed = _interpolate(curve.points, (m, n, k))
            borrowed = "" if curve.format == exact else f"{curve.format} stands in, at the same peak rate; "
            return Figure(speed, curve.tier, borrowed + curve.source)
        return self.peak_tflops(exact)

    def _curves_for(self, exact: str) -> list[Curve]:
        """Curves that tell of `exact`, best first: its own by tier, then one of its rate class, if it is native.

        Without the loan a format nobody timed would be planned at its peak and beat its timed sibling (mxfp8 and fp8).
        """
        known = [c for tier in _TIERS for c in self.curves if c.tier == tier and c.points]
        own = [c for c in known if c.format == exact]
        if own or exact not in self.native_formats:
            return own
        return [c for c in known if PEAK_CLASS.get(c.format) == PEAK_CLASS[exact]]

    def __str__(self) -> str:
        units = f"cpu, {self.num_sms or '?'} cores" if self.kind == "cpu" else f"{self.sm}, {self.num_sms or '?'} SMs"
        return f"{self.name} ({units}, {gib(self.memory_bytes)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Nic:
    """One network port and its speed in one direction."""

    name: str
    kind: Literal["ethernet", "infiniband"]
    gb_per_s: float | None = None
    state: str = ""
    numa_node: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """How GPUs `a` and `b` of one node reach each other: `nvlinks` bonded links, or the PCIe path between them."""

    a: int
    b: int
    nvlinks: int = 0
    path: str = "SYS"  # PIX, PXB, PHB, NODE, SYS as nvidia-smi names them

    @property
    def label(self) -> str:
        return f"NV{self.nvlinks}" if self.nvlinks else self.path


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric(_Sourced):
    """NVLink inside a domain, PCIe to the host, NICs between nodes. Bandwidths are one direction, per GPU."""

    nvlink_domain: int = 1  # GPUs that reach each other by NVLink; may span nodes (NVL72)
    nvswitch: bool = False
    nvlinks_per_gpu: int = 0
    nvlink_gb_per_s: float | None = None
    allreduce_gb_per_s: float | None = None  # bus bandwidth that NCCL's all-reduce reached inside the domain
    pcie_gen: int | None = None
    pcie_width: int | None = None
    pcie_gb_per_s: float | None = None
    nic_gb_per_s: float | None = None  # per GPU
    links: tuple[Link, ...] = ()  # pairs of one node, a < b; empty where NVSwitch joins every pair
    nics: tuple[Nic, ...] = ()
    sources: tuple[Origin, ...] = ()

    def link(self, a: int, b: int) -> str:
        """`X`, `NV18`, `PIX`, ...: how GPUs `a` and `b` of one node are joined; `?` where nobody knows."""
        if a == b:
            return "X"
        for link in self.links:
            if {link.a, link.b} == {a, b}:
                return link.label
        return f"NV{self.nvlinks_per_gpu}" if self.nvswitch and self.nvlinks_per_gpu else "?"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The computer around the GPUs of one node."""

    cpu: str = ""
    num_cores: int | None = None
    num_threads: int | None = None
    num_sockets: int | None = None
    max_mhz: float | None = None
    memory_bytes: int | None = None
    instruction_sets: tuple[str, ...] = ()
    os: str = ""


def gib(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def _known_format(name: str) -> str:
    exact = canonical_format(name)
    if exact is None:
        raise ConfigError(f"format: got {name!r}; accepted: {', '.join(FORMATS)}, fp8, fp4")
    return exact


def _interpolate(points: tuple[GemmPoint, ...], shape: tuple[int, int, int]) -> float:
    if min(shape) < 1:
        raise ConfigError(f"m, n, k: got {shape}; each is at least 1")
    total = weights = 0.0
    for p in points:
        distance = sum(math.log2(a / b) ** 2 for a, b in zip(shape, (p.m, p.n, p.k), strict=True))
        if distance == 0:
            return p.tflops
        total += p.tflops / distance
        weights += 1 / distance
    return total / weights
