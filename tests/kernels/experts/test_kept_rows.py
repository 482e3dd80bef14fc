"""Rows of gate and up in 12 bits a number: what comes back, and the kernels that write and read them."""

import pytest
import torch

import aot
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.experts import kept_rows as K
from deepwell.kernels.experts import swiglu as X
from deepwell.kernels.quantize.fp8 import RowConfig
from launches import on_absent_gpu

TILED = RowConfig(tile=128, num_warps=4)


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def rows_of_all_kinds(width=96):
    torch.manual_seed(0)
    x = torch.randn(12, 2 * width) * torch.exp2(torch.arange(-6.0, 6.0))[:, None] * 20
    x[1] = 0
    x[2, :30] = torch.exp2(-torch.arange(30.0)) * -1.3  # far below the largest
    x[3] *= 1e-38
    x[4] *= 1e36
    return x.bfloat16()


def test_numbers_within_fourteen_octaves_of_the_largest_come_back_bit_for_bit():
    x = rows_of_all_kinds()
    back = K.unpack_rows_ref(*K.pack_rows_ref(x))
    power = torch.exp2(x.float().abs().amax(1, keepdim=True).log2().floor())
    is_near = x.float().abs() >= power * 2.0**-14
    is_near[3] = False  # the least numbers of bf16 have no room below them
    assert_bitwise_equal(back[is_near], x[is_near])
    error = (back.float() - x.float()).abs()
    assert (error <= torch.maximum(power * 2.0**-22, torch.tensor(2.0**-126))).all()
    assert not error[1].any() and is_near.float().mean() > 0.8


def test_a_row_with_inf_or_nan_is_nan():
    x = rows_of_all_kinds()
    x[5, 7], x[6, 3], x[7, 2] = float("nan"), float("inf"), -float("inf")
    back = K.unpack_rows_ref(*K.pack_rows_ref(x))
    assert back[5:8].isnan().all() and back[:5].isfinite().all() and back[8:].isfinite().all()


@pytest.mark.parametrize("width", [16, 300])
def test_the_kernels_keep_a_row_with_nan_as_nan(device, width):
    rows = rows_of_all_kinds(width).to(device)
    rows[5, 1], rows[6, 2] = float("nan"), float("inf")
    slot, weight = torch.arange(12, dtype=torch.int32, device=device), torch.ones(12, device=device).bfloat16()
    *_, kept, top = X.expert_swiglu_kept(rows, weight, slot)
    assert top[5] == top[6] == 255
    grads = X.expert_swiglu_backward(torch.ones(12, width, device=device).bfloat16(), kept, weight, slot, top_P=top)
    assert grads[0].float()[5:7].isnan().all()


@pytest.mark.parametrize("config", [None, TILED], ids=["whole", "tiled"])
@pytest.mark.parametrize("width", [16, 136, 300])
def test_the_kernels_write_and_read_what_the_reference_does(device, config, width):
    rows = rows_of_all_kinds(width).to(device)
    slot = torch.arange(12, dtype=torch.int32, device=device)
    weight, dh = torch.rand(12).bfloat16().to(device), torch.randn(12, width).bfloat16().to(device)
    rows[3:5] = rows[5:7]  # h of the least and the largest numbers is no number of bf16
    q, scale, kept, top = X.expert_swiglu_kept(rows, weight, slot, config=config)
    for got, ref in zip((q, scale), X.expert_swiglu(rows, weight, slot, config=config), strict=True):
        assert_bitwise_equal(got.view(torch.uint8), ref.view(torch.uint8))
    for got, ref in zip((kept, top), K.pack_rows_ref(rows), strict=True):
        assert_bitwise_equal(got, ref)
    made = X.expert_swiglu_backward(dh, kept, weight, slot, top_P=top, config=config)
    wanted = X.expert_swiglu_backward(dh, K.unpack_rows_ref(kept, top), weight, slot, config=config)
    for got, ref in zip(made, wanted, strict=True):
        assert_bitwise_equal(got.view(torch.uint8), ref.view(torch.uint8))


def test_wrong_rows_are_named():
    rows, slot = rows_of_all_kinds(), torch.arange(12, dtype=torch.int32)
    kept, top = K.pack_rows_ref(rows)
    dh, weight = torch.zeros(12, 96).bfloat16(), torch.rand(12)
    with pytest.raises(ConfigError, match="bytes"):
        X.expert_swiglu_backward(dh, rows, weight, slot, top_P=top)
    with pytest.raises(ConfigError, match="three equal parts"):
        X.expert_swiglu_backward(dh, kept[:, :-1].contiguous(), weight, slot, top_P=top)


@pytest.mark.parametrize("width", [768, 1024, 14336])
def test_they_compile_for_hopper_without_spills(width):
    rows, slot = torch.empty(4, 2 * width).bfloat16(), torch.arange(4, dtype=torch.int32)
    dh, weight = torch.empty(4, width).bfloat16(), torch.rand(4).bfloat16()
    with on_absent_gpu(90) as launches:
        *_, kept, top = X.expert_swiglu_kept(rows, weight, slot)
        X.expert_swiglu_backward(dh, kept, weight, slot, top_P=top)
    for launch in launches:
        made = aot.measured(launch.made, 90)
        assert made.spill_bytes == 0, (launch.name, made.registers, made.spill_bytes)
