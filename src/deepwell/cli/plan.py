"""`deepwell plan`: the best layout for a model on a machine, as a table, JSON, an HTML page or another engine's words.

Exit status: 0 a plan was found, 2 the request is wrong, 3 nothing fits (the nearest miss stands on stderr).
"""

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from deepwell.cli.options import option
from deepwell.errors import ConfigError, PlanError

NOTHING_FITS = 3
# An export is planned for its engine unless another is named.
_STACK_OF = {"megatron": "megatron", "megatron-bridge": "megatron", "torchtitan": "torchtitan"}

_Text = str | None
_Flag = bool | None


def plan_command(
    *,
    model: Annotated[str, option("A published model (llama3-70b) or a config.json.")],
    hw: Annotated[_Text, option("The machine: 8x8xB200, gb200-nvl72:4; this one unless given.")] = None,
    seq: Annotated[int, option("Tokens of a sequence.")] = 4096,
    batch: Annotated[int, option("Sequences of a step over all GPUs.")] = 1024,
    precision: Annotated[_Text, option("bf16, fp8, mxfp8, nvfp4, several of them, or auto.")] = None,
    goal: Annotated[str, option("fastest, smallest or cheapest.")] = "fastest",
    optimizer: Annotated[str, option("What the optimizer keeps, e.g. adamw_8bit.")] = "adamw",
    stack: Annotated[_Text, option("The engine that will run it: deepwell, megatron ...")] = None,
    arch: Annotated[_Text, option("Check the machine: blackwell, hopper, ada, ampere or cpu.")] = None,
    moe: Annotated[_Text, option("experts=8,top_k=2 are checked; capacity_factor=, imbalance= are set.")] = None,
    dp: Annotated[_Text, option("Data parallelism that is allowed: 8, or 4,8.")] = None,
    tp: Annotated[_Text, option("Tensor parallelism that is allowed; 1 forbids it.")] = None,
    pp: Annotated[_Text, option("Pipeline parallelism that is allowed.")] = None,
    cp: Annotated[_Text, option("Context parallelism that is allowed.")] = None,
    ep: Annotated[_Text, option("Expert parallelism that is allowed.")] = None,
    etp: Annotated[_Text, option("Splits inside experts that are allowed.")] = None,
    dp_replicate: Annotated[_Text, option("Copies of the shards inside dp (HSDP).")] = None,
    gpus: Annotated[_Text, option("Use so many of the machine's GPUs.")] = None,
    micro_batch: Annotated[_Text, option("Micro-batches that are allowed.")] = None,
    virtual_stages: Annotated[_Text, option("Stages per pipeline rank.")] = None,
    stage_layers: Annotated[_Text, option("Layers of each stage, 10,11,11, or even.")] = None,
    recompute: Annotated[_Text, option("Of none, selective, full, block: those allowed.")] = None,
    sharding: Annotated[_Text, option("Of ddp, zero1, zero2, zero3: those allowed.")] = None,
    schedule: Annotated[_Text, option("Of 1f1b, interleaved, zero_bubble, zbv, dualpipev: those allowed.")] = None,
    sequence_parallel: Annotated[_Flag, option("With TP.", "--sequence-parallel/--no-sequence-parallel")] = None,
    cp_kind: Annotated[_Text, option("ring, ulysses or allgather.")] = None,
    offload: Annotated[_Text, option("In host memory: none, optimizer, activations or both.")] = None,
    overlap: Annotated[_Text, option("Of tp, grad_reduce, param_gather, ep, pp; all; none.")] = None,
    kernels: Annotated[_Text, option("Configurations of the catalog that may be proposed.")] = None,
    cuda_graphs: Annotated[_Flag, option("Host time of graphs.", "--cuda-graphs/--no-cuda-graphs")] = None,
    max_memory: Annotated[float | None, option("GiB that a GPU may fill.")] = None,
    html: Annotated[Path | None, option("Write one self-contained page here.")] = None,
    trace: Annotated[Path | None, option("Write a Chrome/Perfetto trace here.")] = None,
    save: Annotated[Path | None, option("Write the plan as JSON here.")] = None,
    export: Annotated[_Text, option("Print for megatron, megatron-bridge or torchtitan.")] = None,
    explain: Annotated[bool, option("Say why this plan.", "--explain")] = False,
    sensitivity: Annotated[bool, option("Show what one step of each degree does.", "--sensitivity")] = False,
    as_json: Annotated[bool, option("Print JSON only.", "--json")] = False,
) -> None:
    """Pick the parallel layout of a training job and predict its time and memory. Ends with 3 if nothing fits."""
    from deepwell.planner.search.autoplan import autoplan

    counts = {
        "dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, "dp_replicate": dp_replicate, "gpus": gpus,
        "micro_batch": micro_batch, "virtual_stages": virtual_stages,
    }  # fmt: skip
    limits: dict[str, Any] = {
        **{name: _count_list(name, text) for name, text in counts.items()},
        "recompute": _words(recompute), "sharding": _words(sharding), "schedule": _words(schedule),
        "stage_layers": stage_layers if stage_layers == "even" else _count_list("stage_layers", stage_layers),
        "kernels": _words(kernels), "overlap": {"all": True, "none": False}.get(overlap or "", _words(overlap)),
        "offload": offload, "sequence_parallel": sequence_parallel, "context_parallel_kind": cp_kind,
        "cuda_graphs": cuda_graphs, "max_memory": max_memory,
    }  # fmt: skip
    try:
        plan = autoplan(
            read_model(model), hw, seq_len=seq, global_batch=batch, goal=goal, optimizer=optimizer, arch=arch,
            precision=_words(precision) if "," in (precision or "") else precision, moe=_moe(moe),
            stack=stack or _STACK_OF.get(export or ""), **limits,
        )  # fmt: skip
    except PlanError as error:
        refuse(error, as_json)
    _write_files(plan, html, trace, save)
    typer.echo(_shown(plan, export, explain, sensitivity, as_json))


def refuse(error: PlanError, as_json: bool) -> NoReturn:
    """Say that nothing fits, and end with status 3."""
    if as_json:
        typer.echo(json.dumps({"fits": False, "error": str(error)}))
    typer.echo(f"deepwell: {error}", err=True)
    raise typer.Exit(NOTHING_FITS) from error


# ---- reading options ----


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",")]


def _count_list(name: str, text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(word) for word in text.split(",")]
    except ValueError as error:
        option = "--" + name.replace("_", "-")
        raise ConfigError(f"{option}: got {text!r}; whole numbers of at least 1, e.g. 2 or 1,2,4") from error


def _moe(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    found: dict[str, float] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        try:
            found[name.strip()] = int(value) if value.strip().isdigit() else float(value)
        except ValueError as error:
            raise ConfigError(f"--moe: got {word!r}; e.g. experts=8,capacity_factor=1.25") from error
    return found


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


def _shown(plan: Any, export: str | None, explain: bool, sensitivity: bool, as_json: bool) -> str:
    if as_json:
        return str(plan.to_json(indent=1))
    if export is not None:
        return str(plan.export(export))
    explained = [plan.explain()] if explain else []
    varied = [str(plan.sensitivity())] if sensitivity else []
    return "\n\n".join([str(plan), *explained, *varied])


def _write_files(plan: Any, html: Path | None, trace: Path | None, save: Path | None) -> None:
    if html is not None:
        from deepwell.report.plan_page import plan_page

        write(html, plan_page(plan), "--html")
    if trace is not None:
        from deepwell.planner.schedule.trace import chrome_trace_json

        write(trace, chrome_trace_json(plan), "--trace")
    if save is not None:
        write(save, plan.to_json(indent=1), "--save")


def write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error}") from error
    typer.echo(f"wrote {path}", err=True)
