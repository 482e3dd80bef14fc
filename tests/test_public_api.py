"""The public names work whatever was imported before them, and `import deepwell` stays cheap."""

import json
import pkgutil
import random
import subprocess
import sys
from types import ModuleType

import pytest

import deepwell
from warm import run_python

# Running the module of a command line is its job, so importing it here would start it.
MODULES = sorted(
    name for _, name, _ in pkgutil.walk_packages(deepwell.__path__, "deepwell.") if not name.endswith("__main__")
)
CALLABLES = ("probe", "capture", "quantize", "Hardware", "IR", "PrecisionPolicy", "QuantizedTensor")

CHECK = """
import importlib, inspect, json, sys
modules, callables = json.loads(sys.argv[1])
for module in modules:
    importlib.import_module(module)
import deepwell
for name in deepwell.__all__:
    value = getattr(deepwell, name)
    if inspect.ismodule(value):
        sys.exit(f"deepwell.{name} is a module")
    if name in callables and not callable(value):
        sys.exit(f"deepwell.{name} cannot be called: {value!r}")
    if getattr(deepwell, name) is not value:
        sys.exit(f"deepwell.{name} changes from one use to the next")
"""


def _shuffled(seed: int) -> list[str]:
    order = list(MODULES)
    random.Random(seed).shuffle(order)
    return order


ORDERS = {
    "none": [],  # the names alone, nothing imported first
    "sorted": MODULES,
    "reversed": MODULES[::-1],
    **{f"shuffled-{seed}": _shuffled(seed) for seed in range(3)},
}


def _python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "order", [pytest.param(o, marks=pytest.mark.slow) if o in ("shuffled-1", "shuffled-2") else o for o in ORDERS]
)
def test_public_names_survive_any_order_of_imports(order: str) -> None:
    run = run_python(CHECK, json.dumps([ORDERS[order], CALLABLES]))
    assert run.returncode == 0, f"order {order}: {ORDERS[order]}\n{run.stderr}"


def test_the_check_list_is_part_of_the_public_names() -> None:
    assert set(CALLABLES) <= set(deepwell.__all__)


def test_dir_lists_the_public_names() -> None:
    assert set(deepwell.__all__) <= set(dir(deepwell))


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'prob'.*probe"):
        deepwell.prob  # noqa: B018


def test_probe_is_the_function_after_its_module_was_imported() -> None:
    import deepwell.hardware.probe

    assert callable(deepwell.probe)
    assert not isinstance(deepwell.probe, ModuleType)


def test_importing_deepwell_is_fast_and_loads_no_torch() -> None:
    code = """
import sys, time
start = time.perf_counter()
import deepwell
seconds = time.perf_counter() - start
assert "torch" not in sys.modules, "import deepwell loads torch"
print(seconds)
"""
    runs = [_python(code) for _ in range(3)]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr
    assert min(float(run.stdout) for run in runs) < 0.3
