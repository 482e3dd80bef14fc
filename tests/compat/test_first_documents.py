"""What the original documents name is there and works."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import deepwell as dw
from deepwell.compat.sources import SOURCES
from deepwell.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_cutlass_kernels_is_importable_from_the_package() -> None:
    from deepwell import cutlass_kernels

    x = torch.randn(4, 64)
    values, scales = cutlass_kernels.quantize_mxfp8(x)
    assert torch.allclose(cutlass_kernels.dequantize_mxfp8(values, scales).float(), x, atol=0.25)
    assert "cutlass_kernels" not in dw.__all__


def test_tcgen05_ops_quantizes_and_multiplies() -> None:
    from deepwell.kernels import tcgen05_ops

    x, w = torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(48, 64, dtype=torch.bfloat16)
    sides = [tcgen05_ops.quantize_mxfp8(side, columns=False) for side in (x, w)]
    a, b = (tcgen05_ops.ScaledOperand(side.q_TK, side.scale) for side in sides)
    y = tcgen05_ops.block_scaled_gemm(a, b, out_dtype=torch.float32)
    assert torch.equal(y, dw.quantize(x, "mxfp8").dequantize() @ dw.quantize(w, "mxfp8").dequantize().T)


def test_the_graph_optimizer_returns_a_graph_that_computes_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    x = torch.randn(8, 64)
    optimized = dw.BlackwellGraphOptimizer("bf16").optimize(fx.symbolic_trace(model), x)
    assert isinstance(optimized, fx.GraphModule)
    assert torch.allclose(optimized(x), model(x), atol=1e-5)
    low = dw.BlackwellGraphOptimizer().optimize(fx.symbolic_trace(model), x)
    far = (low(x) - model(x)).norm() / model(x).norm()
    assert 1e-4 < far < 0.1  # rounded to MXFP8, and close
    assert "mxfp8" in str(low.engine.report())
    with pytest.raises(ConfigError, match="GraphModule"):
        dw.BlackwellGraphOptimizer().optimize(lambda x: x)


def test_files_that_were_replaced_name_what_does_their_work() -> None:
    for old, new in SOURCES.items():
        assert not (ROOT / old).exists()
        assert all((ROOT / path).is_file() for path in new), old


def test_both_names_of_an_architecture_mean_the_same() -> None:
    from deepwell.cli.build import _archs_here

    assert [_archs_here({"TORCH_CUDA_ARCH_LIST": name}) for name in ("10.0", "10.0a")] == [["sm_100a"]] * 2


def test_the_speedup_table_checks_every_row_and_refuses_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    speedup = importlib.import_module("speedup")
    result = speedup.run_speedup("cpu", ["gemm"], ["bf16", "mxfp8"])
    assert [row["name"] for row in result["rows"]] == ["torch", "Deepwell bf16", "Deepwell mxfp8"]
    assert all(row["right"] and row["speedup"] > 0 for row in result["rows"])
    monkeypatch.setitem(speedup._FLOORS_DB, "mxfp8", 90.0)
    wrong = speedup.run_speedup("cpu", ["gemm"], ["mxfp8"])["rows"][1]
    assert not wrong["right"] and wrong["speedup"] is None
    assert "WRONG" in speedup.table({**result, "rows": [wrong]})
    with pytest.raises(ConfigError, match="no part"):
        speedup.run_speedup("cpu", ["gem"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["./run_blackwell_benchmark.sh", "./run_real_benchmark.sh", "benchmarks/benchmark.py"]
)
def test_the_benchmark_scripts_run_on_a_cpu(script: str, tmp_path: Path) -> None:
    command = [script] if script.endswith(".sh") else [sys.executable, script]
    environment = {**os.environ, "PYTHON": sys.executable}
    run = subprocess.run(
        [*command, "--device", "cpu", "--json", str(tmp_path / "rows.json")], cwd=ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert "GEMM 128^3" in run.stdout and (tmp_path / "rows.json").is_file()


@pytest.mark.parametrize("script", ["test_production.py", "test_blackwell_dispatch.py"])
def test_the_test_scripts_hand_their_tests_to_pytest(script: str) -> None:
    command = [sys.executable, script, "--collect-only", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "tests collected" in run.stdout, run.stdout[-1000:] + run.stderr[-1000:]


def test_setup_py_hands_build_ext_to_deepwell_build() -> None:
    command = [sys.executable, "setup.py", "build_ext", "--inplace", "--arch", "sm_1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode != 0 and "sm_1" in run.stdout + run.stderr  # refused by `deepwell build`, by name


def test_a_wheel_has_the_cuda_sources_inside(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("src/deepwell/errors.py", "csrc/abi.cu", "csrc/deepwell_abi.h", "setup.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    (tree / "src/deepwell/__init__.py").write_text("")
    (tree / "pyproject.toml").write_text(
        '[project]\nname = "deepwell"\nversion = "1"\n[tool.setuptools.packages.find]\nwhere = ["src"]\n'
    )
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "built")]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert (tmp_path / "built/deepwell/csrc/deepwell_abi.h").is_file()
