"""Mixture-of-experts routing: the choice of experts, and the gather and scatter around grouped linears."""

from torch import fx

from deepwell.graph.fx import argument
from deepwell.graph.lift.site import LiftedSite, LiftState, is_inside, joined, parent
from deepwell.graph.ops import Extent


def find_topk(found: LiftState) -> None:
    """The router's choice: the last top-k behind a linear, with its scores and the group limits in front of it."""
    flow = found.flow
    nodes = [n for n in flow.nodes if flow.op(n) == "topk" and found.is_free(n) and n in found.live]
    for node in [n for n in nodes if not _limits_another(found, n)]:
        scores = argument(node, "input")
        shape = flow.shape(scores)
        linears = [site for site in found.sites_behind([scores], through=("norm",)) if site.kind == "linear"]
        routers = [site for site in linears if shape and site.facts["n"] == shape[-1]]
        if not routers:
            continue  # a choice among positions or blocks of them is sparse attention, not routing
        inner = {n for n in flow.back([node], lambda n: not found.is_free(n)) if found.is_free(n) and n in found.live}
        inner |= {r for r in flow.readers.get(node, ()) if flow.op(r) == "getitem"}
        router = routers[-1]
        site = LiftedSite(
            "topk", node, flow.path(node), joined(router.name, "topk"), inner, role="router", inputs=[router],
            facts={
                "experts": shape[-1], "top_k": int(argument(node, "k")), "dims": shape[:-1],
                "scoring": _scoring(found, node, inner), "router": router,
            },
        )  # fmt: skip
        found.add(site)
        for linear in routers:
            linear.role, linear.part = "router", ""


def _limits_another(found: LiftState, node: fx.Node) -> bool:
    """Does this top-k only choose groups for another one of the same module?"""
    flow = found.flow
    later = flow.forward([node], lambda r: not found.is_free(r))
    return any(flow.op(r) == "topk" and flow.path(r) == flow.path(node) for r in later)


def _scoring(found: LiftState, node: fx.Node, inner: set[fx.Node]) -> str:
    ops = {found.flow.op(n) for n in inner}
    if "softmax" in ops:
        return "softmax"
    if "sigmoid" in ops:
        return "sigmoid"
    chosen = [r for r in found.flow.readers.get(node, ()) if found.flow.is_float(r)]
    after = {found.flow.op(n) for n in found.flow.forward(chosen, lambda n: not found.is_free(n))}
    return "sigmoid" if "sigmoid" in after and "softmax" not in after else "softmax"


def find_experts(found: LiftState) -> None:
    """Dispatch before and combine after the grouped linears of each experts module that a router feeds."""
    _merge_picked(found)
    attending = {site.path for site in found.of("attention")}
    groups: dict[str, list[LiftedSite]] = {}
    for site in found.of("grouped_linear"):
        groups.setdefault(parent(site.name), []).append(site)
    for path, sites in groups.items():
        topk = _choice_behind(found, sites)
        is_grouped = any("grouped" in found.flow.op(site.node) for site in sites)
        if (topk is None and not is_grouped) or path in attending:
            continue
        for site in sites:
            site.role = "experts"
        _surround(found, path, sorted(sites, key=found.order), topk)


def _choice_behind(found: LiftState, sites: list[LiftedSite]) -> LiftedSite | None:
    """The nearest top-k that the group follows from."""
    choices: list[LiftedSite] = []

    def stop(node: fx.Node) -> bool:
        owner = found.owner.get(node)
        if owner is not None and owner.kind == "topk":
            choices.append(owner)
        return owner is not None and owner.kind in ("topk", "embedding")

    first = min(sites, key=found.order)
    around = parent(parent(parent(first.name)))
    for _ in found.flow.back(first.node.all_input_nodes, stop):
        pass
    experts = first.facts["experts"]
    near = [c for c in choices if c.path.startswith(around) and c.facts["experts"] >= experts]
    return max(near, key=found.order) if near else None


def _merge_picked(found: LiftState) -> None:
    """A loop over experts uses one matrix of the stack at a time: together they are one grouped linear."""
    kept: dict[tuple[str, tuple[fx.Node, ...]], LiftedSite] = {}
    for site in [s for s in found.of("grouped_linear") if s.facts["picked"]]:
        key = (parent(site.name), tuple(site.params))
        if key in kept:
            first = kept[key]
            first.nodes |= site.nodes
            first.reads = (*(first.reads or ()), *(site.reads or ()))
            for node in site.nodes:
                found.owner[node] = first
            found.sites.remove(site)
        else:
            kept[key] = site
            topk = _choice_behind(found, [site])
            if topk is not None:
                site.facts["rows"] = Extent(topk.facts["top_k"], 1, 1 if found.sizes.seq else 0)
                found.note(f"{site.name}: a loop over experts, counted with an even spread of the router's choices")


def _surround(found: LiftState, path: str, sites: list[LiftedSite], topk: LiftedSite | None) -> None:
    flow = found.flow
    inside = set(sites)
    firsts = [s for s in sites if not _follows(found, s, inside)]
    first = firsts[0]
    data = list(first.reads or ())
    cone = {
        n
        for n in flow.back(
            flow.sources[first.node], lambda n: not found.is_free(n) or not is_inside(flow.path(n), path)
        )
        if found.is_free(n) and is_inside(flow.path(n), path) and n in found.live and n not in flow.weights
    }
    reads = {s: None for n in cone for s in flow.sources[n] if s not in cone} if cone else dict.fromkeys(data)
    rows = {"rows": first.facts["rows"]} if "rows" in first.facts else {"dims": first.facts["dims"]}
    dispatch = LiftedSite(
        "dispatch", first.node, path, joined(path, "dispatch"), cone, tuple(reads), role="experts", step=-0.5,
        facts={"width": first.facts["k"], **rows},
    )  # fmt: skip
    found.add(dispatch, owns_node=False)
    dispatch.facts["topk"] = topk
    for site in firsts:
        site.inputs = [dispatch]
    lasts = [s for s in sites if not any(t in inside for t in found.sites_ahead(s, through=("activation",)))]
    _merge_activations(found, path, sites)
    end = _combine_end(found, path, lasts)
    if end is None:
        found.note(f"{path}: no place was found where the experts' outputs are added back into token order")
        return
    after = set(flow.forward([n for s in lasts for n in s.nodes], lambda n: n is end))
    region = {n for n in flow.back([end], lambda n: n not in after) if n in after and found.is_free(n)}
    shape = flow.shape(end)
    copies = first.facts["rows"] if "rows" in first.facts else found.sizes.rows(first.facts["dims"])
    combine = LiftedSite(
        "combine", end, path, joined(path, "combine"), region, role="experts",
        inputs=[*([topk] if topk else []), *lasts],
        facts={"top_k": topk.facts["top_k"] if topk else copies.factor, "width": shape[-1], "dims": shape[:-1]},
    )  # fmt: skip
    found.add(combine)


def _follows(found: LiftState, site: LiftedSite, group: set[LiftedSite]) -> bool:
    behind = found.sites_behind(site.reads or (), through=("activation", "dispatch"))
    return any(other in group and other is not site for other in behind)


def _merge_activations(found: LiftState, path: str, sites: list[LiftedSite]) -> None:
    """The activations of a loop over experts are one; those of a grouped product stand alone already."""
    inner = [s for s in found.of("activation") if is_inside(s.path, path)]
    for site in inner:
        site.role = "experts"
    rows = sites[0].facts.get("rows")
    if rows is None or len(inner) < 2:
        return
    first, *others = sorted(inner, key=found.order)
    for site in others:
        first.nodes |= site.nodes
        for node in site.nodes:
            found.owner[node] = first
        found.sites.remove(site)
    first.facts["rows"] = rows


def _combine_end(found: LiftState, path: str, lasts: list[LiftedSite]) -> fx.Node | None:
    """Where each token has one row again, with the casts and weights that follow inside the experts module."""
    flow = found.flow
    starts = [n for site in lasts for n in site.nodes]
    end = next(
        (
            n
            for n in flow.forward(starts, lambda n: not found.is_free(n))
            if found.is_free(n) and _is_per_token(found, n, lasts)
        ),
        None,
    )
    while end is not None:
        readers = flow.readers.get(end, [])
        if len(readers) != 1 or not is_inside(flow.path(readers[0]), path) or not found.is_free(readers[0]):
            break
        others = [s for s in flow.sources[readers[0]] if s is not end and s in found.live]
        foreign = [site for site in found.sites_behind(others) if site.role not in ("experts", "router")]
        if foreign or not flow.is_float(readers[0]):
            break
        end = readers[0]
    return end


def _is_per_token(found: LiftState, node: fx.Node, lasts: list[LiftedSite]) -> bool:
    shape = found.flow.shape(node)
    tokens = (found.sizes.batch or 1) * (found.sizes.seq or 1)
    return bool(shape) and shape[-1] == lasts[0].facts["n"] and found.flow.numel(node) == tokens * shape[-1]
