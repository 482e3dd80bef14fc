"""The fused AdamW kernels, compiled without a GPU: accesses, arithmetic, registers and shared memory."""

import re

import pytest
import torch

import aot
from adamw_forms import BF16, FP32, Case
from deepwell.formats.spec import get_format
from deepwell.kernels.device.triton_support import tl, triton
from deepwell.train.adamw import copies as adamw_copies
from deepwell.train.adamw import update as adamw
from deepwell.train.adamw import words as adamw_words
from deepwell.train.adamw.copies import configs_for
from deepwell.train.adamw.update import CONFIGS, FP8, configs_for_moments
from deepwell.train.adamw.words import WORD_CONFIGS, WordConfig, word_configs_for


def _constants(case):
    dtypes = {BF16: tl.bfloat16, FP32: tl.float32, FP8: tl.uint8}
    return {
        "PARAM": dtypes[case.param],
        "GRAD": dtypes[case.grad],
        "MOMENT": dtypes[case.moment],
        "HAS_MASTER": case.has_master,
        "RANDOM_PARAM": case.is_random and case.param == BF16 and not case.has_master,
        "RANDOM_MOMENT": case.is_random and case.moment != FP32,
        "ALIGNED": True,
        "ASM": True,
    }


SCALINGS = ("mx", "square", "tensor")
POINTERS = {
    "table_ptr": torch.int64,
    "chunk_row_ptr": torch.int32,
    "chunk_place_ptr": torch.int32,
    "hyper_ptr": torch.float32,
    "step_ptr": torch.int64,
    "control_ptr": torch.int64,
}


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("case", [Case(), Case(moment=FP8), Case(moment=FP32, grad=FP32, has_master=True)], ids=str)
def test_compiles_to_wide_accesses_and_exact_arithmetic(case, arch, monkeypatch):
    # As the launch asks: no contraction, which would round once where the reference rounds twice.
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    constants = {**_constants(case), "ROWS": 16, "PIECES": 1, "TILES": 1}
    made = aot.compile_kernel(adamw._adamw_kernel, {**POINTERS, **constants}, arch=arch, num_warps=8)
    assert made.spill_bytes == 0 and made.stack_bytes == 0
    # 2048 elements by 256 threads: 8 each, one 16-byte access a bf16 tensor, two an fp32 one, 8 bytes of FP8.
    wide, half = r"\.v4\.b32", r"\.v2\.b32"
    wides = {BF16: 1, FP32: 2, FP8: 0}
    loads = wides[case.grad] + (2 if case.has_master else wides[case.param]) + 2 * wides[case.moment]
    assert made.count(r"ld\.global\S*" + wide) == loads
    assert made.count(r"ld\.global\S*" + half) == (2 if case.moment == FP8 else 0)
    assert made.count(r"st\.global\S*" + wide) == wides[case.param] + 2 * case.has_master + 2 * wides[case.moment]
    assert made.count(r"st\.global\.b16") == 0
    is_exact = case.param == FP32 or case.has_master
    has_fp8 = case.moment == FP8
    # Exact roots of FP8 moments are a Newton step (two fused operations), one for each element and the block's largest;
    # inverses of the two scales are another. The moments are three fused operations, a step that is not exact two, and
    # its size is inverted once (two more).
    assert made.count(r"sqrt\.rn\.f32") == (8 if is_exact and not has_fp8 else 0)
    assert made.count(r"sqrt\.approx\.ftz\.f32 ") - made.count(r"rsqrt\.approx\.ftz") == 8 * (
        not is_exact and not has_fp8
    )
    assert made.count(r"rsqrt\.approx\.ftz") == 9 * has_fp8
    fused = made.count(r"fma\.rn\.f32") + made.count(r"fma\.rn\.f32x2")  # Blackwell has some in pairs
    assert fused == (18 + 4 + 24) * has_fp8 + (16 + 2) * (not is_exact)
    assert made.count(r"div\.rn\.f32") == 8 * is_exact and made.count(r"div\.(approx|full)") == 0
    assert made.count(r"rcp\.approx\.ftz") == 9 * (not is_exact) + 2 * has_fp8
    if case.moment != FP32:
        # Random bits are made where they are used and scales stored from where they are: no shared memory.
        assert made.shared_bytes == 0


# The default, and one with more pieces.
@pytest.mark.parametrize("config", [c for c in CONFIGS if c.pieces > 1][::3], ids=str)
def test_a_thread_holds_pieces_of_a_block_without_spills(config, monkeypatch):
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    tile = {"ROWS": config.rows, "PIECES": config.pieces, "TILES": config.tiles}
    arguments = {**POINTERS, **_constants(Case(moment=FP8)), **tile}
    registers = config.max_registers
    made = aot.compile_kernel(
        adamw._adamw_kernel, arguments, arch=90, num_warps=config.num_warps, max_registers=registers
    )
    assert made.spill_bytes == 0
    # Every load of the tile comes before the barrier that keeps it there.
    head, _, rest = made.ptx.partition("bar.sync")
    wide = r"ld\.global\S*\.v[24]\."
    assert len(re.findall(wide, head)) == 4 * config.pieces and not re.findall(wide, rest)
    # All pieces of a row are one thread's, so that a block is worked out once: one root besides those of the elements.
    elements = config.rows * 128 // (config.num_warps * 32)
    assert made.count(r"rsqrt\.approx\.ftz") == elements + 1
    # Two maxima over the threads of a row.
    threads = 128 // config.pieces // 8
    assert made.count(r"shfl\.sync") == 2 * (threads.bit_length() - 1)


@pytest.mark.parametrize(
    "scaling, arch, each", [*((s, a, False) for s in SCALINGS for a in aot.ARCHS), ("mx", 90, True)]
)
def test_copies_compile_without_spills(scaling, arch, each):
    constants = {
        **_constants(Case()),
        "ROWS": 128,
        "STRIP": 16,
        "COPY_STRIP": 64,
        "EACH": each,
        "SCALING": scaling,
        "POW2": True,
        "HAS_ROW": True,
        "HAS_COL": True,
        "UPDATES": True,
        "WRITES": True,
        "COLLECTS": scaling == "tensor",
    }
    pointers = {**POINTERS, "copies_ptr": torch.int64}
    made = aot.compile_kernel(adamw_copies._copies_kernel, {**pointers, **constants}, arch=arch, num_warps=8)
    assert made.spill_bytes == 0
    assert made.shared_bytes <= aot.MAX_SHARED_BYTES
    # 32 codes a thread in each copy, 16 at a time.
    assert made.count(r"st\.global\S*\.v4\.b32") == 3 + 2 * 2


# The update that collects the maxima of rows and columns, then the pass that writes.
PASSES = [{"UPDATES": is_first, "COLLECTS": is_first, "WRITES": not is_first} for is_first in (True, False)]


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("moment", [BF16, FP8], ids=str)
def test_copies_with_row_scales_compile_without_spills_where_nothing_is_aligned(moment, arch, monkeypatch):
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    config = configs_for(get_format("fp8_e4m3_row"))[0]
    constants = {
        **_constants(Case(moment=moment)),
        "ALIGNED": False,
        "ROWS": config.rows,
        "STRIP": config.strip,
        "COPY_STRIP": config.copy_strip,
        "EACH": moment == BF16,
        "SCALING": "row",
        "POW2": False,
        "HAS_ROW": True,
        "HAS_COL": True,
    }
    pointers = {**POINTERS, "copies_ptr": torch.int64}
    for how in PASSES:
        made = aot.compile_kernel(
            adamw_copies._copies_kernel, {**pointers, **constants, **how}, arch=arch, num_warps=config.num_warps
        )
        assert made.spill_bytes == 0 and made.stack_bytes == 0
        assert made.shared_bytes <= aot.MAX_SHARED_BYTES
        # Maxima of a strip's rows and of the tile's columns; nobody waits for them.
        assert made.count(r"atom\.global\S*relaxed\S*max") == 2 * how["COLLECTS"]
        assert made.count(r"fence|membar|acq_rel") == 0


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("moment", [BF16, FP8], ids=str)
@pytest.mark.parametrize("fmt", ["fp8_e4m3_row", "fp8_e4m3_row_pow2"])
def test_words_with_row_scales_read_a_weight_twice_and_spill_nothing(fmt, moment, arch, monkeypatch):
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    config = word_configs_for(get_format(fmt), has_fp8_moments=moment == FP8)[0]
    for how in PASSES:
        made = _words(Case(moment=moment), "row", config, arch, POW2="pow2" in fmt, **how)
        assert made.spill_bytes == 0 and made.stack_bytes == 0
        # One atomic access for all rows of a part and one for its columns.
        assert made.count(r"atom\.global\S*relaxed\S*max") == 2 * how["COLLECTS"]
        assert made.count(r"fence|membar|acq_rel") == 0
        if how["WRITES"]:
            # 16 bytes of each of four rows of weights, and their codes: 8 bytes a row, two of 16 transposed.
            assert made.count(r"ld\.global\S*\.v4\.b32") == 4 and made.count(r"st\.global\S*\.v4\.b32") == 2
            assert made.count(r"st\.global\S*\.v2\.b32") == 4


def _words(case, scaling, config, arch=90, **changes):
    constants = {
        **{name: value for name, value in _constants(case).items() if name != "ALIGNED"},
        "ROWS": config.rows,
        "PARTS": 128 // config.rows if scaling == "square" else 1,
        "SCALING": scaling,
        "POW2": True,
        "HAS_ROW": True,
        "HAS_COL": True,
        "UPDATES": True,
        "WRITES": True,
        "COLLECTS": scaling == "tensor",
        **changes,
    }
    pointers = {**POINTERS, "copies_ptr": torch.int64}
    return aot.compile_kernel(
        adamw_words._words_kernel,
        {**pointers, **constants},
        arch=arch,
        num_warps=config.num_warps,
        max_registers=config.max_registers,
    )


@pytest.mark.parametrize("has_master", [False, True])
@pytest.mark.parametrize("config", configs_for_moments(FP8), ids=str)
def test_no_config_for_fp8_moments_spills(config, has_master, monkeypatch):
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    tile = {"ROWS": config.rows, "PIECES": config.pieces, "TILES": config.tiles}
    arguments = {**POINTERS, **_constants(Case(moment=FP8, has_master=has_master)), **tile}
    registers = config.max_registers
    made = aot.compile_kernel(
        adamw._adamw_kernel, arguments, arch=90, num_warps=config.num_warps, max_registers=registers
    )
    assert made.spill_bytes == 0 and made.stack_bytes == 0


FORMAT_OF = {"mx": "mxfp8", "square": "fp8_e4m3_128x128_pow2", "tensor": "fp8_e4m3_tensor_pow2"}


@pytest.mark.parametrize("moment", [BF16, FP8], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_default_configs_of_words_keep_sixteen_warps_and_spill_next_to_nothing(scaling, moment, monkeypatch):
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    config = word_configs_for(get_format(FORMAT_OF[scaling]), has_fp8_moments=moment == FP8)[0]
    made = _words(Case(moment=moment), scaling, config)
    assert made.registers <= 128
    # Bytes stored and loaded. Two rows of FP8 moments at once take the last registers: the address of what the copies
    # need waits on the stack, 2 stores and 2 loads of 2000 instructions.
    assert made.spill_bytes <= (16 if moment == FP8 else 0)
    # A second pass is another kernel: it collects first.
    if scaling == "tensor":
        config = word_configs_for(get_format(FORMAT_OF[scaling]), has_fp8_moments=moment == FP8, is_delayed=False)[0]
        assert _words(Case(moment=moment), scaling, config, WRITES=False).spill_bytes == 0


@pytest.mark.parametrize("config", word_configs_for(get_format("mxfp8"), has_fp8_moments=False), ids=str)
def test_a_scale_of_a_column_is_stored_by_one_thread(config):
    # Each store of a column's scales takes a sector for every column. A thread has one byte to store, not eight of
    # which seven others store the same; a row's scales share a sector, and are stored from where they are, that of one
    # of its four rows by each of four threads.
    made = _words(Case(), "mx", config)
    rows = made.count(r"@p st\.global\.b8")
    assert rows == 1 and made.count(r"st\.global\.b8") - rows == 1


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scales_of_two_rows_of_fp8_moments_are_worked_out_together(scaling, monkeypatch):
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    config = word_configs_for(get_format(FORMAT_OF[scaling]), has_fp8_moments=True)[0]
    made = _words(Case(moment=FP8), scaling, config)
    pairs = 2 * 128 // config.rows if scaling == "square" else 2
    # One root and one inverse a pair besides those of the elements; the step's size is inverted once a part.
    assert made.count(r"rsqrt\.approx\.ftz") == pairs * (16 + 1)
    assert made.count(r"rcp\.approx\.ftz") == pairs * (16 + 1) + pairs // 2
    # Five exchanges until a thread has one maximum of four, four to hand out what follows from it: by threads that
    # differ in bits 3 and 2 of their number, and within the sixteen of a row.
    assert made.count(r"shfl\.sync\.idx\.b32 .*, 0x101F, ") == 4 * pairs
    assert made.count(r"shfl\.sync\.bfly\.b32 .*, 8, 0x1F, ") == 2 * pairs


@pytest.mark.parametrize("moment", [BF16, FP8], ids=str)
@pytest.mark.parametrize("is_aligned", [True, False])
def test_words_of_random_bits_serve_only_threads_that_have_both_their_elements(is_aligned, moment):
    # Elements that are loaded one by one lie in a thread 32 apart: the first of two in registers is not the even one.
    # There each takes its own bits from either half of a word of them.
    config = configs_for_moments(moment)[0]
    tile = {"ROWS": config.rows, "PIECES": config.pieces, "TILES": config.tiles}
    constants = {**_constants(Case(moment=moment)), **tile, "ALIGNED": is_aligned}
    made = aot.compile_kernel(adamw._adamw_kernel, {**POINTERS, **constants}, arch=90, num_warps=config.num_warps)
    assert made.count(r"dp2a\.lo") > 0
    assert (made.count(r"65537") > 0) == (not is_aligned)


def test_collecting_an_amax_does_not_wait_for_the_stores():
    made = _words(Case(), "tensor", WORD_CONFIGS[0])
    assert made.count(r"atom\.global\S*relaxed\S*max") == 1 and made.count(r"fence|membar|acq_rel") == 0


@pytest.mark.parametrize("scaling, arch", [("mx", 90), ("mx", 100), ("square", 90), ("tensor", 90)])
def test_words_load_everything_before_they_store(scaling, arch):
    made = _words(Case(), scaling, WordConfig(rows=64, num_warps=8), arch)
    assert made.spill_bytes == 0
    # Only words of the transposed copy (and sums over warps) go through shared memory.
    assert made.shared_bytes == 64 * 128
    parts = 2 if scaling == "square" else 1
    accesses = [line for line in made.ptx.splitlines() if "v4.b32" in line and "global" in line]
    kinds = ["load" if "ld.global" in line else "store" for line in accesses]
    # Parameter, gradient and two moments of four rows, 16 bytes each, a part; then the new ones and 32 bytes of words.
    assert kinds[:16] == ["load"] * 16 and kinds.count("load") == 16 * parts
    assert kinds.count("store") == (12 + 2) * parts
