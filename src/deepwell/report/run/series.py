"""Long series made short enough to draw: extremes, ends and gaps stay; smoothing is done before, on every step."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def rounded(value: float, digits: int = 6) -> float | None:
    """A number for the page: so many significant digits; None for what JSON has no word for."""
    value = float(value)
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short


def rounded_list(values: np.ndarray, digits: int = 6) -> list[float | None]:
    return [rounded(value, digits) for value in values.tolist()]


def picked(values: np.ndarray, limit: int) -> np.ndarray:
    """Indices, in order, of at most about `limit` values: of each stretch its ends, least, greatest and first gap."""
    n = len(values)
    if n <= limit:
        return np.arange(n)
    finite = np.isfinite(values)
    edges = np.linspace(0, n, max(limit // 4, 1) + 1).astype(int)
    found = {0, n - 1}
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        inside = low + np.flatnonzero(finite[low:high])
        if len(inside) < high - low:
            found.add(low + int(np.argmin(finite[low:high])))
        if len(inside):
            part = values[inside]
            found.update((int(inside[0]), int(inside[-1]), int(inside[part.argmin()]), int(inside[part.argmax()])))
    return np.asarray(sorted(found))


def smoothed(values: np.ndarray, span: int) -> np.ndarray:
    """The mean of the `span` steps around each step, fewer at the ends; gaps are left out of it."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    at = np.arange(len(values))
    low, high = np.maximum(at - span // 2, 0), np.minimum(at + span // 2 + 1, len(values))
    found = counts[high] - counts[low]
    return np.where(found > 0, (sums[high] - sums[low]) / np.maximum(found, 1), math.nan)


def thinned(
    x: Mapping[str, np.ndarray], series: Mapping[str, np.ndarray], limit: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the x of every point that is drawn, each once; for each series its values "y" and their places "i" there).

    A series without a finite value is None.
    """
    at = {name: picked(values, limit) for name, values in series.items() if np.isfinite(values).any()}
    used = np.unique(np.concatenate([*at.values(), np.arange(0)]))
    drawn = {
        name: {"y": rounded_list(series[name][places]), "i": np.searchsorted(used, places).tolist()}
        for name, places in at.items()
    }
    return {name: rounded_list(values[used], 12) for name, values in x.items()}, {**dict.fromkeys(series), **drawn}
