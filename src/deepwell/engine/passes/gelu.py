"""Find activations that a model writes out op by op and put their one op in the place.

GPT-2's 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), BLOOM's in another order, erf's, x sigmoid(1.702 x): spellings
are many and functions few. So an expression is recognised by what it computes: all that lies between a tensor x and a
result is evaluated in float64 over the range where the functions differ. The passes behind this one then see one op.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from deepwell.engine.passes.edit import erase_unread, put_call, run_node, runs_in_kernels
from deepwell.graph.fx import Writes, argument, only_user, op_of, value_of
from deepwell.kernels.activation.autograd import quick_gelu

# Every one of these expressions bends x once, by one of:
_BENDS = {"tanh", "erf", "sigmoid"}
_POINTWISE = _BENDS | {"to", "add", "sub", "mul", "div", "pow", "sqrt"}
# Ops from x to the bend and from the bend to the result, in the longest spelling.
_REACH_UP, _REACH_DOWN = 8, 4
# They agree with each other far from 0; between gelu and its tanh form lie up to 5e-4, between two spellings 1e-8.
_PROBE = torch.linspace(-8.0, 8.0, 257, dtype=torch.float64)
_TOLERANCE = 1e-6

Call = tuple[Callable[..., Tensor], dict[str, Any]]
_KNOWN: tuple[tuple[Call, Tensor], ...] = (
    ((F.gelu, {"approximate": "tanh"}), F.gelu(_PROBE, approximate="tanh")),
    ((F.gelu, {}), F.gelu(_PROBE)),
    ((quick_gelu, {}), _PROBE * torch.sigmoid(1.702 * _PROBE)),
    ((F.silu, {}), F.silu(_PROBE)),
)


def rewrite_gelu(graph: fx.Graph) -> int:
    """Replace written-out activations whose inner values nobody else reads. Returns how many."""
    writes = Writes(graph)
    count = sum(_rewrite_at(bend, writes) for bend in list(graph.nodes) if op_of(bend) in _BENDS)
    erase_unread(graph)  # what is left of the expressions reads x no more
    return count


def _rewrite_at(bend: fx.Node, writes: Writes) -> bool:
    above = _above(bend)
    results, node = [bend], bend
    for _ in range(_REACH_DOWN):
        after = only_user(node)
        if after is None or op_of(after) not in _POINTWISE:
            break
        results.append(after)
        node = after
    for result in reversed(results):  # the longest expression first: 2x * gelu(x) / 2 is gelu(x) as well
        for x in above:
            is_written = writes.while_read(x, result) or writes.spoils(result, x)
            call = _recognised(x, result) if not is_written else None
            if call is not None and runs_in_kernels(x) and _same_type(x, result):
                put_call(result, call[0], (x,), call[1])
                return True
    return False


def _above(bend: fx.Node) -> list[fx.Node]:
    """Tensors that the bend is computed from within reach, and that something else reads as well: x is one of them."""
    found: dict[fx.Node, None] = {}
    layer = [bend]
    for _ in range(_REACH_UP):
        layer = [parent for node in layer if op_of(node) in _POINTWISE for parent in node.all_input_nodes]
        found.update(dict.fromkeys(node for node in layer if len(node.users) > 1 and value_of(node) is not None))
    # Where the model computes in fp32, what was cast is x.
    casts = [node.args[0] for node in found if op_of(node) == "to"]
    return [*(node for node in casts if isinstance(node, fx.Node) and value_of(node) is not None), *found]


def _same_type(x: fx.Node, result: fx.Node) -> bool:
    ours, theirs = value_of(x), value_of(result)
    return theirs is not None and ours.dtype == theirs.dtype and bool(ours.shape == theirs.shape)


def _recognised(x: fx.Node, result: fx.Node) -> Call | None:
    """The op that gives what the nodes between x and the result give; None where there is none, or others read them."""
    inner = _between(x, result)
    if inner is None:
        return None
    values: dict[fx.Node, Any] = {x: _PROBE}
    for node in inner:
        values[node] = values[node.args[0]] if op_of(node) == "to" else run_node(node, values)
    out = values[result]
    if not isinstance(out, Tensor) or out.dtype is not torch.float64 or out.shape != _PROBE.shape:
        return None
    # A comparison with NaN is false: an expression that is not finite there is none of them.
    return next((call for call, known in _KNOWN if float((out - known).abs().max()) <= _TOLERANCE), None)


def _keeps_numbers(node: fx.Node, x: fx.Node) -> bool:
    """Whether a node neither rounds to fewer bits than x has nor to a grid, which the probe might lie on."""
    value = value_of(node)
    is_narrow = value is not None and value.dtype not in (value_of(x).dtype, torch.float32)
    return not is_narrow and argument(node, "rounding_mode") is None


def _between(x: fx.Node, result: fx.Node) -> list[fx.Node] | None:
    """The pointwise nodes from x to the result in order; None where one reads another tensor or is read elsewhere."""
    inside: set[fx.Node] = set()
    stack = [result]
    while stack:
        node = stack.pop()
        if node is x or node in inside:
            continue
        if op_of(node) not in _POINTWISE or not _keeps_numbers(node, x):
            return None
        inside.add(node)
        stack += node.all_input_nodes
    is_closed = all(user in inside for node in inside if node is not result for user in node.users)
    if not is_closed or not any(x in node.all_input_nodes for node in inside):
        return None
    return [node for node in x.graph.nodes if node in inside]
