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
    read = [(step, loads, event) for event in run.kept("experts")
            if (step := step_of(event)) is not None and (loads := _loads(event))]  # fmt: skip
    if not read:
        why = "No `experts` event was logged: the model has no experts, or their load was not recorded."
        return {"why": why, "frames": []}
    layers = list(dict.fromkeys(path for _, loads, _ in read for path in loads))
    experts = max(len(tokens) for _, loads, _ in read for tokens in loads.values())
    frames = min(MAX_FRAMES, len(read), max(2, cells // (len(layers) * experts)))
    edges = np.linspace(0, len(read), frames + 1).astype(int).tolist()
    steps = [step for step, _, _ in read]
    ratios = [[float(v.max() / v.mean()) for v in loads.values() if v.mean() > 0] for _, loads, _ in read]
    # Tokens that no expert took, over all layers; the routers' entropy as a share of its maximum.
    dropped = np.asarray([np.nansum(own) if own else np.nan for own in (_by_layer(e, "dropped") for _, _, e in read)])
    entropy = np.asarray([np.mean(own) if own else np.nan for own in (_by_layer(e, "entropy") for _, _, e in read)])
    routed = np.asarray([sum(float(v.sum()) for v in loads.values()) for _, loads, _ in read])
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = dropped / routed

    def points(values: np.ndarray) -> list[list[float | None]]:
        return [[steps[i], rounded(values[i])] for i in picked(values, MAX_POINTS)]

    return {
        "why": None,
        "layers": layers,
        "experts": experts,
        "frames": [
            {"from": part[0][0], "to": part[-1][0], "load": _frame([loads for _, loads, _ in part], layers)}
            for part in (read[low:high] for low, high in itertools.pairwise(edges))
        ],
        "worst": points(np.asarray([max(own, default=np.nan) for own in ratios])),
        "typical": points(np.asarray([float(np.mean(own)) if own else np.nan for own in ratios])),
        "dropped": points(shares) if np.isfinite(shares).any() else [],
        "dropped_total": rounded(float(np.nansum(dropped)), 12),
        "routed_total": rounded(float(routed.sum()), 12),
        "entropy": points(entropy) if np.isfinite(entropy).any() else [],
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


def _by_layer(event: Event, name: str) -> list[float]:
    values = event.get(name)
    return [number(value) for value in values.values()] if isinstance(values, dict) else []


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
