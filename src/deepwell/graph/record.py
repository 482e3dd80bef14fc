"""Record a run: call the model once and write down each torch call as a node of an FX graph.

For models whose forward looks at values (`.item()`, `nonzero`, loops over the experts that were chosen), which no
symbolic tracer can follow. The graph has the form Dynamo gives (F.linear, Tensor.view ...), but where the model read a
value, that value is fixed in it: `reads_values` says so.
"""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from deepwell.errors import CaptureError
from deepwell.graph.example_inputs import ExampleInputs

# Python operators arrive as Tensor methods; in the graph they stand as the operator, as in every other tracer.
BINARY: dict[str, Any] = {
    "__add__": operator.add, "__sub__": operator.sub, "__mul__": operator.mul, "__truediv__": operator.truediv,
    "__floordiv__": operator.floordiv, "__mod__": operator.mod, "__pow__": operator.pow, "__matmul__": operator.matmul,
    "__and__": operator.and_, "__or__": operator.or_, "__xor__": operator.xor, "__lt__": operator.lt,
    "__le__": operator.le,
    "__gt__": operator.gt, "__ge__": operator.ge, "__eq__": operator.eq, "__ne__": operator.ne,
    "__getitem__": operator.getitem,
    "__neg__": operator.neg, "__invert__": operator.invert, "__setitem__": operator.setitem, "__iadd__": operator.iadd,
    "__isub__": operator.isub, "__imul__": operator.imul, "__itruediv__": operator.itruediv, "__iand__": operator.iand,
    "__ior__": operator.ior, "__lshift__": operator.lshift, "__rshift__": operator.rshift,
}  # fmt: skip
REFLECTED: dict[str, Any] = {f"__r{name[2:]}": target for name, target in BINARY.items()}
# Reads of tensor values: each fixes the graph to the values of the example.
READS = (
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__len__", "__iter__", "__contains__",
    "equal", "allclose",
)  # fmt: skip
SHAPE_FROM_VALUES = ("nonzero", "unique", "unique_consecutive", "masked_select", "argwhere", "bincount")
SHAPE_READS = ("__len__", "__iter__")


@dataclass(slots=True)
class Recording:
    """The graph, the real tensor behind each placeholder, and whether it holds for the example's values only."""

    graph_module: fx.GraphModule
    values: list[torch.Tensor]
    reads_values: bool


def record(model: nn.Module, inputs: ExampleInputs) -> Recording:
    """Run `model` on `inputs` and return the graph of what it did.

    Raises CaptureError for models on the meta device (there are no values to read) and for tensors that reach the model
    from outside the call, its parameters and its buffers with a gradient history.
    """
    if any(p.device.type == "meta" for p in model.parameters()):
        raise CaptureError(
            f"{type(model).__name__} is on the meta device and its forward reads values; build it on cpu to record it"
        )
    recorder = _Recorder(model, inputs)
    with _module_paths(model, recorder), recorder:
        output = model(*inputs.args, **inputs.kwargs)
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    recorder.graph.output(tuple(recorder.node_for(leaf) for leaf in leaves))
    module = fx.GraphModule(recorder.constants, recorder.graph)
    return Recording(module, recorder.values, recorder.reads_values)


@contextmanager
def _module_paths(model: nn.Module, recorder: "_Recorder") -> Iterator[None]:
    """Let the recorder know which module is running."""
    paths = {id(m): name for name, m in reversed(list(model.named_modules(remove_duplicate=False)))}
    hooks = torch.nn.modules.module

    def enter(module: nn.Module, args: Any) -> None:
        if id(module) in paths:
            recorder.modules.append((paths[id(module)], type(module)))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in paths and recorder.modules:
            recorder.modules.pop()

    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder(TorchFunctionMode):
    """Writes each torch call that takes or makes tensors into `graph`."""

    def __init__(self, model: nn.Module, inputs: ExampleInputs) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants = nn.Module()
        self.values: list[torch.Tensor] = []
        self.reads_values = False
        self.modules: list[tuple[str, type]] = []
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._nodes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._start = self.graph.create_node("call_function", torch._C._log_api_usage_once, ("deepwell.record",))
        named = {**inputs.named_tensors(model), **dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in named.items():
            self._known_input(name, tensor)
        self.graph.erase_node(self._start)

    def _known_input(self, name: str, tensor: torch.Tensor) -> None:
        if tensor in self._nodes:
            return
        with self.graph.inserting_before(self._start):
            node = self.graph.placeholder(name.replace(".", "_"))
        self._nodes[tensor] = node
        self.values.append(tensor)
        self._note(node, tensor)

    def node_for(self, tensor: torch.Tensor) -> fx.Node:
        """The node that made `tensor`; a constant of the graph for one that was there before the call."""
        if tensor in self._nodes:
            return self._nodes[tensor]
        if tensor.grad_fn is not None:
            raise CaptureError(f"a tensor of shape {tuple(tensor.shape)} was made where no torch call could be seen")
        name = f"constant_{len(list(self.constants.buffers()))}"
        self.constants.register_buffer(name, tensor.detach())
        node = self.graph.get_attr(name)
        self._nodes[tensor] = node
        self._note(node, tensor)
        return node

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        output = func(*args, **kwargs)
        if name in READS or name in SHAPE_FROM_VALUES:
            self.reads_values |= name not in SHAPE_READS
        if _is_recorded(func, name, args, kwargs, output):
            self._write(func, name, args, kwargs, output)
        return output

    def _write(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # A boolean mask as index chooses rows by value: the shape of what follows holds for this example only.
        if name == "__getitem__" and _has_mask(args[1]):
            self.reads_values = True
        node_args, node_kwargs = pytree.tree_map_only(torch.Tensor, self.node_for, (args, kwargs))
        node = self._call(func, name, node_args, node_kwargs)
        if isinstance(output, torch.Tensor):
            self._nodes[output] = node
            self._note(node, output)
        elif isinstance(output, (tuple, list)):
            for i, item in enumerate(output):
                if isinstance(item, torch.Tensor):
                    part = self.graph.call_function(operator.getitem, (node, i))
                    self._nodes[item] = part
                    self._note(part, item)
        self._note(node, None)

    def _call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        if name in BINARY and not kwargs:
            return self.graph.call_function(BINARY[name], args)
        if name in REFLECTED and not kwargs:
            return self.graph.call_function(REFLECTED[name], args[::-1])
        if name == "__get__":
            return self.graph.call_function(getattr, (args[0], func.__self__.__name__))
        if getattr(torch.Tensor, name, None) is func:
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(func, args, kwargs)

    def _note(self, node: fx.Node, value: torch.Tensor | None) -> None:
        path, owner = self.modules[-1] if self.modules else ("", None)
        node.meta.setdefault("module_path", path)
        node.meta.setdefault("module_class", owner.__name__ if owner is not None else "")
        if value is not None:
            with torch._C.DisableTorchFunction():
                node.meta["example_value"] = self._fake.from_tensor(value.detach(), static_shapes=True)


def _is_recorded(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
    if name == "_set_grad_enabled":
        return True
    if name in ("__set__", "__delete__", "requires_grad_", "__hash__", "__repr__"):
        return False
    if output is None:
        return name == "__setitem__"
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(output)) and name != "__iter__"


def _has_mask(index: Any) -> bool:
    entries = index if isinstance(index, tuple) else (index,)
    return any(isinstance(entry, torch.Tensor) and entry.dtype in (torch.bool, torch.uint8) for entry in entries)
