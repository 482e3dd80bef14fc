"""Which weights of an engine are stored in their format, and the check that the file computes what the engine does.

A weight leaves its dtype where the engine's forward multiplies by its codes and nothing else reads it. That is not
taken from the bindings alone: an engine of the same formats runs an example with the weights as the file will give them
back, and a weight that changes a single bit of the result is stored whole, with that reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from deepwell.artifacts.export.weights import Form, Packed, pack
from deepwell.engine.engine import Engine
from deepwell.errors import CaptureError
from deepwell.graph.example_inputs import DEFAULT_BATCH, TARGET_NAMES, ExampleInputs, resolve_inputs
from deepwell.graph.ir import Site
from deepwell.graph.ops import GroupedLinear, Linear
from deepwell.graph.trace import MODEL_ERRORS
from deepwell.kernels.gemm.schemes import GemmScheme, parse_scheme

# Methods whose weights have one scale for all linears that are one product.
_SHARED_SCALE = ("fp8_row", "fp8_tensor")


@dataclass(slots=True, kw_only=True)
class PackedWeights:
    """By parameter name: weights that are stored packed, and why others with a format are not."""

    packed: dict[str, Packed] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    is_checked: bool = False


def choose_forms(engine: Engine, calls: Sequence[ExampleInputs]) -> PackedWeights:
    """Pack what can be packed. `engine` runs the formats to be exported; its model is left as it was."""
    own, choice = engine.deepwell, PackedWeights()
    parameters = dict(own.model.named_parameters(remove_duplicate=False))
    names = {path: f"{path}.weight" if f"{path}.weight" in parameters else path for path in own.bound.schemes}
    if not names:
        return PackedWeights(is_checked=True)
    with evaluating(own.model):
        before = [run_call(engine, call) for call in calls]
        if not all(same_tree(result, run_call(engine, call)) for result, call in zip(before, calls, strict=True)):
            return PackedWeights(reasons=dict.fromkeys(names.values(), "the forward is not deterministic here"))
        for sites in _products(engine):
            met = [site for site in sites if site.path in own.options.rewritten]
            made = _packed(engine, met, [names[site.path] for site in met], parameters) if met else []
            if isinstance(made, str):
                choice.reasons |= {names[site.path]: made for site in met}
            else:
                choice.packed |= {names[site.path]: packed for site, packed in zip(met, made, strict=True)}
            why = "no product with it was met in its format when the example ran"
            choice.reasons |= {names[site.path]: why for site in sites if site.path not in own.options.rewritten}
        for name in _spoilt(engine, calls, before, choice.packed):
            del choice.packed[name]
            choice.reasons[name] = "something else than its product in that format reads it"
    choice.is_checked = True
    return choice


def example_calls(model: nn.Module, example_inputs: Any) -> list[ExampleInputs]:
    """The calls to check, and to write graphs of: the example; where it was guessed, without and with targets."""
    given = resolve_inputs(model, example_inputs, DEFAULT_BATCH, None)
    if not given.guessed:
        return [given]
    plain = {name: value for name, value in given.kwargs.items() if name not in TARGET_NAMES}
    return [replace(given, kwargs=plain), given] if len(plain) < len(given.kwargs) else [given]


def runnable(model: nn.Module, calls: Sequence[ExampleInputs]) -> list[ExampleInputs]:
    """Those calls that the model takes. Raises CaptureError, with the model's own words, where it takes none."""
    found, last = [], None
    with evaluating(model):
        for call in calls:
            try:
                run_call(model, call)
            except MODEL_ERRORS as error:
                last = error
            else:
                found.append(call)
    if not found:
        first = next((line for line in str(last).splitlines() if line.strip()), type(last).__name__)
        raise CaptureError(
            f"{type(model).__name__} does not run on the example: {first}; pass example_inputs"
        ) from last
    return found


@contextmanager
def without_regions(model: nn.Module) -> Iterator[None]:
    """The model with its own forwards where an engine put compiled regions in their place."""
    taken = [m for m in model.modules() if getattr(m.__dict__.get("forward"), "is_deepwell_region", False)]
    forwards = [module.__dict__.pop("forward") for module in taken]
    try:
        yield
    finally:
        for module, forward in zip(taken, forwards, strict=True):
            module.__dict__["forward"] = forward


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's own mode comes back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def run_call(model: nn.Module, call: ExampleInputs) -> Any:
    result = model(*call.args, **dict(call.kwargs))
    plain = dict(result) if isinstance(result, Mapping) else result
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, plain)


# ---- which weight has which form ----


def _products(engine: Engine) -> list[list[Site]]:
    """Linears and experts with a scheme; those that are one product on this device together."""
    products = engine.deepwell.options.products
    groups: dict[Any, list[Site]] = {}
    for site in engine.deepwell.ir.sites():
        scheme = engine.deepwell.bound.schemes.get(site.path)
        if scheme is None or not isinstance(site.op, (Linear, GroupedLinear)):
            continue
        product = products.get(site.path)
        is_merged = isinstance(site.op, Linear) and product is not None and product.n != site.op.n
        key = (site.layer, site.op.inputs[:1], scheme, site.op.k, product.n) if is_merged and product else site.path
        groups.setdefault(key, []).append(site)
    return list(groups.values())


def _packed(
    engine: Engine, sites: Sequence[Site], names: Sequence[str], parameters: Mapping[str, Tensor]
) -> list[Packed] | str:
    """The weights of one product packed, or why they are stored whole."""
    own, op = engine.deepwell, sites[0].op
    found = [_form_of(engine, site, name, parameters) for site, name in zip(sites, names, strict=True)]
    for why in found:
        if isinstance(why, str):
            return why
    form = found[0]
    assert isinstance(form, Form)
    if any(other != form for other in found):
        return "one product reads weights of two forms"
    product = own.options.products.get(sites[0].path)
    total = sum(site.op.n for site in sites if isinstance(site.op, Linear))
    shares = parse_scheme(own.bound.schemes[sites[0].path]).fwd.method in _SHARED_SCALE
    if isinstance(op, Linear) and product is not None and product.n != total and shares:
        return "its scale is shared with weights that are not known"
    packed = pack([parameters[name] for name in names], form)
    return packed if packed is not None else f"{form.format} of what {form.format} gives back is not the same"


def _form_of(engine: Engine, site: Site, name: str, parameters: Mapping[str, Tensor]) -> Form | str:
    """The form of a weight, or why it has none."""
    how, op = parse_scheme(engine.deepwell.bound.schemes[site.path]).fwd, site.op
    assert isinstance(op, (Linear, GroupedLinear))
    weight = parameters.get(name)
    if weight is None:
        return "it is no parameter"
    if sum(other is weight for other in parameters.values()) > 1:
        return "it is tied to another parameter"
    axis = _contracted(engine.deepwell.model, site, weight)
    if axis is None:
        return "which of its axes is contracted is not known"
    fmt = _format(how, is_last=axis == weight.dim() - 1)
    if fmt is None:
        return "its forward runs in the model's dtype"
    if how.method == "fp8_1x128" and (op.n % 128 or op.k % 128):
        return "its squares of 128 are padded, or reach into the next weight"
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it is {weight.dtype}"
    return Form(format=fmt, axis=axis, by_expert=isinstance(op, GroupedLinear))


def _format(how: GemmScheme, *, is_last: bool) -> str | None:
    """The storage of the right operand of a forward product; None in the model's dtype."""
    if how.method in _SHARED_SCALE:
        return "fp8_e4m3_tensor_pow2"
    if how.method == "fp8_1x128":
        return "fp8_e4m3_128x128_pow2"
    if how.method == "grouped_fp8":
        return "fp8_e4m3_row_pow2" if is_last else "fp8_e4m3_tensor_pow2"
    if how.method in ("native", "emulate") and how.format is not None and not how.format.rhs.hadamard:
        return how.format.rhs.format
    return None


def _contracted(model: nn.Module, site: Site, weight: Tensor) -> int | None:
    """The axis of K in a weight: [N, K] or [K, N], behind the axis of experts."""
    op = site.op
    assert isinstance(op, (Linear, GroupedLinear))
    lead = (op.experts,) if isinstance(op, GroupedLinear) else ()
    shape = tuple(weight.shape)
    if op.n != op.k:
        fits = {(*lead, op.n, op.k): len(lead) + 1, (*lead, op.k, op.n): len(lead)}
        return fits.get(shape)
    if shape != (*lead, op.n, op.k):
        return None
    modules = dict(model.named_modules(remove_duplicate=False))
    # The module of a linear, or the one that holds experts' parameters.
    owner = modules.get(site.path, modules.get(site.path.rpartition(".")[0]))
    if isinstance(owner, nn.Linear) or (type(owner).__name__ == "Conv1D" and not lead):
        return int(isinstance(owner, nn.Linear))
    transposed = getattr(owner, "is_transposed", None)
    return len(lead) + (not transposed) if isinstance(transposed, bool) and lead else None


# ---- the check ----


def _spoilt(
    engine: Engine, calls: Sequence[ExampleInputs], before: Sequence[Any], packed: Mapping[str, Packed]
) -> list[str]:
    """Weights that change the result where they are read back from their form, found by halving."""

    def search(names: list[str]) -> list[str]:
        if not names:
            return []
        with _restored(engine.deepwell.model, {name: packed[name] for name in names}):
            after = [run_call(engine, call) for call in calls]
        if all(map(same_tree, before, after)):
            return []
        if len(names) == 1:
            return names
        half = len(names) // 2
        # Where neither half does it alone, all of them together do.
        return search(names[:half]) + search(names[half:]) or names

    found: list[str] = []
    while wrong := search([name for name in packed if name not in found]):
        found += wrong
    return found


@contextmanager
def _restored(model: nn.Module, packed: Mapping[str, Packed]) -> Iterator[None]:
    """The model with these weights as a file will give them back."""
    originals = {name: model.get_parameter(name).data for name in packed}
    try:
        for name, value in packed.items():
            model.get_parameter(name).data = value.restored.to(originals[name].device)
        yield
    finally:
        for name, original in originals.items():
            model.get_parameter(name).data = original


def same_tree(a: Any, b: Any) -> bool:
    left, right = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(left) == len(right) and all(map(_same, left, right))


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b) or type(a) is type(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.numel():
        return True
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
