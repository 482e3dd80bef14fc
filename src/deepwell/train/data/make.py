"""`make_loader`: the loader for whatever data is given."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from deepwell.errors import ConfigError
from deepwell.train.data.loader import IndexedLoader, Loader
from deepwell.train.data.samples import MapSamples, Samples, TextSamples, as_fields
from deepwell.train.data.streams import StreamLoader
from deepwell.train.data.synthetic import PREFIX, SyntheticSamples
from deepwell.train.data.token_files import TokenFolder
from deepwell.train.data.tokenizer import make_tokenizer
from deepwell.train.data.windows import TokenSamples


def make_loader(
    data: Any,
    *,
    seq_len: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    tokenizer: Any = None,
    text_key: str = "text",
    document_mask: bool = True,
    keep_tail: bool = False,
    workers: int = 1,
) -> Loader:
    """The loader of `data`.

    A Loader stays itself. Read by index, resumed at once: a path of token files (or a list of paths), a map-style
    dataset, a datasets.Dataset (with `tokenizer` its column `text_key`), a list or tensor of samples, "synthetic:99".
    Read in order: a DataLoader, an iterable of batches, a function that returns an iterator; the loader's `note` says
    how these resume. Raises ConfigError.
    """
    if isinstance(data, Loader):
        return data
    if seq_len is not None and seq_len < 2:
        raise ConfigError(f"seq_len is {seq_len}; a sample needs at least 2 tokens")
    samples = _samples(data, seq_len, seed, tokenizer, text_key)
    if isinstance(samples, TokenFolder):
        length = seq_len or samples.info.seq_len
        if length is None:
            raise ConfigError(f"data: {samples.path} was prepared without --seq-len: give seq_len")
        samples = TokenSamples(samples, length, document_mask=document_mask, keep_tail=keep_tail)
    if samples is None:
        return StreamLoader(data, seq_len=seq_len, seed=seed)
    return IndexedLoader(samples, seed=seed, shuffle=shuffle, seq_len=seq_len, workers=workers)


def make_held_out_loader(data: Any, *, seq_len: int | None, seed: int) -> Loader:
    """The loader of data to evaluate on. Of synthetic data other samples than training's."""
    if isinstance(data, str) and data.startswith(PREFIX):
        data = SyntheticSamples.parse(data, seq_len, seed).held_out()
    return make_loader(data, seq_len=seq_len, seed=seed)


def _samples(data: Any, seq_len: int | None, seed: int, tokenizer: Any, text_key: str) -> Samples | TokenFolder | None:
    """What is read by index; None for what is read in order."""
    if isinstance(data, str) and (data.startswith(PREFIX) or data == PREFIX[:-1]):
        return SyntheticSamples.parse(data, seq_len, seed)
    are_paths = isinstance(data, list | tuple) and data and all(isinstance(item, str | Path) for item in data)
    if isinstance(data, str | Path) or (tokenizer is None and are_paths):
        return TokenFolder.open(data)
    if isinstance(data, TokenFolder | TokenSamples | SyntheticSamples):
        return data
    if isinstance(data, Mapping):
        raise ConfigError(
            f"data is a mapping with {', '.join(map(str, data))}: give one of its parts, e.g. data['train']"
        )
    if isinstance(data, torch.Tensor | np.ndarray):
        if data.ndim == 1:  # one run of tokens is cut into windows
            if seq_len is None:
                raise ConfigError(f"data is one run of {len(data)} tokens: give seq_len")
            data = data[: len(data) // seq_len * seq_len].reshape(-1, seq_len)
        return MapSamples(data, seq_len)
    is_indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)
    if not is_indexed:
        if not (hasattr(data, "__iter__") or hasattr(data, "__next__") or callable(data)):
            raise ConfigError(
                f"data is a {type(data).__name__}; give a path of token files, 'synthetic:VOCAB', a dataset, a "
                "DataLoader, or an iterable of batches"
            )
        return None
    if not len(data):
        raise ConfigError(f"data: the {type(data).__name__} given is empty; training needs at least one sample")
    return _indexed(data, seq_len, tokenizer, text_key)


def _indexed(data: Any, seq_len: int | None, tokenizer: Any, text_key: str) -> Samples | None:
    columns = getattr(data, "column_names", None)
    first = None if isinstance(columns, list) else data[0]
    has_text = text_key in columns if isinstance(columns, list) else isinstance(first, str)
    has_tokens = "input_ids" in columns if isinstance(columns, list) else not has_text
    if has_tokens:
        # A list of batches is read in order, like any other iterable of them.
        is_batch = first is not None and as_fields(first, "sample 0").get("input_ids", torch.empty(0)).dim() == 2
        return None if is_batch and hasattr(data, "__iter__") else MapSamples(data, seq_len)
    if not has_text:
        raise ConfigError(
            f"data has the columns {', '.join(columns or ())}: it needs input_ids, or {text_key!r} with a tokenizer"
        )
    if tokenizer is None or seq_len is None:
        raise ConfigError("data: texts need a tokenizer and seq_len (or `deepwell data prepare`, which packs them)")
    return TextSamples(data, text_key, make_tokenizer(tokenizer), seq_len)
