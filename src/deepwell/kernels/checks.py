"""Argument checks of the kernels: one wording per mistake, naming the argument, what was got and what to do."""

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.device.fp8 import ELEMENTS

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_matrix(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] = _FLOATS) -> None:
    """Raise ConfigError unless x has two dimensions, one of `dtypes`, and contiguous rows (any distance apart)."""
    if not isinstance(x, Tensor):
        raise ConfigError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.ndim != 2:
        raise ConfigError(f"{name} must have two dimensions, got shape {tuple(x.shape)}; flatten the leading ones")
    if x.dtype not in dtypes:
        raise ConfigError(f"{name} has dtype {x.dtype}; pass one of {', '.join(map(str, dtypes))}")
    if x.numel() and x.shape[1] > 1 and x.stride(1) != 1:  # of an empty one .contiguous() keeps the strides
        raise ConfigError(f"{name} has stride {x.stride(1)} along its rows; call .contiguous() first")


def check_shape(name: str, x: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise ConfigError unless x has that shape and lies on the device of `like`."""
    if not isinstance(x, Tensor) or tuple(x.shape) != shape:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ConfigError(f"{name} must have shape {shape}, got {got}")
    if x.device != like.device:
        raise ConfigError(f"{name} is on {x.device}, the other tensors on {like.device}; move one of them")


def check_vector(name: str, x: Tensor, length: int, like: Tensor, dtype: torch.dtype | None = None) -> None:
    """Raise ConfigError unless x is a contiguous vector of that length, and dtype, on the device of `like`."""
    check_shape(name, x, (length,), like)
    if length > 1 and x.stride(0) != 1:
        raise ConfigError(f"{name} has stride {x.stride(0)}; call .contiguous() first")
    if dtype not in (None, x.dtype):
        raise ConfigError(f"{name} has dtype {x.dtype}; pass {str(dtype).removeprefix('torch.')}")


def check_out(name: str, out: Tensor, shape: tuple[int, int], dtype: torch.dtype, like: Tensor) -> None:
    """Raise ConfigError unless `out` can be written in place as that matrix."""
    check_matrix(name, out, (dtype,))
    check_shape(name, out, shape, like)


def check_number(name: str, x: Tensor, like: Tensor) -> None:
    """Raise ConfigError unless x is one number in fp32 on the device of `like`."""
    if x.numel() != 1 or x.dtype != torch.float32 or x.device != like.device:
        got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
        raise ConfigError(f"{name} must be one float32 number on {like.device}, got {got}")


def check_fp8(name: str, dtype: torch.dtype) -> float:
    """The largest number of an FP8 dtype; raises ConfigError for any other dtype."""
    if dtype not in ELEMENTS:
        raise ConfigError(f"{name} must be torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}")
    return ELEMENTS[dtype].max
