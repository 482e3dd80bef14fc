"""The guard of a run's numerics: findings in, events and changed formats out. Pure, no torch, no clock, no chance.

    nvfp4, mxfp4, mxfp6  ->  mxfp8 (fp8 on devices without)  ->  bf16

A finding is something measured that should not be: a loss that is not finite, a spike, a GEMM whose format loses too
much. `Guard.decide` turns the findings of a step into events. Some are only reported; a fallback moves one GEMM of one
layer one rung down the ladder, that is to more bits, and a recovery moves it back. The same findings in the same order
give the same decisions on every rank; whoever measures reduces the findings over the ranks first (train/watch.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from deepwell.errors import ConfigError, NumericsError
from deepwell.hardware.codec import check_schema
from deepwell.precision.gemm_format import GEMMS

SCHEMA = 1
# Bits of an element, by the policy's formats.
BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "mxfp8": 8, "mxfp6": 6, "mxfp4": 4, "nvfp4": 4}
# What an event may be about.
WHAT = tuple("nonfinite spike skip fallback recover saturation underflow sqnr noise budget repair".split())

# Of the guard's own attributes, those that a resumed run goes on with.
_STATE = ("num_skipped", "skipped_in_row", "last_bad", "repair_until", "is_over_budget", "stop")

Key = tuple[str, str]  # (module path, "fwd", "dgrad" or "wgrad")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """What is watched and when the guard acts. The defaults are for training as it is; `off()` watches nothing.

    A GEMM is sampled every `sample_every` steps at most: the sample's share of the step's tokens decides, so that all
    samples together stay below `sample_cost` of the run (train/watch.py). `confirm` findings of one GEMM within
    `window` steps make it fall back; after that it is not moved for `cool_down` steps. NaN out of finite numbers needs
    no confirmation.
    """

    enabled: bool = True
    max_skipped: int = 5  # bad steps in a row that end the run
    spike_z: float = 10.0  # deviations above the median loss that are a spike
    spike_calm_z: float = 4.0  # below this it is over
    spike_window: int = 64  # losses that the median is of
    spike_warmup: int = 32  # losses before the first judgement
    sample_every: int = 50  # steps; 0 samples nothing
    sample_tokens: int = 256
    sample_cost: float = 0.01  # share of the run's time
    sqnr_margin_db: float = 6.0  # a GEMM may be this far below its format's floor (docs/numerics.md)
    saturation: float = 0.01  # share of an operand's elements that are clipped
    underflow: float = 0.5  # share of its nonzero elements that become zero
    noise_ratio: float = math.sqrt(3.0)  # the gradient's norm is to be so many times its quantization noise
    confirm: int = 2
    window: int = 16
    cool_down: int = 100
    recover_after: int = 0  # clean steps before a GEMM goes one rung back; 0 never
    max_recoveries: int = 1  # of one GEMM
    budget: float = 0.25  # share of the low-precision GEMMs' flops that may fall back before the run asks for attention
    stop_at_budget: bool = False  # end the run there
    repair_steps: int = 0  # after a fallback, a skip or a spike: so many steps ...
    repair_lr: float = 0.1  # ... at this share of the learning rate

    def __post_init__(self) -> None:
        least = {"max_skipped": 1, "spike_window": 4, "spike_warmup": 4, "sample_tokens": 1, "confirm": 1, "window": 1}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int":
                low = least.get(f.name, 0)
                if isinstance(value, bool) or not isinstance(value, int) or value < low:
                    raise ConfigError(f"guard.{f.name} is {value!r}; it must be a whole number of at least {low}")
            elif f.type == "bool" and not isinstance(value, bool):
                raise ConfigError(f"guard.{f.name} is {value!r}; it takes True or False")
            elif f.type == "float" and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0):
                raise ConfigError(f"guard.{f.name} is {value!r}; it must be a number of at least 0")
        if not self.spike_calm_z <= self.spike_z:
            raise ConfigError(f"guard.spike_calm_z is {self.spike_calm_z}; it must not be above spike_z {self.spike_z}")
        if self.spike_warmup > self.spike_window:
            raise ConfigError(
                f"guard.spike_warmup is {self.spike_warmup}; it must not be above spike_window {self.spike_window}"
            )
        if not self.sample_cost > 0:
            raise ConfigError(f"guard.sample_cost is {self.sample_cost!r}; it is a share of the run's time, 0.01 say")

    @classmethod
    def off(cls) -> GuardSettings:
        """Watch nothing, skip nothing."""
        return cls(enabled=False)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GuardSettings:
        unknown = sorted(set(data) - {f.name for f in fields(cls)})
        if unknown:
            known = ", ".join(f.name for f in fields(cls))
            raise ConfigError(f"guard has no setting {unknown[0]!r}; it has {known}")
        return cls(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that was measured at a step and is beyond its limit. `path` and `gemm` are "" of the whole step."""

    step: int
    what: str
    reason: str
    path: str = ""
    gemm: str = ""
    rank: int | None = None
    is_severe: bool = False  # NaN out of finite numbers: needs no confirmation
    is_format: bool = True  # False where the model's own dtype has it too, and other formats would not help


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardEvent:
    """A line of the event log. `before` and `after` are formats, equal or "" where nothing changed."""

    step: int
    what: str
    reason: str
    path: str = ""
    gemm: str = ""
    before: str = ""
    after: str = ""
    rank: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As events.jsonl has it, without time and kind."""
        data = asdict(self)
        return {"from" if k == "before" else "to" if k == "after" else k: v for k, v in data.items()}

    def __str__(self) -> str:
        where = f" {self.path} {self.gemm}".rstrip() if self.path else ""
        how = f" {self.before} -> {self.after}" if self.before != self.after else ""
        return f"{self.what}{where}{how}: {self.reason}"


class GuardStop(NumericsError):
    """The run cannot go on. `events` are those of its last step, for the log."""

    def __init__(self, reason: str, events: Sequence[GuardEvent] = ()) -> None:
        super().__init__(reason)
        self.events = tuple(events)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedGemm:
    """A GEMM that the policy runs in low precision: its format now, the policy's, and its share of the flops."""

    now: str
    policy: str
    share: float


def next_rung(name: str, eight_bit: str = "mxfp8") -> str | None:
    """The next format with more bits on the ladder, None where there is none."""
    bits = BITS[name]
    if bits >= 16:
        return None
    return "bf16" if bits == 8 else eight_bit


def rung_back(now: str, policy: str, eight_bit: str = "mxfp8") -> str | None:
    """One rung from `now` towards the policy's format, None where it is there already."""
    if BITS[now] <= BITS[policy]:
        return None
    return eight_bit if BITS[now] >= 16 and BITS[policy] < 8 else policy


def noisiest(noise: Mapping[Key, float], grad_norm: float, ratio: float) -> list[Key]:
    """The GEMMs to take the noise from, loudest first, until the gradient's norm is `ratio` times what is left.

    `noise` has the power of the noise that each GEMM adds to the gradient. FP4 training stalls where the norm is below
    sqrt(3) times the noise (arXiv 2505.19115).
    """
    left = sum(noise.values())
    found = []
    for key in sorted(noise, key=lambda k: (-noise[k], k)):
        if grad_norm * grad_norm >= ratio * ratio * left or noise[key] <= 0:
            break
        found.append(key)
        left -= noise[key]
    return found


class SpikeDetector:
    """Whether a loss stands out of those before it: its distance from their median, in robust standard deviations.

    The deviation is 1.4826 MAD and at least 1% of the median, so that a flat curve does not turn ripples into spikes.
    What is part of a spike does not enter the window. A level that lasts as long as the warm-up is the new normal.
    """

    def __init__(self, settings: GuardSettings) -> None:
        self.settings = settings
        self.losses: list[float] = []
        self.in_spike = 0  # steps that this one lasts

    def add(self, loss: float) -> tuple[bool, float, float]:
        """(whether a spike begins here, deviations above the median, median); the loss must be finite."""
        s = self.settings
        if len(self.losses) < s.spike_warmup:
            self._keep(loss)
            return False, 0.0, loss
        middle = statistics.median(self.losses)
        spread = 1.4826 * statistics.median([abs(value - middle) for value in self.losses])
        z = (loss - middle) / max(spread, 0.01 * abs(middle), 1e-12)
        begins = not self.in_spike and z > s.spike_z
        if begins or (self.in_spike and z > s.spike_calm_z):
            self.in_spike += 1
            if self.in_spike > s.spike_warmup:
                self.losses, self.in_spike = [loss], 0
            return begins, z, middle
        self.in_spike = 0
        self._keep(loss)
        return False, z, middle

    def _keep(self, loss: float) -> None:
        self.losses = [*self.losses, loss][-self.settings.spike_window :]


@dataclass(slots=True, kw_only=True)
class _History:
    """What the guard knows of one GEMM."""

    found: list[int] = field(default_factory=list)  # steps of findings within the window
    quiet_until: int = 0  # no action before this step
    changed: int = -1  # step of the last change, -1 where it never fell back
    last: int = -1  # step of the last finding
    recoveries: int = 0


class Guard:
    """Decides. It keeps counts and histories (`state_dict`), never formats: those are the engine's."""

    def __init__(self, settings: GuardSettings, *, eight_bit: str = "mxfp8") -> None:
        self.settings, self.eight_bit = settings, eight_bit
        self.spikes = SpikeDetector(settings)
        self.num_skipped = 0
        self.skipped_in_row = 0
        self.last_bad = -1
        self.repair_until = 0
        self.is_over_budget = False
        self.stop = ""  # why the run cannot go on
        self._gemms: dict[Key, _History] = {}

    # ---- deciding ----

    def decide(
        self, step: int, findings: Sequence[Finding], gemms: Mapping[Key, GuardedGemm], loss: float | None = None
    ) -> list[GuardEvent]:
        """The events of a step: what was found, and what is done about it.

        `loss` is the step's where it is finite. Events "fallback" and "recover" are to be carried out: `changes`.
        """
        events = self._of_step(step, findings, loss)
        on_gemms = [f for f in findings if f.path]
        for f in sorted(on_gemms, key=lambda f: (f.path, GEMMS.index(f.gemm) if f.gemm else -1, f.what)):
            events.append(GuardEvent(step=f.step, what=f.what, path=f.path, gemm=f.gemm, reason=f.reason, rank=f.rank))
        events += self._fall_back(step, on_gemms, gemms)
        events += self._recover(step, gemms, {(e.path, e.gemm) for e in events if e.what == "fallback"})
        events += self._check_budget(step, gemms, events)
        return events + self._repair(step, events)

    def _of_step(self, step: int, findings: Sequence[Finding], loss: float | None) -> list[GuardEvent]:
        events = []
        bad = [f for f in findings if f.what == "nonfinite" and not f.path]
        if bad:
            self.num_skipped += 1
            self.skipped_in_row += 1
            self.last_bad = step
            reasons = ", ".join(dict.fromkeys(f.reason for f in bad))
            reason = f"{reasons}: weights and optimizer stay as they were ({self.skipped_in_row} in a row)"
            events.append(GuardEvent(step=step, what="skip", reason=reason, rank=bad[0].rank))
            if self.skipped_in_row >= self.settings.max_skipped:
                self.stop = (
                    f"{self.skipped_in_row} steps in a row were not finite, the last one at step {step}: {reasons}"
                )
                events.append(GuardEvent(step=step, what="nonfinite", reason=f"the run stops: {self.stop}"))
        else:
            self.skipped_in_row = 0
            if loss is not None:
                begins, z, middle = self.spikes.add(loss)
                if begins:
                    self.last_bad = step
                    reason = f"loss {loss:.4g} is {z:.1f} deviations above the median {middle:.4g}"
                    events.append(GuardEvent(step=step, what="spike", reason=reason))
        return events

    def _fall_back(self, step: int, findings: Sequence[Finding], gemms: Mapping[Key, GuardedGemm]) -> list[GuardEvent]:
        by_key: dict[Key, list[Finding]] = {}
        for f in findings:
            if f.is_format and (f.path, f.gemm) in gemms:
                by_key.setdefault((f.path, f.gemm), []).append(f)
        events = []
        for key in sorted(by_key):
            found, history = by_key[key], self._gemms.setdefault(key, _History())
            history.last = step
            if step < history.quiet_until:
                continue
            history.found = [s for s in history.found if s > step - self.settings.window]
            history.found += [step]
            to = next_rung(gemms[key].now, self.eight_bit)
            severe = any(f.is_severe for f in found)
            if to is None or not (severe or len(history.found) >= self.settings.confirm):
                continue
            times = "" if severe else f", {len(history.found)} times within {self.settings.window} steps"
            reason = "; ".join(dict.fromkeys(f.reason for f in found)) + times
            events.append(_moved(step, "fallback", key, (gemms[key].now, to), reason))
            history.found, history.changed = [], step
            history.quiet_until = step + self.settings.cool_down
        return events

    def _recover(self, step: int, gemms: Mapping[Key, GuardedGemm], fallen: set[Key]) -> list[GuardEvent]:
        wait = self.settings.recover_after
        events: list[GuardEvent] = []
        for key in sorted(self._gemms) if wait else ():
            history, gemm = self._gemms[key], gemms.get(key)
            clean = step - max(history.changed, history.last, self.last_bad)
            if history.changed < 0 or gemm is None or key in fallen or clean < wait:
                continue
            to = rung_back(gemm.now, gemm.policy, self.eight_bit)
            if to is None or history.recoveries >= self.settings.max_recoveries:
                continue
            history.changed, history.recoveries, history.quiet_until = step, history.recoveries + 1, 0
            reason = f"{clean} clean steps (recovery {history.recoveries} of {self.settings.max_recoveries})"
            events.append(_moved(step, "recover", key, (gemm.now, to), reason))
        return events

    def _check_budget(
        self, step: int, gemms: Mapping[Key, GuardedGemm], events: Sequence[GuardEvent]
    ) -> list[GuardEvent]:
        now = {(e.path, e.gemm): e.after for e in events if e.what in ("fallback", "recover")}
        fallen = sum(g.share for key, g in gemms.items() if BITS[now.get(key, g.now)] > BITS[g.policy])
        share = fallen / (sum(g.share for g in gemms.values()) or 1.0)
        was, self.is_over_budget = self.is_over_budget, share > self.settings.budget
        if was or not self.is_over_budget:
            return []
        reason = (
            f"{share:.0%} of the low-precision flops have fallen back, more than the budget of "
            f"{self.settings.budget:.0%}: look at the run"
        )
        if self.settings.stop_at_budget:
            self.stop = reason
        return [GuardEvent(step=step, what="budget", reason=reason)]

    def _repair(self, step: int, events: Sequence[GuardEvent]) -> list[GuardEvent]:
        causes = [e for e in events if e.what in ("fallback", "skip", "spike")]
        if not causes or not self.settings.repair_steps or step < self.repair_until:
            return []
        self.repair_until = step + 1 + self.settings.repair_steps
        lr, count = self.settings.repair_lr, self.settings.repair_steps
        reason = f"after a {causes[0].what}: learning rate times {lr:g} for {count} steps"
        return [GuardEvent(step=step, what="repair", reason=reason)]

    def lr_scale(self, step: int) -> float:
        """What the learning rate of a step is multiplied by."""
        return self.settings.repair_lr if step < self.repair_until else 1.0

    def suspects(self, step: int) -> set[Key]:
        """GEMMs with a finding that waits for its confirmation."""
        start = step - self.settings.window
        return {key for key, h in self._gemms.items() if any(s > start for s in h.found) and step >= h.quiet_until}

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """JSON: with it a resumed run decides as the interrupted one would have."""
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in _STATE},
            "losses": list(self.spikes.losses),
            "in_spike": self.spikes.in_spike,
            "gemms": [[path, gemm, asdict(history)] for (path, gemm), history in sorted(self._gemms.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_schema(state, SCHEMA, "the guard's state")
        try:
            for name in _STATE:
                setattr(self, name, state[name])
            self.spikes.losses = [float(value) for value in state["losses"]][-self.settings.spike_window :]
            self.spikes.in_spike = int(state["in_spike"])
            self._gemms = {(path, gemm): _History(**history) for path, gemm, history in state["gemms"]}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not the guard's state: {type(error).__name__}: {error}") from error


def _moved(step: int, what: str, key: Key, formats: tuple[str, str], reason: str) -> GuardEvent:
    (path, gemm), (before, after) = key, formats
    return GuardEvent(step=step, what=what, path=path, gemm=gemm, before=before, after=after, reason=reason)


def changes(events: Sequence[GuardEvent], gemms: Mapping[Key, GuardedGemm]) -> dict[str, dict[Key, str | None]]:
    """By reason, what `Engine.override` gets to carry the events out; None is the policy's own format."""
    found: dict[str, dict[Key, str | None]] = {}
    for e in events:
        if e.what in ("fallback", "recover"):
            key = (e.path, e.gemm)
            back = e.what == "recover" and key in gemms and e.after == gemms[key].policy
            found.setdefault(f"guard, step {e.step}: {e.reason}", {})[key] = None if back else e.after
    return found
