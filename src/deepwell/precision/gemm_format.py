"""What a policy's format means for each GEMM: the storage of both operands, their rounding and Hadamard. Pure.

A linear layer has three products, each of two operands:

    fwd    activation x weight        dgrad    gradient x weight        wgrad    gradient x activation

`Precision` is what a rule names ("nvfp4", with its options); `Precision.gemm("wgrad")` is what a kernel must do.
The defaults are the published recipes: NVFP4 after arXiv 2509.25149, MXFP8 after arXiv 2506.08027, FP8 with tensor
scales after the hybrid that Transformer Engine and torchao train with, FP8 with 1x128 scales after DeepSeek-V3 (arXiv
2412.19437).
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from deepwell.errors import ConfigError
from deepwell.formats.spec import get_format

GEMMS = ("fwd", "dgrad", "wgrad")

_OPERANDS = {"fwd": ("activation", "weight"), "dgrad": ("gradient", "weight"), "wgrad": ("gradient", "activation")}

# Format -> option -> accepted values, the default first.
_OPTIONS: dict[str, dict[str, tuple[bool | str, ...]]] = {
    "fp32": {},
    "bf16": {},
    "fp16": {},
    # E5M2 gradients belong to tensor scales only: a finer scale makes E4M3's range enough and keeps its extra bit.
    "fp8": {"scaling": ("tensor", "row", "1x128"), "gradients": ("auto", "e4m3", "e5m2")},
    # E5M2 gradients diverged on an 8B model with MXFP8; E4M3 everywhere did not.
    "mxfp8": {"gradients": ("e4m3", "e5m2")},
    "mxfp6": {"elements": ("e3m2", "e2m3")},
    "mxfp4": {"stochastic_rounding": (True, False), "hadamard": (True, False)},
    "nvfp4": {
        "stochastic_rounding": (True, False),
        "hadamard": (True, False),
        # Square blocks give forward and dgrad the same quantized weight.
        "weight_blocks": ("16x16", "1x16"),
    },
}

# Other spellings -> format and the options that they imply.
_SPELLINGS: dict[str, tuple[str, dict[str, bool | str]]] = {
    "float32": ("fp32", {}),
    "bfloat16": ("bf16", {}),
    "float16": ("fp16", {}),
    "fp4": ("nvfp4", {}),
    "fp8_tensor": ("fp8", {"scaling": "tensor"}),
    "fp8_row": ("fp8", {"scaling": "row"}),
    "fp8_1x128": ("fp8", {"scaling": "1x128"}),
    "fp8_e4m3": ("fp8", {"gradients": "e4m3"}),
    "mxfp8_e4m3": ("mxfp8", {}),
    "mxfp6_e3m2": ("mxfp6", {"elements": "e3m2"}),
    "mxfp6_e2m3": ("mxfp6", {"elements": "e2m3"}),
    "mxfp4_e2m1": ("mxfp4", {}),
}

POLICY_FORMATS = tuple(_OPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandFormat:
    """One side of a GEMM: its role, its storage format (a name of `deepwell.formats.spec`) and how it is rounded."""

    role: str  # "activation", "weight" or "gradient"
    format: str
    rounding: str = "nearest"  # or "stochastic"
    hadamard: bool = False  # a 16-point transform along the contraction before quantizing

    def __str__(self) -> str:
        extras = [
            word for word, on in (("stochastic", self.rounding == "stochastic"), ("hadamard", self.hadamard)) if on
        ]
        return f"{self.role} {self.format}" + (f" ({', '.join(extras)})" if extras else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmFormat:
    """Both operands of one GEMM."""

    gemm: str
    lhs: OperandFormat
    rhs: OperandFormat

    @property
    def k_alignment(self) -> int:
        """The contraction length is padded to a multiple of this in a native GEMM."""
        return max(get_format(self.lhs.format).k_alignment, get_format(self.rhs.format).k_alignment)

    def __str__(self) -> str:
        return f"{self.gemm}: {self.lhs} x {self.rhs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A format as a policy names it; `options` holds only what differs from the format's defaults, sorted by name."""

    format: str
    options: tuple[tuple[str, bool | str], ...] = ()

    @property
    def is_low(self) -> bool:
        """Whether operands have fewer than 16 bits."""
        return self.format not in {"fp32", "bf16", "fp16"}

    def option(self, name: str) -> bool | str:
        """The value of an option of this format, its default where the rule did not set it."""
        return dict(self.options).get(name, _OPTIONS[self.format][name][0])

    def gemm(self, gemm: str) -> GemmFormat:
        """What one of "fwd", "dgrad", "wgrad" does."""
        return _gemm_format(self, gemm)

    def __str__(self) -> str:
        extras = ", ".join(f"{name}={value}" for name, value in self.options)
        return f"{self.format} ({extras})" if extras else self.format


def precision(name: str | Precision, options: Mapping[str, bool | str] | None = None) -> Precision:
    """The format of that name, in any case, with options. Raises ConfigError with near names where there is none."""
    if isinstance(name, Precision):
        return name if not options else precision(name.format, {**dict(name.options), **options})
    if not isinstance(name, str):
        raise ConfigError(f"format must be a name such as 'mxfp8', got {type(name).__name__}")
    wanted = name.strip().lower().replace("-", "_")
    fmt, implied = _SPELLINGS.get(wanted, (wanted, {}))
    if fmt not in _OPTIONS:
        known = [*_OPTIONS, *_SPELLINGS]
        near = difflib.get_close_matches(wanted, known, n=4, cutoff=0.5)
        hint = (
            f"did you mean {', '.join(near)}?"
            if near
            else f"a policy knows {', '.join(POLICY_FORMATS)} and fp4 (nvfp4)"
        )
        raise ConfigError(f"format {name!r} is not known; {hint}")
    accepted = _OPTIONS[fmt]
    chosen: dict[str, bool | str] = {**implied, **(options or {})}
    for key, value in chosen.items():
        if key not in accepted:
            offer = f"it has {', '.join(accepted)}" if accepted else "it has none"
            raise ConfigError(f"format {fmt} has no option {key!r}; {offer}")
        if not any(value is one or (isinstance(one, str) and value == one) for one in accepted[key]):
            raise ConfigError(f"option {key} of {fmt} is {value!r}; it takes {', '.join(map(repr, accepted[key]))}")
    changed = sorted((key, value) for key, value in chosen.items() if value != accepted[key][0])
    return Precision(format=fmt, options=tuple(changed))


# ---- operands ----


@lru_cache(maxsize=256)
def _gemm_format(asked: Precision, gemm: str) -> GemmFormat:
    if gemm not in GEMMS:
        raise ConfigError(f"gemm is {gemm!r}; a linear layer has {', '.join(GEMMS)}")
    lhs, rhs = (_operand(asked, gemm, role) for role in _OPERANDS[gemm])
    return GemmFormat(gemm=gemm, lhs=lhs, rhs=rhs)


def _operand(asked: Precision, gemm: str, role: str) -> OperandFormat:
    storage = get_format(_storage(asked, role)).name
    options = _OPTIONS[asked.format]
    stochastic = role == "gradient" and "stochastic_rounding" in options and asked.option("stochastic_rounding") is True
    hadamard = gemm == "wgrad" and "hadamard" in options and asked.option("hadamard") is True
    return OperandFormat(
        role=role, format=storage, rounding="stochastic" if stochastic else "nearest", hadamard=hadamard
    )


def _storage(asked: Precision, role: str) -> str:
    """The name of the storage format of one operand."""
    if asked.format == "fp8":
        scaling, gradients = asked.option("scaling"), asked.option("gradients")
        if gradients == "auto":
            gradients = "e5m2" if scaling == "tensor" else "e4m3"
        element = gradients if role == "gradient" else "e4m3"
        if scaling == "1x128" and role == "weight":
            scaling = "128x128"
        # Scales that change only the exponent keep the two copies of a tensor (along rows, along columns) consistent,
        # and what is stored stays representable in MXFP8. They cost a number at most one octave of its range.
        return f"fp8_{element}_{scaling}_pow2"
    if asked.format == "mxfp8":
        return "mxfp8_e5m2" if role == "gradient" and asked.option("gradients") == "e5m2" else "mxfp8"
    if asked.format == "mxfp6":
        return "mxfp6" if asked.option("elements") == "e3m2" else "mxfp6_e2m3"
    if asked.format == "nvfp4":
        return "nvfp4_16x16" if role == "weight" and asked.option("weight_blocks") == "16x16" else "nvfp4"
    return asked.format
