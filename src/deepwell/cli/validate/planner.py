"""`deepwell validate planner`: the planner's predictions against published training runs."""

from pathlib import Path
from typing import Annotated

import typer

from deepwell.cli.options import option
from deepwell.errors import ConfigError


def planner_command(
    file: Annotated[
        Path | None,
        typer.Argument(help="A CSV file with the columns of published_runs.csv; the packaged one if left out."),
    ] = None,
    json_out: Annotated[
        str | None, typer.Option("--json", metavar="OUT", help="Write every figure and row to OUT; - is stdout.")
    ] = None,
    as_markdown: Annotated[bool, option("Print the table as Markdown, for documents.", "--markdown")] = False,
) -> None:
    """Compare predicted step times, memory and picks with published runs, per source and overall."""
    from deepwell.hardware.progress import bar
    from deepwell.planner.published import packaged_runs, read_runs
    from deepwell.planner.published.validate import validate

    runs = packaged_runs() if file is None else read_runs(file)
    with bar("predicting", len(runs)) as advance:
        result = validate(runs, tick=lambda: advance(1))
    if json_out == "-":
        typer.echo(result.to_json())
        return
    typer.echo(result.to_markdown() if as_markdown else str(result))
    if json_out is not None:
        try:
            Path(json_out).write_text(result.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json: {json_out} cannot be written ({error})") from error
