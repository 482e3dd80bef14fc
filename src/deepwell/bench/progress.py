"""A progress bar on stderr for long work, and only where somebody looks at it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[float], None]


@contextmanager
def bar(label: str, total: float) -> Iterator[Advance]:
    """A function that moves the bar on; it does nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _amount: None
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TaskProgressColumn())
    times = (rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
    with rich.Progress(*columns, *times, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)

        def advance(amount: float) -> None:
            progress.advance(task, amount)

        yield advance
