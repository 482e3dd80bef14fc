"""Codes of several weights under one scale: bit for bit those of each weight with the amax of all."""

import itertools
import re

import pytest
import torch

import aot
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.quantize import weights as G
from deepwell.kernels.quantize.fp8 import quantize_both_ref

E4M3 = torch.float8_e4m3fn
# Rows of the weights and their columns: one; grouped queries; gate and up; more than fit; ragged tiles of both kernels.
GROUPS = [([64], 64), ([48, 16, 16], 96), ([80, 80], 40), ([16] * 5, 32), ([16, 32, 16, 48], 528), ([144], 1040)]


def weights_of(rows, columns, device, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, columns, generator=generator).to(device, dtype) * 3**i for i, n in enumerate(rows)]


def expected(weights):
    largest = torch.stack([w.float().abs().amax() for w in weights]).amax()
    codes, transposed, scale = quantize_both_ref(torch.cat(weights), largest, dtype=E4M3)
    return {False: codes, True: transposed}, scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "columns"), GROUPS, ids=str)
def test_a_group_has_the_codes_of_its_weights_together(everywhere, rows, columns, dtype):
    weights = weights_of(rows, columns, everywhere, dtype)
    partials = G.partial_maxima(weights)
    assert partials.shape == (G.num_partials(weights),)
    codes, scale = expected(weights)
    assert_bitwise_equal(partials.amax(), torch.cat(weights).float().abs().amax(), "amax")
    for transposed, per_row in itertools.product((False, True), repeat=2):
        q, found = G.quantize_group(weights, partials, transposed=transposed, scale_per_row=per_row)
        assert_bitwise_equal(
            q.view(torch.uint8), codes[transposed].view(torch.uint8), f"codes, transposed {transposed}"
        )
        assert_bitwise_equal(found, scale.expand(q.shape[0]) if per_row else scale, "scale")


def test_weights_that_are_stored_transposed_or_ragged_go_one_by_one(everywhere):
    # Conv1D's [K, N]; rows of wider ones, of one and of all; a number of rows that leaves no whole words of codes.
    wide = torch.randn(32, 64, device=everywhere)
    wide[0, 50], wide[31, 42] = 1000, 100  # beside the weights, and where only their last row ends
    for weights in (
        [torch.randn(40, 32, device=everywhere).T, torch.randn(40, 16, device=everywhere).T],
        [wide[:, 3:43], torch.randn(16, 40, device=everywhere)],
        [wide[:16, 3:43], wide[16:, 3:43]],
        [torch.randn(7, 40, device=everywhere), torch.randn(3, 40, device=everywhere)],
    ):
        codes, scale = expected(weights)
        partials = G.partial_maxima(weights)
        for transposed in (False, True):
            q, found = G.quantize_group(weights, partials, transposed=transposed, scale_per_row=False)
            assert_bitwise_equal(
                q.view(torch.uint8), codes[transposed].view(torch.uint8), f"codes, transposed {transposed}"
            )
            assert_bitwise_equal(found, scale, "scale")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_one_bad_number_shows_in_every_code(everywhere, bad):
    weights = weights_of([32, 16], 48, everywhere)
    weights[1][5, 7] = bad
    partials = G.partial_maxima(weights)
    for transposed in (False, True):
        q, scale = G.quantize_group(weights, partials, transposed=transposed, scale_per_row=True)
        assert bool(q.float().isnan().all()) and bool(scale.isnan().all())


# Weights of unequal sizes, the last tile of each cut off; more tiles than programs; fewer tiles than programs.
@pytest.mark.parametrize(
    ("rows", "columns", "tile"),
    [([48, 16, 16], 1040, 1024), ([16, 64], 520, 4096), ([16, 16, 16, 32], 136, 256), ([32, 16], 1024, 32768)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tiles_of_all_weights_are_dealt_to_the_programs_in_turn(device, rows, columns, tile, dtype):
    weights = weights_of(rows, columns, device, dtype)
    config = G.GroupConfig(rows=1, columns=tile, stages=4)
    tile = tile * 2 // dtype.itemsize
    tiles = [part.float().abs().amax() for w in weights for part in w.flatten().split(tile)]
    num = G.num_partials(weights)
    shares = [tiles[p::num] for p in range(num)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    zero = torch.zeros((), device=device)
    wanted = torch.stack([torch.stack([zero, *share]).amax() for share in shares])
    assert_bitwise_equal(G.partial_maxima(weights, config=config), wanted, "partial maxima")


# As bits of bf16: infinities, a NaN as arithmetic makes it, the least one of either sign. All are above every number.
# The last number of all, the first of its tile, one amid a tile of the first weight.
@pytest.mark.parametrize(
    ("bits", "place"),
    [
        *((bits, (2, 16 * 1040 - 1)) for bits in (0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFF81)),
        *((0xFF80, (2, 16384)), (0x7F81, (0, 3333))),
    ],
    ids=str,
)
def test_a_number_that_is_none_wins_wherever_it_is(device, bits, place):
    weights = weights_of([48, 16, 16], 1040, device)
    which, i = place
    weights[which].view(-1).view(torch.int16)[i] = torch.tensor(bits, dtype=torch.uint16).view(torch.int16).item()
    partials = G.partial_maxima(weights, config=G.GroupConfig(rows=1, columns=1024, stages=4))
    assert [hex(b) for b in partials.view(torch.int32).tolist() if b >= 0x7F800000] == [hex((bits & 0x7FFF) << 16)]
    q, scale = G.quantize_group(weights, partials, transposed=False, scale_per_row=False)
    assert bool(q.float().isnan().all()) and bool(scale.isnan())


@pytest.mark.parametrize("which", ["PARTIALS_CONFIGS", "ALONG_CONFIGS", "TRANSPOSED_CONFIGS"])
def test_every_config_makes_the_same_bits(device, which, monkeypatch):
    # Several tiles a program, the last of them past all weights, in programs that few weights fill.
    monkeypatch.setattr(G, "_ENOUGH_PROGRAMS", 2)
    weights = weights_of([144, 16, 48], 1040, device)
    partials = G.partial_maxima(weights)
    codes, _ = expected(weights)
    transposed = which == "TRANSPOSED_CONFIGS"
    for config in getattr(G, which):
        if which == "PARTIALS_CONFIGS":
            assert_bitwise_equal(G.partial_maxima(weights, config=config).amax(), partials.amax(), str(config))
        else:
            q, _ = G.quantize_group(weights, partials, transposed=transposed, scale_per_row=True, config=config)
            assert_bitwise_equal(q.view(torch.uint8), codes[transposed].view(torch.uint8), str(config))


# The scale is made of the maximum's exponent: where the mantissa passes 1.75, at both ends of fp32, below the normals.
@pytest.mark.parametrize(
    "largest", [1.75, 1.7578125, 448.0, 450.0, 3e38, 2.0**-126, 2.0**-119, 2.0**-118, 2.0**-133], ids=str
)
def test_the_scale_is_the_one_of_the_quantizer_for_any_maximum(everywhere, largest):
    weights = [torch.linspace(-1, 1, 16 * 64, device=everywhere).mul(largest).bfloat16().view(16, 64)]
    weights[0][3, 5] = largest
    codes, scale = expected(weights)
    for transposed in (False, True):
        q, found = G.quantize_group(weights, G.partial_maxima(weights), transposed=transposed, scale_per_row=False)
        assert_bitwise_equal(
            q.view(torch.uint8), codes[transposed].view(torch.uint8), f"codes, transposed {transposed}"
        )
        assert_bitwise_equal(found, scale, "scale")


def test_zeros_have_the_scale_one(everywhere):
    weights = [torch.zeros(16, 32, device=everywhere)]
    q, scale = G.quantize_group(weights, G.partial_maxima(weights), transposed=False, scale_per_row=False)
    assert not bool(q.view(torch.uint8).any()) and float(scale) == 1.0


def test_one_maximum_instead_of_partial_ones_is_as_good(everywhere):
    weights = weights_of([32, 16], 48, everywhere)
    one = torch.cat(weights).float().abs().amax().reshape(1)
    of_one, of_many = (
        G.quantize_group(weights, partials, transposed=True, scale_per_row=True)
        for partials in (one, G.partial_maxima(weights))
    )
    for mine, ref in zip(of_one, of_many, strict=True):
        assert_bitwise_equal(mine.view(torch.uint8), ref.view(torch.uint8))


def test_large_weights_have_several_tiles_a_program():
    assert [G.tiles_per_program(n) for n in (1, 1024, 2048, 4095, 4096, 100000)] == [1, 1, 2, 2, 4, 4]


@pytest.mark.gpu
def test_a_merged_linear_takes_two_launches_forward_and_one_backward():
    from deepwell.bench.ran import profile

    weights = weights_of([2048, 512, 512], 2048, "cuda")
    partials = G.partial_maxima(weights)
    for run, launches in (
        (lambda: G.quantize_group(weights, G.partial_maxima(weights), transposed=False, scale_per_row=True), 2),
        (lambda: G.quantize_group(weights, partials, transposed=True, scale_per_row=True), 1),
    ):
        run()
        assert sum(kernel.count for kernel in profile(run)) == launches


# ---- compiled for GPUs that are not here ----


def compiled(arch, num, config, *, transposed, tiles):
    arguments = {
        **dict.fromkeys(("w0_ptr", "w1_ptr", "w2_ptr", "w3_ptr"), torch.bfloat16),
        "q_ptr": torch.int32 if transposed else E4M3,
        **dict.fromkeys(("partials_ptr", "scale_ptr"), torch.float32),
        **dict.fromkeys(("N0", "N1", "N2", "N3", "K", "stride", "stride_q"), "i32"),
        **{
            "num_partials": "i32",
            "num_scales": "i32",
            "NUM": num,
            "TRANSPOSED": transposed,
            "PACKING": "asm",
            "ASM": True,
        },
        **{"FP8_MAX": 448.0, "PARTIALS": 256, "TILES": tiles, "BLOCK_N": config.rows, "BLOCK_K": config.columns},
    }
    return aot.compile_kernel(G._codes_kernel, arguments, arch=arch, num_warps=config.num_warps)


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_codes_are_read_and_written_in_wide_accesses(arch, num, transposed):
    for config in (G.TRANSPOSED_CONFIGS if transposed else G.ALONG_CONFIGS)[: None if arch == 90 else 1]:
        made = compiled(arch, num, config, transposed=transposed, tiles=config.tiles)
        numbers = config.rows * config.columns * config.tiles // (32 * config.num_warps)  # of a thread
        assert made.spill_bytes == 0
        # Whichever weight a tile is of, its address is known to be aligned.
        assert made.count(r"ld\.global\S*\.v4\.b32") == numbers // 8
        assert made.count(r"st\.global\S*\.v4\.b32") == numbers // 16
        assert made.count(r"[ls][dt]\.global\S*\.b(8|16)\b") == 0
        # Two at a time, and none saturates: nothing holds them to the range.
        assert made.count(r"mul\.rn\.bf16x2") == numbers // 2
        assert made.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") == numbers // 2
        assert made.count(r"(min|max)\S*\.f32") == 0
        assert made.shared_bytes <= 8192


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("transposed", [False, True])
def test_codes_wait_for_the_maximum_with_a_tile_under_way(arch, transposed):
    config = (G.TRANSPOSED_CONFIGS if transposed else G.ALONG_CONFIGS)[0]
    ptx = compiled(arch, 3, config, transposed=transposed, tiles=2).ptx
    before = ptx[: ptx.index("shfl.sync")]  # the maximum of the partial ones
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", before)) == config.rows * config.columns // 128 // 8
    # The second tile is on its way before the first is written.
    between = ptx[ptx.index("shfl.sync") : re.search(r"st\.global\S*\.v4", ptx).start()]
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", between)) == config.rows * config.columns // 128 // 8


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("num", [1, 3])
def test_maxima_keep_enough_bytes_under_way(arch, num):
    config = G.PARTIALS_CONFIGS[0]
    arguments = {
        **dict.fromkeys(("w0_ptr", "w1_ptr", "w2_ptr", "w3_ptr"), torch.bfloat16),
        "partials_ptr": torch.float32,
        **dict.fromkeys(("size0", "size1", "size2", "size3"), "i32"),
        **{"NUM": num, "ASM": True, "STAGES": config.stages, "BLOCK": config.columns},
    }
    made = aot.compile_kernel(G._partials_kernel, arguments, arch=arch, num_warps=config.num_warps)
    assert made.spill_bytes == 0
    # Two programs a multiprocessor, in registers and in shared memory.
    assert made.registers * 32 * config.num_warps * 2 <= 65536
    assert made.shared_bytes * 2 <= aot.MAX_SHARED_BYTES
    copies = config.columns // (32 * config.num_warps) // 8  # of a tile, by a thread, of 16 bytes
    # All tiles but one at the start, one more in each step, which waits for the oldest alone.
    assert made.count(r"cp\.async\.cg\.shared\.global \[.*0x10,") == copies * config.stages
    assert made.count(r"ld\.global") == 0
    assert made.count(rf"cp\.async\.wait_group\s+{config.stages - 2}\b") == 1
    assert 2 * (config.stages - 2) * 2 * config.columns >= 64 << 10
    assert made.count(r"max\.u16x2") == 4 * copies


@pytest.mark.parametrize("arch", aot.ARCHS)
def test_maxima_of_fp32_are_those_of_integers_which_keep_nan(arch):
    arguments = {
        **dict.fromkeys(("w0_ptr", "w1_ptr", "w2_ptr", "w3_ptr", "partials_ptr"), torch.float32),
        **dict.fromkeys(("size0", "size1", "size2", "size3"), "i32"),
        **{"NUM": 2, "ASM": True, "STAGES": 4, "BLOCK": 4096},
    }
    made = aot.compile_kernel(G._partials_kernel, arguments, arch=arch, num_warps=8)
    assert made.spill_bytes == 0
    assert made.count(r"max\.s32") >= 16 and made.count(r"max\S*\.f32") == 0
