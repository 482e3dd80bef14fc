"""FP8 GEMMs with a scale per 128 of the contraction: the reference, its refusals, and the GPU beside it."""

import pytest
import torch
from torch import Tensor

from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.formats.quantize import quantize
from deepwell.kernels.gemm import fp8_blocks as gemm_blocks
from deepwell.kernels.gemm.fp8_blocks import fp8_gemm_blocks, fp8_gemm_blocks_ref
from deepwell.kernels.quantize.fp8_blocks import quantize_1x128_both_ref, quantize_128x128_ref
from deepwell.kernels.tune.choose import why_rejected
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.verify import verify

# Whole blocks; ends inside a block along each of M, N and K; rows that are no whole lines of 16; fewer than one block.
SHAPES = [(256, 384, 128), (200, 144, 300), (37, 20, 130), (16, 16, 48)]


def operands(m: int, n: int, k: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Numbers whose magnitude differs by octaves from block to block."""
    generator = torch.Generator().manual_seed(m + n + k)
    loud = torch.exp2(torch.randint(-3, 4, (m + n, -(-k // 128)), generator=generator).float())
    x = torch.randn(m + n, k, generator=generator) * loud.repeat_interleave(128, 1)[:, :k]
    return x[:m].bfloat16().to(device), x[m:].bfloat16().to(device)


def codes(a: Tensor, b: Tensor, square: bool) -> list[Tensor]:
    right = quantize_128x128_ref(b) if square else quantize_1x128_both_ref(b)
    found = [*quantize_1x128_both_ref(a)[:2], *right[:2]]
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_that_of_the_formats_dequantized_operands(shape, square):
    a, b = operands(*shape)
    right = quantize(b, "fp8_e4m3_128x128_pow2" if square else "fp8_e4m3_1x128_pow2")
    wanted = quantize(a, "fp8_e4m3_1x128_pow2").dequantize() @ right.dequantize().T
    got = fp8_gemm_blocks(*codes(a, b, square), square=square)
    assert got.dtype is torch.bfloat16 and got.shape == shape[:2]
    assert sqnr_db(wanted.bfloat16().float(), got.float()) > 80  # the same numbers; zeros may change the order of sums
    assert sqnr_db(a.float() @ b.float().T, got.float()) > 27


@pytest.mark.parametrize("square", [True, False])
def test_a_nan_stays_in_its_row(square):
    a, b = operands(64, 48, 256)
    a[7, 200] = float("nan")
    got = fp8_gemm_blocks(*codes(a, b, square), square=square)
    assert got[7].isnan().all() and got[:7].isfinite().all() and got[8:].isfinite().all()


def test_no_rows_and_no_contraction_have_products_too():
    # A gradient over no tokens is zero.
    none = fp8_gemm_blocks(*codes(torch.zeros(0, 128), torch.zeros(32, 128), True), square=True)
    assert none.shape == (0, 32)
    a, b = (quantize_1x128_both_ref(torch.zeros(0, size)) for size in (48, 32))
    got = fp8_gemm_blocks(a.q_t, a.scale_t, b.q_t, b.scale_t, square=False)
    assert_bitwise_equal(got, torch.zeros(48, 32, dtype=torch.bfloat16))


def test_what_does_not_fit_is_named():
    a, b = operands(32, 48, 256)
    q_a, s_a, q_b, s_b = codes(a, b, True)
    with pytest.raises(ConfigError, match=r"a_MK is torch.bfloat16 .* whole blocks of 128 columns"):
        fp8_gemm_blocks(a, s_a, q_b, s_b, square=True)
    with pytest.raises(ConfigError, match=r"a_MK has K=128 and b_NK has K=256"):
        fp8_gemm_blocks(q_a[:, :128], s_a[:1], q_b, s_b, square=True)
    with pytest.raises(ConfigError, match=r"scale_a is torch.float32 \(32, 2\); it must be fp32 \(2, 32\)"):
        fp8_gemm_blocks(q_a, s_a.T, q_b, s_b, square=True)
    with pytest.raises(ConfigError, match=r"scale_b .* it must be fp32 \(2, 48\)"):
        fp8_gemm_blocks(q_a, s_a, q_b, s_b, square=False)


def self_check() -> str:
    (candidate,) = gemm_blocks.built_in("fp8_gemm_blocks")
    return verify(candidate, gemm_blocks.cases(candidate, Problem(op="fp8_gemm_blocks", precision="fp8"))).reason


def test_the_self_check_passes_what_computes_and_finds_what_does_not(monkeypatch):
    assert self_check() == ""

    def with_scales_of(other):
        return lambda a, s_a, b, s_b, *, square: fp8_gemm_blocks_ref(a, *other(s_a, b, s_b), square=square)

    wrong = {
        # A scale of another block, squares read the other way round, and NaN made a number.
        "wrong at forward": with_scales_of(lambda s_a, b, s_b: (s_a.roll(1, 0), b, s_b)),
        "wrong at wgrad": lambda a, s_a, b, s_b, *, square: fp8_gemm_blocks_ref(
            a, s_a, b, s_b if square else s_b.flip(0), square=square
        ),
        "hides a NaN of its input": with_scales_of(lambda s_a, b, s_b: (s_a.nan_to_num(nan=1.0), b, s_b)),
    }
    for reason, product in wrong.items():
        monkeypatch.setattr(gemm_blocks, "fp8_gemm_blocks", product)
        assert reason in self_check()


def test_a_product_that_raises_is_a_reason_not_an_error(monkeypatch):
    def refuse(*operands, square):
        raise NotImplementedError("DeepSeek style scaling is for SM90\nmore")

    monkeypatch.setattr(gemm_blocks, "fp8_gemm_blocks", refuse)
    assert self_check() == "raised NotImplementedError: DeepSeek style scaling is for SM90"


# ---- on a GPU ----


@pytest.fixture
def hopper() -> str:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("cuBLASLt has 1x128 scales on Hopper only")
    return "cuda"


@pytest.mark.gpu
def test_hopper_passes_its_self_check(hopper):
    assert why_rejected("fp8_gemm_blocks", torch.device("cuda", 0)) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 768, 4096)], ids=str)
def test_hopper_multiplies_as_the_reference(hopper, shape, square):
    a, b = operands(*shape, hopper)
    given = codes(a, b, square)
    got = fp8_gemm_blocks(*given, square=square)
    # DESIGN's floors: the product of the same operands, and the one in high precision.
    assert sqnr_db(fp8_gemm_blocks_ref(*given, square=square).float(), got.float()) > 60
    assert sqnr_db(a.float() @ b.float().T, got.float()) > 27


@pytest.mark.gpu
def test_hopper_keeps_nan_and_empty_products(hopper):
    a, b = operands(64, 48, 256, hopper)
    a[7, 200] = float("nan")
    got = fp8_gemm_blocks(*codes(a, b, True), square=True)
    assert got[7].isnan().all() and got[8:].isfinite().all()
    assert fp8_gemm_blocks(*codes(a[:0], b, True), square=True).shape == (0, 48)
