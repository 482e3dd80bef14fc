"""A machine or a cluster, as a value, JSON and a table. Pure and frozen: no torch, no NVML, no files."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from deepwell.errors import ConfigError
from deepwell.graph.table import text_table
from deepwell.hardware.capability import FORMATS
from deepwell.hardware.codec import JsonValue, decode, encode
from deepwell.hardware.parts import Fabric, Figure, Gpu, Host, gib

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware(JsonValue):
    """A machine or a cluster of equal nodes. `gpus` are the devices of one node; `num_nodes` says how many nodes.

    Prints as a table and round-trips through JSON, so a plan made on a laptop can name the cluster it was made for.
    """

    name: str
    gpus: tuple[Gpu, ...]
    fabric: Fabric = field(default_factory=Fabric)
    num_nodes: int = 1
    host: Host | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.gpus:
            raise ConfigError("gpus: a machine needs at least one device; without a GPU that is the CPU")
        if self.num_nodes < 1:
            raise ConfigError(f"num_nodes: got {self.num_nodes}; at least 1")

    @property
    def gpus_per_node(self) -> int:
        return len(self.gpus)

    @property
    def num_gpus(self) -> int:
        return len(self.gpus) * self.num_nodes

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        return self.gpus[0].kind

    @property
    def nvlink_domain(self) -> int:
        """GPUs that reach each other by NVLink: 8 on an HGX board, 72 in an NVL72 rack, 1 without NVLink."""
        return min(self.fabric.nvlink_domain, self.num_gpus)

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the smallest GPU: what every rank of an even plan has."""
        sizes = [gpu.memory_bytes for gpu in self.gpus if gpu.memory_bytes is not None]
        return min(sizes) if len(sizes) == len(self.gpus) else None

    @property
    def total_memory_bytes(self) -> int | None:
        sizes = [gpu.memory_bytes or 0 for gpu in self.gpus]
        return None if self.memory_bytes is None else sum(sizes) * self.num_nodes

    @property
    def native_formats(self) -> tuple[str, ...]:
        """Formats that every GPU runs natively."""
        return tuple(f for f in FORMATS if all(f in gpu.native_formats for gpu in self.gpus))

    def supports(self, format_name: str) -> bool:
        """True where every GPU runs `format_name` natively. Raises `ConfigError` for a name that is no format."""
        return all(gpu.supports(format_name) for gpu in self.gpus)

    def group_gb_per_s(self, size: int, stride: int = 1) -> Figure | None:
        """Bandwidth per GPU and direction of a group of `size` ranks, `stride` apart: the slowest link that it crosses.

        Ranks are numbered node by node, so neighbours are close: where every such group lies inside an NVLink domain it
        gets NVLink, inside a node PCIe, else the NIC. None where that figure is not known, or for a group of one.
        """
        if size < 1 or stride < 1 or (size - 1) * stride >= self.num_gpus:
            raise ConfigError(f"size, stride: {size} ranks {stride} apart do not fit into {self.num_gpus} GPUs")
        if size == 1:
            return None
        block = size * stride  # groups repeat in blocks of this many ranks; some cross a border that it does not divide

        def inside(unit: int) -> bool:
            return self.num_gpus <= unit or unit % block == 0

        if inside(self.nvlink_domain):
            return self.fabric.figure("nvlink_gb_per_s")
        return self.fabric.figure("pcie_gb_per_s" if inside(self.gpus_per_node) else "nic_gb_per_s")

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **encode(self)}

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: object) -> "Hardware":
        """The value behind `to_dict`'s output. Raises `ConfigError` for anything else."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ConfigError(f"data: expected a Hardware object of schema {SCHEMA}, got {found!r}; probe again")
        return decode(cls, {key: value for key, value in data.items() if key != "schema"}, "hardware")

    def __str__(self) -> str:
        connections = _connections(self)
        lines = [_heading(self), "", *_devices(self), "", *_speeds(self), "", *_formats(self)]
        lines += ["", *connections] if connections else []
        lines += ["", *_topology(self)] if 1 < self.gpus_per_node <= 16 else []
        lines += ["", "notes", *(f"  - {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines)


# ---- as text ----


def _topology(hw: Hardware) -> list[str]:
    """The matrix of how the GPUs of one node are joined, with each GPU's NUMA node."""
    indices = range(hw.gpus_per_node)
    rows = [["", *(f"GPU{i}" for i in indices), "NUMA"]]
    for a in indices:
        numa = hw.gpus[a].numa_node
        rows.append([f"GPU{a}", *(hw.fabric.link(a, b) for b in indices), "?" if numa is None else str(numa)])
    return text_table(rows, indent="")


def _heading(hw: Hardware) -> str:
    if hw.kind == "cpu":
        return f"{hw.name}: no GPU, planning for the CPU"
    nodes = f"{hw.num_nodes} node{'s' if hw.num_nodes > 1 else ''} of {hw.gpus_per_node}"
    return (
        f"{hw.name}: {hw.num_gpus} GPU{'s' if hw.num_gpus > 1 else ''} ({nodes}), {gib(hw.total_memory_bytes)} in all"
    )


def _devices(hw: Hardware) -> list[str]:
    # Equal GPUs are one row: a node of eight is read at a glance.
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, gpu in enumerate(hw.gpus):
        key = (gpu.name, gpu.compute_capability, gpu.memory_bytes, gpu.max_sm_clock_mhz, gpu.power_limit_w, gpu.driver)
        groups.setdefault((*key, gpu.mig_enabled), []).append(i)
    rows = [["device", "name", "arch", "cores" if hw.kind == "cpu" else "SMs", "memory", "clock", "power", "driver"]]
    for members in groups.values():
        gpu = hw.gpus[members[0]]
        span = f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0])
        clock = "?" if gpu.max_sm_clock_mhz is None else f"{gpu.max_sm_clock_mhz} MHz"
        power = "?" if gpu.power_limit_w is None else f"{gpu.power_limit_w:.0f} W"
        arch = "cpu" if gpu.kind == "cpu" else gpu.sm + (" MIG" if gpu.mig_enabled else "")
        rows.append(
            [span, gpu.name, arch, str(gpu.num_sms or "?"), gib(gpu.memory_bytes), clock, power, gpu.driver or "-"]
        )
    return text_table(rows, indent="")


def _speeds(hw: Hardware) -> list[str]:
    gpu = hw.gpus[0]
    rows = [["figure", "value", "tier", "source"]]
    for label, figure, unit in (
        ("memory bandwidth", gpu.figure("memory_gb_per_s"), "GB/s"),
        ("copy, read + write", gpu.figure("copy_gb_per_s"), "GB/s"),
        *((f"{peak.rate} peak, dense", Figure(peak.tflops, "spec", peak.source), "TFLOP/s") for peak in gpu.peaks),
    ):
        if figure is not None:
            rows.append([label, _number(figure.value, unit), figure.tier, _short(figure.source)])
    for curve in (c for c in gpu.curves if c.points):
        speeds = [p.tflops for p in curve.points]
        high = _number(max(speeds), "TFLOP/s")
        span = high if min(speeds) == max(speeds) else f"{_number(min(speeds), '')}-{high}"
        shapes = f"{len(curve.points)} shape{'s' if len(curve.points) > 1 else ''}"
        rows.append([f"{curve.format} GEMM, {shapes}", span, curve.tier, _short(curve.source)])
    rows += [[f"{name} GEMM", "not available", "measured", _short(reason)] for name, reason in gpu.unavailable]
    return text_table(rows, indent="") if len(rows) > 1 else ["no speeds known: run `deepwell probe --measure`"]


def _formats(hw: Hardware) -> list[str]:
    native = ", ".join(hw.native_formats) or "none known"
    others = ", ".join(f for f in FORMATS if f not in hw.native_formats)
    lines = [f"native formats   {native}", f"not native       {others or 'none'}"]
    capability = hw.gpus[0].capability
    if capability is not None and capability.note:
        lines.append(f"                 {capability.architecture}: {capability.note}")
    return lines


def _connections(hw: Hardware) -> list[str]:
    fabric = hw.fabric
    rows = [["connection", "per GPU, one direction", "tier", "source"]]
    for label, name in (
        (f"NVLink, domain of {hw.nvlink_domain}{', NVSwitch' if fabric.nvswitch else ''}", "nvlink_gb_per_s"),
        ("all-reduce inside the domain, bus bandwidth", "allreduce_gb_per_s"),
        (f"host link{f', PCIe {fabric.pcie_gen} x{fabric.pcie_width}' if fabric.pcie_gen else ''}", "pcie_gb_per_s"),
        ("network", "nic_gb_per_s"),
    ):
        figure = fabric.figure(name)
        if figure is not None and (hw.nvlink_domain > 1 or name in ("pcie_gb_per_s", "nic_gb_per_s")):
            rows.append([label, _number(figure.value, "GB/s"), figure.tier, _short(figure.source)])
    for nic in fabric.nics:
        rows.append([f"{nic.name} ({nic.kind}{', ' + nic.state if nic.state else ''})",
                     "?" if nic.gb_per_s is None else _number(nic.gb_per_s, "GB/s"), "spec", "/sys"])  # fmt: skip
    return text_table(rows, indent="") if len(rows) > 1 else []


def _number(value: float, unit: str) -> str:
    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def _short(source: str) -> str:
    return source if len(source) <= 72 else source[:69] + "..."
