"""Views of a tensor as the groups of elements that share a scale, ragged ends padded with zeros.

Everywhere in this package the quantized axis is the last one. A grouped view broadcasts against its scales:

    scaling   x              grouped view            scales, broadcast     scales, stored
    tensor    (..., K)       (..., K)                (1, ..., 1)           ()
    row       (..., K)       (..., K)                (..., 1)              (..., 1)
    1 x W     (..., K)       (..., K/W, W)           (..., K/W, 1)         (..., K/W)
    H x W     (..., R, K)    (..., R/H, H, K/W, W)   (..., R/H, 1, K/W, 1) (..., R/H, K/W)
"""

import torch
from torch import Tensor

from deepwell.formats.spec import Format


def group(x: Tensor, fmt: Format) -> Tensor:
    """The grouped view of `x` (a copy where its ends are ragged)."""
    if fmt.block is None:
        return x
    high, wide = fmt.block
    if high > 1 and x.ndim == 1:
        x = x.unsqueeze(0)
    pad_right = -x.shape[-1] % wide
    pad_below = -x.shape[-2] % high if high > 1 else 0
    if pad_right or pad_below:
        x = torch.nn.functional.pad(x, (0, pad_right, 0, pad_below) if high > 1 else (0, pad_right))
    x = x.unflatten(-1, (x.shape[-1] // wide, wide))
    return x.unflatten(-3, (x.shape[-3] // high, high)) if high > 1 else x


def ungroup(grouped: Tensor, fmt: Format, shape: tuple[int, ...]) -> Tensor:
    """The contiguous tensor of `shape` whose grouped view is `grouped`; padding is dropped."""
    if fmt.block is None:
        return grouped
    x = grouped.flatten(-2)
    if fmt.block[0] == 1:
        return x[..., : shape[-1]].contiguous()
    x = x.flatten(-3, -2)
    rows = shape[-2] if len(shape) > 1 else 1
    return x[..., :rows, : shape[-1]].reshape(shape).contiguous()


def group_amax(grouped: Tensor, fmt: Format) -> Tensor:
    """The largest magnitude of each group, shaped to broadcast; NaN where the group has one, 0 where it is empty."""
    is_square = fmt.block is not None and fmt.block[0] > 1
    dims = tuple(range(-grouped.ndim, 0)) if fmt.scaling == "tensor" else (-3, -1) if is_square else (-1,)
    if grouped.numel() == 0:
        shape = [1 if i - grouped.ndim in dims else size for i, size in enumerate(grouped.shape)]
        return grouped.new_zeros(shape)
    return grouped.abs().amax(dims, keepdim=True)


def stored_scales(scales: Tensor, fmt: Format) -> Tensor:
    """Scales as they are stored, from the shape that broadcasts."""
    if fmt.scaling == "tensor":
        return scales.reshape(())
    if fmt.scaling == "row":
        return scales
    return scales.squeeze(-1).squeeze(-2) if fmt.block is not None and fmt.block[0] > 1 else scales.squeeze(-1)


def broadcast_scales(scales: Tensor, fmt: Format) -> Tensor:
    """Stored scales in the shape that broadcasts against the grouped view."""
    if fmt.scaling in {"tensor", "row"}:
        return scales
    return scales.unsqueeze(-1).unsqueeze(-3) if fmt.block is not None and fmt.block[0] > 1 else scales.unsqueeze(-1)
