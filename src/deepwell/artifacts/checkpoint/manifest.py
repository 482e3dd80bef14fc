"""What makes a folder a checkpoint: its manifest, its marker, and the versions of both.

    step-00000100/
      model-00000.safetensors      a rank's parts of the weights; so optimizer-*, and ranks-* with its own small tensors
      config.json                  the model's configuration, where it has one (Hugging Face's file)
      index.json                   each tensor's dtype, whole shape and parts; the optimizer's options
      state.json                   the run's facts: step, data position, plan, policy
      manifest.json                schema, versions, and every file above with its size and SHA-256
      COMMITTED                    the SHA-256 of manifest.json, written last

The folder is built under a temporary name. All files are safetensors or JSON: reading them cannot run code.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepwell.artifacts.plain_json import fits, is_size
from deepwell.errors import CheckpointError, ConfigError
from deepwell.files import hash_file

SCHEMA = 1
WRITER = "deepwell"
MARKER = "COMMITTED"
_FOLDER = re.compile(r"step-(\d{8,})")
# A checkpoint that another of its step is just taking the place of.
_REPLACED = re.compile(r"\.step-(\d{8,})\.[0-9a-z-]+\.old")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

# A file as the manifest names it: its name, size and sha256.
FileRecord = dict[str, Any]
# The JSON documents of a checkpoint: {"manifest": ..., "state": ..., "index": ...}.
Documents = dict[str, dict[str, Any]]
# Schema -> what makes its documents those of the next schema.
MIGRATIONS: dict[int, Callable[[Documents], Documents]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A committed checkpoint's documents, in the schema of this Deepwell."""

    path: Path
    manifest: dict[str, Any]
    state: dict[str, Any]
    index: dict[str, Any]
    files: dict[str, FileRecord]


def folder_name(step: Any) -> str:
    """The name of a step's checkpoint. Raises ConfigError for what is no step."""
    if type(step) is not int or step < 0:
        raise ConfigError(f"meta['step'] is {step!r}; it must be a whole number from 0 on")
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a folder's name says; None for a folder of another name."""
    match = _FOLDER.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
    return int(match[1]) if match else None


def open_documents(path: Path) -> Opened:
    """Read a checkpoint's documents. Raises CheckpointError naming the file that is missing, damaged or too new."""
    manifest = read_manifest(path)
    files = records(manifest, path)
    documents = {"manifest": manifest}
    for name in ("state", "index"):
        record = files.get(f"{name}.json")
        if record is not None:
            data = _bytes(path / record["name"])
            _check(path, record, hashlib.sha256(data).hexdigest())
            documents[name] = _object(data, path / record["name"])
    for schema in range(manifest["schema"], SCHEMA):
        if schema not in MIGRATIONS:
            raise CheckpointError(
                f"{path / 'manifest.json'} has schema {schema}, and nothing leads from it to {SCHEMA}"
            )
        documents = MIGRATIONS[schema](documents)
    for name in ("state", "index"):
        if name not in documents:
            raise CheckpointError(f"{path / 'manifest.json'} names no {name}.json; this is no checkpoint of a run")
    for name, wanted in (("step", is_size), ("world", is_size), ("versions", {str: str})):
        if not fits(documents["manifest"].get(name), wanted):
            raise CheckpointError(f"{path / 'manifest.json'}: its {name} cannot be read")
    return Opened(path=path, files=files, **documents)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a committed checkpoint, as it is on the disk."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; pass a checkpoint's folder (step-00000100)")
    marker, file = path / MARKER, path / "manifest.json"
    if not marker.is_file():
        raise CheckpointError(f"{marker} is missing: {path} was never committed, or is no checkpoint of Deepwell's")
    data = _bytes(file)
    if _bytes(marker).strip() != hashlib.sha256(data).hexdigest().encode():
        raise CheckpointError(f"{file} is not the file that {MARKER} was written for")
    manifest = _object(data, file)
    if manifest.get("writer") != WRITER or type(manifest.get("schema")) is not int:
        raise CheckpointError(f"{file} is not a manifest of Deepwell's")
    if manifest["schema"] > SCHEMA:
        raise CheckpointError(
            f"{file} has schema {manifest['schema']}; this Deepwell reads up to {SCHEMA}: install a newer one"
        )
    return manifest


def records(manifest: dict[str, Any], path: Path) -> dict[str, FileRecord]:
    """The files that a manifest names. Raises CheckpointError for names that lead out of the folder."""
    found: Any = manifest.get("files")
    if not fits(found, [{"name": str, "size": is_size, "sha256": str}]):
        raise CheckpointError(f"{path / 'manifest.json'}: its list of files cannot be read")
    for record in found:
        if not _FILE.fullmatch(record["name"]):
            raise CheckpointError(
                f"{path / 'manifest.json'} names {record['name']!r}, which is no file of a checkpoint"
            )
    return {record["name"]: record for record in found}


def check_hash(path: Path, record: FileRecord) -> None:
    """Raise CheckpointError if a file is not what was written."""
    _check_size(path, record)
    try:
        sha256 = hash_file(path / record["name"])
    except OSError as error:
        raise CheckpointError(f"{path / record['name']} cannot be read: {error.strerror}") from error
    _check(path, record, sha256)


def verify(path: Path | str) -> int:
    """Read every file of a checkpoint and compare its hash; returns the bytes read. Raises CheckpointError."""
    path = Path(path)
    files = records(read_manifest(path), path)
    for record in files.values():
        check_hash(path, record)
    return sum(record["size"] for record in files.values())


def read_meta(path: Path | str) -> dict[str, Any]:
    """The facts of the run that a checkpoint was saved with."""
    return open_documents(Path(path)).state


def list_checkpoints(folder: Path | str) -> list[Path]:
    """The committed and whole checkpoints of a run's folder, oldest step first."""
    return [*_newest_first(Path(folder))][::-1]


def latest(folder: Path | str) -> Path | None:
    """The checkpoint of the highest step that is committed and whole; None if there is none."""
    return next(_newest_first(Path(folder)), None)


def _newest_first(folder: Path) -> Iterator[Path]:
    paths = [path for path in folder.iterdir() if step_of(path) is not None] if folder.is_dir() else []
    given = None
    # Of two with one step, the one that has its proper name.
    for path in sorted(paths, key=lambda path: (step_of(path), path.name[0] != "."), reverse=True):
        if step_of(path) != given and _is_checkpoint(path):
            given = step_of(path)
            yield path


def _is_checkpoint(path: Path) -> bool:
    """Whether it is committed, and its files are all there in their sizes."""
    try:
        for record in records(read_manifest(path), path).values():
            _check_size(path, record)
    except (CheckpointError, OSError):
        return False
    return True


def _check_size(path: Path, record: FileRecord) -> None:
    file = path / record["name"]
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; take an earlier checkpoint, or copy this one again")
    if file.stat().st_size != record["size"]:
        raise CheckpointError(
            f"{file} has {file.stat().st_size} bytes, the manifest says {record['size']}: it was cut or changed"
        )


def _check(path: Path, record: FileRecord, sha256: str) -> None:
    if sha256 != record["sha256"]:
        raise CheckpointError(
            f"{path / record['name']} was changed: its SHA-256 is not the manifest's {record['sha256']}"
        )


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _object(data: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value
