"""The manifest of an exported engine: what the file holds, each tensor's form, and the hash of every member."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from deepwell.artifacts.export.container import MANIFEST, Container
from deepwell.artifacts.export.plain_json import Refuse, read_json
from deepwell.artifacts.export.same_engine import EngineOptions, Pin
from deepwell.artifacts.export.tensor_file import DTYPES
from deepwell.artifacts.export.weights import Form, expected
from deepwell.formats.spec import FORMATS
from deepwell.precision.gemm_format import GEMMS, POLICY_FORMATS

SCHEMA = 1
KIND = "deepwell.engine"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_NAME = re.compile(r"[^\s\x00-\x1f\"'\\/]{1,500}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTensor:
    """One tensor of the model. `form` is None where it is stored in its own dtype; `reason` says why, if asked."""

    kind: str  # "parameter", "buffer" (in the state dict), "temporary" (a buffer that is not), "constant"
    dtype: torch.dtype
    shape: tuple[int, ...]
    form: Form | None = None
    requires_grad: bool = False
    reason: str = ""

    @property
    def format(self) -> str:
        return self.form.format if self.form else str(self.dtype).removeprefix("torch.")

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

    model: dict[str, Any]  # name, form, class, parameters, dtype
    versions: dict[str, str]
    device: str
    step: int
    options: EngineOptions
    pins: tuple[Pin, ...]
    tensors: dict[str, ExportedTensor]
    tied: dict[str, str]
    is_checked: bool
    notes: tuple[str, ...]
    members: dict[str, tuple[int, str]]

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "model": self.model,
            "versions": self.versions,
            "device": self.device,
            "step": self.step,
            "options": asdict(self.options),
            "pins": [asdict(pin) for pin in self.pins],
            "tensors": {name: entry.to_dict() for name, entry in self.tensors.items()},
            "tied": self.tied,
            "checked": self.is_checked,
            "notes": list(self.notes),
            "members": {name: {"bytes": size, "sha256": sha} for name, (size, sha) in self.members.items()},
        }

    @property
    def kinds(self) -> dict[str, str]:
        """What each tensor is, by all of its names."""
        kinds = {name: entry.kind for name, entry in self.tensors.items()}
        return kinds | {name: kinds[target] for name, target in self.tied.items()}

    def formats(self) -> dict[str, dict[str, int]]:
        """How many tensors, elements and bytes each format has."""
        rows = []
        for entry in self.tensors.values():
            parts = expected(entry.form, entry.shape).values() if entry.form else [(entry.dtype, entry.shape)]
            size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in parts)
            rows.append((entry.format, math.prod(entry.shape), size))
        return dict(sorted(count_formats(rows).items(), key=lambda item: -item[1]["bytes"]))


def count_formats(rows: Iterable[tuple[str, int, int]]) -> dict[str, dict[str, int]]:
    """Tensors, elements and bytes of each format; `rows` are (format, elements, bytes) of tensors."""
    found: dict[str, dict[str, int]] = {}
    for name, elements, size in rows:
        row = found.setdefault(name, {"tensors": 0, "elements": 0, "bytes": 0})
        row["tensors"] += 1
        row["elements"] += elements
        row["bytes"] += size
    return found


# ---- reading ----


def read_manifest(container: Container) -> Manifest:
    """The manifest of an open file, every field checked; the members are compared with their hashes by the caller."""
    refuse = container.refuse
    data = read_json(bytes(container.member(MANIFEST)), MANIFEST, refuse)
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
    read = _ManifestReader(data, refuse)
    options = EngineOptions.from_dict(data.get("options"))
    if options is None:
        refuse("the engine's options in its manifest are damaged")
    tensors = {name: read.entry(name, entry) for name, entry in read.field("tensors", dict).items()}
    tied = read.field("tied", dict)
    if not all(name not in tensors and target in tensors for name, target in tied.items()):
        refuse("the tied tensors in its manifest are damaged")
    for name in tied:
        read.check_name(name)
    step = data.get("step")
    if type(step) is not int or step < 0 or not isinstance(data.get("checked"), bool):
        refuse("the step in its manifest is damaged")
    return Manifest(
        model=read.field("model", dict),
        versions=read.texts("versions"),
        device=read.field("device", str),
        step=step,
        options=options,
        pins=tuple(read.pin(pin) for pin in read.field("pins", list)),
        tensors=tensors,
        tied=tied,
        is_checked=data["checked"],
        notes=tuple(str(note) for note in read.field("notes", list)),
        members={name: read.member(name, entry) for name, entry in read.field("members", dict).items()},
    )


class _ManifestReader:
    def __init__(self, data: Mapping[str, Any], refuse: Refuse) -> None:
        self._data, self._refuse = data, refuse

    def field(self, name: str, kind: type[_Kind]) -> _Kind:
        value = self._data.get(name)
        if not isinstance(value, kind):
            self._refuse(f"{name} in its manifest is damaged")
        return value

    def texts(self, name: str) -> dict[str, str]:
        value = self.field(name, dict)
        if not all(isinstance(item, str) for item in value.values()):
            self._refuse(f"{name} in its manifest is damaged")
        return value

    def check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name) or any(not part for part in name.split(".")):
            self._refuse(f"the tensor name {name[:80]!r} is none")

    def entry(self, name: str, data: Any) -> ExportedTensor:
        self.check_name(name)
        shape: Any = data.get("shape") if isinstance(data, dict) else None
        is_shape = isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in shape)
        dtype = _DTYPES.get(data.get("dtype", "")) if is_shape and isinstance(data.get("dtype"), str) else None
        kinds = ("parameter", "buffer", "temporary", "constant")
        if dtype is None or data.get("kind") not in kinds or len(shape) > 16:
            self._refuse(f"tensor {name} in its manifest is damaged")
        form = None
        if "format" in data:
            form = self._form(name, data, tuple(shape), dtype)
        return ExportedTensor(
            kind=data["kind"],
            dtype=dtype,
            shape=tuple(shape),
            form=form,
            requires_grad=data.get("requires_grad") is True,
            reason=str(data.get("reason", ""))[:500],
        )

    def _form(self, name: str, data: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> Form:
        fmt, axis, by_expert = data["format"], data.get("axis"), data.get("by_expert") is True
        is_known = isinstance(fmt, str) and fmt in FORMATS and FORMATS[fmt].is_scaled
        first = 1 if by_expert else 0
        is_float = dtype in (torch.float32, torch.bfloat16, torch.float16)
        if not is_known or type(axis) is not int or not first <= axis < len(shape) or not is_float:
            self._refuse(f"tensor {name} has format {fmt!r} along axis {axis!r}, which does not fit it")
        return Form(format=fmt, axis=axis, by_expert=by_expert)

    def pin(self, data: Any) -> Pin:
        fields = ("path", "gemm", "format", "reason")
        is_sound = isinstance(data, dict) and all(isinstance(data.get(name), str) for name in fields)
        if not is_sound or data["gemm"] not in GEMMS or data["format"] not in POLICY_FORMATS:
            self._refuse("a pinned format in its manifest is damaged")
        return Pin(**{name: data[name] for name in fields})

    def member(self, name: str, data: Any) -> tuple[int, str]:
        is_sound = isinstance(data, dict) and type(data.get("bytes")) is int and isinstance(data.get("sha256"), str)
        if not is_sound or not _SHA256.fullmatch(data["sha256"]):
            self._refuse(f"the hash of {name} in its manifest is damaged")
        return data["bytes"], data["sha256"]
