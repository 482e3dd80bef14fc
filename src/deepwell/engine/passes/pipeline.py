"""All rewrites of graphs, in the order in which they run: PASSES.

On Dynamo's graph, where a linear is a linear: norms, attention, linears, SwiGLU, head and loss. On AOTAutograd's joint
graph, where both readers of a value are seen: who multiplies by scales of rows, what the backward recomputes. On its
forward and backward, where quantizations are nodes of their own: fusing them into their producers, choosing kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx

from deepwell.engine.binding import LeftAlone
from deepwell.engine.passes.attention.rewrite import rewrite_attention
from deepwell.engine.passes.before_linear import rewrite_before_linears
from deepwell.engine.passes.bias_epilogue import fuse_bias
from deepwell.engine.passes.choose_kernels import choose_kernels, merge_rows
from deepwell.engine.passes.cross_entropy import DeferredOutput, rewrite_cross_entropy, unfused_losses
from deepwell.engine.passes.edit import erase_unread
from deepwell.engine.passes.embedding import rewrite_embedding
from deepwell.engine.passes.emulated_products import emulate_in_bf16
from deepwell.engine.passes.experts import find_experts, rewrite_experts, rewrite_fallback
from deepwell.engine.passes.fuse_quantize import fuse_quantize
from deepwell.engine.passes.fuse_recompute import fuse_recomputed_rows
from deepwell.engine.passes.gain import keep_gaining
from deepwell.engine.passes.gelu import rewrite_gelu
from deepwell.engine.passes.linear import find_linears, merge_plain_linears, rewrite_linears
from deepwell.engine.passes.looped_experts import group_loops
from deepwell.engine.passes.qk_norm_rope import rewrite_qk_norm_rope
from deepwell.engine.passes.recompute import mark_recomputed
from deepwell.engine.passes.residual import norm_again_from_sums, rewrite_residual_norm
from deepwell.engine.passes.rms_norm import rewrite_rms_norm
from deepwell.engine.passes.rope import rewrite_rope
from deepwell.engine.passes.row_factors import leave_row_scales
from deepwell.engine.passes.swiglu import rewrite_swiglu
from deepwell.engine.times.gemms import find_products
from deepwell.engine.times.ops import record_calls
from deepwell.engine.unmatched import find_left_alone, has_autocast
from deepwell.graph.fx import give_operands_by_position, value_of
from deepwell.kernels.gemm.fp8 import ALIGNMENT
from deepwell.kernels.tune.fastest import LEAST_FLOPS
from deepwell.kernels.tune.gain import would_gain

if TYPE_CHECKING:
    from deepwell.engine.backend import BackendOptions

# Heads with a fused loss, and whether their logits are a bf16 GEMM.
_FP8_HEADS = {"fp8_row|fp8_row|fp8_row": False, "bf16|fp8_row|fp8_row": True}
_AUTOCAST = (
    "torch.autocast was on: linears whose input it made another dtype than their weight's stay as it runs them; "
    "leave it out, the policy says which products leave the model's dtype (model.bfloat16() for all else in bf16)"
)
_Told = TypeVar("_Told")

DYNAMO, JOINT, COMPILED = "dynamo", "joint", "compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A graph's way through the passes: what they may ask for, and what some hand to the end."""

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


@dataclass(frozen=True, slots=True)
class Pass:
    """One rewrite. It gets the graph and what it `needs`, and returns a count for each of the words in its name.

    It runs at its level if the option `when` is on.
    """

    name: str
    level: str
    function: Callable[..., Any]
    needs: tuple[str, ...] = ()
    when: str = ""


def run(level: str, graph: fx.Graph, work: Work) -> None:
    """Run the passes of one level; each sees what the ones before it made. Counts go to the options."""
    for item in PASSES:
        if item.level != level or (item.when and not work.get(item.when)):
            continue
        found = item.function(graph, *(work.get(name) for name in item.needs))
        names = item.name.split()
        if found is not None and names:
            for name, count in zip(names, found if isinstance(found, tuple) else (found,), strict=True):
                work.options.note(name, count)


def swapped(name: str, function: Callable[..., Any]) -> tuple[Pass, ...]:
    """PASSES with another function under a name: to compare what a pass does with what happens without it."""
    assert name in [item.name for item in PASSES]
    return tuple(replace(item, function=function) if item.name == name else item for item in PASSES)


def files() -> tuple[str, ...]:
    """The source of all passes: compiled code that is kept on disk belongs to it."""
    return tuple(sorted(map(str, Path(__file__).parent.rglob("*.py"))))


# ---- passes that tell more than a count ----


def _look(graph: fx.Graph, work: Work) -> None:
    """See what stays as the model has it while the graph is as the model wrote it."""
    work.may_stay.update(find_left_alone(graph, work.weights, work.options.schemes))
    if work.options.schemes and has_autocast(graph):
        work.options.remarks[_AUTOCAST] = None


def _tell_left(graph: fx.Graph, work: Work) -> None:
    options = work.options
    done = options.rewritten | options.gains.keys() | options.left.keys()
    options.left |= {path: why for path, why in work.may_stay.items() if path not in done}


def _head(graph: fx.Graph, work: Work) -> int:
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


def _linears(graph: fx.Graph, work: Work) -> tuple[int, int]:
    options, weights = work.options, work.weights
    sites = find_linears(graph, weights, options.schemes)
    if options.measure:
        sites, gains = keep_gaining(sites, would_gain, strict=options.measure == "strict")
        options.gains.update(_of_tied(gains, weights, options.schemes))
    counts = rewrite_linears(graph, sites)
    options.products |= find_products(graph, weights)
    options.rewritten |= _of_tied({site.path: None for site in sites}, weights, options.schemes).keys()
    return counts


def _experts(graph: fx.Graph, work: Work) -> tuple[int, int]:
    options = work.options
    sites = find_experts(graph, work.weights, options.schemes)
    fused, reasons = rewrite_experts(graph, sites)
    options.remarks |= {f"experts run product by product, padded for each: {reason}": None for reason in reasons}
    options.rewritten |= {site.path for site in sites}
    return len(sites), fused


def _row_scales(graph: fx.Graph, work: Work) -> int | None:
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


def _kernels(graph: fx.Graph, work: Work) -> None:
    """Let the registry choose among kernels for the products; note what runs."""
    options = work.options
    if options.registry is not None:
        merge_rows(options.kernels, choose_kernels(graph, options.registry))


def scheme_of(names: tuple[str, ...], schemes: Mapping[str, str]) -> tuple[str, str]:
    """The path of a parameter that has a scheme and that scheme, empty where it has none."""
    paths = (name.removesuffix(".weight") for name in names)
    return next(((path, schemes[path]) for path in paths if path in schemes), ("", ""))


def _of_tied(
    noted: Mapping[str, _Told], weights: Mapping[str, tuple[str, ...]], schemes: Mapping[str, str]
) -> dict[str, _Told]:
    """What was recorded by path, also for linears that share the weight and have its scheme: they ran alike."""
    found = dict(noted)
    for names in weights.values():
        paths = [name.removesuffix(".weight") for name in names]
        first = next((path for path in paths if path in noted), None)
        if first is not None:
            found |= {path: noted[first] for path in paths if schemes.get(path) == schemes.get(first)}
    return found


# fmt: off
PASSES: tuple[Pass, ...] = (
    Pass("",                                      DYNAMO,   give_operands_by_position),
    Pass("",                                      DYNAMO,   _look, ("work",)),
    Pass("causal_mask kv_heads window",           DYNAMO,   rewrite_attention, ("outer",)),
    Pass("cross_entropy",                         DYNAMO,   _head, ("work",), when="fuse_head"),
    Pass("embedding",                             DYNAMO,   rewrite_embedding),
    Pass("gelu",                                  DYNAMO,   rewrite_gelu),
    Pass("rms_norm",                              DYNAMO,   rewrite_rms_norm),
    Pass("linear merged_linear",                  DYNAMO,   _linears, ("work",)),
    Pass("merged_plain_linear",                   DYNAMO,   merge_plain_linears, ("weights",), when="merge_plain"),
    Pass("qk_norm_rope",                          DYNAMO,   rewrite_qk_norm_rope),
    Pass("rope rope_qkv",                         DYNAMO,   rewrite_rope, ("rope_alone",)),
    Pass("swiglu",                                DYNAMO,   rewrite_swiglu),
    Pass("looped_experts",                        DYNAMO,   group_loops, ("weights", "schemes")),
    Pass("experts fused_experts",                 DYNAMO,   _experts, ("work",)),
    Pass("plain_experts",                         DYNAMO,   rewrite_fallback),
    Pass("layer_norm activation bias_activation", DYNAMO,   rewrite_before_linears),
    Pass("residual_norm",                         DYNAMO,   rewrite_residual_norm),
    Pass("",                                      DYNAMO,   _tell_left, ("work",)),
    Pass("",                                      DYNAMO,   erase_unread),
    Pass("",                                      JOINT,    norm_again_from_sums, when="recomputes_copies"),
    Pass("row_factors",                           JOINT,    _row_scales, ("work",), when="row_factors"),
    Pass("recomputed",                            JOINT,    mark_recomputed, ("recompute",), when="recomputes"),
    Pass("fused_quantize",                        COMPILED, fuse_quantize),
    Pass("fused_recompute",                       COMPILED, fuse_recomputed_rows, when="use_inductor"),
    Pass("",                                      COMPILED, _kernels, ("work",)),
    Pass("bias_epilogue",                         COMPILED, fuse_bias),
    Pass("",                                      COMPILED, emulate_in_bf16),
    Pass("",                                      COMPILED, record_calls, ("calls",)),
)
# fmt: on
