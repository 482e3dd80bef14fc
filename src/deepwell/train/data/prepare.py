"""Text to token files: written in order, safe to interrupt at any moment, and continued by the same call.

Tokens are appended and flushed; then progress.json says how far they count. A call that finds one cuts the files back
to it and goes on, so that a run with interruptions writes the same bytes as one without.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from deepwell.errors import ConfigError
from deepwell.files import hash_file
from deepwell.train.data.documents import Document, Documents, FileDocuments, Place, chunks
from deepwell.train.data.token_files import (
    DATASET,
    FORMAT,
    PROGRESS,
    SCHEMA,
    ShardInfo,
    describe,
    dtype_for,
    read_json,
    write_json,
)
from deepwell.train.data.tokenizer import TextTokenizer, make_tokenizer

SHARD_TOKENS = 1 << 28
_CHUNK_CHARS, _CHUNK_DOCUMENTS = 1 << 22, 4096  # given to the tokenizer at once
_COMMIT_CHARS = 1 << 25  # lost at most by an interruption
_LOCK = ".lock"


@dataclass(slots=True)
class _Shard:
    """One shard's counts; `closed` shards grow no more."""

    count: int = 0
    documents: int = 0
    closed: bool = False


@dataclass(slots=True)
class _Split:
    """The shards of one split, the last of them open for writing."""

    folder: Path
    shards: list[_Shard] = field(default_factory=list)
    _files: tuple[BinaryIO, BinaryIO] | None = None

    def path(self, number: int, suffix: str) -> Path:
        return self.folder / f"{number:05d}{suffix}"

    def append(self, tokens: NDArray[Any], shard_tokens: int) -> None:
        """Add one document; documents are never cut at the end of a shard."""
        if not self.shards or self.shards[-1].closed:
            self.shards.append(_Shard())
        shard = self.shards[-1]
        if self._files is None:
            number = len(self.shards) - 1
            self._files = (self.path(number, ".tokens").open("ab"), self.path(number, ".docs").open("ab"))
        self._files[0].write(tokens.tobytes())
        self._files[1].write(shard.count.to_bytes(8, "little"))
        shard.count += len(tokens)
        shard.documents += 1
        if shard.count >= shard_tokens:
            self.close_shard()

    def close_shard(self) -> None:
        if self.shards:
            self.shards[-1].closed = True
        self.flush()
        self.release()

    def flush(self) -> None:
        for file in self._files or ():
            file.flush()
            os.fsync(file.fileno())

    def release(self) -> None:
        for file in self._files or ():
            file.close()
        self._files = None

    def restore(self, shards: list[dict[str, Any]], word: int) -> None:
        """Cut the files back to what counts; remove what was begun later."""
        self.shards = [_Shard(**shard) for shard in shards]
        for path in self.folder.iterdir():
            stem = path.name.split(".")[0]
            if not (stem.isdigit() and int(stem) < len(self.shards)):
                path.unlink()
        for number, shard in enumerate(self.shards):
            for suffix, size in ((".tokens", shard.count * word), (".docs", shard.documents * 8)):
                path = self.path(number, suffix)
                if not path.is_file() or path.stat().st_size < size:
                    raise ConfigError(f"{path} is missing or shorter than {PROGRESS} says: start again with --restart")
                os.truncate(path, size)

    def finish(self, info: Callable[..., ShardInfo]) -> None:
        """Write the JSON of the closed shards that have none."""
        for number, shard in enumerate(self.shards):
            json_file = self.path(number, ".json")
            if shard.closed and not json_file.exists():
                hashes = [hash_file(self.path(number, suffix)) for suffix in (".tokens", ".docs")]
                found = info(count=shard.count, documents=shard.documents, sha256=hashes[0], docs_sha256=hashes[1])
                write_json(json_file, found.to_dict())


class _TokenWriter:
    """A folder that is being prepared. `options` decide the bytes: a call goes on only where they are the same."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options = folder, options
        self.place: Place = (0, 0)
        self.read, self.empty = 0, 0
        names = ("train", "val") if options["val_fraction"] else ("train",)
        self.splits = {name: _Split(folder / name) for name in names}
        self.word = dtype_for(options["vocab"])

    def start(self) -> int:
        """Begin, or go on where an earlier call stopped; the number of documents that it had read."""
        for split in self.splits.values():
            split.folder.mkdir(exist_ok=True)
        kept: dict[str, list[dict[str, Any]]] = {}
        if (self.folder / PROGRESS).exists():
            known = read_json(self.folder / PROGRESS)
            if "place" not in known:
                raise ConfigError(f"{self.folder} was being cleared when that was interrupted: call with --restart")
            _compare(known["options"], self.options, self.folder)
            self.place = (known["place"][0], known["place"][1])
            self.read, self.empty, kept = known["read"], known["empty"], known["splits"]
        for name, split in self.splits.items():
            split.restore(kept.get(name, []), self.word.itemsize)
        self.commit()
        return self.read

    def add(self, documents: Sequence[Document], tokenizer: TextTokenizer) -> None:
        texts = [document.text for document in documents if document.text is not None]
        for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
            self.read += 1
            if len(ids):
                split = "val" if _is_held_out(text, self.options["val_fraction"]) else "train"
                tokens = np.append(ids.astype(self.word), np.asarray([tokenizer.eos], dtype=self.word))
                self.splits[split].append(tokens, self.options["shard_tokens"])
            else:
                self.empty += 1
        self.place = documents[-1].after

    def commit(self) -> None:
        """Make what was written count."""
        for split in self.splits.values():
            split.flush()
        facts = {
            "options": self.options,
            "place": list(self.place),
            "read": self.read,
            "empty": self.empty,
            "splits": {name: [asdict(shard) for shard in split.shards] for name, split in self.splits.items()},
        }
        write_json(self.folder / PROGRESS, {"format": FORMAT, "schema": SCHEMA, **facts})
        for split in self.splits.values():
            split.finish(self._info)

    def _info(self, **facts: Any) -> ShardInfo:
        names = ("vocab", "eos", "tokenizer", "tokenizer_sha256", "seq_len")
        return ShardInfo(dtype=self.word.name, **{name: self.options[name] for name in names}, **facts)

    def end(self) -> None:
        """Close the last shards and say that everything is there."""
        for name, split in self.splits.items():
            if not split.shards:
                fraction = self.options["val_fraction"]
                share = f" with --val-fraction {fraction:g}" if fraction else ""
                raise ConfigError(
                    f"{self.read} documents ({self.empty} of them empty){share} leave nothing for {name}: give more "
                    "documents (a share of the documents is held out, never a part of one)"
                )
            split.close_shard()
        self.commit()
        counts = {
            name: {
                "shards": len(split.shards),
                "tokens": sum(shard.count for shard in split.shards),
                "documents": sum(shard.documents for shard in split.shards),
            }
            for name, split in self.splits.items()
        }
        facts = {"options": self.options, "read": self.read, "empty": self.empty, "splits": counts}
        write_json(self.folder / DATASET, {"format": FORMAT, "schema": SCHEMA, **facts})
        (self.folder / PROGRESS).unlink()

    def write(
        self, documents: Documents, tokenizer: TextTokenizer, advance: Callable[[float], None], commit_chars: int
    ) -> None:
        """Add all documents from its place on."""
        advance(documents.size_before(self.place))
        chars = 0
        at_once = min(_CHUNK_CHARS, commit_chars)
        for chunk in chunks(documents.read(self.place), _num_chars, at_once, _CHUNK_DOCUMENTS):
            self.add(chunk, tokenizer)
            chars += sum(map(_num_chars, chunk))
            if chars >= commit_chars:
                self.commit()
                chars = 0
            advance(sum(document.size for document in chunk))

    def release(self) -> None:
        for split in self.splits.values():
            split.release()


def prepare_tokens(
    inputs: str | Path | Sequence[str | Path] | Documents,
    folder: str | Path,
    *,
    tokenizer: Any = "bytes",
    eos: str | None = None,
    text_key: str = "text",
    seq_len: int | None = None,
    val_fraction: float = 0.0,
    shard_tokens: int = SHARD_TOKENS,
    restart: bool = False,
    advance: Callable[[float], None] | None = None,
    commit_chars: int = _COMMIT_CHARS,
) -> dict[str, Any]:
    """Write the documents of `inputs` as token files under `folder`; what `describe` says of them, and what was done.

    `inputs` are files, folders and "stdlib", or Documents (`TextDocuments(strings)`). A call that was interrupted goes
    on when it is called again with the same arguments. Raises ConfigError.
    """
    if seq_len is not None and seq_len < 2:
        raise ConfigError(f"--seq-len is {seq_len}; a window needs at least 2 tokens")
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"--val-fraction is {val_fraction}; give 0 to below 1")
    if shard_tokens < 1:
        raise ConfigError(f"--shard-tokens is {shard_tokens}; give at least 1")
    tokens = make_tokenizer(tokenizer, eos=eos)
    if isinstance(inputs, str | Path):
        inputs = [inputs]
    documents: Documents = FileDocuments(inputs, text_key) if isinstance(inputs, Sequence) else inputs
    options = {
        "inputs": documents.identity, "tokenizer": tokens.name, "tokenizer_sha256": tokens.sha256,
        "vocab": tokens.vocab, "eos": tokens.eos, "seq_len": seq_len, "val_fraction": val_fraction,
        "shard_tokens": shard_tokens,
    }  # fmt: skip
    folder, resumed, wrote = Path(folder), 0, 0
    try:
        with _locked(folder):
            for left in (*folder.glob(".*.json.*.partial"), *folder.glob("*/.*.json.*.partial")):
                left.unlink()  # of a write that was interrupted
            if restart:
                _clear(folder)
            if (folder / DATASET).exists():
                _compare(read_json(folder / DATASET)["options"], options, folder)
                (folder / PROGRESS).unlink(missing_ok=True)
            else:
                _refuse_foreign(folder)
                _keep_tokenizer(tokenizer, folder)
                writer = _TokenWriter(folder, options)
                try:
                    resumed = writer.start()
                    writer.write(documents, tokens, advance or (lambda _: None), commit_chars)
                    writer.end()
                finally:
                    writer.release()
                wrote = writer.read - resumed
            facts = read_json(folder / DATASET)
            counts = {"resumed": resumed, "wrote": wrote, "read": facts["read"], "empty": facts["empty"]}
            return {**describe(folder), **counts}
    except OSError as error:
        raise ConfigError(f"writing {folder}: {error}; what was written counts: make the same call to go on") from error


def _num_chars(document: Document) -> int:
    return len(document.text or "")


def _is_held_out(text: str, fraction: float) -> bool:
    """By content, so that copies of a document fall on the same side."""
    if not fraction:
        return False
    digest = hashlib.sha256(text.encode("utf-8", errors="replace")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _compare(known: dict[str, Any], options: dict[str, Any], folder: Path) -> None:
    differ = [
        f"{name} was {known.get(name)!r}, now {value!r}" if name != "inputs" else "the input files are others"
        for name, value in options.items()
        if known.get(name) != value
    ]
    if differ:
        raise ConfigError(
            f"{folder} was begun with other options ({'; '.join(differ)}): give the same, another folder, or --restart"
        )


def _refuse_foreign(folder: Path) -> None:
    """Never write between files of somebody else."""
    if (folder / PROGRESS).exists():
        return
    strange = sorted(path.name for path in folder.iterdir() if path.name not in _OWN)
    if strange or any(next(path.iterdir(), None) for path in folder.iterdir() if path.is_dir()):
        raise ConfigError(f"{folder} holds other files ({', '.join(strange[:3]) or 'shards'}): give an empty folder")


_OWN = {_LOCK, DATASET, PROGRESS, "train", "val", "tokenizer.json"}


def _clear(folder: Path) -> None:
    """Remove what an earlier call wrote, and only that: a folder without its marks is not touched."""
    if not ((folder / DATASET).exists() or (folder / PROGRESS).exists()):
        return
    if (folder / DATASET).exists():
        (folder / DATASET).replace(folder / PROGRESS)  # unfinished from here on, whatever interrupts this
    for name in ("train", "val"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / PROGRESS).unlink()


def _keep_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Put a tokenizer's file beside its tokens: they mean nothing without it."""
    if isinstance(tokenizer, str | Path) and tokenizer != "bytes":
        path = Path(tokenizer)
        shutil.copyfile(path / "tokenizer.json" if path.is_dir() else path, folder / "tokenizer.json")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time; the lock goes with the process, however it ends."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"-o: {folder} is a file; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{folder} is being written by another process") from error
        file.write(json.dumps(os.getpid()))
        yield
