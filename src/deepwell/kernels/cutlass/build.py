"""Build the CUTLASS kernels of csrc/ into one shared library per GPU architecture, kept in the cache folder.

A build is incremental: an object file is named by the hash of everything that went into it (its source, csrc's
headers, flags, the versions of nvcc and CUTLASS) and is compiled only where it is not there yet. It is atomic: the
library appears under a name of its own, and the manifest that points to it is replaced last. What an interrupted build
left is used by the next one. The libraries have a plain C ABI (csrc/deepwell_abi.h) and CUDA's runtime inside, so that
they depend on no version of torch.
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.files import hash_file, whole_file, write_whole
from deepwell.hardware.cache import cache_dir

MANIFEST = "manifest.json"
SCHEMA = 1
MIN_NVCC = {"sm_90a": (12, 3), "sm_100a": (12, 8)}
# The newest CUTLASS interface that the sources were compiled against, and the oldest they could be.
MIN_CUTLASS = (4, 2)

# abi.cu first: it takes seconds, so a broken toolchain is seen at once. The others take a minute or two each.
SOURCES: dict[str, tuple[str, ...]] = {
    "sm_90a": ("abi", "fp8_rowwise", "fp8_rowwise_e5m2", "fp8_blockwise"),
    "sm_100a": ("abi", "mxfp8", "nvfp4"),
}
ARCHS = tuple(SOURCES)
_FLAGS = ("-O3", "-std=c++17", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", "-cudart", "static")
_CAPABILITIES = {(9, 0): "sm_90a", (10, 0): "sm_100a"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolchain:
    """What a build needs: the compiler, the CUTLASS headers, our sources."""

    nvcc: Path
    nvcc_version: tuple[int, ...]
    headers: Path
    cutlass_version: tuple[int, ...]
    sources: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """One finished library. `compiled` names the sources that had to be compiled this time."""

    arch: str
    path: str
    sha256: str
    nvcc: str
    cutlass: str
    sources: tuple[str, ...]
    compiled: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        done = f"compiled {', '.join(self.compiled)} in {self.seconds:.0f} s" if self.compiled else "up to date"
        return f"{self.arch}: {self.path} (nvcc {self.nvcc}, CUTLASS {self.cutlass}; {done})"


# (source, "started" | "done" | "cached")
Progress = Callable[[str, str], None]


# ---- what is needed ----


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture to build for on a GPU. Raises UnsupportedError where there are no kernels for it."""
    arch = _CAPABILITIES.get(capability)
    if arch is None:
        have = ", ".join(f"{major}.{minor} ({name})" for (major, minor), name in _CAPABILITIES.items())
        raise UnsupportedError(
            f"no CUTLASS kernels for compute capability {capability[0]}.{capability[1]}; csrc has {have}"
        )
    return arch


def check_archs(archs: Sequence[str]) -> tuple[str, ...]:
    """`archs` without repeats. Raises ConfigError where one is not known."""
    for arch in archs:
        if arch not in SOURCES:
            raise ConfigError(f"arch is {arch!r}; csrc has kernels for {', '.join(ARCHS)}")
    return tuple(dict.fromkeys(archs))


def find_nvcc(environ: Mapping[str, str] | None = None) -> tuple[Path, tuple[int, ...]]:
    """(nvcc, its version): of $CUDA_HOME first, as torch looks, then of the path. Raises UnsupportedError."""
    environ = os.environ if environ is None else environ
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    places = [str(Path(home) / "bin")] if home else []
    places += [environ.get("PATH", ""), "/usr/local/cuda/bin"]
    found = shutil.which("nvcc", path=os.pathsep.join(places))
    if found is None:
        raise UnsupportedError(
            "nvcc was not found: install the CUDA toolkit 12.8 or later (its compiler is enough: cuda-nvcc, "
            "cuda-cudart-dev), or set CUDA_HOME to where it is"
        )
    text = _run([found, "--version"]).stdout
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is None:
        raise UnsupportedError(f"{found} --version does not name a release; reinstall the CUDA toolkit")
    return Path(found), (int(match[1]), int(match[2]))


def find_headers() -> tuple[Path, tuple[int, ...]]:
    """(the folder that holds include/ and tools/, the version) of the installed CUTLASS. Raises UnsupportedError."""
    spec = importlib.util.find_spec("cutlass_library")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        root = Path(place) / "source"
        header = root / "include/cutlass/version.h"
        if header.is_file():
            numbers = re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", header.read_text(errors="replace"))
            version = tuple(int(n) for n in numbers)
            if version < MIN_CUTLASS:
                raise UnsupportedError(f"CUTLASS {_dotted(version)} is too old: pip install 'deepwell[cutlass]'")
            return root, version
    raise UnsupportedError("the CUTLASS headers are not installed: pip install 'deepwell[cutlass]'")


def find_sources() -> Path:
    """csrc/ of this checkout, or the copy inside the installed package. Raises UnsupportedError without both."""
    here = Path(__file__).resolve()
    for folder in (here.parents[4] / "csrc", here.parents[2] / "csrc"):
        if (folder / "deepwell_abi.h").is_file():
            return folder
    raise UnsupportedError(f"{folder} is not there: this installation of Deepwell has lost its CUDA sources")


def find_toolchain(archs: Sequence[str], environ: Mapping[str, str] | None = None) -> Toolchain:
    """Everything a build for `archs` needs. Raises UnsupportedError naming the first thing that is missing."""
    nvcc, version = find_nvcc(environ)
    for arch in check_archs(archs):
        if version < MIN_NVCC[arch]:
            needed = _dotted(MIN_NVCC[arch])
            raise UnsupportedError(f"nvcc {_dotted(version)} cannot compile for {arch}: install CUDA {needed} or later")
    headers, cutlass = find_headers()
    return Toolchain(nvcc=nvcc, nvcc_version=version, headers=headers, cutlass_version=cutlass, sources=find_sources())


# ---- building ----


def library_dir(arch: str, environ: Mapping[str, str] | None = None) -> Path:
    """Where the library of an architecture is kept. It need not exist."""
    return cache_dir(environ) / "native" / arch


def plan(arch: str, tools: Toolchain, environ: Mapping[str, str] | None = None) -> dict[str, Path]:
    """The object file of each source; those that exist need no compiler."""
    folder = library_dir(arch, environ) / "objects"
    return {name: folder / f"{name}-{_digest(arch, name, tools)}.o" for name in SOURCES[arch]}


def build(
    arch: str,
    tools: Toolchain,
    *,
    jobs: int = 1,
    progress: Progress | None = None,
    environ: Mapping[str, str] | None = None,
) -> Built:
    """Compile what is not compiled yet and link. `jobs` compilers at once take about 6 GB of memory each.

    Raises UnsupportedError with the compiler's last words where it fails; what is done stays done.
    """
    if not isinstance(jobs, int) or jobs < 1:
        raise ConfigError(f"jobs is {jobs!r}; it must be a whole number of at least 1")
    (arch,) = check_archs([arch])
    start = time.monotonic()
    objects = plan(arch, tools, environ)
    tell = progress or (lambda source, state: None)
    todo = [name for name, path in objects.items() if not path.is_file()]
    for name in objects:
        if name not in todo:
            tell(name, "cached")
    folder = library_dir(arch, environ)
    try:
        (folder / "objects").mkdir(parents=True, exist_ok=True)
        _compile_all(arch, tools, {name: objects[name] for name in todo}, jobs, tell)
        library = _link(arch, tools, list(objects.values()), folder)
    except OSError as error:
        raise ConfigError(f"DEEPWELL_CACHE_DIR: {folder} cannot be written ({error.strerror})") from error
    built = Built(
        arch=arch,
        path=str(library),
        sha256=hash_file(library),
        nvcc=_dotted(tools.nvcc_version),
        cutlass=_dotted(tools.cutlass_version),
        sources=SOURCES[arch],
        compiled=tuple(todo),
        seconds=time.monotonic() - start,
    )
    _write_manifest(folder, built)
    _forget(folder, {*objects.values(), library})
    return built


def _compile_all(arch: str, tools: Toolchain, todo: Mapping[str, Path], jobs: int, tell: Progress) -> None:
    """Compile in order, `jobs` at a time; the first failure lets the running ones end and starts no others."""
    waiting = list(todo.items())
    running: dict[Future[None], str] = {}
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        while waiting or running:
            while waiting and len(running) < jobs:
                name, target = waiting.pop(0)
                tell(name, "started")
                running[pool.submit(_compile, arch, tools, name, target)] = name
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                name = running.pop(future)
                future.result()
                tell(name, "done")


def _compile(arch: str, tools: Toolchain, name: str, target: Path) -> None:
    command = [str(tools.nvcc), *compile_flags(arch, tools), "-c", str(tools.sources / f"{name}.cu")]
    with whole_file(target) as partial:
        run = _run([*command, "-o", str(partial)])
        if run.returncode:
            raise UnsupportedError(f"nvcc could not compile csrc/{name}.cu for {arch}: {_last_words(run.stderr)}")


def _link(arch: str, tools: Toolchain, objects: Sequence[Path], folder: Path) -> Path:
    # Named by what is in it: a running process keeps the file that it has mapped.
    name = f"libdeepwell_{arch}-{hashlib.sha256(' '.join(p.name for p in objects).encode()).hexdigest()[:16]}.so"
    target = folder / name
    if target.is_file():
        return target
    # The runtime inside must not take the place of torch's own: its symbols stay hidden.
    command = [
        str(tools.nvcc),
        "-shared",
        "-cudart",
        "static",
        "-Xlinker",
        "--exclude-libs=ALL",
        "-Xlinker",
        "-Bsymbolic",
    ]
    with whole_file(target) as partial:
        run = _run([*command, *map(str, objects), "-o", str(partial)])
        if run.returncode:
            raise UnsupportedError(f"nvcc could not link the library for {arch}: {_last_words(run.stderr)}")
    return target


def compile_flags(arch: str, tools: Toolchain) -> list[str]:
    """nvcc's flags for one source."""
    includes = [tools.sources, tools.headers / "include", tools.headers / "tools/util/include"]
    number = arch.removeprefix("sm_")
    target = ["-gencode", f"arch=compute_{number},code={arch}", f"-DDW_ARCH={arch}"]
    return [*_FLAGS, *target, *(f"-I{path}" for path in includes)]


def _digest(arch: str, name: str, tools: Toolchain) -> str:
    digest = hashlib.sha256()
    # The flags without the folders: the same build elsewhere is the same build.
    facts = [arch, name, *_FLAGS, _dotted(tools.nvcc_version), _dotted(tools.cutlass_version)]
    digest.update("\n".join(facts).encode())
    for path in _with_headers(tools.sources / f"{name}.cu"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _with_headers(source: Path) -> list[Path]:
    """A source and those of our own headers that it includes, also through each other."""
    found = [source]
    for path in found:
        for name in re.findall(r'^\s*#include "([\w.]+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            header = source.parent / name
            if header.is_file() and header not in found:
                found.append(header)
    return found


# ---- manifest ----


def _write_manifest(folder: Path, built: Built) -> None:
    facts = {"schema": SCHEMA, **built.to_dict(), "path": Path(built.path).name}
    write_whole(folder / MANIFEST, json.dumps(facts, indent=1))


def read_manifest(arch: str, environ: Mapping[str, str] | None = None) -> Built:
    """The library that the last build for `arch` made, its bytes checked. Raises UnsupportedError with the reason."""
    folder = library_dir(arch, environ)
    again = f"run `deepwell build --arch {arch}`"
    try:
        facts = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(facts, dict) or facts.pop("schema", None) != SCHEMA:
            raise UnsupportedError(f"the library for {arch} was built by another version of Deepwell: {again}")
        facts["path"] = str(folder / facts["path"])
        facts["sources"], facts["compiled"] = tuple(facts["sources"]), tuple(facts["compiled"])
        built = Built(**facts)
    except FileNotFoundError:
        raise UnsupportedError(f"no library was built for {arch}: {again}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UnsupportedError(f"the manifest of the library for {arch} cannot be read ({error}): {again}") from error
    try:
        matches = hash_file(Path(built.path)) == built.sha256
    except OSError as error:
        raise UnsupportedError(f"{built.path} cannot be read ({error.strerror}): {again}") from error
    if not matches:
        raise UnsupportedError(f"{built.path} is not the file that was built (another hash): {again}")
    return built


def _forget(folder: Path, keep: set[Path]) -> None:
    """Remove libraries and objects of older sources."""
    for path in [*folder.glob("libdeepwell_*.so"), *folder.glob("objects/*.o")]:
        if path not in keep:
            path.unlink(missing_ok=True)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UnsupportedError(f"{command[0]} cannot be run ({error.strerror}); reinstall the CUDA toolkit") from error


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "error" in line.lower()] or text.strip().splitlines()[-3:]
    return " | ".join(lines[:3]) or "it said nothing; is there enough memory?"
