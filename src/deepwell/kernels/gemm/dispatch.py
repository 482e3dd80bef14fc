"""Run a product by the registry's choice: check, choose, run, and continue with the next best where a kernel fails.

`gemm` is what the public entry points share (`production_kernels`, `cutlass_bindings`). Forward only: training goes
through `dw.compile`, which calls candidates through the ops of `deepwell.kernels.gemm.chosen`.
"""

import logging
import math

import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.kernels.gemm.cases import check_dtype, prepared, run_gemm
from deepwell.kernels.gemm.triton_fp8 import check_epilogue
from deepwell.kernels.registry import KernelRegistry
from deepwell.kernels.tune.candidate import Candidate
from deepwell.kernels.tune.out_of_memory import is_shortage
from deepwell.kernels.tune.problem import Problem, problem_of
from deepwell.kernels.tune.verify import FAILURES

_log = logging.getLogger("deepwell.kernels")
# Precisions that are a dtype: operands of another one are cast to it.
_DTYPES = {
    **dict.fromkeys(("fp32", "float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16"), torch.float16),
}


def gemm(
    registry: KernelRegistry,
    a: Tensor,
    b: Tensor,
    *,
    precision: str = "auto",
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`act(a @ b + bias)` for a [..., K] and b [K, N], by the kernel that the registry chooses.

    The result has a's dtype unless `out_dtype` is given. Raises ConfigError on a wrong argument, UnsupportedError where
    gradients are wanted or nobody computes it here, and lack of memory as it comes: the kernel that met it stays in the
    race.
    """
    _check(a, b, bias, activation)
    dtype = _DTYPES.get(precision, a.dtype)
    if dtype != a.dtype:
        out_dtype = out_dtype or a.dtype
        a, b, bias = a.to(dtype), b.to(dtype), None if bias is None else bias.to(dtype)
    a_MK = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    shape = (*a.shape[:-1], b.shape[1])
    if 0 in (*a_MK.shape, b.shape[1]):
        empty = a_MK.new_zeros((a_MK.shape[0], b.shape[1]))
        return run_gemm(_plain, empty, None, bias=bias, activation=activation, out_dtype=out_dtype).view(shape)
    problem = problem_of(a_MK, b, precision=precision, bias=bias is not None, activation=activation)
    while True:
        candidate = chosen(registry, problem)
        try:
            c_MN = run_gemm(
                candidate, a_MK, prepared(candidate, b), bias=bias, activation=activation, out_dtype=out_dtype
            )
            return c_MN.view(shape)
        except FAILURES as error:
            if is_shortage(error):
                raise
            # Chosen for its bucket, it may not take this very M; or it is broken. Either way somebody else does it.
            reason = f"raised {type(error).__name__} at M={problem.m}: {str(error)[:200]}"
            _log.warning("kernel %s was rejected on %s: %s", candidate.name, problem.device, reason)
            registry.set_aside(candidate.name, reason)


_plain = Candidate(name="empty", op="gemm", precision="bf16", origin="reference", fn=lambda a, b: a)


def chosen(registry: KernelRegistry, problem: Problem) -> Candidate:
    """The candidate that is to run; while a CUDA graph is recorded nothing can be measured, and the vendor's does."""
    place = torch.device(problem.device)
    if place.type == "cuda" and torch.cuda.is_current_stream_capturing():
        known = [c for c in registry.choices() if c.problem == problem.key and c.device == problem.device]
        if known:
            return registry.candidate(problem.op, known[0].kernel)
        return _first_trusted(registry, problem)
    return registry.candidate(problem.op, registry.choose(problem).kernel)


def _first_trusted(registry: KernelRegistry, problem: Problem) -> Candidate:
    for candidate in registry.candidates(problem.op, problem.precision):
        if candidate.trusted and not candidate.why_not(problem) and candidate.name not in registry.aside():
            return candidate
    raise UnsupportedError(f"no kernel for {problem.key} is known while a CUDA graph is recorded; run it once before")


def _check(a: Tensor, b: Tensor, bias: Tensor | None, activation: str | None) -> None:
    for name, x, least in (("a", a, 1), ("b", b, 2)):
        if not isinstance(x, Tensor):
            raise ConfigError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() < least:
            raise ConfigError(f"{name} has shape {tuple(x.shape)}; it needs at least {least} dimensions")
        check_dtype(x.dtype)
    if b.dim() != 2 or a.shape[-1] != b.shape[0]:
        raise ConfigError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)} do not fit: b is [K, N] as for torch.mm; pass weight.T"
        )
    if a.dtype != b.dtype or a.device != b.device:
        raise ConfigError(f"a is {a.dtype} on {a.device} and b {b.dtype} on {b.device}; make them alike")
    check_epilogue(bias, activation, b.shape[1], like=a)
    wanted = any(x is not None and x.requires_grad for x in (a, b, bias))
    if wanted and torch.is_grad_enabled():
        raise UnsupportedError(
            "gradients are wanted of a product that runs forward only: train through dw.compile, or use torch.no_grad()"
        )
