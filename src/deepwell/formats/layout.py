"""Block scales in the tile order that Blackwell's block-scaled tensor cores read, and back; the grouped forms too.

Scales S (R rows, C = K / block columns) are padded with zero bytes to whole tiles of 128 x 4. Tiles lie one after the
other, 512 bytes each, column tile after column tile within a row tile. Within a tile the byte of (r, c) stands at

    (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4

One order serves MXFP8, MXFP4 and NVFP4 (cuBLAS, "1D block scaling factors layout"; CUTLASS' K-major scale atom).

In a grouped GEMM each group begins at a tile of its own: `swizzle_row_groups` pads the rows of each group (tokens of an
expert), `swizzle_column_groups` its columns (the contraction of a wgrad). Group ends stay on the device: nothing waits
for the host, so the buffers have the size of the worst case.
"""

import torch
from torch import Tensor

from deepwell.errors import ConfigError

TILE_ROWS = 128
TILE_COLUMNS = 4
TILE = TILE_ROWS * TILE_COLUMNS


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) rounded up to whole tiles."""
    return rows + -rows % TILE_ROWS, columns + -columns % TILE_COLUMNS


def swizzle(scales: Tensor) -> Tensor:
    """Scales (..., R, C) of one byte each as (..., padded R * padded C) in tile order; a 2-D operand comes out flat."""
    raw = _as_bytes("scales", scales, at_least=2)
    rows, columns = padded_shape(*raw.shape[-2:])
    raw = torch.nn.functional.pad(raw, (0, columns - raw.shape[-1], 0, rows - raw.shape[-2]))
    lead = raw.shape[:-2]
    # (row tile, 4 x 32 rows, column tile, 4 columns) -> (row tile, column tile, 32 rows, 4 rows, 4 columns)
    tiles = raw.reshape(*lead, rows // TILE_ROWS, 4, 32, columns // TILE_COLUMNS, TILE_COLUMNS)
    n = len(lead)
    order = [*range(n), n, n + 3, n + 2, n + 1, n + 4]
    return tiles.permute(order).reshape(*lead, rows * columns).view(scales.dtype)


def unswizzle(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The (..., rows, columns) scales that `swizzle` put in tile order. Raises ConfigError on another size."""
    raw = _as_bytes("swizzled", swizzled, at_least=1)
    padded_rows, padded_columns = padded_shape(rows, columns)
    if raw.shape[-1] != padded_rows * padded_columns:
        needed = padded_rows * padded_columns
        raise ConfigError(f"swizzled has {raw.shape[-1]} bytes; {rows} x {columns} scales in whole tiles take {needed}")
    lead = raw.shape[:-1]
    tiles = raw.reshape(*lead, padded_rows // TILE_ROWS, padded_columns // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    n = len(lead)
    order = [*range(n), n, n + 3, n + 2, n + 1, n + 4]
    plain = tiles.permute(order).reshape(*lead, padded_rows, padded_columns)
    return plain[..., :rows, :columns].contiguous().view(swizzled.dtype)


def swizzle_row_groups(scales: Tensor, group_ends: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (T, C) of row groups that end at `group_ends` (G,), each padded to 128 rows of its own.

    Returns the flat buffer, sized for the worst case of T + 127 G rows, and the (G,) row ends of the padded groups in
    it. Rows at or beyond the last end belong to no group and are left out.
    """
    raw = _as_bytes("scales", scales, at_least=2, at_most=2)
    rows, columns = raw.shape
    starts, padded_starts, padded_ends = _group_bounds(group_ends, TILE_ROWS)
    buffer_rows = _worst_case(rows, group_ends.numel(), TILE_ROWS)
    group_of, is_live = _group_of(rows, group_ends)
    row = torch.arange(rows, device=raw.device)
    target = padded_starts[group_of] + row - starts[group_of]
    # Rows of no group go to a spare row behind the buffer.
    target = torch.where(is_live, target, buffer_rows)
    buffer = raw.new_zeros(buffer_rows + 1, columns)
    buffer[target] = raw
    return swizzle(buffer[:buffer_rows]).view(scales.dtype), padded_ends


def unswizzle_row_groups(swizzled: Tensor, group_ends: Tensor, rows: int, columns: int) -> Tensor:
    """The (rows, columns) scales that `swizzle_row_groups` laid out; rows of no group come back as zero bytes."""
    raw = _as_bytes("swizzled", swizzled, at_least=1, at_most=1)
    starts, padded_starts, _ = _group_bounds(group_ends, TILE_ROWS)
    plain = unswizzle(raw, _worst_case(rows, group_ends.numel(), TILE_ROWS), columns)
    group_of, is_live = _group_of(rows, group_ends)
    row = torch.arange(rows, device=raw.device)
    source = torch.where(is_live, padded_starts[group_of] + row - starts[group_of], 0)
    if rows == 0:
        return raw.new_zeros(0, columns).view(swizzled.dtype)
    return (plain[source] * is_live[:, None]).view(swizzled.dtype)


def swizzle_column_groups(scales: Tensor, group_ends: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (R, C) of column groups that end at `group_ends` (G,) columns, each padded to 4 columns and swizzled by
    itself.

    The groups lie one after the other, each padded R rows high. Returns the flat buffer, sized for the worst case of C
    + 3 G columns, and the (G,) column ends of the padded groups.
    """
    raw = _as_bytes("scales", scales, at_least=2, at_most=2)
    rows, columns = raw.shape
    size, offsets, is_live, padded_ends = _column_group_offsets(rows, columns, group_ends)
    buffer = raw.new_zeros(size + 1)
    buffer[torch.where(is_live, offsets, size)] = raw
    return buffer[:size].view(scales.dtype), padded_ends


def unswizzle_column_groups(swizzled: Tensor, group_ends: Tensor, rows: int, columns: int) -> Tensor:
    """The (rows, columns) scales that `swizzle_column_groups` laid out; columns of no group come back as zero bytes."""
    raw = _as_bytes("swizzled", swizzled, at_least=1, at_most=1)
    size, offsets, is_live, _ = _column_group_offsets(rows, columns, group_ends)
    if raw.numel() != size:
        raise ConfigError(f"swizzled has {raw.numel()} bytes; {rows} x {columns} scales in these groups take {size}")
    padded = torch.nn.functional.pad(raw, (0, 1))
    return padded[torch.where(is_live, offsets, size)].view(swizzled.dtype)


def _column_group_offsets(rows: int, columns: int, group_ends: Tensor) -> tuple[int, Tensor, Tensor, Tensor]:
    """Buffer size, (R, C) byte offsets, which columns are in a group, and the padded ends."""
    device = group_ends.device
    starts, padded_starts, padded_ends = _group_bounds(group_ends, TILE_COLUMNS)
    group_of, is_live = _group_of(columns, group_ends)
    padded_rows, _ = padded_shape(rows, columns)
    row = torch.arange(rows, device=device)[:, None]
    column = torch.arange(columns, device=device) - starts[group_of]
    tiles_per_row = ((padded_ends - padded_starts) // TILE_COLUMNS)[group_of]
    tile = (row // TILE_ROWS) * tiles_per_row + column // TILE_COLUMNS
    within = (row % 32) * 16 + (row % TILE_ROWS // 32) * 4 + column % TILE_COLUMNS
    offsets = padded_starts[group_of] * padded_rows + tile * TILE + within
    size = padded_rows * _worst_case(columns, group_ends.numel(), TILE_COLUMNS)
    return size, offsets, is_live.expand(rows, columns), padded_ends


def _worst_case(length: int, groups: int, tile: int) -> int:
    """The most that `length` rows in `groups` groups can take when each group is padded to whole tiles."""
    return (length + groups * (tile - 1)) // tile * tile


def _group_bounds(group_ends: Tensor, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """First row, padded first row and padded end of each group."""
    if group_ends.ndim != 1 or group_ends.dtype not in {torch.int32, torch.int64} or group_ends.numel() == 0:
        got = f"{group_ends.dtype} {tuple(group_ends.shape)}"
        raise ConfigError(f"group_ends must hold the ends of at least one group as int32 or int64 (G,), got {got}")
    ends = group_ends.long()
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    sizes = ends - starts
    padded = (sizes + (tile - 1)) // tile * tile
    padded_ends = padded.cumsum(0)
    return starts, padded_ends - padded, padded_ends


def _group_of(length: int, group_ends: Tensor) -> tuple[Tensor, Tensor]:
    """The group of each row, clamped to the last, and whether the row is in one at all."""
    row = torch.arange(length, device=group_ends.device)
    found = torch.searchsorted(group_ends.long(), row, right=True)
    return found.clamp(max=group_ends.numel() - 1), found < group_ends.numel()


def _as_bytes(name: str, tensor: Tensor, *, at_least: int, at_most: int | None = None) -> Tensor:
    if tensor.element_size() != 1:
        raise ConfigError(f"{name} must hold one byte per scale (E8M0, E4M3 or uint8), got {tensor.dtype}")
    if tensor.ndim < at_least or (at_most is not None and tensor.ndim > at_most):
        raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; expected {at_least} dimensions")
    return tensor.view(torch.uint8)
