"""JSON of an exported engine's members: strict to read, with a word for numbers that JSON cannot hold."""

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from deepwell.errors import ConfigError

# Raises an error that names the file and this reason.
Refuse = Callable[[str], NoReturn]
_FLOAT = "__float__"


def json_text(data: Any) -> bytes:
    """`data` as JSON; infinity and NaN become {"__float__": "inf"}. Raises ConfigError on what is no JSON value."""
    try:
        return json.dumps(_without_specials(data), indent=1, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the model cannot be described in JSON: {error}") from error


def _without_specials(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if isinstance(value, dict):
        return {key: _without_specials(item) for key, item in value.items()}
    return [_without_specials(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_json(text: bytes, what: str, refuse: Refuse) -> dict[str, Any]:
    """A JSON object; refused where it is none, has a key twice, or is nested too deep to be one of ours."""

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    def value(pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key is there twice")
        if set(found) == {_FLOAT} and found[_FLOAT] in ("inf", "-inf", "nan"):
            return float(found[_FLOAT])
        return found

    try:
        data = json.loads(text.decode("utf-8"), parse_constant=no_constant, object_pairs_hook=value)
    except (ValueError, RecursionError) as error:
        refuse(f"{what} cannot be read: {str(error)[:200]}")
    if not isinstance(data, dict):
        refuse(f"{what} is a {type(data).__name__}, not an object")
    return data


def fits(value: Any, wanted: Any) -> bool:
    """Whether a JSON value has a shape: a type (a bool is no int), [of each item], {str: of each value},
    {name: of each field}, (one of these), a function that says so, or the value itself.
    """
    if isinstance(wanted, type):
        return type(value) is wanted
    if isinstance(wanted, tuple):
        return any(fits(value, one) for one in wanted)
    if isinstance(wanted, list):
        return type(value) is list and all(fits(item, wanted[0]) for item in value)
    if isinstance(wanted, dict) and type(value) is dict:
        named = dict.fromkeys(value, wanted[str]) if str in wanted else wanted
        return set(value) == set(named) and all(fits(value[name], one) for name, one in named.items())
    return bool(wanted(value)) if callable(wanted) else type(value) is type(wanted) and value == wanted


def is_size(value: Any) -> bool:
    """Whether a value is a number of bytes or elements that there can be."""
    return type(value) is int and 0 <= value < 1 << 62


def is_shape(value: Any) -> bool:
    """Whether a value is a tensor's shape; torch multiplies the sizes in 63 bits, also beside a zero."""
    return fits(value, [is_size]) and is_size(math.prod(n or 1 for n in value))
