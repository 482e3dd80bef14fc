"""Give each low-precision product of a compiled graph the kernel that a registry chooses for its shape.

Works on AOTAutograd's forward or backward graph, where shapes are known:

    fp8_gemm(a, scale_a, b, scale_b)          candidates of "fp8_gemm"; users' of "gemm" where x is quantized for it
                                              alone, as in evaluation
    mm(round_to(x), round_to(w)^T)            candidates of "gemm" for the format that both are rounded to

The second only where rounding is to nearest: a kernel that rounds otherwise computes something else. What is chosen,
its microseconds and who was rejected goes into the engine's report.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from deepwell.engine.passes.edit import replace_by_call
from deepwell.errors import UnsupportedError
from deepwell.kernels.gemm import chosen
from deepwell.kernels.gemm.fp8 import ALIGNMENT
from deepwell.kernels.registry import KernelRegistry
from deepwell.kernels.tune.candidate import Choice
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.table import KernelRow, merge_rows, row_of

_TRANSPOSES = (torch.ops.aten.t.default, torch.ops.aten.permute.default, torch.ops.aten.transpose.int)
_DEFAULT = {True: "cublaslt_fast", False: "cublaslt"}  # by whether sums may be fast
_FP8 = ("fp8", "mxfp8")  # what FP8 hardware runs


def choose_kernels(graph: fx.Graph, registry: KernelRegistry) -> list[KernelRow]:
    """Replace products by chosen ones. Returns a row for each product that a registry decided about."""
    ops = torch.ops.deepwell
    rows: list[KernelRow] = []
    registry.forget_skipped()
    for node in list(graph.nodes):
        if node.target is ops.fp8_gemm.default:
            rows += _fp8_gemm(node, registry)
        elif node.target is torch.ops.aten.mm.default:
            rows += _rounded_mm(node, registry)
    graph.eliminate_dead_code()
    return rows


def _fp8_gemm(node: fx.Node, registry: KernelRegistry) -> list[KernelRow]:
    a, b = node.args[0].meta["val"], node.args[2].meta["val"]
    m, k, n = size_of(a.shape[0]), size_of(a.shape[1]), size_of(b.shape[0])
    if 0 in (m, k, n) or k % ALIGNMENT or n % ALIGNMENT or not (a.is_cuda or registry.users()):
        return []
    if a.dtype != b.dtype:
        return []  # E5M2 gradients: candidates prove themselves in E4M3
    fast = bool(node.args[4])
    one_scale = all(scale is None or scale.meta["val"].dim() == 0 for scale in (node.args[1], node.args[3]))
    sizes = {"m": m, "n": n, "k": k}
    problem = Problem(
        op="fp8_gemm", **sizes, precision="fp8", exact_sums=not fast, one_scale=one_scale, device=str(a.device)
    )
    whole, aside = _whole_chain(node, registry, problem)
    if whole is not None:
        return [whole]
    choice = _choose(registry, problem, _DEFAULT[fast])
    if choice is None:
        return []
    candidate = registry.candidate("fp8_gemm", choice.kernel)
    if candidate.name != _DEFAULT[fast] and candidate.origin != "reference":
        args = (*node.args, chosen.install(registry, candidate))
        replace_by_call(node, torch.ops.deepwell.chosen_fp8_gemm.default, args)
    row = row_of(problem, choice)
    return [replace(row, set_aside=(*row.set_aside, *aside))]


def _whole_chain(
    node: fx.Node, registry: KernelRegistry, problem: Problem
) -> tuple[KernelRow | None, list[tuple[str, str]]]:
    """(the row of a user's kernel that took quantization and product, why those of "gemm" could not compete)."""
    users = [candidate for candidate in registry.users() if candidate.op == "gemm" and candidate.precision in _FP8]
    if not users:
        return None, []
    found, reason = _numbers(node)
    if found is None:
        return None, [(candidate.name, reason) for candidate in users]
    x, w = found
    dtype = str(x.meta["val"].dtype).removeprefix("torch.")
    asked = replace(problem, op="gemm", precision="mxfp8", dtype=dtype)
    choice = _choose(registry, asked, "emulated_mxfp8")
    if choice is None or registry.candidate("gemm", choice.kernel).origin != "user":
        return None, [(v.name, v.reason or "slower") for v in (choice.verdicts if choice else ()) if v.origin == "user"]
    key = chosen.install(registry, registry.candidate("gemm", choice.kernel))
    _multiply_by(key, node, x, w, "fp8_e4m3_row_pow2", "fp8_e4m3_tensor_pow2")
    return row_of(asked, choice), []


def _multiply_by(key: str, node: fx.Node, x: fx.Node, w: fx.Node, lhs: str, rhs: str) -> None:
    """Put the kernel of a key, on x and w [N, K], in the place of a product of their FP8 values or rounded numbers."""
    with node.graph.inserting_before(node):
        w_KN = node.graph.call_function(torch.ops.aten.permute.default, (w, [1, 0]))
        w_KN.meta["val"] = w.meta["val"].permute(1, 0)
    args = (x, w_KN, key, lhs, rhs, node.meta["val"].dtype)
    replace_by_call(node, torch.ops.deepwell.chosen_gemm.default, args)


def _numbers(node: fx.Node) -> tuple[tuple[fx.Node, fx.Node] | None, str]:
    """The numbers x and w [N, K] whose FP8 values a product multiplies, or why there are none to give to a kernel."""
    ops = torch.ops.deepwell
    rows, weights = (arg.args[0] if arg.target is operator.getitem else None for arg in (node.args[0], node.args[2]))
    if rows is None or rows.target is not ops.quantize_rows.default:
        return None, "x exists as FP8 values only, written by the kernel before: register it for fp8_gemm"
    if any(reader is not node for part in rows.users for reader in part.users):
        return None, "other products read the same FP8 values of x: register it for fp8_gemm"
    if weights is None or weights.target is not ops.quantize_weights.default or len(weights.args[0]) != 1:
        return None, "the weight exists as FP8 values only or is merged with others: register it for fp8_gemm"
    x, w = rows.args[0], weights.args[0][0]
    if x.meta["val"].dtype != w.meta["val"].dtype:
        return None, "x and the weight have different dtypes"
    return (x, w), ""


def _rounded_mm(node: fx.Node, registry: KernelRegistry) -> list[KernelRow]:
    left, right = _rounded(node.args[0]), _rounded(transposed_from(node.args[1]))
    if left is None or right is None or not any(candidate.op == "gemm" for candidate in registry.users()):
        return []
    x, lhs = left
    w, rhs = right
    value, other = x.meta["val"], w.meta["val"]
    fmt = _policy_format(lhs)
    m, k, n = size_of(value.shape[0]), size_of(value.shape[1]), size_of(other.shape[0])
    if 0 in (m, k, n) or value.dtype != other.dtype or fmt != _policy_format(rhs):
        return []
    dtype = str(value.dtype).removeprefix("torch.")
    problem = Problem(op="gemm", m=m, n=n, k=k, precision=fmt, dtype=dtype, device=str(value.device))
    choice = _choose(registry, problem, f"emulated_{fmt}")
    if choice is None:
        return []
    candidate = registry.candidate("gemm", choice.kernel)
    if candidate.origin == "user":
        _multiply_by(chosen.install(registry, candidate), node, x, w, lhs, rhs)
    return [row_of(problem, choice)]


def _choose(registry: KernelRegistry, problem: Problem, default: str) -> Choice | None:
    """The registry's choice. Where memory is short, `default`, which the graph has; None where nobody else can."""
    try:
        return registry.choose(problem)
    except UnsupportedError:
        return None  # nobody else computes it: the graph stays as it is
    except torch.OutOfMemoryError:
        how = "not measured: lack of memory"
        return Choice(problem=problem.key, device=problem.device, kernel=default, us=None, how=how, verdicts=())


def _rounded(node: Any) -> tuple[fx.Node, str] | None:
    """(what is rounded, its storage format) where a node rounds to nearest without a transform."""
    if not isinstance(node, fx.Node) or node.target is not torch.ops.deepwell.round_to.default:
        return None
    x, fmt, rounding, hadamard = node.args
    return (x, fmt) if rounding == "nearest" and not hadamard else None


def transposed_from(node: Any) -> Any:
    """What a node is the transpose of, None where it is something else."""
    if not isinstance(node, fx.Node) or node.target not in _TRANSPOSES:
        return None
    return node.args[0]


def _policy_format(storage: str) -> str:
    """The policy's name of a storage format: fp8_e4m3_row_pow2 -> fp8, nvfp4_16x16 -> nvfp4."""
    return storage.partition("_")[0]


def size_of(size: Any) -> int:
    """A size as it is now; an open one by the value that it was traced with."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if hint is not None else 0


__all__ = ["KernelRow", "choose_kernels", "merge_rows", "size_of"]
