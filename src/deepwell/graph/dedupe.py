"""Trace one layer of each kind: find repeated blocks, let the others pass their hidden state through.

A deep model is a few kinds of layers, repeated. Two layers of one `nn.ModuleList` are of one kind when they agree in
classes, shapes, dtypes, settings and their entries in the config's per-layer lists; an attribute that merely counts the
layers (`layer_idx`) does not tell them apart. The first of each kind is traced, the rest return their input in the form
in which the first one returns its output. Llama-3 405B: 126 layers, one traced.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deepwell.graph.example_inputs import ExampleInputs
from deepwell.graph.preserve import model_configs, preserved

CHECKED_DUPLICATES = 3  # and the last one: patterns with a period of up to four layers show
MIN_DUPLICATES = 5  # below that a full trace costs less than learning what a layer returns


@dataclass(slots=True)
class _Kind:
    """One kind of layer: the path traced for it, the paths that are not, how such a layer returns its hidden state."""

    representative: str
    duplicates: list[str]
    hidden_key: int | str | None = None  # which argument is the hidden state: position or keyword; None until learned
    container: type | None = None  # tuple or list where the layer returns one, None for the bare hidden state
    ops: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)  # what the representative ran
    is_hidden: tuple[bool, ...] = ()  # entries of the container: True for the hidden state, False for None


def layer_kinds(model: nn.Module) -> list[_Kind]:
    """The kinds of layers of the model's outermost module lists, those with at least one duplicate."""
    kinds: list[_Kind] = []
    inside: list[str] = []
    configs = model_configs(model)
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(outer + ".") for outer in inside):
            continue
        layers = list(module)
        groups: dict[Any, list[str]] = {}
        for i, signature in enumerate(_signatures(layers, configs)):
            groups.setdefault(signature, []).append(f"{path}.{i}")
        found = [_Kind(representative=g[0], duplicates=g[1:]) for g in groups.values() if len(g) > 1]
        if found:
            inside.append(path)
            kinds.extend(found)
    return kinds


def _signatures(layers: list[nn.Module], configs: list[Any]) -> list[Any]:
    """One hashable value per layer; equal values mean layers of one kind."""
    facts = [_facts(layer) for layer in layers]
    counting = _counting_attributes(facts)
    per_layer = [
        value
        for config in configs
        for value in vars(config).values()
        if isinstance(value, (list, tuple)) and len(value) == len(layers) > 1
    ]
    return [
        (
            tuple((key, value) for key, value in fact.items() if key not in counting),
            tuple(repr(entries[i]) for entries in per_layer),
        )
        for i, fact in enumerate(facts)
    ]


def _facts(layer: nn.Module) -> dict[tuple[str, str], Any]:
    facts: dict[tuple[str, str], Any] = {}
    for path, module in layer.named_modules():
        facts[path, "class"] = f"{type(module).__module__}.{type(module).__qualname__}"
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            facts[path, name] = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, value in vars(module).items():
            if not name.startswith("_"):
                facts[path, name] = _settled(value)
    return facts


def _settled(value: Any) -> Any:
    """A value by which two layers can be compared: itself for plain settings, its class for objects."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return value
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_settled(v) for v in value))
    if isinstance(value, Mapping):
        return ("mapping", *((str(k), _settled(v)) for k, v in value.items()))
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _counting_attributes(facts: list[dict[tuple[str, str], Any]]) -> set[tuple[str, str]]:
    """Attributes whose value is the position in the list plus a constant: names for layers, not properties of them."""
    offsets: dict[tuple[str, str], list[Any]] = {}
    for i, fact in enumerate(facts):
        for key, value in fact.items():
            is_count = isinstance(value, int) and not isinstance(value, bool)
            offsets.setdefault(key, []).append(value - i if is_count else "no count")
    return {key for key, seen in offsets.items() if len(seen) > 1 and set(seen) <= {seen[0]} - {"no count"}}


def stub_duplicates(model: nn.Module, inputs: ExampleInputs, *, wanted: bool | None) -> dict[str, str]:
    """Let duplicate layers pass their hidden state through; returns {stubbed path: path traced for it}.

    `wanted=None` decides by the number of duplicates. Kinds whose layers do more than map a hidden state to one of the
    same shape and dtype are kept as they are, and so is the whole model if its forward cannot run on fake tensors. Call
    inside `preserved`, which takes the stubs off again.
    """
    kinds = [] if wanted is False else layer_kinds(model)
    if wanted is None and sum(len(kind.duplicates) for kind in kinds) < MIN_DUPLICATES:
        return {}
    learned = _learn_returns(model, inputs, kinds) if kinds else []
    for kind in learned:
        for path in kind.duplicates:
            # On the instance: the layer keeps its class, its attributes and its place in the list.
            model.get_submodule(path).forward = _pass_through(kind)
    return {path: kind.representative for kind in learned for path in kind.duplicates}


def _pass_through(kind: _Kind) -> Callable[..., Any]:
    key, container, is_hidden = kind.hidden_key, kind.container, kind.is_hidden
    assert key is not None, "a kind is stubbed only after its return was learned"

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[key] if isinstance(key, int) else kwargs[key]
        return hidden if container is None else container([hidden if here else None for here in is_hidden])

    return forward


class _NotSimple(Exception):
    """A layer does something that a pass-through cannot stand for."""


def _learn_returns(model: nn.Module, inputs: ExampleInputs, kinds: list[_Kind]) -> list[_Kind]:
    """Run the model once on fake tensors and note how each kind's first layer returns its hidden state.

    A few duplicates of each kind run too and must do the same ops as the first: a forward that decides by its layer
    number shows here. The other duplicates already pass through, so the run costs a handful of layers.
    """
    simple: list[_Kind] = list(kinds)
    while simple:
        try:
            _run_once(model, inputs, simple)
        except _NotSimple as reason:
            dropped = reason.args[0]
            simple = [kind for kind in simple if kind is not dropped]
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError):
            # The model's own code fails on fake tensors (reads of values) or on passed-through states: trace it whole.
            return []
        else:
            return [kind for kind in simple if kind.hidden_key is not None]
    return []


def _run_once(model: nn.Module, inputs: ExampleInputs, kinds: list[_Kind]) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    args, kwargs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (inputs.args, dict(inputs.kwargs)))
    with preserved(model, values=False), torch.no_grad(), mode:
        for kind in kinds:
            first = model.get_submodule(kind.representative)
            first.forward = functools.partial(_noting, kind, first.forward)
            for i, path in enumerate(kind.duplicates):
                layer = model.get_submodule(path)
                is_checked = i < CHECKED_DUPLICATES or path == kind.duplicates[-1]
                layer.forward = functools.partial(_deferred, kind, layer.forward if is_checked else None)
        model(*args, **kwargs)


def _noting(kind: _Kind, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _OpNames() as ops:
        output = forward(*args, **kwargs)
    kind.ops = ops.seen
    entries = output if type(output) in (tuple, list) else [output]
    tensors = [entry for entry in entries if isinstance(entry, torch.Tensor)]
    if len(tensors) != 1 or any(entry is not None for entry in entries if not isinstance(entry, torch.Tensor)):
        raise _NotSimple(kind)
    kind.hidden_key = _hidden_argument(kind, tensors[0], args, kwargs)
    kind.container = type(output) if type(output) in (tuple, list) else None
    kind.is_hidden = tuple(isinstance(entry, torch.Tensor) for entry in entries)
    return output


def _hidden_argument(kind: _Kind, output: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    candidates: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in candidates:
        if isinstance(value, torch.Tensor):
            if value.shape == output.shape and value.dtype == output.dtype:
                return key
            break  # the hidden state comes first; a match further on would be a coincidence
    raise _NotSimple(kind)


def _deferred(kind: _Kind, forward: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    if kind.hidden_key is None:  # called before its representative: the order of the list is not that of the calls
        raise _NotSimple(kind)
    if forward is None:
        return _pass_through(kind)(*args, **kwargs)
    with _OpNames() as ops:
        output = forward(*args, **kwargs)
    if ops.seen != kind.ops:
        raise _NotSimple(kind)
    return output


class _OpNames(TorchDispatchMode):
    """Notes the name and the shapes of each op that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        shapes = tuple(tuple(t.shape) for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor))
        self.seen.append((str(func), shapes))
        return output
