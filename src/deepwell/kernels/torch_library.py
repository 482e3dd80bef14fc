"""What the torch ops of all rooms (`torch.ops.deepwell.*`) share: how one is defined, operands as kernels read them.

Each room's `torch_ops.py` defines the ops of its kernels, with the shapes that tracing needs. They are primitives
without autograd: the autograd functions beside them call them, so that forward and backward graphs show each
quantization, GEMM and norm as a node that passes can move and fuse.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.device.cached_launches import CachedLaunches

NAMESPACE = "deepwell"
FP8 = torch.float8_e4m3fn
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def register_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any], *, caches: bool = False) -> None:
    """Define an op that `run` computes on every device; `fake` gives tensors of the same shapes and dtypes.

    `caches` says that `run` allocates and launches Triton kernels and does nothing else, by shapes and options alone:
    later calls then do the same without it (`device/cached_launches.py`).
    """
    name = schema.split("(", maxsplit=1)[0]
    _library.define(schema)
    _library.impl(name, CachedLaunches(run) if caches else run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


# What ops write of their rows, by the ends of their names: fields of `RowOptions`, and how many tensors that is.
_WRITTEN: dict[str, tuple[dict[str, Any], int]] = {
    "": ({}, 1),
    "_quantize": ({"write": False, "fp8": FP8}, 2),
    "_rows": ({"write": False, "fp8": FP8}, 2),
    "_beside": ({"fp8": FP8}, 3),
}


def register_rows(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    others: int = 0,
    ends: Sequence[str] = ("", "_quantize"),
) -> None:
    """Define an op once for each of `ends`; `schema` is without results.

    `run` gets the fields of `RowOptions` before the operands. It gives rows, FP8 values and scales, None for what is
    not written, and `others` more tensors. `fake` gives a tensor like the rows, and the others.
    """
    name, operands = schema.split("(", maxsplit=1)
    for end in ends:
        how, count = _WRITTEN[end]

        def call(*given: Any, how: dict[str, Any] = how) -> Any:
            made = not_none(run(how, *given))
            return made if len(made) > 1 else made[0]

        def shapes(*given: Any, count: int = count) -> Any:
            rows, *more = fake(*given)
            made = (*([rows] if count != 2 else []), *(fp8_rows_like(rows) if count > 1 else ()), *more)
            return made if len(made) > 1 else made[0]

        types = ", ".join(["Tensor"] * (count + others))
        result = types if count + others == 1 else f"({types})"
        register_op(f"{name}{end}({operands} -> {result}", call, shapes, caches=True)


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
