"""Norms of tiles of heads before their rotation, forward and backward: of each head, or of all heads of a token."""

# ruff: noqa: RET505 (the compiler reads what follows a return; only a whole if-else chain of constexprs ends it)

from deepwell.kernels.device.bf16_words import floats, product, rounded
from deepwell.kernels.device.triton_support import tl, triton
from deepwell.kernels.norm.rms_norm import mean_of
from deepwell.kernels.rope.head_tiles import (
    load_group,
    load_of_heads,
    load_two,
    of_group,
    pairs_of,
    rotated,
    store_of_heads,
    store_two,
)


@triton.jit
def _mean_of_heads(x1, x2, D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The mean over the columns of each head of two tiles, or of the one that holds all: [1, heads, 1, 1]."""
    total = tl.sum(x1 if INTERLEAVED else x1 + x2, axis=3)
    return mean_of(total, D, D, D & (D - 1) == 0)[:, :, :, None]


@triton.jit
def _weighted(x, rstd, w, DTYPE: tl.constexpr, ROUND_FIRST: tl.constexpr, ASM: tl.constexpr):
    """A normed tile in DTYPE."""
    n = x * rstd
    if ROUND_FIRST:
        n = rounded(n, DTYPE, ASM)
    if ROUND_FIRST and w.dtype == DTYPE:
        return product(n, w, ASM)
    else:
        return rounded(floats(n, ASM) * floats(w, ASM), DTYPE, ASM)


@triton.jit
def _mean_of_row(total, H: tl.constexpr, D: tl.constexpr):
    """The mean over all heads, [1, 1, 1, 1], of a tile that holds the sum of all groups."""
    W: tl.constexpr = H * D
    of_heads = tl.sum(total, axis=3)
    return mean_of(tl.sum(of_heads, axis=1), W, W, W & (W - 1) == 0)[:, None, :, None]


@triton.jit
def _rstd_of_row(x, eps, H: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr, ASM: tl.constexpr):
    total = tl.zeros(x[0].shape, dtype=tl.float32)
    for i in tl.static_range(0, len(x), 2):
        x1, x2 = floats(x[i], ASM), floats(x[i + 1], ASM)
        total += x1 * x1 if INTERLEAVED else x1 * x1 + x2 * x2
    return tl.rsqrt(_mean_of_row(total, H, D) + eps)


@triton.jit
def norm_and_rotate(
    x, h, live, w_ptr, c1, c2, s1, s2, y_row, r_row, eps, H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, RUN: tl.constexpr, WHOLE: tl.constexpr, ROUND_FIRST: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store heads group by group: few of them are in registers in fp32 then."""
    DTYPE: tl.constexpr = x[0].dtype
    if WHOLE:
        rstd = _rstd_of_row(x, eps, H, D, INTERLEAVED, ASM)
        tl.store(r_row + tl.arange(0, 1), tl.reshape(rstd, [1]))
    else:
        w1, w2 = load_two(w_ptr, h, 0, live, D // 2, D, PAIRS, INTERLEAVED, RUN)
    for i in tl.static_range(0, len(x), 2):
        start = i // 2 * h.shape[1]
        is_live = of_group(live, h, i // 2 * h.shape[1], H)
        x1, x2 = floats(x[i], ASM), floats(x[i + 1], ASM)
        if WHOLE:
            w1, w2 = load_group(w_ptr, h, None, live, i // 2 * h.shape[1], H, D, PAIRS, INTERLEAVED, RUN)
        else:
            rstd = tl.rsqrt(_mean_of_heads(x1 * x1, x2 * x2, D, INTERLEAVED) + eps)
        u1 = _weighted(x1, rstd, w1, DTYPE, ROUND_FIRST, ASM)
        if INTERLEAVED:
            u2 = u1
        else:
            u2 = _weighted(x2, rstd, w2, DTYPE, ROUND_FIRST, ASM)
        u1, u2 = pairs_of(u1, u2, INTERLEAVED, ASM)
        y1, y2 = rotated(u1, u2, c1, c2, s1, s2, DTYPE, False, INTERLEAVED, ASM)
        store_two(y_row + start * D, h, D, is_live, y1, y2, D // 2, D, PAIRS, INTERLEAVED, RUN)
        if not WHOLE:
            store_of_heads(r_row + start, h, is_live, rstd, ASM)


@triton.jit
def _before_the_weight(d1, d2, x1, x2, rstd, w1, w2, INTERLEAVED: tl.constexpr, ASM: tl.constexpr):
    """(du, n, g) of both tiles of a group, of gradients behind the rotation; twice the one where interleaved."""
    d1, n1 = floats(d1, ASM), floats(x1, ASM) * rstd
    g1 = d1 * floats(w1, ASM)
    if INTERLEAVED:
        return (d1, d1), (n1, n1), (g1, g1)
    else:
        d2, n2 = floats(d2, ASM), floats(x2, ASM) * rstd
        return (d1, d2), (n1, n2), (g1, d2 * floats(w2, ASM))


@triton.jit
def _before_the_norm(g, n, mean, rstd, live, DTYPE: tl.constexpr, INTERLEAVED: tl.constexpr, ASM: tl.constexpr):
    """Both tiles of dx, rounded.

    `live` is None where all heads are there: one past the last is 0 * NaN where w or a table holds one.
    """
    y1, y2 = (g[0] - n[0] * mean) * rstd, (g[1] - n[1] * mean) * rstd
    if live is not None:
        y1, y2 = tl.where(live, y1, 0.0), tl.where(live, y2, 0.0)
    y1 = rounded(y1, DTYPE, ASM)
    if INTERLEAVED:
        return y1, y1
    else:
        return y1, rounded(y2, DTYPE, ASM)


@triton.jit
def _of_weights(dw1, dw2, d, n, live):
    """The weight's gradient so far and what a group adds to it."""
    a1, a2 = d[0] * n[0], d[1] * n[1]
    if live is not None:
        a1, a2 = tl.where(live, a1, 0.0), tl.where(live, a2, 0.0)
    return dw1 + a1, dw2 + a2


@triton.jit
def head_gradients(
    d_row, h, stride_h, live, x_row, r_row, w, c1, c2, s1, s2, dw, H: tl.constexpr, D: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, RUN: tl.constexpr, NUM_STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Gradients of one token's heads before their norm, rounded, two tiles a group, and the weight's so far."""
    DTYPE: tl.constexpr = d_row.dtype.element_ty
    found = ()
    for start in tl.static_range(0, H, h.shape[1]):
        d1, d2 = load_group(d_row, h, stride_h, live, start, H, D, PAIRS, INTERLEAVED, RUN)
        x1, x2 = load_group(x_row, h, None, live, start, H, D, PAIRS, INTERLEAVED, RUN)
        rstd = load_of_heads(r_row + start, h, H - start, ASM and NUM_STAGES == 1)
        is_live = h < H - start if start + h.shape[1] > H else None
        d1, d2 = pairs_of(d1, d2, INTERLEAVED, ASM)
        d1, d2 = rotated(d1, d2, c1, c2, s1, s2, DTYPE, True, INTERLEAVED, ASM)
        d, n, g = _before_the_weight(d1, d2, x1, x2, rstd, w[0], w[1], INTERLEAVED, ASM)
        mean = _mean_of_heads(g[0] * n[0], g[1] * n[1], D, INTERLEAVED)
        found = found + _before_the_norm(g, n, mean, rstd, is_live, DTYPE, INTERLEAVED, ASM)
        dw = _of_weights(dw[0], dw[1], d, n, is_live)
    return found, dw


@triton.jit
def row_gradients(
    d_row, h, stride_h, live, x_row, r_row, w, c1, c2, s1, s2, dw, H: tl.constexpr, D: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, RUN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As `head_gradients` with one norm of all heads: two tiles of `w` and `dw` a group."""
    DTYPE: tl.constexpr = d_row.dtype.element_ty
    G: tl.constexpr = h.shape[1]
    du, x, dws, found = (), (), (), ()
    rstd = tl.load(r_row)
    total = tl.zeros(w[0].shape, dtype=tl.float32)
    for i in tl.static_range(0, len(w), 2):
        d1, d2 = load_group(d_row, h, stride_h, live, i // 2 * G, H, D, PAIRS, INTERLEAVED, RUN)
        two = load_group(x_row, h, None, live, i // 2 * G, H, D, PAIRS, INTERLEAVED, RUN)
        is_live = h < H - i // 2 * G if i // 2 * G + G > H else None
        d1, d2 = pairs_of(d1, d2, INTERLEAVED, ASM)
        back = rotated(d1, d2, c1, c2, s1, s2, DTYPE, True, INTERLEAVED, ASM)
        d, n, g = _before_the_weight(back[0], back[1], two[0], two[1], rstd, w[i], w[i + 1], INTERLEAVED, ASM)
        total += g[0] * n[0] if INTERLEAVED else g[0] * n[0] + g[1] * n[1]
        dws = dws + _of_weights(dw[i], dw[i + 1], d, n, is_live)
        du, x = du + back, x + two
    mean = _mean_of_row(total, H, D)
    for i in tl.static_range(0, len(w), 2):
        is_live = h < H - i // 2 * G if i // 2 * G + G > H else None
        _, n, g = _before_the_weight(du[i], du[i + 1], x[i], x[i + 1], rstd, w[i], w[i + 1], INTERLEAVED, ASM)
        found = found + _before_the_norm(g, n, mean, rstd, is_live, DTYPE, INTERLEAVED, ASM)
    return found, dws


@triton.jit
def zeros_like(tiles):
    """In fp32, as many and as large."""
    zeros = ()
    for i in tl.static_range(len(tiles)):
        zeros = zeros + (tl.zeros(tiles[i].shape, dtype=tl.float32),)  # noqa: RUF005 (Triton knows no star)
    return zeros
