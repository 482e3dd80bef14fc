"""Ops to plain dicts and back. What is read is checked field by field: a wrong value is an error that names it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from deepwell.errors import ConfigError
from deepwell.graph.ops import DTYPE_BYTES, KINDS, Extent, Op, Param


def op_to_dict(op: Op) -> dict[str, Any]:
    """A plain dict; fields at their default are left out."""
    out: dict[str, Any] = {"kind": op.kind}
    for field in dataclasses.fields(op):
        value = getattr(op, field.name)
        if field.default is not dataclasses.MISSING and value == field.default:
            continue
        if isinstance(value, Extent):
            value = str(value)
        elif field.name == "params":
            value = [{k: v for k, v in dataclasses.asdict(p).items() if v is not None} for p in value]
        elif isinstance(value, tuple):
            value = list(value)
        out[field.name] = value
    return out


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)


# Annotation of a field -> whether a JSON value may stand there, and in words what may.
_FIELD_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "a text"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (_is_whole, "a whole number"),
    "int | None": (lambda value: value is None or _is_whole(value), "a whole number or null"),
    "Extent": (lambda value: isinstance(value, str), 'an extent such as "B*S"'),
    "tuple[str, ...]": (_are_texts, "a list of texts"),
    "tuple[Param, ...]": (lambda value: isinstance(value, (list, tuple)), "a list of parameters"),
}


def _param_from_dict(data: Any) -> Param:
    needed = {"name", "shape", "dtype"}
    if not isinstance(data, dict) or not needed <= set(data) <= {*needed, "tied_to"}:
        raise ConfigError(f"parameter {data!r} needs name, shape and dtype, and may have tied_to")
    if not all(isinstance(data[key], str) for key in ("name", "dtype")) or data["dtype"] not in DTYPE_BYTES:
        raise ConfigError(f"parameter {data['name']!r} has dtype {data['dtype']!r}; known: {', '.join(DTYPE_BYTES)}")
    if not isinstance(data["shape"], (list, tuple)) or not all(_is_whole(size) and size >= 0 for size in data["shape"]):
        raise ConfigError(f"parameter {data['name']} has shape {data['shape']!r}; it is a list of whole numbers")
    if not isinstance(data.get("tied_to", ""), str):
        raise ConfigError(f"parameter {data['name']} has tied_to {data['tied_to']!r}; it is a parameter's name")
    return Param(**{**data, "shape": tuple(data["shape"])})


def op_from_dict(data: dict[str, Any]) -> Op:
    """Rebuild an op; a kind, field or value that does not belong there is a ConfigError that names it."""
    if not isinstance(data, dict):
        raise ConfigError(f"an op is a JSON object, got {type(data).__name__}")
    fields = dict(data)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"op {data.get('name')!r} has kind {kind!r}; known kinds: {', '.join(KINDS)}")
    cls = KINDS[kind]
    known = {f.name: f for f in dataclasses.fields(cls)}
    missing = [name for name, f in known.items() if f.default is dataclasses.MISSING and name not in fields]
    if missing:
        raise ConfigError(f"op {data.get('name')!r} of kind {kind} lacks {', '.join(missing)}")
    for name, value in fields.items():
        if name not in known:
            raise ConfigError(f"op {data.get('name')!r} of kind {kind} has no field {name!r}")
        annotation = str(known[name].type)
        fits, words = _FIELD_KINDS[annotation]
        if not fits(value):
            raise ConfigError(f"op {data.get('name')!r}: {name} is {value!r}; it must be {words}")
        if annotation == "Extent":
            fields[name] = Extent.parse(value)
        elif name == "params":
            fields[name] = tuple(map(_param_from_dict, value))
        elif isinstance(value, list):
            fields[name] = tuple(value)
    return cls(**fields)
