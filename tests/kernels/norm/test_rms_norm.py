"""RMSNorm and LayerNorm: no worse than torch at the same dtype, FP8 rows bit-equal to quantizing the result."""

import pytest
import torch
import torch.nn.functional as F

import aot
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than
from deepwell.formats.quantize import quantize
from deepwell.kernels.norm import rms_norm as N
from deepwell.kernels.quantize.fp8 import RowConfig, quantize_rows_ref

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Rows that fill a block, that do not, that are shorter than the smallest block, and one token.
FORWARD_CONFIGS = [RowConfig(tile=0, num_warps=warps) for warps in (4, 8, 16)]
BACKWARD_CONFIGS = [
    N.BackwardConfig(num_warps=8, programs_per_sm=1, num_stages=3),
    N.BackwardConfig(num_warps=4, programs_per_sm=4, num_stages=2),
]
SHAPES = [(9, 256), (5, 300), (1, 1000), (3, 17)]


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def make(t, d, device, dtype=torch.bfloat16):
    x, r, dy, dr = (torch.randn(t, d).to(dtype).to(device) for _ in range(4))
    x, r = x * 4, r * 2
    return x, r, dy, dr, (torch.rand(d) + 0.5).to(dtype).to(device), torch.randn(d).to(dtype).to(device)


def llama_norm(x, w, eps):
    """HF's LlamaRMSNorm, as torch runs it in any dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    n = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return w * n.to(x.dtype)


def torch_norm(kind, eps):
    if kind == "llama":
        return lambda x, w, b: llama_norm(x, w, eps)
    if kind == "torch":
        return lambda x, w, b: F.rms_norm(x, x.shape[-1:], w, eps)
    return lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, eps)


def torch_values(norm, tensors, dtype):
    """y, dx (+ the residual's gradient), dw and db of torch in `dtype`."""
    x, r, dy, dr, w, b = (tensor.to(dtype, copy=True) for tensor in tensors)
    x, w, b = x.requires_grad_(), w.requires_grad_(), b.requires_grad_()
    total = x + r
    y = norm(total, w, b)
    dx, dw, db = torch.autograd.grad((y, total), (x, w, b), (dy, dr), allow_unused=True)
    return y.detach(), dx, dw, db


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["llama", "torch", "layer"])
def test_forward_and_gradients_are_no_worse_than_torch(device, shape, kind):
    x, r, dy, dr, w, b = make(*shape, device)
    # Both sides start from the sum as it is rounded to bf16, so that only the norm is compared.
    x = (x + r) - r
    tensors = (x, r, dy, dr, w, b)
    total = x + r
    norm = torch_norm(kind, 1e-5)
    exact_inputs = (total.double(), torch.zeros_like(r), dy, dr, w, b)
    exact = torch_values(norm, exact_inputs, torch.float64)
    own = torch_values(norm, tensors, torch.bfloat16)
    if kind == "layer":
        options = N.NormOptions(eps=1e-5, rounding="torch", center=True)
    else:
        options = N.NormOptions(eps=1e-5, rounding=kind)
    made = N.norm(x, w, b if kind == "layer" else None, residual_TD=r, options=options)
    grads = N.norm_backward(dy, made.total, w, made.rstd, made.mean, d_residual_TD=dr, options=options)
    assert_bitwise_equal(made.total, total, "x + residual")
    assert_no_worse_than(made.y, own[0], exact[0])
    assert_no_worse_than(grads.dx, own[1], exact[1])
    assert_no_worse_than(grads.dw, own[2], exact[2])
    if kind == "layer":
        assert_no_worse_than(grads.db, own[3], exact[3])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_rows_are_the_quantized_result_bit_for_bit(device, dtype):
    x, r, dy, dr, w, _ = make(7, 200, device)
    x[2] = 0
    r[2] = 0
    options = N.NormOptions(fp8=dtype)
    name = f"fp8_{'e4m3' if dtype == E4M3 else 'e5m2'}_row_pow2"
    made = N.norm(x, w, residual_TD=r, options=options)
    grads = N.norm_backward(dy, made.total, w, made.rstd, d_residual_TD=dr, options=options)
    for got, high in ((made, made.y), (grads, grads.dx)):
        wanted = quantize(high, name)
        assert_bitwise_equal(got.q, wanted.data, "codes")
        assert_bitwise_equal(got.scale, wanted.scales[:, 0], "scales")


def test_codes_alone_are_those_written_beside_the_result(device):
    x, _, dy, _, w, _ = make(4, 130, device)
    alone, beside = N.NormOptions(write=False, fp8=E4M3), N.NormOptions(fp8=E4M3)
    a, b = N.norm(x, w, options=alone), N.norm(x, w, options=beside)
    assert a.y is None
    assert a.total is None
    assert_bitwise_equal(a.q, b.q, "codes")
    c = N.norm_backward(dy, x, w, a.rstd, options=alone)
    assert c.dx is None
    assert_bitwise_equal(c.q, N.norm_backward(dy, x, w, a.rstd, options=beside).q, "codes of dx")


@pytest.mark.parametrize("config", FORWARD_CONFIGS, ids=str)
def test_every_forward_config_agrees(device, config):
    # fp32 sums in another order: rstd may differ in its last bits, y not beyond one rounding.
    x, r, _, _, w, _ = make(21, 333, device)
    made = N.norm(x, w, residual_TD=r, options=N.NormOptions(fp8=E4M3), config=config)
    ref = N.norm_ref(x, w, None, r, N.NormOptions(fp8=E4M3))
    assert_bitwise_equal(made.total, ref.total, "x + residual")
    torch.testing.assert_close(made.rstd, ref.rstd, rtol=1e-6, atol=0)
    assert_no_worse_than(made.y, ref.y, llama_norm(ref.total.double(), w.double(), 1e-6))


@pytest.mark.parametrize("config", BACKWARD_CONFIGS, ids=str)
def test_every_backward_config_sums_all_rows_into_dw(device, config):
    # More rows than programs (interpreted: two per "multiprocessor" count), so that programs loop.
    x, _, dy, dr, w, _ = make(23, 200, device)
    made = N.norm(x, w)
    got = N.norm_backward(dy, x, w, made.rstd, d_residual_TD=dr, config=config)
    exact = torch_values(torch_norm("llama", 1e-6), (x.double(), torch.zeros_like(x), dy, dr, w, w), torch.float64)
    own = torch_values(torch_norm("llama", 1e-6), (x, torch.zeros_like(x), dy, dr, w, w), torch.bfloat16)
    assert_no_worse_than(got.dx, own[1], exact[1])
    assert_no_worse_than(got.dw, own[2], exact[2])


def test_the_weight_gradient_is_the_same_bits_every_time(device):
    x, _, dy, _, w, _ = make(50, 64, device)
    rstd = N.norm(x, w).rstd
    first, second = (N.norm_backward(dy, x, w, rstd).dw for _ in range(2))
    assert_bitwise_equal(first, second, "dw")


def test_fp32_and_strided_rows_are_normalised(device):
    x, r, dy, dr, w, _ = make(6, 96, device, torch.float32)
    wide = torch.cat([x, x], dim=1)[:, 96:]
    made, ref = N.norm(wide, w, residual_TD=r), N.norm_ref(x, w, None, r, N.NormOptions())
    torch.testing.assert_close(made.y, ref.y)
    grads = N.norm_backward(torch.cat([dy, dy], 1)[:, :96], made.total, w, made.rstd, d_residual_TD=dr)
    wanted = N.norm_backward_ref(dy, ref, w, dr, N.NormOptions())
    torch.testing.assert_close(grads.dx, wanted.dx)
    torch.testing.assert_close(grads.dw, wanted.dw)


def test_a_nan_stays_in_its_row_and_shows(device):
    x, _, dy, _, w, _ = make(4, 64, device)
    x[1, 5] = float("nan")
    made = N.norm(x, w, options=N.NormOptions(fp8=E4M3))
    assert made.scale.isnan().tolist() == [False, True, False, False]
    assert made.y.isnan().any(1).tolist() == [False, True, False, False]
    assert N.norm_backward(dy, x, w, made.rstd).dw.isnan().any()


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_factors_of_rows_give_the_bits_of_rows_multiplied_before(device, kind):
    # What a FP8 GEMM leaves to its reader: powers of two, another for every row. (Rows are not multiples of
    # the block, nor of the rows of a program.)
    x, r, dy, dr, w, b = make(5, 300, device)
    factor = torch.tensor([1.0, 2.0**-3, 2.0**4, 2.0**-20, 2.0**-1], device=device)
    scaled_x, scaled_dy = ((a.float() * factor[:, None]).to(a.dtype) for a in (x, dy))
    options = N.NormOptions(eps=1e-5, rounding="torch", center=kind == "layer", fp8=E4M3)

    def both(x, dy, factor):
        given = {"factor_T": factor, "options": options}
        made = N.norm(x, w, b if kind == "layer" else None, residual_TD=r, **given)
        return made, N.norm_backward(dy, made.total, w, made.rstd, made.mean, d_residual_TD=dr, **given)

    (made, grads), (wanted, wanted_grads) = both(x, dy, factor), both(scaled_x, scaled_dy, None)
    assert not torch.equal(made.total, x + r)
    for one, other in zip((*made, *grads), (*wanted, *wanted_grads), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_bitwise_equal(one, other)


def test_no_tokens_give_empty_results_and_a_zero_weight_gradient(device):
    x, w = torch.empty(0, 64, device=device), torch.ones(64, device=device)
    made = N.norm(x, w, options=N.NormOptions(fp8=E4M3))
    assert (made.y.shape, made.q.shape, made.rstd.shape) == ((0, 64), (0, 64), (0,))
    grads = N.norm_backward(x, x, w, made.rstd)
    assert not grads.dw.any()


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda x, w: N.norm(x, w[:3]), ConfigError, "w_D must have shape"),
        (lambda x, w: N.norm(x, w, residual_TD=x[:1]), ConfigError, "residual_TD must have shape"),
        (lambda x, w: N.norm(x, w, residual_TD=x.double()), ConfigError, "residual_TD has dtype"),
        (lambda x, w: N.norm(x[:, :0], w[:0]), ConfigError, "no columns"),
        (lambda x, w: N.norm(x, w, factor_T=w[:2]), ConfigError, "factor_T is for an x that a residual"),
        (lambda x, w: N.norm(x, w, residual_TD=x, factor_T=w), ConfigError, "factor_T must have shape"),
        (lambda x, w: N.norm(x, w, residual_TD=x, factor_T=w[:2].half()), ConfigError, "factor_T is torch.float16"),
        (lambda x, w: N.NormOptions(rounding="up"), ConfigError, "rounding must be one of"),
        (lambda x, w: N.NormOptions(write=False), ConfigError, "nothing would be written"),
        (lambda x, w: N.norm_backward(x, x[:1], w, w[:1]), ConfigError, "dy_TD must have shape"),
    ],
)
def test_wrong_arguments_are_named(call, error, names):
    with pytest.raises(error, match=names):
        call(torch.randn(2, 8), torch.randn(8))


def test_rows_that_do_not_fit_registers_are_refused_on_every_device():
    x = torch.empty(1, N.MAX_COLUMNS + 1)
    with pytest.raises(UnsupportedError, match="32769 columns"):
        N.norm(x, x[0])


# ---- what the compiler makes of them, without a GPU ----


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("factor", [None, torch.float32], ids=["scaled", "with factors"])
def test_the_forward_with_residual_and_fp8_compiles_to_vectors_without_spills(arch, factor):
    config = N.default_forward_config(4096)
    arguments = {
        **dict.fromkeys(("x_ptr", "residual_ptr", "w_ptr", "total_ptr"), torch.bfloat16),
        "factor_ptr": factor,
        **dict.fromkeys(("b_ptr", "y_ptr", "mean_ptr"), None),
        **dict.fromkeys(("scale_ptr", "rstd_ptr"), torch.float32),
        "q_ptr": E4M3,
        **dict.fromkeys(("T", "D", "stride_xt", "stride_rt"), "i32"),
        "eps": "fp32",
        "FP8_MAX": 448.0,
        "ROUND_FIRST": True,
        "ROWS": config.rows_per_program(4096),
        "BLOCK": config.block(4096),
        **N._layout(config.block(4096), 4096, config.num_warps),
        "ASM": True,
    }
    made = aot.compile_kernel(N._norm_kernel, arguments, arch=arch, num_warps=config.num_warps)
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.count(r"ld\.global\S*\.v4\.b32") >= 3
    assert made.count(r"st\.global\S*\.v4\.b32") >= 2
    assert made.count(r"[ls][dt]\.global\S*\.b(8|16)\b") == 0
    # 16 elements a thread: rounded, times the weight and encoded two at a time, no division.
    assert made.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") == 8
    assert made.count(r"mul\.rn\.bf16x2") == 16
    assert made.count(r"div\.") == 0


@pytest.mark.parametrize(("arch", "columns"), [(90, 2048), (90, 4096), (90, 8192), (100, 4096)])
@pytest.mark.parametrize("factor", [None, torch.float32], ids=["scaled", "with factors"])
def test_the_backward_holds_its_rows_in_registers_without_spills(arch, columns, factor):
    config = N.default_backward_config(columns)
    arguments = {
        **dict.fromkeys(("dy_ptr", "x_ptr", "w_ptr", "dr_ptr", "dx_ptr"), torch.bfloat16),
        **dict.fromkeys(("mean_ptr", "db_ptr"), None),
        "factor_ptr": factor,
        **dict.fromkeys(("rstd_ptr", "scale_ptr", "dw_ptr"), torch.float32),
        "q_ptr": E4M3,
        **dict.fromkeys(("T", "D", "stride_dyt", "stride_xt", "stride_drt"), "i32"),
        "FP8_MAX": 448.0,
        "BLOCK": columns,
        "NUM_STAGES": config.num_stages,
        "DENSE": True,
        **N._layout(columns, columns, config.num_warps),
        "ASM": True,
    }
    made = aot.compile_kernel(N._norm_backward_kernel, arguments, arch=arch, num_warps=config.num_warps)
    assert made.spill_bytes == made.stack_bytes == 0
    # All programs are resident at once: registers and shared memory for all of a multiprocessor's.
    assert made.registers * 32 * config.num_warps * config.programs_per_sm <= 65536
    assert made.shared_bytes * config.programs_per_sm <= aot.MAX_SHARED_BYTES
    # The next row is under way in 16-byte copies while this one is computed.
    assert made.count(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10") >= 3
    assert made.count(r"[ls][dt]\.global\S*\.b(8|16)\b") == 0
    # Rounded and encoded two at a time, and nothing is divided, nor masked.
    words = columns // (32 * config.num_warps) // 2
    assert made.count(r"cvt\.rn\.bf16x2\.f32") == made.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") == words
    assert words // 2 < made.count(r"max\.NaN\.xorsign\.abs\.bf16x2") < words
    assert made.count(r"cvt\.rn\.bf16\.f32") <= 1
    assert made.count(r"div\.") == 0


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_scales_of_rows_of_every_size_have_the_bits_of_a_division(device, dtype):
    # Largest values on both sides of 1.75 times a power of two, where the scale's exponent changes; subnormal ones,
    # none at all, and rows that are not finite.
    exponents = torch.cat(
        (torch.arange(0, 11, 2), torch.arange(125, 130), torch.arange(247, 255, 2), torch.tensor([254]))
    )
    near = (exponents[:, None] * 0x80 + torch.tensor([0, 0x60, 0x61])).flatten()
    sizes = torch.cat((near, torch.tensor([1, 2, 0x7F80, 0x7FC0])))
    dr = torch.zeros(len(sizes), 128, dtype=torch.bfloat16)
    dr[:, 77] = sizes.to(torch.int16).view(torch.bfloat16)
    dr, zero = dr.to(device), torch.zeros_like(dr, device=device)
    options = N.NormOptions(fp8=dtype)
    # Gradients of 0 leave dx as the residual's.
    rstd = torch.ones(len(sizes), device=device)
    got = N.norm_backward(zero, zero, zero[0], rstd, d_residual_TD=dr, options=options)
    assert_bitwise_equal(got.dx.nan_to_num(), dr.nan_to_num(), "dx")
    q, scale = quantize_rows_ref(dr, dtype=dtype)
    assert_bitwise_equal(got.scale.nan_to_num(nan=-1.0), scale.nan_to_num(nan=-1.0), "scale")
    assert_bitwise_equal(got.q.float().nan_to_num(nan=-1.0), q.float().nan_to_num(nan=-1.0), "codes")
