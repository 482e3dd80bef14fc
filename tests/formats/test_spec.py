"""The facts of the formats: against ml_dtypes' own tables, by hand, and through JSON."""

import json
import subprocess
import sys

import ml_dtypes
import pytest

from deepwell.errors import ConfigError
from deepwell.formats.spec import ALIASES, ELEMENTS, FORMATS, Format, get_format

ML_DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}


@pytest.mark.parametrize("name", ML_DTYPES)
def test_element_facts_agree_with_ml_dtypes(name):
    element, info = ELEMENTS[name], ml_dtypes.finfo(ML_DTYPES[name])
    assert element.bits == info.bits
    assert element.max == float(info.max)
    assert element.min_normal == float(info.smallest_normal)
    assert element.min_subnormal == float(info.smallest_subnormal)
    assert element.mantissa_bits == info.nmant
    assert element.exponent_bits == info.nexp


# OCP's emax of each MX element, which the floor rule subtracts.
@pytest.mark.parametrize("name, emax", [("e4m3", 8), ("e5m2", 15), ("e3m2", 4), ("e2m3", 2), ("e2m1", 2)])
def test_largest_power_of_two_is_the_one_of_the_standard(name, emax):
    assert ELEMENTS[name].max_exponent == emax


# By hand: codes, plus eight scale bits over the block. NVFP4 weights share a scale over 256 elements.
@pytest.mark.parametrize(
    "name, bits",
    [
        ("bf16", 16),
        ("fp8", 8),
        ("fp8_1x128", 8 + 32 / 128),
        ("fp8_128x128", 8 + 32 / 16384),
        ("mxfp8", 8.25),
        ("mxfp6", 8.25),  # a byte per code
        ("mxfp4", 4.25),
        ("nvfp4", 4.5),
        ("nvfp4_16x16", 4 + 8 / 256),
    ],
)
def test_bits_per_element_count_the_scales(name, bits):
    assert get_format(name).bits_per_element == bits


def test_bytes_of_a_shape_count_ragged_blocks_and_odd_rows():
    # 3 rows of 33: 17 bytes of pairs, 3 scales of 16; and the global scale.
    assert get_format("nvfp4").num_bytes((3, 33)) == 3 * 17 + 3 * 3 + 4
    # 2 matrices of 130 x 130: 2 x 2 fp32 scales each.
    assert get_format("fp8_128x128").num_bytes((2, 130, 130)) == 2 * 130 * 130 + 2 * 4 * 4
    assert get_format("fp8_row").num_bytes((5, 7)) == 35 + 5 * 4
    assert get_format("mxfp8").num_bytes((0, 64)) == 0


def test_every_fp8_combination_has_a_name():
    for element in ("e4m3", "e5m2"):
        for group, block in (("tensor", None), ("row", None), ("1x128", (1, 128)), ("128x128", (128, 128))):
            for scale, suffix in (("fp32", ""), ("pow2", "_pow2")):
                fmt = get_format(f"fp8_{element}_{group}{suffix}")
                assert (fmt.element.name, fmt.block, fmt.scale) == (element, block, scale)


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_lead_to_formats(alias):
    assert get_format(alias) is FORMATS[ALIASES[alias]]


def test_fp4_is_nvfp4_and_case_and_dashes_do_not_matter():
    assert get_format("FP4").name == "nvfp4"
    assert get_format("NVFP4-16x16").name == "nvfp4_16x16"
    assert get_format(get_format("mxfp8")).name == "mxfp8"


def test_an_unknown_name_is_answered_with_near_ones():
    with pytest.raises(ConfigError, match=r"'mxpf8' is not known; did you mean mxfp8"):
        get_format("mxpf8")
    with pytest.raises(ConfigError, match="known: fp32, bf16"):
        get_format("~~~")
    with pytest.raises(ConfigError, match="got int"):
        get_format(8)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_round_trip_through_json(name):
    fmt = FORMATS[name]
    assert Format.from_dict(json.loads(json.dumps(fmt.to_dict()))) == fmt
    assert name in str(fmt)


def test_a_description_with_other_facts_is_refused():
    stored = get_format("mxfp8").to_dict() | {"block": [1, 16]}
    with pytest.raises(ConfigError, match=r"block=\[1, 16\]"):
        Format.from_dict(stored)
    with pytest.raises(ConfigError, match="has no 'name'"):
        Format.from_dict({})


def test_the_facts_load_without_torch():
    code = "import sys, deepwell.formats.spec; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
