"""The compiler's guard: a kernel that only a GPU would show to be wrong is refused when it is compiled."""

import pytest
import torch

import aot
from deepwell.kernels.device.triton_support import tl, triton


@triton.jit
def _largest_kernel(x_ptr, y_ptr, stride, AT_ONCE: tl.constexpr):
    row = tl.arange(0, 2)[:, None, None]
    head = tl.arange(0, 4)[None, :, None]
    column = tl.max_contiguous(tl.arange(0, 32), 8)[None, None, :]
    x = tl.load(x_ptr + row * stride + head * 64 + column)
    if AT_ONCE:
        y = tl.max(tl.reshape(x, [2, 128]), axis=1)
    else:
        y = tl.max(tl.max(x, axis=2), axis=1)
    tl.store(y_ptr + tl.arange(0, 2), y)


def compile_largest(*, at_once: bool):
    arguments = {"x_ptr": torch.bfloat16, "y_ptr": torch.bfloat16, "stride": "i32", "AT_ONCE": at_once}
    return aot.compile_kernel(_largest_kernel, arguments, arch=90, num_warps=1)


def test_a_reduction_whose_lanes_are_no_neighbours_is_refused():
    # Rows lie between columns and heads in a warp, as Triton orders them.
    with pytest.raises(AssertionError, match=r"mixes lanes in \['axis 1 of #linear, lanes \[0, 1, 3, 4\]'\]"):
        compile_largest(at_once=True)


def test_one_dimension_after_the_other_is_let_through():
    made = compile_largest(at_once=False)
    assert made.count(r"shfl\.sync\.bfly") == 4
