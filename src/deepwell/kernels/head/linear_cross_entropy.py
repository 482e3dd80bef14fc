"""The head's GEMM and its cross entropy, forward and backward at once, in chunks: all logits never exist.

    u = x W^T + b    z = a u, or k tanh(a u / k) under a soft cap k        a: the model's scale of its logits
    loss = mean_t (logsumexp(z_t) - z_t[target_t])    dz = (softmax(z) - onehot) / count    du = dz a (1 - (z/k)^2)
    dx = du W    dW = du^T x    db = sum_t du         over targets that are not ignored

Gradients are made in the forward pass, where the chunk's logits are at hand; the backward scales them. Those that
nobody wants (a frozen head, a frozen model under a trained head) are not computed. With `fp8` dW may wait: the forward
hands out FP8 values of du and x, and the GEMM of the backward has the loss' gradient in one of its scales.
Numerics: softmax in fp32; x W^T and du in bf16 as torch's own, what lies between them in fp32; dW added over chunks in
    bf16 by the GEMM (one rounding a chunk), db in fp32. With `fp8` the GEMMs take x and W in E4M3 and du in E5M2: rows
    of x and du with their own power-of-two scales, W with one; du is never larger than a/count, so its transposed copy
    has a scale known beforehand and dW is one GEMM, db another with a column of ones. Why E5M2: du holds 1 for the
    target beside the probabilities of all other words. E4M3 under one scale a row drops those below 2^-18; nothing
    pushes these words down any more, and they rise until together they hold a few percent of the probability.
    Scales of rows are left out of the products, for which cuBLASLt has faster kernels (docs/gotchas.md): the loss reads
    a row's logits times its scale, dx is multiplied as it is copied to its place. Powers of two change no bit, but of
    numbers below the smallest normal one, 2^-126 in bf16, which are then rounded twice. Products have the dtype of x,
    or bf16 on GPUs that write those with scales of rows in nothing else; in fp16, whose range they leave, with scales.
    A dW that waited is rounded once; for a gradient of 1 it is bit for bit the one that did not.
    With `bf16_forward` the logits are those of a bf16 head, and only dx and dW are FP8 GEMMs.
    A vocabulary that is no multiple of 16 is padded with rows of zeros, in a copy of W: their logits and gradients are
    0 and nobody reads them, so that results are those of the weight as it is.
Cost: 6*T*D*V flops. Memory: one chunk of logits, dx and dW; with `fp8` also du^T, T*V bytes; padded, a copy of W. A
    dW that waits saves the pass that scales it, 4*D*V bytes of traffic; until then du^T and x^T stand in its
    place, T*(V + D) bytes for 2*D*V.
    On one H200 16384 x 4096 x 128256 takes 70 ms of bf16 GEMMs, half of that in FP8.
"""

# Shapes: T tokens, C tokens of a chunk, D width, V vocabulary.

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.kernels.gemm.fp8 import ALIGNMENT, fp8_gemm, row_dtype
from deepwell.kernels.head.cross_entropy import LossOptions, cross_entropy, logits_ref
from deepwell.kernels.quantize.fp8 import quantize_rows, quantize_weight
from deepwell.kernels.quantize.transpose import transpose_codes
from deepwell.kernels.tune.fastest import fastest_fp8_gemm, fastest_mm

# The gradient of the logits spans as many octaves as their probabilities.
GRADIENT_FORMAT = torch.float8_e5m2

# Rows of logits start on whole lines of memory: cuBLAS has its fast GEMMs for aligned rows alone.
PADDED = 64

# Bytes of logits that one chunk may hold. In bf16 large chunks add dW up less often. In FP8 it is one GEMM, and a chunk
# has to outweigh its launches alone, whose share falls with the width. One H200, 2026-11-15, at 1024, 512 and 256 MiB:
# 44.9, 44.4 and 45.0 ms for a width of 4096, 23.7, 24.5 and 24.4 ms for 2048 (`benchmarks/bench_head.py`).
CHUNK_BYTES = 1 << 30
FP8_CHUNK_BYTES_TIMES_WIDTH = 1 << 41


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """Which loss of which logits, and how it is computed. `dx`, `dw`, `db`: which gradients somebody wants."""

    ignore_index: int = -100
    reduction: str = "mean"
    fp8: bool = False
    bf16_forward: bool = False  # with fp8: the GEMM of the logits stays in the model's dtype
    logit_scale: float = 1.0
    soft_cap: float | None = None
    dx: bool = True
    dw: bool = True
    db: bool = True

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ConfigError(f"reduction is {self.reduction!r}; linear_cross_entropy takes mean or sum")
        self.loss("none")  # checks the scale and the cap

    def loss(self, gradient: str) -> LossOptions:
        """The options of the loss of one chunk."""
        return LossOptions(
            gradient=gradient,
            fp8=GRADIENT_FORMAT,
            ignore_index=self.ignore_index,
            logit_scale=self.logit_scale,
            soft_cap=self.soft_cap,
        )


class HeadLoss(NamedTuple):
    """The loss and the gradients that were asked for; None for the others."""

    loss: Tensor
    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None


class WeightCodes(NamedTuple):
    """The operands of the GEMM that makes dW: du and x along the tokens, each with one scale."""

    qg_VT: Tensor
    g_scale: Tensor
    qx_DT: Tensor
    x_scale: Tensor


class HeadCodes(NamedTuple):
    """As `HeadLoss`, with what dW is made from in its place."""

    loss: Tensor
    dx: Tensor | None
    codes: WeightCodes | None
    db: Tensor | None


# ---- reference: what the chunks must add up to, in the plainest torch ----


def linear_cross_entropy_ref(
    x_TD: Tensor, w_VD: Tensor, target_T: Tensor, *, bias_V: Tensor | None = None, head: HeadOptions | None = None
) -> HeadLoss:
    """Reference for `linear_cross_entropy`, through autograd on fp32 logits."""
    head = head or HeadOptions()
    given = [t if t is None else t.detach().float().requires_grad_() for t in (x_TD, w_VD, bias_V)]
    leaves = [t for t in given if t is not None]
    with torch.enable_grad():
        z, _ = logits_ref(leaves[0] @ leaves[1].T, given[2], head.loss("none"))
        loss = F.cross_entropy(z, target_T, ignore_index=head.ignore_index, reduction=head.reduction)
        dx, dw, *db = torch.autograd.grad(loss, leaves)
    return HeadLoss(
        loss.detach(),
        dx.to(x_TD.dtype) if head.dx else None,
        dw.to(w_VD.dtype) if head.dw else None,
        db[0].to(bias_V.dtype) if bias_V is not None and head.db else None,
    )


# ---- public wrappers ----


def linear_cross_entropy(
    x_TD: Tensor,
    w_VD: Tensor,
    target_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    head: HeadOptions | None = None,
    chunk: int | None = None,
) -> HeadLoss:
    """Loss (fp32 scalar) and the gradients of x, W and the bias for a loss gradient of 1.

    Raises ConfigError on shapes that do not fit, or sizes FP8 cannot take.
    """
    head = head or HeadOptions()
    if head.fp8:
        loss, dx, codes, db = linear_cross_entropy_codes(x_TD, w_VD, target_T, bias_V=bias_V, head=head, chunk=chunk)
        dw = None if codes is None else weight_gradient(codes, dtype=w_VD.dtype)[: w_VD.shape[0]]
        return HeadLoss(loss, dx, dw, db)
    _check(x_TD, w_VD, target_T, bias_V, head)
    factor = _factor(target_T, head)
    out = _chunks(x_TD, w_VD, bias_V, target_T, factor, head, _rows_of_chunks(x_TD, w_VD, head, chunk))
    return out._replace(loss=out.loss.sum() * factor)


def linear_cross_entropy_codes(
    x_TD: Tensor,
    w_VD: Tensor,
    target_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    head: HeadOptions,
    chunk: int | None = None,
) -> HeadCodes:
    """`linear_cross_entropy` in FP8 without its last GEMM: `weight_gradient` makes dW of the FP8 values.

    Raises ConfigError on shapes that do not fit, or a head that is not FP8.
    """
    if not head.fp8:
        raise ConfigError("head.fp8 is False; linear_cross_entropy_codes has no FP8 values of a bf16 head")
    _check(x_TD, w_VD, target_T, bias_V, head)
    factor = _factor(target_T, head)
    out = _chunks_fp8(x_TD, w_VD, bias_V, target_T, factor, head, _rows_of_chunks(x_TD, w_VD, head, chunk))
    return out._replace(loss=out.loss.sum() * factor)


def weight_gradient(codes: WeightCodes, grad: Tensor | None = None, *, dtype: torch.dtype) -> Tensor:
    """dW [V, D], padded as the FP8 values are, of a loss whose gradient is `grad`, an fp32 number; without one, 1.

    The number is a factor of a scale: 1 changes no bit, a power of two shifts the exponents, any other is rounded with
    dW, once. 0 gives zeros. An infinite or NaN one leaves no entry of dW finite, as a multiplication would. It goes to
    the scale of x, near 1, and not to that of du, near 2^-30: it may be as small as 2^-90 before digits are lost.
    """
    x_scale = codes.x_scale if grad is None else codes.x_scale * grad
    return fastest_fp8_gemm(codes.qg_VT, codes.g_scale, codes.qx_DT, x_scale, out_dtype=dtype, fast=False)


def linear_cross_entropy_loss(
    x_TD: Tensor, w_VD: Tensor, target_T: Tensor, *, bias_V: Tensor | None = None, head: HeadOptions | None = None
) -> Tensor:
    """The loss alone, for a forward that nobody differentiates: one GEMM a chunk instead of three."""
    head = head or HeadOptions()
    _check_labels(target_T, w_VD.shape[0], head.ignore_index)
    factor = _factor(target_T, head)
    total = torch.zeros_like(factor)
    v, w_VD = w_VD.shape[0], _padded(w_VD)
    is_fp8 = head.fp8 and not head.bf16_forward
    qw_VD, _, w_scale = quantize_weight(w_VD, write="rows") if is_fp8 else (None, None, factor)
    options = head.loss("none")
    # The chunks of a training step: the fastest way to make their logits is known.
    for part in _parts(x_TD.shape[0], _rows_of_chunks(x_TD, w_VD, head, None)):
        if qw_VD is None:
            z_CV, factor_C = x_TD[part] @ w_VD.T, None
        else:
            z_CV, factor_C = _product(*quantize_rows(x_TD[part]), qw_VD, w_scale, dtype=x_TD.dtype)
        made = cross_entropy(z_CV, target_T[part], vocab=v, bias_V=bias_V, factor_T=factor_C, options=options)
        total += made.loss.sum()
        del z_CV  # before the next chunk's logits are made
    return total * factor


def chunk_bytes(width: int, fp8: bool) -> int:
    """Bytes of logits that one chunk may hold, for hidden states of a width."""
    return min(CHUNK_BYTES, FP8_CHUNK_BYTES_TIMES_WIDTH // width) if fp8 else CHUNK_BYTES


def _rows_of_a_chunk(x_TD: Tensor, w_VD: Tensor, head: HeadOptions) -> int:
    return max(ALIGNMENT, chunk_bytes(w_VD.shape[1], head.fp8) // (w_VD.shape[0] * x_TD.element_size()))


def _rows_of_chunks(x_TD: Tensor, w_VD: Tensor, head: HeadOptions, chunk: int | None) -> int:
    """Rows of chunks of equal size, none larger than `chunk` or what may be held."""
    t = x_TD.shape[0]
    chunk = min(chunk or _rows_of_a_chunk(x_TD, w_VD, head), max(t, 1))
    rows = -(-t // -(-t // chunk)) if t else 1
    # FP8 contracts over a chunk's tokens in whole lines.
    return -(-rows // ALIGNMENT) * ALIGNMENT if head.fp8 else rows


def padded_rows(v: int) -> int:
    """Rows of the weight that the GEMMs see."""
    return v + -v % PADDED if v % ALIGNMENT else v


def _padded(w_VD: Tensor) -> Tensor:
    more = padded_rows(w_VD.shape[0]) - w_VD.shape[0]
    return F.pad(w_VD, (0, 0, 0, more)) if more else w_VD


def _parts(t: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, t)) for start in range(0, t, chunk))


def _factor(target_T: Tensor, head: HeadOptions) -> Tensor:
    """What the sum of the losses is multiplied with."""
    one = torch.ones((), dtype=torch.float32, device=target_T.device)
    return one / (target_T != head.ignore_index).sum() if head.reduction == "mean" else one


def _chunks(
    x_TD: Tensor,
    w_VD: Tensor,
    bias_V: Tensor | None,
    target_T: Tensor,
    factor: Tensor,
    head: HeadOptions,
    chunk: int,
) -> HeadLoss:
    v, w_VD = w_VD.shape[0], _padded(w_VD)
    loss_T = torch.empty(x_TD.shape[0], dtype=torch.float32, device=x_TD.device)
    dx_TD = torch.empty_like(x_TD) if head.dx else None
    # The first chunk writes dW, the others add to it: zeros would be a pass of their own, and be read again.
    dw_VD = (torch.empty_like if x_TD.shape[0] else torch.zeros_like)(w_VD) if head.dw else None
    db_V = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and head.db else None
    # One buffer for the logits of every chunk: two at once would stand at the peak of a model's memory.
    logits = torch.empty((min(chunk, x_TD.shape[0]), w_VD.shape[0]), dtype=x_TD.dtype, device=x_TD.device)
    for part in _parts(x_TD.shape[0], chunk):
        z_CV = fastest_mm(x_TD[part], w_VD.T, out=logits[: part.stop - part.start])
        # Overwrites the logits by their gradient.
        options = head.loss("in_place")
        made = cross_entropy(z_CV, target_T[part], vocab=v, bias_V=bias_V, grad_scale=factor, options=options)
        loss_T[part] = made.loss
        if dx_TD is not None:
            fastest_mm(z_CV, w_VD, out=dx_TD[part])
        if dw_VD is not None:
            fastest_mm(z_CV.T, x_TD[part], out=dw_VD, accumulate=part.start > 0)
        if db_V is not None:
            db_V += z_CV[:, :v].sum(0, dtype=torch.float32)
    db_V = None if db_V is None or bias_V is None else db_V.to(bias_V.dtype)
    return HeadLoss(loss_T, dx_TD, None if dw_VD is None else dw_VD[:v], db_V)


def _chunks_fp8(
    x_TD: Tensor,
    w_VD: Tensor,
    bias_V: Tensor | None,
    target_T: Tensor,
    factor: Tensor,
    head: HeadOptions,
    chunk: int,
) -> HeadCodes:
    t, v, w_VD = x_TD.shape[0], w_VD.shape[0], _padded(w_VD)
    qx_TD, x_scale = quantize_rows(x_TD)
    qw_VD, qw_DV, w_scale = quantize_weight(w_VD, write="columns" if head.bf16_forward else "both")
    assert qw_DV is not None
    wants_db = head.db and bias_V is not None
    loss_T = torch.empty(t, dtype=torch.float32, device=x_TD.device)
    dx_TD = torch.empty_like(x_TD) if head.dx else None
    shape = (w_VD.shape[0], t)
    qg_VT = torch.empty(shape, dtype=GRADIENT_FORMAT, device=x_TD.device) if head.dw or wants_db else None
    # |du| <= a/count: the scale of a row with that amax holds for all. Where nothing counts, every du is 0.
    largest = torch.where(factor.isinf(), 0.0, factor * abs(head.logit_scale))
    g_scale = quantize_rows(largest.reshape(1, 1), dtype=GRADIENT_FORMAT)[1].reshape(())
    for part in _parts(t, chunk):
        if qw_VD is None:
            z_CV, factor_C = fastest_mm(x_TD[part], w_VD.T, out=x_TD.new_empty(part.stop - part.start, shape[0])), None
        else:
            z_CV, factor_C = _product(qx_TD[part], x_scale[part], qw_VD, w_scale, dtype=x_TD.dtype)
        options = head.loss("fp8")
        grads = cross_entropy(
            z_CV,
            target_T[part],
            vocab=v,
            bias_V=bias_V,
            factor_T=factor_C,
            grad_scale=factor,
            options=options,
        )
        del z_CV  # before the next chunk's logits are made
        q_CV, scale_C = grads.q, grads.scale
        assert q_CV is not None and scale_C is not None
        loss_T[part] = grads.loss
        if dx_TD is not None:
            product, factor_C = _product(q_CV, scale_C, qw_DV, w_scale, dtype=x_TD.dtype, fast=False)
            _to_place(product, factor_C, dx_TD[part])
            del product
        if qg_VT is not None:
            transpose_codes(q_CV, scale_C, scale=g_scale, out=qg_VT[:, part])
        del grads, q_CV
    codes = db_V = None
    if qg_VT is not None and head.dw:
        codes = WeightCodes(qg_VT, g_scale, *transpose_codes(qx_TD, x_scale))
    if qg_VT is not None and bias_V is not None and head.db:
        ones = torch.ones((ALIGNMENT, t), dtype=x_TD.dtype, device=x_TD.device).to(qx_TD.dtype)
        db_V = fp8_gemm(qg_VT, g_scale, ones, torch.ones_like(g_scale), fast=False)[:v, 0].to(bias_V.dtype).contiguous()
    return HeadCodes(loss_T, dx_TD, codes, db_V)


def _product(
    q_CK: Tensor, scale_C: Tensor, qw_NK: Tensor, w_scale: Tensor, *, dtype: torch.dtype, fast: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Values times a weight's, and what its reader multiplies rows with: their scales, or None where they are in it."""
    written = row_dtype(dtype, q_CK.device)
    if written == torch.float16:
        return fastest_fp8_gemm(q_CK, scale_C, qw_NK, w_scale, out_dtype=written, fast=fast), None
    return fastest_fp8_gemm(q_CK, None, qw_NK, w_scale, out_dtype=written, fast=fast), scale_C


def _to_place(product_CD: Tensor, factor_C: Tensor | None, out_CD: Tensor) -> None:
    if factor_C is None:
        out_CD.copy_(product_CD)
    else:
        # In the product's dtype, so that torch converts nothing on the way; bf16 holds all powers of two of scales.
        torch.mul(product_CD, factor_C.to(product_CD.dtype)[:, None], out=out_CD)


def _check(x_TD: Tensor, w_VD: Tensor, target_T: Tensor, bias_V: Tensor | None, head: HeadOptions) -> None:
    if x_TD.dim() != 2 or w_VD.dim() != 2 or x_TD.shape[1] != w_VD.shape[1]:
        raise ConfigError(f"x_TD {tuple(x_TD.shape)} and w_VD {tuple(w_VD.shape)} must be matrices of equal width")
    if target_T.shape != x_TD.shape[:1]:
        raise ConfigError(f"target_T has shape {tuple(target_T.shape)}; x_TD has {x_TD.shape[0]} rows")
    if bias_V is not None and bias_V.shape != w_VD.shape[:1]:
        raise ConfigError(f"bias_V has shape {tuple(bias_V.shape)}; w_VD has {w_VD.shape[0]} rows")
    if head.fp8 and any(size % ALIGNMENT for size in x_TD.shape):
        sizes = f"T={x_TD.shape[0]}, D={x_TD.shape[1]}"
        raise ConfigError(f"fp8 takes multiples of {ALIGNMENT}, got {sizes}; pad or leave the head in bf16")
    _check_labels(target_T, w_VD.shape[0], head.ignore_index)


def _check_labels(target_T: Tensor, vocab: int, ignore_index: int) -> None:
    """Raise torch's error on a label that is no word."""
    is_outside = ((target_T < 0) | (target_T >= vocab)) & (target_T != ignore_index)
    if target_T.is_cuda:  # without waiting for the answer: an assertion on the device, as torch's own
        torch._assert_async(~is_outside.any(), "a label is out of bounds")
    elif bool(is_outside.any()):
        raise IndexError(f"Target {int(target_T[is_outside][0])} is out of bounds.")  # torch's own words
