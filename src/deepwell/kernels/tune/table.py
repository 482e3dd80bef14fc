"""The table of chosen kernels, as the registry and an engine's report print it. Values without torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from deepwell.graph.table import WIDTH, text_table
from deepwell.kernels.tune.candidate import Choice
from deepwell.kernels.tune.out_of_memory import SKIPPED
from deepwell.kernels.tune.problem import Problem

_HEADER = ("kernels", "format", "times", "runs as", "us", "next best", "how")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One problem: how often it occurs, the kernel that runs it, the next best, and why others were rejected."""

    op: str
    shape: str  # MxNxK
    format: str
    count: int
    kernel: str
    us: float | None = None
    next_best: str = ""
    how: str = ""
    set_aside: tuple[tuple[str, str], ...] = ()


def row_of(problem: Problem, choice: Choice, count: int = 1) -> KernelRow:
    """The row of a problem that was met so often."""
    times = {verdict.name: verdict.us for verdict in choice.verdicts}
    others = [name for name in choice.ranking() if name != choice.kernel and times[name] is not None]
    return KernelRow(
        op=problem.op,
        shape=problem.size,
        format=problem.precision,
        count=count,
        kernel=choice.kernel,
        us=choice.us,
        next_best=f"{others[0]} {times[others[0]]:.1f}" if others else "",
        how=choice.how,
        set_aside=tuple((verdict.name, verdict.reason) for verdict in choice.rejected()),
    )


def merge_rows(known: dict[tuple[str, str, str, str], KernelRow], rows: Iterable[KernelRow]) -> None:
    """Add rows up by op, shape, format and kernel."""
    for row in rows:
        key = (row.op, row.shape, row.format, row.kernel)
        known[key] = replace(row, count=row.count + (known[key].count if key in known else 0))


def kernel_table(rows: Sequence[KernelRow]) -> list[str]:
    """Each problem in a line; then who was rejected and why, each reason once."""
    cells: list[Sequence[str]] = [_HEADER]
    for row in rows:
        us = "" if row.us is None else f"{row.us:.1f}"
        cells.append((f"{row.op} {row.shape}", row.format, str(row.count), row.kernel, us, row.next_best, row.how))
    if not any(row.next_best for row in rows):
        cells = [[*cell[:5], *cell[6:]] for cell in cells]
    reasons = dict.fromkeys(
        f"{name} was {reason if reason.startswith(SKIPPED) else f'rejected: {reason}'}"
        for row in rows
        for name, reason in row.set_aside
    )
    return [*text_table(cells, indent="    "), *(line for reason in reasons for line in wrapped(f"kernel {reason}"))]


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
