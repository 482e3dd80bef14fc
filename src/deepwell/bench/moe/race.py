"""The MoE race: each row in a process of its own with a time limit, kept as soon as it is there."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deepwell.bench.environment import environment, last_line
from deepwell.bench.moe.shapes import KERNELS, SHAPES, STEPS, TINY, WAYS
from deepwell.errors import ConfigError
from deepwell.hardware.progress import bar

# Of each row, beside the table: which kernel each stage runs by, and the longest kernels of a step.
_APART = ("chosen", "longest")


def row_names(device: str, only: Sequence[str]) -> list[tuple[str, str]]:
    """(block, way) of every row, or (model, "step"); `only` names blocks, ways, models, "kernels" or "steps".

    Raises ConfigError on a name that means nothing.
    """
    shapes = SHAPES if device == "cuda" else TINY
    rows = [(shape, way) for shape in shapes for way in (*WAYS, KERNELS)]
    rows += [(model, "step") for model in STEPS] if device == "cuda" else []
    known = {name for row in rows for name in row}
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(f"--only {', '.join(unknown)} is no row; rows are named by {', '.join(sorted(known))}")
    if not only:
        return rows
    # Blocks and ways narrow each other.
    blocks = {name for name in only if name in shapes or name in STEPS}
    ways = set(only) - blocks
    return [row for row in rows if (not blocks or row[0] in blocks) and (not ways or row[1] in ways)]


def run_moe(
    device: str,
    only: Sequence[str] = (),
    *,
    timeout_s: float = 300.0,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """All rows. `keep` gets the result after each of them."""
    title = "MoE: a block's forward and backward; memory beyond weights and input; steps as `deepwell bench step`"
    result: dict[str, Any] = {"bench": "moe", "title": title, "environment": environment(), "rows": [], "kernels": []}
    result |= {part: {} for part in _APART}
    names = row_names(device, only)
    base: dict[str, float] = {}
    with bar("moe", len(names)) as advance:
        for block, way in names:
            found = _step(block, timeout_s) if way == "step" else _in_process(block, way, device, timeout_s)
            for row in found:
                for part in _APART:
                    if found_part := row.pop(part, None):
                        result[part][f"{block} {way}"] = found_part
            result["kernels" if way == KERNELS else "rows"] += found
            for row in result["rows"]:
                if row.get("ms"):  # how much faster than the first of its block
                    row["speed"] = base.setdefault(row["block"], row["ms"]) / row["ms"]
            if keep is not None:
                keep(result)
            advance(1)
    return result


def _in_process(block: str, way: str, device: str, timeout_s: float) -> list[dict[str, Any]]:
    key = {"block": block, "way": way}
    made = last_line(["deepwell.bench.moe.block", block, way, device], timeout_s)
    if isinstance(made, str):
        # A peer may not be installed; ours must run.
        return [{**key, "note": made} | ({"problems": [made]} if way.startswith(("deepwell", KERNELS)) else {})]
    return [{"block": block, **row} for row in made] if isinstance(made, list) else [made]


def _step(model: str, timeout_s: float) -> list[dict[str, Any]]:
    """Rows of `deepwell bench step`: torch.compile, Deepwell as it comes, and in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        command = ["deepwell", "bench", "step", "--model", model, "--peers", "torch", "--variants", "fp8,bf16"]
        # Three entrants, each of which compiles a model.
        made = last_line([*command, "--json", str(file)], 3 * timeout_s)
        if not file.exists():
            return [{"block": model, "way": "step", "note": made if isinstance(made, str) else "no result"}]
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    kept = ("ms", "peak_gb", "note", "problems")
    return [
        {"block": model, "way": row["name"], **{key: row[key] for key in kept if row.get(key) is not None}}
        for row in rows
    ]
