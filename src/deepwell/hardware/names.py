"""The named machines: `8xB200`, `64x8xH100`, `gb200-nvl72:4`, and the constants behind each name.

A name is a GPU of `machines/*.json` with counts before it, or a rack with a count behind it. Every constant in those
files carries its source; what has no source is not there.
"""

import difflib
import functools
import re
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any, get_args

from deepwell.errors import ConfigError
from deepwell.hardware.codec import decode, packaged_json
from deepwell.hardware.model import Hardware
from deepwell.hardware.parts import Curve, Fabric, Gpu, Origin, Peak, Tier

GRAMMAR = (
    "accepted: GPU (one GPU), COUNTxGPU (so many GPUs), NODESxCOUNTxGPU (nodes of so many GPUs), RACK or RACK:COUNT "
    "(racks), e.g. H200, 8xB200, 64x8xH100, gb200-nvl72:4"
)
_MAX_GPUS = 1_000_000  # more is a typing mistake


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    figure: str
    value: float
    source: str
    tier: Tier = "spec"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rack:
    name: str
    gpus: int
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One GPU product as its node or rack is sold: what `machines/*.json` hold."""

    name: str
    compute_capability: tuple[int, int]
    compute_capability_source: str
    constants: tuple[Constant, ...]
    peaks: tuple[Peak, ...]
    aliases: tuple[str, ...] = ()
    device_names: tuple[str, ...] = ()  # how NVML and torch name it, exactly
    racks: tuple[Rack, ...] = ()
    curves: tuple[Curve, ...] = ()
    notes: tuple[str, ...] = ()

    def constant(self, figure: str) -> Constant | None:
        return next((c for c in self.constants if c.figure == figure), None)

    @property
    def gpus_per_node(self) -> int:
        found = self.constant("gpus_per_node")
        return 1 if found is None else int(found.value)

    def gpu(self, index: int = 0) -> Gpu:
        values, sources = self._figures(Gpu)
        capability = Origin("compute_capability", "spec", self.compute_capability_source)
        return Gpu(
            name=self.name, machine=self.name, index=index, compute_capability=self.compute_capability,
            peaks=self.peaks, curves=self.curves, sources=(*sources, capability), **values,
        )  # fmt: skip

    def fabric(self) -> Fabric:
        values, sources = self._figures(Fabric)
        # Boards of more than two GPUs at full NVLink rate are joined by NVSwitch; nothing else reaches a domain of 8.
        return Fabric(nvswitch=values.get("nvlink_domain", 1) > 2, sources=sources, **values)

    def _figures(self, part: type[Gpu | Fabric]) -> tuple[dict[str, Any], tuple[Origin, ...]]:
        """The constants that are fields of a part, whole numbers where the field is one, and where they come from."""
        hints = {f.name: f.type for f in fields(part)}
        mine = [c for c in self.constants if c.figure in hints]
        values = {c.figure: int(c.value) if int in (hints[c.figure], *get_args(hints[c.figure])) else c.value
                  for c in mine}  # fmt: skip
        return values, tuple(Origin(c.figure, c.tier, c.source) for c in mine)


@functools.cache
def machines() -> dict[str, Machine]:
    found = {}
    files = resources.files("deepwell.hardware").joinpath("machines").iterdir()
    for name in sorted(file.name for file in files if file.name.endswith(".json")):
        machine = decode(Machine, packaged_json("deepwell.hardware", "machines", name), name)
        found[machine.name.lower()] = machine
    return found


@functools.cache
def _by_name() -> dict[str, tuple[Machine, int, str]]:
    """Every accepted GPU or rack name, lower case: its machine, the GPUs it stands for, and how it is written."""
    table: dict[str, tuple[Machine, int, str]] = {}
    for machine in machines().values():
        for name in (machine.name, *machine.aliases):
            table[name.lower()] = (machine, 1, name)
        for rack in machine.racks:
            table[rack.name.lower()] = (machine, rack.gpus, rack.name)
    return table


def machine_of_device(device_name: str, memory_bytes: int | None) -> Machine | None:
    """The machine whose GPU calls itself `device_name`, or None.

    One name can hide different parts (an H100 with 96 GB of HBM2e calls itself H100 too), so memory must agree to 6 %.
    """
    for machine in machines().values():
        if device_name in machine.device_names:
            nominal = machine.constant("memory_bytes")
            if memory_bytes is None or nominal is None or abs(memory_bytes / nominal.value - 1) < 0.06:
                return machine
    return None


def named_hardware(name: str) -> Hardware:
    """The machine or cluster called `name`. Raises `ConfigError` with the nearest names, or with the grammar."""
    text = "".join(name.split()).lower()
    if not text:
        raise ConfigError(f"name: got an empty name; {GRAMMAR}")
    if ":" in text or (text in _by_name() and _by_name()[text][1] > 1):
        return _racks(name, text)
    counts, gpu = _split_counts(name, text)
    machine, rack_gpus = _look_up(name, gpu)
    if rack_gpus > 1:
        raise ConfigError(f"name: got {name!r}; racks are counted behind the name, as {gpu}:4; {GRAMMAR}")
    if len(counts) == 2:
        nodes, count = _count(name, counts[0]), _count(name, counts[1])
    elif counts:
        nodes, count = _whole_nodes(name, machine, _count(name, counts[0]))
    else:
        nodes, count = 1, 1
    if count > machine.gpus_per_node:
        raise ConfigError(f"name: got {name!r}; a node of {machine.name} holds at most {machine.gpus_per_node} GPUs")
    return _build(name, machine, nodes, count)


def _racks(name: str, text: str) -> Hardware:
    rack, colon, count_text = text.partition(":")
    machine, gpus = _look_up(name, rack)
    if gpus == 1:
        raise ConfigError(f"name: got {name!r}; {machine.name} is a GPU, counted in front: 8x{machine.name}; {GRAMMAR}")
    racks = _count(name, count_text) if colon else 1
    return _build(name, machine, racks * gpus // machine.gpus_per_node, machine.gpus_per_node)


def _split_counts(name: str, text: str) -> tuple[list[str], str]:
    """The counts in front of the GPU's name, and that name. Names may hold an x themselves (A100-SXM4-80GB)."""
    parts = text.split("x")
    for i in range(min(3, len(parts))):
        if "x".join(parts[i:]) in _by_name():
            return parts[:i], "x".join(parts[i:])
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?(?!\d+x)(.+)", text)
    if match is None or not match[3].strip("0123456789x"):
        raise ConfigError(f"name: got {name!r}; {GRAMMAR}")
    return [count for count in match.groups()[:2] if count is not None], match[3]


def _look_up(name: str, gpu: str) -> tuple[Machine, int]:
    known = _by_name()
    if gpu in known:
        return known[gpu][:2]
    near = [known[key][2] for key in difflib.get_close_matches(gpu, known, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(m.name for m in machines().values())}."
    raise ConfigError(f"name: got {name!r}; no machine is called {gpu!r}; {hint} ({GRAMMAR})")


def _count(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MAX_GPUS:
        raise ConfigError(f"name: got {name!r}; {text!r} is no count from 1 to {_MAX_GPUS:,}; {GRAMMAR}")
    return int(text)


def _whole_nodes(name: str, machine: Machine, count: int) -> tuple[int, int]:
    per_node = machine.gpus_per_node
    if count <= per_node:
        return 1, count
    if count % per_node:
        raise ConfigError(
            f"name: got {name!r}; a node of {machine.name} holds {per_node} GPUs and {count} GPUs are no whole nodes; "
            f"say the nodes yourself, as NODESxCOUNTx{machine.name}"
        )
    return count // per_node, per_node


def _build(name: str, machine: Machine, nodes: int, count: int) -> Hardware:
    if nodes * count > _MAX_GPUS:
        raise ConfigError(f"name: got {name!r}; {nodes * count:,} GPUs are more than {_MAX_GPUS:,}")
    gpus = tuple(machine.gpu(i) for i in range(count))
    name = "".join(name.split())
    return Hardware(name=name, gpus=gpus, fabric=machine.fabric(), num_nodes=nodes, notes=machine.notes)
