"""Two checkouts of Deepwell against each other: the same training steps, taking turns on one GPU.

    git worktree add ../before COMMIT
    python benchmarks/compare_trees.py --before ../before --rows 8b-4l,hf-8b-4l,1b-16l,768-12l,moe --json compare.json

Each checkout has a process of its own that compiles the model with `dw.compile(model)`, trains it with AdamWDW, and
then waits to be asked for a burst of steps. Bursts alternate, so that clocks and temperature are the same for both.
Printed for each row: the median step of either, and after over before. The exit status is 1 where a row is slower by
more than --limit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROWS = "8b-4l,hf-8b-4l,1b-16l,768-12l,moe"
_MOE = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "head_dim": 128,
}
_MOE |= {"num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32768}
_SMALL_MOE = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
}
_SMALL_MOE |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}


# ---- in the process of a checkout ----


def _step_of(row: str, device: str) -> Any:
    """A function that trains one step of a row's model and returns its loss."""
    import torch

    import deepwell as dw

    if row == "moe":
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(0)
        with torch.device(device):
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(_MOE if device == "cuda" else _SMALL_MOE))).bfloat16()
        shape = (2, 8192) if device == "cuda" else (2, 32)
        tokens = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)

        def loss_of(run: Any) -> Any:
            return run(input_ids=tokens, labels=tokens).loss
    else:
        from deepwell.bench.models import race_model

        chosen = race_model(row)
        model, example = chosen.build(device), chosen.example(device)

        def loss_of(run: Any) -> Any:
            return chosen.loss_of(run, example)

    engine = dw.compile(model)
    optimizer = dw.AdamWDW(engine.parameters(), lr=1e-4)

    def step() -> Any:
        loss = loss_of(engine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def serve(row: str, device: str) -> None:
    """Answer each line of standard input, a number of steps, by the milliseconds of one of them."""
    import torch

    step = _step_of(row, device)
    losses = [float(step()) for _ in range(3)]
    print(json.dumps({"losses": losses}), flush=True)
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for line in sys.stdin:
        count = int(line)
        wait()
        start = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        print(json.dumps({"ms": 1e3 * (time.perf_counter() - start) / count}), flush=True)


# ---- in the process that compares ----


class Tree:
    """A checkout with a row's model, ready for bursts."""

    def __init__(self, root: Path, row: str, device: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root / "src")}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", row, "--device", device]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
        )

    def ready(self) -> list[float]:
        return self._answer()["losses"]

    def burst(self, steps: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self._answer()["ms"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{' '.join(self.process.args[2:])} in {self.process.args[1]} ended before it answered")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(row: str, roots: tuple[Path, Path], args: argparse.Namespace) -> dict[str, Any]:
    """Medians of both checkouts over alternating bursts, and the losses of their first steps."""
    trees = []
    try:
        for root in roots:  # one compiles at a time: they share a cache and a GPU
            trees.append(Tree(root, row, args.device))
            trees[-1].losses = trees[-1].ready()  # type: ignore[attr-defined]
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(args.rounds):
            for i in (0, 1) if number % 2 == 0 else (1, 0):
                times[i].append(trees[i].burst(args.burst))
        before, after = (statistics.median(t) for t in times)
        losses = [tree.losses for tree in trees]  # type: ignore[attr-defined]
        return {
            "row": row,
            "before_ms": before,
            "after_ms": after,
            "ratio": after / before,
            "times": times,
            "losses": losses,
        }
    finally:
        for tree in trees:
            tree.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--after", type=Path, default=Path(__file__).resolve().parents[1], help="this one by default")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--burst", type=int, default=8, help="steps of one turn")
    parser.add_argument("--limit", type=float, default=0.015, help="how much slower a row may be")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="write the results to this file, row by row")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.device)
        return 0
    if args.before is None or not (args.before / "src" / "deepwell").is_dir():
        parser.error("--before must be a checkout of Deepwell, with src/deepwell in it")
    rows = []
    for row in args.rows.split(","):
        rows.append(compare(row, (args.before.resolve(), args.after.resolve()), args))
        last = rows[-1]
        print(
            f"{row:10s} before {last['before_ms']:8.2f} ms  after {last['after_ms']:8.2f} ms  {last['ratio']:.3f}",
            flush=True,
        )
        if args.json:
            stamp = datetime.now(timezone.utc).strftime("%Y-%m-%d")
            args.json.write_text(json.dumps({"date": stamp, "host": platform.node(), "rows": rows}, indent=1) + "\n")
    slower = [row["row"] for row in rows if row["ratio"] > 1 + args.limit]
    print(f"slower by more than {args.limit:.1%}: {', '.join(slower) or 'none'}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
