"""The sources that a measurement depends on, as one hash: a user's file; Deepwell's own with all that they import.

Imports are read from the text: also those inside functions, but not those that only a type checker follows.
"""

import ast
import hashlib
import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

_SIMPLE = (int, float, str, bool, bytes, type(None))
_PACKAGE = "deepwell"
_ROOT = Path(__file__).resolve().parents[2]


def fingerprint_of(*functions: Callable[..., Any]) -> str | None:
    """A hash of the files that hold the functions, their names and what they closed over; None where that is unclear.

    A file is hashed whole: a kernel and the code it calls usually live together. What the file imports is not followed.
    """
    digest = hashlib.sha256()
    for function in functions:
        parts = _identity_of(function)
        if parts is None:
            return None
        for part in parts:
            digest.update(part)
    return digest.hexdigest()[:16]


def _identity_of(function: Callable[..., Any]) -> list[bytes] | None:
    wrapped = inspect.unwrap(function)
    code = getattr(wrapped, "__code__", None)
    if code is None:
        return None
    source = Path(code.co_filename)
    body = file_hash(source) if source.is_file() else repr((code.co_code, code.co_names, code.co_consts))
    values = [*(wrapped.__defaults__ or ()), *(wrapped.__kwdefaults__ or {}).values()]
    values += [cell.cell_contents for cell in (wrapped.__closure__ or ())]
    if not all(isinstance(value, _SIMPLE) or type(value).__name__ == "dtype" for value in values):
        return None
    return [body.encode(), wrapped.__qualname__.encode(), repr(values).encode()]


@lru_cache(maxsize=256)
def file_hash(path: Path) -> str:
    """Of a source file as it was when first asked for."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sources_hash(*modules: ModuleType) -> str:
    """Of these modules of Deepwell and of every other one of it that they import, directly or not."""
    digest = hashlib.sha256()
    for name in sorted(closure(*(module.__name__ for module in modules))):
        digest.update(f"{name} {file_hash(_file(name))}\n".encode())
    return digest.hexdigest()[:16]


def closure(*names: str) -> set[str]:
    """The names of modules with those of all that they import from Deepwell."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo.extend(_imports(name))
    return found


@lru_cache(maxsize=512)
def _imports(name: str) -> frozenset[str]:
    file = _file(name)
    return frozenset(found for node in _import_nodes(ast.parse(file.read_bytes(), str(file))) for found in _names(node))


def _import_nodes(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo.extend(node.orelse)
        elif not isinstance(node, ast.expr):  # no import is inside an expression
            todo.extend(ast.iter_child_nodes(node))


def _names(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The modules of Deepwell that an import names; `from package import module` names the module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if _is_ours(alias.name))
    elif node.module and _is_ours(node.module):
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if _file(inner).is_file() else node.module


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == _PACKAGE


def _file(name: str) -> Path:
    path = _ROOT.joinpath(*name.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
