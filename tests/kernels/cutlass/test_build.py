"""`deepwell build`: what it needs, what it compiles again and what not, and what the compiler made of csrc."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepwell.cli import app
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.cutlass import build as cb
from deepwell.kernels.cutlass import library as cl

ROOT = Path(__file__).resolve().parents[3]

# A compiler that writes what it was asked instead of compiling, and fails where its source says so.
FAKE_NVCC = """#!{python}
import pathlib, sys
args = sys.argv[1:]
if "--version" in args:
    print("Cuda compilation tools, release {release}, V{release}.88")
    sys.exit()
source = next((a for a in args if a.endswith(".cu")), None)
with open({log!r}, "a") as log:
    log.write((pathlib.Path(source).stem if source else "link") + "\\n")
if source and "BROKEN" in pathlib.Path(source).read_text():
    print("x.cuh(3): error: identifier \\"tile\\" is undefined", file=sys.stderr)
    sys.exit(1)
pathlib.Path(args[args.index("-o") + 1]).write_text(" ".join(args))
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A toolchain of fakes, with a copy of csrc that a test may change."""
    monkeypatch.setenv("DEEPWELL_CACHE_DIR", str(tmp_path / "cache"))
    sources = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", sources)
    return cb.Toolchain(
        nvcc=fake_nvcc(tmp_path, "13.0"),
        nvcc_version=(13, 0),
        headers=tmp_path,
        cutlass_version=(4, 2, 0),
        sources=sources,
    )


def fake_nvcc(folder: Path, release: str) -> Path:
    path = folder / "cuda" / "bin" / "nvcc"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FAKE_NVCC.format(python=sys.executable, release=release, log=str(folder / "log")))
    path.chmod(0o755)
    return path


def compiled(folder: Path) -> list[str]:
    """What the compiler was called for since the last question."""
    log = folder / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


# ---- what is needed ----


def test_a_missing_compiler_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(UnsupportedError, match=r"nvcc was not found.*12\.8"):
        cb.find_nvcc({"PATH": ""})


def test_an_old_compiler_is_named_with_the_version_it_needs(tmp_path):
    environ = {"CUDA_HOME": str(fake_nvcc(tmp_path, "12.6").parents[1]), "PATH": ""}
    assert cb.find_nvcc(environ)[1] == (12, 6)
    with pytest.raises(UnsupportedError, match=r"nvcc 12\.6 cannot compile for sm_100a.*12\.8"):
        cb.find_toolchain(["sm_90a", "sm_100a"], environ)


def test_a_compiler_that_does_not_say_its_version_is_named(tmp_path):
    nvcc = fake_nvcc(tmp_path, "unknown")
    with pytest.raises(UnsupportedError, match="does not name a release"):
        cb.find_nvcc({"CUDA_HOME": str(nvcc.parents[1]), "PATH": ""})


def test_missing_headers_are_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(cb.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"deepwell\[cutlass\]"):
        cb.find_headers()


def test_unknown_architectures_are_refused():
    with pytest.raises(ConfigError, match=r"sm_80.*sm_90a, sm_100a"):
        cb.check_archs(["sm_80"])
    assert cb.check_archs(["sm_90a", "sm_90a"]) == ("sm_90a",)
    assert cb.arch_of((9, 0)) == "sm_90a" and cb.arch_of((10, 0)) == "sm_100a"
    # sm_100a code runs on 10.0 alone: the "a" is for architecture-specific.
    with pytest.raises(UnsupportedError, match=r"10\.3"):
        cb.arch_of((10, 3))


# ---- incremental and atomic ----


def test_a_second_build_compiles_nothing(tools, tmp_path):
    told = []
    first = cb.build("sm_90a", tools, progress=lambda *what: told.append(what))
    assert compiled(tmp_path) == [*cb.SOURCES["sm_90a"], "link"]
    assert first.compiled == cb.SOURCES["sm_90a"] and ("abi", "started") in told and ("abi", "done") in told
    second = cb.build("sm_90a", tools)
    assert compiled(tmp_path) == [] and second.compiled == ()
    assert second.path == first.path and second.sha256 == first.sha256
    assert cb.read_manifest("sm_90a").path == first.path


def test_only_what_changed_is_compiled_again(tools, tmp_path):
    before = cb.build("sm_90a", tools)
    compiled(tmp_path)
    with (tools.sources / "fp8_blockwise.cu").open("a") as file:
        file.write("// changed\n")
    after = cb.build("sm_90a", tools)
    assert compiled(tmp_path) == ["fp8_blockwise", "link"]
    # Another library beside the first: a process that has mapped the old one keeps its file; then the old one goes.
    assert after.path != before.path and not Path(before.path).exists()
    # A header concerns those that include it, also through another: not the ABI's own file, not another family.
    with (tools.sources / "block_scaled.cuh").open("a") as file:
        file.write("// changed\n")
    cb.build("sm_90a", tools)
    assert compiled(tmp_path) == []
    with (tools.sources / "launch.cuh").open("a") as file:
        file.write("// changed\n")
    cb.build("sm_90a", tools)
    assert compiled(tmp_path) == ["fp8_rowwise", "fp8_rowwise_e5m2", "fp8_blockwise", "link"]


@pytest.mark.parametrize("change", [{"nvcc_version": (13, 1)}, {"cutlass_version": (4, 3, 0)}])
def test_another_compiler_or_cutlass_is_another_build(tools, tmp_path, change):
    cb.build("sm_100a", tools)
    compiled(tmp_path)
    facts = {name: getattr(tools, name) for name in cb.Toolchain.__slots__} | change
    cb.build("sm_100a", cb.Toolchain(**facts))
    assert compiled(tmp_path) == [*cb.SOURCES["sm_100a"], "link"]


def test_a_failing_source_is_named_and_what_is_done_stays_done(tools, tmp_path):
    good = (tools.sources / "fp8_rowwise_e5m2.cu").read_text()
    (tools.sources / "fp8_rowwise_e5m2.cu").write_text("BROKEN")
    with pytest.raises(UnsupportedError, match=r"csrc/fp8_rowwise_e5m2\.cu for sm_90a.*identifier"):
        cb.build("sm_90a", tools)
    assert compiled(tmp_path) == ["abi", "fp8_rowwise", "fp8_rowwise_e5m2"]
    with pytest.raises(UnsupportedError, match="no library was built"):
        cb.read_manifest("sm_90a")
    assert not list(cb.library_dir("sm_90a").rglob("*.partial"))
    (tools.sources / "fp8_rowwise_e5m2.cu").write_text(good)
    cb.build("sm_90a", tools)
    assert compiled(tmp_path) == ["fp8_rowwise_e5m2", "fp8_blockwise", "link"]


def test_several_compilers_at_once_give_the_same_library(tools, tmp_path):
    one = cb.build("sm_90a", tools)
    shutil.rmtree(cb.library_dir("sm_90a"))
    compiled(tmp_path)
    two = cb.build("sm_90a", tools, jobs=2)
    assert sorted(compiled(tmp_path)) == sorted([*cb.SOURCES["sm_90a"], "link"])
    assert Path(one.path).name == Path(two.path).name
    with pytest.raises(ConfigError, match="jobs"):
        cb.build("sm_90a", tools, jobs=0)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / cb.MANIFEST).write_text("{"), "cannot be read"),
        (lambda folder: (folder / cb.MANIFEST).write_text("[1]"), "another version"),
        (lambda folder: (folder / cb.MANIFEST).write_text('{"schema": 1}'), "cannot be read"),
        (lambda folder: next(folder.glob("*.so")).write_bytes(b"other"), "not the file that was built"),
        (lambda folder: next(folder.glob("*.so")).unlink(), "cannot be read"),
    ],
)
def test_a_damaged_build_is_a_reason_and_never_loaded(tools, damage, reason):
    cb.build("sm_90a", tools)
    damage(cb.library_dir("sm_90a"))
    with pytest.raises(UnsupportedError, match=rf"{reason}.*deepwell build --arch sm_90a"):
        cb.read_manifest("sm_90a")
    cl.forget_libraries()
    found = cl._library_of((9, 0))
    assert isinstance(found, str) and reason in found
    cl.forget_libraries()


# ---- command line ----


def test_the_command_builds_and_prints_json(tools, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tools.nvcc.parents[1]))
    monkeypatch.setattr(cb, "find_headers", lambda: (tools.headers, tools.cutlass_version))
    run = CliRunner().invoke(app, ["build", "--arch", "sm_100a,sm_90a", "--json"])
    assert run.exit_code == 0, run.output
    built = json.loads(run.stdout)["built"]
    assert [library["arch"] for library in built] == ["sm_100a", "sm_90a"]
    again = CliRunner().invoke(app, ["build", "--arch", "sm_90a"])
    assert again.exit_code == 0 and "up to date" in again.stdout


def test_the_command_says_what_is_wrong_in_one_line(monkeypatch):
    run = CliRunner().invoke(app, ["build", "--arch", "sm_80"])
    assert run.exit_code == 2 and run.stderr.count("\n") == 1 and "sm_80" in run.stderr
    import deepwell.cli.build as command

    monkeypatch.setattr(command, "_archs_here", lambda: ["sm_90a"])
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    run = CliRunner().invoke(app, ["build"])
    assert run.exit_code == 2 and "nvcc was not found" in run.stderr


def test_torchs_list_of_architectures_is_honoured():
    from deepwell.cli.build import _archs_here

    assert _archs_here({"TORCH_CUDA_ARCH_LIST": "9.0a;10.0a+PTX"}) == ["sm_90a", "sm_100a"]
    with pytest.raises(UnsupportedError, match=r"8\.0"):
        _archs_here({"TORCH_CUDA_ARCH_LIST": "8.0 8.6"})


# ---- the real compiler ----


def has_nvcc() -> bool:
    try:
        return cb.find_nvcc()[1] >= cb.MIN_NVCC["sm_90a"]
    except UnsupportedError:
        return False


needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="no nvcc 12.3 or later")


@needs_nvcc
def test_the_abi_compiles_and_speaks_our_version(tmp_path):
    # Seconds, without CUTLASS: the header, the exports, the static runtime and the loader's view of them.
    nvcc, _ = cb.find_nvcc()
    target = tmp_path / "libabi.so"
    flags = [*cb._FLAGS, "-gencode", "arch=compute_90a,code=sm_90a", "-DDW_ARCH=sm_90a", f"-I{ROOT / 'csrc'}"]
    link = ["-shared", "-Xlinker", "--exclude-libs=ALL"]
    subprocess.run([str(nvcc), *flags, *link, str(ROOT / "csrc/abi.cu"), "-o", str(target)], check=True)
    library = cl.load_library(str(target))
    assert library.arch == "sm_90a" and library.configs == {}
    words = [library.handle.dw_error_string(i).decode() for i in range(10)]
    assert words[0] == "ok" and len(set(words)) == 10 and "unknown" not in " ".join(words)
    assert library.handle.dw_error_string(99).decode() == "unknown error code"
    assert library.handle.dw_last_cuda_error() == b""
    with pytest.raises(UnsupportedError, match="no fp8_rowwise kernels"):
        library.config_index("fp8_rowwise", None)
    # The runtime inside must not be seen from outside: torch has its own.
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(target)], capture_output=True, text=True, check=True)
    assert "cudaLaunchKernel" not in symbols.stdout and "dw_abi_version" in symbols.stdout


def cuobjdump() -> Path | None:
    """NVIDIA's disassembler, of the pip packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm or of the toolkit."""
    here = [Path(place) / "nvidia/cu13/bin/cuobjdump" for place in sys.path]
    found = shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump"
    return next((path for path in [*here, Path(found)] if path.is_file()), None)


# Instruction -> how many kernels hold it: one per configuration and element type.
SASS = {
    "sm_90a": {r"QGMMA\.64x256x32\.F32\.E4M3\.E4M3": 1, r"QGMMA\.64x128x32\.F32\.E4M3\.E4M3": 5}
    | {r"QGMMA\.64x256x32\.F32\.E5M2\.E4M3": 1, r"QGMMA\.64x128x32\.F32\.E5M2\.E4M3": 3},
    "sm_100a": {r"UTCQMMA\.2CTA": 1, r"UTCQMMA (?!\.2CTA)": 1, r"UTCOMMA\.2CTA\.4X": 1, r"UTCOMMA\.4X": 1},
}


def kernels_of(sass: str) -> dict[str, str]:
    """The text of each kernel of a disassembly."""
    parts = re.split(r"\n\s*Function : (\S+)", sass)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("arch", cb.ARCHS)
def test_csrc_becomes_tensor_core_code_without_spills(arch):
    # Ten minutes of a core, 7 GB: the whole build, then what the assembler made of it. On a busy machine give it more
    # than pytest's limit: -o faulthandler_timeout=3600.
    tools = cb.find_toolchain([arch])
    built = cb.build(arch, tools)
    check_library(arch, built.path)


def check_library(arch: str, path: str) -> None:
    library = cl.load_library(path)
    assert library.arch == arch
    tool = cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump: pip install --no-deps nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    sass = subprocess.run([str(tool), "-sass", path], capture_output=True, text=True, check=True).stdout
    kernels = {name: text for name, text in kernels_of(sass).items() if "GemmUniversal" in name}
    assert len(kernels) == {"sm_90a": 10, "sm_100a": 4}[arch]
    for instruction, count in SASS[arch].items():
        holding = [name for name, text in kernels.items() if re.search(rf"\b{instruction}", text)]
        assert len(holding) == count, f"{instruction} is in {len(holding)} kernels"
    for name, text in kernels.items():
        assert re.search(r"\bUTMALDG", text), f"{name[:80]} loads without TMA"
        spilled = re.findall(r"\b(?:STL|LDL)\b[^;]*;", text)
        assert not spilled, f"{name[:80]} spills: {spilled[:3]}"
