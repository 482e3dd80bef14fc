"""A progress bar on stderr for long work, and only where somebody looks at it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Advance = Callable[..., None]


@contextmanager
def bar(label: str, total: float, *, shown: bool | None = None) -> Iterator[Advance]:
    """`advance(amount)` moves the bar on, with description=, completed= or total= it changes that.

    Nothing is drawn where stderr is no terminal, unless `shown` says otherwise.
    """
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda _amount=0.0, **_changes: None
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TaskProgressColumn())
    times = (rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
    with rich.Progress(*columns, *times, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)

        def advance(amount: float = 0.0, **changes: Any) -> None:
            progress.update(task, advance=amount, **changes)

        yield advance
