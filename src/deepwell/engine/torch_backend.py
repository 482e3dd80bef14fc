"""`torch.compile(model, backend="deepwell", options={"precision": "mxfp8"})`: the engine's passes without an IR.

A backend sees one graph and no model, so the linears are read from the graph: a head by the embedding or the loss it
belongs to, a router by the top-k behind it, the rest by the names of their modules. From there on it is the same: a
policy, its resolution, this device's bindings; `last_report()` is the engine's report of what was compiled last.

Where Dynamo breaks a model into several graphs, a layer's number is read from its path, so that "first 2 blocks" are
the model's first. Of its last ones the first graphs cannot know: `options={"num_layers": 32}` says how many there are.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from deepwell.engine.arguments import check_flags, check_sizes, policy_of
from deepwell.engine.backend import compile_graph, parameter_names
from deepwell.engine.binding import Binding, Bound, Target, as_model_runs_them, bind, with_gains
from deepwell.engine.compile import check_fallback, device_of, measured_fallback, registry_for, use_inductor
from deepwell.engine.passes.work import BackendOptions
from deepwell.engine.report import EngineReport
from deepwell.errors import ConfigError
from deepwell.graph.fx import (
    SHAPE_OPS,
    argument,
    give_operands_by_position,
    grouped_parts,
    linear_parts,
    op_of,
    value_of,
)
from deepwell.graph.ir import IR, Block, Layer
from deepwell.graph.ops import GroupedLinear, Linear
from deepwell.precision.policy import PrecisionPolicy

OPTIONS = (
    "precision",
    "precision_policy",
    "fallback",
    "inductor",
    "fuse_head",
    "use_cutlass",
    "kernel_registry",
    "measure",
    "num_layers",
)
# torch.compile's modes, and whether they ask for CUDA graphs.
_MODES = {"default": False, "reduce-overhead": True, "max-autotune": True, "max-autotune-no-cudagraphs": False}
_FLAGS = ("inductor", "fuse_head", "use_cutlass", "measure")
# Ops between a router's product and its top-k: a cast, a score function, a bias, a view.
_ROUTER_REACH = 6


def deepwell(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's. `options` are those of `dw.compile`: precision, precision_policy, fallback ...

    `mode` is torch.compile's word: "reduce-overhead" and "max-autotune" record CUDA graphs on a GPU; as kernels are
    measured in any case, the others ask for nothing more.
    """
    call = _call_of(options, mode)
    chosen = dict(options or {})
    unknown = sorted(set(chosen) - set(OPTIONS))
    if unknown:
        raise ConfigError(f"options has {unknown[0]!r}; backend='deepwell' takes {', '.join(OPTIONS)}")
    policy = policy_of(None, chosen.get("precision"), chosen.get("precision_policy"))
    check_flags(**{name: chosen[name] for name in _FLAGS if name in chosen})
    check_sizes(num_layers=chosen.get("num_layers"))
    fallback = check_fallback(chosen.get("fallback", "safe"))
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    device = device_of(tensors)
    names = parameter_names(graph_module.graph, example_inputs)
    ir = ir_of_graph(graph_module.graph, names, call.layers, chosen.get("num_layers") or 0)
    resolution = policy.copy().freeze().resolve(ir)
    bound = bind(ir, resolution, device, fallback=fallback)
    registry, missing = registry_for(chosen.get("kernel_registry"), chosen.get("use_cutlass", False), device)
    cuda_graphs, unused = _cuda_graphs(mode, device)
    backend_options = BackendOptions(
        schemes=bound.schemes,
        registry=registry,
        measure=measured_fallback(chosen.get("measure"), fallback, device),
        use_inductor=use_inductor(chosen.get("inductor"), device),
        cuda_graphs=cuda_graphs,
        fuse_head=chosen.get("fuse_head", True),
    )
    notes = (*resolution.notes, *missing, *unused, *call.notes_on_layers(policy, ir, "num_layers" in chosen))
    call.graphs.append(_Graph(device=str(device), bound=replace(bound, notes=notes), options=backend_options))
    return compile_graph(graph_module, example_inputs, backend_options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """One compiled graph: what was bound, and the options that count what passes do in it."""

    device: str
    bound: Bound
    options: BackendOptions

    def bindings(self) -> tuple[Binding, ...]:
        """As they run: with what was measured, and what no pass could take as the model has it."""
        left, options = self.options.left, self.options
        unmet = {path: left[path] for path in options.unmet() if path in left}
        return as_model_runs_them(with_gains(self.bound.bindings, options.gains), unmet)


@dataclass(slots=True, kw_only=True)
class _Call:
    """What one `torch.compile(..., backend="deepwell")` compiled so far; `options` is the very object it was given."""

    options: Any
    mode: str | None = None
    graphs: list[_Graph] = field(default_factory=list)
    layers: dict[str, int] = field(default_factory=dict)  # list of layers -> how many of it were seen
    first_layers: int = 0  # how many the first graph's policy counted with

    def notes_on_layers(self, policy: PrecisionPolicy, ir: IR, is_told: bool) -> list[str]:
        """A note where an earlier graph counted its last layers from a number that was too small."""
        if not self.graphs:
            self.first_layers = ir.num_layers
        counts_from_end = any("last" in (rule.pattern or "") for rule in policy.rules)
        if is_told or not counts_from_end or ir.num_layers <= self.first_layers:
            return []
        return [
            f"a rule counts from the last layer; the first graph showed {self.first_layers} layers and this one "
            f"{ir.num_layers}: pass options={{'num_layers': ...}}"
        ]


# The last few calls: a process compiles a handful of models.
_calls: deque[_Call] = deque(maxlen=8)


def _call_of(options: Any, mode: str | None) -> _Call:
    """The record of the torch.compile that these options, or this mode, were given to; it becomes the last one."""
    found = next((call for call in _calls if call.options is options and call.mode == mode), None)
    if found is None:
        found = _Call(options=options, mode=mode)
    else:
        _calls.remove(found)
    _calls.append(found)
    return found


def last_report() -> EngineReport:
    """The report of the graphs that the last compiling `torch.compile(..., backend="deepwell")` has made so far.

    Calls without options and of one mode cannot be distinguished and share one. Raises ConfigError where nothing was
    compiled yet.
    """
    if not _calls or not _calls[-1].graphs:
        raise ConfigError("no graph was compiled by backend='deepwell' yet: call the compiled model once")
    graphs = _calls[-1].graphs
    passes: dict[str, int] = {}
    for graph in graphs:
        for name, count in graph.options.counts.items():
            passes[name] = passes.get(name, 0) + count
    rows = {(row.path, row.gemm): row for graph in graphs for row in graph.bindings()}
    notes = (*(note for g in graphs for note in g.bound.notes), *(r for g in graphs for r in g.options.remarks))
    return EngineReport(
        model="torch.compile's model",
        device=graphs[-1].device,
        bindings=tuple(rows.values()),
        passes=passes,
        graphs=len(graphs),
        notes=tuple(dict.fromkeys(notes)),
        kernels=tuple(row for graph in graphs for row in graph.options.kernels.values()),
    )


def forget_reports() -> None:
    """Drop what was recorded, as `torch._dynamo.reset()` drops what was compiled."""
    _calls.clear()


def _cuda_graphs(mode: str | None, device: Target) -> tuple[bool, list[str]]:
    """Whether a mode means CUDA graphs on this device, and a note where it asks for them in vain."""
    if mode is not None and mode not in _MODES:
        raise ConfigError(f"mode is {mode!r}; backend='deepwell' takes {', '.join(_MODES)}")
    asked = mode is not None and _MODES[mode]
    if asked and device.kind != "cuda":
        return False, [f"mode={mode!r} records CUDA graphs, which needs a GPU; on the {device} it changes nothing"]
    return asked, []


def ir_of_graph(
    graph: fx.Graph, names: Mapping[str, tuple[str, ...]], seen: dict[str, int] | None = None, num_layers: int = 0
) -> IR:
    """The linears of a graph as an IR: enough for a policy to decide, without edges and costs.

    A layer stands where its number says, whatever part of the model the graph holds. `seen` remembers how many layers
    graphs before this one showed; `num_layers` is how many the model's longest list of them has, if that is known.
    """
    give_operands_by_position(graph)
    vocabularies = {
        int(value_of(weight).shape[0])
        for node in graph.nodes
        if op_of(node) == "embedding" and value_of(weight := argument(node, "weight")) is not None
    }
    found: dict[str, tuple[str, Linear | GroupedLinear]] = _grouped(graph, names)
    for node in graph.nodes:
        parts = linear_parts(node)
        weight = parts[1] if parts else None
        if parts is None or not isinstance(weight, fx.Node) or weight.name not in names:
            continue
        value = value_of(weight)
        if value is None or value.dim() != 2:
            continue
        path = names[weight.name][0].removesuffix(".weight")
        n, k = (int(size) for size in (value.T.shape if parts[3] else value.shape))
        layer, op = _layer_of(path)
        role = _role(node, path, n, vocabularies)
        found[path] = (layer, Linear(name=op, role=role, k=k, n=n, bias=parts[2] is not None))
    layers: dict[str, list[Linear | GroupedLinear]] = {}
    for layer, linear in found.values():
        layers.setdefault(layer, []).append(linear)
    outside = tuple(layers.pop("", ()))
    paths = _all_layers(layers, {} if seen is None else seen, num_layers)
    # Those that lie in other graphs have no linears here.
    blocks = (*(Block(ops=tuple(ops)) for ops in layers.values()), Block(ops=()))
    index = {path: number for number, path in enumerate(layers)}
    places = tuple(Layer(path=path, block=index.get(path, len(layers))) for path in paths)
    return IR(name="graph", dtype="bf16", stem=(), blocks=blocks, layers=places, tail=outside)


def _grouped(graph: fx.Graph, names: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, Linear | GroupedLinear]]:
    """Experts' grouped products by the path of their weight."""
    found: dict[str, tuple[str, Linear | GroupedLinear]] = {}
    for node in graph.nodes:
        parts = grouped_parts(node)
        if parts is None or not isinstance(parts[1], fx.Node) or parts[1].name not in names:
            continue
        _, weight, _, is_kn = parts
        path = names[weight.name][0].removesuffix(".weight")
        experts, n, k = (int(size) for size in (value_of(weight).mT if is_kn else value_of(weight)).shape)
        layer, op = _layer_of(path)
        found[path] = (layer, GroupedLinear(name=op, role="experts", experts=experts, k=k, n=n))
    return found


def _all_layers(layers: Iterable[str], seen: dict[str, int], num_layers: int) -> list[str]:
    """The paths of all layers that a model with these has: 0, 1, 2 ... of each list, as far as is known."""
    for path in layers:
        prefix, _, number = path.rpartition(".")
        seen[prefix] = max(seen.get(prefix, 0), int(number) + 1)
    if seen and num_layers:
        longest = max(seen, key=lambda prefix: seen[prefix])
        seen[longest] = max(seen[longest], num_layers)
    return [f"{prefix}.{number}".lstrip(".") for prefix, count in seen.items() for number in range(count)]


def _layer_of(path: str) -> tuple[str, str]:
    """(path of the numbered layer, path inside it); ("", path) outside of any."""
    match = re.match(r"((?:.*?\.)?\d+)\.(.+)", path)
    return (match[1], match[2]) if match else ("", path)


def _role(node: fx.Node, path: str, n: int, vocabularies: set[int]) -> str:
    if n in vocabularies or _feeds_a_loss(node):
        return "head"
    if _reaches_topk(node, _ROUTER_REACH):
        return "router"
    if re.search(r"attn|attention", path):
        return "attention"
    return "mlp" if re.search(r"mlp|ffn|feed_?forward", path) else "other"


def _feeds_a_loss(node: fx.Node) -> bool:
    return any(
        op_of(user) == "cross_entropy" or (op_of(user) in {"to", *SHAPE_OPS} and _feeds_a_loss(user))
        for user in node.users
    )


def _reaches_topk(node: fx.Node, steps: int) -> bool:
    """Whether a few ops that mix no other products lead to a top-k."""
    if steps == 0:
        return False
    for user in node.users:
        if op_of(user) == "topk":
            return True
        is_pointwise = linear_parts(user) is None and op_of(user) != "scaled_dot_product_attention"
        if is_pointwise and value_of(user) is not None and _reaches_topk(user, steps - 1):
            return True
    return False
