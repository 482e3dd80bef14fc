"""LayerNorm and plain activations before an FP8 linear become kernels that can write its FP8 rows.

Only there: what feeds a product in high precision Inductor fuses as well, with its neighbours at that. RMSNorm and
gated activations have passes of their own.
"""

from typing import Any

from torch import fx

from deepwell.engine import functional
from deepwell.engine.passes.match import SHAPE_OPS, argument, name_of, replace, runs_in_kernels
from deepwell.engine.passes.swiglu import activation_of


def rewrite_before_linears(graph: fx.Graph) -> tuple[int, int]:
    """Replace them after the linear pass ran. Returns how many LayerNorms and how many activations."""
    norms = activations = 0
    for node in list(graph.nodes):
        if name_of(node) == "layer_norm" and _feeds_fp8(node):
            norms += _replace_norm(graph, node)
        elif activation_of(node) and _feeds_fp8(node) and runs_in_kernels(node.args[0]):
            with graph.inserting_before(node):
                new = graph.call_function(functional.activation, (node.args[0], activation_of(node)))
            replace(node, new)
            activations += 1
    return norms, activations


def _replace_norm(graph: fx.Graph, node: fx.Node) -> bool:
    x, shape = node.args[0], argument(node, 1, "normalized_shape")
    weight, bias = argument(node, 2, "weight"), argument(node, 3, "bias")
    operands: list[Any] = [x, weight] if bias is None else [x, weight, bias]
    if len(tuple(shape)) != 1 or not runs_in_kernels(*operands):
        return False
    with graph.inserting_before(node):
        new = graph.call_function(functional.layer_norm, (x, weight, bias, argument(node, 4, "eps", 1e-5)))
    replace(node, new)
    return True


def _feeds_fp8(node: fx.Node) -> bool:
    """Whether an FP8 linear reads the node, views between them or not."""
    return any(
        (user.target is functional.low_precision_linear and "fp8_row" in str(user.args[3]))
        or (name_of(user) in SHAPE_OPS and _feeds_fp8(user))
        for user in node.users
    )
