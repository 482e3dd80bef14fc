"""Hand softmax attention to the backend as what it is: causal, with its key-value heads unrepeated.

Under compile, Hugging Face builds the causal mask from positions and passes it to SDPA, and repeats key-value heads
to the number of query heads. cuDNN then computes the whole square and reads every head's copy. The mask depends on
nothing but sizes, so it is evaluated here, once, on small ones; where it is the lower triangle it is dropped for
`is_causal`.
"""

from typing import Any

import torch
from torch import fx

from deepwell.engine.passes.match import SHAPE_OPS, argument, name_of, value_of

_FORBIDDEN = {"placeholder", "get_attr", "call_module"}


def rewrite_attention(graph: fx.Graph) -> int:
    """Drop causal masks and repeated heads. Returns how many attentions changed."""
    count = 0
    causal: dict[fx.Node, bool] = {}
    for node in list(graph.nodes):
        if name_of(node) != "attention":
            continue
        changed = False
        mask = argument(node, 3, "attn_mask")
        if isinstance(mask, fx.Node):
            if mask not in causal:
                causal[mask] = _is_causal(mask)
            if causal[mask]:
                _set(node, attn_mask=None, is_causal=True)
                changed = True
        changed |= _keep_kv_heads(node)
        count += changed
    return count


def _set(node: fx.Node, **kwargs: Any) -> None:
    """Give SDPA's options by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names[3:], node.args[3:], strict=False))
    node.args = tuple(node.args[:3])
    merged = {**given, **node.kwargs, **kwargs}
    node.kwargs = {key: value for key, value in merged.items() if value is not None or key == "scale"}


def _is_causal(mask: fx.Node) -> bool:
    """Whether the mask's subgraph reads sizes alone and gives the lower triangle."""
    value = value_of(mask)
    if value is None or value.dtype is not torch.bool or value.dim() < 2 or value.shape[-1] != value.shape[-2]:
        return False
    result = _evaluate(mask)
    if result is None:
        return False
    size = result.shape[-1]
    triangle = torch.ones(size, size, dtype=torch.bool, device=result.device).tril()
    return bool((result == triangle).all())


def _evaluate(node: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on constants alone, None where it reads an input, a parameter or a symbol."""
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
        if current.op in _FORBIDDEN or isinstance(current.meta.get("example_value"), torch.SymInt):
            return None
        stack.append((current, True))
        stack += [(parent, False) for parent in current.all_input_nodes]
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for current in order:
            args, kwargs = fx.node.map_arg((current.args, current.kwargs), lambda n: values[n])
            if current.op == "call_function":
                values[current] = current.target(*args, **kwargs)
            else:
                values[current] = getattr(args[0], str(current.target))(*args[1:], **kwargs)
    result = values[node]
    return result if isinstance(result, torch.Tensor) else None


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
    if name_of(node) not in SHAPE_OPS or value_of(node) is None or value_of(node).dim() != 4:
        return None
    expand = node.args[0]
    if name_of(expand) != "expand":
        return None
    grown = expand.args[0]
    if name_of(grown) not in {"getitem", "unsqueeze"} or value_of(grown) is None or value_of(grown).dim() != 5:
        return None
    source = grown.args[0]
    small, big = value_of(source), value_of(node)
    if small is None or small.dim() != 4 or value_of(grown).shape[2] != 1:
        return None
    same = small.shape[0] == big.shape[0] and small.shape[2:] == big.shape[2:]
    return source if same and big.shape[1] % small.shape[1] == 0 else None
