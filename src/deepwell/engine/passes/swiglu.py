"""Find `silu(gate) * up` and put one op in its place; packed where both are halves of one merged linear."""

from torch import fx

from deepwell.engine import functional
from deepwell.engine.passes.match import name_of, only_user, other_operand, replace, value_of


def rewrite_swiglu(graph: fx.Graph) -> int:
    """Replace every gated SiLU whose inner values nobody else reads. Returns how many."""
    count = 0
    for silu in list(graph.nodes):
        if name_of(silu) != "silu":
            continue
        product = only_user(silu)
        if product is None or name_of(product) != "mul":
            continue
        gate, up = silu.args[0], other_operand(product, silu)
        if not isinstance(up, fx.Node) or value_of(up) is None or value_of(gate).shape != value_of(up).shape:
            continue
        with graph.inserting_before(product):
            packed = _packed(gate, up)
            if packed is not None:
                new = graph.call_function(functional.swiglu_packed, (packed,))
            else:
                new = graph.call_function(functional.swiglu, (gate, up))
        replace(product, new)
        count += 1
    return count


def _packed(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """The merged tensor whose first half is the gate and whose second half is up."""
    halves = [node.args for node in (gate, up) if name_of(node) == "getitem"]
    if len(halves) != 2 or halves[0][0] is not halves[1][0] or (halves[0][1], halves[1][1]) != (0, 1):
        return None
    split = halves[0][0]
    if split.target is not functional.split_columns or len(split.args[1]) != 2:
        return None
    return split.args[0]
