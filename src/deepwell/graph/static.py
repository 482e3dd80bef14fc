"""The static walk: an IR from the module tree alone, for models whose forward no tracer can follow.

Linears, embeddings, norms, activations, convolutions and stacks of experts are read from the modules and their
parameters; roles come from names. Order and row counts come from forward hooks as far as the forward runs on fake
tensors, else from the tree. Edges are sequential and sums are not seen. Parameter counts are exact.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from deepwell.errors import CaptureError
from deepwell.graph import static_modules as read
from deepwell.graph.example_inputs import DEFAULT_BATCH, resolve_inputs
from deepwell.graph.ir import IR, Block, Layer
from deepwell.graph.lift.extents import Sizes
from deepwell.graph.lift.layers import layer_lists
from deepwell.graph.ops import BLOCK_INPUT, Linear, Loss, Op
from deepwell.graph.parameters import Parameters, model_dtype, positions
from deepwell.graph.preserve import preserved
from deepwell.graph.trace import MODEL_ERRORS, quiet


def static_walk(model: nn.Module, example_inputs: Any = None, *, reasons: tuple[str, ...] = ()) -> IR:
    """The IR of `model` from its modules; `reasons` say why it was not traced and open the notes."""
    check_readable(model)
    run = _try_forward(model, example_inputs)
    facts = read.ModuleContext(model, run.sizes)
    walk = _Walk(model=model, dtype=model_dtype(model), parameters=Parameters(model), facts=facts, run=run)
    ir = walk.ir(reasons)
    if not any(ir.sites()):
        raise CaptureError(
            f"{type(model).__name__} has neither parameters nor modules that could be read and was not traced: "
            f"{'; '.join(reasons) or 'no reason is known'}"
        )
    ir.check()
    return ir


def check_readable(model: nn.Module) -> None:
    """CaptureError for a model whose parameters have no shape yet."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise CaptureError(
                f"parameter {name} of {type(model).__name__} has no shape yet; run the model once before capturing it"
            )


# ---- the forward, as far as it goes ----


@dataclass(slots=True)
class _ModuleRun:
    """Which modules ran, in order, with the shape of the first tensor that went in; `stopped` says where it ended."""

    sizes: Sizes = field(default_factory=lambda: Sizes(None, None))
    order: dict[str, int] = field(default_factory=dict)
    rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stopped: str = ""


def _try_forward(model: nn.Module, example_inputs: Any) -> _ModuleRun:
    run = _ModuleRun()
    try:
        inputs = resolve_inputs(model, example_inputs, DEFAULT_BATCH, None)
    except CaptureError:
        run.stopped = "no inputs are known"
        return run
    run.sizes = Sizes(inputs.batch, inputs.seq_len)
    paths = {id(module): path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        path = paths.get(id(module))
        if path is not None and path not in run.order:
            run.order[path] = len(run.order)
            tensor = next((a for a in args if isinstance(a, torch.Tensor)), None)
            if tensor is not None:
                run.rows[path] = tuple(int(s) for s in tensor.shape)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        with preserved(model, values=True), torch.no_grad(), quiet(), FakeTensorMode(allow_non_fake_inputs=True):
            model(*inputs.args, **inputs.kwargs)
    except MODEL_ERRORS as error:
        lines = str(error).strip().splitlines()
        run.stopped = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    finally:
        handle.remove()
    return run


# ---- the walk ----


@dataclass(slots=True)
class _Walk:
    model: nn.Module
    dtype: str
    parameters: Parameters
    facts: read.ModuleContext
    run: _ModuleRun

    def ir(self, reasons: tuple[str, ...]) -> IR:
        lists = layer_lists(self.model)
        layer_paths = [path for children in lists for path in children]
        groups: dict[str, list[Op]] = {"": [], **{path: [] for path in layer_paths}, ".": []}
        seen_layer = False
        for path, module in self._in_order():
            layer = next((p for p in layer_paths if path == p or path.startswith(p + ".")), None)
            seen_layer = seen_layer or layer is not None
            place = layer if layer is not None else ("." if seen_layer else "")
            groups[place].extend(self._ops(path, module, layer))
        blocks: list[Block] = []
        layers: list[Layer] = []
        for path in layer_paths:
            block = Block(ops=_chained(groups[path], BLOCK_INPUT))
            if block not in blocks:
                blocks.append(block)
            layers.append(Layer(path=path, block=blocks.index(block)))
        tail = self._with_loss(groups["."]) if layer_paths else groups["."]
        return IR(
            name=type(self.model).__name__,
            dtype=self.dtype,
            stem=_chained(groups[""], None),
            blocks=tuple(blocks),
            layers=tuple(layers),
            tail=_chained(tail, BLOCK_INPUT),
            max_positions=positions(self.model),
            source="static",
            notes=self._notes(reasons),
            module=self.model,
        )

    def _notes(self, reasons: tuple[str, ...]) -> tuple[str, ...]:
        notes = [f"not traced: {reason}" for reason in reasons]
        notes.append("read from the module tree: edges are sequential, sums are not counted")
        if self.run.stopped:
            notes.append(f"order and rows are the tree's where the forward did not run ({self.run.stopped})")
        return tuple(notes)

    def _in_order(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules in the order they ran; one that did not run stands behind its predecessor in the tree."""
        last = -1
        keyed: list[tuple[int, int, str, nn.Module]] = []
        for i, (path, module) in enumerate(self.model.named_modules()):
            last = self.run.order.get(path, last)
            keyed.append((last, i, path, module))
        for _, _, path, module in sorted(keyed, key=lambda entry: entry[:2]):
            yield path, module

    def _ops(self, path: str, module: nn.Module, layer: str | None) -> list[Op]:
        found = read.read_module(self.facts, path, module, self.run.rows.get(path))
        result: list[Op] = []
        for op, names in found:
            params = tuple(self.parameters.param(name, layer or "", _relative(name, layer)) for name in names)
            dtype = params[0].dtype if params else self.dtype
            result.append(replace(op, name=_relative(op.name, layer) or "op", params=params, dtype=dtype))
        return result

    def _with_loss(self, ops: list[Op]) -> list[Op]:
        takes_labels = "labels" in inspect.signature(self.model.forward).parameters
        head = next((op for op in reversed(ops) if isinstance(op, Linear) and op.role == "head"), None)
        if not takes_labels or head is None:
            return ops
        return [*ops, Loss(name="loss", role="loss", vocab=head.n, dtype=self.dtype)]


def _relative(name: str, layer: str | None) -> str:
    if layer is None:
        return name
    return name[len(layer) + 1 :] if name.startswith(layer + ".") else "" if name == layer else name


def _chained(ops: list[Op], first: str | None) -> tuple[Op, ...]:
    """Each op reads the one before it; names that occur twice are numbered."""
    result: list[Op] = []
    counts: dict[str, int] = {}
    for op in ops:
        counts[op.name] = counts.get(op.name, 0) + 1
        name = op.name if counts[op.name] == 1 else f"{op.name}_{counts[op.name]}"
        edge = result[-1].name if result else first
        result.append(replace(op, name=name, inputs=() if edge is None else (edge,)))
    return tuple(result)
