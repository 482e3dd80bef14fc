"""What an export wrote, as a value: the file, its size and hash, and how its weights are stored."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepwell.artifacts.export.container import MANIFEST, Container
from deepwell.artifacts.export.manifest import read_manifest


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
