"""Codes of several weights under one scale: bit for bit those of each weight with the amax of all."""

import itertools

import pytest
import torch

import aot
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels import quantize_group as G
from deepwell.kernels.quantize import quantize_both_ref

E4M3 = torch.float8_e4m3fn
# Rows of the weights and their columns: one; grouped queries; gate and up; more than fit; ragged tiles of both kernels.
GROUPS = [([64], 64), ([48, 16, 16], 96), ([80, 80], 40), ([16] * 5, 32), ([16, 32, 16, 48], 528), ([144], 1040)]


def weights_of(rows, columns, device, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, columns, generator=generator).to(device, dtype) * 3**i for i, n in enumerate(rows)]


def expected(weights):
    largest = torch.stack([w.float().abs().amax() for w in weights]).amax()
    codes, turned, scale = quantize_both_ref(torch.cat(weights), largest, pow2=True, dtype=E4M3)
    return {False: codes, True: turned}, scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "columns"), GROUPS, ids=str)
def test_a_group_has_the_codes_of_its_weights_together(everywhere, rows, columns, dtype):
    weights = weights_of(rows, columns, everywhere, dtype)
    partials = G.partial_maxima(weights)
    assert partials.shape == (G.num_partials(weights),)
    codes, scale = expected(weights)
    assert_bitwise_equal(partials.amax(), torch.cat(weights).float().abs().amax(), "amax")
    for turned, per_row in itertools.product((False, True), repeat=2):
        q, found = G.quantize_group(weights, partials, turned=turned, scale_per_row=per_row)
        assert_bitwise_equal(q.view(torch.uint8), codes[turned].view(torch.uint8), f"codes, turned {turned}")
        assert_bitwise_equal(found, scale.expand(q.shape[0]) if per_row else scale, "scale")


def test_weights_that_are_stored_turned_or_ragged_go_one_by_one(everywhere):
    # Conv1D's [K, N]; rows of wider ones; a number of rows that leaves no whole words of codes.
    wide = torch.randn(32, 64, device=everywhere)
    for weights in (
        [torch.randn(40, 32, device=everywhere).T, torch.randn(40, 16, device=everywhere).T],
        [wide[:, 3:43], torch.randn(16, 40, device=everywhere)],
        [torch.randn(7, 40, device=everywhere), torch.randn(3, 40, device=everywhere)],
    ):
        codes, scale = expected(weights)
        partials = G.partial_maxima(weights)
        for turned in (False, True):
            q, found = G.quantize_group(weights, partials, turned=turned, scale_per_row=False)
            assert_bitwise_equal(q.view(torch.uint8), codes[turned].view(torch.uint8), f"codes, turned {turned}")
            assert_bitwise_equal(found, scale, "scale")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_one_bad_number_shows_in_every_code(everywhere, bad):
    weights = weights_of([32, 16], 48, everywhere)
    weights[1][5, 7] = bad
    partials = G.partial_maxima(weights)
    for turned in (False, True):
        q, scale = G.quantize_group(weights, partials, turned=turned, scale_per_row=True)
        assert bool(q.float().isnan().all()) and bool(scale.isnan().all())


def test_zeros_have_the_scale_one(everywhere):
    weights = [torch.zeros(16, 32, device=everywhere)]
    q, scale = G.quantize_group(weights, G.partial_maxima(weights), turned=False, scale_per_row=False)
    assert not bool(q.view(torch.uint8).any()) and float(scale) == 1.0


def test_one_maximum_instead_of_partial_ones_is_as_good(everywhere):
    weights = weights_of([32, 16], 48, everywhere)
    one = torch.cat(weights).float().abs().amax().reshape(1)
    of_one, of_many = (
        G.quantize_group(weights, partials, turned=True, scale_per_row=True)
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
        (lambda: G.quantize_group(weights, G.partial_maxima(weights), turned=False, scale_per_row=True), 2),
        (lambda: G.quantize_group(weights, partials, turned=True, scale_per_row=True), 1),
    ):
        run()
        assert sum(kernel.count for kernel in profile(run)) == launches


# ---- compiled for GPUs that are not here ----


def compiled(arch, num, *, turned, tiles=4):
    config = G.TURNED_CONFIG if turned else G.ALONG_CONFIG
    arguments = {
        **dict.fromkeys(("w0_ptr", "w1_ptr", "w2_ptr", "w3_ptr"), torch.bfloat16),
        "q_ptr": torch.int32 if turned else E4M3,
        **dict.fromkeys(("partials_ptr", "scale_ptr"), torch.float32),
        **dict.fromkeys(("N0", "N1", "N2", "N3", "K", "stride_q"), "i32"),
        **dict.fromkeys(("stride0", "stride1", "stride2", "stride3"), "i32"),
        **{"num_partials": "i32", "num_scales": "i32", "NUM": num, "TURNED": turned, "PACKING": "asm"},
        **{"FP8_MAX": 448.0, "PARTIALS": 256, "TILES": tiles, "BLOCK_N": config.rows, "BLOCK_K": config.columns},
    }
    return aot.compile_kernel(G._codes_kernel, arguments, arch=arch, num_warps=config.num_warps)


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("num", [1, 3])
def test_codes_are_read_and_written_in_wide_accesses(arch, num):
    made = compiled(arch, num, turned=False)
    assert made.spill_bytes == 0
    # Whichever weight a tile is of, its address is known to be aligned.
    assert made.count(r"ld\.global\S*\.v4\.b32") >= 2
    assert made.count(r"[ls][dt]\.global\S*\.b(8|16)\b") == 0
    made = compiled(arch, num, turned=True)
    assert made.spill_bytes == 0
    assert made.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") == 16  # 32 numbers a thread, two at a time
    assert made.count(r"ld\.global\S*\.v[24]\.b32") >= 4
    assert made.count(r"st\.global\S*\.v[24]\.b32") >= 2
    assert made.shared_bytes <= 8192


@pytest.mark.parametrize("arch", aot.ARCHS)
def test_maxima_keep_enough_bytes_under_way(arch):
    arguments = {
        **dict.fromkeys(("w0_ptr", "w1_ptr", "w2_ptr", "w3_ptr"), torch.bfloat16),
        "partials_ptr": torch.float32,
        **dict.fromkeys(("N0", "N1", "N2", "N3", "K", "stride0", "stride1", "stride2", "stride3"), "i32"),
        **{"NUM": 3, "BLOCK_N": G.PARTIALS_CONFIG.rows, "BLOCK_K": G.PARTIALS_CONFIG.columns},
    }
    made = aot.compile_kernel(G._partials_kernel, arguments, arch=arch, num_warps=G.PARTIALS_CONFIG.num_warps)
    assert made.spill_bytes == 0
    assert made.registers * 32 * G.PARTIALS_CONFIG.num_warps * 2 <= 65536  # two programs a multiprocessor
    assert made.count(r"ld\.global\S*\.v4\.b32") >= 12
