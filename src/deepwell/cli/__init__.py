"""The command line: `deepwell probe`, `deepwell doctor`; `python -m deepwell` is the same.

Exit status: 0 done, 1 the answer is no (`doctor` found something required broken), 2 the request is wrong (one line on
stderr says how; `--debug` adds the traceback).
"""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from deepwell import __version__
from deepwell.cli import bench, build, data, dryrun, export, plan, report, train
from deepwell.cli.options import option
from deepwell.cli.validate import app as validate
from deepwell.errors import ConfigError, DeepwellError


class _Group(TyperGroup):
    """Prints Deepwell's own errors as one line with status 2; other errors are bugs and keep their traceback."""

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except DeepwellError as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"deepwell: {error}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Group,
    name="deepwell",
    help="Train transformer and MoE models in low precision, at the speed of the hardware.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.add_typer(validate.app, name="validate")
app.command("build")(build.build_command)
app.command("plan")(plan.plan_command)
app.command("dryrun")(dryrun.dryrun_command)
app.command("train")(train.train_command)
app.command("report")(report.report_command)
app.command("export")(export.export_command)
app.add_typer(data.app, name="data")


_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "absent": "bright_black"}


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"deepwell {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, option("Show the traceback of an error.", "--debug")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train transformer and MoE models in low precision, at the speed of the hardware."""


@app.command("probe")
def probe_command(
    name: Annotated[str | None, typer.Argument(help="A named machine: H200, 8xB200, 64x8xH100, gb200-nvl72:4.")] = None,
    measure: Annotated[bool, option("Time copies and GEMMs here and keep the results.", "--measure")] = False,
    budget: Annotated[float, option("Seconds to spend on measuring.")] = 20.0,
    as_json: Annotated[bool, option("Print JSON only.", "--json")] = False,
) -> None:
    """Show the GPUs, their speeds and how they are connected: of this machine, or of a named one."""
    from deepwell.hardware.probe import probe

    if measure and name is not None:
        raise ConfigError(f"--measure: {name!r} is a name; only this machine can be measured, so leave the name out")
    hw = probe(name)
    if measure:
        from deepwell.hardware.measure import measure as run

        hw = run(hw, budget_s=budget, progress=sys.stderr.isatty())
    typer.echo(hw.to_json() if as_json else str(hw))


@app.command("doctor")
def doctor_command(
    as_json: Annotated[bool, option("Print JSON only.", "--json")] = False,
) -> None:
    """Show what works here, what does not, and what to do. Ends with status 1 if something required is broken."""
    from deepwell.doctor.checks import diagnose

    diagnosis = diagnose()
    if as_json:
        typer.echo(diagnosis.to_json())
    else:
        for line in str(diagnosis).splitlines():
            colour = _COLOURS.get(line[:6].strip())
            typer.echo(typer.style(line[:6], fg=colour) + line[6:] if colour else line)
    if not diagnosis.healthy:
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point; `arguments` are the process's own unless given."""
    app(args=None if arguments is None else list(arguments), prog_name="deepwell")
