"""QuantizedTensor: what it prints, weighs, moves and saves; and what a damaged or foreign file is told."""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.hadamard import DEFAULT_SIGNS
from deepwell.formats.layout import swizzle
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.formats.quantize import QuantizedTensor, quantize
from deepwell.formats.spec import FORMATS, get_format


def sample(fmt, device="cpu", shape=(33, 70), **options):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    return quantize(x, fmt, **options)


def assert_same(got, want):
    assert (got.format, got.axis, got.shape) == (want.format, want.axis, want.shape)
    assert (got.dtype, got.hadamard_signs) == (want.dtype, want.hadamard_signs)
    for name in ("data", "scales", "global_scale"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert_bitwise_equal(a, b, name)


def test_it_prints_itself_in_one_line():
    q = sample("nvfp4", axis=0, shape=(64, 48), hadamard=DEFAULT_SIGNS)
    assert repr(q) == (
        "QuantizedTensor(nvfp4 64x48 along axis 0, scales 48x4 e4m3, global scale, Hadamard, "
        "from bfloat16, cpu, 1.7 kB)"
    )
    assert repr(sample("fp8")) == (
        "QuantizedTensor(fp8_e4m3_tensor 33x70 along axis 1, scales one fp32, from bfloat16, cpu, 2.3 kB)"
    )


def test_it_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample("mxfp8").axis = 0


@pytest.mark.parametrize("fmt", FORMATS)
def test_its_bytes_are_those_the_format_counts(fmt):
    assert sample(fmt).nbytes == get_format(fmt).num_bytes((33, 70))
    # On whole blocks the count is the bits per element, but for tensor and row scales.
    q = sample(fmt, shape=(256, 512))
    extra = {"tensor": 4, "row": 4 * 256}.get(q.format.scaling, 0) + (4 if q.format.has_global_scale else 0)
    assert q.nbytes == 256 * 512 * q.format.bits_per_element / 8 + extra


@pytest.mark.parametrize(
    "fmt, dtype, scale_dtype",
    [
        ("fp8", torch.float8_e4m3fn, torch.float32),
        ("fp8_e5m2", torch.float8_e5m2, torch.float32),
        ("mxfp8", torch.float8_e4m3fn, torch.float8_e8m0fnu),
        ("mxfp8_e5m2", torch.float8_e5m2, torch.float8_e8m0fnu),
        ("mxfp6", torch.uint8, torch.float8_e8m0fnu),
        ("mxfp4", torch.uint8, torch.float8_e8m0fnu),
        ("nvfp4", torch.uint8, torch.float8_e4m3fn),
    ],
)
def test_it_is_stored_in_the_dtypes_that_gemms_take(fmt, dtype, scale_dtype):
    q = sample(fmt)
    assert (q.data.dtype, q.scales.dtype) == (dtype, scale_dtype)
    packed = fmt in {"mxfp4", "nvfp4"}
    assert q.data_for_gemm().dtype == (torch.float4_e2m1fn_x2 if packed else dtype)


def test_moving_keeps_every_bit(device):
    q = sample("nvfp4")
    moved = q.to(device)
    assert moved.device.type == device
    assert_same(moved.to("cpu"), q)


def test_unscaled_formats_have_no_codes():
    with pytest.raises(UnsupportedError, match="'bf16' has no codes"):
        sample("bf16").codes()


# ---- swizzled scales ----


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "nvfp4"])
def test_swizzled_scales_are_the_layouts(fmt):
    q = sample(fmt, shape=(200, 300))
    assert_bitwise_equal(q.scale_swizzled(), swizzle(q.scales), "scales")


def test_square_blocks_repeat_their_scale_for_every_row():
    # The hardware knows 1x16 alone: a 16x16 scale stands in each of its rows, ragged last block included.
    q = sample("nvfp4_16x16", shape=(40, 64))
    rows = q.scales.view(torch.uint8)[torch.arange(40) // 16].contiguous().view(torch.float8_e4m3fn)
    assert_bitwise_equal(q.scale_swizzled(), swizzle(rows), "scales")


def test_a_batch_and_a_vector_are_swizzled_too():
    assert sample("mxfp8", shape=(3, 130, 64)).scale_swizzled().shape == (3, 256 * 4)
    assert sample("mxfp8", shape=(64,)).scale_swizzled().shape == (128 * 4,)


def test_fp8_scales_are_not_swizzled():
    with pytest.raises(UnsupportedError, match="has no swizzled scales"):
        sample("fp8_1x128").scale_swizzled()


# ---- files ----


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_file_brings_back_every_bit(fmt, tmp_path, device):
    q = sample(fmt, device, axis=0)
    q.save(tmp_path / "x.safetensors")
    assert_same(QuantizedTensor.load(tmp_path / "x.safetensors"), q.to("cpu"))
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_nan_scales_hadamard_signs_and_empty_tensors_survive_a_file(tmp_path):
    x = torch.ones(32, 64)
    x[0, 0] = float("nan")
    cases = [quantize(x, "mxfp8"), quantize(x, "nvfp4", hadamard=DEFAULT_SIGNS), quantize(torch.empty(0, 64), "nvfp4")]
    for i, q in enumerate(cases):
        q.save(tmp_path / str(i))
        assert_same(QuantizedTensor.load(tmp_path / str(i)), q)


def test_a_file_is_plain_safetensors_with_a_json_header(tmp_path):
    sample("nvfp4").save(tmp_path / "x")
    with safe_open(tmp_path / "x", framework="pt") as file:
        header = json.loads(file.metadata()["deepwell.quantized"])
        assert set(file.keys()) == {"data", "scales", "global_scale"}
    assert (header["format"]["name"], header["shape"], header["dtype"]) == ("nvfp4", [33, 70], "bfloat16")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.safetensors: no such file"):
        QuantizedTensor.load(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused(keep, tmp_path):
    path = tmp_path / "cut"
    sample("mxfp8").save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(ConfigError, match="cut: not a whole safetensors file"):
        QuantizedTensor.load(path)


def test_one_flipped_bit_is_found(tmp_path):
    path = tmp_path / "flipped"
    sample("nvfp4").save(path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match="flipped: the bytes do not match their hash"):
        QuantizedTensor.load(path)


def test_other_files_are_refused_by_what_they_are(tmp_path):
    path = tmp_path / "other"
    path.write_bytes(b"PK\x03\x04 a zip, say" * 10)
    with pytest.raises(ConfigError, match="other: not a whole safetensors file"):
        QuantizedTensor.load(path)
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(ConfigError, match=r"not one that QuantizedTensor\.save wrote"):
        QuantizedTensor.load(path)


def rewrite(path, change):
    """Save `path` again with a changed header; the tensors and their hash stay."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["deepwell.quantized"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    header = change(header)
    text = header if isinstance(header, str) else json.dumps(header)
    save_file(tensors, path, metadata={"deepwell.quantized": text})


# A header may lie in each of its fields; every lie is answered with a ConfigError that names the file.
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda h: "{", "header is not JSON"),
        (lambda h: [], "header lacks one of"),
        (lambda h: {k: v for k, v in h.items() if k != "axis"}, "header lacks one of"),
        (lambda h: h | {"version": 99}, "written as version 99"),
        (lambda h: h | {"format": {"name": "mxfp9"}}, "'mxfp9' is not known"),
        (lambda h: h | {"format": "mxfp8"}, "header is wrong"),
        (lambda h: h | {"format": get_format("nvfp4").to_dict()}, "data should be torch.uint8"),
        (lambda h: h | {"shape": [33, 71]}, "data should be"),
        (lambda h: h | {"shape": None}, "header is wrong"),
        (lambda h: h | {"shape": ["a", "b"]}, "do not fit each other"),
        (lambda h: h | {"axis": 5}, "do not fit each other"),
        (lambda h: h | {"axis": "x"}, "do not fit each other"),
        (lambda h: h | {"dtype": "float12"}, "header is wrong"),
        (lambda h: h | {"hadamard_signs": [1, 2]}, "signs must be 16"),
    ],
)
def test_a_lying_header_is_refused(change, message, tmp_path):
    path = tmp_path / "liar"
    sample("mxfp8").save(path)
    rewrite(path, change)
    with pytest.raises(ConfigError, match=f"liar: .*{message}"):
        QuantizedTensor.load(path)


def test_saving_over_a_file_replaces_it_whole(tmp_path):
    path = tmp_path / "x"
    sample("mxfp8").save(path)
    sample("nvfp4").save(path)
    assert QuantizedTensor.load(path).format.name == "nvfp4"
