"""The IR from the sites of a traced graph: edges, names, parameters, layers and blocks."""

from typing import Any

import torch
from torch import fx, nn

from deepwell.graph.ir import IR, Block, Layer
from deepwell.graph.lift.attention import find_attention, find_rope
from deepwell.graph.lift.contractions import find_contractions
from deepwell.graph.lift.extents import Sizes
from deepwell.graph.lift.layers import Places
from deepwell.graph.lift.norms import find_norms
from deepwell.graph.lift.pointwise import find_activations, find_products, find_sums
from deepwell.graph.lift.roles import assign_roles
from deepwell.graph.lift.routing import find_experts, find_topk
from deepwell.graph.lift.site import LiftedSite, LiftState, joined
from deepwell.graph.ops import BLOCK_INPUT, EARLIER, KINDS, Op, Param
from deepwell.graph.parameters import Parameters, model_dtype, positions
from deepwell.graph.preserve import written_class
from deepwell.graph.trace import Traced

INPUT = "input"  # stands for the model's own float input among producers


def lift(model: nn.Module, traced: Traced) -> IR:
    """The IR of a traced model; `module` and `graph` of the result are the live model and the trace."""
    found = find_sites(model, traced)
    return _Assembly(model, traced, found).ir()


def find_sites(model: nn.Module, traced: Traced, *, is_whole: bool = True) -> LiftState:
    """Every op of the vocabulary in the graph, with role and part; each finder takes what the ones before it left."""
    found = LiftState(model, traced, _sizes(traced), is_whole=is_whole)
    find_contractions(found)
    find_norms(found)
    find_topk(found)
    find_attention(found)
    find_rope(found)
    find_activations(found)
    find_experts(found)
    find_products(found)
    find_sums(found)
    assign_roles(found)
    return found


def _sizes(traced: Traced) -> Sizes:
    """Batch and length of the example; images have no sequence axis."""
    inputs = {p.node for p in traced.inputs}
    values = [n.meta.get("example_value") for n in traced.graph.nodes if n.name in inputs]
    is_image = any(isinstance(v, torch.Tensor) and v.dim() >= 4 and v.is_floating_point() for v in values[:1])
    return Sizes(traced.batch, None if is_image else traced.seq_len)


class _Assembly:
    """One pass from sites to ops: where each belongs, what it reads, what it is called, what it owns."""

    def __init__(self, model: nn.Module, traced: Traced, found: LiftState) -> None:
        self.model, self.traced, self.found = model, traced, found
        self.flow = found.flow
        self.places = Places(self.flow, traced.stubbed)
        self.dtype = model_dtype(model)
        self.fixed: list[str] = []  # ops whose rows no product of batch and length gives
        self.parameters = Parameters(model)
        self._add_leftover_parameters()
        self.sites = sorted(found.sites, key=found.order)
        self.layers = self.places.in_order()
        self.groups = self._grouped()
        self.inputs = self._edges()

    # ---- parameters that no op took ----

    def _add_leftover_parameters(self) -> None:
        """Every parameter of the model gets a place: counts are exact whatever the graph holds."""
        taken = {
            self.parameters.owner(name)
            for s in self.found.sites
            for n in s.params
            for name in self.flow.parameter_names(n)
        }
        used = {
            self.flow.parameter_names(n)[0]: n
            for n in self.flow.nodes
            if n in self.flow.weights and n.op == "placeholder"
        }
        left: dict[str, list[str]] = {}
        for name in self.parameters.owners():
            if name not in taken and self.places.layer_of_path(name) not in self.traced.stubbed:
                left.setdefault(name.rpartition(".")[0], []).append(name)
        for path, names in left.items():
            nodes = [used[name] for name in names if name in used]
            self._add_other(path, names, nodes)

    def _add_other(self, path: str, names: list[str], nodes: list[fx.Node]) -> None:
        readers = [
            r
            for n in nodes
            for r in self.flow.forward([n], lambda r: r not in self.flow.weights)
            if r not in self.flow.weights
        ]
        calls = [r for r in readers if r.op != "output"]
        first = min(calls, key=self.flow.index.__getitem__) if calls else self.flow.output
        module = self.model.get_submodule(path) if path else self.model
        reads = tuple(s for s in self.flow.sources[first] if s in self.found.live) if calls else ()
        is_new = bool(path) and path not in {s.name for s in self.found.sites}
        site = LiftedSite(
            "other", first, path, path if is_new else joined(path, "parameters"),
            reads=reads, role="other", step=0.5, facts={"function": type(module).__name__, "names": names},
        )  # fmt: skip
        shape = self.flow.shape(first) if calls else ()
        dims, width = self.found.sizes.split(shape)
        if shape and self.flow.is_float(first) and (self.found.sizes.seq is None or self.found.sizes.rows(dims).seq):
            site.facts.update(width=width, dims=dims)
        for neighbour in self.found.sites:
            if (
                neighbour.role == "mixer"
                and path
                and (neighbour.path == path or neighbour.name.rpartition(".")[0] == path)
            ):
                site.role = "mixer"
        self.found.add(site, owns_node=False)
        if not calls:
            self.found.note(
                f"{site.name}: {', '.join(n.rpartition('.')[2] for n in names)} stand unused in the traced forward"
            )

    # ---- groups ----

    def _layer_of(self, site: LiftedSite) -> str | None:
        if site.kind == "other" and site.node.op == "output":
            return self.places.layer_of_path(site.facts["names"][0])
        return self.places.layer_of(site.node)

    def _grouped(self) -> dict[str, list[LiftedSite]]:
        """Sites by layer path; "" is the stem, "." the tail."""
        groups: dict[str, list[LiftedSite]] = {"": [], **{path: [] for path in self.layers}, ".": []}
        inner = [s for s in self.sites if self._layer_of(s) in groups]
        first = self.found.order(inner[0]) if inner else None
        after: set[LiftedSite] = set(inner)
        for site in self.sites:
            layer = self._layer_of(site)
            if layer in groups and layer is not None:
                groups[layer].append(site)
            elif first is None or self.found.order(site) < first:
                groups[""].append(site)
            elif site.node.op == "output" or any(s in after for s in self._behind(site)):
                groups["."].append(site)
                after.add(site)
            else:
                groups[""].append(site)
        return groups

    def _behind(self, site: LiftedSite) -> list[LiftedSite]:
        return site.inputs if site.inputs is not None else self.found.sites_behind(self._reads(site))

    def _reads(self, site: LiftedSite) -> list[fx.Node]:
        if site.reads is not None:
            return [r for r in site.reads if r not in self.flow.weights]
        return [
            s for n in site.nodes for s in self.flow.sources[n] if s not in site.nodes and s not in self.flow.weights
        ]

    # ---- edges ----

    def _edges(self) -> dict[LiftedSite, tuple[str, ...]]:
        producers = self._producers()
        group_of = {site: path for path, group in self.groups.items() for site in group}
        ran = [path for path, group in self.groups.items() if group]
        before = dict(zip(ran[1:], ran, strict=False))
        handed: dict[str, LiftedSite] = {}
        for path, previous in before.items():
            read = [
                p
                for s in self.groups[path]
                for p in producers[s]
                if isinstance(p, LiftedSite) and group_of.get(p) == previous
            ]
            if read:
                handed[path] = max(read, key=self.found.order)
        edges: dict[LiftedSite, tuple[str, ...]] = {}
        self.names = self._names(group_of)
        for site in self.sites:
            path = group_of[site]
            marks: set[str] = set()
            own: list[LiftedSite] = []
            for producer in producers[site]:
                if producer == INPUT:
                    marks.add(BLOCK_INPUT if not before.get(path) else EARLIER)
                elif isinstance(producer, LiftedSite) and group_of[producer] == path:
                    own.append(producer)
                else:
                    marks.add(BLOCK_INPUT if producer is handed.get(path) else EARLIER)
            own.sort(key=self.found.order)
            edges[site] = (
                *(m for m in (BLOCK_INPUT, EARLIER) if m in marks),
                *dict.fromkeys(self.names[s] for s in own),
            )
        return edges

    def _producers(self) -> dict[LiftedSite, set[Any]]:
        """The nearest ops behind each site, its own input among them; only ops that run before it."""
        behind: dict[fx.Node, frozenset[Any]] = {}
        for node in self.flow.nodes:
            owner = self.found.owner.get(node)
            placeholder = self.flow.placeholder(node)
            if owner is not None:
                behind[node] = frozenset((owner,))
            elif placeholder is not None:
                is_data = placeholder.kind == "input" and self.flow.is_float(node)
                behind[node] = frozenset((INPUT,)) if is_data else frozenset()
            else:
                behind[node] = frozenset().union(*(behind[s] for s in self.flow.sources[node]))
        result: dict[LiftedSite, set[Any]] = {}
        for site in self.sites:
            found: set[Any] = set(site.inputs) if site.inputs is not None else set()
            if site.inputs is None:
                for node in self._reads(site):
                    found |= behind[node]
            found.discard(site)
            if site.role == "experts" and site.kind in ("activation", "grouped_linear"):
                found = {
                    f for f in found if f == INPUT or f.kind not in ("topk", "dispatch") or f in (site.inputs or ())
                }
            late = {f for f in found if f != INPUT and self.found.order(f) >= self.found.order(site)}
            for producer in late:
                found |= {f for f in result.get(producer, ()) if f is not site}
            result[site] = found - late
        return result

    # ---- names ----

    def _names(self, group_of: dict[LiftedSite, str]) -> dict[LiftedSite, str]:
        names: dict[LiftedSite, str] = {}
        for path, group in self.groups.items():
            counts: dict[str, int] = {}
            taken: set[str] = set()
            for site in group:
                name = self._relative(site.name, path) or site.facts.get("names", ["op"])[0].rpartition(".")[2]
                counts[name] = counts.get(name, 0) + 1
                numbered = name if counts[name] == 1 else f"{name}_{counts[name]}"
                while numbered in taken:
                    counts[name] += 1
                    numbered = f"{name}_{counts[name]}"
                taken.add(numbered)
                names[site] = numbered
        return names

    def _relative(self, name: str, layer: str) -> str:
        """A full name as it reads inside its layer; a module shared between layers is known there by its own name."""
        if layer in ("", "."):
            return name
        if name == layer:
            return ""
        if name.startswith(layer + "."):
            return name[len(layer) + 1 :]
        head, tail = name, ""
        while head:
            for alias in self.flow.aliases(head):
                if alias.startswith(layer + "."):
                    return joined(alias[len(layer) + 1 :], tail)
            head, _, last = head.rpartition(".")
            tail = joined(last, tail)
        return name

    # ---- ops ----

    def _op(self, site: LiftedSite, layer: str) -> Op:
        facts = {
            k: v
            for k, v in site.facts.items()
            if k not in ("dims", "slack", "picked", "names", "bent", "topk", "router", "operands")
        }
        if "rows" not in facts and "dims" in site.facts and site.kind != "attention":
            is_data = site.node in self.flow.from_input
            facts["rows"] = self.found.sizes.rows(site.facts["dims"], is_data=is_data, slack=site.facts.get("slack", 1))
            if is_data and self.found.sizes.seq is not None and not facts["rows"].seq and facts["rows"].factor > 1:
                self.fixed.append(site.name)
        if site.kind == "rope":
            facts["rows"] = self.found.sizes.rows((self.traced.batch or 1, self.traced.seq_len or 1))
        params = self._params(site, layer)
        return KINDS[site.kind](
            name=self.names[site], role=site.role, part=site.part, inputs=self.inputs[site], params=params,
            dtype=params[0].dtype if params else self.dtype, **facts,
        )  # fmt: skip

    def _params(self, site: LiftedSite, layer: str) -> tuple[Param, ...]:
        names = self._parameter_names(site, layer)
        return tuple(self.parameters.param(name, layer, self._relative(name, layer)) for name in names)

    def _parameter_names(self, site: LiftedSite, layer: str) -> list[str]:
        if site.kind == "other":
            return list(site.facts["names"])
        near = site.name if layer in ("", ".") else joined(layer, self.names[site])
        return [self.found.param_name(node, near) for node in site.params]

    def ir(self) -> IR:
        used = {n for path, group in self.groups.items() for s in group for n in self._parameter_names(s, path)}
        self.parameters.name_all(used)
        stem = tuple(self._op(site, "") for site in self.groups[""])
        blocks: list[Block] = []
        layers: list[Layer] = []
        ops_of: dict[str, tuple[Op, ...]] = {}
        for path in self.layers:
            if path in self.traced.stubbed:
                ops_of[path] = self.parameters.retied(
                    ops_of[self.traced.stubbed[path]], self.traced.stubbed[path], path
                )
            else:
                ops_of[path] = tuple(self._op(site, path) for site in self.groups[path])
            block = Block(ops=ops_of[path])
            if block not in blocks:
                blocks.append(block)
            layers.append(Layer(path=path, block=blocks.index(block)))
        tail = tuple(self._op(site, ".") for site in self.groups["."])
        ir = IR(
            name=written_class(self.model), dtype=self.dtype, stem=stem, blocks=tuple(blocks), layers=tuple(layers),
            tail=tail, max_positions=positions(self.model), source="graph", notes=self._notes(),
            module=self.model, graph=self.traced,
        )  # fmt: skip
        ir.check()
        return ir

    def _notes(self) -> tuple[str, ...]:
        notes = [f"not by {attempt.tracer}: {attempt.error}: {attempt.reason}" for attempt in self.traced.attempts]
        if self.traced.specialized:
            notes.append("the forward reads values: the graph holds for the example's values")
        if self.fixed:
            notes.append(
                f"rows of {len(self.fixed)} ops are no product of batch and length and stand as in the example "
                f"(first: {self.fixed[0]})"
            )
        return (*notes, *self.found.notes)
