"""LayerDrop that drops nothing: `torch.rand([]) < 0.0` is never true, so no graph needs to end for it.

Hugging Face's OPT, BART, Whisper and many others draw a number for each layer in training and compare it with
`layerdrop`, also where that is 0.0, as it mostly is. Dynamo leaves what decides by a tensor's value to Python, and with
it the loop over the layers. A number from [0, 1) is not below 0, whatever was drawn: such a branch is decided while
the graph is made, under the guard that Dynamo has on `layerdrop`. A rate above 0 breaks the graph as ever.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx
from torch._dynamo import symbolic_convert
from torch._dynamo.source import RandomValueSource
from torch._dynamo.variables import ConstantVariable, TensorVariable

_is_on: ContextVar[bool] = ContextVar("deepwell_layer_drop", default=False)
_less_than = symbolic_convert.compare_op_handlers["<"]


@contextmanager
def layer_drop_decided() -> Iterator[None]:
    """What Dynamo traces in this thread meanwhile takes the branch that is always taken."""
    token = _is_on.set(True)
    try:
        yield
    finally:
        _is_on.reset(token)


def draws(graph: fx.Graph) -> list[fx.Node]:
    """The single numbers that a graph of Dynamo's draws and does not read. Drops comparisons that nothing reads."""
    for node in graph.find_nodes(op="call_function", target=operator.lt):
        if not node.users and isinstance(node.args[0], fx.Node) and _draws_one(node.args[0]):
            graph.erase_node(node)
    found = graph.find_nodes(op="call_function", target=torch.rand)
    return [node for node in found if not node.users and _draws_one(node)]


def _draws_one(node: fx.Node) -> bool:
    return node.target is torch.rand and node.args == ([],) and not node.kwargs


class _Never(TensorVariable):
    """A tensor that is False. Only a branch needs to know: whatever else reads it gets the tensor."""

    def is_python_constant(self) -> bool:
        tracer: Any = self.proxy.tracer
        return "JUMP" in tracer.output_graph.current_tx.current_instruction.opname

    def as_python_constant(self) -> bool:
        return False


def _compare(tx: Any, operands: Any, keywords: Any) -> Any:
    """Dynamo's `a < b`."""
    number, rate = operands
    is_float = _is_on.get() and _is_random_float(tx, number)
    is_tensor = _is_on.get() and _is_random_tensor(number)
    if is_float or is_tensor:
        rate = rate.realize()
        if rate.is_python_constant() and rate.as_python_constant() == 0:
            if is_float:
                return ConstantVariable.create(False)
            found = _less_than(tx, operands, keywords)
            found.__class__ = _Never
            return found
    return _less_than(tx, operands, keywords)


def _is_random_tensor(value: Any) -> bool:
    return type(value) is TensorVariable and _draws_one(value.proxy.node)


def _is_random_float(tx: Any, value: Any) -> bool:
    """Whether it is `random.uniform(0, 1)`, which Dynamo draws before the graph."""
    source = getattr(value, "source", None)
    if not isinstance(source, RandomValueSource):
        return False
    function, args, keywords = tx.output.random_calls[source.random_call_index]
    return (function.__name__, *args) == ("uniform", 0, 1) and not keywords


symbolic_convert.compare_op_handlers["<"] = _compare
