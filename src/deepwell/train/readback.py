"""Numbers of a step that come back from the device one step later, so that nobody waits for it."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A tensor on its way to the host. On a CPU it is there at once, and `event` is None."""

    def __init__(self, values: Tensor) -> None:
        self._values, self.event = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def read(self) -> list[float]:
        """Its numbers; waits for them."""
        if self.event is not None:
            self.event.synchronize()
        return self._values.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A step that is over: its values, how long it took, and what the log knows of it."""

    step: int
    values: list[float]
    seconds: float
    facts: dict[str, Any]


class Readback:
    """Steps in flight. On a GPU the host runs at most one step ahead; on a CPU everything is there at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pending: deque[tuple[int, HostCopy, float, dict[str, Any]]] = deque()
        self._last_event: Any = None
        self._last_time = 0.0

    def start(self) -> None:
        """Time counts from here: after a pause (compiling, evaluating, saving) too."""
        if self.device.type == "cuda":
            self._last_event = torch.cuda.Event(enable_timing=True)
            self._last_event.record()
        self._last_time = time.perf_counter()

    def push(self, step: int, values: list[Tensor], **facts: Any) -> None:
        """A step was launched; `values` are its 0-d results on the device."""
        packed = torch.stack([value.detach().to(self.device, torch.float64).reshape(()) for value in values])
        self._pending.append((step, HostCopy(packed), time.perf_counter(), facts))

    def pop(self, keep: int = 0) -> list[Finished]:
        """Steps that are over, all but the last `keep` that were launched; waits for those."""
        done = []
        while len(self._pending) > keep:
            step, copy, at, facts = self._pending.popleft()
            values, seconds = copy.read(), at - self._last_time
            if copy.event is not None:
                seconds = self._last_event.elapsed_time(copy.event) / 1e3
            self._last_event, self._last_time = copy.event, at
            done.append(Finished(step=step, values=values, seconds=max(seconds, 1e-9), facts=facts))
        return done
