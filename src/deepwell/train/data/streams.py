"""Batches from anything that can be iterated: each rank reads the whole stream and keeps its own rows."""

import logging
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from deepwell.errors import ConfigError
from deepwell.train.data.loader import Batch, Loader
from deepwell.train.data.order import words
from deepwell.train.data.samples import as_fields, as_rows, collate
from deepwell.train.data.state_json import decode_state, encode_state

_log = logging.getLogger("deepwell.train")
_CHECKED = 16  # rows before the cursor that a resumed run compares


class BatchSource:
    """An iterable, and how it is begun again. `again`: it can be; `stateful`: it says and takes where it is."""

    def __init__(self, data: Any, seed: int) -> None:
        self.data, self._seed = data, seed
        self.name = f"{type(data).__module__}.{type(data).__qualname__}"
        is_function = callable(data) and not hasattr(data, "__iter__")
        self._make: Callable[[], Any] = data if is_function else lambda: iter(data)
        self._generators: list[tuple[torch.Generator, Tensor | None]] = []  # with their first state, if not ours
        if isinstance(data, DataLoader):
            self._own_generators(data)
        self.again = is_function or not hasattr(data, "__next__")
        self.stateful, self.refused = False, ""
        self._initial: Any = None
        if hasattr(data, "state_dict") and hasattr(data, "load_state_dict"):
            self._take_state()

    def _own_generators(self, loader: DataLoader[Any]) -> None:
        """Give a DataLoader its own generators where it has none, so that it leaves torch's alone."""
        sampler = loader.sampler
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise ConfigError(
                "data: the DataLoader has a DistributedSampler, but ranks share the rows by themselves: leave it out"
            )
        # torchdata's samplers seed themselves from torch's generator, and so differently on each rank.
        is_random = loader.generator is None and type(sampler).__module__.startswith("torchdata.")
        for holder in (loader, sampler, getattr(loader.batch_sampler, "sampler", None)):
            if holder is None or not hasattr(holder, "generator"):
                continue
            if any(holder.generator is known for known, _ in self._generators):
                continue
            is_given = holder.generator is not None and not (is_random and holder is sampler)
            if not is_given:
                holder.generator = torch.Generator()
            self._generators.append((holder.generator, holder.generator.get_state() if is_given else None))
        self._seed_generators(0)

    def _seed_generators(self, epoch: int) -> None:
        """By seed and epoch; a generator that was given begins as it was, and its own seed decides later epochs."""
        for generator, state in self._generators:
            if state is not None:
                generator.set_state(state)
            if state is None or epoch:
                seed = self._seed if state is None else generator.initial_seed()
                generator.manual_seed(int(words("stream", seed, epoch)[0] >> 1))

    def _take_state(self) -> None:
        inner = getattr(self.data, "_ex_iterable", None)
        while inner is not None and type(inner).__name__ != "BufferShuffledExamplesIterable":
            inner = getattr(inner, "ex_iterable", None)
        if inner is not None:
            self.refused = "its state leaves out its shuffle buffer"  # of datasets.IterableDataset
            return
        try:
            self._initial, self.stateful = encode_state(self.data.state_dict()), True
        except ConfigError as error:
            self.refused = str(error)

    def load(self, state: Any) -> None:
        """Go to where `state` (encoded) was taken; None is the start."""
        state = self._initial if state is None else state
        if state is not None:
            self.data.load_state_dict(decode_state(state))

    def open(self, epoch: int) -> Iterator[Any]:
        """The iterator of an epoch: what it gives depends on seed and epoch as far as that is ours to decide."""
        self._seed_generators(epoch)
        for holder in (self.data, getattr(self.data, "sampler", None)):
            set_epoch = getattr(holder, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        return iter(self._make())


class StreamLoader(Loader):
    """Rows of a stream by their number. Rows behind the last two cursors are let go; asking for them reads anew.

    It resumes by state, where the iterable has state_dict and load_state_dict; by reading again, where it can be
    iterated anew; else not at all: then it goes on with whatever comes.
    """

    def __init__(self, data: Any, *, seq_len: int | None = None, seed: int = 0) -> None:
        super().__init__(workers=1)
        self.seq_len, self.seed = seq_len, seed
        self._source = BatchSource(data, seed)
        self._lock = threading.RLock()
        self._rows: deque[dict[str, Tensor]] = deque()
        self._first = 0  # number of the first row that is held
        self._next = 0  # number of the next row to read
        self._epoch, self._epoch_begin = 0, 0
        self._iterator: Iterator[Any] | None = None
        self._cursors: tuple[int, int] | None = None  # the last two; None before the first
        self._states: deque[dict[str, Any]] = deque()  # where the iterable stood before a row: row, epoch, begin, state
        self._shape: torch.Size | None = None  # of the first batch
        self._loaded: dict[str, Any] = {}  # what a resume gave, until its check was made
        self.resumable = self._source.stateful or self._source.again
        self.note = self._say()

    def _say(self) -> str:
        name, refused = self._source.name, f" ({self._source.refused})" if self._source.refused else ""
        if self._source.stateful:
            return ""
        if self._source.again:
            return (
                f"data: {name} is resumed by reading it again from its start{refused}, which takes time and must give "
                "the same batches; a dataset with indices or token files resume at once"
            )
        return (
            f"data: {name} can be read only once{refused}, so a resumed run goes on with whatever it gives next: give "
            "a function that returns an iterator, or an object with state_dict and load_state_dict, to resume exactly"
        )

    @property
    def rows(self) -> int | None:  # type: ignore[override]
        """Rows of the stream's first batch, None where it gives single samples; reads it where nothing was read yet."""
        size = getattr(self._source.data, "batch_size", None)
        if isinstance(size, int):
            return size
        with self._lock:
            if self._shape is None:
                self._read()
            return self._shape[0] if self._shape is not None and len(self._shape) == 2 else None

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "stream", "type": self._source.name, "seq_len": self.seq_len, "seed": self.seed}

    def close(self) -> None:
        super().close()
        with self._lock:
            self._rows.clear()
            self._iterator = None  # workers of a DataLoader end with it

    def state_dict(self, cursor: int) -> dict[str, Any]:
        """Where the stream stands at `cursor`, which is at or before what was read last."""
        with self._lock:
            if self._cursors is None and self._loaded.get("cursor") == cursor:
                return dict(self._loaded)  # resumed, and nothing read since
            end = min(cursor, self._next)  # a rank may not have needed the last rows of a step
            begin = max(end - _CHECKED, self._first)
            # A state some rows before the cursor: those are read again and compared.
            before = [known for known in self._states if known["row"] <= begin] or list(self._states)[:1]
            known = before[-1] if before and before[-1]["row"] < cursor else {}
            begin = max(begin, known.get("row", 0))
            return {"cursor": cursor, "checked": [begin, end], "check": self._crc(begin, end), **known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            if not state or not self.resumable:
                return
            self._restart()
            self._loaded = dict(state)
            if self._source.stateful and "state" not in state:
                self._source.load(None)
            elif self._source.stateful:
                self._states.append({name: state[name] for name in ("row", "epoch", "begin", "state")})
                self._first = self._next = state["row"]
                self._epoch, self._epoch_begin = state["epoch"], state["begin"]
                self._source.load(state["state"])

    def _crc(self, begin: int, end: int) -> int | None:
        """Of the rows [begin, end), where they are all held."""
        if not self._first <= begin < end <= self._next:
            return None
        crc = 0
        for row in range(begin, end):
            crc = zlib.crc32(self._rows[row - self._first]["input_ids"].numpy().tobytes(), crc)
        return crc

    def _make(self, cursor: int, indices: tuple[int, ...]) -> Batch:
        with self._lock:
            if self._cursors is None:
                self._cursors = (cursor, cursor)
                if not self.resumable:
                    self._first = self._epoch_begin = cursor  # it goes on with whatever comes
                    self._next = cursor + len(self._rows)
            elif cursor != self._cursors[1]:
                self._cursors = (self._cursors[1], cursor) if cursor > self._cursors[1] else (cursor, cursor)
            low, high = cursor + min(indices), cursor + max(indices)
            if low < self._first:
                self._rewind(low)
            self._read_to(high)
            if not self._is_as_before():
                self._begin_anew()
                self._read_to(high)
                if not self._is_as_before():
                    raise ConfigError(self._differs())
            self._loaded = {}
            return collate([self._rows[cursor + index - self._first] for index in indices], "data")

    def _read_to(self, row: int) -> None:
        assert self._cursors is not None
        while self._next <= row:
            self._read()
            keep = min(self._cursors) - _CHECKED
            self._forget(min(keep, self._loaded["checked"][0]) if self._loaded else keep)

    def _is_as_before(self) -> bool:
        """Whether the rows before the cursor of a resumed run are those that the saved run read."""
        if self._loaded.get("check") is None:
            return True
        found = self._crc(*self._loaded["checked"])
        return found is None or found == self._loaded["check"]

    def _begin_anew(self) -> None:
        """After a state that led elsewhere: read from the start, which is slow and may be right."""
        if not (self._source.stateful and self._source.again and "state" in self._loaded):
            raise ConfigError(self._differs())
        _log.warning("data: the state of %s led to other samples; it is read from its start", self._source.name)
        self._restart()
        self._source.load(None)

    def _differs(self) -> str:
        return (
            f"data: {self._source.name} gives other batches than before the resume (before sample "
            f"{self._loaded['cursor']}): fix its order and its seeds, or start a new run"
        )

    def _forget(self, keep: int) -> None:
        """Let go of rows before row `keep`, and of states that no row from there on needs."""
        while self._rows and self._first < keep:
            self._rows.popleft()
            self._first += 1
        while len(self._states) > 1 and self._states[1]["row"] <= keep:
            self._states.popleft()

    def _rewind(self, row: int) -> None:
        if not self._source.again:
            raise ConfigError(f"data: sample {row} of {self._source.name} was read already, and it cannot be read anew")
        self._restart()
        if self._source.stateful:
            self._source.load(None)

    def _restart(self) -> None:
        self._iterator = None
        self._rows.clear()
        self._states.clear()
        self._first = self._next = self._epoch = self._epoch_begin = 0

    def _read(self) -> None:
        """Read one batch; the next epoch where this one ends."""
        raw = self._next_batch()
        what = f"the batch at sample {self._next} of {self._source.name}"
        self._shape = self._shape or as_fields(raw, what)["input_ids"].shape
        for row in as_rows(raw, what, self.seq_len):
            # A copy: an iterable may fill the same tensors again.
            self._rows.append({name: value.clone() for name, value in row.items()})
            self._next += 1

    def _next_batch(self) -> Any:
        if self._iterator is None:
            self._iterator = self._source.open(self._epoch)
        for attempt in range(2):
            if self._source.stateful:
                place = {"row": self._next, "epoch": self._epoch, "begin": self._epoch_begin}
                self._states.append({**place, "state": encode_state(self._source.data.state_dict())})
            try:
                return next(self._iterator)
            except StopIteration:
                if self._source.stateful:
                    self._states.pop()
            read = self._next - self._epoch_begin
            if not self._source.again or attempt or not read:
                raise ConfigError(self._ended())
            if self._epoch == 0:
                self.epoch_samples = read
            self._epoch, self._epoch_begin = self._epoch + 1, self._next
            self._iterator = self._source.open(self._epoch)
        raise AssertionError("not reached")

    def _ended(self) -> str:
        if self._next == 0:
            return f"data: {self._source.name} gave no batches; training needs at least one"
        return (
            f"data: {self._source.name} ended after {self._next} samples and cannot be read anew: give more data, or a "
            "function that returns an iterator"
        )
