"""The sources that a measurement of Deepwell's own kernels depends on: files, all that they import, as one hash.

Imports are read from the text: also those inside functions, but not those that only a type checker follows.
"""

import ast
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from deepwell.kernels.registry import file_hash

_PACKAGE = "deepwell"
_ROOT = Path(__file__).resolve().parents[2]


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
