"""Prints a machine: one line per GPU, the topology matrix, the formats, and what is missing."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepwell.hardware.capability import FORMATS

if TYPE_CHECKING:
    from deepwell.hardware.model import Figure, Gpu, Hardware


def gib(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as left-aligned columns; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def gpu_line(gpu: "Gpu") -> str:
    """The device in one line."""
    if gpu.kind == "cpu":
        return f"{gpu.name} (cpu, {gpu.num_sms or '?'} cores, {gib(gpu.memory_bytes)})"
    return f"{gpu.name} (sm_{_cc(gpu, '')}, {gpu.num_sms or '?'} SMs, {gib(gpu.memory_bytes)})"


def hardware_table(hw: "Hardware") -> str:
    """The whole machine as text: heading, devices, speeds, formats, connections, notes."""
    lines = [_heading(hw), "", *_devices(hw), "", *_speeds(hw), "", *_formats(hw)]
    connections = _connections(hw)
    if connections:
        lines += ["", *connections]
    if 1 < hw.gpus_per_node <= 16:
        lines += ["", *topology(hw)]
    if hw.notes:
        lines += ["", "notes", *(f"  - {note}" for note in hw.notes)]
    return "\n".join(lines)


def topology(hw: "Hardware") -> list[str]:
    """The matrix of how the GPUs of one node are joined, with each GPU's NUMA node."""
    indices = range(hw.gpus_per_node)
    rows = [["", *(f"GPU{i}" for i in indices), "NUMA"]]
    for a in indices:
        numa = hw.gpus[a].numa_node
        rows.append([f"GPU{a}", *(hw.fabric.link(a, b) for b in indices), "?" if numa is None else str(numa)])
    return table(rows)


def _heading(hw: "Hardware") -> str:
    if hw.kind == "cpu":
        return f"{hw.name}: no GPU, planning for the CPU"
    nodes = f"{hw.num_nodes} node{'s' if hw.num_nodes > 1 else ''} of {hw.gpus_per_node}"
    return (
        f"{hw.name}: {hw.num_gpus} GPU{'s' if hw.num_gpus > 1 else ''} ({nodes}), {gib(hw.total_memory_bytes)} in all"
    )


def _devices(hw: "Hardware") -> list[str]:
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
        arch = "cpu" if gpu.kind == "cpu" else f"sm_{_cc(gpu, '')}" + (" MIG" if gpu.mig_enabled else "")
        rows.append(
            [span, gpu.name, arch, str(gpu.num_sms or "?"), gib(gpu.memory_bytes), clock, power, gpu.driver or "-"]
        )
    return table(rows)


def _speeds(hw: "Hardware") -> list[str]:
    gpu = hw.gpus[0]
    rows = [["figure", "value", "tier", "source"]]
    for label, figure, unit in (
        ("memory bandwidth", gpu.figure("memory_gb_per_s"), "GB/s"),
        ("copy, read + write", gpu.figure("copy_gb_per_s"), "GB/s"),
        *((f"{peak.rate} peak, dense", _peak(peak.tflops, peak.source), "TFLOP/s") for peak in gpu.peaks),
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
    return table(rows) if len(rows) > 1 else ["no speeds known: run `deepwell probe --measure`"]


def _peak(tflops: float, source: str) -> "Figure":
    from deepwell.hardware.model import Figure

    return Figure(value=tflops, tier="spec", source=source)


def _formats(hw: "Hardware") -> list[str]:
    native = ", ".join(hw.native_formats) or "none known"
    others = ", ".join(f for f in FORMATS if f not in hw.native_formats)
    lines = [f"native formats   {native}", f"not native       {others or 'none'}"]
    capability = hw.gpus[0].capability
    if capability is not None and capability.note:
        lines.append(f"                 {capability.architecture}: {capability.note}")
    return lines


def _connections(hw: "Hardware") -> list[str]:
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
    return table(rows) if len(rows) > 1 else []


def _number(value: float, unit: str) -> str:
    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def _short(source: str) -> str:
    return source if len(source) <= 72 else source[:69] + "..."


def _cc(gpu: "Gpu", separator: str) -> str:
    return "?" if gpu.compute_capability is None else separator.join(map(str, gpu.compute_capability))
