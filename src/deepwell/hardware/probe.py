"""probe(): what hardware there is, here or under a name. Reads NVML, /proc and /sys; imports torch only if it must.

    probe()                 this machine; without a GPU its one device is the CPU
    probe("8xB200")         a named machine, see names.py for the grammar

Figures measured before on this machine (`deepwell probe --measure`) are read from the cache and win over the tables.
"""

import contextlib
import dataclasses
import importlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from deepwell.hardware.cache import read_measurement
from deepwell.hardware.host import cpu_device, read_host, read_nics
from deepwell.hardware.model import Hardware
from deepwell.hardware.names import machine_of_device, machines, named_hardware
from deepwell.hardware.nvml import NvmlReader, NvmlReading, scaled_peaks
from deepwell.hardware.parts import Fabric, Gpu, Nic, Origin

__all__ = ["Fabric", "Gpu", "Hardware", "probe"]


def probe(
    name: str | None = None,
    *,
    nvml: ModuleType | Any | None = None,
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    use_cache: bool = True,
) -> Hardware:
    """The hardware of this machine, or the machine called `name`.

    Never fails for what a driver hides: the answer is partial then, and its notes say what is missing. Raises
    `ConfigError` for a name that is none. `nvml`, `root` and `environ` stand in for pynvml, the files and os.environ.
    """
    if name is not None:
        return named_hardware(name)
    environ = os.environ if environ is None else environ
    reading = _read_gpus(nvml, root, environ)
    host = read_host(root)
    gpus = reading.gpus or [cpu_device(host)]
    nics = read_nics(root)
    hardware = Hardware(
        name=platform.node() or "this machine",
        gpus=tuple(gpus),
        fabric=_with_network(reading.fabric, nics, reading.gpus),
        host=host,
        notes=tuple(dict.fromkeys(reading.notes)),
    )
    return _with_measurements(hardware, environ) if use_cache else hardware


def _read_gpus(nvml: ModuleType | Any | None, root: Path, environ: Mapping[str, str]) -> NvmlReading:
    nothing = NvmlReading(gpus=[], fabric=Fabric(), notes=[])
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            nothing.notes.append("nvidia-ml-py is not installed, so NVML was not asked: pip install nvidia-ml-py")
            return _read_through_torch(nothing, root)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        kind = type(error).__name__
        advice = next((advice for part, advice in _ADVICE.items() if part in kind), _ASK_SMI)
        nothing.notes.append(f"NVML could not start ({error}); {advice}")
        return _read_through_torch(nothing, root)
    try:
        reading = NvmlReader(nvml, root).read(environ.get("CUDA_VISIBLE_DEVICES"))
    finally:
        with contextlib.suppress(nvml.NVMLError):  # all answers are in already, and the process ends NVML anyway
            nvml.nvmlShutdown()
    if not reading.gpus:
        reading.notes.append("NVML shows no GPU: the CPU is the device")
    return reading


_ASK_SMI = "run nvidia-smi to see the driver's own message"
_ADVICE = {
    "LibraryNotFound": "no NVIDIA driver is installed, or this container was started without GPUs",
    "DriverNotLoaded": "the driver is installed but not loaded: try `modprobe nvidia` or reboot",
    "NoPermission": "this user may not open the NVIDIA devices: check /dev/nvidia* and the container's device rules",
    "LibRmVersionMismatch": "the driver was updated while running: reboot",
}


def _read_through_torch(reading: NvmlReading, root: Path) -> NvmlReading:
    """The GPUs as torch sees them, where NVML cannot be had but device files say that there are some."""
    devices = [root / "dev/nvidia0", root / "dev/nvidiactl", root / "dev/dxg", root / "dev/nvhost-gpu"]
    # Importing torch takes seconds: on a machine without any of these files there is nothing it could find.
    if not any(device.exists() for device in devices):
        return reading
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        reading.notes.append("there are NVIDIA device files, but neither NVML nor torch can be used to read them")
        return reading
    if not torch.cuda.is_available():
        reading.notes.append("there are NVIDIA device files, but torch sees no GPU either")
        return reading
    reading.notes.append("GPUs were read through torch: clocks, power, MIG mode and links are not known")
    reading.gpus = [_torch_gpu(i, torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    return reading


def _torch_gpu(index: int, properties: Any) -> Gpu:
    gpu = Gpu(
        name=properties.name,
        index=index,
        compute_capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=getattr(properties, "L2_cache_size", None),
        sources=tuple(Origin(f, "spec", "torch") for f in ("num_sms", "memory_bytes", "l2_bytes")),
    )
    machine = machine_of_device(gpu.name, gpu.memory_bytes)
    if machine is None:
        return dataclasses.replace(gpu, peaks=scaled_peaks(gpu))
    model = machine.gpu()
    more = tuple(s for s in model.sources if s.figure in ("memory_gb_per_s", "copy_gb_per_s"))
    return dataclasses.replace(
        gpu,
        machine=machine.name,
        memory_gb_per_s=model.memory_gb_per_s,
        copy_gb_per_s=model.copy_gb_per_s,
        peaks=model.peaks,
        curves=model.curves,
        sources=gpu.sources + more,
    )


def _with_network(fabric: Fabric, nics: tuple[Nic, ...], gpus: list[Gpu]) -> Fabric:
    """Adds the ports, the network's share of each GPU, and the machine's known all-reduce speed."""
    sources = list(fabric.sources)
    up = [nic for nic in nics if nic.state in ("active", "up") and nic.gb_per_s]
    # InfiniBand is there to be used by GPUs; of Ethernet, at most the fastest port is.
    fast = [nic for nic in up if nic.kind == "infiniband"] or sorted(up, key=lambda nic: nic.gb_per_s or 0)[-1:]
    share = sum(nic.gb_per_s or 0 for nic in fast) / max(len(gpus), 1) if fast else None
    if share is not None:
        ports = ", ".join(nic.name for nic in fast)
        sources.append(Origin("nic_gb_per_s", "spec", f"derived: {ports} over {max(len(gpus), 1)} devices"))
    reduce = None
    machine = machines().get((gpus[0].machine or "").lower()) if gpus else None
    known = machine.constant("allreduce_gb_per_s") if machine is not None else None
    if known is not None and fabric.nvswitch and fabric.nvlink_domain > 1:
        reduce = known.value
        sources.append(Origin("allreduce_gb_per_s", known.tier, known.source))
    return dataclasses.replace(fabric, nics=nics, nic_gb_per_s=share, allreduce_gb_per_s=reduce, sources=tuple(sources))


def _with_measurements(hardware: Hardware, environ: Mapping[str, str]) -> Hardware:
    """`hardware` with what was measured on it before, if a cache file of this device, driver and torch is there."""
    gpus, notes = [], list(hardware.notes)
    for gpu in hardware.gpus:
        measurement, note = read_measurement(gpu, environ)
        gpus.append(gpu if measurement is None else measurement.applied_to(gpu))
        notes += [note] if note else []
    return dataclasses.replace(hardware, gpus=tuple(gpus), notes=tuple(dict.fromkeys(notes)))
