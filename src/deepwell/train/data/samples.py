"""Samples: what a model trains on, from whatever form a dataset gives it in.

A sample is a dict of CPU tensors of one length: input_ids, and labels (as Hugging Face takes them: not shifted, -100 is
ignored) or shift_labels (shifted already: the target of position t stands at t); position_ids where documents restart.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.train.data.tokenizer import TextTokenizer

IGNORED = -100
_KEYS = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask")


@runtime_checkable
class Samples(Protocol):
    """Map-style data: the same index gives the same sample for ever."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def as_rows(raw: Any, what: str, seq_len: int | None, pad: int = 0) -> list[dict[str, Tensor]]:
    """The samples of a batch (or the one sample) that a dataset gave.

    Dicts, (tokens, targets) with targets shifted already, and tokens alone, as tensors, arrays or lists. With `seq_len`
    longer samples are cut and shorter ones padded at their end. `what` names the origin in errors.
    """
    fields = as_fields(raw, what)
    if fields["input_ids"].dim() == 1:
        fields = {name: value[None] for name, value in fields.items()}
    shape = fields["input_ids"].shape
    for name, value in fields.items():
        if value.shape != shape:
            raise ConfigError(
                f"{what}: {name} has shape {tuple(value.shape)}, input_ids {tuple(shape)}; they go together"
            )
    fields = _without_mask(fields, what)
    if "labels" not in fields and "shift_labels" not in fields:
        fields["labels"] = fields["input_ids"].clone()
    if seq_len is not None:
        fields = _fit(fields, seq_len, pad)
    return [{name: value[row] for name, value in fields.items()} for row in range(shape[0])]


def as_fields(raw: Any, what: str) -> dict[str, Tensor]:
    """The named tensors of a sample or batch; other names are left out."""
    if isinstance(raw, Mapping):
        if "input_ids" not in raw:
            raise ConfigError(f"{what} has no input_ids but {', '.join(map(str, raw)) or 'nothing'}")
        found = {name: raw[name] for name in _KEYS if raw.get(name) is not None}
    elif _is_pair(raw):
        found = dict(zip(("input_ids", "shift_labels"), raw, strict=False))
    else:
        found = {"input_ids": raw}
    return {name: _tensor(value, f"{what}: {name}") for name, value in found.items()}


def _is_pair(raw: Any) -> bool:
    """Whether this is (tokens,) or (tokens, targets): tensors or arrays, or a tuple of lists."""
    if not isinstance(raw, tuple | list) or not 0 < len(raw) <= 2:
        return False
    are_arrays = all(hasattr(item, "shape") and len(item.shape) > 0 for item in raw)
    return are_arrays or (isinstance(raw, tuple) and all(isinstance(item, list | tuple) for item in raw))


def _tensor(value: Any, what: str) -> Tensor:
    try:
        if isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(v, Tensor) for v in value):
            value = torch.stack(list(value))
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{what} is a {type(value).__name__} that makes no tensor of tokens: {error}") from error
    if tensor.numel() == 0 or tensor.dim() not in (1, 2):
        raise ConfigError(f"{what} has shape {tuple(tensor.shape)}; give [tokens] or [rows, tokens], not empty")
    if tensor.is_floating_point() or tensor.is_complex():
        raise ConfigError(f"{what} is {tensor.dtype}; tokens are whole numbers")
    return tensor.detach().to(device="cpu", dtype=torch.int64)


def _without_mask(fields: dict[str, Tensor], what: str) -> dict[str, Tensor]:
    """Padding at the end as ignored labels: nothing before it looks there, so a causal model needs no mask."""
    mask = fields.pop("attention_mask", None)
    if mask is None or bool((mask != 0).all()):
        return fields
    is_padding = mask == 0
    if bool((is_padding[:, :-1] & ~is_padding[:, 1:]).any()):
        raise UnsupportedError(f"{what}: attention_mask has zeros before ones; pad at the end of a sample, not before")
    fields = dict(fields)
    if "shift_labels" in fields:
        follows = torch.nn.functional.pad(is_padding[:, 1:], (0, 1))
        fields["shift_labels"] = fields["shift_labels"].masked_fill(is_padding | follows, IGNORED)
    if "shift_labels" not in fields or "labels" in fields:
        labels = fields.get("labels", fields["input_ids"])
        fields["labels"] = labels.masked_fill(is_padding, IGNORED)
    return fields


def _fit(fields: dict[str, Tensor], seq_len: int, pad: int) -> dict[str, Tensor]:
    rows, length = fields["input_ids"].shape
    if length == seq_len:
        return fields
    if length > seq_len:
        return {name: value[:, :seq_len] for name, value in fields.items()}
    missing = seq_len - length
    more = {
        "input_ids": torch.full((rows, missing), pad),
        "labels": torch.full((rows, missing), IGNORED),
        "shift_labels": torch.full((rows, missing), IGNORED),
        "position_ids": torch.arange(missing).expand(rows, -1),  # the padding is a document of its own
    }
    return {name: torch.cat([value, more[name]], dim=1) for name, value in fields.items()}


def collate(rows: Sequence[Mapping[str, Tensor]], what: str) -> dict[str, Tensor]:
    """One batch of samples. Raises ConfigError where they differ in names or length."""
    names, length = rows[0].keys(), len(rows[0]["input_ids"])
    for row in rows:
        if row.keys() != names:
            raise ConfigError(f"{what}: one sample has {', '.join(names)}, another {', '.join(row)}")
        if len(row["input_ids"]) != length:
            raise ConfigError(
                f"{what}: samples of {length} and of {len(row['input_ids'])} tokens: give seq_len, so that "
                "longer ones are cut and shorter ones padded"
            )
    return {name: torch.stack([row[name] for row in rows]) for name in names}


class MapSamples:
    """A map-style dataset, a list, or a tensor of rows."""

    def __init__(self, data: Any, seq_len: int | None = None) -> None:
        self._data, self._seq_len = data, seq_len
        self._name = f"{type(data).__module__}.{type(data).__qualname__}"

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        rows = as_rows(self._data[index], f"sample {index} of {self._name}", self._seq_len)
        if len(rows) != 1:
            raise ConfigError(f"sample {index} of {self._name} holds {len(rows)} rows; a sample is one")
        return rows[0]

    def fingerprint(self) -> dict[str, Any]:
        """Its type, and the dataset's own fingerprint or else a hash of the first sample."""
        own = getattr(self._data, "_fingerprint", None)
        facts: dict[str, Any] = {"kind": "samples", "type": self._name}
        if isinstance(own, str):
            return {**facts, "dataset": own}
        first = self[0]
        data = b"".join(first[name].numpy().tobytes() for name in sorted(first))
        return {**facts, "first_sample": hashlib.sha256(data).hexdigest()[:16]}


class TextSamples:
    """A dataset of texts: each becomes one sample, cut or padded to seq_len, its end token included."""

    def __init__(self, data: Any, column: str, tokenizer: TextTokenizer, seq_len: int) -> None:
        self._data, self._column, self._tokenizer, self._seq_len = data, column, tokenizer, seq_len

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        row = self._data[index]
        text = row[self._column] if isinstance(row, Mapping) else row
        if not isinstance(text, str):
            raise ConfigError(f"sample {index}: {self._column!r} is a {type(text).__name__}, not a text")
        ids = torch.as_tensor(self._tokenizer.encode([text])[0].astype("int64"))
        ids = torch.cat([ids, torch.tensor([self._tokenizer.eos])])
        return as_rows(ids, f"sample {index}", self._seq_len, pad=self._tokenizer.eos)[0]

    def fingerprint(self) -> dict[str, Any]:
        own = getattr(self._data, "_fingerprint", None)
        return {"kind": "texts", "tokenizer": self._tokenizer.sha256, "dataset": own if isinstance(own, str) else None}
