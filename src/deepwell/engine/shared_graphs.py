"""Graphs that Dynamo runs for several layers: each layer in its own formats, and the report knows which ones ran.

Parameters are inputs of Dynamo's graphs, and none of its guards distinguishes those of two layers. After a
graph break inside a layer one compiled graph would therefore serve all equal layers, in the formats of the first. So a
graph that holds a part of the model only gets a guard for each of its weights: the formats it was compiled for. A layer
with others is compiled by Dynamo as any other input would be, shapes, backward and all; layers with equal ones share a
graph, and the first call with the parameters of each says that they were met.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch._guards import Guard, Source, TracingContext

from deepwell.engine.passes.edit import scheme_of
from deepwell.errors import CaptureError

# While other tensors at every call take the places of a part's parameters (local parts of DTensors): which part it is.
STANDS_IN_FOR: ContextVar[tuple[object, ...] | None] = ContextVar("stands_in_for", default=None)

NamedParameters = Callable[[], Iterable[tuple[str, Tensor]]]
Names = tuple[str, ...]

# The end of a source that leads from a module to a parameter of it.
_STEP = r"\._(?:modules|parameters)\['([^']+)'\]"
_BELOW_A_MODULE = re.compile(rf"(?:{_STEP})+$")


class KnownParameters:
    """The names of a model's parameters, several where one is tied, and the scheme of each, by identity."""

    def __init__(self, parameters: NamedParameters, schemes: Mapping[str, str]) -> None:
        self._parameters, self.schemes = parameters, schemes
        self._known: dict[int, tuple[weakref.ref[Tensor], Names, str | None]] = {}
        self._read()

    def _read(self) -> None:
        names: dict[int, tuple[Tensor, Names]] = {}
        for name, parameter in self._parameters():
            names[id(parameter)] = (parameter, (*names.get(id(parameter), (parameter, ()))[1], name))
        # Those that are not the model's now may be again: sharded models change theirs for each layer's turn.
        kept = {key: entry for key, entry in self._known.items() if entry[0]() is not None}
        self._known = kept | {key: self._entry(tensor, found) for key, (tensor, found) in names.items()}

    def _entry(self, tensor: Tensor, names: Names) -> tuple[weakref.ref[Tensor], Names, str | None]:
        scheme = scheme_of(names, self.schemes)[1] if names else None
        return weakref.ref(tensor), names, scheme

    def _find(self, tensor: Tensor) -> tuple[weakref.ref[Tensor], Names, str | None]:
        found = self._known.get(id(tensor))
        # Of a parameter that is gone another may have the id.
        if found is None or found[0]() is not tensor:
            self._read()
            found = self._known.get(id(tensor)) or self._entry(tensor, ())
            self._known[id(tensor)] = found
        return found

    def are_all(self, tensors: Iterable[Tensor]) -> bool:
        """Whether no weight of the model, with a scheme or without, is missing among tensors."""
        given, now = {id(tensor) for tensor in tensors}, list(self._parameters())
        if any(id(parameter) not in given for _, parameter in now if parameter.dim() >= 2):
            return False
        # A pipeline's stage shows one part of the model at a time: there are weights that are not to be seen now.
        return {_path(name) for name, _ in now} >= self.schemes.keys()

    def has(self, value: Any) -> bool:
        """Whether it was one of the model's when they were last read."""
        found = self._known.get(id(value))
        return found is not None and found[0]() is value

    def names(self, tensor: Tensor) -> Names:
        """Empty where it is not the model's."""
        return self._find(tensor)[1]

    def scheme(self, tensor: Tensor) -> str | None:
        """ "" where it is to stay as it is, None where it is not the model's."""
        return self._find(tensor)[2]


def renamed(pairs: Iterable[tuple[Names, Names]], schemes: Mapping[str, str]) -> dict[str, str]:
    """{path of a parameter: path of the one that takes its place}, from the names of both."""
    new: dict[str, str] = {}
    for before, now in pairs:
        new |= dict(zip(map(_path, before), map(_path, now), strict=False))
        if now:
            new[scheme_of(before, schemes)[0]] = scheme_of(now, schemes)[0]  # also where one has more names
    new.pop("", None)
    return new


def _path(name: str) -> str:
    return name.removesuffix(".weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter among a graph's inputs that may be one with formats."""

    index: int
    names: Names
    scheme: str | None
    is_own: bool  # whether the graph serves this parameter alone, not others of the same scheme
    source: Source | None  # where Dynamo reads it
    holder: Source | None = None  # the module that it is a parameter of, however deep,
    keys: Names = ()  # and the way from there to it

    def is_met_by(self, tensor: Any, known: KnownParameters) -> bool:
        """Whether what was compiled for this weight is right for a tensor."""
        return known.names(tensor) == self.names if self.is_own else known.scheme(tensor) == self.scheme


def shared_weights(
    graph: fx.Graph, example_inputs: Sequence[Any], known: KnownParameters, own: Iterable[int] = ()
) -> list[Weight]:
    """The weights of a graph that other layers' could take the place of.

    None where the graph holds all of the model's: it runs for nothing else. `own` are inputs whose names are part of
    what was compiled, such as those whose FP8 values are kept.
    """
    pairs = list(zip((n for n in graph.nodes if n.op == "placeholder"), example_inputs, strict=True))
    # Under `torch.func.functional_call` any tensor may be one.
    is_one = [isinstance(value, nn.Parameter) or known.has(value) for _, value in pairs]
    parameters = [(i, node, value) for i, (node, value) in enumerate(pairs) if is_one[i]]
    if known.are_all(value for _, _, value in parameters):
        return []
    alone = set(own)
    return [
        _weight(node, index=i, names=known.names(value), scheme=known.scheme(value), is_own=i in alone)
        for i, node, value in parameters
        if value.dim() >= 2
    ]


def _weight(node: fx.Node, **known: Any) -> Weight:
    """A weight with the module that Dynamo reaches it from."""
    source = getattr(node.meta.get("grapharg"), "source", None) or getattr(node, "_dynamo_source", None)
    match = _BELOW_A_MODULE.search("" if source is None else text_of(source))
    holder = source if match and known["names"] else None
    while holder is not None and text_of(holder) != match.string[: match.start()]:  # type: ignore[union-attr]
        holder = getattr(holder, "base", None)
    keys = tuple(re.findall(_STEP, match[0])) if match else ()
    return Weight(source=source, holder=holder, keys=keys, **known)


def text_of(source: Source) -> str:
    """What a source reads, as Python; a method in earlier versions of torch."""
    return source.name() if callable(source.name) else source.name


# ---- guards ----


def guard(weights: Sequence[Weight], known: KnownParameters) -> None:
    """Let Dynamo compile again where one of these weights is another with other formats.

    One guard for all weights of a module: which they are is asked once for each module that comes.
    """
    if TracingContext.try_get() is None:
        return  # no graph of Dynamo's: nobody gives it to others
    held: dict[str, list[Weight]] = {}
    for weight in weights:
        if weight.holder is not None:
            held.setdefault(text_of(weight.holder), []).append(weight)
        elif weight.source is not None:
            _install(weight.source, [weight], partial(weight.is_met_by, known=known))
    for together in held.values():
        source = together[0].holder
        assert source is not None
        _install(source, together, _HoldsTheSame(together, known))


def _install(source: Source, weights: Sequence[Weight], check: Callable[[Any], bool]) -> None:
    from torch._dynamo.guards import install_guard

    what = ", ".join(f"{' = '.join(w.names)} {w.scheme or 'as written'}".strip() for w in weights)
    install_guard(Guard(source, partial(FORMATS_MATCH, check, what)))


def FORMATS_MATCH(check: Callable[[Any], bool], what: str, builder: Any, guard: Guard) -> None:
    """Build a guard; Dynamo shows what it says where it logs why it compiled again."""
    manager = builder.get_guard_manager(guard)
    given = (check, [f"deepwell: {guard.name} has the formats of {what}"], guard.user_stack)
    # Earlier versions of torch do not take the stack.
    manager.add_lambda_guard(*given[: 3 if "arg2" in type(manager).add_lambda_guard.__doc__ else 2])


class _HoldsTheSame:
    """Whether the parameters of a module are those that weights were compiled for, or others of their formats."""

    def __init__(self, weights: Sequence[Weight], known: KnownParameters) -> None:
        self._weights, self._known = weights, known
        self._answers: dict[int, tuple[weakref.ref[Any], bool]] = {}

    def __call__(self, module: Any) -> bool:
        found = self._answers.get(id(module))
        if found is not None and found[0]() is module:
            return found[1]
        tensors = [_below(module, weight.keys) for weight in self._weights]
        if any(tensor is None for tensor in tensors):
            return False
        answer = all(w.is_met_by(tensor, self._known) for w, tensor in zip(self._weights, tensors, strict=True))
        # Tensors that take the parameters' places for a while say nothing of the module.
        if all(self._known.names(tensor) for tensor in tensors):
            self._answers[id(module)] = (weakref.ref(module), answer)
        return answer


def _below(module: Any, keys: Names) -> Any:
    """The parameter at the end of a way of names, None where there is none."""
    *modules, name = keys
    for key in modules:
        module = getattr(module, "_modules", {}).get(key)
    return getattr(module, "_parameters", {}).get(name)


# ---- which layers ran ----


def noting(
    run: Callable[..., Any],
    weights: Sequence[Weight],
    known: KnownParameters,
    note: Callable[[dict[str, str] | None], frozenset[str]],
    ran: Callable[[frozenset[str]], None],
) -> Callable[..., Any]:
    """The compiled graph; `note` gets {path it was compiled for: path it runs for} at its first call with parameters.

    What `note` returns, the paths that it runs for, `ran` gets at each call. Without weights to share it is one graph
    for one model, and `note` gets None. Raises CaptureError where Dynamo runs it for parameters with other formats, its
    guards having been switched off.
    """
    where = _telling(weights)
    seen: dict[tuple[object, ...], frozenset[str]] = {} if weights else {(): note(None)}

    def wrapped(*inputs: Any) -> Any:
        given = (STANDS_IN_FOR.get() or tuple([id(inputs[i]) for i in where])) if where else ()
        paths = seen.get(given)
        if paths is None:
            paths = seen[given] = note(_met(weights, inputs, known))
        ran(paths)
        return run(*inputs)

    return wrapped


def _telling(weights: Sequence[Weight]) -> list[int]:
    """Inputs that tell whose parameters came: one for each module, unless all of it are tied."""
    held: dict[str, list[Weight]] = {}
    for weight in weights:
        where = weight.holder if weight.holder is not None else weight.source
        held.setdefault("" if where is None else text_of(where), []).append(weight)
    single = [[weight for weight in together if len(weight.names) == 1] for together in held.values()]
    chosen = [ones[:1] or together for ones, together in zip(single, held.values(), strict=True)]
    return [weight.index for some in chosen for weight in some]


def _met(weights: Sequence[Weight], inputs: Sequence[Any], known: KnownParameters) -> dict[str, str]:
    pairs: list[tuple[Names, Names]] = []
    for weight in weights:
        tensor = inputs[weight.index]
        names = known.names(tensor)
        # A tensor that took a parameter's place after the graph was compiled has the place's formats.
        if names and not weight.is_met_by(tensor, known):
            raise CaptureError(
                f"a graph compiled for {', '.join(weight.names) or 'a tensor of no model'} was run for "
                f"{', '.join(names)}, which has other formats: Dynamo's guards were not checked; leave "
                "skip_guard_eval_unsafe and guard filters out"
            )
        pairs.append((weight.names, names))
    return renamed(pairs, known.schemes)
