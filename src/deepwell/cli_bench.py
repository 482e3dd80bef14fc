"""`deepwell bench`: time whole training steps and single kernels beside their peers, and keep the tables.

Imports stay inside the commands: the command line loads no torch.
"""

import typer

app = typer.Typer(help="Time training steps and kernels beside their peers.", no_args_is_help=True)


@app.callback()
def options() -> None:
    """Time training steps and kernels beside their peers."""
