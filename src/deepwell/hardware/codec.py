"""Turns frozen dataclasses into plain JSON data and back, checking every type on the way in.

JSON has no tuples: they travel as lists. A missing field takes its default; an unknown field, a wrong type or a missing
field without a default raises `ConfigError` that names the place, so a foreign file never becomes half a value.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from importlib import resources
from typing import Any, TypeVar

from deepwell.errors import ConfigError

T = TypeVar("T")
_Value = TypeVar("_Value", bound="JsonValue")


def encode(value: Any) -> Any:
    """`value` as JSON data; fields that hold their default are left out, so files stay short."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: (f, getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {name: encode(item) for name, (f, item) in fields.items() if not _is_default(f, item)}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value


def read_json(text: str, name: str) -> Any:
    """The data of a JSON text that `name`.to_json wrote. Raises ConfigError where it is no JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"text: not JSON ({error}); pass what {name}.to_json returned") from error


def packaged_json(package: str, *path: str) -> Any:
    """The data of a JSON file that ships with a package."""
    return json.loads(resources.files(package).joinpath(*path).read_text(encoding="utf-8"))


def check_schema(data: object, schema: int, what: str) -> None:
    """Raises ConfigError unless `data` is an object of that schema; `what` is what the message calls it."""
    got = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
    if not isinstance(data, Mapping) or got != schema:
        raise ConfigError(f"{what} has schema {got!r}; this Deepwell reads schema {schema}")


def _is_default(field: dataclasses.Field[Any], item: object) -> bool:
    return field.default is not dataclasses.MISSING and type(item) is type(field.default) and item == field.default


class JsonValue:
    """A value that round-trips through JSON. Dataclasses get the codec's two dicts unless they have their own."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = encode(self)
        return data

    @classmethod
    def from_dict(cls: type[_Value], data: Any) -> _Value:
        return decode(cls, data, cls.__name__.lower())

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls: type[_Value], text: str) -> _Value:
        return cls.from_dict(read_json(text, cls.__name__))


def decode(cls: type[T], data: object, where: str) -> T:
    """`data` as a `cls`; raises `ConfigError` naming `where` and the field that does not fit."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected an object for {cls.__name__}, got {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise ConfigError(f"{where}: {cls.__name__} has no field {unknown[0]!r}; it has {', '.join(fields)}")
    arguments = {}
    for name, field in fields.items():
        if name in data:
            arguments[name] = decode_value(hints[name], data[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{where}: {cls.__name__} needs the field {name!r}")
    return cls(**arguments)


def decode_value(hint: Any, data: object, where: str) -> Any:
    """`data` as a value of the type `hint`; raises `ConfigError` naming `where`."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return None if data is None else decode_value(inner, data, where)
    if origin is tuple:
        return _decode_tuple(typing.get_args(hint), data, where)
    if origin is typing.Literal:
        if data not in typing.get_args(hint):
            raise ConfigError(f"{where}: got {data!r}; accepted: {', '.join(map(repr, typing.get_args(hint)))}")
        return data
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast(type, hint), data, where)
    # bool is an int in Python and an int is a fine float in JSON: accept the second, refuse the first.
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, hint) or (isinstance(data, bool) and hint is not bool):
        raise ConfigError(f"{where}: expected {hint.__name__}, got {data!r}")
    return data


def _decode_tuple(args: tuple[Any, ...], data: object, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        raise ConfigError(f"{where}: expected a list, got {data!r}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(decode_value(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if len(args) != len(data):
        raise ConfigError(f"{where}: expected {len(args)} items, got {len(data)}")
    return tuple(decode_value(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, data, strict=True)))
