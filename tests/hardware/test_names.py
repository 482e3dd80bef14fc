"""Named machines: the grammar, its refusals, and constants that hang together."""

import pytest

from deepwell.errors import ConfigError
from deepwell.hardware.names import machine_of_device, machines, named_hardware
from deepwell.hardware.probe import probe

# (name, GPUs, nodes, NVLink domain): one GPU, a part of a node, a node, several nodes, nodes said outright, racks.
GOOD = [
    ("H200", 1, 1, 1),
    ("4xB200", 4, 1, 4),
    ("8xB200", 8, 1, 8),
    ("16xH100", 16, 2, 8),
    ("64x8xH100", 512, 64, 8),
    ("3x4xH100", 12, 3, 8),
    ("72xGB200", 72, 18, 72),
    ("gb200-nvl72", 72, 18, 72),
    ("gb200-nvl72:4", 288, 72, 72),
    ("GB300-NVL72:2", 144, 36, 72),
    ("8xA100-SXM4-80GB", 8, 1, 8),  # the name itself holds an x
    ("8xh100-pcie", 8, 1, 1),
]


@pytest.mark.parametrize(("name", "gpus", "nodes", "domain"), GOOD)
def test_names_give_the_counts_they_say(name, gpus, nodes, domain):
    hw = probe(name)
    assert (hw.num_gpus, hw.num_nodes, hw.nvlink_domain) == (gpus, nodes, domain)
    assert hw.gpus_per_node * hw.num_nodes == hw.num_gpus


def test_case_and_blanks_do_not_matter():
    assert probe(" 8 X b200 ").gpus == probe("8xB200").gpus


# Each with a piece that the message must hold: what was wrong, or what is near.
BAD = [
    ("0xB200", "'0' is no count"),
    ("axH100", "'a' is no count"),
    ("-1xB200", "'-1' is no count"),
    ("1.5xH100", "'1.5' is no count"),
    ("\u0668xB200", "is no count"),  # an Arabic 8 is a digit to Python
    ("", "empty name"),
    ("8x", "accepted:"),
    ("x", "accepted:"),
    ("8x8x8xH100", "accepted:"),
    ("B20", "did you mean B200"),
    ("8xH10O", "did you mean H100"),
    ("gb200nvl72", "did you mean GB200-NVL72"),
    ("8xRTX", "known: A100-40"),
    ("H100:2", "is a GPU, counted in front"),
    ("8xGB200-NVL72", "counted behind the name"),
    ("gb200-nvl72:0", "'0' is no count"),
    ("gb200-nvl72:", "'' is no count"),
    ("2x16xH100", "at most 8"),
    ("12xH100", "no whole nodes"),
    ("1000000x8xH100", "more than"),
    ("9999999xH100", "is no count"),
]


@pytest.mark.parametrize(("name", "piece"), BAD)
def test_bad_names_are_refused_with_what_to_write_instead(name, piece):
    with pytest.raises(ConfigError) as error:
        named_hardware(name)
    assert piece in str(error.value)
    assert repr(name) in str(error.value) or not name


def test_every_constant_has_a_source():
    for machine in machines().values():
        texts = [c.source for c in machine.constants] + [p.source for p in machine.peaks]
        texts += (
            [c.source for c in machine.curves] + [r.source for r in machine.racks] + [machine.compute_capability_source]
        )
        assert all(len(text) > 10 for text in texts), machine.name


def test_every_machine_of_the_task_is_there_with_what_a_planner_needs():
    wanted = "A100-40 A100-80 A800-80 H100 H100-96G-500W H100-PCIe H200 H800 B100 B200 B300 GB200 GB300".split()
    assert sorted(machines()) == sorted(name.lower() for name in wanted)
    for machine in machines().values():
        gpu = machine.gpu()
        assert gpu.memory_bytes and gpu.memory_gb_per_s and gpu.power_limit_w, machine.name
        assert gpu.peak_tflops("bf16") is not None, machine.name


@pytest.mark.parametrize("name", ["h100", "h100-pcie", "h200", "h800"])
def test_hopper_fp8_is_twice_bf16_and_there_is_no_fp4(name):
    gpu = machines()[name].gpu()
    assert gpu.peak_tflops("fp8").value == pytest.approx(2 * gpu.peak_tflops("bf16").value, rel=1e-3)
    assert gpu.peak_tflops("nvfp4") is None and not gpu.supports("mxfp8")


@pytest.mark.parametrize(("name", "fp4_over_fp8"), [("b100", 2), ("b200", 2), ("gb200", 2), ("b300", 3), ("gb300", 3)])
def test_blackwell_peaks_step_up_by_format(name, fp4_over_fp8):
    gpu = machines()[name].gpu()
    assert gpu.peak_tflops("mxfp8").value == 2 * gpu.peak_tflops("bf16").value
    assert gpu.peak_tflops("nvfp4").value == fp4_over_fp8 * gpu.peak_tflops("mxfp8").value
    assert gpu.peak_tflops("mxfp6").value == gpu.peak_tflops("mxfp8").value


def test_hopper_peak_follows_from_its_clock():
    # 132 SMs x 4 tensor cores x 512 FMA x 2 flops x 1.83 GHz is the published 989.
    gpu = machines()["h100"].gpu()
    assert gpu.num_sms * 4 * 512 * 2 * gpu.max_sm_clock_mhz * 1e6 / 1e12 == pytest.approx(989, rel=1e-3)


def test_what_was_timed_never_beats_the_peak():
    for machine in machines().values():
        gpu = machine.gpu()
        for curve in gpu.curves:
            assert max(p.tflops for p in curve.points) < gpu.peak_tflops(curve.format).value
        assert gpu.copy_gb_per_s is None or gpu.copy_gb_per_s < gpu.memory_gb_per_s


def test_nvlink_is_the_links_times_their_speed():
    for machine in machines().values():
        fabric = machine.fabric()
        if fabric.nvlinks_per_gpu:
            per_link = 50 if machine.compute_capability >= (10, 0) else 25
            assert fabric.nvlink_gb_per_s == per_link * fabric.nvlinks_per_gpu, machine.name


def test_h200_brings_its_measured_table():
    gpu = probe("H200").gpus[0]
    assert {c.format for c in gpu.curves} == {"bf16", "fp8_tensor", "fp8_row", "fp8_1x128"}
    figure = gpu.gemm_tflops("fp8_row", 16384, 4096, 4096)
    assert (figure.value, figure.tier) == (1344, "table") and "2026-11-15" in figure.source


def test_a_device_name_with_another_memory_is_another_part():
    # Some H100s carry 96 GB of slower memory under the same name.
    assert machine_of_device("NVIDIA H200", 143_771 * 2**20).name == "H200"
    assert machine_of_device("NVIDIA H100 80GB HBM3", 96 * 2**30) is None
    assert machine_of_device("NVIDIA H200 NVL", 143_771 * 2**20) is None
