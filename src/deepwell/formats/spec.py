"""The facts of every number format Deepwell knows: element encodings, block shapes, scales, bytes. Pure, no torch.

An element format says what one code means. A format says how a tensor is stored: its elements, the group of them that
shares a scale, and the kind of that scale. Names read `fp8_<element>_<group>[_pow2]`, `mxfp8[_e5m2]`, `nvfp4[_16x16]`.

    >>> get_format("nvfp4").bits_per_element
    4.5

Sources: OCP Microscaling Formats v1.0 (MX elements, E8M0), OCP 8-bit Floating Point v1.0 (E4M3, E5M2), the PTX ISA
(E2M1, UE4M3) and the operand rules of cuBLASLt.
"""

import difflib
import math
from dataclasses import dataclass, fields
from functools import lru_cache

from deepwell.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementFormat:
    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    min_normal: float
    min_subnormal: float
    has_inf: bool
    has_nan: bool
    is_signed: bool = True
    # Bits one element takes in memory. 6-bit codes lie in a byte each, as the tensor cores' shared memory wants them.
    storage_bits: int

    @property
    def max_exponent(self) -> int:
        return math.frexp(self.max)[1] - 1

    def __str__(self) -> str:
        return f"{self.name}: {self.bits} bits, max {self.max:g}, min {self.min_subnormal:g}"


def _element(name: str, exponent_bits: int, mantissa_bits: int, largest: float | None = None) -> ElementFormat:
    """An element whose top exponent is kept for inf and NaN, or, up to `largest`, holds ordinary numbers."""
    bias, bits = 2 ** (exponent_bits - 1) - 1, 1 + exponent_bits + mantissa_bits
    return ElementFormat(
        name=name, bits=bits, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits, bias=bias,
        max=largest or (2 - 2.0**-mantissa_bits) * 2.0**bias, min_normal=2.0 ** (1 - bias),
        min_subnormal=2.0 ** (1 - bias - mantissa_bits), has_inf=largest is None, has_nan=bits >= 8,
        storage_bits=8 if bits == 6 else bits,
    )  # fmt: skip


FP32 = _element("fp32", 8, 23)
BF16 = _element("bf16", 8, 7)
FP16 = _element("fp16", 5, 10)
E5M2 = _element("e5m2", 5, 2)
E4M3 = _element("e4m3", 4, 3, 448.0)
E3M2 = _element("e3m2", 3, 2, 28.0)
E2M3 = _element("e2m3", 2, 3, 7.5)
E2M1 = _element("e2m1", 2, 1, 6.0)
# The scale of the MX formats: a biased exponent and nothing else. Byte 0 is 2^-127 (there is no zero), byte 255 is NaN.
E8M0 = ElementFormat(
    name="e8m0", bits=8, exponent_bits=8, mantissa_bits=0, bias=127, max=2.0**127, min_normal=2.0**-127,
    min_subnormal=2.0**-127, has_inf=False, has_nan=True, is_signed=False, storage_bits=8,
)  # fmt: skip

ELEMENTS = {element.name: element for element in (FP32, BF16, FP16, E5M2, E4M3, E3M2, E2M3, E2M1, E8M0)}

# Bits of one stored scale, by kind. "pow2" is a power of two held in fp32: every FP8 GEMM takes it, E8M0 can represent
# it.
_SCALE_BITS = {"fp32": 32, "pow2": 32, "e8m0": 8, "e4m3": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How a tensor is stored: its elements, the group of elements that shares a scale, and the kind of that scale."""

    name: str
    element: ElementFormat
    # none: no scale; tensor: one; row: one per row along the quantized axis; block: one per `block`.
    scaling: str
    # (rows, elements along the quantized axis) of a scale group; None unless scaling is "block".
    block: tuple[int, int] | None
    # Kind of a stored scale: fp32, pow2 (a power of two in fp32), e8m0, e4m3; None without scales.
    scale: str | None
    # NVFP4: one fp32 scale for the tensor above the block scales.
    has_global_scale: bool
    # The contraction length is a multiple of this in a native GEMM: whole blocks and 16-byte rows.
    k_alignment: int

    @property
    def bits_per_element(self) -> float:
        """Bits in memory per element with block scales included; tensor and row scales vanish in a large tensor."""
        if self.block is None or self.scale is None:
            return float(self.element.storage_bits)
        return self.element.storage_bits + _SCALE_BITS[self.scale] / (self.block[0] * self.block[1])

    @property
    def is_scaled(self) -> bool:
        return self.scale is not None

    @property
    def is_transposable(self) -> bool:
        """Whether one set of codes and scales serves both directions: no scale, one scale, or square blocks."""
        if self.scaling == "block":
            assert self.block is not None
            return self.block[0] == self.block[1]
        return self.scaling in {"none", "tensor"}

    def scale_shape(self, rows: tuple[int, ...], length: int) -> tuple[int, ...] | None:
        """The shape of the scales of a tensor with leading dimensions `rows` and `length` elements along the axis."""
        if self.scaling == "none":
            return None
        if self.scaling == "tensor":
            return ()
        if self.scaling == "row":
            return (*rows, 1)
        assert self.block is not None
        high, wide = self.block
        blocks = -(-length // wide)
        if high == 1:
            return (*rows, blocks)
        return (*rows[:-1], -(-rows[-1] // high), blocks) if rows else (1, blocks)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of `shape` quantized along its last dimension: codes, scales and global scale."""
        if not shape:
            raise ConfigError("shape is empty; a quantized tensor has at least one dimension")
        *lead, length = shape
        rows = math.prod(lead)
        total = rows * -(-length * self.element.storage_bits // 8)
        scale_shape = self.scale_shape(tuple(lead), length)
        if scale_shape is not None:
            assert self.scale is not None
            total += math.prod(scale_shape) * _SCALE_BITS[self.scale] // 8
        return total + (4 if self.has_global_scale else 0)

    def to_dict(self) -> dict[str, object]:
        values: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        values["element"] = self.element.name
        values["block"] = list(self.block) if self.block else None
        return values

    @staticmethod
    def from_dict(values: dict[str, object]) -> "Format":
        """The format that `to_dict` described. Raises ConfigError where the stored facts are not this version's."""
        name = values.get("name")
        if not isinstance(name, str):
            raise ConfigError(f"format description {values!r} has no 'name'; write it with Format.to_dict()")
        found = get_format(name)
        known = found.to_dict()
        wrong = [
            f"{key}={value!r} (here {known.get(key)!r})" for key, value in values.items() if known.get(key) != value
        ]
        if wrong:
            raise ConfigError(f"format {name!r} was stored with other facts: {', '.join(wrong)}; quantize again")
        return found

    def __str__(self) -> str:
        if self.scale is None:
            return f"{self.name} ({self.bits_per_element:g} bits)"
        group = "x".join(map(str, self.block)) if self.block else self.scaling
        above = " + fp32 per tensor" if self.has_global_scale else ""
        return (
            f"{self.name} ({self.element.name}, {self.scale} scale per {group}{above}, {self.bits_per_element:g} bits)"
        )


# cuBLASLt and CUTLASS take FP8 rows of whole 16 bytes; blockwise scales want whole blocks of 128.
_FP8_GROUPS: dict[str, tuple[str, tuple[int, int] | None, int]] = {
    "tensor": ("tensor", None, 16),
    "row": ("row", None, 16),
    "1x128": ("block", (1, 128), 128),
    "128x128": ("block", (128, 128), 128),
}


def _format(
    name: str, element: ElementFormat, group: tuple[str, tuple[int, int] | None, int], scale: str | None
) -> Format:
    scaling, block, alignment = group
    return Format(
        name=name,
        element=element,
        scaling=scaling,
        block=block,
        scale=scale,
        has_global_scale=scale == "e4m3",
        k_alignment=alignment,
    )


_MX = {"mxfp8": E4M3, "mxfp8_e5m2": E5M2, "mxfp6": E3M2, "mxfp6_e2m3": E2M3, "mxfp4": E2M1}
_ALL = (
    *(_format(one.name, one, ("none", None, 128 // one.bits), None) for one in (FP32, BF16, FP16)),
    *(
        _format(f"fp8_{element.name}_{name}{'_pow2' if scale == 'pow2' else ''}", element, group, scale)
        for element in (E4M3, E5M2)
        for name, group in _FP8_GROUPS.items()
        for scale in ("fp32", "pow2")
    ),
    *(_format(name, element, ("block", (1, 32), 32), "e8m0") for name, element in _MX.items()),
    # 32 is 16 bytes of packed E2M1.
    *(_format(name, E2M1, ("block", (rows, 16), 32), "e4m3") for name, rows in {"nvfp4": 1, "nvfp4_16x16": 16}.items()),
)

FORMATS = {fmt.name: fmt for fmt in _ALL}

# Short names, each for one format above. A bare "fp8" is E4M3 with one fp32 scale per tensor: every FP8 GPU runs it.
ALIASES = {
    "fp4": "nvfp4",
    "nvfp4_1x16": "nvfp4",
    "fp8": "fp8_e4m3_tensor",
    "fp8_e4m3": "fp8_e4m3_tensor",
    "fp8_e5m2": "fp8_e5m2_tensor",
    "mxfp8_e4m3": "mxfp8",
    "mxfp6_e3m2": "mxfp6",
    "mxfp4_e2m1": "mxfp4",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    **{f"fp8_{group}{pow2}": f"fp8_e4m3_{group}{pow2}" for group in _FP8_GROUPS for pow2 in ("", "_pow2")},
}


@lru_cache(maxsize=256)
def _find(name: str) -> Format:
    wanted = name.strip().lower().replace("-", "_")
    wanted = ALIASES.get(wanted, wanted)
    if wanted in FORMATS:
        return FORMATS[wanted]
    known = [*FORMATS, *ALIASES]
    near = difflib.get_close_matches(wanted, known, n=4, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}"
    raise ConfigError(f"format {name!r} is not known; {hint}")


def get_format(name: "str | Format") -> Format:
    """The format of that name or alias, in any case. Raises ConfigError with near names where there is none."""
    if isinstance(name, Format):
        return name
    if not isinstance(name, str):
        raise ConfigError(f"format must be a name or a Format, got {type(name).__name__}")
    return _find(name)
