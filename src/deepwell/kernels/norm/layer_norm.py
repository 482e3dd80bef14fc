"""LayerNorm with weight and bias: the kernels of `rms_norm.py` with the mean taken off and a bias added.

    n = (s - mean_d s) * rstd,  s = x + r        y = round(w * n + b)
    dx = rstd * (g - mean_d(g) - n * mean_d(g * n)) + dr,   g = dy * w;   dw = sum_t dy * n;   db = sum_t dy

Numerics and cost are those of `rms_norm.py`; the default rounding is torch's, once at the end.
"""

# Shapes: T tokens, D model width.

from dataclasses import replace

from torch import Tensor

from deepwell.kernels.norm.rms_norm import BackwardConfig, Normed, NormGrads, NormOptions, norm, norm_backward
from deepwell.kernels.quantize.fp8 import RowConfig

_DEFAULT = NormOptions(eps=1e-5, rounding="torch", center=True)


def layer_norm(
    x_TD: Tensor,
    w_D: Tensor,
    b_D: Tensor | None = None,
    *,
    residual_TD: Tensor | None = None,
    factor_T: Tensor | None = None,
    options: NormOptions = _DEFAULT,
    config: RowConfig | None = None,
) -> Normed:
    """Normalise the rows of `x_TD` (+ `residual_TD`) to mean 0 and variance 1, times w plus b.

    `factor_T` multiplies the rows of x before a residual is added.

    Raises ConfigError on a wrong argument, UnsupportedError on rows of more than 32768 columns.
    """
    return norm(x_TD, w_D, b_D, residual_TD, replace(options, center=True), config, factor_T)


def layer_norm_backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    w_D: Tensor,
    mean_T: Tensor,
    rstd_T: Tensor,
    *,
    d_residual_TD: Tensor | None = None,
    factor_T: Tensor | None = None,
    options: NormOptions = _DEFAULT,
    config: BackwardConfig | None = None,
) -> NormGrads:
    """Gradients of `layer_norm`: dx (with `d_residual_TD` added), dw and db. `x_TD` is what was normalised.

    `factor_T` multiplies the rows of dy.
    """
    saved = Normed(None, None, None, x_TD, rstd_T, mean_T)
    return norm_backward(dy_TD, saved, w_D, d_residual_TD, replace(options, center=True), config, factor_T)
