"""Let FP8 linears read FP8 values that live from call to call, instead of quantizing their weights in every call.

The values are buffers of the graph's module, so that AOTAutograd gives them to compiled code as inputs: they change
between two runs, never inside. A weight that the graph itself writes into keeps its own quantization.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deepwell.engine.passes.edit import replace
from deepwell.engine.weight_cache import KeptGroup, WeightCache
from deepwell.graph.fx import Writes, memory_of, transposed
from deepwell.kernels.gemm.linear import cached_linear, can_keep_codes, low_precision_linear
from deepwell.kernels.quantize.weight_cache_launches import Codes

PREFIX = "deepwell_codes"


def cache_weights(
    graph_module: fx.GraphModule,
    inputs: Mapping[str, tuple[int, tuple[str, ...]]],
    example_inputs: Sequence[Any],
    cache: WeightCache,
    taken: dict[int, KeptGroup],
) -> int:
    """Rewrite the linears of one graph; the groups they read are added to `taken`. Returns how many linears.

    `inputs` says of each placeholder that is a parameter which input of the outermost graph it is, and its names.
    """
    graph, count = graph_module.graph, 0
    written = Writes(graph).memory
    names: dict[int, tuple[str, ...]] = {}
    for node in list(graph.nodes):
        if node.target is not low_precision_linear or not can_keep_codes(node.args[3]):
            continue
        x, weights, bias, scheme = node.args
        found = [_parameter(weight, inputs, written) for weight in weights]
        known = [item for item in found if item is not None]
        group = _group(known, example_inputs, cache) if len(known) == len(found) else None
        if group is None:
            continue
        if id(group.codes) not in names:
            if id(group.codes) in taken:
                continue  # a nested graph's: one buffer must not have two names
            names[id(group.codes)] = _register(graph_module, group.codes)
            taken[id(group.codes)] = group
        with graph.inserting_before(node):
            codes = [graph.get_attr(name) for name in names[id(group.codes)]]
            new = graph.call_function(cached_linear, (x, weights, bias, scheme, *codes))
        replace(node, new)
        count += 1
    graph_module.recompile()
    return count


def _parameter(
    weight: fx.Node, inputs: Mapping[str, tuple[int, tuple[str, ...]]], written: set[Any]
) -> tuple[int, tuple[str, ...], bool] | None:
    """(input, names, whether it is stored as [K, N]) of a linear's weight, None where its FP8 values cannot be kept."""
    source = transposed(weight)
    stored = weight if source is None else source
    if stored.op != "placeholder" or stored.name not in inputs or memory_of(stored) in written:
        return None
    return *inputs[stored.name], source is not None


def _group(
    found: list[tuple[int, tuple[str, ...], bool]], example_inputs: Sequence[Any], cache: WeightCache
) -> KeptGroup | None:
    """The group of a linear's weights; None where one is no plain matrix with contiguous rows."""
    weights = [example_inputs[i] for i, _, _ in found]
    for w in weights:
        is_plain = isinstance(w, torch.Tensor) and not is_traceable_wrapper_subclass(w)
        if not is_plain or w.dim() != 2 or w.numel() == 0 or (w.shape[1] > 1 and w.stride(1) != 1):
            return None
    if len({(w.dtype, w.device) for w in weights}) != 1:
        return None
    is_kn = [kn for _, _, kn in found]
    sizes = [w.shape if kn else w.shape[::-1] for w, kn in zip(weights, is_kn, strict=True)]
    described = zip((names for _, names, _ in found), (tuple(w.shape) for w in weights), is_kn, strict=True)
    key = (*described, weights[0].dtype, weights[0].device)
    codes = cache.codes_of(key, sizes[0][0], [n for _, n in sizes], is_kn, weights[0].device)
    return KeptGroup(key=key, codes=codes, inputs=tuple(i for i, _, _ in found))


def _register(graph_module: fx.GraphModule, codes: Codes) -> tuple[str, ...]:
    """Make the FP8 values buffers of a graph's module. Returns their names there."""
    number = sum(name.startswith(PREFIX) for name, _ in graph_module.named_buffers(recurse=False))
    names = []
    for part in ("rows", "columns", "scale"):
        names.append(f"{PREFIX}_{number}_{part}")
        graph_module.register_buffer(names[-1], getattr(codes, part))
    return tuple(names)


def name_sources(graph_module: fx.GraphModule) -> None:
    """Say of each buffer where it came from, which AOTAutograd asks of all that Dynamo hands over."""
    from torch._dynamo.source import ConstantSource

    sources = getattr(graph_module, "_param_name_to_source", None)
    if sources is None:
        return
    for name, _ in graph_module.named_buffers(remove_duplicate=False):
        if PREFIX in name:
            sources[name] = ConstantSource(source_name=name.replace(".", "_"))
