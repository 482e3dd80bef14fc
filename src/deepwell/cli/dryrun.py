"""`deepwell dryrun`: does it fit, how fast, what may go wrong; with real steps where the machine is this one.

Exit status: 0 it fits, 2 the request is wrong, 3 it does not fit.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from deepwell.cli.options import option
from deepwell.cli.plan import NOTHING_FITS, read_model, refuse, write
from deepwell.errors import ConfigError, PlanError

_SEQ_LEN, _BATCH = 4096, 8

_Text = str | None
_Count = int | None
_File = Path | None


def dryrun_command(
    *,
    model: Annotated[_Text, option("A published model, a model of the race (8b-4l), or a config.json.")] = None,
    hw: Annotated[_Text, option("The machine: H200, 8x8xB200; this one unless given.")] = None,
    plan: Annotated[_File, option("A plan that `deepwell plan --save` wrote.")] = None,
    seq: Annotated[_Count, option("Tokens of a sequence.")] = None,
    batch: Annotated[_Count, option("Sequences of a step over all GPUs.")] = None,
    precision: Annotated[_Text, option("bf16, fp8, mxfp8 or nvfp4.")] = None,
    steps: Annotated[int, option("Real steps that count.")] = 3,
    measure: Annotated[bool | None, option("Run real steps here, or none of them.", "--measure/--no-measure")] = None,
    trace: Annotated[_File, option("Write a Chrome/Perfetto trace of the simulated step.")] = None,
    as_json: Annotated[bool, option("Print JSON only.", "--json")] = False,
) -> None:
    """Simulate a training step, try it here where that can be, and list the risks. Ends with 3 if it does not fit."""
    if measure and hw is not None:
        raise ConfigError(f"--measure: {hw!r} is a name; only this machine can be measured, so leave --hw out")
    wanted = _Wanted(model=model, hw=hw, seq=seq, batch=batch, precision=precision)
    try:
        # Built here where it was asked for, or where a small model of the race was named and nothing else.
        is_live = hw is None and plan is None and _race_model(model) is not None if measure is None else measure
        run = _live(wanted, plan, steps, measure) if is_live else _simulated(wanted, plan)
    except PlanError as error:
        refuse(error, as_json)
    if trace is not None:
        write(trace, run.trace_json(), "--trace")
    typer.echo(run.to_json(indent=1) if as_json else str(run))
    if not run.fits:
        raise typer.Exit(NOTHING_FITS)


class _Wanted(NamedTuple):
    model: _Text
    hw: _Text
    seq: _Count
    batch: _Count
    precision: _Text

    def require_model(self) -> str:
        if self.model is None:
            raise ConfigError("--model: name a model or a config.json, or give a plan by --plan")
        return self.model


def _race_model(name: str | None) -> Any:
    """The race's model of that name, or None; a published model of the same name goes first."""
    from deepwell.graph.configs import published_models

    if name is None or name in published_models():
        return None
    from deepwell.bench.models import MODELS

    return MODELS.get(name)


# ---- simulated ----


def _simulated(wanted: _Wanted, path: Path | None) -> Any:
    from deepwell.engine.dryrun.dry_run import simulated
    from deepwell.planner.search.autoplan import autoplan

    if path is not None:
        return simulated(_read_plan(path))
    model, seq, batch = _shape(wanted, _race_model(wanted.require_model()))
    return simulated(autoplan(model, wanted.hw, seq_len=seq, global_batch=batch, precision=wanted.precision))


def _shape(wanted: _Wanted, race: Any) -> tuple[Any, int, int]:
    if race is None:
        return read_model(wanted.require_model()), wanted.seq or _SEQ_LEN, wanted.batch or _BATCH
    c = race.config
    config = {
        "model_type": "llama", "hidden_size": c.width, "intermediate_size": c.hidden,
        "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads, "vocab_size": c.vocab, "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return config, wanted.seq or race.seq_len, wanted.batch or race.batch


def _read_plan(path: Path) -> Any:
    from deepwell.planner.plan import Plan

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--plan: cannot read {path}: {error}") from error
    return Plan.from_json(text)


# ---- with a live model ----


def _live(wanted: _Wanted, path: Path | None, steps: int, measure: bool | None) -> Any:
    import torch

    from deepwell.engine.compile import compile as compile_engine
    from deepwell.engine.dryrun.dry_run import dryrun
    from deepwell.graph.capture import capture
    from deepwell.hardware.progress import bar

    plan = None if path is None else _read_plan(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with bar("dry run", 3) as advance:
        net, example = _built(wanted, plan, device)
        advance(1)
        engine = compile_engine(capture(net, example), plan=plan, precision=wanted.precision)
        advance(1)
        run = dryrun(engine, steps=steps, batch=example, measure=measure)
        advance(1)
    return run


def _built(wanted: _Wanted, plan: Any, device: str) -> tuple[Any, Any]:
    model = _race_model(wanted.require_model()) or _hugging_face(wanted.require_model())
    size = plan.layout.micro_batch if plan is not None else wanted.batch or model.batch
    length = plan.workload.seq_len if plan is not None else wanted.seq or model.seq_len
    model = replace(model, batch=size, seq_len=length)
    return model.build(device), model.capture_inputs(model.example(device))


def _hugging_face(name: str) -> Any:
    from deepwell.bench.families import FamilyModel, need_transformers
    from deepwell.graph.configs import published_config

    found = read_model(name)
    data = dict(published_config(found)) if isinstance(found, str) else found
    if not isinstance(data, dict) or "model_type" not in data:
        raise ConfigError("--measure: only a config.json with its model_type, or a published model, can be built here")
    settings = need_transformers().AutoConfig.for_model(**data)
    return FamilyModel(name=name, settings=settings, batch=1, seq_len=min(2048, settings.max_position_embeddings))
