"""One run, or several to compare, as one HTML page: offline, self-contained, also while a run is still writing.

Path("run.html").write_text(run_page(read_runs(["runs/a", "runs/b"])))
"""

from collections.abc import Sequence

from deepwell.report.page import render_page
from deepwell.report.run.data import RunHistory
from deepwell.report.run.panels import page_data

# Name, title, what it shows, whether it is half as wide as the page.
_PANELS = (
    ("loss", "Loss", "Training and evaluation; diamonds are guard events, dashed steps were lost to a restart.", False),
    ("optimizer", "Gradient norm and learning rate", "Before clipping, and as the schedule has it.", True),
    ("throughput", "Throughput and MFU", "Tokens per second and GPU; MFU against the bf16 peak.", True),
    ("memory", "Memory", "Peak of each step on the fullest GPU, against what it may fill.", True),
    ("predicted", "Predicted against real", "Step time as the plan predicted it and as it was measured.", True),
    ("guard", "Guard events", "What was skipped, which layers changed their format, and why.", False),
    ("precision", "Precision map over time", "The formats of each layer's GEMMs, step by step.", False),
    ("experts", "Expert load", "Tokens of each expert relative to its layer's mean; 1 is balanced.", False),
    ("goodput", "Restarts and goodput", "Where the time went.", False),
    ("checkpoints", "Checkpoints", "When the run saved, and how long training waited for it.", False),
    ("settings", "Settings", "As the run's newest start recorded them.", False),
)  # fmt: skip


def run_page(runs: Sequence[RunHistory], *, now: float | None = None, refresh_s: float | None = None) -> str:
    """The whole page as text. `now` (Unix seconds) decides what is stale; `refresh_s` lets the page reload itself."""
    data = page_data(runs, now)
    compare = (("compare", "Compared runs", "Curves over each other, final figures, settings that differ.", False),)
    return render_page(
        "run_page",
        data,
        title=" and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        panels=compare + _PANELS if len(runs) > 1 else _PANELS,
        refresh=None if refresh_s is None else max(1, round(refresh_s)),
    )
