"""The watch over a run's numerics: measures each step cheaply, asks the guard, changes the engine's formats.

    watch.begin_step(step, batches, run)             a sample, where one is due: a few tokens, eagerly, some layers
    watch.before_clip()                              which layers' gradients are not finite, after a bad step
    ok = watch.after_backward(loss, grad_norm)       on the device, the same on every rank
    guarded_step(optimizer, ok)                      leaves everything as it is where ok is False
    events = watch.end_step(step)                    decides; formats change from the next step on

A step costs some ten small kernels and one copy to the host that nobody waits for: call `end_step` of a step after the
next one was launched and the device never idles. Its findings travel in one small tensor of which the largest values
over all ranks are taken, so that every rank decides the same.

A sample costs about a forward and backward of its tokens, eagerly. One is due every `sample_every` steps, or every
cost / sample_cost steps where that is more. `cost` is in steps: 4 times its tokens' share of the step's (eager kernels,
products that are computed twice), or on a GPU the time that the host took to launch a sample where that is more. One
layer is looked at each time, in turn; all of them at the first step and after a bad one; one with a finding again at
the next steps, until it is confirmed or has gone.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepwell.engine.engine import Engine
from deepwell.engine.fragile import floor_of
from deepwell.engine.overrides import Overrides, formats_of
from deepwell.engine.sampling import FIGURES, Sample, take_sample
from deepwell.errors import ConfigError
from deepwell.graph.ops import GroupedLinear, InputSizes, Linear
from deepwell.hardware.capability import capability_of
from deepwell.kernels.gemm.schemes import parse_scheme
from deepwell.precision.gemm_format import GEMMS, precision
from deepwell.precision.guard import (
    Finding,
    Guard,
    GuardedGemm,
    GuardEvent,
    GuardSettings,
    GuardStop,
    Key,
    changes,
    noisiest,
)
from deepwell.train.adamw.optimizer import AdamWDW
from deepwell.train.readback import HostCopy

SCHEMA = 1
Batch = Mapping[str, Tensor]
Run = Callable[[Batch], Tensor]
# A sample's time over its tokens' share of the step's.
_COST = 4.0
_NUM_VALUES = 5  # bad loss, bad norm, loss, norm, the sample's time in steps
# Tensors of a batch that may be cut along the tokens.
_TOKENWISE = {"input_ids", "labels", "shift_labels", "position_ids", "attention_mask", "token_type_ids"}


@dataclass(slots=True, kw_only=True)
class _Record:
    """What was measured in a step, on its way to the host."""

    values: HostCopy
    blamed: tuple[str, ...]  # paths whose gradients were looked at
    sample: Sample | None
    share: float
    schemes: Mapping[str, str]


class Watch:
    """Watches one engine's run. `reduce(tensor, op="max")` takes the largest over all ranks.

    `dp` ranks read different samples of a step. `repair` is called with a step's events when a repair begins (the
    settings' `repair_steps`); `lr_scale` is what the learning rate of the coming step is multiplied by.
    """

    def __init__(
        self,
        engine: Engine,
        guard: GuardSettings | None = None,
        reduce: Callable[..., Tensor] | None = None,
        *,
        rank: int | None = None,
        dp: int = 1,
        repair: Callable[[Sequence[GuardEvent]], None] | None = None,
    ) -> None:
        self.engine, self.settings = engine, guard or GuardSettings()
        self.guard = Guard(self.settings, eight_bit=eight_bit_of(engine))
        self.dp, self._repair, self._reduce = dp, repair, reduce
        has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = rank if rank is not None else torch.distributed.get_rank() if has_group else 0
        self.num_samples = 0
        self._cost, self._last_cost = 0.0, 0.0  # of samples, in steps; of the last one, on this rank
        self._step_began, self._step_seconds = 0.0, math.inf
        self._records: deque[_Record] = deque()
        self._wants_all, self._next, self._turn = True, 0, 0
        self._alert_until = 0  # gradients are looked at one by one before this step
        self._noise: dict[Key, float] = {}  # power of a wgrad's noise over that of the whole gradient
        self._dead: set[Key] = set()
        self._step = 0
        self._last_ok = True
        self._sample: tuple[Sample | None, float] = (None, 0.0)
        self._blame: tuple[tuple[str, ...], Tensor | None] = ((), None)
        self._known: tuple[Any, dict[Key, GuardedGemm]] = (None, {})
        self._by_layer: tuple[Any, list[list[str]]] = (None, [])
        self._experts = [site.path for site in engine.deepwell.ir.sites() if isinstance(site.op, GroupedLinear)]
        self.expert_loads: dict[str, list[int]] = {}  # of the step decided on last, where it had a sample

    # ---- a step ----

    def begin_step(self, step: int, batches: Sequence[Batch] = (), run: Run | None = None) -> None:
        """Before a step's forward: take a sample where one is due.

        `batches` are this rank's micro-batches of the step, `run` gives the mean loss of a smaller one by a call of the
        engine. All ranks must come here together. Without `run` formats are not judged, only loss and gradients.
        """
        now, has_sample = time.perf_counter(), self._sample[0] is not None
        if self._step_began and not has_sample:
            # The shortest one: the first steps compile, and others wait for a save.
            self._step_seconds = min(self._step_seconds, now - self._step_began)
        self._step_began = now
        self._step, self._sample, self._blame = step, (None, 0.0), ((), None)
        if not (self.settings.enabled and self.settings.sample_every and run is not None and batches):
            return
        schemes = self.engine.deepwell.bound.schemes
        is_due = self._wants_all or step >= self._next
        paths = self._due(step, schemes)
        if not paths and not (is_due and self._experts):
            return
        self._wants_all = False
        batch, share = part_of(batches, self.settings.sample_tokens)
        sample = take_sample(
            self.engine.deepwell.model, schemes, paths, lambda: run(batch), number=self.num_samples,
            loads_of=self._experts,
        )  # fmt: skip
        self._sample = (sample, share / self.dp)
        self._next = max(self._next, step + self.interval(share))
        self.num_samples += 1
        seconds = time.perf_counter() - now
        # 0 for the first one, which compiles kernels. On a CPU sizes alone decide: equal runs sample at the same steps.
        self._last_cost = seconds / self._step_seconds if self.engine.deepwell.device_type == "cuda" else 0.0

    def interval(self, share: float) -> int:
        """Steps between samples that have this share of a step's tokens."""
        cost = max(_COST * share, self._cost)
        return max(self.settings.sample_every, math.ceil(cost / self.settings.sample_cost))

    def before_clip(self) -> None:
        """After the backward, before gradients are clipped: for some steps after a bad one, find where it begins."""
        if not self.settings.enabled or self._step >= self._alert_until:
            return
        weights = dict(self.engine.deepwell.model.named_parameters(remove_duplicate=False))
        paths, norms = [], []
        for path in self.engine.deepwell.bound.schemes:
            weight = weights.get(path, weights.get(f"{path}.weight"))
            if weight is not None and weight.grad is not None:
                grad = weight.grad
                paths.append(path)
                norms.append(getattr(grad, "to_local", lambda g=grad: g)().norm())
        if paths:
            self._blame = (tuple(paths), torch.stack([norm.float() for norm in norms]))

    @torch.no_grad()
    def after_backward(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Whether the step may update the weights: a 0-d bool on the device, the same on every rank.

        `loss` and `grad_norm` are of the whole step, 0-d.
        """
        device = loss.device
        if not self.settings.enabled:
            return torch.ones((), dtype=torch.bool, device=device)
        pair = torch.stack([loss.detach().reshape(()).float(), grad_norm.detach().to(device).reshape(()).float()])
        cost = torch.full((1,), self._last_cost, device=device)
        parts = [(~pair.isfinite()).float() * (self.rank + 1), pair.nan_to_num(0.0, 0.0, 0.0), cost]
        blamed, norms = self._blame
        if norms is not None:
            parts.append((~norms.isfinite()).float() * (self.rank + 1))
        sample, share = self._sample
        if sample is not None:
            figures = sample.figures.clone()
            figures[:, FIGURES.index("low")] *= self.rank + 1
            figures[:, FIGURES.index("own")] *= self.rank + 1
            parts.append(figures.flatten())
        values = torch.cat(parts)
        values = values if self._reduce is None else self._reduce(values, op="max")
        record = _Record(
            values=HostCopy(values), blamed=blamed, sample=sample, share=share,
            schemes=self.engine.deepwell.bound.schemes,
        )  # fmt: skip
        self._records.append(record)
        return values[:2].sum() == 0

    def end_step(self, step: int, loss: float | None = None, grad_norm: float | None = None) -> list[GuardEvent]:
        """Decide on the oldest step that was not decided on, which `step` numbers, and carry it out.

        Raises GuardStop, a NumericsError, where the run cannot go on. `loss` and `grad_norm` stand in where the watch
        has none of its own (`after_backward` was not called).
        """
        if not self.settings.enabled:
            return []
        findings: list[Finding] = []
        self.expert_loads = {}
        if self._records:
            record = self._records.popleft()
            if record.sample is not None:
                self.expert_loads = {path: load.tolist() for path, load in record.sample.loads.items()}
            values = record.values.read()
            bad, (loss, grad_norm, cost) = values[:2], values[2:_NUM_VALUES]
            if record.sample is not None and cost:
                self._cost = min(self._cost, cost) if self._cost else cost  # other work only makes it longer
                self._next = max(self._next, step + self.interval(0.0))
            findings += self._of_step(step, bad)
            cut = _NUM_VALUES + len(record.blamed)
            findings += self._of_gradients(step, record.blamed, values[_NUM_VALUES:cut])
            findings += self._of_sample(step, record, values[cut:], grad_norm)
        else:
            findings += self._of_step(step, [float(not math.isfinite(v)) for v in (loss, grad_norm) if v is not None])
        is_bad = any(not f.path for f in findings)
        self._last_ok = not is_bad
        gemms = self.gemms()
        events = self.guard.decide(step, findings, gemms, loss=None if is_bad else loss)
        if is_bad or any(e.what == "spike" for e in events):
            self._wants_all = True
            self._alert_until = self._step + 1 + self.settings.window
        self._carry_out(events, gemms)
        if self._repair is not None and any(e.what == "repair" for e in events):
            self._repair(events)
        if self.guard.stop:
            raise GuardStop(self.guard.stop, events)
        return events

    # ---- what the trainer asks ----

    @property
    def healthy(self) -> bool:
        """Whether a checkpoint may be written now: the last step was sound, and the loss is not in a spike.

        Waits for the steps that were launched.
        """
        if not self.settings.enabled:
            return True
        launched = all(sum(record.values.read()[:2]) == 0 for record in self._records)
        return launched and self._last_ok and not self.guard.stop and not self.guard.spikes.in_spike

    @property
    def lr_scale(self) -> float:
        """What the learning rate of the coming step is multiplied by."""
        return self.guard.lr_scale(self._step + 1)

    def formats(self) -> dict[str, str]:
        """What each linear layer runs in now, "fwd|dgrad|wgrad" by path."""
        return formats_of(self.engine.deepwell.bound)

    def state_dict(self) -> dict[str, Any]:
        """JSON: formats that were changed, histories, and whose turn it is."""
        return {
            "schema": SCHEMA,
            "guard": self.guard.state_dict(),
            "overrides": self.engine.deepwell.overrides.to_dict(),
            "wants_all": self._wants_all,
            "next": self._next,
            "cost": self._cost,
            "turn": self._turn,
            "samples": self.num_samples,
            "alert_until": self._alert_until,
            "noise": [[path, gemm, value] for (path, gemm), value in sorted(self._noise.items())],
            "dead": sorted(list(key) for key in self._dead),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the run that wrote it: the engine has its formats from the next call on. {} changes nothing."""
        if not state:
            return
        if state.get("schema") != SCHEMA:
            raise ConfigError(f"the watch's state has schema {state.get('schema')!r}; this Deepwell reads {SCHEMA}")
        try:
            overrides = Overrides.from_dict(state["overrides"])
            guard = state["guard"]
            self._wants_all, self._next, self._turn = bool(state["wants_all"]), int(state["next"]), int(state["turn"])
            self.num_samples, self._alert_until = int(state["samples"]), int(state["alert_until"])
            self._noise = {(path, gemm): float(value) for path, gemm, value in state["noise"]}
            self._dead = {(path, gemm) for path, gemm in state["dead"]}
            self._cost = float(state.get("cost", 0.0))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not the watch's state: {type(error).__name__}: {error}") from error
        self.guard.load_state_dict(guard)
        self.engine.deepwell.set_overrides(overrides)
        self._records.clear()
        self._last_ok = True

    # ---- samples ----

    def _layers(self, schemes: Mapping[str, str]) -> list[list[str]]:
        """Paths with a scheme, layer by layer."""
        if self._by_layer[0] is not schemes:
            found: dict[Any, list[str]] = {}
            for site in self.engine.deepwell.ir.sites():
                if site.path in schemes:
                    found.setdefault(site.path if site.layer is None else site.layer, []).append(site.path)
            self._by_layer = (schemes, list(found.values()))
        return self._by_layer[1]

    def _due(self, step: int, schemes: Mapping[str, str]) -> list[str]:
        layers = self._layers(schemes)
        if not layers:
            return []
        if self._wants_all:
            return [path for paths in layers for path in paths]
        chosen: list[str] = []
        if step >= self._next:
            chosen += layers[self._turn % len(layers)]
            self._turn += 1
        suspects = {path for path, _ in self.guard.suspects(step)}
        return list(dict.fromkeys([*chosen, *(p for paths in layers if suspects & set(paths) for p in paths)]))

    # ---- from figures to findings ----

    def _of_step(self, step: int, bad: Sequence[float]) -> list[Finding]:
        names = ("loss", "gradient norm")
        return [
            Finding(step=step, what="nonfinite", reason=f"{name} is not finite", rank=int(flag) - 1)
            for name, flag in zip(names, bad, strict=False)
            if flag
        ]

    def _of_gradients(self, step: int, paths: Sequence[str], flags: Sequence[float]) -> list[Finding]:
        """Where the first gradient that is not finite came from, seen from the loss; nothing where all are so."""
        bad = [i for i, flag in enumerate(flags) if flag]
        if not bad or len(bad) == len(paths):
            return []
        rank = int(max(flags)) - 1
        if len(bad) == 1:
            only = paths[bad[0]]
            reason = "gradient of this weight alone is not finite"
            return [Finding(step=step, what="nonfinite", path=only, gemm="wgrad", reason=reason, rank=rank)]
        if bad[-1] == len(paths) - 1:
            return []
        # Before this linear gradients are finite and behind it they are not: its product, or that of one beside it.
        first = paths[bad[-1] + 1]
        width = {site.path: getattr(site.op, "k", 0) for site in self.engine.deepwell.ir.sites()}
        beside = [
            p
            for p in paths[bad[-1] + 1 :]
            if p.rpartition(".")[0] == first.rpartition(".")[0] and width.get(p) == width.get(first)
        ]
        reason = f"gradients from {paths[bad[-1]]} on are not finite"
        return [Finding(step=step, what="nonfinite", path=p, gemm="dgrad", reason=reason, rank=rank) for p in beside]

    def _of_sample(self, step: int, record: _Record, values: Sequence[float], grad_norm: float) -> list[Finding]:
        if record.sample is None:
            return []
        findings: list[Finding] = []
        noise: dict[Key, float] = {}
        width = len(FIGURES)
        for number, (path, gemm) in enumerate(record.sample.rows):
            row = dict(zip(FIGURES, values[number * width : (number + 1) * width], strict=True))
            if not row["seen"]:
                continue
            findings += self._of_gemm(step, (path, gemm), record.schemes[path], row)
            if gemm == "wgrad" and not row["own"] and grad_norm > 0:
                noise[path, gemm] = row["power"] * record.share / (grad_norm * grad_norm)
        if findings:
            return findings  # a gradient of spoilt products is no measure of noise
        self._noise |= noise
        now = {key for key, gemm in self.gemms().items() if gemm.now != "bf16"}
        self._noise = {key: value for key, value in self._noise.items() if key in now}
        loud = noisiest(self._noise, 1.0, self.settings.noise_ratio)
        ratio = 1 / math.sqrt(sum(self._noise.values()) or 1.0)
        reason = f"gradient norm is {ratio:.2f} times its quantization noise, below {self.settings.noise_ratio:.2f}"
        return [Finding(step=step, what="noise", path=p, gemm=g, reason=reason) for p, g in loud]

    def _of_gemm(self, step: int, key: Key, scheme: str, row: Mapping[str, float]) -> list[Finding]:
        path, gemm = key
        base = Finding(step=step, what="nonfinite", path=path, gemm=gemm, reason="")
        how, name = getattr(parse_scheme(scheme), gemm), scheme.split("|")[GEMMS.index(gemm)]
        if row["own"]:
            reason = "not finite in the model's own dtype"
            return [replace(base, reason=reason, rank=int(row["own"]) - 1, is_format=False)]
        if row["low"]:
            reason = f"{name} gives NaN or infinity out of finite numbers"
            return [replace(base, reason=reason, rank=int(row["low"]) - 1, is_severe=True)]
        if row["dead"]:
            if key in self._dead:
                return []
            self._dead.add(key)
            reason = "the product is zero throughout, in the model's own dtype too: a dead layer"
            return [replace(base, what="underflow", reason=reason, is_format=False)]
        self._dead.discard(key)
        found = []
        decibels = -10 * math.log10(row["noise"]) if row["noise"] > 0 else math.inf
        limit = floor_of(how) - self.settings.sqnr_margin_db
        if decibels < limit:
            found.append(replace(base, what="sqnr", reason=f"{decibels:.1f} dB in {name}, below {limit:g} dB"))
        for what, most in (("saturation", self.settings.saturation), ("underflow", self.settings.underflow)):
            share = row["saturated" if what == "saturation" else "underflow"]
            if share > most:
                happened = "are clipped" if what == "saturation" else "become zero"
                found.append(replace(base, what=what, reason=f"{share:.1%} of an operand {happened} in {name}"))
        return found

    # ---- the engine ----

    def gemms(self) -> dict[Key, GuardedGemm]:
        """Every GEMM that the policy runs in low precision at this step, with its format now."""
        engine = self.engine
        if self._known[0] is engine.deepwell.bound:
            return self._known[1]
        policy = engine.deepwell.policy.resolve(engine.deepwell.ir, engine.deepwell.step)
        work = InputSizes(batch=1, seq_len=4096)
        sizes = {
            site.path: float(site.op.rows_at(work) * site.op.k * site.op.n)
            for site in engine.deepwell.ir.sites()
            if isinstance(site.op, (Linear, GroupedLinear))
        }
        found = {}
        for row in engine.deepwell.bound.bindings:
            asked = policy[row.path][row.gemm]
            if asked.precision.is_low:
                now = "bf16" if row.scheme == "bf16" else row.format
                found[row.path, row.gemm] = GuardedGemm(now=now, policy=asked.format, share=sizes[row.path])
        self._known = (engine.deepwell.bound, found)
        return found

    def _carry_out(self, events: Sequence[GuardEvent], gemms: Mapping[Key, GuardedGemm]) -> None:
        overrides, engine = self.engine.deepwell.overrides, self.engine
        known = engine.deepwell.policy.resolve(engine.deepwell.ir, engine.deepwell.step) if events else None
        for reason, asked in changes(events, gemms).items():
            assert known is not None
            named = {key: None if name is None else precision(name) for key, name in asked.items()}
            overrides = overrides.changed(named, reason, known)
        if overrides is not engine.deepwell.overrides:
            engine.deepwell.set_overrides(overrides)


def eight_bit_of(engine: Engine) -> str:
    """The ladder's middle rung on the engine's device: MXFP8 where it is native or emulated, else FP8."""
    if engine.deepwell.device_type != "cuda":
        return "mxfp8"
    native = capability_of(torch.cuda.get_device_capability()).native_formats
    return "mxfp8" if "mxfp8" in native else "fp8"


def guarded_step(optimizer: torch.optim.Optimizer, ok: Tensor) -> None:
    """`optimizer.step()`, unless `ok` is False: then weights and the optimizer's state stay as they are, bit for bit.

    Decided on the device where the optimizer can: AdamWDW that skips by itself, torch's fused ones. For all others, and
    for sharded parameters, the host reads `ok`, which waits for the backward.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    is_sharded = any(hasattr(p, "to_local") for p in params)
    group = optimizer.param_groups[0]
    if not is_sharded and params:
        if isinstance(optimizer, AdamWDW) and (group["skip_nonfinite"] or group["clip_norm"] is not None):
            grad = params[0].grad
            assert grad is not None
            # NaN into one gradient: its norm is not finite and the optimizer skips. Times one changes nothing.
            grad.view(-1)[:1].mul_(torch.where(ok, 1.0, math.nan).to(grad.dtype))
            optimizer.step()
            return
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale, optimizer.found_inf = None, (~ok).float()  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            return
    if bool(ok):
        optimizer.step()


def part_of(batches: Sequence[Batch], tokens: int) -> tuple[dict[str, Tensor], float]:
    """About `tokens` tokens of the first micro-batch, and their share of all micro-batches."""
    first = batches[0]
    main = "input_ids" if "input_ids" in first else next(iter(first))
    ids, total = first[main], sum(batch[main].numel() for batch in batches)
    b, s = ids.shape[0], ids.shape[1] if ids.dim() > 1 else 1
    rows = max(1, min(b, tokens // max(s, 1)))
    is_plain = all(t.dim() == 2 and tuple(t.shape) == (b, s) and name in _TOKENWISE for name, t in first.items())
    columns = min(s, tokens) if is_plain else s
    part = {
        name: t[:rows, :columns] if is_plain else t[:rows] if t.dim() and t.shape[0] == b else t
        for name, t in first.items()
    }
    for name in {"labels", "shift_labels"} & set(part) if is_plain else ():
        targets = part[name][:, 1:] if name == "labels" else part[name]
        if not bool((targets != -100).any()):
            part[name] = part[main]  # nothing is predicted here, and the mean of nothing is NaN
    return part, part[main].numel() / total
