"""Leave a model as it was: everything that tracing may touch is noted before and put back after.

Tracing changes settings on purpose (attention and experts implementation, the key-value cache), and the code it runs may change
the rest: buffers registered inside forward, cached tables, random states, hooks. `preserved` undoes all of it.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def preserved(model: nn.Module, *, values: bool) -> Iterator[None]:
    """Restore attributes, hooks, configs, random states and autograd mode on exit; with `values`, what buffers hold as well."""
    namespaces = [module.__dict__ for module in model.modules()] + [vars(config) for config in model_configs(model)]
    before = [(space, _copied(space)) for space in namespaces]
    buffers = [(b, b.detach().clone()) for b in model.buffers() if values and b.device.type != "meta"]
    grads = [(p, p.grad) for p in model.parameters()]
    grad_enabled = torch.is_grad_enabled()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_grad_enabled(grad_enabled)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for space, old in before:
            _restore(space, old)
        with torch.no_grad():
            for buffer, old_value in buffers:
                buffer.copy_(old_value)
        for parameter, grad in grads:
            parameter.grad = grad


def _copied(space: dict[str, Any]) -> dict[str, Any]:
    # Parameters, buffers, submodules and hooks live in dictionaries inside the module's own: note their entries too.
    return {
        name: (value, value.copy() if isinstance(value, (dict, list, set)) else None) for name, value in space.items()
    }


def _restore(space: dict[str, Any], old: dict[str, Any]) -> None:
    for name in [name for name in space if name not in old]:
        del space[name]
    for name, (value, entries) in old.items():
        space[name] = value
        if entries is None or value == {} == entries:
            continue
        if isinstance(value, list):
            value[:] = entries
        else:
            value.clear()
            value.update(entries)


def model_configs(model: nn.Module) -> list[Any]:
    """Every distinct Hugging Face config that a module of the model holds, nested ones included."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    found: dict[int, Any] = {}
    pending = [m.__dict__.get("config") for m in model.modules()]
    while pending:
        config = pending.pop()
        if isinstance(config, transformers.PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            pending.extend(vars(config).values())
    return list(found.values())


def choose_traceable_implementations(model: nn.Module) -> None:
    """Set a Hugging Face model to fused attention, grouped expert GEMMs and no key-value cache. Call inside `preserved`.

    Attention: `sdpa` where the class supports it (one node instead of a softmax spelled out), else `eager`. Experts:
    `grouped_mm`, since the looped default reads routing counts on the host. A class that fixes its attention modules when it is
    built keeps what it was built with: its mask would not fit the other implementation.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    for config in model_configs(model):
        if getattr(config, "use_cache", False):
            config.use_cache = False
    for module in model.modules():
        if not isinstance(module, transformers.PreTrainedModel):
            continue
        if module._can_set_attn_implementation():
            module.config._attn_implementation_internal = module.get_correct_attn_implementation(None)
        if module._can_set_experts_implementation():
            module.config._experts_implementation_internal = module.get_correct_experts_implementation(None)
