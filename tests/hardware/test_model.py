"""Hardware and its parts: JSON both ways, figures with tiers, interpolation, bandwidth of groups."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepwell.errors import ConfigError
from deepwell.hardware.model import Hardware
from deepwell.hardware.names import machines
from deepwell.hardware.parts import Curve, Fabric, GemmPoint, Gpu, Link, Nic, Origin
from deepwell.hardware.probe import probe

_text = st.text(max_size=12)
_count = st.integers(1, 2**40)
_speed = st.floats(0.001, 1e6, allow_nan=False)
_maybe = st.none()
_sources = st.builds(Origin, figure=_text, tier=st.sampled_from(["spec", "table", "measured"]), text=_text)
_points = st.builds(GemmPoint, m=_count, n=_count, k=_count, tflops=_speed)
_curves = st.builds(
    Curve, format=_text, tier=st.just("measured"), source=_text, points=st.lists(_points, max_size=3).map(tuple)
)
_gpus = st.builds(
    Gpu,
    name=_text,
    kind=st.sampled_from(["cuda", "cpu"]),
    compute_capability=_maybe | st.tuples(st.integers(0, 20), st.integers(0, 9)),
    memory_bytes=_maybe | _count,
    memory_gb_per_s=_maybe | _speed,
    mig_enabled=_maybe | st.booleans(),
    instruction_sets=st.lists(_text, max_size=2).map(tuple),
    curves=st.lists(_curves, max_size=2).map(tuple),
    unavailable=st.lists(st.tuples(_text, _text), max_size=2).map(tuple),
    sources=st.lists(_sources, max_size=2).map(tuple),
)
_fabrics = st.builds(
    Fabric,
    nvlink_domain=st.integers(1, 72),
    nvswitch=st.booleans(),
    nvlink_gb_per_s=_maybe | _speed,
    links=st.lists(
        st.builds(Link, a=st.integers(0, 7), b=st.integers(0, 7), nvlinks=st.integers(0, 18)), max_size=2
    ).map(tuple),
    nics=st.lists(st.builds(Nic, name=_text, kind=st.just("infiniband"), gb_per_s=_maybe | _speed), max_size=2).map(
        tuple
    ),
)
_hardware = st.builds(
    Hardware,
    name=_text,
    gpus=st.lists(_gpus, min_size=1, max_size=3).map(tuple),
    fabric=_fabrics,
    num_nodes=st.integers(1, 9),
    notes=st.lists(_text, max_size=2).map(tuple),
)


@given(_hardware)
@settings(max_examples=60, deadline=None)
def test_any_hardware_survives_json(hw):
    assert Hardware.from_json(hw.to_json()) == hw
    assert isinstance(str(hw), str)  # and prints, whatever is missing


@pytest.mark.parametrize("name", sorted(machines()))
def test_named_machines_survive_json_and_print(name):
    hw = probe(f"2x1x{name}")
    assert Hardware.from_json(hw.to_json()) == hw
    assert hw.gpus[0].name in str(hw)


# A foreign file must not become half a value: each case breaks one thing.
@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(schema=99),
        lambda d: d.pop("schema"),
        lambda d: d.update(surprise=1),
        lambda d: d.pop("gpus"),
        lambda d: d.update(gpus=[]),
        lambda d: d.update(gpus="H100"),
        lambda d: d.update(num_nodes=0),
        lambda d: d.update(num_nodes=True),
        lambda d: d["gpus"][0].update(memory_bytes="80"),
        lambda d: d["gpus"][0].update(memory_bytes=1.5),
        lambda d: d["gpus"][0].update(kind="tpu"),
        lambda d: d["gpus"][0].update(compute_capability=[9]),
        lambda d: d["fabric"].update(nvswitch=1),
    ],
)
def test_foreign_json_is_refused(change):
    data = json.loads(probe("8xH100").to_json())
    change(data)
    with pytest.raises(ConfigError):
        Hardware.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3"])
def test_what_is_no_hardware_is_refused(text):
    with pytest.raises(ConfigError):
        Hardware.from_json(text)


def _gpu(*curves: Curve) -> Gpu:
    return Gpu(name="any", compute_capability=(9, 0), curves=curves)


def _curve(tier: str, format_name: str = "bf16", *speeds: float) -> Curve:
    points = tuple(GemmPoint(m=2**i, n=2**i, k=2**i, tflops=s) for i, s in enumerate(speeds or (1.0,), start=10))
    return Curve(format=format_name, tier=tier, source=tier, points=points)


def test_measured_beats_table_beats_peak():
    table, measured = _curve("table", "bf16", 600.0), _curve("measured", "bf16", 500.0)
    assert _gpu(table, measured).gemm_tflops("bf16", 8, 8, 8).tier == "measured"
    assert _gpu(table).gemm_tflops("bf16", 8, 8, 8).tier == "table"
    assert probe("H100-PCIe").gpus[0].gemm_tflops("bf16", 8, 8, 8).tier == "spec"
    assert _gpu().gemm_tflops("bf16", 8, 8, 8) is None


def test_interpolation_hits_the_points_and_stays_between_them():
    gpu = _gpu(_curve("table", "bf16", 100.0, 400.0))
    assert gpu.gemm_tflops("bf16", 1024, 1024, 1024).value == 100
    assert gpu.gemm_tflops("bf16", 2048, 2048, 2048).value == 400
    between = gpu.gemm_tflops("bf16", 1448, 1448, 1448).value
    assert between == pytest.approx(250, rel=0.01)  # half way in log2
    assert 100 < gpu.gemm_tflops("bf16", 1, 1, 1).value < 400
    with pytest.raises(ConfigError, match="m, n, k"):
        gpu.gemm_tflops("bf16", 0, 8, 8)


def test_an_untimed_format_borrows_from_its_rate_class_and_says_so():
    # Else mxfp8 would be planned at its peak and win against fp8, which was timed.
    gpu = probe("B200").gpus[0]
    figure = gpu.gemm_tflops("mxfp8", 8192, 8192, 8192)
    assert figure.value == gpu.gemm_tflops("fp8", 8192, 8192, 8192).value
    assert figure.tier == "table" and "fp8_tensor stands in" in figure.source
    # Not native, so nothing to borrow for.
    assert probe("H200").gpus[0].gemm_tflops("mxfp8", 8192, 8192, 8192) is None


def test_group_bandwidth_is_that_of_the_slowest_link_crossed():
    hw = probe("4x8xH100")
    assert hw.group_gb_per_s(8).value == 450  # one node
    assert hw.group_gb_per_s(2, stride=4).value == 450
    assert hw.group_gb_per_s(2, stride=8).value == 50  # neighbours of neighbouring nodes
    assert hw.group_gb_per_s(16).value == 50
    assert hw.group_gb_per_s(3).value == 50  # ranks 6, 7, 8 sit in two nodes
    assert hw.group_gb_per_s(1) is None
    rack = probe("gb200-nvl72")
    assert rack.group_gb_per_s(64).value == 900  # NVLink spans the nodes of a rack
    assert probe("gb200-nvl72:2").group_gb_per_s(144).value == 50
    pcie = probe("2x8xH100-PCIe")
    assert pcie.group_gb_per_s(8).value == 63 and pcie.group_gb_per_s(16) is None
    with pytest.raises(ConfigError, match="do not fit"):
        hw.group_gb_per_s(64)


def test_totals_are_over_all_nodes():
    hw = probe("2x8xH100")
    assert hw.total_memory_bytes == 16 * hw.memory_bytes == 16 * 81559 * 2**20
    assert hw.supports("fp8") and not hw.supports("nvfp4")


def test_figures_carry_tier_and_source_and_unknown_names_are_refused():
    gpu = probe("H200").gpus[0]
    assert gpu.figure("copy_gb_per_s").tier == "table" and gpu.figure("memory_gb_per_s").tier == "spec"
    assert gpu.figure("sm_clock_mhz") is None
    with pytest.raises(ConfigError, match="no figure"):
        gpu.figure("charm")
