"""measure(): times copies and GEMMs on this machine and keeps the results, so that plans rest on what it really does.

Medians after warm-up, within a time budget; jobs are ordered so that a short budget still gives every format one shape.
Ctrl-C and a budget that runs out keep what is there. A format that torch refuses is recorded with torch's own reason.
"""

import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.hardware.amx import bf16_fault
from deepwell.hardware.cache import Measurement, read_measurement, write_measurement
from deepwell.hardware.gemms import gemm_call
from deepwell.hardware.model import Hardware
from deepwell.hardware.parts import Curve, GemmPoint, Gpu
from deepwell.hardware.progress import bar

Shape = tuple[int, int, int]  # m, n, k

# Llama-8B's GEMMs at 16k tokens, two cubes, and one small: the shapes of the shipped H200 table, most telling first.
GPU_SHAPES: tuple[Shape, ...] = (
    (8192, 8192, 8192),
    (16384, 4096, 4096),
    (16384, 3072, 768),
    (16384, 28672, 4096),
    (16384, 4096, 14336),
    (4096, 4096, 4096),
    (16384, 6144, 4096),
    (28672, 4096, 16384),
)
CPU_SHAPES: tuple[Shape, ...] = ((512, 512, 512), (1024, 1024, 1024), (256, 2048, 512), (128, 128, 128))
GPU_FORMATS = ("bf16", "fp8_tensor", "fp8_row", "fp8_1x128", "mxfp8", "nvfp4")
CPU_FORMATS = ("fp32", "bf16", "fp8_tensor", "fp8_row")
_GPU_COPY_BYTES = 1 << 30
_CPU_COPY_BYTES = 1 << 29  # beyond any last-level cache
_FLUSH_BYTES = 256 << 20  # beyond any L2
_MAX_REPEATS = 50
_MIN_REPEATS = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    format: str  # "copy" is the copy
    shape: Shape = (0, 0, 0)

    def __str__(self) -> str:
        return "copy" if self.format == "copy" else f"{self.format} {'x'.join(map(str, self.shape))}"


def measure(
    hw: Hardware,
    *,
    budget_s: float = 20.0,
    shapes: Sequence[Shape] | None = None,
    formats: Sequence[str] | None = None,
    copy_bytes: int | None = None,
    progress: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Hardware:
    """`hw` with measured figures, which are kept in the cache for later probes. `hw` must be this machine.

    Measures the first device; equal ones share its figures. Raises `ConfigError` for a named machine or a bad budget.
    """
    if hw.host is None:
        raise ConfigError(f"hw: {hw.name!r} is a name, not this machine; measure what probe() without a name returns")
    if not 0 < budget_s <= 3600:
        raise ConfigError(f"budget_s: got {budget_s}; give seconds, more than 0 and at most 3600")
    import torch

    gpu, device = _device(torch, hw)
    is_cpu = gpu.kind == "cpu"
    shapes = tuple(shapes or (CPU_SHAPES if is_cpu else GPU_SHAPES))
    formats = tuple(formats or (CPU_FORMATS if is_cpu else GPU_FORMATS))
    run = _MeasureRun(torch, gpu, device, copy_bytes or (_CPU_COPY_BYTES if is_cpu else _GPU_COPY_BYTES))
    jobs = [_Job(format="copy"), *(_Job(format=f, shape=s) for s in shapes for f in formats)]
    note = run.all(jobs, budget_s, progress)
    result = run.result(complete=not note)
    older, _ = read_measurement(gpu, environ)
    if note and older is not None:
        result = _merge(older, result)
    write_measurement(gpu, result, environ)
    alike = (gpu.name, gpu.driver, gpu.mig_enabled)
    gpus = tuple(result.applied_to(g) if (g.name, g.driver, g.mig_enabled) == alike else g for g in hw.gpus)
    return dataclasses.replace(hw, gpus=gpus, notes=tuple(dict.fromkeys((*hw.notes, *([note] if note else [])))))


def _device(torch: Any, hw: Hardware) -> tuple[Gpu, Any]:
    """The device to time and what `hw` calls it; CUDA and NVML may number the GPUs differently, so the name decides."""
    if hw.kind == "cpu":
        return hw.gpus[0], torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("hw: there is a GPU, but torch cannot use it; run `deepwell doctor` to see why")
    name = torch.cuda.get_device_name(0)
    for gpu in hw.gpus:
        if gpu.name == name:
            return gpu, torch.device("cuda", 0)
    raise ConfigError(f"hw: torch's first GPU is {name!r}, which is not in it; probe this machine again")


class _MeasureRun:
    """One measuring run over one device: the jobs' results as they come in."""

    def __init__(self, torch: Any, gpu: Gpu, device: Any, copy_bytes: int) -> None:
        self.torch = torch
        self.gpu = gpu
        self.device = device
        self.copy_bytes = min(copy_bytes, (gpu.memory_bytes or copy_bytes * 16) // 16)
        self.copy_gb_per_s: float | None = None
        self.points: dict[str, list[GemmPoint]] = {}
        self.unavailable: dict[str, str] = {}
        self.skipped: list[_Job] = []

    def all(self, jobs: Sequence[_Job], budget_s: float, progress: bool) -> str:
        """Runs the jobs. Returns an empty string, or a note on what is missing and why."""
        deadline = time.monotonic() + budget_s
        try:
            with self.torch.no_grad(), bar("measuring", len(jobs), shown=progress) as advance:
                for done, job in enumerate(jobs):
                    advance(description=f"measuring {job}", completed=done)
                    left = deadline - time.monotonic()
                    if left <= 0:
                        self.skipped += jobs[done:]
                        break
                    self.one(job, left / (len(jobs) - done))
        except self.torch.AcceleratorError as error:  # the CUDA context is gone: nothing after it can be trusted
            return f"measuring ended when the GPU failed ({str(error).splitlines()[0]}); what was measured is kept"
        except KeyboardInterrupt:
            return "measuring was stopped by the user; what was measured until then is kept"
        if self.skipped:
            return f"time or memory was too short for {len(self.skipped)} of {len(jobs)} measurements ({budget_s:g} s)"
        return ""

    def one(self, job: _Job, seconds: float) -> None:
        if job.format in self.unavailable:
            return
        reason = self._refusal(job.format)
        if reason:
            self.unavailable[job.format] = reason
            return
        try:
            call = self._copy() if job.format == "copy" else gemm_call(self.torch, job.format, job.shape, self.device)
            taken = self._time(call, seconds)
        except UnsupportedError as error:
            self.unavailable[job.format] = str(error)
        except self.torch.OutOfMemoryError:
            self.skipped.append(job)
        except self.torch.AcceleratorError:
            raise
        except (RuntimeError, ValueError) as error:  # how torch refuses a format on a device
            self.unavailable[job.format] = (str(error).splitlines() or [type(error).__name__])[0][:200]
        else:
            self._keep(job, taken)

    def _refusal(self, format_name: str) -> str:
        """Why `format_name` must not even be tried: a GPU without it, or a CPU that would kill this process."""
        if format_name == "copy" or format_name in self.points:
            return ""
        if self.gpu.kind == "cpu":
            return bf16_fault(self.gpu.instruction_sets) if format_name == "bf16" else ""
        return self.gpu.why_not(format_name)

    def _keep(self, job: _Job, seconds: float) -> None:
        if job.format == "copy":
            self.copy_gb_per_s = round(2 * self.copy_bytes / seconds / 1e9, 2)
            return
        m, n, k = job.shape
        point = GemmPoint(m, n, k, float(f"{2 * m * n * k / seconds / 1e12:.4g}"))
        self.points.setdefault(job.format, []).append(point)

    def _copy(self) -> Callable[[], object]:
        source = self.torch.ones(self.copy_bytes, dtype=self.torch.uint8, device=self.device)
        target = self.torch.empty_like(source)
        return lambda: target.copy_(source)

    def _time(self, call: Callable[[], object], seconds: float) -> float:
        """Median seconds of one call, spending about `seconds` on it."""
        if self.device.type == "cuda":
            return self._time_cuda(call, seconds)
        for _ in range(2):  # the first call compiles and allocates
            start = time.perf_counter()
            call()
            taken = time.perf_counter() - start
        samples = []
        for _ in range(_repeats(taken, seconds)):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        return statistics.median(samples)

    def _time_cuda(self, call: Callable[[], object], seconds: float) -> float:
        cuda = self.torch.cuda
        flush = self.torch.empty(_FLUSH_BYTES, dtype=self.torch.uint8, device=self.device)
        for _ in range(3):  # the first call loads the kernel and lets the library choose
            call()
        cuda.synchronize(self.device)
        start = time.perf_counter()
        flush.zero_()
        call()
        cuda.synchronize(self.device)
        count = _repeats(time.perf_counter() - start, seconds)
        begins = [cuda.Event(enable_timing=True) for _ in range(count)]
        ends = [cuda.Event(enable_timing=True) for _ in range(count)]
        for begin, end in zip(begins, ends, strict=True):
            flush.zero_()  # each repeat starts with a cold L2, as in a training step
            begin.record()
            call()
            end.record()
        cuda.synchronize(self.device)
        return statistics.median(b.elapsed_time(e) for b, e in zip(begins, ends, strict=True)) / 1000

    def result(self, *, complete: bool) -> Measurement:
        date = datetime.date.today().isoformat()
        version = self.torch.__version__
        threads = f", {self.torch.get_num_threads()} threads" if self.gpu.kind == "cpu" else ""
        source = f"measured here {date} with torch {version}{threads}"
        curves = tuple(
            Curve(format=name, tier="measured", source=source, points=tuple(points))
            for name, points in self.points.items()
        )
        # A format that ran for one shape is available, whatever another shape said.
        refused = tuple((name, reason) for name, reason in self.unavailable.items() if name not in self.points)
        return Measurement.for_device(
            self.gpu, date=date, copy_gb_per_s=self.copy_gb_per_s, curves=curves, unavailable=refused, complete=complete
        )


def _repeats(one_s: float, seconds: float) -> int:
    return max(_MIN_REPEATS, min(_MAX_REPEATS, int(seconds / max(one_s, 1e-9))))


def _merge(older: Measurement, newer: Measurement) -> Measurement:
    """What `newer` measured, and what only `older` has."""
    curves = {curve.format: curve for curve in older.curves}
    for curve in newer.curves:
        fresh = {(p.m, p.n, p.k) for p in curve.points}
        before = curves[curve.format].points if curve.format in curves else ()
        points = curve.points + tuple(p for p in before if (p.m, p.n, p.k) not in fresh)
        curves[curve.format] = dataclasses.replace(curve, points=points)
    refused = {**dict(older.unavailable), **dict(newer.unavailable)}
    return dataclasses.replace(
        newer,
        copy_gb_per_s=older.copy_gb_per_s if newer.copy_gb_per_s is None else newer.copy_gb_per_s,
        curves=tuple(curves.values()),
        unavailable=tuple((name, reason) for name, reason in refused.items() if name not in curves),
    )
