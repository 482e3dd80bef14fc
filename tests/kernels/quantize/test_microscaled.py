"""The MXFP8 and NVFP4 quantizers: bit for bit the reference formats, interpreted on a CPU and compiled on a GPU."""

import pytest
import torch

import aot
from deepwell.errors import ConfigError
from deepwell.formats import layout
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.formats.quantize import quantize
from deepwell.kernels.quantize import microscaled as Q

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: "mxfp8", E5M2: "mxfp8_e5m2"}

# One element, less than a block, ragged both ways, whole tiles, more than one tile both ways.
SHAPES = [(1, 1), (5, 20), (33, 70), (128, 128), (130, 140)]


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


def many_magnitudes(t, k, dtype, device, specials=True):
    """Values over 80 binades in patches, with zeros, subnormals, and (specials) one NaN and one inf far apart."""
    x = torch.randn(t, k) * torch.logspace(-12, 12, t)[:, None].roll(t // 3, 0) * torch.logspace(-3, 3, k)
    x[::7] *= 1e-30
    if t > 4:
        x[1] = 0.0
        x[2] = 1e-40
        if specials:
            x[3, k // 2] = float("nan")
            x[4, 0] = -float("inf")
    return x.to(dtype).to(device)


def check_mx(x, copies, dtype, swizzled):
    for axis, q, scale in ((1, copies.q_TK, copies.scale), (0, copies.q_KT, copies.scale_t)):
        wanted = quantize(x, FORMATS[dtype], axis=axis)
        assert_bitwise_equal(q, wanted.data, f"codes along axis {axis}")
        scales = layout.swizzle(wanted.scales) if swizzled else wanted.scales
        assert_bitwise_equal(scale, scales, f"scales along axis {axis}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "swizzled"), [(E4M3, True), (E5M2, False)])
def test_mxfp8_equals_the_format_bit_for_bit_both_ways(device, shape, dtype, swizzled):
    for source in (torch.bfloat16, torch.float32)[: 1 if shape[0] > 100 else 2]:
        x = many_magnitudes(*shape, source, device)
        check_mx(x, Q.quantize_mxfp8(x, swizzled=swizzled, dtype=dtype), dtype, swizzled)


@pytest.mark.parametrize("config", Q.MX_CONFIGS, ids=str)
def test_every_mx_config_gives_the_same_bits(device, config):
    x = many_magnitudes(132, 170, torch.bfloat16, device)
    check_mx(x, Q.quantize_mxfp8(x, config=config), E4M3, True)


def test_mxfp8_scales_are_right_at_every_power_of_two_and_its_neighbours(device):
    # The largest magnitude decides the byte; just below, at and just above 448 * 2^e is where rounding up turns.
    exponents = torch.arange(-149, 120)
    power = torch.ldexp(torch.ones(len(exponents)), exponents)
    edges = torch.stack([448.0 * power, (448.0 * power).nextafter(torch.tensor(0.0)), power, power * 1.0000001])
    largest = torch.cat([edges.flatten(), torch.tensor([3.4028235e38, 1.1754944e-38, 1e-45, 0.0])])
    x = torch.zeros(len(largest), 32)
    x[:, 5] = largest
    x = x.to(device)
    copies = Q.quantize_mxfp8(x, columns=False, swizzled=False)
    wanted = quantize(x, "mxfp8")
    assert_bitwise_equal(copies.scale, wanted.scales, "scales")
    assert_bitwise_equal(copies.q_TK, wanted.data, "codes")


def test_one_copy_alone_is_the_same_and_the_other_is_absent(device):
    x = many_magnitudes(40, 70, torch.bfloat16, device)
    both = Q.quantize_mxfp8(x)
    rows, columns = Q.quantize_mxfp8(x, columns=False), Q.quantize_mxfp8(x, rows=False)
    assert rows.q_KT is None and rows.scale_t is None and columns.q_TK is None and columns.scale is None
    assert_bitwise_equal(rows.q_TK, both.q_TK)
    assert_bitwise_equal(rows.scale, both.scale)
    assert_bitwise_equal(columns.q_KT, both.q_KT)
    assert_bitwise_equal(columns.scale_t, both.scale_t)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_empty_tensors_have_empty_codes_and_the_filling_of_their_tiles(device, shape):
    x = torch.zeros(shape, device=device)
    check_mx(x, Q.quantize_mxfp8(x), E4M3, True)
    found = Q.quantize_nvfp4(x)
    wanted = quantize(x, "nvfp4")
    assert_bitwise_equal(found.q, wanted.data)
    assert_bitwise_equal(found.scale, wanted.scale_swizzled())
    assert_bitwise_equal(found.global_scale, wanted.global_scale)


def test_rows_may_lie_apart_in_memory(device):
    # A slice of a wider activation: contiguous rows, a larger stride.
    x = many_magnitudes(40, 96, torch.bfloat16, device)[:, 32:96]
    assert x.stride(0) == 96
    check_mx(x, Q.quantize_mxfp8(x), E4M3, True)
    found = Q.quantize_nvfp4(x.nan_to_num(posinf=1.0, neginf=-1.0), swizzled=False)
    assert_bitwise_equal(found.q, quantize(x.nan_to_num(posinf=1.0, neginf=-1.0), "nvfp4").data)


# ---- NVFP4 ----


def check_nv(x, found, *, square, swizzled, amax=None, random_bits=None):
    rounding = "nearest" if random_bits is None else "stochastic"
    fmt = "nvfp4_16x16" if square else "nvfp4"
    wanted = quantize(x, fmt, rounding=rounding, generator=random_bits, amax=amax)
    assert_bitwise_equal(found.global_scale, wanted.global_scale, "global scale")
    assert_bitwise_equal(found.scale, wanted.scale_swizzled() if swizzled else wanted.scales, "scales")
    assert_bitwise_equal(found.q, wanted.data, "codes")


@pytest.mark.parametrize(
    ("shape", "square", "swizzled"),
    [
        *((shape, square, not square) for shape in SHAPES for square in (False, True)),
        *(((17, 33), square, swizzled) for square in (False, True) for swizzled in (False, True)),
    ],
)
def test_nvfp4_equals_the_format_bit_for_bit(device, shape, square, swizzled):
    # A NaN makes every scale NaN: with and without. The largest shape is slow to interpret: once is enough.
    cases = [(torch.float32, False), (torch.bfloat16, True)][: 1 if shape[0] > 100 else 2]
    for source, specials in cases:
        x = many_magnitudes(*shape, source, device, specials)
        check_nv(x, Q.quantize_nvfp4(x, square=square, swizzled=swizzled), square=square, swizzled=swizzled)


@pytest.mark.parametrize("scale", [1e-3, 0.7, 40.0])
def test_a_given_amax_replaces_the_tensors_own_and_larger_values_saturate(device, scale):
    # Ordinary numbers, so that scales and codes of every size occur; the given amax is smaller, near, and larger.
    x = torch.randn(64, 128, dtype=torch.bfloat16).to(device)
    x[3, 7] = float("inf")
    amax = torch.tensor(4.0 * scale, device=device)
    check_nv(x, Q.quantize_nvfp4(x, amax), square=False, swizzled=True, amax=amax)


@pytest.mark.parametrize("amax", [0.0, float("nan"), float("inf"), 1e-45, 3.4e38])
def test_extreme_amax_values_follow_the_format(device, amax):
    x = torch.randn(16, 48).to(device)
    given = torch.tensor(amax, device=device)
    check_nv(x, Q.quantize_nvfp4(x, given), square=False, swizzled=True, amax=given)


@pytest.mark.parametrize("square", [False, True])
def test_stochastic_rounding_with_given_bytes_equals_the_format(device, square):
    x = torch.randn(40, 80, dtype=torch.bfloat16).to(device)
    x[0, :16] = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -6, 0.1, 5.9, 0, -0.0, 1, 2])
    bits = torch.randint(0, 256, x.shape, dtype=torch.uint8).to(device)
    found = Q.quantize_nvfp4(x, square=square, random_bits=bits)
    check_nv(x, found, square=square, swizzled=True, random_bits=bits)


@pytest.mark.parametrize("config", Q.NV_CONFIGS, ids=str)
def test_every_nv_config_gives_the_same_bits(device, config):
    if config.packing == "asm" and device == "cuda" and torch.cuda.get_device_capability()[0] < 10:
        pytest.skip("E2M1 conversions are Blackwell's")
    for square in (False, True):
        x = many_magnitudes(50, 300, torch.bfloat16, device, specials=False)
        check_nv(x, Q.quantize_nvfp4(x, square=square, config=config), square=square, swizzled=True)


def test_every_e2m1_tie_goes_to_the_even_code(device):
    # Halfway points, their neighbours and beyond, in a block whose multiplier is 1 (largest 6, given amax 2688).
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = torch.cat([ties, ties.nextafter(torch.tensor(9.0)), ties.nextafter(torch.tensor(0.0)), torch.zeros(3)])
    blocks = torch.zeros(64)
    for i, value in enumerate(torch.cat([values, -values]).tolist()):
        blocks[i // 15 * 16 + i % 15 + 1] = value
    blocks[::16] = 6.0
    x = blocks[None, :].to(device)
    amax = torch.tensor(2688.0, device=device)
    check_nv(x, Q.quantize_nvfp4(x, amax, swizzled=False), square=False, swizzled=False, amax=amax)


def test_wrong_arguments_are_named(device):
    x = torch.zeros(4, 64, device=device)
    with pytest.raises(ConfigError, match="rows and columns"):
        Q.quantize_mxfp8(x, rows=False, columns=False)
    with pytest.raises(ConfigError, match="dtype"):
        Q.quantize_mxfp8(x, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="two dimensions"):
        Q.quantize_mxfp8(x[0])
    with pytest.raises(ConfigError, match="amax"):
        Q.quantize_nvfp4(x, torch.zeros(2, device=device))
    with pytest.raises(ConfigError, match="random_bits"):
        Q.quantize_nvfp4(x, random_bits=torch.zeros(4, 8, dtype=torch.uint8, device=device))


# ---- compiled without a GPU ----


def mx_arguments(config, **changes):
    return {
        "x_ptr": torch.bfloat16,
        "q_ptr": E4M3,
        "scale_ptr": torch.uint8,
        "qt_ptr": E4M3,
        "scale_t_ptr": torch.uint8,
        "T": "i32",
        "K": "i32",
        "stride_xt": "i32",
        "MAX": 448.0,
        "INV_MAX": 1 / 448,
        "ROWS": True,
        "COLUMNS": True,
        "SWIZZLED": True,
        "BLOCK_T": config.rows,
        "BLOCK_K": config.columns,
        **changes,
    }


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("config", Q.MX_CONFIGS, ids=str)
def test_mx_kernels_compile_with_wide_accesses_and_without_spills(arch, config):
    made = aot.compile_kernel(Q._quantize_mx_kernel, mx_arguments(config), arch=arch, num_warps=config.num_warps)
    assert made.spill_bytes == 0 and made.stack_bytes == 0
    assert made.shared_bytes <= aot.MAX_SHARED_BYTES
    # 16-byte reads of x; codes leave in vectors too, and the conversion is hardware's.
    assert made.count(r"ld\.global[\w.]*\.v4\.b32|ld\.global[\w.]*\.v2\.b64") > 0
    assert made.count(r"st\.global[\w.]*\.v[24]\.b32") > 0
    assert made.count(r"cvt\.rn\.satfinite\.e4m3x2") > 0
    # Subnormal magnitudes decide the lowest scales: nothing may flush them.
    assert made.count(r"(mul|fma|add)[\w.]*\.ftz") == 0


def nv_arguments(config, **changes):
    return {
        "x_ptr": torch.bfloat16,
        "amax_ptr": torch.float32,
        "random_ptr": None,
        "q_ptr": torch.uint8,
        "scale_ptr": torch.uint8,
        "global_ptr": torch.float32,
        "T": "i32",
        "K": "i32",
        "stride_xt": "i32",
        "stride_rt": "i32",
        "SQUARE": False,
        "STOCHASTIC": False,
        "SWIZZLED": True,
        "ASM": config.packing == "asm",
        "BLOCK_T": config.rows,
        "BLOCK_K": config.columns,
        **changes,
    }


# Every configuration, and the two variants of the first.
NV_KERNELS = [(config, False, False) for config in Q.NV_CONFIGS] + [
    (Q.NV_CONFIGS[0], True, False),
    (Q.NV_CONFIGS[0], False, True),
]


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize(("config", "square", "stochastic"), NV_KERNELS, ids=str)
def test_nv_kernels_compile_with_exact_division_and_without_spills(arch, config, square, stochastic):
    if config.packing == "asm" and arch < 100:
        pytest.skip("E2M1 conversions are Blackwell's")
    arguments = nv_arguments(
        config, SQUARE=square, STOCHASTIC=stochastic, random_ptr=torch.uint8 if stochastic else None
    )
    made = aot.compile_kernel(Q._quantize_nv_kernel, arguments, arch=arch, num_warps=config.num_warps)
    assert made.spill_bytes == 0 and made.stack_bytes == 0
    assert made.shared_bytes <= aot.MAX_SHARED_BYTES
    assert made.count(r"div\.rn\.f32") > 0 and made.count(r"div\.(full|approx)") == 0
    assert made.count(r"ld\.global[\w.]*\.v4\.b32|ld\.global[\w.]*\.v2\.b64") > 0
    converted = made.count(r"cvt\.rn\.satfinite\.e2m1x2\.f32")
    assert converted > 0 if config.packing == "asm" else converted == 0
