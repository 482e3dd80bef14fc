"""`engine.generate`: Hugging Face's own generation, its forwards run by the engine.

`generate` is a method of the model and calls the model. While it runs, and in its thread alone, the model's forward is
the engine's, so that what is generated is what the engine computes, formats included.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepwell.engine.calls.overlap import Overlap


class Generation:
    """The model's `generate` with the forward of an engine, `run`."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        self._model: Any = model
        self._engine, self._threads = run, threading.local()
        self._installed = Overlap(self._install)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._installed(), self._in_this_thread(True):
            return self._model.generate(*args, **kwargs)

    @contextmanager
    def _in_this_thread(self, is_on: bool) -> Iterator[None]:
        before = getattr(self._threads, "is_on", False)
        self._threads.is_on = is_on
        try:
            yield
        finally:
            self._threads.is_on = before

    @contextmanager
    def _install(self) -> Iterator[None]:
        own, held = self._model.forward, self._model.__dict__

        @functools.wraps(own)  # generation reads the forward's signature
        def forward(*inputs: Any, **named: Any) -> Any:
            if not getattr(self._threads, "is_on", False):
                return own(*inputs, **named)
            with self._in_this_thread(False):  # the engine compiles the model's own forward
                return self._engine(*inputs, **named)

        before = held.get("forward")
        # Dynamo looks past this function: what it compiles is the model's own, as in any other call.
        held["forward"] = torch._dynamo.disable(forward, recursive=False)
        try:
            yield
        finally:
            if before is None:
                del held["forward"]
            else:
                held["forward"] = before
