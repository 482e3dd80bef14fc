"""Stores of numbers that several threads hold alike: scales of blocks, one number a head."""

from deepwell.kernels.device.triton_support import constant, tl, triton

_STORE_WORD = constant("{ .reg .pred p; setp.ne.u32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }")
_STORE_BYTE = constant("{ .reg .pred p; setp.ne.u32 p, $3, 0; @p st.global.b8 [$1], $2; mov.b32 $0, 0; }")


@triton.jit
def store_alike(pointer, value, is_live, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Store fp32 as it is, or the low byte of int32, from wherever it is: threads that hold the same store the same.

    A plain store has a layout of its own; to get there the few numbers of a tile would go through shared memory, with
    two barriers each time.
    """
    if ASM:
        tl.inline_asm_elementwise(
            _STORE_WORD if DTYPE == tl.float32 else _STORE_BYTE,
            "=r,l,r,r",
            [pointer.to(tl.int64), value.to(tl.int32, bitcast=True), is_live.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointer, value.to(DTYPE), mask=is_live)
