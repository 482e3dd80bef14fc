"""Counter-based random bits: the published vectors, and the kernel's bits against the reference's."""

import pytest
import torch

from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.device import philox
from deepwell.kernels.device.triton_support import tl, triton

# Known answers of Philox4x32-7 from the Random123 library's kat_vectors: counter, key, words.
ONES = 0xFFFFFFFF
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize("counter, key, words", VECTORS)
def test_gives_the_published_words(counter, key, words):
    got = philox.philox_words_ref(tuple(torch.tensor([c]) for c in counter), key[0] | key[1] << 32)
    assert tuple(int(word) for word in got) == words


@triton.jit
def _draw_kernel(tile_ptr, seed_ptr, first, IS_RAISED: tl.constexpr, ASM: tl.constexpr, ROWS: tl.constexpr):
    seed, tensor, step = tl.load(seed_ptr), tl.load(seed_ptr + 1), tl.load(seed_ptr + 2)
    r = tl.arange(0, ROWS)[None, :, None]
    e = r * 128 + tl.arange(0, 128)[None, None, :]
    start = first.to(tl.int64)
    call = start // 8 + r * 16 + tl.arange(0, 16)[None, None, :]
    own, one, two = philox.random_bits(call, seed, tensor, step, 2, IS_RAISED, ASM)
    tl.store(tile_ptr + e, own)
    tl.store(tile_ptr + ROWS * 128 + e, one)
    tl.store(tile_ptr + 2 * ROWS * 128 + e, two)


@pytest.mark.parametrize("is_raised", [False, True])
def test_draws_the_bits_of_the_reference(is_raised, device):
    # A start beyond the first elements, and a seed that needs its upper word.
    first, seed = 1024, 0x1234567890ABCDEF
    kernel = _draw_kernel
    if device == "cpu":
        kernel = triton.runtime.interpreter.InterpretedFunction(_draw_kernel.fn)
    tile = torch.zeros((3, 512), dtype=torch.int32, device=device)
    key = torch.tensor([seed, 7, 9], device=device)
    kernel[(1,)](tile, key, first, IS_RAISED=is_raised, ASM=device != "cpu", ROWS=4)
    keys = {"seed": seed, "tensor": 7, "step": 9, "stream": 2, "device": torch.device(device)}
    ref = philox.random_bits_ref(first + 512, **keys)
    wanted = [ref, ref.view(-1, 2)[:, [1, 0]].flatten(), ref.view(-1, 4)[:, [2, 3, 0, 1]].flatten()]
    for distance, bits in enumerate(wanted):
        if distance:
            # A count that ends inside a group of neighbours.
            ragged = philox.neighbour_bits_ref(first + 509, **keys, distance=distance)
            assert_bitwise_equal(ragged, bits[: first + 509], f"a ragged count, neighbour {distance}")
        drawn = (bits << 8) | 0x80 if distance and is_raised else bits
        assert_bitwise_equal(tile[distance], drawn[first:], f"neighbour {distance}")


def test_bits_are_uniform_and_differ_by_every_part_of_the_key():
    base = {"seed": 1, "tensor": 2, "step": 3, "stream": 0}
    cpu = torch.device("cpu")
    bits = philox.random_bits_ref(1 << 16, **base, device=cpu)
    # 2^16 draws of 16 bits: the mean's standard deviation is 74; each bit is set half the time within 5 of 128.
    assert abs(float(bits.double().mean()) - 32767.5) < 5 * 74
    for bit in range(16):
        assert abs(int(((bits >> bit) & 1).sum()) - (1 << 15)) < 5 * 128
    for key, value in base.items():
        other = philox.random_bits_ref(1 << 16, **{**base, key: value + 1}, device=cpu)
        assert int((other == bits).sum()) < 20, key
