"""Benchmark results as a table to read and as a JSON file to keep."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepwell.bench.environment import one_line
from deepwell.errors import ConfigError
from deepwell.graph.table import text_table


def write(result: dict[str, Any], path: Path) -> None:
    """Keep a result. Raises ConfigError where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written: {error.strerror}") from error


def check_writable(path: Path) -> None:
    """Raise ConfigError where a result could not be kept, before the time for it is spent."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written: {error.strerror}") from error


def step_table(result: dict[str, Any]) -> str:
    """Whole steps: the first row that has a time is what the others are compared with."""
    rows = result["rows"]
    base = next((row["ms"] for row in rows if row["ms"]), None)
    columns = ("", "ms", "speed", "tokens/s", "GPU idle ms", "peak GB", "first steps s", "loss", "ran as claimed")
    cells: list[Sequence[str]] = [columns]
    for row in rows:
        if row["ms"] is None:
            cells.append((row["name"], "-", *[""] * (len(columns) - 3), row["note"]))
            continue
        ran = "yes" if row["claims"] and not row["problems"] else "; ".join(row["problems"]) or "not asked"
        cells.append(
            (
                row["name"],
                f"{row['ms']:.2f}",
                f"{base / row['ms']:.3f}x" if base else "",
                f"{row['tokens_per_s']:,.0f}",
                "" if row["idle_ms"] is None else f"{row['idle_ms']:.2f}",
                "" if row["peak_gb"] is None else f"{row['peak_gb']:.2f}",
                f"{row['first_steps_s']:.1f}",
                f"{row['losses'][-1]:.4f}",
                ran,
            )
        )
    title = (
        f"{result['model']}: {result['parameters'] / 1e9:.3f}e9 parameters, {result['tokens']:,} tokens a step, "
        f"forward + backward + AdamW; medians of {result['samples']} steps, {result['order']}"
    )
    checked = [(row["name"], row["gradients"]) for row in rows if row.get("gradients")]
    lines = [
        f"{name}: gradients of one sequence of {found['tokens']} have cosine {found['cosine']:.5f} with eager's, "
        f"the lowest {found['lowest cosine']:.5f} ({found['lowest of']})"
        for name, found in checked
    ]
    return "\n".join([_page(title, cells, result), *lines])


def kernel_table(result: dict[str, Any]) -> str:
    """Milliseconds of single kernels: one row each, with whatever else a row holds."""
    rows = result["rows"]
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in ("note", "problems")))
    cells: list[Sequence[str]] = [columns]
    for row in rows:
        values = [_cell(row.get(column)) for column in columns]
        remark = row.get("note") or "; ".join(row.get("problems", ()))
        cells.append([*values[:-1], remark] if remark else values)
    return _page(result["title"], cells, result)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _page(title: str, cells: list[Sequence[str]], result: dict[str, Any]) -> str:
    return "\n".join([title, *text_table(cells), one_line(result["environment"])])


def has_problems(result: dict[str, Any]) -> bool:
    """Whether a row did not run, or not as it claims."""
    return any(row.get("problems") for row in result["rows"])
