"""What a traced graph says about its values: weights distinguished from activations, writes followed.

`Flow` answers for every value: is it made of parameters alone, does it follow from data, which values does it read.
Reads see in-place writes: what was copied into a slice of a tensor is a source of the tensor. An op has one name here
whether it writes or not, and the name of another library's op is taken by its word (`graph/fx.py` says which is which).
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn

from deepwell.graph.fx import VIEWS, memory_of, op_of, value_of, without_marks, written_by
from deepwell.graph.lift.inline import inlined
from deepwell.graph.trace import Placeholder, Traced

# Calls that give their first argument's values back in another form: a chain of them leads to one source.
FORMS = VIEWS | {
    "getitem", "to", "clone", "repeat", "repeat_interleave", "dropout", "native_dropout", "alpha_dropout",
    "feature_dropout", "pad", "roll", "flip", "index_select", "gather", "nan_to_num", "broadcast_to", "index", "tile",
    "_assert_tensor_metadata", "checkpoint_name", "tag_activation_checkpoint",
}  # fmt: skip
# Elementwise arithmetic: with plain numbers these rescale one value.
ARITHMETIC = {"add", "sub", "mul", "div", "pow", "neg", "clamp", "minimum", "maximum", "masked_fill", "where", "abs"}


class Flow:
    """A traced graph with the questions that lifting asks of it."""

    def __init__(self, model: nn.Module, traced: Traced) -> None:
        self.model = model
        self.traced = traced
        self.graph = inlined(traced.graph_module)
        self.nodes: list[fx.Node] = [n for n in self.graph.nodes if n.op != "output"]
        self.output: fx.Node = next(n for n in reversed(self.graph.nodes) if n.op == "output")
        self._by_index = list(self.graph.nodes)
        self.index = {node: i for i, node in enumerate(self._by_index)}
        self.ops = {node: without_marks(op_of(node)) for node in self.graph.nodes}
        self._placeholders = traced.by_node()
        self._module_names = _names_of_modules(model)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._stacks: dict[fx.Node, tuple[str, ...]] = {}
        self.sources: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        self._current: dict[tuple[fx.Node, fx.Node], tuple[fx.Node, ...]] = {}
        self._follow_writes()
        # Placeholders of the parameters that a value is made of, for values made of parameters alone.
        self.weights: dict[fx.Node, frozenset[fx.Node]] = {}
        self.from_input: set[fx.Node] = set()
        self._spread()

    # ---- facts of one node ----

    def op(self, node: fx.Node) -> str:
        return self.ops[node]

    def value(self, node: Any) -> Any:
        """The fake tensor that stands for the node's value."""
        return value_of(node)

    def shape(self, node: Any) -> tuple[int, ...]:
        value = value_of(node)
        return tuple(map(_concrete, value.shape)) if value is not None else ()

    def numel(self, node: Any) -> int:
        return math.prod(self.shape(node))

    def is_tensor(self, node: Any) -> bool:
        return value_of(node) is not None

    def is_float(self, node: Any) -> bool:
        value = value_of(node)
        return value is not None and (value.is_floating_point() or value.is_complex())

    def placeholder(self, node: fx.Node) -> Placeholder | None:
        return self._placeholders.get(node.name) if node.op == "placeholder" else None

    def path(self, node: fx.Node) -> str:
        """The innermost module that was running."""
        path = node.meta.get("module_path")
        if path in self._module_names:
            return str(path)
        return next(reversed(self.stack(node)), "")  # a helper object of a library, named by where it was found

    def module(self, path: str) -> nn.Module:
        return self.model.get_submodule(path)

    def module_class(self, node: fx.Node) -> str:
        return str(node.meta.get("module_class", ""))

    def aliases(self, path: str) -> tuple[str, ...]:
        """Every path under which the module at `path` is registered."""
        return self._module_names.get(path, (path,))

    def stack(self, node: fx.Node) -> tuple[str, ...]:
        """Paths of the modules that were running, outermost first."""
        if node not in self._stacks:
            self._stacks[node] = self._read_stack(node)
        return self._stacks[node]

    def _read_stack(self, node: fx.Node) -> tuple[str, ...]:
        path = str(node.meta.get("module_path", ""))
        path = path if path in self._module_names else ""
        stack = node.meta.get("nn_module_stack") or {}
        written = [
            str(entry[0]).removeprefix("L['self']").removeprefix("L['fn']").lstrip(".") for entry in stack.values()
        ]
        known = [name for name in (_plain_path(name) for name in written) if name in self._module_names]
        if known:
            return (*known, *([path] if path and known[-1] != path else []))
        parts = path.split(".") if path else []
        return tuple(".".join(parts[: i + 1]) for i in range(len(parts)))

    # ---- arguments ----

    def tensor_args(self, node: fx.Node) -> list[fx.Node]:
        """Argument nodes that hold tensors, in order; lists of tensors are opened."""
        found: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n) if self.is_tensor(n) else None)
        return found

    # ---- reads that see writes ----

    def seen(self, node: fx.Node, arg: fx.Node) -> tuple[fx.Node, ...]:
        """What `node` finds in its argument `arg`: the value itself, and what was written into it since."""
        return self._current.get((node, arg), (arg,))

    def _follow_writes(self) -> None:
        root: dict[Any, fx.Node] = {}  # memory -> the first value in it
        writes: dict[Any, list[tuple[fx.Node, fx.Node]]] = {}  # memory -> (writing node, node written to)
        for node in self.graph.nodes:
            seen: dict[fx.Node, None] = {}
            for arg in node.all_input_nodes:
                memory, current = memory_of(arg), [arg]
                for writer, target in writes.get(memory, ()):
                    if self.index[writer] < self.index[arg]:
                        continue  # the view was taken after the write and holds it already
                    is_whole = target is arg or self.numel(target) == self.numel(root[memory])
                    current = [writer] if is_whole else [*current, writer]
                self._current[node, arg] = tuple(current)
                seen.update(dict.fromkeys(current))
            self.sources[node] = tuple(seen)
            for source in seen:
                self.readers.setdefault(source, []).append(node)
            root.setdefault(memory_of(node), node)
            for target in written_by(node):
                writes.setdefault(memory_of(target), []).append((node, target))

    # ---- spreading ----

    def _spread(self) -> None:
        for node in self.nodes:
            placeholder = self.placeholder(node)
            if placeholder is not None:
                if placeholder.kind == "parameter":
                    self.weights[node] = frozenset((node,))
                elif placeholder.kind == "input":
                    self.from_input.add(node)
                continue
            sources = self.sources[node]
            if self._picks_a_weight(node):
                self.weights[node] = self.weights[sources[0]]
            elif any(s in self.from_input for s in sources):
                self.from_input.add(node)
            elif sources and any(s in self.weights for s in sources) and self.ops[node] != "embedding":
                if all(s in self.weights or not self._is_positional(s) for s in sources):
                    self.weights[node] = frozenset().union(*(self.weights.get(s, frozenset()) for s in sources))

    def _picks_a_weight(self, node: fx.Node) -> bool:
        """One matrix of a stack, chosen by a number that the data gave (a loop over experts)."""
        if self.ops[node] not in ("getitem", "select", "index_select", "index") or not self.sources[node]:
            return False
        stack, *choice = self.sources[node]
        numbers = all(not self.is_float(c) and self.numel(c) <= 1 for c in choice)
        return stack in self.weights and bool(choice) and numbers and len(self.shape(stack)) >= 3

    def _is_positional(self, node: fx.Node) -> bool:
        """Is it a table made from positions (arange, cos)? Then what it joins is an activation, not a weight."""
        return self.is_tensor(node) and self.numel(node) > 1 and node not in self.weights

    def parameter_names(self, node: fx.Node) -> tuple[str, ...]:
        placeholder = self.placeholder(node)
        assert placeholder is not None and placeholder.kind == "parameter"
        return placeholder.names

    def parameter(self, node: fx.Node) -> nn.Parameter | None:
        """The model's parameter behind a placeholder, None where the node is none."""
        placeholder = self.placeholder(node)
        if placeholder is None or placeholder.kind != "parameter":
            return None
        return self._parameters.get(placeholder.name)

    # ---- walking ----

    def trunk(self, node: fx.Node) -> fx.Node:
        """The value behind casts, dropout and arithmetic with plain numbers; slices and views stay."""
        while True:
            op = self.ops[node]
            if op in ("to", "dropout", "clone", "contiguous", "clamp", "neg"):
                following = self.sources[node][:1]
            elif op in ("add", "sub", "mul", "div", "pow", "abs"):
                following = self.sources[node] if len(self.sources[node]) == 1 else ()
            else:
                following = ()
            if not following:
                return node
            node = following[0]

    def back(self, starts: Iterable[Any], stop: Any) -> Iterator[fx.Node]:
        """Every node that `starts` read, themselves included, without going behind nodes for which `stop` holds."""
        pending = [n for n in starts if isinstance(n, fx.Node)]
        seen: set[fx.Node] = set(pending)
        while pending:
            node = pending.pop()
            yield node
            if stop(node):
                continue
            for source in self.sources[node]:
                if source not in seen:
                    seen.add(source)
                    pending.append(source)

    def forward(self, starts: Iterable[fx.Node], stop: Any) -> Iterator[fx.Node]:
        """Every node that reads `starts`, themselves left out, without going past nodes for which `stop` holds."""
        seen: set[fx.Node] = {reader for start in starts for reader in self.readers.get(start, ())}
        order = [self.index[node] for node in seen]
        heapq.heapify(order)
        while order:
            node = self._by_index[heapq.heappop(order)]
            yield node
            if stop(node):
                continue
            for reader in self.readers.get(node, ()):
                if reader not in seen:
                    seen.add(reader)
                    heapq.heappush(order, self.index[reader])


def _concrete(size: int | torch.SymInt) -> int:
    """A size as a number; one that only the data decides (rows of one expert) stands as 1."""
    if isinstance(size, int):
        return size
    known = size.node.maybe_as_int()
    return 1 if known is None else int(known)


def _plain_path(written: str) -> str:
    """Dynamo writes list entries as `layers.0` or `_modules['layers'][0]`; the model knows the first."""
    return written.replace("_modules['", "").replace("']", "").replace("[", ".").replace("]", "").strip(".")


def _names_of_modules(model: nn.Module) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(path)
    return {path: tuple(paths) for paths in names.values() for path in paths}
