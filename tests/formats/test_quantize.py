"""The quantizers: whole tensors against plain numpy ones, every format at its edges, and what no code path may do."""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.quantize import FLT_MAX, dequantize, quantize
from deepwell.formats.spec import FORMATS, get_format

F = np.float32
SCALED = [name for name, fmt in FORMATS.items() if fmt.is_scaled]
MX = [name for name, fmt in FORMATS.items() if fmt.scale == "e8m0"]
ML = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


# ---- whole-tensor oracles, one block after the other in numpy ----


def mx_rceil_oracle(x, element):
    """Codes and scale bytes of the rows of `x`, scales rounded up by way of frexp."""
    largest = F(ml_dtypes.finfo(ML[element]).max)
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((x.shape[0], -(-x.shape[1] // 32)), np.uint8)
    for i in range(x.shape[0]):
        for j in range(scales.shape[1]):
            block = x[i, 32 * j : 32 * j + 32]
            needed = np.abs(block).max() * (F(1) / largest)
            fraction, exponent = np.frexp(needed)  # needed = fraction * 2^exponent, fraction in [0.5, 1)
            power = -127 if needed == 0 else int(exponent) - int(fraction == 0.5)
            power = min(max(power, -127), 127)
            scaled = np.clip(np.ldexp(block.astype(np.float64), -power), -largest, largest).astype(F)
            codes[i, 32 * j : 32 * j + 32] = scaled.astype(ML[element]).view(np.uint8)
            scales[i, j] = power + 127
    return codes, scales


def fp8_oracle(x, element, high, wide, pow2):
    """Codes and fp32 scales of blocks of high x wide."""
    largest = F(ml_dtypes.finfo(ML[element]).max)
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((-(-x.shape[0] // high), -(-x.shape[1] // wide)), F)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
            amax = np.abs(x[where]).max()
            with np.errstate(over="ignore"):
                enc = F(1) if amax == 0 else min(largest / amax, F(FLT_MAX))
            if pow2:
                enc = np.ldexp(F(1), int(np.frexp(enc)[1]) - 1)
            scales[i, j] = F(1) / enc
            codes[where] = np.clip(x[where] * enc, -largest, largest).astype(ML[element]).view(np.uint8)
    return codes, scales


def numpy_inputs():
    rng = np.random.default_rng(11)
    x = rng.standard_normal((33, 200)).astype(F)
    return {
        "gauss": x,
        "bf16": x.astype(ml_dtypes.bfloat16).astype(F),
        "heavy tails": x * np.exp(3 * rng.standard_normal(x.shape)).astype(F),
        "40 octaves": np.ldexp(x, rng.integers(-40, 1, x.shape)).astype(F),
        "huge": (x * F(4e37)).astype(F),
        "tiny": x * F(1e-37),
        "subnormal": x * F(3e-43),
        "zero blocks": np.where(np.arange(200) < 130, 0, x).astype(F),
    }


@pytest.mark.parametrize("fmt", MX)
@pytest.mark.parametrize("case", numpy_inputs())
def test_mx_bits_equal_the_numpy_oracle(fmt, case, device):
    x = numpy_inputs()[case]
    codes, scales = mx_rceil_oracle(x, get_format(fmt).element.name)
    q = quantize(torch.from_numpy(x).to(device), fmt)
    assert np.array_equal(q.scales.view(torch.uint8).cpu().numpy(), scales)
    assert np.array_equal(q.codes().cpu().numpy(), codes)


# The block of each kind of group on 33 x 200: whole, one row, a ragged second block, ragged in both directions.
FP8_GROUPS = {"tensor": (33, 200), "row": (1, 200), "1x128": (1, 128), "128x128": (128, 128)}


@pytest.mark.parametrize("fmt", [name for name in SCALED if name.startswith("fp8")])
@pytest.mark.parametrize("case", ["gauss", "heavy tails", "huge", "tiny", "subnormal", "zero blocks"])
def test_fp8_bits_equal_the_numpy_oracle(case, fmt, device):
    x = numpy_inputs()[case]
    element, group = fmt.removesuffix("_pow2").split("_")[1:]
    codes, scales = fp8_oracle(x, element, *FP8_GROUPS[group], pow2=fmt.endswith("_pow2"))
    q = quantize(torch.from_numpy(x).to(device), fmt)
    assert np.array_equal(q.scales.cpu().numpy().reshape(scales.shape), scales)
    assert np.array_equal(q.codes().cpu().numpy(), codes)


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)])
def test_unscaled_formats_are_the_ieee_cast(name, dtype, device):
    x = torch.tensor([[1.0, 1 + 2**-9, 3.4e38, float("inf"), float("nan"), -0.0, 1e-45]], device=device)
    q = quantize(x, name)
    assert q.data.dtype == dtype and q.scales is None
    assert torch.equal(q.dequantize().nan_to_num(nan=7), x.to(dtype).float().nan_to_num(nan=7))


# ---- nothing may rely on torch's float8 casts ----


class _CastWatch(TorchDispatchMode):
    """Fails on any conversion of numbers into a float8 dtype: torch 2.11 and 2.13 disagree on what is out of range."""

    FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_cast = func._schema.name in {"aten::_to_copy", "aten::copy_", "aten::to"}
        if is_cast and isinstance(out, torch.Tensor) and out.dtype in self.FLOAT8:
            source = args[1] if func._schema.name == "aten::copy_" else args[0]
            assert source.dtype == out.dtype, f"{func} casts {source.dtype} to {out.dtype}"
        return out


def test_the_watch_sees_a_cast():
    with pytest.raises(AssertionError, match="casts"), _CastWatch():
        torch.ones(2).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("fmt", SCALED)
def test_no_number_is_cast_to_float8_by_torch(fmt):
    x = torch.randn(40, 70) * 1e4
    with _CastWatch():
        quantize(x, fmt).dequantize()
        quantize(x, fmt, axis=0, rounding="stochastic")


# Beyond 464, where torch 2.11's cast gives NaN: a scale that is too small sends every value there.
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_values_beyond_the_range_saturate_in_every_torch_version(element, device):
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((64, 64)) * np.exp(rng.uniform(-5, 30, (64, 64)))).astype(F)
    largest = F(ml_dtypes.finfo(ML[element]).max)
    q = quantize(torch.from_numpy(x).to(device), f"fp8_{element}_tensor", amax=torch.tensor(float(largest)))
    want = np.clip(x, -largest, largest).astype(ML[element]).view(np.uint8)
    assert q.scales.item() == 1.0
    assert np.array_equal(q.codes().cpu().numpy(), want)
    assert q.dequantize().isfinite().all()


@pytest.mark.parametrize(
    "fmt, scale_rounding",
    [(fmt, "rceil") for fmt in SCALED] + [(fmt, rule) for fmt in MX for rule in ("floor", "even")],
)
def test_finite_inputs_of_any_size_stay_finite(fmt, scale_rounding, device):
    bits = np.random.default_rng(6).integers(0, 1 << 32, (64, 256), dtype=np.uint32).view(F)
    x = torch.from_numpy(np.where(np.isfinite(bits), bits, 0).astype(F)).to(device)
    # Halved: at the very end of fp32 the maximum may round to a value that fp32 cannot hold.
    q = quantize(x / 2, fmt, scale_rounding=scale_rounding)
    assert q.dequantize().isfinite().all()


# ---- inf and NaN ----


@pytest.mark.parametrize("fmt", [name for name in SCALED if not name.startswith("nvfp4")])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_an_inf_or_nan_makes_its_scale_group_nan_and_no_other(fmt, bad, device):
    x = torch.ones(256, 256, device=device)
    x[3, 5] = bad
    q = quantize(x, fmt)
    spec = get_format(fmt)
    high, wide = spec.block or {"tensor": (256, 256), "row": (1, 256)}[spec.scaling]
    want = torch.zeros(256, 256, dtype=torch.bool, device=device)
    want[3 // high * high : 3 // high * high + high, :wide] = True
    assert torch.equal(q.dequantize().isnan(), want)
    nan_codes = {"e4m3": 0x7F, "e5m2": 0x7F, "e3m2": 0x1F, "e2m3": 0x1F, "e2m1": 7}
    assert (q.codes()[want] == nan_codes[spec.element.name]).all()
    if spec.scale == "e8m0":
        assert q.scales.view(torch.uint8)[3, 0].item() == 255


# ---- shapes, strides, axes ----


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_input_dtype_equals_its_float32_values(fmt, dtype, device):
    x = torch.randn(40, 70, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    q, q32 = quantize(x, fmt), quantize(x.float(), fmt)
    assert q.dtype == dtype
    assert torch.equal(q.data.view(torch.uint8), q32.data.view(torch.uint8))


@pytest.mark.parametrize("fmt", FORMATS)
def test_another_axis_is_the_transposed_problem(fmt, device):
    x = torch.randn(70, 45, generator=torch.Generator().manual_seed(1)).to(device)
    down, along = quantize(x, fmt, axis=0), quantize(x.T.contiguous(), fmt)
    assert torch.equal(down.data.view(torch.uint8), along.data.view(torch.uint8))
    assert torch.equal(down.dequantize(), along.dequantize().T)
    assert down.axis == 0 and down.shape == (70, 45)


@pytest.mark.parametrize("fmt", FORMATS)
def test_strided_inputs_equal_contiguous_ones(fmt, device):
    base = torch.randn(80, 90, generator=torch.Generator().manual_seed(2)).to(device)
    for view in (base.T, base[::2, 5:], base[:, ::3], base[:1].expand(20, 90)):
        q, want = quantize(view, fmt), quantize(view.contiguous(), fmt)
        assert torch.equal(q.data.view(torch.uint8), want.data.view(torch.uint8))
        assert torch.equal(q.dequantize(), want.dequantize())


# One dimension; a batch of matrices; a middle axis; lengths of one; a tail of one element.
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "shape, axis", [((33,), 0), ((2, 3, 129), -1), ((2, 65, 3), 1), ((1, 1), -1), ((5, 17), 0), ((3, 1), 1)]
)
def test_any_shape_and_axis_comes_back_close(fmt, shape, axis, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device)
    q = quantize(x, fmt, axis=axis)
    back = q.dequantize()
    assert back.shape == x.shape
    # At most half a step of the widest binade of the element, at the scale of the tensor's maximum.
    spec = get_format(fmt)
    steps = 2.0 ** -(spec.element.mantissa_bits + 1)
    assert float((back - x).abs().max()) <= float(x.abs().max()) * steps * (2 if spec.is_scaled else 1)
    moved = x.movedim(axis, -1)
    assert q.nbytes == spec.num_bytes(tuple(moved.shape))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape, axis", [((0,), 0), ((0, 64), -1), ((5, 0), -1), ((4, 0), 0), ((2, 0, 3), 1)])
def test_empty_tensors_give_empty_results(fmt, shape, axis, device):
    x = torch.empty(shape, device=device)
    for rounding in ("nearest",) if fmt == "fp16" else ("nearest", "stochastic"):
        q = quantize(x, fmt, axis=axis, rounding=rounding)
        assert q.dequantize().shape == shape
        assert q.data.numel() == 0
        moved = x.movedim(axis, -1)
        wanted = get_format(fmt).scale_shape(tuple(moved.shape[:-1]), moved.shape[-1])
        assert (None if q.scales is None else tuple(q.scales.shape)) == wanted


@pytest.mark.parametrize("fmt", ["fp8_1x128", "mxfp8", "mxfp6", "mxfp4", "nvfp4"])
def test_a_ragged_tail_is_scaled_over_what_is_there(fmt, device):
    # The tail equals the same numbers with zeros behind them: padding neither counts nor comes back.
    x = torch.randn(4, 150, generator=torch.Generator().manual_seed(4)).to(device)
    padded = torch.nn.functional.pad(x, (0, 256 - 150))
    q, want = quantize(x, fmt), quantize(padded, fmt)
    assert torch.equal(q.codes(), want.codes()[:, :150])
    blocks = q.scales.shape[-1]
    assert torch.equal(q.scales.view(torch.uint8), want.scales[:, :blocks].contiguous().view(torch.uint8))


@pytest.mark.parametrize("fmt", SCALED)
def test_zeros_stay_zero(fmt, device):
    q = quantize(torch.zeros(20, 40, device=device), fmt)
    assert q.codes().max().item() == 0
    assert q.dequantize().abs().max().item() == 0
    if q.format.scale == "e8m0":
        assert q.scales.view(torch.uint8).max().item() == 0  # byte 0, the smallest scale there is


# ---- both directions ----


def test_one_dimensional_blocks_differ_between_the_copies():
    # Rows of many magnitudes, so that a row's block and a column's block have different maxima.
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(64, 64, generator=generator) * torch.exp(3 * torch.randn(64, 1, generator=generator))
    for fmt in ("mxfp8", "mxfp6", "mxfp4", "nvfp4", "fp8_1x128"):
        row, column = quantize(x, fmt), quantize(x, fmt, axis=0)
        assert not torch.equal(row.codes().T, column.codes())
        assert not torch.equal(row.dequantize(), column.dequantize())
        # Quantizing the row copy again is not the column copy: it must come from high precision.
        assert not torch.equal(quantize(row.dequantize(), fmt, axis=0).codes(), column.codes())


# ---- arguments ----


def test_dequantize_rounds_once_to_the_asked_dtype():
    q = quantize(torch.randn(8, 64), "mxfp8")
    assert dequantize(q).dtype == torch.float32
    assert torch.equal(q.dequantize(torch.bfloat16), q.dequantize().to(torch.bfloat16))


def test_stochastic_rounding_repeats_with_its_seed(device):
    x = torch.randn(64, 64, device=device)
    for fmt in ("bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"):
        a, b = (
            quantize(x, fmt, rounding="stochastic", generator=torch.Generator(device).manual_seed(1)) for _ in range(2)
        )
        assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))


def test_wrong_arguments_are_refused_by_name():
    x = torch.ones(4, 4)
    with pytest.raises(ConfigError, match="float64"):
        quantize(x.double(), "mxfp8")
    with pytest.raises(ConfigError, match=r"x has dtype torch\.int64"):
        quantize(torch.ones(4, dtype=torch.int64), "mxfp8")
    with pytest.raises(ConfigError, match="axis 2 is not an axis"):
        quantize(x, "mxfp8", axis=2)
    with pytest.raises(ConfigError, match="axis -1 is not an axis of x with shape"):
        quantize(torch.tensor(1.0), "mxfp8")
    with pytest.raises(ConfigError, match="rounding must be 'nearest' or 'stochastic', got 'up'"):
        quantize(x, "mxfp8", rounding="up")
    with pytest.raises(ConfigError, match="scale_rounding must be 'rceil', 'floor' or 'even', got 'ceil'"):
        quantize(x, "mxfp8", scale_rounding="ceil")
    with pytest.raises(UnsupportedError, match="is for MX formats; nvfp4 has one rule"):
        quantize(x, "nvfp4", scale_rounding="floor")
    with pytest.raises(UnsupportedError, match="amax is for formats with one scale per tensor; mxfp8"):
        quantize(x, "mxfp8", amax=torch.ones(()))
    with pytest.raises(UnsupportedError, match="stochastic rounding to fp16"):
        quantize(x, "fp16", rounding="stochastic")
    with pytest.raises(ConfigError, match="did you mean"):
        quantize(x, "nvpf4")


@pytest.mark.parametrize("fmt", FORMATS)
def test_shapes_are_known_without_numbers(fmt):
    # A custom op's fake kernel runs the quantizer on the meta device: nothing may ask for a value.
    q, real = (quantize(torch.ones(40, 70, device=where), fmt) for where in ("meta", "cpu"))
    assert (q.data.shape, q.data.dtype) == (real.data.shape, real.data.dtype)
    assert q.scales is None or (q.scales.shape, q.scales.dtype) == (real.scales.shape, real.scales.dtype)


def test_gradients_do_not_flow_and_do_not_disturb():
    x = torch.randn(4, 64, requires_grad=True)
    q = quantize(x, "mxfp8")
    assert not q.dequantize().requires_grad
