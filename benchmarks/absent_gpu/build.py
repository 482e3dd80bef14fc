"""Build the GPU that is not there (driver.c), and run a Python under it.

    python benchmarks/absent_gpu/build.py script.py [ARGUMENTS]

Needs Linux, gcc, binutils and a CUDA build of torch (`pip install torch==2.11.0` into an environment of its own: some
5 GB), no GPU. Caches of compiled kernels and of choices are its own, below `build/absent_gpu`. Not for numbers that a
model computes, and not for its speed on a GPU: nothing is computed. cuDNN is not stood in for: call
`torch.backends.cuda.enable_cudnn_sdp(False)`. Self-checks and races of kernels see zeros; `stand_in` has them pass.
"""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
_BUILD = ROOT / "build" / "absent_gpu"
_LIBRARY = _BUILD / "libcuda.so.1"
_TORCH = ("torch_cuda", "c10_cuda", "torch_python", "torch_cpu", "caffe2_nvrtc")
# Triton asks for them when it runs; cuDNN, cuFFT and their like answer for themselves.
_STOOD_IN = re.compile(r"cu[A-Z]\w+|cuda[A-Z]\w+|cublas[A-Z]\w+")
_OTHERS = re.compile(r"cu(File|pti|DNN)")


def build() -> Path:
    """The library, built anew where its source changed."""
    import torch
    import triton

    if torch.version.cuda is None:
        raise SystemExit("absent_gpu: this torch has no CUDA in it; use an environment with torch==2.11.0 from PyPI")
    source = Path(__file__).with_name("driver.c")
    if _LIBRARY.exists() and _LIBRARY.stat().st_mtime > source.stat().st_mtime:
        return _LIBRARY
    _BUILD.mkdir(parents=True, exist_ok=True)
    packages = Path(torch.__file__).parent.parent
    triton_headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    headers = [*sorted(packages.glob("nvidia/*/include")), triton_headers]
    made, rest = _BUILD / "driver.o", _BUILD / "rest.c"
    flags = ["-O1", "-fPIC", "-w", *(f"-I{folder}" for folder in headers)]
    _run("gcc", *flags, "-c", str(source), "-o", str(made))
    wanted = set(_symbols("--undefined-only", *(str(packages / f"torch/lib/lib{name}.so") for name in _TORCH)))
    wanted |= set(re.findall(r"\b(cu[A-Z]\w+) *\(", (triton_headers / "cuda.h").read_text(errors="ignore")))
    missing = {name for name in wanted if _STOOD_IN.fullmatch(name) and not _OTHERS.match(name)}
    missing -= set(_symbols("--defined-only", str(made), dynamic=False))
    rest.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(missing)))
    shared = ["-shared", "-Wl,-soname,libcuda.so.1", "-ldl", "-lpthread"]
    _run("gcc", "-fPIC", "-w", str(rest), str(made), "-o", str(_LIBRARY), *shared)
    link = _BUILD / "libcuda.so"
    link.unlink(missing_ok=True)
    link.symlink_to(_LIBRARY.name)
    return _LIBRARY


def _symbols(which: str, *files: str, dynamic: bool = True) -> list[str]:
    how = ["-D"] if dynamic else []
    lines = _run("nm", *how, which, *files).splitlines()
    return [line.split()[-1].partition("@")[0] for line in lines if line and not line.endswith(":")]


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def environment() -> dict[str, str]:
    """Of a process that sees the GPU."""
    caches = {"DEEPWELL_CACHE_DIR": "choices", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    own = {name: str(_BUILD / folder) for name, folder in caches.items()}
    paths = {"LD_PRELOAD": str(build()), "LD_LIBRARY_PATH": str(_BUILD), "TRITON_LIBCUDA_PATH": str(_BUILD)}
    return {**os.environ, **own, **paths, "PYTHONPATH": str(ROOT / "src")}


def library() -> ctypes.CDLL:
    """The library in a process that runs under it: `absent_reset`, `absent_launches`, `absent_name`."""
    loaded = ctypes.CDLL(str(_LIBRARY))
    loaded.absent_name.restype, loaded.absent_launches.restype = ctypes.c_char_p, ctypes.c_long
    return loaded


def launched() -> list[str]:
    """The names of the kernels, products and copies since `absent_reset`."""
    loaded = library()
    return [loaded.absent_name(i).decode() for i in range(loaded.absent_launches())]


def stand_in() -> None:
    """Have every self-check pass and nothing measured: results are zeros, and times those of the host.

    Parts of masks, whose values the passes read, are computed on the CPU.
    """
    import torch
    from torch import fx

    from deepwell.engine import compile as engine_compile
    from deepwell.engine.passes import edit
    from deepwell.engine.passes.attention import masks
    from deepwell.kernels.tune import choose, verify

    torch.backends.cuda.enable_cudnn_sdp(False)
    passed = verify.Proof(sqnr_db=99.0)
    stand_ins: dict[str, Any] = {
        "verify": lambda *args, **how: passed,
        "verify_apart": lambda *args, **how: passed,
        "verify_together": lambda asked, *how: [passed] * len(asked),
        "judge": lambda got, case: ("", 99.0),
    }
    for name, made in stand_ins.items():
        setattr(choose, name, made)
    setattr(engine_compile, "measured_fallback", lambda *args: None)  # noqa: B010

    def on_cpu(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def run_node(node: fx.Node, values: Any) -> Any:
        def runs(args: Any, kwargs: Any) -> Any:
            target = node.target if node.op == "call_function" else getattr(args[0], str(node.target))
            return target(*(args if node.op == "call_function" else args[1:]), **kwargs)

        given = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        return runs(*torch.utils._pytree.tree_map(on_cpu, given))

    assert masks.run_node is edit.run_node
    masks.run_node = run_node


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    os.execvpe(sys.executable, [sys.executable, *sys.argv[1:]], environment())
