"""Launches for a GPU that is not here show what only a launch shows: what the compiler refuses of a real call."""

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from deepwell.kernels.device.triton_support import tl, triton
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


def launch(n, *, wide):
    x = torch.zeros(32)
    with on_absent_gpu() as launches:
        _sum_kernel[(3,)](x, x, n, WIDE=wide)
    return launches


def test_a_launch_compiles_and_computes_nothing():
    before = driver._active
    (made,) = launch(5, wide=False)
    assert made.name == "_sum_kernel" and made.grid == (3,) and ".target sm_90" in made.made.asm["ptx"]
    assert driver._active is before


def test_an_integer_that_is_1_is_a_constant():
    by_one, by_five = (launch(n, wide=False)[0].made.asm["ptx"] for n in (1, 5))
    assert by_one.count(".param .u32") < by_five.count(".param .u32")


def test_what_the_compiler_refuses_is_raised():
    with pytest.raises(CompilationError):  # a return behind that of a branch, of another shape
        launch(5, wide=True)


def test_more_shared_memory_than_there_is_is_raised():
    with pytest.raises(OutOfResources, match="shared memory"), on_absent_gpu():
        _product_kernel[(1,)](torch.zeros(256, 256), SIZE=256)
