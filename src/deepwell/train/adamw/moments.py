"""FP8 moments inside the optimizer: blending with the gradient, exact roots, E4M3 codes with a scale for each block.

    m ~ code * scale                   sqrt(v) ~ code * scale            scale = amax / 448 of 128 elements
    m = fma(code, scale * b1, g * w1)  v = fma(code^2, scale^2 * b2, fma(g^2, w2, 2^-100))

b1 = 1 - w1, and the factor of the gradient is part of w1 and (squared) of w2: what a block or a tensor has once is
multiplied once. An element's share of instructions decides whether the update waits for memory, hence
  * 2^-120 of a magnitude has E4M3's code at the top of its fp32 bits, subnormal codes included: one product with
    2^-120 / scale and one integer addition round an element, and what fp32's smallest number cuts was below 2^-20 of a
    code's step;
  * no code can pass 126: |x| * (1 / scale) is at most five units above 448, and what is added is 8 short of a carry;
  * the correctly rounded root is a Newton step on the approximate one, without any case: no v is below 2^-100, where
    the step's remainder would leave fp32's range;
  * roots keep their order, so that of the largest v is the largest root.
What it costs in range: a root is at least 2^-50 (1e-15: an eps of 1e-8 hides it), a v beyond fp32 is NaN, and so is a
block with a magnitude above 2^30.

Two forms that agree bit for bit with the reference: plain operations, which the interpreter runs too, and PTX.
Cost (SASS of sm_90): about 10 instructions to decode and blend both, 5 a root, 9 to encode both. A block's scales take
about 40 of each of its threads.
"""

# Shapes: tiles are (rows, pieces, columns), the 128 elements of a block in the pieces of its row; what a block has once
# is (rows,), and (rows, 1, 1) where it was loaded.

import torch
from torch import Tensor

from deepwell.kernels.device.triton_support import constant, tl, triton

BLOCK = 128
FP8 = torch.float8_e4m3fn
_INV_MAX = 1 / 448
_SMALLEST_V = 2.0**-100
_SMALLEST_SCALE = 2.0**-126
_LARGEST = 2.0**30
_CODE_POWER = 2.0**-120

# ---- reference ----


def fma_ref(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of fp32, rounded once."""
    product, other = a.double() * b.double(), c.double()
    total = product + other
    back = total - product
    error = (product - (total - back)) + (other - back)
    # The product is exact, the sum is not: rounded to odd, it cannot lie halfway between two fp32 numbers by accident.
    # (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008. An error of NaN is no error.)
    bits = total.view(torch.int64)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error.abs() > 0) & (bits & 1 == 0), bits + step, bits)
    return odd.view(torch.float64).float()


def blend_ref(
    codes: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    grad: Tensor,
    weights: tuple[float, float, float, float],
) -> tuple[Tensor, Tensor]:
    """First moment and root of the second, flat, from their codes and the gradient; weights (w1, b2, w2, factor)."""
    weight1, beta2, weight2, factor = (torch.tensor(w, dtype=torch.float32, device=grad.device) for w in weights)
    m, root = (code.float() for code in codes)
    m_scale, v_scale = (scale.repeat_interleave(BLOCK)[: m.numel()] for scale in scales)
    g = grad.float()
    m = fma_ref(m, m_scale * (1 - weight1), g * (factor * weight1))
    new = fma_ref(g * g, (factor * factor) * weight2, torch.full_like(g, _SMALLEST_V))
    v = fma_ref(root * root, (v_scale * v_scale) * beta2, new)
    # torch's fp32 root on a CPU is not correctly rounded (0.6 % of results are off by a bit); through fp64 it is.
    return m, torch.where(v.isinf(), float("nan"), v.double().sqrt().float())


def encode_ref(x: Tensor, codes: Tensor, scales: Tensor, noise: Tensor | None, *, is_root: bool) -> None:
    """E4M3 codes and block scales of x. Without noise to nearest, halves up; with it at random."""
    padded = torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    amax = padded.abs().amax(1, keepdim=True)
    is_finite = amax <= _LARGEST
    scale = (amax * _INV_MAX).clamp(min=_SMALLEST_SCALE)
    scales.copy_(torch.where(is_finite, scale, float("nan")).flatten())
    # A subnormal multiplier is rounded down, else it could carry a magnitude of 448 into the next code.
    inverse = (torch.ones_like(scale) / scale).double() * _CODE_POWER
    encode = ((inverse * 2.0**149).floor() * 2.0**-149).float().where(inverse < 2.0**-126, inverse.float())
    bits = (padded.abs() * encode).view(torch.int32).flatten()[: x.numel()].long()
    code = (bits * 16 + (0x800000 if noise is None else (noise << 8) + 0x80)) >> 24
    if is_root:
        code = code.clamp(min=1)
    code = code + (torch.signbit(x).int() << 7)
    # A block with inf or NaN says so by its scale; its codes are zero.
    is_finite = is_finite.expand(-1, BLOCK).flatten()[: x.numel()]
    codes.copy_(torch.where(is_finite, code, 0).to(torch.uint8).view(FP8))


# ---- kernel functions ----

# Newton's step for the root of what is neither zero nor subnormal; of inf it is NaN.
_ROOT = constant(
    """{ .reg .f32 y, s, h, e;
    rsqrt.approx.ftz.f32 y, $1;
    mul.rn.f32 s, $1, y;
    mul.rn.f32 h, y, 0f3F000000;
    neg.f32 e, s;
    fma.rn.f32 e, e, s, $1;
    fma.rn.f32 $0, e, h, s; }"""
)
# Newton's step for the inverse, correctly rounded within 2^-126 .. 2^126: the compiler's own sequence without its check
# for other exponents. Then 2^-120 of it, cut where it is subnormal.
_INVERSE = constant(
    """{ .reg .f32 y, e;
    rcp.approx.ftz.f32 y, $1;
    neg.f32 e, $1;
    fma.rn.f32 e, e, y, 0f3F800000;
    fma.rn.f32 y, y, e, y;
    mul.rz.f32 $0, y, 0f03800000; }"""
)
# Four codes: bits of |x| * 2^-120 / scale moved to the top, what rounds added, the sign in its place; a block that is
# not finite drops all.
_ENCODE = constant(
    """{ .reg .b32 a, b, c, d;
    shl.b32 a, $1, 4;
    shl.b32 b, $2, 4;
    shl.b32 c, $3, 4;
    shl.b32 d, $4, 4;
    add.u32 a, a, $9;
    add.u32 b, b, $10;
    add.u32 c, c, $11;
    add.u32 d, d, $12;
    lop3.b32 a, a, $5, 0x80000000, 0xD8;
    lop3.b32 b, b, $6, 0x80000000, 0xD8;
    lop3.b32 c, c, $7, 0x80000000, 0xD8;
    lop3.b32 d, d, $8, 0x80000000, 0xD8;
    prmt.b32 a, a, b, 0x0073;
    prmt.b32 c, c, d, 0x0073;
    prmt.b32 a, a, c, 0x5410;
    lop3.b32 $0, a, $13, 0, 0x30; }"""
)
# The same of roots: no sign, and no code is zero (127 more than any other passes 127).
_ENCODE_ROOT = constant(
    """{ .reg .b32 a, b, c, d;
    shl.b32 a, $1, 4;
    shl.b32 b, $2, 4;
    shl.b32 c, $3, 4;
    shl.b32 d, $4, 4;
    add.u32 a, a, $5;
    add.u32 b, b, $6;
    add.u32 c, c, $7;
    add.u32 d, d, $8;
    prmt.b32 a, a, b, 0x0073;
    prmt.b32 c, c, d, 0x0073;
    prmt.b32 a, a, c, 0x5410;
    add.u32 b, a, 0x7F7F7F7F;
    lop3.b32 b, b, 0x80808080, 0, 0x0C;
    shr.u32 b, b, 7;
    add.u32 a, a, b;
    lop3.b32 $0, a, $9, 0, 0x30; }"""
)


@triton.jit
def _value(code, ASM: tl.constexpr):
    """fp32 of uint8 E4M3 codes."""
    if ASM:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    # The bits moved to fp32's place are 2^-120 of the value, exactly.
    bits = code.to(tl.int32)
    magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(bits >= 128, -magnitude, magnitude)


@triton.jit
def _fma(a, b, c, ASM: tl.constexpr):
    """a * b + c rounded once; see `fma_ref`."""
    if ASM:
        return tl.fma(a, tl.broadcast_to(b, a.shape), c)
    product = a.to(tl.float64) * tl.broadcast_to(b, a.shape).to(tl.float64)
    other = c.to(tl.float64)
    total = product + other
    back = total - product
    error = (product - (total - back)) + (other - back)
    bits = total.to(tl.int64, bitcast=True)
    step = tl.where((error > 0) == (total > 0), 1, -1)
    bits = tl.where((tl.abs(error) > 0) & ((bits & 1) == 0), bits + step, bits)
    return bits.to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def blend_e4m3(m, v, m_scale, v_scale, g, weight1, beta2, weight2, factor, ASM: tl.constexpr):
    """The moments (the second as it is, not its root) of uint8 codes, their scales and the gradient."""
    m = _fma(_value(m, ASM), m_scale * (1.0 - weight1), g * (factor * weight1), ASM)
    root = _value(v, ASM)
    new = _fma(g * g, (factor * factor) * weight2, tl.full(g.shape, 7.888609052210118e-31, tl.float32), ASM)
    return m, _fma(root * root, (v_scale * v_scale) * beta2, new, ASM)


@triton.jit
def _block_max(bits):
    """The largest of a block's bits: as integers NaN is above inf and inf above any number, so it cannot be lost."""
    return tl.max(tl.max(bits, axis=1), axis=1)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitude_max(x):
    """The largest magnitude of each row's block; NaN is not lost."""
    return tl.reduce(tl.reduce(tl.abs(x), 1, _larger), 1, _larger)


@triton.jit
def root_of(v, ASM: tl.constexpr):
    """Correctly rounded roots."""
    if ASM:
        return tl.inline_asm_elementwise(_ROOT, "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)
    return tl.where(v < float("inf"), tl.sqrt_rn(v), float("nan"))


@triton.jit
def root_exact(v, ASM: tl.constexpr):
    """Correctly rounded roots, and the largest of each row."""
    amax = _block_max(v.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)
    return root_of(v, ASM), root_of(amax, ASM)


@triton.jit
def scale_of(amax, ASM: tl.constexpr):
    """The scale of each row (NaN where it is not finite), what its magnitudes are multiplied with, 2^-120 / scale, and
    a mask of what its codes drop, of no bits or all."""
    scale = tl.maximum(amax * 0.002232142857142857, 1.1754943508222875e-38)
    if ASM:
        encode = tl.inline_asm_elementwise(_INVERSE, "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1)
    else:
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale).to(tl.float64) * 7.52316384526264e-37
        cut = tl.floor(inverse * 7.1362384635298e44).to(tl.int32).to(tl.float32, bitcast=True)
        encode = tl.where(inverse < 1.1754943508222875e-38, cut, inverse.to(tl.float32))
    is_finite = amax <= 1073741824.0
    return tl.where(is_finite, scale, float("nan")), encode, tl.where(is_finite, 0, -1)


@triton.jit
def encode_e4m3(x, encode, drop, noise, IS_ROOT: tl.constexpr, HAS_NOISE: tl.constexpr, ASM: tl.constexpr):
    """uint8 E4M3 codes of a tile with the multipliers and masks of its blocks; `noise` is (16 bits << 8) | 0x80.

    See `encode_ref`.
    """
    bits = x.to(tl.int32, bitcast=True)
    top = (tl.abs(x) * encode).to(tl.int32, bitcast=True)
    # A block with inf or NaN says so by its scale; its codes are zero.
    if ASM:
        added = noise if HAS_NOISE else tl.full(x.shape, 0x800000, tl.int32)
        drop = tl.broadcast_to(drop, x.shape)
        if IS_ROOT:
            code = tl.inline_asm_elementwise(
                _ENCODE_ROOT, "=r,r,r,r,r,r,r,r,r,r,r,r,r", [top, added, drop], dtype=tl.uint8, is_pure=True, pack=4
            )
        else:
            code = tl.inline_asm_elementwise(
                _ENCODE,
                "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                [top, bits, added, drop],
                dtype=tl.uint8,
                is_pure=True,
                pack=4,
            )
        return code
    # 28 bits of what is finite, so that nothing is lost by the shift.
    code = (((top << 4) + (noise if HAS_NOISE else 0x800000)) >> 24) & 0x7F
    if IS_ROOT:
        code = tl.maximum(code, 1)
    return ((code | ((bits >> 24) & 0x80)) & ~drop).to(tl.uint8)
