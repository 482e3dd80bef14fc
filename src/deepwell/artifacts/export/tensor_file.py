"""Tensors of an exported engine: a safetensors member, written piece by piece and read as views of mapped memory."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from deepwell.artifacts.checkpoint.tensor_file import TORCH_DTYPES, TensorSlot, header, in_file_order
from deepwell.artifacts.export.container import ALIGNMENT
from deepwell.artifacts.export.plain_json import Refuse, read_json

# What a tensor may be, by its name in the file. Names of safetensors; E8M0 scales lie there as bytes.
DTYPES = {name: TORCH_DTYPES[name] for name in "BOOL U8 I8 I16 I32 I64 F8_E4M3 F8_E5M2 BF16 F16 F32 F64".split()}
_MAX_HEADER_BYTES = 1 << 28
_PIECE = 1 << 26


def is_storable(tensor: Tensor) -> bool:
    return tensor.dtype in DTYPES.values()


def tensor_pieces(tensors: Mapping[str, Tensor]) -> tuple[int, Iterator[bytes | memoryview]]:
    """(bytes, pieces) of a safetensors file."""
    given = (TensorSlot(key=name, dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in tensors.items())
    slots = in_file_order(given)
    head = header(slots, has_metadata=False, alignment=ALIGNMENT)

    def pieces() -> Iterator[bytes | memoryview]:
        yield head
        for slot in slots:
            flat = tensors[slot.key].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            for begin in range(0, flat.numel(), _PIECE):
                yield memoryview(flat[begin : begin + _PIECE].numpy())  # type: ignore[arg-type]

    return len(head) + sum(slot.nbytes for slot in slots), pieces()


def read_tensors(member: memoryview, refuse: Refuse) -> dict[str, Tensor]:
    """The tensors of a member, as views. `refuse` raises: whatever is not exactly a safetensors file is refused."""
    if len(member) < 8:
        refuse("its tensors are cut short")
    length = int.from_bytes(member[:8], "little")
    if length > min(_MAX_HEADER_BYTES, len(member) - 8):
        refuse(f"the header of its tensors claims {length:,} bytes")
    entries = read_json(bytes(member[8 : 8 + length]), "the header of its tensors", refuse)
    entries.pop("__metadata__", None)
    data = member[8 + length :]
    found: dict[str, Tensor] = {}
    spans = []
    for name, entry in entries.items():
        dtype, shape, begin, end = _entry(name, entry, refuse)
        count = math.prod(shape)
        if end - begin != count * dtype.itemsize or end > len(data) or begin % dtype.itemsize:
            refuse(f"tensor {name} of shape {shape} does not fit the {end - begin:,} bytes that it claims")
        spans.append((begin, end))
        found[name] = (
            torch.frombuffer(data[begin:end], dtype=torch.uint8).view(dtype).reshape(shape)
            if count
            else torch.empty(shape, dtype=dtype)
        )
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            refuse("its tensors overlap, or bytes lie between them")
        at = end
    if at != len(data):
        refuse("bytes lie behind its tensors")
    return found


def _entry(name: str, entry: Any, refuse: Refuse) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        refuse(f"tensor {name} is not described by dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    numbers = (entry["shape"], entry["data_offsets"])
    # Not isinstance: a bool is an int.
    if dtype is None or not all(
        isinstance(part, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in part) for part in numbers
    ):
        refuse(f"tensor {name} has dtype {entry['dtype']!r} and shape {entry['shape']!r}")
    if len(entry["data_offsets"]) != 2 or entry["data_offsets"][0] > entry["data_offsets"][1]:
        refuse(f"tensor {name} lies at {entry['data_offsets']!r}")
    begin, end = entry["data_offsets"]
    return dtype, tuple(entry["shape"]), begin, end
