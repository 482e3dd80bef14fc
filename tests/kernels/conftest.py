"""Let the tests of kernels import the modules beside this file: `aot`, the compiler without a GPU, and the fixtures."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from kernel_fixtures import *  # noqa: F403
