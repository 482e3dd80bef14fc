"""Whole training steps (forward, backward, AdamW) of the race's models: Deepwell beside its peers, in one call.

Every entrant builds the same weights and trains on the same tokens. Where memory allows, all stay on the GPU and take
turns, so that drifting clocks hit all alike; else one is measured after the other, and the table says so. Times are
CUDA events between steps without a wait in between, medians over all turns; memory is the peak of an entrant's own
allocations. Each row carries the kernels that one of its steps ran, and the claims that they were checked against.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepwell.bench.environment import environment
from deepwell.bench.families import FamilyModel
from deepwell.bench.gradients import against_eager
from deepwell.bench.models import RaceModel
from deepwell.bench.peers import Peer
from deepwell.bench.ran import Claim, engine_claims, peer_claims, problems, shares, watch
from deepwell.bench.variants import Variant, runs_as
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.hardware.progress import bar
from deepwell.kernels.tune.timing import launched_ms
from deepwell.train.adamw.optimizer import AdamWDW

Entrant = Variant | Peer
Model = RaceModel | FamilyModel
OPTIMIZERS = ("auto", "torch", "dw")
WARMUP, SETTLING = 3, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """How to measure. `order` is "auto", "turns" or "one by one"."""

    device: str = "cuda"
    rounds: int = 5
    burst: int = 3  # timed steps of a turn, after one that is not timed
    optimizer: str = "auto"  # auto: adamw_dw for Deepwell, torch's fused AdamW for peers, bf16 moments both
    order: str = "auto"
    kernels: int = 40  # of the profile, the longest
    gradients: bool = False  # compare those of Deepwell's own with eager's, on one short sequence

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"--optimizer is {self.optimizer!r}; it takes {', '.join(OPTIMIZERS)}")
        if self.order not in ("auto", "turns", "one by one"):
            raise ConfigError(f"order is {self.order!r}; it takes auto, turns or one by one")
        if self.rounds < 1 or self.burst < 1:
            raise ConfigError(f"rounds is {self.rounds} and burst {self.burst}; both are at least 1")


@dataclass(slots=True, kw_only=True)
class StepRow:
    """One entrant's line of the table; `note` says why there is no time, or what to know about it."""

    model: str
    name: str
    about: str = ""
    ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    tokens_per_s: float | None = None
    peak_gb: float | None = None
    first_steps_s: float | None = None
    losses: list[float] = field(default_factory=list)
    runs_as: dict[str, int] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    idle_ms: float | None = None  # of a profiled step: the GPU waited for its next kernel
    kernels: list[tuple[str, int, float]] = field(default_factory=list)
    claims: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # of the engine
    gradients: dict[str, Any] | None = None  # against eager's
    note: str = ""


class Trainee:
    """An entrant that is built and warm: `step` trains once more."""

    def __init__(self, entrant: Entrant, model: Model, options: StepOptions, *, warmup: int = WARMUP) -> None:
        self.entrant, self.model, self.device = entrant, model, options.device
        self.row = StepRow(model=model.name, name=entrant.name)
        self.times: list[float] = []
        is_cuda = options.device == "cuda"
        before = torch.cuda.memory_allocated() if is_cuda else 0
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        net = model.build(options.device)
        self.example = model.example(options.device)
        self.engine = None
        if isinstance(entrant, Variant):
            self.engine = entrant.engine(net, model.capture_inputs(self.example))
            self.call: Callable[..., Any] = self.engine
            self.row.runs_as = runs_as(self.engine)
            self.row.about = f"Deepwell: {', '.join(self.row.runs_as)}"
        else:
            self.call = entrant.build(net)
            self.row.about = entrant.about
        self.optimizer = _optimizer(net, isinstance(entrant, Variant), options)
        self.row.losses = [self.step().item() for _ in range(warmup)]
        self.row.first_steps_s = time.perf_counter() - started
        for _ in range(SETTLING):  # until it is known whether CUDA graphs are replayed
            if self.engine is None or self.engine.deepwell.is_settled:
                break
            self.step()
        if is_cuda:
            torch.cuda.synchronize()
            self.row.peak_gb = (torch.cuda.max_memory_allocated() - before) / 1e9

    def step(self) -> Tensor:
        loss = self.model.loss_of(self.call, self.example)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def turn(self, burst: int) -> None:
        """One step to settle, then timed ones."""
        self.step()
        if self.device == "cuda":
            self.times += launched_ms(self.step, burst)
            return
        for _ in range(burst):
            started = time.perf_counter()
            self.step()
            self.times.append(1e3 * (time.perf_counter() - started))

    def finish(self, options: StepOptions) -> StepRow:
        """Medians, and on a GPU the proof that what the row says ran."""
        row = self.row
        row.ms, row.min_ms, row.max_ms = statistics.median(self.times), min(self.times), max(self.times)
        row.tokens_per_s = self.model.tokens / row.ms * 1e3
        if self.engine is not None:
            # Once more: what the first steps measured may have kept linears in bf16.
            row.runs_as, row.passes = runs_as(self.engine), dict(self.engine.deepwell.options.counts)
            row.notes = list(self.engine.deepwell.report().notes)
        if options.device == "cuda":
            kernels, row.idle_ms = watch(self.step, steps=options.burst + 1)
            row.kernels = [(one.name[:120], one.count, round(one.ms, 3)) for one in kernels[: options.kernels]]
            row.shares = shares(kernels)
            claims = self._claims()
            row.claims = [claim.text for claim in claims]
            row.problems = problems(claims, kernels)
        return row

    def _claims(self) -> list[Claim]:
        if isinstance(self.entrant, Peer):
            return peer_claims(self.entrant.uses_fp8)
        assert self.engine is not None
        claims = engine_claims(self.engine.deepwell.options.schemes, self.row.passes, self.model.head)
        if isinstance(self.optimizer, AdamWDW):
            claims.append(Claim("adamw_dw", r"_adamw\w*_kernel"))
        return claims


def _optimizer(net: torch.nn.Module, is_deepwell: bool, options: StepOptions) -> torch.optim.Optimizer:
    if options.optimizer == "dw" or (options.optimizer == "auto" and is_deepwell):
        return AdamWDW(net.parameters(), lr=1e-5, moments="bf16")
    # torch keeps moments in the parameters' dtype: bf16 here too.
    return torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True)


def fits_together(model: Model, entrants: int, free_bytes: int) -> bool:
    """Whether that many copies of weights and moments leave half of the memory for one step."""
    return entrants * model.resident_bytes() <= 0.5 * free_bytes


def run_steps(model: Model, entrants: Sequence[Entrant], options: StepOptions) -> dict[str, Any]:
    """Measure all entrants; the table as JSON: environment, options, rows in the order of the entrants."""
    if not entrants:
        raise ConfigError("no entrant: name some with --peers or --variants")
    turns = options.order == "turns"
    if options.order == "auto":
        free = torch.cuda.mem_get_info()[0] if options.device == "cuda" else 1 << 62
        turns = fits_together(model, len(entrants), free)
    with bar(model.name, len(entrants) * (options.rounds + 1)) as advance:
        measure = _in_turns if turns else _one_by_one
        # All entrants share the model's code, and each compiles it for itself.
        with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=1024):
            rows = measure(model, entrants, options, advance)
            if options.gradients:
                _free(options)
                _check_gradients(model, entrants, options, rows)
    return {
        "bench": "step",
        "environment": environment(),
        "model": model.name,
        "device": options.device,
        "batch": f"{model.batch} x {model.seq_len}",
        "tokens": model.tokens,
        "parameters": model.num_params,
        "order": "in turns" if turns else "one by one",
        "samples": options.rounds * options.burst,
        "rows": [asdict(row) for row in rows],
    }


def _in_turns(
    model: Model, entrants: Sequence[Entrant], options: StepOptions, advance: Callable[[float], None]
) -> list[StepRow]:
    torch._dynamo.reset()
    rows: list[StepRow] = []
    trainees: list[Trainee] = []
    for entrant in entrants:
        built = _build(entrant, model, options)
        if isinstance(built, Trainee):
            trainees.append(built)
            rows.append(built.row)
        else:
            rows.append(built)
        advance(1)
    for _ in range(options.rounds):
        for trainee in trainees:
            trainee.turn(options.burst)
            advance(1)
    for trainee in trainees:
        trainee.finish(options)
    return rows


def _one_by_one(
    model: Model, entrants: Sequence[Entrant], options: StepOptions, advance: Callable[[float], None]
) -> list[StepRow]:
    rows: list[StepRow] = []
    for entrant in entrants:
        rows += _in_turns(model, [entrant], options, advance)
        _free(options)
    return rows


def _check_gradients(model: Model, entrants: Sequence[Entrant], options: StepOptions, rows: Sequence[StepRow]) -> None:
    """Compare each engine's gradients with eager's, after the race: it must not touch what the race compiles."""
    for entrant, row in zip(entrants, rows, strict=True):
        if isinstance(entrant, Variant) and row.ms is not None:
            torch._dynamo.reset()
            found, wrong = against_eager(model, entrant, options.device)
            row.gradients = found
            row.problems += wrong
            _free(options)


def _build(entrant: Entrant, model: Model, options: StepOptions) -> Trainee | StepRow:
    """The entrant ready to run, or the row that says why it cannot."""
    try:
        return Trainee(entrant, model, options)
    except UnsupportedError as error:
        note = str(error)
    except torch.cuda.OutOfMemoryError as error:
        note = f"out of memory: {str(error).splitlines()[0]}"
    _free(options)
    return StepRow(model=model.name, name=entrant.name, note=note)


def _free(options: StepOptions) -> None:
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
