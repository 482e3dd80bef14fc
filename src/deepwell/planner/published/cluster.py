"""The machine of a published run: its GPU's name however it is written, whole nodes, and a network that is stated."""

import functools
import math
import re
from dataclasses import replace

from deepwell.errors import ConfigError
from deepwell.hardware.model import Hardware
from deepwell.hardware.names import machines, named_hardware
from deepwell.planner.published.record import Record


def is_nvidia(gpu: str) -> bool:
    return not re.match(r"(amd|instinct|google|aws|intel|huawei|tpu|trainium|trn\d|gaudi|ascend|mi\d{3})", gpu.lower())


def hardware_of(record: Record) -> Hardware:
    """The cluster of the row. Raises ConfigError where the GPU is not known or not NVIDIA's."""
    name, count = record.text("gpu"), record.count("num_gpus") or 0
    if "not stated" in name or "/" in name:
        raise ConfigError(f"gpu {name!r}: the source does not say which GPU it is")
    cleaned = re.sub(r"\s*\(.*\)$", "", name)
    if not is_nvidia(cleaned):
        raise ConfigError(f"gpu {name!r}: not an NVIDIA GPU")
    return _cluster(cleaned, count, _nic_from_notes(record.notes))


@functools.lru_cache(maxsize=512)
def _cluster(gpu: str, count: int, nic: tuple[str, float] | None) -> Hardware:
    machine = _machine_name(gpu)
    per_node = machines()[machine.lower()].gpus_per_node
    # Whole nodes where the count allows it, else the largest equal parts of nodes.
    each = next(size for size in range(min(count, per_node), 0, -1) if count % size == 0)
    nodes = count // each
    hardware = named_hardware(f"{nodes}x{each}x{machine}")
    fabric = hardware.fabric
    if fabric.nvlink_domain == 72 and count > 64 and count % 64 == 0:
        # Jobs of powers of two take 16 trays of a rack, so that groups of up to 64 GPUs stay inside its NVLink.
        fabric = replace(fabric, nvlink_domain=64)
    if nic is not None:
        scope, gbit = nic
        per_gpu = gbit / 8 if scope == "gpu" else gbit / 8 / per_node
        fabric = replace(fabric, nic_gb_per_s=per_gpu)
    return replace(hardware, fabric=fabric)


def _machine_name(gpu: str) -> str:
    """The machine that a source means: as it is written, else without maker, counts, board, and memory behind it."""
    bare = re.sub(r"(?i)^\d+\s*x\s*|\s*x\s*\d+$|\b(?:nvidia|dgx|hgx)\b", " ", gpu).strip(" -_")
    words = re.split(r"[\s_-]+", bare)
    plain = [word for word in words if not re.fullmatch(r"(?i)sxm\d?|hbm\w*", word)]
    for tried in (words, *(plain[:length] for length in range(len(plain), 0, -1))):
        try:
            found = named_hardware("1x1x" + "-".join(tried))
        except ConfigError:
            continue
        return found.gpus[0].machine or gpu
    known = ", ".join(sorted(found.name for found in machines().values()))
    raise ConfigError(f"gpu {gpu!r}: no machine of that name; known: {known}")


def _nic_from_notes(notes: str) -> tuple[str, float] | None:
    """Network speed where a source states it: Gbit/s of a node or of a GPU."""
    patterns = (
        ("gpu", 1.0, r"(\d+)\s*Gb/s (?:RDMA |CX-\d+ )?per GPU"),
        ("node", 1.0, r"(\d+)x\s*(?:HDR|NDR|EDR)?(\d+)(?:\s*Gb(?:ps|/s)?)? (?:IB|RoCE|InfiniBand) per node"),
        ("node", 1.0, r"(\d+) ?Gbps(?:/node| node-node interconnect)"),
        ("node", 100.0, r"(\d+) OmniPath links/node"),  # Omni-Path 100: 100 Gbit/s a link
    )
    for scope, gbit, pattern in patterns:
        if found := re.search(pattern, notes):
            return scope, gbit * math.prod(map(float, found.groups()))
    return None
