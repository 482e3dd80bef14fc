"""Products by a chosen candidate as torch ops, so that a compiled graph names the kernel that runs in it.

A node carries a candidate's key; the candidates themselves, with the registry that chose them, are kept here by that
key for the life of the process. Where a candidate fails while it runs, or the size it meets is not for it, the product
is computed as the graph had it before, and the registry sets the candidate aside. Lack of memory is no failure of the
candidate: it is raised, and the candidate stays.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import deepwell.kernels.gemm.torch_ops  # noqa: F401 (registers the ops that a product falls back to)
from deepwell.errors import ConfigError
from deepwell.kernels.gemm.cases import prepared, run_fp8_gemm, run_gemm
from deepwell.kernels.gemm.fp8 import one_on
from deepwell.kernels.registry import KernelRegistry
from deepwell.kernels.torch_library import register_op
from deepwell.kernels.tune.candidate import Candidate
from deepwell.kernels.tune.out_of_memory import is_shortage
from deepwell.kernels.tune.problem import problem_of
from deepwell.kernels.tune.verify import FAILURES

_log = logging.getLogger("deepwell.kernels")
_installed: dict[str, tuple[KernelRegistry, Candidate]] = {}


def install(registry: KernelRegistry, candidate: Candidate) -> str:
    """Make a candidate callable from graphs. Returns the key that names it there."""
    known = _installed.get(candidate.key)
    # Without a hash of its sources only the very same function is the same candidate.
    key = candidate.key
    if known is not None and known[1].fn is not candidate.fn:
        key = f"{candidate.key}#{id(candidate.fn):x}"
    _installed[key] = (registry, candidate)
    return key


def _find(key: str) -> tuple[KernelRegistry, Candidate]:
    if key not in _installed:
        raise ConfigError(f"kernel {key!r} is not known in this process; compile the model again with its registry")
    return _installed[key]


def _or_else(
    key: str, run: Callable[[Candidate], Tensor], otherwise: Callable[[], Tensor], operands: Sequence[Tensor]
) -> Tensor:
    registry, candidate = _find(key)
    if candidate.name in registry.aside():
        return otherwise()
    try:
        return _as_traced(run(candidate), operands)
    except FAILURES as error:
        if is_shortage(error):
            raise
        reason = f"raised {type(error).__name__} while the model ran: {str(error)[:200]}"
        _log.warning("kernel %s was rejected: %s", candidate.name, reason)
        registry.set_aside(candidate.name, reason)
        return otherwise()


def _as_traced(c: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """A product as compiled code takes it: row by row, in memory that is no operand's. Raises ValueError."""
    shape = (operands[0].shape[0], operands[1].shape[1])
    if tuple(c.shape) != shape:
        raise ValueError(f"its result has shape {tuple(c.shape)} instead of {shape}")
    c = c.contiguous()
    memory = c.untyped_storage().data_ptr()
    return c.clone() if any(x.untyped_storage().data_ptr() == memory for x in operands) else c


def _chosen_gemm(a: Tensor, b: Tensor, kernel: str, lhs: str, rhs: str, dtype: torch.dtype) -> Tensor:
    """`a @ b`; else with both operands rounded to the storage formats `lhs` and `rhs`, as the policy says."""

    def exactly() -> Tensor:
        left = torch.ops.deepwell.round_to(a, lhs, "nearest", False)
        return (left @ torch.ops.deepwell.round_to(b.T, rhs, "nearest", False).T).to(dtype)

    candidate = _find(kernel)[1]
    if candidate.why_not(problem_of(a, b, precision=candidate.precision)):
        return exactly()
    return _or_else(kernel, lambda found: run_gemm(found, a, prepared(found, b), out_dtype=dtype), exactly, (a, b))


def _chosen_fp8_gemm(a: Tensor, scale_a: Tensor | None, b: Tensor, scale_b: Tensor, fast: bool, kernel: str) -> Tensor:
    given = (a, one_on(a.device) if scale_a is None else scale_a, b, scale_b)

    def by_vendor() -> Tensor:
        return torch.ops.deepwell.fp8_gemm(*given, fast)

    return _or_else(kernel, lambda found: run_fp8_gemm(found, given), by_vendor, (a, b.T))


register_op(
    "chosen_gemm(Tensor a, Tensor b, str kernel, str lhs, str rhs, ScalarType dtype) -> Tensor",
    _chosen_gemm,
    lambda a, b, kernel, lhs, rhs, dtype: a.new_empty((a.shape[0], b.shape[1]), dtype=dtype),
)
register_op(
    "chosen_fp8_gemm(Tensor a, Tensor? scale_a, Tensor b, Tensor scale_b, bool fast, str kernel) -> Tensor",
    _chosen_fp8_gemm,
    lambda a, scale_a, b, scale_b, fast, kernel: a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16),
)
