"""The fused AdamW kernels, compiled without a GPU: accesses, arithmetic, registers and shared memory."""

import functools
import re

import pytest
import torch

import aot
from adamw_forms import BF16, FP32, Case
from deepwell.kernels.device.triton_support import tl, triton
from deepwell.train.adamw import update as adamw
from deepwell.train.adamw.update import CONFIGS, FP8, UpdateConfig, configs_for_moments


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


POINTERS = {
    "table_ptr": torch.int64,
    "chunk_row_ptr": torch.int32,
    "chunk_place_ptr": torch.int32,
    "hyper_ptr": torch.float32,
    "step_ptr": torch.int64,
    "control_ptr": torch.int64,
}


@functools.cache
def compiled(case, config, arch=90, is_aligned=True):
    """The update as the launch asks for it: no contraction, which would round once where the reference rounds twice."""
    tile = {"ROWS": config.rows, "PIECES": config.pieces, "TILES": config.tiles}
    constants = {**POINTERS, **_constants(case), **tile, "ALIGNED": is_aligned}
    how = {"num_warps": config.num_warps, "max_registers": config.max_registers}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.language, "default_fp_fusion", False)
        return aot.compile_kernel(adamw._adamw_kernel, constants, arch=arch, **how)


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("case", [Case(), Case(moment=FP8), Case(moment=FP32, grad=FP32, has_master=True)], ids=str)
def test_compiles_to_wide_accesses_and_exact_arithmetic(case, arch):
    made = compiled(case, UpdateConfig(rows=16, tiles=1, num_warps=8), arch)
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
def test_a_thread_holds_pieces_of_a_block_without_spills(config):
    made = compiled(Case(moment=FP8), config)
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


@pytest.mark.parametrize("has_master", [False, True])
@pytest.mark.parametrize("config", configs_for_moments(FP8), ids=str)
def test_no_config_for_fp8_moments_spills(config, has_master):
    made = compiled(Case(moment=FP8, has_master=has_master), config)
    assert made.spill_bytes == 0 and made.stack_bytes == 0


@pytest.mark.parametrize("moment", [BF16, FP8], ids=str)
@pytest.mark.parametrize("is_aligned", [True, False])
def test_words_of_random_bits_serve_only_threads_that_have_both_their_elements(is_aligned, moment):
    # Elements that are loaded one by one lie in a thread 32 apart: the first of two in registers is not the even one.
    # There each takes its own bits from either half of a word of them.
    made = compiled(Case(moment=moment), configs_for_moments(moment)[0], is_aligned=is_aligned)
    assert made.count(r"dp2a\.lo") > 0
    assert (made.count(r"65537") > 0) == (not is_aligned)
