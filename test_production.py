"""`python test_production.py`: the tests of the production kernels. Arguments go to pytest."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent

if __name__ == "__main__":
    sys.argv = ["test.py", "tests/kernels/gemm/test_production_kernels.py", *sys.argv[1:]]
    runpy.run_path(str(ROOT / "test.py"), run_name="__main__")
