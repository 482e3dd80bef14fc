"""Put the experts' grouped products into the formats that the policy and this machine decided.

A grouped product is `torch._grouped_mm` (or Hugging Face's stand-in for other dtypes) of rows sorted by expert with a
parameter [E, N, K], transposed, or [E, K, N]. Each becomes a `grouped_linear`; a batch of products [E, T, K] with such
a parameter (Inkling's shared experts) a `batched_linear`, its groups equally long. Where all GEMMs of both projections
are FP8 and everything between the tokens and their sum is what Hugging Face's grouped experts do,

    rows = x[order // top_k];  h = act(gate) * up of rows @ gate_up.T;  y = h @ down.T;  y *= weight[order]
    sum over top_k of y in the order of tokens; rows of no expert masked to zero on the way

the whole block becomes one `fused_experts`. Where only the products and the gate between them are these (JetMoE,
Aria), those are one: rows in, rows out.

Experts that are one call already (`run_experts`: DeepwellMoE's, and Hugging Face's as the engine runs them) get their
precision as an argument.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from deepwell.engine.passes.edit import (
    in_dtype_of,
    put_call,
    replace,
    rows_first,
    runs_in_kernels,
    scheme_of,
)
from deepwell.graph.fx import (
    GROUPED_FALLBACK,
    VIEWS,
    Writes,
    argument,
    arguments,
    grouped_parts,
    is_changed,
    only_user,
    op_of,
    skip_casts,
    value_of,
    written_by,
)
from deepwell.kernels.activation.autograd import swiglu_packed
from deepwell.kernels.experts.autograd import FP8_METHOD, batched_linear, fused_experts, grouped_linear
from deepwell.kernels.experts.mlp import is_fused_in_fp8, run_experts
from deepwell.kernels.tune.gain import Gain

_FP8 = "|".join([FP8_METHOD] * 3)
_PLAIN = "bf16|bf16|bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSite:
    """A grouped product of the graph that leaves bf16. `is_kn`: the weight is stored [E, K, N]."""

    node: fx.Node
    weight: fx.Node
    offs: fx.Node | None  # None: as many rows for each expert, x is [E, T, K]
    is_kn: bool
    scheme: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A whole MoE block around two sites: what it reads, and the node of its sum; or of rows, by expert already."""

    x: fx.Node
    order: fx.Node | None  # None: x are the rows, and the result too
    weights: fx.Node | None  # of the router, one per choice, in the order of tokens
    top_k: int
    act: str
    total: fx.Node


def find_experts(
    graph: fx.Graph, weights: Mapping[str, tuple[str, ...]], schemes: Mapping[str, str]
) -> list[ExpertSite]:
    """Grouped products whose weight is a parameter with a scheme. `weights` maps placeholders to parameters' names."""
    sites = []
    for node in graph.nodes:
        parts = grouped_parts(node)
        if parts is None:
            continue
        x, weight, offs, is_kn = parts
        names = weights.get(weight.name, ()) if isinstance(weight, fx.Node) else ()
        path, scheme = scheme_of(names, schemes)
        if path and runs_in_kernels(x, weight):
            sites.append(ExpertSite(node=node, weight=weight, offs=offs, is_kn=is_kn, scheme=scheme, path=path))
    return sites


def rewrite_experts(graph: fx.Graph, sites: Sequence[ExpertSite]) -> tuple[int, list[str]]:
    """Replace the sites, whole blocks where recognised; call after the SwiGLU pass.

    Returns how many blocks, and why other FP8 experts run product by product.
    """
    by_node = {site.node: site for site in sites}
    writes = Writes(graph)
    done: set[fx.Node] = set()
    blocks = 0
    reasons: dict[str, str] = {}  # by the module of the experts: that of its last product, the down projection
    for down in sites:
        if down.scheme != _FP8:
            continue
        found = _block_around(down, by_node)
        if not isinstance(found, str) and _is_written(writes, found[0], down, found[1]):
            found = "what they read is written into before the experts are done"
        if isinstance(found, str):
            reasons[down.path.rpartition(".")[0]] = found
            continue
        gate_up, block = found
        reasons.pop(down.path.rpartition(".")[0], None)
        _replace_block(graph, gate_up, down, block)
        done |= {gate_up.node, down.node}
        blocks += 1
    for site in sites:
        if site.node in done:
            continue
        x = site.node.args[0]
        with graph.inserting_before(site.node):
            function, offs = (batched_linear, ()) if site.offs is None else (grouped_linear, (site.offs,))
            new = graph.call_function(function, (x, site.weight, *offs, site.is_kn, site.scheme))
        replace(site.node, in_dtype_of(site.node, new, x))
    return blocks, list(dict.fromkeys(reasons.values()))


def rewrite_calls(
    graph: fx.Graph,
    weights: Mapping[str, tuple[str, ...]],
    schemes: Mapping[str, str],
    gain_of: Callable[[fx.Node, str], Gain | None] = lambda call, path: None,
) -> tuple[list[str], int, list[str], dict[str, Gain]]:
    """Give experts that are one call the schemes of their weights; FP8 that `gain_of` finds slower stays bf16.

    Returns the paths of those that leave it, how many calls are fused from end to end, why other FP8 ones run product
    by product, and the measured gains by path.
    """
    paths: list[str] = []
    gains: dict[str, Gain] = {}
    reasons: dict[str, None] = {}
    fused = 0
    for node in [node for node in graph.nodes if node.target is run_experts]:
        x, gate_up, down, *_ = node.args
        is_apart = isinstance(gate_up, tuple)
        stored = [_behind_views(weight) for weight in (*(gate_up if is_apart else (gate_up,)), down)]
        found = [scheme_of(weights.get(weight.name, ()), schemes) for weight in stored]
        own_paths, own_schemes = [path for path, _ in found], [scheme for _, scheme in found]
        if not all(own_paths) or len(set(own_schemes[:-1])) > 1 or not runs_in_kernels(x, *stored):
            continue
        how = [own_schemes[0], own_schemes[-1]]
        is_fp8 = how == [_FP8, _FP8]
        is_fused = is_fp8 and not is_apart and is_fused_in_fp8(value_of(gate_up), value_of(down))
        gain = gain_of(node, own_paths[0]) if is_fused else None
        if gain is not None:
            gains |= dict.fromkeys(own_paths, gain)
            if not gain.gains:
                node.args = (*node.args[:-1], _PLAIN)
                continue
        paths += own_paths
        node.args = (*node.args[:-1], ";".join(how))
        fused += is_fused
        if is_fp8 and not is_fused:
            reasons["gate and up are two weights" if is_apart else "their weights lie in neither order"] = None
    return paths, fused, list(reasons), gains


def _behind_views(weight: fx.Node) -> fx.Node:
    """The parameter that a weight of a call shows: transposed, by expert, or without rows that no expert has."""
    while weight.op != "placeholder" and (op_of(weight) in VIEWS or op_of(weight) == "getitem"):
        weight = weight.args[0]  # type: ignore[assignment]
    return weight


def rewrite_fallback(graph: fx.Graph) -> int:
    """Replace what is left of Hugging Face's stand-in for grouped products of other dtypes than bf16; how many.

    Its backward reads the sizes of groups on the host, which no graph of a backward can hold.
    """
    count = 0
    for node in list(graph.nodes):
        parts = grouped_parts(node) if op_of(node) == GROUPED_FALLBACK else None
        if parts is None or parts[2] is None:
            continue
        x, weight, offs, is_kn = parts
        put_call(node, grouped_linear, (x, weight, offs, is_kn, _PLAIN))
        count += 1
    return count


def _replace_block(graph: fx.Graph, gate_up: ExpertSite, down: ExpertSite, block: _Block) -> None:
    total = block.total
    with graph.inserting_before(total):
        routing = (block.order, block.weights, down.offs)
        weights = [rows_first(graph, site.weight, site.is_kn) for site in (gate_up, down)]
        args = (block.x, *weights, routing, block.top_k, block.act)
        new = graph.call_function(fused_experts, args)
    inside = list(_between(total, {block.x, block.order, block.weights, gate_up.weight, down.weight, down.offs}))
    replace(total, in_dtype_of(total, new, block.x))
    for node in inside:
        for reader in [user for user in node.users if op_of(user) == "masked_fill_" and not user.users]:
            graph.erase_node(reader)
        if not node.users:
            graph.erase_node(node)


def _between(node: fx.Node, inputs: set[fx.Node]) -> Iterator[fx.Node]:
    """What a node is made from, back to these inputs, each after its readers."""
    graph_order = {other: i for i, other in enumerate(node.graph.nodes)}
    found: set[fx.Node] = set()
    stack = [parent for parent in node.all_input_nodes if parent not in inputs]
    while stack:
        one = stack.pop()
        if one not in found and one.op != "placeholder":
            found.add(one)
            stack += [parent for parent in one.all_input_nodes if parent not in inputs]
    return iter(sorted(found, key=lambda n: -graph_order[n]))


# ---- recognising a block ----


def _block_around(down: ExpertSite, sites: Mapping[fx.Node, ExpertSite]) -> tuple[ExpertSite, _Block] | str:
    """The gate-up site and the block whose down projection this is, or what differs."""
    hidden = skip_casts(down.node.args[0])
    if hidden.target is not swiglu_packed or only_user(hidden) is None:
        return "their gate is not act(first half) * second half of one product without a bias"
    gate_up = next((site for node, site in sites.items() if _masked(hidden.args[0], site) is node), None)
    if any(map(is_changed, (hidden, down.node, gate_up and gate_up.node))):
        return "their rows are written into on the way"
    if gate_up is None or gate_up.scheme != _FP8 or not _are_same(gate_up.offs, down.offs):
        return "gate and up are not one FP8 product over the same groups"
    if down.offs is None:
        return "they are a batch of products with as many rows for each expert"
    gathered = _gathered(skip_casts(gate_up.node.args[0]), gate_up)
    summed = None if gathered is None else _summed(down, *gathered[1:])
    x, order, top_k = (gate_up.node.args[0], None, 1) if gathered is None or summed is None else gathered
    if not runs_in_kernels(x, gate_up.weight, down.weight):
        return "their dtypes differ"
    weights, total = summed or (None, down.node)
    block = _Block(x=x, order=order, weights=weights, top_k=top_k, act=hidden.args[1], total=total)
    return gate_up, block


def _are_same(a: Any, b: Any) -> bool:
    """Whether both are one value: ends of groups may be counted for each product."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
        return a is b if isinstance(a, fx.Node) else bool(a == b)
    is_counted = op_of(a) == op_of(b) and op_of(a) in ("cumsum", "to", "convert") and a.kwargs == b.kwargs
    return is_counted and len(a.args) == len(b.args) and all(map(_are_same, a.args, b.args))


def _is_written(writes: Writes, gate_up: ExpertSite, down: ExpertSite, block: _Block) -> bool:
    """Whether something that a block reads is another when its sum is computed."""
    begin = gate_up.node if block.order is None else block.order
    read = (block.x, block.weights, block.order, down.offs, gate_up.weight, down.weight)
    return any(writes.between(node, begin, block.total) for node in read if node is not None)


def _masked(node: Any, site: ExpertSite) -> Any:
    """What a `masked_fill(y, rows of no expert, 0)` fills, the node itself where it is none."""
    is_mask = op_of(node) == "masked_fill" and _is_of_no_expert(node, site)
    return node.args[0] if is_mask and only_user(node.args[0]) is node else node


def _is_of_no_expert(fill: fx.Node, site: ExpertSite) -> bool:
    """Whether a node fills rows with zeros whose expert, in the order of rows, is none of the weight's."""
    mask = argument(fill, "mask")
    if argument(fill, "value") != 0 or op_of(mask) != "unsqueeze" or op_of(mask.args[0]) != "ge":
        return False
    ids, experts = mask.args[0].args
    is_sorted = isinstance(ids, fx.Node) and ids.target is operator.getitem
    return is_sorted and isinstance(experts, int) and experts == value_of(site.weight).shape[0]


def _gathered(rows: Any, site: ExpertSite) -> tuple[fx.Node, fx.Node, int] | None:
    """(x, order, top_k) where the rows are `x[order // top_k]`, those of no expert zero."""
    if not isinstance(rows, fx.Node) or rows.target is not operator.getitem or not isinstance(rows.args[1], fx.Node):
        return None
    others = [user for user in rows.users if op_of(user) != "masked_fill_" or not _is_of_no_expert(user, site)]
    if is_changed(rows) and (len(others) != 1 or written_by(others[0])):
        return None
    x, token = rows.args
    if op_of(token) != "floordiv" or not isinstance(token.args[1], int):
        return None
    order, top_k = token.args
    is_matrix = value_of(x) is not None and value_of(x).dim() == 2
    return (x, order, top_k) if is_matrix and isinstance(order, fx.Node) else None


def _summed(site: ExpertSite, order: fx.Node, top_k: int) -> tuple[fx.Node, fx.Node] | None:
    """(the router's weights, the sum) where a product's rows are weighted, put back in order and added up."""
    down = site.node
    node = only_user(down)
    node = only_user(node) if node is not None and _masked(node, site) is down else node
    if node is None or op_of(node) not in ("mul", "mul_") or len(node.args) != 2:
        return None
    weights = _weights_of(node.args[1], order)
    put_back = only_user(node)
    if weights is None or put_back is None or op_of(put_back) != "getitem" or put_back.args[0] is not node:
        return None
    if not _is_inverse(put_back.args[1], order):
        return None
    view = only_user(put_back)
    total = only_user(view) if view is not None and op_of(view) in ("view", "reshape") else None
    if total is None or op_of(total) != "sum" or argument(total, "dim") not in (1, [1], (1,)):
        return None
    shape = value_of(view).shape
    is_by_token = len(shape) == 3 and shape[1] == top_k and not argument(total, "keepdim", False)
    return (weights, total) if is_by_token and arguments(total).keys() <= {"input", "dim", "keepdim"} else None


def _weights_of(node: Any, order: fx.Node) -> fx.Node | None:
    """The weights where the node is `weights[order].unsqueeze(-1)`."""
    if op_of(node) != "unsqueeze" or argument(node, "dim") not in (-1, 1):
        return None
    sorted_weights = node.args[0]
    if op_of(sorted_weights) != "getitem" or sorted_weights.args[1] is not order:
        return None
    value = value_of(sorted_weights.args[0])
    return sorted_weights.args[0] if value is not None and value.dim() == 1 else None


def _is_inverse(node: Any, order: fx.Node) -> bool:
    """Whether the node is `inv = empty_like(order); inv[order] = arange(...)`."""
    if not op_of(node).startswith("empty_like") or node.args[0] is not order:
        return False
    writes = [user for user in node.users if node in written_by(user)]
    values = [user.args[2] for user in writes if op_of(user) == "setitem" and user.args[1] is order]
    return len(writes) == 1 and [op_of(value) for value in values] == ["arange"] and len(values[0].args) == 1
