"""doctor on native kernels: the library of `deepwell build`, and Blackwell's self-check on stand-ins."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deepwell.doctor import checks as doctor
from deepwell.doctor import native as doctor_native
from deepwell.files import hash_file
from deepwell.hardware.model import Hardware
from deepwell.hardware.parts import Gpu, Host
from deepwell.kernels.cutlass import build as cb
from deepwell.kernels.gemm import block_scaled, native_candidates
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.verify import verify


def machine(capability):
    gpu = Gpu(name="NVIDIA GPU", compute_capability=capability, driver="580.1", cuda_driver="13.0")
    return Hardware(name="here", gpus=(gpu,), host=Host())


CPU = Hardware(name="here", gpus=(Gpu(name="CPU", kind="cpu"),), host=Host())


def build(folder, arch):
    """What a build leaves: a library and the manifest that names it."""
    target = folder / "native" / arch
    target.mkdir(parents=True)
    library = target / f"libdeepwell_{arch}-0.so"
    library.write_bytes(b"code")
    sha256 = hash_file(library)
    sources = cb.SOURCES[arch]
    built = cb.Built(arch=arch, path=str(library), sha256=sha256, nvcc="13.0", cutlass="4.2.0", sources=sources)
    cb._write_manifest(target, built)
    return library


def test_the_library_of_this_gpu_is_found_and_a_damaged_one_is_a_warning(tmp_path):
    environ = {"DEEPWELL_CACHE_DIR": str(tmp_path)}
    missing = doctor_native.library_finding(machine((9, 0)), environ)
    assert missing.status == "absent" and "deepwell build" in missing.detail
    library = build(tmp_path, "sm_90a")
    found = doctor_native.library_finding(machine((9, 0)), environ)
    assert found.status == "ok" and "sm_90a" in found.detail and "fp8_rowwise" in found.detail
    # Another GPU's library is none for this one.
    assert doctor_native.library_finding(machine((10, 0)), environ).status == "absent"
    assert doctor_native.library_finding(CPU, environ).status == "ok"
    library.write_bytes(b"changed")
    damaged = doctor_native.library_finding(machine((9, 0)), environ)
    assert damaged.status == "warn" and "hash" in damaged.detail and damaged.remedy


def test_a_gpu_without_cutlass_kernels_is_said():
    found = doctor_native.library_finding(machine((8, 0)))
    assert found.status == "absent" and "8.0" in found.detail


def prove_with(gemms):
    """The real self-check on the CPU, with stand-ins for the GPU's kernels."""

    def prove(fmt):
        found = []
        for op in ("block_scaled_quantize", "block_scaled_gemm"):
            for candidate in native_candidates.built_in(op):
                if candidate.precision == fmt and candidate.name in ("quantize", *gemms):
                    stand_in = replace(candidate, fn=gemms.get(candidate.name, candidate.fn))
                    proof = verify(stand_in, native_candidates.cases(stand_in, Problem(op=op, precision=fmt)))
                    found.append(candidate.verdict(reason=proof.reason, sqnr_db=proof.sqnr_db))
        return found

    return prove


def right(a, b, dtype):
    return block_scaled.block_scaled_gemm_ref(a, b, out_dtype=dtype)


def wrong(a, b, dtype):
    return right(a, b, dtype) * 1.25


def absent(a, b, dtype):
    raise RuntimeError("no kernel image is available for execution on the device")


def test_on_blackwell_every_kernel_is_held_against_its_reference():
    found = doctor_native.self_check_findings(
        machine((10, 0)), prove_with({"vendor": right, "triton": wrong, "cutlass": absent})
    )
    assert [f.name for f in found] == ["self-check mxfp8", "self-check nvfp4"]
    for finding in found:
        assert finding.status == "ok"
        assert "vendor passed" in finding.detail and "triton FAILED" in finding.detail
        assert "no kernel image" in finding.detail


def test_where_no_kernel_passes_doctor_warns_and_says_what_happens_instead():
    found = doctor_native.self_check_findings(machine((10, 0)), prove_with({"vendor": wrong, "triton": absent}))
    assert [f.status for f in found] == ["warn", "warn"]
    assert all("substitute" in f.remedy or "emulation" in f.remedy for f in found)


@pytest.mark.parametrize("hw", [machine((9, 0)), CPU], ids=["hopper", "cpu"])
def test_elsewhere_there_is_nothing_to_check(hw):
    (found,) = doctor_native.self_check_findings(hw, prove=lambda fmt: pytest.fail("nothing to prove"))
    assert found.status == "absent"


def test_doctor_asks_for_the_self_check_only_where_torch_has_a_gpu(monkeypatch, tmp_path):
    environ = {"DEEPWELL_CACHE_DIR": str(tmp_path)}
    proof = SimpleNamespace(name="quantize", reason="", sqnr_db=999.0)
    monkeypatch.setattr(doctor_native, "_on_device", lambda fmt: [proof, proof])
    with_gpu = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    without = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    always = ["native library", "native sources"]
    assert [c.name for c in doctor.check_native(without, machine((10, 0)), environ)] == always
    checks = doctor.check_native(with_gpu, machine((10, 0)), environ)
    assert [c.name for c in checks] == [*always, "self-check mxfp8", "self-check nvfp4"]
    assert json.loads(doctor.Diagnosis(checks=tuple(checks)).to_json())["healthy"]
