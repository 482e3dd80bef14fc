"""One attention to prove and to time; the result and all gradients are compared at once, each in units of the
reference's.

In units of its own norm a gradient that is off by a factor would pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.verify import FLOORS_DB, Case


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedShape:
    """Sizes of one attention."""

    B: int
    H: int
    G: int
    S: int
    D: int
    V: int

    def tensors(self, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """q, k, v and the result's gradient, which lie in memory as a model's do: [B, S, H, D]."""
        generator = torch.Generator(device).manual_seed(0)
        sizes = ((self.H, self.D), (self.G, self.D), (self.G, self.V), (self.H, self.V))
        made = (torch.randn(self.B, self.S, *size, generator=generator, device=device, dtype=dtype) for size in sizes)
        return tuple(tensor.transpose(1, 2) for tensor in made)

    def problem(self, op: str, dtype: torch.dtype, device: str, more: str = "") -> Problem:
        return Problem(
            op=op,
            m=self.S,
            n=self.D,
            k=self.V,
            precision="bf16",
            dtype=str(dtype).removeprefix("torch."),
            details=f"{self.B}x{self.H}x{self.G}{more}",
            exact_m=True,
            device=device,
        )


def is_timed(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether operands are of a kind that attention is timed with."""
    widths = (query.shape[-1], value.shape[-1])
    is_low = query.dtype in (torch.bfloat16, torch.float16) and query.dtype == key.dtype == value.dtype
    return query.is_cuda and is_low and all(isinstance(width, int) for width in widths)


def in_units(made: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """Results as one vector, each over the norm of what it should be, so that none hides the others' errors."""
    shapes, needed = [tuple(t.shape) for t in made], [tuple(t.shape) for t in wanted]
    if shapes != needed:
        raise ValueError(f"results of shapes {shapes}, they should be {needed}")
    return torch.cat([t.float().reshape(-1) / ref.float().norm() for t, ref in zip(made, wanted, strict=True)])


def case_of(label: str, operands: tuple[Any, ...], names: Sequence[str], wanted: Sequence[Tensor]) -> Case:
    """The case of a candidate that returns a result and its gradients."""
    return Case(
        label=label,
        operands=operands,
        names=names,
        wanted=in_units(wanted, wanted),
        call=lambda candidate, given: in_units(candidate.fn(*given), wanted),
        floor_db=FLOORS_DB["bf16"],
    )
