"""The torch.compile backend: rewrite the graph that Dynamo captured, then let AOTAutograd and Inductor compile it.

`passes/pipeline.py` lists the passes: on Dynamo's graph, on AOTAutograd's joint graph, and on its forward and backward.
On a CPU, or without a C compiler, the rewritten graphs run eagerly (AOT eager).
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch._guards import CompileContext

from deepwell.engine.deferred import defer
from deepwell.engine.nested_graphs import in_common, nested, separate
from deepwell.engine.passes import pipeline
from deepwell.engine.passes.cache_weights import cache_weights, name_sources
from deepwell.engine.passes.cross_entropy import DeferredOutput
from deepwell.engine.passes.edit import scheme_of
from deepwell.engine.passes.work import BackendOptions, Work
from deepwell.engine.shared_graphs import KnownParameters, guard, noting, renamed, shared_weights
from deepwell.engine.weight_cache import KeptGroup, refreshing
from deepwell.errors import CaptureError
from deepwell.graph.layer_drop import draws, layer_drop_decided
from deepwell.kernels.gemm.fp8 import keep_one
from deepwell.kernels.tune.fastest import LEAST_FLOPS

# Past its limits Dynamo would quietly run the model as it was written, in high precision, and it counts what all
# engines of a class compile: the backend has a limit of its own, which is an error.
_DYNAMO = {"recompile_limit": 2**20, "accumulated_recompile_limit": 2**20, "fail_on_recompile_limit_hit": True}
# Under DistributedDataParallel Dynamo would cut the graph at its buckets, behind the engine's back. Compiled regions
# give it the overlap that it does so for.
_DYNAMO["optimize_ddp"] = False
# With it Dynamo of torch 2.11 does not see that a parameter was frozen or unfrozen, and runs the graph of before.
_DYNAMO["skip_tensor_guards_with_matching_dict_tags"] = False
# Its name in torch 2.11 and later.
_IGNORED_LOGGING = next(
    name for name in ("ignore_logging_functions", "ignore_logger_methods") if hasattr(torch._dynamo.config, name)
)
# Training, evaluation, each mixture of fixed and open sizes: a graph each.
MOST_GRAPHS = 64


def _tells_the_user_something(record: logging.LogRecord) -> bool:
    """False where torch 2.11 says that it could not write our setting, a set of functions, into its own metrics."""
    return "Unexpected exception logging" not in record.getMessage()


logging.getLogger("torch._dynamo.metrics_context").addFilter(_tells_the_user_something)


@contextmanager
def tracing(changes: Mapping[str, Any]) -> Iterator[None]:
    """The settings that graphs are compiled and found again under, with an engine's own.

    It is what torch's own `config.patch` does. Each of its patches leaves a context variable behind, for every call.
    """
    config: Any = torch._dynamo.config
    settings = {**_DYNAMO, **changes, _IGNORED_LOGGING: _chatter()}
    before = {name: getattr(config, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(config, name, value)
        with layer_drop_decided():
            yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _chatter() -> set[Any]:
    """Logging that is no reason to break a graph: GPT-2 logs once, between its head and its loss, which loss it takes.

    A `warning` that a model gives at every call still breaks it and is heard.
    """
    methods = ("debug", "info", "info_once", "warning_once")
    return {getattr(logging.Logger, name) for name in methods if hasattr(logging.Logger, name)}


def backend_of(options: BackendOptions) -> Callable[..., Any]:
    """What torch.compile calls with each graph."""

    def deepwell(graph_module: Any, example_inputs: Any) -> Callable[..., Any]:
        return compile_graph(graph_module, example_inputs, options)

    return deepwell


def compile_graph(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: BackendOptions
) -> Callable[..., Any]:
    """Rewrite one captured graph and compile what is left."""
    if options.see is not None:
        options.see(options, graph_module, example_inputs)
    options.graphs += 1
    _check_number(options)
    graph, own = graph_module.graph, options.for_one_graph()
    deferred = rewrite(graph_module, example_inputs, own)
    kept = keep_codes(graph_module, example_inputs, own) if options.cache_weights else []
    options.add_paths(own)
    for device in {value.device for value in example_inputs if isinstance(value, torch.Tensor)}:
        keep_one(device)
    # Before AOTAutograd, which erases where inputs came from.
    run_for = _guarded(graph, example_inputs, options, kept)
    drawing = keep_draws(graph_module, outside=options.use_inductor)
    compiler = _with_inductor if options.use_inductor else _eagerly
    run = drawing(compiler(graph_module, example_inputs, own))
    if kept:
        run = refreshing(run, kept, options.weight_cache)
    run = run_for(run, lambda met: options.add_paths(own, met))
    return _with_deferred_logits(run, deferred)


def _check_number(options: BackendOptions) -> None:
    """Raise CaptureError where one function was compiled too often.

    Dynamo has such a limit too, but counts what other engines of the same class compiled, those that are gone included.
    """
    running = CompileContext.current_compile_id()
    frame = None if running is None else running.frame_id
    options.frames[frame] = count = options.frames.get(frame, 0) + 1
    # Behind a graph break each layer has a graph of its own, for its own FP8 values.
    most = MOST_GRAPHS + (8 * len(options.schemes) if options.cache_weights else 0)
    if count > most:
        raise CaptureError(
            f"one function of the model was compiled {most} times, each time for other inputs; pad them to a few "
            "sizes, or keep what changes at every call out of Python numbers (TORCH_LOGS=recompiles says why)"
        )


def _guarded(
    graph: fx.Graph, example_inputs: Sequence[Any], options: BackendOptions, kept: Sequence[KeptGroup]
) -> Callable[..., Callable[..., Any]]:
    """Have a graph of a part of the model run only for layers of its formats. Returns what notes these layers."""
    if options.parameters is None or not options.schemes:
        return lambda run, note: run
    known = KnownParameters(options.parameters, options.schemes)
    own = {i for group in kept for i in group.inputs}
    weights = shared_weights(graph, example_inputs, known, own)
    guard(weights, known)
    return lambda run, note: noting(run, weights, known, note, options.calls_made.ran)


def keep_draws(graph_module: fx.GraphModule, *, outside: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have single random numbers that nothing reads (LayerDrop's) drawn as in eager mode: AOTAutograd would drop them.

    The CPU's generator also orders data and, on a CPU, makes dropout's masks. There each number is drawn in its place,
    as one more output. Returns what goes around the compiled graph; with `outside` that draws all, so that a GPU's
    graph keeps nothing of the CPU.
    """
    found = draws(graph_module.graph)
    count, output = len(found), graph_module.graph.output_node()
    if not count:
        return lambda run: run
    if outside:
        for node in found:
            graph_module.graph.erase_node(node)
    else:
        output.args = ((*output.args[0], *found),)  # type: ignore[misc]
    graph_module.recompile()

    def around(run: Callable[..., Any]) -> Callable[..., Any]:
        def after_draws(*inputs: Any) -> Any:
            torch.rand(count)
            return run(*inputs)

        return after_draws if outside else lambda *inputs: run(*inputs)[:-count]

    return around


def _with_deferred_logits(run: Callable[..., Any], deferred: Sequence[DeferredOutput]) -> Callable[..., Any]:
    """Return logits that are computed when somebody looks at them, where the graph returns the head's input."""
    if not deferred:
        return run

    def wrapped(*inputs: Any) -> Any:
        outputs = list(run(*inputs))
        for item in reversed(deferred):  # each has put its target behind the outputs
            target = outputs.pop()
            bias = None if item.bias_input is None else inputs[item.bias_input]
            bias = bias if bias is None or bias.dim() == 1 else bias.view(-1)
            operands = (outputs[item.indices[0]], inputs[item.weight_input], bias)
            logits, loss = defer(operands, outputs[item.loss], target, item.factor(inputs), item.how)
            for index in item.indices:
                outputs[index] = logits
            outputs[item.loss] = loss
        return tuple(outputs)

    return wrapped


def rewrite(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: BackendOptions
) -> list[DeferredOutput]:
    """The passes on Dynamo's graph and on those nested in it. Returns the outputs that are deferred logits."""
    return _rewrite(graph_module, parameter_names(graph_module.graph, example_inputs, options.parameters), options)


def _rewrite(
    graph_module: fx.GraphModule,
    weights: Mapping[str, tuple[str, ...]],
    options: BackendOptions,
    outer: Mapping[str, fx.Node] | None = None,
) -> list[DeferredOutput]:
    """Nested graphs first: they may ask how the outer one makes their masks, which `outer` says."""
    _rewrite_nested(graph_module, weights, options)
    work = Work(options=options, weights=weights, outer=outer)
    pipeline.run(pipeline.DYNAMO, graph_module.graph, work)
    graph_module.recompile()
    return work.deferred


def _rewrite_nested(
    graph_module: fx.GraphModule, weights: Mapping[str, tuple[str, ...]], options: BackendOptions
) -> None:
    """The passes on nested graphs: once for all layers of equal formats that run one, else on a copy for each."""

    def kind_of(operand: fx.Node) -> object:
        names = weights.get(operand.name, ())
        # Kept FP8 values belong to one weight.
        return names if options.cache_weights or not names else scheme_of(names, options.schemes)[1]

    separate(graph_module, kind_of)
    for body, calls in nested(graph_module):
        each = [{inner: weights[node.name] for inner, node in c.items() if node.name in weights} for c in calls]
        # A nested graph's outputs belong to the graph around it: nothing of it can be deferred.
        inside = replace(options.for_one_graph(), fuse_head=False)
        _rewrite(body, each[0], inside, in_common(calls))
        for names in each:
            options.add_paths(inside, renamed([(each[0][inner], names[inner]) for inner in names], options.schemes))


def keep_codes(graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: BackendOptions) -> list[KeptGroup]:
    """Let the FP8 linears of a rewritten graph, and of those nested in it, read kept FP8 values. Returns the groups."""
    names = parameter_names(graph_module.graph, example_inputs, options.parameters)
    placeholders = [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]
    taken: dict[int, KeptGroup] = {}

    def keep(module: fx.GraphModule, inputs: Mapping[str, tuple[int, tuple[str, ...]]]) -> None:
        for body, (operands, *_) in nested(module):
            keep(body, {inner: inputs[node.name] for inner, node in operands.items() if node.name in inputs})
        count = cache_weights(module, inputs, example_inputs, options.weight_cache, taken)
        options.note("cached_weights", count)

    keep(graph_module, {name: (i, names[name]) for i, name in enumerate(placeholders) if name in names})
    name_sources(graph_module)
    return list(taken.values())


def parameter_names(
    graph: fx.Graph,
    example_inputs: Sequence[Any],
    parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Placeholder name -> the names of the parameter it stands for, several where it is tied.

    Identity decides where the model is known: after a graph break Dynamo names tensors from the middle of the model.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if parameters is None:
        named = ((node.name, _name_from_source(node)) for node in placeholders)
        return {name: (parameter,) for name, parameter in named if parameter}
    names: dict[int, tuple[str, ...]] = {}
    for name, parameter in parameters():
        names[id(parameter)] = (*names.get(id(parameter), ()), name)
    pairs = zip(placeholders, example_inputs, strict=True)
    return {node.name: names[id(value)] for node, value in pairs if id(value) in names}


def _name_from_source(node: fx.Node) -> str:
    """A parameter's name as Dynamo says where the tensor came from, "" where it is none."""
    source = getattr(node.meta.get("grapharg"), "source", None) or getattr(node, "_dynamo_source", None)
    if source is None:
        return ""
    text = source.name() if callable(source.name) else source.name
    return ".".join(re.findall(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", text))


def _eagerly(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: BackendOptions
) -> Callable[..., Any]:
    work = Work(options=options)

    def compiler(inner: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        pipeline.run(pipeline.COMPILED, inner.graph, work)
        for view in inner.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            view.target = torch.ops.aten.reshape.default  # an eager kernel may lay its output out as tracing does not
        inner.recompile()
        return make_boxed_func(inner.forward)

    def partition(joint: fx.GraphModule, *operands: Any, **how: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        pipeline.run(pipeline.JOINT, joint.graph, work)
        return default_partition(joint, *operands, **how)

    compilers = {"fw_compiler": compiler, "bw_compiler": compiler}
    return aot_autograd(**compilers, partition_fn=partition)(graph_module, example_inputs)


def _with_inductor(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: BackendOptions
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    from deepwell.engine.calls.replay import Replay, compiling
    from deepwell.engine.inductor_ops import register_ops

    register_ops()

    class Level(CustomGraphPass):
        def __init__(self, level: str) -> None:
            self.level = level

        def __call__(self, graph: fx.Graph) -> None:
            pipeline.run(self.level, graph, Work(options=options))

        def uuid(self) -> Any:
            if self.level == pipeline.COMPILED and options.registry is not None:
                return None  # compiled code names kernels of this process: it is kept for no other
            how = f"{self.level} {options.recompute} {options.row_factors} {LEAST_FLOPS}"
            return get_hash_for_files(pipeline.files(), how)

    patches: dict[str, Any] = {
        "post_grad_custom_pre_pass": Level(pipeline.COMPILED),
        "joint_custom_pre_pass": Level(pipeline.JOINT),
    }
    if options.cuda_graphs is False or not any(
        isinstance(value, torch.Tensor) and value.is_cuda for value in example_inputs
    ):
        return compile_fx(graph_module, list(example_inputs), config_patches=patches)  # type: ignore[return-value]
    replay = Replay("always" if options.cuda_graphs else "measured")
    options.replays.append(replay)

    def inner_compile(*given: Any, **how: Any) -> Any:
        with compiling(replay):  # of a backward that is compiled when it is first needed
            return compile_fx_inner(*given, **how)

    patches |= {"triton.cudagraphs": True, "graph_partition": False}
    with compiling(replay):
        run: Any = compile_fx(graph_module, list(example_inputs), inner_compile, config_patches=patches)
    return lambda *inputs: replay.outputs(run(*inputs))
