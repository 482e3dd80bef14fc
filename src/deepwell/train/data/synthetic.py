"""Made-up tokens that depend on seed and index alone: noise, or a pattern that a model can learn."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.train.data.order import Order, mix, words

PREFIX = "synthetic:"
_LENGTH = 1 << 40


class SyntheticSamples:
    """Random tokens. With `pattern`, each sample walks a fixed cycle through the vocabulary, 1 token in 10 random."""

    def __init__(
        self, vocab: int, seq_len: int, *, seed: int = 0, pattern: bool = False, length: int = _LENGTH
    ) -> None:
        if vocab < 2:
            raise ConfigError(f"synthetic data: a vocabulary of {vocab}; give at least 2")
        if seq_len < 2:
            raise ConfigError(f"seq_len is {seq_len}; a sample needs at least 2 tokens")
        if length < 1:
            raise ConfigError(f"synthetic data: length is {length}; give at least 1")
        self.vocab, self.seq_len, self.seed, self.pattern = vocab, seq_len, seed, pattern
        self._length, self._first = length, 0
        self._key = words("synthetic", seed)[:1]
        self._cycle = Order(vocab, seed, 0)

    @classmethod
    def parse(cls, text: str, seq_len: int | None, seed: int) -> SyntheticSamples:
        """From "synthetic:VOCAB" or "synthetic:VOCAB:pattern"."""
        vocab, _, kind = text.removeprefix(PREFIX).partition(":")
        if not vocab.isdecimal() or kind not in ("", "pattern"):
            raise ConfigError(f"data is {text!r}; give 'synthetic:VOCAB' or 'synthetic:VOCAB:pattern', VOCAB a number")
        if seq_len is None:
            raise ConfigError(f"data is {text!r}, which has no length of its own: give seq_len")
        return cls(int(vocab), seq_len, seed=seed, pattern=kind == "pattern")

    def held_out(self) -> SyntheticSamples:
        """As many samples of the same kind, of which none is one of these."""
        other = copy.copy(self)
        other._first = self._first + self._length
        return other

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        place = (self._first + index) * (self.seq_len + 1)
        numbers = np.arange(self.seq_len + 1, dtype=np.uint64) + np.uint64(place)
        random = mix(mix(numbers + self._key) + self._key)
        high, vocab = random >> np.uint64(32), np.uint64(self.vocab)
        ids = (high % vocab)[1:].astype(np.int64)
        if self.pattern:
            places = (random[0] % vocab + np.arange(self.seq_len, dtype=np.uint64)) % vocab
            is_noise = (random[1:] & np.uint64(0xFFFF)) < np.uint64(6554)
            ids = np.where(is_noise, ids, self._cycle(places))
        tokens = torch.from_numpy(ids)
        return {"input_ids": tokens, "labels": tokens.clone()}

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "synthetic", "vocab": self.vocab, "pattern": self.pattern}
