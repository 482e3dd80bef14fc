"""Loaders of iterables: every form of batch, each kind of resume, ranks that share rows."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from deepwell.errors import ConfigError
from deepwell.train.data import Loader, check_same_data, make_loader


def numbers(loader: Loader, cursor: int, indices: Any) -> list[int]:
    return loader.batch(cursor, indices)["input_ids"][:, 0].tolist()


def batches(sizes: tuple[int, ...] = (2, 3, 1, 4)) -> Iterator[dict[str, torch.Tensor]]:
    """Ten rows, numbered in their first column, in batches of uneven size."""
    done = 0
    for size in sizes:
        yield {"input_ids": torch.arange(done, done + size)[:, None].expand(-1, 3).contiguous()}
        done += size


class Again:
    """An iterable that begins anew; counts how often."""

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        return batches()


class Stateful(Again):
    """Says and takes where it is; counts the batches that it gave."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.place, self.given, self.late = 0, 0, late

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        all_of_them = list(batches())
        while self.place < len(all_of_them):
            batch = all_of_them[self.place]
            self.given += 1
            if not self.late:
                self.place += 1
            yield batch
            if self.late:
                self.place += 1
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "generator": torch.arange(3, dtype=torch.uint8), "pair": (1, b"x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["pair"] == (1, b"x") and state["generator"].dtype == torch.uint8
        self.place = state["place"]


def test_rows_are_numbered_across_batches_and_shared_by_ranks() -> None:
    for data in (Again(), batches, list(batches()), Stateful()):
        one = make_loader(data)
        assert numbers(one, 0, range(4)) == [0, 1, 2, 3]
        assert numbers(one, 4, range(8)) == [4, 5, 6, 7, 8, 9, 0, 1]  # the next epoch follows
    # Two ranks with a copy each of the same stream see what one sees.
    ranks = [make_loader(Again()) for _ in range(2)]
    for cursor in (0, 8, 16):
        seen = {}
        for rank, loader in enumerate(ranks):
            for m in range(2):
                indices = [(m * 2 + rank) * 2 + i for i in range(2)]
                seen |= dict(zip(indices, numbers(loader, cursor, indices), strict=True))
        assert [seen[i] for i in range(8)] == [(cursor + i) % 10 for i in range(8)]


@pytest.mark.parametrize("make", [Again, Stateful, lambda: batches, lambda: list(batches())])
@pytest.mark.parametrize("cursor", [0, 1, 4, 9, 10, 13, 27])
def test_a_resume_at_any_cursor_goes_on(make: Any, cursor: int) -> None:
    first = make_loader(make())
    if cursor:
        for begin in range(0, cursor, 3):
            numbers(first, begin, range(min(3, cursor - begin)))
        first.prefetch(cursor, range(4))  # read ahead: the saved state must not be
        numbers(first, cursor, range(4))
    state = json.loads(json.dumps(first.state_dict(cursor)))
    second = make_loader(make())
    assert second.resumable and check_same_data(first.fingerprint(), second.fingerprint()) == []
    second.load_state_dict(state)
    assert second.state_dict(cursor) == state  # saved again before anything was read
    assert numbers(second, cursor, range(5)) == [(cursor + i) % 10 for i in range(5)]
    assert numbers(second, cursor + 5, range(2)) == [(cursor + 5 + i) % 10 for i in range(2)]


def test_what_a_resume_costs_is_said() -> None:
    again, stateful, once = make_loader(Again()), make_loader(Stateful()), make_loader(batches())
    assert again.resumable and "reading it again from its start" in again.note
    assert stateful.resumable and stateful.note == ""
    assert not once.resumable and "read only once" in once.note
    # By state, only the batches of the 16 rows before the cursor are read again.
    for cursor in range(0, 208, 8):
        numbers(stateful, cursor, range(8))
    data = Stateful()
    loader = make_loader(data)
    loader.load_state_dict(stateful.state_dict(208))
    assert numbers(loader, 208, range(2)) == [8, 9] and data.given == 7

    class Odd(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"file": object()}

    odd = make_loader(Odd())
    assert odd.resumable and "holds a object, which JSON cannot keep" in odd.note
    odd.load_state_dict(make_loader(Odd()).state_dict(0))
    assert numbers(odd, 3, [0]) == [3]


def test_a_stream_that_changed_is_noticed() -> None:
    first = make_loader(Again())
    numbers(first, 0, range(6))
    state = first.state_dict(6)
    changed = make_loader(lambda: ({"input_ids": b["input_ids"] + 1} for b in batches()))
    changed.load_state_dict(state)
    with pytest.raises(ConfigError, match="gives other batches than before the resume"):
        changed.batch(6, [0])
    # The first of four ranks saves, which never needed the last rows of the step.
    for make in (Again, Stateful):
        rank = make_loader(make())
        for cursor in range(0, 80, 40):
            numbers(rank, cursor, range(10))
        state = json.loads(json.dumps(rank.state_dict(80)))
        assert state["check"] is not None and state["checked"][1] < 80
        same = make_loader(make())
        same.load_state_dict(state)
        assert numbers(same, 80, range(30, 40)) == list(range(10))
        state["check"] ^= 1
        changed = make_loader(make())
        changed.load_state_dict(state)
        with pytest.raises(ConfigError, match="gives other batches"):
            changed.batch(80, [0])


def test_a_state_that_leads_elsewhere_is_noticed_and_the_stream_read_anew(caplog: pytest.LogCaptureFixture) -> None:
    # One batch behind, as a generator's state is that counts after it yields.
    late = make_loader(Stateful(late=True))
    for cursor in range(0, 33, 3):
        numbers(late, cursor, range(3))
    resumed = make_loader(Stateful(late=True))
    resumed.load_state_dict(json.loads(json.dumps(late.state_dict(33))))
    assert numbers(resumed, 33, range(4)) == [3, 4, 5, 6]
    assert "led to other samples" in caplog.text


def test_an_iterator_is_read_once() -> None:
    loader = make_loader(batches())
    assert numbers(loader, 100, range(4)) == [0, 1, 2, 3]  # after a resume it goes on with what there is
    assert numbers(loader, 104, range(4)) == [4, 5, 6, 7]
    with pytest.raises(ConfigError, match=r"sample 5 of .*generator was read already"):
        numbers(loader, 5, [0])
    loader = make_loader(batches())
    with pytest.raises(ConfigError, match="ended after 10 samples"):
        numbers(loader, 0, range(11))
    for empty in (lambda: iter(()), iter(())):
        with pytest.raises(ConfigError, match="gave no batches"):
            make_loader(empty).batch(0, [0])


def test_going_back_reads_anew_and_little_is_kept() -> None:
    data = Again()
    loader = make_loader(data)
    for cursor in range(0, 200, 4):
        assert numbers(loader, cursor, range(4)) == [(cursor + i) % 10 for i in range(4)]
    assert loader.epoch_samples == 10
    assert len(loader._rows) <= 4 + 4 + 4 + 16  # two steps, one batch ahead, and what a check compares
    assert numbers(loader, 196 - 4, range(4)) == [2, 3, 4, 5]  # the step before is still there
    begun = data.begun
    assert numbers(loader, 2, [0]) == [2] and data.begun == begun + 1
    fresh = make_loader(Again())
    assert numbers(fresh, 5000, [0]) == [0]
    assert len(fresh._rows) <= 16 + 4  # skipped rows are not kept
    stateful = make_loader(Stateful())
    numbers(stateful, 40, range(4))
    assert len(stateful._states) < 10
    assert numbers(stateful, 0, range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"input_ids": [[1, 2], [3, 4]]}, {"input_ids": [3, 4], "labels": [3, 4]}),
        (
            {"input_ids": torch.tensor([[1, 2], [3, 4]]), "labels": torch.tensor([[1, 2], [-100, 4]])},
            {"labels": [-100, 4]},
        ),
        (
            (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[2, 9], [4, 9]])),
            {"input_ids": [3, 4], "shift_labels": [4, 9]},
        ),
        ([torch.tensor([[1, 2], [3, 4]]), torch.tensor([[2, 9], [4, 9]])], {"shift_labels": [4, 9]}),
        (([[1, 2], [3, 4]], [[2, 9], [4, 9]]), {"shift_labels": [4, 9]}),
        (torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), {"input_ids": [3, 4], "labels": [3, 4]}),
        (np.array([[1, 2], [3, 4]], dtype=np.uint16), {"input_ids": [3, 4]}),
        ([[1, 2], [3, 4]], {"input_ids": [3, 4], "labels": [3, 4]}),
    ],
)
def test_every_form_of_batch(batch: Any, expected: dict[str, list[int]]) -> None:
    found = make_loader(lambda: iter([batch])).batch(0, [1])
    for name, values in expected.items():
        assert found[name].tolist() == [values]
    assert ("shift_labels" in found) != ("labels" in found)


def test_single_samples_in_a_row_and_lengths() -> None:
    def samples() -> Iterator[dict[str, list[int]]]:
        yield from ({"input_ids": list(range(n, n + 2 + n))} for n in range(3))

    padded = make_loader(samples, seq_len=4).batch(0, range(3))
    assert padded["input_ids"].tolist() == [[0, 1, 0, 0], [1, 2, 3, 0], [2, 3, 4, 5]]
    assert padded["labels"].tolist() == [[0, 1, -100, -100], [1, 2, 3, -100], [2, 3, 4, 5]]
    with pytest.raises(ConfigError, match="give seq_len"):
        make_loader(samples).batch(0, range(2))


def test_the_rows_of_a_batch_can_be_asked_before_the_first() -> None:
    for data, rows in ((Again(), 2), (Stateful(), 2), (batches(), 2)):
        loader = make_loader(data)
        assert loader.rows == rows
        if isinstance(data, Again):
            assert numbers(loader, 12, range(3)) == [2, 3, 4]
            assert numbers(loader, 0, range(3)) == [0, 1, 2]
            assert loader.rows == rows
    # What was read for it is not lost where it cannot be read again, nor read twice after a resume.
    once = make_loader(batches())
    assert once.rows == 2 and numbers(once, 50, range(3)) == [0, 1, 2]
    resumed = make_loader(Stateful())
    assert resumed.rows == 2
    resumed.load_state_dict(make_loader(Stateful()).state_dict(0))
    assert numbers(resumed, 0, range(3)) == [0, 1, 2]
    assert make_loader(lambda: ({"input_ids": [n, n]} for n in range(3))).rows is None
    assert make_loader(DataLoader(TensorDataset(torch.ones(8, 2, dtype=torch.long)), batch_size=4)).rows == 4
    assert make_loader([[1, 2]]).rows is None


def test_a_buffer_that_is_filled_again_does_no_harm() -> None:
    def reused() -> Iterator[torch.Tensor]:
        buffer = torch.zeros(2, 3, dtype=torch.long)
        for n in range(5):
            yield buffer.fill_(n)

    assert numbers(make_loader(reused), 0, range(10)) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_data_loaders_shuffle_by_their_own_seed_and_resume() -> None:
    def loader(seed: int, **options: Any) -> Loader:
        return make_loader(DataLoader(TensorDataset(torch.arange(20).view(10, 2)), batch_size=3, **options), seed=seed)

    one = loader(0, shuffle=True)
    stream = [n // 2 for n in numbers(one, 0, range(30))]
    epochs = [stream[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and epochs[0] != epochs[1]
    assert [n // 2 for n in numbers(loader(0, shuffle=True), 17, range(10))] == stream[17:27]
    assert [n // 2 for n in numbers(loader(1, shuffle=True), 0, range(30))] != stream
    # A generator that was given stays; going back begins from where it stood.
    own = loader(0, shuffle=True, generator=torch.Generator().manual_seed(5))
    given = numbers(own, 0, range(25))
    assert numbers(own, 0, range(25)) == given == numbers(own, 25 - 25, range(25))
    other = loader(9, shuffle=True, generator=torch.Generator().manual_seed(5))
    assert numbers(other, 12, range(8)) == given[12:20]
    assert [n // 2 for n in numbers(loader(0), 0, range(12))] == [*range(10), 0, 1]


def test_iterable_datasets_epochs_and_samplers() -> None:
    class Epochs(IterableDataset):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            return iter([{"input_ids": [10 * self.epoch + n, 0]} for n in range(3)])

    assert numbers(make_loader(Epochs()), 0, range(7)) == [0, 1, 2, 10, 11, 12, 20]
    data = TensorDataset(torch.arange(8).view(4, 2))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match="DistributedSampler"):
        make_loader(DataLoader(data, sampler=sampler))


def test_threads_end_and_failures_come_with_their_batch() -> None:
    before = threading.active_count()

    def broken() -> Iterator[Any]:
        yield torch.zeros(2, 2, dtype=torch.long)
        raise RuntimeError("the disk is gone")

    loader = make_loader(broken)
    loader.prefetch(0, [0, 1])
    loader.prefetch(2, [0, 1])
    assert numbers(loader, 0, [0, 1]) == [0, 0]
    with pytest.raises(RuntimeError, match="the disk is gone"):
        loader.batch(2, [0, 1])
    loader.close()
    assert threading.active_count() == before
