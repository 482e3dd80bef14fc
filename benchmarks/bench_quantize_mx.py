"""Time the MXFP8 and NVFP4 quantizers in every config, after checking their bits against the formats.

    PYTHONPATH=src python3 benchmarks/bench_quantize_mx.py [--json FILE]

Each row says microseconds (median), GB/s of the bytes the operation must move, and that as a share of the copy
bandwidth measured in the same run. A config whose bits differ is a row that says WRONG.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepwell.bench.environment import environment
from deepwell.formats.quantize import quantize
from deepwell.kernels.quantize import microscaled as Q
from deepwell.kernels.quantize.fp8 import amax
from deepwell.kernels.tune.timing import cold_median_us, copy_gbps

SHAPES = ((16384, 4096), (16384, 14336), (32768, 768))
# Rows that are compared with the reference, whose intermediate tensors are large.
CHECKED = 512


@dataclass(frozen=True, kw_only=True)
class Row:
    op: str
    shape: tuple[int, int]
    config: str
    us: float | None
    gbps: float | None
    of_copy: float | None
    problem: str = ""


def wrong_bits(got: Tensor, wanted: Tensor) -> str:
    count = int((got.view(torch.uint8) != wanted.view(torch.uint8)).sum())
    return f"WRONG: {count} bytes differ" if count else ""


def mx_cases(x: Tensor) -> Iterator[tuple[str, str, float, Callable[[], object], str]]:
    """(op, config, bytes, run, what is wrong)."""
    few = x[:CHECKED]
    for config in Q.MX_CONFIGS:
        for op, rows, columns, per_element in (("rows", True, False, 1.03), ("both", True, True, 2.06)):

            def run(
                y: Tensor = x, rows: bool = rows, columns: bool = columns, config: Q.TileConfig = config
            ) -> Q.MxCopies:
                return Q.quantize_mxfp8(y, rows=rows, columns=columns, config=config)

            got = run(few)
            wanted = quantize(few, "mxfp8")
            problem = wrong_bits(got.q_TK, wanted.data) or wrong_bits(got.scale, wanted.scale_swizzled())
            if columns and not problem:
                wanted = quantize(few, "mxfp8", axis=0)
                problem = wrong_bits(got.q_KT, wanted.data) or wrong_bits(got.scale_t, wanted.scale_swizzled())
            yield f"mxfp8 {op}", str(config), x.numel() * (2 + per_element), run, problem


def nv_cases(x: Tensor) -> Iterator[tuple[str, str, float, Callable[[], object], str]]:
    few, largest = x[:CHECKED], amax(x)
    random = torch.randint(0, 256, x.shape, dtype=torch.uint8, device="cuda")
    is_blackwell = torch.cuda.get_device_capability()[0] >= 10
    for config in Q.NV_CONFIGS:
        if config.packing == "asm" and not is_blackwell:
            continue
        for op, square, bits in (("1x16", False, None), ("16x16", True, None), ("1x16 stochastic", False, random)):

            def run(
                y: Tensor = x, square: bool = square, bits: Tensor | None = bits, config: Q.TileConfig = config
            ) -> Q.NvRows:
                given = None if bits is None else bits[: y.shape[0]]
                return Q.quantize_nvfp4(y, largest, square=square, random_bits=given, config=config)

            got = run(few)
            rounding = "nearest" if bits is None else "stochastic"
            given = None if bits is None else bits[:CHECKED]
            fmt = "nvfp4_16x16" if square else "nvfp4"
            wanted = quantize(few, fmt, amax=largest, rounding=rounding, generator=given)
            problem = wrong_bits(got.q, wanted.data) or wrong_bits(got.scale, wanted.scale_swizzled())
            num_bytes = x.numel() * (2 + 0.5625 + (0 if bits is None else 1))
            yield f"nvfp4 {op}", str(config), num_bytes, run, problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_quantize_mx needs a CUDA GPU")
    torch.manual_seed(0)
    copy = copy_gbps()
    print(f"{torch.cuda.get_device_name()}: copy {copy:.0f} GB/s")
    rows = []
    for t, k in SHAPES:
        x = (torch.randn(t, k, device="cuda") * torch.exp2(2 * torch.randn(t, 1, device="cuda"))).bfloat16()
        for cases in (mx_cases, nv_cases):
            for op, config, num_bytes, run, problem in cases(x):
                us = None if problem else cold_median_us(run)
                gbps = None if us is None else num_bytes / us / 1e3
                share = None if gbps is None else gbps / copy
                rows.append(Row(op=op, shape=(t, k), config=config, us=us, gbps=gbps, of_copy=share, problem=problem))
                figures = problem or f"{us:8.1f} us {gbps:7.0f} GB/s {share:5.2f} of copy"
                print(f"{t:>6} x {k:<6} {op:18} {config:70} {figures}", flush=True)
    if arguments.json:
        facts = {"environment": environment(), "copy_gbps": copy}
        Path(arguments.json).write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
