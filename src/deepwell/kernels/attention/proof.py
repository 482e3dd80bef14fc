"""How attention is compared with its reference: the result and all gradients at once, each in units of the reference's.

In units of its own norm a gradient that is off by a factor would pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepwell.kernels.tune.verify import FLOORS_DB, Case


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
