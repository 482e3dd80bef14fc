"""The engine: a model with its kernels bound. Called, trained, saved and loaded like the model it came from."""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from deepwell.engine.backend import compile_graph
from deepwell.engine.binding import Bound, Fragile, LeftAlone, as_model_runs_them, with_gains, without_fragile
from deepwell.engine.experts_choice import GroupedExperts
from deepwell.engine.fragile import FragileReport, check_fragile
from deepwell.engine.generation import generate
from deepwell.engine.kept_grads import KeptGrads
from deepwell.engine.overrides import Key, Overrides
from deepwell.engine.passes.work import BackendOptions
from deepwell.engine.recompute import LayerRecompute
from deepwell.engine.regions import Regions, has_module, is_left_out, is_sharded
from deepwell.engine.report import NOTHING_COMPILED, EngineReport
from deepwell.engine.times.gemms import with_times
from deepwell.engine.times.ops import measure_calls
from deepwell.engine.weight_cache import WeightCache
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.graph.ir import IR
from deepwell.graph.lift.called import with_roles_of_call
from deepwell.graph.ops import GroupedLinear
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

# Training, evaluation, each mixture of fixed and open sizes: a graph each. Past its limit Dynamo would quietly run the
# model as it was written, in high precision; here that is an error.
_DYNAMO = {"recompile_limit": 64, "accumulated_recompile_limit": 1024, "fail_on_recompile_limit_hit": True}
# Under DistributedDataParallel Dynamo would cut the graph at its buckets, behind the engine's back. Compiled regions
# give it the overlap that it does so for.
_DYNAMO["optimize_ddp"] = False
# Its name in torch 2.11 and later.
_IGNORED_LOGGING = next(
    name for name in ("ignore_logging_functions", "ignore_logger_methods") if hasattr(torch._dynamo.config, name)
)


def _tells_the_user_something(record: logging.LogRecord) -> bool:
    """False where torch 2.11 says that it could not write our setting, a set of functions, into its own metrics."""
    return "Unexpected exception logging" not in record.getMessage()


logging.getLogger("torch._dynamo.metrics_context").addFilter(_tells_the_user_something)


@contextmanager
def _set(config: Any, changes: Mapping[str, Any]) -> Iterator[None]:
    """What torch's own `config.patch` does. Each of its patches leaves a context variable behind, for every call."""
    before = {name: getattr(config, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


class Engine(nn.Module):
    """A drop-in for the model: the same call, outputs, parameters and state_dict keys.

    It shares the model's modules, parameters and buffers, so either can be trained, saved or moved; attributes it does
    not have are the model's.
    """

    def __new__(cls, ir: IR | None = None, *args: Any, **kwargs: Any) -> Engine:
        if ir is None:  # who copies an engine fills it by themselves
            return super().__new__(cls)
        model = type(ir.require_module())
        has_parts = all(hasattr(model, name) for name in ("__getitem__", "__len__", "__iter__"))
        return super().__new__(EngineOfParts if has_parts else cls)

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
        model = ir.require_module()
        self.__dict__["model"] = model
        super().__init__()
        # The very dicts, not copies: what is registered on one is registered on both, under the same names.
        self.__dict__["_modules"] = model._modules
        self.__dict__["_parameters"] = model._parameters
        self.__dict__["_buffers"] = model._buffers
        self.__dict__["_non_persistent_buffers_set"] = model._non_persistent_buffers_set
        self.__dict__["ir"], self.__dict__["policy"], self.__dict__["plan"] = ir, policy, plan
        self.__dict__["device_name"] = device
        self.__dict__["device_type"] = _device_type(model)
        self.__dict__["breaks"] = {}
        self.__dict__["_recompute"], self.__dict__["regions"] = None, None
        self.__dict__["_fragile"], self.__dict__["overrides"] = {}, Overrides()
        self.__dict__["_experts"] = GroupedExperts(model)
        self.__dict__["_kept_grads"] = KeptGrads(model.parameters)
        self.__dict__["_bind_at"], self.__dict__["_phases"] = bind_at, {}
        self.__dict__["_changes"] = policy.changes(ir) if bind_at is not None else ()
        self.__dict__["_is_stale"], self.__dict__["_roles"] = False, _PREVIEWS[ir.source == "static"]
        self._enter(0, bound, options)

    def at_step(self, step: int) -> Engine:
        """Bind what the policy says of a training step, and return the engine itself; call it before that step.

        Between two steps at which the policy changes nothing happens. Where formats do change, the model is compiled
        for them at the next call; formats that were bound before are there already.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"step is {step!r}; it must be a whole number from 0 on")
        span = max((change for change in self._changes if change <= step), default=0)
        if span != self.step:
            self._enter(span, *self._bind_at(self.ir, span, self.overrides))
        return self

    def override(self, changes: Mapping[Key, str | Precision | None], reason: str) -> Engine:
        """Give single GEMMs of single layers another format from the next call on, and return the engine itself.

        `changes` maps (module path, "fwd", "dgrad" or "wgrad") to the format that the GEMM has at least, or to None,
        which takes an override back. The policy stands where it asks for more bits at a step. The report shows the
        reason. Formats that were compiled before are not compiled again.
        """
        return self.set_overrides(self.overrides.changed(changes, reason, self.policy.resolve(self.ir, self.step)))

    def set_overrides(self, overrides: Overrides) -> Engine:
        """Replace all overrides, as a resumed run does: `Overrides.from_dict` of `engine.overrides.to_dict()`."""
        if self._bind_at is None:
            raise UnsupportedError("this engine's formats cannot change; make it with dw.compile")
        known = self.policy.resolve(self.ir, self.step)
        foreign = [row.path for row in overrides.rows if row.path not in known]
        if foreign:
            raise ConfigError(f"overrides name {foreign[0]}, which is no linear layer of {self.ir.name}")
        bound, options = self._bind_at(self.ir, self.step, overrides)  # may raise where fallback="strict"
        self.__dict__["overrides"] = overrides
        self._enter(self.step, bound, options)
        return self

    def check_fragile(self, batch: Any, *, strict: bool = False, floor_db: float | None = None) -> FragileReport:
        """Keep in bf16 what the formats of this step would spoil, by one batch of the model as it was written.

        `batch` is a dict of keyword arguments (with labels, so that there is a loss), a tuple of arguments or a tensor.
        Each GEMM whose signal to noise is below the floor of its formats (`floor_db` replaces them) stays in bf16 from
        the next call on, with that reason in the report; `strict` raises UnsupportedError instead.
        """
        bound = self.bound if self._bind_at is None else self._bind_at(self.ir, self.step, self.overrides)[0]
        with self._experts.applied():
            found = check_fragile(self.model, bound, batch, floor_db=floor_db)
        if strict and found.fragile:
            first = found.fragile[0]
            more = f" and {len(found.fragile) - 1} more" if len(found.fragile) > 1 else ""
            raise UnsupportedError(f"{first.path}: {first.scheme} is {first.reason}{more}; fallback='safe' keeps bf16")
        keys = {(row.path, row.gemm, row.scheme): row for row in found.rows}
        self.__dict__["_fragile"] = {**self._fragile, **keys}
        self._enter(self.step, bound, self.options)
        return found

    def _enter(self, step: int, bound: Bound, options: BackendOptions) -> None:
        """Make the bindings of a span of steps the engine's own; equal schemes share one compiled model."""
        checked: dict[object, Fragile] = self._fragile
        if checked:
            bound = without_fragile(bound, checked.values())
            options = options.for_schemes(bound.schemes)
        key = tuple(sorted(bound.schemes.items()))
        if key not in self._phases:
            in_regions = self.regions is not None
            compiled = self.model if in_regions else torch.compile(self.model, backend=_backend(options))
            self._phases[key] = (options, compiled)
            options.see = _seen_by(self)
        self.__dict__["step"], self.__dict__["bound"] = step, bound
        self.__dict__["options"], self.__dict__["_compiled"] = self._phases[key]
        if self.regions is not None:
            self.regions.enter(self.options)

    def _see(self, options: BackendOptions, graph_module: Any, example_inputs: Sequence[Any]) -> None:
        """Decide roles by what runs: a graph that shows others than the capture did is compiled for its own formats."""
        if options is not self.options or self._bind_at is None:
            return
        ir = with_roles_of_call(self.ir, graph_module, example_inputs)
        self.__dict__["_roles"] = _ROLES_OF_CALL
        if ir is self.ir:
            return
        bound, _ = self._bind_at(ir, self.step, self.overrides)
        bound = without_fragile(bound, self._fragile.values()) if self._fragile else bound
        others = {path for path in options.rewritten if bound.schemes.get(path) != options.schemes.get(path)}
        # A graph before this one multiplies some of them in formats of another role: all is compiled anew for the next
        # call. So are the formats of other steps.
        self.__dict__["_is_stale"] = self._is_stale or bool(others)
        options.schemes = bound.schemes
        self.__dict__["_phases"] = {tuple(sorted(bound.schemes.items())): (options, self._compiled)}
        self.__dict__["ir"], self.__dict__["bound"] = ir, bound
        self.__dict__["_changes"] = self.policy.changes(ir)

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
        self.__dict__["regions"] = regions
        if self._recompute is not None:
            regions.recompute(self._recompute)
        self._phases.clear()
        self._enter(self.step, self.bound, self.options)
        return regions

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """An engine of a copy of the model, compiled by itself: no graph, and no code of a weight, is shared."""
        if self.regions is not None:
            raise UnsupportedError("an engine of compiled regions cannot be copied: its model's layers belong to it")
        model = copy.deepcopy(self.model, memo)

        def of_copy(options: BackendOptions) -> BackendOptions:
            own = options.for_schemes(options.schemes)
            return replace(
                own, parameters=lambda: model.named_parameters(remove_duplicate=False), weight_cache=WeightCache()
            )

        def bind_at(ir: IR, step: int, overrides: Overrides) -> tuple[Bound, BackendOptions]:
            bound, options = self._bind_at(ir, step, overrides)
            return bound, of_copy(options)

        new = Engine(
            self.ir.attach(model),
            self.bound,
            self.policy,
            options=of_copy(self.options),
            device=self.device_name,
            bind_at=None if self._bind_at is None else bind_at,
            plan=self.plan,
        )
        new.__dict__["step"], new.__dict__["_fragile"] = self.step, dict(self._fragile)
        new.__dict__["overrides"] = self.overrides
        if self._recompute is not None:
            new.recompute(LayerRecompute(new.ir, len(self._recompute.paths)))
        memo[id(self)] = new
        return new

    def __copy__(self) -> Engine:
        """Another name for the same: model, options and compiled graphs are shared."""
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Compiled graphs live in this process alone, and a pickle could run code where it is read."""
        raise UnsupportedError(
            "an engine cannot be pickled: save engine.state_dict(), whose keys are the model's; load it into the model "
            "and dw.compile that"
        )

    def recompute(self, layers: LayerRecompute) -> None:
        """Compute these layers again in the backward instead of keeping what they hold."""
        self.__dict__["_recompute"] = layers
        if self.regions is not None:
            self.regions.recompute(layers)

    # nn.Module keeps `training` for itself; the model's is the only one.
    @property
    def training(self) -> bool:
        return self.model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if mode != self.model.training and "_compiled" in self.__dict__:
            self.model.train(mode)

    def train(self, mode: bool = True) -> Engine:
        self.model.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._check_devices(args, kwargs)
        if not self.options.was_called:
            self._check_sharded()
        if self._is_stale:
            self.__dict__["_is_stale"] = False
            self._phases.clear()
            self._enter(self.step, *self._bind_at(self.ir, self.step, self.overrides))
        before = dict(counters["graph_break"])
        recomputed = self._recompute.applied() if self._recompute is not None else nullcontext()
        if self.options.cuda_graphs and torch.is_grad_enabled():
            self._kept_grads.keep()
        running = self._running() if self.regions is None else self.regions.running()
        with running, recomputed:
            out = self._compiled(*args, **kwargs)
        self.options.was_called = True
        if self.regions is None:  # a region is one graph or an error, and between them Python is what is wanted
            self.breaks.update({k: v for k, v in counters["graph_break"].items() if v != before.get(k, 0)})
        return out

    @contextmanager
    def _running(self) -> Iterator[None]:
        """The settings that the engine's graphs are compiled and found again under."""
        with _set(torch._dynamo.config, self._dynamo_settings()), self._experts.applied():
            yield

    def _check_sharded(self) -> None:
        """Before the first call, once the user has had the chance to shard the model."""
        if self._recompute is not None and self.regions is None and is_sharded(self.model):
            self.use_regions()  # Dynamo would run checkpointed layers with FSDP2's hooks as they were written

    def _dynamo_settings(self) -> dict[str, Any]:
        limits = dict(_DYNAMO)
        # Each further set of formats that was bound has graphs of its own.
        limits["recompile_limit"] += 8 * (len(self._phases) - 1)
        limits["accumulated_recompile_limit"] += 8 * (len(self._phases) - 1)
        if self.options.cache_weights:
            # Behind a graph break each layer has a graph of its own, for its own codes.
            limits["recompile_limit"] += 8 * self.ir.num_layers
            limits["accumulated_recompile_limit"] += 8 * self.ir.num_layers
        return {**limits, _IGNORED_LOGGING: _chatter()}

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

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, hooks included."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the model; the next call computes with the new weights."""
        return self.model.load_state_dict(*args, **kwargs)

    def report(self, *, measure: bool = False) -> EngineReport:
        """Every GEMM's format, binding and reason, the kernels chosen, and how often each pass fired so far.

        `measure` times every kernel of the compiled graphs, and every linear's GEMMs, at the shapes they have there;
        that takes a few seconds.
        """
        kernels = [*self.options.kernels.values()]
        bindings = with_gains(self.bound.bindings, self.options.gains)
        bindings = as_model_runs_them(bindings, self._unmet(), self.options.left_at_times())
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
        by_itself = "the model multiplies its experts by itself (one by one, or in a kernel of its own)"
        nowhere = "no product with its weight was met in what was compiled"
        known = self.options.left
        return {
            path: LeftAlone(dtype=self.ir.dtype, reason=by_itself if path in experts else nowhere)
            if path in experts or path not in known
            else known[path]
            for path in self.options.unmet()
            if path in experts or path not in elsewhere
        }

    def _notes(self) -> list[str]:
        """What did not go as the bindings say."""
        notes = [self._roles]
        if self._changes:
            steps = ", ".join(map(str, self._changes))
            notes.append(f"the policy changes at step {steps}; bound now is what it says of step {self.step}: at_step")
        if self.overrides:
            notes.append(f"formats of {len(self.overrides)} GEMMs were changed at run time: engine.overrides")
        notes += self._experts.notes()
        if self._recompute is not None:
            notes.append(f"computed again in the backward: {len(self._recompute.paths)} of {self.ir.num_layers} layers")
        if not self.options.use_inductor:
            notes.append("what no pass touches runs eagerly (AOT eager); inductor=True compiles it")
        kept = self.options.weight_cache
        if self.options.cache_weights and self.options.graphs:
            notes.append(
                f"FP8 codes of {len(kept.groups)} groups of weights are kept between calls: "
                f"{kept.num_bytes / 2**20:.1f} MiB"
            )
        if count := self.options.counts.get("bias_epilogue"):
            notes.append(f"bias in the epilogue of {count} FP8 products: added in fp32, rounded once")
        for reason in self.breaks:
            notes.append(f"Dynamo broke the graph and each piece was compiled by itself: {_first_line(reason)}")
        notes += self.options.remarks
        if self.options.use_inductor and self.options.graphs and "fused_quantize" not in self.options.counts:
            notes.append("compiled code came from Inductor's cache: what was fused in it was counted when it was made")
        registry = self.options.registry
        for name, reason in registry.aside().items() if registry is not None else ():
            notes.append(f"kernel {name} was rejected: {reason}")
        if self.options.was_called and not self.options.graphs:
            notes.append(f"{NOTHING_COMPILED}: Dynamo ran the model as it was written, in {self.ir.dtype}")
        unmet: dict[str, list[str]] = {}
        for path, left in self._unmet().items():
            unmet.setdefault(f", in {left.dtype}" if left.dtype else "", []).append(path)
        for dtype, paths in unmet.items():
            shown = ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
            notes.append(f"not met as a product with a parameter in what ran so far{dtype}: {shown}")
        return notes

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["model"], name)
            return functools.partial(generate, self) if name == "generate" else found


def _seen_by(engine: Engine) -> Callable[[BackendOptions, Any, Sequence[Any]], None]:
    """Show graphs to an engine that Dynamo, which keeps the options, must not keep alive."""
    known = weakref.ref(engine)

    def see(options: BackendOptions, graph_module: Any, example_inputs: Sequence[Any]) -> None:
        engine = known()
        if engine is not None:
            engine._see(options, graph_module, example_inputs)

    return see


class EngineOfParts(Engine):
    """Of an nn.Sequential, or of another model with numbered parts: those are the model's own, not compiled."""

    def __getitem__(self, key: Any) -> Any:
        return self.model[key]

    def __len__(self) -> int:
        return len(self.model)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.model)


def _chatter() -> set[Any]:
    """Logging that is no reason to break a graph: GPT-2 tells once, between its head and its loss, which loss it takes.

    A `warning` that a model gives at every call still breaks it and is heard.
    """
    methods = ("debug", "info", "info_once", "warning_once")
    return {getattr(logging.Logger, name) for name in methods if hasattr(logging.Logger, name)}


def _device_type(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    if parameter is None:
        return "cpu"
    # Of a shard that FSDP2 keeps in host memory, where it is gathered.
    mesh = getattr(parameter, "device_mesh", None)
    return parameter.device.type if mesh is None else str(mesh.device_type)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), text)


def _backend(options: BackendOptions) -> Callable[..., Any]:
    def deepwell(graph_module: Any, example_inputs: Any) -> Callable[..., Any]:
        return compile_graph(graph_module, example_inputs, options)

    return deepwell


__all__ = ["Engine", "EngineReport"]
