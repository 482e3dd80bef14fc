"""`deepwell plan`: the best layout for a model on a machine, as a table, JSON, an HTML page or another engine's words.

Exit status: 0 a plan was found, 2 the request is wrong, 3 nothing fits (the nearest miss stands on stderr).
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from deepwell.errors import ConfigError, PlanError

NOTHING_FITS = 3

_Text = str | None
_Count = int | None


def plan_command(
    *,
    model: Annotated[str, typer.Option("--model", help="A published model (llama3-70b) or a config.json.")],
    hw: Annotated[
        _Text, typer.Option("--hw", help="The machine: 8x8xB200, gb200-nvl72:4; this one unless given.")
    ] = None,
    seq: Annotated[int, typer.Option("--seq", help="Tokens of a sequence.")] = 4096,
    batch: Annotated[int, typer.Option("--batch", help="Sequences of a step over all GPUs.")] = 1024,
    precision: Annotated[_Text, typer.Option("--precision", help="bf16, fp8, mxfp8 or nvfp4.")] = None,
    goal: Annotated[str, typer.Option("--goal", help="fastest, smallest or cheapest.")] = "fastest",
    optimizer: Annotated[str, typer.Option("--optimizer", help="What the optimizer keeps, e.g. adamw_8bit.")] = "adamw",
    stack: Annotated[_Text, typer.Option("--stack", help="The engine that will run it: deepwell, megatron ...")] = None,
    tp: Annotated[_Count, typer.Option("--tp", help="Fix tensor parallelism.")] = None,
    pp: Annotated[_Count, typer.Option("--pp", help="Fix pipeline parallelism.")] = None,
    cp: Annotated[_Count, typer.Option("--cp", help="Fix context parallelism.")] = None,
    ep: Annotated[_Count, typer.Option("--ep", help="Fix expert parallelism.")] = None,
    micro_batch: Annotated[_Count, typer.Option("--micro-batch", help="Fix the micro-batch.")] = None,
    recompute: Annotated[_Text, typer.Option("--recompute", help="none, selective, full or block.")] = None,
    sharding: Annotated[_Text, typer.Option("--sharding", help="ddp, zero1, zero2 or zero3.")] = None,
    schedule: Annotated[
        _Text, typer.Option("--schedule", help="1f1b, interleaved, zero_bubble, zbv, dualpipev.")
    ] = None,
    max_memory: Annotated[float | None, typer.Option("--max-memory", help="GiB that a GPU may fill.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write one self-contained page here.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a Chrome/Perfetto trace here.")] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write the plan as JSON here.")] = None,
    export: Annotated[
        _Text, typer.Option("--export", help="Print for megatron, megatron-bridge or torchtitan.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why this plan.")] = False,
    sensitivity: Annotated[bool, typer.Option("--sensitivity", help="Show what one step of each degree does.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Pick the parallel layout of a training job and predict its time and memory. Ends with 3 if nothing fits."""
    from deepwell.planner.search import autoplan

    limits: dict[str, Any] = {
        "tp": tp, "pp": pp, "cp": cp, "ep": ep, "micro_batch": micro_batch, "recompute": recompute,
        "sharding": sharding, "schedule": schedule, "max_memory": max_memory,
    }  # fmt: skip
    stack = stack or _stack_of(export)
    try:
        plan = autoplan(
            read_model(model), hw, seq_len=seq, global_batch=batch, precision=precision, goal=goal, stack=stack,
            optimizer=optimizer, **limits,
        )  # fmt: skip
    except PlanError as error:
        if as_json:
            typer.echo(json.dumps({"fits": False, "error": str(error)}))
        typer.echo(f"deepwell: {error}", err=True)
        raise typer.Exit(NOTHING_FITS) from error
    _write_files(plan, html, trace, save)
    typer.echo(_shown(plan, export, explain, sensitivity, as_json))


def read_model(name: str) -> Any:
    """A published model's name, or the dict of a config.json. Raises ConfigError."""
    path = Path(name)
    if not (path.suffix == ".json" or path.exists()):
        return name
    if path.is_dir():
        path /= "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--model: cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"--model: {path} holds {type(data).__name__}; it must be the object of a config.json")
    if data.get("schema") and "blocks" in data:
        from deepwell.graph.ir import IR

        return IR.from_dict(data)
    return data


def _stack_of(export: str | None) -> str | None:
    """An export is planned for its engine unless another is named."""
    return {"megatron": "megatron", "megatron-bridge": "megatron", "torchtitan": "torchtitan"}.get(export or "")


def _shown(plan: Any, export: str | None, explain: bool, sensitivity: bool, as_json: bool) -> str:
    if as_json:
        return str(plan.to_json(indent=1))
    if export is not None:
        return str(plan.export(export))
    parts = [str(plan)]
    if explain:
        parts.append(plan.explain())
    if sensitivity:
        parts.append(str(plan.sensitivity()))
    return "\n\n".join(parts)


def _write_files(plan: Any, html: Path | None, trace: Path | None, save: Path | None) -> None:
    if html is not None:
        from deepwell.report.plan_page import plan_page

        _write(html, plan_page(plan), "--html")
    if trace is not None:
        from deepwell.planner.trace import chrome_trace_json

        _write(trace, chrome_trace_json(plan), "--trace")
    if save is not None:
        _write(save, plan.to_json(indent=1), "--save")


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error}") from error
    typer.echo(f"wrote {path}", err=True)
