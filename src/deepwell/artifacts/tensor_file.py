"""The safetensors format as it is written here: a JSON header, then the tensors' bytes one after the other.

The safetensors library writes a file from tensors that are all in memory. A checkpoint is written from buffers that
were filled while training went on, an export from one tensor at a time, and both are hashed on the way: hence a writer
of our own. A part of a tensor has its place in the whole in the header, under the name that
torch.distributed.checkpoint gives it, so that torch's HuggingFaceStorageReader reads these files too. The library reads
files; a member of an exported engine is read here, as views of mapped memory.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepwell.artifacts.plain_json import Refuse, fits, is_shape, is_size, read_json
from deepwell.errors import UnsupportedError

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# What a tensor of an exported engine may be; E8M0 scales lie there as bytes.
EXPORTED = {name: TORCH_DTYPES[name] for name in "BOOL U8 I8 I16 I32 I64 F8_E4M3 F8_E5M2 BF16 F16 F32 F64".split()}
_MAX_HEADER_BYTES = 1 << 28
_PIECE = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlot:
    """A tensor's place in a file. `offsets` is where it begins in the whole tensor that it is a part of."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype, key: str) -> str:
    """The format's name of a dtype. Raises UnsupportedError naming the tensor where it has none."""
    if dtype not in _NAMES:
        raise UnsupportedError(f"{key} has dtype {dtype}, which safetensors files cannot hold; convert it first")
    return _NAMES[dtype]


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


def tensor_pieces(tensors: Mapping[str, Tensor]) -> tuple[int, Iterator[bytes | memoryview]]:
    """(bytes, pieces) of a file without metadata."""
    given = (TensorSlot(key=name, dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in tensors.items())
    slots = in_file_order(given)
    head = header(slots, has_metadata=False, alignment=64)

    def pieces() -> Iterator[bytes | memoryview]:
        yield head
        for slot in slots:
            for piece in as_bytes(tensors[slot.key].detach().cpu().contiguous()).split(_PIECE):
                yield memoryview(piece.numpy())

    return len(head) + sum(slot.nbytes for slot in slots), pieces()


def read_tensors(member: memoryview, refuse: Refuse) -> dict[str, Tensor]:
    """The tensors of a file in memory, as views. `refuse` raises: what is not exactly a safetensors file is refused."""
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
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            refuse(f"tensor {name} is not described by dtype, shape and data_offsets")
        sizes, place = entry["shape"], entry["data_offsets"]
        if not fits(entry, {"dtype": tuple(EXPORTED), "shape": is_shape, "data_offsets": [is_size]}):
            refuse(f"tensor {name} has dtype {entry['dtype']!r} and shape {sizes!r}")
        if len(place) != 2 or place[0] > place[1]:
            refuse(f"tensor {name} lies at {place!r}")
        begin, end = place
        dtype, count = EXPORTED[entry["dtype"]], math.prod(sizes)
        if end - begin != count * dtype.itemsize or end > len(data) or begin % dtype.itemsize:
            refuse(f"tensor {name} of shape {tuple(sizes)} does not fit the {end - begin:,} bytes that it claims")
        spans.append((begin, end))
        flat = torch.frombuffer(data[begin:end], dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)
        found[name] = flat.view(dtype).reshape(sizes)
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            refuse("its tensors overlap, or bytes lie between them")
        at = end
    if at != len(data):
        refuse("bytes lie behind its tensors")
    return found
