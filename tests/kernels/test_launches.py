"""Launches for a GPU that is not here show what only a launch shows: what the compiler refuses of a real call."""

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from deepwell.kernels.device.triton_support import compile_ahead, launch, tl, triton
from deepwell.kernels.tune.verify import why_failed
from launches import on_absent_gpu


@triton.jit
def _tile(x_ptr, WIDE: tl.constexpr):
    if WIDE:
        return tl.load(x_ptr + tl.arange(0, 32))
    return tl.load(x_ptr + tl.arange(0, 16))


@triton.jit
def _sum_kernel(x_ptr, y_ptr, n, WIDE: tl.constexpr):
    tl.store(y_ptr, tl.sum(_tile(x_ptr, WIDE)) * n)


@triton.jit
def _product_kernel(x_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = x_ptr + i[:, None] * SIZE + i[None, :]
    x = tl.load(at)
    tl.store(at, tl.dot(x, x))


def launched(n, *, wide):
    x = torch.zeros(32)
    with on_absent_gpu() as launches:
        _sum_kernel[(3,)](x, x, n, WIDE=wide)
    return launches


def test_a_launch_compiles_and_computes_nothing():
    before = driver._active
    (made,) = launched(5, wide=False)
    assert made.name == "_sum_kernel" and made.grid == (3,) and ".target sm_90" in made.made.asm["ptx"]
    assert driver._active is before


def test_an_integer_that_is_1_is_a_constant():
    by_one, by_five = (launched(n, wide=False)[0].made.asm["ptx"] for n in (1, 5))
    assert by_one.count(".param .u32") < by_five.count(".param .u32")


def test_what_the_compiler_refuses_is_raised():
    with pytest.raises(CompilationError):  # a return behind that of a branch, of another shape
        launched(5, wide=True)


def test_more_shared_memory_than_there_is_is_raised():
    with pytest.raises(OutOfResources, match="shared memory"), on_absent_gpu():
        _product_kernel[(1,)](torch.zeros(256, 256), SIZE=256)


def test_why_a_kernel_was_not_compiled_is_said_in_one_line():
    with pytest.raises(CompilationError) as found:
        launched(5, wide=True)
    assert str(found.value).startswith("at 2:")  # all that its first line says
    reason = why_failed(found.value)
    assert "Inconsistent return types" in reason and "in _tile: return tl.load(x_ptr + tl.arange(0, 16))" in reason
    with pytest.raises(OutOfResources) as found, on_absent_gpu():
        _product_kernel[(1,)](torch.zeros(256, 256), SIZE=256)
    assert "shared memory, Required: 524288" in why_failed(found.value)


def test_what_is_compiled_ahead_is_not_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.zeros(32)
    _sum_kernel.device_caches.clear()

    def call(n, wide):
        return lambda: launch(_sum_kernel, (3,))(x, x, n, WIDE=wide)

    with on_absent_gpu() as launches:
        compile_ahead([call(48, False), call(7, False), call(7, True)])  # the last one cannot be compiled
        ahead = list(tmp_path.rglob("*.cubin"))
        assert len(ahead) == 2
        call(48, False)()
        call(7, False)()
        assert list(tmp_path.rglob("*.cubin")) == ahead and len(launches) >= 2
        with pytest.raises(CompilationError):
            call(7, True)()
