"""`deepwell bench`: time whole training steps and single kernels beside their peers, and keep the tables.

Imports stay inside the commands: the command line must not load torch to print its help. Status 1 where a row claims
kernels that the profiler did not see, or one of Deepwell's own did not run.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from deepwell.cli.options import option
from deepwell.errors import ConfigError

app = typer.Typer(help="Time training steps and kernels beside their peers.", no_args_is_help=True)


def _check_file(json_file: str | None) -> str | None:
    from deepwell.bench.report import check_writable

    if json_file not in (None, "-"):
        check_writable(Path(str(json_file)))
    return json_file


Json = Annotated[
    str | None,
    typer.Option(
        "--json", callback=_check_file, help="Keep the result in this file; - prints JSON instead of the table."
    ),
]
Device = Annotated[str | None, option("cuda or cpu; the GPU where there is one.", "--device")]
Quick = Annotated[bool, option("Fewer repetitions.", "--quick")]


@app.command("step")
def step_command(
    model: Annotated[
        str,
        option(
            "8b-4l, hf-8b-4l, 1b-16l, 768-12l, llama3-8b, tiny, hf-tiny, or hf:NAME[:layers]: a width of "
            "`bench models`, a config.json, a model type of transformers."
        ),
    ] = "8b-4l",
    peers: Annotated[
        str, option("eager, torch, torch-max, torchao, torchao-row, torchao-row-gw, liger, ...")
    ] = "torch",
    variants: Annotated[
        str | None,
        option("Deepwell's own: default (dw.compile without options; of hf:NAME), bf16, fp8, fp8_cg, FILE.json, ..."),
    ] = None,
    batch: Annotated[int | None, option("Sequences of a step, not the model's own.")] = None,
    seq_len: Annotated[int | None, option("Tokens of a sequence.")] = None,
    gradients: Annotated[
        bool, option("Compare Deepwell's gradients with eager's on a short sequence.", "--gradients")
    ] = False,
    rounds: Annotated[int, option("Turns of each entrant.")] = 5,
    burst: Annotated[int, option("Steps timed in a row before the next entrant takes its turn.")] = 3,
    optimizer: Annotated[str, option("auto (Deepwell: adamw_dw, peers: torch's fused), torch, dw.")] = "auto",
    one_by_one: Annotated[bool, option("Do not take turns: one entrant at a time in memory.", "--one-by-one")] = False,
    checkpoint_layers: Annotated[int, option("Layers that keep only their input (less memory).")] = 0,
    quick: Quick = False,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Time whole training steps: forward, backward and AdamW."""
    from deepwell.bench.devices import pick_device
    from deepwell.bench.families import PREFIX
    from deepwell.bench.models import race_model
    from deepwell.bench.peers import parse_peers
    from deepwell.bench.report import step_table
    from deepwell.bench.step import Entrant, StepOptions, run_steps
    from deepwell.bench.variants import DEFAULT, parse_variants

    race = race_model(model, batch=batch, seq_len=seq_len).with_layers_checkpointed(checkpoint_layers)
    if variants is None:
        variants = DEFAULT if model.startswith(PREFIX) else "bf16,fp8"
    entrants: list[Entrant] = [*parse_peers(peers), *parse_variants(variants)]
    how = StepOptions(
        device=pick_device(device),
        rounds=2 if quick else rounds,
        burst=1 if quick else burst,
        optimizer=optimizer,
        order="one by one" if one_by_one else "auto",
        gradients=gradients,
    )
    _show(run_steps(race, entrants, how), json_file, step_table)


@app.command("models")
def models_command(
    only: Annotated[str, option("Rows, such as gpt2-xl,mixtral:4; also whatever else hf:NAME takes.")] = "",
    out: Annotated[Path, option("The folder that keeps a JSON file of each row.")] = Path("models"),
    resume: Annotated[bool, option("Do not run rows again that the folder holds.", "--resume")] = False,
    rounds: Annotated[int, option("Turns of each entrant.")] = 5,
    burst: Annotated[int, option("Steps timed in a row before the next entrant takes its turn.")] = 3,
    timeout: Annotated[float, option("Seconds of one row at most.")] = 1800.0,
    quick: Quick = False,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Race Hugging Face families at real widths: dw.compile(model) without options beside torch.compile."""
    from deepwell.bench.devices import pick_device
    from deepwell.bench.families import WIDTHS
    from deepwell.bench.model_table import run_models
    from deepwell.bench.step import StepOptions

    names = [name.strip() for name in only.split(",") if name.strip()] or list(WIDTHS)
    how = StepOptions(device=pick_device(device), rounds=2 if quick else rounds, burst=1 if quick else burst)
    _show(run_models(names, out, how, resume=resume, timeout=timeout), json_file)


@app.command("gemm")
def gemm_command(
    quick: Annotated[bool, option("The first and the last shape only.", "--quick")] = False,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Time every GEMM candidate on the race's eight shapes: whole chains and GEMMs alone, beside bf16."""
    from deepwell.bench.devices import pick_device
    from deepwell.bench.gemm import SHAPES, gemm_table, run_gemms

    where = pick_device(device, "--device cpu")
    shapes = (SHAPES[0], SHAPES[-1]) if quick else SHAPES
    # A CPU emulates: one small shape shows that it works.
    _show(run_gemms(where, shapes=shapes if where == "cuda" else ((128, 192, 256),)), json_file, gemm_table)


@app.command("attention")
def attention_command(
    batch: Annotated[int, typer.Option("--batch")] = 2,
    heads: Annotated[int, typer.Option("--heads")] = 32,
    kv_heads: Annotated[int, typer.Option("--kv-heads")] = 8,
    seq_len: Annotated[int | None, option("8192; on a CPU 512.")] = None,
    width: Annotated[int, option("Of a head.")] = 128,
    quick: Quick = False,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Time causal attention, forward and backward: softmax written out, flash, cuDNN, and what the engine calls."""
    from deepwell.bench.attention import AttentionShape, run_attention
    from deepwell.bench.devices import pick_device

    where = pick_device(device, "--device cpu")
    # Softmax written out holds all scores: at 8192 those are 17 GB a tensor in a CPU's fp32.
    length = seq_len if seq_len is not None else 8192 if where == "cuda" else 512
    shape = AttentionShape(B=batch, H=heads, G=kv_heads, S=length, D=width)
    _show(run_attention(shape, where, rounds=3 if quick else 10), json_file)


@app.command("adamw")
def adamw_command(
    model: Annotated[str, option("Whose parameters.")] = "8b-4l",
    quick: Quick = False,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Time the optimizer alone: adamw_dw beside torch's fused AdamW, bf16 parameters and moments."""
    from deepwell.bench.adamw import run_adamw
    from deepwell.bench.devices import pick_device
    from deepwell.bench.models import race_model

    _show(run_adamw(race_model(model), pick_device(device), rounds=3 if quick else 10), json_file)


@app.command("moe")
def moe_command(
    only: Annotated[str, option("Rows by block, way, kernels or step, such as qwen3-32k,deepwell-fp8.")] = "",
    timeout: Annotated[float, option("Seconds that one row may take.")] = 300.0,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Time MoE blocks, their kernels and whole MoE steps beside their peers, each row in a process of its own."""
    from deepwell.bench.devices import pick_device
    from deepwell.bench.moe.race import run_moe
    from deepwell.bench.report import kernel_table, write

    names = [name.strip() for name in only.split(",") if name.strip()]
    keep = None if json_file in (None, "-") else (lambda result: write(result, Path(str(json_file))))
    result = run_moe(pick_device(device, "--device cpu"), names, timeout_s=timeout, keep=keep)
    if json_file != "-" and result["kernels"]:
        typer.echo(kernel_table({**result, "title": "MoE: every kernel of each stage", "rows": result["kernels"]}))
    _show(result, json_file)


@app.command("compile")
def compile_command(
    model: Annotated[str, typer.Option("--model")] = "8b-4l",
    entrants: Annotated[str, option("Peers and variants.")] = "torch,fp8",
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Time the first step in a fresh process: with empty caches, and with those that the first process left."""
    from deepwell.bench.compile_time import run_compile
    from deepwell.bench.devices import pick_device
    from deepwell.bench.models import race_model
    from deepwell.bench.peers import PEERS
    from deepwell.bench.variants import DEFAULT, Variant

    names = [name.strip() for name in entrants.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--entrants is empty; it takes variants and peers, such as torch,fp8 ({', '.join(PEERS)})")
    for name in names:
        if name not in (*PEERS, DEFAULT):
            Variant.parse(name).policy()  # a policy file is read here, not first in the process that compiles
    _show(run_compile(race_model(model).name, names, pick_device(device)), json_file)


def _show(result: dict[str, Any], json_file: str | None, table: Callable[[dict[str, Any]], str] | None = None) -> None:
    """Print the table or the JSON, keep the file, and end with status 1 where a claim does not hold."""
    from deepwell.bench.report import has_problems, kernel_table, write

    if json_file == "-":
        typer.echo(json.dumps(result))
    else:
        typer.echo((table or kernel_table)(result))
    if json_file not in (None, "-"):
        write(result, Path(json_file))
    if has_problems(result):
        typer.echo("deepwell: a row did not run as it says; see the last column", err=True)
        raise typer.Exit(1)
