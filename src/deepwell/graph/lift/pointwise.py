"""Activations, residual sums, and products of activations that are no attention."""

from torch import fx

from deepwell.graph.fx import argument, op_of, without_marks
from deepwell.graph.lift.flow import FORMS
from deepwell.graph.lift.site import LiftedSite, LiftState, joined, parent
from deepwell.graph.ops import Extent

_BENDS = {
    "silu", "gelu", "relu", "relu6", "leaky_relu", "elu", "celu", "selu", "mish", "softplus", "sigmoid", "tanh",
    "hardswish", "hardsigmoid", "erf", "prelu", "logsigmoid", "log_sigmoid", "softsign", "glu", "expm1", "rrelu",
    "threshold",
}  # fmt: skip
_STRAIGHT = {
    "add", "sub", "mul", "div", "pow", "neg", "clamp", "to", "contiguous", "dropout", "minimum", "maximum", "abs",
    "where", "min", "max", "exp", "log1p", "sqrt", "clone",
}  # fmt: skip
_KEEPING = ("to", "dropout", "contiguous", "clone", "masked_fill")


def find_activations(found: LiftState) -> None:
    """Elementwise functions of one value that bend it, with the product behind them where they gate another."""
    bases = _bases(found)
    flow = found.flow
    members: dict[fx.Node, list[fx.Node]] = {}
    for node, base in bases.items():
        if node is not base:
            members.setdefault(base, []).append(node)
    for base, nodes in members.items():
        if not any(_bends(found, n) for n in nodes):
            continue
        inside = set(nodes)
        ends = [n for n in nodes if any(r not in inside for r in flow.readers.get(n, ()))]
        for end in _outermost(found, ends, inside):
            cone = _cone(found, end, inside)
            if any(_bends(found, n) for n in cone) and all(found.is_free(n) for n in cone):
                _add_activation(found, base, end, cone, bases)


def _cone(found: LiftState, end: fx.Node, inside: set[fx.Node]) -> set[fx.Node]:
    return {n for n in found.flow.back([end], lambda n: n not in inside) if n in inside}


def _bases(found: LiftState) -> dict[fx.Node, fx.Node]:
    """For each activation the value that it is an elementwise function of; itself where it is of several."""
    flow = found.flow
    bases: dict[fx.Node, fx.Node] = {}
    for node in flow.nodes:
        if not found.is_activation(node):
            continue
        bases[node] = node
        if not found.is_free(node) or flow.op(node) not in _BENDS | _STRAIGHT:
            continue
        behind = {bases[s] for s in flow.sources[node] if s in bases}
        if len(behind) == 1 and flow.op(node) != "glu":
            (base,) = behind
            if flow.numel(base) == flow.numel(node):
                bases[node] = base
    for node in flow.nodes:
        if node in bases and found.is_free(node) and _applied(found, node):
            # A function with a backward of its own (torch.autograd.Function): its forward stands in a graph of its own.
            sources = [s for s in flow.sources[flow.sources[node][0]] if s in bases]
            if len(sources) == 1 and flow.numel(sources[0]) == flow.numel(node):
                bases[node] = bases[sources[0]]
    for node in flow.nodes:  # glu reads both halves of one value
        if flow.op(node) == "glu" and node in bases and found.is_free(node):
            bases[node] = bases[flow.sources[node][0]]
    return bases


def _applied(found: LiftState, node: fx.Node) -> set[str]:
    """The bending steps inside a custom autograd function whose result this node takes."""
    flow = found.flow
    sources = flow.sources[node]
    if flow.op(node) != "getitem" or not sources or flow.op(sources[0]) != "autograd_function_apply":
        return set()
    return {_op(n) for n in _body(found, sources[0])} & _BENDS


def _op(node: fx.Node) -> str:
    return without_marks(op_of(node))


def _body(found: LiftState, call: fx.Node) -> list[fx.Node]:
    body = call.args[0]
    module = getattr(found.flow.traced.graph_module, str(body.target), None) if isinstance(body, fx.Node) else None
    return list(module.graph.nodes) if isinstance(module, fx.GraphModule) else []


def _bends(found: LiftState, node: fx.Node) -> bool:
    return found.flow.op(node) in _BENDS or bool(_applied(found, node))


def _outermost(found: LiftState, ends: list[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    """Ends that no other end follows from; casts of the input alone are no end."""
    behind: set[fx.Node] = set()
    for end in ends:
        behind.update(n for n in found.flow.back(found.flow.sources[end], lambda n: n not in inside))
    return [end for end in ends if end not in behind]


def _add_activation(
    found: LiftState, base: fx.Node, end: fx.Node, cone: set[fx.Node], bases: dict[fx.Node, fx.Node]
) -> None:
    flow = found.flow
    bend = min((n for n in cone if _bends(found, n)), key=flow.index.__getitem__)
    gate = _gated_by(found, end, base, bases)
    nodes = set(cone)
    last = end
    if gate is not None:
        nodes |= gate
        last = max(gate, key=flow.index.__getitem__)
    is_glu = any(flow.op(n) == "glu" for n in cone)
    path = _block_of(found, bend)
    dims, width = found.sizes.split(flow.shape(last))
    site = LiftedSite(
        "activation", last, path, joined(path, "act"), nodes, params=found.params_of(nodes),
        facts={
            "function": _function(found, cone, gate is not None), "width": width,
            "gated": gate is not None or is_glu, "dims": dims, "bent": base,
        },
    )  # fmt: skip
    found.add(site)


def _gated_by(found: LiftState, end: fx.Node, base: fx.Node, bases: dict[fx.Node, fx.Node]) -> set[fx.Node] | None:
    """The nodes up to the product with another activation, if the function's value goes nowhere else."""
    flow = found.flow
    taken: set[fx.Node] = set()
    node = end
    while True:
        readers = flow.readers.get(node, [])
        if len(readers) != 1 or not found.is_free(readers[0]):
            return None
        reader = readers[0]
        taken.add(reader)
        if flow.op(reader) == "mul":
            others = [s for s in flow.sources[reader] if s is not node and found.is_activation(s)]
            fits = len(others) == 1 and bases.get(others[0]) is not base
            return taken if fits and flow.numel(reader) == max(flow.numel(others[0]), flow.numel(node)) else None
        if flow.op(reader) not in _KEEPING and not (
            flow.op(reader) in FORMS and flow.numel(reader) == flow.numel(node)
        ):
            return None
        node = reader


def _block_of(found: LiftState, node: fx.Node) -> str:
    """The module that an activation stands in: the parent of a module that is nothing but the function."""
    path = found.flow.path(node)
    if not path:
        return ""
    module = found.flow.module(path)
    is_function = next(module.children(), None) is None and all(p.dim() < 2 for p in module.parameters())
    has_sites = any(site.path == path and site.kind != "activation" for site in found.sites)
    return parent(path) if is_function and not has_sites else path


def _function(found: LiftState, cone: set[fx.Node], is_gate: bool) -> str:
    flow = found.flow
    for node in [n for n in cone if _applied(found, n)]:
        cone = cone | set(_body(found, flow.sources[node][0]))
    ops = {_op(n) for n in cone}
    if "silu" in ops:
        return "silu"
    if "gelu" in ops:
        node = next(n for n in cone if flow.op(n) == "gelu")
        return "gelu_tanh" if argument(node, "approximate") == "tanh" else "gelu"
    if "relu" in ops:
        return "relu2" if "pow" in ops or _is_square(found, cone) else "relu"
    if "erf" in ops:
        return "gelu"
    if "tanh" in ops:
        if "softplus" in ops:
            return "mish"
        return "gelu_tanh" if _numbers(cone, 0.044715) else "tanh"
    if "sigmoid" in ops:
        if not any(_op(n) == "mul" and len(n.all_input_nodes) == 2 for n in cone):
            return "sigmoid"
        if is_gate and "clamp" in ops:
            return "clamped_swiglu"
        return "quick_gelu" if _numbers(cone, 1.702) else "silu"
    return "xielu" if {"expm1", "where"} <= ops else min(ops & _BENDS)


def _is_square(found: LiftState, cone: set[fx.Node]) -> bool:
    return any(
        found.flow.op(n) == "mul" and len(n.all_input_nodes) == 1 and len(found.flow.tensor_args(n)) == 2 for n in cone
    )


def _numbers(cone: set[fx.Node], wanted: float) -> bool:
    return any(isinstance(a, float) and abs(a - wanted) < 1e-3 for n in cone for a in n.args)


# ---- sums ----


def find_sums(found: LiftState) -> None:
    """Sums of two hidden states that come from different ops."""
    flow = found.flow
    for node in flow.nodes:
        if flow.op(node) != "add" or not found.is_free(node) or not found.is_activation(node):
            continue
        terms = [a for a in flow.tensor_args(node) if found.is_activation(a)]
        if len(terms) != 2 or not _is_hidden(found, node, terms):
            continue
        behind = [set(found.sites_behind([_seen(found, node, term)])) for term in terms]
        inputs = [_reads_input(found, term) for term in terms]
        if behind[0] == behind[1] and inputs[0] == inputs[1]:
            continue
        path = flow.path(node)
        shape = flow.shape(node)
        found.add(
            LiftedSite(
                "add", node, path, joined(path, "add"), facts={"width": shape[-1], "dims": shape[:-1]}, role="residual"
            )
        )


def _seen(found: LiftState, node: fx.Node, term: fx.Node) -> fx.Node:
    """The value of `term` as `node` reads it, after in-place writes."""
    sources = found.flow.sources[node]
    return term if term in sources else sources[0]


def _reads_input(found: LiftState, term: fx.Node) -> bool:
    return any(
        found.flow.placeholder(n) for n in found.flow.back([term], lambda n: not found.is_free(n)) if n in found.live
    )


def _input_rows(found: LiftState) -> set[tuple[int, ...]]:
    """Leading axes of the model's inputs: a second sequence (a decoder's) has a length of its own."""
    flow = found.flow
    inputs = [n for n in flow.nodes if (p := flow.placeholder(n)) is not None and p.kind == "input"]
    return {flow.shape(n)[:-1] if flow.is_float(n) else flow.shape(n) for n in inputs}


def _is_hidden(found: LiftState, node: fx.Node, terms: list[fx.Node]) -> bool:
    flow = found.flow
    shape = flow.shape(node)
    if len(shape) < 2 or shape[-1] < 2:
        return False
    rows = found.sizes.rows(shape[:-1])
    if found.sizes.seq is not None and not rows.seq and shape[:-1] not in _input_rows(found):
        return False  # one step of a recurrence, not a hidden state
    batch = found.sizes.batch or 1
    return all(
        flow.shape(t)[-1:] == shape[-1:] and flow.numel(t) in (flow.numel(node), flow.numel(node) // batch)
        for t in terms
    )


# ---- products of activations ----


def find_products(found: LiftState) -> None:
    """Matmuls of two activations outside of softmax attention; many equal ones of one module count as one."""
    flow = found.flow
    groups: dict[tuple[str, tuple[Extent, ...]], list[fx.Node]] = {}
    for node in flow.nodes:
        if flow.op(node) not in ("matmul", "baddbmm", "einsum") or not found.is_free(node):
            continue
        operands = [a for a in flow.tensor_args(node) if found.is_activation(a)][-2:]
        if len(operands) != 2:
            continue
        extents = _product_extents(found, node, operands)
        if extents is not None:
            groups.setdefault((flow.path(node), extents), []).append(node)
    for (path, extents), nodes in groups.items():
        parts = [[n] for n in nodes] if len(nodes) <= 4 else [nodes]
        for part in parts:
            _add_matmul(found, path, extents, part)


def _product_extents(found: LiftState, node: fx.Node, operands: list[fx.Node]) -> tuple[Extent, ...] | None:
    flow, sizes = found.flow, found.sizes
    out, left = flow.shape(node), flow.shape(operands[0])
    if flow.op(node) == "einsum":
        # What the equation contracts is the product of both operands' sizes that the output lacks.
        total = flow.numel(operands[0]) * flow.numel(operands[1])
        inner = max(1, round((total / max(1, flow.numel(node))) ** 0.5))
        return (sizes.rows(out[:-1]), Extent(), Extent(out[-1]), sizes.size(inner))
    if len(out) < 2 or len(left) < 2:
        return None
    return (sizes.rows(out[:-2], is_data=len(out) > 2), sizes.size(out[-2]), sizes.size(out[-1]), sizes.size(left[-1]))


def _add_matmul(found: LiftState, path: str, extents: tuple[Extent, ...], nodes: list[fx.Node]) -> None:
    flow, seq = found.flow, found.sizes.seq
    batch, m, n, k = extents
    count = len(nodes)
    if count > 1 and seq is not None and seq - 1 <= count <= seq and not any(e.seq for e in extents):
        batch = Extent(batch.factor, batch.batch, 1)  # one step of a scan for each position
    elif count > 1:
        batch = batch.times(count)
    found.add(
        LiftedSite(
            "matmul", nodes[-1], path, joined(path, "matmul"), set(nodes),
            tuple({s: None for node in nodes for s in flow.sources[node] if s not in nodes}),
            facts={"batch": batch, "m": m, "n": n, "k": k},
        )
    )  # fmt: skip
