"""Roles and parts by dataflow: which linear makes queries, which one gates, which one is the head."""

from torch import fx, nn

from deepwell.graph.lift.layers import layer_lists
from deepwell.graph.lift.site import LiftedSite, LiftState, is_inside, parent

# What stands between a projection and the op it serves.
_BETWEEN = ("norm", "rope", "conv")


def assign_roles(found: LiftState) -> None:
    _attention(found)
    _head(found)
    mixers = _mixer_modules(found)
    for site in found.sites:
        if site.role == "other" and any(is_inside(site.name, mixer) for mixer in mixers):
            site.role = "mixer"
    _feed_forward(found)
    _leftovers(found)


# ---- attention ----


def _attention(found: LiftState) -> None:
    for site in found.of("attention"):
        operands = site.facts.pop("operands", None)
        if operands is None:
            continue
        feeds: dict[LiftedSite, str] = {}
        for letter, operand in zip("qkv", operands.seen, strict=True):
            for source in found.sites_behind(operand, through=_BETWEEN):
                if source.kind == "linear" and source.role == "other":
                    feeds[source] = feeds.get(source, "") + letter
        parts = {linear: letters for linear, letters in feeds.items() if _near(linear, site)}
        _low_rank(found, site, parts)
        for linear, part in parts.items():
            linear.role, linear.part = "attention", part
        _output(found, site)


def _near(linear: LiftedSite, attention: LiftedSite) -> bool:
    """Does the linear stand in the attention module or beside it (projections of a block that attends itself)?"""
    return linear.name.startswith(parent(attention.path))


def _low_rank(found: LiftState, attention: LiftedSite, parts: dict[LiftedSite, str]) -> None:
    """Chains of two linears: the first becomes `_a`, the second `_b`."""
    for second, letters in list(parts.items()):
        firsts = [
            s for s in found.sites_behind(second.reads or (), through=("norm",))
            if s.kind == "linear" and parent(s.name) == parent(second.name) and s.role in ("other", "attention")
        ]  # fmt: skip
        if not firsts:
            continue
        parts[second] = f"{letters}_b"
        for first in firsts:
            known = parts.get(first, "")
            # One latent may serve several: q_a and kv_a become qkv_a.
            served = letters + (known.removesuffix("_a") if known.endswith("_a") else "")
            parts[first] = "".join(x for x in "qkv" if x in served) + "_a"


def _output(found: LiftState, attention: LiftedSite) -> None:
    ahead = [s for s in found.sites_ahead(attention, through=("norm", "activation")) if s.kind == "linear"]
    ahead = [s for s in ahead if s.role == "other" and _near(s, attention)]
    for linear in ahead[:1]:
        linear.role, linear.part = "attention", "o"
        seconds = [
            s for s in found.sites_ahead(linear, through=("norm",))
            if s.kind == "linear" and s.role == "other" and parent(s.name) == parent(linear.name)
            and parent(s.name) == attention.path
        ]  # fmt: skip
        if seconds:
            linear.part, seconds[0].role, seconds[0].part = "o_a", "attention", "o_b"


# ---- mixers ----


def _mixer_modules(found: LiftState) -> set[str]:
    """Modules that mix along the sequence without softmax: a convolution or parameters of their own beside linears."""
    attending = {site.path for site in found.of("attention")}
    linears = {parent(site.name) for site in found.of("linear")} | {
        parent(site.name) for site in found.of("grouped_linear")
    }
    found_mixers: set[str] = set()
    for path in linears - {""}:
        if any(is_inside(a, path) or is_inside(path, a) for a in attending):
            continue
        module = found.flow.module(path)
        own = [n for n, p in module.named_parameters(recurse=False) if p.dim() <= 2 and n not in ("weight", "bias")]
        conv = any(s.path == path or parent(s.name) == path for s in found.of("conv"))
        matmul = any(s.path == path for s in found.of("matmul"))
        is_router = any(s.role == "router" and (s.name == path or parent(s.name) == path) for s in found.of("linear"))
        if (own and not is_router) or conv or matmul:
            found_mixers.add(path)
    return found_mixers


# ---- feed forward ----


def _feed_forward(found: LiftState) -> None:
    moe = [pair for pair in _moe_modules(found) if not _attends(found, pair[0])]
    attending = {site.path for site in found.of("attention")} - {""}
    for act in found.of("activation"):
        bent: fx.Node = act.facts.pop("bent")
        if act.role not in ("other", "experts"):
            continue
        attends = any(is_inside(act.path, a) for a in attending)
        if act.role == "other" and attends and not _stands_between(found, act):
            act.role = "attention"
            continue
        _mlp_parts(found, act, bent, _mlp_role(act, moe))


def _stands_between(found: LiftState, act: LiftedSite) -> bool:
    """Has it linears without a role on both sides, as in a block that attends and feeds forward in one module?"""
    behind = found.sites_behind(
        [s for n in act.nodes for s in found.flow.sources[n] if s not in act.nodes], through=("norm",)
    )
    ahead = found.sites_ahead(act, through=("norm",))
    return all(any(s.kind == "linear" and s.role == "other" for s in side) for side in (behind, ahead))


def _moe_modules(found: LiftState) -> list[tuple[str, str]]:
    """(module that holds router and experts, experts module)."""
    modules: list[tuple[str, str]] = []
    for site in found.of("dispatch"):
        topk = site.facts.pop("topk")
        router = topk.facts.get("router") if topk is not None else None
        names = [site.path] + ([router.name] if router is not None else [])
        modules.append((_common(names), site.path))
    for site in found.of("topk"):
        router = site.facts.pop("router", None)
        if router is not None:
            modules.append((parent(router.name), router.name))
    return modules


def _attends(found: LiftState, holder: str) -> bool:
    """Does the module also hold attention? Then it is the whole layer and not its feed-forward part."""
    return any(is_inside(site.path, holder) for site in found.of("attention"))


def _common(paths: list[str]) -> str:
    parts: list[str] = []
    for words in zip(*(p.split(".") for p in paths), strict=False):
        if len(set(words)) > 1:
            break
        parts.append(words[0])
    return ".".join(parts)


def _mlp_role(act: LiftedSite, moe: list[tuple[str, str]]) -> str:
    if act.role == "experts":
        return "experts"
    beside = any(is_inside(act.path, holder) for holder, _ in moe if holder)
    return "shared_experts" if beside else "mlp"


def _mlp_parts(found: LiftState, act: LiftedSite, bent: fx.Node, role: str) -> None:
    kinds = ("linear", "grouped_linear")
    allowed = ("other", role)
    through = ("norm", "dispatch")

    def linears_behind(nodes: list[fx.Node]) -> list[LiftedSite]:
        return [
            s
            for s in found.sites_behind(nodes, through=through)
            if s.kind in kinds and s.role in allowed and not s.part
        ]

    inside = act.nodes
    reads = [s for n in inside for s in found.flow.sources[n] if s not in inside and found.is_activation(s)]
    gates = linears_behind([bent])
    others = [s for s in linears_behind([r for r in reads if r is not bent]) if s not in gates]
    downs = [
        s for s in found.sites_ahead(act, through=("norm",)) if s.kind in kinds and s.role in allowed and not s.part
    ]
    if not gates and not others:
        return
    act.role = role
    for site in gates:
        fused = act.facts["gated"] and not others
        site.part = "gate_up" if fused else "gate" if act.facts["gated"] else "up"
        site.role = role
    for site in others:
        site.role, site.part = role, "up"
    for site in downs[:1]:
        site.role, site.part = role, "down"


# ---- the rest ----


def _head(found: LiftState) -> None:
    """The linear whose values are the loss's logits, or that stands last before the model's output.

    The last linear of a part of a model is none: of a graph that does not hold the whole model, and of a module without
    layers and embeddings (a block, an MLP). There the loss, a weight that is an embedding's, or the width tells.
    """
    tables = [m for m in found.flow.model.modules() if isinstance(m, nn.Embedding)]
    vocabularies = {site.facts["vocab"] for site in found.of("embedding")}
    if not found.is_whole and tables:
        vocabularies.add(max(table.num_embeddings for table in tables))
    looked_up = [found.flow.parameter(node) for site in found.of("embedding") for node in site.params]
    embedded = {id(weight) for weight in (*(table.weight for table in tables), *looked_up) if weight is not None}
    layers = [path for paths in layer_lists(found.flow.model) for path in paths]
    is_model = found.is_whole and bool(layers or vocabularies)
    losses = found.of("loss")
    feeds_loss = set(
        found.sites_behind([read for site in losses for read in site.reads or ()], through=("activation",))
    )
    last = feeds_loss | set(found.sites_behind(found.flow.output.all_input_nodes, through=("activation", "loss")))
    # With adapters on it the head is one of the terms of the logits; as a term the width has to tell.
    read = [*(node for site in losses for node in site.reads or ()), *found.flow.output.all_input_nodes]
    terms = set(found.sites_behind(read, through=("activation", "loss", "add")))
    for site in found.of("linear"):
        if site.role != "other":
            continue
        n = site.facts["n"]
        is_known = n in vocabularies or any(n == loss.facts["vocab"] for loss in losses)
        is_outside = not any(is_inside(site.name, path) for path in layers)
        is_tied = any(id(found.flow.parameter(node)) in embedded for node in site.params)
        if is_tied or (site in feeds_loss and is_known) or (site in last and is_outside and (is_known or is_model)):
            site.role, site.part = "head", ""
        elif site in terms and is_outside and is_known:
            site.role, site.part = "head", ""


def _leftovers(found: LiftState) -> None:
    attending = {site.path for site in found.of("attention")} - {""}
    shared = {site.path: site.role for site in found.of("activation") if site.role in ("mlp", "shared_experts")}
    holders = {h for h in (parent(site.path) for site in found.of("combine")) if h and not _attends(found, h)}
    for site in sorted(found.sites, key=found.order):
        if site.kind == "add" and all(s.role == "embedding" for s in found.sites_behind(site.node.all_input_nodes)):
            site.role = "embedding"
        if site.role == "residual" and any(is_inside(site.path, h) for h in holders):
            site.role = "shared_experts"
        if site.role != "other" or site.kind in ("other",):
            continue
        if any(site.name.startswith(a + ".") for a in attending):
            site.role = "attention"
        elif site.kind == "linear" and parent(site.name) in shared:
            site.role = shared[parent(site.name)]
