"""Kernels as users write them, right and wrong, in a module so that another process can import them."""

import os
import signal
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


def hangs_when_large(a: Tensor, b: Tensor) -> Tensor:
    """Right at the sizes of the proof; waits for a tile that never comes at larger ones."""
    return a @ b if a.shape[0] <= 512 else hangs(a, b)


def crashes_when_large(a: Tensor, b: Tensor) -> Tensor:
    return a @ b if a.shape[0] <= 512 else crashes(a, b)


def is_killed_when_large(a: Tensor, b: Tensor) -> Tensor:
    """As a system without memory ends a process."""
    if a.shape[0] > 512:
        os.kill(os.getpid(), signal.SIGKILL)
    return a @ b


def lacks_memory(a: Tensor, b: Tensor) -> Tensor:
    raise MemoryError


def lacks_memory_when_large(a: Tensor, b: Tensor) -> Tensor:
    return a @ b if a.shape[0] <= 512 else lacks_memory(a, b)


class TileError(Exception):
    """An error of a user's own kind."""


def raises_its_own(a: Tensor, b: Tensor) -> Tensor:
    raise TileError("no such tile")


def halves_b(a: Tensor, b: Tensor) -> Tensor:
    """Right by what it made of its operand."""
    b.mul_(0.5)
    return a @ b


def zeroes_a(a: Tensor, b: Tensor) -> Tensor:
    c = a @ b
    a.zero_()
    return c


def zeroes_bias(a: Tensor, b: Tensor, *, bias=None) -> Tensor:
    c = a @ b if bias is None else a @ b + bias
    if bias is not None:
        bias.zero_()
    return c


def halves_b_when_large(a: Tensor, b: Tensor) -> Tensor:
    return a @ b if a.shape[0] <= 512 else halves_b(a, b)


def hides_nan(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b).nan_to_num(0.0)


def fp8_right(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, *, out_dtype=torch.bfloat16) -> Tensor:
    return ((a.float() @ b.float().T) * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)).to(out_dtype)


def fp8_without_scales(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    return (a.float() @ b.float().T).bfloat16()


def fp8_halves_scale(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    scale_b.mul_(0.5)
    return fp8_right(a, scale_a, b, scale_b)
