"""FP8 products: equal to the reference on the same codes, above the floor against high precision."""

import pytest
import torch

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.gemm import fp8 as gemm
from deepwell.kernels.gemm.fp8 import ALIGNMENT, fp8_gemm, fp8_gemm_ref
from deepwell.kernels.gemm.torch_ops import ops
from deepwell.kernels.quantize.fp8 import quantize_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# A square, a wide and a narrow one, and a single row.
SHAPES = [(64, 64, 64), (48, 256, 32), (1, 32, 128)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """No Triton here: the CPU runs the reference, a GPU runs cuBLASLt."""
    return request.param


def _operands(m, n, k, device):
    a, b = torch.randn(m, k, device=device).bfloat16(), torch.randn(n, k, device=device).bfloat16()
    return a, b, quantize_rows(a), quantize_rows(b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fast", [False, True])
def test_the_product_of_rows_matches_the_reference(device, shape, fast):
    a, b, (q_a, s_a), (q_b, s_b) = _operands(*shape, device)
    got = fp8_gemm(q_a, s_a, q_b, s_b, fast=fast)
    ref = fp8_gemm_ref(q_a, s_a, q_b, s_b, out_dtype=torch.float32)
    assert got.dtype is torch.bfloat16 and got.shape == ref.shape
    # DESIGN.md: 80 dB against the dequantized product rounded to the output's dtype; the CPU is the reference itself.
    assert sqnr_db(ref.bfloat16(), got) > (80 if device == "cpu" else 60)
    assert sqnr_db(a.float() @ b.float().T, got) > 27


def test_one_scale_for_a_tensor_is_the_same_scale_for_every_row(device):
    _, _, (q_a, _), (q_b, _) = _operands(32, 48, 64, device)
    scale_a, scale_b = torch.tensor(0.25, device=device), torch.tensor(0.5, device=device)
    one = fp8_gemm(q_a, scale_a, q_b, scale_b, fast=False)
    many = fp8_gemm(q_a, scale_a.expand(32).contiguous(), q_b, scale_b.expand(48).contiguous(), fast=False)
    assert_bitwise_equal(one, many)


def test_e5m2_gradients_and_no_rows(device):
    _, _, (q_a, s_a), (q_b, s_b) = _operands(16, 32, 64, device)
    got = fp8_gemm(q_a.float().to(E5M2), s_a, q_b, s_b, fast=False)
    ref = fp8_gemm_ref(q_a.float().to(E5M2), s_a, q_b, s_b, out_dtype=torch.bfloat16)
    assert sqnr_db(ref, got) > (80 if device == "cpu" else 60)
    assert fp8_gemm(q_a[:0], s_a[:0], q_b, s_b).shape == (0, 32)


@pytest.mark.parametrize("m, n, k", [(7, 20, 36), (16, 10, 32), (5, 32, 3), (1, 1, 1)])
def test_the_engines_op_fills_up_sizes_that_the_gemm_does_not_take(device, m, n, k):
    # Zeros add nothing to a sum: the result is that of the operands as they are.
    _, _, (q_a, s_a), (q_b, s_b) = _operands(m, n, k, device)
    got = ops.fp8_gemm(q_a, s_a, q_b, s_b, False)
    ref = fp8_gemm_ref(q_a, s_a, q_b, s_b, out_dtype=torch.bfloat16)
    assert got.is_contiguous() and got.shape == (m, n)
    assert sqnr_db(ref, got) > (80 if device == "cpu" else 50)


def test_nan_in_a_scale_or_code_is_seen(device):
    _, _, (q_a, s_a), (q_b, s_b) = _operands(16, 32, 64, device)
    s_a[3] = float("nan")
    got = fp8_gemm(q_a, s_a, q_b, s_b)
    assert got[3].isnan().all() and got[:3].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, sa, b, sb: (a.float(), sa, b, sb), r"a_MK is torch\.float32"),
        (lambda a, sa, b, sb: (a, sa, b[0], sb), "b_NK is .* with 1 dimensions"),
        (lambda a, sa, b, sb: (a, sa[:3], b, sb), r"scale of a_MK is torch\.float32 with 3 entries"),
        (lambda a, sa, b, sb: (a, sa.double(), b, sb), r"scale of a_MK is torch\.float64"),
        (lambda a, sa, b, sb: (a, sa, b[:, :32].contiguous(), sb), "K=64 and b_NK has K=32"),
    ],
)
def test_wrong_operands_are_named(device, change, message):
    _, _, (q_a, s_a), (q_b, s_b) = _operands(16, 32, 64, device)
    with pytest.raises(ConfigError, match=message):
        fp8_gemm(*change(q_a, s_a, q_b, s_b))


@pytest.mark.gpu
def test_a_gpu_refuses_lines_that_are_not_whole():
    _, _, (q_a, s_a), (q_b, s_b) = _operands(16, 24, 64, "cuda")
    with pytest.raises(UnsupportedError, match=f"multiples of {ALIGNMENT}"):
        fp8_gemm(q_a, s_a, q_b, s_b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_row_scaled_results_are_those_that_the_device_writes(dtype, monkeypatch):
    cpu = torch.device("cpu")
    assert gemm.row_dtype(dtype, cpu) is dtype
    for capability, wanted in {(9, 0): dtype, (8, 9): torch.bfloat16, (10, 0): torch.bfloat16}.items():
        monkeypatch.setattr(gemm, "_capability", lambda device, found=capability: found)
        assert gemm.row_dtype(dtype, cpu) is wanted
