"""The manifest of an exported engine: what the file holds, each tensor's form, and the hash of every member."""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.artifacts.export.container import MANIFEST, Container
from deepwell.artifacts.export.same_engine import OPTIONS, PIN
from deepwell.artifacts.export.weights import Form, expected
from deepwell.artifacts.plain_json import Refuse, fits, is_shape, is_size
from deepwell.artifacts.tensor_file import EXPORTED
from deepwell.formats.spec import FORMATS

SCHEMA = 1
KIND = "deepwell.engine"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in EXPORTED.values()}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NAME = re.compile(r"[^\s\x00-\x1f\"'\\/]{1,500}")
# In the state dict or not: "buffer" or "temporary".
_KINDS = ("parameter", "buffer", "temporary", "constant")
# The shape of each field, and what is said of those whose name says too little.
_FIELDS: dict[str, Any] = {
    "options": OPTIONS, "tensors": dict, "tied": {str: str}, "step": is_size, "checked": bool, "versions": {str: str},
    "model": lambda model: isinstance(model, dict) and type(model.get("parameters", 0)) is int,
    "device": str, "pins": [PIN], "notes": [str], "members": dict,
}  # fmt: skip
_WORDS = {
    "options": "the engine's options in its manifest are", "tied": "the tied tensors in its manifest are",
    "checked": "the step in its manifest is", "step": "the step in its manifest is",
    "pins": "a pinned format in its manifest is",
}  # fmt: skip
_MEMBER = {"bytes": int, "sha256": lambda text: isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTensor:
    """One tensor of the model. `form` is None where it is stored in its own dtype; `reason` says why, if asked."""

    kind: str  # of _KINDS
    dtype: torch.dtype
    shape: tuple[int, ...]
    form: Form | None = None
    requires_grad: bool = False
    reason: str = ""

    @property
    def format(self) -> str:
        return self.form.format if self.form else str(self.dtype).removeprefix("torch.")

    @property
    def parts(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape of each of its parts in the file; "" is the tensor itself."""
        return expected(self.form, self.shape) if self.form else {"": (self.dtype, self.shape)}

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "kind": self.kind, "dtype": str(self.dtype).removeprefix("torch."), "shape": list(self.shape),
        }  # fmt: skip
        if self.form is not None:
            found |= {"format": self.form.format, "axis": self.form.axis, "by_expert": self.form.by_expert}
        if self.requires_grad:
            found["requires_grad"] = True
        return found | ({"reason": self.reason} if self.reason else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything of a file that is neither the model nor a number."""

    data: dict[str, Any]  # KIND, SCHEMA and _FIELDS
    tensors: dict[str, ExportedTensor]

    @property
    def kinds(self) -> dict[str, str]:
        """What each tensor is, by all of its names."""
        kinds = {name: entry.kind for name, entry in self.tensors.items()}
        return kinds | {name: kinds[target] for name, target in self.data["tied"].items()}

    def formats(self) -> dict[str, dict[str, int]]:
        """How many tensors, elements and bytes each format has."""
        rows = []
        for entry in self.tensors.values():
            num_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in entry.parts.values())
            rows.append((entry.format, math.prod(entry.shape), num_bytes))
        return dict(sorted(count_formats(rows).items(), key=lambda item: -item[1]["bytes"]))


def count_formats(rows: Iterable[tuple[str, int, int]]) -> dict[str, dict[str, int]]:
    """Tensors, elements and bytes of each format; `rows` are (format, elements, bytes) of tensors."""
    found: dict[str, dict[str, int]] = {}
    for name, elements, num_bytes in rows:
        row = found.setdefault(name, {"tensors": 0, "elements": 0, "bytes": 0})
        row["tensors"] += 1
        row["elements"] += elements
        row["bytes"] += num_bytes
    return found


def tensors_of(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of what a model holds, by all of its names."""
    stored = model.state_dict(keep_vars=True)
    yield from (("parameter", *item) for item in model.named_parameters(remove_duplicate=False))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield "buffer" if name in stored else "temporary", name, buffer


# ---- reading ----


def read_manifest(container: Container) -> Manifest:
    """The manifest of an open file: every field checked, every member compared with its hash."""
    refuse = container.refuse
    data = container.json(MANIFEST)
    if data.get("kind") != KIND:
        refuse(f"its manifest says {str(data.get('kind'))[:60]!r}, not {KIND!r}: this is no engine")
    schema = data.get("schema")
    if type(schema) is not int or schema < 1:
        refuse(f"its schema is {schema!r}")
    if schema > SCHEMA:
        made = data.get("versions", {}).get("deepwell", "?") if isinstance(data.get("versions"), dict) else "?"
        refuse(
            f"it was written as schema {schema} by Deepwell {str(made)[:20]}, this Deepwell reads up to {SCHEMA} "
            "(install a newer Deepwell)"
        )
    for name, wanted in _FIELDS.items():
        if not fits(data.get(name), wanted):
            refuse(f"{_WORDS.get(name, f'{name} in its manifest is')} damaged")
    tensors = {name: _entry(name, entry, refuse) for name, entry in data["tensors"].items()}
    for name, target in data["tied"].items():
        if name in tensors or target not in tensors:
            refuse(f"{_WORDS['tied']} damaged")
        _check_name(name, refuse)
    for name, entry in data["members"].items():
        if not fits(entry, _MEMBER):
            refuse(f"the hash of {name} in its manifest is damaged")
    container.check_hashes(data["members"])
    return Manifest(data=data, tensors=tensors)


def _check_name(name: str, refuse: Refuse) -> None:
    if not _NAME.fullmatch(name) or any(not part for part in name.split(".")):
        refuse(f"the tensor name {name[:80]!r} is none")


def _entry(name: str, data: Any, refuse: Refuse) -> ExportedTensor:
    _check_name(name, refuse)
    facts = {key: data.get(key) for key in ("kind", "dtype", "shape")} if isinstance(data, dict) else {}
    is_sound = fits(facts, {"kind": _KINDS, "dtype": tuple(_DTYPES), "shape": is_shape})
    if not is_sound or len(data["shape"]) > 16:
        refuse(f"tensor {name} in its manifest is damaged")
    shape, dtype, form = tuple(data["shape"]), _DTYPES[data["dtype"]], None
    if "format" in data:
        fmt, axis, by_expert = data["format"], data.get("axis"), data.get("by_expert") is True
        is_known = isinstance(fmt, str) and fmt in FORMATS and FORMATS[fmt].is_scaled
        if not is_known or type(axis) is not int or not by_expert <= axis < len(shape) or dtype not in _FLOATS:
            refuse(f"tensor {name} has format {fmt!r} along axis {axis!r}, which does not fit it")
        form = Form(format=fmt, axis=axis, by_expert=by_expert)
    return ExportedTensor(
        kind=data["kind"],
        dtype=dtype,
        shape=shape,
        form=form,
        requires_grad=data.get("requires_grad") is True,
        reason=str(data.get("reason", ""))[:500],
    )


# ---- what an export wrote ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One exported engine or folder. `sha256` is that of the manifest (of config.json for a folder), which names all
    other hashes; `formats` counts tensors, elements and bytes."""

    path: str
    format: str  # "engine" or "hf"
    bytes: int
    sha256: str
    model: dict[str, Any]
    formats: dict[str, dict[str, int]]
    notes: tuple[str, ...] = ()
    manifest: dict[str, Any] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Without the manifest, which has a line for each tensor."""
        names = ("path", "format", "bytes", "sha256", "model", "formats")
        return {name: getattr(self, name) for name in names} | {"notes": list(self.notes)}

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        model = self.model
        about = f"{model.get('class') or model.get('name')}, {int(model.get('parameters') or 0):,} parameters"
        lines = [f"{self.path}: {about}, {_size(self.bytes)}", f"  sha256 {self.sha256}"]
        total = sum(row["bytes"] for row in self.formats.values()) or 1
        for name, row in self.formats.items():
            bits = 8 * row["bytes"] / max(row["elements"], 1)
            share = f"{100 * row['bytes'] / total:.1f}%"
            lines.append(
                f"  {name:<22} {row['tensors']:>5} tensors {row['elements']:>15,} numbers "
                f"{_size(row['bytes']):>10} {share:>6}  {bits:.2f} bits each"
            )
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def inspect(path: str | os.PathLike[str]) -> Artifact:
    """What a file holds, every member compared with its hash; no model is built. Raises CheckpointError."""
    container = Container(Path(path))
    manifest = read_manifest(container)
    return Artifact(
        path=str(container.path),
        format="engine",
        bytes=container.num_bytes,
        sha256=container.sha256(MANIFEST),
        model=manifest.data["model"],
        formats=manifest.formats(),
        notes=tuple(manifest.data["notes"]),
        manifest=manifest.data,
    )


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"
