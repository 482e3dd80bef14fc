"""doctor: each check with the good and the broken case, on stand-ins."""

import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepwell.doctor import checks as doctor
from deepwell.doctor.environment import environment_findings
from deepwell.hardware.model import Hardware
from deepwell.hardware.parts import Gpu, Host
from deepwell.hardware.probe import probe


def _machine(**changes) -> Hardware:
    gpu = Gpu(
        **{"name": "NVIDIA B200", "compute_capability": (10, 0), "driver": "580.1", "cuda_driver": "13.0", **changes}
    )
    return Hardware(name="here", gpus=(gpu,), host=Host())


CPU = Hardware(name="here", gpus=(Gpu(name="CPU", kind="cpu"),), host=Host())


def _torch(cuda="13.0", available=True, archs=("sm_90", "sm_100")):
    cuda_module = SimpleNamespace(
        is_available=lambda: available, get_arch_list=lambda: list(archs), device_count=lambda: 1
    )
    return SimpleNamespace(__version__="2.11.0", version=SimpleNamespace(cuda=cuda), cuda=cuda_module)


# GPU and torch that do not fit together, each in one way.
@pytest.mark.parametrize(
    ("torch_module", "hw", "status", "piece"),
    [
        (_torch(), _machine(), "ok", "1 GPUs"),
        (_torch(cuda=None), _machine(), "fail", "CPU build"),
        (_torch(cuda="13.0"), _machine(cuda_driver="12.8"), "fail", "12.8 at most"),
        (_torch(cuda="12.9"), _machine(cuda_driver="12.8"), "ok", ""),  # minor versions of CUDA fit each other
        (_torch(available=False), _machine(), "fail", "torch sees no GPU"),
        (_torch(archs=("sm_80", "sm_90a")), _machine(), "fail", "not for sm_100"),
        (_torch(archs=("sm_80", "sm_86")), _machine(compute_capability=(8, 9)), "ok", ""),
        (_torch(cuda=None), CPU, "absent", "no GPU"),
    ],
)
def test_torch_build_driver_and_gpu_must_fit(torch_module, hw, status, piece):
    check = doctor.check_cuda(torch_module, hw)
    assert check.status == status and piece in check.detail
    assert bool(check.remedy) == (status == "fail")


def test_gpus_are_shown_with_their_native_formats_and_the_drivers_silence():
    assert [c.status for c in doctor.check_gpus(CPU)] == ["absent"]
    hw = _machine()
    noted = Hardware(name="here", gpus=hw.gpus, notes=("power limit is not known",))
    checks = doctor.check_gpus(noted)
    assert [c.status for c in checks] == ["ok", "ok", "warn"]
    assert "nvfp4" in checks[0].detail and "13.0" in checks[1].detail and "power limit" in checks[2].detail


def test_the_hand_vectors_pass_with_the_real_quantizers():
    assert doctor.check_formats().status == "ok"


def test_a_quantizer_that_rounds_wrongly_is_found():
    def truncating(x, name):
        return SimpleNamespace(dequantize=lambda: torch.trunc(x))

    check = doctor.check_formats(truncating)
    assert check.status == "fail" and "bf16" in check.detail and "nvfp4" in check.detail


def test_a_missing_package_is_named_with_the_command():
    check = doctor.check_packages(("numpy", "surely-not-installed"))
    assert check.status == "fail" and check.remedy == "pip install surely-not-installed"


def _program(folder, name, text):
    file = folder / name
    file.write_text(f"#!/bin/sh\necho '{text}'\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


# nvcc of a toolkit that knows sm_100, of one that does not, and a program that is no nvcc.
@pytest.mark.parametrize(
    ("text", "status", "piece"),
    [
        ("Cuda compilation tools, release 13.0, V13.0.88", "ok", "13.0"),
        ("Cuda compilation tools, release 12.8, V12.8.61", "ok", "12.8"),
        ("Cuda compilation tools, release 12.6, V12.6.20", "warn", "cannot compile for sm_100"),
        ("hello", "warn", "does not say its version"),
    ],
)
def test_nvcc_must_be_new_enough(tmp_path, text, status, piece):
    (tmp_path / "bin").mkdir()
    _program(tmp_path / "bin", "nvcc", text)
    check = doctor.check_nvcc({"CUDA_HOME": str(tmp_path), "PATH": ""})
    assert check.status == status and piece in check.detail


def test_no_nvcc_is_fine(tmp_path):
    assert doctor.check_nvcc({"CUDA_HOME": str(tmp_path), "PATH": str(tmp_path)}).status == "absent"


def test_the_compiler_that_inductor_would_call_is_looked_for(tmp_path):
    _program(tmp_path, "mycxx", "mycxx 1.0")
    assert doctor.check_compiler({"CXX": "mycxx", "PATH": str(tmp_path)}).detail == "mycxx 1.0"
    missing = doctor.check_compiler({"PATH": str(tmp_path)})
    assert missing.status == "warn" and "uncompiled" in missing.remedy


def test_an_unwritable_cache_is_a_warning_with_the_variable(tmp_path):
    assert doctor.check_cache({"DEEPWELL_CACHE_DIR": str(tmp_path / "new")}).status == "ok"
    (tmp_path / "file").write_text("")
    check = doctor.check_cache({"DEEPWELL_CACHE_DIR": str(tmp_path / "file")})
    assert check.status == "warn" and "DEEPWELL_CACHE_DIR" in check.remedy


def test_a_nearly_full_disk_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    assert doctor.check_cache({"DEEPWELL_CACHE_DIR": str(tmp_path)}).status == "warn"


def test_cutlass_headers_are_found_with_their_version(tmp_path, monkeypatch):
    header = tmp_path / "cutlass_library/source/include/cutlass/version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n")
    (tmp_path / "cutlass_library/__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("cutlass_library", None)
    assert doctor.check_cutlass().detail == "headers 4.2.0"


# (variable, value, status, what the explanation must say)
VARIABLES = [
    ("CUTLASS_ENABLE_SM100", "1", "warn", "has no effect"),
    ("CUTLASS_ENABLE_TENSOR_CORE", "1", "warn", "has no effect"),
    ("CUTLASS_DEBUG", "1", "warn", "CUTLASS_DEBUG_TRACE_LEVEL"),
    ("TORCH_ALLOW_TF32_CUBLAS_GEMM", "1", "warn", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", "warn", "TF32"),
    ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0", "ok", "stay fp32"),
    ("CUDA_LAUNCH_BLOCKING", "1", "warn", "slows"),
    ("CUDA_LAUNCH_BLOCKING", "0", "ok", "default"),
    ("TORCH_CUDA_ARCH_LIST", "10.0", "ok", "10.0 as 10.0a"),
    ("TORCH_CUDA_ARCH_LIST", "9.0a;10.0a+PTX", "ok", "deepwell build"),
    ("TORCH_CUDA_ARCH_LIST", "8.0 8.6", "ok", "deepwell build"),
    ("TORCH_CUDA_ARCH_LIST", "sm_100", "warn", "'sm_100' is no architecture"),
    ("TORCH_CUDA_ARCH_LIST", "", "warn", "empty"),
    ("DEEPWELL_CACHE_DIR", "x", "ok", "honoured by Deepwell"),
    ("DEEPWELL_CASH_DIR", "x", "warn", "reads no such variable"),
    ("CUDA_VISIBLE_DEVICES", "0", "ok", "honoured"),
]


@pytest.mark.parametrize(("name", "value", "status", "piece"), VARIABLES)
def test_variables_are_honoured_or_explained(name, value, status, piece):
    ((found, verdict, text),) = environment_findings({name: value, "HOME": "x"})
    assert (found, verdict) == (name, status) and piece in text


def test_torchs_own_tf32_variable_is_the_one_that_doctor_names():
    # The claim that one name works and the other does not is read off the installed torch.
    text = (Path(torch.__file__).parent / "include/ATen/Context.h").read_text(encoding="utf-8")
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" in text and "TORCH_ALLOW_TF32_CUBLAS_GEMM" not in text


def test_only_failures_make_it_unhealthy_and_remedies_are_printed():
    warn = doctor.Check(name="a", status="warn", detail="slow", remedy="do this")
    fail = doctor.Check(name="b", status="fail", detail="broken")
    assert doctor.Diagnosis(checks=(warn,)).healthy and not doctor.Diagnosis(checks=(warn, fail)).healthy
    text = str(doctor.Diagnosis(checks=(warn, fail)))
    assert "-> do this" in text and "1 warn, 1 fail" in text


def test_a_cpu_that_kills_bf16_fails_without_a_gpu_and_warns_with_one(monkeypatch):
    monkeypatch.setattr(doctor, "bf16_fault", lambda sets, environ: "it traps")
    assert doctor.check_cpu_bf16(CPU, {}).status == "fail"
    assert doctor.check_cpu_bf16(_machine(), {}).status == "warn"


def test_an_old_torch_is_a_failure(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    _, check = doctor.check_torch()
    assert check.status == "fail" and "2.11" in check.remedy


def test_versions_compare_as_numbers():
    assert doctor.version_tuple("2.13.0+cpu") == (2, 13, 0)
    assert doctor.version_tuple("2.9") < doctor.MIN_TORCH < doctor.version_tuple("2.11.0a0")
    assert doctor.version_tuple("unknown") == (0,)


def test_the_named_machines_can_be_doctored_like_real_ones():
    assert doctor.check_gpus(probe("8xB200"))[0].detail.startswith("8 x B200 (sm_100, 148 SMs")
