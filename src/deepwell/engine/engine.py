"""The engine: a model with its kernels bound. Called, trained, saved and loaded like the model it came from."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepwell.engine.binding import Bound
from deepwell.engine.calls.generation import Generation
from deepwell.engine.overrides import Overrides
from deepwell.engine.passes.work import BackendOptions
from deepwell.engine.recompute import LayerRecompute
from deepwell.engine.report import EngineReport
from deepwell.engine.runtime import Runtime
from deepwell.engine.weight_cache import WeightCache
from deepwell.errors import UnsupportedError
from deepwell.graph.ir import IR

# What is set on an engine and stays there: how it is called, not what it computes.
_OWN = ("forward", "training", "_compiled_call_impl")


class Engine(nn.Module):
    """A drop-in for the model: the same call, outputs, attributes, parameters and state_dict keys.

    It shares the model's modules, parameters and buffers, so either can be trained, saved or moved. Attributes are the
    model's, read and written. What belongs to the engine is at `engine.deepwell` (a `Runtime`), and also on the
    engine itself, as in `engine.report()`, where the model has nothing of that name.
    """

    deepwell: Runtime

    def __new__(cls, ir: IR | None = None, *args: Any, **kwargs: Any) -> Engine:
        if ir is None:  # a copy, which the copier fills
            return super().__new__(cls)
        model = type(ir.require_module())
        has_parts = all(hasattr(model, name) for name in ("__getitem__", "__len__", "__iter__"))
        return super().__new__(EngineOfParts if has_parts else cls)

    def __init__(self, ir: IR, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `Runtime`."""
        runtime = Runtime(ir, *args, **kwargs)
        super().__init__()
        runtime.engine, model, own = self, runtime.model, self.__dict__
        own["deepwell"], runtime.generation = runtime, Generation(model, self)
        # The very dicts, not copies: what is registered on one is registered on both, under the same names.
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            own[name] = getattr(model, name)
        own["forward"] = _forward(runtime)
        own |= {name: _of_model(self, name) for name in _replaced_methods(model)}

    # nn.Module keeps `training` for itself; the model's is the only one.
    @property
    def training(self) -> bool:
        return self.deepwell.model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "deepwell" in self.__dict__ and mode != self.training:
            self.deepwell.model.train(mode)

    def train(self, mode: bool = True) -> Engine:
        self.deepwell.model.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, by the engine's kernels. `torch.export` gets the model as it was written."""
        return _forward(self.deepwell)(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, hooks included."""
        return self.deepwell.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the model; the next call computes with the new weights."""
        return self.deepwell.model.load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Engine:
        self.deepwell.model._apply(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        runtime = self.__dict__.get("deepwell")
        if runtime is None:
            raise AttributeError(f"this engine is not complete; it has no {name!r} yet")
        try:
            found = getattr(runtime.model, name)
        except AttributeError:
            if name.startswith("_") or not hasattr(runtime, name):
                raise
            return getattr(runtime, name)
        return runtime.generation if name == "generate" else found

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "deepwell":
            raise AttributeError("engine.deepwell is the engine's own and cannot be set")
        if name in self.__dict__ or name in _OWN or name.startswith("__"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.deepwell.model, name, value)

    def __delattr__(self, name: str) -> None:
        if name == "deepwell":
            raise AttributeError("engine.deepwell is the engine's own and cannot be deleted")
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self.deepwell.model, name)

    def __dir__(self) -> list[str]:
        own = [name for name in dir(self.deepwell) if not name.startswith("_")]
        return sorted({*super().__dir__(), *dir(self.deepwell.model), *own})

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """An engine of a copy of the model, compiled by itself: no graph and no quantized weight is shared."""
        runtime = self.deepwell
        if runtime.regions is not None:
            raise UnsupportedError("an engine of compiled regions cannot be copied: its model's layers belong to it")
        model = copy.deepcopy(runtime.model, memo)

        live = runtime.live.copied(model, memo)

        def of_copy(options: BackendOptions) -> BackendOptions:
            return replace(options.for_schemes(options.schemes), parameters=live, weight_cache=WeightCache())

        def bind_at(ir: IR, step: int, overrides: Overrides) -> tuple[Bound, BackendOptions]:
            assert runtime.bind_at is not None
            bound, options = runtime.bind_at(ir, step, overrides)
            return bound, of_copy(options)

        new = Engine(
            runtime.ir.attach(model),
            runtime.bound,
            runtime.policy,
            options=of_copy(runtime.options),
            device=runtime.device_name,
            bind_at=None if runtime.bind_at is None else bind_at,
            plan=runtime.plan,
        )
        new.deepwell.live = live
        new.deepwell.step, new.deepwell.fragile = runtime.step, dict(runtime.fragile)
        new.deepwell.overrides = runtime.overrides
        if runtime.recomputed is not None:
            new.deepwell.recompute(LayerRecompute(new.deepwell.ir, len(runtime.recomputed.paths)))
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


class EngineOfParts(Engine):
    """Of an nn.Sequential, or of another model with numbered parts: those are the model's own, not compiled."""

    def __getitem__(self, key: Any) -> Any:
        model: Any = self.deepwell.model
        return model[key]

    def __len__(self) -> int:
        model: Any = self.deepwell.model
        return len(model)

    def __iter__(self) -> Iterator[Any]:
        model: Any = self.deepwell.model
        return iter(model)


def _forward(runtime: Runtime) -> Callable[..., Any]:
    """What a call of the engine runs, with the signature of the model's forward, which callers read."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Not is_exporting(), which Dynamo of torch 2.11 takes to be True inside of torch.compile too.
        if torch.compiler._is_exporting_flag:
            return runtime.model(*args, **kwargs)
        return runtime.run(*args, **kwargs)

    own: Any = forward
    own.__doc__, own.__signature__ = runtime.model.forward.__doc__, inspect.signature(runtime.model.forward)
    return forward


def _replaced_methods(model: nn.Module) -> list[str]:
    """The methods of nn.Module that a model has its own versions of, but for those that the engine has."""
    names = [name for name in dir(nn.Module) if not name.startswith("__") and name not in {*_OWN, *vars(Engine)}]
    return [
        name
        for name in names
        if callable(getattr(nn.Module, name))
        and (name in vars(model) or getattr(type(model), name) is not getattr(nn.Module, name))
    ]


def _of_model(engine: Engine, name: str) -> Callable[..., Any]:
    """A method of the model that answers with the engine where it would with the model, as `to` and `float` do."""
    model = engine.deepwell.model

    @functools.wraps(getattr(model, name))
    def call(*args: Any, **kwargs: Any) -> Any:
        out = getattr(model, name)(*args, **kwargs)
        return engine if out is model else out

    return call


__all__ = ["Engine", "EngineReport"]
