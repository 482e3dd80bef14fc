"""What the environment variables that people set for GPU training do, and to whom.

Only variables that are set are spoken of. Sources: torch's ATen/Context.h reads TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and
torch/utils/cpp_extension.py TORCH_CUDA_ARCH_LIST; CUTLASS knows compile-time macros and reads no variables at run time.
"""

import re
from collections.abc import Callable, Mapping
from typing import Literal

Finding = tuple[str, Literal["ok", "warn"], str]
_Verdict = tuple[Literal["ok", "warn"], str]

_ARCH = re.compile(r"\d+\.\d[af]?(\+PTX)?|[A-Z][A-Za-z+]*")


def environment_findings(environ: Mapping[str, str]) -> list[Finding]:
    """(variable, status, explanation) for each known variable that is set, in a fixed order."""
    findings: list[Finding] = []
    for name, judge in _VARIABLES.items():
        if name in environ:
            status, text = judge(environ[name])
            findings.append((name, status, f"={environ[name]}: {text}"))
    for name in sorted(environ):
        if name.startswith("DEEPWELL_") and name not in _VARIABLES:
            findings.append(
                (name, "warn", "Deepwell reads no such variable; it knows DEEPWELL_CACHE_DIR and DEEPWELL_LOG")
            )
    return findings


def _no_effect(why: str) -> Callable[[str], _Verdict]:
    return lambda value: ("warn", f"has no effect: {why}")


def _honoured(by_whom: str) -> Callable[[str], _Verdict]:
    return lambda value: ("ok", f"honoured by {by_whom}")


def _launch_blocking(value: str) -> _Verdict:
    if value.strip() in ("", "0"):
        return "ok", "CUDA's default, launches are asynchronous"
    return "warn", "every kernel launch waits for its end, which slows all training; unset it unless you are debugging"


def _tf32(value: str) -> _Verdict:
    if value.strip() == "1":
        return "warn", "honoured by torch: fp32 matrix products run in TF32, with 10 bits of mantissa"
    return "ok", "honoured by torch: fp32 products stay fp32"


def _arch_list(value: str) -> _Verdict:
    tokens = [token for token in re.split(r"[;\s]+", value.strip()) if token]
    wrong = [token for token in tokens if not _ARCH.fullmatch(token)]
    if wrong or not tokens:
        return "warn", f"{wrong[0] if wrong else 'an empty list'!r} is no architecture; write it as '9.0a;10.0a'"
    bare = [token for token in tokens if re.match(r"(9\.0|10\.\d|11\.0)(\+PTX)?$", token)]
    if bare:
        number = bare[0].partition("+")[0]
        return "ok", f"honoured by `deepwell build`, which reads {number} as {number}a: wgmma and tcgen05 need it"
    return "ok", "honoured by `deepwell build` and by torch's extension builder"


_VARIABLES: dict[str, Callable[[str], _Verdict]] = {
    "DEEPWELL_CACHE_DIR": _honoured("Deepwell: the folder of its caches"),
    "DEEPWELL_LOG": _honoured("Deepwell: the log level"),
    "CUDA_VISIBLE_DEVICES": _honoured("CUDA and by `deepwell probe`"),
    "CUDA_LAUNCH_BLOCKING": _launch_blocking,
    "TORCH_CUDA_ARCH_LIST": _arch_list,
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": _tf32,
    "TORCH_ALLOW_TF32_CUBLAS_GEMM": _no_effect("torch's variable is TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    "CUTLASS_ENABLE_SM100": _no_effect("the architecture is chosen when kernels are built (TORCH_CUDA_ARCH_LIST)"),
    "CUTLASS_ENABLE_TENSOR_CORE": _no_effect("tensor cores are always used; CUTLASS has a compile-time macro only"),
    "CUTLASS_DEBUG": _no_effect("CUTLASS traces by the compile-time macro CUTLASS_DEBUG_TRACE_LEVEL"),
    "ONEDNN_MAX_CPU_ISA": _honoured("oneDNN: the newest CPU instructions it may use"),
}
