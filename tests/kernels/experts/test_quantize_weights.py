"""Codes of all experts' weights, along their rows and transposed: bit for bit the formats' own, expert by expert."""

import pytest
import torch
import triton.language as tl

import aot
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.formats.quantize import quantize
from deepwell.kernels.experts import quantize_weights as W

E4M3 = torch.float8_e4m3fn


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def weights(*shape, device, dtype=torch.bfloat16):
    """Experts of different magnitudes, so that a scale of another expert shows."""
    loud = torch.exp2(torch.arange(shape[0]).float() * 3)[:, None, None]
    return (torch.randn(shape) * loud).to(dtype).to(device)


@pytest.mark.parametrize("shape", [(3, 16, 32), (2, 48, 144), (1, 4, 16), (1, 3, 16400)])
def test_rows_are_the_formats_own_for_each_expert(device, shape):
    w = weights(*shape, device=device)
    q, scale = W.quantize_experts(w)
    for e, expert in enumerate(w):
        found = quantize(expert, "fp8_e4m3_row_pow2")
        assert_bitwise_equal(q[e], found.data.to(q.device), f"codes of expert {e}")
        assert_bitwise_equal(scale[e], found.scales.flatten().to(q.device), f"scales of expert {e}")
    assert_bitwise_equal(W.expert_scales(w), scale, "scales alone")


@pytest.mark.parametrize("shape", [(3, 16, 32), (2, 132, 144)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_transposed_codes_are_the_formats_own_tensor_codes(device, shape, dtype):
    # Smaller than a tile, and ragged over several.
    w = weights(*shape, device=device, dtype=dtype)
    scale = W.quantize_experts(w)[1].amax(1)
    q = W.quantize_experts_transposed(w, scale)
    for e, expert in enumerate(w):
        found = quantize(expert, "fp8_e4m3_tensor_pow2")
        assert scale[e] == found.scales.item()
        transposed = found.data.view(torch.uint8).T.contiguous().view(E4M3)
        assert_bitwise_equal(q[e], transposed.to(q.device), f"codes of expert {e}")


def test_weights_may_be_a_part_of_a_larger_tensor(device):
    w = weights(2, 16, 64, device=device)[:, :, 16:48]
    scale = W.quantize_experts(w)[1].amax(1)
    assert_bitwise_equal(
        W.quantize_experts_transposed(w, scale),
        W.quantize_experts_transposed(w.contiguous(), scale),
        "transposed codes",
    )


def test_an_expert_that_holds_nan_or_inf_is_nan_and_the_others_are_not(device):
    w = weights(3, 16, 16, device=device)
    w[1, 3, 3] = float("inf")
    q, scale = W.quantize_experts(w)
    assert_bitwise_equal(W.expert_scales(w), scale, "scales alone")
    transposed = W.quantize_experts_transposed(w, scale.amax(1))
    assert transposed.float().isnan().flatten(1).all(1).tolist() == [False, True, False]
    assert q.float().isnan().flatten(1).any(1).tolist() == [False, True, False]


def test_an_expert_of_zeros_has_zero_codes(device):
    w = torch.zeros(1, 16, 16, device=device)
    q, scale = W.quantize_experts(w)
    assert_bitwise_equal(W.expert_scales(w), scale, "scales alone")
    assert not q.view(torch.uint8).any()
    assert not W.quantize_experts_transposed(w, scale.amax(1)).view(torch.uint8).any()


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda w: W.quantize_experts(w[0]), "w_ERC is"),
        (lambda w: W.quantize_experts(w.transpose(1, 2)), "contiguous"),
        (lambda w: W.expert_scales(w.transpose(1, 2)), "contiguous"),
        (lambda w: W.quantize_experts_transposed(w, torch.ones(3)), "scale_E must have shape"),
        (lambda w: W.quantize_experts_transposed(w[:, :6], torch.ones(2)), "multiple of 4"),
        (lambda w: W.quantize_experts_transposed(w, torch.ones(2).double()), "must be float32"),
    ],
)
def test_wrong_arguments_are_named(call, names):
    with pytest.raises(ConfigError, match=names):
        call(torch.randn(2, 8, 16))


@pytest.mark.parametrize("arch", aot.ARCHS)
def test_turning_spills_nothing_and_packs_in_hardware(arch):
    arguments = {
        "w_ptr": torch.bfloat16,
        "scale_ptr": torch.float32,
        "out_ptr": torch.int32,
        **dict.fromkeys(("R4", "C", "stride_we", "stride_wr"), "i32"),
        "FP8": tl.float8e4nv,
        "FP8_MAX": 448.0,
        "PACKING": "asm",
        "BLOCK_R": W._TILE,
        "BLOCK_C": W._TILE,
    }
    made = aot.compile_kernel(W._turn_experts_kernel, arguments, arch=arch, num_warps=4)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") >= 2
    assert made.count(r"ld\.global[\w.]*\.v4\.b32") >= 1
    assert made.count(r"st\.global[\w.]*\.v4\.b32") >= 1
    assert made.count(r"div\.rn\.f32") >= 1
    assert made.shared_bytes <= aot.MAX_SHARED_BYTES
