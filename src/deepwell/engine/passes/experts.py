"""Put the experts' grouped products into the formats that the policy and this machine decided.

A grouped product is `torch._grouped_mm` (or Hugging Face's stand-in for other dtypes) of rows sorted by expert with a
parameter [E, N, K], transposed, or [E, K, N]. Each becomes a `grouped_linear`; a batch of products [E, T, K] with such
a parameter (Llama 4 gives every token to every expert, times zero where it was not chosen) a `batched_linear`, its
groups equally long. Where all GEMMs of both projections are
FP8 and everything between the tokens and their sum is what Hugging Face's grouped experts do,

    rows = x[order // top_k];  h = act(gate) * up of rows @ gate_up.T;  y = h @ down.T;  y *= weight[order]
    sum over top_k of y in the order of tokens; rows of no expert masked to zero on the way

the whole block becomes one `fused_experts`.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from deepwell.engine.passes.match import (
    CAST_OPS,
    Writes,
    argument,
    name_of,
    only_user,
    replace,
    runs_in_kernels,
    skip,
    value_of,
)
from deepwell.kernels.activation.autograd import swiglu_packed
from deepwell.kernels.experts.autograd import FP8_METHOD, batched_linear, fused_experts, grouped_linear

_GROUPED = {"_grouped_mm", "grouped_mm", "grouped_mm_fallback"}
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
    """A whole MoE block around two sites: what it reads, and the node of its sum."""

    x: fx.Node
    order: fx.Node
    weights: fx.Node  # of the router, one per choice, in the order of tokens
    top_k: int
    act: str
    total: fx.Node


def is_grouped_product(target: Any) -> bool:
    """Whether a function is torch's grouped product, or Hugging Face's stand-in for it."""
    name = getattr(target, "__name__", "") or str(getattr(target, "_qualified_op_name", ""))
    return name.rpartition(":")[2].partition(".")[0] in _GROUPED


def grouped_parts(node: fx.Node) -> tuple[Any, Any, Any, bool] | None:
    """(x, weight, offs, whether the weight is [E, K, N]) where the node is a grouped product of 2D rows, else None.

    A batch of products has no `offs`: x is [E, T, K].
    """
    is_batch = name_of(node) in ("bmm", "matmul") and len(node.args) == 2
    if not is_batch and (node.op != "call_function" or not is_grouped_product(node.target)):
        return None
    x, right = argument(node, 0, "input"), argument(node, 1, "weight")
    offs = argument(node, 2, "offs")
    x_value, value = value_of(x), value_of(right)
    if x_value is None or value is None or (x_value.dim(), value.dim()) != (3 if is_batch else 2, 3):
        return None
    if (offs is None) != is_batch or (is_batch and not _are_as_many(x_value.shape[0], value.shape[0])):
        return None
    if node.kwargs.get("bias") is not None or node.kwargs.get("out_dtype") not in (None, x_value.dtype):
        return None
    dims = {argument(right, 1, "dim0"), argument(right, 2, "dim1")} if name_of(right) == "transpose" else set()
    is_turned = dims in ({-2, -1}, {1, 2})
    return x, right.args[0] if is_turned else right, offs, not is_turned


def _are_as_many(batch: Any, experts: Any) -> bool:
    """Whether both sizes are fixed and equal: an open one may be one of many that a product is repeated for."""
    return isinstance(batch, int) and isinstance(experts, int) and batch == experts


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
        path = next((name for name in (n.removesuffix(".weight") for n in names) if name in schemes), None)
        if path is not None and runs_in_kernels(x, weight):
            scheme = schemes[path]
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
        if not isinstance(found, str) and writes.between(found[1].x, found[1].order, found[1].total):
            found = "their tokens are written into before the experts are done"
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
            if site.offs is None:
                how = (x, site.weight, site.is_kn, site.scheme)
                new = graph.call_function(batched_linear, how)
            else:
                grouped = (x, site.weight, site.offs, site.is_kn, site.scheme)
                new = graph.call_function(grouped_linear, grouped)
        replace(site.node, new)
    return blocks, list(dict.fromkeys(reasons.values()))


def rewrite_fallback(graph: fx.Graph) -> int:
    """Replace what is left of Hugging Face's stand-in for grouped products of other dtypes than bf16; how many.

    Its backward reads the sizes of groups on the host, which no graph of a backward can hold.
    """
    count = 0
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        parts = grouped_parts(node) if name.partition(".")[0] == "grouped_mm_fallback" else None
        if parts is None or parts[2] is None:
            continue
        x, weight, offs, is_kn = parts
        with graph.inserting_before(node):
            new = graph.call_function(grouped_linear, (x, weight, offs, is_kn, _PLAIN))
        replace(node, new)
        count += 1
    return count


def _replace_block(graph: fx.Graph, gate_up: ExpertSite, down: ExpertSite, block: _Block) -> None:
    total = block.total
    with graph.inserting_before(total):
        routing = (block.order, block.weights, down.offs)
        args = (block.x, gate_up.weight, down.weight, routing, block.top_k, block.act)
        new = graph.call_function(fused_experts, args)
        wanted = value_of(total)
        new.meta["example_value"] = wanted.to(value_of(block.x).dtype)
        if wanted.dtype != value_of(block.x).dtype:
            new = graph.call_method("to", (new, wanted.dtype))
    inside = list(_between(total, {block.x, block.order, block.weights, gate_up.weight, down.weight, down.offs}))
    replace(total, new)
    for node in inside:
        for reader in [user for user in node.users if user.target == "masked_fill_" and not user.users]:
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
    hidden = skip(down.node.args[0], CAST_OPS)
    if hidden.target is not swiglu_packed or only_user(hidden) is None:
        return "their gate is not act(first half) * second half of one product without a bias"
    gate_up = sites.get(_masked(hidden.args[0]))
    if gate_up is None or gate_up.scheme != _FP8 or gate_up.offs is not down.offs:
        return "gate and up are not one FP8 product over the same groups"
    if down.offs is None:
        return "they are a batch of products with as many rows for each expert"
    if gate_up.is_kn or down.is_kn:
        return "their weights are stored [E, K, N]"
    gathered = _gathered(skip(gate_up.node.args[0], CAST_OPS))
    if gathered is None:
        return "their rows are not tokens taken in the order of experts"
    x, order, top_k = gathered
    summed = _summed(down.node, order, top_k)
    if summed is None or not runs_in_kernels(x, gate_up.weight, down.weight):
        return "their rows are not weighted and added up by token, or dtypes differ"
    weights, total = summed
    block = _Block(x=x, order=order, weights=weights, top_k=top_k, act=hidden.args[1], total=total)
    return gate_up, block


def _masked(node: Any) -> Any:
    """What a `masked_fill(y, rows of no expert, 0)` fills, the node itself where it is none."""
    if not (isinstance(node, fx.Node) and node.target == "masked_fill" and node.args[2] == 0):
        return node
    mask = node.args[1]
    compared = mask.args[0] if isinstance(mask, fx.Node) and name_of(mask) == "unsqueeze" else None
    is_sentinel = isinstance(compared, fx.Node) and compared.target is operator.ge
    return node.args[0] if is_sentinel and only_user(node.args[0]) is node else node


def _gathered(rows: Any) -> tuple[fx.Node, fx.Node, int] | None:
    """(x, order, top_k) where the rows are `x[order // top_k]`."""
    if name_of(rows) != "getitem" or not isinstance(rows.args[1], fx.Node):
        return None
    x, token = rows.args
    if token.target is not operator.floordiv or not isinstance(token.args[1], int):
        return None
    order, top_k = token.args
    is_matrix = value_of(x) is not None and value_of(x).dim() == 2
    return (x, order, top_k) if is_matrix and isinstance(order, fx.Node) else None


def _summed(down: fx.Node, order: fx.Node, top_k: int) -> tuple[fx.Node, fx.Node] | None:
    """(the router's weights, the sum) where the rows of `down` are weighted, put back in order and added up."""
    node = only_user(down)
    node = only_user(node) if node is not None and _masked(node) is down else node
    if node is None or name_of(node) != "mul" or len(node.args) != 2:
        return None
    weights = _weights_of(node.args[1], order)
    put_back = only_user(node)
    if weights is None or put_back is None or name_of(put_back) != "getitem" or put_back.args[0] is not node:
        return None
    if not _is_inverse(put_back.args[1], order):
        return None
    view = only_user(put_back)
    total = only_user(view) if view is not None and name_of(view) in ("view", "reshape") else None
    if total is None or total.target != "sum" or argument(total, 1, "dim") not in (1, [1], (1,)):
        return None
    shape = value_of(view).shape
    is_by_token = len(shape) == 3 and shape[1] == top_k and not argument(total, 2, "keepdim", False)
    return (weights, total) if is_by_token and set(total.kwargs) <= {"dim", "keepdim"} else None


def _weights_of(node: Any, order: fx.Node) -> fx.Node | None:
    """The weights where the node is `weights[order].unsqueeze(-1)`."""
    if name_of(node) != "unsqueeze" or argument(node, 1, "dim") not in (-1, 1):
        return None
    sorted_weights = node.args[0]
    if name_of(sorted_weights) != "getitem" or sorted_weights.args[1] is not order:
        return None
    value = value_of(sorted_weights.args[0])
    return sorted_weights.args[0] if value is not None and value.dim() == 1 else None


def _is_inverse(node: Any, order: fx.Node) -> bool:
    """Whether the node is `inv = empty_like(order); inv[order] = arange(...)`."""
    if (
        not isinstance(node, fx.Node)
        or getattr(node.target, "__name__", "") != "empty_like"
        or node.args[0] is not order
    ):
        return False
    writes = [user for user in node.users if user.target is operator.setitem and user.args[0] is node]
    values = [user.args[2] for user in writes if user.args[1] is order]
    return len(writes) == 1 and [getattr(getattr(v, "target", None), "__name__", "") for v in values] == ["arange"]
