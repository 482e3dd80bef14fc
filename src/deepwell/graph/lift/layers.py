"""Which modules are layers: the children of the model's outermost lists of blocks, in the order they run."""

from collections.abc import Mapping

from torch import fx, nn

from deepwell.graph.lift.flow import Flow


def layer_lists(model: nn.Module) -> list[list[str]]:
    """Paths of the layers of each outermost nn.ModuleList, and of each nn.Sequential of equal blocks."""
    lists: list[list[str]] = []
    inside: list[str] = []
    for path, module in model.named_modules():
        if any(path == outer or path.startswith(outer + ".") for outer in inside):
            continue
        if isinstance(module, nn.ModuleList) or _repeats(module):
            children = [
                f"{path}.{name}" if path else name
                for name, child in module.named_children()
                if next(child.parameters(), None) is not None
            ]
            if children and not all(_is_leaf(model.get_submodule(child)) for child in children):
                lists.append(children)
                inside.append(path)
                if not path:
                    break
    return lists


def _repeats(module: nn.Module) -> bool:
    if not isinstance(module, nn.Sequential):
        return False
    children = list(module)
    return len(children) > 1 and len({type(c) for c in children}) == 1 and not _is_leaf(children[0])


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


class Places:
    """Assigns nodes to layers and orders the layers."""

    def __init__(self, flow: Flow, stubbed: Mapping[str, str]) -> None:
        self._flow = flow
        self._lists = layer_lists(flow.model)
        self._layers = {path for children in self._lists for path in children}
        self._stubbed = stubbed
        self._first: dict[str, int] = {}
        for node in flow.nodes:
            layer = self.layer_of(node)
            if layer is not None:
                self._first.setdefault(layer, flow.index[node])

    def layer_of(self, node: fx.Node) -> str | None:
        if node.op == "placeholder":
            return None
        return next((path for path in self._flow.stack(node) if path in self._layers), None)

    def layer_of_path(self, path: str) -> str | None:
        """The layer that a module or parameter stands in by its name."""
        parts = path.split(".")
        names = (".".join(parts[: i + 1]) for i in range(len(parts)))
        return next((name for name in names if name in self._layers), None)

    def in_order(self) -> list[str]:
        """Layers in execution order; one that was passed through keeps its place in its list."""
        keyed: list[tuple[int, int, str]] = []
        for children in self._lists:
            last = -1
            for i, path in enumerate(children):
                if path in self._first:
                    last = self._first[path]
                elif path not in self._stubbed:
                    continue
                keyed.append((last, i, path))
        return [path for _, _, path in sorted(keyed)]
