"""What an attention mask means: causal, banded or neither, found by computing it on small concrete values.

A mask depends on positions only, so its part of the graph is run on the CPU at the traced length. A window wider than
that length cannot be seen there; the numbers in the mask's own arithmetic are then tried one by one with a small value
in their place: the one that turns the mask into a band of that width is the window.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from deepwell.graph.lift.flow import Flow

# Of numbers, scores that are computed: a mask of long rows would take the host's memory and minutes.
_MOST_NUMBERS = 1 << 27
PROBE = 5  # the small width that stands in for a number under suspicion
# Ops of a mask's arithmetic whose numbers may be a window.
_COMPARING = ("sub", "add", "lt", "le", "gt", "ge", "floordiv", "div", "triu", "tril")
_EVALUATION_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class MaskFacts:
    causal: bool
    window: int | None = None
    chunked: bool = False


class _Unknown(Exception):
    """The mask rests on values that are not there (a buffer on the meta device)."""


def read_mask(flow: Flow, probability: fx.Node, scores: fx.Node | None, mask: fx.Node | None) -> MaskFacts | None:
    """Facts of the mask between `scores` and the softmax `probability`, or of an explicit `mask`; None if unknown.

    So it is in the graph of a call, which is asked for the roles of linears alone, and past `_MOST_NUMBERS`.
    """
    shape = flow.shape(scores if mask is None and scores is not None else mask)
    if flow.traced.tracer == "call" or math.prod(shape) > _MOST_NUMBERS:
        return None
    # Values are wanted: on a CPU, also where the caller builds everything under `with torch.device("meta")`.
    with torch.device("cpu"):
        return _read_mask(flow, mask if mask is not None else probability, scores)


def _read_mask(flow: Flow, target: fx.Node, scores: fx.Node | None) -> MaskFacts | None:
    visible = _visible(flow, target, scores, {})
    if visible is None:
        return None
    facts = _facts(visible)
    if facts.window is not None:
        return facts
    for number in _numbers(flow, target, scores, visible.shape[-1]):
        changed = _visible(flow, target, scores, {number: PROBE})
        if changed is None or changed.shape != visible.shape:
            continue
        probed = _facts(changed)
        if probed.window is not None and probed.causal == facts.causal:
            return MaskFacts(facts.causal, number + probed.window - PROBE)
        if _is_chunked(changed):
            return MaskFacts(facts.causal, number, chunked=True)
    return facts


def _facts(visible: torch.Tensor) -> MaskFacts:
    """From a square of booleans: nothing above the diagonal, and how far below it."""
    queries, keys = visible.shape
    distance = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)[None, :]
    causal = bool(keys > 1 and not visible[distance < 0].any() and queries > 1)
    below = distance[visible]
    reach = int(below.max()) + 1 if below.numel() else 0
    band = (distance >= 0) & (distance < reach) if causal else distance.abs() < reach
    is_band = 0 < reach < keys and bool((visible == band).all())
    return MaskFacts(causal, reach if is_band else None)


def _is_chunked(visible: torch.Tensor) -> bool:
    queries, keys = visible.shape
    q, k = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    return bool((visible == ((k <= q) & (k // PROBE == q // PROBE))).all())


def _visible(flow: Flow, target: fx.Node, scores: fx.Node | None, swap: Mapping[int, int]) -> torch.Tensor | None:
    """Which keys each query sees, as [queries, keys] booleans of the first batch entry and head."""
    try:
        with torch.no_grad():
            value = _Evaluation(flow, scores, swap).run(target)
    except (_Unknown, *_EVALUATION_ERRORS):
        return None
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return None
    while value.dim() > 2:
        value = value[0]
    if target is not None and flow.op(target) == "softmax":
        keys = flow.shape(scores)[-1] if scores is not None else value.shape[-1]
        return value[..., :keys] > 0  # a sink stands behind the keys
    if value.dtype == torch.bool:
        return value
    return value > -1e4 if value.is_floating_point() else value > 0


def _numbers(flow: Flow, target: fx.Node, scores: fx.Node | None, length: int) -> list[int]:
    """Whole numbers in the mask's arithmetic that could be a window, the likely ones (beyond the length) first."""
    found: set[int] = set()
    for node in flow.back([target], lambda n: n is scores):
        if flow.op(node) in _COMPARING:
            found.update(abs(a) for a in node.args if isinstance(a, int) and not isinstance(a, bool))
    return sorted((n for n in found if n > PROBE and n not in (length, length - 1, length + 1)), reverse=True)


class _Evaluation:
    """Runs a part of the graph on the CPU: scores and activations are zeros, flags in the input are ones."""

    def __init__(self, flow: Flow, scores: fx.Node | None, swap: Mapping[int, int]) -> None:
        self._flow = flow
        self._scores = scores
        self._swap = swap
        self._values: dict[fx.Node, Any] = {}

    def run(self, target: fx.Node) -> Any:
        needed = sorted(self._needed(target), key=self._flow.index.__getitem__)
        for node in needed:
            self._values[node] = self._value(node)
        return self._values[target]

    def _needed(self, target: fx.Node) -> set[fx.Node]:
        """What the target rests on, with the calls that write into those tensors."""
        needed: set[fx.Node] = {target}
        pending = [target]
        while pending:
            node = pending.pop()
            if self._is_given(node):
                continue
            for source in (*node.all_input_nodes, *self._flow.sources[node]):
                if source not in needed:
                    needed.add(source)
                    pending.append(source)
        return needed

    def _is_given(self, node: fx.Node) -> bool:
        return (
            node is self._scores
            or node.op in ("placeholder", "get_attr")
            or self._flow.op(node) in ("linear", "embedding")
        )

    def _value(self, node: fx.Node) -> Any:
        if self._is_given(node):
            return self._given(node)
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda n: self._values[n] if n in self._values else self._absent(n)
        )
        args, kwargs = self._on_cpu(args), self._on_cpu(kwargs)
        if self._flow.op(node) in _COMPARING:
            args = tuple(self._swapped(a) for a in args)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if self._flow.op(node) == "_assert_tensor_metadata":
            return None
        return node.target(*args, **kwargs)

    def _absent(self, node: fx.Node) -> Any:
        raise _Unknown(node.name)

    def _swapped(self, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) in self._swap:
            return int(math.copysign(self._swap[abs(value)], value))
        return value

    def _on_cpu(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, (tuple, list)):
            return type(value)(self._on_cpu(v) for v in value)
        if isinstance(value, dict):
            return {key: self._on_cpu(v) for key, v in value.items()}
        return value

    def _given(self, node: fx.Node) -> Any:
        flow = self._flow
        placeholder = flow.placeholder(node)
        example = flow.value(node)
        if node.op == "get_attr":
            value: Any = flow.traced.graph_module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            return self._real(value)
        if placeholder is not None and placeholder.kind == "buffer":
            return self._real(flow.model.get_buffer(placeholder.name))
        if not isinstance(example, torch.Tensor):
            raise _Unknown(node.name)
        shape = tuple(int(s) for s in example.shape)
        is_flag = placeholder is not None and placeholder.kind == "input" and not example.is_floating_point()
        return torch.ones(shape, dtype=example.dtype) if is_flag else torch.zeros(shape, dtype=example.dtype)

    def _real(self, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            raise _Unknown("a buffer without values")
        return value.detach().cpu().clone()
