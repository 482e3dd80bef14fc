"""The whole pipeline on one small model: probe, capture, plan, dry run, train, be killed, resume, export, load.

    python recipes/demo.py [--out DIR] [--recipe mxfp8]

Everything it prints is computed here and now, on this machine; the results stay in DIR.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel

import deepwell as dw
from deepwell.precision import PrecisionPolicy
from deepwell.train.recipe import Recipe

RECIPE = Path(__file__).with_name("tiny.toml")
PATIENCE_S = 120.0


def show(console: Console, value: object) -> None:
    console.print(str(value), highlight=False, markup=False, soft_wrap=True)


def train(overrides: list[str], kill_after: int | None = None) -> int:
    """`deepwell train` in a process of its own; killed once a checkpoint of `kill_after` steps or more is there."""
    command = [sys.executable, "-m", "deepwell", "train", str(RECIPE), *overrides]
    process = subprocess.Popen(command)
    if kill_after is not None:
        folder = Path(next(o for o in overrides if o.startswith("run.dir=")).split('"')[1]) / "checkpoints"
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            if any(int(path.parent.name[5:]) >= kill_after for path in folder.glob("step-*/COMMITTED")):
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.02)
    return process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where the results go")
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    parser.add_argument("--recipe", default="mxfp8", help="precision recipe: bf16, fp8, mxfp8, nvfp4")
    args = parser.parse_args()
    console = Console()
    out, start = args.out, time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)

    console.rule("1  probe: what this machine is")
    hw = dw.probe()
    show(console, hw)
    (out / "hardware.json").write_text(hw.to_json())

    console.rule("2  capture: what the model is")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run_dir, data = out / f"run-{time.strftime('%Y%m%d-%H%M%S')}", out / "data"
    changes = [
        f"train.steps={args.steps}", "train.seq_len=64", f"train.save_every={args.steps // 4}",
        f'precision.recipe="{args.recipe}"', f'run.dir="{run_dir}"', f'data.train="{data}"',
        f'data.eval="{data}/val"', f"train.eval_every={args.steps // 2}", "train.log_every=5",
    ]  # fmt: skip
    recipe = Recipe.read(RECIPE, changes)
    ir = dw.capture(recipe.build_model(device))
    show(console, ir)
    (out / "ir.json").write_text(ir.to_json())

    console.rule("3  plan, compile, dry run: which format each GEMM gets, how it runs here, does it fit")
    policy = PrecisionPolicy.recipe(args.recipe)
    plan = dw.autoplan(ir, hw=dw.probe(), seq_len=64, global_batch=8, precision=policy, gpus=1, progress=False)
    show(console, plan)
    engine = dw.compile(ir, plan=plan)
    show(console, dw.dryrun(engine))
    (out / "plan.json").write_text(plan.to_json())

    console.rule("4  data: the standard library's sources as tokens")
    subprocess.run(
        [sys.executable, "-m", "deepwell", "data", "prepare", "stdlib", "-o", str(data), "--val-fraction", "0.02"],
        check=True,
    )

    console.rule(f"5  train {args.steps} steps, and be killed on the way")
    status = train(changes, kill_after=args.steps // 2)
    console.print(f"[bold red]killed[/] (status {status}): no chance to save, nothing said")
    console.rule("6  the same command again: it goes on from the last checkpoint")
    status = train(changes)
    if status:
        sys.exit(status)
    losses = [
        (event["step"], event["loss"])
        for event in map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
        if event["kind"] == "step"
    ]
    console.print(f"loss {losses[0][1]:.3f} at step {losses[0][0]}, {losses[-1][1]:.3f} at step {losses[-1][0]}")

    console.rule("7  save, export, and load the export without the model's code")
    checkpoint = dw.load(run_dir)
    show(console, checkpoint)
    engine.load_state_dict(checkpoint.weights())
    artifact = dw.export(engine.eval(), path=str(out / "tiny.engine"))
    show(console, artifact)
    loaded = dw.load_engine(out / "tiny.engine")
    tokens = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(0), device="cpu").to(device)
    with torch.no_grad():
        same = torch.equal(engine(input_ids=tokens).logits, loaded(input_ids=tokens).logits)
    console.print(f"logits of the loaded engine are {'equal, bit for bit' if same else 'NOT equal'}")

    console.rule("8  the run's page")
    page = out / "run.html"
    command = [sys.executable, "-m", "deepwell", "report", str(run_dir), "-o", str(page)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    console.print(f"open {page.resolve()} in a browser: loss, throughput, precision, restarts")
    files = "\n".join(f"{path}  {path.stat().st_size:,} bytes" for path in sorted(out.glob("*.*")))
    console.print(Panel(files, title=f"results, after {time.perf_counter() - start:.0f} s", title_align="left"))
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
