"""What tests of the choice among kernels ask for: a problem, and a registry with users' kernels."""

from deepwell.kernels import KernelRegistry
from deepwell.kernels.tune.problem import Problem


def problem(m=96, n=128, k=160, **more) -> Problem:
    return Problem(m=m, n=n, k=k, **{"op": "gemm", "precision": "mxfp8", "dtype": "float32", **more})


def registry_of(*functions, timeout_s=30.0, **how) -> KernelRegistry:
    registry = KernelRegistry(proof_timeout_s=timeout_s)
    for function in functions:
        registry.register(function.__name__, function, **{"precision": "mxfp8", **how})
    return registry
