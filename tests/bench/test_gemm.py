"""The table of single products: every candidate is a row, and the means are of chains against bf16."""

import dataclasses
import json

import pytest

from deepwell.bench import gemm
from deepwell.bench.environment import environment
from deepwell.bench.gemm import SHAPES, gemm_table, run_gemms, summary
from deepwell.bench.ran import Kernel
from deepwell.bench.report import has_problems
from deepwell.kernels.registry import KernelRegistry, Problem


def row(kernel, speed, shape=(1, 2, 3), op="gemm"):
    return {"op": op, "shape": list(shape), "kernel": kernel, "speed": speed, "us": 1.0}


def test_every_candidate_is_a_row_with_its_figures():
    result = run_gemms("cpu", shapes=[(64, 96, 128)])
    rows = {row["kernel"]: row for row in result["rows"]}
    assert {"torch_bf16", "emulated_fp8", "fp8_gemm_ref"} <= set(rows)
    assert all(row["us"] > 0 and row["tflops"] > 0 and row["sqnr_db"] > 20 for row in rows.values())
    assert rows["torch_bf16"]["speed"] == 1.0
    text = gemm_table(json.loads(json.dumps(result)))
    assert "64x96x128  chain" in text and "emulated_fp8" in text and "geometric mean over 1 shapes" in text


def test_a_row_whose_kernel_did_not_run_is_a_problem(monkeypatch):
    seen = [Kernel(name="elementwise_kernel", count=1, ms=1.0)]
    monkeypatch.setattr(gemm, "profile", lambda call: (call(), seen)[1])
    registry = KernelRegistry()
    problem = Problem(op="gemm", m=64, n=96, k=128, precision="fp8", static_b=True, device="cpu")
    row = {"op": "gemm", "shape": [64, 96, 128], "kernel": "x", "us": 1.0, "tflops": 1.0, "sqnr_db": 50.0, "speed": 1.0}
    gemm._look(row, dataclasses.replace(registry.candidate("gemm", "emulated_fp8"), origin="vendor"), problem)
    assert (
        row["problems"] == ["a product of vendor: 0 of at least 1 kernels ran"] and row["ran"] == "elementwise_kernel"
    )
    result = {"rows": [row], "environment": environment(), "summary": summary([row])}
    assert has_problems(result) and "0 of at least 1 kernels ran" in gemm_table(result)
    codes = Problem(op="fp8_gemm", m=64, n=96, k=128, precision="fp8", static_b=True, device="cpu")
    gemm._look(row, registry.candidate("fp8_gemm", "fp8_gemm_ref"), codes)
    assert row["problems"] == []  # a reference claims nothing


def test_means_are_geometric_over_chains_and_the_best_of_a_shape_counts_once():
    rows = [row("fp8", 2.0), row("bf16", 1.0), row("fp8", 0.5, (4, 5, 6)), row("bf16", 1.0, (4, 5, 6))]
    found = summary([*rows, row("codes", 9.0, op="fp8_gemm")])["chains"]
    assert found["fp8"] == {"geomean": pytest.approx(1.0), "least": 0.5, "shapes": 2}
    assert found["best of each shape"] == {"geomean": pytest.approx(2**0.5), "least": 1.0, "shapes": 2}
    assert "codes" not in found


def test_the_race_has_eight_shapes():
    assert len(set(SHAPES)) == 8
