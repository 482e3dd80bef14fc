"""The fixtures of kernel tests, and the modules beside this file."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parents[1] / "kernels"), str(HERE)]

from kernel_fixtures import *  # noqa: E402, F403
