"""The torch.compile backend: rewrite the graph that Dynamo captured, then let AOTAutograd and Inductor compile it.

Passes run at two levels. On Dynamo's graph, where a linear is a linear: norms, attention, linears, SwiGLU, head and
loss. On AOTAutograd's forward and backward, where quantizations are nodes of their own: fusing them into their
producers. On a CPU, or without a C compiler, the rewritten graphs run eagerly (AOT eager).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from deepwell.engine.deferred import DeferredLogits
from deepwell.engine.passes.attention import rewrite_attention
from deepwell.engine.passes.cross_entropy import DeferredOutput, rewrite_cross_entropy
from deepwell.engine.passes.fuse_quantize import fuse_quantize
from deepwell.engine.passes.linear import find_linears, rewrite_linears
from deepwell.engine.passes.rms_norm import rewrite_rms_norm
from deepwell.engine.passes.swiglu import rewrite_swiglu


@dataclass(slots=True, kw_only=True)
class BackendOptions:
    """What the passes need to know. `schemes` maps module paths to the schemes of their linears."""

    schemes: Mapping[str, str] = field(default_factory=dict)
    use_inductor: bool = False
    fuse_head: bool = True
    counts: dict[str, int] = field(default_factory=dict)
    deferred: list[DeferredOutput] = field(default_factory=list)

    def note(self, name: str, count: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + count


def compile_graph(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: BackendOptions
) -> Callable[..., Any]:
    """Rewrite one captured graph and compile what is left."""
    rewrite(graph_module, options)
    compiler = _with_inductor if options.use_inductor else _eagerly
    return _with_deferred_logits(compiler(graph_module, example_inputs, options), options.deferred)


def _with_deferred_logits(run: Callable[..., Any], deferred: Sequence[DeferredOutput]) -> Callable[..., Any]:
    """Hand out logits that are computed when somebody looks at them, where the graph returns the head's input."""
    if not deferred:
        return run

    def wrapped(*inputs: Any) -> Any:
        outputs = list(run(*inputs))
        for item in deferred:
            outputs[item.index] = DeferredLogits(outputs[item.index], inputs[item.weight_input])
        return tuple(outputs)

    return wrapped


def rewrite(graph_module: fx.GraphModule, options: BackendOptions) -> None:
    """The passes on Dynamo's graph, in order: each sees what the ones before it made."""
    graph = graph_module.graph
    weights = parameter_names(graph)
    options.note("attention", rewrite_attention(graph))
    if options.fuse_head:
        fp8_heads = [
            node for node, name in weights.items() if "fp8_row" in options.schemes.get(name.removesuffix(".weight"), "")
        ]
        heads, options.deferred = rewrite_cross_entropy(graph, fp8_heads)
        options.note("cross_entropy", heads)
    options.note("rms_norm", rewrite_rms_norm(graph))
    linears, merged = rewrite_linears(graph, find_linears(graph, weights, options.schemes))
    options.note("linear", linears)
    options.note("merged_linear", merged)
    options.note("swiglu", rewrite_swiglu(graph))
    graph.eliminate_dead_code()
    graph_module.recompile()


def parameter_names(graph: fx.Graph) -> dict[str, str]:
    """Placeholder name -> parameter name, read from where Dynamo says the tensor came from."""
    names = {}
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        source = getattr(node.meta.get("grapharg"), "source", None) or getattr(node, "_dynamo_source", None)
        if source is None:
            continue
        text = source.name() if callable(source.name) else source.name
        parts = re.findall(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", text)
        if parts:
            names[node.name] = ".".join(parts)
    return names


def _eagerly(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: BackendOptions
) -> Callable[..., Any]:
    def compiler(inner: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        options.note("fused_quantize", fuse_quantize(inner.graph))
        inner.recompile()
        return make_boxed_func(inner.forward)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)(graph_module, example_inputs)


def _with_inductor(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: BackendOptions
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Fusions(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            options.note("fused_quantize", fuse_quantize(graph))

        def uuid(self) -> Any:
            return fuse_quantize.__module__

    patches = {"post_grad_custom_pre_pass": Fusions()}
    return compile_fx(graph_module, list(example_inputs), config_patches=patches)  # type: ignore[return-value]
