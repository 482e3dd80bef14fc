"""Trace any nn.Module into one FX graph of torch-level ops, with the names of everything that goes in.

Four tracers, tried in order; what failed before the one that worked is kept with its reason:

    dynamo   torch.compile's front end with a backend that only takes the graph: F.linear, F.embedding ... as a compiler
             backend sees them. Nothing runs; works on the meta device.
    eval     the same in evaluation mode: for forwards that decide by random numbers in training (LayerDrop above 0).
             Without dropout.
    export   torch.export without Dynamo (aten ops, not decomposed): for forwards that Dynamo cannot read but that
             decide nothing by values.
    record   runs the model and writes down each torch call: the last resort for forwards that read values (`.item()`,
             loops over chosen experts). The graph then holds for the example's values only and is `specialized`.

The model, its config, its random states and Dynamo's settings are left as they were.
"""

import copy
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import pgo

from deepwell.errors import CaptureError, ConfigError
from deepwell.graph.dedupe import stub_duplicates
from deepwell.graph.example_inputs import DEFAULT_BATCH, ExampleInputs, other_lengths, resolve_inputs
from deepwell.graph.layer_drop import layer_drop_decided
from deepwell.graph.preserve import (
    choose_traceable_implementations,
    fill_meta_tensors,
    preserved,
    see_whole,
    written_class,
)
from deepwell.graph.record import record
from deepwell.kernels.experts.spelled_out import spelled_out

TRACERS = ("dynamo", "eval", "export", "record")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """A tracer that failed: the error's class, the first line of its message, and the user's line where it happened."""

    tracer: str
    error: str
    reason: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.tracer}: {self.error}: {self.reason}" + (f" (at {self.where})" if self.where else "")


class TraceError(CaptureError):
    """No tracer gave a graph; `attempts` holds the reason of each."""

    def __init__(self, model_class: str, attempts: tuple[FailedAttempt, ...]) -> None:
        reasons = "; ".join(str(attempt) for attempt in attempts)
        super().__init__(f"{model_class} could not be traced: {reasons}")
        self.attempts = attempts

    @property
    def is_refusal(self) -> bool:
        """Whether the model itself, run eagerly, did not accept the call: other inputs may do."""
        return self.attempts[-1].tracer == "record" and self.attempts[-1].error != CaptureError.__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """One input of the graph: `kind` is parameter, buffer, input or constant; `names` are all its names."""

    node: str
    kind: str
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.names[0] if self.names else self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One graph of a model. Nodes carry `meta[...]`: `example_value` (fake tensors), `module_path`, `module_class`.

    `stubbed` maps each layer that was passed through to the layer that was traced in its place.
    """

    model_class: str
    graph_module: fx.GraphModule
    tracer: str
    specialized: bool
    training: bool
    placeholders: tuple[Placeholder, ...]
    stubbed: Mapping[str, str] = field(default_factory=dict)
    batch: int | None = None
    seq_len: int | None = None
    attempts: tuple[FailedAttempt, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    @property
    def inputs(self) -> tuple[Placeholder, ...]:
        """The placeholders that the user feeds."""
        return tuple(p for p in self.placeholders if p.kind == "input")

    @property
    def parameter_names(self) -> frozenset[str]:
        """Every name of every parameter that the graph reads."""
        return frozenset(name for p in self.placeholders if p.kind == "parameter" for name in p.names)

    def by_node(self) -> dict[str, Placeholder]:
        return {p.node: p for p in self.placeholders}


def trace(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    batch: int = DEFAULT_BATCH,
    seq_len: int | None = None,
    deduplicate: bool | None = None,
    tracers: tuple[str, ...] = TRACERS,
) -> Traced:
    """One FX graph of `model(*example_inputs)`.

    `example_inputs` is a tensor, a tuple of arguments or a dict of keyword arguments; without it inputs are guessed
    (token ids and labels for language models, else from the first layer) with `batch` and `seq_len`. `deduplicate`
    traces one layer of each kind (default: where that saves). Raises CaptureError where inputs cannot be guessed and
    TraceError, with the reason of each tracer, where none gives one graph.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    if not tracers or not set(tracers) <= set(TRACERS):
        raise ConfigError(f"tracers is {tracers!r}; choose one or more of {', '.join(TRACERS)}")
    model = getattr(model, "_orig_mod", model)  # the user's own torch.compile wrapper would be traced through
    inputs = resolve_inputs(model, example_inputs, batch, seq_len)
    refused: TraceError | None = None
    for call in (inputs, *(other_lengths(model, inputs) if seq_len is None else ())):
        try:
            return _trace_call(model, call, deduplicate, tracers)
        except TraceError as error:
            refused = refused or error
            if not error.is_refusal:
                break
    assert refused is not None, "the loop ends without a result only after an error"
    raise refused


def _trace_call(model: nn.Module, inputs: ExampleInputs, deduplicate: bool | None, tracers: tuple[str, ...]) -> Traced:
    """What the first tracer that works makes of one given call."""
    attempts: list[FailedAttempt] = []
    for tracer in tracers:
        if tracer == "eval" and not model.training and "dynamo" in tracers:
            continue
        for wanted in (deduplicate, False) if deduplicate is not False else (False,):
            stubbed: dict[str, str] = {}
            try:
                with (
                    preserved(model, values=tracer in ("export", "record")),
                    spelled_out(),
                    torch.enable_grad(),
                    quiet(),
                ):
                    choose_traceable_implementations(model)
                    see_whole(model)
                    if tracer == "eval":
                        model.eval()
                    stubbed = stub_duplicates(model, inputs, wanted=wanted)
                    call = fill_meta_tensors(model, inputs, skip=stubbed) if tracer in ("dynamo", "eval") else inputs
                    found = _FUNCTIONS[tracer](model, call)
            except MODEL_ERRORS as error:
                attempts.append(_attempt(tracer, error))
                if stubbed:
                    continue  # a layer may need what a passed-through one would have left: try the whole model
                break
            return Traced(
                model_class=written_class(model),
                graph_module=found.graph_module,
                tracer=tracer,
                specialized=found.specialized,
                training=model.training and tracer != "eval",
                placeholders=found.placeholders,
                stubbed=stubbed,
                batch=inputs.batch,
                seq_len=inputs.seq_len,
                attempts=tuple(attempts),
            )
    raise TraceError(type(model).__name__, tuple(attempts))


_SILENT = (
    "_dynamo.metrics_context",  # torch 2.11 cannot write our settings of Dynamo into its metrics (a set of functions)
    "_subclasses.fake_tensor",  # the stack of each guessed input that a model cannot take: the IR's notes have a line
    "fx.experimental.symbolic_shapes",  # where a value that decides is read from: the attempt says so
)


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings of half-run models (deprecations, meta tensors) tell the user nothing about the trace.

    Nor do the loggers of _SILENT.
    """
    loggers = [logging.getLogger(f"torch.{name}") for name in _SILENT]
    were_disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, was_disabled in zip(loggers, were_disabled, strict=True):
            logger.disabled = was_disabled


# ---- the tracers ----


@dataclass(slots=True)
class _TracedGraph:
    graph_module: fx.GraphModule
    placeholders: tuple[Placeholder, ...]
    specialized: bool = False


class _GraphTaken(Exception):
    """Raised by the capturing backend once it has the graph: guards and code that nobody will run need not be made."""


def _by_dynamo(model: nn.Module, inputs: ExampleInputs) -> _TracedGraph:
    taken: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(graph_module: fx.GraphModule, example_tensors: list[Any]) -> Callable[..., Any]:
        taken.append((graph_module, example_tensors))
        raise _GraphTaken

    try:
        with torch._dynamo.config.patch(dynamo_settings()), shapes_forgotten(), layer_drop_decided():
            torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*inputs.args, **inputs.kwargs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, _GraphTaken):
            raise
    if len(taken) != 1:
        raise CaptureError(f"Dynamo gave {len(taken)} graphs for {type(model).__name__}, not one")
    module, tensors = taken.pop()  # not to be held on to by the backend, which Dynamo keeps
    names = TensorNames(model, inputs)
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    placeholders = tuple(names.placeholder(node, value) for node, value in zip(nodes, tensors, strict=True))
    for node in nodes:
        node.meta.pop("grapharg", None)  # holds the user's tensors
    _tidy(module)
    note_modules(module, model)
    return _TracedGraph(module, placeholders)


@contextmanager
def shapes_forgotten() -> Iterator[None]:
    """Keep from Dynamo which sizes the example had: a size seen twice with two values is compiled as a symbol.

    Not `torch._dynamo.reset()`, which would also throw away what others compiled, CUDA graphs included.
    """
    kept = copy.deepcopy(pgo._CODE_STATE)
    try:
        yield
    finally:
        pgo._CODE_STATE = kept


def dynamo_settings() -> dict[str, Any]:
    """Settings under which most models are one graph: values may be read into it, log lines do not break it."""
    settings: dict[str, Any] = {
        "capture_scalar_outputs": True,
        "capture_dynamic_output_shape_ops": True,
        "specialize_float": True,
        "allow_rnn": True,
        "suppress_errors": False,
        "assume_static_by_default": True,
        "automatic_dynamic_shapes": False,
        # Every trace is one more compilation of the same code.
        "recompile_limit": 1 << 20,
        "accumulated_recompile_limit": 1 << 20,
    }
    methods = ("debug", "info", "warning", "error", "warning_once", "info_once", "warning_advice")
    loggers = {getattr(logging.Logger, name) for name in methods if hasattr(logging.Logger, name)} | {warnings.warn}
    # The newer name of the setting also covers plain functions such as warnings.warn; torch 2.11 may know the older one
    # only.
    known = (
        "ignore_logging_functions"
        if hasattr(torch._dynamo.config, "ignore_logging_functions")
        else "ignore_logger_methods"
    )
    settings[known] = getattr(torch._dynamo.config, known) | loggers
    return {name: value for name, value in settings.items() if hasattr(torch._dynamo.config, name)}


def _by_export(model: nn.Module, inputs: ExampleInputs) -> _TracedGraph:
    said = io.StringIO()
    # A graph that is not finished is printed there; the error itself is in the notes.
    with redirect_stderr(said), _buffer_hooks_kept():
        program = torch.export.export(model, inputs.args, dict(inputs.kwargs), strict=False)
    print(said.getvalue(), end="", file=sys.stderr)
    module = program.graph_module
    names = TensorNames(model, inputs)
    nodes = {node.name: node for node in module.graph.nodes if node.op == "placeholder"}
    placeholders = []
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        kind = torch.export.graph_signature.InputKind
        if spec.kind is kind.PARAMETER:
            placeholders.append(names.placeholder(node, model.get_parameter(spec.target)))
        elif spec.kind is kind.BUFFER:
            placeholders.append(Placeholder(node=node.name, kind="buffer", names=(str(spec.target),)))
        elif spec.kind is kind.USER_INPUT and isinstance(node.meta.get("val"), torch.Tensor):
            placeholders.append(Placeholder(node=node.name, kind="input", names=(node.name,)))
        else:
            placeholders.append(Placeholder(node=node.name, kind="constant", names=(str(spec.target or node.name),)))
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    note_modules(module, model)
    return _TracedGraph(module, tuple(placeholders))


@contextmanager
def _buffer_hooks_kept() -> Iterator[None]:
    """Take back what a failed export of torch 2.11 leaves: a hook that refuses real tensors as the model's buffers."""
    hooks = nn.modules.module._global_buffer_registration_hooks
    before = set(hooks)
    try:
        yield
    finally:
        for key in set(hooks) - before:
            del hooks[key]


def _by_record(model: nn.Module, inputs: ExampleInputs) -> _TracedGraph:
    recording = record(model, inputs)
    names = TensorNames(model, inputs)
    nodes = [node for node in recording.graph_module.graph.nodes if node.op == "placeholder"]
    placeholders = tuple(names.placeholder(node, value) for node, value in zip(nodes, recording.values, strict=True))
    return _TracedGraph(recording.graph_module, placeholders, specialized=recording.reads_values)


_FUNCTIONS: dict[str, Callable[[nn.Module, ExampleInputs], _TracedGraph]] = {
    "dynamo": _by_dynamo,
    "eval": _by_dynamo,
    "export": _by_export,
    "record": _by_record,
}


# ---- names ----


class TensorNames:
    """Which tensor is what in the model and the call, by identity: tied parameters keep all their names."""

    def __init__(self, model: nn.Module, inputs: ExampleInputs) -> None:
        self._known: dict[int, tuple[str, list[str]]] = {}
        for kind, tensors in (
            ("parameter", model.named_parameters(remove_duplicate=False)),
            ("buffer", model.named_buffers(remove_duplicate=False)),
            ("input", inputs.named_tensors(model).items()),
        ):
            for name, tensor in tensors:
                self._known.setdefault(id(tensor), (kind, []))[1].append(name)

    def placeholder(self, node: fx.Node, value: Any) -> Placeholder:
        kind, names = self._known.get(id(value), ("constant", [node.name]))
        return Placeholder(node=node.name, kind=kind, names=tuple(names))


def note_modules(module: fx.GraphModule, model: nn.Module) -> None:
    """Write path and class of each node's innermost module into its meta, alike for every tracer and torch version."""
    paths = {str(id(m)): name for name, m in reversed(list(model.named_modules(remove_duplicate=False)))}
    for node in module.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        path, module_class = "", type(model).__name__
        if stack and node.op != "placeholder":
            key, (written, owner) = list(stack.items())[-1]
            # Dynamo keys the stack by id(module), with "@n" for the n-th call; export writes the path itself.
            path = paths.get(str(key).split("@", maxsplit=1)[0], str(written).removeprefix("L['self']").lstrip("."))
            module_class = owner.__name__ if isinstance(owner, type) else str(owner).rsplit(".", maxsplit=1)[-1]
        node.meta["module_path"], node.meta["module_class"] = path, module_class


def _tidy(module: fx.GraphModule) -> None:
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is torch._C._log_api_usage_once:
            module.graph.erase_node(node)
    module.recompile()


# ---- failures ----

# What a model's own forward raises when a tracer runs it. Anything else (KeyboardInterrupt, MemoryError) is not a
# reason to go on.
MODEL_ERRORS = (
    RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError, ImportError,
    NameError,
)  # fmt: skip


def _attempt(tracer: str, error: BaseException) -> FailedAttempt:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return FailedAttempt(
        tracer=tracer, error=type(error).__name__, reason=lines[0] if lines else "no message", where=_user_frame(error)
    )


def _user_frame(error: BaseException) -> str:
    """The innermost line of the user's (or the model library's) code: not in torch, not in Deepwell."""
    frames = list(getattr(error, "real_stack", None) or []) or list(traceback.extract_tb(error.__traceback__))
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    for frame in reversed(frames):
        if not frame.filename.startswith(own) and not frame.filename.startswith("<"):
            return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
    return ""
