"""Time the CUTLASS kernels in every configuration against cuBLASLt, after checking their bits.

    PYTHONPATH=src python3 benchmarks/bench_cutlass.py [--library FILE] [--shapes 0,1,2] [--json FILE]

`--library` is a shared library of `deepwell build`; without it the one in the cache folder is taken. A row says
microseconds (median), TFLOP/s, and the speed as a share of cuBLASLt's product of the same shape with the same
accumulation. "equal" is the share of results whose bits are cuBLASLt's, "dB" the distance from them. The first rows are
not timed: dB against the fp32 product of the dequantized operands, ragged sizes too. A kernel that is wrong is a row
that says WRONG and has no time.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from deepwell.bench.environment import environment
from deepwell.formats.metrics import sqnr_db
from deepwell.formats.quantize import quantize
from deepwell.kernels.cutlass import library as cl
from deepwell.kernels.gemm.fp8 import fp8_gemm_ref
from deepwell.kernels.quantize.fp8 import quantize_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# M, N, K: two squares, the linears of a Llama-8B layer at 16384 tokens, a wgrad, and a narrow one.
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
# Sizes that fill no tile, for the check alone.
RAGGED = ((1, 16, 16), (100, 272, 144), (777, 1040, 528))


@dataclass(frozen=True, kw_only=True)
class Row:
    shape: tuple[int, int, int]
    kernel: str
    us: float | None
    tflops: float | None
    of_vendor: float | None
    equal: float | None
    db: float | None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    kernel: str
    run: Callable[[], Tensor]
    # What its bits are compared with, and whose time its own is divided by.
    vendor: str


def median_us(run: Callable[[], object]) -> float:
    return 1e3 * triton.testing.do_bench(run, warmup=10, rep=30, return_mode="median")


def operands(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, n, k = shape
    a = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(n, k, dtype=torch.bfloat16, device="cuda").mul_(k**-0.5)
    return (*quantize_rows(a, dtype=dtype), *quantize_rows(b))


def vendor_row(sides: tuple[Tensor, Tensor, Tensor, Tensor], fast: bool) -> Callable[[], Tensor]:
    a, scale_a, b, scale_b = sides
    rows, columns = scale_a[:, None], scale_b[None, :]
    return lambda: torch._scaled_mm(a, b.T, rows, columns, out_dtype=torch.bfloat16, use_fast_accum=fast)


def rowwise_cases(library: cl.Library, sides: tuple[Tensor, Tensor, Tensor, Tensor]) -> Iterator[Case]:
    name = "e4m3" if sides[0].dtype == E4M3 else "e5m2"
    for fast in (True, False):
        label = f"cublaslt row {name} {'fast' if fast else 'exact'}"
        yield Case(kernel=label, run=vendor_row(sides, fast), vendor=label)
    for config in library.configs.get("fp8_rowwise", ()):

        def run(config: str = config) -> Tensor:
            return cl.gemm_rowwise(*sides, config=config, library=library)

        vendor = f"cublaslt row {name} {'exact' if 'exact' in config else 'fast'}"
        yield Case(kernel=f"cutlass row {name} {config}", run=run, vendor=vendor)


def fused_cases(library: cl.Library, shape: tuple[int, int, int]) -> Iterator[Case]:
    """Bias and SiLU in the epilogue against the product and the two as torch compiles them."""
    sides = operands(shape, E4M3)
    bias = torch.randn(shape[1], dtype=torch.bfloat16, device="cuda")
    product = vendor_row(sides, True)
    tail = torch.compile(lambda y: F.silu(y + bias))
    label = "cublaslt row e4m3 fast, torch bias+silu"
    yield Case(kernel=label, run=lambda: tail(product()), vendor=label)
    epilogue = cl.Epilogue(bias=bias, activation="silu")
    for config in library.configs.get("fp8_rowwise", ())[:2]:

        def run(config: str = config) -> Tensor:
            return cl.gemm_rowwise(*sides, config=config, epilogue=epilogue, library=library)

        yield Case(kernel=f"cutlass row e4m3 {config}, bias+silu", run=run, vendor=label)


def blockwise_cases(library: cl.Library, shape: tuple[int, int, int]) -> Iterator[Case]:
    m, n, k = shape
    if "fp8_blockwise" not in library.configs or n % 128 or k % 128 or m % 4:
        return
    a, b = (torch.randn(rows, k, dtype=torch.bfloat16, device="cuda").to(E4M3) for rows in (m, n))
    scale_a = torch.rand(k // 128, m, device="cuda") + 0.5
    scale_b = torch.rand(k // 128, n // 128, device="cuda") + 0.5
    kinds = F.ScalingType
    # torch wants the blocks of B padded to four along K, K fast.
    padded = torch.zeros(n // 128, (k // 128 + 3) // 4 * 4, device="cuda")
    padded[:, : k // 128] = scale_b.T

    def vendor() -> Tensor:
        recipes = (kinds.BlockWise1x128, kinds.BlockWise128x128)
        return F.scaled_mm(a, b.T, scale_a.T, recipes[0], padded.T, recipes[1], output_dtype=torch.bfloat16)

    label = "cublaslt 1x128"
    yield Case(kernel=label, run=vendor, vendor=label)
    for config in library.configs["fp8_blockwise"]:

        def run(config: str = config) -> Tensor:
            return cl.gemm_blockwise(a, scale_a, b, scale_b, config=config, library=library)

        yield Case(kernel=f"cutlass 1x128 {config}", run=run, vendor=label)


def measure(shape: tuple[int, int, int], cases: Iterator[Case]) -> list[Row]:
    """Rows of one family: each case compared with its vendor's result, then timed."""
    rows: list[Row] = []
    results: dict[str, Tensor] = {}
    times: dict[str, float] = {}
    flops = 2.0 * shape[0] * shape[1] * shape[2]
    for case in cases:
        try:
            got = case.run()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:  # a kernel's, or torch's own checks
            rows.append(_failed(shape, case.kernel, str(error).splitlines()[0]))
            continue
        results.setdefault(case.kernel, got)
        wanted = results.get(case.vendor)
        equal = db = None
        if wanted is not None and case.kernel != case.vendor:
            equal = float((got == wanted).float().mean())
            db = sqnr_db(wanted.float(), got.float())
            # Different orders of the same sums differ by a bf16 rounding here and there; anything else is wrong.
            if db < 45:
                rows.append(_failed(shape, case.kernel, f"WRONG: {db:.1f} dB against {case.vendor}"))
                continue
        us = times[case.kernel] = median_us(case.run)
        vendor_us = times.get(case.vendor)
        rows.append(
            Row(
                shape=shape,
                kernel=case.kernel,
                us=us,
                tflops=flops / us / 1e6,
                of_vendor=None if vendor_us is None else vendor_us / us,
                equal=equal,
                db=db,
            )
        )
    return rows


def _failed(shape: tuple[int, int, int], kernel: str, problem: str) -> Row:
    return Row(shape=shape, kernel=kernel, us=None, tflops=None, of_vendor=None, equal=None, db=None, problem=problem)


def accuracy(library: cl.Library) -> list[Row]:
    """dB of every configuration against the fp32 product: what each accumulation loses at K = 4096 and 16384."""
    rows = []
    for shape in ((1024, 1024, 4096), (1024, 1024, 16384), *RAGGED):
        sides = operands(shape, E4M3)
        reference = fp8_gemm_ref(*sides, out_dtype=torch.float32)
        for case in rowwise_cases(library, sides):
            try:
                db = sqnr_db(reference, case.run().float())
            except (RuntimeError, ValueError) as error:
                rows.append(_failed(shape, case.kernel, str(error)))
                continue
            rows.append(Row(shape=shape, kernel=case.kernel, us=None, tflops=None, of_vendor=None, equal=None, db=db))
    x, w = (torch.randn(rows_, 4096, device="cuda") for rows_ in (1024, 1024))
    a, b = quantize(x, "fp8_1x128"), quantize(w, "fp8_128x128")
    if "fp8_blockwise" in library.configs and a.scales is not None and b.scales is not None:
        got = cl.gemm_blockwise(a.data, a.scales.T.contiguous(), b.data, b.scales.T.contiguous(), library=library)
        db = sqnr_db(a.dequantize() @ b.dequantize().T, got.float())
        name = "cutlass 1x128"
        rows.append(
            Row(shape=(1024,) * 2 + (4096,), kernel=name, us=None, tflops=None, of_vendor=None, equal=None, db=db)
        )
    return rows


def show(rows: list[Row]) -> None:
    for row in rows:
        shape = "x".join(map(str, row.shape))
        if row.problem:
            print(f"{shape:>20}  {row.kernel:58} {row.problem}")
            continue
        figures = [
            "" if row.us is None else f"{row.us:9.1f} us {row.tflops:7.0f} TFLOP/s",
            "" if row.of_vendor is None else f"{row.of_vendor:6.3f} of vendor",
            "" if row.equal is None else f"{100 * row.equal:8.4f}% equal",
            "" if row.db is None else f"{row.db:6.1f} dB",
        ]
        print(f"{shape:>20}  {row.kernel:58} {'  '.join(f for f in figures if f)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="a shared library of `deepwell build`; else the one in the cache folder")
    parser.add_argument(
        "--shapes", default=",".join(map(str, range(len(SHAPES)))), help="numbers of the shapes to time"
    )
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_cutlass needs a CUDA GPU")
    library = cl.load_library(str(Path(arguments.library).resolve())) if arguments.library else cl.library_for()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {library}")
    torch.manual_seed(0)
    rows = accuracy(library)
    show(rows)
    for shape in (SHAPES[int(i)] for i in arguments.shapes.split(",")):
        found = measure(shape, rowwise_cases(library, operands(shape, E4M3)))
        found += measure(shape, rowwise_cases(library, operands(shape, E5M2)))
        found += measure(shape, fused_cases(library, shape))
        found += measure(shape, blockwise_cases(library, shape))
        show(found)
        rows += found
        torch.cuda.empty_cache()
    if arguments.json:
        facts = {"environment": environment(), "library": str(library)}
        Path(arguments.json).write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
