"""Rotary position embedding of merged q, k, v rows in one pass each way, FP8 rows of the gradient included.

    half         y[i] = x[i] cos[i] - x[i + R/2] sin[i]       y[i + R/2] = x[i + R/2] cos[i + R/2] + x[i] sin[i + R/2]
    interleaved  the same of the pairs (2i, 2i + 1)           columns R .. D of a head, and all of v, are copied
    backward     the transposed rotation; dqkv holds dq, dk, dv where the forward found q, k, v
    (q, scale) = FP8 rows of dqkv, one scale for all heads of a token
    merged rows may come with factors (`row_factors`): the tables take them for q and k

Numerics: fp32 inside, one rounding to the input's dtype; the FP8 rows are bit-equal to quantizing the rounded dqkv.
Cost: memory bound; bytes per element of a row in bf16: forward 2 + 2, backward 2 + 2, backward to FP8 2 + 1; the tables
    stay in L2. v is copied although nothing rotates it: the merged rows need not outlive the forward then.
    Floors at 4.25 TB/s: 16384 tokens of 48 heads x 128: 95 us, to FP8 71 us; 32768 of 36 x 64: 71 us, to FP8 53 us.
"""

# Shapes: B batch, S sequence, T = B * S tokens, H heads, D head width, R <= D rotated columns of a head, W row width.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.device.bf16_words import encoded, larger, product
from deepwell.kernels.device.fp8 import row_scale
from deepwell.kernels.device.triton_support import (
    cdiv,
    launch,
    next_power_of_2,
    on_device,
    runs_kernel,
    runs_ptx,
    tl,
    triton,
)
from deepwell.kernels.gemm.row_factors import check_factor, factor_like, times_rows
from deepwell.kernels.quantize.fp8 import RowOptions
from deepwell.kernels.rope.head_tiles import (
    heads_of,
    largest,
    load_columns,
    load_pairs,
    magnitudes,
    rotated,
    store_codes,
    store_columns,
    store_two,
    within,
)

CONVENTIONS = ("half", "interleaved")
# How q, k and v lie in a row: all heads of each side by side, or the three of one head (GPT-NeoX).
PACKINGS = ("blocks", "heads")
# The widest row that registers hold: 1024 threads of 32 elements.
MAX_WIDTH = 32768
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class RopeGrads(NamedTuple):
    """What the backward gives, one row a token; None for what was not asked for."""

    grad: Tensor | None
    q: Tensor | None
    scale: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """What a merged row holds: how many heads of q, k and v, and in which order; which columns pair up."""

    q: int
    k: int
    v: int
    packing: str = "blocks"
    convention: str = "half"

    def __post_init__(self) -> None:
        if self.packing not in PACKINGS:
            raise ConfigError(f"packing must be one of {', '.join(PACKINGS)}, got {self.packing!r}")
        check_convention(self.convention)
        if min(self.q, self.k, self.v) < 1:
            raise ConfigError(f"every one of q, k, v needs a head, got {self.q}, {self.k}, {self.v}")
        if self.packing == "heads" and not self.q == self.k == self.v:
            raise ConfigError(f"packing 'heads' needs as many k and v as q, got {self.q}, {self.k}, {self.v}")

    @property
    def total(self) -> int:
        return self.q + self.k + self.v

    def parts(self, row: Tensor, width: int) -> tuple[Tensor, ...]:
        """q, k and v of merged rows [..., W] as views [..., H, D]."""
        if self.packing == "heads":
            return row.unflatten(-1, (self.q, 3, width)).unbind(-2)
        parts = row.split([self.q * width, self.k * width, self.v * width], dim=-1)
        return tuple(part.unflatten(-1, (-1, width)) for part in parts)


# ---- reference: what the kernels must compute, in the plainest torch ----


def rotate_ref(x_BSHD: Tensor, cos: Tensor, sin: Tensor, convention: str, *, backward: bool = False) -> Tensor:
    """Reference for `rope` and, transposed, for its backward."""
    width = cos.shape[-1]
    x, rest = x_BSHD[..., :width].float(), x_BSHD[..., width:]
    x1, x2 = _pairs(x, convention)
    (c1, c2), (s1, s2) = (_pairs(table.float().unsqueeze(-2), convention) for table in (cos, sin))
    if backward:
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    y = torch.cat((y1, y2), dim=-1) if convention == "half" else torch.stack((y1, y2), dim=-1).flatten(-2)
    return torch.cat((y.to(x_BSHD.dtype), rest), dim=-1).contiguous()


def _pairs(x: Tensor, convention: str) -> tuple[Tensor, Tensor]:
    if convention == "half":
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]
    return x[..., 0::2], x[..., 1::2]


def rope_qkv_ref(
    qkv_BSW: Tensor, cos: Tensor, sin: Tensor, heads: Heads, factor_T: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if factor_T is not None:
        qkv_BSW = times_rows(qkv_BSW.flatten(0, 1), factor_T).to(qkv_BSW.dtype).view(qkv_BSW.shape)
    q, k, v = heads.parts(qkv_BSW, qkv_BSW.shape[-1] // heads.total)
    q, k = (rotate_ref(x, cos, sin, heads.convention) for x in (q, k))
    return q, k, v.clone(memory_format=torch.contiguous_format)


def rope_qkv_backward_ref(
    grads: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, heads: Heads, options: RowOptions
) -> RopeGrads:
    dq, dk, dv = grads
    dq, dk = (rotate_ref(x, cos, sin, heads.convention, backward=True) for x in (dq, dk))
    if heads.packing == "heads":
        grad = torch.stack((dq, dk, dv), dim=-2).flatten(-3)
    else:
        grad = torch.cat((dq, dk, dv), dim=-2).flatten(-2)
    return RopeGrads(*options.rows_of(grad.flatten(0, 1)))


# ---- configs: what the tuner may choose from ----


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Tokens per program (a power of two), and its warps."""

    rows: int
    num_warps: int


CONFIGS = tuple(RopeConfig(rows=rows, num_warps=n) for rows, n in ((1, 4), (1, 2), (1, 8), (2, 1), (4, 4)))


def default_config(columns: int) -> RopeConfig:
    """At most 96 elements a thread: what a thread does once is shared by many, and loads are of 16 bytes.

    16384 tokens of 48 heads x 64 to FP8 on an H200: 43.4 us with 96, 44.3 with 48, 46.5 with 24; 48 heads x 128: 82.1,
    80.2, 88.1; the forward is the same for all three (`benchmarks/bench_rows.py --only rope`).
    """
    rows = 4 if columns <= 768 else 2 if columns <= 1536 else 1
    return RopeConfig(rows=rows, num_warps=min(16, next_power_of_2(cdiv(columns, 32 * 96))))


# ---- kernels: a pointer that is None is an operand or a result that was not asked for ----


@triton.jit
def _rope_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    factor_ptr,
    yq_ptr,
    yk_ptr,
    yv_ptr,
    cq_ptr,
    ck_ptr,
    cv_ptr,
    scale_ptr,
    T,
    S,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_cos_b,
    stride_cos_s,
    stride_sin_b,
    stride_sin_s,
    stride_yqt,
    stride_ykt,
    stride_yvt,
    stride_yh,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK_HK: tl.constexpr,
    BLOCK_HV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    FP8_MAX: tl.constexpr,
    ASM: tl.constexpr,
):
    # One program, ROWS tokens with all their heads; y is written, c are its codes.
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    P: tl.constexpr = BLOCK_PAIRS
    HALF: tl.constexpr = BLOCK_D // 2  # v lies in two tiles, too
    if ROWS == 1:
        # One token: its place is the same for all threads, and nothing is masked.
        t32 = tl.program_id(0)
        live = tl.full([1, 1, 1, 1], True, tl.int1)
    else:
        t32 = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None, None, None]
        live = t32 < T
    b, s = (t32 // S).to(tl.int64), (t32 % S).to(tl.int64)
    t = t32.to(tl.int64)

    if v_ptr is not None:
        hv = heads_of(BLOCK_HV, GROUP)
        live_v = within(live, hv, HV, BLOCK_HV)
        v_row = v_ptr + b * stride_vb + s * stride_vs
        if INTERLEAVED:
            v1 = load_columns(v_row, hv, stride_vh, live_v, 0, D, BLOCK_D, RUN)
            v2 = v1
        else:
            v1 = load_columns(v_row, hv, stride_vh, live_v, 0, HALF, HALF, RUN)
            v2 = load_columns(v_row, hv, stride_vh, live_v, HALF, D, HALF, RUN)
    hq = heads_of(BLOCK_HQ, GROUP)
    live_q = within(live, hq, HQ, BLOCK_HQ)
    q_row = q_ptr + b * stride_qb + s * stride_qs
    q1, q2 = load_pairs(q_row, hq, stride_qh, live_q, R, P, INTERLEAVED, RUN, ASM)
    if R < D:
        q3 = load_columns(q_row, hq, stride_qh, live_q, R, D, BLOCK_REST, RUN)
    if k_ptr is not None:
        hk = heads_of(BLOCK_HK, GROUP)
        live_k = within(live, hk, HK, BLOCK_HK)
        k_row = k_ptr + b * stride_kb + s * stride_ks
        k1, k2 = load_pairs(k_row, hk, stride_kh, live_k, R, P, INTERLEAVED, RUN, ASM)
        if R < D:
            k3 = load_columns(k_row, hk, stride_kh, live_k, R, D, BLOCK_REST, RUN)

    # Every thread reads the columns it has of q: no exchange.
    same = heads_of(GROUP, GROUP)
    c1, c2 = load_pairs(cos_ptr + b * stride_cos_b + s * stride_cos_s, same, 0, live, R, P, INTERLEAVED, RUN, ASM)
    s1, s2 = load_pairs(sin_ptr + b * stride_sin_b + s * stride_sin_s, same, 0, live, R, P, INTERLEAVED, RUN, ASM)
    if factor_ptr is not None:
        if ROWS == 1:
            factor = tl.load(factor_ptr + t)
        else:
            factor = tl.load(factor_ptr + t, mask=live, other=0.0)
        # A power of two: where it is multiplied in changes no bit.
        c1, c2, s1, s2 = c1 * factor, c2 * factor, s1 * factor, s2 * factor
        if R < D:
            q3 = product(q3, factor_like(q3, factor), ASM)
            if k_ptr is not None:
                k3 = product(k3, factor_like(k3, factor), ASM)
        if v_ptr is not None:
            v1 = product(v1, factor_like(v1, factor), ASM)
            v2 = product(v2, factor_like(v2, factor), ASM)
    q1, q2 = rotated(q1, q2, c1, c2, s1, s2, DTYPE, BACKWARD, INTERLEAVED, ASM)
    if k_ptr is not None:
        k1, k2 = rotated(k1, k2, c1, c2, s1, s2, DTYPE, BACKWARD, INTERLEAVED, ASM)

    if yq_ptr is not None:
        y_row = yq_ptr + t * stride_yqt
        store_two(y_row, hq, stride_yh, live_q, q1, q2, R // 2, R, P, INTERLEAVED, RUN)
        if R < D:
            store_columns(y_row, hq, stride_yh, live_q, q3, R, D, BLOCK_REST, RUN)
        if k_ptr is not None:
            y_row = yk_ptr + t * stride_ykt
            store_two(y_row, hk, stride_yh, live_k, k1, k2, R // 2, R, P, INTERLEAVED, RUN)
            if R < D:
                store_columns(y_row, hk, stride_yh, live_k, k3, R, D, BLOCK_REST, RUN)
        if v_ptr is not None:
            store_two(yv_ptr + t * stride_yvt, hv, stride_yh, live_v, v1, v2, HALF, D, HALF, INTERLEAVED, RUN)

    if cq_ptr is not None:
        FP8: tl.constexpr = cq_ptr.dtype.element_ty
        both = larger(magnitudes(q1, q2, ASM), magnitudes(k1, k2, ASM), ASM)
        if HALF == P:
            bits = largest(larger(both, magnitudes(v1, v2, ASM), ASM), ASM)
        else:
            bits = tl.maximum(largest(both, ASM), largest(magnitudes(v1, v2, ASM), ASM))
        if R < D:
            rest = larger(magnitudes(q3, q3, ASM), magnitudes(k3, k3, ASM), ASM)
            bits = tl.maximum(bits, largest(rest, ASM))
        # Nothing saturates: the multiplier is of the row's own largest.
        enc, scale = row_scale(bits, FP8_MAX)
        e = enc[:, None, None, None]
        c_row = cq_ptr + t * stride_yqt
        store_codes(c_row, hq, stride_yh, live_q, q1, q2, e, R // 2, R, P, INTERLEAVED, RUN, ASM)
        if R < D:
            store_columns(c_row, hq, stride_yh, live_q, encoded(q3, e, FP8, ASM, True), R, D, BLOCK_REST, RUN)
        c_row = ck_ptr + t * stride_ykt
        store_codes(c_row, hk, stride_yh, live_k, k1, k2, e, R // 2, R, P, INTERLEAVED, RUN, ASM)
        if R < D:
            store_columns(c_row, hk, stride_yh, live_k, encoded(k3, e, FP8, ASM, True), R, D, BLOCK_REST, RUN)
        c_row = cv_ptr + t * stride_yvt
        store_codes(c_row, hv, stride_yh, live_v, v1, v2, e, HALF, D, HALF, INTERLEAVED, RUN, ASM)
        token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        tl.store(scale_ptr + token, scale, mask=token < T)


# ---- public wrappers: check, allocate, launch ----


def rope_qkv(
    qkv_BSW: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: Heads,
    factor_T: Tensor | None = None,
    config: RopeConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q and k, and v, of merged rows, each in a buffer of its own: [B, S, H, D], contiguous.

    `cos` and `sin` are [S, R], [1, S, R] or [B, S, R]; `factor_T` multiplies the rows.
    """
    check_operand("qkv_BSW", qkv_BSW, 3)
    b, s, w = qkv_BSW.shape
    if w % heads.total:
        raise ConfigError(f"qkv_BSW has {w} columns, no multiple of its {heads.total} heads")
    width = w // heads.total
    check_tables(cos, sin, qkv_BSW, width)
    check_factor("factor_T", factor_T, b * s, qkv_BSW)
    if not runs_kernel(qkv_BSW, _rope_kernel):
        return rope_qkv_ref(qkv_BSW, cos, sin, heads, factor_T)
    out = tuple(qkv_BSW.new_empty((b, s, h, width)) for h in (heads.q, heads.k, heads.v))
    written = [x.flatten(0, 1) for x in out]
    _launch(heads.parts(qkv_BSW, width), (cos, sin), written, heads.convention, factor=factor_T, config=config)
    return out[0], out[1], out[2]


def rope_qkv_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    packing: str = "blocks",
    convention: str = "half",
    options: RowOptions | None = None,
    config: RopeConfig | None = None,
) -> RopeGrads:
    """Gradient of `rope_qkv` at its merged rows, [T, W], from those of q, k, v, [B, S, H, D] with D dense."""
    options = options or RowOptions()
    heads = heads_of_grads(grads, packing, convention)
    dq = grads[0]
    b, s, _, width = dq.shape
    check_tables(cos, sin, dq, width)
    if not runs_kernel(dq, _rope_kernel):
        return rope_qkv_backward_ref(grads, cos, sin, heads, options)
    made = RopeGrads(*options.empty_rows(dq, b * s, heads.total * width))
    _launch(
        grads,
        (cos, sin),
        heads.parts(made.grad, width) if made.grad is not None else None,
        convention,
        backward=True,
        rows=(heads.parts(made.q, width), made.scale, options) if made.q is not None else None,
        config=config,
    )
    return made


def heads_of_grads(grads: tuple[Tensor, Tensor, Tensor], packing: str, convention: str) -> Heads:
    """The heads that gradients of q, k and v have. Raises ConfigError where these differ in more than their number."""
    dq = grads[0]
    for name, x in zip(("dq", "dk", "dv"), grads, strict=True):
        check_operand(name, x, 4)
        if (x.shape[:2], x.shape[3], x.dtype, x.device) != (dq.shape[:2], dq.shape[3], dq.dtype, dq.device):
            raise ConfigError(
                f"{name} must be like dq, {tuple(dq.shape)} {dq.dtype}, but for its heads; "
                f"got {tuple(x.shape)} {x.dtype} on {x.device}"
            )
    q, k, v = (x.shape[2] for x in grads)
    return Heads(q=q, k=k, v=v, packing=packing, convention=convention)


def rope(
    x_BSHD: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    convention: str = "half",
    backward: bool = False,
    config: RopeConfig | None = None,
) -> Tensor:
    """The rotation of one tensor's heads (any strides, D dense), or its transpose for a gradient: [B, S, H, D]."""
    check_operand("x_BSHD", x_BSHD, 4)
    check_convention(convention)
    check_tables(cos, sin, x_BSHD, x_BSHD.shape[-1])
    if not runs_kernel(x_BSHD, _rope_kernel):
        return rotate_ref(x_BSHD, cos, sin, convention, backward=backward)
    y = x_BSHD.new_empty(x_BSHD.shape)
    _launch((x_BSHD,), (cos, sin), [y.flatten(0, 1)], convention, backward=backward, config=config)
    return y


def check_convention(convention: str) -> None:
    """Raise ConfigError unless the pairing of columns is one of `CONVENTIONS`."""
    if convention not in CONVENTIONS:
        raise ConfigError(f"convention must be one of {', '.join(CONVENTIONS)}, got {convention!r}")


def check_operand(name: str, x: Tensor, dims: int) -> None:
    """Raise ConfigError unless x has that many dimensions, a float dtype and a dense last dimension."""
    if not isinstance(x, Tensor) or x.ndim != dims:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ConfigError(f"{name} must be a tensor of {dims} dimensions, got {got}")
    if x.dtype not in _FLOATS:
        raise ConfigError(f"{name} has dtype {x.dtype}; pass one of {', '.join(map(str, _FLOATS))}")
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ConfigError(f"{name} has stride {x.stride(-1)} along its last dimension; call .contiguous() first")


def check_tables(cos: Tensor, sin: Tensor, like: Tensor, width: int) -> None:
    """Raise ConfigError unless cos and sin are tables for the positions of `like` [B, S, ...] and that head width."""
    b, s = like.shape[:2]
    for name, table in (("cos", cos), ("sin", sin)):
        check_operand(name, table, 3 if isinstance(table, Tensor) and table.ndim == 3 else 2)
        if table.device != like.device:
            raise ConfigError(f"{name} is on {table.device}, the other tensors on {like.device}; move one of them")
        if table.shape[-2] != s or (table.ndim == 3 and table.shape[0] not in (1, b)):
            raise ConfigError(
                f"{name} must have shape [{s}, R], [1, {s}, R] or [{b}, {s}, R], got {tuple(table.shape)}"
            )
        r = table.shape[-1]
        if r != cos.shape[-1] or r % 2 or not 2 <= r <= width:
            raise ConfigError(f"{name} has {r} columns; cos and sin need the same even number, 2 to {width}")


def _launch(
    read: tuple[Tensor, ...],
    tables: tuple[Tensor, Tensor],
    write: Any,
    convention: str,
    *,
    backward: bool = False,
    factor: Tensor | None = None,
    rows: tuple[tuple[Tensor, ...], Tensor | None, RowOptions] | None = None,
    config: RopeConfig | None = None,
) -> None:
    """Run the kernel on one operand or three [B, S, H, D]; results are [T, H, D] with one head stride for all."""
    b, s, _, d = read[0].shape
    heads = [x.shape[2] for x in read]
    columns = sum(x.shape[2] for x in read) * d
    if columns > MAX_WIDTH:
        raise UnsupportedError(f"rows of {columns} columns do not fit registers; at most {MAX_WIDTH}")
    codes, scale, options = rows if rows is not None else (None, None, RowOptions())
    like = write if write is not None else codes
    assert like is not None
    config = config or default_config(columns)
    r = tables[0].shape[-1]
    if b * s == 0:
        return
    with on_device(read[0]):
        launch(_rope_kernel, (cdiv(b * s, config.rows),))(
            *_three(read),
            *tables,
            factor,
            *_three(write),
            *_three(codes),
            scale,
            b * s,
            s,
            *(stride for x in _three(read) for stride in (x.stride()[:3] if x is not None else (0, 0, 0))),
            *(stride for table in tables for stride in table_strides(table)),
            *(x.stride(0) if x is not None else 0 for x in _three(like)),
            like[0].stride(1),
            **dict(zip(("HQ", "HK", "HV"), heads + [1] * (3 - len(heads)), strict=True)),
            D=d,
            R=r,
            ROWS=config.rows,
            **blocks(heads, d, r, config, interleaved=convention == "interleaved"),
            INTERLEAVED=convention == "interleaved",
            BACKWARD=backward,
            FP8_MAX=options.fp8_max,
            ASM=runs_ptx(read[0], _rope_kernel),
            num_warps=config.num_warps,
        )


def blocks(
    heads: Sequence[int], width: int, rotated: int, config: RopeConfig, *, interleaved: bool = False
) -> dict[str, int]:
    """Sizes of the kernel's tiles, powers of two, for the heads of one operand or of three (`head_tiles.py`)."""
    power = next_power_of_2
    pairs, threads = power(rotated // 2), 32 * config.num_warps
    # Columns in a row of one thread: 16 bytes of bf16, or 8 where that would leave threads without a head of k or v.
    fewest, columns = max(map(power, heads[1:] or heads)), config.rows * pairs * (2 if interleaved else 1)
    run = 8 if threads * 8 // columns <= fewest else 4
    group = min(max(1, threads * run // columns), power(heads[0]))
    tiles = [max(group, power(h)) for h in heads] + [group] * (3 - len(heads))
    return {
        **dict(zip(("BLOCK_HQ", "BLOCK_HK", "BLOCK_HV"), tiles, strict=True)),
        "BLOCK_D": power(width),
        "BLOCK_PAIRS": pairs,
        "BLOCK_REST": power(max(1, width - rotated)),
        "GROUP": group,
        "RUN": run,
    }


def _three(operands: Any) -> list[Tensor | None]:
    given = list(operands or ())
    return given + [None] * (3 - len(given))


def table_strides(table: Tensor) -> tuple[int, int]:
    """Distances from one sequence and from one position to the next; 0 where all sequences share a table."""
    is_shared = table.ndim == 2 or table.shape[0] == 1
    return 0 if is_shared else table.stride(0), table.stride(-2)
