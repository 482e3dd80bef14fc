"""One parameter with its state, its row of addresses, and the launches that write quantized copies with the update."""

# Shapes: R rows and C columns of a matrix; a stack of E matrices has a row of the table for each.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepwell.formats.spec import get_format
from deepwell.kernels.device.triton_support import triton
from deepwell.train.adamw import copies as adamw_copies
from deepwell.train.adamw import words as adamw_words
from deepwell.train.adamw.copies import (
    COPY_COLUMNS,
    TILE_COLUMNS,
    Copies,
    TileConfig,
    amax_ref,
    configs_for,
    write_copies_ref,
)
from deepwell.train.adamw.scalars import TABLE_COLUMNS
from deepwell.train.adamw.words import WordConfig, word_configs_for

_FP8 = torch.float8_e4m3fn
_ROLL_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slot:
    """One parameter and its state. FP8 moments have fp32 scales, one for each 128 elements in memory order."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scales: Tensor | None = None
    exp_avg_sq_scales: Tensor | None = None
    master: Tensor | None = None
    copies: Copies | None = None
    # The row of scalars it uses, and its number among all parameters: the key of its random bits.
    group: int = 0
    index: int = 0

    @property
    def has_fp8_moments(self) -> bool:
        return self.exp_avg.dtype == _FP8

    def addresses(self, grad: Tensor, number: int, matrix: int = 0, numel: int | None = None) -> tuple[int, ...]:
        """A row of the table of addresses, of the whole parameter or of one matrix of `numel` elements."""
        numel = self.param.numel() if numel is None else numel
        first = matrix * numel

        def at(tensor: Tensor | None, per: int = 1) -> int:
            return 0 if tensor is None else tensor.data_ptr() + first // per * tensor.element_size()

        tensors = (self.param, grad, self.exp_avg, self.exp_avg_sq)
        scales = (at(self.exp_avg_scales, 128), at(self.exp_avg_sq_scales, 128))
        return (*map(at, tensors), *scales, at(self.master), numel, number, self.index)


class Table:
    """A table of int64 words in device memory that is sent again only when it changed."""

    def __init__(self, device: torch.device, columns: int) -> None:
        self.device = device
        self.columns = columns
        self.words = torch.empty((0, columns), dtype=torch.int64, device=device)
        self._sent: list[tuple[int, ...]] = []

    def write(self, rows: list[tuple[int, ...]]) -> None:
        """Make `rows` the content."""
        if rows == self._sent:
            return
        self._sent = rows
        host = torch.tensor(rows, dtype=torch.int64)
        if self.device.type == "cuda":
            host = host.pin_memory()  # else the copy would wait for the GPU
        self.words = host.to(self.device, non_blocking=True)


# Words count in 32 bits within 128 rows, and their tiles in 15 bits down and 16 across.
_MAX_STRIDE = 2**24
_MAX_WORD_SHAPE = (2**20, 2**23)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyKind:
    """What the copies of one launch have in common."""

    format: str
    has_row: bool
    has_col: bool
    is_delayed: bool
    # Whether the update can run tile by tile: FP8 moments have blocks of 128 elements, so rows must be whole blocks.
    is_fused: bool
    # Rows that do not begin at multiples of 8 elements draw their random bits one by one.
    draws_each: bool
    is_aligned: bool


def copy_kind(slot: Slot) -> CopyKind:
    """The kind of a slot that has copies."""
    copies = slot.copies
    assert copies is not None
    rows, columns = slot.param.shape[-2:]
    codes = [t for t in (copies.row, copies.col) if t is not None]
    strides = [columns, *(stride for t in codes for stride in t.stride()[-2:-1])]
    starts = [t.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in t.stride()[:-1]) for t in codes]
    return CopyKind(
        format=copies.format.name,
        has_row=copies.row is not None,
        has_col=copies.col is not None,
        is_delayed=copies.is_delayed and copies.format.scaling == "tensor",
        is_fused=not slot.has_fp8_moments or columns % 128 == 0,
        draws_each=columns % 8 != 0,
        is_aligned=rows % 16 == 0
        and columns % 16 == 0
        and all(starts)
        and max(strides) < _MAX_STRIDE
        and rows < _MAX_WORD_SHAPE[0]
        and columns < _MAX_WORD_SHAPE[1],
    )


class CopyLaunch:
    """The update with its copies for slots of one kind (`kind` is adamw_tables.Kind with its copies)."""

    def __init__(
        self,
        slots: Sequence[Slot],
        kind: Any,
        members: list[int],
        device: torch.device,
        config: TileConfig | WordConfig | None = None,
    ) -> None:
        self.kind = kind
        self.copy: CopyKind = kind.copies
        self.format = get_format(self.copy.format)
        self.members = members
        self.config = self._fitting(config)
        self.table = Table(device, TABLE_COLUMNS)
        self.copies = Table(device, COPY_COLUMNS)
        self.scales = Table(device, 3)
        # Row scales: bits of the largest magnitude of each row, then of each column, of one matrix after the other.
        lines = sum(_num_matrices(slots[i]) * sum(slots[i].param.shape[-2:]) for i in members)
        self.maxima = torch.zeros(lines if self.format.scaling == "row" else 0, dtype=torch.int32, device=device)
        counts = torch.tensor(
            [self._num_tiles(slots[i].param) for i in members for _ in range(_num_matrices(slots[i]))]
        )
        row = torch.arange(counts.numel()).repeat_interleave(counts)
        place = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        if isinstance(self.config, WordConfig):
            # Row and column of the tile, which a program would have to divide for.
            across = torch.tensor(
                [_num_across(slots[i].param) for i in members for _ in range(_num_matrices(slots[i]))]
            ).repeat_interleave(counts)
            place = place // across * 65536 + place % across
        self.chunk_row = row.to(torch.int32).to(device)
        self.chunk_place = place.to(torch.int32).to(device)

    def _fitting(self, config: TileConfig | WordConfig | None) -> TileConfig | WordConfig:
        """The config asked for, or the default; words need whole vectors everywhere."""
        has_words = self.kind.is_aligned and self.copy.is_aligned
        if not has_words and not isinstance(config, TileConfig):
            return configs_for(self.format)[0]
        if config is not None:
            return config
        has_fp8 = self.kind.moment == _FP8
        return word_configs_for(self.format, has_fp8_moments=has_fp8, is_delayed=self.copy.is_delayed)[0]

    @property
    def _parts(self) -> int:
        """Parts of a program of words: two where a block needs more rows than one has."""
        return max(1, 128 // self.config.rows) if self.format.block == (128, 128) else 1

    def _num_tiles(self, param: Tensor) -> int:
        if param.numel() == 0:
            # A matrix without columns may still have rows, and each of them a scale.
            return 1 if self.format.scaling == "row" else 0
        tile_rows = self.config.rows * (self._parts if isinstance(self.config, WordConfig) else 1)
        return -(-param.shape[-2] // tile_rows) * _num_across(param)

    def refresh(self, slots: Sequence[Slot], grads: Sequence[Tensor | None]) -> None:
        """Write addresses anew where they changed."""
        addresses, copies = [], []
        is_row = self.format.scaling == "row"
        line = self.maxima.data_ptr()
        for i in self.members:
            slot, grad = slots[i], grads[i]
            assert grad is not None
            rows, columns = slot.param.shape[-2:]
            for matrix in range(_num_matrices(slot)):
                addresses.append(slot.addresses(grad, i, matrix, rows * columns))
                maxima = (0, line, line + 4 * rows) if is_row else None
                line += 4 * (rows + columns)
                copies.append(_copy_row(slot, matrix, maxima))
        self.table.write(addresses)
        self.copies.write(copies)
        if self.format.scaling == "tensor":
            # Weights that share a scale share its row: rolling it twice would lose the amax.
            found = [(c.scale, c.amax, c.new_amax) for i in self.members if (c := slots[i].copies) is not None]
            rows3 = [tuple(0 if t is None else t.data_ptr() for t in triple) for triple in found]
            self.scales.write(list(dict.fromkeys(rows3)))

    def run(self, constants: dict[str, Any], hyper: Tensor, steps: Tensor, control: Tensor) -> None:
        """The update (unless it ran before) and its copies."""
        launch = (constants, hyper, steps, control)
        is_fused = self.copy.is_fused
        if self.copy.is_delayed:
            self._roll(control)
            self._tiles(*launch, updates=is_fused, writes=True, collects=True)
        elif self.format.scaling == "block":
            self._tiles(*launch, updates=is_fused, writes=True, collects=False)
        else:
            self._collect(*launch, updates=is_fused)
            self._tiles(*launch, updates=False, writes=True, collects=False)

    def start(
        self, constants: dict[str, Any], hyper: Tensor, steps: Tensor, control: Tensor, *, is_step: bool = False
    ) -> None:
        """The copies of the weights as they are; `is_step`: delayed ones, by what was collected before."""
        launch = (constants, hyper, steps, control)
        is_delayed = self.copy.is_delayed
        if self.format.scaling == "tensor":
            self._roll(control)  # what was collected before counts for a step alone
        if self.format.scaling != "block" and not is_step:
            self._collect(*launch, updates=False)
        self._tiles(*launch, updates=False, writes=True, collects=is_delayed)

    def _collect(
        self, constants: dict[str, Any], hyper: Tensor, steps: Tensor, control: Tensor, *, updates: bool
    ) -> None:
        """The maxima of the weights, new ones where it `updates` them, for the pass that writes."""
        if self.format.scaling == "row":
            self.maxima.zero_()
        self._tiles(constants, hyper, steps, control, updates=updates, writes=False, collects=True)
        if self.format.scaling == "tensor":
            self._roll(control)

    def _tiles(
        self,
        constants: dict[str, Any],
        hyper: Tensor,
        steps: Tensor,
        control: Tensor,
        *,
        updates: bool,
        writes: bool,
        collects: bool,
    ) -> None:
        scalings = {"e8m0": "mx", "fp32": "square", "pow2": "square"}
        scale = self.format.scale
        assert scale is not None
        if self.chunk_row.numel() == 0:
            return
        config = self.config
        tables = (self.table.words, self.copies.words, self.chunk_row, self.chunk_place, hyper, steps, control)
        common = {
            "SCALING": scalings[scale] if self.format.scaling == "block" else self.format.scaling,
            "POW2": scale == "pow2",
            "HAS_ROW": self.copy.has_row,
            "HAS_COL": self.copy.has_col,
            "UPDATES": updates,
            "WRITES": writes,
            "COLLECTS": collects,
            "ROWS": config.rows,
            "num_warps": config.num_warps,
            "maxnreg": config.max_registers,
            # A contracted multiply-add rounds once where the reference rounds twice.
            "enable_fp_fusion": False,
        }
        grid = (self.chunk_row.numel(),)
        if isinstance(config, WordConfig):
            dtypes = {name: value for name, value in constants.items() if name != "ALIGNED"}
            adamw_words._words_kernel[grid](*tables, **dtypes, **common, PARTS=self._parts)
            return
        adamw_copies._copies_kernel[grid](
            *tables,
            **{**constants, "ALIGNED": constants["ALIGNED"] and self.copy.is_aligned},
            **common,
            STRIP=config.strip,
            COPY_STRIP=config.copy_strip,
            EACH=self.copy.draws_each,
        )

    def _roll(self, control: Tensor) -> None:
        count = self.scales.words.shape[0]
        adamw_copies._roll_kernel[(triton.cdiv(count, _ROLL_ROWS),)](
            self.scales.words,
            count,
            control,
            POW2=self.format.scale == "pow2",
            ROWS=_ROLL_ROWS,
            num_warps=2,
            enable_fp_fusion=False,
        )


def _num_across(param: Tensor) -> int:
    return max(1, -(-param.shape[-1] // TILE_COLUMNS))


def _num_matrices(slot: Slot) -> int:
    return slot.param.shape[0] if slot.param.dim() == 3 else 1


def _copy_row(slot: Slot, matrix: int, maxima: tuple[int, int, int] | None) -> tuple[int, ...]:
    """A row of the table of copies: R, C, first element, four (address, stride), then scale, amax, new amax.

    `maxima` take the place of the last three where scales are of rows: nothing, the maxima of rows and of columns.
    """
    copies = slot.copies
    assert copies is not None
    rows, columns = slot.param.shape[-2:]
    row = [rows, columns, matrix * rows * columns]
    for tensor in (copies.row, copies.col, copies.row_scales, copies.col_scales):
        one = tensor[matrix] if tensor is not None and tensor.dim() == 3 else tensor
        row += [0, 0] if one is None else [one.data_ptr(), one.stride(0)]
    scalars = (copies.scale, copies.amax, copies.new_amax)
    row += maxima or [0 if tensor is None else tensor.data_ptr() for tensor in scalars]
    return tuple(row)


# ---- on a CPU ----


def write_copies(slots: Sequence[Slot], *, is_step: bool = False) -> None:
    """The reference's copies of weights: as they are, or (`is_step`) after an update, by each one's rule for amax."""
    shared: dict[int, list[Slot]] = {}
    for slot in slots:
        copies = slot.copies
        assert copies is not None
        if copies.new_amax is None:
            write_copies_ref(slot.param.detach(), copies)
        else:
            shared.setdefault(copies.new_amax.data_ptr(), []).append(slot)
    for group in shared.values():
        first = group[0].copies
        assert first is not None and first.amax is not None and first.new_amax is not None
        current = amax_ref([slot.param for slot in group], first.amax.device)
        first.amax.copy_(first.new_amax if is_step and first.is_delayed else current)
        for slot in group:
            assert slot.copies is not None
            write_copies_ref(slot.param.detach(), slot.copies)
        first.new_amax.copy_(current if first.is_delayed else torch.zeros_like(current))
