"""`deepwell validate faults`: a tiny run is killed again and again and must lose nothing."""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from deepwell.cli.options import option
from deepwell.errors import ConfigError, DeepwellError


def faults_command(
    kills: Annotated[int, option("SIGKILLs of workers and agents; other signals come on top.")] = 100,
    world: Annotated[int, option("Processes of the run.")] = 2,
    seed: Annotated[int, option("Of what is struck when.")] = 0,
    minutes: Annotated[float, option("No kill is begun later than this.")] = 60.0,
    json_out: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write every figure to FILE; - is stdout.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="Keep the runs, their events and logs in DIR.")
    ] = None,
    as_markdown: Annotated[bool, option("Print the tables as Markdown, for documents.", "--markdown")] = False,
) -> None:
    """Kill a tiny run at random moments, inside checkpoint writes too, and compare it with an undisturbed one.

    Status 1 where tokens were skipped or repeated, where the final state is not bit for bit that of the undisturbed
    run, where a checkpoint does not verify, or where files or processes are left behind.
    """
    from deepwell.bench.faults import FaultSetup, run_faults

    setup = FaultSetup(kills=kills, world=world, seed=seed, minutes=minutes)
    if json_out not in (None, "-") and not Path(json_out).absolute().parent.is_dir():
        raise ConfigError(f"--json: {Path(json_out).parent} is no folder")

    def say(line: str) -> None:
        typer.echo(line, err=True)

    with tempfile.TemporaryDirectory(prefix="deepwell-faults-", ignore_cleanup_errors=True) as scratch:
        try:
            result = run_faults(setup, Path(scratch) if keep is None else keep, say)
        except DeepwellError as error:
            if isinstance(error, ConfigError):
                raise
            typer.echo(f"deepwell: {error}", err=True)
            raise typer.Exit(1) from error
    if json_out is not None:
        text = json.dumps(result.to_dict(), indent=1)
        if json_out == "-":
            typer.echo(text)
        else:
            Path(json_out).write_text(text + "\n", encoding="utf-8")
    if json_out != "-":
        typer.echo(result.to_markdown() if as_markdown else str(result))
    if not result.ok:
        raise typer.Exit(1)
