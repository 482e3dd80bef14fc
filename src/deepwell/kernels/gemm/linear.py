"""A linear: one autograd function, whose three GEMMs each run as the scheme says. The methods are a table, `_METHODS`.

              x, dy                                    w                             products
    bf16, nvfp4, emulate    kept as they are: each product quantizes both operands along its contraction
    mxfp8     both copies from one read                both copies from one read     block-scaled
    fp8_row   rows; wgrad transposes the FP8 values    amax; a copy each way         cuBLASLt
    tensor    amax; both copies from one read          amax; a copy each way         cuBLASLt, fast but for wgrad
    1x128     both copies from one read                squares; a copy each way      cuBLASLt, promoted every 128

What is read and written of x or dy in bf16, bytes per element: mxfp8 and 1x128 2 + 2; tensor 2 for the amax, then
2 + 2; rows, where no kernel before writes them, 2 + 1 and 1 + 1 more to transpose the values. Blocks along tokens
differ from those along a row, so that they are made of the numbers, not of the values. What the backward needs of x is
the copy for its wgrad: one byte an element. Only FP8 rows are also written by a norm or an activation before.
"""

# Shapes: T tokens (all leading dimensions folded), K and N the widths of a linear.

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepwell.formats.spec import E5M2, get_format
from deepwell.kernels.gemm.schemes import SCALED, GemmScheme, parse_scheme
from deepwell.kernels.gemm.torch_ops import ops
from deepwell.kernels.quantize.weights import is_kn

# An operand of a GEMM: values and scales, or the numbers themselves.
_Operand = tuple[Tensor, ...]


def low_precision_linear(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, scheme: str) -> Tensor:
    """`x @ cat(weights).T + bias` with each of its three GEMMs run as `scheme` says."""
    return _linear(x, bias, scheme, None, None, None, *weights)


def cached_linear(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, scheme: str, rows: Tensor, columns: Tensor, scale: Tensor
) -> Tensor:
    """`low_precision_linear` with the FP8 values of `weights` given: `rows` [N, K], `columns` [K, N], one scale.

    The weights themselves are there for their gradients; their values are not read.
    """
    return _linear(x, bias, scheme, rows, columns, scale, *weights)


def can_keep_codes(scheme: str) -> bool:
    """Whether both products with the weights read FP8 values alone."""
    fwd, dgrad, _ = gemms(scheme)
    return fwd.name == dgrad.name == "fp8_row"


def split_columns(x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """The column ranges of a merged linear's output, as views."""
    return torch.split(x, list(widths), dim=-1)


def _linear(x: Tensor, bias: Tensor | None, *others: Any) -> Tensor:
    y_TN = _Linear.apply(x.reshape(-1, x.shape[-1]), *others)
    if bias is not None:
        y_TN = y_TN + bias
    return y_TN.view(*x.shape[:-1], y_TN.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        scheme: str,
        q_NK: Tensor | None,
        q_KN: Tensor | None,
        w_scale: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        fwd, dgrad, wgrad = ctx.gemms = gemms(scheme)
        needs_dx, needs_dw = ctx.needs_input_grad[0], any(ctx.needs_input_grad[5:])
        x, x_kept = copies(x_TK, "activation", fwd, wgrad if needs_dw else None)
        w: _Operand
        w_kept: _Operand
        if q_NK is not None and q_KN is not None and w_scale is not None:
            w, w_kept = (q_NK, w_scale), (q_KN, w_scale)
        else:
            w, w_kept = fwd.method.weights(weights, needs_dx and dgrad.name == fwd.name)
        y_TN = fwd.method.multiply(fwd.how, x, w, x_TK.dtype)
        # The transposed copy of the weights is made when the backward asks for it, from weights that are there anyway.
        reads_weights = needs_dx and len(w_kept) < 2
        ctx.widths, ctx.counts = [weight.shape[0] for weight in weights], (len(x_kept), len(w_kept))
        ctx.is_kn = len(weights) == 1 and is_kn(weights[0])
        ctx.save_for_backward(*x_kept, *w_kept, *(weights if reads_weights else ()))
        return y_TN.to(x_TK.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        _, dgrad, wgrad = ctx.gemms
        dy_TN = grads[0].contiguous()
        saved = iter(ctx.saved_tensors)
        x, w = (tuple(next(saved) for _ in range(count)) for count in ctx.counts)
        needs_dx, needs_dw = ctx.needs_input_grad[0], any(ctx.needs_input_grad[5:])
        dy, dy_columns = copies(dy_TN, "gradient", dgrad if needs_dx else None, wgrad if needs_dw else None)
        dx_TK, dw = None, [None] * len(ctx.widths)
        if needs_dx:
            if len(w) < 2:
                w = dgrad.method.transposed(list(saved), dy[0], *w)
            dx_TK = dgrad.method.multiply(dgrad.how, dy, w, dy_TN.dtype).to(dy_TN.dtype)
        if needs_dw:
            # As the weight is stored: autograd would copy the other way round.
            sides = (x, dy_columns) if ctx.is_kn else (dy_columns, x)
            made = wgrad.method.wgrad(wgrad.how, *sides, dy_TN.dtype).to(dy_TN.dtype)
            dw = [made.T] if ctx.is_kn else made.split(ctx.widths)
        return dx_TK, None, None, None, None, *dw


# ---- the methods ----


class _Method(NamedTuple):
    """How the GEMMs of one method get their operands and multiply them."""

    # x or dy, in a format, for a GEMM that contracts its columns.
    rows: Callable[[Tensor, str], _Operand]
    # The same, and what a wgrad, which contracts its tokens, starts from.
    both: Callable[[Tensor, str], tuple[_Operand, _Operand]]
    # The weights for the forward, and what a dgrad of the same method starts from where there is one: the transposed
    # operand itself, or what `transposed` takes.
    weights: Callable[[Sequence[Tensor], bool], tuple[_Operand, _Operand]]
    # (weights, a tensor of the backward, what was kept) -> the weights for a dgrad.
    transposed: Callable[..., _Operand]
    # `left @ right.T` of operands, to a dtype or near it: for the forward and dgrad, and for a wgrad.
    multiply: Callable[[GemmScheme, _Operand, _Operand, torch.dtype], Tensor]
    wgrad: Callable[[GemmScheme, _Operand, _Operand, torch.dtype], Tensor]


def _as_they_are(product: Callable[[GemmScheme, Tensor, Tensor], Tensor]) -> _Method:
    """Operands stay numbers; `product` quantizes them, if it does, and gives `left @ right.T`."""
    return _Method(
        rows=lambda x, fmt: (x,),
        both=lambda x, fmt: ((x,), (x,)),
        weights=lambda weights, keep: ((_joined(weights),), ()),
        transposed=lambda weights, after: (_joined(weights).T,),
        multiply=lambda how, left, right, dtype: product(how, *left, *right),
        wgrad=lambda how, dy, x, dtype: product(how, dy[0].T, x[0].T),
    )


def _quantized(
    quantize: Callable[[Tensor, str, str, bool], Any], how: GemmScheme, left: Tensor, right: Tensor
) -> tuple[Any, Any]:
    """Both operands of one product, each in its format."""
    assert how.format is not None
    lhs, rhs = how.format.lhs, how.format.rhs
    # The transform cancels in the product only where both sides have it.
    assert lhs.hadamard == rhs.hadamard
    first = quantize(left, lhs.format, lhs.rounding, lhs.hadamard)
    return first, quantize(right, rhs.format, rhs.rounding, rhs.hadamard)


def _emulated(how: GemmScheme, left: Tensor, right: Tensor) -> Tensor:
    lhs, rhs = _quantized(ops.round_to, how, left, right)
    return (lhs @ rhs.T).to(left.dtype)


def _nvfp4(how: GemmScheme, left: Tensor, right: Tensor) -> Tensor:
    lhs, rhs = _quantized(ops.nv_quantize_rows, how, left, right)
    return ops.block_scaled_gemm(*lhs, *rhs, left.dtype)


def _rows_alone(how: GemmScheme, left: Tensor, right: Tensor) -> Tensor:
    return ops.fp8_gemm(*ops.quantize_rows(left), *ops.quantize_rows(right), False)


def _joined(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


# -- MXFP8 --


def _mx_rows(x: Tensor, fmt: str = "mxfp8") -> _Operand:
    return ops.mx_quantize_rows(x, fmt)


def _mx_both(x: Tensor, fmt: str = "mxfp8") -> tuple[_Operand, _Operand]:
    q, scale, q_t, scale_t = ops.mx_quantize_both(x, fmt)
    return (q, scale), (q_t, scale_t)


def _mx_multiply(how: GemmScheme, left: _Operand, right: _Operand, dtype: torch.dtype) -> Tensor:
    return ops.block_scaled_gemm(*left, None, *right, None, dtype)


_MXFP8 = _Method(
    rows=_mx_rows,
    both=_mx_both,
    weights=lambda weights, keep: _mx_both(_joined(weights)) if keep else (_mx_rows(_joined(weights)), ()),
    transposed=lambda weights, after: _mx_rows(_joined(weights).T),
    multiply=_mx_multiply,
    wgrad=_mx_multiply,
)

# -- FP8 --


def _weights(weights: Sequence[Tensor], keep: bool, *, scale_per_row: bool) -> tuple[_Operand, _Operand]:
    q_NK, scale, partials = ops.quantize_weights(list(weights), scale_per_row)
    return (q_NK, scale), (partials,) if keep else ()


def _transposed(
    weights: list[Tensor], after: Tensor, partials: Tensor | None = None, *, scale_per_row: bool
) -> _Operand:
    if partials is None:
        partials = ops.quantize_weights(weights, scale_per_row)[2]
    return ops.quantize_weights_transposed(weights, partials, after, scale_per_row)


_FP8_ROW = _Method(
    rows=lambda x, fmt: ops.quantize_rows(x),
    both=lambda x, fmt: (ops.quantize_rows(x),) * 2,
    weights=partial(_weights, scale_per_row=True),
    transposed=partial(_transposed, scale_per_row=True),
    multiply=lambda how, left, right, dtype: ops.fp8_gemm(*left, *right, how.fast),
    wgrad=lambda how, dy, x, dtype: ops.fp8_gemm(*ops.wgrad_operands(*dy, *x), how.fast),
)


def _tensor_both(x: Tensor, fmt: str) -> tuple[_Operand, _Operand]:
    q, q_t, scale = ops.quantize_tensor_both(x, _is_e5m2(fmt))
    return (q, scale), (q_t, scale)


def _is_e5m2(fmt: str) -> bool:
    return get_format(fmt).element is E5M2


_FP8_TENSOR = _Method(
    rows=lambda x, fmt: ops.quantize_tensor(x, _is_e5m2(fmt)),
    both=_tensor_both,
    weights=partial(_weights, scale_per_row=False),
    transposed=partial(_transposed, scale_per_row=False),
    multiply=lambda how, left, right, dtype: ops.fp8_gemm(*left, *right, True),
    wgrad=lambda how, dy, x, dtype: ops.fp8_gemm(*dy, *x, False),
)


def _blocks_both(x: Tensor, fmt: str) -> tuple[_Operand, _Operand]:
    q, scale, q_t, scale_t = ops.quantize_1x128_both(x)
    return (q, scale), (q_t, scale_t)


_FP8_1X128 = _Method(
    rows=lambda x, fmt: ops.quantize_1x128(x),
    both=_blocks_both,
    weights=lambda weights, keep: (ops.quantize_weights_128x128(list(weights)), ()),
    transposed=ops.quantize_weights_128x128_transposed,
    multiply=lambda how, left, right, dtype: ops.fp8_gemm_blocks(*left, *right, True),
    wgrad=lambda how, dy, x, dtype: ops.fp8_gemm_blocks(*dy, *x, False),
)

_METHODS = {
    "bf16": _as_they_are(lambda how, left, right: left @ right.T),
    "emulate": _as_they_are(_emulated),
    "nvfp4": _as_they_are(_nvfp4),
    "mxfp8": _MXFP8,
    "fp8_row": _FP8_ROW,
    # Rows beside tensor or 1x128 scales share no operand with them: each product quantizes its own.
    "fp8_row_alone": _as_they_are(_rows_alone),
    "fp8_tensor": _FP8_TENSOR,
    "fp8_1x128": _FP8_1X128,
}

# ---- a scheme's GEMMs ----


class _Gemm(NamedTuple):
    name: str
    how: GemmScheme

    @property
    def method(self) -> _Method:
        return _METHODS[self.name]

    def format_of(self, role: str) -> str:
        """Of the operand of that role, "" where the method has one format alone."""
        if self.how.format is None:
            return ""
        lhs, rhs = self.how.format.lhs, self.how.format.rhs
        return lhs.format if lhs.role == role else rhs.format


@lru_cache(maxsize=1024)
def gemms(scheme: str) -> tuple[_Gemm, _Gemm, _Gemm]:
    """How forward, dgrad and wgrad of a scheme run."""
    how = parse_scheme(scheme)
    three = (how.fwd, how.dgrad, how.wgrad)
    is_scaled = any(gemm.method in SCALED for gemm in three)

    def named(gemm: GemmScheme) -> _Gemm:
        name = gemm.method
        if gemm.method == "native":
            assert gemm.format is not None
            name = "mxfp8" if gemm.format.lhs.format.startswith("mxfp8") else "nvfp4"
        elif gemm.method == "fp8_row" and is_scaled:
            name = "fp8_row_alone"
        return _Gemm(name, gemm)

    fwd, dgrad, wgrad = map(named, three)
    return fwd, dgrad, wgrad


def copies(x: Tensor, role: str, along: _Gemm | None, across: _Gemm | None) -> tuple[_Operand, _Operand]:
    """x for the GEMM that contracts its columns, and for the wgrad; one read gives both where the two agree."""
    formats = [None if gemm is None else (gemm.name, gemm.format_of(role)) for gemm in (along, across)]
    if along is not None and formats[0] == formats[1]:
        return along.method.both(x, along.format_of(role))
    rows = () if along is None else along.method.rows(x, along.format_of(role))
    return rows, () if across is None else across.method.both(x, across.format_of(role))[1]
