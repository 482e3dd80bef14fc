"""The persistent Triton GEMM: equal to its reference interpreted, compiled for both targets, and on a GPU."""

import pytest
import torch

import aot
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import sqnr_db
from deepwell.kernels.gemm import triton_fp8 as gemm_triton
from deepwell.kernels.gemm.triton_fp8 import (
    CONFIGS,
    Fp8GemmConfig,
    default_config,
    fp8_gemm_epilogue_ref,
    fp8_gemm_triton,
)
from deepwell.kernels.quantize.fp8 import quantize_rows

# Tensor cores' own accumulator has fewer bits than fp32; registers every 128 have almost all of them.
FAST_DB, PROMOTED_DB = 40, 60
# Small tiles, so that interpreted programs walk several tiles, groups and K steps.
SMALL = Fp8GemmConfig(block_m=32, block_n=32, block_k=32, num_stages=2, num_warps=4, group_m=2)
# The epilogue in two halves, and sums in fp32 registers.
WIDE = Fp8GemmConfig(block_m=16, block_n=256, block_k=32, num_stages=2, num_warps=4, promote=True)


def _operands(m, n, k, device):
    a = torch.randn(m, k, device=device)
    # Weights as models have them: small.
    b = 0.02 * torch.randn(n, k, device=device)
    return *quantize_rows(a.bfloat16()), *quantize_rows(b.bfloat16())


def _floor(device, config):
    if device == "cpu":
        return 80  # the interpreter adds up in fp32
    return PROMOTED_DB if config.promote else FAST_DB


# Several tiles in both directions, one tile, rows and columns that end inside a tile, K that ends inside a step.
@pytest.mark.parametrize("shape", [(96, 128, 64), (32, 32, 32), (37, 80, 48), (1, 16, 16), (150, 16, 112)], ids=str)
@pytest.mark.parametrize("small", [SMALL, WIDE], ids=lambda c: c.name)
def test_the_product_is_the_references(device, shape, small):
    q_a, s_a, q_b, s_b = _operands(*shape, device)
    config = small if device == "cpu" else None
    got = fp8_gemm_triton(q_a, s_a, q_b, s_b, config=config)
    ref = fp8_gemm_epilogue_ref(q_a, s_a, q_b, s_b)
    assert got.dtype is torch.bfloat16 and got.shape == ref.shape
    assert sqnr_db(ref, got) > _floor(device, config or default_config(*shape[:2]))


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_every_config_on_the_gpu(config):
    # A whole number of tiles and a shape that ends inside them.
    for shape in [(1024, 1024, 2048), (777, 1040, 1168)]:
        q_a, s_a, q_b, s_b = _operands(*shape, "cuda")
        ref = fp8_gemm_epilogue_ref(q_a, s_a, q_b, s_b)
        assert sqnr_db(ref, fp8_gemm_triton(q_a, s_a, q_b, s_b, config=config)) > _floor("cuda", config)


@pytest.mark.parametrize("activation", [None, "gelu", "silu", "relu"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_bias_and_activation_are_in_the_epilogue(device, activation, has_bias):
    q_a, s_a, q_b, s_b = _operands(48, 64, 64, device)
    bias = torch.randn(64, device=device).bfloat16() if has_bias else None
    config = SMALL if device == "cpu" else None
    got = fp8_gemm_triton(q_a, s_a, q_b, s_b, bias=bias, activation=activation, config=config)
    ref = fp8_gemm_epilogue_ref(q_a, s_a, q_b, s_b, bias=bias, activation=activation)
    # exp and erf differ in the last bits of fp32 and move a rounding to bf16 now and then.
    assert sqnr_db(ref, got) > (65 if device == "cpu" else FAST_DB)


def test_one_scale_serves_all_rows_of_an_operand(device):
    q_a, _, q_b, s_b = _operands(48, 32, 32, device)
    one = torch.tensor(0.25, device=device)
    config = SMALL if device == "cpu" else None
    got = fp8_gemm_triton(q_a, one, q_b, s_b, config=config)
    torch.testing.assert_close(got, fp8_gemm_triton(q_a, one.expand(48).contiguous(), q_b, s_b, config=config))


@pytest.mark.parametrize("activation", [None, "gelu", "silu", "relu"])
def test_nan_stays_visible_in_its_row_alone(device, activation):
    q_a, s_a, q_b, s_b = _operands(40, 32, 32, device)
    s_a[3] = float("nan")
    config = SMALL if device == "cpu" else None
    got = fp8_gemm_triton(q_a, s_a, q_b, s_b, activation=activation, config=config)
    assert got[3].isnan().all()
    assert got[:3].isfinite().all() and got[4:].isfinite().all()


def test_rows_of_a_wider_buffer_are_read_where_they_lie(device):
    # A slice of columns: rows contiguous, further apart than they are long.
    q_a, s_a, q_b, s_b = _operands(40, 32, 64, device)
    config = SMALL if device == "cpu" else None
    got = fp8_gemm_triton(q_a[:, 16:48], s_a, q_b[:, 16:48], s_b, config=config)
    ref = fp8_gemm_epilogue_ref(q_a[:, 16:48], s_a, q_b[:, 16:48], s_b)
    assert sqnr_db(ref, got) > (80 if device == "cpu" else FAST_DB)


def test_no_rows_give_no_rows(everywhere):
    q_a, s_a, q_b, s_b = _operands(16, 32, 32, everywhere)
    assert fp8_gemm_triton(q_a[:0], s_a[:0], q_b, s_b).shape == (0, 32)


def test_what_cannot_be_multiplied_is_named(device):
    q_a, s_a, q_b, s_b = _operands(16, 32, 32, device)
    with pytest.raises(ConfigError, match=r"activation is 'tanh'; it takes gelu, silu, relu"):
        fp8_gemm_triton(q_a, s_a, q_b, s_b, activation="tanh")
    with pytest.raises(ConfigError, match=r"bias must have shape \(32,\)"):
        fp8_gemm_triton(q_a, s_a, q_b, s_b, bias=torch.zeros(16, device=device))
    with pytest.raises(UnsupportedError, match=r"K=32 and N=20 must be multiples of 16"):
        fp8_gemm_triton(q_a, s_a, q_b[:20], s_b[:20])
    with pytest.raises(UnsupportedError, match="give both one dtype"):
        fp8_gemm_triton(q_a.float().to(torch.float8_e5m2), s_a, q_b, s_b)


def test_every_config_has_a_name_of_its_own():
    assert len({config.name for config in CONFIGS}) == len(CONFIGS)


def _compile(config, arch, activation=""):
    arguments = {
        "a_desc": f"tensordesc<fp8e4nv[{config.block_m}, {config.block_k}]>",
        "b_desc": f"tensordesc<fp8e4nv[{config.block_n}, {config.block_k}]>",
        "c_desc": f"tensordesc<bf16[{config.block_m}, {config.block_n // (1 + config.writes_halves)}]>",
        "scale_a_ptr": torch.float32,
        "scale_b_ptr": torch.float32,
        "bias_ptr": torch.bfloat16,
        "M": "i32:any",
        "N": "i32",
        "K": "i32",
        "PROGRAMS": "i32:any",
        "ROWS_A": True,
        "ROWS_B": True,
        "HAS_BIAS": True,
        "ACTIVATION": activation,
        "PROMOTE": config.promote,
        "HALVES": config.writes_halves,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
    }
    kernel = gemm_triton._fp8_gemm_kernel
    return aot.compile_kernel(kernel, arguments, arch=arch, num_warps=config.num_warps, num_stages=config.num_stages)


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_it_compiles_to_tensor_cores_and_bulk_copies(config, arch):
    made = _compile(config, arch)
    assert made.shared_bytes <= aot.MAX_SHARED_BYTES
    assert made.spill_bytes == 0 and made.stack_bytes == 0
    assert made.count(r"cp\.async\.bulk\.tensor\.2d\.shared") > 0, "operands must come through TMA"
    assert made.count(r"cp\.async\.bulk\.tensor\.2d\.global") > 0, "results must go through TMA"
    mma = r"wgmma\.mma_async\S*e4m3" if arch == 90 else r"tcgen05\.mma"
    assert made.count(mma) > 0


def test_the_epilogue_adds_no_spills():
    # GELU needs the most registers; the largest tile and the one that promotes have the fewest to spare.
    for config in (CONFIGS[0], CONFIGS[3]):
        assert _compile(config, 90, "gelu").spill_bytes == 0
