"""Whether an engine's gradients are those of the model as it was written, on one short sequence at the real width."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.bench.families import FamilyModel
from deepwell.bench.models import RaceModel
from deepwell.bench.variants import Variant

SEQ_LEN = 256
# FP8 leaves 0.998 of a deep stack's gradient, tokens that change their experts some hundredths less.
MIN_COSINE = 0.95


def against_eager(model: RaceModel | FamilyModel, variant: Variant, device: str) -> tuple[dict[str, Any], list[str]]:
    """The engine's loss and gradients beside eager's in the model's own dtype, and what is wrong with them in words."""
    small = model.small(SEQ_LEN)
    net, example = small.build(device), small.example(device)
    losses, grads = [], []
    # Eager first: the engine is made when nothing else will ask the model anything.
    for make in (lambda: net, lambda: variant.engine(net, small.capture_inputs(example))):
        loss = small.loss_of(make(), example)
        loss.backward()
        losses.append(loss.item())
        grads.append(_taken(net))
    found = _compare(*grads)
    found |= {"tokens": small.tokens, "loss": losses[1], "loss of eager": losses[0]}
    wrong = [f"gradients: {name} has one in eager alone" for name in found.pop("missing")]
    if not found["cosine"] >= MIN_COSINE:
        wrong.append(f"gradients: cosine with eager's {found['cosine']:.4f}, below {MIN_COSINE}")
    if not abs(losses[1] - losses[0]) <= 0.02 * abs(losses[0]):
        wrong.append(f"loss {losses[1]:.4f} where eager's is {losses[0]:.4f}")
    return found, wrong


def _taken(net: nn.Module) -> dict[str, Tensor]:
    grads = {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}
    net.zero_grad(set_to_none=True)
    return grads


def _compare(wanted: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, Any]:
    """The cosine over all parameters, and the lowest of one that has a share in the gradient at all."""
    sums = torch.zeros(3, dtype=torch.float64)
    cosines = {}
    for name, grad in wanted.items():
        if name in got:
            x, y = grad.flatten().float(), got[name].flatten().float()
            parts = torch.stack((x @ y, x @ x, y @ y)).double().cpu()
            cosines[name] = _cosine(parts), parts[1].item()
            sums += parts
    # One that is all but zero is all rounding.
    judged = {name: cosine for name, (cosine, square) in cosines.items() if square > 1e-8 * sums[1].item()}
    lowest = min(judged, key=lambda name: judged[name] if not math.isnan(judged[name]) else -2.0, default="")
    return {
        "cosine": _cosine(sums),
        "lowest cosine": judged.get(lowest, math.nan),
        "lowest of": lowest,
        "missing": sorted(wanted.keys() - got.keys()),
    }


def _cosine(parts: Tensor) -> float:
    product, x, y = parts.tolist()
    return product / math.sqrt(x * y) if x * y else math.nan
