"""The floor plan holds: imports point one way, pure modules stay pure, files and functions stay readable."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"

# From the ground up; a module imports from its own layer and from those below. The longest matching prefix decides,
# so `graph.ir` is pure while the rest of `graph` is torch code.
# The package root is exempt: it only lists names.
LAYERS = (
    ("errors", "compat", "files"),
    ("formats.spec",),
    (
        "graph.ir",
        "graph.blocks",
        "graph.ops",
        "graph.op_json",
        "graph.table",
        "graph.configs",
        "graph.configs_hybrid",
        "graph.config_writer",
        "graph.fusion",
        "precision",
        "hardware",
    ),
    ("planner",),
    ("formats",),
    ("kernels",),
    ("graph",),
    ("precision.guard",),
    ("moe", "engine"),
    ("train", "artifacts", "report", "engine.dryrun.dry_run", "engine.dryrun.steps"),  # real steps need the optimizer
    ("bench", "compat.cutlass_kernels", "compat.graph_optimizer"),
    ("doctor",),
    ("cli", "__main__"),
)
RANK = {prefix: rank for rank, layer in enumerate(LAYERS) for prefix in layer}
PURE_UP_TO = RANK["planner"]

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 8
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
ALLOWED_ENVIRONMENT = {"DEEPWELL_CACHE_DIR", "DEEPWELL_LOG"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    module: str
    line: int
    is_local: bool
    is_typing: bool


def module_name(path: Path, src: Path = SRC) -> str:
    parts = path.relative_to(src).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((SRC / "deepwell").rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in MODULES.items()}


def where(name: str, line: int = 1) -> str:
    return f"{MODULES[name].relative_to(ROOT)}:{line}"


def rank_of(module: str) -> int:
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        rank = RANK.get(".".join(parts[:length]))
        if rank is not None:
            return rank
    return RANK[parts[0].split("_")[0] or parts[0]]


def _targets(node: ast.Import | ast.ImportFrom, importer: str, is_package: bool) -> Iterator[str]:
    """The deepwell modules that one import statement names; `from package import module` names the module."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        relative = "." * node.level + (node.module or "")
        package = importer if is_package else importer.rpartition(".")[0]
        base = importlib.util.resolve_name(relative, package) if node.level else relative
        names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names]
    yield from (name for name in dict.fromkeys(names) if name == "deepwell" or name.startswith("deepwell."))


def imports_of(tree: ast.AST, importer: str, is_package: bool) -> Iterator[Import]:
    """Every import of a deepwell module, also those inside functions and under `if TYPE_CHECKING`."""
    todo: list[tuple[ast.AST, bool, bool]] = [(tree, False, False)]
    while todo:
        node, is_local, is_typing = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in _targets(node, importer, is_package):
                yield Import(module=module, line=node.lineno, is_local=is_local, is_typing=is_typing)
        is_local = is_local or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guarded = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
        todo.extend((child, is_local, is_typing or child in guarded) for child in ast.iter_child_nodes(node))


def all_imports(name: str) -> list[Import]:
    return list(imports_of(TREES[name], name, MODULES[name].name == "__init__.py"))


def upward(name: str, found: list[Import]) -> list[Import]:
    """The imports that run and point up. What only a type checker reads may point anywhere."""
    return [i for i in found if not i.is_typing and i.module != "deepwell" and rank_of(i.module) > rank_of(name)]


def test_every_module_has_a_place_in_the_floor_plan() -> None:
    homeless = []
    for name in MODULES:
        if name == "deepwell":
            continue
        try:
            rank_of(name)
        except KeyError:
            homeless.append(where(name))
    assert not homeless, f"give these a layer in LAYERS: {homeless}"


@pytest.mark.parametrize("name", [name for name in MODULES if name != "deepwell"])
def test_imports_point_down_only(name: str) -> None:
    problems = [
        f"{where(name, i.line)} imports {i.module}, which stands above" for i in upward(name, all_imports(name))
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("importer", "code"),
    [
        ("deepwell.planner.cost", "from deepwell.kernels import registry"),
        ("deepwell.planner.cost", "def f():\n    import deepwell.kernels.registry"),
        ("deepwell.hardware.probe", "from ..engine import compile"),
        ("deepwell.kernels.gemm.fp8", "from deepwell.cli import main"),
    ],
)
def test_an_upward_import_is_found(importer: str, code: str) -> None:
    # The check itself: plain, function-local, relative and through the package.
    assert upward(importer, list(imports_of(ast.parse(code), importer, is_package=False)))


@pytest.mark.parametrize(
    ("importer", "code"),
    [
        ("deepwell.planner.cost", "if TYPE_CHECKING:\n    from deepwell.kernels import registry"),
        ("deepwell.engine.compile", "from deepwell.kernels import registry"),
        ("deepwell.hardware.probe", "from .model import Gpu"),
    ],
)
def test_a_downward_import_is_not_held_against_a_module(importer: str, code: str) -> None:
    assert not upward(importer, list(imports_of(ast.parse(code), importer, is_package=False)))


def test_modules_form_no_import_cycle() -> None:
    # Imports inside functions may close a circle (a value prints itself through a module that reads it);
    # those at the top of a module may not, or the order of imports would decide whether they work.
    edges = {
        name: [i.module for i in all_imports(name) if i.module in MODULES and not (i.is_local or i.is_typing)]
        for name in MODULES
    }
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "import cycle: " + " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        for target in edges[name]:
            if target != name:
                walk(target, (*path, name))
        done.add(name)

    for name in edges:
        walk(name, ())


def test_pure_modules_load_no_torch() -> None:
    pure = [name for name in MODULES if name == "deepwell" or rank_of(name) <= PURE_UP_TO]
    assert "deepwell.errors" in pure
    code = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    heavy = {"torch", "triton", "transformers"} & set(sys.modules)
    if heavy:
        sys.exit(f"{name} loads {sorted(heavy)} at import")
"""
    run = subprocess.run([sys.executable, "-c", code, json.dumps(pure)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", MODULES)
def test_files_are_short_named_well_and_say_what_they_are(name: str) -> None:
    lines = len(MODULES[name].read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{where(name)} has {lines} lines; split it (limit {MAX_FILE_LINES})"
    assert ast.get_docstring(TREES[name]), f"{where(name)} needs a docstring whose first line says what the module is"
    assert not BANNED_NAMES & set(name.split(".")), f"{where(name)}: name the module after what it holds"


def _is_schema(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the signature is not ours to shape: Triton kernels, commands, and the ops that torch registers."""
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    return bool(re.search(r"\bjit\b|\.(command|callback)\(|custom_op|triton_op|register_fake", decorators))


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters that a call must give, or may give without a name. Keyword options with defaults are not counted."""
    a = node.args
    needed = [arg for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is None]
    names = [arg.arg for arg in (*a.posonlyargs, *a.args, *needed)]
    return len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))


@pytest.mark.parametrize("name", MODULES)
def test_functions_can_be_read_at_one_sight(name: str) -> None:
    problems = []
    for node in ast.walk(TREES[name]):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_schema(node):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            problems.append(f"{where(name, node.lineno)} {node.name}: {lines} lines (limit {MAX_FUNCTION_LINES})")
        if _num_parameters(node) > MAX_PARAMETERS:
            problems.append(f"{where(name, node.lineno)} {node.name}: more than {MAX_PARAMETERS} parameters")
    assert not problems, "\n".join(problems)


def test_no_top_level_module_shares_a_public_name() -> None:
    # `deepwell.probe` must be the function; a module of that name would replace it once anything imports it.
    import deepwell

    taken = {name.split(".")[1] for name in MODULES if name.count(".") >= 1} & set(deepwell.__all__)
    assert not taken, f"rename these modules: {sorted(taken)}"


def test_environment_variables_are_the_known_few() -> None:
    found = {
        (variable, where(name))
        for name, path in MODULES.items()
        for variable in re.findall(r"\bDEEPWELL_[A-Z0-9_]+", path.read_text(encoding="utf-8"))
    }
    unknown = sorted(pair for pair in found if pair[0] not in ALLOWED_ENVIRONMENT)
    assert not unknown, f"a setting belongs in an argument, not in the environment: {unknown}"


@pytest.mark.parametrize("name", MODULES)
def test_no_error_is_caught_blindly(name: str) -> None:
    # A handler names what it expects; one that catches everything hides the mistakes nobody thought of.
    problems = []
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            if node.type is None or re.search(r"\b(Base)?Exception\b", caught):
                problems.append(f"{where(name, node.lineno)} catches {caught}")
    assert not problems, "\n".join(problems)


# ---- the house: small folders, no families of prefixes, no private names across modules ----

MAX_FILES_IN_FOLDER = 25
MAX_CYCLES, MAX_CYCLE = 3, 2  # imports in functions and for types included
MAX_FAN_OUT = 20
MAX_SHARED_CLASS_NAMES = 8


def test_folders_stay_small_and_families_are_packages() -> None:
    folders: dict[Path, list[str]] = {}
    for path in MODULES.values():
        folders.setdefault(path.parent, []).append(path.stem)
    large = {str(f.relative_to(ROOT)): len(names) for f, names in folders.items() if len(names) > MAX_FILES_IN_FOLDER}
    assert not large, f"split by meaning into a sub-package: {large}"
    families: dict[str, set[str]] = {}
    for folder, names in folders.items():
        for name in names:
            prefix, _, rest = name.lstrip("_").partition("_")
            if rest:
                members = {other for other in names if other == prefix or other.lstrip("_").startswith(f"{prefix}_")}
                families[f"{folder.relative_to(ROOT)}/{prefix}_*"] = members
    found = sorted(family for family, members in families.items() if len(members) > 2)
    assert not found, f"make a package of each: {found}"


def test_no_private_name_is_imported_from_another_module() -> None:
    problems = [
        f"{where(name, node.lineno)} imports {alias.name} from {node.module}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in MODULES
        for alias in node.names
        if re.match(r"_[^_]", alias.name) and f"{node.module}.{alias.name}" not in MODULES
    ]
    assert not problems, "\n".join(problems)


def _imported(name: str) -> set[str]:
    """The modules that one names anywhere, in functions and for types too, and the packages that it imports from."""
    found = {i.module for i in all_imports(name)}
    found |= {n.module for n in ast.walk(TREES[name]) if isinstance(n, ast.ImportFrom) and n.module and not n.level}
    return (found & set(MODULES)) - {name, "deepwell"}


def _cycles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that reach each other."""

    def reached(start: str) -> set[str]:
        seen, todo = {start}, [start]
        while todo:
            todo += (new := edges[todo.pop()] - seen)
            seen |= new
        return seen

    reach = {name: reached(name) for name in edges}
    groups = {frozenset(n for n in reach[name] if name in reach[n]) for name in edges}
    return [set(group) for group in groups if len(group) > 1]


def test_cycles_of_lazy_imports_are_found() -> None:
    assert _cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def test_modules_import_few_others_and_hardly_in_circles() -> None:
    edges = {name: _imported(name) for name in MODULES}
    cycles = _cycles(edges)
    assert len(cycles) <= MAX_CYCLES and all(len(one) <= MAX_CYCLE for one in cycles), f"cycles: {cycles}"
    wide = {name: len(found) for name, found in edges.items() if len(found) > MAX_FAN_OUT}
    assert not wide, f"these import more than {MAX_FAN_OUT} modules: {wide}"


def test_a_class_name_means_one_thing() -> None:
    names = [node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert len(twice) <= MAX_SHARED_CLASS_NAMES, f"defined more than once: {twice}"


def test_compiling_a_model_loads_no_optimizer() -> None:
    code = "import sys, deepwell.engine.compile; print([m for m in sys.modules if m.startswith('deepwell.train')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
