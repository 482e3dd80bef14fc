"""Documents from files: text, JSON lines, JSON, Parquet and the standard library's sources, from any place on.

A place is (number of the file, offset in it); reading from a place gives exactly the documents after it.
"""

import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from deepwell.errors import ConfigError

Place = tuple[int, int]
STDLIB = "stdlib"
TEXT = (".txt", ".md", ".py")
IN_FOLDERS = (*TEXT, ".jsonl", ".parquet")  # .json files only by name: folders are full of settings
KINDS = (*TEXT, ".jsonl", ".json", ".parquet")
_BY_RECORD = (".json", ".parquet")  # their offsets count records; those of other files count bytes
LONGEST_TEXT = 1 << 24  # bytes of a text file that become one document; longer files are cut at line ends


@dataclass(frozen=True, slots=True)
class Document:
    """A text and the place after it; `size` is how far this moves a progress bar. No text: only the place moves."""

    text: str | None
    after: Place
    size: int


class Documents(Protocol):
    """Where documents come from."""

    total: int  # the sum of all sizes, 0 where nobody knows
    identity: str  # the same as long as the inputs are the same

    def size_before(self, place: Place) -> int: ...

    def read(self, place: Place) -> Iterator[Document]: ...


class TextDocuments:
    """Documents from strings that are here already, or that an iterable gives. Resumed by reading from the start."""

    total = 0

    def __init__(self, texts: Iterable[str], identity: str = "texts") -> None:
        self._texts = texts
        self.identity = identity

    def size_before(self, _place: Place) -> int:
        return 0

    def read(self, place: Place) -> Iterator[Document]:
        for number, text in enumerate(itertools.islice(self._texts, place[1], None), start=place[1]):
            if not isinstance(text, str):
                raise ConfigError(f"document {number} is a {type(text).__name__}, not a text")
            yield Document(text, (0, number + 1), len(text))


class FileDocuments:
    """The documents of files, in the order of the inputs and, inside a folder, of the paths."""

    def __init__(self, inputs: Sequence[str | Path], text_key: str = "text") -> None:
        """List the files. Raises ConfigError where one is missing or of no known kind."""
        if not inputs:
            raise ConfigError("data prepare needs an input: files, folders, or 'stdlib'")
        self.files = [file for each in inputs for file in _files_of(each)]
        self._key = text_key
        if any(file.suffix == ".parquet" for file in self.files):
            _parquet()  # what is missing is said now, not hours later
        stats = [file.stat() for file in self.files]
        self._sizes = [stat.st_size for stat in stats]
        self.total = sum(self._sizes)
        seen = [
            (str(file.resolve()), stat.st_size, stat.st_mtime_ns) for file, stat in zip(self.files, stats, strict=True)
        ]
        self.identity = hashlib.sha256(json.dumps([text_key, seen]).encode()).hexdigest()

    def size_before(self, place: Place) -> int:
        number, offset = place
        in_bytes = number < len(self.files) and self.files[number].suffix not in _BY_RECORD
        return sum(self._sizes[:number]) + (offset if in_bytes else 0)

    def read(self, place: Place) -> Iterator[Document]:
        for number in range(place[0], len(self.files)):
            path, size = self.files[number], self._sizes[number]
            done = place[1] if number == place[0] else 0
            by_record = path.suffix in _BY_RECORD
            try:
                for text, after in _READERS.get(path.suffix, _read_text)(path, done, self._key):
                    yield Document(text, (number, after), 0 if by_record else after - done)
                    done = after
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
            if by_record:
                yield Document(None, (number + 1, 0), size)


_Item = TypeVar("_Item")


def chunks(items: Iterable[_Item], size_of: Callable[[_Item], int], size: int, most: int) -> Iterator[list[_Item]]:
    """Items in lists of at least `size` altogether, or of `most` items; the last list may be smaller."""
    chunk: list[_Item] = []
    total = 0
    for item in items:
        chunk.append(item)
        total += size_of(item)
        if total >= size or len(chunk) >= most:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def _files_of(each: str | Path) -> list[Path]:
    if str(each) == STDLIB:
        return _standard_library()
    path = Path(each)
    if path.is_file():
        if path.suffix not in KINDS:
            raise ConfigError(f"input {path} is of no known kind; known: {' '.join(KINDS)}, folders, 'stdlib'")
        return [path]
    if not path.is_dir():
        raise ConfigError(f"input: there is no file or folder {path}")
    found = _walk(path, IN_FOLDERS, lambda name: name.startswith("."))
    if not found:
        raise ConfigError(f"input: the folder {path} holds no {' '.join(IN_FOLDERS)} (.json files are given by name)")
    return found


def _standard_library() -> list[Path]:
    """The sources of Python's standard library without its tests: text that every machine has."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return _walk(Path(sysconfig.get_paths()["stdlib"]), (".py",), left_out.__contains__)


def _walk(root: Path, suffixes: tuple[str, ...], is_left_out: Callable[[str], bool]) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not is_left_out(name)]
        found += [Path(folder, name) for name in names if name.endswith(suffixes) and not is_left_out(name)]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def _read_text(path: Path, offset: int, _key: str) -> Iterator[tuple[str, int]]:
    with path.open("rb") as file:
        file.seek(offset)
        while data := file.read(LONGEST_TEXT):
            if len(data) == LONGEST_TEXT:
                data += file.readline()
            yield data.decode("utf-8", errors="replace"), file.tell()


def _read_lines(path: Path, offset: int, key: str) -> Iterator[tuple[str, int]]:
    with path.open("rb") as file:
        file.seek(offset)
        while line := file.readline():
            if line.strip():
                where = f"{path}, the line that ends at byte {file.tell()}"
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{where} is no JSON: {error}") from error
                yield _text_of(record, key, where), file.tell()


def _read_json(path: Path, offset: int, key: str) -> Iterator[tuple[str, int]]:
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    records = data if isinstance(data, list) else [data]
    for number in range(offset, len(records)):
        yield _text_of(records[number], key, f"{path}, record {number}"), number + 1


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("input: a .parquet file needs `pip install pyarrow`") from error
    return pyarrow


def _read_parquet(path: Path, offset: int, key: str) -> Iterator[tuple[str, int]]:
    pyarrow = _parquet()
    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(path)
        if key not in file.schema_arrow.names:
            raise ConfigError(f"{path} has no column {key!r} but {', '.join(file.schema_arrow.names)}: give --text-key")
        for batch in file.iter_batches(columns=[key]):
            for value in batch.column(0).to_pylist():
                number += 1
                if number > offset:
                    yield _text_of(value, key, f"{path}, row {number - 1}"), number
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} is no Parquet file: {error}") from error


def _text_of(record: Any, key: str, where: str) -> str:
    value = record
    if isinstance(record, dict):
        if key not in record:
            raise ConfigError(
                f"{where} has no {key!r} but {', '.join(map(repr, record)) or 'nothing'}: give --text-key"
            )
        value = record[key]
    if not isinstance(value, str):
        raise ConfigError(f"{where}: the text is a {type(value).__name__}, not a string")
    return value


_READERS: dict[str, Callable[[Path, int, str], Iterator[tuple[str, int]]]] = {
    ".jsonl": _read_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
