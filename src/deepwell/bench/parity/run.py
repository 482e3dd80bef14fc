"""One run of a parity test: a model trained on the corpus in one precision, resumable, with its held-out loss.

Everything that a pair shares comes from the seed and the setup: weights (drawn on the CPU), order of the data,
schedule, optimizer (adamw_dw with fp32 master weights and fp32 moments, so that the format of the GEMMs is all that
differs). Nothing waits for the device between two log lines. A checkpoint is one file, written whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deepwell.bench.corpus import Corpus
from deepwell.bench.llama import Llama, LlamaConfig
from deepwell.bench.variants import Variant, runs_as
from deepwell.errors import ConfigError
from deepwell.files import whole_file
from deepwell.graph.capture import capture
from deepwell.hardware.progress import bar
from deepwell.train.adamw.optimizer import AdamWDW
from deepwell.train.optimizers import parameter_groups


def _model(width: int, heads: int, hidden: int, layers: int, vocab: int, experts: int = 0) -> LlamaConfig:
    return LlamaConfig(
        width=width, num_heads=heads, num_kv_heads=heads, hidden=hidden, num_layers=layers, vocab=vocab, experts=experts
    )


MODELS = {
    "768-12l": _model(768, 12, 2048, 12, 32768),  # 135M parameters, 85M of them in the layers
    "384-6l": _model(384, 6, 1024, 6, 32768),  # for many runs: an eighth of the layers' work and of the time
    "moe-384-6l": _model(384, 6, 512, 6, 32768, 16),  # a token meets two experts: 60M parameters in layers, 11M at work
    "moe-128-4l": _model(128, 4, 128, 4, 4096, 8),  # for a CPU: 2.1M parameters in the layers
    "moe-tiny": _model(64, 2, 64, 2, 512, 4),
    "tiny": _model(64, 2, 128, 2, 512),
}
BASELINE = "bf16"
MAX_EPOCHS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSetup:
    model: str = "768-12l"
    tokens: int = 50_000_000
    batch: int = 32
    seq_len: int = 1024
    lr: float = 3e-4
    warmup: float = 0.1  # share of the steps
    final_lr: float = 0.1  # share of lr at the end of the cosine
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    evals: int = 5  # how often the held-out loss is taken on the way, on a quarter of its tokens
    eval_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"--model is {self.model!r}; parity has {', '.join(MODELS)}")
        for name in ("tokens", "batch", "seq_len", "eval_tokens"):
            _check_whole(name, getattr(self, name), 1)
        _check_whole("evals", self.evals, 0)
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"--lr is {self.lr}; it must be a number above 0")
        if not 0 <= self.warmup <= 1:
            raise ConfigError(f"--warmup is {self.warmup}; it is a share of the steps, 0 to 1")

    @property
    def steps(self) -> int:
        return max(1, math.ceil(self.tokens / (self.batch * self.seq_len)))

    def learning_rates(self) -> Tensor:
        """The rate of every step: linear warm-up, then a cosine down to `final_lr`."""
        steps, warm = self.steps, max(1, round(self.warmup * self.steps))
        at = torch.arange(steps, dtype=torch.float64)
        cosine = 0.5 * (1 + torch.cos(math.pi * (at - warm).clamp(min=0) / max(1, steps - warm)))
        return self.lr * torch.minimum((at + 1) / warm, self.final_lr + (1 - self.final_lr) * cosine)


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be a whole number of at least {least}")


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """What a run has to show so far; kept in its checkpoint and in the results."""

    arm: str
    seed: int
    setup: PairSetup
    data: str  # the corpus's fingerprint
    policy: dict[str, Any] = field(default_factory=dict)
    steps_done: int = 0
    seconds: float = 0.0
    runs_as: dict[str, int] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    losses: list[tuple[int, float]] = field(default_factory=list)  # (step, mean loss since the last entry)
    held: list[dict[str, float]] = field(default_factory=list)  # step, tokens, own, bf16
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Equal for runs that are the same run."""
        return json.dumps([self.arm, self.policy, self.seed, asdict(self.setup), self.data], sort_keys=True)

    @classmethod
    def of(cls, variant: Variant, seed: int, setup: PairSetup, corpus: Corpus) -> RunRecord:
        policy = variant.policy().to_dict()
        return cls(arm=variant.name, seed=seed, setup=setup, data=corpus.fingerprint, policy=policy)

    @property
    def is_done(self) -> bool:
        return self.steps_done == self.setup.steps and bool(self.held) and self.held[-1]["step"] == self.steps_done

    @property
    def final(self) -> dict[str, float]:
        return self.held[-1]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "done": self.is_done}

    @classmethod
    def from_dict(cls, data: Any) -> RunRecord:
        """The record that `to_dict` wrote, read back from JSON. Raises ConfigError where it is something else."""
        try:
            rest = {key: value for key, value in data.items() if key not in ("done", "setup")}
            rest["losses"] = [(int(step), float(loss)) for step, loss in data["losses"]]
            record = cls(setup=PairSetup(**data["setup"]), **rest)
            wrong = [name for name, kind in _KINDS.items() if not isinstance(getattr(record, name), kind)]
            if wrong or not 0 <= record.steps_done <= record.setup.steps:
                raise ConfigError(f"wrong {', '.join(wrong) or 'steps_done'}")
            if not all(isinstance(entry[name], int | float) for entry in record.held for name in _OF_HELD):
                raise ConfigError("wrong held")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"not a parity run: {type(error).__name__}: {error}") from error
        return record


# What JSON must hold where later code relies on it.
_KINDS: dict[str, Any] = {
    "arm": str,
    "seed": int,
    "data": str,
    "policy": dict,
    "steps_done": int,
    "seconds": int | float,
    "runs_as": dict,
    "held": list,
}
_OF_HELD = ("step", "own", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When to log, to save and to stop. `deadline` is on time.perf_counter's clock."""

    log_every: int = 50
    checkpoint_every: int = 500
    deadline: float | None = None

    def __post_init__(self) -> None:
        for name in ("log_every", "checkpoint_every"):
            _check_whole(name, getattr(self, name), 1)


class ParityRun:
    """A run in progress. `train` goes on until it is done or the deadline comes, whatever happened before."""

    def __init__(
        self, variant: Variant, seed: int, setup: PairSetup, corpus: Corpus, device: str, *, cuda_graphs: bool = False
    ) -> None:
        self.variant, self.setup, self.device = variant, setup, torch.device(device)
        self.record = RunRecord.of(variant, seed, setup, corpus)
        # In 16 bits; torch indexes int16, not uint16.
        arrays = (np.load(path).view(np.int16) for path in (corpus.train, corpus.held))
        self.tokens, self.held = (torch.from_numpy(array).to(self.device) for array in arrays)
        if len(self.held) <= setup.seq_len:
            raise ConfigError(
                f"--seq-len is {setup.seq_len}, but only {len(self.held):,} tokens of the text are held out: give more "
                "text or shorter sequences"
            )
        self.starts = _order(len(self.tokens), setup, seed).to(self.device)
        self.model = _build(setup, corpus.vocab, seed, self.device)
        self.ir = ir = capture(self.model, self._batch(0))
        self.engine = variant.engine_of(ir)
        self.engine.deepwell.options.cuda_graphs = (
            "cg" in variant.words or cuda_graphs
        ) and "emulated" not in variant.words
        # Evaluation has graphs of its own: it must not disturb what is recorded for training.
        self.eval_own = variant.without("cg").engine_of(ir)
        self.eval_bf16 = Variant.parse(BASELINE).engine_of(ir)
        self.eval_own.deepwell.options.cuda_graphs = self.eval_bf16.deepwell.options.cuda_graphs = False
        for engine in (self.engine, self.eval_own, self.eval_bf16):
            # Accuracy is the policy's: no linear may stay in bf16 because that was faster here and now.
            engine.deepwell.options.measure = None
        self.rates = setup.learning_rates().to(self.device, torch.float32)
        self.lr = self.rates[0].clone()
        self.optimizer = _optimizer(self.model, self.lr, setup)
        self.record.runs_as = runs_as(self.engine)
        self._pending = torch.zeros((), device=self.device)
        self._num_pending = 0

    def train(self, pace: Pace, save: Callable[[ParityRun], None]) -> bool:
        """Train on; `save` is called at every checkpoint. Whether the run is done."""
        record, started, before = self.record, time.perf_counter(), self.record.seconds
        evals = _eval_steps(self.setup)
        label = f"{record.arm} seed {record.seed}"
        with _precise_products(self.variant), bar(label, self.setup.steps) as advance:
            advance(record.steps_done)
            while record.steps_done < self.setup.steps:
                self._step(record.steps_done)
                record.steps_done += 1
                advance(1)
                done = record.steps_done
                if done % pace.log_every == 0 or done in evals:
                    self._log()
                if done in evals:
                    self._evaluate(self.setup.eval_tokens if done == self.setup.steps else self.setup.eval_tokens // 4)
                record.seconds = before + time.perf_counter() - started
                late = pace.deadline is not None and time.perf_counter() > pace.deadline
                if done < self.setup.steps and (late or done % pace.checkpoint_every == 0):
                    save(self)
                if late:
                    break
        record.passes = dict(self.engine.deepwell.options.counts)
        return record.is_done

    def _step(self, number: int) -> None:
        self.lr.copy_(self.rates[number])
        loss = self.engine(*self._batch(number))
        loss.backward()
        self._pending += loss.detach()
        self._num_pending += 1
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _batch(self, number: int) -> tuple[Tensor, Tensor]:
        first = number * self.setup.batch
        return _windows(self.tokens, self.starts[first : first + self.setup.batch], self.setup.seq_len)

    def _log(self) -> None:
        if self._num_pending:
            self.record.losses.append((self.record.steps_done, self._pending.item() / self._num_pending))
            self._pending.zero_()
            self._num_pending = 0

    def _evaluate(self, tokens: int) -> None:
        """The held-out loss in the run's own precision and with the same weights in bf16."""
        bf16 = self._held_out(self.eval_bf16, tokens)
        runtime = self.eval_own.deepwell
        is_bf16 = not runtime.bound.schemes and runtime.options.fuse_head
        own = bf16 if is_bf16 else self._held_out(self.eval_own, tokens)
        self.record.held.append({"step": self.record.steps_done, "own": own[0], "bf16": bf16[0], "tokens": own[1]})

    @torch.no_grad()
    def _held_out(self, engine: Any, tokens: int) -> tuple[float, int]:
        seq_len, batch = self.setup.seq_len, self.setup.batch
        windows = min((len(self.held) - 1) // seq_len, max(1, math.ceil(tokens / seq_len)))
        batch = min(batch, windows)
        count = windows // batch
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number in range(count):
            starts = torch.arange(number * batch, (number + 1) * batch, device=self.device) * seq_len
            total += engine(*_windows(self.held, starts, seq_len))
        return total.item() / count, count * batch * seq_len

    # ---- checkpoints ----

    def save(self, path: Path) -> None:
        """Weights, optimizer, random state and the record in one file, whole or not at all."""
        tensors = {f"model.{name}": _stored(tensor) for name, tensor in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{key}": _stored(value) for key, value in state.items()}
        tensors["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        tensors["pending"] = _stored(self._pending)
        facts = {"record": json.dumps(self.record.to_dict()), "num_pending": str(self._num_pending)}
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            save_file(tensors, partial, metadata=facts)

    def load(self, path: Path) -> None:
        """Go on where `save` left off. Raises ConfigError where the file is another run's or damaged."""
        try:
            with safe_open(path, framework="pt") as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
            record = RunRecord.from_dict(json.loads(facts["record"]))
            num_pending = int(facts["num_pending"])
            if record.key == self.record.key:
                self._check_tensors(tensors, record.steps_done)
                torch.set_rng_state(tensors["random.cpu"])
        except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"checkpoint {path} cannot be read ({error}): delete it to start that run anew"
            ) from error
        if record.key != self.record.key:
            raise ConfigError(f"checkpoint {path} is of another run: delete it to start this one anew")
        self.model.load_state_dict(_under("model.", tensors))
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _under("optimizer.", tensors).items():
            number, _, key = name.partition(".")
            state.setdefault(int(number), {})[key] = tensor
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        if "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"])
        self._pending.copy_(tensors["pending"])
        self._num_pending = num_pending
        record.runs_as = self.record.runs_as
        self.record = record

    def _check_tensors(self, tensors: dict[str, Tensor], steps_done: int) -> None:
        """Raise ConfigError where a tensor is missing, or is none that `save` writes after so many steps."""
        wanted = {f"model.{name}": _kind(tensor) for name, tensor in self.model.state_dict().items()}
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        for number, param in enumerate(params if steps_done else ()):
            wanted[f"optimizer.{number}.step"] = (torch.Size(), torch.int64)
            for key in ("exp_avg", "exp_avg_sq", "master"):
                wanted[f"optimizer.{number}.{key}"] = (param.shape, torch.float32)
        wanted |= {"random.cpu": _kind(torch.get_rng_state()), "pending": _kind(self._pending)}
        # A run may have begun on another kind of device.
        found = {name: _kind(tensor) for name, tensor in tensors.items() if name != "random.cuda"}
        wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        if wrong:
            raise ConfigError(f"{wrong[0]} is missing or not this run's")


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _build(setup: PairSetup, vocab: int, seed: int, device: torch.device) -> Llama:
    """The model in bf16; weights are drawn in fp32 on the CPU, so that every device starts from the same."""
    config = MODELS[setup.model]
    sizes = {**asdict(config), "vocab": -(-vocab // 128) * 128, "max_positions": max(setup.seq_len, 128)}
    torch.manual_seed(seed)
    return Llama(LlamaConfig(**sizes)).init_weights(seed).to(device, torch.bfloat16)


def _optimizer(model: Llama, lr: Tensor, setup: PairSetup) -> AdamWDW:
    return AdamWDW(
        parameter_groups(model.named_parameters(), setup.weight_decay),
        lr=lr,
        betas=(0.9, 0.95),
        master_weights="fp32",
        moments="fp32",
        stochastic_rounding=False,
        clip_norm=setup.clip_norm,
    )


def _windows(tokens: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    rows = tokens[starts[:, None] + torch.arange(seq_len + 1, device=tokens.device)].long() & 0xFFFF
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _order(num_tokens: int, setup: PairSetup, seed: int) -> Tensor:
    """Where each sequence of the run begins: windows side by side, each epoch in an order of its own."""
    windows = (num_tokens - 1) // setup.seq_len
    needed = setup.steps * setup.batch
    if windows == 0 or needed > MAX_EPOCHS * windows:
        raise ConfigError(
            f"--tokens is {setup.tokens:,}, but the text has {windows * setup.seq_len:,} and is read at most "
            f"{MAX_EPOCHS} times: give more text or fewer tokens"
        )
    epochs = math.ceil(needed / windows)
    generators = (torch.Generator().manual_seed(1_000_003 * seed + epoch) for epoch in range(epochs))
    return torch.cat([torch.randperm(windows, generator=one) for one in generators])[:needed] * setup.seq_len


def _eval_steps(setup: PairSetup) -> set[int]:
    every = max(1, setup.steps // max(1, setup.evals))
    return {*range(every, setup.steps - every // 2, every), setup.steps}


@contextlib.contextmanager
def _precise_products(variant: Variant) -> Iterator[None]:
    """Emulated MXFP8 on a GPU multiplies in TF32: E4M3 times a power of two fits its 11 bits, so products are exact."""
    fits = variant.base == "mxfp8" and "emulated" in variant.words
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = fits or before
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
