"""Expert load over time: pictures of layers x experts, the worst imbalance and the dropped tokens."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepwell.report.run.data import Event, RunHistory, number, step_of
from deepwell.report.run.series import picked, rounded, rounded_list

MAX_FRAMES = 60
MAX_POINTS = 1200


_Loads = dict[str, np.ndarray]  # tokens of each expert, by layer


def expert_panel(run: RunHistory, cells: int) -> dict[str, Any]:
    """Loads are relative: 1 is the layer's mean. `cells` bounds the numbers of all frames together."""
    read = [(step, _loads(event), _dropped(event), _entropy(event)) for event in run.kept("experts")
            if (step := step_of(event)) is not None]  # fmt: skip
    found = [(step, loads, dropped) for step, loads, dropped, _ in read if loads]
    entropy = [(step, value) for step, loads, _, value in read if loads]
    if not found:
        why = "No `experts` event was logged: the model has no experts, or their load was not recorded."
        return {"why": why, "frames": []}
    layers = list(dict.fromkeys(path for _, loads, _ in found for path in loads))
    experts = max(len(tokens) for _, loads, _ in found for tokens in loads.values())
    frames = min(MAX_FRAMES, len(found), max(2, cells // (len(layers) * experts)))
    edges = np.linspace(0, len(found), frames + 1).astype(int).tolist()
    return {
        "why": None,
        "layers": layers,
        "experts": experts,
        "frames": [
            {"from": part[0][0], "to": part[-1][0], "load": _frame([loads for _, loads, _ in part], layers)}
            for part in (found[low:high] for low, high in itertools.pairwise(edges))
        ],
        **_curves(found),
        "entropy": _points(entropy) if any(np.isfinite(value) for _, value in entropy) else [],
    }


def _loads(event: Event) -> _Loads:
    """What is no list of numbers is left out."""
    layers = event.get("layers")
    found = {}
    for path, tokens in layers.items() if isinstance(layers, dict) else ():
        values = np.asarray([number(one) for one in tokens] if isinstance(tokens, list) else [])
        if len(values) and np.isfinite(values).all():
            found[str(path)] = values
    return found


def _dropped(event: Event) -> float:
    """Tokens that no expert took, over all layers; NaN where the event does not say."""
    drops = event.get("dropped")
    found = [number(n) for n in drops.values()] if isinstance(drops, dict) else []
    return sum(n for n in found if np.isfinite(n)) if found else np.nan


def _entropy(event: Event) -> float:
    """The mean over layers of the routers' entropy, as a share of its maximum; NaN where the event does not say."""
    values = event.get("entropy")
    found = [number(n) for n in values.values()] if isinstance(values, dict) else []
    return float(np.mean(found)) if found else np.nan


def _points(found: Sequence[tuple[int, float]]) -> list[list[float | None]]:
    values = np.asarray([value for _, value in found])
    return [[found[i][0], rounded(values[i])] for i in picked(values, MAX_POINTS)]


def _frame(parts: Sequence[_Loads], layers: Sequence[str]) -> list[list[float | None]]:
    """The mean load of a stretch of events, one row per layer."""
    load = []
    for path in layers:
        tokens = np.zeros(0)
        for loads in parts:
            own = loads.get(path, tokens)
            tokens = tokens + own if len(own) == len(tokens) else own
        mean = float(tokens.mean()) if len(tokens) else 0.0
        load.append(rounded_list(tokens / mean if mean > 0 else tokens, 3))
    return load


def _curves(found: Sequence[tuple[int, _Loads, float]]) -> dict[str, Any]:
    steps = [step for step, _, _ in found]
    ratios = [[float(v.max() / v.mean()) for v in loads.values() if v.mean() > 0] for _, loads, _ in found]
    dropped = np.asarray([dropped for _, _, dropped in found])
    routed = np.asarray([sum(float(v.sum()) for v in loads.values()) for _, loads, _ in found])
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = dropped / routed

    def points(values: np.ndarray) -> list[list[float | None]]:
        return _points(list(zip(steps, values, strict=True)))

    return {
        "worst": points(np.asarray([max(own, default=np.nan) for own in ratios])),
        "typical": points(np.asarray([float(np.mean(own)) if own else np.nan for own in ratios])),
        "dropped": points(shares) if np.isfinite(shares).any() else [],
        "dropped_total": rounded(float(np.nansum(dropped)), 12),
        "routed_total": rounded(float(routed.sum()), 12),
    }
