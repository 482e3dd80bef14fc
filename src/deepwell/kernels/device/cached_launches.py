"""An op's launches, cached: the Python between an op and its kernels runs once for each kind of call.

A wrapper checks its operands, chooses a configuration, allocates and launches: 20 to 60 us of the host that depend on
the operands' shapes, strides and dtypes and on options alone. The second and the third call of a kind are recorded:
what was allocated, and which compiled kernels ran with which numbers and on whose memory. Where both agree, later calls
allocate and launch the same, kernels and numbers alike, without the wrapper. An op that does anything else in between
(a torch kernel, a TMA descriptor, a number that changes) is not cached and runs as ever. `_MOST_KINDS` are remembered.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepwell.kernels.device.triton_support import is_compiling_ahead, recorder, triton

_MOST_KINDS = 1024
# Calls of a kind that run as they are written: in the first, kernels are compiled. Then two that are recorded.
_PLAIN_CALLS = 1
# An op that refuses so many kinds, and has none that is cached, is asked no more.
_MOST_REFUSED = 16
_EMPTY = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


@dataclass(frozen=True, slots=True)
class _Memory:
    """A tensor that the op allocates. Those are numbered in their order, behind the operands."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Launch:
    """A compiled kernel and what it gets: numbers, and addresses as (place, whose memory, bytes into it).

    `frees` are allocated tensors that nothing reads after it.
    """

    kernel: Any
    grid: tuple[int, int, int]
    numbers: tuple[Any, ...]
    addresses: tuple[tuple[int, int, int], ...]
    run: Any = field(compare=False)
    frees: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _View:
    """A result: an allocated tensor, as it is or another view of its memory."""

    memory: int
    as_strided: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class _Sequence:
    """All that a call of a kind does."""

    steps: tuple[_Memory | _Launch, ...]
    results: tuple[_View, ...]
    is_tuple: bool

    def run(self, operands: Sequence[Tensor]) -> Any:
        device = operands[0].device
        tensors: list[Any] = [*operands]
        addresses = [tensor.data_ptr() for tensor in operands]
        stream = current_stream(operands[0])
        for step in self.steps:
            if isinstance(step, _Memory):
                made = torch.empty_strided(step.size, step.stride, dtype=step.dtype, device=device)
                tensors.append(made)
                addresses.append(made.data_ptr())
                continue
            numbers = list(step.numbers)
            for place, memory, offset in step.addresses:
                numbers[place] = addresses[memory] + offset
            step.run(*numbers, stream=stream)
            for memory in step.frees:
                tensors[memory] = None
        results = tuple(
            tensors[view.memory] if view.as_strided is None else tensors[view.memory].as_strided(*view.as_strided)
            for view in self.results
        )
        return results if self.is_tuple else results[0]


class _Refused(Exception):
    """Why a call cannot be cached."""


class _Allocations(TorchDispatchMode):
    """Sees what torch does while an op runs: allocations are noted, views are nothing, all else refuses."""

    def __init__(self, recording: "Recording") -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            self._recording.allocated(out)
        elif not func.is_view:
            self._recording.refuse(f"it calls {func}")
        return out


class Recording:
    """One call of an op as it happens. What cannot be cached ends it with a reason; the call itself goes on."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        self.why = ""
        self._operands = len(operands)
        self._tensors = list(operands)  # all alive, so that no memory is that of two
        self._steps: list[_Memory | _Launch] = []

    def refuse(self, why: str) -> None:
        self.why = self.why or why

    def allocated(self, made: Tensor) -> None:
        if made.device != self._tensors[0].device:
            self.refuse("it allocates elsewhere")
        self._steps.append(_Memory(tuple(made.shape), made.stride(), made.dtype))
        self._tensors.append(made)

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
        """`kernel[grid](*args, **kwargs)`, noted."""
        compiled = kernel[grid](*args, **kwargs)
        try:
            self._steps.append(self._noted(kernel, grid, compiled, args, kwargs))
        except _Refused as reason:
            self.refuse(str(reason))
        return compiled

    def _noted(self, kernel: Any, grid: tuple[int, ...], compiled: Any, args: Any, kwargs: dict[str, Any]) -> _Launch:
        if not isinstance(kernel, triton.runtime.JITFunction) or compiled is None or kernel.pre_run_hooks:
            raise _Refused(f"{kernel} is no plain Triton kernel")
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        numbers: list[Any] = []
        addresses = []
        for place, parameter in enumerate(kernel.params):
            value = given[parameter.name] if parameter.name in given else parameter.default
            if isinstance(value, Tensor):
                addresses += [] if value.data_ptr() == 0 else [(place, *self._memory_of(value))]
                value = 0
            elif not parameter.is_constexpr and not isinstance(value, (int, float, type(None))):
                raise _Refused(f"{parameter.name} is a {type(value).__name__}")
            numbers.append(value)
        x, y, z = (*grid, 1, 1)[:3]
        whole = x, y, z
        return _Launch(compiled, whole, tuple(numbers), tuple(addresses), compiled[whole])

    def _memory_of(self, tensor: Tensor) -> tuple[int, int]:
        """(whose memory a tensor is, bytes into it): an operand's, or that of an allocated tensor."""
        for i, known in enumerate(self._tensors):
            if known is tensor:
                return i, 0
        storage = tensor.untyped_storage()._cdata
        found = [i for i, known in enumerate(self._tensors) if known.untyped_storage()._cdata == storage]
        if len(found) != 1:
            raise _Refused("a kernel reads memory of nobody, or of several operands")
        return found[0], tensor.data_ptr() - self._tensors[found[0]].data_ptr()

    def sequence(self, made: Any) -> _Sequence | None:
        """What was recorded, or None where it cannot be cached."""
        results = made if isinstance(made, (tuple, list)) else (made,)
        try:
            views = tuple(map(self._view, results))
        except _Refused as reason:
            self.refuse(str(reason))
        if self.why:
            return None
        return _Sequence(self._with_frees(views), views, isinstance(made, (tuple, list)))

    def _view(self, result: Any) -> _View:
        if not isinstance(result, Tensor):
            raise _Refused(f"a result is a {type(result).__name__}")
        memory, offset = self._memory_of(result)
        whole = self._tensors[memory]
        launches = [step for step in self._steps if isinstance(step, _Launch)]
        is_written = any(memory == where for step in launches for _, where, _ in step.addresses)
        if memory < self._operands or result.dtype != whole.dtype or not (is_written or not whole.numel()):
            raise _Refused("a result is not what its kernels wrote")
        if result is whole:
            return _View(memory, None)
        return _View(memory, (tuple(result.shape), result.stride(), offset // result.element_size()))

    def _with_frees(self, results: Sequence[_View]) -> tuple[_Memory | _Launch, ...]:
        """The steps; each launch drops what it was the last to use."""
        kept = {view.memory for view in results} | set(range(self._operands))
        steps = list(self._steps)
        for i in reversed(range(len(steps))):
            step = steps[i]
            if isinstance(step, _Launch):
                frees = tuple(sorted({memory for _, memory, _ in step.addresses} - kept))
                kept.update(frees)
                steps[i] = replace(step, frees=frees)
        return tuple(steps)


class CachedLaunches:
    """An op's implementation in the place of `run`, its wrapper."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        # By kind of call: the sequence; how many calls there were, and the first recording; or None where it refused.
        self._kinds: dict[Any, _Sequence | tuple[int, _Sequence | None] | None] = {}
        self._refused, self._lock = 0, threading.Lock()
        self.is_off = False
        self.why = ""  # the last refusal

    def __call__(self, *args: Any) -> Any:
        if self.is_off or not is_on_current_gpu(args[0]) or is_compiling_ahead():
            return self.run(*args)
        operands: list[Tensor] = []
        kind = _kind_of(args, operands)
        found = self._kinds.get(kind, (0, None))
        if found.__class__ is _Sequence:
            return found.run(operands)
        if found is None:
            return self.run(*args)
        return self._first_calls(kind, found, args, operands)

    def _first_calls(self, kind: Any, found: Any, args: tuple[Any, ...], operands: list[Tensor]) -> Any:
        calls, before = found
        if calls < _PLAIN_CALLS:
            made = self.run(*args)
            self._keep(kind, (calls + 1, None))
            return made
        recording = Recording(operands)
        token = recorder.set(recording)
        try:
            with _Allocations(recording):
                made = self.run(*args)
        finally:
            recorder.reset(token)
        sequence = recording.sequence(made)
        if sequence is None or (before is not None and sequence != before):
            self._refuse(kind, recording.why or "two calls of a kind were not alike")
        else:
            self._keep(kind, sequence if before is not None else (calls + 1, sequence))
        return made

    def _keep(self, kind: Any, what: Any) -> None:
        with self._lock:
            if len(self._kinds) < _MOST_KINDS or kind in self._kinds:
                self._kinds[kind] = what

    def _refuse(self, kind: Any, why: str) -> None:
        self._keep(kind, None)
        self.why = why
        self._refused += 1
        is_cached = any(isinstance(known, _Sequence) for known in self._kinds.values())
        self.is_off = self._refused >= _MOST_REFUSED and not is_cached


def is_on_current_gpu(operand: Any) -> bool:
    """Whether kernels run where an op's first operand is, a tensor or several, without a change of the device."""
    first = operand if isinstance(operand, Tensor) else operand[0]
    return first.is_cuda and first.get_device() == torch.cuda.current_device()


def current_stream(operand: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(operand.get_device())


def _kind_of(args: Sequence[Any], operands: list[Tensor]) -> Any:
    """What the launches of a call depend on; its tensors are put into `operands`."""
    kind: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            operands.append(arg)
            kind.append((arg.dtype, arg.shape, arg.stride(), arg.data_ptr() % 16, arg.get_device()))
        elif isinstance(arg, (list, tuple)):
            kind.append(_kind_of(arg, operands))
        else:
            kind.append(arg)
    return tuple(kind)
