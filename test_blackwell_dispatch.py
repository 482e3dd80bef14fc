"""`python test_blackwell_dispatch.py`: tests of CUTLASS bindings and block-scaled GEMMs. Arguments go to pytest."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent

if __name__ == "__main__":
    tests = ["tests/kernels/cutlass/test_bindings.py", "tests/kernels/gemm/test_block_scaled.py"]
    sys.argv = ["test.py", *tests, *sys.argv[1:]]
    runpy.run_path(str(ROOT / "test.py"), run_name="__main__")
