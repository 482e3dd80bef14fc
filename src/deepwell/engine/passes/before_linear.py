"""LayerNorm and plain activations before an FP8 linear become kernels that can write its FP8 rows.

Only there: what feeds a product in high precision Inductor fuses as well, with its neighbours at that. RMSNorm and
gated activations have passes of their own. Where the activation reads an FP8 linear too, as between the two of an MLP,
its kernel takes that linear's bias along: no pass over the product for the bias, and none for the bias's gradient.
"""

from typing import Any

from torch import fx

from deepwell.engine.passes.edit import put_call, runs_in_kernels, width_of
from deepwell.engine.passes.swiglu import activation_of
from deepwell.graph.fx import GRAD_MODE, SHAPE_OPS, Writes, argument, only_user, op_of
from deepwell.kernels.activation.autograd import activation, bias_activation
from deepwell.kernels.gemm.linear import low_precision_linear
from deepwell.kernels.norm.autograd import layer_norm


def rewrite_before_linears(graph: fx.Graph) -> tuple[int, int, int]:
    """Replace them after the linear pass ran. Returns how many LayerNorms, activations, and activations with a bias."""
    norms = activations = biases = 0
    writes = Writes(graph)
    for node in list(graph.nodes):
        if op_of(node) == "layer_norm" and _feeds_fp8(node):
            norms += _replace_norm(node)
        elif activation_of(node) and _feeds_fp8(node) and runs_in_kernels(node.args[0]):
            if writes.spoils(node, node.args[0]):
                continue
            bias = _take_bias(node)
            function, operands = (activation, ()) if bias is None else (bias_activation, (bias,))
            put_call(node, function, (node.args[0], *operands, activation_of(node)))
            activations += 1
            biases += bias is not None
    return norms, activations, biases


def _take_bias(activation: fx.Node) -> fx.Node | None:
    """Take the bias from the FP8 linear whose product the activation alone reads; None where there is none."""
    node = activation.args[0]
    while op_of(node) in SHAPE_OPS and only_user(node) is not None and width_of(node) == width_of(node.args[0]):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not low_precision_linear or only_user(node) is None:
        return None
    if node.meta.get(GRAD_MODE) != activation.meta.get(GRAD_MODE):
        return None  # the bias would learn here
    x, weights, bias, scheme = node.args
    if bias is None or not scheme.startswith("fp8_row") or not runs_in_kernels(bias, activation.args[0]):
        return None
    node.args = (x, weights, None, scheme)
    return bias


def _replace_norm(node: fx.Node) -> bool:
    x, shape = node.args[0], argument(node, "normalized_shape")
    weight, bias = argument(node, "weight"), argument(node, "bias")
    # Under autocast the result may be in another dtype.
    operands: list[Any] = [node, x, weight] if bias is None else [node, x, weight, bias]
    if len(tuple(shape)) != 1 or not runs_in_kernels(*operands):
        return False
    put_call(node, layer_norm, (x, weight, bias, argument(node, "eps", 1e-5)))
    return True


def _feeds_fp8(node: fx.Node) -> bool:
    """Whether an FP8 linear reads the node, views between them or not."""
    return any(
        (user.target is low_precision_linear and "fp8_row" in str(user.args[3]))
        or (op_of(user) in SHAPE_OPS and _feeds_fp8(user))
        for user in node.users
    )
