"""Constants of modules that kernels read."""

import importlib
import pkgutil

import pytest
import triton.language as tl

from deepwell import kernels

MODULES = sorted(module.name for module in pkgutil.iter_modules(kernels.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_every_constant_equals_itself(name):
    # Triton compares globals at every launch after the first and refuses those that changed: NaN always has.
    module = importlib.import_module(f"deepwell.kernels.{name}")
    for key, value in vars(module).items():
        if isinstance(value, tl.constexpr):
            assert value.value == value.value, key
