"""Text that every machine has, as tokens: the sources of the standard library and of installed packages.

Each content once, in an order that depends on content alone, 2% of the files held out by their hash; a byte-level BPE
trained on the rest; tokens as uint16 arrays in the cache, under a name that says which text and which tokenizer.
"""

import hashlib
import json
import logging
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepwell.errors import ConfigError
from deepwell.files import whole_file, write_whole
from deepwell.hardware.cache import cache_dir
from deepwell.hardware.progress import bar
from deepwell.train.data.documents import chunks

# Python first; what follows is taken only where the limit leaves room.
SUFFIXES = ((".py",), (".pyi", ".pyx", ".pxd", ".rst", ".md"), (".h", ".hpp", ".c", ".cc", ".cpp", ".cu", ".cuh"))
SMALLEST, LARGEST = 200, 1_000_000
HELD_OUT_EVERY = 50
END = "<|end|>"  # between files; its token is 0
_SAMPLE_BYTES = 48_000_000  # more text than this changes a 32k vocabulary little and costs minutes on few cores
_CHUNK_BYTES = 4_000_000
_log = logging.getLogger("deepwell.bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Files by content: (digest, text) in the order of the digests, split into training and held-out."""

    train: tuple[str, ...]
    held: tuple[str, ...]
    fingerprint: str

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.train)) + sum(map(len, self.held))


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokens on disk, and what they were made from."""

    train: str
    held: str
    tokenizer: str
    fingerprint: str  # of text and tokenizer: runs compare only where it is equal
    vocab: int
    num_files: int
    num_bytes: int
    num_train: int
    num_held: int

    def to_dict(self) -> dict[str, Any]:
        """What belongs beside a result: no paths of this machine."""
        facts = asdict(self)
        return {name: value for name, value in facts.items() if name not in ("train", "held", "tokenizer")}

    def __str__(self) -> str:
        return (
            f"{self.num_bytes / 1e6:.0f} MB of text in {self.num_files:,} files: {self.num_train / 1e6:.1f} M training "
            f"tokens, {self.num_held / 1e6:.2f} M held out, vocabulary {self.vocab} ({self.fingerprint})"
        )


def python_roots() -> tuple[Path, ...]:
    """The folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    found = dict.fromkeys((paths["stdlib"], paths["purelib"], paths["platlib"], *packages))
    return tuple(Path(path) for path in found if Path(path).is_dir())


def read_text(roots: Sequence[Path], limit_bytes: float) -> Text:
    """The files under `roots`, each content once whatever its spacing, at most `limit_bytes`."""
    found: dict[str, bytes] = {}
    kept: list[str] = []
    size = 0
    for suffixes in SUFFIXES:
        if size >= limit_bytes:
            break
        earlier = set(found)
        for digest, data in _contents(roots, suffixes):
            # Of copies that differ in spacing the smallest, wherever they lie.
            found[digest] = min(found.get(digest, data), data) if digest not in earlier else found[digest]
        for digest in sorted(found.keys() - earlier):
            if size < limit_bytes:
                kept.append(digest)
                size += len(found[digest])
    kept.sort()
    texts = {digest: found[digest].decode("utf-8", errors="ignore") for digest in kept}
    train = tuple(text for digest, text in texts.items() if not _is_held_out(digest))
    held = tuple(text for digest, text in texts.items() if _is_held_out(digest))
    if not train or not held:
        raise ConfigError(f"--text: {len(kept)} files under {', '.join(map(str, roots))} are too few to hold some out")
    return Text(train=train, held=held, fingerprint=hashlib.sha256("".join(kept).encode()).hexdigest()[:12])


def _is_held_out(digest: str) -> bool:
    return int(digest[:8], 16) % HELD_OUT_EVERY == 0


def _contents(roots: Sequence[Path], suffixes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """(digest, content) of the readable files of a fit size, in the order of their paths."""
    paths = [
        os.path.join(folder, name)  # noqa: PTH118 - tens of thousands of files
        for root in roots
        for folder, _, names in os.walk(root)
        for name in names
        if name.endswith(suffixes)
    ]
    paths.sort()
    with bar(f"reading {suffixes[0]} files", len(paths)) as advance, ThreadPoolExecutor() as pool:
        for found in pool.map(_read, paths, chunksize=64):
            advance(1)
            if found is not None:
                yield found


def _has_text(root: Path) -> bool:
    """Whether one file of a known kind and a fit size lies there."""
    known = tuple(suffix for suffixes in SUFFIXES for suffix in suffixes)
    paths = (Path(folder, name) for folder, _, names in os.walk(root) for name in names if name.endswith(known))
    return any(_fits(path) for path in paths)


def _fits(path: Path) -> bool:
    try:
        return SMALLEST < path.stat().st_size < LARGEST
    except OSError:
        return False


def _read(path: str) -> tuple[str, bytes] | None:
    try:
        data = Path(path).read_bytes() if _fits(Path(path)) else b""
    except OSError:
        return None
    # Vendored copies often differ in nothing but line ends and indentation: spacing does not count.
    return (hashlib.sha256(data.translate(None, b" \t\r\n")).hexdigest(), data) if data else None


def make_corpus(
    roots: Sequence[Path] | None = None,
    *,
    megabytes: float = 190.0,
    vocab: int = 32768,
    tokenizer: Path | None = None,
    folder: Path | None = None,
) -> Corpus:
    """The corpus of these folders, from the cache where it is there. `tokenizer` is a JSON to use instead of training.

    Raises ConfigError where text or tokenizer are no use.
    """
    if not 300 <= vocab <= 65536:
        raise ConfigError(f"--vocab is {vocab}; a byte-level BPE in 16 bits takes 300 to 65536")
    if not megabytes > 0:
        raise ConfigError(f"--megabytes is {megabytes}; it must be above 0")
    for root in roots or ():
        if not root.is_dir():
            raise ConfigError(f"--text: there is no folder {root}")
        if not _has_text(root):
            kinds = " ".join(suffix for suffixes in SUFFIXES for suffix in suffixes)
            raise ConfigError(f"--text: no file under {root} is {SMALLEST} bytes to 1 MB of {kinds}")
    # Reading the text can take minutes: what is wrong with a given tokenizer is said before.
    given: Any = None if tokenizer is None else _load_tokenizer(tokenizer)
    folder = folder or cache_dir() / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    text = read_text(roots or python_roots(), megabytes * 1e6)
    bpe, path = _own_bpe(text, vocab, folder) if tokenizer is None else (given, tokenizer)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    fingerprint = f"{text.fingerprint}-{digest}"
    train, held = (folder / f"{name}-{fingerprint}.npy" for name in ("train", "held"))
    return Corpus(
        train=str(train),
        held=str(held),
        tokenizer=str(path),
        fingerprint=fingerprint,
        vocab=bpe.get_vocab_size(),
        num_files=len(text.train) + len(text.held),
        num_bytes=text.num_bytes,
        num_train=_tokenize(bpe, text.train, train, "train"),
        num_held=_tokenize(bpe, text.held, held, "held"),
    )


def _own_bpe(text: Text, vocab: int, folder: Path) -> tuple[Any, Path]:
    """The BPE of this text and the file it is kept in: from the cache where it is there and whole, else trained."""
    path = folder / f"bpe-{vocab}-{text.fingerprint}.json"
    if path.is_file():
        try:
            return _load_tokenizer(path), path
        except ConfigError:
            _log.warning("the tokenizer in %s is damaged: it is rebuilt", path)
    bpe = _byte_level({}, [])
    tokenizers = _tokenizers()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=_alphabet(), special_tokens=[END], show_progress=sys.stderr.isatty()
    )
    # Texts evenly spread over the corpus, as many as fit the sample.
    step = max(1, -(-sum(map(len, text.train)) // _SAMPLE_BYTES))
    bpe.train_from_iterator(text.train[::step], trainer)
    write_whole(path, bpe.to_str())
    return bpe, path


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError("the package tokenizers is not installed: pip install tokenizers") from error
    return tokenizers


def _alphabet() -> list[str]:
    """A character for each byte, as ByteLevel writes them."""
    return list(_tokenizers().pre_tokenizers.ByteLevel.alphabet())


def _byte_level(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    tokenizers = _tokenizers()
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    if vocab:
        bpe.add_special_tokens([END])
    return bpe


def _load_tokenizer(path: Path) -> Any:
    """The tokenizer that this command wrote to `path`. Raises ConfigError where it is something else.

    Made from vocabulary and merges once those are known to be sound: the package's own reader raises bare Exceptions.
    """
    if not path.is_file():
        raise ConfigError(f"--tokenizer: there is no file {path}")
    try:
        data = json.loads(path.read_bytes())
        kind, vocab = data["pre_tokenizer"]["type"], data["model"]["vocab"]
        # Older versions of the package write the two parts of a merge with a space between them.
        merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in data["model"]["merges"]]
        is_sound = sorted(vocab.values()) == list(range(len(vocab))) and all(
            {left, right, left + right} <= vocab.keys() for left, right in merges
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--tokenizer: {path} is no tokenizer's JSON ({type(error).__name__}: {error}): give one that this command "
            "wrote, or none"
        ) from error
    if not (is_sound and kind == "ByteLevel" and vocab.get(END) == 0 and len(vocab) <= 65536):
        raise ConfigError(
            f"--tokenizer: {path} was not written by this command: that is a byte-level BPE whose token 0 is {END}"
        )
    if not vocab.keys() >= set(_alphabet()):
        raise ConfigError(f"--tokenizer: {path} has no token for some bytes: give one that this command wrote, or none")
    return _byte_level(vocab, merges)


def _tokenize(bpe: Any, texts: Sequence[str], path: Path, label: str) -> int:
    """Write the texts' tokens to `path` unless it is there already, and whole; their number."""
    import numpy as np

    if path.is_file():
        try:
            kept = np.lib.format.open_memmap(path, mode="r")
            if kept.dtype == np.uint16 and kept.ndim == 1:
                return len(kept)
        except (OSError, ValueError, EOFError):
            pass
        _log.warning("the tokens in %s are damaged: they are rebuilt", path)
    encode = getattr(bpe, "encode_batch_fast", bpe.encode_batch)
    pieces: list[Any] = []
    end = np.zeros(1, dtype=np.uint16)
    with bar(f"tokenizing {label}", sum(map(len, texts))) as advance:
        for chunk in chunks(texts, len, _CHUNK_BYTES, len(texts)):
            for encoding in encode(chunk, add_special_tokens=False):
                pieces += [np.array(encoding.ids, dtype=np.uint16), end]
            advance(sum(map(len, chunk)))
    tokens = np.concatenate(pieces)
    with whole_file(path) as partial, partial.open("wb") as file:
        np.save(file, tokens)
    return len(tokens)
