"""Loaders by index: the same stream for every number of ranks, from every cursor, from every kind of dataset."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.train.data import (
    Loader,
    Samples,
    TextDocuments,
    check_same_data,
    count_items,
    make_held_out_loader,
    make_loader,
    prepare_tokens,
)


def rows(batch: dict[str, Tensor], name: str = "input_ids") -> list[list[int]]:
    return batch[name].tolist()


def step(loader: Loader, cursor: int, dp: int, micro: int, accumulate: int) -> list[list[int]]:
    """What all ranks see in a step, in the order of the global stream."""
    seen: dict[int, list[int]] = {}
    for rank in range(dp):
        for m in range(accumulate):
            indices = [(m * dp + rank) * micro + i for i in range(micro)]
            seen |= dict(zip(indices, rows(loader.batch(cursor, indices)), strict=True))
    return [seen[index] for index in sorted(seen)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "data"
    prepare_tokens(
        TextDocuments([f"{n} " * (n % 7 + 1) for n in range(100)]),
        folder,
        seq_len=16,
        shard_tokens=300,
        val_fraction=0.1,
    )
    return folder


def test_a_step_is_the_same_for_every_number_of_ranks(folder: Path) -> None:
    loaders = [make_loader(folder), make_loader("synthetic:99", seq_len=8), make_loader(torch.arange(60).view(20, 3))]
    for loader in loaders:
        for cursor in (0, 8, 800):
            one = step(loader, cursor, dp=1, micro=8, accumulate=1)
            assert one == step(loader, cursor, dp=2, micro=2, accumulate=2) == step(loader, cursor, 4, 1, 2)
            assert one == step(make_loader(loader), cursor, 8, 1, 1)


def test_an_epoch_holds_each_sample_once_and_the_next_is_another() -> None:
    loader = make_loader(torch.arange(14).view(7, 2), seed=3)
    epochs = [[row[0] // 2 for row in rows(loader.batch(7 * epoch, range(7)))] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # Resumed anywhere, also across the border of epochs, it is the same stream.
    stream = [number for epoch in epochs for number in epoch]
    for cursor in range(17):
        fresh = make_loader(torch.arange(14).view(7, 2), seed=3)
        assert [row[0] // 2 for row in rows(fresh.batch(cursor, range(4)))] == stream[cursor : cursor + 4]
    plain = make_loader(torch.arange(14).view(7, 2), shuffle=False)
    assert [row[0] // 2 for row in rows(plain.batch(5, range(4)))] == [5, 6, 0, 1]
    other = make_loader(torch.arange(14).view(7, 2), seed=4)
    assert [row[0] // 2 for row in rows(other.batch(0, range(14)))] != stream[:14]


def test_a_dataset_smaller_than_a_batch_goes_round() -> None:
    loader = make_loader([[1, 2, 3]])
    assert rows(loader.batch(5, range(4))) == [[1, 2, 3]] * 4
    assert loader.epoch_samples == 1


@pytest.mark.parametrize("empty", [[], torch.empty(0, 4, dtype=torch.long), np.empty((0, 4), dtype=np.int64)])
def test_an_empty_dataset_is_refused(empty: Any) -> None:
    with pytest.raises(ConfigError, match="empty"):
        make_loader(empty)


class Slow(Dataset):
    """A map-style dataset that counts its reads and notes who reads."""

    def __init__(self, length: int = 100) -> None:
        self.length, self.reads, self.threads = length, [], set()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads.append(index)
        self.threads.add(threading.current_thread().name)
        if index == 99:
            raise RuntimeError("sample 99 is broken")
        return {"input_ids": [index, index + 1], "name": "x"}


def test_prefetched_batches_are_the_same_and_threads_end() -> None:
    before = threading.active_count()
    data = Slow()
    loader = make_loader(data, shuffle=False)
    data.reads.clear()
    data.threads.clear()
    loader.prefetch(4, [0, 1])
    loader.prefetch(4, [0, 1])
    assert rows(loader.batch(4, [0, 1])) == [[4, 5], [5, 6]]
    assert data.reads == [4, 5]
    assert all(name.startswith("deepwell-data") for name in data.threads)
    # Hints beyond the depth are ignored, those the trainer moved past are let go, and a failure comes with its batch.
    for cursor in range(40):
        loader.prefetch(cursor, [0])
    assert len(loader._announced) == loader.depth
    assert rows(loader.batch(50, [0])) == [[50, 51]]
    assert not loader._announced
    loader.prefetch(99, [0])
    with pytest.raises(RuntimeError, match="sample 99"):
        loader.batch(99, [0])
    loader.prefetch(0, [0])
    loader.close()
    loader.close()
    assert threading.active_count() == before
    for call in (loader.batch, loader.prefetch):
        with pytest.raises(ConfigError, match="closed"):
            call(0, [0])


def test_global_random_generators_are_left_alone(folder: Path) -> None:
    data = torch.utils.data.DataLoader(TensorDataset(torch.arange(40).view(20, 2)), batch_size=4, shuffle=True)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    for source in (folder, "synthetic:50:pattern", data):
        with make_loader(source, seq_len=8) as loader:
            loader.prefetch(0, range(8))
            loader.batch(0, range(8))
            loader.batch(40, range(8))
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])


@pytest.mark.parametrize(("cursor", "indices"), [(-1, [0]), (0, []), (0, [-1])])
def test_impossible_numbers_are_refused(cursor: int, indices: Sequence[int]) -> None:
    with pytest.raises(ConfigError, match="give numbers from 0"):
        make_loader([[1, 2]]).batch(cursor, indices)


class Own:
    """Somebody's Samples."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([index, 5]), "labels": torch.tensor([-100, 5])}


class HfDataset:
    """What is used of a datasets.Dataset."""

    _fingerprint = "abc"

    def __init__(self, **columns: list[Any]) -> None:
        self._columns = columns
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self._columns.items()}


def test_each_kind_of_dataset_gives_the_same_form() -> None:
    assert isinstance(Own(), Samples)
    own = make_loader(Own(), shuffle=False).batch(0, [1])
    assert (rows(own), rows(own, "labels")) == ([[1, 5]], [[-100, 5]])
    pairs = TensorDataset(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]))
    pair = make_loader(pairs).batch(0, [0])
    assert (rows(pair), rows(pair, "shift_labels")) == ([[1, 2]], [[2, 3]])
    assert "labels" not in pair
    for data in (
        [[7, 8]],
        torch.tensor([[7, 8]]),
        np.array([[7, 8]], dtype=np.uint16),
        TensorDataset(torch.tensor([[7, 8]])),
    ):
        found = make_loader(data).batch(0, [0])
        assert rows(found) == rows(found, "labels") == [[7, 8]]
        assert {value.dtype for value in found.values()} == {torch.int64}
    windows = make_loader(np.arange(11, dtype=np.uint16), seq_len=4, shuffle=False).batch(0, [0, 1, 2])
    assert rows(windows) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_hugging_face_datasets_by_columns_or_by_text() -> None:
    columns = HfDataset(input_ids=[[1, 2, 3, 0], [4, 5]], attention_mask=[[1, 1, 1, 0], [1, 1]], source=["web", "book"])
    batch = make_loader(columns, seq_len=4, shuffle=False).batch(0, [0, 1])
    assert batch.keys() == {"input_ids", "labels"}
    assert rows(batch) == [[1, 2, 3, 0], [4, 5, 0, 0]]
    assert rows(batch, "labels") == [[1, 2, 3, -100], [4, 5, -100, -100]]
    assert rows(make_loader(columns, seq_len=2, shuffle=False).batch(0, [0])) == [[1, 2]]
    with pytest.raises(ConfigError, match=r"samples of 4 and of 2 tokens: give seq_len"):
        make_loader(columns, shuffle=False).batch(0, [0, 1])
    text = make_loader(HfDataset(text=["ab", "cdefg"]), seq_len=4, tokenizer="bytes", shuffle=False)
    assert rows(text.batch(0, [0, 1])) == [[97, 98, 256, 256], [99, 100, 101, 102]]
    assert rows(text.batch(0, [0, 1]), "labels") == [[97, 98, 256, -100], [99, 100, 101, 102]]
    with pytest.raises(ConfigError, match="texts need a tokenizer and seq_len"):
        make_loader(HfDataset(text=["ab"]))
    with pytest.raises(ConfigError, match="columns body: it needs input_ids"):
        make_loader(HfDataset(body=["ab"]))
    with pytest.raises(ConfigError, match=r"data\['train'\]"):
        make_loader({"train": columns})


def test_packed_padding_and_shifted_masks() -> None:
    packed = [{"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}]
    batch = make_loader(packed, seq_len=5).batch(0, [0])
    assert rows(batch, "position_ids") == [[0, 1, 0, 0, 1]]
    shifted = [{"input_ids": [1, 2, 3, 0], "shift_labels": [2, 3, 0, 0], "attention_mask": [1, 1, 1, 0]}]
    assert rows(make_loader(shifted).batch(0, [0]), "shift_labels") == [[2, 3, -100, -100]]
    with pytest.raises(UnsupportedError, match="pad at the end"):
        make_loader([{"input_ids": [0, 1, 2], "attention_mask": [0, 1, 1]}]).batch(0, [0])


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"tokens": [1, 2]}, "no input_ids but tokens"),
        ({"input_ids": [1.5, 2.0]}, "tokens are whole numbers"),
        ({"input_ids": []}, "not empty"),
        ({"input_ids": "abc"}, "makes no tensor"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has shape"),
        (torch.zeros(2, 2, 2, dtype=torch.long), "give \\[tokens\\]"),
    ],
)
def test_wrong_samples_are_named(sample: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_loader([sample]).batch(0, [0])


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        ("synthetic", {}, "synthetic:VOCAB"),
        ("synthetic:many", {"seq_len": 8}, "VOCAB a number"),
        ("synthetic:8", {}, "give seq_len"),
        ("synthetic:1", {"seq_len": 8}, "vocabulary of 1"),
        ("absent/folder", {}, "no file or folder"),
        (["absent/folder"], {}, "no file or folder"),
        (7, {}, "data is a int"),
        ([[1, 2]], {"seq_len": 1}, "seq_len is 1"),
        ([[1, 2]], {"workers": 0}, "workers is 0"),
        (torch.arange(9), {}, "one run of 9 tokens"),
    ],
)
def test_wrong_data_is_named(data: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_loader(data, **options)


def test_synthetic_patterns_can_be_learned_and_noise_cannot() -> None:
    noise = make_loader("synthetic:64", seq_len=512).batch(0, range(8))["input_ids"]
    pattern = make_loader("synthetic:64:pattern", seq_len=512).batch(0, range(8))["input_ids"]
    for tokens, low, high in ((noise, 0.0, 0.08), (pattern, 0.78, 0.9)):
        assert 0 <= int(tokens.min()) and int(tokens.max()) < 64
        # How often a token is followed by the one that follows it most.
        counts = torch.zeros(64, 64).index_put_((tokens[:, :-1], tokens[:, 1:]), torch.ones(8, 511), accumulate=True)
        share = float(counts.amax(1).sum() / counts.sum())
        assert low <= share <= high
    again = make_loader("synthetic:64", seq_len=512).batch(8, range(8))["input_ids"]
    assert not torch.equal(noise, again)


def test_synthetic_data_to_evaluate_on_is_not_what_is_trained_on() -> None:
    trained, held_out = (
        make("synthetic:64:pattern", seq_len=64, seed=1) for make in (make_loader, make_held_out_loader)
    )
    rows = [{tuple(row.tolist()) for row in one.batch(0, range(64))["input_ids"]} for one in (trained, held_out)]
    assert len(rows[0]) == len(rows[1]) == 64 and not rows[0] & rows[1]
    # But the same cycle: what follows a token most.
    follows = []
    for one in (trained, held_out):
        tokens = one.batch(0, range(400))["input_ids"]
        counts = torch.zeros(64, 64).index_put_((tokens[:, :-1], tokens[:, 1:]), torch.ones(400, 63), accumulate=True)
        follows.append(counts.argmax(1))
    assert torch.equal(*follows)


def test_items_are_the_labels_that_are_predicted() -> None:
    labels = torch.tensor([[1, 2, -100, 4], [-100, -100, 3, 4]])
    assert count_items({"input_ids": labels, "labels": labels}) == 4
    assert count_items({"input_ids": labels, "shift_labels": labels}) == 5
    assert count_items({"input_ids": torch.ones(2, 4)}) == 6


def test_fingerprints_say_what_differs(folder: Path, tmp_path: Path) -> None:
    saved = json.loads(json.dumps(make_loader(folder, seed=1).fingerprint()))
    assert saved["seq_len"] == 16  # as it was prepared
    assert check_same_data(saved, make_loader(folder, seed=1).fingerprint()) == []
    assert "does not say" in check_same_data({}, saved)[0]
    moved = tmp_path / "moved"
    folder.rename(moved)
    try:
        assert check_same_data(saved, make_loader(moved, seed=1).fingerprint()) == []
        for other, words in (
            (make_loader(moved, seed=2), "seed was 1, is 2"),
            (make_loader(moved, seed=1, seq_len=8), "seq_len was 16, is 8"),
            (make_loader(moved, seed=1, shuffle=False), "shuffle was True, is False"),
            (make_loader(moved / "val", seed=1), "sha256 was"),
            (make_loader("synthetic:257", seq_len=16, seed=1), "kind was 'tokens', is 'synthetic'"),
        ):
            with pytest.raises(ConfigError, match=words):
                check_same_data(saved, other.fingerprint())
        (warning,) = check_same_data(saved, make_loader(moved, seed=1, document_mask=False).fingerprint())
        assert "document_mask was True, is False" in warning
    finally:
        moved.rename(folder)
    one, other = (make_loader([[1, number]]).fingerprint() for number in (2, 3))
    (warning,) = check_same_data(one, other)
    assert "first_sample" in warning
