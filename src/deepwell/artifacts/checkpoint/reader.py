"""Reads any part of any tensor of a checkpoint, from whatever parts it was saved in."""

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepwell.artifacts.checkpoint.manifest import Opened, check_hash, open_documents
from deepwell.artifacts.checkpoint.shards import Box, overlap
from deepwell.artifacts.plain_json import fits, is_shape, is_size
from deepwell.artifacts.tensor_file import TORCH_DTYPES
from deepwell.errors import CheckpointError

Slices = tuple[slice, ...]
_MOST_OPEN, _MOST_HASHED = 64, 4  # files at a time
_INDEX = {
    "model": dict, "optimizer": {str: dict}, "tied": {str: str}, "values": {str: dict},
    "groups": [{"names": [str], "options": dict}],
}  # fmt: skip
_ENTRY = {"dtype": tuple(TORCH_DTYPES), "shape": is_shape, "parts": [list], "block": is_size}


class StoredTensor:
    """A whole tensor of a checkpoint, as the index has it."""

    def __init__(self, name: str, stored: str, data: Any, opened: Opened) -> None:
        if not fits({"block": 0, **data} if isinstance(data, dict) else data, _ENTRY):
            raise CheckpointError(f"{opened.path / 'index.json'}: {name} cannot be read")
        self.name, self.stored, self.block = name, stored, data.get("block", 0)
        self.dtype, self.shape = TORCH_DTYPES[data["dtype"]], tuple(data["shape"])
        self.parts: list[tuple[str, Box]] = []
        for part in data["parts"]:  # [file, where it begins, how far it reaches]
            file, *place = part or [None]
            is_box = fits(place, [[is_size]]) and [len(numbers) for numbers in place] == 2 * [len(self.shape)]
            if not isinstance(file, str) or file not in opened.files or not is_box:
                raise CheckpointError(f"{opened.path / 'index.json'}: a part of {name} is in no file of the manifest")
            begin, sizes = map(tuple, place)
            self.parts.append((file, Box(offsets=begin, sizes=sizes, whole=self.shape)))

    @property
    def whole(self) -> Box:
        return Box(offsets=(0,) * len(self.shape), sizes=self.shape, whole=self.shape)


class Reader:
    """The tensors of one checkpoint. Opens files as they are needed, and reads only the bytes that are asked for."""

    def __init__(self, path: Path) -> None:
        self.opened = open_documents(path)
        index = self.opened.index
        if not fits({name: index.get(name) for name in _INDEX}, _INDEX):
            raise CheckpointError(f"{path / 'index.json'} is not an index of tensors")
        self.tied: dict[str, str] = index["tied"]
        self.groups: list[dict[str, Any]] = index["groups"]
        self.values: dict[str, dict[str, Any]] = index["values"]
        self.model = {name: StoredTensor(name, name, data, self.opened) for name, data in index["model"].items()}
        self.optimizer = {
            name: {
                key: StoredTensor(f"the optimizer's {key} of {name}", f"state.{name}.{key}", data, self.opened)
                for key, data in states.items()
            }
            for name, states in index["optimizer"].items()
        }
        self._files: dict[str, Any] = {}

    def verify(self, share: int = 0, of: int = 1) -> None:
        """Compare the hashes of every `of`-th file, from number `share` on."""
        with ThreadPoolExecutor(max_workers=_MOST_HASHED) as pool:
            list(pool.map(partial(check_hash, self.opened.path), list(self.opened.files.values())[share::of]))

    def name_of(self, name: str) -> str:
        """The name that a tensor is saved under: its own, or that of the tensor it was tied to."""
        return name if name in self.model else self.tied.get(name, name)

    def parts(self, entry: StoredTensor, box: Box) -> list[tuple[Any, Box, Slices, Slices]]:
        """What is stored of a part: (tensor not read yet, its place, what they share in it and in the part).

        Raises CheckpointError naming the file that is not as the index says, or where elements are in no file.
        """
        found = []
        for file, place in entry.parts:
            shared = overlap(place, box)
            if shared is not None:
                sizes = (-(-place.numel // entry.block),) if entry.block else place.sizes
                found.append((self._tensor(file, entry, sizes), place, *shared))
        lacking = box.numel - sum(math.prod(s.stop - s.start for s in inside) for *_, inside in found)
        if lacking:
            raise CheckpointError(
                f"{self.opened.path}: {lacking} of {box.numel} elements of {entry.name} are in no file"
            )
        return found

    def read(self, entry: StoredTensor, box: Box) -> Tensor:
        """A part of a tensor, on the host."""
        parts = self.parts(entry, box)
        for stored, place, outside, _ in parts:
            if place == box:
                return stored[outside]
        out = torch.empty(box.sizes, dtype=entry.dtype)
        for stored, _, outside, inside in parts:
            out[inside] = stored[outside]
        return out

    def read_scales(self, entry: StoredTensor, box: Box) -> Tensor | None:
        """The scales of a part's blocks, where each of its blocks has one scale; None where blocks were cut elsewhere.

        Blocks follow a part's memory, so another split of the tensor has other blocks. Where the borders of parts are
        multiples of the block they are the same blocks all the same, and nothing is lost.
        """
        spread = self.spread_scales(entry, box).flatten()
        if not spread.numel():
            return spread
        blocks = torch.nn.functional.pad(spread, (0, -spread.numel() % entry.block), value=float("nan"))
        blocks = blocks.view(-1, entry.block)
        first = blocks[:, :1]
        is_padding = (torch.arange(blocks.numel()) >= spread.numel()).view(blocks.shape)
        same = (blocks.view(torch.int32) == first.view(torch.int32)) | is_padding
        return first.flatten().clone() if bool(same.all()) else None

    def spread_scales(self, entry: StoredTensor, box: Box) -> Tensor:
        """The scale of each element of a part."""
        parts = self.parts(entry, box)
        out = torch.empty(box.sizes, dtype=entry.dtype)
        for stored, place, outside, inside in parts:
            out[inside] = stored[:].repeat_interleave(entry.block)[: place.numel].view(place.sizes)[outside]
        return out

    def _tensor(self, file: str, entry: StoredTensor, sizes: tuple[int, ...]) -> Any:
        """A stored tensor to take slices of. Raises CheckpointError naming the file if it is not as the index says."""
        path = self.opened.path / file
        try:
            if file not in self._files:
                if len(self._files) >= _MOST_OPEN:
                    self._files.pop(next(iter(self._files)))
                self._files[file] = safe_open(str(path), framework="pt")
            stored = self._files[file].get_slice(entry.stored)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if tuple(stored.get_shape()) != sizes:
            raise CheckpointError(f"{path}: {entry.name} has shape {stored.get_shape()}, the index says {sizes}")
        return stored


def requantize(codes: Tensor, spread: Tensor, block: int, *, is_root: bool) -> tuple[Tensor, Tensor]:
    """FP8 values whose scales are given per element, rounded to nearest with a scale for each block."""
    from deepwell.train.adamw.moments import FP8, encode_ref

    values = codes.float() * spread
    new_codes = torch.empty(codes.numel(), dtype=torch.uint8).view(FP8)
    scales = torch.empty(-(-codes.numel() // block), dtype=torch.float32)
    encode_ref(values.flatten(), new_codes, scales, None, is_root=is_root)
    return new_codes.view(codes.shape), scales


class Tensors(Mapping[str, Tensor]):
    """Whole tensors by name, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._reader = Reader(path)
        self._names = list(dict.fromkeys([*self._reader.model, *self._reader.tied]))

    def __getitem__(self, name: str) -> Tensor:
        entry = self._reader.model[self._reader.name_of(name)]
        return self._reader.read(entry, entry.whole)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Tensors({len(self)} of {self._reader.opened.path})"
