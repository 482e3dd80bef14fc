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

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from deepwell.kernels.experts.activation import SWIGLU, ExpertActivation, parse_activation
from deepwell.kernels.experts.autograd import AS_IS, grouped_linear
from deepwell.kernels.experts.spelled_out import is_spelled_out
from deepwell.kernels.experts.torch_ops import ops

__all__ = [
    "PLAIN_SCHEME",
    "SWIGLU",
    "Biases",
    "ExpertActivation",
    "GateUp",
    "experts_mlp_ref",
    "group_ends",
    "parse_activation",
]

PLAIN_SCHEME = "bf16|bf16|bf16"
Biases = tuple[Tensor | None, Tensor | None]
GateUp = Tensor | tuple[Tensor, Tensor]
_LINE_BYTES = 16


def experts_mlp_ref(
    x_TH: Tensor,
    w_gate_up: GateUp,
    w_down: Tensor,
    top_index: Tensor,
    top_weight: Tensor,
    *,
    biases: Biases = (None, None),
    activation: ExpertActivation = SWIGLU,
    schemes: tuple[str, str] = (PLAIN_SCHEME, PLAIN_SCHEME),
) -> Tensor:
    """`y_TH` in the dtype of x. `w_gate_up` is [E, G, H] and `w_down` [E, H, F], views of any strides.

    Gate and up may be two weights [E, F, H], without a bias then. `biases` are [E, G] and [E, H]. `schemes` say how the
    GEMMs of the two projections run ("fwd|dgrad|wgrad").
    """
    experts, top_k = w_down.shape[0], top_index.shape[-1]
    index = top_index.reshape(-1)
    sorted_index, order = torch.sort(torch.where(index < 0, experts, index), stable=True)
    offs = group_ends(sorted_index, experts)
    of_none = (sorted_index >= experts).unsqueeze(-1)
    expert = sorted_index.clamp(max=experts - 1)
    rows = x_TH[order // top_k].masked_fill(of_none, 0.0)
    weights = w_gate_up if isinstance(w_gate_up, tuple) else (w_gate_up,)
    parts = [_product(rows, weight, offs, schemes[0]) for weight in weights]
    if biases[0] is not None:
        parts = [parts[0] + biases[0][expert]]
    parts = [part.masked_fill(of_none, 0.0) for part in parts]
    rows = activation.of_rows(parts[0]) if len(parts) == 1 else activation.gate(*parts)
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
    if scheme == PLAIN_SCHEME and is_spelled_out() and torch.compiler.is_compiling() and x_SK.dtype != torch.bfloat16:
        return ops.grouped_emulated(x_SK, w_ENK, offs, AS_IS, AS_IS)  # a plain product for who reads the graph
    if scheme != PLAIN_SCHEME or not _torch_has_it(x_SK, w_ENK):
        is_kn = w_ENK.stride(1) == 1 and w_ENK.stride(2) != 1
        stored = w_ENK.transpose(1, 2) if is_kn else w_ENK
        return grouped_linear(x_SK, stored, offs, is_kn, scheme)
    return torch._grouped_mm(x_SK, w_ENK.transpose(1, 2), offs=offs)


def _torch_has_it(x_SK: Tensor, w_ENK: Tensor) -> bool:
    """Whether `torch._grouped_mm` and its gradients run for these; traced, it knows bf16 alone."""
    # torch 2.11 does not say that it compiles where Dynamo asks what a call gives.
    knows_fp32 = not (torch.compiler.is_compiling() or is_fake(x_SK) or x_SK.is_cuda)
    known = (torch.bfloat16, torch.float32) if knows_fp32 else (torch.bfloat16,)
    whole = all(size * x_SK.element_size() % _LINE_BYTES == 0 for size in w_ENK.shape[1:])
    return x_SK.dtype == w_ENK.dtype and x_SK.dtype in known and whole
