"""Launch kernels for a GPU that is not here: the wrappers run, Triton compiles what they ask for, nothing is computed.

`aot` compiles a kernel with arguments that a test writes down. Here they are those of a real call, specialized as
Triton specializes them: an int that is 1 is a constant, others are multiples of 16 or not, None is a pointer left out.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

import aot

_H200_SMS = 132


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch: the kernel's name, its grid, and what the compiler made of it."""

    name: str
    grid: Any
    made: CompiledKernel


class _AbsentGpu(DriverBase):
    """What Triton asks of a driver in order to compile and to launch. A launch does nothing."""

    def __init__(self, arch: int) -> None:
        self.arch, self.utils = arch, self

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> str:
        return f"sm_{self.arch}"  # a cache of kernels of its own: that of a GPU that is here stays as it is

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_device_properties(self, device: object) -> dict[str, int]:
        return {"max_shared_mem": aot.MAX_SHARED_BYTES}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: object) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *launch: None


@contextmanager
def on_absent_gpu(arch: int = 90) -> Iterator[list[Launch]]:
    """Within it, wrappers launch their kernels on CPU tensors; the launches are listed as they come.

    Results hold whatever memory held. Raises what Triton raises: errors of the compiler, too much shared memory.
    """
    launches: list[Launch] = []
    before = driver._active
    run = JITFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = run(self, *args, **kwargs)
        launches.append(Launch(name=self.fn.__name__, grid=kwargs["grid"], made=made))
        return made

    stand_ins = {
        "runs_kernel": lambda x, kernel: True,
        "runs_ptx": lambda x, kernel: True,
        "on_device": lambda x: nullcontext(),
        "num_sms": lambda x: _H200_SMS,
    }
    with mock.patch.object(JITFunction, "run", noted), contextmanager(_patched)(stand_ins):
        driver.set_active(_AbsentGpu(arch))
        try:
            yield launches
        finally:
            driver._active = before


def _patched(stand_ins: dict[str, Any]) -> Iterator[None]:
    names = [name for name in sys.modules if name.startswith("deepwell.kernels.")]
    owners = [sys.modules[name] for name in names if not name.endswith("triton_support")]
    patches = [
        mock.patch.object(owner, name, stand_in)
        for owner in owners
        for name, stand_in in stand_ins.items()
        if name in vars(owner)
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
