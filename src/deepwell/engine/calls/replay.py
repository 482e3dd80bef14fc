"""A compiled forward and its backward, launched kernel by kernel or replayed from CUDA graphs.

Short kernels wait for the host: a step of GPT-2 has a thousand launches. Recorded as CUDA graphs it has two. Where
nobody asked for them, a few calls are timed first: graphs are recorded where the GPU waits for the host, inputs have
fixed sizes and outputs are small, and dropped again where the replay is no faster. Torch's own `cudagraph_trees`
records and replays, on memory of its own; what leaves it is copied, so that outputs may be kept and gradients
accumulated as without graphs. A forward whose predecessor still waits for its backward, one in another thread and one
inside somebody's own recording are launched as ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._inductor import compile_fx

_log = logging.getLogger("deepwell.engine")

# Calls of a graph before it is timed (kernels are compiled and chosen in the first, launches recorded in the next two),
# and timed ones.
_WARM_CALLS, _TIMED_CALLS = 3, 2
# Of the time of a forward and backward; the rest of it the GPU worked on after the last launch. Less than all: the host
# may wait for nobody at the end and have kept the GPU waiting on the way. The replay is timed in any case.
_HOST_SHARE = 0.6
# What the replay must take at most, of the time of launches.
_MOST_TIME = 0.97
# Torch runs a graph once in its own memory and records it in the second call.
_RECORDING_CALLS = 2
# Copies of larger outputs would cost more than launches: all logits, say.
_MOST_OUTPUT_BYTES = 256 << 20
# Copied by itself: an H200 copies at 4.25 TB/s, and by `_foreach_copy_` at 3.0 (1.85e9 gradients, 2026-11-18).
_LARGE_BYTES = 32 << 20

Run = Callable[[list[Any]], Any]

_compiling: ContextVar[Replay | None] = ContextVar("deepwell_replay", default=None)
# Of what recorded forwards keep for backwards that have not run, a few tensors each, as weak references: autograd frees
# all at once. Torch has one tree of graphs a device for all engines.
_pending: list[Any] = []
_WATCHED = 4
_weak_reference: Any = torch._C._WeakTensorRef  # type: ignore[attr-defined]


class Replay:
    """How one graph of a model, with its backward, is run.

    `rule` is "always" or "measured". `state` is "launched" until a decision is made, then "replayed" or "never"; `why`
    says it in words.
    """

    def __init__(self, rule: str) -> None:
        self.rule, self.state, self.why = rule, "launched", ""
        self._calls = self._replays = 0
        self._seconds: dict[str, list[tuple[float, float]]] = {"launched": [], "replayed": []}
        self._recorded: dict[str, Run] = {}
        self._addresses: set[int] = set()  # of what recorded forwards return
        self._is_timing = False
        self._thread = threading.get_ident()

    @property
    def is_settled(self) -> bool:
        """Whether nothing will be decided or recorded any more."""
        if self.state == "never":
            return True
        needed = _RECORDING_CALLS + (_TIMED_CALLS if self.rule == "measured" else 0)
        return self.state == "replayed" and self._replays > needed

    def wrap(self, launch: Run, recorded: Run, *, is_backward: bool, is_inference: bool) -> Run:
        """What runs one compiled graph: `launch` its kernels, or replay what `recorded` records at its first call."""
        if is_inference and self.rule == "measured":
            return launch  # evaluation and generation: short, and of many lengths
        self._recorded["backward" if is_backward else "forward"] = recorded
        run = self._backward if is_backward else self._forward
        return lambda inputs: run(launch, inputs)

    # ---- one call ----

    def _forward(self, launch: Run, inputs: list[Any]) -> Any:
        self._calls += 1
        self._is_timing = False
        if self.state == "never":
            self._release()
        if self.state == "launched":
            self._decide(inputs)
        if self.state != "replayed" or not self._may_replay():
            self._is_timing = self.rule == "measured" and self.state == "launched" and self._calls > _WARM_CALLS
            return self._timed("launched", launch, inputs)
        given = list(inputs)
        self._replays += 1
        self._is_timing = self.rule == "measured" and 0 <= self._replays - _RECORDING_CALLS - 1 < _TIMED_CALLS
        try:
            torch.compiler.cudagraph_mark_step_begin()
            outputs = self._timed("replayed", self._recorded["forward"], inputs)
        except RuntimeError as error:  # too little memory, an op that waits for the GPU
            if self._replays > _RECORDING_CALLS:
                raise
            _log.warning("CUDA graphs cannot be recorded, kernels are launched as ever: %s", error)
            self._give_up(f"the forward could not be recorded: {str(error).splitlines()[0]}")
            return launch(given)
        own = {0, *(_address(value) for value in given)}  # nothing lies at 0: empty tensors
        made = [i for i, out in enumerate(outputs) if isinstance(out, Tensor) and _address(out) not in own]
        self._addresses.update(_address(outputs[i]) for i in made)
        outputs = list(outputs)
        for i in made[-_WATCHED:]:  # AOTAutograd puts what it keeps behind what the caller gets
            outputs[i] = outputs[i].detach()  # torch itself holds on to the tensors of its graphs
            _pending.append(_weak_reference(outputs[i]))
        return outputs

    def _backward(self, launch: Run, inputs: list[Any]) -> Any:
        # Who holds an input here keeps its memory from being used again.
        if any(_address(value) in self._addresses for value in inputs):
            grads = copied(self._timed("replayed", self._recorded["backward"], inputs))
        else:
            grads = self._timed("launched", launch, inputs)
        self._end_of_step()
        return grads

    def _release(self) -> None:
        """Free what was recorded, once nothing waits for its backward."""
        if self._recorded and not self._waits():
            self._recorded.clear()
            self._addresses.clear()

    @staticmethod
    def _waits() -> bool:
        _pending[:] = [kept for kept in _pending if not kept.expired()]
        return bool(_pending)

    def _may_replay(self) -> bool:
        """Whether this forward may use the graphs' memory: nothing recorded waits for a backward there."""
        is_own_thread = threading.get_ident() == self._thread
        return is_own_thread and not self._waits() and not torch.cuda.is_current_stream_capturing()

    # ---- deciding ----

    def _timed(self, state: str, run: Run, inputs: list[Any]) -> Any:
        """`run(inputs)`; while a call is timed, with the seconds of the host and of the GPU noted."""
        if not self._is_timing:
            return run(inputs)
        torch.cuda.synchronize()
        started = time.perf_counter()
        outputs = run(inputs)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        self._seconds[state].append((launched - started, time.perf_counter() - started))
        return outputs

    def _end_of_step(self) -> None:
        """After a backward: drop graphs that are no faster than launches."""
        self._is_timing = False
        if self.state != "replayed" or self.rule != "measured" or len(self._seconds["replayed"]) != 2 * _TIMED_CALLS:
            return
        launches, replays = (self._milliseconds(state) for state in ("launched", "replayed"))
        self._seconds["replayed"].append((0.0, 0.0))  # decided once
        if replays > _MOST_TIME * launches:
            self._give_up(f"a replay takes {replays:.1f} ms where launches take {launches:.1f}")
        else:
            self.why = f"the host was the limit: {launches:.1f} ms by launches, {replays:.1f} ms replayed"

    def _milliseconds(self, state: str) -> float:
        """Of a forward and backward."""
        return 1e3 * sum(total for _, total in self._seconds[state]) / _TIMED_CALLS

    def _decide(self, inputs: Sequence[Any]) -> None:
        """Leave the state "launched" where it is known by now how the graph should be run."""
        if any(not isinstance(value, Tensor) for value in inputs):
            self._give_up("sizes change from call to call")
        elif torch.distributed.is_available() and torch.distributed.is_initialized():
            self._give_up("several processes train the model")
        elif self.rule == "always":
            if self._calls > 1:  # kernels are chosen by timing them, which a recording forbids
                self.state, self.why = "replayed", "asked for"
        elif len(self._seconds["launched"]) == 2 * _TIMED_CALLS:
            host, total = (sum(pair[i] for pair in self._seconds["launched"]) for i in (0, 1))
            if host < _HOST_SHARE * total:
                self._give_up(f"launches take {host / total:.0%} of a forward and backward, the GPU is the limit")
            else:
                torch.cuda.empty_cache()  # the graphs have memory of their own
                self.state = "replayed"
        elif self._calls > _WARM_CALLS + 8 * _TIMED_CALLS:
            self._give_up("not every forward is followed by its backward")

    def _give_up(self, why: str) -> None:
        self.state, self.why = "never", why
        _log.info("CUDA graphs are not used: %s", why)

    # ---- outputs ----

    def outputs(self, made: Any) -> Any:
        """What a call returns, apart from the memory that the next replay writes."""
        if self.state != "replayed" or not isinstance(made, (tuple, list)):
            return made
        inside = [_address(out) in self._addresses for out in made]
        size = sum(out.numel() * out.element_size() for out, is_inside in zip(made, inside, strict=True) if is_inside)
        if size > _MOST_OUTPUT_BYTES and self.rule == "measured":
            self._give_up(f"outputs of {size / 2**20:.0f} MiB would be copied at every call")
        return type(made)(out.clone() if is_inside else out for out, is_inside in zip(made, inside, strict=True))


def _address(value: Any) -> int:
    """Of a tensor's memory; -1 of anything else."""
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else -1


def copied(grads: Sequence[Any]) -> list[Any]:
    """Gradients in memory of their own: large ones one by one, the others by few launches for all."""
    tensors = {id(grad): grad for grad in grads if isinstance(grad, Tensor)}
    copies = {key: torch.empty_like(grad) for key, grad in tensors.items()}
    small = []
    for key, grad in tensors.items():
        if grad.numel() * grad.element_size() < _LARGE_BYTES:
            small.append(key)
        else:
            copies[key].copy_(grad)
    if small:
        torch._foreach_copy_([copies[key] for key in small], [tensors[key] for key in small])
    return [copies.get(id(grad), grad) if isinstance(grad, Tensor) else grad for grad in grads]


# ---- with Inductor ----

_cudagraphify = compile_fx.cudagraphify


def _choosing(model: Run, *given: Any, **how: Any) -> Run:
    """In the place of Inductor's `cudagraphify`: a graph that an engine compiles may also be launched."""
    recorded, replay = _cudagraphify(model, *given, **how), _compiling.get()
    if replay is None:
        return recorded
    return replay.wrap(model, recorded, is_backward=how["is_backward"], is_inference=how["is_inference"])


@contextmanager
def compiling(replay: Replay) -> Iterator[None]:
    """While Inductor compiles, or reads from its caches, a graph that `replay` will run."""
    compile_fx.cudagraphify = _choosing
    token = _compiling.set(replay)
    try:
        yield
    finally:
        _compiling.reset(token)
