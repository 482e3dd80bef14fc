"""Reads NVIDIA GPUs and their links through NVML; whatever a call refuses becomes None and a note, never a crash.

NVML fails in pieces: inside a container a call may be forbidden, on MIG slices and virtual GPUs unsupported, with an
old driver missing. So each call stands alone.
"""

import dataclasses
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

from deepwell.hardware.host import numa_node
from deepwell.hardware.names import Machine, machine_of_device, machines
from deepwell.hardware.parts import Fabric, Gpu, Link, Origin, Peak

# fp32 lanes per SM (CUDA C++ Programming Guide, throughput of arithmetic instructions): NVML counts lanes, not SMs.
_LANES_PER_SM = {(8, 0): 64}
_DEFAULT_LANES_PER_SM = 128
# One direction, per link (stas00/ml-engineering @744d01e network/README.md, NVLink table). By compute capability, as
# drivers disagree on what NVML's link version means, and some report a Hopper's links as NVLink 5.
_NVLINK_GB_PER_S = {(7, 0): 25.0, (8, 0): 25.0, (9, 0): 25.0, (10, 0): 50.0, (10, 3): 50.0}
# Per lane and direction after encoding, by PCIe generation (same source: x16 gives 31, 63, 121 GB/s).
_PCIE_GB_PER_S_PER_LANE = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}

_PATHS = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # NVML's topology levels

# Whose peaks an unknown GPU of the same architecture is scaled from: the full-power part of each.
_REFERENCES = {(8, 0): "a100-80", (9, 0): "h100", (10, 0): "b200", (10, 3): "b300"}


@dataclasses.dataclass(kw_only=True, slots=True)
class NvmlReading:
    """What NVML said: the GPUs, how they are joined, and what it would not say."""

    gpus: list[Gpu]
    fabric: Fabric
    notes: list[str]


class NvmlReader:
    """One walk over NVML. `nvml` is the pynvml module, or anything with its functions and errors."""

    def __init__(self, nvml: ModuleType | Any, root: Path = Path("/")) -> None:
        self.nvml = nvml
        self.root = root
        self.notes: list[str] = []
        self._refused: dict[str, tuple[str, list[int]]] = {}

    def read(self, visible: str | None = None) -> NvmlReading:
        """The GPUs that NVML shows and `visible` (CUDA_VISIBLE_DEVICES) admits. `nvml` must be initialised."""
        count = self._ask("GPU count", None, "nvmlDeviceGetCount") or 0
        handles = {i: self._ask("GPU handle", i, "nvmlDeviceGetHandleByIndex", i) for i in range(count)}
        found = {i: handle for i, handle in handles.items() if handle is not None}
        if visible is not None:
            found = self._visible(found, visible)
        gpus = [self._gpu(i, handle) for i, handle in found.items()]
        fabric = self._fabric(list(found.values()), gpus)
        for what, (reason, indices) in self._refused.items():
            where = f" of GPU {', '.join(map(str, indices))}" if indices else ""
            self.notes.append(f"{what}{where} is not known: NVML answered: {reason}")
        return NvmlReading(gpus=gpus, fabric=fabric, notes=self.notes)

    def _visible(self, handles: dict[int, Any], visible: str) -> dict[int, Any]:
        """As CUDA reads the variable: indices or UUID prefixes, in that order, up to the first that does not exist."""
        uuids = {i: _string(self._quiet("nvmlDeviceGetUUID", handle)) or "" for i, handle in handles.items()}
        chosen: dict[int, Any] = {}
        for raw in visible.split(","):
            token = raw.strip()
            matches = [
                i for i in handles if token == str(i) or (token.startswith("GPU-") and uuids[i].startswith(token))
            ]
            if len(matches) != 1:
                if token.startswith("MIG-"):
                    self.notes.append(f"CUDA_VISIBLE_DEVICES names the MIG slice {token}: slices are not read")
                break
            chosen[matches[0]] = handles[matches[0]]
        hidden = len(handles) - len(chosen)
        if hidden:
            self.notes.append(f"CUDA_VISIBLE_DEVICES={visible!r} hides {hidden} of {len(handles)} GPUs")
        return chosen

    def _ask(self, what: str, index: int | None, name: str, *arguments: Any) -> Any:
        """The call's answer, or None with the reason kept for the notes; without words for it, no note."""
        call = getattr(self.nvml, name, None)
        try:
            if call is not None:
                return call(*arguments)
            reason = "this nvidia-ml-py does not have the call"
        except self.nvml.NVMLError as error:
            reason = str(error) or type(error).__name__
        if what:
            self._refuse(what, index, reason)
        return None

    def _quiet(self, name: str, *arguments: Any) -> Any:
        """An answer whose absence is ordinary (a GPU without NVLink refuses all of these) and needs no note."""
        return self._ask("", None, name, *arguments)

    def _refuse(self, what: str, index: int | None, reason: str) -> None:
        _, indices = self._refused.setdefault(what, (reason, []))
        if index is not None and index not in indices:
            indices.append(index)

    def _gpu(self, i: int, handle: Any) -> Gpu:
        ask = self._ask
        clock_sm = getattr(self.nvml, "NVML_CLOCK_SM", 1)
        clock_memory = getattr(self.nvml, "NVML_CLOCK_MEM", 2)
        name = _string(ask("name", i, "nvmlDeviceGetName", handle)) or "unknown NVIDIA GPU"
        memory = ask("memory", i, "nvmlDeviceGetMemoryInfo", handle)
        cc = ask("compute capability", i, "nvmlDeviceGetCudaComputeCapability", handle)
        lanes = ask("SM count", i, "nvmlDeviceGetNumGpuCores", handle)
        per_sm = 1 if cc is None else _LANES_PER_SM.get((int(cc[0]), int(cc[1])), _DEFAULT_LANES_PER_SM)
        cuda = ask("CUDA driver version", None, "nvmlSystemGetCudaDriverVersion_v2")
        limit = ask("power limit", i, "nvmlDeviceGetEnforcedPowerLimit", handle)
        pci = ask("PCI address", i, "nvmlDeviceGetPciInfo", handle)
        bus = None if pci is None else _string(pci.busId)
        gpu = Gpu(
            name=name,
            index=i,
            uuid=_string(ask("UUID", i, "nvmlDeviceGetUUID", handle)),
            compute_capability=None if cc is None else (int(cc[0]), int(cc[1])),
            num_sms=int(lanes) // per_sm if lanes and cc is not None else None,
            memory_bytes=None if memory is None else int(memory.total),
            sm_clock_mhz=ask("SM clock", i, "nvmlDeviceGetClockInfo", handle, clock_sm),
            max_sm_clock_mhz=ask("maximum SM clock", i, "nvmlDeviceGetMaxClockInfo", handle, clock_sm),
            memory_clock_mhz=ask("memory clock", i, "nvmlDeviceGetClockInfo", handle, clock_memory),
            max_memory_clock_mhz=ask("maximum memory clock", i, "nvmlDeviceGetMaxClockInfo", handle, clock_memory),
            power_limit_w=None if limit is None else limit / 1000,
            driver=_string(ask("driver version", None, "nvmlSystemGetDriverVersion")),
            cuda_driver=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            mig_enabled=self._mig(i, handle),
            pci_bus_id=bus,
            numa_node=None if bus is None else numa_node(bus, self.root),
        )
        return self._with_speeds(gpu, handle)

    def _mig(self, i: int, handle: Any) -> bool | None:
        """MIG mode; a GPU without the feature answers NotSupported, which is a plain no and no note."""
        if not hasattr(self.nvml, "nvmlDeviceGetMigMode"):
            return None
        try:
            return bool(self.nvml.nvmlDeviceGetMigMode(handle)[0])
        except self.nvml.NVMLError_NotSupported:
            return False
        except self.nvml.NVMLError as error:
            self._refuse("MIG mode", i, str(error) or type(error).__name__)
            return None

    def _with_speeds(self, gpu: Gpu, handle: Any) -> Gpu:
        """Adds bandwidth, peaks and curves: of the machine that the name stands for, else by formula from NVML."""
        sources = [Origin(f, "spec", "NVML") for f in ("memory_bytes", "num_sms", "power_limit_w")]
        sources += [Origin(f"max_{unit}_clock_mhz", "spec", "NVML") for unit in ("sm", "memory")]
        machine = machine_of_device(gpu.name, gpu.memory_bytes)
        gpu = dataclasses.replace(gpu, machine=machine.name if machine else None)
        if gpu.mig_enabled:
            self.notes.append(
                f"GPU {gpu.index} is in MIG mode: a slice has a part of its speed, so no speeds are given"
            )
            return dataclasses.replace(gpu, sources=tuple(sources))
        if machine is not None:
            return _as_machine(gpu, machine, sources)
        self.notes.append(f"GPU {gpu.index} is called {gpu.name!r}, which is no known machine: speeds are derived")
        width = self._ask("memory bus width", gpu.index, "nvmlDeviceGetMemoryBusWidth", handle)
        bandwidth = None
        if width and gpu.max_memory_clock_mhz:
            bandwidth = gpu.max_memory_clock_mhz * 1e6 * (width / 8) * 2 / 1e9
            text = f"derived: {gpu.max_memory_clock_mhz} MHz x {width} bit x 2 / 8"
            sources.append(Origin("memory_gb_per_s", "spec", text))
        return dataclasses.replace(gpu, memory_gb_per_s=bandwidth, peaks=scaled_peaks(gpu), sources=tuple(sources))

    def _fabric(self, handles: list[Any], gpus: list[Gpu]) -> Fabric:
        links, per_gpu, switched = self._nvlinks(handles, gpus)
        if switched and per_gpu:
            links = {pair: max(links.get(pair, 0), per_gpu) for pair in itertools.combinations(range(len(gpus)), 2)}
        sources = []
        bandwidth = None
        per_link = _NVLINK_GB_PER_S.get(gpus[0].compute_capability or (0, 0)) if gpus else None
        if per_gpu and per_link is not None:
            bandwidth = per_gpu * per_link
            text = f"derived: {per_gpu} active NVLink links x {per_link:g} GB/s"
            machine = machines().get((gpus[0].machine or "").lower())
            known = machine.constant("nvlink_gb_per_s") if machine else None
            if known is not None and known.value < bandwidth:  # H800: the links are all there, but slower
                bandwidth, text = known.value, known.source
            sources.append(Origin("nvlink_gb_per_s", "spec", text))
        pcie = self._pcie(handles[0]) if handles else {}
        if "pcie_gb_per_s" in pcie:
            sources.append(Origin("pcie_gb_per_s", "spec", "derived: generation and width that NVML reports"))
        pairs = []
        for a, b in itertools.combinations(range(len(gpus)), 2):
            level = self._ask("PCIe topology", None, "nvmlDeviceGetTopologyCommonAncestor", handles[a], handles[b])
            pairs.append(Link(a=a, b=b, nvlinks=links.get((a, b), 0), path=_PATHS.get(level, "?")))
        return Fabric(
            nvlink_domain=largest_group(len(gpus), [pair for pair, count in links.items() if count]),
            nvswitch=switched,
            nvlinks_per_gpu=per_gpu,
            nvlink_gb_per_s=bandwidth,
            links=tuple(pairs),
            sources=tuple(sources),
            **pcie,
        )

    def _nvlinks(self, handles: list[Any], gpus: list[Gpu]) -> tuple[dict[tuple[int, int], int], int, bool]:
        """(links per pair, active links of the poorest GPU, whether a switch is behind them)."""
        by_bus = {gpu.pci_bus_id.lower(): i for i, gpu in enumerate(gpus) if gpu.pci_bus_id}
        pairs: dict[tuple[int, int], int] = {}
        counts, switched = [], False
        most = getattr(self.nvml, "NVML_NVLINK_MAX_LINKS", 18)
        for a, handle in enumerate(handles):
            active = [link for link in range(most) if self._quiet("nvmlDeviceGetNvLinkState", handle, link)]
            counts.append(len(active))
            for link in active:
                remote = self._quiet("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
                b = None if remote is None else by_bus.get((_string(remote.busId) or "").lower())
                if b is None:
                    kind = None if switched else self._quiet("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
                    switched = switched or kind == getattr(self.nvml, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2)
                elif a < b:
                    pairs[a, b] = pairs.get((a, b), 0) + 1
        return pairs, min(counts, default=0), switched

    def _pcie(self, handle: Any) -> dict[str, Any]:
        # The current generation drops while idle, so the maximum of GPU and slot is the figure to plan with.
        gen = self._ask("PCIe generation", 0, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
        width = self._ask("PCIe width", 0, "nvmlDeviceGetMaxPcieLinkWidth", handle)
        if gen is None or width is None:
            return {}
        speed = _PCIE_GB_PER_S_PER_LANE.get(gen)
        known = {} if speed is None else {"pcie_gb_per_s": round(speed * width, 1)}
        return {"pcie_gen": gen, "pcie_width": width, **known}


def scaled_peaks(gpu: Gpu) -> tuple[Peak, ...]:
    """Peaks of an unknown GPU: those of a known one of its compute capability, by the ratio of their SMs."""
    machine = machines().get(_REFERENCES.get(gpu.compute_capability or (0, 0), ""))
    sms = None if machine is None else machine.constant("num_sms")
    if not gpu.num_sms or machine is None or sms is None:
        return ()
    ratio = gpu.num_sms / sms.value
    text = f"derived: {machine.name}'s peak x {gpu.num_sms} / {sms.value:.0f} SMs"
    return tuple(Peak(p.rate, round(p.tflops * ratio, 1), text) for p in machine.peaks)


def largest_group(count: int, pairs: list[tuple[int, int]]) -> int:
    """Size of the largest set of GPUs that NVLink joins directly or through others."""
    group = list(range(count))
    for a, b in pairs:
        old, new = group[b], group[a]
        group = [new if g == old else g for g in group]
    return max((group.count(g) for g in group), default=1)


def _as_machine(gpu: Gpu, machine: Machine, sources: list[Origin]) -> Gpu:
    model = machine.gpu()
    taken = {name: getattr(model, name) for name in ("memory_gb_per_s", "copy_gb_per_s", "l2_bytes")}
    taken |= {"num_sms": model.num_sms} if gpu.num_sms is None else {}
    have = {source.figure for source in sources} - set(taken)
    kept = [s for s in sources if s.figure in have] + [s for s in model.sources if s.figure in taken]
    return dataclasses.replace(gpu, peaks=model.peaks, curves=model.curves, sources=tuple(kept), **taken)


def _string(value: Any) -> str | None:
    """NVML bindings give bytes or str by version."""
    if value is None:
        return None
    text = value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
    return text.rstrip("\0").strip() or None
