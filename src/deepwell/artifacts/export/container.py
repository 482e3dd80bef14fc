"""The file of an exported engine: a zip of stored members in one canonical form, read without trust.

    local header, member, local header, member, ..., central directory, end record with the manifest's sha256 as comment

Members are stored, not compressed, and begin at multiples of 64 bytes, so that tensors can be mapped into memory as
they lie. Every byte that is no member follows from the members' names, sizes and checksums: the reader writes the
headers again and compares. Whatever else a zip can be (compressed, encrypted, overlapping, with gaps or hidden members)
is therefore refused, as is every changed byte.
"""

import hashlib
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from deepwell.artifacts.plain_json import read_json
from deepwell.errors import CheckpointError, ConfigError

ALIGNMENT = 64
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
# Every member that a file may have; a name from a file is never used as a path.
MEMBERS = ("manifest.json", "model.json", "ir.json", "policy.json", "plan.json", "generation.json", TENSORS)
MAX_TEXT_BYTES = 1 << 28  # of a JSON member: a model of a million ops has less
_COMMENT = b"deepwell engine, manifest sha256 "
_COMMENT_BYTES = len(_COMMENT) + 64
_FULL = 0xFFFFFFFF  # a field whose number stands in the zip64 extra
_PADDING_ID, _ZIP64_ID = 0xD935, 0x0001
_DATE = (1980 - 1980) << 9 | 1 << 5 | 1  # the first day that a zip can name: a file says nothing of when it was made


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member's place in the file."""

    name: str
    size: int
    crc: int
    header_offset: int

    @property
    def header(self) -> bytes:
        """The local header, padded so that the member begins at a multiple of ALIGNMENT."""
        name = self.name.encode("ascii")
        is_large = self.size >= _FULL
        extra = struct.pack("<HHQQ", _ZIP64_ID, 16, self.size, self.size) if is_large else b""
        start = self.header_offset + 30 + len(name) + len(extra) + 4
        padding = -start % ALIGNMENT
        extra += struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
        size = _FULL if is_large else self.size
        return (
            struct.pack("<4s5H3I2H", b"PK\x03\x04", self._version, 0, 0, 0, _DATE, self.crc, size, size, len(name),
                        len(extra)) + name + extra
        )  # fmt: skip

    @property
    def entry(self) -> bytes:
        """The entry of the central directory."""
        name = self.name.encode("ascii")
        numbers = [n for n in (self.size, self.size, self.header_offset) if n >= _FULL]
        extra = struct.pack(f"<HH{len(numbers)}Q", _ZIP64_ID, 8 * len(numbers), *numbers) if numbers else b""
        size, offset = min(self.size, _FULL), min(self.header_offset, _FULL)
        return (
            struct.pack("<4s6H3I5H2I", b"PK\x01\x02", self._version, self._version, 0, 0, 0, _DATE, self.crc, size,
                        size, len(name), len(extra), 0, 0, 0, 0, offset) + name + extra
        )  # fmt: skip

    @property
    def _version(self) -> int:
        return 45 if self.size >= _FULL or self.header_offset >= _FULL else 20

    @property
    def offset(self) -> int:
        return self.header_offset + len(self.header)

    @property
    def end(self) -> int:
        return self.offset + self.size


def _end_of_directory(members: list[Member], manifest_sha256: str) -> bytes:
    start = members[-1].end if members else 0
    directory = b"".join(member.entry for member in members)
    size, count = len(directory), len(members)
    record = b""
    if start >= _FULL:
        record += struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
        record += struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
    comment = _COMMENT + manifest_sha256.encode("ascii")
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, size, min(start, _FULL), len(comment))
    return directory + record + end + comment


# ---- writing ----

# The pieces of a member, one after the other.
Pieces = Iterable[bytes | memoryview]


class Writer:
    """Writes members one after the other; `finish` writes the manifest, with the hashes of all others, and the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._members = file, list[Member]()
        self.hashes: dict[str, dict[str, int | str]] = {}

    def add(self, name: str, size: int, pieces: Pieces) -> str:
        """Write a member of `size` bytes; returns its sha256."""
        assert name in MEMBERS, name
        at = self._members[-1].end if self._members else 0
        empty = Member(name=name, size=size, crc=0, header_offset=at)
        self._file.write(empty.header)
        digest, crc, written = hashlib.sha256(), 0, 0
        for piece in pieces:
            self._file.write(piece)
            digest.update(piece)
            crc, written = zlib.crc32(piece, crc), written + len(piece)
        assert written == size, f"{name} has {written} bytes, not {size}"
        member = Member(name=name, size=size, crc=crc, header_offset=at)
        self._file.seek(at)
        self._file.write(member.header)
        self._file.seek(member.end)
        self._members.append(member)
        self.hashes[name] = {"bytes": size, "sha256": digest.hexdigest()}
        return digest.hexdigest()

    def finish(self, manifest: bytes) -> None:
        sha256 = self.add(MANIFEST, len(manifest), [manifest])
        self._file.write(_end_of_directory(self._members, sha256))


# ---- reading ----


class Container:
    """An open file whose form has been checked; members are views into mapped memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if not file.seek(0, os.SEEK_END):
                    self.refuse("it is empty")
                # Private pages: who writes into a tensor that was read changes a copy, never the file.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ConfigError(f"path: cannot read {path}: {error.strerror or error}") from error
        self._view = memoryview(self._map)
        self.members = self._read_members()

    def refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {reason}; export it again with dw.export")

    @property
    def num_bytes(self) -> int:
        return len(self._view)

    def member(self, name: str) -> memoryview:
        found = self.members.get(name)
        if found is None:
            self.refuse(f"{name} is missing")
        return self._view[found.offset : found.end]

    def json(self, name: str) -> dict[str, Any]:
        return read_json(bytes(self.member(name)), name, self.refuse)

    def sha256(self, name: str) -> str:
        return hashlib.sha256(self.member(name)).hexdigest()

    def check_hashes(self, wanted: Mapping[str, Mapping[str, Any]]) -> None:
        """Compare every member with what the manifest says of it: "bytes" and "sha256"."""
        for name in sorted(set(wanted) - set(self.members)):
            self.refuse(f"{name} is missing")
        for name in sorted(set(self.members) - set(wanted) - {MANIFEST}):
            self.refuse(f"{name} is not in its manifest")
        for name, entry in wanted.items():
            if self.members[name].size != entry["bytes"] or self.sha256(name) != entry["sha256"]:
                self.refuse(f"{name} does not match its hash: the file was changed or damaged")

    def _read_members(self) -> dict[str, Member]:
        members = self._directory()
        at = 0
        for member in members.values():
            if member.header_offset != at:
                where = "overlaps the one before it" if member.header_offset < at else "does not follow the one before"
                self.refuse(f"the member {member.name} {where}")
            if member.end > self.num_bytes or self._view[at : member.offset] != member.header:
                self.refuse(f"the header of {member.name} does not agree with the directory: changed, or not ours")
            at = member.end
        if next(reversed(members), "") != MANIFEST:
            self.refuse(f"{MANIFEST} is missing")
        manifest = members[MANIFEST]
        sha256 = hashlib.sha256(self._view[manifest.offset : manifest.end]).hexdigest()
        if self._view[at:] != _end_of_directory(list(members.values()), sha256):
            if bytes(self._view[-64:]) != sha256.encode("ascii"):
                self.refuse(f"{MANIFEST} does not match its hash: the file was changed or damaged")
            self.refuse("its directory is not as Deepwell writes it: changed, or not ours")
        return members

    def _directory(self) -> dict[str, Member]:
        """The members that the directory names. Nothing in it is believed yet."""
        at = self.num_bytes - 22 - _COMMENT_BYTES
        end = bytes(self._view[max(at, 0) :])
        if at < 0 or end[:4] != b"PK\x05\x06" or not end[20:].startswith(struct.pack("<H", _COMMENT_BYTES) + _COMMENT):
            self._refuse_foreign()
        count, size, start = struct.unpack_from("<HII", end, 10)
        if count > len(MEMBERS):
            self.refuse(f"it has {count} members, more than the {len(MEMBERS)} that an engine can have")
        if start == _FULL:
            start = at - size - 76  # the records of a large file lie between
        if start < 0 or start + size > at:
            self.refuse("its directory lies outside the file")
        left, found = self._view[start : start + size], dict[str, Member]()
        for _ in range(count):
            if left[:4] != b"PK\x01\x02" or len(left) < 46:
                self.refuse("its directory is damaged")
            flags, method, crc, *sizes, name_bytes, extra_bytes, offset = struct.unpack("<8x2H4x3I2H10xI", left[:46])
            raw, extra = bytes(left[46 : 46 + name_bytes]), bytes(left[46 + name_bytes :][:extra_bytes])
            left = left[46 + name_bytes + extra_bytes :]
            name = raw.decode("ascii", errors="backslashreplace")
            if name not in MEMBERS:
                is_path = name.startswith(("/", "\\")) or ".." in name or ":" in name
                what = "a path out of the file's own folder" if is_path else "no member of an engine"
                self.refuse(f"the member {name[:80]!r} is {what}")
            if method or flags & 1:
                how = "encrypted" if flags & 1 else "compressed"
                self.refuse(f"the member {name} is {how}; an engine's members are stored as they are")
            large = iter(struct.unpack_from(f"<{max(0, len(extra) - 4) // 8}Q", extra, min(4, len(extra))))
            stored, size, offset = (next(large, _FULL) if n == _FULL else n for n in (*sizes, offset))
            if stored != size or offset + size > self.num_bytes:
                self.refuse(
                    f"the member {name} claims {size:,} bytes, the file has {self.num_bytes:,}: cut short or changed"
                )
            if name in found:
                self.refuse(f"the member {name} is there twice")
            if name != TENSORS and size > MAX_TEXT_BYTES:
                self.refuse(f"{name} has {size:,} bytes, more than the {MAX_TEXT_BYTES:,} it may have")
            found[name] = Member(name=name, size=size, crc=crc, header_offset=offset)
        return found

    def _refuse_foreign(self) -> NoReturn:
        """Say what a file is that does not end as an engine does."""
        begin = bytes(self._view[:4096])
        if begin[:4] == b"PK\x03\x04":
            if _PADDING_ID.to_bytes(2, "little") in begin[:128] and any(
                begin[30:].startswith(name.encode()) for name in MEMBERS
            ):
                self.refuse("its end is missing: the file was cut short or changed")
            if b"data.pkl" in begin:
                self.refuse("this is a file of torch.save, which could run code; Deepwell loads none")
            self.refuse("this is a zip, but no engine")
        if begin[:1] == b"\x80":
            self.refuse("this is a file of Python objects, which could run code; Deepwell loads none")
        self.refuse("this is no engine")
