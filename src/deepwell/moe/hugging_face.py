"""Hugging Face's experts computed by `experts_mlp`: what `model.set_experts_implementation("deepwell")` runs.

What lies between an expert's products is read from the module: its gate is tried on a few numbers and compared with
the activations that `experts_mlp` knows. A gate that is none of them runs as Hugging Face's grouped products.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.kernels.activation.functions import ACTIVATIONS
from deepwell.kernels.experts.mlp import experts_mlp
from deepwell.kernels.experts.reference import ExpertActivation

NAME = "deepwell"
_KNOWN = "_deepwell_activation"  # on a module, what was found out about it
_SHIFTS = (0.0, 1.0)
_FUNCTIONS = (*ACTIVATIONS, "relu2")
# Dynamo of torch 2.11 takes no module for a constant: a gate is unknown there until its model was called once.
READS_IN_TRACES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module of Hugging Face's interface."""
    how = activation_of(self)
    if how is None:
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    w_gate_up, w_down, biases = weights_of(self)
    x = hidden_states.to(w_down.dtype)  # under autocast a norm may have made it another one
    index, weight = top_k_index.reshape(len(x), -1), top_k_weights.reshape(len(x), -1)
    out = experts_mlp(x, w_gate_up, w_down, index, weight, biases=biases, activation=how)
    return out.to(hidden_states.dtype)


def weights_of(module: Any) -> tuple[Any, Any, Any]:
    """([E, G, H], [E, H, F], both biases or None) of an experts module, as views."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    weights = (getattr(module, first), module.down_proj)
    w_gate_up, w_down = (w.transpose(1, 2) for w in weights) if module.is_transposed else weights
    biases = (getattr(module, f"{first}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
    return w_gate_up, w_down, biases


def register() -> None:
    """Make `experts_implementation="deepwell"` known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def activation_of(module: nn.Module) -> ExpertActivation | None:
    """What an experts module does between its products, None where it is none of the known ones."""
    known = module.__dict__
    if _KNOWN not in known:
        if torch.compiler.is_compiling():
            # Not kept: the graph would be made for a module that has no such entry.
            return _read(module) if READS_IN_TRACES else None
        known[_KNOWN] = _read(module)
    return known[_KNOWN]


def read_activations(model: nn.Module) -> dict[str, ExpertActivation | None]:
    """By path, the activation of each experts module that asks its config which implementation to run."""
    return {path: activation_of(m) for path, m in model.named_modules() if chooses_experts(m)}


def chooses_experts(module: Any) -> bool:
    """Whether a module's forward asks its config which of Hugging Face's implementations of experts to run."""
    has_flags = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))
    return has_flags and hasattr(getattr(module, "config", None), "_experts_implementation_internal")


@torch.compiler.assume_constant_result  # runs while a graph is made
@torch.no_grad()
def _read(module: Any) -> ExpertActivation | None:
    function = getattr(module, "_apply_gate" if module.has_gate else "act_fn", None)
    shapes = [getattr(module, name, None) for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")]
    if not callable(function) or any(not isinstance(weight, Tensor) or weight.dim() != 3 for weight in shapes):
        return None
    numbers = torch.linspace(-12, 12, 97, device="cpu")
    rows = numbers[torch.randperm(97, generator=torch.Generator().manual_seed(0), device="cpu")].expand(2, 97).clone()
    rows[1] = numbers.flip(0)
    rows = rows[:, :96]
    wanted = function(rows)
    fits = (how for how in activations_of(module, has_gate=module.has_gate) if _equal(how.of_rows(rows), wanted))
    return next(fits, None)


def _equal(made: Tensor, wanted: Any) -> bool:
    is_shaped = isinstance(wanted, Tensor) and made.shape == wanted.shape
    return is_shaped and torch.allclose(made, wanted, rtol=1e-6, atol=1e-7)


def activations_of(module: nn.Module, *, has_gate: bool) -> Iterator[ExpertActivation]:
    """What `experts_mlp` can compute between the products of a module with these numbers in it."""
    if not has_gate:
        yield from (ExpertActivation(function=name, gated=False) for name in _FUNCTIONS)
        return
    numbers = {k: v for k, v in vars(module).items() if isinstance(v, float | int) and not isinstance(v, bool)}
    limits = [None, *(float(v) for k, v in numbers.items() if "limit" in k)]
    alphas = [None, *(float(v) for k, v in numbers.items() if "alpha" in k)]
    for limit, alpha, shift, interleaved in itertools.product(limits, alphas, _SHIFTS, (False, True)):
        for name in _FUNCTIONS if alpha is None else ("silu",):
            yield ExpertActivation(function=name, interleaved=interleaved, limit=limit, alpha=alpha, up_shift=shift)
