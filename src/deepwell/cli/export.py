"""`deepwell export`: a Hugging Face folder or a checkpoint as one engine file; `--inspect` shows what a file holds."""

from pathlib import Path
from typing import Annotated

import typer

from deepwell.cli.options import option
from deepwell.errors import ConfigError


def export_command(
    source: Annotated[Path, typer.Argument(help="A Hugging Face folder or a checkpoint; with --inspect, a file.")],
    output: Annotated[Path | None, option("The file, or the folder, to write.", "--output", "-o")] = None,
    precision: Annotated[str | None, option("bf16, fp8, mxfp8 or nvfp4; a checkpoint brings its own.")] = None,
    form: Annotated[str, option("engine (one file) or hf (a folder).", "--format")] = "engine",
    device: Annotated[str | None, option("cpu or cuda; a GPU where there is one.")] = None,
    inspect: Annotated[bool, option("Check a file and show what it holds.", "--inspect")] = False,
    as_json: Annotated[bool, option("Print JSON only.", "--json")] = False,
) -> None:
    """Write a model, its formats and its plan as one file that loads without anybody's code."""
    if inspect:
        from deepwell.artifacts.export.manifest import inspect as look

        if output is not None or precision is not None:
            raise ConfigError("--inspect only reads: leave -o and --precision out")
        found = look(source)
        typer.echo(found.to_json(indent=1) if as_json else str(found))
        return
    if output is None:
        raise ConfigError("-o is missing: name the file to write, e.g. -o model.engine")

    import torch

    from deepwell.artifacts.export.source import model_from
    from deepwell.artifacts.export.write import check_format, export
    from deepwell.engine.compile import compile as compile_engine

    check_format(form)
    model, policy, plan = model_from(source)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if where.partition(":")[0] not in ("cpu", "cuda") or (where != "cpu" and not torch.cuda.is_available()):
        raise ConfigError(f"--device is {where!r}; it takes cpu, or cuda where a GPU is")
    asked = {"precision": precision} if precision is not None or policy is None else {"precision_policy": policy}
    engine = compile_engine(model.to(where), plan=plan, **asked)
    written = export(engine, output, format=form)
    typer.echo(written.to_json(indent=1) if as_json else str(written))
