"""The repository installs itself, pins what it installs, and holds nothing of one machine."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
IS_FULL_RUN = os.environ.get("DEEPWELL_FULL_TESTS") == "1"

# What single tests compare with and skip without, and the tools of `make lint`. On a GPU host they may be missing.
ORACLES = (
    "ml_dtypes",
    "hypothesis",
    "nvmath",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "triton",
    "xdist",
    "ruff",
    "mypy",
)


def tracked_files() -> list[Path]:
    """The files of the project; in a copy without git, everything that is not a cache or an environment."""
    git = shutil.which("git")
    if git and (ROOT / ".git").exists():
        command = [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        return [path for name in names if name and (path := ROOT / name).is_file()]
    skipped = {".venv", "__pycache__", "build", "dist", "out"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(
            part in skipped or part.endswith((".egg-info", "_cache", ".hypothesis"))
            for part in path.relative_to(ROOT).parts
        )
    ]


def texts() -> list[tuple[Path, str]]:
    found = []
    for path in tracked_files():
        data = path.read_bytes()
        if b"\0" not in data[:4096]:
            found.append((path.relative_to(ROOT), data.decode("utf-8")))
    return found


# ---- what `make test` promises ----


@pytest.mark.skipif(not IS_FULL_RUN, reason="DEEPWELL_FULL_TESTS is not 1: `make test` sets it")
@pytest.mark.parametrize("name", ORACLES)
def test_a_full_run_lacks_no_oracle(name: str) -> None:
    # Tests skip without their oracle, for GPU hosts where nothing can be installed; here that may not happen.
    importlib.import_module(name)


def test_make_lists_its_targets() -> None:
    if shutil.which("make") is None:
        pytest.skip("no make here")
    output = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("demo", "test", "lint", "format", "setup", "clean"):
        assert f"make {target} " in output


@pytest.mark.parametrize("name", ["setup.sh", ".ci/run"])
def test_scripts_can_be_started(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / name], check=True)


# ---- the pins ----


def _requirements(text: str) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def _declared() -> list[Requirement]:
    """The requirements of pyproject.toml that setup.sh installs (Python 3.10 has no TOML reader)."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = []
    for name in ("dependencies", "hf", "tensorboard", "dev"):
        block = re.search(rf"^{name} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
        assert block, f"pyproject.toml has no list {name}"
        uncommented = re.sub(r"^\s*#.*$", "", block[1], flags=re.MULTILINE)
        found += [Requirement(item) for item in re.findall(r'"([^"]+)"', uncommented)]
    return found


PINS = _requirements((ROOT / "constraints.txt").read_text(encoding="utf-8"))


@pytest.mark.parametrize("python", PYTHONS)
def test_each_package_has_one_exact_pin_on_each_python(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "platform_system": "Linux"}
    pins: dict[str, str] = {}
    for pin in PINS:
        if pin.marker and not pin.marker.evaluate(environment):
            continue
        name = canonicalize_name(pin.name)
        assert name not in pins, f"{name} is pinned twice for Python {python}"
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        assert "*" not in specifier.version
        pins[name] = specifier.version
    declared = [r for r in _declared() if not r.marker or r.marker.evaluate(environment)]
    assert len(declared) > 10
    for requirement in declared:
        version = pins.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} of pyproject.toml has no pin in constraints.txt for Python {python}"
        assert requirement.specifier.contains(version), f"the pin {requirement.name}=={version} is not {requirement}"


# ---- setup.sh itself ----


def _run_setup(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    # Started from elsewhere, and without an index: what it needs is there, or it must say so.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PIP_NO_INDEX": "1"} | environment
    return subprocess.run([tree / "setup.sh"], cwd="/", env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small Deepwell in a folder whose name has a space."""
    tree = tmp_path / "a tree"
    (tree / "src" / "deepwell").mkdir(parents=True)
    for name in ("setup.sh", "pyproject.toml", "constraints.txt", "LICENSE", "src/deepwell/__init__.py"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "README.md").write_text("A copy for a test.\n", encoding="utf-8")
    return tree


def test_setup_names_a_python_that_is_not_there(tree: Path) -> None:
    run = _run_setup(tree, PYTHON="python-of-nowhere")
    assert run.returncode == 1
    assert "PYTHON=python-of-nowhere is no command here" in run.stderr
    assert not (tree / ".venv").exists()


def test_setup_refuses_a_python_that_is_too_old(tree: Path, tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit 0\nexit 1\n', encoding="utf-8")
    old.chmod(0o755)
    run = _run_setup(tree, PYTHON=str(old))
    assert run.returncode == 1
    assert "is Python 3.9.2; Deepwell needs Python 3.10 to 3.13" in run.stderr


def test_setup_says_which_debian_package_brings_venv(tree: Path, tmp_path: Path) -> None:
    # Debian ships Python without ensurepip. This stand-in answers like that one and is a whole Python otherwise.
    bare = tmp_path / "python-bare"
    bare.write_text(
        '#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; *sys.executable*) echo "$0"; exit 0;; esac\n'
        f'exec "{sys.executable}" "$@"\n',
        encoding="utf-8",
    )
    bare.chmod(0o755)
    run = _run_setup(tree, PYTHON=str(bare))
    assert run.returncode == 1
    assert "sudo apt install python{}.{}-venv".format(*sys.version_info[:2]) in run.stderr
    assert not (tree / ".venv").exists()


def _imported_torch(tree: Path) -> str:
    code = "import importlib.util; print(importlib.util.find_spec('torch').origin)"
    command = [str(tree / ".venv" / "bin" / "python"), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(not IS_FULL_RUN, reason="needs every package of constraints.txt around it: `make test` has them")
def test_setup_repairs_what_was_interrupted_keeps_torch_and_is_quick_the_second_time(tree: Path) -> None:
    import torch

    # As left behind by a kill in the middle of pip: no stamp, the mark still there, no interpreter.
    (tree / ".venv" / "bin").mkdir(parents=True)
    (tree / ".venv" / "pyvenv.cfg").write_text("include-system-site-packages = true\n", encoding="utf-8")
    (tree / ".venv" / ".deepwell-unfinished").touch()

    # The environment of this run has torch and all packages, so that no index is needed.
    first = _run_setup(tree, PYTHON=sys.executable)
    assert first.returncode == 0, first.stderr
    assert "an unfinished or outdated .venv is replaced" in first.stdout
    assert "keeping torch" in first.stdout
    assert Path(_imported_torch(tree)) == Path(torch.__file__)

    start = time.perf_counter()
    second = _run_setup(tree)
    assert second.stdout.startswith("setup: ready")
    # 0.3 s on an idle machine; here both cores may be busy with other tests.
    assert time.perf_counter() - start < 3


# ---- test.py ----


def test_test_py_passes_its_arguments_to_pytest_and_returns_its_status() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "test.py"), "-p", "no:cacheprovider", "-q", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")

    chosen = run("tests/test_repository.py", "-k", "test_scripts_can_be_started")
    assert chosen.returncode == 0, chosen.stdout
    assert "2 passed" in chosen.stdout
    # Five is pytest's own status for "no tests collected".
    assert run("tests/test_repository.py", "-k", "no_test_is_called_so").returncode == 5


# ---- what the tree may hold ----

# Absolute paths that exist on somebody's machine only. Assembled, so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:" + "|".join(("home", "root", "tmp", "Users", "work")) + r")/[\w.]")


def test_the_pattern_finds_the_path_of_a_machine() -> None:
    path = "/".join(("", "home", "someone", "data"))
    assert MACHINE_PATH.search(f'open("{path}")')
    assert not MACHINE_PATH.search("benchmarks/home/index.html")


def test_the_tree_names_no_path_of_one_machine() -> None:
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_tree_holds_no_large_file() -> None:
    large = [f"{path} ({path.stat().st_size >> 10} KiB)" for path in tracked_files() if path.stat().st_size > 1 << 20]
    assert not large, f"keep data out of the tree or make it smaller: {large}"


def test_nothing_in_the_sources_is_left_unfinished() -> None:
    marks = re.compile(
        r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b|raise NotImplementedError(?:\(\))?$"
    )
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in texts()
        if path.parts[0] in ("src", "csrc", "benchmarks", "recipes")
        for number, line in enumerate(text.splitlines(), 1)
        if marks.search(line)
    ]
    assert not found, "\n".join(found)
