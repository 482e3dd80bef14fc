"""The launches that keep FP8 weights up to date: which groups share a launch, and their tables of addresses.

Addresses lie in device memory. They are sent again when a weight has moved, which the host sees without asking the
device; whether a weight has changed is the device's own decision (`weight_codes`). On a CPU the reference decides.
"""

# Shapes: N, K sizes of a linear; W weights and G groups of a launch.

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.checks import check_matrix
from deepwell.kernels.device.address_table import Table
from deepwell.kernels.device.triton_support import is_interpreted, on_device, runs_kernel, tl
from deepwell.kernels.quantize import weight_cache as weight_codes
from deepwell.kernels.quantize.weight_cache import (
    CODES_CONFIGS,
    MAX_SLOTS,
    CodesConfig,
    fingerprint_ref,
    quantize_group_ref,
)

_FP8 = torch.float8_e4m3fn
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Elements of a slot: fewer are not worth a program.
_SLOT_ELEMENTS = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Codes:
    """The FP8 values of a group of weights [N, K] that share a scale, side by side, and what they were made of.

    `widths` are the N of each weight; `is_kn` says which are stored as [K, N].
    """

    rows: Tensor  # [N, K]
    columns: Tensor  # [K, N]
    scale: Tensor
    state: Tensor  # weight_codes.STATE_WORDS
    widths: tuple[int, ...]
    is_kn: tuple[bool, ...]

    @staticmethod
    def empty(k: int, widths: Sequence[int], is_kn: Sequence[bool], device: torch.device) -> "Codes":
        """Buffers for FP8 values that do not exist yet; the next refresh makes them."""
        n = sum(widths)
        # Not of inference mode, whatever the caller is in: a later training step saves them for its backward.
        with torch.inference_mode(False):
            return Codes(
                rows=torch.zeros((n, k), dtype=torch.uint8, device=device).view(_FP8),
                columns=torch.zeros((k, n), dtype=torch.uint8, device=device).view(_FP8),
                scale=torch.zeros((), dtype=torch.float32, device=device),
                state=torch.zeros(weight_codes.STATE_WORDS, dtype=torch.int64, device=device),
                widths=tuple(widths),
                is_kn=tuple(is_kn),
            )

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + self.columns.nbytes

    @property
    def times_quantized(self) -> int:
        """How often the FP8 values were made; waits for the device."""
        return int(self.state[3])

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """For each weight where its FP8 values go, as it is stored and transposed."""
        found, start = [], 0
        for width, is_kn in zip(self.widths, self.is_kn, strict=True):
            along, transposed = self.rows[start : start + width], self.columns[:, start : start + width]
            found.append((transposed, along) if is_kn else (along, transposed))
            start += width
        return found


@dataclass(kw_only=True, slots=True, eq=False)
class _GroupLaunch:
    """The tables of one launch: groups of one dtype and alignment."""

    members: list[int]
    dtype: torch.dtype
    is_aligned: bool
    weights: Table
    groups: Tensor
    slot_group: Tensor
    tile_weight: Tensor
    tile_place: Tensor
    hashes: Tensor
    amaxes: Tensor


class CodesRefresh:
    """Brings the values of groups up to date with weights that the caller shows at each call, as they are stored."""

    def __init__(self, codes: Sequence[Codes], *, config: CodesConfig | None = None) -> None:
        if not codes:
            raise ConfigError("codes is empty; pass at least one group")
        self.codes = tuple(codes)
        self.config = config or CODES_CONFIGS[0]
        self._places: tuple[object, ...] = ()
        self._kinds: tuple[object, ...] = ()
        self._launches: list[_GroupLaunch] = []

    def refresh(self, weights: Sequence[Sequence[Tensor]]) -> None:
        """Make the FP8 values of `weights`, one list for each group, where they are not those of its last call."""
        first = weights[0][0]
        if not runs_kernel(first, weight_codes._refresh_kernel):
            with torch.no_grad():
                for codes, group in zip(self.codes, weights, strict=True):
                    _refresh_ref(codes, [_check(codes, i, w) for i, w in enumerate(group)])
            return
        places = tuple((w.data_ptr(), w.stride(), w.dtype) for group in weights for w in group)
        if places != self._places:
            self._prepare(weights)
            self._places = places
        with on_device(first):
            for launch in self._launches:
                self._run(launch)

    def _prepare(self, weights: Sequence[Sequence[Tensor]]) -> None:
        for codes, group in zip(self.codes, weights, strict=True):
            for i, w in enumerate(group):
                _check(codes, i, w)
        kinds = tuple((group[0].dtype, _is_aligned(c, group)) for c, group in zip(self.codes, weights, strict=True))
        if kinds != self._kinds:
            found: dict[tuple[torch.dtype, bool], list[int]] = {}
            for i, kind in enumerate(kinds):
                found.setdefault(kind, []).append(i)
            self._launches = [self._new_launch(members, *kind, weights) for kind, members in found.items()]
            self._kinds = kinds
        for launch in self._launches:
            rows = []
            for number, i in enumerate(launch.members):
                for w, (along, transposed) in zip(weights[i], self.codes[i].parts(), strict=True):
                    copies = (along.data_ptr(), along.stride(0), transposed.data_ptr(), transposed.stride(0))
                    rows.append((w.data_ptr(), *w.shape, w.stride(0), *copies, number, 0))
            launch.weights.write(rows)

    def _new_launch(
        self, members: list[int], dtype: torch.dtype, is_aligned: bool, weights: Sequence[Sequence[Tensor]]
    ) -> _GroupLaunch:
        device = weights[0][0].device
        groups: list[tuple[int, ...]] = []
        slot_group: list[int] = []
        tile_weight, tile_place = [], []
        first_weight = 0
        for number, i in enumerate(members):
            elements = sum(w.numel() for w in weights[i])
            slots = min(MAX_SLOTS, -(-elements // _SLOT_ELEMENTS))
            counts = [self._num_tiles(w) for w in weights[i]]
            codes = self.codes[i]
            addresses = (codes.state.data_ptr(), codes.scale.data_ptr())
            groups.append((first_weight, len(counts), len(slot_group), slots, *addresses, sum(counts)))
            slot_group += [number] * slots
            for count in counts:
                tile_weight.append(torch.full((count,), first_weight, dtype=torch.int32))
                tile_place.append(torch.arange(count, dtype=torch.int32))
                first_weight += 1
        return _GroupLaunch(
            members=members,
            dtype=dtype,
            is_aligned=is_aligned,
            weights=Table(device, weight_codes.WEIGHT_COLUMNS),
            groups=torch.tensor(groups, dtype=torch.int64).to(device),
            slot_group=torch.tensor(slot_group, dtype=torch.int32).to(device),
            tile_weight=torch.cat(tile_weight).to(device),
            tile_place=torch.cat(tile_place).to(device),
            hashes=torch.zeros(len(slot_group), dtype=torch.int64, device=device),
            amaxes=torch.zeros(len(slot_group), dtype=torch.int32, device=device),
        )

    def _num_tiles(self, w: Tensor) -> int:
        rows, columns = w.shape
        return -(-rows // self.config.rows) * -(-columns // (self.config.columns * self.config.tiles))

    def _run(self, launch: _GroupLaunch) -> None:
        config, kernel = self.config, weight_codes._refresh_kernel
        packing = config.packing if launch.is_aligned else "bytes"
        if packing == "asm" and is_interpreted(kernel):
            packing = "words"  # the interpreter reads no PTX
        weight_codes._fingerprint_kernel[(launch.slot_group.numel(),)](
            launch.weights.words,
            launch.groups,
            launch.slot_group,
            launch.hashes,
            launch.amaxes,
            DTYPE=_DTYPES[launch.dtype],
            ALIGNED=launch.is_aligned,
            BLOCK=config.block,
            num_warps=config.hash_warps,
        )
        kernel[(launch.tile_weight.numel(),)](
            launch.weights.words,
            launch.groups,
            launch.tile_weight,
            launch.tile_place,
            launch.hashes,
            launch.amaxes,
            DTYPE=_DTYPES[launch.dtype],
            # Bytes are for what lies anywhere. With fp32 read in fours, tiles of 32 x 32 lost a quarter of the
            # transposed copy on an H200 (Triton 3.6), whatever mask and pointers the store had.
            ALIGNED=launch.is_aligned and packing != "bytes",
            PACKING=packing,
            ROWS=config.rows,
            COLUMNS=config.columns,
            TILES=config.tiles,
            SLOTS=MAX_SLOTS,
            num_warps=config.num_warps,
        )


def _refresh_ref(codes: Codes, weights: list[Tensor]) -> None:
    """Reference: the same decision, taken on the host."""
    found = fingerprint_ref(weights, is_aligned=_is_aligned(codes, weights))
    if bool(codes.state[1]) and bool(codes.state[0] == found):
        return
    along, transposed = zip(*codes.parts(), strict=True)
    codes.scale.copy_(quantize_group_ref(weights, list(along), list(transposed)))
    codes.state[0] = found
    codes.state[1] = 1
    codes.state[3] += 1


def _is_aligned(codes: Codes, weights: Sequence[Tensor]) -> bool:
    """Whether a group can be read in 64-bit words and written in 16-byte lines."""
    for w, parts in zip(weights, codes.parts(), strict=True):
        if w.shape[0] % 16 or w.shape[1] % 16 or w.stride(0) != w.shape[1] or w.data_ptr() % 16:
            return False
        if any(part.data_ptr() % 16 or part.stride(0) % 16 for part in parts):
            return False
    return True


def _check(codes: Codes, i: int, w: Tensor) -> Tensor:
    """The weight itself; raises ConfigError unless it is what the i-th FP8 values of a group are of."""
    check_matrix(f"weights[{i}]", w)
    along = codes.parts()[i][0]
    if w.shape != along.shape or w.device != along.device:
        raise ConfigError(
            f"weights[{i}] is {tuple(w.shape)} on {w.device}; its FP8 values are {tuple(along.shape)} on {along.device}"
        )
    return w
