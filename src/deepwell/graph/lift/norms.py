"""Normalizations: modules that are one, calls that are one, and x * rsqrt(mean(x^2)) wherever it stands."""

from torch import fx

from deepwell.graph.fx import argument
from deepwell.graph.lift.flow import FORMS
from deepwell.graph.lift.site import LiftedSite, LiftState, joined

_CALLS = {
    "layer_norm": "layer", "native_layer_norm": "layer", "rms_norm": "rms", "group_norm": "group",
    "batch_norm": "batch", "normalize": "l2", "instance_norm": "instance",
}  # fmt: skip


def find_norms(found: LiftState) -> None:
    for path, nodes in _norm_modules(found).items():
        for part in _calls_apart(found, nodes):
            _add_norm(found, path, part)
    for node in found.flow.nodes:
        if found.is_free(node) and found.flow.op(node) in _CALLS:
            _add_norm(found, found.flow.path(node), {node})
    for node in found.flow.nodes:
        if found.is_free(node) and found.flow.op(node) in ("rsqrt", "div") and found.flow.is_float(node):
            _by_hand(found, node)


def _norm_modules(found: LiftState) -> dict[str, set[fx.Node]]:
    """Nodes of each module that is a norm by its class: no parameters but vectors, no contraction inside."""
    groups: dict[str, set[fx.Node]] = {}
    verdicts: dict[str, str | None] = {}
    for node in found.flow.nodes:
        if node.op == "placeholder" or not found.is_free(node):
            continue
        path = found.flow.path(node)
        if path not in verdicts:
            verdicts[path] = _norm_path(found, path)
        norm = verdicts[path]
        if norm is not None:
            groups.setdefault(norm, set()).add(node)
    taken = {found.flow.path(site.node) for site in found.sites}
    return {path: nodes for path, nodes in groups.items() if path not in taken}


def _norm_path(found: LiftState, path: str) -> str | None:
    if not path:
        return None
    module = found.flow.module(path)
    if "norm" not in type(module).__name__.lower() or any(
        p.dim() > 1 and p.numel() != max(p.shape) for p in module.parameters()
    ):
        return None
    return path


def _calls_apart(found: LiftState, nodes: set[fx.Node]) -> list[set[fx.Node]]:
    """The nodes of a module split by call: calls share no values but weights."""
    flow = found.flow
    rest = {n for n in nodes if n not in flow.weights}
    parts: list[set[fx.Node]] = []
    while rest:
        part: set[fx.Node] = set()
        pending = [min(rest, key=flow.index.__getitem__)]
        while pending:
            node = pending.pop()
            if node not in rest:
                continue
            rest.remove(node)
            part.add(node)
            pending.extend(n for n in (*flow.sources[node], *flow.readers.get(node, ())) if n in rest)
        parts.append(part)
    return parts


def _add_norm(found: LiftState, path: str, nodes: set[fx.Node]) -> None:
    flow = found.flow
    outward = [n for n in nodes if flow.is_float(n) and any(r not in nodes for r in flow.readers.get(n, ()))]
    if not outward or not any(flow.ops[n] not in FORMS for n in nodes):
        return  # a norm module that is switched off, or one that only moves data
    node = max(outward, key=flow.index.__getitem__)
    params = found.params_of(nodes)
    reads = {s: None for n in sorted(nodes, key=flow.index.__getitem__) for s in flow.sources[n]
             if s not in nodes and s not in flow.weights}  # fmt: skip
    shape = flow.shape(node)
    width = flow.numel(params[0]) if params else shape[-1]
    kind = _kind(found, nodes)
    if kind in ("batch", "group", "instance"):
        width = shape[1] if len(shape) > 1 else shape[-1]
    is_module = bool(path) and "norm" in type(flow.module(path)).__name__.lower()
    found.add(
        LiftedSite(
            "norm", node, path, path if is_module else joined(path, "norm"), nodes, tuple(reads), params=params,
            facts={"norm": kind, "width": width, "dims": _row_dims(shape, width, kind)}, role="norm",
        )
    )  # fmt: skip


def _row_dims(shape: tuple[int, ...], width: int, kind: str) -> tuple[int, ...]:
    if kind in ("batch", "group", "instance"):
        return shape[:1] + shape[2:]
    dims = list(shape)
    covered = 1
    while dims and covered < width:
        covered *= dims.pop()
    return tuple(dims)


def _kind(found: LiftState, nodes: set[fx.Node]) -> str:
    flow = found.flow
    ops = {flow.op(n) for n in nodes}
    for call, kind in _CALLS.items():
        if call in ops:
            return kind
    if "norm" in ops or "linalg_vector_norm" in ops or "vector_norm" in ops:
        return "l2"
    means = {n for n in nodes if flow.op(n) in ("mean", "var_mean", "var")}
    centred = any(
        flow.op(n) == "sub" and any(flow.trunk(s) in means or flow.op(s) == "getitem" for s in flow.sources[n])
        for n in nodes
    )
    if centred or ops & {"var", "var_mean", "std"}:
        return "layer"
    if "mean" not in ops and "sum" in ops:
        return "l2"
    return "rms"


def _by_hand(found: LiftState, node: fx.Node) -> None:
    """x * rsqrt(mean(x^2) + eps), x / sqrt(...) outside of norm modules, with the weight behind it."""
    flow = found.flow
    start = node if flow.op(node) == "rsqrt" else argument(node, "other")
    if not isinstance(start, fx.Node) or (
        start is not node and flow.op(start) not in ("sqrt", "norm", "linalg_vector_norm")
    ):
        return
    inner: set[fx.Node] = {start}
    squared = None
    for source in flow.back(flow.sources[start], lambda n: flow.op(n) == "pow" or not found.is_free(n)):
        if flow.op(source) not in ("mean", "add", "pow", "mul", "clamp", "to", "sum") or not found.is_free(source):
            continue
        inner.add(source)
        is_square = flow.op(source) == "pow" or (
            flow.op(source) == "mul" and len(flow.sources[source]) == 1 and len(flow.tensor_args(source)) == 2
        )
        squared = flow.sources[source][0] if is_square and flow.sources[source] else squared
    if squared is None or not any(flow.op(n) in ("mean", "sum") for n in inner):
        return
    if start is node:
        scaled = [r for r in flow.readers.get(node, ()) if flow.op(r) == "mul"]
        inner.update(scaled)
        last = scaled[0] if scaled else None
    else:
        last = node
    if last is None or flow.trunk(squared) not in {flow.trunk(s) for s in flow.sources[last]}:
        return
    nodes = {n for n in inner if found.is_free(n)} | {last}
    for reader in flow.readers.get(last, ()):
        weighted = flow.op(reader) == "mul" and any(s in flow.weights for s in flow.sources[reader])
        if weighted and len(flow.readers[last]) == 1 and found.is_free(reader):
            nodes.add(reader)
    _add_norm(found, flow.path(last), nodes)
