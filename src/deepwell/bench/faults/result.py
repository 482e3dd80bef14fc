"""What a run that was killed on purpose was asked to survive, and what came of it."""

import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from deepwell.errors import ConfigError

# What is done to the run, as the table calls it.
KINDS = {
    "worker": "SIGKILL of a worker",
    "all": "SIGKILL of all workers at once",
    "agent": "SIGKILL of the agent",
    "start": "SIGKILL of a worker that starts",
    "term": "SIGTERM to the agent",
    "stop": "SIGSTOP of a worker (hangs)",
}
KILLS = ("worker", "all", "agent", "start")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSetup:
    """What to do: so many SIGKILLs, and some SIGTERMs and hangs besides, while a tiny model trains."""

    kills: int = 100
    world: int = 2
    seed: int = 0
    minutes: float = 60.0  # after this no kill is begun, which fails the check of their number
    steps_per_kill: int = 16
    save_every: int = 4
    hang_after_s: float = 15.0

    def __post_init__(self) -> None:
        if self.kills < 1:
            raise ConfigError(f"--kills is {self.kills}; give at least 1")
        if not 1 <= self.world <= 16:
            raise ConfigError(f"--world is {self.world}; give 1 to 16 processes")
        if not self.minutes > 0:
            raise ConfigError(f"--minutes is {self.minutes:g}; give more than 0")

    @property
    def terms(self) -> int:
        """SIGTERMs on top of the kills."""
        return 0 if self.kills < 2 else max(1, self.kills // 12)

    @property
    def hangs(self) -> int:
        """Stopped processes on top of the kills; each costs `hang_after_s`."""
        return self.kills // 25 if self.world > 1 else 0

    @property
    def steps(self) -> int:
        return self.steps_per_kill * (self.kills + self.terms + self.hangs) + 2 * self.save_every


@dataclass(frozen=True, slots=True)
class Strike:
    """One thing that was done to the run: when, at which step, and whether a checkpoint was being written."""

    kind: str
    t: float
    step: int
    in_write: bool


@dataclass(frozen=True, slots=True)
class FaultClaim:
    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was done, what it cost, and what was checked at the end."""

    setup: FaultSetup
    strikes: tuple[Strike, ...]
    checks: tuple[FaultClaim, ...]
    starts: int
    recoveries: tuple[float, ...]  # seconds from the last step before to the end of the first one after
    lost_steps: int
    goodput: float
    undisturbed_s: float
    seconds: float
    reasons: dict[str, int]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def kills(self) -> int:
        return sum(strike.kind in KILLS for strike in self.strikes)

    @property
    def kills_in_writes(self) -> int:
        return sum(strike.in_write and strike.kind in KILLS for strike in self.strikes)

    def rows(self) -> list[tuple[str, str]]:
        counts = Counter(strike.kind for strike in self.strikes)
        rows = {"processes": f"{self.setup.world} (gloo, one agent)", "steps": f"{self.setup.steps:,}"}
        rows |= {words: str(counts[kind]) for kind, words in KINDS.items() if counts[kind]}
        rows |= {
            "SIGKILLs in all": str(self.kills),
            "of these while a checkpoint was written": str(self.kills_in_writes),
            "restarts": str(self.starts - 1),
        }
        if self.recoveries:
            middle, longest = statistics.median(self.recoveries), max(self.recoveries)
            rows["recovery, median and longest"] = f"{middle:.1f} s, {longest:.1f} s"
        rows |= {
            "steps computed twice": str(self.lost_steps),
            "undisturbed run": f"{self.undisturbed_s:.0f} s",
            "this run, goodput": f"{self.seconds:.0f} s, {100 * self.goodput:.1f}%",
        }
        return list(rows.items())

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        lines = [f"{name:<{width}}  {value}" for name, value in self.rows()]
        lines += ["", *(f"{'ok  ' if c.ok else 'FAIL'}  {c.name}: {c.detail}" for c in self.checks)]
        return "\n".join(lines)

    def to_markdown(self) -> str:
        lines = ["| what | figure |", "|---|---|", *(f"| {name} | {value} |" for name, value in self.rows())]
        lines += ["", "| check | held | detail |", "|---|---|---|"]
        lines += [f"| {check.name} | {'yes' if check.ok else '**no**'} | {check.detail} |" for check in self.checks]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok, "kills": self.kills, "kills_in_writes": self.kills_in_writes}
