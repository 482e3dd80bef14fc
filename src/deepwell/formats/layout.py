"""Block scales in the tile order that Blackwell's block-scaled tensor cores read, and back.

Scales S (R rows, C = K / block columns) are padded with zero bytes to whole tiles of 128 x 4. Tiles lie one after the
other, 512 bytes each, column tile after column tile within a row tile. Within a tile the byte of (r, c) stands at

    (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4

One order serves MXFP8, MXFP4 and NVFP4 (cuBLAS, "1D block scaling factors layout"; CUTLASS' K-major scale atom).
"""

import torch
from torch import Tensor

from deepwell.errors import ConfigError

TILE_ROWS = 128
TILE_COLUMNS = 4


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    return rows + -rows % TILE_ROWS, columns + -columns % TILE_COLUMNS


def swizzle(scales: Tensor) -> Tensor:
    """Scales (..., R, C) of one byte each as (..., padded R * padded C) in tile order; a 2-D operand comes out flat."""
    raw = _as_bytes("scales", scales, at_least=2)
    rows, columns = padded_shape(*raw.shape[-2:])
    raw = torch.nn.functional.pad(raw, (0, columns - raw.shape[-1], 0, rows - raw.shape[-2]))
    lead = raw.shape[:-2]
    # (row tile, 4 x 32 rows, column tile, 4 columns) -> (row tile, column tile, 32 rows, 4 rows, 4 columns)
    tiles = raw.reshape(*lead, rows // TILE_ROWS, 4, 32, columns // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.transpose(-4, -2).reshape(*lead, rows * columns).view(scales.dtype)


def unswizzle(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The (..., rows, columns) scales that `swizzle` put in tile order. Raises ConfigError on another size."""
    raw = _as_bytes("swizzled", swizzled, at_least=1)
    padded_rows, padded_columns = padded_shape(rows, columns)
    if raw.shape[-1] != padded_rows * padded_columns:
        needed = padded_rows * padded_columns
        raise ConfigError(f"swizzled has {raw.shape[-1]} bytes; {rows} x {columns} scales in whole tiles take {needed}")
    lead = raw.shape[:-1]
    tiles = raw.reshape(*lead, padded_rows // TILE_ROWS, padded_columns // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    plain = tiles.transpose(-4, -2).reshape(*lead, padded_rows, padded_columns)
    return plain[..., :rows, :columns].contiguous().view(swizzled.dtype)


def _as_bytes(name: str, tensor: Tensor, *, at_least: int) -> Tensor:
    if tensor.element_size() != 1:
        raise ConfigError(f"{name} must hold one byte per scale (E8M0, E4M3 or uint8), got {tensor.dtype}")
    if tensor.ndim < at_least:
        raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; expected {at_least} dimensions")
    return tensor.view(torch.uint8)
