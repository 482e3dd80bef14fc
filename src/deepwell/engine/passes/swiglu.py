"""Find `silu(gate) * up`, or GELU's, and put one op in its place; packed where both are halves of one tensor."""

from torch import fx

from deepwell.engine.passes.edit import put_call, runs_in_kernels
from deepwell.graph.fx import Writes, argument, multiplies, only_user, op_of, other_operand, value_of
from deepwell.kernels.activation.autograd import quick_gelu, swiglu, swiglu_packed
from deepwell.kernels.gemm.linear import split_columns


def rewrite_swiglu(graph: fx.Graph) -> int:
    """Replace every gated SiLU or GELU whose inner values nobody else reads. Returns how many."""
    count = 0
    writes = Writes(graph)
    for inner in list(graph.nodes):
        act = activation_of(inner)
        product = only_user(inner) if act else None
        if product is None or not multiplies(product, inner):  # `up *= ...`: others may read up afterwards
            continue
        gate, up = inner.args[0], other_operand(product, inner)
        if writes.between(gate, inner, product) or writes.spoils(product, gate, up):
            continue
        if not runs_in_kernels(gate, up) or value_of(gate).shape != value_of(up).shape or not value_of(gate).dim():
            continue
        packed = _packed(gate, up)
        put_call(product, *((swiglu, (gate, up, act)) if packed is None else (swiglu_packed, (packed, act))))
        count += 1
    return count


def activation_of(node: fx.Node) -> str:
    """The kernel's name of the activation that a node computes, "" where it is none."""
    name = op_of(node)
    if name == "gelu":
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(argument(node, "approximate", "none"), "")
    if name in ("silu", "relu"):
        return name
    return "quick_gelu" if node.target is quick_gelu else ""


def _packed(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """The tensor whose first half of columns is the gate and whose second half is up."""
    halves = [node.args for node in (gate, up) if op_of(node) == "getitem"]
    if len(halves) != 2 or halves[0][0] is not halves[1][0] or (halves[0][1], halves[1][1]) != (0, 1):
        return None
    split = halves[0][0]
    is_merged = split.target is split_columns and len(split.args[1]) == 2
    is_chunk = op_of(split) == "chunk" and argument(split, "chunks") == 2 and _is_last(split)
    return split.args[0] if is_merged or is_chunk else None


def _is_last(chunk: fx.Node) -> bool:
    """Whether a chunk cuts the last dimension into equal halves."""
    value = value_of(chunk.args[0])
    dim = argument(chunk, "dim", 0)
    return value is not None and dim in (-1, value.dim() - 1) and value.shape[-1] % 2 == 0
