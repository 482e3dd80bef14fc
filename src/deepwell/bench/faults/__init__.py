"""Kills a run again and again and checks that nothing of it is lost: `deepwell validate faults`.

result = run_faults(FaultSetup(kills=100), Path("out/faults"))
print(result); assert result.ok
"""

from deepwell.bench.faults.result import FaultClaim, FaultSetup, Result
from deepwell.bench.faults.siege import run_faults

__all__ = ["FaultClaim", "FaultSetup", "Result", "run_faults"]
