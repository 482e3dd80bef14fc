"""The table of native formats by compute capability."""

import pytest

from deepwell.errors import ConfigError
from deepwell.formats import spec
from deepwell.hardware.capability import (
    CAPABILITIES,
    FORMATS,
    PEAK_CLASS,
    canonical_format,
    capability_of,
    fp8_row_results,
)
from deepwell.hardware.parts import Gpu

# (compute capability, (Blackwell, Hopper, tcgen05), native, not native)
TABLE = [
    ((8, 0), (False, False, False), ["bf16"], ["fp8", "mxfp8", "nvfp4"]),
    ((8, 6), (False, False, False), ["bf16"], ["fp8", "mxfp8", "nvfp4"]),
    ((8, 9), (False, False, False), ["fp8_tensor", "fp8_row"], ["fp8_1x128", "mxfp8"]),
    ((9, 0), (False, True, False), ["fp8_tensor", "fp8_row", "fp8_1x128"], ["mxfp8", "mxfp6", "mxfp4", "nvfp4"]),
    ((10, 0), (True, False, True), ["fp8_tensor", "mxfp8", "mxfp6", "mxfp4", "nvfp4"], ["fp8_1x128"]),
    ((10, 1), (True, False, True), ["mxfp8", "nvfp4"], ["fp8_1x128"]),
    ((10, 3), (True, False, True), ["mxfp8", "nvfp4"], ["fp8_1x128"]),
    ((11, 0), (True, False, True), ["mxfp8", "nvfp4"], ["fp8_1x128"]),
    ((12, 0), (True, False, False), ["mxfp8", "nvfp4"], ["fp8_1x128"]),
    ((12, 1), (True, False, False), ["mxfp8", "nvfp4"], ["fp8_1x128"]),
]


@pytest.mark.parametrize(("cc", "flags", "native", "others"), TABLE)
def test_each_compute_capability_knows_its_formats(cc, flags, native, others):
    gpu = Gpu(name="any", compute_capability=cc)
    assert (gpu.is_blackwell, gpu.is_hopper, gpu.has_tcgen05) == flags
    assert all(gpu.supports(name) and not gpu.why_not(name) for name in native)
    assert all(not gpu.supports(name) and gpu.why_not(name) for name in others)


def test_the_table_is_covered_and_agrees_with_the_properties():
    assert {row[0] for row in TABLE} == set(CAPABILITIES)
    for cc, capability in CAPABILITIES.items():
        assert capability.has_tcgen05 == Gpu(name="any", compute_capability=cc).has_tcgen05


def test_unknown_capabilities_get_the_nearest_older_or_the_least():
    assert capability_of((10, 7)).native_formats == CAPABILITIES[10, 3].native_formats
    assert "10.3" in capability_of((10, 7)).note
    assert "mxfp8" not in capability_of((14, 0)).native_formats and "bf16" in capability_of((14, 0)).native_formats
    assert capability_of((7, 5)).native_formats == ("fp32", "fp16")


def test_every_format_name_of_deepwell_is_understood():
    # The formats package says more (element, power-of-two scales); the tensor core is the same.
    for name in (*spec.FORMATS, *spec.ALIASES):
        assert canonical_format(name) in FORMATS, name
    assert canonical_format("fp8_e5m2_row_pow2") == "fp8_row"
    assert canonical_format("fp8_128x128") == "fp8_1x128"
    assert canonical_format("nvfp4_16x16") == "nvfp4"
    assert set(PEAK_CLASS) == set(FORMATS)


@pytest.mark.parametrize("name", ["fp7", "", "mxfp8_e9", "bf16_e4m3"])
def test_what_is_no_format_is_refused(name):
    with pytest.raises(ConfigError, match="format"):
        Gpu(name="any", compute_capability=(9, 0)).supports(name)


@pytest.mark.parametrize("cc", list(CAPABILITIES))
def test_products_with_row_scales_are_written_in_bf16_alone_but_on_hopper(cc):
    wanted = ("bf16", "fp16", "fp32") if cc[0] == 9 else ("bf16",)
    assert fp8_row_results(cc) == fp8_row_results(cc, "13.0") == fp8_row_results(cc, "12.9") == wanted
    # cuBLASLt learned row scales with 12.9; before that torch runs CUTLASS on Hopper too.
    assert fp8_row_results(cc, "12.8") == ("bf16",)
