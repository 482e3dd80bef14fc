"""Times every GEMM candidate on the eight shapes of the race: `PYTHONPATH=src python3 benchmarks/bench_gemm.py`.

Chains with the quantization of the activation, and GEMMs of codes alone; checked first, medians, beside bf16.
"""

import argparse
import json
from pathlib import Path

import torch

from deepwell.bench.gemm import SHAPES, gemm_table, run_gemms
from deepwell.kernels.gemm.candidates import register_library
from deepwell.kernels.registry import KernelRegistry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="keep the rows in this file")
    parser.add_argument("--quick", action="store_true", help="the first and the last shape only (a CPU: a tiny one)")
    parser.add_argument("--library", help="a CUTLASS library of `deepwell build` for this GPU, to compete as well")
    arguments = parser.parse_args()
    shapes = (SHAPES[0], SHAPES[-1]) if arguments.quick else SHAPES
    if arguments.device == "cpu":
        shapes = ((128, 192, 256),)
    registry = KernelRegistry()
    if arguments.library:
        register_library(registry, arguments.library)
    result = run_gemms(arguments.device, shapes=shapes, registry=registry)
    print(gemm_table(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
