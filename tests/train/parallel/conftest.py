"""Let the tests of parallel runs, and the processes that they start, import the modules beside them."""

import os
import sys
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)

if HERE not in sys.path:
    sys.path.insert(0, HERE)
os.environ["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
