"""Context parallelism without processes: how batches are split, what runs for what was asked, what is refused."""

from __future__ import annotations

import pytest
import torch
from cases import make_model

import deepwell as dw
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.train.feed import count_items
from deepwell.train.parallel.context import _visible, choose_kind
from deepwell.train.parallel.runner import split_context


def test_a_batch_is_split_behind_the_shift() -> None:
    ids = torch.arange(16).view(2, 8)
    labels = ids.clone()
    labels[0, 4] = -100
    batch = {"input_ids": ids, "labels": labels}
    first, second = (split_context(batch, 2, rank) for rank in range(2))
    assert torch.equal(first["input_ids"], ids[:, :4]) and torch.equal(second["input_ids"], ids[:, 4:])
    # The last token of the first part predicts the first of the second one.
    assert first["shift_labels"].tolist() == [[1, 2, 3, -100], [9, 10, 11, 12]]
    assert second["shift_labels"].tolist() == [[5, 6, 7, -100], [13, 14, 15, -100]]
    assert second["position_ids"].tolist() == [[4, 5, 6, 7]] * 2
    assert count_items(first) + count_items(second) == count_items(batch)
    shifted = {"input_ids": ids, "shift_labels": labels}
    assert torch.equal(split_context(shifted, 2, 1)["shift_labels"], labels[:, 4:])


def test_batches_that_cannot_be_split_are_refused() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(ConfigError, match="8 tokens cannot be split over cp 3"):
        split_context({"input_ids": ids}, 3, 0)
    with pytest.raises(ConfigError, match="has pixels and no input_ids"):
        split_context({"pixels": ids}, 2, 0)
    with pytest.raises(UnsupportedError, match="attention_mask with padding"):
        split_context({"input_ids": ids, "attention_mask": torch.tensor([[1] * 8, [1] * 7 + [0]])}, 2, 0)
    with pytest.raises(UnsupportedError, match="restart at documents"):
        split_context({"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 2)}, 2, 0)
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(8)[None]}
    assert set(split_context(whole, 2, 0)) == {"input_ids", "position_ids", "shift_labels"}


def test_the_kind_that_runs_is_reported() -> None:
    ir = dw.capture(make_model("llama"))  # 4 heads, 4 key-value heads
    assert choose_kind(ir, "ulysses", 2) == ("ulysses", "")
    assert choose_kind(ir, "allgather", 2) == ("allgather", "")
    kind, note = choose_kind(ir, "ring", 2)
    assert kind == "ulysses" and note.startswith("context parallelism over 2 ranks: ulysses stands in for ring: ")
    kind, note = choose_kind(ir, "ulysses", 3)
    assert kind == "allgather" and "4 heads and 4 key-value heads do not divide" in note
    assert choose_kind(ir, "ulysses", 2, tp=2) == ("ulysses", "")
    kind, note = choose_kind(ir, "ulysses", 4, tp=2)
    assert kind == "allgather" and "2 heads and 2 key-value heads do not divide" in note


def test_who_sees_whom() -> None:
    whole = _visible(8, 8, 0, None, torch.device("cpu"))
    assert torch.equal(whole, torch.ones(8, 8).tril().bool())
    assert torch.equal(_visible(4, 8, 4, None, torch.device("cpu")), whole[4:])
    near = _visible(4, 8, 4, 2, torch.device("cpu"))
    assert near.sum(1).tolist() == [2] * 4 and near[0].tolist() == [False] * 3 + [True] * 2 + [False] * 3
