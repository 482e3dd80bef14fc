"""AdamW over the parameters of a Llama-8B with four layers (1.92e9, bf16, bf16 moments): adamw_dw beside torch's.

Bytes are counted, not measured: gradient read, parameter and both moments read and written.
"""

import statistics
from typing import Any

import torch
from torch import Tensor

from deepwell.bench.attention import in_turns
from deepwell.bench.environment import environment
from deepwell.bench.families import FamilyModel
from deepwell.bench.models import RaceModel
from deepwell.bench.ran import profile
from deepwell.hardware.progress import bar
from deepwell.train.adamw.optimizer import AdamWDW

_BYTES = 2 + 2 * 2 + 2 * 2 * 2


def shapes_of(model: RaceModel | FamilyModel) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in model.on_meta().parameters()]


def run_adamw(model: RaceModel | FamilyModel, device: str = "cuda", *, rounds: int = 10) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    steps: dict[str, Any] = {}
    ways: dict[str, Any] = {
        "torch fused": lambda params: torch.optim.AdamW(params, lr=1e-5, fused=True),
        "adamw_dw, nearest": lambda params: AdamWDW(params, lr=1e-5, moments="bf16", stochastic_rounding=False),
        "adamw_dw": lambda params: AdamWDW(params, lr=1e-5, moments="bf16"),
        "adamw_dw, clipped": lambda params: AdamWDW(params, lr=1e-5, moments="bf16", clip_norm=1.0),
        "adamw_dw, fp8 moments": lambda params: AdamWDW(params, lr=1e-5, moments="fp8"),
    }
    params = _parameters(shapes_of(model), device)
    count = sum(p.numel() for p in params)
    with bar("adamw", rounds + 1) as advance:
        for name, make in ways.items():
            steps[name] = make(params).step
            for _ in range(2):
                steps[name]()
        advance(1)
        times = in_turns(steps, rounds, device, advance)
    base = statistics.median(times["torch fused"])
    for name, found in times.items():
        ms = statistics.median(found)
        row: dict[str, Any] = {"optimizer": name, "ms": ms, "speed": base / ms}
        if "moments" not in name:
            row["TB/s"] = count * (_BYTES + 2 * name.endswith("clipped")) / ms / 1e9
        if device == "cuda":
            row["kernel"] = profile(steps[name])[0].name[:60]
            row["problems"] = (
                [] if ("adamw" in row["kernel"]) == name.startswith("adamw_dw") else ["another kernel ran"]
            )
        rows.append(row)
    title = f"AdamW, {count / 1e9:.3f}e9 bf16 parameters in {len(params)} tensors; medians of {rounds}, in turns"
    return {"bench": "adamw", "title": title, "environment": environment(), "rows": rows}


def _parameters(shapes: list[tuple[int, ...]], device: str) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        param = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02, generator=generator)
        param.grad = torch.empty_like(param).normal_(std=1e-3, generator=generator)
        params.append(param)
    return params
