"""Block-scaled products: the reference, the Triton kernel interpreted and compiled for sm_100, the vendor's call."""

import re
from dataclasses import asdict, replace

import ml_dtypes
import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import OutOfResources, interpreter

import aot
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.formats.quantize import quantize
from deepwell.kernels.gemm import block_scaled as B
from deepwell.kernels.gemm import native_candidates as native
from deepwell.kernels.tune import choose, sandbox
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.verify import Proof, verify

SHAPES = [(16, 32, 64), (130, 144, 96), (5, 7, 40)]


def operand(x, fmt):
    """An operand by the reference quantizers alone."""
    q = quantize(x, fmt)
    return B.ScaledOperand(q.data, q.scale_swizzled(), q.global_scale)


def pair(m, n, k, fmt):
    x, w = torch.randn(m, k) * torch.logspace(-2, 2, m)[:, None], torch.randn(n, k) * torch.logspace(-1, 1, k)
    return x, w, operand(x, fmt), operand(w, "nvfp4_16x16" if fmt == "nvfp4" else fmt)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp8_e5m2", "nvfp4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_a_cpu_the_product_is_the_emulation_bit_for_bit(fmt, shape):
    x, w, a, b = pair(*shape, fmt)
    weights = "nvfp4_16x16" if fmt == "nvfp4" else fmt
    wanted = quantize(x, fmt).dequantize() @ quantize(w, weights).dequantize().T
    for candidate in B.CANDIDATES:
        got = B.block_scaled_gemm(a, b, out_dtype=torch.float32, candidate=candidate)
        assert_bitwise_equal(got, wanted, candidate)
    assert_bitwise_equal(B.block_scaled_gemm(a, b), wanted.to(torch.bfloat16), "bf16")


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize(("fp_db", "shape"), [({"mxfp8": 27.0, "nvfp4": 14.0}, (128, 96, 512))], ids=["whole"])
def test_the_product_is_as_near_to_high_precision_as_the_format_promises(fmt, fp_db, shape):
    m, n, k = shape
    x, w = torch.randn(m, k), torch.randn(n, k)
    got = B.block_scaled_gemm(operand(x, fmt), operand(w, fmt), out_dtype=torch.float32)
    assert sqnr_db(x @ w.T, got) > fp_db[fmt]


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_empty_sides_give_zeros_or_nothing(fmt):
    for m, n, k in ((0, 16, 32), (16, 0, 32), (16, 16, 0)):
        a, b = operand(torch.zeros(m, k), fmt), operand(torch.zeros(n, k), fmt)
        got = B.block_scaled_gemm(a, b)
        assert got.shape == (m, n) and not got.any()


def test_wrong_operands_are_named():
    mx, nv = operand(torch.randn(8, 64), "mxfp8"), operand(torch.randn(8, 64), "nvfp4")
    with pytest.raises(ConfigError, match="both must be MXFP8 or both NVFP4"):
        B.block_scaled_gemm(mx, nv)
    with pytest.raises(ConfigError, match=r"a\.scale"):
        B.block_scaled_gemm(mx._replace(scale=mx.scale[:-1]), mx)
    with pytest.raises(ConfigError, match=r"b\.global_scale"):
        B.block_scaled_gemm(nv, nv._replace(global_scale=None))
    with pytest.raises(ConfigError, match=r"a\.data"):
        B.block_scaled_gemm(mx._replace(data=mx.data.float()), mx)
    with pytest.raises(ConfigError, match="out_dtype"):
        B.block_scaled_gemm(mx, mx, out_dtype=torch.float64)
    with pytest.raises(ConfigError, match="candidate"):
        B.block_scaled_gemm(mx, mx, candidate="cublas")


# ---- the Triton kernel, interpreted ----

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def _decoded(handle, scale, fp4, rows_first):
    """fp32 values (rows, K) of one side of a scaled dot."""
    codes = handle.data if rows_first else handle.data.T
    if fp4:
        values = _E2M1[np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)]
    else:
        name = handle.dtype.scalar.name
        values = codes.view({"fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2}[name])
    scales = scale.data
    if scale.dtype.scalar.name == "fp8e4nv":
        scales = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        scales = np.exp2(scales.astype(np.float32) - 127)
    return values.astype(np.float32) * np.repeat(scales, values.shape[1] // scales.shape[1], axis=1)


def _create_dot_scaled(self, a, scale_a, format_a, b, scale_b, format_b, fast_math, a_k_pack, b_k_pack, acc):
    """tl.dot_scaled by its documentation: Triton 3.6.0's interpreter has none, 3.9.0's reads E4M3 scales as E8M0."""
    assert a_k_pack and b_k_pack
    left = _decoded(a, scale_a, "E2M1" in str(format_a).upper(), True)
    right = _decoded(b, scale_b, "E2M1" in str(format_b).upper(), False)
    return interpreter.TensorHandle(acc.data + left @ right.T, acc.dtype.scalar)


_own_dot_scaled = TritonSemantic.dot_scaled


def _dot_scaled(self, a, scale_a, format_a, b, scale_b, format_b, *rest):
    """The front end reads the formats' `.value`; interpreted kernels hold plain strings."""
    return _own_dot_scaled(self, a, scale_a, tl.constexpr(format_a), b, scale_b, tl.constexpr(format_b), *rest)


@pytest.fixture
def interpreted_dot(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(TritonSemantic, "dot_scaled", _dot_scaled)
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot_scaled", _create_dot_scaled, raising=False)
    return device


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp8_e5m2", "nvfp4"])
@pytest.mark.parametrize("shape", [(130, 144, 96), (128, 256, 384), (260, 272, 576)], ids=str)
def test_the_triton_kernel_is_the_reference(interpreted_dot, fmt, shape):
    device = interpreted_dot
    if device == "cuda" and fmt == "nvfp4" and torch.cuda.get_device_capability()[0] < 10:
        pytest.skip("Triton 3.6 cannot compile NVFP4 products for Hopper")
    _, _, a, b = pair(*shape, fmt)
    a, b = (B.ScaledOperand(*(None if t is None else t.to(device) for t in side)) for side in (a, b))
    wanted = B.block_scaled_gemm_ref(a, b, out_dtype=torch.float32)
    got = B.block_scaled_gemm(a, b, out_dtype=torch.float32, candidate="triton")
    # The same exact products, added in another order.
    assert sqnr_db(wanted, got) > 100 if device == "cpu" else sqnr_db(wanted, got) > 60
    # Rows that carry little weight must be right too: each row by itself.
    for row in range(0, shape[0], 37):
        assert sqnr_db(wanted[row], got[row]) > 60


# ---- compiled without a GPU ----


def arguments(config, fmt):
    is_nv = fmt == "nvfp4"
    element, scale, pack, vector = ("u8", "fp8e4nv", 2, 16) if is_nv else ("fp8e4nv", "u8", 1, 32)
    tiles = config.block_k // vector // 4

    def desc(dtype, *block):
        return f"tensordesc<{dtype}[{', '.join(map(str, block))}]>"

    name = "e2m1" if is_nv else "e4m3"
    return {
        "a_desc": desc(element, config.block_m, config.block_k // pack),
        "scale_a_desc": desc(scale, 1, config.block_m // 128, tiles, 2, 256),
        "b_desc": desc(element, config.block_n, config.block_k // pack),
        "scale_b_desc": desc(scale, 1, config.block_n // 128, tiles, 2, 256),
        "c_desc": desc("bf16", config.block_m, config.block_n),
        "global_a_ptr": torch.float32 if is_nv else None,
        "global_b_ptr": torch.float32 if is_nv else None,
        "M": "i32",
        "N": "i32",
        "K": "i32",
        "FORMAT_A": name,
        "FORMAT_B": name,
        "PACK": pack,
        "VECTOR": vector,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "NUM_STAGES": config.num_stages,
        "GROUP": 8,
    }


KINDS = {
    "mxfp8": r"tcgen05\.mma\.cta_group::1\.kind::mxf8f6f4\.block_scale\.scale_vec::1X",
    "nvfp4": r"tcgen05\.mma\.cta_group::1\.kind::mxf4nvf4\.block_scale\.scale_vec::4X",
}
# K of one instruction.
STEP = {"mxfp8": 32, "nvfp4": 64}


@pytest.mark.parametrize(
    ("fmt", "config"),
    [("mxfp8", c) for c in B.MX_CONFIGS] + [("nvfp4", c) for c in B.NV_CONFIGS],
    ids=str,
)
def test_on_sm_100_the_kernel_is_block_scaled_tensor_core_code(fmt, config):
    made = aot.compile_kernel(B._block_scaled_kernel, arguments(config, fmt), arch=100, num_warps=config.num_warps)
    # Too much tensor memory is no compile error: the instructions silently go. So count them.
    count = made.count(KINDS[fmt])
    assert count > 0 and count % (config.block_k // STEP[fmt]) == 0
    assert count == made.count(r"tcgen05\.mma\.")
    assert made.count(r"tcgen05\.cp\.cta_group::1\.warpx4\.32x128b") > 0, "scales go to tensor memory as they lie"
    assert 0 < made.tmem_columns <= 512
    assert made.shared_bytes <= aot.MAX_SHARED_BYTES
    assert made.spill_bytes == 0 and made.stack_bytes == 0
    assert made.count(r"cp\.async\.bulk\.tensor") > 0


def test_on_sm_90_the_mxfp8_kernel_multiplies_in_bf16():
    config = B.HOPPER_CONFIG
    made = aot.compile_kernel(B._block_scaled_kernel, arguments(config, "mxfp8"), arch=90, num_warps=config.num_warps)
    assert made.count(r"wgmma\.mma_async[\w.]*bf16\.bf16") > 0
    assert made.spill_bytes == 0 and made.shared_bytes <= aot.MAX_SHARED_BYTES


# ---- the vendor's call: its form, since no device here runs it ----


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_the_vendor_is_called_as_torch_documents_it(fmt, monkeypatch):
    _, _, a, b = pair(130, 144, 96, fmt)
    seen = {}

    def scaled_mm(mat_a, mat_b, scale_a, recipe_a, scale_b, recipe_b, **options):
        seen.update(options)
        kinds, orders = B.F.ScalingType, B.F.SwizzleType
        scales = [scale_a, scale_b] if fmt == "mxfp8" else [scale_a[0], scale_b[0]]
        blocks = 96 // (32 if fmt == "mxfp8" else 16)
        for scale, rows in zip(scales, (130, 144), strict=True):
            assert scale.dtype == (torch.float8_e8m0fnu if fmt == "mxfp8" else torch.float8_e4m3fn)
            assert scale.is_contiguous() and scale.numel() == -(-rows // 128) * 128 * -(-blocks // 4) * 4
        if fmt == "mxfp8":
            assert recipe_a == recipe_b == kinds.BlockWise1x32
            assert options["swizzle_a"] == options["swizzle_b"] == orders.SWIZZLE_32_4_4
        else:
            assert mat_a.dtype == mat_b.dtype == torch.float4_e2m1fn_x2
            assert recipe_a == recipe_b == [kinds.BlockWise1x16, kinds.TensorWise]
            assert options["swizzle_a"] == options["swizzle_b"] == [orders.SWIZZLE_32_4_4, orders.NO_SWIZZLE]
            assert scale_a[1].numel() == scale_b[1].numel() == 1 and scale_a[1].dtype == torch.float32
        # Row-major times column-major.
        assert mat_a.stride(1) == 1 and mat_b.stride(0) == 1
        return torch.zeros(mat_a.shape[0], mat_b.shape[1], dtype=options["output_dtype"])

    monkeypatch.setattr(B.F, "scaled_mm", scaled_mm)
    assert B._vendor(a, b, torch.bfloat16).shape == (130, 144)
    assert seen["output_dtype"] == torch.bfloat16


def test_operands_are_padded_to_whole_lines_without_touching_the_scales():
    a = operand(torch.randn(5, 40), "nvfp4")
    filled = B._filled(a, 16)
    assert filled.data.shape == (16, 32) and filled.length == 64
    assert filled.scale is a.scale
    wanted, got = B.dequantize_operand(a), B.dequantize_operand(filled)
    # Scale tiles are padded to 128 rows and 4 blocks: the filled operand reads the same bytes. (No products are
    # compared: how a CPU's library adds up 40 of them and 24 zeros is its own business.)
    assert torch.equal(got[:5, :40], wanted) and not got[5:].any() and not got[:, 40:].any()


def test_what_cutlass_has_no_kernel_for_is_said():
    a = operand(torch.randn(16, 32), "mxfp8_e5m2")
    with pytest.raises(UnsupportedError, match="E5M2"):
        B._cutlass(a, a, torch.bfloat16)


# ---- the self-check ----


def proof_of(fmt, function, kernel="vendor", op="block_scaled_gemm"):
    (candidate,) = [c for c in native.built_in(op) if (c.name, c.precision) == (kernel, fmt)]
    candidate = candidate if function is None else replace(candidate, fn=function)
    return verify(candidate, native.cases(candidate, Problem(op=op, precision=fmt)))


def right(a, b, dtype):
    return B.block_scaled_gemm_ref(a, b, out_dtype=dtype)


def test_a_right_kernel_passes_its_self_check():
    for fmt in native.FORMATS:
        found = proof_of(fmt, right)
        assert found.is_passed, found
        assert found.sqnr_db > 45


def swapped_scale_tiles(a, b, dtype):
    """As if the kernel took the scales row by row instead of in tile order."""
    plain = B.layout.unswizzle(a.scale, *B.layout.padded_shape(a.data.shape[0], -(-a.length // a.block)))
    return right(a._replace(scale=plain.flatten()), b, dtype)


def without_global_scale(a, b, dtype):
    return (
        right(a._replace(global_scale=torch.ones(())), b, dtype) if a.global_scale is not None else right(a, a, dtype)
    )


def short_sum(a, b, dtype):
    """A kernel that forgets the last block of a ragged contraction."""
    if a.length % 128 == 0:
        return right(a, b, dtype)
    values = B.dequantize_operand(a)
    values[:, a.length // 128 * 128 :] = 0
    return (values @ B.dequantize_operand(b).T).to(dtype)


def hides_nan(a, b, dtype):
    return right(a, b, dtype).nan_to_num(0.0)


def raises(a, b, dtype):
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul")


def refuses(a, b, dtype):
    """torch's checks of values are ValueErrors."""
    raise ValueError("scale_a must be swizzled to SWIZZLE_32_4_4 format")


def does_not_compile(a, b, dtype):
    raise OutOfResources(300000, 232448, "shared memory")


def in_fp16_sums(a, b, dtype):
    """Sums in half precision: the right shape of answer, the wrong accumulator."""
    left, other = B.dequantize_operand(a), B.dequantize_operand(b)
    acc = torch.zeros(left.shape[0], other.shape[0], dtype=torch.bfloat16)
    for i in range(0, left.shape[1], 16):
        acc += (left[:, i : i + 16] @ other[:, i : i + 16].T).to(torch.bfloat16)
    return acc.to(dtype)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (swapped_scale_tiles, "dB|finite"),
        (without_global_scale, "dB|returns"),
        (short_sum, "dB"),
        (hides_nan, "hides a NaN"),
        (raises, "NOT_SUPPORTED"),
        (refuses, "swizzled"),
        (does_not_compile, "shared memory"),
        (in_fp16_sums, "dB"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("fmt", native.FORMATS)
def test_a_wrong_kernel_fails_its_self_check_with_the_reason(fmt, wrong, reason):
    found = proof_of(fmt, wrong).reason
    assert re.search(reason, found), found


def test_a_nan_must_stay_in_its_row_of_mxfp8():
    def spoils(a, b, dtype):
        c = right(a, b, dtype)
        return c.fill_(float("nan")) if c.isnan().any() else c

    assert "where the reference is finite" in proof_of("mxfp8", spoils).reason
    assert proof_of("nvfp4", spoils).is_passed  # its one global scale spoils all


def test_the_quantizers_pass_theirs_and_a_wrong_one_does_not(monkeypatch):
    for fmt in native.FORMATS:
        assert proof_of(fmt, None, "quantize", "block_scaled_quantize").is_passed
    honest = native.quantize_nvfp4
    monkeypatch.setattr(native, "quantize_nvfp4", lambda x: honest(x * 1.03))
    found = proof_of("nvfp4", None, "quantize", "block_scaled_quantize").reason
    assert "equal bits are needed" in found


def test_the_first_candidate_that_passes_is_taken_and_none_is_a_reason(monkeypatch):
    device, tried = torch.device("cpu"), []

    def found(**passed):
        tried.clear()
        choose.first_right.cache_clear()

        def proof_of(candidate, problem):
            tried.append(candidate.name)
            return Proof(reason="" if passed.get(candidate.name, True) else "is wrong", sqnr_db=50.0)

        monkeypatch.setattr(choose, "proof_of", proof_of)
        return native.native_kernel("mxfp8", device)

    # What stands behind the first that passes is not even tried: a kernel that hangs cannot stop a training run.
    assert found(vendor=False, triton=True)[0] == "triton" and tried == ["quantize", "vendor", "triton"]
    kernel, reason = found(vendor=False, triton=False, cutlass=False)
    assert kernel is None and reason == "vendor is wrong; triton is wrong; cutlass is wrong"
    kernel, reason = found(quantize=False)
    assert kernel is None and reason == "quantize is wrong" and tried == ["quantize"]
    choose.first_right.cache_clear()


@pytest.mark.parametrize(
    ("entry", "timeout_s", "reason"),
    [
        ("import time; time.sleep(60)", 1.0, "hangs"),
        ("import os; os.abort()", 60.0, "ended its process with status -6"),
        ("raise SystemExit('no kernel image')", 60.0, "no kernel image"),
        ("print('hello')", 60.0, "instead of a proof"),
        ("pass", 60.0, "ended its process"),
    ],
)
def test_a_kernel_that_hangs_or_crashes_alone_is_a_finding(entry, timeout_s, reason):
    assert reason in sandbox._in_fresh_process(entry, {}, timeout_s, "").reason


def test_a_proof_from_another_process_is_the_same_proof():
    (candidate,) = [c for c in native.built_in("block_scaled_gemm") if (c.name, c.precision) == ("vendor", "nvfp4")]
    request = {**sandbox._address(candidate), "problem": asdict(Problem(op=candidate.op, precision="nvfp4"))}
    found = sandbox._in_fresh_process(sandbox._ENTRY, {**request, "at_size": False}, 120.0, "")
    assert found == proof_of("nvfp4", None)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", native.FORMATS)
def test_on_a_gpu_the_quantizers_prove_themselves_and_blackwell_has_a_native_kernel(fmt):
    device = torch.device("cuda", torch.cuda.current_device())
    assert choose.why_rejected("block_scaled_quantize", device, fmt) == ""
    kernel, reason = native.native_kernel(fmt, device)
    if torch.cuda.get_device_capability()[0] >= 10:
        assert kernel is not None, reason
    elif fmt == "nvfp4":
        assert kernel is None and reason
