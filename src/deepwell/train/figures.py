"""The figures of a step: throughput, MFU, memory, predicted against real time, goodput.

MFU is the model's flops over the peak of bf16; the weighted one is over each format's own peak, that is the time that
all GEMMs would take at their formats' peaks over the time that the step took.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from deepwell.engine.dryrun.plan import predict
from deepwell.engine.engine import Engine
from deepwell.errors import ConfigError, DeepwellError
from deepwell.planner.estimate_values import GIB
from deepwell.planner.measured_steps import is_this_machines, record_step
from deepwell.planner.plan import Plan

ENOUGH = 20  # steps before their median is worth keeping


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """How long a step of a plan takes, or of one made of what the engine does here."""

    plan: Plan
    step_s: float


def predicted(
    engine: Engine, batch: int, seq_len: int, micro_batches: int, optimizer: str | None
) -> StepPrediction | None:
    """Of an engine that has no plan, on the one device it is on; None where its machine cannot be described."""
    try:
        found = predict(engine, batch, seq_len, micro_batches, optimizer)
    except DeepwellError:
        return None
    return StepPrediction(found.plan, found.step_s)


class Figures:
    """Turns a step's seconds into what the log shows."""

    def __init__(self, prediction: StepPrediction | None, world: int, device: torch.device) -> None:
        self.prediction, self.world, self.device = prediction, world, device
        self._seconds: deque[float] = deque(maxlen=1000)
        self._limit = None
        if device.type == "cuda":
            self._limit = torch.cuda.get_device_properties(device).total_memory / GIB

    def of_step(self, seconds: float, tokens: int) -> dict[str, Any]:
        """Figures of a step of `tokens` tokens over all ranks."""
        self._seconds.append(seconds)
        figures: dict[str, Any] = {
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_s_per_gpu": tokens / seconds / self.world,
            "tflops": None,
            "mfu": None,
            "mfu_weighted": None,
            "memory_gib": self.memory_gib(),
            "memory_limit_gib": self._limit,
            "predicted_s": None,
            "ratio": None,
        }
        if self.prediction is not None:
            found, step_s = self.prediction.plan.estimate, self.prediction.step_s
            figures["tflops"] = found.model_flops_per_token * tokens / self.world / seconds / 1e12
            if found.mfu_bf16 and self.device.type == "cuda":  # of a CPU's peak nobody knows enough
                figures["mfu"] = found.mfu_bf16 * found.step_s / seconds
                figures["mfu_weighted"] = found.mfu_weighted * found.step_s / seconds
            figures |= {"predicted_s": step_s, "ratio": step_s / seconds}
        return figures

    def keep_measured(self) -> str:
        """Let the planner know what a step of this plan took here: the median, where enough were taken.

        Returns why it could not be kept, "" where it was or need not be.
        """
        found = self.prediction
        if found is None or len(self._seconds) < ENOUGH:
            return ""
        gpu, estimate = found.plan.hardware.gpus[0], found.plan.estimate
        if not is_this_machines(gpu):
            return ""
        today = time.strftime("%Y-%m-%d", time.gmtime())
        real = statistics.median(self._seconds)
        try:
            record_step(gpu, found.plan.workload, found.plan.layout, estimate.uncorrected_s, real, today)
        except ConfigError as error:  # a cache that cannot be written is no reason to fail a run that is done
            return str(error)
        return ""

    def memory_gib(self) -> float:
        """The most that torch had reserved on the GPU; on a CPU what the process holds now."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device) / GIB
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - read at every step
            return int(file.read().split()[1]) * 4096 / GIB


class Goodput:
    """The share of a run's wall-clock time, restarts included, that went into steps that count."""

    def __init__(self) -> None:
        self.useful_s = 0.0
        self.started = time.time()

    def add(self, seconds: float) -> None:
        self.useful_s += seconds

    @property
    def share(self) -> float:
        return min(1.0, self.useful_s / max(1e-9, time.time() - self.started))
