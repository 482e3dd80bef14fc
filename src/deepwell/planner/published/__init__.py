"""Published runs as planner inputs: a CSV row becomes a workload, hardware, a layout and a stack, or a reason."""

from deepwell.planner.published.run import Measured as Measured
from deepwell.planner.published.run import RunRow as RunRow
from deepwell.planner.published.run import packaged_runs as packaged_runs
from deepwell.planner.published.run import read_runs as read_runs
from deepwell.planner.published.run import recompute_candidates as recompute_candidates
