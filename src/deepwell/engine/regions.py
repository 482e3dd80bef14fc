"""Compiled regions: each layer is a graph of its own, and what lies between the layers runs eagerly.

PyTorch's distributed wrappers work between layers: FSDP2 gathers a layer's weights before it and frees them behind it,
pipeline stages and expert dispatch send activations. One graph of the whole model leaves them no room, so under them
every layer is a region (one full graph), head and loss another, and the rest, the glue, is left to Python.

DTensors stay outside. At a region's border its parameters are exchanged for their local parts, so that Dynamo and all
passes see plain tensors of local size; gradients go back to the DTensors.

Layers of equal formats share one graph. A layer's sum and the next layer's norm are in two regions now: of the fused
residual norms there is one less in each layer.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from deepwell.engine.backend import backend_of
from deepwell.engine.calls.overlap import Overlap
from deepwell.engine.offload import HostMemory
from deepwell.engine.passes.work import BackendOptions
from deepwell.engine.recompute import LayerRecompute, again
from deepwell.engine.shared_graphs import STANDS_IN_FOR
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.graph.ir import IR
from deepwell.graph.ops import GroupedLinear, Linear, Norm

Forward = Callable[..., Any]
# What Dynamo logs of the breaks that regions make on purpose.
REASON = "deepwell: between compiled regions"


class Regions:
    """The regions of one engine's model. `enter` says with which options they are compiled from the next call on.

    `inner` are paths of modules inside layers that are regions of their own (experts, whose rows come by an eager
    exchange); a layer that holds one may have breaks. `partial` has the names of replicated parameters whose gradients
    are sums over the mesh, because each rank saw other tokens; `shares` has factors of parameters that every rank adds
    to its part of a sum.
    """

    def __init__(self, ir: IR, running: Callable[[], AbstractContextManager[None]], inner: Sequence[str] = ()) -> None:
        self.model: nn.Module = ir.require_module()
        self.partial: set[str] = set()
        self.shares: dict[str, float] = {}
        self._running, self._threads = running, threading.local()
        self._without_cache = Overlap(self._switch_cache_off)
        self._options: BackendOptions | None = None
        self._backends: dict[int, Forward] = {}
        layers = [layer.path for layer in ir.layers if has_module(self.model, layer.path)]
        if not layers:
            raise ConfigError(f"regions: {ir.name} has no repeated layers to compile by themselves")
        for path in inner:
            if not any(path.startswith(f"{layer}.") for layer in layers):
                raise ConfigError(f"regions: inner has {path!r}, which is in none of the model's layers")
        self.layers, self.inner = tuple(layers), tuple(inner)
        self.glue = find_glue(self.model, layers)
        # A Hugging Face model that is traced makes masks that attention kernels do not know: its loop is never traced.
        self._is_eager = not self.glue and hasattr(self.model, "base_model_prefix")
        self.others = tuple(_others(ir, self.model, self.glue, layers)) if self.glue or self._is_eager else ()
        self.paths = (*self.layers, *self.inner, *self.others)
        found = [module.__dict__.get("config") for module in self.model.modules()]
        self._configs = [*{id(c): c for c in found if isinstance(getattr(c, "use_cache", None), bool)}.values()]
        for path in self.paths:
            breaks = path in layers and any(other.startswith(f"{path}.") for other in inner)
            self._install(path, fullgraph=not breaks)
        if self.glue:
            glue = self.model.get_submodule(self.glue)
            self._put(self.glue, torch._dynamo.disable(glue.forward, reason=REASON))
        self._install("", fullgraph=False)

    def enter(self, options: BackendOptions) -> None:
        """Compile for these options, or go back to what was compiled for them before."""
        if id(options) not in self._backends:
            self._backends[id(options)] = backend_of(options)
        self._options = options

    def recompute(self, layers: LayerRecompute) -> None:
        """Compute these layers again in the backward: outside the region, whose graph runs twice."""
        for path in layers.take_over():
            if path in self.layers:
                module = self.model.get_submodule(path)
                self._put(path, torch._dynamo.disable(again(module.forward), reason=REASON))

    def offload(self) -> HostMemory:
        """Keep what layers save for the backward in host memory. Returns where it goes."""
        host = HostMemory()
        for path in self.layers:
            module = self.model.get_submodule(path)
            if getattr(module, "gradient_checkpointing", False):
                raise UnsupportedError(
                    f"{path} is recomputed in the backward: it saves its input alone, and nothing goes to the host; "
                    "leave out recompute, or the offload of activations"
                )
            self._put(path, torch._dynamo.disable(host.around(module, module.forward), reason=REASON))
        return host

    def _install(self, path: str, *, fullgraph: bool) -> None:
        module = self.model.get_submodule(path)
        inner = module.forward
        compiled: dict[int, Forward] = {}
        holders: list[tuple[str, dict[str, Any]]] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            assert self._options is not None, "an engine enters its options before it is called"
            key = id(self._options)
            if key not in compiled and not path and self._is_eager:
                compiled[key] = inner
            elif key not in compiled:
                compiled[key] = torch.compile(inner, backend=self._backends[key], fullgraph=fullgraph)
            if getattr(self._threads, "is_running", False):
                return compiled[key](*args, **kwargs)
            # Computed again in the backward, or a part of the model that is called by itself.
            with self.running():
                return compiled[key](*args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not holders:
                holders.extend(self._holders(path, module))
            swapped = self._exchange(holders)
            if not swapped:
                return run(*args, **kwargs)
            if self._options is not None and self._options.cache_weights:
                raise UnsupportedError(
                    "cache_weights=True keeps values of parameters, and local parts of DTensors are others at every "
                    "call; leave it out under tensor and expert parallelism"
                )
            stands_in = STANDS_IN_FOR.set((id(self), path))
            try:
                return run(*args, **kwargs)
            finally:
                STANDS_IN_FOR.reset(stands_in)
                for where, name, parameter in swapped:
                    where[name] = parameter

        self._put(path, torch._dynamo.disable(functools.wraps(inner)(forward), reason=REASON))

    def _put(self, path: str, forward: Forward) -> None:
        module = self.model.get_submodule(path)
        forward.is_deepwell_region = True  # type: ignore[attr-defined]
        module.forward = forward

    def _holders(self, path: str, module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
        """(prefix, its parameters) of every module whose parameters are this region's to exchange.

        Not those of regions inside it, nor of modules that FSDP2 gathers by themselves: theirs are still sharded.
        """
        from torch.distributed.fsdp import FSDPModule

        regions = {id(self.model.get_submodule(other)) for other in self.paths}
        pending = [(f"{path}." if path else "", module)]
        while pending:
            prefix, each = pending.pop()
            if each._parameters:
                yield prefix, each._parameters
            for name, child in each._modules.items():
                if child is not None and id(child) not in regions and not isinstance(child, FSDPModule):
                    pending.append((f"{prefix}{name}.", child))

    def _exchange(
        self, holders: Iterable[tuple[str, dict[str, Any]]]
    ) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        """Put local tensors in the places of DTensors. Returns what was there."""
        from torch.distributed.tensor import DTensor, Partial

        swapped: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for prefix, parameters in holders:
            for name, parameter in parameters.items():
                if isinstance(parameter, DTensor):
                    path = f"{prefix}{name}"
                    is_partial = path in self.partial
                    grads = [Partial() if is_partial and p.is_replicate() else p for p in parameter.placements]
                    swapped.append((parameters, name, parameter))
                    here = parameter.to_local(grad_placements=grads)
                    parameters[name] = here * self.shares[path] if path in self.shares else here
        return swapped

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the model is called: the engine's settings are in force, and training fills no key-value cache.

        A layer's place in the cache would be a constant of its graph: each layer would have one of its own.
        """
        before = getattr(self._threads, "is_running", False)
        self._threads.is_running = True
        try:
            with self._running(), self._without_cache():
                yield
        finally:
            self._threads.is_running = before

    @contextmanager
    def _switch_cache_off(self) -> Iterator[None]:
        cached = [config for config in self._configs if config.use_cache] if self.model.training else []
        for config in cached:
            config.use_cache = False
        try:
            yield
        finally:
            for config in cached:
                config.use_cache = True


def find_glue(model: nn.Module, layers: Sequence[str]) -> str:
    """The module whose forward runs the layers: the innermost one around all of them. "" where that is the model."""
    base = getattr(model, "base_model_prefix", "")
    if base and has_module(model, base) and all(path.startswith(f"{base}.") for path in layers):
        return str(base)
    common: list[str] = []
    for names in zip(*(path.split(".")[:-1] for path in layers), strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    while common and isinstance(model.get_submodule(".".join(common)), (nn.ModuleList, nn.ModuleDict)):
        common.pop()
    return ".".join(common)


def _others(ir: IR, model: nn.Module, glue: str, layers: Sequence[str]) -> Iterator[str]:
    """Modules of the glue beside the layers that have something to compile: the final norm, projections."""
    found: dict[str, None] = {}
    for site in ir.sites():
        if site.layer is not None or not isinstance(site.op, (Norm, Linear, GroupedLinear)):
            continue
        inside = f"{glue}." if glue else ""
        names = site.path.removeprefix(inside).split(".") if site.path.startswith(inside) else []
        for count in range(1, len(names) + 1):
            path = inside + ".".join(names[:count])
            if not has_module(model, path):
                break
            if not any(layer.startswith(f"{path}.") for layer in layers):
                if next(model.get_submodule(path).parameters(), None) is not None:
                    found[path] = None
                break
    return iter(found)


def has_module(model: nn.Module, path: str) -> bool:
    """Whether there is such a module: a stage of a pipeline has some of the model's layers only."""
    module: Any = model
    for name in path.split(".") if path else ():
        module = getattr(module, "_modules", {}).get(name)
        if module is None:
            return False
    return True


def is_left_out(model: nn.Module, path: str) -> bool:
    """Whether the place of a module is empty: a stage of a pipeline has not both ends of the model."""
    module: Any = model
    for name in path.split("."):
        children = getattr(module, "_modules", {})
        if name not in children:
            return False  # a parameter of the module, not a module
        module = children[name]
        if module is None:
            return True
    return False


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has the model or a part of it."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
