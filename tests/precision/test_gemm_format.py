"""What a format means for each GEMM: operands, rounding, Hadamard, options."""

from typing import Any

import pytest

from deepwell.errors import ConfigError
from deepwell.formats.spec import FORMATS
from deepwell.precision.gemm_format import GEMMS, POLICY_FORMATS, Precision, precision


def storage(name: str, **options: bool | str) -> dict[str, tuple[str, str]]:
    asked = precision(name, options)
    return {gemm: (asked.gemm(gemm).lhs.format, asked.gemm(gemm).rhs.format) for gemm in GEMMS}


def test_every_gemm_has_its_two_operands() -> None:
    roles = {gemm: (precision("mxfp8").gemm(gemm).lhs.role, precision("mxfp8").gemm(gemm).rhs.role) for gemm in GEMMS}
    assert roles == {
        "fwd": ("activation", "weight"),
        "dgrad": ("gradient", "weight"),
        "wgrad": ("gradient", "activation"),
    }


def test_nvfp4_is_the_published_recipe() -> None:
    assert storage("nvfp4") == {
        "fwd": ("nvfp4", "nvfp4_16x16"),
        "dgrad": ("nvfp4", "nvfp4_16x16"),
        "wgrad": ("nvfp4", "nvfp4"),
    }
    asked = precision("nvfp4")
    operands = {(gemm, o.role): o for gemm in GEMMS for o in (asked.gemm(gemm).lhs, asked.gemm(gemm).rhs)}
    # Stochastic rounding on gradients only, Hadamard on wgrad's operands only.
    assert {key for key, o in operands.items() if o.rounding == "stochastic"} == {
        ("dgrad", "gradient"),
        ("wgrad", "gradient"),
    }
    assert {key for key, o in operands.items() if o.hadamard} == {("wgrad", "gradient"), ("wgrad", "activation")}


def test_fp8_with_one_scale_per_tensor_is_the_hybrid() -> None:
    assert storage("fp8") == {
        "fwd": ("fp8_e4m3_tensor_pow2", "fp8_e4m3_tensor_pow2"),
        "dgrad": ("fp8_e5m2_tensor_pow2", "fp8_e4m3_tensor_pow2"),
        "wgrad": ("fp8_e5m2_tensor_pow2", "fp8_e4m3_tensor_pow2"),
    }


def test_finer_fp8_scales_are_e4m3_everywhere() -> None:
    assert set(sum(storage("fp8", scaling="row").values(), ())) == {"fp8_e4m3_row_pow2"}
    assert storage("fp8", scaling="1x128") == {
        "fwd": ("fp8_e4m3_1x128_pow2", "fp8_e4m3_128x128_pow2"),
        "dgrad": ("fp8_e4m3_1x128_pow2", "fp8_e4m3_128x128_pow2"),
        "wgrad": ("fp8_e4m3_1x128_pow2", "fp8_e4m3_1x128_pow2"),
    }


def test_mxfp8_is_e4m3_everywhere_and_rounds_to_nearest() -> None:
    assert set(sum(storage("mxfp8").values(), ())) == {"mxfp8"}
    assert storage("mxfp8", gradients="e5m2")["wgrad"] == ("mxfp8_e5m2", "mxfp8")
    assert precision("mxfp8").gemm("wgrad").lhs.rounding == "nearest"


@pytest.mark.parametrize("name", POLICY_FORMATS)
def test_every_operand_is_a_format_that_the_quantizers_know(name: str) -> None:
    for gemm in GEMMS:
        made = precision(name).gemm(gemm)
        for operand in (made.lhs, made.rhs):
            assert operand.format in FORMATS
        assert made.k_alignment >= 1
    assert precision(name).is_low is (name not in ("fp32", "bf16", "fp16"))


@pytest.mark.parametrize(
    ("spelling", "name", "options"),
    [
        ("fp4", "nvfp4", {}),
        ("FP4", "nvfp4", {}),
        ("MX-FP8".replace("-", ""), "mxfp8", {}),
        ("bfloat16", "bf16", {}),
        ("fp8-row", "fp8", {"scaling": "row"}),
        ("fp8_1x128", "fp8", {"scaling": "1x128"}),
        ("fp8_tensor", "fp8", {}),
        ("fp8_e4m3", "fp8", {"gradients": "e4m3"}),
        ("mxfp6_e2m3", "mxfp6", {"elements": "e2m3"}),
    ],
)
def test_other_spellings_mean_the_same(spelling: str, name: str, options: dict[str, Any]) -> None:
    assert precision(spelling) == precision(name, options)


def test_an_option_at_its_default_is_no_option() -> None:
    assert precision("nvfp4", {"hadamard": True}) == precision("nvfp4") == Precision(format="nvfp4")
    assert precision("nvfp4", {"hadamard": False}).gemm("wgrad").lhs.hadamard is False
    assert str(precision("nvfp4", {"hadamard": False})) == "nvfp4 (hadamard=False)"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mxfp9", {}, "mxfp8"),  # near names
        ("int3", {}, "bf16, fp16, fp8"),  # nothing near: all of them
        (None, {}, "NoneType"),
        ("bf16", {"hadamard": True}, "no option 'hadamard'; it has none"),
        ("nvfp4", {"hadamrd": True}, "stochastic_rounding, hadamard"),
        ("nvfp4", {"hadamard": "yes"}, "'yes'; it takes True, False"),
        ("nvfp4", {"hadamard": 1}, "it takes True, False"),  # 1 == True, but is a number
        ("fp8", {"scaling": "column"}, "'tensor', 'row', '1x128'"),
    ],
)
def test_wrong_formats_and_options_are_named(name: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        precision(name, options)


def test_a_gemm_that_is_none_of_the_three_is_refused() -> None:
    with pytest.raises(ConfigError, match="fwd, dgrad, wgrad"):
        precision("mxfp8").gemm("backward")


def test_a_gemm_format_prints_what_a_kernel_must_do() -> None:
    text = str(precision("nvfp4").gemm("wgrad"))
    assert text == "wgrad: gradient nvfp4 (stochastic, hadamard) x activation nvfp4 (hadamard)"
