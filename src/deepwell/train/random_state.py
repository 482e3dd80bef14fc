"""The random states of one process as small tensors, so that a resumed run draws the numbers it would have drawn."""

import math
import random

import numpy as np
import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Python's, numpy's and torch's random states, and that of the GPU this process computes on."""
    _, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    assert kind == "MT19937"
    state = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64).copy()),
        "numpy_rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state().clone(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).clone()
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Go on from a saved state; what is missing in it stays as it is."""
    if "python" in state:
        gauss = float(state["python_gauss"][0])
        words = tuple(int(word) for word in state["python"])
        random.setstate((3, words, None if math.isnan(gauss) else gauss))
    if "numpy" in state:
        position, has_gauss, cached = (float(value) for value in state["numpy_rest"])
        keys = state["numpy"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    if "torch" in state:
        torch.set_rng_state(state["torch"].to(torch.uint8).cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].to(torch.uint8).cpu(), device)


def seed_all(seed: int, rank: int, step: int = 0) -> None:
    """Seed all generators of a process: each rank its own numbers, each start from another step others."""
    mixed = (seed * 1_000_003 + rank * 7_919 + step * 104_729) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
