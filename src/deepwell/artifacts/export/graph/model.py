"""The module behind a graph in a file: an nn.Module with the model's own parameter names, built without its code.

Every op is looked up in `ops.py`; nothing from the file is imported, evaluated or used as a name in code. The graph
becomes a torch.fx.GraphModule whose values have names of its own (`v0`, `v1`, ...).
"""

import functools
import keyword
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from deepwell.artifacts.export.graph.ops import ATTRIBUTES, METHODS, functions
from deepwell.artifacts.plain_json import Refuse, fits
from deepwell.errors import ConfigError

_NAMED = {
    "dtype": "float32 float64 bfloat16 float16 int64 int32 int16 int8 uint8 bool complex64 complex128".split(),
    "memory_format": ["contiguous_format", "preserve_format", "channels_last"],
}
_MAX_NODES, _MAX_DEPTH, _MAX_TREE_DEPTH = 1_000_000, 16, 32
# Words of conditions: of any number of operands, and of two.
_CHAINED: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "*": operator.mul, "min": min, "max": max, "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
}  # fmt: skip
_PAIRED: dict[str, Callable[[Any, Any], Any]] = {
    "//": operator.floordiv, "%": operator.mod, "==": operator.eq, "!=": operator.ne, "<=": operator.le,
    "<": operator.lt, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip
_ARGUMENT = {"name": str, "position": (None, int), "shape": [(int, str)], "dtype": str}


def build_graph(
    form: Mapping[str, Any],
    kinds: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    device: torch.device,
    refuse: Refuse,
) -> nn.Module:
    """The model behind graphs in a file, its tensors registered under their own names."""
    graphs = form.get("graphs")
    if not isinstance(graphs, list) or not graphs or len(graphs) > 16:
        refuse("its model has no graph")
    calls = [Call(graph, device, refuse) for graph in graphs]
    for name in sorted({name for call in calls for name in call.tensors} - set(tensors)):
        refuse(f"tensor {name} is missing")
    model = GraphModel()
    owners: dict[str, tuple[nn.Module, str]] = {}
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        owner: nn.Module = model
        for part in path:
            if part in owner._parameters or part in owner._buffers:
                refuse(f"tensor {name} lies inside another tensor")
            if part not in owner._modules:
                _check_free(owner, part, name, refuse)
                owner._modules[part] = Part()
            owner = owner.get_submodule(part)
        _check_free(owner, leaf, name, refuse)
        if kinds[name] == "parameter":
            owner.register_parameter(leaf, tensor)  # type: ignore[arg-type]
        else:
            owner.register_buffer(leaf, tensor, persistent=kinds[name] == "buffer")
        owners[name] = (owner, leaf)
    model.calls = [(call, [owners[name] for name in call.tensors]) for call in calls]
    return model.eval()


def _check_free(owner: nn.Module, leaf: str, name: str, refuse: Refuse) -> None:
    if hasattr(owner, leaf):
        refuse(f"tensor {name} has a name that is taken")


class GraphModel(nn.Module):
    """Runs one of its graphs: the one whose arguments were given."""

    calls: "list[tuple[Call, list[tuple[nn.Module, str]]]]"  # with the owners of its tensors

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for call, held in self.calls:
            given = call.match(args, kwargs)
            if given is not None:
                return _made(call.result, call.run(*given, *(getattr(owner, leaf) for owner, leaf in held)))
        shown = " or ".join(f"({', '.join(call.names)})" for call, _ in self.calls)
        got = ", ".join([f"{len(args)} by position"] * bool(args) + [str(name) for name in kwargs])
        raise ConfigError(f"the model in this file takes {shown}; got {got or 'nothing'}")


class Part(nn.Module):
    """A place in the tree of parameters; it has no forward of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError("a part of a model from a file cannot be called by itself; call the whole model")


class Call:
    """One graph: its arguments, the conditions on their sizes, and how its outputs make the result.

    Every field of the JSON is checked for what it must be.
    """

    def __init__(self, form: Any, device: torch.device, refuse: Refuse) -> None:
        wanted = {"arguments", "constants", "sizes", "conditions", "tensors", "nodes", "outputs", "result"}
        if not isinstance(form, dict) or set(form) != wanted:
            refuse("a graph of its model lacks a field, or has one that is not known")

        def field(name: str, shape: Any, words: str) -> Any:
            if not fits(form[name], shape):
                refuse(words)
            return form[name]

        self.arguments = field("arguments", [_ARGUMENT], "the arguments of its model are damaged")
        self.names = [argument["name"] for argument in self.arguments]
        self.constants = field("constants", dict, "the constants of its model are damaged")
        self.sizes: dict[str, tuple[int, int]] = {}
        self._read_sizes(field("sizes", dict, "the sizes of its model are damaged"), refuse)
        self.conditions = field("conditions", [self._is_tree], "the conditions on sizes of its model are damaged")
        for name in ("tensors", "nodes", "outputs"):
            field(name, _is_bounded, "the graph of its model is damaged, or absurdly large")
        self.tensors = field("tensors", [str], "the tensors of its graph are damaged")
        self.outputs = form["outputs"]
        self.result = field(
            "result", lambda value: self._is_result(value, refuse), "the result of its model is damaged"
        )
        self.run = _graph_module(self, form["nodes"], device, refuse)

    def _read_sizes(self, sizes: dict[str, Any], refuse: Refuse) -> None:
        for name, place in sizes.items():
            is_place = isinstance(place, list) and len(place) == 2 and place[0] in self.names and type(place[1]) is int
            argument = self.names.index(place[0]) if is_place else -1
            if not is_place or not 0 <= place[1] < len(self.arguments[argument]["shape"]):
                refuse(f"the size {name} of its model is of no argument")
            self.sizes[name] = (argument, place[1])
        for argument in self.arguments:
            if any(isinstance(size, str) and size not in self.sizes for size in argument["shape"]):
                refuse(f"the argument {argument['name']} of its model has a size that is not known")

    def _is_tree(self, tree: Any, depth: int = 0) -> bool:
        if not isinstance(tree, list):
            return tree in self.sizes if isinstance(tree, str) else type(tree) is int
        word, *operands = tree or [None]
        if not isinstance(word, str) or depth > _MAX_TREE_DEPTH:
            return False
        is_known = len(operands) == 2 if word in _PAIRED else bool(operands) and word in {"not", *_CHAINED}
        return is_known and all(self._is_tree(item, depth + 1) for item in operands)

    def _is_result(self, value: Any, refuse: Refuse, depth: int = 0) -> bool:
        if depth > _MAX_DEPTH:
            refuse("the result of its model is nested too deep")
        if not isinstance(value, dict):
            return value is None or isinstance(value, (bool, int, str))
        if len(value) != 1:
            return False
        ((kind, inner),) = value.items()
        if kind in ("output", "float"):
            return _is_float(inner) if kind == "float" else type(inner) is int and 0 <= inner < len(self.outputs)
        if kind == "dict" and isinstance(inner, dict):
            inner = list(inner.values())
        elif kind not in ("tuple", "list") or not isinstance(inner, list):
            return False
        return all(self._is_result(item, refuse, depth + 1) for item in inner)

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
        """The arguments in order, None where others were given. Raises ConfigError on sizes that do not fit."""
        given = {name: value for name, value in kwargs.items() if value is not None}
        positions = {argument["position"]: argument["name"] for argument in self.arguments}
        spare = [name for name in self.names if name not in given]
        for number, value in enumerate(args):
            if value is None:
                continue
            name = positions.get(number, spare[number] if number < len(spare) else None)
            if name is None or name in given:
                return None
            given[name] = value
        plain = {name: value for name, value in given.items() if name not in self.names}
        if len(given) - len(plain) != len(self.names) or not set(plain) <= set(self.constants):
            return None
        for name, value in plain.items():
            if value != self.constants[name]:
                raise ConfigError(f"{name} is {value!r}; this model was exported with {self.constants[name]!r}")
        found = [given[name] for name in self.names]
        self._check(found)
        return found

    def _check(self, found: list[Any]) -> None:
        for argument, value in zip(self.arguments, found, strict=True):
            shape = argument["shape"]
            if not isinstance(value, Tensor) or value.dim() != len(shape):
                raise ConfigError(f"{argument['name']} must be a tensor of {len(shape)} dimensions {shape}")
            for dim, size in enumerate(shape):
                if isinstance(size, int) and value.shape[dim] != size:
                    raise ConfigError(
                        f"{argument['name']} has size {value.shape[dim]} in dimension {dim}; this model was exported "
                        f"for {size} there"
                    )
        known = {name: found[at].shape[dim] for name, (at, dim) in self.sizes.items()}
        for argument, value in zip(self.arguments, found, strict=True):
            for dim, size in enumerate(argument["shape"]):
                if isinstance(size, str) and value.shape[dim] != known[size]:
                    raise ConfigError(f"{argument['name']} has size {value.shape[dim]} where another has {known[size]}")
        for condition in self.conditions:
            if not _holds(condition, known):
                raise ConfigError(
                    f"sizes {known} are outside what this model was exported for: {_words(condition)}; "
                    "export it with example_inputs of such sizes"
                )


def _holds(tree: Any, known: Mapping[str, int]) -> Any:
    if not isinstance(tree, list):
        return known[tree] if isinstance(tree, str) else tree
    word, *values = tree[0], *(_holds(item, known) for item in tree[1:])
    return not values[0] if word == "not" else functools.reduce({**_CHAINED, **_PAIRED}[word], values)


def _words(tree: Any) -> str:
    if not isinstance(tree, list):
        return str(tree)
    word, *rest = tree[0], *map(_words, tree[1:])
    return f"{rest[0]} {word} {rest[1]}" if len(rest) == 2 else f"{word}({', '.join(rest)})"


def _made(result: Any, outputs: Sequence[Any]) -> Any:
    if not isinstance(result, dict):
        return result
    ((kind, value),) = result.items()
    if kind in ("output", "float"):
        return float(value) if kind == "float" else outputs[value]
    if kind == "dict":
        return {key: _made(item, outputs) for key, item in value.items()}
    items = [_made(item, outputs) for item in value]
    return items if kind == "list" else tuple(items)


def _is_bounded(items: Any) -> bool:
    return isinstance(items, list) and len(items) <= _MAX_NODES


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _is_float(text: Any) -> bool:
    try:
        return isinstance(text, str) and isinstance(float(text), float)
    except ValueError:
        return False


def _graph_module(call: Call, nodes: list[Any], device: torch.device, refuse: Refuse) -> fx.GraphModule:
    graph = fx.Graph()
    values = [graph.placeholder(f"v{i}") for i in range(len(call.arguments) + len(call.tensors))]

    def decoded(value: Any, depth: int = 0) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if not isinstance(value, dict) or len(value) != 1 or depth > _MAX_DEPTH:
            refuse("a value in the graph of its model is damaged")
        ((kind, inner),) = value.items()
        if kind == "n" and type(inner) is int and 0 <= inner < len(values):
            return values[inner]
        if kind in ("tuple", "list", "slice") and isinstance(inner, list):
            items = [decoded(item, depth + 1) for item in inner]
            if kind != "slice" or len(items) == 3:
                return slice(*items) if kind == "slice" else tuple(items) if kind == "tuple" else items
        if kind in _NAMED and inner in _NAMED[kind]:
            return getattr(torch, inner)
        if kind == "float" and _is_float(inner):
            return float(inner)
        if kind in ("device", "ellipsis") and inner is True:
            return device if kind == "device" else Ellipsis
        return refuse(f"a value {str(kind)[:40]!r} in the graph of its model is not known")

    for node in ({"kwargs": {}, **node} if isinstance(node, dict) else node for node in nodes):
        if not fits(node, {"op": str, "args": list, "kwargs": dict}) or not all(map(_is_name, node["kwargs"])):
            refuse("a node in the graph of its model is damaged")
        op, operands = node["op"], tuple(decoded(item) for item in node["args"])
        named = {name: decoded(item) for name, item in node["kwargs"].items()}
        is_of_value = bool(operands) and isinstance(operands[0], fx.Node)
        if op in functions():
            made = graph.call_function(functions()[op], operands, named)
        elif op.startswith(".") and op[1:] in METHODS and is_of_value:
            made = graph.call_method(op[1:], operands, named)
        elif op == "getattr" and len(operands) == 2 and operands[1] in ATTRIBUTES and is_of_value:
            made = graph.call_function(getattr, operands)
        else:
            refuse(f"the graph of its model names {op[:80]!r}, which is no op that a file may name")
        values.append(made)
    graph.output(tuple(decoded(item) for item in call.outputs))
    return fx.GraphModule(nn.Module(), graph)
