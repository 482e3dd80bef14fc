"""What every test shares: this tree's sources, a cache of its own, a fixed seed, the `device` fixture."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SRC = str(TESTS.parent / "src")

# This tree is tested, also without an installation (a GPU host) and also where another checkout is installed.
# Processes that a test starts inherit it.
for path in (str(TESTS), SRC):
    if path not in sys.path:
        sys.path.insert(0, path)
os.environ["PYTHONPATH"] = os.pathsep.join([SRC, str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


def _avoid_trapped_amx() -> None:
    """Keep torch off AMX where the CPU announces it and traps it: a bf16 product would kill the process, not a test.

    Found once, by the process that starts the others; they inherit it.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        return
    from deepwell.hardware.amx import bf16_fault
    from deepwell.hardware.host import read_host

    if bf16_fault(read_host().instruction_sets):
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"


_avoid_trapped_amx()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu`, with the reason, on a machine without one."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Run the test on the CPU, and once more on the GPU where there is one."""
    return request.param


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tests from reading or writing the user's cache of measurements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPWELL_CACHE_DIR", str(tmp_path_factory.mktemp("deepwell-cache")))
        yield


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Seed torch before each test, so that its numbers do not depend on which tests ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _passes_on_cpu() -> None:
    """A CPU stands for a GPU in tests: its engines rewrite graphs in bf16 too, where by default they would not."""
    import deepwell.engine.compile as compiling

    compiling.PLAIN_ON_CPU = False
