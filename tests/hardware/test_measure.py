"""Measuring on the CPU with tiny shapes, and the cache that keeps the results."""

import dataclasses
import json

import pytest
import torch

from deepwell.errors import ConfigError
from deepwell.hardware import gemms, measure
from deepwell.hardware.cache import Measurement, cache_dir, measurement_path, read_measurement, write_measurement
from deepwell.hardware.gemms import gemm_call
from deepwell.hardware.parts import Curve, GemmPoint, Gpu
from deepwell.hardware.probe import probe

# bf16 is left out: on a CPU with AMX its first use starts a child process (tests/hardware/test_host.py has that).
TINY = {"shapes": ((32, 32, 32), (64, 32, 16)), "formats": ("fp32", "fp8_tensor", "fp8_row"), "copy_bytes": 1 << 16}


@pytest.fixture
def environ(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPWELL_CACHE_DIR", str(tmp_path / "cache"))
    return {"DEEPWELL_CACHE_DIR": str(tmp_path / "cache")}


@pytest.fixture
def cpu(environ, tmp_path, fake_nvml):
    nvml = fake_nvml(refuse={"nvmlInit": fake_nvml.NVMLError_LibraryNotFound("none")})
    # An empty root: on a GPU machine its device files would lead past the missing NVML to the GPU.
    return lambda: probe(nvml=nvml, environ=environ, root=tmp_path)


@pytest.fixture
def fp8_products(monkeypatch):
    """torch 2.11 has `scaled_mm` on GPUs alone: on its CPU the product of the scaled operands stands in for it."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"):
        return
    kinds = torch.nn.functional.ScalingType

    def scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype, use_fast_accum):
        shapes = {kinds.TensorWise: [(1,), (1,)], kinds.RowWise: [(len(a), 1), (1, b.shape[1])]}
        assert recipe_a == recipe_b and [scale_a.shape, scale_b.shape] == shapes[recipe_a]
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)


def test_measured_figures_are_kept_and_found_again(cpu, fp8_products, environ):
    hw = measure.measure(cpu(), budget_s=20, **TINY)
    gpu = hw.gpus[0]
    assert gpu.figure("copy_gb_per_s").tier == "measured" and gpu.copy_gb_per_s > 0
    assert {c.format for c in gpu.curves} == {"fp32", "fp8_tensor", "fp8_row"} and gpu.unavailable == ()
    assert all(len(c.points) == 2 and min(p.tflops for p in c.points) > 0 for c in gpu.curves)
    assert gpu.gemm_tflops("fp32", 32, 32, 32).tier == "measured"
    again = cpu()
    assert again.gpus == hw.gpus
    assert cpu().notes == hw.notes
    assert "measured here" in str(again)


def test_a_format_that_torch_refuses_is_recorded_with_the_reason(cpu):
    hw = measure.measure(
        cpu(), budget_s=20, **{**TINY, "formats": ("fp8_1x128", "mxfp8", "fp32"), "shapes": ((128,) * 3,)}
    )
    reasons = dict(hw.gpus[0].unavailable)
    assert set(reasons) == {"fp8_1x128", "mxfp8"} and all(reasons.values())
    assert "not available" in str(hw)


def test_a_short_budget_keeps_what_it_measured_and_says_so(cpu, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(measure.time, "monotonic", lambda: float(next(clock)))
    hw = measure.measure(cpu(), budget_s=3, **TINY)  # the clock ticks once a job: the copy and one GEMM fit
    assert any("too short for 5 of 7" in note for note in hw.notes)
    assert [c.format for c in hw.gpus[0].curves] == ["fp32"]


def test_ctrl_c_keeps_what_was_measured_and_what_was_there(cpu, fp8_products, environ, monkeypatch):
    measure.measure(cpu(), budget_s=20, **TINY)

    def stop(torch_module, format_name, shape, device):
        if format_name == "fp8_row":
            raise KeyboardInterrupt
        return gemms.gemm_call(torch_module, format_name, shape, device)

    monkeypatch.setattr(measure, "gemm_call", stop)
    hw = measure.measure(cpu(), budget_s=20, **{**TINY, "shapes": ((16, 16, 16),)})
    assert any("stopped by the user" in note for note in hw.notes)
    shapes = {c.format: [p.m for p in c.points] for c in hw.gpus[0].curves}
    assert shapes == {"fp32": [16, 32, 64], "fp8_tensor": [16, 32, 64], "fp8_row": [32, 64]}
    assert cpu().gpus[0].curves == hw.gpus[0].curves
    found, _ = read_measurement(hw.gpus[0], environ)
    assert not found.complete


def test_a_failing_gpu_ends_the_run_and_blames_no_format(cpu, fp8_products, monkeypatch):
    def fail(torch_module, format_name, shape, device):
        if format_name == "fp8_row":
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")
        return gemms.gemm_call(torch_module, format_name, shape, device)

    monkeypatch.setattr(measure, "gemm_call", fail)
    hw = measure.measure(cpu(), budget_s=20, **TINY)
    assert any("illegal memory access was encountered)" in note for note in hw.notes)
    assert hw.gpus[0].unavailable == () and {c.format for c in hw.gpus[0].curves} == {"fp32", "fp8_tensor"}


def test_a_format_the_gpu_lacks_is_not_even_tried():
    gpu = Gpu(name="any", compute_capability=(9, 0))
    run = measure._MeasureRun(torch, gpu, torch.device("cpu"), 1024)
    run.one(measure._Job(format="nvfp4", shape=(128, 128, 128)), 0.01)
    assert "no block-scaled MMA" in run.unavailable["nvfp4"]


@pytest.mark.parametrize("budget", [0, -1, 4000, float("nan")])
def test_bad_budgets_are_refused(cpu, budget):
    with pytest.raises(ConfigError, match="budget_s"):
        measure.measure(cpu(), budget_s=budget)


def test_a_named_machine_cannot_be_measured():
    with pytest.raises(ConfigError, match="a name, not this machine"):
        measure.measure(probe("8xB200"))


@pytest.mark.parametrize("format_name", ["fp32", "fp8_tensor", "fp8_row"])
def test_the_timed_call_multiplies(fp8_products, format_name):
    # The operands are random; a product of the right shape and finite numbers is what is timed.
    out = gemm_call(torch, format_name, (32, 48, 64), torch.device("cpu"))()
    assert out.shape == (32, 48) and torch.isfinite(out.float()).all() and out.float().std() > 1


@pytest.mark.gpu
@pytest.mark.parametrize("format_name", measure.GPU_FORMATS)
def test_the_timed_call_multiplies_on_a_gpu(format_name):
    hw = probe()
    if not hw.supports(format_name):
        pytest.skip(hw.gpus[0].why_not(format_name))
    out = gemm_call(torch, format_name, (256, 384, 512), torch.device("cuda"))()
    assert out.shape == (256, 384) and torch.isfinite(out.float()).all() and out.float().std() > 1


@pytest.mark.gpu
def test_a_gpu_is_measured_below_its_peak(environ):
    hw = measure.measure(probe(environ=environ), budget_s=20)
    gpu = hw.gpus[0]
    assert gpu.copy_gb_per_s < gpu.memory_gb_per_s
    for curve in (c for c in gpu.curves if c.tier == "measured"):
        assert max(p.tflops for p in curve.points) < gpu.peak_tflops(curve.format).value


def _measurement(gpu: Gpu, **changes) -> Measurement:
    curve = Curve(format="bf16", tier="measured", source="test", points=(GemmPoint(m=1, n=2, k=3, tflops=4.0),))
    return Measurement.for_device(gpu, date="2026-01-01", copy_gb_per_s=5.0, curves=(curve,), **changes)


GPU = Gpu(name="NVIDIA H200", driver="580", compute_capability=(9, 0))


def test_the_cache_gives_back_what_it_got(environ):
    written = _measurement(GPU, unavailable=(("nvfp4", "no"),), complete=False)
    write_measurement(GPU, written, environ)
    assert read_measurement(GPU, environ) == (written, "")
    assert not list(cache_dir(environ).glob("*.tmp"))


def test_another_driver_device_or_core_count_is_another_file(environ):
    cpu = Gpu(name="Xeon", kind="cpu", num_sms=4)
    gpus = [GPU, dataclasses.replace(GPU, driver="590"), dataclasses.replace(GPU, mig_enabled=True)]
    gpus += [cpu, dataclasses.replace(cpu, num_sms=8)]
    assert len({measurement_path(gpu, environ) for gpu in gpus}) == len(gpus)


# Torn, foreign, of another schema, of wrong types, binary: each is ignored with a note, and written anew later.
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"schema": 99}', b'{"schema": 1}', b'{"schema": 1, "device": 3}', b"\xff\xfe\x00", b"null"],
)
def test_a_corrupt_cache_is_ignored_with_a_note_and_rebuilt(environ, content):
    path = measurement_path(GPU, environ)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    found, note = read_measurement(GPU, environ)
    assert found is None and path.name in note
    write_measurement(GPU, _measurement(GPU), environ)
    assert read_measurement(GPU, environ)[0] == _measurement(GPU)


def test_a_cache_of_another_device_is_ignored(environ):
    # Copied from another machine under this one's file name.
    other = dataclasses.replace(_measurement(GPU), device="NVIDIA B200")
    path = write_measurement(GPU, _measurement(GPU), environ)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "device": other.device}))
    found, note = read_measurement(GPU, environ)
    assert found is None and "another device" in note


def test_a_corrupt_cache_shows_in_the_notes_of_probe(cpu):
    hw = measure.measure(cpu(), budget_s=20, **TINY)
    measurement_path(hw.gpus[0]).write_text("{")
    assert any("were ignored" in note for note in cpu().notes)


def test_an_unwritable_cache_names_the_variable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="DEEPWELL_CACHE_DIR"):
        write_measurement(GPU, _measurement(GPU), {"DEEPWELL_CACHE_DIR": str(tmp_path / "file")})
