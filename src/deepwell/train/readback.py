"""Numbers of a step that come back from the device one step later, so that nobody waits for it."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class Pending:
    """A step that was started: its values on their way to the host, and what the log knows of it."""

    step: int
    values: Tensor
    end: Any  # a CUDA event, or the host's time
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A step that is over: its values and how long it took."""

    step: int
    values: tuple[float, ...]
    seconds: float
    facts: dict[str, Any]


class Readback:
    """Steps in flight. On a GPU the host runs at most one step ahead; on a CPU everything is there at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pending: deque[Pending] = deque()
        self._last_end: Any = None
        self._last_time = 0.0

    def start(self) -> None:
        """Time counts from here: after a pause (compiling, evaluating, saving) too."""
        if self.device.type == "cuda":
            self._last_end = torch.cuda.Event(enable_timing=True)
            self._last_end.record()
        self._last_time = time.perf_counter()

    def push(self, step: int, values: list[Tensor], **facts: Any) -> None:
        """A step was launched; `values` are its 0-d results on the device."""
        packed = torch.stack([value.detach().to(self.device, torch.float64).reshape(()) for value in values])
        end: Any = None
        if self.device.type == "cuda":
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            end = torch.cuda.Event(enable_timing=True)
            end.record()
        else:
            host, end = packed, time.perf_counter()
        self._pending.append(Pending(step=step, values=host, end=end, facts=facts))

    def pop(self, keep: int = 0) -> list[Finished]:
        """Steps that are over, all but the last `keep` that were launched; waits for those."""
        done = []
        while len(self._pending) > keep:
            pending = self._pending.popleft()
            if self.device.type == "cuda":
                pending.end.synchronize()
                seconds = self._last_end.elapsed_time(pending.end) / 1e3
                self._last_end = pending.end
            else:
                seconds, self._last_time = pending.end - self._last_time, pending.end
            values = tuple(float(value) for value in pending.values)
            done.append(Finished(step=pending.step, values=values, seconds=max(seconds, 1e-9), facts=pending.facts))
        return done
