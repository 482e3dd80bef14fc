"""A stand-in for pynvml: eight GPUs that answer, refuse or lie as a test asks."""

from types import SimpleNamespace
from typing import Any

import pytest


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_DriverNotLoaded(NVMLError):
    pass


class FakeNvml:
    """As the pynvml module looks from outside. `refuse` maps a function's name to the error that it raises."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_NoPermission = NVMLError_NoPermission
    NVMLError_LibraryNotFound = NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = NVMLError_DriverNotLoaded
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2

    def __init__(self, **changes: Any) -> None:
        self.count = 8
        self.name: str | bytes = "NVIDIA H200"
        self.cc = (9, 0)
        self.cores = 132 * 128
        self.memory = 143_771 * 2**20
        self.nvlinks = 18
        self.peers: dict[tuple[int, int], int] | None = (
            None  # (gpu, link) -> other gpu; None: all links end in a switch
        )
        self.bus_width = 6144
        self.memory_clock = 3201
        self.refuse: dict[str, Exception] = {}
        self.was_shut_down = False
        for key, value in changes.items():
            assert hasattr(self, key), key
            setattr(self, key, value)

    def __getattr__(self, function: str) -> Any:
        if not function.startswith("nvml"):
            raise AttributeError(function)
        answer = getattr(type(self), "_" + function, None)
        if answer is None:
            raise AttributeError(function)

        def call(*arguments: Any) -> Any:
            if function in self.refuse:
                raise self.refuse[function]
            return answer(self, *arguments)

        return call

    def _nvmlInit(self) -> None:
        return None

    def _nvmlShutdown(self) -> None:
        self.was_shut_down = True

    def _nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def _nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def _nvmlDeviceGetCount(self) -> int:
        return self.count

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def _nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return self.name

    def _nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}aaaaaaa-0000"

    def _nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=self.memory, free=self.memory, used=0)

    def _nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.cc

    def _nvmlDeviceGetNumGpuCores(self, handle: int) -> int:
        return self.cores

    def _nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000

    def _nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle + 16:02X}:00.0".encode())

    def _nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 345 if kind == 1 else self.memory_clock

    def _nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return 1980 if kind == 1 else self.memory_clock

    def _nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return [0, 0]

    def _nvmlDeviceGetMemoryBusWidth(self, handle: int) -> int:
        return self.bus_width

    def _nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= self.nvlinks:
            raise NVMLError_NotSupported("Not Supported")
        return 1

    def _nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        other = None if self.peers is None else self.peers.get((handle, link))
        bus = "00000000:03:00.0" if other is None else f"00000000:{other + 16:02X}:00.0"
        return SimpleNamespace(busId=bus)

    def _nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2

    def _nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def _nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def _nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return 40 if a // 4 == b // 4 else 50


@pytest.fixture
def fake_nvml() -> type[FakeNvml]:
    return FakeNvml
