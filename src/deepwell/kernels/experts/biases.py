"""The experts' biases: what that of the down projection adds to a token, and both biases' gradients.

    y[t] += sum_j w[t, j] b[e(t, j)]                      a product of the choices' weights by expert [T, E] with b
    db_down[e] = sum of w dy over the choices of e        db_up[e] = sum of dH over the rows of e
    dw[t, j] += <dy[t], b[e(t, j)]>

Numerics: sums in fp32, always in the same order; FP8 rows are summed as they are. The products are those of
    `product_in_fp32`, on tensor cores; what a token gets is rounded once.
"""

# Shapes: T tokens, S = T * top_k choices, P padded rows, E experts, D width of a token, G of the first product.

import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.device.triton_support import cdiv, launch, on_device, runs_kernel, tl, triton
from deepwell.kernels.experts.row_tiles import expert_of_rows, groups
from deepwell.kernels.gemm.product_in_fp32 import halves, product_in_fp32_ref, runs_on_tensor_cores
from deepwell.kernels.gemm.torch_ops import ops

_BLOCK_T, _BLOCK_G, _WARPS = 64, 128, 4


def weights_by_expert(weight_S: Tensor, ends: Tensor, slot: Tensor, place: Tensor, top_k: int) -> Tensor:
    """[T, E] in fp32: what each token gives to each expert; choices that nobody took give nothing."""
    live_S = torch.where(place >= 0, weight_S.float(), 0.0)
    weight_TE = live_S.new_zeros((live_S.shape[0] // top_k, ends.shape[0]))
    return weight_TE.scatter_add(1, _experts(ends, slot, place).view(-1, top_k), live_S.view(-1, top_k))


def add_down_bias_ref(y_TD: Tensor, weight_TE: Tensor, bias_ED: Tensor) -> Tensor:
    return (y_TD + product_in_fp32_ref(weight_TE, bias_ED)).to(y_TD.dtype)


def add_down_bias(y_TD: Tensor, weight_TE: Tensor, bias_ED: Tensor) -> Tensor:
    """What the experts give to each token, with their biases; weights in fp32."""
    if not runs_on_tensor_cores(weight_TE, bias_ED) or y_TD.dtype != torch.bfloat16:
        return add_down_bias_ref(y_TD, weight_TE, bias_ED)
    return torch.addmm(y_TD, torch.cat(halves(weight_TE), 1), torch.cat((bias_ED, bias_ED)))


def down_bias_grad(dy_TD: Tensor, weight_S: Tensor, ends: Tensor, slot: Tensor, place: Tensor, top_k: int) -> Tensor:
    """[E, D] in fp32."""
    return ops.product_in_fp32(weights_by_expert(weight_S, ends, slot, place, top_k).T, dy_TD)


def down_bias_grad_of_weights(
    dy_TD: Tensor, bias_ED: Tensor, ends: Tensor, slot: Tensor, place: Tensor, top_k: int
) -> Tensor:
    """[S] in fp32: <dy, b> of each choice, 0 of those that nobody took."""
    by_expert_TE = ops.product_in_fp32(dy_TD, bias_ED.T)
    of_bias_S = by_expert_TE.gather(1, _experts(ends, slot, place).view(-1, top_k)).flatten()
    return torch.where(place >= 0, of_bias_S, 0.0)


def _experts(ends: Tensor, slot: Tensor, place: Tensor) -> Tensor:
    return expert_of_rows(ends, slot.shape[0])[place.clamp(min=0)]


def sums_by_expert(rows_PG: Tensor, ends: Tensor, slot: Tensor) -> Tensor:
    """[E, G], as a product: sums in fp32 whatever the rows are."""
    experts = torch.arange(ends.shape[0], device=ends.device)
    belongs_EP = (expert_of_rows(ends, slot.shape[0])[None, :] == experts[:, None]) & (slot >= 0)[None, :]
    return belongs_EP.to(rows_PG.dtype) @ rows_PG


# ---- sums of FP8 rows ----


def code_sums_ref(q_PG: Tensor, scale_P: Tensor, ends_E: Tensor) -> Tensor:
    rows = q_PG.float() * scale_P[:, None]
    return torch.stack([rows[part].sum(0) for _, part in groups(ends_E)])


@triton.jit
def _code_sums_kernel(
    q_ptr, scale_ptr, ends_ptr, out_ptr, G, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr
):  # fmt: skip
    # Program (e, g): some columns of one expert.
    e = tl.program_id(0)
    gs = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    begin = tl.load(ends_ptr + e - 1, mask=e > 0, other=0)
    end = tl.load(ends_ptr + e)
    acc = tl.zeros((BLOCK_T, BLOCK_G), dtype=tl.float32)
    for start in range(begin, end, BLOCK_T):
        p = start + tl.arange(0, BLOCK_T)
        at = q_ptr + p.to(tl.int64)[:, None] * G + gs[None, :]
        q = tl.load(at, mask=(p < end)[:, None] & (gs < G)[None, :], other=0.0).to(tl.float32)
        acc += q * tl.load(scale_ptr + p, mask=p < end, other=0.0)[:, None]
    tl.store(out_ptr + e.to(tl.int64) * G + gs, tl.sum(acc, axis=0), mask=gs < G)


def code_sums(q_PG: Tensor, scale_P: Tensor, ends_E: Tensor) -> Tensor:
    """[E, G] in fp32: the sum of each expert's FP8 rows; rows without a choice must be zeros.

    Raises ConfigError on operands that do not fit.
    """
    if scale_P.shape != q_PG.shape[:1] or not q_PG.is_contiguous():
        raise ConfigError(f"q_PG {tuple(q_PG.shape)} must be contiguous, with as many scales; got {scale_P.shape}")
    if not runs_kernel(q_PG, _code_sums_kernel):
        return code_sums_ref(q_PG, scale_P, ends_E)
    g = q_PG.shape[1]
    out = torch.empty((ends_E.shape[0], g), dtype=torch.float32, device=q_PG.device)
    with on_device(q_PG):
        launch(_code_sums_kernel, (ends_E.shape[0], cdiv(g, _BLOCK_G)))(
            q_PG, scale_P, ends_E, out, g, BLOCK_T=_BLOCK_T, BLOCK_G=_BLOCK_G, num_warps=_WARPS
        )
    return out
