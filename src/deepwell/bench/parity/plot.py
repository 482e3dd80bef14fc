"""The curves of a parity test as a picture: training loss, held-out loss, and the gap to bf16."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepwell.bench.parity.compare import BASELINE, Results
from deepwell.bench.parity.run import RunRecord
from deepwell.errors import ConfigError


def plot(results: Results, path: Path) -> Path:
    """Write the picture. Raises ConfigError where matplotlib is missing or there is nothing to draw."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("the picture needs matplotlib: pip install matplotlib; the JSON holds the curves") from error
    records = [record for record in results.records if record.losses]
    if not records:
        raise ConfigError(f"{results.path} holds no curve yet")
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    arms = list(dict.fromkeys(record.arm for record in records))
    colours = {arm: f"C{number % 10}" for number, arm in enumerate(arms)}
    for record in records:
        _draw(left, record, colours, [(step, loss) for step, loss in record.losses])
        _draw(middle, record, colours, [(entry["step"], entry["own"]) for entry in record.held])
        gaps = _gaps(record, records)
        if gaps:
            _draw(right, record, colours, gaps)
    right.axhline(0.0, color="black", linewidth=0.8)
    for axes, title in ((left, "training loss"), (middle, "held-out loss, own precision"), (right, "gap to bf16, %")):
        axes.set_title(title)
        axes.set_xlabel("million tokens")
        axes.grid(alpha=0.3)
    handles = {text.get_label(): text for text in left.get_lines()}
    left.legend(handles.values(), handles.keys(), fontsize=8)
    figure.savefig(path, dpi=130)
    return path


def _draw(axes: Any, record: RunRecord, colours: dict[str, str], points: Sequence[tuple[float, float]]) -> None:
    scale = record.setup.batch * record.setup.seq_len / 1e6
    styles = ("-", "--", ":", "-.")
    axes.plot(
        [step * scale for step, _ in points],
        [value for _, value in points],
        styles[record.seed % len(styles)],
        color=colours[record.arm],
        label=f"{record.arm}, seed {record.seed}",
        marker="." if len(points) < 20 else None,
        linewidth=1.0,
    )


def _gaps(record: RunRecord, records: Sequence[RunRecord]) -> list[tuple[float, float]]:
    """(step, gap in percent) of a run to bf16's with the same seed, setup and data, where both were evaluated."""
    if record.arm == BASELINE:
        return []
    for other in records:
        same = (other.arm, other.seed, other.data) == (BASELINE, record.seed, record.data)
        if same and other.setup == record.setup:
            base = {entry["step"]: entry["own"] for entry in other.held}
            held = [(entry["step"], entry["own"]) for entry in record.held if entry["step"] in base]
            return [(step, 100 * (own / base[step] - 1)) for step, own in held]
    return []
