"""How long a call takes on its device: on a GPU the GPU's own time, for a model's host runs ahead of it.

The launches of a call are recorded once in a CUDA graph and replayed. Timed call by call, what is shorter than its
launches shows the host instead: FP8 looked twice as slow as it is at width 768, and all kernels alike at 4096^3.
"""

import functools
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_log = logging.getLogger("deepwell.kernels")

Call = Callable[[], object]


def median_us(run: Call, device: str, budget_s: float = 0.1) -> float:
    """The median time of a call in microseconds, after calls that do not count."""
    place = torch.device(device)
    for _ in range(2):
        run()
    if place.type != "cuda":
        return statistics.median(times_us(run, place, budget_s))
    with recorded(run, place) as replay:
        return statistics.median(times_us(replay, place, budget_s))


def cold_median_us(run: Call, warmup_ms: int = 5, rep_ms: int = 20) -> float:
    """The median time of a call on the current GPU that finds nothing of its operands in L2, as in a step."""
    from triton.testing import do_bench

    run()
    with recorded(run, torch.device("cuda", torch.cuda.current_device())) as replay:
        return 1e3 * float(do_bench(replay, warmup=warmup_ms, rep=rep_ms, return_mode="median"))


def copy_gbps() -> float:
    """Bandwidth of a plain copy of 1 GiB on the current GPU, read plus write.

    Launched, not recorded: a graph copies by other means (2.7 TB/s instead of 4.25 on an H200).
    """
    from triton.testing import do_bench

    source = torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2e-6 * source.nbytes / float(do_bench(lambda: target.copy_(source), warmup=5, rep=20, return_mode="median"))


def times_us(run: Call, device: torch.device, budget_s: float) -> list[float]:
    """Times of single calls, by CUDA events on a GPU."""
    return _cuda_times(run, device, budget_s) if device.type == "cuda" else _cpu_times(run, budget_s)


@contextmanager
def recorded(run: Call, device: torch.device, pool: Any = None) -> Iterator[Call]:
    """`run` on a GPU with its launches recorded; as it is where that cannot be, because it waits for the GPU, say.

    `pool` (torch.cuda.graph_pool_handle) is memory for the results of calls that never run at the same time.
    """
    with torch.cuda.device(device):
        graph = _record(run, pool)
        if graph is None:
            yield run
            return
        try:
            yield graph.replay
        finally:
            torch.cuda.synchronize()
            graph.reset()


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """The one stream of all recordings on a device: memory that the allocator keeps for a stream serves no other."""
    return torch.cuda.Stream(device)


def _record(run: Call, pool: Any) -> torch.cuda.CUDAGraph | None:
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # libraries make the workspaces of this stream
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
    except torch.OutOfMemoryError:
        _stream.cache_clear()
        raise
    except RuntimeError as error:
        _stream.cache_clear()  # a stream whose recording broke off is not used again
        _log.info("timed call by call: its launches cannot be recorded (%s)", str(error).splitlines()[0][:200])
        torch.cuda.synchronize()
        return None
    return graph


def _cpu_times(run: Call, budget_s: float) -> list[float]:
    times: list[float] = []
    begin = time.perf_counter()
    while not times or (time.perf_counter() - begin < budget_s and len(times) < 100):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def _cuda_times(run: Call, device: torch.device, budget_s: float) -> list[float]:
    with torch.cuda.device(device):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        count = max(5, min(200, int(budget_s * 1e3 / max(first.elapsed_time(last), 1e-3))))
        return [ms * 1e3 for ms in launched_ms(run, count)]


def launched_ms(run: Call, count: int) -> list[float]:
    """Milliseconds of each of `count` calls on the current GPU, launched one behind the other."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
