"""Single products as layers have them: every candidate's whole chain and its GEMM alone, beside bf16.

A chain quantizes the activation, multiplies, and writes bf16; the weight is quantized beforehand, as it is shared by
all tokens of a step. Each result is checked against the reference at its own shape before it is timed, and on a GPU
the profiler is asked afterwards whether the kernels ran that a row is named for.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from deepwell.bench.environment import environment, one_line
from deepwell.bench.ran import candidate_claims, problems, profile
from deepwell.hardware.progress import bar
from deepwell.kernels.gemm.cases import call_of, inputs_of, setup
from deepwell.kernels.registry import KernelRegistry
from deepwell.kernels.tune.candidate import Candidate, Verdict
from deepwell.kernels.tune.choose import on_real_tensors, race
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.verify import Proof

# (M, N, K): squares, the linears of an 8B-class layer at 16384 tokens, a weight gradient, a small model's MLP.
SHAPES = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 6144, 4096),
    (16384, 4096, 4096),
    (16384, 28672, 4096),
    (16384, 4096, 14336),
    (28672, 4096, 16384),
    (16384, 3072, 768),
)
BASELINE = "torch_bf16"
TARGET = 1.6


def run_gemms(
    device: str = "cuda", *, shapes: Sequence[tuple[int, int, int]] = SHAPES, registry: KernelRegistry | None = None
) -> dict[str, Any]:
    """Time all candidates on all shapes. Returns rows, the geometric means against bf16, and where it was measured."""
    registry = registry or KernelRegistry()
    place = f"{device}:0" if device == "cuda" else device
    rows: list[dict[str, Any]] = []
    with bar("gemm", len(shapes)) as advance:
        for shape in shapes:
            rows += _shape(registry, shape, place)
            advance(1)
    return {"environment": environment(), "rows": rows, "summary": summary(rows)}


def _shape(registry: KernelRegistry, shape: tuple[int, int, int], device: str) -> list[dict[str, Any]]:
    m, n, k = shape
    rows = []
    precision = "auto" if device.startswith("cuda") else "fp8"
    for op, asked in (("gemm", precision), ("fp8_gemm", "fp8")):
        problem = Problem(op=op, m=m, n=n, k=k, precision=asked, static_b=True, device=device)
        given = [candidate for candidate in registry.candidates(op, asked) if not candidate.why_not(problem)]
        if device.startswith("cuda"):
            given = [candidate for candidate in given if candidate.origin != "reference"]
        elif op == "gemm":
            given.append(registry.candidate("gemm", BASELINE))
        with on_real_tensors():
            verdicts = race(problem, [(candidate, Proof()) for candidate in given], setup(problem))
            found = [_row(op, shape, verdict) for verdict in verdicts]
            by_name = {candidate.name: candidate for candidate in given}
            for row in found if device.startswith("cuda") else ():
                if row["us"]:
                    _look(row, by_name[row["kernel"]], problem)
        rows += found
    bf16 = next((row["us"] for row in rows if row["kernel"] == BASELINE), None)
    for row in rows:
        row["speed"] = bf16 / row["us"] if bf16 and row["us"] else None
    return rows


def _row(op: str, shape: tuple[int, int, int], verdict: Verdict) -> dict[str, Any]:
    m, n, k = shape
    return {
        "op": op,
        "shape": list(shape),
        "kernel": verdict.name,
        "origin": verdict.origin,
        "us": verdict.us,
        "tflops": 2 * m * n * k / verdict.us / 1e6 if verdict.us else None,
        "sqnr_db": verdict.sqnr_db,
        "problem": verdict.reason,
    }


def _look(row: dict[str, Any], candidate: Candidate, problem: Problem) -> None:
    """Ask the profiler what ran: the longest kernel of one call, and what of the row's claims does not hold."""
    kernels = profile(call_of(candidate, problem, inputs_of(problem)))
    row["ran"] = max(kernels, key=lambda kernel: kernel.ms).name[:60] if kernels else None
    row["problems"] = problems(candidate_claims(candidate.origin, candidate.precision), kernels)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric mean and least of the speed against bf16: of each chain, and of the best chain of every shape."""
    by_kernel: dict[str, list[float]] = {}
    best: dict[tuple[int, ...], float] = {}
    for row in rows:
        if row["op"] == "gemm" and row["speed"]:
            by_kernel.setdefault(row["kernel"], []).append(row["speed"])
            key = tuple(row["shape"])
            best[key] = max(best.get(key, 0.0), row["speed"])
    if best:
        # bf16 itself is among the candidates: what is chosen is never slower.
        by_kernel["best of each shape"] = list(best.values())
    found = {
        name: {"geomean": statistics.geometric_mean(speeds), "least": min(speeds), "shapes": len(speeds)}
        for name, speeds in by_kernel.items()
    }
    return {"chains": found, "num_shapes": len({tuple(row["shape"]) for row in rows}), "target": TARGET}


def gemm_table(result: dict[str, Any]) -> str:
    lines = [one_line(result["environment"])]
    last = None
    for row in result["rows"]:
        head = (tuple(row["shape"]), row["op"])
        if head != last:
            what = "chain: quantize, multiply" if row["op"] == "gemm" else "GEMM of FP8 values alone"
            lines += ["", f"{'x'.join(map(str, row['shape']))}  {what}"]
            last = head
        if row["us"] is None:
            lines.append(f"  {row['kernel']:<40} {row['problem']}")
            continue
        speed = f"{row['speed']:5.2f}x bf16" if row["speed"] else ""
        db = "" if row["sqnr_db"] is None else f"{row['sqnr_db']:7.1f} dB"
        wrong = "; ".join(row.get("problems", ()))
        figures = f"  {row['kernel']:<40} {row['us']:9.1f} us {row['tflops']:8.1f} TFLOP/s {db}  {speed}  {wrong}"
        lines.append(figures.rstrip())
    lines += ["", f"chains against bf16, geometric mean over {result['summary']['num_shapes']} shapes (least)"]
    for name, found in result["summary"]["chains"].items():
        lines.append(f"  {name:<40} {found['geomean']:5.2f}x ({found['least']:.2f}x) on {found['shapes']} shapes")
    return "\n".join(lines)
