"""Find attention that is written out, product by product, and give it to a kernel that holds no scores.

    softmax(scale * q k^T + mask) v            becomes SDPA, whose mask the next pass reads
    softmax([scale * q k^T + mask, sink]) v    the sink's column dropped before v (GPT-OSS): on a GPU, flash attention
    softmax(cap * tanh(scale * q k^T / cap) + mask) v    a soft cap (Gemma 2): `flexible.py` has a kernel for it

Between them may stand casts, a dropout that drops nothing, and a maximum that is taken off all logits of a row, which
softmax does by itself. Scores that something else reads, another softmax axis, or fewer bits than q has leave it as it
is. So does a mask that may hide all keys from a query, where something learns: the fused kernels' gradient of such a
row is wrong where the mask is a large number (docs/gotchas.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from deepwell.engine.passes.attention.masks import band_of, packed_of
from deepwell.engine.passes.edit import put_call, runs_in_kernels
from deepwell.graph.fx import Writes, argument, op_of, value_of
from deepwell.kernels.attention.autograd import windowed_attention
from deepwell.kernels.attention.flash import NO_WINDOW, why_not_flash
from deepwell.kernels.tune.choose import why_rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The operands of one attention; `sinks` has an entry for each head, `cap` is 0 where scores are as they are."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    scale: float
    mask: fx.Node | None = None
    sinks: fx.Node | None = None
    cap: float = 0.0


def rewrite_written(graph: fx.Graph, outer: Mapping[str, fx.Node]) -> int:
    """Replace attention that is written out. Returns how many."""
    count = 0
    opens_all_rows = cache(_opens_all_rows)  # layers share a mask
    for node in list(graph.nodes):
        found = match_written(node)
        if found is None or found.cap:
            continue
        if found.sinks is not None:
            call = _with_sinks(found, outer)
        elif found.mask is None or not value_of(node).requires_grad or opens_all_rows(_made_by(found.mask, outer)):
            call = _as_sdpa(found)
        else:
            call = None
        if call is not None:
            put_call(node, *call)
            count += 1
    return count


def _as_sdpa(found: Written) -> tuple[Any, ...] | None:
    mask = value_of(found.mask)
    if found.mask is not None and (mask is None or mask.dim() < 2 or mask.dtype != value_of(found.query).dtype):
        return None
    if mask is not None and mask.requires_grad:  # a learned bias, which the fast kernels have no gradient of
        return None
    operands = (found.query, found.key, found.value)
    return F.scaled_dot_product_attention, operands, {"attn_mask": found.mask, "scale": found.scale}


def _with_sinks(found: Written, outer: Mapping[str, fx.Node]) -> tuple[Any, ...] | None:
    """Where the mask is causal or a causal window, and the kernel takes the operands."""
    query, key, mask = value_of(found.query), value_of(found.key), found.mask
    size = query.shape[2]
    if mask is None or not isinstance(size, int) or value_of(mask).shape[-2:] != (size, key.shape[2]):
        return None
    band = band_of(_made_by(mask, outer))
    if band is None or why_not_flash(query, key, value_of(found.value)):
        return None
    window = NO_WINDOW if band.is_causal(size) else band.window(size)
    if window is None or (query.is_cuda and why_rejected("attention", query.device, "bf16")):
        return None
    return windowed_attention, (found.query, found.key, found.value, found.sinks, found.scale, window)


def _made_by(mask: fx.Node, outer: Mapping[str, fx.Node]) -> fx.Node:
    """A mask where it is made, which may be the graph around a nested one."""
    return outer.get(mask.name, mask) if mask.op == "placeholder" else mask


def _opens_all_rows(mask: fx.Node) -> bool:
    """Whether a mask is known to leave each query a key: its own, or the first one."""
    value = value_of(mask)
    if value is None or value.dim() < 2:
        return False
    packed, (queries, keys) = packed_of(mask), value.shape[-2:]
    band = band_of(mask) if packed is None else packed.band
    return band is not None and band.first <= 0 <= band.last and (queries == keys or band.last == math.inf)


def match_written(node: fx.Node) -> Written | None:
    """The attention whose last product a node is."""
    if op_of(node) != "matmul":
        return None
    probs, value, sinks, mask = _before(node.args[0], node), node.args[1], None, None
    has_sinks = op_of(probs) == "getitem" and probs.args[1] == (Ellipsis, slice(None, -1, None))
    if has_sinks:
        probs = _before(probs.args[0], probs)
    if op_of(probs) != "softmax" or _axis(probs) != -1:
        return None
    logits = _without_maximum(probs.args[0], probs)
    if has_sinks:
        logits, sinks = _joined(logits)
    if op_of(logits) == "add" and not logits.kwargs and all(isinstance(arg, fx.Node) for arg in logits.args):
        logits, mask = _scores_and_mask(logits)
    cap, logits = _uncapped(logits)
    scale, product = _scaled(logits)
    if op_of(product) != "matmul" or has_sinks != (sinks is not None):
        return None
    query, key = product.args[0], _untransposed(product.args[1])
    if not runs_in_kernels(query, key, value) or any(value_of(n).dim() != 4 for n in (query, key, value)):
        return None
    if not _keeps_precision(product, node, value_of(query).dtype) or not _spreads_over(mask, product):
        return None
    # They are read where the last product stands.
    writes = Writes(node.graph)
    read = [n for n in (query, key, mask, sinks) if n is not None]
    if any(writes.between(n, product, node) for n in read) or writes.spoils(node, node, value, *read):
        return None
    return Written(query=query, key=key, value=value, scale=scale, mask=mask, sinks=sinks, cap=cap)


def _keeps_precision(first: fx.Node, last: fx.Node, dtype: torch.dtype) -> bool:
    """Whether all between two products is in the operands' dtype or in float32, and so is the result."""
    found, stack = {last}, [first]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.users
    dtypes = {value.dtype for node in found if node is not last and (value := value_of(node)) is not None}
    return dtypes <= {dtype, torch.float32} and value_of(first).dtype == value_of(last).dtype == dtype


def _spreads_over(mask: fx.Node | None, scores: fx.Node) -> bool:
    """Whether a mask is broadcast to the scores, and not the scores to it."""
    if mask is None or value_of(mask) is None:
        return mask is None
    pairs = zip(reversed(value_of(mask).shape), reversed(value_of(scores).shape), strict=False)
    return value_of(mask).dim() <= 4 and all(_is_one(size) or size == whole for size, whole in pairs)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _uncapped(node: Any) -> tuple[float, Any]:
    """(c, scores) of `c * tanh(scores / c)`, (0, itself) of anything else."""
    if op_of(node) != "mul" or node.kwargs:
        return 0.0, node
    cap = next((arg for arg in node.args if isinstance(arg, (int, float))), None)
    bent = _before(next((arg for arg in node.args if isinstance(arg, fx.Node)), None), node)
    part = _before(bent.args[0], bent) if op_of(bent) == "tanh" else None
    is_cap = cap is not None and cap > 0 and op_of(part) == "div" and not part.kwargs and part.args[1] == cap
    return (float(cap), _before(part.args[0], part)) if is_cap else (0.0, node)


def _scaled(node: Any) -> tuple[float, Any]:
    """(scale, product) of scores."""
    number = next((arg for arg in getattr(node, "args", ()) if isinstance(arg, (int, float))), None)
    if op_of(node) not in ("mul", "div") or number is None or node.kwargs:
        return 1.0, node
    if op_of(node) == "div":
        return (1 / number, _before(node.args[0], node)) if node.args[1] is number and number else (1.0, None)
    return float(number), _before(node.args[1] if node.args[0] is number else node.args[0], node)


def _before(node: Any, reader: fx.Node) -> Any:
    """What a node is, behind casts, copies and dropout without effect; None where another node reads it on the way."""
    while isinstance(node, fx.Node) and set(node.users) == {reader}:
        is_dropout = op_of(node) == "dropout" and not argument(node, "inplace", False)
        drops_nothing = is_dropout and (argument(node, "p", 0.5) == 0 or argument(node, "training", True) is False)
        if op_of(node) not in ("to", "contiguous") and not drops_nothing:
            return node
        node, reader = node.args[0], node
    return None


def _axis(softmax: fx.Node) -> Any:
    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    value = value_of(softmax)
    return dim - value.dim() if isinstance(dim, int) and value is not None and dim >= 0 else dim


def _without_maximum(node: Any, reader: fx.Node) -> Any:
    """Logits less their row's maximum are the logits to a softmax."""
    if op_of(node) != "sub" or node.kwargs or set(node.users) != {reader}:
        return _before(node, reader)
    logits, largest = node.args
    maximum = largest.args[0] if op_of(largest) == "getitem" and largest.args[1] == 0 else None
    is_max = op_of(maximum) == "max" and maximum.args[0] is logits and set(largest.users) == {node}
    dims = (maximum.kwargs.get("dim", maximum.args[1] if len(maximum.args) > 1 else None),) if is_max else ()
    if dims != (-1,) or not maximum.kwargs.get("keepdim", False) or set(maximum.users) != {largest}:
        return None
    return logits if set(logits.users) == {maximum, node} else None


def _joined(node: Any) -> tuple[Any, Any]:
    """(scores, sinks of the heads) of logits that are scores and a column of sinks; (None, None) for anything else."""
    parts = node.args[0] if op_of(node) == "cat" and isinstance(node.args[0], (list, tuple)) else ()
    dim = argument(node, "dim", 0) if parts else None
    if len(parts) != 2 or dim not in (-1, 3):
        return None, None
    scores, column = _before(parts[0], node), parts[1]
    # sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1)
    shaped = column.args[0] if op_of(column) == "expand" else None
    sinks = shaped.args[0] if op_of(shaped) in ("view", "reshape") else None
    value, heads = value_of(sinks), value_of(parts[0]).shape[1]
    if value is None or tuple(value.shape) != (heads,) or tuple(value_of(shaped).shape) != (1, heads, 1, 1):
        return None, None
    return scores, sinks


def _scores_and_mask(node: fx.Node) -> tuple[Any, Any]:
    """Of a sum, the scaled product and what is added to it."""
    for scores, mask in (node.args, reversed(node.args)):
        found = _before(scores, node)
        if op_of(found) in ("mul", "div", "matmul"):
            return found, mask
    return None, None


def _untransposed(node: Any) -> Any:
    """k of `k.transpose(-1, -2)` or `k.mT`, which is [B, H, D, S] there."""
    if op_of(node) != "transpose":
        return None
    axes = {argument(node, "dim0"), argument(node, "dim1")}
    return node.args[0] if axes in ({2, 3}, {-1, -2}, {2, -1}, {3, -2}) else None
