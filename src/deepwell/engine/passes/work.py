"""What a graph brings to the passes: the options, what was done, and the passes that record more than a count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import fx

from deepwell.engine.binding import LeftAlone
from deepwell.engine.calls.ran import Calls
from deepwell.engine.passes.choose_kernels import KernelRow, choose_kernels, merge_rows
from deepwell.engine.passes.cross_entropy import DeferredOutput, rewrite_cross_entropy, unfused_losses
from deepwell.engine.passes.edit import scheme_of
from deepwell.engine.passes.experts import find_experts, rewrite_calls, rewrite_experts
from deepwell.engine.passes.gain import gain_of_experts, keep_gaining
from deepwell.engine.passes.linear import find_linears, rewrite_linears
from deepwell.engine.passes.row_factors import leave_row_scales
from deepwell.engine.times.gemms import LinearSizes, find_products
from deepwell.engine.times.ops import OpCall
from deepwell.engine.unmatched import find_left_alone, has_autocast
from deepwell.engine.weight_cache import WeightCache
from deepwell.errors import UnsupportedError
from deepwell.graph.fx import value_of
from deepwell.kernels.experts.gain import experts_would_gain
from deepwell.kernels.gemm.fp8 import ALIGNMENT
from deepwell.kernels.registry import KernelRegistry
from deepwell.kernels.tune.fastest import LEAST_FLOPS
from deepwell.kernels.tune.gain import Gain, would_gain

# Heads with a fused loss, and whether their logits are a bf16 GEMM.
_FP8_HEADS = {"fp8_row|fp8_row|fp8_row": False, "bf16|fp8_row|fp8_row": True}
_AUTOCAST = (
    "torch.autocast was on: linears whose input it made another dtype than their weight's stay as it runs them; "
    "leave it out, the policy says which products leave the model's dtype (model.bfloat16() for all else in bf16)"
)
_Noted = TypeVar("_Noted")


@dataclass(slots=True, kw_only=True)
class BackendOptions:
    """What the passes need to know, and what they did.

    `schemes` maps module paths to the schemes of their linears. `parameters` gives the model's named parameters; where
    it is None their names are read from Dynamo's sources.
    """

    schemes: Mapping[str, str] = field(default_factory=dict)
    use_inductor: bool = False
    plain_as_written: bool = False  # a model without schemes is not compiled at all
    fuse_head: bool = True
    # Record forward and backward once and replay them: short kernels no longer wait for the host (calls/replay.py).
    # None: where a few calls show that the host is the limit.
    cuda_graphs: bool | None = False
    replays: list[Any] = field(default_factory=list)  # a `Replay` for each graph that may be recorded
    row_factors: bool = True  # large FP8 products have one scale, their readers those of rows: passes/row_factors.py
    recompute: str = "hidden"  # what of the FP8 copies the backward recomputes: passes/recompute.py (with Inductor)
    cache_weights: bool = False  # keep the FP8 weights, 2 bytes each, and recompute them when weights change
    weight_cache: WeightCache = field(default_factory=WeightCache)
    registry: KernelRegistry | None = None  # chooses the kernels of products; None leaves the vendor's
    # Keep linears in bf16 where FP8 would not be faster ("safe"), or refuse to ("strict"); None measures nothing.
    measure: str | None = None
    parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None
    # Sees each graph as Dynamo gives it, with its inputs, and may change `schemes` before the passes read them.
    see: Callable[[BackendOptions, fx.GraphModule, Sequence[Any]], None] | None = None
    kernels: dict[tuple[str, str, str, str], KernelRow] = field(default_factory=dict)
    calls: dict[OpCall, int] = field(default_factory=dict)  # of Deepwell's ops in the compiled graphs
    gains: dict[str, Gain] = field(default_factory=dict)  # by path, as last measured
    products: dict[str, LinearSizes] = field(default_factory=dict)  # sizes of linears by path, as last compiled
    counts: dict[str, int] = field(default_factory=dict)
    rewritten: set[str] = field(default_factory=set)  # paths of linears that left bf16
    left: dict[str, LeftAlone] = field(default_factory=dict)  # by path, linears with a scheme that a graph left as is
    remarks: dict[str, None] = field(default_factory=dict)  # what looked like a pass's business and was not; no value
    graphs: int = 0  # how many were compiled: one for each piece of the model and each kind of input
    frames: dict[int | None, int] = field(default_factory=dict)  # of them, how many of each function
    was_called: bool = False
    calls_made: Calls = field(default_factory=Calls)

    def for_schemes(self, schemes: Mapping[str, str]) -> BackendOptions:
        """The same choices for other schemes, with nothing done yet."""
        done = {"kernels": {}, "calls": {}, "gains": {}, "counts": {}, "rewritten": set(), "remarks": {}, "graphs": 0}
        return replace(
            self,
            schemes=schemes,
            products={},
            left={},
            frames={},
            replays=[],
            was_called=False,
            calls_made=Calls(),
            **done,
        )

    def for_one_graph(self) -> BackendOptions:
        """These options, with their own record of what happened by path; the rest is shared."""
        return replace(self, gains={}, products={}, rewritten=set(), left={})

    def add_paths(self, graph: BackendOptions, paths: Mapping[str, str] | None = None) -> frozenset[str]:
        """Take over what one graph recorded by path, for other paths where the graph runs for others.

        Returns the paths of the linears that it runs in their formats.
        """

        def path_of(path: str) -> str:
            return path if paths is None else paths.get(path, path)

        self.gains.update({path_of(path): gain for path, gain in graph.gains.items()})
        self.products.update({path_of(path): product for path, product in graph.products.items()})
        rewritten = frozenset(path_of(path) for path in graph.rewritten)
        self.rewritten |= rewritten
        self.left.update({path_of(path): why for path, why in graph.left.items()})
        return rewritten

    def unmet(self) -> list[str]:
        """Paths with a scheme that no graph multiplied in it, but for those that bf16 was faster for."""
        stayed = {path for path, gain in self.gains.items() if not gain.gains}
        return [path for path in self.schemes if path not in self.rewritten | stayed]

    def left_at_times(self) -> dict[str, LeftAlone]:
        """Those that one graph multiplies in their scheme and another as the model has them."""
        return {path: left for path, left in self.left.items() if left.is_product and path in self.rewritten}

    def note(self, name: str, count: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + count

    @property
    def is_as_written(self) -> bool:
        """Whether there is nothing to compile."""
        return self.plain_as_written and not self.schemes

    @property
    def recomputes(self) -> bool:
        """Whether the backward recomputes anything: Inductor's partitioner does."""
        return self.use_inductor and self.recompute != "nothing"

    @property
    def recomputes_copies(self) -> bool:
        return self.use_inductor and self.recompute == "copies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One graph in the pipeline: the values that passes may ask for, and what some leave for the end."""

    options: BackendOptions
    weights: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # placeholder -> its parameter's names
    outer: Mapping[str, fx.Node] | None = None  # what the inputs of a nested graph are in the one around it
    deferred: list[DeferredOutput] = field(default_factory=list)
    may_stay: dict[str, LeftAlone] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """What a pass names: this object, a field of it or of the options."""
        if name == "work":
            return self
        return getattr(self if hasattr(self, name) else self.options, name)


# ---- passes that record more than a count ----


def see_unmatched(graph: fx.Graph, work: Work) -> None:
    """See what stays as the model has it while the graph is as the model wrote it."""
    work.may_stay.update(find_left_alone(graph, work.weights, work.options.schemes))
    if work.options.schemes and has_autocast(graph):
        work.options.remarks[_AUTOCAST] = None


def note_unmatched(graph: fx.Graph, work: Work) -> None:
    options = work.options
    done = options.rewritten | options.gains.keys() | options.left.keys()
    options.left |= {path: why for path, why in work.may_stay.items() if path not in done}


def rewrite_head(graph: fx.Graph, work: Work) -> int:
    """Head and loss: in bf16 or, where the GEMMs' formats and the width allow it, in FP8."""
    options = work.options
    schemes = {node: scheme_of(names, options.schemes) for node, names in work.weights.items()}
    sizes = {node.name: value.shape for node in graph.nodes if (value := value_of(node)) is not None}
    fp8 = {
        node: _FP8_HEADS[scheme]
        for node, (_, scheme) in schemes.items()
        if scheme in _FP8_HEADS and sizes[node][-1] % ALIGNMENT == 0
    }
    others = [node for node, (_, scheme) in schemes.items() if scheme and node not in fp8]
    for reason in unfused_losses(graph):
        options.remarks[f"all logits are held: the loss of the head has {reason}"] = None
    heads, deferred = rewrite_cross_entropy(graph, fp8, others)
    options.rewritten |= {schemes[head.name][0] for head in heads if head.name in fp8}
    work.deferred.extend(deferred)
    return len(heads)


def rewrite_all_linears(graph: fx.Graph, work: Work) -> tuple[int, int]:
    options, weights = work.options, work.weights
    sites = find_linears(graph, weights, options.schemes)
    if options.measure:
        sites, gains = keep_gaining(sites, would_gain, strict=options.measure == "strict")
        options.gains.update(_of_tied(gains, weights, options.schemes))
    counts = rewrite_linears(graph, sites)
    options.products |= find_products(graph, weights)
    options.rewritten |= _of_tied({site.path: None for site in sites}, weights, options.schemes).keys()
    return counts


def rewrite_all_experts(graph: fx.Graph, work: Work) -> tuple[int, int]:
    options = work.options
    sites = find_experts(graph, work.weights, options.schemes)
    fused, reasons = rewrite_experts(graph, sites)

    def measured(*sizes: Any) -> Gain | None:
        try:
            return experts_would_gain(*sizes)
        except (torch.OutOfMemoryError, UnsupportedError) as error:
            options.remarks[f"experts in FP8 were not compared with bf16: {str(error).splitlines()[0][:200]}"] = None
            return None

    def gain_of(call: fx.Node, path: str) -> Gain | None:
        return gain_of_experts(call, path, measured, strict=options.measure == "strict") if options.measure else None

    paths, fused_calls, others, gains = rewrite_calls(graph, work.weights, options.schemes, gain_of)
    options.gains.update(gains)
    why = dict.fromkeys((*reasons, *others))
    options.remarks |= {f"experts run product by product, padded for each: {reason}": None for reason in why}
    options.rewritten |= {*(site.path for site in sites), *paths}
    return len(sites) + len(paths), fused + fused_calls


def move_row_scales(graph: fx.Graph, work: Work) -> int | None:
    """Have the products of a joint graph read without the scales of their rows, which their readers then take.

    On a GPU only those whose algorithms are timed, large ones of fixed size: torch's own choice for a product with
    one scale is the slower one. None where a user's kernel may want the whole chain.
    """
    registry = work.options.registry
    if registry is not None and any(item.op == "gemm" for item in registry.users()):
        return None
    devices = {value.device for node in graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor)}
    has_gpu = any(device.type == "cuda" for device in devices)
    return leave_row_scales(graph, LEAST_FLOPS if has_gpu else 0.0)


def choose_by_registry(graph: fx.Graph, work: Work) -> None:
    """Let the registry choose among kernels for the products; note what runs."""
    options = work.options
    if options.registry is not None:
        merge_rows(options.kernels, choose_kernels(graph, options.registry))


def _of_tied(
    noted: Mapping[str, _Noted], weights: Mapping[str, tuple[str, ...]], schemes: Mapping[str, str]
) -> dict[str, _Noted]:
    """What was recorded by path, also for linears that share the weight and have its scheme: they ran alike."""
    found = dict(noted)
    for names in weights.values():
        paths = [name.removesuffix(".weight") for name in names]
        first = next((path for path in paths if path in noted), None)
        if first is not None:
            found |= {path: noted[first] for path in paths if schemes.get(path) == schemes.get(first)}
    return found
