"""The loader: batches by a global cursor that does not know how many ranks there are."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.train.data.order import ORDER, Order
from deepwell.train.data.samples import Samples, collate

Batch = dict[str, Tensor]
_Key = tuple[int, tuple[int, ...]]
# Where one of these differs, the cursor points at other samples.
_DECIDE = (
    "kind", "seq_len", "samples", "seed", "shuffle", "order", "sha256", "tokens", "documents", "vocab",
    "tokenizer_sha256", "tokenizer", "pattern",
)  # fmt: skip
# These may differ without meaning anything, or on purpose.
_WARN = ("type", "dataset", "first_sample", "document_mask")


class Loader(ABC):
    """Gives batches; prepares those that were announced in threads of its own. Subclasses say how one is made.

    The cursor counts samples of one global stream: epoch after epoch, in an order that depends on the seed and the
    epoch alone. It never touches a global random generator.
    """

    resumable: bool = True
    note: str = ""  # how a resume works, or why there is none; "" where there is nothing to say
    epoch_samples: int | None = None  # samples of one epoch; None where nobody knows
    rows: int | None = None  # of the batches that the data comes in; None where it comes in samples
    depth: ClassVar[int] = 32  # announced batches that are kept at most

    def __init__(self, workers: int = 1) -> None:
        if workers < 1:
            raise ConfigError(f"workers is {workers}; give at least 1")
        self._workers = workers
        self._pool: ThreadPoolExecutor | None = None
        self._announced: dict[_Key, Future[Batch]] = {}
        self._guard = threading.Lock()
        self._closed = False

    def batch(self, cursor: int, indices: Sequence[int]) -> Batch:
        """The samples number cursor + i for each i of `indices`, as one batch of CPU tensors."""
        key = self._key(cursor, indices)
        with self._guard:
            future = self._announced.pop(key, None)
            stale = [k for k in self._announced if k[0] < cursor]
            if future is None and len(self._announced) >= self.depth:
                stale = list(self._announced)  # the trainer went elsewhere: nobody will ask for these
            for old in stale:
                self._announced.pop(old).cancel()
        if future is None:
            return self._make(*key)
        return future.result()

    def prefetch(self, cursor: int, indices: Sequence[int]) -> None:
        """Prepare this batch in the background. A hint: it is ignored while `depth` batches wait already."""
        key = self._key(cursor, indices)
        with self._guard:
            if key in self._announced or len(self._announced) >= self.depth:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="deepwell-data")
            self._announced[key] = self._pool.submit(self._make, *key)

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """JSON that says what data this is; `check_same_data` compares two."""

    def state_dict(self, cursor: int) -> dict[str, Any]:
        """JSON that a checkpoint keeps beside the cursor. Most loaders need none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most loaders need none
        """Take what `state_dict` gave, before the first batch after a resume."""

    def close(self) -> None:
        """End the threads. The loader gives no batches afterwards."""
        with self._guard:
            self._closed = True
            pool, self._pool = self._pool, None
            self._announced.clear()
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _make(self, cursor: int, indices: tuple[int, ...]) -> Batch:
        """One batch, in whichever thread."""

    def _key(self, cursor: int, indices: Sequence[int]) -> _Key:
        if self._closed:
            raise ConfigError("data: this loader was closed; make another with make_loader")
        key = (int(cursor), tuple(int(index) for index in indices))
        if key[0] < 0 or not key[1] or min(key[1]) < 0:
            raise ConfigError(f"data: cursor {cursor} and indices {list(indices)}: give numbers from 0, at least one")
        return key


class IndexedLoader(Loader):
    """Batches of samples that can be read in any order: each epoch shuffled anew, and no position kept anywhere."""

    def __init__(
        self, samples: Samples, *, seed: int = 0, shuffle: bool = True, seq_len: int | None = None, workers: int = 1
    ) -> None:
        super().__init__(workers)
        self.epoch_samples = len(samples)
        if not self.epoch_samples:
            raise ConfigError(f"data: the {type(samples).__name__} given is empty; training needs at least one sample")
        self.samples, self.seed, self.shuffle = samples, seed, shuffle
        self.seq_len = getattr(samples, "seq_len", seq_len)
        self._orders: dict[int, Order] = {}

    def sample_indices(self, numbers: Sequence[int]) -> list[int]:
        """Which samples the global numbers mean."""
        length = len(self.samples)
        found = [0] * len(numbers)
        epochs: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            epochs.setdefault(number // length, []).append(place)
        for epoch, places in epochs.items():
            positions = [numbers[place] % length for place in places]
            chosen = self._order(epoch)(positions).tolist() if self.shuffle else positions
            for place, index in zip(places, chosen, strict=True):
                found[place] = index
        return found

    def _order(self, epoch: int) -> Order:
        if epoch not in self._orders:
            kept = {known: order for known, order in self._orders.items() if known == epoch - 1}
            self._orders = {epoch: Order(len(self.samples), self.seed, epoch), **kept}
        return self._orders[epoch]

    def _make(self, cursor: int, indices: tuple[int, ...]) -> Batch:
        chosen = self.sample_indices([cursor + index for index in indices])
        return collate([self.samples[index] for index in chosen], "data")

    def fingerprint(self) -> dict[str, Any]:
        own = getattr(self.samples, "fingerprint", None)
        facts = own() if callable(own) else {"kind": "samples", "type": type(self.samples).__qualname__}
        order = {"samples": len(self.samples), "seed": self.seed, "shuffle": self.shuffle, "order": ORDER}
        return {**facts, "seq_len": self.seq_len, **order}


def check_same_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Compare two loaders' fingerprints: warnings where the data may be other, ConfigError where it is.

    A path may differ: data that was moved is the same data.
    """
    if not saved:
        return ["data: the checkpoint does not say what data the run read; it is taken to be the same"]

    def said(name: str) -> str:
        texts = (repr(facts.get(name)) for facts in (saved, now))
        was, found = (text if len(text) <= 20 else f"{text[:16]}..." for text in texts)
        return f"{name} was {was}, is {found}"

    differ = [said(name) for name in _DECIDE if saved.get(name) != now.get(name)]
    if differ:
        raise ConfigError(
            f"data: the run was saved with other data ({'; '.join(differ)}), so its cursor means other samples: give "
            "the same data and settings, or start a new run"
        )
    return [f"data: {said(name)}" for name in _WARN if saved.get(name) != now.get(name)]
