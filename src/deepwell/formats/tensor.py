"""QuantizedTensor: codes, scales and format of one tensor as a single value that prints, moves, saves and decodes
itself.

The codes keep the quantized axis last: a tensor quantized along axis 0 of (M, K) holds codes of shape (K, M), the
transposed copy that a GEMM wants. A file is safetensors: the tensors, and a JSON header with everything else and a hash
of the bytes.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.files import write_whole
from deepwell.formats import layout
from deepwell.formats.blocks import broadcast_scales, group, ungroup
from deepwell.formats.elements import STORAGE_DTYPES, decode, decode_e8m0, unpack_codes
from deepwell.formats.hadamard import check_signs, inverse_hadamard16
from deepwell.formats.spec import E2M1, Format

_HEADER_KEY = "deepwell.quantized"
_VERSION = 1
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SCALE_DTYPES = {
    "fp32": torch.float32,
    "pow2": torch.float32,
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedTensor:
    """One quantized tensor. `data` and `scales` have the quantized axis last; scales multiply back: x = q * scale."""

    data: Tensor
    scales: Tensor | None
    # NVFP4's fp32 scale of the whole tensor, also multiplying; None elsewhere.
    global_scale: Tensor | None
    format: Format
    axis: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    hadamard_signs: tuple[int, ...] | None = None

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @property
    def moved_shape(self) -> tuple[int, ...]:
        """The shape of the tensor with the quantized axis moved last."""
        rest = self.shape[: self.axis] + self.shape[self.axis + 1 :]
        return (*rest, self.shape[self.axis])

    def codes(self) -> Tensor:
        """The uint8 codes, one byte each, quantized axis last. Raises UnsupportedError for bf16, fp16 and fp32."""
        if not self.format.is_scaled:
            raise UnsupportedError(f"format {self.format.name!r} has no codes; its data are the numbers")
        return unpack_codes(self.data, self.format.element, self.shape[self.axis])

    def data_for_gemm(self) -> Tensor:
        """`data` in the dtype that torch's scaled GEMMs take: packed E2M1 viewed as float4_e2m1fn_x2."""
        return self.data.view(torch.float4_e2m1fn_x2) if self.format.element == E2M1 else self.data

    def dequantize(self, dtype: torch.dtype = torch.float32, *, undo_hadamard: bool = True) -> Tensor:
        """The numbers that the codes stand for, in the original shape. `undo_hadamard=False` leaves a transform in."""
        return dequantize(self, dtype, undo_hadamard=undo_hadamard)

    def scale_swizzled(self) -> Tensor:
        """The block scales in the 128x4 tile order of Blackwell's block-scaled GEMMs, flat (per matrix of a batch)."""
        if self.scales is None or self.format.scale not in {"e8m0", "e4m3"}:
            raise UnsupportedError(f"format {self.format.name!r} has no swizzled scales; only MX formats and NVFP4 do")
        assert self.format.block is not None
        scales = self.scales
        if self.format.block[0] > 1:
            # The hardware reads a scale per row: a square block's scale is repeated for each of its rows.
            rows = self.moved_shape[-2] if len(self.shape) > 1 else 1
            scales = scales.view(torch.uint8).repeat_interleave(self.format.block[0], dim=-2)[..., :rows, :]
            scales = scales.contiguous().view(self.scales.dtype)
        elif scales.ndim == 1:
            scales = scales.unsqueeze(0)
        return layout.swizzle(scales)

    def to(self, device: torch.device | str) -> "QuantizedTensor":
        """The same value on `device`."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self._tensors().items()}
        return replace(self, **moved)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; it appears whole or not at all."""
        tensors = {name: _as_stored(tensor) for name, tensor in self._tensors().items()}
        header = {
            "version": _VERSION,
            "format": self.format.to_dict(),
            "axis": self.axis,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "hadamard_signs": self.hadamard_signs,
            "sha256": _hash(tensors),
        }
        write_whole(Path(path), save(tensors, metadata={_HEADER_KEY: json.dumps(header)}))

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> "QuantizedTensor":
        """Read what `save` wrote, bit for bit. Raises ConfigError naming the file and what is wrong with it."""
        target = Path(path)
        if not target.is_file():
            raise ConfigError(f"{target}: no such file; write one with QuantizedTensor.save(path)")
        try:
            with safe_open(target, framework="pt") as file:
                header = _read_header(target, file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise ConfigError(f"{target}: not a whole safetensors file ({error}); save it again") from error
        if header["sha256"] != _hash(tensors):
            raise ConfigError(f"{target}: the bytes do not match their hash, the file is damaged; save it again")
        return _from_file(target, header, tensors).to(device)

    def _tensors(self) -> dict[str, Tensor]:
        named = {"data": self.data, "scales": self.scales, "global_scale": self.global_scale}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def __repr__(self) -> str:
        parts = [f"{self.format.name} {_by(self.shape)} along axis {self.axis}"]
        if self.scales is not None:
            parts.append(f"scales {_by(self.scales.shape) or 'one'} {self.format.scale}")
        if self.global_scale is not None:
            parts.append("global scale")
        if self.hadamard_signs is not None:
            parts.append("Hadamard")
        parts += [f"from {str(self.dtype).removeprefix('torch.')}", str(self.device), _size(self.nbytes)]
        return f"QuantizedTensor({', '.join(parts)})"


def _by(shape: tuple[int, ...] | torch.Size) -> str:
    return "x".join(map(str, shape))


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32, *, undo_hadamard: bool = True) -> Tensor:
    """The numbers that `q` stands for: element * scale (* global scale), in fp32 and rounded once to `dtype`.

    NVFP4 multiplies element by block scale first (exact in fp32), then by the global scale. `undo_hadamard=False`
    leaves the values transformed, as an emulated GEMM of two transformed operands wants them.
    """
    fmt = q.format
    if q.scales is None:
        values = q.data.float()
    else:
        grouped = group(decode(q.codes(), fmt.element), fmt)
        scales = decode_e8m0(q.scales) if fmt.scale == "e8m0" else q.scales.float()
        grouped = grouped * broadcast_scales(scales, fmt)
        if q.global_scale is not None:
            grouped = grouped * q.global_scale
        values = ungroup(grouped, fmt, q.moved_shape)
    if q.hadamard_signs is not None and undo_hadamard:
        values = inverse_hadamard16(values, q.hadamard_signs)
    return values.to(dtype).movedim(-1, q.axis)


# ---- files ----


def _as_stored(tensor: Tensor) -> Tensor:
    """E8M0 as bytes: older safetensors do not name its dtype."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else tensor


def _hash(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_header(path: Path, metadata: Mapping[str, str]) -> dict:
    if _HEADER_KEY not in metadata:
        raise ConfigError(f"{path}: a safetensors file, but not one that QuantizedTensor.save wrote")
    try:
        header = json.loads(metadata[_HEADER_KEY])
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: its header is not JSON ({error}); save it again") from error
    needed = {"version", "format", "axis", "shape", "dtype", "hadamard_signs", "sha256"}
    if not isinstance(header, dict) or not needed <= header.keys():
        raise ConfigError(f"{path}: its header lacks one of {', '.join(sorted(needed))}; save it again")
    if header["version"] != _VERSION:
        raise ConfigError(f"{path}: written as version {header['version']}, this Deepwell reads version {_VERSION}")
    return header


def _from_file(path: Path, header: dict, tensors: dict[str, Tensor]) -> QuantizedTensor:
    try:
        fmt = Format.from_dict(header["format"])
        signs = None if header["hadamard_signs"] is None else check_signs(header["hadamard_signs"])
        shape, axis, dtype = tuple(header["shape"]), header["axis"], _DTYPES[header["dtype"]]
    except (ConfigError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: its header is wrong: {error}") from error
    if not isinstance(axis, int) or not all(isinstance(n, int) and n >= 0 for n in shape) or not 0 <= axis < len(shape):
        raise ConfigError(f"{path}: its header has axis {axis!r} and shape {shape!r}, which do not fit each other")
    moved = (*shape[:axis], *shape[axis + 1 :], shape[axis])
    for name, (dtype_wanted, shape_wanted) in _expected(fmt, moved).items():
        got = tensors.get(name)
        stored = torch.uint8 if dtype_wanted == torch.float8_e8m0fnu else dtype_wanted
        if got is None or got.dtype != stored or tuple(got.shape) != shape_wanted:
            found = "nothing" if got is None else f"{got.dtype} {tuple(got.shape)}"
            raise ConfigError(f"{path}: {name} should be {stored} {shape_wanted} for {fmt.name}, found {found}")
        tensors[name] = got.view(dtype_wanted)
    return QuantizedTensor(
        data=tensors["data"],
        scales=tensors.get("scales"),
        global_scale=tensors.get("global_scale"),
        format=fmt,
        axis=axis,
        shape=shape,
        dtype=dtype,
        hadamard_signs=signs,
    )


def _expected(fmt: Format, moved: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    length = -(-moved[-1] // 2) if fmt.element == E2M1 else moved[-1]
    expected = {"data": (STORAGE_DTYPES.get(fmt.element.name, torch.uint8), (*moved[:-1], length))}
    scale_shape = fmt.scale_shape(moved[:-1], moved[-1])
    if scale_shape is not None and fmt.scale is not None:
        expected["scales"] = (_SCALE_DTYPES[fmt.scale], scale_shape)
    if fmt.has_global_scale:
        expected["global_scale"] = (torch.float32, ())
    return expected
