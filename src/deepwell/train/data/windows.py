"""Windows of token files as samples: documents packed one after the other, masked from each other."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.train.data.samples import IGNORED
from deepwell.train.data.token_files import TokenFolder


class TokenSamples:
    """Windows of `seq_len` tokens, one after the other and across shards.

    With `document_mask`, position_ids restart where a document does (and at the start of the window), and the first
    token of a document is no target. `keep_tail` keeps the last, shorter window and pads it with the end token; without
    it up to seq_len - 1 tokens are never seen.
    """

    def __init__(
        self, tokens: TokenFolder | str | Path, seq_len: int, *, document_mask: bool = True, keep_tail: bool = False
    ) -> None:
        if seq_len < 2:
            raise ConfigError(f"seq_len is {seq_len}; a window needs at least 2 tokens")
        self.tokens = tokens if isinstance(tokens, TokenFolder) else TokenFolder.open(tokens)
        self.seq_len, self.document_mask = seq_len, document_mask
        self._length = -(-len(self.tokens) // seq_len) if keep_tail else len(self.tokens) // seq_len
        if not self._length:
            raise ConfigError(
                f"data: {self.tokens.path} has {len(self.tokens)} tokens, no window of seq_len {seq_len}: give a "
                "smaller seq_len, more data, or keep_tail=True"
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(f"window {index} of {self._length}")
        begin = index * self.seq_len
        ids, starts = self.tokens.read(begin, min(begin + self.seq_len, len(self.tokens)))
        missing = self.seq_len - len(ids)
        if missing:
            starts = np.append(starts, len(ids))  # the padding is a document of its own
            ids = np.append(ids, np.full(missing, self.tokens.info.eos))
        labels = ids.copy()
        if missing:
            labels[-missing:] = IGNORED
        sample = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if self.document_mask:
            labels[starts] = IGNORED
            places = np.arange(self.seq_len)
            begins = np.zeros(self.seq_len, dtype=np.int64)
            begins[starts] = starts
            sample["position_ids"] = torch.from_numpy(places - np.maximum.accumulate(begins))
        return sample

    def fingerprint(self) -> dict[str, Any]:
        facts = self.tokens.to_dict()
        kept = ("path", "tokens", "documents", "vocab", "tokenizer_sha256", "sha256")
        return {"kind": "tokens", **{name: facts[name] for name in kept}, "document_mask": self.document_mask}
