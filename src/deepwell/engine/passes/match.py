"""Reading FX nodes: one name for the many spellings of an op, and small questions that every pass asks.

Dynamo writes `x * y` as operator.mul, torch.mul or the method "mul"; passes match the canonical name.
"""

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_FUNCTIONS: dict[Any, str] = {
    operator.add: "add",
    operator.iadd: "add",
    torch.add: "add",
    operator.mul: "mul",
    operator.imul: "mul",
    torch.mul: "mul",
    operator.truediv: "div",
    torch.div: "div",
    torch.tanh: "tanh",
    F.tanh: "tanh",
    torch.erf: "erf",
    torch.sigmoid: "sigmoid",
    F.sigmoid: "sigmoid",
    operator.sub: "sub",
    torch.sub: "sub",
    torch.sqrt: "sqrt",
    F.relu: "relu",
    torch.relu: "relu",
    operator.matmul: "matmul",
    torch.matmul: "matmul",
    torch.bmm: "bmm",
    operator.getitem: "getitem",
    torch.rsqrt: "rsqrt",
    torch.pow: "pow",
    operator.pow: "pow",
    torch.mean: "mean",
    torch.square: "square",
    F.silu: "silu",
    F.gelu: "gelu",
    F.linear: "linear",
    torch._C._nn.linear: "linear",
    F.rms_norm: "rms_norm",
    torch.rms_norm: "rms_norm",
    F.layer_norm: "layer_norm",
    F.scaled_dot_product_attention: "attention",
    F.cross_entropy: "cross_entropy",
    F.embedding: "embedding",
    F.dropout: "dropout",
    torch._C._nn.gelu: "gelu",
    torch.layer_norm: "layer_norm",
    torch.addmm: "addmm",
    torch.chunk: "chunk",
    torch.reshape: "reshape",
    torch.flatten: "flatten",
    torch.transpose: "transpose",
    torch.t: "t",
}
_METHODS = {
    "add", "sub", "mul", "div", "tanh", "erf", "sigmoid", "sqrt", "relu", "pow", "mean", "rsqrt", "square", "to",
    "float", "type", "bfloat16", "half", "view", "reshape", "flatten", "contiguous", "transpose", "expand", "unsqueeze",
    "repeat_interleave", "matmul", "bmm", "addmm", "chunk", "t",
}  # fmt: skip
_METHOD_NAMES = {"add_": "add", "mul_": "mul", "type_as": "to"}

_IN_PLACE = {
    operator.setitem,
    operator.iadd,
    operator.imul,
    operator.isub,
    operator.itruediv,
    operator.iand,
    operator.ior,
}

KERNEL_DTYPES = {torch.float32, torch.bfloat16, torch.float16}

# Ops that only re-describe the same numbers: shape, layout or dtype.
SHAPE_OPS = {"view", "reshape", "flatten", "contiguous"}
CAST_OPS = {"to", "float", "type", "bfloat16", "half"}


def name_of(node: Any) -> str:
    """The canonical name of a node's op, "" where it has none (placeholders, constants, ops no pass asks about)."""
    if not isinstance(node, fx.Node):
        return ""
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target, "")
    if node.op == "call_method":
        target = str(node.target)
        return target if target in _METHODS else _METHOD_NAMES.get(target, "")
    return ""


# Operands that passes read by position, where a model gives them by name.
_OPERANDS = {
    "linear": ("input", "weight", "bias"),
    "addmm": ("input", "mat1", "mat2"),
    "matmul": ("input", "other"),
    "bmm": ("input", "mat2"),
    "mul": ("input", "other"),
    "add": ("input", "other"),
    "rsqrt": ("input",),
    "pow": ("input", "exponent"),
    "mean": ("input", "dim"),
    "square": ("input",),
    "silu": ("input",),
    "gelu": ("input",),
    "relu": ("input",),
    "tanh": ("input",),
    "erf": ("input",),
    "sigmoid": ("input",),
    "rms_norm": ("input",),
    "layer_norm": ("input",),
    "cross_entropy": ("input", "target"),
    "attention": ("query", "key", "value"),
    "chunk": ("input", "chunks"),
}


def give_operands_by_position(graph: fx.Graph) -> None:
    """Turn `f(input=x, weight=w)` into `f(x, w)`, so that passes find operands in one place."""
    for node in graph.nodes:
        for name in _OPERANDS.get(name_of(node), ())[len(node.args) :]:
            if name not in node.kwargs:
                break
            node.args = (*node.args, node.kwargs[name])
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != name}


def is_in_place(node: fx.Node) -> bool:
    """Whether a node writes into its first argument: `x.add_(y)`, `x += y`, `x[i] = y`, `f(x, inplace=True)`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_method = name.endswith("_") and not name.endswith("__")
    is_asked = name in ("relu", "silu") and len(node.args) > 1 and bool(node.args[1])
    return is_method or is_asked or node.target in _IN_PLACE or bool(node.kwargs.get("inplace"))


def written_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node writes into."""
    targets: list[Any] = []
    if node.op in ("call_function", "call_method") and is_in_place(node):
        targets += node.args[:1]
    if "out" in node.kwargs:
        targets.append(node.kwargs["out"])
    if isinstance(node.target, torch._ops.OpOverload):
        for i, operand in enumerate(node.target._schema.arguments):
            if operand.alias_info is not None and operand.alias_info.is_write:
                targets.append(node.args[i] if i < len(node.args) else node.kwargs.get(operand.name))
    found: list[fx.Node] = []
    fx.node.map_arg(targets, found.append)
    return found


def memory_of(node: Any) -> Any:
    """What tells a tensor's memory from another's: views of one tensor share it, also among fake tensors."""
    value = value_of(node)
    return None if value is None else value.untyped_storage()._cdata


class Writes:
    """Where a graph writes into memory that is there already: `x.mul_(2)`, `x[0] = y`, also through views.

    A pass that lets an op read a tensor earlier or later than the model did asks whether it is another one by then.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._order: dict[fx.Node, int] = {}
        self._places: dict[Any, list[int]] = {}
        for place, node in enumerate(graph.nodes):
            self._order[node] = place
            for target in written_by(node):
                self._places.setdefault(memory_of(target), []).append(place)

    def between(self, tensor: Any, first: fx.Node, last: fx.Node | None = None) -> bool:
        """Whether a tensor's memory is written after one node and before another, or before the end.

        A node that a pass put in has no place of its own here: it counts as the graph's begin or end.
        """
        places = self._places.get(memory_of(tensor), ())
        begin, end = self._order.get(first, -1), len(self._order)
        return any(begin < place < (end if last is None else self._order.get(last, end)) for place in places)

    def while_read(self, tensor: fx.Node, last: fx.Node) -> bool:
        """Whether a tensor's memory is written between its first reader and a node."""
        return self.between(tensor, min(tensor.users, key=lambda node: self._order.get(node, -1)), last)

    @property
    def memory(self) -> set[Any]:
        """All that is written at some place."""
        return set(self._places)


def erase_unread(graph: fx.Graph) -> None:
    """Drop known ops that nobody reads any more.

    FX's own sweep takes what has no reader for dead, but Dynamo's graphs hold `x.scatter_(...)` whose work lies in x.
    AOTAutograd drops what else is dead, once mutation is out of the graph.
    """
    for node in reversed(list(graph.nodes)):
        if not node.users and name_of(node) and not is_in_place(node):
            graph.erase_node(node)


def value_of(node: Any) -> Any:
    """The fake tensor Dynamo computed for a node, None where there is none."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def runs_in_kernels(*nodes: Any) -> bool:
    """Whether these are tensors of one dtype that the kernels take; a float64 model is left as it is."""
    dtypes = {value.dtype if (value := value_of(node)) is not None else None for node in nodes}
    return len(dtypes) == 1 and dtypes <= KERNEL_DTYPES


def transposed(node: Any) -> fx.Node | None:
    """The matrix M where the node is M.T in one of its spellings, else None."""
    if not isinstance(node, fx.Node) or value_of(node) is None or value_of(node).dim() != 2:
        return None
    is_attribute = node.target is getattr and node.args[1] in ("T", "mT")
    is_call = name_of(node) == "t" or (
        name_of(node) == "transpose" and {argument(node, 1, "dim0"), argument(node, 2, "dim1")} in ({0, 1}, {-2, -1})
    )
    return node.args[0] if is_attribute or is_call else None


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def other_operand(node: fx.Node, one: fx.Node) -> Any:
    """The other factor or summand of a two-operand node."""
    return node.args[1] if node.args[0] is one else node.args[0]


def skip(node: Any, kinds: Iterable[str]) -> Any:
    """Walk up through single-input nodes of these kinds."""
    wanted = set(kinds)
    while name_of(node) in wanted and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def only_user(node: fx.Node) -> fx.Node | None:
    """The single user of a node, None where there are more or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def replace(old: fx.Node, new: fx.Node) -> None:
    """Put `new` in the place of `old` and drop `old`."""
    new.meta.setdefault("example_value", old.meta.get("example_value"))
    for key in ("nn_module_stack", "stack_trace", "module_path"):
        if key in old.meta:
            new.meta.setdefault(key, old.meta[key])
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def replace_by_call(node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    """Put a call of another op with the same value in the place of `node` and drop `node`."""
    graph = node.graph
    with graph.inserting_before(node):
        new = graph.call_function(target, args)
    new.meta.update(node.meta)
    # The operands that the old op was traced with: Inductor would bind them to the new op's parameters
    new.meta.pop("eager_input_vals", None)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
