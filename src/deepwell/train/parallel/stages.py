"""Stages of a pipeline: which layers a rank keeps, and how the model runs them alone.

A stage runs the model's own forward. What belongs to other stages is stood in for while it does so: the embedding by
what came from the stage before, other layers by modules that hand their input on, norm and head by such as well. So the
loop, the masks and the positions of the model stay its own, and layers keep their numbers and names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.engine.engine import Engine
from deepwell.engine.regions import REASON, find_glue, has_module
from deepwell.errors import UnsupportedError
from deepwell.graph.ir import IR
from deepwell.planner.layout import Layout
from deepwell.train.feed import Feed


class HandedOn(nn.Module):
    """In the place of a layer of another stage: its first argument comes out. Says of itself what the layer said."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        for name, value in {} if layer is None else vars(layer).items():
            if isinstance(value, (str, int, float)) and not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


class Received(nn.Module):
    """In the place of the embedding: gives what the stage before sent."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Tensor | None = None
        self.forward = torch._dynamo.disable(lambda *args, **kwargs: self.value, reason=REASON)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """The layers of one stage of `count`, by number."""

    index: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def spans(layout: Layout, num_layers: int) -> tuple[StageSpan, ...]:
    """All stages of a layout, in the model's order. Stage i is rank i % pp's."""
    counts = layout.layers_of_stages(num_layers)
    bounds = list(accumulate(counts, initial=0))
    return tuple(StageSpan(index=i, count=len(counts), layers=range(*bounds[i : i + 2])) for i in range(len(counts)))


class Cut:
    """The places of a model at which it is cut. Takes from the model, in place, what `keep` stages do not need.

    Where `tp` ranks split the tokens, a stage is sent its own. The model then sees them `tp` times, so that masks and
    positions are those of the whole sequence, and the stage's first layer takes its part of that again.

    Raises UnsupportedError where a model does more between its parts than to pass the hidden state on.
    """

    def __init__(self, engine: Engine, keep: tuple[StageSpan, ...], tp: int = 1) -> None:
        ir, model = engine.deepwell.ir, engine.deepwell.model
        self.model, self._tp = model, tp
        self.base_path = find_glue(model, [layer.path for layer in ir.layers])
        self._list_at = _list_of_layers(ir, model)
        layers = dict(model.get_submodule(".".join(self._list_at)).named_children())
        self._embedding, self._ends = _ends(ir, model, self.base_path)
        self.received = Received()
        self.is_tied = _weights(model, [self._embedding]) & _weights(model, self._ends) != set()
        self._check(ir, layers)
        self.width = int(next(op.params[0].shape[1] for op in ir.stem if op.params))
        self._stand_ins = {name: HandedOn(layer) for name, layer in layers.items()}
        self._lists: dict[int, nn.ModuleList] = {}
        for span in keep:
            own = {str(i) for i in span.layers}
            self._lists[span.index] = _module_list(
                {name: layer if name in own else self._stand_ins[name] for name, layer in layers.items()}
            )
        kept = {str(i) for span in keep for i in span.layers}
        _put(model, self._list_at, _module_list({name: layers[name] for name in layers if name in kept}))
        if not any(span.is_first for span in keep):
            _put(model, self._embedding, None)
        if not any(span.is_last for span in keep):
            for path in self._ends:
                _put(model, path, None)

    def _check(self, ir: IR, layers: dict[str, nn.Module]) -> None:
        """Whether a model without its layers gives what its embedding gave, to the last bit."""
        weight = next(self.model.parameters())
        tokens = torch.zeros(1, 4, dtype=torch.int64, device=weight.device)
        width = self.model.get_submodule(".".join(self._embedding)).weight.shape[1]
        x = torch.linspace(-1, 1, 4 * width, device=weight.device, dtype=weight.dtype).view(1, 4, width)
        passed = _module_list({name: HandedOn(layer) for name, layer in layers.items()})
        places = {self._list_at: passed, self._embedding: self.received} | {path: HandedOn() for path in self._ends}
        with _instead(self.model, places), torch.no_grad():
            self.received.value = x
            why = ""
            try:
                out = hidden_of(self.base_module(tokens) if self.base_path else self.model(tokens))
            except (TypeError, AttributeError, ValueError, RuntimeError) as error:
                out, why = None, f" ({type(error).__name__}: {error})"
            finally:
                self.received.value = None
        if out is None or out.shape != x.shape or not torch.equal(out, x):
            raise UnsupportedError(
                f"pp: {ir.name} does more between its embedding, its layers and its head than to pass the hidden state "
                f"on (scales, positions, layers that take more than one value){why}; leave pp at 1"
            )

    @property
    def base_module(self) -> nn.Module:
        return self.model.get_submodule(self.base_path)

    @contextmanager
    def only(self, span: StageSpan, x: Tensor) -> Iterator[None]:
        """While the model runs one stage. `x` is what the stage before sent."""
        places: dict[tuple[str, ...], nn.Module] = {self._list_at: self._lists[span.index]}
        if not span.is_first:
            places[self._embedding] = self.received
        if not span.is_last:
            places |= dict.fromkeys(self._ends, self._stand_ins["0"])
        self.received.value = x if span.is_first or self._tp == 1 else x.repeat(1, self._tp, 1)
        try:
            with _instead(self.model, places):
                yield
        finally:
            self.received.value = None

    def parts(self, span: StageSpan) -> list[nn.Module]:
        """The modules of a stage that hold parameters."""
        found = [self._lists[span.index][i] for i in span.layers]
        ends = [self._embedding] * span.is_first + self._ends * span.is_last
        return found + [self.model.get_submodule(".".join(path)) for path in ends]

    def tied_weight(self, span: StageSpan) -> nn.Parameter | None:
        """The weight of embedding or head, which both ends have a copy of; None on stages without one."""
        if not self.is_tied or not (span.is_first or span.is_last):
            return None
        path = self._embedding if span.is_first else self._ends[-1]
        return self.model.get_submodule(".".join(path)).weight


class StageModule(nn.Module):
    """One stage as torch's schedules call it: hidden states in, hidden states out; the last one gives the loss, [1]."""

    def __init__(self, engine: Engine, feed: Feed, cut: Cut, span: StageSpan) -> None:
        super().__init__()
        self.span, self._given = span, (engine, feed, cut)  # in a tuple: the engine is no module of the stage's
        self.parts = nn.ModuleList(cut.parts(span))

    def forward(self, x: Tensor, share: Tensor | None = None, **batch: Tensor) -> Tensor:
        """`batch` is the whole micro-batch, which every rank has; `share` multiplies the last stage's mean loss."""
        engine, feed, cut = self._given
        with cut.only(self.span, x):
            if self.span.is_last:
                loss = feed(engine, batch).reshape(1)
                return loss.clone() if share is None else loss * share
            others = {name: batch[name] for name in ("position_ids", "attention_mask") if name in batch}
            assert engine.deepwell.regions is not None, "stages are made of regions"
            with engine.deepwell.regions.running():
                if cut.base_path:
                    out = hidden_of(cut.base_module(input_ids=batch["input_ids"], use_cache=False, **others))
                else:
                    out = hidden_of(engine.deepwell.model(batch["input_ids"]))
            engine.deepwell.options.was_called = True
            return out.clone() if out is x else out


def hidden_of(out: Any) -> Tensor:
    """What comes out of a model without its head."""
    for name in ("last_hidden_state", "logits"):
        if isinstance(getattr(out, name, None), Tensor):
            return getattr(out, name)
    return out[0] if isinstance(out, (tuple, list)) else out


# ---- where a model is cut ----


def _list_of_layers(ir: IR, model: nn.Module) -> tuple[str, ...]:
    parents = {layer.path.rpartition(".")[0] for layer in ir.layers}
    path = parents.pop() if len(parents) == 1 else ""
    found = model.get_submodule(path) if path else None
    if not isinstance(found, nn.ModuleList):
        raise UnsupportedError(f"pp: the layers of {ir.name} are not one nn.ModuleList; leave pp at 1")
    numbers = [layer.path.rpartition(".")[2] for layer in ir.layers]
    if numbers != [str(i) for i in range(len(found))]:
        raise UnsupportedError(f"pp: the list {path} of {ir.name} holds more than its layers; leave pp at 1")
    return tuple(path.split("."))


def _ends(ir: IR, model: nn.Module, base: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(the embedding's place, those of all else that has parameters and lies behind the layers)."""
    embeddings = {op.name for op in ir.stem if op.params}
    layers = {layer.path for layer in ir.layers}
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    outside = [path for path in owners if not any(path == own or path.startswith(f"{own}.") for own in layers)]
    ends = sorted(path for path in outside if path not in embeddings)
    tail = {op.name for op in ir.tail}
    foreign = [path for path in ends if path not in tail]
    if len(embeddings) != 1 or foreign or "" in ends:
        what = ", ".join(sorted(embeddings if len(embeddings) != 1 else foreign)) or "parameters of its own"
        raise UnsupportedError(
            f"pp: {ir.name} has {what} beside one embedding, its layers, norm and head; leave pp at 1"
        )
    # The head last: its weight is the one that may be the embedding's.
    ends.sort(key=lambda path: next(i for i, op in enumerate(ir.tail) if op.name == path))
    return tuple(embeddings.pop().split(".")), [tuple(path.split(".")) for path in ends]


def _weights(model: nn.Module, paths: list[tuple[str, ...]]) -> set[int]:
    modules = [model.get_submodule(".".join(path)) for path in paths if has_module(model, ".".join(path))]
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _module_list(modules: dict[str, nn.Module]) -> nn.ModuleList:
    found = nn.ModuleList()
    found._modules.update(modules)
    return found


def _put(model: nn.Module, path: tuple[str, ...], module: nn.Module | None) -> None:
    model.get_submodule(".".join(path[:-1]))._modules[path[-1]] = module


@contextmanager
def _instead(model: nn.Module, places: dict[tuple[str, ...], Any]) -> Iterator[None]:
    """Put modules into the places of others for a while."""
    before = {path: model.get_submodule(".".join(path[:-1]))._modules[path[-1]] for path in places}
    for path, module in places.items():
        _put(model, path, module)
    try:
        yield
    finally:
        for path, module in before.items():
            _put(model, path, module)
