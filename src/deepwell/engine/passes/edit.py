"""Changing FX graphs: put one node in the place of another, and drop what nobody reads any more."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from deepwell.graph.fx import CHANGED, GRAD_MODE, PURE, op_of, value_of, written_by

KERNEL_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


def runs_in_kernels(*nodes: Any) -> bool:
    """Whether these are tensors of one dtype that the kernels take; a float64 model is left as it is.

    So are tensors without rows: a single number, or a last dimension without one.
    """
    values = [value_of(node) for node in nodes]
    dtypes = {value.dtype if value is not None and _has_rows(value) else None for value in values}
    return len(dtypes) == 1 and dtypes <= KERNEL_DTYPES


def _has_rows(value: torch.Tensor) -> bool:
    # An open size is none of 0.
    return value.dim() > 0 and not (isinstance(value.shape[-1], int) and value.shape[-1] == 0)


def width_of(node: Any) -> Any:
    """Of the last dimension, None where there is none."""
    value = value_of(node)
    return value.shape[-1] if value is not None and value.dim() else None


def run_node(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """What a node gives of the values of those it reads."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
    if node.op == "call_function":
        return node.target(*args, **kwargs)
    return getattr(args[0], str(node.target))(*args[1:], **kwargs)


def is_row(bias: Any, width: Any) -> bool:
    """Whether a bias has one number for each column of a product: what is another shape is broadcast to it."""
    value = value_of(bias)
    return value is not None and value.dim() == 1 and bool(value.shape[0] == width)


def scheme_of(names: Iterable[str], schemes: Mapping[str, str]) -> tuple[str, str]:
    """The path of a parameter that has a scheme and that scheme, empty where it has none."""
    paths = (name.removesuffix(".weight") for name in names)
    return next(((path, schemes[path]) for path in paths if path in schemes), ("", ""))


def erase_unread(graph: fx.Graph) -> None:
    """Drop known ops that nobody reads any more.

    FX's own sweep takes what has no reader for dead, but Dynamo's graphs hold `x.scatter_(...)` whose work lies in x.
    AOTAutograd drops what else is dead, once mutation is out of the graph.
    """
    for node in reversed(list(graph.nodes)):
        if not node.users and op_of(node) in PURE and not written_by(node):
            graph.erase_node(node)


def replace(old: fx.Node, new: fx.Node) -> None:
    """Put `new` in the place of `old` and drop `old`."""
    new.meta.setdefault("example_value", old.meta.get("example_value"))
    for key in ("nn_module_stack", "stack_trace", "module_path", CHANGED, GRAD_MODE):
        if key in old.meta:
            new.meta.setdefault(key, old.meta[key])
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def put_call(old: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Put a call of what computes the same in the place of `old`."""
    with old.graph.inserting_before(old):
        new = old.graph.call_function(target, args, kwargs)
    replace(old, new)


def put_with_value(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call at the graph's insertion point, with the value that it has of its operands' values."""
    node = graph.call_function(target, args, kwargs)
    node.meta["example_value"] = run_node(node, {operand: value_of(operand) for operand in node.all_input_nodes})
    return node


def rows_first(graph: fx.Graph, weight: fx.Node, is_kn: bool) -> fx.Node:
    """The weight of experts as [E, N, K], a view where the model stores [E, K, N]."""
    return put_with_value(graph, torch.transpose, weight, 1, 2) if is_kn else weight


def in_dtype_of(old: fx.Node, new: fx.Node, x: fx.Node) -> fx.Node:
    """`new`, whose dtype is that of x, in the dtype of `old`: autocast may give a product another one."""
    wanted = value_of(old)
    if wanted is None or wanted.dtype == value_of(x).dtype:
        return new
    new.meta["example_value"] = wanted.to(value_of(x).dtype)
    with old.graph.inserting_before(old):
        return old.graph.call_method("to", (new, wanted.dtype))


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
