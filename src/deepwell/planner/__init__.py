"""The planner: predicts time and memory of a training step on any layout and picks the best. Pure, no torch."""

from deepwell.planner.estimate import Estimate as Estimate
from deepwell.planner.estimate import StageMemory as StageMemory
from deepwell.planner.estimate import estimate as estimate
from deepwell.planner.layout import Layout as Layout
from deepwell.planner.layout import Offload as Offload
from deepwell.planner.layout import Overlap as Overlap
from deepwell.planner.layout import Recompute as Recompute
from deepwell.planner.stack import Stack as Stack
from deepwell.planner.stack import get_stack as get_stack
from deepwell.planner.workload import Workload as Workload
