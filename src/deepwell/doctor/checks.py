"""doctor: what works on this machine, what does not, and what to do about it.

Each check answers ok, warn (works, but look), fail (something required is broken) or absent (an optional thing is not
there). Only `fail` makes `deepwell doctor` end with status 1.
"""

import dataclasses
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepwell import __version__
from deepwell.doctor.check import Check
from deepwell.doctor.environment import environment_findings
from deepwell.hardware.amx import bf16_fault
from deepwell.hardware.cache import cache_dir, package_version
from deepwell.hardware.model import Hardware
from deepwell.hardware.probe import probe

MIN_TORCH = (2, 11)
MIN_NVCC = (12, 8)  # the first toolkit that compiles for sm_100
MIN_TRANSFORMERS = (5, 17)
_REQUIRED = ("numpy", "safetensors", "rich", "typer", "jinja2", "nvidia-ml-py")
_MIN_FREE_BYTES = 1 << 30

# Hand-made vectors: (format, values, what they must become). The largest value makes every scale a power of two or one,
# so results are exact; ties go to the even code. Remaining values of a block are zero.
HAND_VECTORS: tuple[tuple[str, tuple[float, ...], tuple[float, ...]], ...] = (
    ("bf16", (1.00390625, 1.01171875, -3.0), (1.0, 1.015625, -3.0)),
    ("fp8_tensor", (448.0, 1.0625, 1.1875, -0.3), (448.0, 1.0, 1.25, -0.3125)),
    ("fp8_row", (448.0, 17.0, 19.0, -0.001), (448.0, 16.0, 20.0, -0.001953125)),
    ("mxfp8", (448.0, -2.0, 0.5, 1.0625, 1.1875), (448.0, -2.0, 0.5, 1.0, 1.25)),
    ("mxfp4", (6.0, 2.5, 3.5, -0.25, 0.75, 5.0), (6.0, 2.0, 4.0, 0.0, 1.0, 4.0)),
    ("nvfp4", (6.0, 2.5, 3.5, -0.25, 0.75, 5.0), (6.0, 2.0, 4.0, 0.0, 1.0, 4.0)),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All findings. `healthy` is False if anything required is broken."""

    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        return all(check.status != "fail" for check in self.checks)

    def to_json(self) -> str:
        checks = [dataclasses.asdict(check) for check in self.checks]
        return json.dumps({"deepwell": __version__, "healthy": self.healthy, "checks": checks}, indent=2)

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            lines.append(f"{check.status:6}  {check.name:{width}}  {check.detail}")
            if check.remedy:
                lines.append(f"{'':6}  {'':{width}}  -> {check.remedy}")
        counts = {s: sum(c.status == s for c in self.checks) for s in ("ok", "warn", "fail", "absent")}
        return "\n".join([*lines, "", ", ".join(f"{count} {status}" for status, count in counts.items() if count)])


def diagnose(environ: Mapping[str, str] | None = None) -> Diagnosis:
    """Looks at everything. Takes a few seconds, most of them torch's import."""
    environ = os.environ if environ is None else environ
    hw = probe(environ=environ)
    torch, torch_check = check_torch()
    checks = [check_python(), check_packages(), *check_gpus(hw), torch_check]
    if torch is not None:
        checks += [check_cuda(torch, hw), check_cpu_bf16(hw, environ)]
    checks += [check_triton(hw), check_transformers(), check_nvcc(environ), check_cutlass()]
    checks += [check_compiler(environ), check_cache(environ)]
    if torch is not None:
        checks += [check_formats(), *check_native(torch, hw, environ)]
    checks += [Check(name, status, text) for name, status, text in environment_findings(environ)]
    return Diagnosis(checks=tuple(checks))


def check_python() -> Check:
    detail = f"{platform.python_version()} on {platform.system()} {platform.release()} ({platform.machine()})"
    return Check("python", "ok", detail)


def check_packages(names: tuple[str, ...] = _REQUIRED) -> Check:
    versions = {name: package_version(name) for name in names}
    missing = [name for name, version in versions.items() if version is None]
    detail = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    if missing:
        return Check("packages", "fail", detail, f"pip install {' '.join(missing)}")
    return Check("packages", "ok", f"deepwell {__version__}; {detail}")


def check_gpus(hw: Hardware) -> list[Check]:
    """The devices and, beside them, what the driver would not say."""
    notes = "; ".join(hw.notes)
    if hw.kind == "cpu":
        detail = f"none: plans and training use the CPU, low precision by emulation ({notes or 'NVML shows no GPU'})"
        return [Check("gpu", "absent", detail)]
    gpu = hw.gpus[0]
    native = [f for f in ("fp8_tensor", "mxfp8", "nvfp4") if hw.supports(f)]
    found = Check("gpu", "ok", f"{hw.gpus_per_node} x {gpu}; native: bf16 {' '.join(native)}")
    driver = f"{gpu.driver or 'version unknown'}, runs CUDA up to {gpu.cuda_driver or 'unknown'}"
    checks = [found, Check("driver", "ok", driver)]
    if notes:
        checks.append(Check("gpu notes", "warn", notes))
    return checks


def check_torch() -> tuple[Any, Check]:
    """(the torch module or None, the finding)."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library of the wheel does not load
        remedy = "pip install torch; on a GPU machine choose the build for its CUDA"
        return None, Check("torch", "fail", f"cannot be imported: {error}", remedy)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    detail = f"{torch.__version__} ({build})"
    if version_tuple(torch.__version__) < MIN_TORCH:
        return torch, Check("torch", "fail", detail, "install torch 2.11 or later")
    return torch, Check("torch", "ok", detail)


def check_cuda(torch: Any, hw: Hardware) -> Check:
    """That torch can use the GPU that the driver shows: build, driver and architecture fit together."""
    name = "torch on GPU"
    if hw.kind == "cpu":
        return Check(name, "absent", "no GPU to use")
    gpu = hw.gpus[0]
    if torch.version.cuda is None:
        return Check(name, "fail", "this torch is a CPU build", "install a CUDA build of torch")
    if gpu.cuda_driver and version_tuple(gpu.cuda_driver)[0] < version_tuple(torch.version.cuda)[0]:
        detail = f"torch is built for CUDA {torch.version.cuda}, the driver runs {gpu.cuda_driver} at most"
        return Check(name, "fail", detail, "update the driver, or install torch for its CUDA")
    if not torch.cuda.is_available():
        remedy = "run `python -c 'import torch; torch.zeros(1).cuda()'` to see CUDA's message"
        return Check(name, "fail", "torch sees no GPU, the driver does", remedy)
    if gpu.compute_capability:
        # A build for 9.0 runs on every 9.x; another major version needs its own code or PTX.
        built = {arch.split("_")[1].rstrip("af") for arch in torch.cuda.get_arch_list()}
        majors = {number[:-1] for number in built}
        if str(gpu.compute_capability[0]) not in majors:
            needed = "sm_" + "".join(map(str, gpu.compute_capability))
            detail = f"built for {' '.join(torch.cuda.get_arch_list())}, not for {needed}"
            return Check(name, "fail", detail, "install a torch that has this architecture")
    return Check(name, "ok", f"{torch.cuda.device_count()} GPUs usable")


def check_cpu_bf16(hw: Hardware, environ: Mapping[str, str]) -> Check:
    """bf16 products on the CPU; where there is a GPU a fault is only worth a warning."""
    sets = () if hw.host is None else hw.host.instruction_sets
    fault = bf16_fault(sets, environ=environ)
    if not fault:
        return Check("bf16 on CPU", "ok", "a bf16 product runs" if sets else "not checked")
    return Check("bf16 on CPU", "fail" if hw.kind == "cpu" else "warn", fault)


def check_triton(hw: Hardware) -> Check:
    version = package_version("triton")
    if version is not None and importlib.util.find_spec("triton") is not None:
        return Check("triton", "ok", version)
    if hw.kind == "cpu":
        return Check("triton", "absent", "not installed; only GPU kernels need it")
    remedy = "pip install triton (torch's CUDA builds bring their own)"
    return Check("triton", "warn", "not installed: fused kernels fall back to torch", remedy)


def check_transformers() -> Check:
    version = package_version("transformers")
    if version is None:
        detail = "not installed; only Hugging Face models need it: pip install 'deepwell[hf]'"
        return Check("transformers", "absent", detail)
    if version_tuple(version) < MIN_TRANSFORMERS:
        return Check("transformers", "warn", f"{version}, older than 5.17", "pip install -U 'transformers>=5.17'")
    return Check("transformers", "ok", version)


def check_nvcc(environ: Mapping[str, str]) -> Check:
    """nvcc for the native build: $CUDA_HOME first, as torch looks, then the path."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    places = (
        [str(Path(home) / "bin"), environ.get("PATH", "")] if home else [environ.get("PATH", ""), "/usr/local/cuda/bin"]
    )
    nvcc = shutil.which("nvcc", path=os.pathsep.join(places))
    if nvcc is None:
        return Check("nvcc", "absent", "not found; only the native build needs it (CUDA 12.8 or later)")
    text = _output([nvcc, "--version"])
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is None:
        return Check("nvcc", "warn", f"{nvcc} does not say its version", "reinstall the toolkit")
    version = (int(match[1]), int(match[2]))
    detail = f"{version[0]}.{version[1]}"
    if version < MIN_NVCC:
        return Check("nvcc", "warn", f"{detail} cannot compile for sm_100", "install CUDA 12.8+")
    return Check("nvcc", "ok", f"{detail}, compiles for sm_90a and sm_100a")


def check_cutlass() -> Check:
    spec = importlib.util.find_spec("cutlass_library")
    places = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]
    for place in places:
        header = place / "source/include/cutlass/version.h"
        if header.is_file():
            numbers = re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", header.read_text(errors="replace"))
            return Check("cutlass", "ok", f"headers {'.'.join(numbers) or 'of unknown version'}")
    detail = "headers not installed; only the native build needs them: pip install 'deepwell[cutlass]'"
    return Check("cutlass", "absent", detail)


def check_native(torch: Any, hw: Hardware, environ: Mapping[str, str]) -> list[Check]:
    native = importlib.import_module("deepwell.doctor.native")
    findings: list[Check] = [native.library_finding(hw, environ), native.sources_finding()]
    if hw.kind != "cpu" and torch.cuda.is_available():
        findings += native.self_check_findings(hw)
    return findings


def check_compiler(environ: Mapping[str, str]) -> Check:
    """The C++ compiler that Inductor calls on a CPU: $CXX, else g++ (clang++ on macOS)."""
    wanted = environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    found = shutil.which(wanted.split()[0], path=environ.get("PATH"))
    if found is None:
        remedy = "install a C++ compiler (apt install g++), or set CXX; without it models run uncompiled on the CPU"
        return Check("c++ compiler", "warn", f"{wanted} not found", remedy)
    return Check("c++ compiler", "ok", (_output([found, "--version"]).splitlines() or [wanted])[0])


def check_cache(environ: Mapping[str, str]) -> Check:
    folder = cache_dir(environ)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        remedy = "set DEEPWELL_CACHE_DIR to a folder that can be written"
        return Check("cache", "warn", f"{folder} cannot be written ({error.strerror})", remedy)
    detail = f"{folder}, {free / 2**30:.1f} GiB free"
    if free < _MIN_FREE_BYTES:
        return Check("cache", "warn", detail, "free some disk: compiled kernels need room")
    return Check("cache", "ok", detail)


def check_formats(quantize: Callable[..., Any] | None = None) -> Check:
    """Quantizes hand-made vectors with the reference quantizers and compares with what they must give."""
    torch = importlib.import_module("torch")
    if quantize is None:
        quantize = importlib.import_module("deepwell.formats.quantize").quantize
    wrong = []
    for name, values, expected in HAND_VECTORS:
        x = torch.zeros(1, 128)
        x[0, : len(values)] = torch.tensor(values)
        want = torch.zeros(1, 128)
        want[0, : len(expected)] = torch.tensor(expected)
        got = quantize(x, name).dequantize()
        # 1/448 and 1/6 are no binary fractions, so the two-level scales come back within an ulp or two.
        if not torch.allclose(got.float(), want, rtol=1e-6, atol=0):
            wrong.append(f"{name}: {got[0, : len(values)].tolist()} where {list(expected)} is right")
    if wrong:
        return Check("formats", "fail", "; ".join(wrong), "this torch rounds differently: do not train with it")
    return Check("formats", "ok", f"test vectors exact: {', '.join(v[0] for v in HAND_VECTORS)}")


def version_tuple(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: `2.13.0+cpu` -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else (0,)


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
