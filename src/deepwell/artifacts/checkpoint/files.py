"""Files that are on the disk when the call returns, hashed as they are written."""

import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SLICE = 8 << 20  # bytes between two looks at how much the system took


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file as the manifest names it."""

    name: str
    size: int
    sha256: str

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "FileRecord":
        return cls(name=str(data["name"]), size=int(data["size"]), sha256=str(data["sha256"]))


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file and wait until the disk has it. Raises FileExistsError where one is there already."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            digest.update(view)
            size += len(view)
            while len(view):
                view = view[os.write(descriptor, view[:_SLICE]) :]
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)  # calls on an open file do not know its name
        raise
    finally:
        os.close(descriptor)
    return FileRecord(name=path.name, size=size, sha256=digest.hexdigest())


def write_whole(path: Path, data: bytes) -> FileRecord:
    """Write a file that others look for: it appears under its name only when it is complete."""
    partial = path.with_name(path.name + ".part")
    record = write_file(partial, [data])
    partial.rename(path)
    return FileRecord(name=path.name, size=record.size, sha256=record.sha256)


def hash_file(path: Path) -> str:
    """The SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_SLICE):
            digest.update(block)
    return digest.hexdigest()


def rename_folder(source: Path, target: Path) -> None:
    """Give a folder its name, and wait until the disk has that too."""
    source.rename(target)
    sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(path: Path) -> None:
    """Delete a folder and what is in it; what cannot be deleted stays."""
    shutil.rmtree(path, ignore_errors=True)
