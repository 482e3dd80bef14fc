"""Triton where it is installed, a stand-in where it is not, and the one rule for where a kernel runs.

Kernel files take `triton` and `tl` from here, so that they import anywhere (macOS has no Triton). CUDA tensors go to
the kernel, CPU tensors to the plain-torch reference, unless Triton's interpreter is on: then the kernel is interpreted.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from deepwell.errors import UnsupportedError

# E4M3 and E5M2 conversions are hardware's from Ada (8.9) on.
_MIN_CAPABILITY = (8, 9)


class _Absent:
    """Lets kernels be defined without Triton: any attribute and any decorator of it is this object again."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __call__(self, *args: object, **kwargs: object) -> "_Absent":
        return self

    def __getitem__(self, grid: object) -> None:
        raise _missing()


def _missing() -> UnsupportedError:
    return UnsupportedError(
        "this kernel needs Triton, which is not installed: pip install triton (Linux), or use a CPU"
    )


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return _Absent()


triton: Any = _load("triton")
tl: Any = _load("triton.language")


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. `triton.cdiv` is made for kernels and takes a host 5 us a call."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n; 0 for 0, as Triton's, which takes a host 6 us."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def _constant_class() -> Any:
    if isinstance(tl, _Absent):
        return tl.constexpr

    class Constant(tl.constexpr):
        """A global that kernels read. Each launch compares it with what was compiled, 1 us by constexpr's own `!=`."""

        def __ne__(self, other: object) -> bool:
            return not isinstance(other, tl.constexpr) or self.value != other.value

    return Constant


constant = _constant_class()


def _launch_errors() -> tuple[type[Exception], ...]:
    try:
        return RuntimeError, ValueError, importlib.import_module("triton.errors").TritonError
    except ModuleNotFoundError:
        return RuntimeError, ValueError


# What the launch of a kernel may raise: CUDA's errors, torch's checks (of values: a ValueError), Triton's compiler and
# launcher.
LAUNCH_ERRORS = _launch_errors()


@dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """The tile of rows x columns that a program takes at a time.

    `packing`, how values are made: "bytes" one by one; "words", four of a column in one, to be transposed at a quarter
    of the cost; "asm" by PTX instructions.
    """

    rows: int
    columns: int
    num_warps: int
    packing: str = "bytes"


@lru_cache(maxsize=64)
def _check_device(index: int) -> None:
    capability = torch.cuda.get_device_capability(index)
    if capability < _MIN_CAPABILITY:
        got = ".".join(map(str, capability))
        raise UnsupportedError(f"FP8 kernels need compute capability 8.9 or later; cuda:{index} has {got}")


def runs_kernel(x: Tensor, kernel: Any) -> bool:
    """Whether `kernel` itself computes on x's device; False means: use the reference. Raises UnsupportedError."""
    if x.is_cuda:
        if isinstance(triton, _Absent):
            raise _missing()
        _check_device(x.device.index)
        return True
    return is_interpreted(kernel)


def is_interpreted(kernel: Any) -> bool:
    """Whether `kernel` was made for Triton's interpreter (TRITON_INTERPRET=1 when its module was loaded)."""
    return not isinstance(triton, _Absent) and not isinstance(kernel, triton.runtime.JITFunction)


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Make x's GPU the current one while a kernel is launched: Triton launches on the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@lru_cache(maxsize=64)
def _num_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def runs_ptx(x: Tensor, kernel: Any) -> bool:
    """Whether `kernel` may have PTX of Hopper in it: not where it is interpreted, nor on an earlier GPU."""
    return not is_interpreted(kernel) and x.is_cuda and _capability(x.device.index) >= (9, 0)


@lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def num_sms(x: Tensor) -> int:
    """Streaming multiprocessors of x's GPU, for kernels whose programs stay and loop; 2 where interpreted."""
    return _num_sms(x.device.index) if x.is_cuda else 2


def block_descriptor(x: Tensor, *block: int) -> Any:
    """A TMA descriptor of blocks of a tensor."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x, list(block))


# ---- compiled before they are launched ----

_only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)
# Of the call of an op that is recorded (`cached_launches`): it launches, and notes what.
recorder: ContextVar[Any] = ContextVar("recorder", default=None)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`; within `compile_ahead` its call compiles the kernel and launches nothing."""
    if _only_compiles.get() and not is_interpreted(kernel):
        return partial(kernel.warmup, grid=grid)
    recording = recorder.get()
    return kernel[grid] if recording is None else partial(recording.launch, kernel, grid)


def is_compiling_ahead() -> bool:
    return _only_compiles.get()


def compile_ahead(calls: Sequence[Callable[[], object]]) -> None:
    """Compile the kernels that `calls` would `launch`, as many at a time as there are cores.

    Results of the calls mean nothing. What raises here raises again when it is launched, and is not reported twice.
    """
    if isinstance(triton, _Absent) or not hasattr(triton, "AsyncCompileMode") or len(calls) < 2:
        return
    token = _only_compiles.set(True)
    try:
        with (
            ThreadPoolExecutor(min(len(calls), os.cpu_count() or 1)) as pool,
            triton.AsyncCompileMode(pool, ignore_errors=True),
        ):
            for call in calls:
                with suppress(Exception):
                    call()
    finally:
        _only_compiles.reset(token)
