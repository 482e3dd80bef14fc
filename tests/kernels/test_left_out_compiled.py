"""Kernels without what their wrappers may leave out, compiled for sm_90.

The interpreter takes a pointer that is None where the compiler may not (docs/gotchas.md), and the tests beside each
kernel compile the forms that a step runs most. Here are the others: results not asked for, operands not there.
"""

from typing import Any

import pytest
import torch

import aot
from deepwell.kernels.activation import bias_activation as B
from deepwell.kernels.activation import swiglu as S
from deepwell.kernels.device.triton_support import tl
from deepwell.kernels.gemm import triton_fp8 as G
from deepwell.kernels.head import cross_entropy as C
from deepwell.kernels.norm import rms_norm as N
from deepwell.kernels.quantize import fp8 as Q
from deepwell.kernels.quantize import microscaled as MX
from deepwell.kernels.quantize import transpose as T
from deepwell.kernels.rope import rope as R
from deepwell.train.adamw import scalars as adamw_scalars

BF16, FP32, E4M3, I64, I32 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.int32
FP8 = {"FP8_MAX": 448.0}


def arguments(kernel: Any, left_out: str = "", **given: Any) -> dict[str, Any]:
    """All of a kernel's: pointers to bf16, codes and scales by their names, integers that are multiples of 16."""
    out: dict[str, Any] = {}
    for param in kernel.params:
        name = param.name
        if name in given:
            out[name] = given[name]
        elif name.removesuffix("_ptr") in left_out.split():
            out[name] = None
        elif name.endswith("_ptr"):
            is_code = name.removesuffix("_ptr") in {"q", "qt", "qh", "cq", "ck", "cv"}
            is_fp32 = any(word in name for word in ("scale", "factor", "rstd", "mean", "loss", "dw_", "db_"))
            out[name] = E4M3 if is_code else FP32 if is_fp32 else BF16
        elif not param.is_constexpr:
            out[name] = "i32"
    assert not set(left_out.split()) - {name.removesuffix("_ptr") for name in out}
    return out


CODES, BACKWARD_CODES = "q scale", "q scale qh scale_h"


@pytest.mark.parametrize("two_passes", [False, True], ids=["whole", "tiles"])
@pytest.mark.parametrize(
    "left_out",
    [
        # With a gate; then activations without one.
        *("b factor " + CODES, "b factor", "factor " + CODES, "b h"),
        *("u", "u b", "u factor", "u h", "u b h", "u b factor h", f"u {CODES}", f"u b {CODES}", f"u b factor {CODES}"),
    ],
)
def test_activations_forward(left_out, two_passes):
    how = {"ACT": "gelu", "BLOCK": 1024, "TWO_PASSES": two_passes, "ASM": True, **FP8}
    made = aot.compile_kernel(S._swiglu_kernel, arguments(S._swiglu_kernel, left_out, **how), arch=90)
    assert made.spill_bytes == made.stack_bytes == 0


@pytest.mark.parametrize("two_passes", [False, True], ids=["whole", "tiles"])
@pytest.mark.parametrize(
    "left_out",
    [
        *(f"dh_factor factor {BACKWARD_CODES}", "dh_factor factor qh scale_h", "dh_factor", "factor grad qh scale_h"),
        *(f"u dh_factor factor {BACKWARD_CODES}", "u dh_factor factor grad qh scale_h", "u qh scale_h", "u", "u grad"),
    ],
)
def test_activations_backward(left_out, two_passes):
    how = {"ACT": "gelu", "BLOCK": 1024, "TWO_PASSES": two_passes, "ASM": True, **FP8}
    made = aot.compile_kernel(S._swiglu_backward_kernel, arguments(S._swiglu_backward_kernel, left_out, **how), arch=90)
    assert made.spill_bytes == made.stack_bytes == 0


RMS = "b mean"


@pytest.mark.parametrize(
    "left_out",
    [
        *(f"factor residual total {CODES}", f"factor {CODES}", "factor residual total", "factor residual total y", "y"),
        *(f"factor residual total {CODES} {RMS}", f"factor {CODES} {RMS}", f"factor residual total {RMS}"),
        *(f"factor residual total y {RMS}", RMS),
    ],
)
def test_norms_forward(left_out):
    config = N.default_forward_config(4096)
    layout = {"ROWS": config.rows_per_program(4096), "BLOCK": config.block(4096), "ASM": True, "eps": "fp32"}
    layout |= N._layout(config.block(4096), 4096, config.num_warps)
    given = arguments(N._norm_kernel, left_out, ROUND_FIRST=True, **layout, **FP8)
    made = aot.compile_kernel(N._norm_kernel, given, arch=90, num_warps=config.num_warps)
    assert made.spill_bytes == made.stack_bytes == 0


@pytest.mark.parametrize(
    "left_out",
    [
        *(f"factor dr {CODES}", f"factor {CODES}", f"dr {CODES}", "factor dr", "factor", "dr", ""),
        *(f"factor dr {CODES} mean db", f"{CODES} mean db", "dr mean db"),
    ],
)
def test_norms_backward(left_out):
    config = N.default_backward_config(4096)
    layout = {"BLOCK": 4096, "NUM_STAGES": config.num_stages, "DENSE": True, "ASM": True}
    layout |= N._layout(4096, 4096, config.num_warps)
    given = arguments(N._norm_backward_kernel, left_out, **layout, **FP8)
    made = aot.compile_kernel(N._norm_backward_kernel, given, arch=90, num_warps=config.num_warps)
    assert made.spill_bytes == made.stack_bytes == 0


@pytest.mark.parametrize("left_out", ["q scale grad factor", "q scale grad", "q scale grad b", "grad b", "q scale b"])
def test_cross_entropy(left_out):
    options = C.LossOptions(gradient="none" if "grad" in left_out else "new")
    config = C.default_config(128256, options)
    how = {"SCALE": 1.0, "CAP": 0.0, "BLOCK": config.block, "THREADS": 32 * config.num_warps}
    how |= {"PADDED": False, "ASM": True}
    given = arguments(C._cross_entropy_kernel, left_out, target_ptr=I64, c_ptr=FP32, **how, **FP8)
    made = aot.compile_kernel(C._cross_entropy_kernel, given, arch=90, num_warps=config.num_warps)
    assert made.spill_bytes == made.stack_bytes == 0


@pytest.mark.parametrize("left_out", ["", CODES])
def test_activations_with_a_bias_backward(left_out):
    config = B.default_backward_config(3072)
    how = {"ACT": "gelu", "BLOCK": 4096, "NUM_STAGES": config.num_stages}
    given = arguments(B._bias_activation_backward_kernel, left_out, **how, **FP8)
    made = aot.compile_kernel(B._bias_activation_backward_kernel, given, arch=90, num_warps=config.num_warps)
    assert made.spill_bytes == made.stack_bytes == 0


@pytest.mark.parametrize("scales", [(True, True), (False, False), (True, False)], ids=str)
@pytest.mark.parametrize(("out", "code"), [("bf16", "fp8e4nv"), ("fp32", "fp8e4nv"), ("bf16", "fp8e5")])
def test_products_without_a_bias(scales, out, code):
    config = G.CONFIGS[0]
    descriptors = {
        "a_desc": f"tensordesc<{code}[{config.block_m}, {config.block_k}]>",
        "b_desc": f"tensordesc<fp8e4nv[{config.block_n}, {config.block_k}]>",
        "c_desc": f"tensordesc<{out}[{config.block_m}, {config.block_n // (1 + config.writes_halves)}]>",
    }
    how = {"ROWS_A": scales[0], "ROWS_B": scales[1], "HAS_BIAS": False, "ACTIVATION": "", "PROMOTE": config.promote}
    sizes = {name: getattr(config, name.lower()) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")}
    given = arguments(G._fp8_gemm_kernel, "bias", HALVES=config.writes_halves, **how, **sizes, **descriptors)
    warps = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    assert aot.compile_kernel(G._fp8_gemm_kernel, given, arch=90, **warps).spill_bytes == 0


@pytest.mark.parametrize("left_out", ["qt scale_t", "q scale"])
def test_mx_codes_of_one_side(left_out):
    config = MX.MX_CONFIGS[0]
    how = {"MAX": 448.0, "INV_MAX": 1 / 448, "ROWS": "qt" in left_out, "COLUMNS": "qt" not in left_out}
    tile = {"SWIZZLED": True, "BLOCK_T": config.rows, "BLOCK_K": config.columns}
    scales = {
        name: torch.uint8 for name in ("scale_ptr", "scale_t_ptr") if name.removesuffix("_ptr") not in left_out.split()
    }
    given = arguments(MX._quantize_mx_kernel, left_out, **how, **tile, **scales)
    assert aot.compile_kernel(MX._quantize_mx_kernel, given, arch=90, num_warps=config.num_warps).spill_bytes == 0


@pytest.mark.parametrize("fp8", [False, True])
def test_transposed_codes(fp8):
    largest = {"FP8_MAX": 448.0}
    bytes_of = arguments(T._transpose_bytes_kernel, out_ptr=E4M3, BLOCK_T=64, BLOCK_N=64, **largest)
    aot.compile_kernel(T._transpose_bytes_kernel, bytes_of, arch=90)
    config = T.default_config(16384, 4096)
    tile = {
        "BLOCK_T": config.rows,
        "BLOCK_N": config.columns,
        "ASM": True,
        "FP8": tl.float8e4nv if fp8 else tl.float8e5,
    }
    tile |= {"TOP_K": 1, "GATHERS_OTHER": False, "BLOCK_ROWS": T.BLOCK_ROWS}
    left_out = "scale other_q other_t other_out slot blocks"
    given = arguments(T._transpose_words_kernel, left_out, q_ptr=I32, out_ptr=I32, **tile, **largest)
    made = aot.compile_kernel(T._transpose_words_kernel, given, arch=90, num_warps=config.num_warps)
    assert made.spill_bytes == made.stack_bytes == 0


@pytest.mark.parametrize("left_out", ["yq yk yv", "cq ck cv scale"])
def test_rotations_with_factors(left_out):
    hq, hk, hv, d = 32, 8, 8, 128
    config = R.default_config((hq + hk + hv) * d)
    sizes = {"HQ": hq, "HK": hk, "HV": hv, "D": d, "R": d, "ROWS": config.rows}
    blocks = R.blocks((hq, hk, hv), d, d, config, interleaved=False)
    how = {"INTERLEAVED": False, "BACKWARD": "yq" in left_out, "ASM": True}
    given = arguments(R._rope_kernel, left_out, **sizes, **blocks, **how, **FP8)
    assert aot.compile_kernel(R._rope_kernel, given, arch=90, num_warps=config.num_warps).spill_bytes == 0


def test_maxima():
    given = arguments(Q._amax_kernel, bits_ptr=I32, BLOCK_T=8, BLOCK_K=1024)
    assert aot.compile_kernel(Q._amax_kernel, given, arch=90).spill_bytes == 0


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", [tl.bfloat16, tl.float32], ids=str)
def test_the_norm_of_gradients(aligned, dtype):
    tables = {"table_ptr": I64, "chunk_row_ptr": I32, "chunk_place_ptr": I32, "partial_ptr": torch.float64}
    sizes = {"ROWS": adamw_scalars.NORM_ROWS, "TILES": adamw_scalars.NORM_TILES}
    given = {**tables, "GRAD": dtype, "ALIGNED": aligned, **sizes}
    made = aot.compile_kernel(adamw_scalars._norm_kernel, given, arch=90, num_warps=adamw_scalars.NORM_WARPS)
    assert made.spill_bytes == 0


@pytest.mark.parametrize(("has_norm", "has_clip"), [(False, False), (True, False), (True, True)])
def test_scalars_of_a_step(has_norm, has_clip):
    doubles = dict.fromkeys(("partial_ptr", "group_ptr"), torch.float64)
    longs = dict.fromkeys(("active_ptr", "slot_group_ptr", "step_ptr", "control_ptr"), I64)
    singles = dict.fromkeys(("hyper_ptr", "norm_ptr"), FP32)
    how = {"HAS_NORM": has_norm, "HAS_CLIP": has_clip, "SLOTS": 128}
    given = arguments(adamw_scalars._prepare_kernel, **doubles, **longs, **singles, **how)
    assert aot.compile_kernel(adamw_scalars._prepare_kernel, given, arch=90).spill_bytes == 0
