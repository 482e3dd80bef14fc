"""What the torch ops of all rooms (`torch.ops.deepwell.*`) share: how one is defined, operands as kernels read them.

Each room's `torch_ops.py` defines the ops of its kernels, with the shapes that tracing needs. They are primitives
without autograd: the autograd functions beside them call them, so that forward and backward graphs show each
quantization, GEMM and norm as a node that passes can move and fuse.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "deepwell"
FP8 = torch.float8_e4m3fn
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def register_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an op that `run` computes on every device; `fake` gives tensors of the same shapes and dtypes."""
    name = schema.split("(", maxsplit=1)[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def dense(x: Tensor) -> Tensor:
    """x with contiguous rows, as the kernels read them: itself, or a copy where a model transposed it."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def dense_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else dense(x)


def fp8_rows_like(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Empty FP8 values and scales of the rows of x."""
    return x_TK.new_empty(x_TK.shape, dtype=FP8), x_TK.new_empty(x_TK.shape[0], dtype=torch.float32)


def not_none(made: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple(tensor for tensor in made if tensor is not None)
