"""What lies between an expert's two products: its description, its values and slopes, in torch and in Triton.

    gated    h = act(g) * (u + shift), g at most `limit` and u within it, or g * s(alpha g) in the place of act
    plain    h = act(u)

Numerics: the kernels compute in fp32 from rows that were rounded once; gradients are zero where a clamp is active.
"""

# ruff: noqa: RET505 (the compiler reads what follows a return; only a whole if-else chain of constexprs ends it)

# Shapes: P rows, F hidden width of an expert, G = 2F where experts are gated, else F.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.activation.functions import ACTIVATIONS, act_and_slope, act_ref
from deepwell.kernels.checks import check_matrix
from deepwell.kernels.device.triton_support import tl, triton

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: torch.square(F.relu(x)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertActivation:
    """What lies between an expert's two products.

    gated:        act(gate) * (up + up_shift); else act(up)
    interleaved:  columns are gate 0, up 0, gate 1, up 1 ...; else all gates first
    limit:        gate at most this, up between minus this and this, before anything else
    alpha:        the gate is `gate * sigmoid(alpha * gate)` instead of `function` (GPT-OSS: 1.702)
    """

    function: str = "silu"
    gated: bool = True
    interleaved: bool = False
    limit: float | None = None
    alpha: float | None = None
    up_shift: float = 0.0
    word: str = field(init=False, repr=False, compare=False, default="")  # made once: Dynamo traces its reading

    def __post_init__(self) -> None:
        fields = (self.function, self.gated, self.interleaved, self.limit, self.alpha, self.up_shift)
        object.__setattr__(self, "word", ",".join(map(str, fields)))
        if self.function not in _FUNCTIONS:
            raise ConfigError(f"activation {self.function!r} is not known; known: {', '.join(_FUNCTIONS)}")
        for name in ("interleaved", "limit", "alpha", "up_shift"):
            if not self.gated and getattr(self, name):
                raise ConfigError(f"{name} is {getattr(self, name)} and the experts have no gate; leave it out")

    def __str__(self) -> str:
        """One word that a graph can hold; `parse_activation` reads it."""
        return self.word

    @property
    def is_swiglu(self) -> bool:
        """Whether it is `act(first half) * second half` and nothing else."""
        return self == ExpertActivation(function=self.function)

    def of_rows(self, rows_SG: Tensor) -> Tensor:
        """[S, F], each operation in the dtype of the rows."""
        if not self.gated:
            return _FUNCTIONS[self.function](rows_SG)
        halves = (rows_SG[..., ::2], rows_SG[..., 1::2]) if self.interleaved else rows_SG.chunk(2, dim=-1)
        return self.gate(*halves)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """The gated product of rows that are apart already."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        if self.alpha is not None:
            gated = gate * torch.sigmoid(gate * self.alpha)
        else:
            gated = _FUNCTIONS[self.function](gate)
        return (up + self.up_shift) * gated if self.up_shift else gated * up


SWIGLU = ExpertActivation()


def parse_activation(text: str) -> ExpertActivation:
    """The activation that `str()` wrote."""
    function, gated, interleaved, limit, alpha, up_shift = text.split(",")
    return ExpertActivation(
        function=function,
        gated=gated == "True",
        interleaved=interleaved == "True",
        limit=None if limit == "None" else float(limit),
        alpha=None if alpha == "None" else float(alpha),
        up_shift=float(up_shift),
    )


# ---- values and slopes in torch ----


def hidden_and_slopes_ref(rows_PG: Tensor, how: ExpertActivation) -> tuple[Tensor, Tensor]:
    """`(h_PF, slope_PG)` in fp32: h, and its derivative by each column of the rows."""
    rows = rows_PG.float()
    if not how.gated:
        return _act_ref(rows, how)
    gate, up = (rows[:, ::2], rows[:, 1::2]) if how.interleaved else rows.chunk(2, dim=1)
    limit = float("inf") if how.limit is None else how.limit
    is_open = [(gate <= limit).float(), ((up <= limit) & (up >= -limit)).float()]
    if how.limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    a, slope = _act_ref(gate, how)
    up = up + how.up_shift
    slopes = [slope * up * is_open[0], a * is_open[1]]
    return a * up, torch.stack(slopes, -1).flatten(1) if how.interleaved else torch.cat(slopes, 1)


def _act_ref(g: Tensor, how: ExpertActivation) -> tuple[Tensor, Tensor]:
    if how.alpha is not None:
        s = torch.sigmoid(how.alpha * g)
        return g * s, s * (1 + how.alpha * g * (1 - s))
    if how.function == "relu2":
        return g.relu().square(), 2 * g.relu()
    return act_ref(g, how.function)


# ---- in Triton: a description is a tuple of constants ----


def constants(how: ExpertActivation) -> dict[str, Any]:
    """The constants by which a kernel knows an activation."""
    assert how.function == "relu2" or how.function in ACTIVATIONS
    return {
        "ACT": "" if how.alpha is not None else how.function,
        "ALPHA": how.alpha or 0.0,
        "LIMIT": how.limit or 0.0,
        "SHIFT": how.up_shift,
        "GATED": how.gated,
        "INTERLEAVED": how.interleaved,
    }


def hidden_width(gate_up_PG: Tensor, how: ExpertActivation) -> int:
    """F. Raises ConfigError unless the rows are contiguous and have the columns that the activation takes."""
    check_matrix("gate_up_PG", gate_up_PG)
    if not gate_up_PG.is_contiguous() or gate_up_PG.shape[1] % (1 + how.gated):
        raise ConfigError(f"gate_up_PG must be contiguous with columns for {how}, got {tuple(gate_up_PG.shape)}")
    return gate_up_PG.shape[1] // (1 + how.gated)


@triton.jit
def load_gate_and_up(row, f, F, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(gate, up) of columns f in fp32; twice the same of experts without a gate."""
    if not GATED:
        x = tl.load(row + f, mask=f < F, other=0.0).to(tl.float32)
        return x, x
    elif INTERLEAVED and row.dtype.element_ty == tl.bfloat16:
        # A word has one of both: loads of 16 bytes, and nothing to exchange between threads.
        word = tl.load(row.to(tl.pointer_type(tl.int32)) + f, mask=f < F, other=0)
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    else:
        first = row + (2 * f if INTERLEAVED else f)
        gate = tl.load(first, mask=f < F, other=0.0).to(tl.float32)
        return gate, tl.load(first + (1 if INTERLEAVED else F), mask=f < F, other=0.0).to(tl.float32)


@triton.jit
def store_gate_and_up(row, gate, up, f, F, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Columns f of rows of bf16 or FP8 values, of numbers in that dtype; without a gate only the first."""
    SIZE: tl.constexpr = row.dtype.element_ty.primitive_bitwidth
    if not GATED:
        tl.store(row + f, gate, mask=f < F)
    elif INTERLEAVED and SIZE == 16:
        low = gate.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = low | (up.to(tl.int16, bitcast=True).to(tl.int32) << 16)
        tl.store(row.to(tl.pointer_type(tl.int32)) + f, word, mask=f < F)
    elif INTERLEAVED and SIZE == 8:
        low = gate.to(tl.uint8, bitcast=True).to(tl.int16)
        pair = low | (up.to(tl.uint8, bitcast=True).to(tl.int16) << 8)
        tl.store(row.to(tl.pointer_type(tl.int16)) + f, pair, mask=f < F)
    else:
        first = row + (2 * f if INTERLEAVED else f)
        tl.store(first, gate, mask=f < F)
        tl.store(first + (1 if INTERLEAVED else F), up, mask=f < F)


@triton.jit
def _value_and_slope(g, ACT: tl.constexpr, ALPHA: tl.constexpr):
    if ACT == "":
        s = tl.sigmoid(ALPHA * g)
        return g * s, s * (1.0 + ALPHA * g * (1.0 - s))
    elif ACT == "relu2":
        r = tl.where(g <= 0.0, 0.0, g)  # NaN stays
        return r * r, 2.0 * r
    else:
        return act_and_slope(g, ACT)


@triton.jit
def gated_hidden(g, u, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """h of a gated expert in fp32."""
    if LIMIT > 0:
        g = tl.where(g > LIMIT, LIMIT, g)
        u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
    a, _ = _value_and_slope(g, ACT, ALPHA)
    return a * (u + SHIFT)


@triton.jit
def gated_slopes(g, u, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """(h, its derivative by g, by u) of a gated expert in fp32."""
    if LIMIT > 0:
        open_g = tl.where(g > LIMIT, 0.0, 1.0)
        open_u = tl.where((u > LIMIT) | (u < -LIMIT), 0.0, 1.0)
        g = tl.where(g > LIMIT, LIMIT, g)
        u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
        a, slope = _value_and_slope(g, ACT, ALPHA)
        return a * (u + SHIFT), slope * (u + SHIFT) * open_g, a * open_u
    else:
        a, slope = _value_and_slope(g, ACT, ALPHA)
        return a * (u + SHIFT), slope * (u + SHIFT), a


@triton.jit
def plain_hidden(u, ACT: tl.constexpr, ALPHA: tl.constexpr):
    """(h, its derivative) of an expert without a gate in fp32."""
    return _value_and_slope(u, ACT, ALPHA)
