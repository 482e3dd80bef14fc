"""`deepwell train RECIPE`: run a recipe here, or on many processes by torchrun.

Exit status: 0 done, or saved after a SIGTERM; 1 the run gave up; 2 the request is wrong.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deepwell.cli.options import option
from deepwell.errors import ConfigError, DeepwellError

_Text = str | None
_Count = int | None


def train_command(
    *,
    recipe: Annotated[Path, typer.Argument(help="A recipe's TOML file, e.g. recipes/tiny.toml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes of the recipe: section.key=value, e.g. train.steps=100.")
    ] = None,
    steps: Annotated[_Count, option("Steps of the whole run.")] = None,
    run_dir: Annotated[_Text, option("Folder of events and checkpoints.")] = None,
    resume: Annotated[_Text, option("auto, never, or the path of a checkpoint.")] = None,
    dry_run: Annotated[bool, option("Plan and simulate a step; train nothing.", "--dry-run")] = False,
    processes: Annotated[
        _Text, option("Processes on this node, started by torchrun: a number or 'gpu'.", "--nproc")
    ] = None,
    nodes: Annotated[_Text, option("Nodes, or least:most for an elastic run, e.g. 2:4.", "--nnodes")] = None,
    rendezvous: Annotated[_Text, option("host:port of the rendezvous, for several nodes.", "--rdzv")] = None,
    restarts: Annotated[int, option("Restarts after a crash, with --nproc.", "--max-restarts")] = 10,
    as_json: Annotated[bool, option("Print JSON only: how the run ended.", "--json")] = False,
) -> None:
    """Train what a recipe says; a run that was interrupted goes on."""
    from deepwell.train.recipe import Recipe

    changes = list(overrides or ())
    changes += [f"train.steps={steps}"] if steps is not None else []
    changes += [f"run.dir={json.dumps(run_dir, ensure_ascii=False)}"] if run_dir is not None else []
    where = False if resume == "never" else resume
    changes += [f"run.resume={json.dumps(where, ensure_ascii=False)}"] if resume is not None else []
    found = Recipe.read(recipe, changes)
    if dry_run:
        _dry_run(found, as_json)
        return
    if processes is not None or nodes is not None:
        arguments = ["train", str(recipe), *changes, *(["--json"] if as_json else [])]
        folder = Path(found.section("run").get("dir", f"runs/{found.path.stem}"))
        raise typer.Exit(_torchrun(arguments, processes or "gpu", nodes or "1", rendezvous, restarts, folder))
    trainer = found.trainer(quiet=as_json)
    try:
        result = trainer.fit()
    except DeepwellError as error:
        if isinstance(error, ConfigError):
            raise
        typer.echo(f"deepwell: {error}", err=True)
        raise typer.Exit(1) from error
    if int(os.environ.get("RANK", "0")) == 0:
        _say(result, as_json)


def _say(result: Any, as_json: bool) -> None:
    fields = {
        "reason": result.reason, "step": result.step, "loss": result.loss, "seconds": round(result.seconds, 3),
        "run_dir": str(result.run_dir),
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(fields))
        return
    typer.echo(f"{result.reason} after step {result.step}: loss {result.loss:.4f}, {result.seconds:.1f} s")
    typer.echo(f"its page: deepwell report {result.run_dir}")


def _dry_run(recipe: Any, as_json: bool) -> None:
    from deepwell.engine.dryrun.dry_run import simulated

    plan = recipe.make_plan(1)
    if plan is None:
        raise ConfigError(f"--dry-run: {recipe.path} has no [plan] and no [layout]; use `deepwell dryrun` for a model")
    run = simulated(plan)
    typer.echo(run.to_json(indent=1) if as_json else f"{plan}\n\n{run}")
    if not run.fits:
        raise typer.Exit(3)


def _torchrun(
    arguments: list[str], processes: str, nodes: str, rendezvous: str | None, restarts: int, run_dir: Path
) -> int:
    """Start the processes with what restarts need; the exit status of the whole."""
    from deepwell.train.elastic import run_agent

    if processes != "gpu" and not processes.isdigit():
        raise ConfigError(f"--nproc is {processes!r}; it takes a number, or 'gpu' for all of this node's")
    where = ["--standalone"] if nodes == "1" and rendezvous is None else []
    if not where:
        if rendezvous is None:
            raise ConfigError(f"--nnodes {nodes}: give --rdzv host:port, the same on every node")
        where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}", f"--nnodes={nodes}", "--rdzv-id=deepwell"]
        where.append("--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3")
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--max-restarts={restarts}",
        "--monitor-interval=0.5", *where, "-m", "deepwell", *arguments,
    ]  # fmt: skip
    return run_agent(command, run_dir)
