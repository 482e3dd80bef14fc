"""How the commands write their options."""

from typing import Any

import typer


def option(text: str, *flags: str) -> Any:
    """An option by its help; its flag is the parameter's name unless it is given."""
    return typer.Option(*flags, help=text)
