"""Reads the computer itself: processor, memory, network ports. On Linux from plain files, else from Python.

Every reader takes the root folder as an argument, so tests hand in a folder of their own.
"""

import os
import platform
from pathlib import Path

from deepwell.hardware.parts import Gpu, Host, Nic, Origin, Peak

# What a planner or a kernel asks for, out of the hundred flags that /proc/cpuinfo lists.
_INTERESTING = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile",
    "amx_bf16", "amx_fp16", "amx_int8", "asimd", "asimdhp", "asimddp", "sve", "sve2", "bf16", "i8mm",
)  # fmt: skip
_VIRTUAL_PORTS = (
    "lo", "docker", "veth", "br-", "virbr", "tun", "tap", "dummy", "bond", "kube", "cni", "flannel", "cali",
)  # fmt: skip


def read_host(root: Path = Path("/")) -> Host:
    """This computer's processor, memory and system; a field that cannot be read is None or empty."""
    blocks = _cpuinfo(root)
    first = blocks[0] if blocks else {}
    flags = set((first.get("flags") or first.get("Features") or "").split())
    sockets = {block["physical id"] for block in blocks if "physical id" in block}
    cores = {(block.get("physical id"), block["core id"]) for block in blocks if "core id" in block}
    return Host(
        cpu=first.get("model name") or first.get("Processor") or platform.processor() or platform.machine(),
        num_cores=len(cores) or (len(blocks) or None) or os.cpu_count(),
        num_threads=len(blocks) or os.cpu_count(),
        num_sockets=len(sockets) or None,
        max_mhz=_max_mhz(root, first),
        memory_bytes=_memory_bytes(root),
        instruction_sets=tuple(name for name in _INTERESTING if name in flags),
        os=f"{platform.system()} {platform.release()}",
    )


def cpu_device(host: Host) -> Gpu:
    """The CPU as a device to plan for. Its speeds are formulas until `deepwell probe --measure` has run."""
    cores = _usable_cores(host)
    lanes = 16 if "avx512f" in host.instruction_sets else 8 if "avx2" in host.instruction_sets else 4
    peaks: tuple[Peak, ...] = ()
    if cores and host.max_mhz:
        formula = f"derived: {cores} cores x {host.max_mhz:.0f} MHz x {lanes} fp32 lanes x 2, one FMA unit a core"
        peaks = (Peak("fp32", cores * host.max_mhz * 1e6 * lanes * 2 / 1e12, formula),)
    sources = (
        Origin("num_sms", "spec", "cores this process may use"),
        Origin("memory_bytes", "spec", "memory of this computer or of its container"),
        # The count and speed of the memory channels cannot be read without privileges: one common channel stands in.
        Origin(
            "memory_gb_per_s",
            "spec",
            "derived: one DDR4-3200 channel, 3200e6 x 8 bytes; measure to know",
        ),
    )
    return Gpu(
        name=host.cpu or "CPU",
        kind="cpu",
        num_sms=cores,
        memory_bytes=host.memory_bytes,
        memory_gb_per_s=25.6,
        max_sm_clock_mhz=None if host.max_mhz is None else round(host.max_mhz),
        instruction_sets=host.instruction_sets,
        peaks=peaks,
        sources=sources,
    )


def read_nics(root: Path = Path("/")) -> tuple[Nic, ...]:
    """The network ports that are real, with their speed: InfiniBand first, then Ethernet."""
    return _infiniband(root / "sys/class/infiniband") + _ethernet(root / "sys/class/net")


def numa_node(pci_bus_id: str, root: Path = Path("/")) -> int | None:
    """NUMA node of a PCI device. NVML writes the domain with eight digits, /sys with four."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    return _numa(root / f"sys/bus/pci/devices/{domain[-4:]}:{rest}")


def _usable_cores(host: Host) -> int | None:
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
        return min(allowed, host.num_cores) if host.num_cores else allowed
    return host.num_cores


def _cpuinfo(root: Path) -> list[dict[str, str]]:
    text = _text(root / "proc/cpuinfo")
    blocks = []
    for block in text.split("\n\n") if text else []:
        pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
        found = {key.strip(): value.strip() for key, _, value in pairs}
        if "processor" in found:
            blocks.append(found)
    return blocks


def _max_mhz(root: Path, cpu: dict[str, str]) -> float | None:
    khz = _number(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    if khz is not None:
        return khz / 1000
    try:
        return float(cpu["cpu MHz"])
    except (KeyError, ValueError):
        return None


def _memory_bytes(root: Path) -> int | None:
    total = None
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:") and line.split()[1].isdigit():
            total = int(line.split()[1]) * 1024
    if total is None and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A container may be allowed less than the computer has (cgroup v2, then v1).
    limits = [_number(root / "sys/fs/cgroup/memory.max"), _number(root / "sys/fs/cgroup/memory/memory.limit_in_bytes")]
    known = [size for size in (total, *limits) if size is not None and size > 0]
    return min(known) if known else None


def _infiniband(folder: Path) -> tuple[Nic, ...]:
    nics = []
    for device in _children(folder):
        for port in _children(device / "ports"):
            rate = (_text(port / "rate") or "").split()  # "400 Gb/sec (4X NDR)"
            state = (_text(port / "state") or "").partition(":")[2].strip().lower()  # "4: ACTIVE"
            speed = float(rate[0]) / 8 if rate and rate[0].replace(".", "", 1).isdigit() else None
            name = f"{device.name}:{port.name}"
            nics.append(
                Nic(name=name, kind="infiniband", gb_per_s=speed, state=state, numa_node=_numa(device / "device"))
            )
    return tuple(nics)


def _ethernet(folder: Path) -> tuple[Nic, ...]:
    nics = []
    for device in _children(folder):
        # Only a port with a device behind it is hardware; bridges and tunnels have none.
        if device.name.startswith(_VIRTUAL_PORTS) or not (device / "device").exists():
            continue
        mbit = _number(device / "speed")  # -1 where the link is down or the driver is virtual
        speed = mbit / 8000 if mbit is not None and mbit > 0 else None
        state = (_text(device / "operstate") or "").strip()
        nics.append(
            Nic(name=device.name, kind="ethernet", gb_per_s=speed, state=state, numa_node=_numa(device / "device"))
        )
    return tuple(nics)


def _numa(device: Path) -> int | None:
    node = _number(device / "numa_node")
    return node if node is not None and node >= 0 else None


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None
