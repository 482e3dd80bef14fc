"""The job that is killed: a tiny model, trained by the Trainer; each rank writes down every sample it was given."""

import json
import os
import signal
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepwell.engine.compile import compile as compile_engine
from deepwell.train.run import Callback
from deepwell.train.trainer import Trainer

VOCAB, WIDTH, SEQ_LEN = 64, 32, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    folder: str
    steps: int
    world: int
    seed: int
    save_every: int
    hang_after_s: float
    give_up_after: int = 1000
    fail_step: int = 0  # at which `fail_rank` fails, each time it gets there: raises, or with "sleep" sleeps for ever
    fail_rank: int = 0
    fail_how: str = "raise"


class Tiny(nn.Module):
    """An embedding, one block with dropout, a head: what is random must be resumed too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        hidden = hidden + self.dropout(self.down(F.gelu(self.up(hidden))))
        return self.head(hidden)


class Tokens(Callback):
    """Writes down which samples, with a checksum of their tokens, this rank computed each step from."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"tokens-{rank:05d}.jsonl"
        self._seen: dict[int, int] = {}

    def on_start(self, trainer: Trainer) -> None:
        make = trainer.loader.batch

        def batch(cursor: int, indices: Sequence[int]) -> dict[str, Tensor]:
            found = make(cursor, indices)
            for index, row in zip(indices, found["input_ids"], strict=True):
                self._seen[cursor + index] = zlib.crc32(row.contiguous().numpy().tobytes())
            return found

        trainer.loader.batch = batch  # type: ignore[method-assign]

    def on_step(self, trainer: Trainer, event: Mapping[str, Any]) -> None:
        line = {"t": time.time(), "step": event["step"], "samples": list(self._seen.items())}
        self._seen.clear()
        data = json.dumps(line) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, data.encode())
        finally:
            os.close(descriptor)


class Fails(Callback):
    def __init__(self, job: WorkerJob, rank: int) -> None:
        self._step = job.fail_step if rank == job.fail_rank else 0
        self._how = job.fail_how

    def on_step(self, trainer: Trainer, event: Mapping[str, Any]) -> None:
        if event["step"] == self._step:
            if self._how == "raise":
                raise ValueError(f"planned failure at step {self._step}")
            time.sleep(1e6)


def make_trainer(job: WorkerJob, callbacks: Sequence[Callback] = (), **changes: Any) -> Trainer:
    torch.manual_seed(job.seed)
    engine = compile_engine(Tiny(), precision="bf16")
    settings: dict[str, Any] = {
        "steps": job.steps, "seq_len": SEQ_LEN, "global_batch": 2 * job.world, "micro_batch": 1, "lr": 1e-2,
        "save_every": job.save_every, "hang_after": f"{job.hang_after_s:g}s" if job.hang_after_s else "0",
        "give_up_after": job.give_up_after, "seed": job.seed, "quiet": True, "elastic": True,
    }  # fmt: skip
    return Trainer.from_engine(
        engine, "adamw", f"synthetic:{VOCAB}", run_dir=job.folder, callbacks=callbacks, **{**settings, **changes}
    )


def work(fields: dict[str, Any]) -> int:
    """One process of a job, called by torch's elastic agent; 0 where it ended in order."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # those of the agent, which this process was forked from
    torch.set_num_threads(1)
    job = WorkerJob(**fields)
    folder, rank = Path(job.folder), int(os.environ["RANK"])
    (folder / "pids" / str(os.getpid())).write_text(os.environ["RANK"], encoding="ascii")
    try:
        with make_trainer(job, [Tokens(folder, rank), Fails(job, rank)]) as trainer:
            trainer.fit()
    except SystemExit as ended:
        if ended.code:
            raise
        os._exit(0)  # after a SIGTERM: the agent, which is ending, would leave a result unread and this process waiting
    return 0
