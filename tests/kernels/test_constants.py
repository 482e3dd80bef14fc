"""Constants of modules that kernels read."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import deepwell
from deepwell import kernels
from deepwell.kernels.device.triton_support import cdiv, constant, next_power_of_2
from deepwell.train import adamw
from launches import on_absent_gpu

MODULES = sorted(
    module.name
    for package in (kernels, adamw)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
)
_FACTOR = constant(3.0)


@triton.jit
def _scale_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) * _FACTOR)


def test_every_constant_equals_itself_and_is_compared_quickly() -> None:
    # Triton compares globals at every launch after the first and refuses those that changed: NaN always has.
    found = {
        f"{name}.{key}": value
        for name in MODULES
        for key, value in vars(importlib.import_module(name)).items()
        if isinstance(value, tl.constexpr)
    }
    assert len(found) > 30
    for key, value in found.items():
        assert isinstance(value, constant), f"{key}: write constant(...), not tl.constexpr(...)"
        assert (value != value) is False, key  # noqa: PLR0124


def test_a_constant_that_changed_is_refused_at_the_next_launch(monkeypatch) -> None:
    with on_absent_gpu():
        for value in (_FACTOR, constant(3.0)):
            monkeypatch.setitem(globals(), "_FACTOR", value)
            _scale_kernel[(1,)](torch.ones(1))
        for value in (constant(4.0), 3.0):
            monkeypatch.setitem(globals(), "_FACTOR", value)
            with pytest.raises(RuntimeError, match="_FACTOR has changed"):
                _scale_kernel[(1,)](torch.ones(1))


def test_sizes_on_the_host_are_tritons_without_its_wrapper() -> None:
    for n in (0, 1, 2, 3, 5, 127, 128, 129, 4096, (1 << 31) - 1):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        assert cdiv(n, 128) == triton.cdiv(n, 128)
    for path in Path(deepwell.__file__).parent.rglob("*.py"):
        slow = re.findall(r"\btriton\.(?:cdiv|next_power_of_2)\b", path.read_text().replace("`triton.cdiv`", ""))
        assert not slow, f"{path}: {slow}: a host waits 5 us for each call; triton_support has both"
