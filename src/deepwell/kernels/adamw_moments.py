"""FP8 moments inside the optimizer's kernels: decoding, exact roots, and E4M3 codes with a scale for each block.

    m ~ code * scale                   sqrt(v) ~ code * scale            scale = amax / 448 of 128 elements

Two forms that agree bit for bit with `adamw._encode_ref`: plain operations, which the interpreter runs too, and PTX,
for a GPU. An element's share of instructions decides whether the update waits for memory, so the second form uses that
  * 2^-120 of a magnitude has E4M3's code at the top of its fp32 bits, subnormal codes included: rounding is one integer
    addition for all of them, and the second product rounds as the addition of 2^-6 in the reference does (multiples of
    2^-29, ties to even);
  * no code can pass 126: |x| * 448 / amax is at most two units above 448, and what is added is 8 short of a carry;
  * the correctly rounded root is a Newton step on the approximate one wherever nothing leaves fp32's normal range,
    which a power of four for each block makes sure of; the power leaves with the block's factors;
  * roots keep their order, so that of the largest v is the largest root.
Cost (SASS of sm_90): about 6 instructions to decode and square, 9 a root, 12 to encode both.
"""

# Shapes: tiles are (rows, pieces, columns), the 128 elements of a block in the pieces of its row; what a block has once
# is (rows, 1, 1).

from deepwell.kernels._triton import tl, triton

# What is stored of a block: amax / 448, by way of the multiplier.
_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_INF_BITS = tl.constexpr(0x7F800000)

# Newton's step for the root; 0, inf and NaN would come out as NaN and stay as they are.
_ROOT = tl.constexpr(
    """{ .reg .f32 y, s, h, e; .reg .pred p;
    rsqrt.approx.ftz.f32 y, $1;
    mul.rn.f32 s, $1, y;
    mul.rn.f32 h, y, 0f3F000000;
    neg.f32 e, s;
    fma.rn.f32 e, e, s, $1;
    fma.rn.f32 s, e, h, s;
    setp.nan.f32 p, s, s;
    selp.f32 $0, $1, s, p; }"""
)
# Four codes: bits of |x| * encode * 2^-120 moved to the top, what rounds added, the sign in its place; a block that is
# not finite keeps nothing.
_ENCODE = tl.constexpr(
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
    and.b32 $0, a, $13; }"""
)
# The same of roots: no sign, and a root above zero has a code above zero.
_ENCODE_ROOT = tl.constexpr(
    """{ .reg .b32 a, b, c, d, e;
    shl.b32 a, $1, 4;
    shl.b32 b, $2, 4;
    shl.b32 c, $3, 4;
    shl.b32 d, $4, 4;
    add.u32 a, a, $9;
    add.u32 b, b, $10;
    add.u32 c, c, $11;
    add.u32 d, d, $12;
    min.u32 e, $5, 0x01000000;
    max.u32 a, a, e;
    min.u32 e, $6, 0x01000000;
    max.u32 b, b, e;
    min.u32 e, $7, 0x01000000;
    max.u32 c, c, e;
    min.u32 e, $8, 0x01000000;
    max.u32 d, d, e;
    prmt.b32 a, a, b, 0x0073;
    prmt.b32 c, c, d, 0x0073;
    prmt.b32 a, a, c, 0x5410;
    and.b32 $0, a, $13; }"""
)


@triton.jit
def decode_e4m3(code, scale, ASM: tl.constexpr):
    """fp32 of uint8 E4M3 codes times their scale."""
    if ASM:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    # The bits moved to fp32's place are 2^-120 of the value, exactly.
    bits = code.to(tl.int32)
    magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(bits >= 128, -magnitude, magnitude) * scale


@triton.jit
def _block_max(bits):
    """The largest of a block's bits: as integers NaN is above inf and inf above any number, so it cannot be lost."""
    return tl.max(tl.max(bits, axis=1, keep_dims=True), axis=2, keep_dims=True)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitude_max(x):
    """The largest magnitude of each row's block, as bits; NaN is not lost."""
    largest = tl.reduce(tl.reduce(tl.abs(x), 1, _larger, keep_dims=True), 2, _larger, keep_dims=True)
    return largest.to(tl.uint32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def root_exact(v, ASM: tl.constexpr):
    """Correctly rounded roots, times a power of two for each row, and what takes the power away.

    Also the largest root of each row, as bits without the power.
    """
    bits = v.to(tl.uint32, bitcast=True)
    amax = _block_max(bits)
    if not ASM:
        root = tl.sqrt_rn(v)
        largest = tl.sqrt_rn(amax.to(tl.float32, bitcast=True))
        return root, tl.full(amax.shape, 1.0, tl.float32), largest.to(tl.uint32, bitcast=True)
    # An even power that brings the largest v to 2^100: what is 2^-200 of it still has all its bits there.
    power = tl.minimum(tl.maximum(227 - (amax >> 23).to(tl.int32), 0), 120) & -2
    lift = ((127 + power) << 23).to(tl.float32, bitcast=True)
    unlift = ((127 - (power >> 1)) << 23).to(tl.float32, bitcast=True)
    root = tl.inline_asm_elementwise(_ROOT, "=f,f", [v * lift], dtype=tl.float32, is_pure=True, pack=1)
    largest = tl.inline_asm_elementwise(
        _ROOT, "=f,f", [amax.to(tl.float32, bitcast=True) * lift], dtype=tl.float32, is_pure=True, pack=1
    )
    return root, unlift, (largest * unlift).to(tl.uint32, bitcast=True)


@triton.jit
def multiplier_of(amax_bits):
    """What rows are multiplied with before they are encoded, 448 / amax; NaN where a row is not finite."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    encode = tl.minimum(tl.div_rn(tl.full(amax.shape, 448.0, tl.float32), amax), _FLT_MAX)
    encode = tl.where(amax_bits == 0, 1.0, encode)
    return tl.where(amax_bits < _INF_BITS, encode, float("nan"))


@triton.jit
def store_scale(scale_ptr, block, is_live_block, encode, THREADS: tl.constexpr):
    """Store the inverse of each block's multiplier, by one of the THREADS threads that hold its row.

    As many columns as threads, and no word of neighbours in memory: else the compiler would find maximum and multiplier
    twice, once for the layout in which it stores.
    """
    scale = tl.div_rn(tl.full(encode.shape, 1.0, tl.float32), encode)
    c = tl.arange(0, THREADS)[None, None, :]
    place = tl.max_contiguous(block + c, [1, 1, 1])
    tl.store(scale_ptr + place, tl.broadcast_to(scale, place.shape), mask=is_live_block & (c == 0))


@triton.jit
def encode_e4m3(x, encode, noise, IS_ROOT: tl.constexpr, HAS_NOISE: tl.constexpr, ASM: tl.constexpr):
    """uint8 E4M3 codes of a tile whose rows have these multipliers; `noise` is (16 bits << 8) | 0x80.

    See `adamw._encode_ref`.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.abs(x) * encode
    # A block with inf or NaN says so by its scale; its codes are zero.
    keep = tl.where(encode < float("inf"), -1, 0)
    if ASM:
        top = (magnitude * 7.52316384526264e-37).to(tl.int32, bitcast=True)
        added = noise if HAS_NOISE else tl.full(x.shape, 0x800000, tl.int32)
        return tl.inline_asm_elementwise(
            _ENCODE_ROOT if IS_ROOT else _ENCODE,
            "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [top, bits, added, tl.broadcast_to(keep, x.shape)],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    magnitude = tl.minimum(magnitude, 448.0)
    is_small = magnitude < 0.015625
    code = tl.where(is_small, magnitude + 0.015625, magnitude).to(tl.int32, bitcast=True)
    code = code + ((noise >> 4) if HAS_NOISE else 0x80000)
    code = (code >> 20) - tl.where(is_small, 968, 960)
    code = tl.minimum(tl.maximum(code, 0), 126)
    if IS_ROOT:
        code = tl.where(x > 0, tl.maximum(code, 1), code)
    return ((code | ((bits >> 24) & 0x80)) & keep).to(tl.uint8)
