"""A site: one op of the vocabulary as it was found in the graph, before it has relative names and edges."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from deepwell.graph.lift.extents import Sizes
from deepwell.graph.lift.flow import Flow
from deepwell.graph.trace import Traced


@dataclass(slots=True, eq=False)
class LiftedSite:
    """`node` gives the place in execution order; `nodes` belong to the op; `reads` are the values whose producers are
    its inputs (default: all that its nodes read from outside). `inputs` overrides that where dataflow says too much."""

    kind: str
    node: fx.Node
    path: str
    name: str
    nodes: set[fx.Node] = field(default_factory=set)
    reads: tuple[fx.Node, ...] | None = None
    inputs: list[LiftedSite] | None = None
    params: list[fx.Node] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    role: str = "other"
    part: str = ""
    step: float = 0.0  # order among sites that share a node


class LiftState:
    """The sites found so far and which nodes they took; finders add to it in turn."""

    def __init__(self, model: nn.Module, traced: Traced, sizes: Sizes, *, is_whole: bool = True) -> None:
        self.flow = Flow(model, traced)
        self.sizes = sizes
        self.is_whole = is_whole  # whether the graph holds the whole model, and not a piece behind a graph break
        self.sites: list[LiftedSite] = []
        self.owner: dict[fx.Node, LiftedSite] = {}
        self.notes: list[str] = []
        self._live: set[fx.Node] | None = None

    def add(self, site: LiftedSite, *, owns_node: bool = True) -> LiftedSite:
        self.sites.append(site)
        if owns_node:
            site.nodes.add(site.node)
        for node in site.nodes:
            self.owner.setdefault(node, site)
        if site.reads is not None:
            readers = site.nodes or {site.node}
            site.reads = tuple(
                dict.fromkeys(s for read in site.reads for n in readers for s in self._seen_by(n, read)) or site.reads
            )
        self._live = None
        return site

    def _seen_by(self, node: fx.Node, read: fx.Node) -> tuple[fx.Node, ...]:
        if read in self.flow.sources[node]:
            return (read,)
        return self.flow.seen(node, read) if read in node.all_input_nodes else ()

    def take(self, site: LiftedSite, nodes: set[fx.Node]) -> None:
        """Let a site own more nodes: they are inside it and no other finder may use them."""
        for node in nodes:
            if node not in self.owner:
                site.nodes.add(node)
                self.owner[node] = site

    def of(self, kind: str) -> list[LiftedSite]:
        return [site for site in self.sites if site.kind == kind]

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def is_free(self, node: fx.Node) -> bool:
        return node not in self.owner

    def order(self, site: LiftedSite) -> tuple[float, float]:
        return (self.flow.index[site.node], site.step)

    # ---- activations ----

    @property
    def live(self) -> set[fx.Node]:
        """Values that carry activations: outputs of sites, float inputs, and all that follows from them."""
        if self._live is None:
            live: set[fx.Node] = set()
            for node in self.flow.nodes:
                placeholder = self.flow.placeholder(node)
                is_input = placeholder is not None and placeholder.kind == "input" and self.flow.is_float(node)
                if is_input or node in self.owner or any(source in live for source in self.flow.sources[node]):
                    live.add(node)
            self._live = live
        return self._live

    def is_activation(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and node in self.live and self.flow.is_float(node)

    def sites_behind(self, starts: Any, through: tuple[str, ...] = ()) -> list[LiftedSite]:
        """The nearest sites behind values, not counting those of the kinds in `through`, in order."""
        return self._nearest(self.flow.back, starts, through)

    def sites_ahead(self, site: LiftedSite, through: tuple[str, ...] = ()) -> list[LiftedSite]:
        """The nearest sites that read this one, not counting those of the kinds in `through`, in order."""
        return self._nearest(self.flow.forward, site.nodes, through, site)

    def _nearest(
        self,
        walk: Callable[..., Iterable[fx.Node]],
        starts: Any,
        through: tuple[str, ...],
        own: LiftedSite | None = None,
    ) -> list[LiftedSite]:
        def is_one(node: fx.Node) -> bool:
            site = self.owner.get(node)
            return site is not None and site is not own and site.kind not in through

        return sorted(dict.fromkeys(self.owner[node] for node in walk(starts, is_one) if is_one(node)), key=self.order)

    def params_of(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The parameters that nodes read, in order."""
        sources = {s for node in nodes for s in self.flow.sources[node]}
        return sorted({p for s in sources for p in self.flow.weights.get(s, ())}, key=self.flow.index.__getitem__)

    def param_name(self, node: fx.Node, near: str) -> str:
        """The name of a parameter as the module at `near` knows it; tied parameters have several."""
        names = self.flow.parameter_names(node)
        return max(names, key=lambda name: (_shared_parts(name, near), -names.index(name)))


def _shared_parts(name: str, near: str) -> int:
    count = 0
    for a, b in zip(name.split("."), near.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count


def joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def parent(path: str) -> str:
    return path.rpartition(".")[0]


def is_inside(path: str, holder: str) -> bool:
    """Whether a path is that of a module, or of something in it."""
    return path == holder or path.startswith(f"{holder}.")
