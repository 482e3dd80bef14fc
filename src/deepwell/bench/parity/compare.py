"""Does a precision policy cost accuracy? The same training run in bf16 and in the policy, pair by pair, over seeds.

Runs that are finished stand in one JSON file, those that are not have a checkpoint beside it; calling again goes on
where the last call stopped, also after a kill. The verdict:

    gap      held-out loss over bf16's of the same seed, minus one; of the two evaluations (in the run's own precision,
             and of its weights in bf16) the worse one
    spread   (largest - smallest) / mean of bf16's held-out loss over seeds
    pass          mean gap <= bound
    fail          mean gap > bound, and not within the spread
    cannot tell   spread > bound, and the gap within it
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepwell.bench.corpus import Corpus
from deepwell.bench.environment import environment
from deepwell.bench.parity.run import BASELINE, Pace, PairSetup, ParityRun, RunRecord
from deepwell.bench.variants import Variant
from deepwell.errors import ConfigError
from deepwell.files import write_whole

SCHEMA = 1
BOUND = 0.0025


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmVerdict:
    """What the pairs of one arm say. `spread` is None where one seed of bf16 is all there is."""

    arm: str
    tokens: int
    seeds: tuple[int, ...]
    gaps: tuple[float, ...]
    gaps_bf16: tuple[float, ...]  # of the same weights evaluated in bf16
    bound: float
    spread: float | None

    @property
    def gap(self) -> float:
        """The worse of both evaluations; NaN where a loss was NaN or infinite, which `max` would pass over."""
        means = (statistics.fmean(self.gaps), statistics.fmean(self.gaps_bf16))
        return max(means) if all(map(math.isfinite, means)) else math.nan

    @property
    def answer(self) -> str:
        if math.isnan(self.gap):
            return "fail"
        if self.spread is not None and self.spread > self.bound and abs(self.gap) <= self.spread:
            return "cannot tell"
        return "pass" if self.gap <= self.bound else "fail"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gap": self.gap, "answer": self.answer}

    def __str__(self) -> str:
        pairs = ", ".join(f"{seed}: {gap:+.3%}" for seed, gap in zip(self.seeds, self.gaps, strict=True))
        line = (
            f"{self.answer:11s} {self.arm} at {self.tokens / 1e6:.0f} M tokens: mean gap {self.gap:+.3%} "
            f"(bound {self.bound:.2%}); own precision {statistics.fmean(self.gaps):+.3%} [{pairs}], "
            f"weights in bf16 {statistics.fmean(self.gaps_bf16):+.3%}; "
        )
        if math.isnan(self.gap):
            return line + "a held-out loss is NaN or infinite"
        if self.spread is None:
            return line + "one bf16 seed: its spread is not known"
        line += f"bf16's spread over seeds {self.spread:.3%}"
        if self.answer == "cannot tell":
            line += ", larger than the bound and the gap: the test cannot tell the two apart"
        return line


@dataclass(slots=True, kw_only=True)
class Results:
    path: Path
    records: list[RunRecord]
    corpora: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Results:
        """The results so far; empty where the file is not there yet. Raises ConfigError where it is no such file."""
        if not path.exists():
            return cls(path=path, records=[], corpora={})
        try:
            data = json.loads(path.read_bytes())
            if data["schema"] != SCHEMA:
                raise ConfigError(f"schema {data['schema']!r}, and this Deepwell reads {SCHEMA}")
            if not isinstance(data["corpora"], dict):
                raise ConfigError("corpora is no object")
            return cls(path=path, records=[RunRecord.from_dict(run) for run in data["runs"]], corpora=data["corpora"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no parity result ({error}): give --out another folder") from error

    @classmethod
    def open(cls, folder: Path) -> Results:
        """The results in a folder that is made where needed. Raises ConfigError where they could not be kept there."""
        try:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(f"--out: {folder} is no folder to write to ({error}): give another") from error
        return cls.read(folder / "parity.json")

    def find(self, key: str) -> RunRecord | None:
        return next((record for record in self.records if record.key == key), None)

    def put(self, record: RunRecord) -> None:
        """Add or replace a run and write the file, whole or not at all."""
        self.records = [*(old for old in self.records if old.key != record.key), record]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(self.to_dict(), indent=1))

    def verdicts(self, bound: float = BOUND) -> list[ArmVerdict]:
        """One for each arm and setup that has finished pairs."""
        done = [record for record in self.records if record.is_done]
        base = {(_group(record), record.seed): record for record in done if record.arm == BASELINE}
        spreads = {group: _spread([base[key] for key in base if key[0] == group]) for group, _ in base}
        verdicts = []
        for group in dict.fromkeys(_group(record) for record in done):
            for arm in dict.fromkeys(r.arm for r in done if r.arm != BASELINE and _group(r) == group):
                runs = {r.seed: r for r in done if r.arm == arm and _group(r) == group and (group, r.seed) in base}
                if not runs:
                    continue
                pairs = [(runs[seed], base[group, seed]) for seed in sorted(runs)]
                verdicts.append(
                    ArmVerdict(
                        arm=arm,
                        tokens=pairs[0][0].setup.tokens,
                        seeds=tuple(sorted(runs)),
                        gaps=tuple(_gap(run, other, "own") for run, other in pairs),
                        gaps_bf16=tuple(_gap(run, other, "bf16") for run, other in pairs),
                        bound=bound,
                        spread=spreads[group],
                    )
                )
        return verdicts

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "corpora": self.corpora,
            "verdicts": [verdict.to_dict() for verdict in self.verdicts()],
            "runs": [record.to_dict() for record in self.records],
        }


def _group(record: RunRecord) -> str:
    """Equal for runs that may be compared: everything but arm and seed."""
    return json.dumps([asdict(record.setup), record.data], sort_keys=True)


def _gap(run: RunRecord, base: RunRecord, evaluation: str) -> float:
    loss, of_base = run.final[evaluation], base.final[evaluation]
    return loss / of_base - 1 if _is_loss(of_base) else math.nan  # over an infinite loss everything would pass


def _is_loss(value: float) -> bool:
    return 0 < value < math.inf


def _spread(records: Sequence[RunRecord]) -> float | None:
    losses = [record.final["own"] for record in records if _is_loss(record.final["own"])]
    return (max(losses) - min(losses)) / statistics.fmean(losses) if len(losses) > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedRuns:
    """Which runs are wanted: every arm beside bf16, for every seed."""

    arms: tuple[Variant, ...]
    seeds: tuple[int, ...]
    setup: PairSetup
    device: str
    cuda_graphs: bool = False  # changes no number, and is not for emulation

    def __post_init__(self) -> None:
        arms = {Variant.parse(BASELINE), *self.arms}
        if len({arm.name for arm in arms}) < len(arms):
            names = ", ".join(arm.name for arm in self.arms)
            raise ConfigError(f"--arms: two arms have one name, or that of the baseline {BASELINE}: {names}")

    def runs(self) -> list[tuple[Variant, int]]:
        """Pair by pair, so that a sitting that ends early leaves whole pairs."""
        arms = dict.fromkeys((Variant.parse(BASELINE), *self.arms))
        return [(arm, seed) for seed in self.seeds for arm in arms]


def run_plan(
    plan: WantedRuns, corpus: Corpus, folder: Path, pace: Pace, say: Callable[[str], None] = lambda _line: None
) -> tuple[Results, int]:
    """Do what is not done yet; the results, and how many runs are left where the deadline came first."""
    results = Results.open(folder)
    results.corpora[corpus.fingerprint] = corpus.to_dict()
    wanted = plan.runs()
    # All of them first: a policy that cannot be read is an error before the first run, not after it.
    keys = [RunRecord.of(variant, seed, plan.setup, corpus).key for variant, seed in wanted]
    for number, (variant, seed) in enumerate(wanted):
        earlier = results.find(keys[number])
        if earlier is not None and earlier.is_done:
            say(f"{variant.name} seed {seed}: done earlier, held-out {_held(earlier)}")
            continue
        if pace.deadline is not None and time.perf_counter() > pace.deadline:
            return results, len(wanted) - number
        record, is_done = _run_one(plan, variant, seed, corpus, folder, pace)
        results.put(record)
        if not is_done:
            say(f"{variant.name} seed {seed}: stopped after {record.steps_done} of {plan.setup.steps} steps")
            return results, len(wanted) - number
        rate = plan.setup.steps * plan.setup.batch * plan.setup.seq_len / record.seconds
        ways = ", ".join(f"{count} GEMMs {way}" for way, count in record.runs_as.items())
        speed = f"{record.seconds:.0f} s, {rate:,.0f} tokens/s"
        say(f"{variant.name} seed {seed}: held-out {_held(record)}, {speed}; {ways}")
    return results, 0


def _held(record: RunRecord) -> str:
    return f"{record.final['own']:.4f} ({record.final['bf16']:.4f} in bf16)"


def _run_one(
    plan: WantedRuns, variant: Variant, seed: int, corpus: Corpus, folder: Path, pace: Pace
) -> tuple[RunRecord, bool]:
    import torch

    torch._dynamo.reset()
    run = ParityRun(variant, seed, plan.setup, corpus, plan.device, cuda_graphs=plan.cuda_graphs)
    for arm in plan.arms:
        # Of all of them before one is trained: an arm that this device lacks is not found out after hours of bf16.
        arm.engine_of(run.ir)
    digest = hashlib.sha256(run.record.key.encode()).hexdigest()[:12]
    checkpoint = folder / "checkpoints" / f"{Path(variant.name).stem}-{seed}-{digest}.safetensors"
    if checkpoint.is_file():
        run.load(checkpoint)
    run.record.machine = environment()
    is_done = run.train(pace, lambda one: one.save(checkpoint))
    if is_done:
        checkpoint.unlink(missing_ok=True)
    return run.record, is_done
