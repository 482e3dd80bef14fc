"""Leave a model as it was: everything that tracing may touch is noted before and put back after.

Tracing changes settings on purpose (attention and experts implementation, the key-value cache), and the code it runs
may change the rest: buffers registered inside forward, cached tables, random states, hooks. `preserved` undoes all of
it.
"""

import dataclasses
import random
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from deepwell.graph.example_inputs import ExampleInputs


@contextmanager
def preserved(model: nn.Module, *, values: bool) -> Iterator[None]:
    """Restore attributes, hooks, configs, random states and gradients on exit; with `values`, what tensors hold too.

    That is buffers and tensors that are attributes, not parameters: those of a large model have no room twice.
    """
    namespaces = [module.__dict__ for module in model.modules()] + [vars(config) for config in model_configs(model)]
    before = [(space, _copied(space)) for space in namespaces]
    contents = [(t, t.detach().clone()) for t in _held_tensors(model)] if values else []
    grads = [(p, p.grad) for p in model.parameters()]
    grad_enabled = torch.is_grad_enabled()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
            yield
    finally:
        torch.set_grad_enabled(grad_enabled)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for space, old in before:
            _restore(space, old)
        with torch.no_grad():
            for tensor, content in contents:
                if not torch.equal(tensor, content):
                    tensor.copy_(content)
        for parameter, grad in grads:
            parameter.grad = grad


def _held_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Buffers, and attributes that are tensors, each once."""
    held = [*model.buffers(), *(value for module in model.modules() for value in vars(module).values())]
    tensors = {id(t): t for t in held if isinstance(t, torch.Tensor) and t.layout is torch.strided}
    return [t for t in tensors.values() if t.device.type != "meta"]


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
        if entries is None:
            continue
        if isinstance(value, list):
            value[:] = entries
        else:
            value.clear()
            value.update(entries)


def fill_meta_tensors(model: nn.Module, inputs: ExampleInputs, skip: Collection[str]) -> ExampleInputs:
    """Put fake tensors of a real device in the place of meta ones, in model and inputs. Call inside `preserved`.

    A tensor that a forward makes on the meta device is no fake tensor to Dynamo, and their mix is an error; on a real
    device Dynamo makes fakes of both. No memory is taken. Modules under the paths of `skip` are skipped: they do not
    run.
    """
    tensors = [*model.parameters(), *model.buffers()]
    real = next((t.device for t in tensors if t.device.type != "meta"), torch.device("cpu"))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    filled: dict[int, torch.Tensor] = {}  # tied tensors stay tied

    def fill(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "meta":
            return value
        if id(value) not in filled:
            with mode:
                fake: torch.Tensor = torch.empty_like(value, device=real)
            is_parameter = isinstance(value, nn.Parameter)
            filled[id(value)] = nn.Parameter(fake, requires_grad=value.requires_grad) if is_parameter else fake
        return filled[id(value)]

    skipped = {id(m) for path in skip for m in model.get_submodule(path).modules()}
    for module in (m for m in model.modules() if id(m) not in skipped):
        for space in (module._parameters, module._buffers, module.__dict__):
            for name, value in space.items():
                space[name] = fill(value)
    args, kwargs = pytree.tree_map(fill, (inputs.args, dict(inputs.kwargs)))
    return dataclasses.replace(inputs, args=args, kwargs=kwargs)


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
    """Set a Hugging Face model to fused attention, grouped expert GEMMs and no cache. Call inside `preserved`.

    Attention: `sdpa` where the class supports it (one node instead of a softmax spelled out), else `eager`. Experts:
    `grouped_mm`, since the looped default reads routing counts on the host. A class that fixes its attention modules
    when it is built keeps what it was built with: its mask would not fit the other implementation.
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


def see_whole(model: nn.Module) -> None:
    """Let a sharded model be read as the one it shards. Call inside `preserved`, which puts all of it back.

    Parameters have their whole size, on the meta device; FSDP2's hooks, which would gather and keep a state that a
    trace leaves half-way, are off, and so are compiled regions and the collectives of tensor parallelism.
    """
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                of_fsdp = type(getattr(hook, "__self__", None)).__name__ == "FSDPState"
                if of_fsdp or hasattr(hook, "is_deepwell_collective"):
                    del hooks[key]
        if hasattr(module.__dict__.get("forward"), "is_deepwell_region"):
            del module.__dict__["forward"]
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None:
        return
    whole: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for module in model.modules():
        for name, p in module._parameters.items():
            if isinstance(p, distributed.DTensor):
                if id(p) not in whole:
                    whole[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
                module._parameters[name] = whole[id(p)]


def written_class(model: nn.Module) -> str:
    """The name of the class that somebody wrote: FSDP2 puts another one in front of it."""
    made = any(base.__name__ == "FSDPModule" for base in type(model).__mro__)
    return type(model).__name__.removeprefix("FSDP") if made else type(model).__name__
