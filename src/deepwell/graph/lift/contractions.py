"""Products with parameters, table lookups and the loss: linears, grouped linears, convolutions, embeddings."""

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from deepwell.graph.fx import argument
from deepwell.graph.lift.flow import FORMS
from deepwell.graph.lift.site import LiftedSite, LiftState, joined


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of data and a weight: which is which, and the sizes. `experts` is 0 for a plain linear."""

    data: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    rows: tuple[int, ...]
    k: int
    n: int
    experts: int = 0


def find_contractions(found: LiftState) -> None:
    """Add a site for every product of an activation with parameters, every lookup, every convolution and the loss."""
    for node in found.flow.nodes:
        op = found.flow.op(node)
        if op in ("embedding", "embedding_bag"):
            _embedding(found, node)
        elif op == "conv" or op.startswith("conv_transpose"):
            _conv(found, node)
        elif op in ("cross_entropy", "cross_entropy_loss", "nll_loss"):
            _loss(found, node)
        elif op == "multi_head_attention_forward":
            _fused_attention(found, node)
        else:
            product = _product(found, node, op)
            if product is not None:
                _add_product(found, node, product)


# ---- products ----


def _product(found: LiftState, node: fx.Node, op: str) -> _Product | None:
    flow = found.flow
    args = [a for a in node.args if isinstance(a, fx.Node)]
    if op == "linear":
        data, weight = argument(node, "input"), argument(node, "weight")
        return _right(found, data, weight, argument(node, "bias"), transposed=True)
    if op in ("addmm", "baddbmm") and len(args) >= 3:
        product = _either(found, args[1], args[2])
        if product is None:
            return None
        bias = args[0] if args[0] in flow.weights else None
        return replace(product, bias=bias)
    if op == "matmul" and len(args) == 2:
        return _either(found, args[0], args[1])
    if op == "einsum":
        return _einsum(found, node)
    if "grouped" in op and len(args) >= 2:
        return _grouped(found, node, args)
    return None


def _either(found: LiftState, left: fx.Node, right: fx.Node) -> _Product | None:
    weights, shape = found.flow.weights, found.flow.shape
    if right in weights and left not in weights:
        return _right(found, left, right, None, transposed=False)
    if left in weights and right not in weights and len(shape(left)) == 2 and len(shape(right)) >= 2:
        n, k = shape(left)
        return _Product(right, left, None, (*shape(right)[:-2], shape(right)[-1]), k, n)
    return None


def _right(found: LiftState, data: Any, weight: Any, bias: Any, *, transposed: bool) -> _Product | None:
    flow = found.flow
    if not isinstance(weight, fx.Node) or weight not in flow.weights or data in flow.weights:
        return None
    data_shape, shape = flow.shape(data), flow.shape(weight)
    if len(shape) == 1 and not transposed:
        return _Product(data, weight, bias, data_shape[:-1], shape[0], 1)
    if len(shape) == 2:
        n, k = shape if transposed else shape[::-1]
        return _Product(data, weight, bias, data_shape[:-1], k, n)
    if len(shape) >= 3 and not transposed:
        groups = math.prod(shape[:-2])
        rows = data_shape[:-1] if len(data_shape) >= len(shape) else (*shape[:-2], *data_shape[:-1])
        return _Product(data, weight, bias, rows, shape[-2], shape[-1], groups if groups > 1 else 0)
    return None


def _einsum(found: LiftState, node: fx.Node) -> _Product | None:
    flow = found.flow
    equation, operands = node.args[0], list(node.args[1:])
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation or "." in equation:
        return None
    terms, out = equation.replace(" ", "").split("->")
    names = terms.split(",")
    if (operands[0] in flow.weights) == (operands[1] in flow.weights):
        return None
    weight_at = 0 if operands[0] in flow.weights else 1
    weight, data = operands[weight_at], operands[1 - weight_at]
    in_weight, in_data = names[weight_at], names[1 - weight_at]
    size = {
        **dict(zip(in_weight, flow.shape(weight), strict=False)),
        **dict(zip(in_data, flow.shape(data), strict=False)),
    }
    k = n = groups = 1
    for letter in in_weight:
        if letter in out and letter in in_data:
            groups *= size[letter]
        elif letter in out:
            n *= size[letter]
        else:
            k *= size[letter]
    rows = tuple(size[letter] for letter in in_data if letter in out)
    return _Product(data, weight, None, rows, k, n, groups if groups > 1 else 0)


def _grouped(found: LiftState, node: fx.Node, args: list[fx.Node]) -> _Product | None:
    """grouped_mm and kin: rows of data in expert order times one weight per expert."""
    flow = found.flow
    weight = next((a for a in args if a in flow.weights and len(flow.shape(a)) == 3), None)
    data = next((a for a in args if a not in flow.weights and flow.is_float(a)), None)
    if weight is None or data is None:
        return None
    data_shape, shape = flow.shape(data), flow.shape(weight)
    width = flow.shape(node)[-1]
    k, n = (shape[1], shape[2]) if shape[2] == width and shape[1] == data_shape[-1] else (shape[2], shape[1])
    bias = next((a for a in args if a in flow.weights and a is not weight and len(flow.shape(a)) == 2), None)
    return _Product(data, weight, bias, data_shape[:-1], k, n, shape[0])


def _add_product(found: LiftState, node: fx.Node, product: _Product) -> None:
    flow = found.flow
    path = flow.path(node)
    weights = _in_order(found, flow.weights[product.weight])
    biases = _in_order(found, flow.weights.get(product.bias, frozenset())) if product.bias is not None else []
    # A product that picks one expert's matrix out of a stack belongs to the whole stack.
    stack = _picked_expert(found, product.weight) if not product.experts else 0
    name = _product_name(found, weights[0], path)
    site = LiftedSite(
        "grouped_linear" if product.experts or stack else "linear", node, path, name,
        reads=(product.data,), params=weights + biases,
        facts={"k": product.k, "n": product.n, "bias": bool(biases), "dims": product.rows},
    )  # fmt: skip
    if site.kind == "grouped_linear":
        site.facts["experts"] = product.experts or stack
        site.facts["picked"] = bool(stack)
    found.add(site)
    if not biases:
        _added_bias(found, site)


def _product_name(found: LiftState, weight: fx.Node, path: str) -> str:
    full = found.param_name(weight, path)
    owner, _, attribute = full.rpartition(".")
    return owner if attribute == "weight" and owner else full


def _in_order(found: LiftState, params: frozenset[fx.Node]) -> list[fx.Node]:
    return sorted(params, key=found.flow.index.__getitem__)


def _picked_expert(found: LiftState, weight: fx.Node) -> int:
    """How many matrices stand in the 3-D parameter that this matrix is an entry of; 0 if it is no entry."""
    flow = found.flow
    params = flow.weights[weight]
    if len(params) != 1:
        return 0
    (param,) = params
    if len(flow.shape(param)) == 3 and len(flow.shape(weight)) == 2:
        return flow.shape(param)[0]
    stacks = [n for n in flow.back([weight], lambda n: n is param) if len(flow.shape(n)) == 3 and n in flow.weights]
    return flow.shape(stacks[-1])[0] if stacks and len(flow.shape(weight)) == 2 else 0


def _added_bias(found: LiftState, site: LiftedSite) -> None:
    """A parameter added right behind the product is its bias (Conv1D written out, expert biases gathered by expert)."""
    flow = found.flow
    node = site.node
    for _ in range(3):  # at most a view or a cast between product and sum
        readers = flow.readers.get(node, [])
        if len(readers) != 1:
            return
        node = readers[0]
        if flow.op(node) == "add":
            break
        if flow.op(node) not in FORMS:
            return
    else:
        return
    other = [a for a in flow.tensor_args(node) if a not in flow.sources or a not in site.nodes]
    for candidate in other:
        params = _gathered_parameter(found, candidate)
        axes = 2 if site.kind == "grouped_linear" else 1
        shape = () if params is None else flow.shape(params)
        if params is not None and 1 <= len(shape) <= axes and shape[-1] == site.facts["n"]:
            site.params.append(params)
            site.facts["bias"] = True
            between = set(flow.back([node], lambda n: n is site.node or n in flow.weights))
            found.take(
                site, {n for n in between if n not in flow.weights and flow.index[n] > flow.index[site.node]} | {node}
            )
            return


def _gathered_parameter(found: LiftState, node: fx.Node) -> fx.Node | None:
    """The parameter that a value is, possibly reshaped or with rows picked by index."""
    flow = found.flow
    while node not in flow.weights:
        if flow.op(node) not in ("getitem", "index", "index_select", "gather", "repeat_interleave", *FORMS):
            return None
        following = [a for a in flow.tensor_args(node) if flow.is_float(a)]
        if len(following) != 1:
            return None
        node = following[0]
    params = flow.weights[node]
    return next(iter(params)) if len(params) == 1 else None


# ---- lookups, convolutions, loss ----


def _embedding(found: LiftState, node: fx.Node) -> None:
    flow = found.flow
    args = flow.tensor_args(node)
    table = next((a for a in args if a in flow.weights and len(flow.shape(a)) == 2), None)
    ids = next((a for a in args if a not in flow.weights), None)
    if table is None or ids is None:
        return
    path = flow.path(node)
    weights = _in_order(found, flow.weights[table])
    vocab, width = flow.shape(table)
    found.add(
        LiftedSite(
            "embedding", node, path, _product_name(found, weights[0], path), reads=(ids,), params=weights,
            facts={"vocab": vocab, "width": width, "dims": flow.shape(ids)}, role="embedding",
        )
    )  # fmt: skip


def _conv(found: LiftState, node: fx.Node) -> None:
    flow = found.flow
    weight, bias = argument(node, "weight"), argument(node, "bias")
    if weight not in flow.weights:
        return
    out, shape = flow.shape(node), flow.shape(weight)
    k = math.prod(shape[1:])
    if flow.op(node).startswith("conv_transpose"):
        k = shape[0] * k // shape[1]
    path = flow.path(node)
    weights = _in_order(found, flow.weights[weight])
    biases = _in_order(found, flow.weights.get(bias, frozenset())) if isinstance(bias, fx.Node) else []
    channels = 1 if len(out) == len(shape) else 0  # unbatched input has no batch axis in front
    found.add(
        LiftedSite(
            "conv", node, path, _product_name(found, weights[0], path), reads=(node.all_input_nodes[0],),
            params=weights + biases, role="other",
            facts={"k": k, "n": out[channels], "dims": out[:channels] + out[channels + 1 :], "slack": max(shape[2:])},
        )
    )  # fmt: skip


def _loss(found: LiftState, node: fx.Node) -> None:
    flow = found.flow
    logits = argument(node, "input")
    shape = flow.shape(logits)
    if not shape:
        return
    vocab = shape[1] if len(shape) > 1 else shape[0]
    dims = (shape[0], *shape[2:]) if len(shape) > 1 else ()
    found.add(LiftedSite("loss", node, "", "loss", reads=(logits,), facts={"vocab": vocab, "dims": dims}, role="loss"))


def _fused_attention(found: LiftState, node: fx.Node) -> None:
    """F.multi_head_attention_forward: input projection, attention and output projection in one call."""
    flow = found.flow
    query, key, value = (argument(node, name) for name in ("query", "key", "value"))
    width, heads = int(argument(node, "embed_dim_to_check")), int(argument(node, "num_heads"))
    weight, bias = argument(node, "in_proj_weight"), argument(node, "in_proj_bias")
    separate = [node.kwargs.get(f"{name}_proj_weight") for name in "qkv"]
    out_weight, out_bias = argument(node, "out_proj_weight"), argument(node, "out_proj_bias")
    extra = [argument(node, "bias_k"), argument(node, "bias_v")]
    path, nodes = flow.path(node), {node}
    is_self = query is key and key is value
    rows, kv_rows = flow.shape(query)[:-1], flow.shape(key)[:-1]
    projections: list[LiftedSite] = []

    def linear(weight: fx.Node, bias: Any, part: str, reads: fx.Node, dims: tuple[int, ...], step: float) -> LiftedSite:
        n, k = flow.shape(weight)
        joined_biases = flow.weights.get(bias, frozenset())  # one vector, or put together from several
        params = [weight, *(each for each in flow.nodes if each in joined_biases)]
        return found.add(
            LiftedSite(
                "linear", node, path, _product_name(found, weight, path), set(nodes), (reads,), params=params,
                role="attention", part=part, step=step,
                facts={"k": k, "n": n, "bias": len(params) > 1, "dims": dims},
            )
        )  # fmt: skip

    if isinstance(weight, fx.Node) and not argument(node, "use_separate_proj_weight"):
        if not is_self:
            found.note(f"{path or 'the model'}: one projection of three inputs is counted on the query's rows")
        projections.append(linear(weight, bias, "qkv", query, rows, -0.3))
        projections[0].reads = tuple(dict.fromkeys((query, key, value)))
    else:
        for i, (part, source) in enumerate(zip("qkv", (query, key, value), strict=True)):
            own_bias = bias if part == "q" else None  # one bias vector serves the three; it is counted once
            projections.append(
                linear(separate[i], own_bias, part, source, rows if part == "q" else kv_rows, -0.5 + 0.1 * i)
            )
    attention = found.add(
        LiftedSite(
            "attention", node, path, joined(path, "attention"), set(nodes), inputs=projections, role="attention",
            step=-0.1, params=[p for p in extra if isinstance(p, fx.Node)],
            facts={
                "q_heads": heads, "kv_heads": heads, "qk_dim": width // heads, "v_dim": width // heads,
                "causal": bool(node.kwargs.get("is_causal", False)), "window": None,
                "q": rows, "kv": kv_rows, "mask": node.kwargs.get("attn_mask"),
            },
        )
    )  # fmt: skip
    out = linear(out_weight, out_bias, "o", node, rows, 0.0)
    out.inputs = [attention]
    found.owner[node] = out
