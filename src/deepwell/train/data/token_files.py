"""Token files: NAME.tokens (raw words), NAME.docs (where documents start), NAME.json (what they are).

The JSON is written last and carries a check of itself: a shard without it is unfinished, one whose sizes differ is
damaged. A folder that `deepwell data prepare` made holds train/ and val/ with shards, and dataset.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepwell.errors import ConfigError
from deepwell.files import hash_file, write_whole

FORMAT, SCHEMA = "deepwell tokens", 1
DATASET = "dataset.json"  # of a prepared folder: written when everything is there
PROGRESS = "progress.json"  # of a folder that is being prepared
_CHUNK = 1 << 24


def dtype_for(vocab: int) -> np.dtype[Any]:
    """The narrowest little-endian word that holds every token of the vocabulary."""
    if not 0 < vocab <= 1 << 32:
        raise ConfigError(f"a vocabulary of {vocab} tokens: token files hold 1 to 2^32")
    return np.dtype("<u2") if vocab <= 1 << 16 else np.dtype("<u4")


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write `data` with a check of itself: all of it or nothing."""
    write_whole(path, json.dumps({**data, "check": _check_of(data)}, indent=1) + "\n", synced=True)


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote. Raises ConfigError where the file is damaged or something else."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f"{path} is not of Deepwell's token files: make some with `deepwell data prepare`")
    if data.get("schema") != SCHEMA:
        raise ConfigError(
            f"{path} has schema {data.get('schema')}, this version reads {SCHEMA}: update Deepwell or prepare it again"
        )
    check = data.pop("check", None)
    if check != _check_of(data):
        raise ConfigError(f"{path} is damaged (its check does not fit its content): prepare the data again")
    return data


def _check_of(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """What NAME.json says."""

    dtype: str
    count: int
    documents: int
    vocab: int
    eos: int
    tokenizer: str
    tokenizer_sha256: str
    sha256: str
    docs_sha256: str
    seq_len: int | None = None  # what `data prepare --seq-len` said; only a default

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any], path: Path) -> ShardInfo:
        names = {field.name for field in fields(cls)}
        missing = sorted(names - data.keys())
        if missing:
            raise ConfigError(f"{path} does not name {', '.join(missing)}: it is no shard of token files")
        info = cls(**{name: data[name] for name in names})
        if info.dtype != dtype_for(info.vocab).name:
            raise ConfigError(f"{path}: {info.vocab} tokens are kept as {dtype_for(info.vocab).name}, not {info.dtype}")
        return info


class Shard:
    """One shard, mapped into memory; sizes and check are looked at on opening."""

    def __init__(self, path: Path) -> None:
        """Open the shard of NAME.json. Raises ConfigError where a file is missing, damaged or foreign."""
        self.path = path
        self.info = ShardInfo.from_dict(read_json(path), path)
        word = dtype_for(self.info.vocab)
        self.tokens: NDArray[Any] = self._map(".tokens", word, self.info.count)
        self.starts: NDArray[Any] = self._map(".docs", np.dtype("<u8"), self.info.documents)
        ends = (int(self.starts[0]), int(self.starts[-1])) if self.info.documents else (0, 0)
        if ends[0] != 0 or ends[1] >= max(self.info.count, 1) or bool(self.info.count) != bool(self.info.documents):
            raise ConfigError(f"{path.with_suffix('.docs')} is damaged: documents start at {ends[0]} to {ends[1]}")

    def _map(self, suffix: str, word: np.dtype[Any], count: int) -> NDArray[Any]:
        path = self.path.with_suffix(suffix)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}), but {self.path.name} names it") from error
        if size != count * word.itemsize:
            raise ConfigError(
                f"{path} has {size} bytes, {self.path.name} says {count * word.itemsize}: it is cut off or another "
                "file; prepare the data again"
            )
        return np.memmap(path, dtype=word, mode="r") if count else np.empty(0, dtype=word)

    def verify(self) -> None:
        """Read everything: hashes, token range, order of documents. Raises ConfigError that names the file."""
        for suffix, expected in ((".tokens", self.info.sha256), (".docs", self.info.docs_sha256)):
            path = self.path.with_suffix(suffix)
            if hash_file(path) != expected:
                raise ConfigError(f"{path} is damaged: its hash is not the one of {self.path.name}")
        for begin in range(0, self.info.count, _CHUNK):
            if int(self.tokens[begin : begin + _CHUNK].max()) >= self.info.vocab:
                raise ConfigError(f"{self.path.with_suffix('.tokens')} holds tokens outside {self.info.vocab}")
        if not bool(np.all(self.starts[1:] > self.starts[:-1])):
            raise ConfigError(f"{self.path.with_suffix('.docs')} is damaged: its documents are not in order")


class TokenFolder:
    """Shards that belong together, as one run of tokens."""

    def __init__(self, shards: Sequence[Shard], path: str) -> None:
        self.shards = tuple(shards)
        self.path = path
        self.info = self.shards[0].info
        for shard in self.shards:
            for name in ("vocab", "eos", "tokenizer_sha256"):
                one, other = getattr(self.info, name), getattr(shard.info, name)
                if one != other:
                    raise ConfigError(f"{shard.path} has {name} {other}, {self.shards[0].path} has {one}: not one set")
        self.bases = np.cumsum([0, *(shard.info.count for shard in self.shards)])

    @classmethod
    def open(cls, path: str | Path | Sequence[str | Path]) -> TokenFolder:
        """The shards of a folder, of one file (NAME, NAME.json or NAME.tokens), or of several of these in order."""
        paths = [path] if isinstance(path, str | Path) else list(path)
        if not paths:
            raise ConfigError("data: the list of token files is empty")
        shards = [Shard(file) for each in paths for file in _shard_files(Path(each))]
        return cls(shards, ", ".join(map(str, paths)))

    def __len__(self) -> int:
        return int(self.bases[-1])

    @property
    def documents(self) -> int:
        return sum(shard.info.documents for shard in self.shards)

    @property
    def sha256(self) -> str:
        """Of the tokens and documents of all shards in order."""
        text = "".join(shard.info.sha256 + shard.info.docs_sha256 for shard in self.shards)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        counts = {"tokens": len(self), "documents": self.documents, "shards": len(self.shards)}
        names = ("vocab", "dtype", "eos", "tokenizer", "tokenizer_sha256", "seq_len")
        shared = {name: getattr(self.info, name) for name in names}
        return {"path": self.path, **counts, **shared, "sha256": self.sha256}

    def read(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens [begin, end) and the places in them where documents start, across shards."""
        tokens, starts = np.empty(end - begin, dtype=np.int64), []
        number = int(np.searchsorted(self.bases, begin, side="right")) - 1
        done = begin
        while done < end:
            shard, base = self.shards[number], int(self.bases[number])
            until = min(end, int(self.bases[number + 1]))
            tokens[done - begin : until - begin] = shard.tokens[done - base : until - base]
            first, last = np.searchsorted(shard.starts, [done - base, until - base])
            starts.append(shard.starts[first:last].astype(np.int64) + (base - begin))
            done, number = until, number + 1
        if len(tokens) and int(tokens.max()) >= self.info.vocab:
            raise ConfigError(
                f"{self.path}: token {int(tokens.max())} is outside the vocabulary of {self.info.vocab}: the file is "
                "damaged; `deepwell data info --verify` names the shard"
            )
        return tokens, np.concatenate(starts) if starts else np.empty(0, dtype=np.int64)


def _shard_files(path: Path) -> list[Path]:
    """The NAME.json files that `path` means."""
    if not path.is_dir():
        file = path if path.suffix == ".json" else path.with_suffix(".json")
        if path.suffix not in ("", ".json", ".tokens", ".docs"):
            raise ConfigError(f"data: {path} is no token file: make some with `deepwell data prepare {path} -o FOLDER`")
        if file.is_file():
            return [file]
        if path.exists():
            raise ConfigError(f"data: {path} has no {file.name} beside it: it is unfinished or no token file")
        raise ConfigError(f"data: there is no file or folder {path}")
    if (path / PROGRESS).exists() and not (path / DATASET).exists():
        raise ConfigError(f"data: {path} was not finished: run the same `deepwell data prepare` again, it goes on")
    folder = path / "train" if (path / DATASET).exists() else path
    found = sorted(file for file in folder.glob("*.json") if file.with_suffix(".tokens").exists())
    left = sorted(file.name for file in folder.glob("*.tokens") if not file.with_suffix(".json").exists())
    if left:
        raise ConfigError(f"data: {folder} is incomplete: {', '.join(left[:3])} has no JSON; prepare the data again")
    if not found:
        raise ConfigError(
            f"data: {folder} holds no token files: make some with `deepwell data prepare INPUT -o FOLDER`"
        )
    if (path / DATASET).exists():
        expected = read_json(path / DATASET)["splits"]["train"]["shards"]
        if expected != len(found):
            raise ConfigError(f"data: {folder} has {len(found)} shards, {DATASET} says {expected}: some are missing")
    return found


def describe(path: str | Path, *, verify: bool = False) -> dict[str, Any]:
    """What `deepwell data info` prints of a folder or file; `verify` reads every token and compares hashes."""
    path = Path(path)
    is_prepared = path.is_dir() and (path / DATASET).exists()
    names = sorted(read_json(path / DATASET)["splits"]) if is_prepared else [""]
    splits = {}
    for name in names:
        folder = TokenFolder.open(path / name)
        if verify:
            for shard in folder.shards:
                shard.verify()
        splits[name or "all"] = folder.to_dict()
    return {"path": str(path), "verified": verify, "splits": splits}
