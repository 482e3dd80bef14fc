"""The experts' computation on one rank in plain torch: what every faster way must compute.

    y[t] = sum_j top_weight[t, j] * down_e(act(gate_up_e(x[t])))          e = top_index[t, j]

Choices with a negative index, or one past the last expert, take no part: they cost nothing and give no gradient but
zeros. Rows are sorted by expert and multiplied as groups; where the groups end is known on the device alone, so nothing
waits for the host, but for products that torch has no grouped kernel for: rows that are not whole lines of 16 bytes,
and fp32 on a GPU.
The order of operations and the dtypes between them are those of Hugging Face's grouped experts, so both agree bitwise.
"""

# Shapes: T tokens, K choices a token, S = T * K choices, E experts, H width of a token, F hidden width of an expert,
# G = 2F where experts are gated, else F.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.experts.autograd import grouped_linear

PLAIN_SCHEME = "bf16|bf16|bf16"
Biases = tuple[Tensor | None, Tensor | None]
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: torch.square(F.relu(x)),
}
_LINE_BYTES = 16


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

    def __post_init__(self) -> None:
        if self.function not in _FUNCTIONS:
            raise ConfigError(f"activation {self.function!r} is not known; known: {', '.join(_FUNCTIONS)}")
        for name in ("interleaved", "limit", "alpha", "up_shift"):
            if not self.gated and getattr(self, name):
                raise ConfigError(f"{name} is {getattr(self, name)} and the experts have no gate; leave it out")

    def __str__(self) -> str:
        """One word that a graph can hold; `parse_activation` reads it."""
        fields = (self.function, self.gated, self.interleaved, self.limit, self.alpha, self.up_shift)
        return ",".join(map(str, fields))

    @property
    def is_swiglu(self) -> bool:
        """Whether it is `act(first half) * second half` and nothing else."""
        return self == ExpertActivation(function=self.function)

    def __call__(self, rows_SG: Tensor) -> Tensor:
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


def experts_mlp_ref(
    x_TH: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    top_index: Tensor,
    top_weight: Tensor,
    *,
    biases: Biases = (None, None),
    activation: ExpertActivation = SWIGLU,
    schemes: tuple[str, str] = (PLAIN_SCHEME, PLAIN_SCHEME),
) -> Tensor:
    """`y_TH` in the dtype of x. `w_gate_up` is [E, G, H] and `w_down` [E, H, F], views of any strides.

    `biases` are [E, G] and [E, H]. `schemes` say how the GEMMs of the two projections run ("fwd|dgrad|wgrad").
    """
    experts, top_k = w_gate_up.shape[0], top_index.shape[-1]
    index = top_index.reshape(-1)
    sorted_index, order = torch.sort(torch.where(index < 0, experts, index), stable=True)
    offs = group_ends(sorted_index, experts)
    of_none = (sorted_index >= experts).unsqueeze(-1)
    expert = sorted_index.clamp(max=experts - 1)
    rows = x_TH[order // top_k].masked_fill(of_none, 0.0)
    rows = _product(rows, w_gate_up, offs, schemes[0])
    if biases[0] is not None:
        rows = rows + biases[0][expert]
    rows = activation(rows.masked_fill(of_none, 0.0))
    rows = _product(rows, w_down, offs, schemes[1])
    if biases[1] is not None:
        rows = rows + biases[1][expert]
    rows = rows.masked_fill(of_none, 0.0) * top_weight.reshape(-1)[order].unsqueeze(-1)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    return rows[place].view(x_TH.shape[0], top_k, x_TH.shape[-1]).sum(dim=1).to(x_TH.dtype)


def group_ends(sorted_index: Tensor, experts: int) -> Tensor:
    """Where each expert's rows end, int32, counted on the device."""
    ids = torch.arange(experts, device=sorted_index.device, dtype=sorted_index.dtype)
    return torch.searchsorted(sorted_index, ids, right=True).to(torch.int32)


def _product(x_SK: Tensor, w_ENK: Tensor, offs: Tensor, scheme: str) -> Tensor:
    if scheme != PLAIN_SCHEME or not _torch_has_it(x_SK, w_ENK):
        is_kn = w_ENK.stride(1) == 1 and w_ENK.stride(2) != 1
        stored = w_ENK.transpose(1, 2) if is_kn else w_ENK
        return grouped_linear(x_SK, stored, offs, is_kn, scheme)
    return torch._grouped_mm(x_SK, w_ENK.transpose(1, 2), offs=offs)


def _torch_has_it(x_SK: Tensor, w_ENK: Tensor) -> bool:
    """Whether `torch._grouped_mm` and its gradients run for these; compiled, it knows bf16 alone."""
    known = (torch.bfloat16,) if torch.compiler.is_compiling() or x_SK.is_cuda else (torch.bfloat16, torch.float32)
    whole = all(size * x_SK.element_size() % _LINE_BYTES == 0 for size in w_ENK.shape[1:])
    return x_SK.dtype == w_ENK.dtype and x_SK.dtype in known and whole
