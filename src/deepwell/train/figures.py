"""The figures of a step: throughput, MFU, memory, predicted against real time.

MFU is the model's flops over the peak of bf16; the weighted one is over each format's own peak, that is the time that
all GEMMs would take at their formats' peaks over the time that the step took.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

import torch

from deepwell.errors import ConfigError
from deepwell.planner.estimate_values import GIB
from deepwell.planner.measured_steps import is_this_machines, record_step
from deepwell.planner.plan import Plan

ENOUGH = 20  # steps before their median is worth keeping


class Figures:
    """Turns a step's seconds into what the log shows; `step_s` is what a step of `plan` was predicted to take."""

    def __init__(self, plan: Plan | None, step_s: float, world: int, device: torch.device) -> None:
        self.plan, self.step_s, self.world, self.device = plan, step_s, world, device
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
        if self.plan is not None:
            found = self.plan.estimate
            figures["tflops"] = found.model_flops_per_token * tokens / self.world / seconds / 1e12
            if found.mfu_bf16 and self.device.type == "cuda":  # of a CPU's peak nobody knows enough
                figures["mfu"] = found.mfu_bf16 * found.step_s / seconds
                figures["mfu_weighted"] = found.mfu_weighted * found.step_s / seconds
            figures |= {"predicted_s": self.step_s, "ratio": self.step_s / seconds}
        return figures

    def keep_measured(self) -> str:
        """Let the planner know what a step of this plan took here: the median, where enough were taken.

        Returns why it could not be kept, "" where it was or need not be.
        """
        plan = self.plan
        if plan is None or len(self._seconds) < ENOUGH or not is_this_machines(plan.hardware.gpus[0]):
            return ""
        today = time.strftime("%Y-%m-%d", time.gmtime())
        real = statistics.median(self._seconds)
        try:
            gpu, uncorrected = plan.hardware.gpus[0], plan.estimate.uncorrected_s
            record_step(gpu, plan.workload, plan.layout, uncorrected, real, today)
        except ConfigError as error:  # a cache that cannot be written is no reason to fail a run that is done
            return str(error)
        return ""

    def memory_gib(self) -> float:
        """The most that torch had reserved on the GPU; on a CPU what the process holds now."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device) / GIB
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - read at every step
            return int(file.read().split()[1]) * 4096 / GIB
