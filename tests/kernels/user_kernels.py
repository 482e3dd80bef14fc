"""Kernels as users write them, right and wrong, in a module so that another process can import them."""

import os
import time

import torch
from torch import Tensor


def right(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def right_with_everything(a: Tensor, b: Tensor, *, bias=None, activation=None, out_dtype=None) -> Tensor:
    c = a.float() @ b.float()
    c = c if bias is None else c + bias.float()
    c = {None: lambda x: x, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}[activation](c)
    return c.to(out_dtype or a.dtype)


def slow(a: Tensor, b: Tensor) -> Tensor:
    time.sleep(0.05)
    return a @ b


def wrong(a: Tensor, b: Tensor) -> Tensor:
    """Forgets the last of K."""
    return a[:, :-8] @ b[:-8]


def wrong_when_large(a: Tensor, b: Tensor) -> Tensor:
    """Right at the sizes of the proof; loses a tile of columns at larger ones."""
    c = a @ b
    if a.shape[0] > 512:
        c[:, -32:] = 0
    return c


def wrong_shape(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b).T


def raises(a: Tensor, b: Tensor) -> Tensor:
    raise KeyError("no such tile")


def hangs(a: Tensor, b: Tensor) -> Tensor:
    time.sleep(3600)
    return a @ b


def crashes(a: Tensor, b: Tensor) -> Tensor:
    os._exit(7)


def hides_nan(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b).nan_to_num(0.0)


def fp8_right(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, *, out_dtype=torch.bfloat16) -> Tensor:
    return ((a.float() @ b.float().T) * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)).to(out_dtype)


def fp8_without_scales(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    return (a.float() @ b.float().T).bfloat16()
