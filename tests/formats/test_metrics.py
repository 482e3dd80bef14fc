"""The metrics themselves: by hand, and shown to fail on what they are there to catch."""

import math

import pytest
import torch

from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than, sqnr_db


def test_sqnr_by_hand():
    ref = torch.tensor([3.0, 4.0])
    assert sqnr_db(ref, torch.tensor([3.0, 3.5])) == pytest.approx(20)  # 25 / 0.25
    assert sqnr_db(ref, ref) == math.inf
    assert sqnr_db(ref, torch.zeros(2)) == 0
    assert sqnr_db(torch.zeros(2), ref) == -math.inf


def test_sqnr_of_nan_passes_no_floor():
    got = sqnr_db(torch.ones(2), torch.tensor([1.0, float("nan")]))
    assert math.isnan(got) and not got > -1000
    assert math.isnan(sqnr_db(torch.ones(1), torch.tensor([float("inf")])))


def test_shapes_must_agree():
    with pytest.raises(ConfigError, match=r"got has shape \(2, 1\), the reference \(2,\)"):
        sqnr_db(torch.ones(2), torch.ones(2, 1))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu]
)
def test_equal_bits_pass_in_every_dtype(dtype):
    x = torch.arange(64, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.arange(64).to(dtype)
    assert_bitwise_equal(x, x.clone())


def test_a_difference_is_named_by_coordinate_and_bytes():
    ref = torch.zeros(3, 4)
    got = ref.clone()
    got[1, 2], got[2, 0] = 1.0, 5.0
    with pytest.raises(
        AssertionError, match=r"scale: 2 of 12 elements differ, first at \(1, 2\): got 0x3f800000 \(1\)"
    ):
        assert_bitwise_equal(got, ref, "scale")


def test_bits_are_compared_not_values():
    with pytest.raises(AssertionError, match="0x80000000"):
        assert_bitwise_equal(torch.tensor(-0.0), torch.tensor(0.0))
    nan = torch.tensor([float("nan")])
    assert_bitwise_equal(nan, nan.clone())
    with pytest.raises(AssertionError, match=r"got torch\.float32 \(1,\), reference torch\.float64"):
        assert_bitwise_equal(nan, nan.double())


def test_an_error_of_twice_torchs_is_the_limit():
    ref = torch.linspace(-1, 1, 1000)
    torch_same = ref + 1e-3
    assert_no_worse_than(ref + 1.9e-3, torch_same, ref)
    with pytest.raises(AssertionError, match=r"largest error 2\.100e-03 is more than 2 x torch's 1\.000e-03"):
        assert_no_worse_than(ref + 2.1e-3, torch_same, ref)
    assert_no_worse_than(ref + 2.1e-3, torch_same, ref, factor=3)


def test_a_zero_output_is_caught():
    ref = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    with pytest.raises(AssertionError, match="largest error"):
        assert_no_worse_than(torch.zeros(1000), ref.bfloat16(), ref)


def test_many_small_errors_are_caught_by_the_rms():
    # torch is wrong in one place; a kernel as wrong everywhere has the same largest error.
    ref = torch.ones(1000)
    torch_same = ref.clone()
    torch_same[0] += 1e-2
    with pytest.raises(AssertionError, match="RMS error"):
        assert_no_worse_than(ref + 1e-2, torch_same, ref)


def test_infinities_and_nan_must_stand_where_the_reference_has_them():
    inf = float("inf")
    ref = torch.tensor([1.0, inf, -inf, float("nan")])
    assert_no_worse_than(ref.clone(), ref.clone(), ref)
    for wrong in ([1.0, -inf, -inf, float("nan")], [1.0, inf, -inf, 0.0]):
        with pytest.raises(AssertionError, match="other infinities or NaN"):
            assert_no_worse_than(torch.tensor(wrong), ref, ref)
    with pytest.raises(AssertionError, match="not finite where"):
        assert_no_worse_than(torch.tensor([inf, inf, -inf, float("nan")]), ref, ref)
