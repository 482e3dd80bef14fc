"""Which format each GEMM of each layer uses at each step."""

from deepwell.precision.policy import PrecisionPolicy as PrecisionPolicy
