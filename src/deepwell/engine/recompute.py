"""Recompute whole layers: keep each layer's input alone and compute the layer again in the backward.

Hugging Face's layers do so themselves on request, and know what of their arguments (a key-value cache) must not be
filled twice. Other modules run under `torch.utils.checkpoint` for as long as the engine calls the model; called by
itself, the model is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepwell.engine.calls.overlap import Overlap
from deepwell.errors import ConfigError
from deepwell.graph.ir import IR

Forward = Callable[..., Any]


class LayerRecompute:
    """The layers that are computed again: `layers` of the IR from the first on, all where None."""

    def __init__(self, ir: IR, layers: int | None = None) -> None:
        model = ir.require_module()
        paths = [layer.path for layer in ir.layers][:layers]
        if not paths:
            raise ConfigError(f"recompute: {ir.name} has no repeated layers; use torch.utils.checkpoint in the model")
        self.paths = tuple(paths)
        modules = [model.get_submodule(path) for path in paths]
        self._wrapped: list[tuple[nn.Module, Forward]] = []
        self.applied = Overlap(self._apply)  # while the engine calls the model
        if all(hasattr(module, "gradient_checkpointing") for module in modules):
            _tell_hugging_face(model, modules)
        else:
            self._wrapped = [(module, again(module.forward)) for module in modules]

    def take_over(self) -> tuple[str, ...]:
        """The paths of layers that the caller from now on computes again by itself; none where Hugging Face does."""
        taken = self.paths if self._wrapped else ()
        self._wrapped = []
        return taken

    @contextmanager
    def _apply(self) -> Iterator[None]:
        for module, forward in self._wrapped:
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module, _ in self._wrapped:
                del module.__dict__["forward"]


def _tell_hugging_face(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    chosen = set(modules)
    kind = type(modules[0])
    for module in model.modules():
        if isinstance(module, kind) and module not in chosen:
            module.gradient_checkpointing = False  # type: ignore[assignment]


def again(forward: Forward) -> Forward:
    """`forward` under a checkpoint: what it keeps is computed again in the backward."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)

    return run
