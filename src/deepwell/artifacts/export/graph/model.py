"""The module behind a graph in a file: an nn.Module with the model's own parameter names, built without its code.

Every op is looked up in `graph_ops`; nothing from the file is imported, evaluated or used as a name in code. The graph
becomes a torch.fx.GraphModule whose values have names of its own (`v0`, `v1`, ...).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from deepwell.artifacts.export.graph.ops import ATTRIBUTES, METHODS, functions
from deepwell.artifacts.export.plain_json import Refuse
from deepwell.errors import ConfigError

_DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool",
                 "complex64", "complex128")
}  # fmt: skip
_MEMORY_FORMATS = {name: getattr(torch, name) for name in ("contiguous_format", "preserve_format", "channels_last")}
_MAX_NODES = 1_000_000


class GraphModel(nn.Module):
    """Runs one of its graphs: the one whose arguments were given."""

    _calls: list[Call]
    _held: list[list[tuple[nn.Module, str]]]

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        self.__dict__["_calls"] = list(calls)
        self.__dict__["_held"] = []

    def hold(self, names: Sequence[str]) -> None:
        """Find each tensor once; call it when all of them are registered."""
        owners = {}
        for name in names:
            path, _, leaf = name.rpartition(".")
            owners[name] = (self.get_submodule(path), leaf)
        self.__dict__["_held"] = [[owners[name] for name in call.tensors] for call in self._calls]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for call, held in zip(self._calls, self._held, strict=True):
            given = call.match(args, kwargs)
            if given is not None:
                tensors = [getattr(owner, leaf) for owner, leaf in held]
                return _made(call.result, call.run(*given, *tensors))
        shown = " or ".join(f"({', '.join(call.names)})" for call in self._calls)
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
        self.arguments = form["arguments"]
        if not isinstance(self.arguments, list) or not all(map(self._is_argument, self.arguments)):
            refuse("the arguments of its model are damaged")
        self.names = [argument["name"] for argument in self.arguments]
        self.constants = form["constants"]
        if not isinstance(self.constants, dict):
            refuse("the constants of its model are damaged")
        self.sizes: dict[str, tuple[int, int]] = {}
        self._read_sizes(form["sizes"], refuse)
        self.conditions = form["conditions"]
        if not isinstance(self.conditions, list) or not all(self._is_tree(tree, 0) for tree in self.conditions):
            refuse("the conditions on sizes of its model are damaged")
        self.tensors, self.outputs = form["tensors"], form["outputs"]
        lists = (self.tensors, form["nodes"], self.outputs)
        if not all(isinstance(part, list) and len(part) <= _MAX_NODES for part in lists):
            refuse("the graph of its model is damaged, or absurdly large")
        if not all(isinstance(name, str) for name in self.tensors):
            refuse("the tensors of its graph are damaged")
        self.result = form["result"]
        self._check_result(self.result, 0, refuse)
        self.run = _graph_module(self, form["nodes"], device, refuse)

    @staticmethod
    def _is_argument(value: Any) -> bool:
        if not isinstance(value, dict) or set(value) != {"name", "position", "shape", "dtype"}:
            return False
        is_shape = isinstance(value["shape"], list) and all(type(size) in (int, str) for size in value["shape"])
        return (
            isinstance(value["name"], str)
            and is_shape
            and (value["position"] is None or type(value["position"]) is int)
        )

    def _read_sizes(self, sizes: Any, refuse: Refuse) -> None:
        if not isinstance(sizes, dict):
            refuse("the sizes of its model are damaged")
        for name, place in sizes.items():
            is_place = isinstance(place, list) and len(place) == 2 and place[0] in self.names and type(place[1]) is int
            argument = self.names.index(place[0]) if is_place else -1
            if not is_place or not 0 <= place[1] < len(self.arguments[argument]["shape"]):
                refuse(f"the size {name} of its model is of no argument")
            self.sizes[name] = (argument, place[1])
        for argument in self.arguments:
            if any(isinstance(size, str) and size not in self.sizes for size in argument["shape"]):
                refuse(f"the argument {argument['name']} of its model has a size that is not known")

    def _is_tree(self, tree: Any, depth: int) -> bool:
        if isinstance(tree, str):
            return tree in self.sizes
        if type(tree) is int:
            return True
        is_call = isinstance(tree, list) and len(tree) > 1 and isinstance(tree[0], str)
        if not is_call or tree[0] not in {"not", *_CHAINED, *_PAIRED} or depth > 32:
            return False
        if tree[0] in _PAIRED and len(tree) < 3:
            return False
        return all(self._is_tree(item, depth + 1) for item in tree[1:])

    def _check_result(self, value: Any, depth: int, refuse: Refuse) -> None:
        if depth > 16:
            refuse("the result of its model is nested too deep")
        if not isinstance(value, dict):
            if value is not None and not isinstance(value, (bool, int, str)):
                refuse("the result of its model is damaged")
            return
        found: tuple[str, Any] = next(iter(value.items()), ("", None))
        kind, inner = found
        if kind == "output" and type(inner) is int and 0 <= inner < len(self.outputs):
            return
        if kind == "float" and isinstance(inner, str) and _is_float(inner):
            return
        is_nested = isinstance(inner, dict) if kind == "dict" else kind in ("tuple", "list") and isinstance(inner, list)
        if not is_nested:
            refuse("the result of its model is damaged")
        for item in inner.values() if kind == "dict" else inner:
            self._check_result(item, depth + 1, refuse)

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
        if len(given) - len(plain) != len(self.names):
            return None
        for name, value in plain.items():
            if name not in self.constants:
                return None
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
        if not self.sizes:
            return
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


# ---- sizes ----


# Of any number of operands, and of two.
_CHAINED: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "*": operator.mul, "min": min, "max": max, "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
}  # fmt: skip
_PAIRED: dict[str, Callable[[Any, Any], Any]] = {
    "//": operator.floordiv, "%": operator.mod, "==": operator.eq, "!=": operator.ne, "<=": operator.le,
    "<": operator.lt, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip


def _holds(tree: Any, known: Mapping[str, int]) -> Any:
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return known[tree]
    word, *rest = tree
    values = [_holds(item, known) for item in rest]
    if word == "not":
        return not values[0]
    return functools.reduce(_CHAINED[word], values) if word in _CHAINED else _PAIRED[word](*values[:2])


def _words(tree: Any) -> str:
    if not isinstance(tree, list):
        return str(tree)
    word, *rest = tree
    return (
        f"{word}({', '.join(map(_words, rest))})" if len(rest) != 2 else f"{_words(rest[0])} {word} {_words(rest[1])}"
    )


def _made(result: Any, outputs: Sequence[Any]) -> Any:
    if not isinstance(result, dict):
        return result
    ((kind, value),) = result.items()
    if kind == "output":
        return outputs[value]
    if kind == "float":
        return float(value)
    if kind == "dict":
        return {key: _made(item, outputs) for key, item in value.items()}
    items = [_made(item, outputs) for item in value]
    return items if kind == "list" else tuple(items)


# ---- reading ----


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _graph_module(call: Call, nodes: list[Any], device: torch.device, refuse: Refuse) -> fx.GraphModule:
    graph = fx.Graph()
    values = [graph.placeholder(f"v{i}") for i in range(len(call.arguments) + len(call.tensors))]

    def decoded(value: Any, depth: int = 0) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if not isinstance(value, dict) or len(value) != 1 or depth > 16:
            refuse("a value in the graph of its model is damaged")
        ((kind, inner),) = value.items()
        if kind == "n" and type(inner) is int and 0 <= inner < len(values):
            return values[inner]
        if kind in ("tuple", "list", "slice") and isinstance(inner, list):
            items = [decoded(item, depth + 1) for item in inner]
            if kind == "slice" and len(items) == 3:
                return slice(*items)
            if kind != "slice":
                return tuple(items) if kind == "tuple" else items
        if kind == "dtype" and isinstance(inner, str) and inner in _DTYPES:
            return _DTYPES[inner]
        if kind == "memory_format" and isinstance(inner, str) and inner in _MEMORY_FORMATS:
            return _MEMORY_FORMATS[inner]
        if kind == "float" and isinstance(inner, str) and _is_float(inner):
            return float(inner)
        if kind == "device" and inner is True:
            return device
        if kind == "ellipsis" and inner is True:
            return Ellipsis
        return refuse(f"a value {str(kind)[:40]!r} in the graph of its model is not known")

    for node in nodes:
        if not isinstance(node, dict) or not {"op", "args"} <= set(node) <= {"op", "args", "kwargs"}:
            refuse("a node in the graph of its model is damaged")
        op, args, kwargs = node["op"], node["args"], node.get("kwargs", {})
        is_sound = isinstance(op, str) and isinstance(args, list) and isinstance(kwargs, dict)
        if not is_sound or not all(name.isidentifier() for name in kwargs):
            refuse("a node in the graph of its model is damaged")
        operands = tuple(decoded(item) for item in args)
        named = {name: decoded(item) for name, item in kwargs.items()}
        if op in functions():
            made = graph.call_function(functions()[op], operands, named)
        elif op.startswith(".") and op[1:] in METHODS and operands and isinstance(operands[0], fx.Node):
            made = graph.call_method(op[1:], operands, named)
        elif op == "getattr" and len(operands) == 2 and operands[1] in ATTRIBUTES and isinstance(operands[0], fx.Node):
            made = graph.call_function(getattr, operands)
        else:
            refuse(f"the graph of its model names {op[:80]!r}, which is no op that a file may name")
        values.append(made)
    graph.output(tuple(decoded(item) for item in call.outputs))
    return fx.GraphModule(nn.Module(), graph)
