"""Write docs/api.md: every public name with its signature and its docstring. `python docs/make_api.py [--check]`."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import deepwell  # noqa: E402
import deepwell.kernels  # noqa: E402
from deepwell.engine.runtime import Runtime  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
HEAD = """# API

Every public name, from its own docstring. `python docs/make_api.py` writes this page; the tests hold it to the code.
"""


def names() -> list[tuple[str, Any]]:
    """(name as users write it, object), in the order in which the package lists them."""
    found = [(f"deepwell.{name}", getattr(deepwell, name)) for name in deepwell.__all__ if not name.startswith("_")]
    place = [name for name, _ in found].index("deepwell.Engine") + 1
    found.insert(place, ("deepwell.Engine.deepwell", Runtime))
    kernels = [name for name in deepwell.kernels.__all__ if not name.startswith("_")]
    return found + [(f"deepwell.kernels.{name}", getattr(deepwell.kernels, name)) for name in kernels]


def signature(value: Any) -> str:
    """As its source has it, which is the same on every Python; a dataclass by its fields."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    if isinstance(node, ast.ClassDef):
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                return _call(item)
        body = [item for one in _own(value) for item in ast.parse(textwrap.dedent(inspect.getsource(one))).body[0].body]
        fields = [item for item in body if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item)]
        return f"({', '.join(ast.unparse(item) for item in fields if not ast.unparse(item).startswith('_'))})"
    assert isinstance(node, ast.FunctionDef)
    return _call(node)


def _own(value: type) -> list[type]:
    """The class with those of its bases that are Deepwell's, the first base first."""
    return [one for one in reversed(value.__mro__) if one.__module__.startswith("deepwell")]


def _call(node: ast.FunctionDef) -> str:
    arguments = node.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args.pop(0)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    return f"({ast.unparse(arguments)}){returns}"


def members(value: type) -> Iterator[tuple[str, str, str]]:
    """(name, signature, what it is) of the methods and properties that a class and its bases define and document."""
    for name, member in {name: member for one in _own(value) for name, member in vars(one).items()}.items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield name, "", inspect.getdoc(member.fget) or ""
        elif isinstance(member, (classmethod, staticmethod)):
            yield name, signature(member.__func__), inspect.getdoc(member.__func__) or ""
        elif inspect.isfunction(member):
            yield name, signature(member), inspect.getdoc(member) or ""


def page() -> str:
    lines = [HEAD]
    for name, value in names():
        lines.append(f"## {name}\n")
        is_class = inspect.isclass(value)
        if not (is_class and issubclass(value, Exception)):
            lines.append(f"```\n{name.rpartition('.')[2]}{signature(value)}\n```\n")
        lines.append(f"{inspect.getdoc(value) or ''}\n")
        rows = [(n, s, d) for n, s, d in members(value) if d] if is_class else []
        for member, call, text in rows:
            first = " ".join(text.partition("\n\n")[0].split())
            lines.append(f"- `{member}{call}`: {first}")
        if rows:
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    if "--check" in sys.argv:
        if PAGE.read_text(encoding="utf-8") != page():
            sys.exit("docs/api.md is not what the code says: python docs/make_api.py")
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
