"""`deepwell validate`: checks that answer yes or no with measured numbers.

Each command ends with status 1 where the answer is no. Imports stay inside the commands: the command line must not load
torch to print its help.
"""

import typer

app = typer.Typer(
    help="Check claims by measuring: accuracy of a policy, predictions of the planner.", no_args_is_help=True
)


@app.callback()
def options() -> None:
    """Check claims by measuring."""
