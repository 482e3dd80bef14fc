"""One parameter with its optimizer state, as a row of the launches' table of addresses."""

from dataclasses import dataclass

import torch
from torch import Tensor

_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slot:
    """One parameter and its state. FP8 moments have fp32 scales, one for each 128 elements in memory order."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scales: Tensor | None = None
    exp_avg_sq_scales: Tensor | None = None
    master: Tensor | None = None
    # The row of scalars it uses, and its number among all parameters: the key of its random bits.
    group: int = 0
    index: int = 0

    @property
    def has_fp8_moments(self) -> bool:
        return self.exp_avg.dtype == _FP8

    def addresses(self, grad: Tensor, number: int) -> tuple[int, ...]:
        """Its row of the table of addresses."""
        tensors = (self.param, grad, self.exp_avg, self.exp_avg_sq, self.exp_avg_scales, self.exp_avg_sq_scales)
        at = [0 if tensor is None else tensor.data_ptr() for tensor in (*tensors, self.master)]
        return (*at, self.param.numel(), number, self.index)
