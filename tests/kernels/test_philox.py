"""Counter-based random bits: the published vectors, and the kernel's bits against the reference's."""

import pytest
import torch

from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels import philox
from deepwell.kernels._triton import tl, triton

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
def _draw_kernel(tile_ptr, each_ptr, next_ptr, next_each_ptr, seed_ptr, first, ROWS: tl.constexpr):
    seed, tensor, step = tl.load(seed_ptr), tl.load(seed_ptr + 1), tl.load(seed_ptr + 2)
    e = tl.arange(0, ROWS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    start = first.to(tl.int64)
    bits, neighbours = philox.random_bits(start, seed, tensor, step, 2, ROWS, 128, 128)
    tl.store(tile_ptr + e, bits)
    tl.store(next_ptr + e, neighbours)
    bits, neighbours = philox.random_bits_each(start + e, seed, tensor, step, 2)
    tl.store(each_ptr + e, bits)
    tl.store(next_each_ptr + e, neighbours)


def test_draws_a_tile_and_single_elements_alike(device):
    # A start beyond the first elements, and a seed that needs its upper word.
    first, seed = 1024, 0x1234567890ABCDEF
    kernel = _draw_kernel
    if device == "cpu":
        kernel = triton.runtime.interpreter.InterpretedFunction(_draw_kernel.fn)
    tile = torch.zeros((4, 128), dtype=torch.int32, device=device)
    each, neighbours, neighbours_each = (torch.zeros_like(tile) for _ in range(3))
    key = torch.tensor([seed, 7, 9], device=device)
    kernel[(1,)](tile, each, neighbours, neighbours_each, key, first, ROWS=4)
    ref = philox.random_bits_ref(first + 512, seed=seed, tensor=7, step=9, stream=2, device=torch.device(device))
    assert_bitwise_equal(tile.flatten(), ref[first:], "tile")
    assert_bitwise_equal(each.flatten(), ref[first:], "each")
    swapped = ref.view(-1, 2)[:, [1, 0]].flatten()
    assert_bitwise_equal(neighbours.flatten(), swapped[first:], "neighbours")
    assert_bitwise_equal(neighbours_each.flatten(), swapped[first:], "neighbours, each")
    odd = philox.neighbour_bits_ref(first + 511, seed=seed, tensor=7, step=9, stream=2, device=torch.device(device))
    assert_bitwise_equal(odd, swapped[: first + 511], "an odd count")


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
