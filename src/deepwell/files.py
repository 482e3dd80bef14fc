"""Files that appear under their name whole or not at all, and files that are on the disk when the call returns."""

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_BLOCK = 8 << 20  # bytes between two looks at how much the system took


@contextmanager
def whole_file(path: Path, *, synced: bool = False) -> Iterator[Path]:
    """A path beside `path` to write to: it takes the name where the block ends well, and is gone where it fails.

    With `synced` its bytes are on the disk before it has the name.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        yield partial
        if synced:
            sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes | str, *, synced: bool = False) -> None:
    """Write a file, UTF-8 where it is text."""
    with whole_file(path, synced=synced) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file and wait until the disk has it; returns its name, size and SHA-256. Raises FileExistsError."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            digest.update(view)
            size += len(view)
            while len(view):
                view = view[os.write(descriptor, view[:_BLOCK]) :]
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)  # calls on an open file do not know its name
        raise
    finally:
        os.close(descriptor)
    return {"name": path.name, "size": size, "sha256": digest.hexdigest()}


def hash_file(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def rename_synced(source: Path, target: Path) -> None:
    """Give a file or folder its name, and wait until the disk has that too."""
    source.rename(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
