"""Learning rates over a run: a factor of the peak for each step. Pure numbers, no state to save.

schedule = Schedule(kind="cosine", steps=10_000, warmup=200, floor=0.1)
schedule(0), schedule(200), schedule(10_000)      # 1/200, 1.0, 0.1
"""

import math
from dataclasses import dataclass

from deepwell.errors import ConfigError

KINDS = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The factor of the peak learning rate at each step, counted from 0.

    `warmup` steps rise linearly. Then "constant" stays, "linear" and "cosine" fall to `floor` (a share of the peak) at
    the last step, "wsd" (warm-up, stable, decay) stays and falls linearly over the last `decay` steps.
    """

    kind: str = "cosine"
    steps: int = 1000
    warmup: int = 0
    floor: float = 0.1
    decay: int | None = None  # of "wsd"; a tenth of the run where None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"schedule is {self.kind!r}; it takes {', '.join(KINDS)}")
        if not 0 <= self.warmup <= self.steps:
            raise ConfigError(f"warmup is {self.warmup}; it must be between 0 and steps ({self.steps})")
        if not 0.0 <= self.floor <= 1.0:
            raise ConfigError(f"lr_floor is {self.floor}; it is a share of the peak learning rate, 0 to 1")
        if self.decay is not None and not 0 <= self.decay <= self.steps - self.warmup:
            raise ConfigError(f"decay is {self.decay}; {self.steps - self.warmup} steps come after the warm-up")

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        length = self.steps - self.warmup
        if self.kind == "wsd":
            falling = max(1, length // 10) if self.decay is None else self.decay
            into = step - (self.steps - falling)
            return 1.0 if into < 0 or not falling else self._fall((into + 1) / falling)
        if self.kind == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, length - 1))
        return self._fall(done if self.kind == "linear" else (1.0 - math.cos(math.pi * done)) / 2.0)

    def _fall(self, share: float) -> float:
        return 1.0 - (1.0 - self.floor) * min(1.0, share)
