"""The head's GEMM and its cross entropy, forward and backward at once, in chunks: all logits never exist.

    z = x W^T    loss = mean_t (logsumexp(z_t) - z_t[target_t])    dz = (softmax(z) - onehot) / count
    dx = dz W    dW = dz^T x                                       over targets that are not ignored

Gradients are made in the forward pass, where the chunk's logits are at hand; the backward scales them.
Numerics: softmax in fp32; logits and dz in bf16 as torch's own, dW added over chunks in bf16 by the GEMM (one
rounding a
    chunk). With `fp8` the GEMMs take E4M3: rows of x and dz with their own power-of-two scales, W with one; dz is never
    larger than 1/count, so its transposed copy has a scale known beforehand and dW is one GEMM.
Cost: 6*T*D*V flops. Memory: one chunk of logits, dx and dW; with `fp8` also dz^T, T*V bytes.
    On one H200 16384 x 4096 x 128256 takes 70 ms of bf16 GEMMs, half of that in FP8.
"""

# Shapes: T tokens, C tokens of a chunk, D width, V vocabulary.

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.cross_entropy import Options, cross_entropy
from deepwell.kernels.gemm import ALIGNMENT, fp8_gemm
from deepwell.kernels.quantize import quantize_rows, quantize_weight
from deepwell.kernels.transpose import transpose_codes

# Bytes of logits that one chunk may hold: large chunks keep the GEMMs at full speed and add dW up less often.
CHUNK_BYTES = 1 << 30

# ---- reference: what the chunks must add up to, in the plainest torch ----


def linear_cross_entropy_ref(
    x_TD: Tensor, w_VD: Tensor, target_T: Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference for `linear_cross_entropy`, through autograd on fp32 logits."""
    x, w = x_TD.detach().float().requires_grad_(), w_VD.detach().float().requires_grad_()
    with torch.enable_grad():
        loss = F.cross_entropy(x @ w.T, target_T, ignore_index=ignore_index, reduction=reduction)
        dx, dw = torch.autograd.grad(loss, (x, w))
    return loss.detach(), dx.to(x_TD.dtype), dw.to(w_VD.dtype)


# ---- public wrapper ----


def linear_cross_entropy(
    x_TD: Tensor,
    w_VD: Tensor,
    target_T: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    fp8: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss (fp32 scalar) and the gradients of x and W for a loss gradient of 1.

    Raises ConfigError on a reduction other than mean and sum, shapes that do not fit, or sizes FP8 cannot take.
    """
    _check(x_TD, w_VD, target_T, reduction, fp8)
    t, v = x_TD.shape[0], w_VD.shape[0]
    chunk = min(chunk or max(ALIGNMENT, CHUNK_BYTES // (v * x_TD.element_size())), max(t, 1))
    # Chunks of equal size; FP8 contracts over a chunk's tokens in whole lines.
    chunk = -(-t // -(-t // chunk)) if t else 1
    chunk = -(-chunk // ALIGNMENT) * ALIGNMENT if fp8 else chunk
    factor = torch.ones((), dtype=torch.float32, device=x_TD.device)
    if reduction == "mean":
        factor = factor / (target_T != ignore_index).sum()
    run = _chunks_fp8 if fp8 else _chunks
    loss_T, dx_TD, dw_VD = run(x_TD, w_VD, target_T, factor, ignore_index, chunk)
    return loss_T.sum() * factor, dx_TD, dw_VD


def _chunks(
    x_TD: Tensor, w_VD: Tensor, target_T: Tensor, factor: Tensor, ignore_index: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    options = Options(gradient="in_place", ignore_index=ignore_index)
    loss_T = torch.empty(x_TD.shape[0], dtype=torch.float32, device=x_TD.device)
    dx_TD, dw_VD = torch.empty_like(x_TD), torch.zeros_like(w_VD)
    for start in range(0, x_TD.shape[0], chunk):
        part = slice(start, start + chunk)
        z_CV = x_TD[part] @ w_VD.T
        # Overwrites the logits by their gradient.
        loss_T[part] = cross_entropy(z_CV, target_T[part], grad_scale=factor, options=options).loss
        torch.mm(z_CV, w_VD, out=dx_TD[part])
        dw_VD.addmm_(z_CV.T, x_TD[part])
    return loss_T, dx_TD, dw_VD


def _chunks_fp8(
    x_TD: Tensor, w_VD: Tensor, target_T: Tensor, factor: Tensor, ignore_index: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    options = Options(gradient="fp8", ignore_index=ignore_index)
    t, v = x_TD.shape[0], w_VD.shape[0]
    qx_TD, x_scale = quantize_rows(x_TD)
    qw_VD, qw_DV, w_scale = quantize_weight(w_VD)
    loss_T, dx_TD = torch.empty(t, dtype=torch.float32, device=x_TD.device), torch.empty_like(x_TD)
    qg_VT = torch.empty((v, t), dtype=qx_TD.dtype, device=x_TD.device)
    # |dz| <= 1/count: the scale of a row with that amax holds for all.
    g_scale = quantize_rows(factor.reshape(1, 1))[1].reshape(())
    for start in range(0, t, chunk):
        part = slice(start, min(start + chunk, t))
        z_CV = fp8_gemm(qx_TD[part], x_scale[part], qw_VD, w_scale, out_dtype=x_TD.dtype)
        grads = cross_entropy(z_CV, target_T[part], grad_scale=factor, options=options)
        assert grads.q is not None and grads.scale is not None
        loss_T[part] = grads.loss
        dx_TD[part] = fp8_gemm(grads.q, grads.scale, qw_DV, w_scale, out_dtype=x_TD.dtype)
        transpose_codes(grads.q, grads.scale, scale=g_scale, out=qg_VT[:, part])
    dw_VD = fp8_gemm(qg_VT, g_scale, *transpose_codes(qx_TD, x_scale), out_dtype=w_VD.dtype)
    return loss_T, dx_TD, dw_VD


def _check(x_TD: Tensor, w_VD: Tensor, target_T: Tensor, reduction: str, fp8: bool) -> None:
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"reduction is {reduction!r}; linear_cross_entropy takes mean or sum")
    if x_TD.dim() != 2 or w_VD.dim() != 2 or x_TD.shape[1] != w_VD.shape[1]:
        raise ConfigError(f"x_TD {tuple(x_TD.shape)} and w_VD {tuple(w_VD.shape)} must be matrices of equal width")
    if target_T.shape != x_TD.shape[:1]:
        raise ConfigError(f"target_T has shape {tuple(target_T.shape)}; x_TD has {x_TD.shape[0]} rows")
    if fp8 and any(size % ALIGNMENT for size in (*x_TD.shape, w_VD.shape[0])):
        sizes = f"T={x_TD.shape[0]}, D={x_TD.shape[1]}, V={w_VD.shape[0]}"
        raise ConfigError(f"fp8 takes multiples of {ALIGNMENT}, got {sizes}; pad or leave the head in bf16")
