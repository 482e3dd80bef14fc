"""Tokenizers for text: bytes (built in), a `tokenizers` JSON file or folder, or a tokenizer object."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepwell.errors import ConfigError

BYTES = "bytes"
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end|>", "<|im_end|>", "[EOS]", "[SEP]")


class TextTokenizer:
    """Text to tokens; `eos` ends a document and is not part of what `encode` gives.

    `ids` gives the tokens of texts; that they are inside the vocabulary is checked here.
    """

    def __init__(
        self, name: str, vocab: int, eos: int, sha256: str, ids: Callable[[list[str]], Iterable[list[int]]]
    ) -> None:
        self.name, self.vocab, self.eos, self.sha256, self._ids = name, vocab, eos, sha256, ids
        if not 0 <= eos < vocab:
            raise ConfigError(f"tokenizer {name}: its end token {eos} is outside its vocabulary of {vocab}")

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        clean = [text.encode("utf-8", errors="replace").decode() for text in texts]  # JSON may hold lone surrogates
        found = [np.asarray(ids, dtype=np.int64) for ids in self._ids(clean)]
        largest = max((int(ids.max()) for ids in found if len(ids)), default=0)
        if largest >= self.vocab:
            raise ConfigError(f"tokenizer {self.name} gave token {largest}, its vocabulary has {self.vocab}")
        return found


class ByteTokenizer(TextTokenizer):
    """UTF-8 bytes as tokens 0 to 255; 256 ends a document."""

    def __init__(self) -> None:
        super().__init__(BYTES, 257, 256, hashlib.sha256(b"deepwell bytes 1").hexdigest(), lambda _: ())

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8) for text in texts]


class _BareErrors(AbstractContextManager[None]):
    """Turns the bare `Exception` that the tokenizers package raises on a bad file into a ConfigError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is Exception:
            raise ConfigError(f"--tokenizer: {self._path} is no tokenizer's JSON: {error}") from error


def make_tokenizer(tokenizer: Any, *, eos: str | None = None) -> TextTokenizer:
    """The tokenizer that `tokenizer` means: "bytes", a file or folder, or an object. `eos` names the end token.

    Raises ConfigError where it is none, or where no token ends a document.
    """
    if isinstance(tokenizer, TextTokenizer):
        return tokenizer
    if tokenizer is None or tokenizer == BYTES:
        if eos is not None:
            raise ConfigError(f"--eos is {eos!r}, but the byte tokenizer ends documents with token 256: leave it out")
        return ByteTokenizer()
    if isinstance(tokenizer, str | Path):
        return _from_file(Path(tokenizer), eos)
    if hasattr(tokenizer, "encode_batch") and hasattr(tokenizer, "to_str"):
        return _from_fast(tokenizer, "tokenizer", eos, [])
    if callable(tokenizer) and hasattr(tokenizer, "eos_token_id") and hasattr(tokenizer, "get_vocab"):
        return _from_transformers(tokenizer, None if eos is None else tokenizer.convert_tokens_to_ids(eos))
    raise ConfigError(
        f"tokenizer is a {type(tokenizer).__name__}; give 'bytes', a tokenizer's JSON file, or a tokenizer object of "
        "tokenizers or transformers"
    )


def _from_transformers(tokenizer: Any, eos: int | None) -> TextTokenizer:
    """Of a tokenizer object of Hugging Face's transformers, called as those are."""
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    end = tokenizer.eos_token_id if eos is None else eos
    if end is None:
        raise ConfigError(f"tokenizer {name} has no eos_token: set one, documents end with it")
    known = tokenizer.get_vocab()
    sha256 = hashlib.sha256(json.dumps(sorted(known.items())).encode()).hexdigest()

    def ids(texts: list[str]) -> list[list[int]]:
        return list(tokenizer(texts, add_special_tokens=False, truncation=False)["input_ids"])

    vocab = max(len(tokenizer), *(token + 1 for token in known.values()))
    return TextTokenizer(Path(name).name, vocab, end, sha256, ids)


def _from_file(path: Path, eos: str | None) -> TextTokenizer:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"--tokenizer: there is no file {file}; give a tokenizer's JSON or 'bytes'")
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError("--tokenizer: a JSON file needs `pip install tokenizers`; 'bytes' needs nothing") from error
    try:
        text = file.read_text(encoding="utf-8")
        is_one = "model" in json.loads(text)
        settings = file.with_name("tokenizer_config.json")
        end = json.loads(settings.read_text(encoding="utf-8")).get("eos_token") if settings.is_file() else None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"--tokenizer: {file} is no tokenizer's JSON: {error}") from error
    if not is_one:
        raise ConfigError(f"--tokenizer: {file} is no tokenizer's JSON: it names no model")
    with _BareErrors(file):
        found = tokenizers.Tokenizer.from_str(text)
    named = end.get("content") if isinstance(end, dict) else end
    return _from_fast(found, file.parent.name if path.is_dir() else file.name, eos, [named] if named else [])


def _from_fast(tokenizer: Any, name: str, eos: str | None, first: Sequence[str]) -> TextTokenizer:
    """Of a `tokenizers.Tokenizer`; `first` are end tokens that go before the usual ones."""
    sha256 = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    wanted = [eos] if eos is not None else [*first, *_END_TOKENS]
    end = next((token for text in wanted if (token := tokenizer.token_to_id(text)) is not None), None)
    if end is None:
        raise ConfigError(
            f"--eos: tokenizer {name} has no token {eos!r}"
            if eos is not None
            else f"--tokenizer: {name} has none of the usual end tokens ({' '.join(_END_TOKENS)}): name it with --eos"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)  # on all cores

    def ids(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in encode(texts, add_special_tokens=False)]

    vocab = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return TextTokenizer(name, vocab, end, sha256, ids)
