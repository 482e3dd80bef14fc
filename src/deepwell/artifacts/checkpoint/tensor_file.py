"""The safetensors format as it is written here: a JSON header, then the tensors' bytes one after the other.

The safetensors library writes a file from tensors that are all in memory. A checkpoint is written from buffers that
were filled while training went on, an export from one tensor at a time, and both are hashed on the way: hence a writer
of our own. Reading is the library's. A part of a tensor has its place in the whole in the header, under the name that
torch.distributed.checkpoint gives it, so that torch's HuggingFaceStorageReader reads these files too.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepwell.errors import UnsupportedError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlot:
    """A tensor's place in a file. `offsets` is where it begins in the whole tensor that it is a part of."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def dtype_name(dtype: torch.dtype, key: str) -> str:
    """The format's name of a dtype. Raises UnsupportedError naming the tensor where it has none."""
    if dtype not in DTYPES:
        raise UnsupportedError(f"{key} has dtype {dtype}, which safetensors files cannot hold; convert it first")
    return DTYPES[dtype]


def in_file_order(slots: Iterable[TensorSlot]) -> list[TensorSlot]:
    """Wide elements first: every tensor is aligned to its own element then."""
    return sorted(slots, key=lambda slot: (-slot.dtype.itemsize, slot.key))


def header(slots: Iterable[TensorSlot], *, has_metadata: bool = True, alignment: int = 8) -> bytes:
    """What stands before the tensors' bytes, which begin at a multiple of `alignment`, for slots in their order."""
    metadata = {"format": "pt"}
    entries: dict[str, object] = {}
    parts: dict[str, dict[str, list[int]]] = {}
    begin = 0
    for slot in slots:
        end = begin + slot.nbytes
        name = dtype_name(slot.dtype, slot.key)
        entries[slot.key] = {"dtype": name, "shape": list(slot.shape), "data_offsets": [begin, end]}
        if slot.offsets is not None:
            parts[slot.key] = {"saved_offsets": list(slot.offsets)}
        begin = end
    if parts:
        metadata |= {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(parts)}
    document = {"__metadata__": metadata, **entries} if has_metadata else entries
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as a flat uint8 tensor."""
    return tensor.reshape(-1).view(torch.uint8)
