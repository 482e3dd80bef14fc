"""A model as a graph in JSON: what Dynamo captured of one call, over the ops of `ops.py`, with open sizes.

    {"arguments": [{"name", "position", "shape", "dtype"}], "constants": {name: value},
     "sizes": {"s0": [argument, dim]}, "conditions": [["<=", "s0", 64]],
     "tensors": [name, ...], "nodes": [{"op", "args", "kwargs"}], "outputs": [...], "result": ...}

Sizes that the forward leaves open are symbols; what it decided by them (a branch, a bound) is kept as a condition that
a loaded graph checks before it runs. Text of the user's code, its names and its line numbers are not in it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental import _config as fx_config
from torch.utils import _pytree as pytree

from deepwell.artifacts.export.graph.ops import ATTRIBUTES, METHODS, keys
from deepwell.artifacts.export.manifest import tensors_of
from deepwell.errors import UnsupportedError
from deepwell.graph.example_inputs import ExampleInputs
from deepwell.graph.trace import MODEL_ERRORS, dynamo_settings, quiet, shapes_forgotten

CONSTANT = "constant."
# sympy's classes as the words of a condition.
_WORDS = {"Equality": "==", "Unequality": "!=", "LessThan": "<=", "StrictLessThan": "<", "GreaterThan": ">=",
          "StrictGreaterThan": ">", "Add": "+", "Mul": "*", "FloorDiv": "//", "CleanDiv": "//", "Mod": "%",
          "PythonMod": "%", "Min": "min", "Max": "max", "And": "and", "Or": "or", "Not": "not"}  # fmt: skip
_CHECKS = ("_assert_scalar.default", "sym_constrain_range.default", "sym_constrain_range_for_size.default", "_check")
_UNREAD = ("_set_grad_enabled", "_log_api_usage_once", "_exit_autocast")


def capture_call(model: nn.Module, inputs: ExampleInputs) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(graph in JSON, constant tensors by name) of one call. Raises UnsupportedError, naming what stands in the way."""
    arguments, constants = _arguments(model, inputs)
    last: Exception | None = None
    for is_open in (True, False):
        try:
            return _capture(model, inputs, arguments, constants, is_open=is_open)
        except MODEL_ERRORS as error:
            last = error
    first = next((line.strip() for line in str(last).splitlines() if line.strip()), type(last).__name__)
    raise UnsupportedError(f"{type(model).__name__} has no form without its code: {first}") from last


def _arguments(model: nn.Module, inputs: ExampleInputs) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and other values of a call by the names that the forward has for them."""
    tensors: dict[str, Tensor] = {}
    constants: dict[str, Any] = {}
    for name, value in inputs._bound(model):
        if isinstance(value, Tensor):
            tensors[name] = value
        elif value is None or isinstance(value, (bool, int, float, str)):
            constants[name] = value
        else:
            raise UnsupportedError(
                f"{type(model).__name__}: the argument {name} is a {type(value).__name__}; a model in a file takes "
                "tensors and plain values"
            )
    return tensors, constants


def _capture(
    model: nn.Module,
    inputs: ExampleInputs,
    arguments: Mapping[str, Tensor],
    constants: dict[str, Any],
    *,
    is_open: bool,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    fresh = {name: tensor.detach().clone() for name, tensor in arguments.items()}
    if is_open:
        for tensor in fresh.values():
            for dim in range(tensor.dim()):
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
    mine = {id(tensor): fresh[name] for name, tensor in arguments.items()}
    args, kwargs = pytree.tree_map(lambda leaf: mine.get(id(leaf), leaf), (inputs.args, dict(inputs.kwargs)))
    taken: list[tuple[fx.GraphModule, list[Any], list[Any]]] = []

    def backend(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            outputs = module.forward(*values)
            taken.append((module, list(values), list(outputs)))
            return outputs

        return run

    with _capturing():
        result = torch.compile(model, backend=backend, fullgraph=True)(*args, **kwargs)
    if len(taken) != 1:
        raise UnsupportedError(f"the forward is {len(taken)} graphs, not one")
    module, values, outputs = taken[0]
    names = _names(model, fresh, values)
    graph = _GraphWriter(module, names, torch.device(next((v.device for v in values if isinstance(v, Tensor)), "cpu")))
    positions = {id(leaf): i for i, leaf in enumerate(args)}
    form = {
        "arguments": [
            {"name": name, "position": positions.get(id(tensor)), "shape": graph.shape_of(name, tensor),
             "dtype": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in fresh.items()
        ],
        "constants": constants,
        "sizes": {symbol: list(place) for symbol, place in graph.sizes.items()},
        "conditions": graph.conditions(),
        "tensors": [name for kind, name in names if kind in ("tensor", "constant")],
        "nodes": graph.nodes,
        "outputs": graph.outputs,
        "result": _result(result, outputs),
    }  # fmt: skip
    held = zip(names, values, strict=True)
    return form, {name: value for (kind, name), value in held if kind == "constant"}


@contextmanager
def _capturing() -> Iterator[None]:
    """Sizes stay open, one and zero included, and nothing of this is remembered or printed."""
    settings = {**dynamo_settings(), "assume_static_by_default": True, "capture_scalar_outputs": False}
    # A size is then not taken to be other than 0 and 1, which would go into the graph unseen.
    oblivious = fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with torch._dynamo.config.patch(settings), oblivious, shapes_forgotten(), torch.no_grad(), quiet():
        yield


def _names(model: nn.Module, arguments: Mapping[str, Tensor], values: list[Any]) -> list[tuple[str, str]]:
    """(kind, name) of each value that the graph was called with: input, tensor of the model, constant or size."""
    known: dict[int, tuple[str, str]] = {id(tensor): ("input", name) for name, tensor in arguments.items()}
    for _, name, tensor in tensors_of(model):
        known.setdefault(id(tensor), ("tensor", name))
    return [
        known.get(id(value), ("constant", f"{CONSTANT}{number}") if isinstance(value, Tensor) else ("size", ""))
        for number, value in enumerate(values)
    ]


class _GraphWriter:
    """Writes one FX graph down. Values are numbered: inputs, tensors, then nodes."""

    def __init__(self, module: fx.GraphModule, names: list[tuple[str, str]], device: torch.device) -> None:
        self._device = device
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        pairs = list(zip(placeholders, names, strict=True))
        self._inputs = {name: node for node, (kind, name) in pairs if kind == "input"}
        held = [node for node, (kind, _) in pairs if kind in ("tensor", "constant")]
        self._number = {node: number for number, node in enumerate([*self._inputs.values(), *held])}
        self._next = len(self._number)
        self.sizes: dict[str, tuple[str, int]] = {}
        self._environment: Any = None
        for name, node in self._inputs.items():
            for dim, size in enumerate(_value(node).shape):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    self.sizes.setdefault(str(size.node.expr), (name, dim))
                    self._environment = size.node.shape_env
        self.nodes: list[dict[str, Any]] = []
        self.outputs: list[Any] = []
        for node, (kind, _) in pairs:
            if kind == "size" and node.users:
                self._size(node)
        skipped = _checks(module.graph)
        for node in module.graph.nodes:
            if node.op == "output":
                self.outputs = [self._encode(item) for item in node.args[0]]
            elif node.op != "placeholder" and node not in skipped and not _is_unread(node):
                args = [self._encode(item) for item in node.args]
                self._add(node, _op_of(node), args, {name: self._encode(item) for name, item in node.kwargs.items()})

    def shape_of(self, name: str, tensor: Tensor) -> list[int | str]:
        """Open sizes as symbols, those that the forward fixed as numbers."""
        if name not in self._inputs:
            return list(tensor.shape)  # the forward does not read it
        sizes = (
            size.node.expr if isinstance(size, torch.SymInt) else size for size in _value(self._inputs[name]).shape
        )
        return [int(size) if isinstance(size, (int, sympy.Integer)) else str(size) for size in sizes]

    def conditions(self) -> list[Any]:
        """What the forward decided by open sizes, as trees."""
        if self._environment is None:
            return []
        # Symbols that proved to be one number are put in: the argument's shape says it already.
        known = [guard.expr for guard in self._environment.guards]
        known += [later.expr for group in self._environment.deferred_runtime_asserts.values() for later in group]
        found = [_tree(self._environment.replace(expr), self.sizes) for expr in known]
        for symbol, bounds in self._environment.var_to_range.items():
            if str(symbol) in self.sizes and bounds.upper.is_Integer and int(bounds.upper) < 1 << 40:
                found.append(["<=", str(symbol), int(bounds.upper)])
        return [tree for number, tree in enumerate(found) if tree is not True and tree not in found[:number]]

    def _size(self, node: fx.Node) -> None:
        """A size that Dynamo passes by itself is read off the argument that has it."""
        value = _value(node)
        expr = value.node.expr if isinstance(value, torch.SymInt) else None
        if str(expr) not in self.sizes:
            raise UnsupportedError(f"the graph takes {node.name}, which is no size of an argument")
        name, dim = self.sizes[str(expr)]
        self._add(node, ".size", [{"n": self._number[self._inputs[name]]}, dim], {})

    def _add(self, node: fx.Node, op: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.nodes.append({"op": op, "args": args, **({"kwargs": kwargs} if kwargs else {})})
        self._number[node] = self._next
        self._next += 1

    def _encode(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value not in self._number:
                raise UnsupportedError(f"a value of {value.name} is read that a file cannot hold")
            return {"n": self._number[value]}
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, slice):
            return {"slice": [self._encode(part) for part in (value.start, value.stop, value.step)]}
        if isinstance(value, (tuple, list)):
            return {"tuple" if isinstance(value, tuple) else "list": [self._encode(item) for item in value]}
        if isinstance(value, (torch.dtype, torch.memory_format)):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if value is Ellipsis or (isinstance(value, torch.device) and value.type == self._device.type):
            return {"ellipsis" if value is Ellipsis else "device": True}
        raise UnsupportedError(f"a value of type {type(value).__name__} is read that a file cannot hold")


def _op_of(node: fx.Node) -> str:
    """The word for a node's op. Raises UnsupportedError where a file may not name it."""
    if node.op == "call_method" and node.target in METHODS:
        return f".{node.target}"
    if node.op == "call_function":
        if node.target is getattr and node.args[1] in ATTRIBUTES:
            return "getattr"
        if node.target is torch.ops.aten.sym_size.int:
            return ".size"
        key = keys().get(node.target)
        if key is not None:
            return key
    name = getattr(node.target, "__name__", node.target)
    raise UnsupportedError(f"the op {name} is not among those that a file may name")


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _checks(graph: fx.Graph) -> set[fx.Node]:
    """Checks of sizes that Dynamo wrote into the graph, and what is computed for them alone: they are conditions."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_check = getattr(node.target, "__name__", "") in _CHECKS
        is_for_checks = bool(node.users) and all(user in found for user in node.users)
        is_size = node.op == "call_function" and not isinstance(_value(node), (Tensor, tuple, list))
        if is_check or (is_for_checks and is_size):
            found.add(node)
    return found


def _is_unread(node: fx.Node) -> bool:
    """A setting that changes nothing here; entering or leaving a region without autocast: there is none around it."""
    name = getattr(node.target, "__name__", "")
    return name in _UNREAD or (name == "_enter_autocast" and len(node.args) > 2 and node.args[2] is False)


def _tree(expr: Any, sizes: Mapping[str, Any]) -> Any:
    """A condition of sympy as lists: [operator, operand, ...]; True where it always holds."""
    if expr is True or expr is sympy.true:  # by identity: one equals True
        return True
    if isinstance(expr, sympy.Symbol):
        if str(expr) not in sizes:
            raise UnsupportedError(f"the forward decides by {expr}, which is no size of an argument")
        return str(expr)
    if isinstance(expr, sympy.Integer):
        return int(expr)
    name = type(expr).__name__
    operands = [_tree(item, sizes) for item in expr.args]
    if name in _WORDS:
        return [_WORDS[name], *operands]
    if name == "Pow" and isinstance(expr.args[1], sympy.Integer) and int(expr.args[1]) > 0:
        return ["*", *[operands[0]] * int(expr.args[1])]
    raise UnsupportedError(f"the forward decides by {expr} whether to go on")


def _result(result: Any, outputs: list[Any]) -> Any:
    """What the model returns, with the graph's outputs by number."""
    places = {id(output): number for number, output in enumerate(outputs) if isinstance(output, Tensor)}

    def write(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in places:
                raise UnsupportedError("the model returns a tensor that no op of its graph makes")
            return {"output": places[id(value)]}
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return {"float": repr(value)}
        if isinstance(value, Mapping):
            if not all(isinstance(key, str) for key in value):
                raise UnsupportedError("the model returns a dict whose keys are no texts")
            return {"dict": {key: write(item) for key, item in value.items()}}
        if type(value) in (tuple, list):
            return {type(value).__name__: [write(item) for item in value]}
        raise UnsupportedError(f"the model returns a {type(value).__name__}; a file holds tensors, dicts and tuples")

    return write(result)
