"""Times of calls: the device's own, whatever the host does meanwhile."""

import time

import pytest
import torch

from deepwell.kernels.tune.timing import launched_ms, median_us, recorded, times_us

CUDA = torch.device("cuda", 0)


def test_a_cpu_is_timed_call_by_call() -> None:
    calls = []

    def run() -> None:
        calls.append(1)
        time.sleep(0.002)

    assert 1900 < median_us(run, "cpu", budget_s=0.02) < 20000
    assert len(calls) >= 3  # two that do not count


def test_calls_that_are_launched_in_a_row_are_timed_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, other: "Event") -> float:
            return other.at - self.at

    waits: list[float] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(clock[0]))
    durations = iter((5.0, 1.0, 3.0))
    found = launched_ms(lambda: clock.__setitem__(0, clock[0] + next(durations)), 3)
    assert found == [5.0, 1.0, 3.0] and waits == [9.0]


@pytest.mark.gpu
def test_launches_of_the_host_are_not_in_a_gpus_time() -> None:
    x = torch.ones(1024, device="cuda")

    def run() -> None:
        time.sleep(0.001)  # a slow host
        x.mul_(1.0)

    assert by_events(run) > 900
    assert median_us(run, "cuda:0", budget_s=0.02) < 100


def by_events(run) -> float:
    run()
    times = times_us(run, CUDA, 0.02)
    return sorted(times)[len(times) // 2]


@pytest.mark.gpu
def test_a_call_that_waits_for_the_gpu_is_timed_all_the_same() -> None:
    x = torch.ones(1 << 20, device="cuda")
    with recorded(lambda: x.sum().item(), CUDA) as run:
        assert run() == 1 << 20  # itself: nothing was recorded
    assert median_us(lambda: x.sum().item(), "cuda:0", budget_s=0.01) > 0
    assert (x + 1).sum().item() == 2 << 20  # the device is as good as before


@pytest.mark.gpu
def test_lack_of_memory_is_said_and_leaves_the_device_usable() -> None:
    too_much = 2 * torch.cuda.get_device_properties(0).total_memory
    calls = []

    def run() -> None:
        calls.append(1)
        if len(calls) == 2:  # while it is recorded
            torch.empty(too_much, dtype=torch.uint8, device="cuda")

    with pytest.raises(torch.OutOfMemoryError), recorded(run, CUDA):
        pass
    assert torch.ones(8, device="cuda").sum().item() == 8


@pytest.mark.gpu
def test_calls_that_take_turns_share_memory() -> None:
    pool = torch.cuda.graph_pool_handle()
    x = torch.randn(1 << 24, device="cuda")
    torch.cuda.synchronize()
    with recorded(lambda: x + 1, CUDA, pool):
        one = torch.cuda.memory_reserved()
        with recorded(lambda: x + 2, CUDA, pool) as second:
            second()
            assert torch.cuda.memory_reserved() <= one + (1 << 22)
