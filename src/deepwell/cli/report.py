"""`deepwell report`: one offline HTML page of a run, or of several to compare; its figures as text or JSON.

Exit status: 0 done, 2 a folder has no record of a run. The run may still be writing.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from deepwell.cli.options import option
from deepwell.errors import ConfigError
from deepwell.files import write_whole

_PAGE = "report.html"


def report_command(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders that runs write to.")],
    output: Annotated[
        Path | None, option("The page; report.html in the first RUN_DIR unless given.", "-o", "--output")
    ] = None,
    as_json: Annotated[bool, option("Print the figures as JSON; a page only with -o.", "--json")] = False,
    watch: Annotated[
        float | None, typer.Option("--watch", metavar="SECONDS", help="Write the page again and again until the end.")
    ] = None,
) -> None:
    """Write one self-contained HTML page of a run: loss, speed, memory, guard events, formats, experts, restarts."""
    if watch is not None and not watch >= 1:
        raise ConfigError(f"--watch: got {watch:g}; give at least 1 second")
    if watch is not None and as_json:
        raise ConfigError("--watch writes a page and --json prints once: give one of them")
    folder = run_dirs[0].parent if run_dirs[0].is_file() else run_dirs[0]
    page = output if output is not None or as_json else folder / _PAGE
    found = _report(run_dirs, page, watch)
    if as_json:
        typer.echo(json.dumps(found[0] if len(found) == 1 else found, indent=1, allow_nan=False))
    else:
        _show(found)
    if page is not None:
        typer.echo(f"wrote {page}", err=True)
    if watch is not None:
        _watch(run_dirs, page, watch)


def _report(run_dirs: list[Path], page: Path | None, refresh_s: float | None) -> list[dict[str, Any]]:
    """Write the page, and return the figures of each run."""
    from deepwell.report.run.data import read_runs
    from deepwell.report.run.page import run_page
    from deepwell.report.run.summary import summary

    runs, now = read_runs(run_dirs), time.time()
    found = [summary(run, now) for run in runs]
    if page is not None:
        _write(page, run_page(runs, now=now, refresh_s=None if _is_over(found) else refresh_s))
    return found


def _watch(run_dirs: list[Path], page: Path | None, seconds: float) -> None:
    """Write the page every so many seconds until each run has finished or given up; what failed may start again."""
    found = _report(run_dirs, page, seconds)
    try:
        while not _is_over(found):
            time.sleep(seconds)
            found = _report(run_dirs, page, seconds)
    except KeyboardInterrupt:
        return
    _show(found)


def _is_over(found: list[dict[str, Any]]) -> bool:
    return all(one["state"] in ("finished", "gave up") for one in found)


def _show(found: list[dict[str, Any]]) -> None:
    from deepwell.report.run.summary import summary_text

    for one in found:
        typer.echo(summary_text(one))


def _write(page: Path, text: str) -> None:
    try:
        write_whole(page, text)  # a browser may load the page at any moment
    except OSError as error:
        raise ConfigError(f"-o: cannot write {page}: {error}") from error
