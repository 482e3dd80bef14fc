"""A change to a model that several threads need at once: made by the first that enters, undone by the last to leave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager


class Overlap:
    """`with overlap():` as often as wanted, from any thread; the change itself is entered once and left once."""

    def __init__(self, change: Callable[[], AbstractContextManager[None]]) -> None:
        self._change, self._lock = change, threading.Lock()
        self._inside, self._made = 0, ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._made.enter_context(self._change())
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._made.close()
