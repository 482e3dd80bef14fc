"""Hand softmax attention to the backend as what it is: causal, with its key-value heads unrepeated.

Under compile, Hugging Face builds the causal mask from positions and passes it to SDPA, and repeats key-value heads
to the number of query heads. cuDNN then computes the whole square and reads every head's copy. Where the mask depends
on nothing but sizes it is evaluated here, once; where it is the lower triangle, as booleans or as what is added to the
scores (0, and -inf or a dtype's lowest number), it is dropped for `is_causal`. A size
that is a symbol gets its example value and, so that a window longer than the example does not pass for a triangle, one
beyond every constant that the mask is made with.
"""

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from deepwell.graph.fx import SHAPE_OPS, argument, has_index_tensor, memory_of, op_of, value_of, written_by

_FORBIDDEN = {"get_attr", "call_module", "output"}
# The largest square that is tried for a symbolic size: 16M booleans.
_LARGEST_TRIAL = 4096


def rewrite_attention(graph: fx.Graph, outer: Mapping[str, fx.Node] | None = None) -> tuple[int, int]:
    """Drop causal masks and repeated heads. Returns how many of each.

    `outer` names the nodes of the surrounding graph that a nested graph's inputs are: a mask may be made there.
    """
    outer = outer or {}
    masks = heads = 0
    causal: dict[fx.Node, bool] = {}
    for node in list(graph.nodes):
        if op_of(node) != "scaled_dot_product_attention":
            continue
        mask = argument(node, "attn_mask")
        if isinstance(mask, fx.Node):
            mask = outer.get(mask.name, mask) if mask.op == "placeholder" else mask
            if mask not in causal:
                causal[mask] = _is_causal(mask)
            if causal[mask]:
                _set(node, attn_mask=None, is_causal=True)
                masks += 1
        heads += _keep_kv_heads(node)
    return masks, heads


def _set(node: fx.Node, **kwargs: Any) -> None:
    """Give SDPA's options by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names[3:], node.args[3:], strict=False))
    node.args = tuple(node.args[:3])
    merged = {**given, **node.kwargs, **kwargs}
    node.kwargs = {key: value for key, value in merged.items() if value is not None or key == "scale"}


def _is_causal(mask: fx.Node) -> bool:
    """Whether the mask's subgraph reads sizes alone and gives the lower triangle, at every size it may get."""
    value = value_of(mask)
    if value is None or value.dim() < 2 or value.shape[-1] != value.shape[-2]:
        return False
    if value.dtype is not torch.bool and not value.dtype.is_floating_point:
        return False
    order = _subgraph(mask)
    if order is None or _is_written(order):
        return False
    size = value.shape[-1]
    if not isinstance(size, torch.SymInt):
        return _is_triangle(_evaluate(order, {}))
    symbol = size.node.expr
    if not symbol.is_Symbol:
        return False
    trial = max([2, _hint(size), *_constants(order)]) + 1
    return trial <= _LARGEST_TRIAL and all(_is_triangle(_evaluate(order, {symbol: n})) for n in (_hint(size), trial))


def _is_triangle(mask: Any) -> bool:
    """Whether a mask lets through the lower triangle and nothing else: True, or 0 beside what no score outweighs."""
    if not isinstance(mask, torch.Tensor) or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    size = mask.shape[-1]
    if mask.dtype.is_floating_point:
        shut = mask <= torch.finfo(mask.dtype).min / 2  # -inf, finfo.min, and what a model makes of them by addition
        if not bool(((mask == 0) | shut).all()):
            return False  # a bias of positions (ALiBi) is none
        mask = ~shut
    return mask.dtype is torch.bool and bool(
        (mask == torch.ones(size, size, dtype=torch.bool, device=mask.device).tril()).all()
    )


def _subgraph(node: fx.Node) -> list[fx.Node] | None:
    """All that a node is computed from, in order; None where it reads a tensor that is not made here."""
    order: list[fx.Node] = []
    seen: set[fx.Node] = set()
    stack = [(node, False)]
    while stack:
        current, done = stack.pop()
        if done:
            order.append(current)
            continue
        if current in seen:
            continue
        seen.add(current)
        is_size = _is_symbol(current)
        if current.op in _FORBIDDEN or (current.op == "placeholder" and not is_size):
            return None
        stack.append((current, True))
        if not is_size:  # a size is known from its symbol, whatever tensor it was read from
            stack += [(parent, False) for parent in current.all_input_nodes]
    return order


def _is_written(order: list[fx.Node]) -> bool:
    """Whether something writes into a part of the subgraph, or into a view of it, beside the graph's edges."""
    parts = {node for node in order if value_of(node) is not None}
    memory = {memory_of(node) for node in parts}
    others = (node for node in order[-1].graph.nodes if node not in parts)
    return any(memory_of(target) in memory for node in others for target in written_by(node))


def _is_symbol(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.SymInt)


def _hint(size: torch.SymInt) -> int:
    return int(size.node.hint)


def _constants(order: list[fx.Node]) -> list[int]:
    """The whole numbers that a subgraph is made with: lengths of windows and chunks are among them."""
    found = [_hint(node.meta["example_value"]) for node in order if _is_symbol(node)]
    for node in order:
        if not _is_symbol(node):
            fx.node.map_aggregate((node.args, node.kwargs), lambda a: found.append(abs(a)) if type(a) is int else None)
    return found


def _evaluate(order: list[fx.Node], sizes: Mapping[Any, int]) -> Any:
    """The value of the last node with the symbols in `sizes` replaced, other sizes at their example values.

    None where a size mixes both.
    """
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for current in order:
            if _is_symbol(current):
                size = current.meta["example_value"]
                is_free = not size.node.expr.free_symbols & sizes.keys()
                replaced = size.node.expr.xreplace({symbol: sympy.Integer(n) for symbol, n in sizes.items()})
                if not is_free and not replaced.is_number:
                    return None
                values[current] = _hint(size) if is_free else int(replaced)
                continue
            args, kwargs = fx.node.map_arg((current.args, current.kwargs), lambda n: values[n])
            if current.op == "call_function":
                values[current] = current.target(*args, **kwargs)
            else:
                values[current] = getattr(args[0], str(current.target))(*args[1:], **kwargs)
    return values[order[-1]]


def _keep_kv_heads(node: fx.Node) -> bool:
    """Undo repeat_kv on key and value where both were repeated alike."""
    key, value = (_unrepeated(node.args[i]) for i in (1, 2))
    if key is None or value is None:
        return False
    if value_of(key).shape[1] != value_of(value).shape[1]:
        return False
    node.args = (node.args[0], key, value, *node.args[3:])
    _set(node, enable_gqa=True)
    return True


def _unrepeated(node: Any) -> fx.Node | None:
    """The tensor [B, G, S, C] behind `x[:, :, None].expand(B, G, R, S, C).reshape(B, G*R, S, C)`."""
    if op_of(node) not in SHAPE_OPS or value_of(node) is None or value_of(node).dim() != 4:
        return None
    expand = node.args[0]
    if op_of(expand) != "expand":
        return None
    grown = expand.args[0]
    if op_of(grown) not in {"getitem", "unsqueeze"} or value_of(grown) is None or value_of(grown).dim() != 5:
        return None
    if op_of(grown) == "getitem" and has_index_tensor(grown):
        return None  # heads in another order
    source = grown.args[0]
    small, big = value_of(source), value_of(node)
    if small is None or small.dim() != 4 or value_of(grown).shape[2] != 1:
        return None
    same = small.shape[0] == big.shape[0] and small.shape[2:] == big.shape[2:]
    return source if same and big.shape[1] % small.shape[1] == 0 else None
