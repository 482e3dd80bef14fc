"""Random bits that depend on nothing but a key and a position: Philox4x32-7, in torch and in Triton.

    words(c0..c3; key) = four 32-bit words       (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)

Element e of tensor t at step s takes 16 bits of the call at counter (e // 8, stream, t, s) under the key `seed`: eight
elements share one call, element e the half e % 2 (low first) of word (e % 8) // 2. So a result depends neither on the
launch shape nor on what ran before, and a resumed run draws the same bits. A second number of an element takes its
neighbour's bits (element e ^ 1), the other half of the same word, and a third those of element e ^ 2, in the next word:
the three are independent of each other, and one call serves them all.

Seven rounds are the fewest that the paper found to pass TestU01's BigCrush; ten, its choice for general use, made the
optimizer's update wait for integer arithmetic instead of memory. One H200, 2026-11-15, the update inside a training
step of 1.92e9 parameters (8b-4l): 9.5 ms with ten rounds and three draws, 8.4 with seven and two.

Numerics: both forms are bit-equal. Cost: about 45 integer instructions a call, 6 for an element.
"""

import torch
from torch import Tensor

from deepwell.kernels.device.triton_support import constant, tl, triton

# Elements that share one call: 128 bits in halves of 16.
PER_CALL = 8
ROUNDS = 7
_NUM_ROUNDS = constant(ROUNDS)
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
# A stream is a purpose (which of an element's numbers is rounded); it stands above any real call index.
_STREAM_SHIFT = 24

# ---- reference ----


def philox_words_ref(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, ...]:
    """The four words of each counter, as int64 tensors with values below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(ROUNDS):
        # int64 products wrap, and a masked shift reads their upper word as if they were unsigned.
        high, low = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (((low >> 32) & _MASK) ^ c1 ^ k0, low & _MASK, ((high >> 32) & _MASK) ^ c3 ^ k1, high & _MASK)
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_bits_ref(count: int, *, seed: int, tensor: int, step: int, stream: int, device: torch.device) -> Tensor:
    """The 16 random bits of elements 0 .. count of a tensor, as int32."""
    call = torch.arange(-(-count // PER_CALL), dtype=torch.int64, device=device)
    upper = (call >> 32) + (stream << _STREAM_SHIFT)
    words = philox_words_ref((call & _MASK, upper, torch.full_like(call, tensor), torch.full_like(call, step)), seed)
    stacked = torch.stack(words, dim=-1)
    halves = torch.stack((stacked & 0xFFFF, stacked >> 16), dim=-1)
    return halves.flatten()[:count].to(torch.int32)


def neighbour_bits_ref(
    count: int, *, seed: int, tensor: int, step: int, stream: int, device: torch.device, distance: int = 1
) -> Tensor:
    """The bits of each element's neighbour e ^ distance (1 or 2), as int32."""
    whole = -(-count // 4) * 4
    bits = random_bits_ref(whole, seed=seed, tensor=tensor, step=step, stream=stream, device=device)
    return bits.view(-1, 4)[:, [i ^ distance for i in range(4)]].flatten()[:count]


# ---- kernel functions ----


@triton.jit
def _words(call, seed, tensor, step, STREAM: tl.constexpr):
    c0 = call.to(tl.uint32)
    c1 = (call >> 32).to(tl.uint32) + STREAM * 16777216
    zero = c0 * 0
    c2 = zero + tensor.to(tl.uint32)
    c3 = zero + step.to(tl.uint32)
    k0 = zero + seed.to(tl.uint32)
    k1 = zero + (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(_NUM_ROUNDS):
        high = tl.umulhi(c0, zero + 0xD2511F53)
        low = c0 * (zero + 0xD2511F53)
        c0 = tl.umulhi(c2, zero + 0xCD9E8D57) ^ c1 ^ k0
        c1 = c2 * (zero + 0xCD9E8D57)
        c2 = high ^ c3 ^ k1
        c3 = low
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


# A half of a word, moved up by eight bits, with 0x80 below it.
_LOW_HALF = constant("prmt.b32 $0, $1, 0x80, 0x5104;")
_HIGH_HALF = constant("prmt.b32 $0, $1, 0x80, 0x5324;")


@triton.jit
def _in_order(r0, r1, r2, r3, IS_RAISED: tl.constexpr, ASM: tl.constexpr):
    """Words of calls (A, B, C) as the elements (A, B, 8 C) take them, and with the halves of each word swapped."""
    # Each join adds the fastest dimension: (.., word's upper bit, word's lower bit, half).
    words = tl.join(tl.join(r0, r2), tl.join(r1, r3))
    if IS_RAISED and ASM:
        low = tl.inline_asm_elementwise(_LOW_HALF, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
        high = tl.inline_asm_elementwise(_HIGH_HALF, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low, high = (words & 0xFFFF).to(tl.int32), (words >> 16).to(tl.int32)
        if IS_RAISED:
            low, high = (low << 8) | 0x80, (high << 8) | 0x80
    A: tl.constexpr = r0.shape[0]
    B: tl.constexpr = r0.shape[1]
    C: tl.constexpr = r0.shape[2] * 8
    return tl.reshape(tl.join(low, high), (A, B, C)), tl.reshape(tl.join(high, low), (A, B, C))


@triton.jit
def random_bits(call, seed, tensor, step, STREAM: tl.constexpr, IS_RAISED: tl.constexpr, ASM: tl.constexpr):
    """The bits of the eight elements of each call (A, B, C), those of e ^ 1 and those of e ^ 2: (A, B, 8 C), int32.

    IS_RAISED gives (bits << 8) | 0x80 of the neighbours: what rounds an E4M3 code, halves of the last bit included.
    ASM is for a GPU: the same in fewer instructions.
    """
    r0, r1, r2, r3 = _words(call, seed, tensor, step, STREAM)
    own, _ = _in_order(r0, r1, r2, r3, False, ASM)
    _, first = _in_order(r0, r1, r2, r3, IS_RAISED, ASM)
    second, _ = _in_order(r1, r0, r3, r2, IS_RAISED, ASM)
    return own, first, second


@triton.jit
def random_words(call, seed, tensor, step, STREAM: tl.constexpr, IS_RAISED: tl.constexpr):
    """As `random_bits` for a GPU, but what is not raised comes as whole words, both elements of a word alike.

    An even element's own bits are the lower half of its word, those of e ^ 1 the upper one of the same, and those of
    e ^ 2 the lower one of theirs: what adds them can take a half out by itself.
    """
    r0, r1, r2, r3 = _words(call, seed, tensor, step, STREAM)
    own = _whole(r0, r1, r2, r3)
    if IS_RAISED:
        _, first = _in_order(r0, r1, r2, r3, True, True)
        second, _ = _in_order(r1, r0, r3, r2, True, True)
    else:
        first, second = own, _whole(r1, r0, r3, r2)
    return own, first, second


@triton.jit
def _whole(r0, r1, r2, r3):
    words = tl.join(tl.join(r0, r2), tl.join(r1, r3)).to(tl.int32, bitcast=True)
    return tl.reshape(tl.join(words, words), (r0.shape[0], r0.shape[1], r0.shape[2] * 8))
