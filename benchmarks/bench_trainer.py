"""What the Trainer adds to a bare loop: log, watch, checkpoints; and compiled regions under FSDP2. One GPU.

PYTHONPATH=src python3 benchmarks/bench_trainer.py [--model 8b-4l] [--rounds 4] [--burst 12] [--json FILE]

All entrants train the same model on the same tokens with adamw_dw and take turns: drifting clocks hit all alike.

  bare        forward, backward, optimizer.step() that clips, nothing else
  trainer     Trainer.fit with its defaults: events.jsonl, the watch, the readback of loss and norm
  unwatched   the same with guard=False
  whole       the trainer's runner alone: forward, backward, norm and clipping, adamw_dw; the whole model is one graph
  regions     the same by FSDP2 (zero2) on a mesh of one GPU: every layer is a compiled region
  resharded   the same with zero3: weights are gathered again in the backward

A turn is `burst` steps between two synchronisations of the device; medians over turns. After the turns the trainer
saves in the background every `burst` steps: what a save costs the step it falls into.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepwell as dw
from deepwell.bench.environment import environment, one_line
from deepwell.bench.models import RaceModel, race_model
from deepwell.planner.layout import Layout
from deepwell.train.adamw.optimizer import AdamWDW
from deepwell.train.feed import Feed, count_items
from deepwell.train.parallel import Runner, make_meshes
from deepwell.train.parallel.shard import ShardedRunner, shard

FOREVER = 10**6


def data_of(model: RaceModel, count: int = 4) -> list[dict[str, torch.Tensor]]:
    """A few batches on the host, as a loader would hand them over."""
    generator = torch.Generator().manual_seed(0)
    shape = (model.batch, model.seq_len)
    batches = [torch.randint(0, model.config.vocab, shape, generator=generator) for _ in range(count)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in batches]


class Samples:
    """The batches row by row, over and over."""

    def __init__(self, batches: list[dict[str, torch.Tensor]]) -> None:
        self.rows = [row for batch in batches for row in batch["input_ids"]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "labels": row}


def bare(model: RaceModel, device: str, batches: list[dict[str, torch.Tensor]]) -> Callable[[int], Any]:
    """The loop that one would write by hand."""
    engine = compiled(model, device)
    optimizer = AdamWDW(engine.parameters(), lr=1e-5, clip_norm=1.0, skip_nonfinite=True)

    def run(steps: int) -> None:
        for i in range(steps):
            tokens = batches[i % len(batches)]["input_ids"].to(device, non_blocking=True)
            if model.is_huggingface:
                loss = engine(input_ids=tokens, labels=tokens).loss
            else:
                targets = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()
                loss = engine(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def compiled(model: RaceModel, device: str) -> dw.Engine:
    net = model.build(device)
    return dw.compile(dw.capture(net, model.capture_inputs(model.example(device))), precision="mxfp8")


def trainer(
    model: RaceModel, device: str, batches: list[dict[str, torch.Tensor]], folder: Path, **options: Any
) -> dw.Trainer:
    made: dw.Trainer = dw.Trainer.from_engine(
        compiled(model, device), dataloader=Samples(batches), run_dir=folder, quiet=True, resume=False, steps=FOREVER,
        global_batch=model.batch, micro_batch=model.batch, lr=1e-5, warmup=0, schedule="constant", save_every=0,
        save_at_end=False, hang_after="10m", give_up_after=10**6, **options,
    )  # fmt: skip
    return made


def running(made: dw.Trainer) -> Callable[[int], Any]:
    return lambda steps: made.fit(stop_at=made.step + steps)


def by_runner(
    model: RaceModel, device: str, batches: list[dict[str, torch.Tensor]], sharding: Any
) -> Callable[[int], Any]:
    """Steps of a runner: of the whole graph, or of compiled regions under FSDP2 with one rank."""
    engine = compiled(model, device)
    feed = Feed(engine.deepwell.model)
    if sharding:
        if not dist.is_initialized():
            store = dist.HashStore()
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        meshes = make_meshes(Layout(dp=1, sharding=sharding), device)
        engine.deepwell.use_regions()
        shard(engine, meshes)
        runner: Runner = ShardedRunner(engine, feed, torch.device(device), meshes)
    else:
        runner = Runner(engine, feed, torch.device(device))
    optimizer = AdamWDW(runner.parameters(), lr=1e-5)

    def run(steps: int) -> None:
        for i in range(steps):
            batch = batches[i % len(batches)]
            runner.run([batch], num_items=count_items(batch))
            runner.grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def seconds_of(run: Callable[[int], Any], steps: int, is_cuda: bool) -> float:
    if is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    run(steps)
    if is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def saves(made: dw.Trainer, burst: int, steps: int) -> dict[str, Any]:
    """Save every `burst` steps in the background, or as soon as the save before is written; what that costs a step."""
    made.settings = made.settings.changed(save_every=burst, keep_last=1)
    first = made.step
    made.fit(stop_at=made.step + steps)
    assert made.run_dir is not None
    events = [json.loads(line) for line in (made.run_dir / "events.jsonl").read_text().splitlines()]
    steps = {e["step"]: e["seconds"] for e in events if e["kind"] == "step" and e["step"] > first}
    written = [e for e in events if e["kind"] == "save" and e["step"] > first]
    after = {e["step"]: steps.get(e["step"] + 1, 0.0) for e in written}
    quiet = statistics.median(seconds for step, seconds in steps.items() if step - 1 not in after)
    return {
        "step_s": quiet,
        "stalls_s": [e["stall_s"] for e in written],
        "next_steps_s": list(after.values()),
        "write_s": [e["seconds"] for e in written],
        "bytes": [e["bytes"] for e in written],
        "committed": [e["committed"] for e in written],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b-4l")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--burst", type=int, default=12)
    parser.add_argument("--save-steps", type=int, default=300, help="steps with saves in the background; 0: none")
    parser.add_argument("--folder", help="where the runs are written; /dev/shm leaves the disk out")
    parser.add_argument("--only", default="bare,trainer,unwatched,whole,regions,resharded")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, wanted = race_model(arguments.model), arguments.only.split(",")
    batches = data_of(model)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        runs: dict[str, Callable[[int], Any]] = {}
        trainers = {}
        if "bare" in wanted:
            runs["bare"] = bare(model, device, batches)
        for name, options in {"trainer": {}, "unwatched": {"guard": False}}.items():
            if name in wanted:
                trainers[name] = trainer(model, device, batches, Path(folder) / name, **options)
                runs[name] = running(trainers[name])
        for name, sharding in {"whole": None, "regions": "zero2", "resharded": "zero3"}.items():
            if name in wanted:
                runs[name] = by_runner(model, device, batches, sharding)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            seconds_of(run, 4, device == "cuda")  # compiles
        for _ in range(arguments.rounds):
            for name, run in runs.items():
                times[name].append(seconds_of(run, arguments.burst, device == "cuda"))
        saved = None
        if "trainer" in trainers and arguments.save_steps:
            saved = saves(trainers["trainer"], arguments.burst, arguments.save_steps)
    report(times, saved, model.name, arguments.json)


def report(times: dict[str, list[float]], saved: dict[str, Any] | None, model: str, path: Path | None) -> None:
    facts = environment()
    medians = {name: statistics.median(found) for name, found in times.items()}
    base = medians.get("bare", next(iter(medians.values())))
    rows = [
        {
            "name": name,
            "ms": 1e3 * medians[name],
            "over": medians[name] / base - 1.0,
            "turns_ms": [1e3 * t for t in found],
        }
        for name, found in times.items()
    ]
    print(f"{model}, {one_line(facts)}")
    for row in rows:
        print(f"  {row['name']:10s} {row['ms']:9.2f} ms  {100 * row['over']:+6.2f}%")
    for name in ("regions", "resharded"):
        if {"whole", name} <= set(medians):
            print(f"  {name} over whole {100 * (medians[name] / medians['whole'] - 1):+.2f}%")
    if saved is not None:
        shown = ", ".join(f"{1e3 * s:.0f}" for s in saved["stalls_s"])
        after = ", ".join(f"{1e3 * s:.0f}" for s in saved["next_steps_s"])
        written = ", ".join(f"{s:.1f}" for s in saved["write_s"])
        print(f"  saves: training stood still for {shown} ms; written in {written} s")
        print(f"  a step takes {1e3 * saved['step_s']:.1f} ms, those after a save {after} ms")
    if path is not None:
        path.write_text(json.dumps({"environment": facts, "model": model, "rows": rows, "saves": saved}, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "8")
    main()
