"""Where a kernel test runs: interpreted on the CPU always, compiled on a GPU where there is one.

TRITON_INTERPRET works on a whole process and at import. Here the kernels are put into the interpreter one test at a
time, so that other tests in the process see them compiled, and CPU tensors sent to the references, as users do.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

# Triton loads gluon at the first launch, and gluon wants to find Triton's library compiled: load it before any patch.
import triton.experimental.gluon  # noqa: F401
import triton.language as tl
from triton.runtime import JITFunction, interpreter

from deepwell.kernels.tune import choose

GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
)


@pytest.fixture
def no_choices(tmp_path, monkeypatch) -> Iterator[None]:
    """Kernels are chosen as on a fresh machine: nothing is kept, on disk or in the process."""
    monkeypatch.setenv("DEEPWELL_CACHE_DIR", str(tmp_path / "cache"))
    choose.forget()
    yield
    choose.forget()


@pytest.fixture(params=["cpu", GPU])
def device(request, monkeypatch) -> Iterator[str]:
    """The device of a kernel test. On "cpu" the kernels of every imported deepwell.kernels module are interpreted."""
    yield from _on(request.param, monkeypatch)


@pytest.fixture(params=["interpreted", "reference", GPU])
def everywhere(request, monkeypatch) -> Iterator[str]:
    """As `device`, and once more on the CPU as users have it: the wrappers and their plain-torch references."""
    if request.param == "reference":
        yield "cpu"
    else:
        yield from _on(request.param, monkeypatch)


@pytest.fixture
def interpreting() -> Callable[[], AbstractContextManager[pytest.MonkeyPatch]]:
    """For a part of a test: within it kernels are interpreted, and what is patched by what it gives is undone after."""

    @contextmanager
    def context() -> Iterator[pytest.MonkeyPatch]:
        with pytest.MonkeyPatch.context() as patch:
            for _ in _on("cpu", patch):
                yield patch

    return context


def _on(place: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if place == "cuda":
        yield "cuda"
        return
    before = _snapshot()
    _interpret_kernels(monkeypatch)
    monkeypatch.setattr(interpreter, "_convert_float", _convert_float)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", _patch_lang_tensor)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _create_dot)
    _patch_language_once(monkeypatch)
    with np.errstate(all="ignore"):
        yield "cpu"
    monkeypatch.undo()
    _restore(before)


# What the interpreter replaces.
_PATCHED = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)


def _snapshot() -> list[dict[str, object]]:
    return [dict(vars(owner)) for owner in _PATCHED]


def _restore(before: list[dict[str, object]]) -> None:
    for owner, saved in zip(_PATCHED, before, strict=True):
        for name in set(vars(owner)) - set(saved):
            delattr(owner, name)
        for name, value in saved.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)


def _interpret_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace every compiled function of our kernels and of Triton's own library by its interpreted twin."""
    names = [name for name in sys.modules if name.startswith(("deepwell.kernels.", "deepwell.train.adamw."))]
    owners = [sys.modules[name] for name in names] + [tl, tl.standard, tl.core, tl.math, tl.tensor]
    twins: dict[int, object] = {}
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if isinstance(value, JITFunction):
                twin = twins.setdefault(id(value), interpreter.InterpretedFunction(value.fn))
                monkeypatch.setattr(owner, name, twin)


def _patch_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton patches its whole language at every launch and every call of a device function: most of a test's time."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    monkeypatch.setattr(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope())


_own_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor: type, scope: object) -> None:
    """Triton 3.6.0 turns an array of one element into an int as numpy 2.4 no longer lets it; read the element."""
    _own_patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_NUMPY_TYPES = {
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e5": ml_dtypes.float8_e5m2,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp32": np.float32,
    "fp64": np.float64,
}
_LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}


def _convert_float(x: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: object) -> np.ndarray:
    """Casts as the hardware does them: to nearest even, FP8 saturating, NaN canonical.

    Triton 3.6.0's own loses the carry out of a mantissa, rounds ties up and truncates subnormals.
    """
    bits = getattr(np, f"uint{target.primitive_bitwidth}")
    values = np.ascontiguousarray(x).view(_NUMPY_TYPES[source.name])
    if target.name in _LARGEST:
        values = values.astype(np.float32)
        limit = _LARGEST[target.name]
        codes = np.clip(values, -limit, limit).astype(_NUMPY_TYPES[target.name]).view(bits)
        return np.where(np.isnan(values), bits(0x7F), codes).reshape(x.shape)
    with np.errstate(over="ignore"):
        return values.astype(_NUMPY_TYPES[target.name]).view(bits).reshape(x.shape)


def _create_dot(self: object, a: object, b: object, d: object, *how: object) -> object:
    """Products in fp32 of what the operands' bits mean: Triton 3.6.0 multiplies the bits of bf16 as integers."""
    left, right = (_values(x).astype(np.float32) for x in (a, b))
    return interpreter.TensorHandle(np.matmul(left, right) + d.data, d.dtype.scalar)


def _values(x: object) -> np.ndarray:
    return np.ascontiguousarray(x.data).view(_NUMPY_TYPES[x.dtype.scalar.name])
