"""What an engine is beside its model: formats and bindings, the compiled graphs, and the report of what ran."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.utils.hooks import RemovableHandle

from deepwell.engine.backend import backend_of, tracing
from deepwell.engine.binding import (
    Bound,
    Fragile,
    LeftAlone,
    as_model_runs_them,
    further_uses,
    with_gains,
    without_fragile,
)
from deepwell.engine.calls.experts_choice import GroupedExperts
from deepwell.engine.fragile import FragileReport, check_fragile
from deepwell.engine.live_parameters import LiveParameters
from deepwell.engine.overrides import Key, Overrides
from deepwell.engine.passes.work import BackendOptions
from deepwell.engine.recompute import LayerRecompute
from deepwell.engine.regions import Regions, has_module, is_left_out, is_sharded
from deepwell.engine.report import NOTHING_COMPILED, EngineReport
from deepwell.engine.times.gemms import with_times
from deepwell.engine.times.ops import measure_calls
from deepwell.errors import ConfigError, DeepwellError, UnsupportedError
from deepwell.graph.ir import IR
from deepwell.graph.lift.called import with_roles_of_call
from deepwell.graph.ops import GroupedLinear
from deepwell.kernels.tune.choose import decided
from deepwell.planner.plan import Plan
from deepwell.precision.gemm_format import Precision
from deepwell.precision.policy import PrecisionPolicy

# What the linears' formats at a step are bound to under these overrides, and the options to compile them with.
BindAt = Callable[[IR, int, Overrides], tuple[Bound, BackendOptions]]

# Where the roles of linears come from, for the report.
_PREVIEWS = {
    False: "roles of linears (head, router ...) are those of the captured graph; the first call's graph decides",
    True: "roles of linears (head, router ...) are read from names in the module tree; the first call's graph decides",
}
_ROLES_OF_CALL = "roles of linears (head, router ...) are those in the graphs of the calls so far"

# Training and evaluation at fixed and open sizes are so many graphs of a function; the next may come from a counter.
_GRAPHS_BEFORE_COUNTERS = 4
# Where Dynamo counts why it left something to Python; not all of the second kind ends a graph.
_BREAKS = ("graph_break", "unimplemented")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Runtime:
    """All that belongs to an engine and not to its model: `engine.deepwell`.

    `model` is the model, `ir` what was captured of it, `policy` and `plan` what was asked for, `bound` what that is
    bound to at `step`, `options` how it is compiled and what the passes did. `engine` is the engine itself.
    """

    def __init__(
        self,
        ir: IR,
        bound: Bound,
        policy: PrecisionPolicy,
        *,
        options: BackendOptions,
        device: str,
        bind_at: BindAt | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.model = model = ir.require_module()
        self.engine: Any = None  # who is called, set by the engine itself; its `generate` is the other
        self.generation: Any = None
        self.ir, self.policy, self.plan = ir, policy, plan
        self.live = LiveParameters(model)
        self.device_name, self.device_type = device, _device_type(model)
        self.breaks: dict[str, int] = {}
        self.regions: Regions | None = None
        self.recomputed: LayerRecompute | None = None
        self.overrides = Overrides()
        self.fragile: dict[object, Fragile] = {}
        self._experts = GroupedExperts(model)
        self.bind_at, self._phases = bind_at, dict[object, tuple[BackendOptions, Callable[..., Any]]]()
        self._changes = policy.changes(ir) if bind_at is not None else ()
        self._is_stale, self._roles = False, _PREVIEWS[ir.source == "static"]
        self._hooks_made, self._has_hooks = -1, False
        # An outer torch.compile leaves a call of the engine to the engine.
        self.run = torch._dynamo.disable(self._run, reason="deepwell: an engine compiles its model by itself")
        self._enter(0, bound, options)

    def at_step(self, step: int) -> Any:
        """Bind what the policy says of a training step, and return the engine itself; call it before that step.

        Between two steps at which the policy changes nothing happens. Where formats do change, the model is compiled
        for them at the next call; formats that were bound before are there already.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"step is {step!r}; it must be a whole number from 0 on")
        span = max((change for change in self._changes if change <= step), default=0)
        if span != self.step:
            assert self.bind_at is not None, "formats that change can be bound"
            self._enter(span, *self.bind_at(self.ir, span, self.overrides))
        return self.engine

    def override(self, changes: Mapping[Key, str | Precision | None], reason: str) -> Any:
        """Give single GEMMs of single layers another format from the next call on, and return the engine itself.

        `changes` maps (module path, "fwd", "dgrad" or "wgrad") to the format that the GEMM has at least, or to None,
        which takes an override back. The policy stands where it asks for more bits at a step. The report shows the
        reason. Formats that were compiled before are not compiled again.
        """
        return self.set_overrides(self.overrides.changed(changes, reason, self.policy.resolve(self.ir, self.step)))

    def set_overrides(self, overrides: Overrides) -> Any:
        """Replace all overrides, as a resumed run does: `Overrides.from_dict` of `engine.overrides.to_dict()`."""
        if self.bind_at is None:
            raise UnsupportedError("this engine's formats cannot change; make it with dw.compile")
        known = self.policy.resolve(self.ir, self.step)
        foreign = [row.path for row in overrides.rows if row.path not in known]
        if foreign:
            raise ConfigError(f"overrides name {foreign[0]}, which is no linear layer of {self.ir.name}")
        bound, options = self.bind_at(self.ir, self.step, overrides)  # may raise where fallback="strict"
        self.overrides = overrides
        self._enter(self.step, bound, options)
        return self.engine

    def check_fragile(self, batch: Any, *, strict: bool = False, floor_db: float | None = None) -> FragileReport:
        """Keep in bf16 what the formats of this step would spoil, by one batch of the model as it was written.

        `batch` is a dict of keyword arguments (with labels, so that there is a loss), a tuple of arguments or a tensor.
        Each GEMM whose signal to noise is below the floor of its formats (`floor_db` replaces them) stays in bf16 from
        the next call on, with that reason in the report; `strict` raises UnsupportedError instead.
        """
        bound = self.bound if self.bind_at is None else self.bind_at(self.ir, self.step, self.overrides)[0]
        with self._experts.as_products():
            found = check_fragile(self.model, bound, batch, floor_db=floor_db)
        if strict and found.fragile:
            first = found.fragile[0]
            more = f" and {len(found.fragile) - 1} more" if len(found.fragile) > 1 else ""
            raise UnsupportedError(f"{first.path}: {first.scheme} is {first.reason}{more}; fallback='safe' keeps bf16")
        keys: dict[object, Fragile] = {(row.path, row.gemm, row.scheme): row for row in found.rows}
        self.fragile = {**self.fragile, **keys}
        self._enter(self.step, bound, self.options)
        return found

    def _enter(self, step: int, bound: Bound, options: BackendOptions) -> None:
        """Make the bindings of a span of steps the engine's own; equal schemes share one compiled model."""
        if self.fragile:
            bound = without_fragile(bound, self.fragile.values())
            options = options.for_schemes(bound.schemes)
        key = tuple(sorted(bound.schemes.items()))
        if options.parameters is None:
            options.parameters = self.live
        if key not in self._phases:
            if self.regions is not None:
                options.cuda_graphs = False  # between layers Python works
            is_eager = self.regions is not None or options.is_as_written
            compiled = self.model if is_eager else torch.compile(self.model, backend=backend_of(options))
            self._phases[key] = (options, compiled)
            options.see = _seen_by(self)
        self.step, self.bound = step, bound
        self.options, self._compiled = self._phases[key]
        if self.regions is not None:
            self.regions.enter(self.options)

    def see(self, options: BackendOptions, graph_module: Any, example_inputs: Sequence[Any]) -> None:
        """Decide roles by what runs: a graph that shows others than the capture did is compiled for its own formats."""
        if options is not self.options or self.bind_at is None:
            return
        ir = with_roles_of_call(self.ir, graph_module, example_inputs)
        self._roles = _ROLES_OF_CALL
        if ir is self.ir:
            return
        bound, _ = self.bind_at(ir, self.step, self.overrides)
        bound = without_fragile(bound, self.fragile.values()) if self.fragile else bound
        others = {path for path in options.rewritten if bound.schemes.get(path) != options.schemes.get(path)}
        # A graph before this one multiplies some of them in formats of another role: all is compiled anew for the next
        # call. So are the formats of other steps.
        self._is_stale = self._is_stale or bool(others)
        options.schemes = bound.schemes
        self._phases = {tuple(sorted(bound.schemes.items())): (options, self._compiled)}
        self.ir, self.bound = ir, bound
        self._changes = self.policy.changes(ir)

    def use_regions(self, inner: Sequence[str] = ()) -> Regions:
        """Compile each layer by itself from the first call on, and leave what is between them to Python.

        For models under FSDP2, DDP, tensor, pipeline and expert parallelism, which work between layers; on one device
        one graph of the whole model is faster. It replaces the forward of the model's own modules. `inner` are paths of
        modules in layers that are regions of their own: see `engine/regions.py`.
        """
        if self.options.was_called:
            raise ConfigError("use_regions: the engine was called already; call it before the first step")
        if self.regions is not None:
            raise ConfigError("use_regions: the engine has its regions already")
        if self.options.cuda_graphs:
            raise UnsupportedError(
                "cuda_graphs=True records the whole model, and compiled regions have Python between them; leave one out"
            )
        regions = Regions(self.ir, self._running, inner)
        self.regions = regions
        if self.recomputed is not None:
            regions.recompute(self.recomputed)
        self._phases.clear()
        self._enter(self.step, self.bound, self.options)
        return regions

    def recompute(self, layers: LayerRecompute) -> None:
        """Compute these layers again in the backward instead of keeping what they hold."""
        self.recomputed = layers
        if self.regions is not None:
            self.regions.recompute(layers)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._check_devices(args, kwargs)
        if not self.options.was_called:
            self._check_sharded()
        self._see_hooks()
        if self._is_stale and self.bind_at is not None:
            self._is_stale = False
            self._phases.clear()
            self._enter(self.step, *self.bind_at(self.ir, self.step, self.overrides))
        options = self.options
        before = {kind: dict(counters[kind]) for kind in _BREAKS}
        options.calls_made.begin()
        recomputed = self.recomputed.applied() if self.recomputed is not None else nullcontext()
        running: AbstractContextManager[None] = self._running() if self.regions is None else self.regions.running()
        if self.regions is None and self.options.is_as_written:
            running = nullcontext()
        args, kwargs = _each_once(args, kwargs)
        try:
            with running, recomputed:
                out = self._compiled(*args, **kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, DeepwellError):
                raise error.inner_exception from error
            raise
        except NotImplementedError as error:
            if "jvp" not in str(error):
                raise
            raise UnsupportedError(
                "an engine has no forward-mode gradients of dual tensors: torch.func.jvp runs the model as it was "
                "written, and so does engine.deepwell.model"
            ) from error
        new: dict[str, int] = {}
        if self.regions is None:  # a region is one graph or an error, and between them Python is what is wanted
            self.breaks.update(new := _new("graph_break", before))
            new = new or _new("unimplemented", before)
        if not _runs_eagerly():  # a call that was to run eagerly, as a sample is, says nothing of the others
            self._see_call(options, new)
        return out

    @property
    def is_settled(self) -> bool:
        """Whether all graphs so far run as they will: those that may be replayed take some ten calls to show it."""
        return self.options.was_called and all(replay.is_settled for replay in self.options.replays)

    @property
    def is_replayed(self) -> bool:
        """Whether forward and backward are CUDA graphs by now."""
        return any(replay.state == "replayed" for replay in self.options.replays)

    def _see_call(self, options: BackendOptions, breaks: Mapping[str, int]) -> None:
        """Warn of the first call, and of a later one, that ran linears with a format as they were written.

        A model that silently runs in high precision is not what its user asked for. A call that only did not need a
        linear is none of these: Dynamo gave up nothing in it.
        """
        is_first, options.was_called = not options.was_called, True
        if not options.schemes:
            return
        has_run, missed = options.calls_made.end(options.rewritten)
        left: Collection[str] = self._unmet() if is_first else missed if breaks else ()
        reason = f"Dynamo broke the graph ({_first_line(next(iter(breaks)))})" if breaks else ""
        is_news = bool(breaks)
        if not has_run:
            left, is_news = left or options.schemes, options.calls_made.bare == 1
            reason = reason or ("no compiled graph ran in this call" if options.graphs else NOTHING_COMPILED)
            if is_news and not breaks and not torch._C._len_torch_dispatch_stack():
                _try_again(self.model)
                reason += "; the next call tries again"
        if not left or not is_news:
            return
        self.breaks.update(breaks)
        warnings.warn(
            f"deepwell: of {len(options.schemes)} linears of {self.ir.name} with a format, {len(left)} run as "
            f"they were written, in {self.ir.dtype}: {reason}. engine.deepwell.report() names them. Move what breaks "
            "the graph out of the loop over the layers, or give each layer a module of its own",
            stacklevel=2,
        )

    @contextmanager
    def _running(self) -> Iterator[None]:
        """The settings that the engine's graphs are compiled and found again under."""
        with tracing(self._dynamo_settings()), self._experts.applied():
            yield

    def _see_hooks(self) -> None:
        """Compile anew, with guards on hooks, where modules have got their first ones since the last call.

        Dynamo has no guards on modules without hooks, which is right for most and saves half of a call's guards.
        """
        if self._has_hooks or self._hooks_made == RemovableHandle.next_id or _runs_eagerly():
            return
        self._hooks_made = RemovableHandle.next_id
        self._has_hooks = any(getattr(module, name) for module in self.model.modules() for name in _HOOKS)
        self._is_stale = self._is_stale or (self._has_hooks and self.options.was_called)

    def _check_sharded(self) -> None:
        """Before the first call, once the user has had the chance to shard the model."""
        if self.recomputed is not None and self.regions is None and is_sharded(self.model):
            self.use_regions()  # Dynamo would run checkpointed layers with FSDP2's hooks as they were written

    def _dynamo_settings(self) -> dict[str, Any]:
        # A whole number that a module counts up in its forward would be a constant of every graph.
        counts = max(self.options.frames.values(), default=0) >= _GRAPHS_BEFORE_COUNTERS
        open_numbers = {"allow_unspec_int_on_nn_module": counts or torch._dynamo.config.allow_unspec_int_on_nn_module}
        hooks = {"skip_nnmodule_hook_guards": not self._has_hooks}
        return {**hooks, **open_numbers}

    def _check_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ConfigError where the model was moved since, or an input lies elsewhere."""
        now = _device_type(self.model)
        if now != self.device_type:
            raise ConfigError(
                f"this engine was compiled for {self.device_type} and its model is on {now} now; "
                "compile again, or move it back"
            )
        for name, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, torch.Tensor) and value.dim() and value.device.type != now:
                label = f"argument {name}" if isinstance(name, int) else name
                raise ConfigError(f"{label} is on {value.device} and the engine on {now}; call .to({now!r}) on it")

    def report(self, *, measure: bool = False) -> EngineReport:
        """Every GEMM's format, binding and reason, the kernels chosen, and how often each pass fired so far.

        `measure` times every kernel of the compiled graphs, and every linear's GEMMs, at the shapes they have there;
        that takes a few seconds.
        """
        kernels = [*self.options.kernels.values()]
        bindings = with_gains(self.bound.bindings, self.options.gains)
        bindings = as_model_runs_them(bindings, self._unmet(), self._left_at_times())
        if measure:
            kernels += measure_calls(self.options.calls)
            parameter = next(self.model.parameters(), torch.empty(0))
            device, products = str(parameter.device), self.options.products
            bindings = with_times(bindings, products, kernels, device=device, dtype=parameter.dtype)
        return EngineReport(
            model=self.ir.name,
            device=self.device_name,
            bindings=bindings,
            kernels=tuple(kernels),
            passes=dict(self.options.counts),
            graphs=self.options.graphs,
            notes=(*self.ir.notes, *self.bound.notes, *self._notes()),
            step=self.step,
            plan="" if self.plan is None else str(self.plan.layout),
        )

    def _unmet(self) -> dict[str, LeftAlone]:
        """By path, linears and experts with a format whose products were not met in what ran; empty before a call."""
        if not self.options.was_called:
            return {}
        experts = {site.path for site in self.ir.sites() if isinstance(site.op, GroupedLinear)}
        # A stage of a pipeline has a part of the model's layers, and not both ends.
        layers, model = self.ir.layers, self.model
        elsewhere = {
            site.path
            for site in self.ir.sites()
            if (is_left_out(model, site.path) if site.layer is None else not has_module(model, layers[site.layer].path))
        }
        gone = {name.removesuffix(".weight") for name in self.live.gone()}
        by_itself = "the model multiplies its experts by itself (one by one, or in a kernel of its own)"
        nowhere = "no product with its weight was met in what was compiled"
        known, unmet, schemes = self.options.left, self.options.unmet(), self.options.schemes
        again = {path for path, weight in further_uses(self.ir).items() if weight in schemes and weight not in unmet}
        found = {
            path: LeftAlone(dtype=self.ir.dtype, reason=by_itself if path in experts else nowhere)
            if path in experts or path not in known
            else known[path]
            for path in unmet
            if (path in experts or path not in elsewhere) and path not in again
        }
        replaced = LeftAlone(dtype=self.ir.dtype, reason="the model has no such weight any more: it was replaced")
        return found | {path: replaced for path in self.options.schemes if path in gone and path not in elsewhere}

    def _left_at_times(self) -> dict[str, LeftAlone]:
        """By path, linears that ran in their format and also, in another graph or call, as the model has them."""
        calls = self.options.calls_made
        how_often = f"no compiled graph ran in {calls.bare} of {calls.count} calls"
        bare = LeftAlone(dtype=self.ir.dtype, reason=how_often)
        return (dict.fromkeys(self.options.rewritten, bare) if calls.bare else {}) | self.options.left_at_times()

    def _notes(self) -> list[str]:
        """What did not go as the bindings say."""
        notes = [self._roles]
        if self._changes:
            steps = ", ".join(map(str, self._changes))
            notes.append(f"the policy changes at step {steps}; bound now is what it says of step {self.step}: at_step")
        if self.overrides:
            notes.append(f"formats of {len(self.overrides)} GEMMs were changed at run time: engine.deepwell.overrides")
        notes += self._experts.notes()
        if self.recomputed is not None:
            notes.append(f"computed again in the backward: {len(self.recomputed.paths)} of {self.ir.num_layers} layers")
        if not self.options.use_inductor and not self.options.is_as_written:
            notes.append("what no pass touches runs eagerly (AOT eager); inductor=True compiles it")
        kept = self.options.weight_cache
        if self.options.cache_weights and self.options.graphs:
            notes.append(
                f"FP8 values of {len(kept.groups)} groups of weights are kept between calls: "
                f"{kept.num_bytes / 2**20:.1f} MiB"
            )
        for replay in self.options.replays:
            if replay.why:
                how = "are" if replay.state == "replayed" else "are not"
                notes.append(f"forward and backward {how} replayed from CUDA graphs: {replay.why}")
        if count := self.options.counts.get("bias_epilogue"):
            notes.append(f"bias in the epilogue of {count} FP8 products: added in fp32, rounded once")
        for reason in self.breaks:
            notes.append(f"Dynamo broke the graph and each piece was compiled by itself: {_first_line(reason)}")
        notes += self.options.remarks
        if self.options.use_inductor and self.options.graphs and "fused_quantize" not in self.options.counts:
            notes.append("compiled code came from Inductor's cache: what was fused in it was counted when it was made")
        if added := self.live.added():
            notes.append(
                f"weights that came after dw.compile have no format and run as they were written: {_some(added)}"
            )
        if self.device_type == "cuda" and (count := len(decided())):
            where = "deepwell.kernels.KernelRegistry().explain()"
            notes.append(f"{count} kernels were chosen in this process; who competed, and their times: {where}")
        registry = self.options.registry
        for name, reason in registry.aside().items() if registry is not None else ():
            notes.append(f"kernel {name} was rejected: {reason}")
        if self.options.is_as_written and self.regions is None:
            notes.append(f"{NOTHING_COMPILED}: all is in {self.ir.dtype}, which a CPU runs fastest as it was written")
        elif self.options.was_called and not self.options.graphs:
            notes.append(f"{NOTHING_COMPILED}: Dynamo ran the model as it was written, in {self.ir.dtype}")
        calls = self.options.calls_made
        if calls.bare and self.options.graphs:
            notes.append(f"no compiled graph ran in {calls.bare} of {calls.count} calls: all in {self.ir.dtype}")
        if calls.missed:
            paths, most = [p for p in self.options.schemes if p in calls.missed], max(calls.missed.values())
            notes.append(
                f"in up to {most} of {calls.count} calls no graph had a product of {_some(paths)}: where such a call "
                f"ran them, it ran them as the model has them, in {self.ir.dtype}"
            )
        unmet: dict[str, list[str]] = {}
        for path, left in self._unmet().items():
            unmet.setdefault(f", in {left.dtype}" if left.dtype else "", []).append(path)
        for dtype, paths in unmet.items():
            notes.append(f"not met as a product with a parameter in what ran so far{dtype}: {_some(paths)}")
        return notes


def _runs_eagerly() -> bool:
    """Whether this call is to run as the model was written, as a sample does, which has hooks of its own."""
    return torch._dynamo.eval_frame._stance.stance == "force_eager"


def _seen_by(runtime: Runtime) -> Callable[[BackendOptions, Any, Sequence[Any]], None]:
    """Show graphs to an engine that Dynamo, which keeps the options, must not keep alive."""
    known = weakref.ref(runtime)

    def see(options: BackendOptions, graph_module: Any, example_inputs: Sequence[Any]) -> None:
        runtime = known()
        if runtime is not None:
            runtime.see(options, graph_module, example_inputs)

    return see


def _each_once(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with a second tensor over the same memory where one is passed twice, as in labels=input_ids.

    Dynamo would have a graph for that alone, and torch 2.13 raises KeyError where a call before it had the two apart
    and another keyword beside them (docs/gotchas.md). One with a gradient stays.
    """
    seen: set[int] = set()

    def apart(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.requires_grad:
            return value
        if id(value) in seen:
            return value.view_as(value)  # a view to autograd too, which the model may write into
        seen.add(id(value))
        return value

    return tuple(map(apart, args)), {name: apart(value) for name, value in kwargs.items()}


def _device_type(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    if parameter is None:
        return "cpu"
    # Of a shard that FSDP2 keeps in host memory, where it is gathered.
    mesh = getattr(parameter, "device_mesh", None)
    return parameter.device.type if mesh is None else str(mesh.device_type)


def _try_again(model: nn.Module) -> None:
    """Let Dynamo look at a forward again that it left to Python for good when it compiled it for somebody else.

    It remembers that by code, so a hook on one model, long gone, would keep every model of the class from its graphs.
    """
    forward: Any = getattr(model.forward, "__func__", model.forward)
    while forward is not None:
        if hasattr(forward, "__code__"):
            torch._C._dynamo.eval_frame.reset_code(forward.__code__)
        forward = getattr(forward, "__wrapped__", None)


def _new(kind: str, before: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """What Dynamo has counted of a kind since."""
    return {reason: n for reason, n in counters[kind].items() if n != before[kind].get(reason, 0)}


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), text)
