"""Keep linears and experts in bf16 where FP8 would not be faster: measured on this GPU at the graph's sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from deepwell.engine.passes.choose_kernels import size_of
from deepwell.engine.passes.linear import LinearSite
from deepwell.errors import UnsupportedError
from deepwell.graph.fx import SHAPE_OPS, op_of, value_of
from deepwell.kernels.activation.autograd import activation
from deepwell.kernels.experts.gain import Block
from deepwell.kernels.experts.row_tiles import is_kn
from deepwell.kernels.gemm.schemes import SCALED
from deepwell.kernels.norm.autograd import layer_norm, rms_norm
from deepwell.kernels.tune.gain import Gain

_FP8 = "fp8_row|fp8_row|fp8_row"


def keep_gaining(
    sites: Sequence[LinearSite], measure: Callable[..., Gain], *, strict: bool
) -> tuple[list[LinearSite], dict[str, Gain]]:
    """The sites that leave bf16, and every measured linear's gain by its path.

    Linears of one input are one GEMM and are measured as one. `strict` raises UnsupportedError instead of keeping bf16.
    """
    groups: dict[tuple[fx.Node, str, bool], list[LinearSite]] = defaultdict(list)
    for site in sites:
        groups[site.x, site.scheme, site.bias is None].append(site)
    gains: dict[str, Gain] = {}
    for (_, scheme, _), group in groups.items():
        sizes = _sizes(group)
        if sizes is None or not (scheme == _FP8 or _is_scaled(scheme)):
            continue
        # By tensor or by blocks no kernel before writes the FP8 values: nothing is fused.
        gain = measure(*sizes, _fused_rows(group)) if scheme == _FP8 else measure(*sizes, "", _method(scheme))
        for site in group:
            gains[site.path] = gain
        if strict and not gain.gains:
            raise UnsupportedError(f"{group[0].path}: fp8 {gain.reason}; fallback='safe' keeps it in bf16")
    kept = [site for site in sites if site.path not in gains or gains[site.path].gains]
    return kept, gains


def gain_of_experts(call: fx.Node, path: str, measure: Callable[..., Gain | None], *, strict: bool) -> Gain | None:
    """The gain of a call of `run_experts` in FP8, None where it is not measured: off a GPU, or in another dtype.

    `strict` raises UnsupportedError where there is none.
    """
    x_node, up_node, down_node, index_node, _, biases, how, _ = call.args
    x, up, down, index = map(value_of, (x_node, up_node, down_node, index_node))
    tokens = size_of(x.shape[0])
    if not (_can_be_measured(x) and tokens):
        return None
    block = Block(
        experts=down.shape[0],
        width=down.shape[1],
        ffn=down.shape[2],
        top_k=index.shape[1],
        activation=how,
        biases=tuple(bias is not None for bias in biases),
        stored="kn" if is_kn(up) else "nk",
    )
    gain = measure(block, tokens, str(x.device))
    if strict and gain is not None and not gain.gains:
        raise UnsupportedError(f"{path}: fp8 {gain.reason}; fallback='safe' keeps it in bf16")
    return gain


def _can_be_measured(x: torch.Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype == torch.bfloat16


def _is_scaled(scheme: str) -> bool:
    """Whether all three GEMMs have tensor scales, or all 1x128."""
    return len({_method(part) for part in scheme.split("|")}) == 1 and _method(scheme) in SCALED


def _method(scheme: str) -> str:
    return scheme.partition("|")[0].partition(",")[0]


def _fused_rows(group: Sequence[LinearSite]) -> str:
    """Which FP8 rows of a linear the kernel before it will write: of x, of dy, of both.

    Norms and activations write rows of their result, attention does not. RoPE and gated activations, which read several
    linears of one input, and plain activations write rows of their gradient; so does a norm of the stream that the
    linear's result is added to.
    """
    source: Any = group[0].x
    while isinstance(source, fx.Node) and op_of(source) in (*SHAPE_OPS, "transpose", "permute", "contiguous"):
        source = source.args[0]
    fused = ["x"] if _writes_rows(source) else []
    readers = [user for site in group for user in site.node.users]
    if len(group) > 1 or any(_writes_rows(user) or _is_normed_sum(user) for user in readers):
        fused.append("dy")
    return " ".join(fused)


def _writes_rows(node: fx.Node) -> bool:
    """Whether an op is a norm or an activation, plain or gated, whose kernels write FP8 rows."""
    ours = (rms_norm, layer_norm, activation)
    return node.target in ours or op_of(node) in ("rms_norm", "layer_norm", "gelu", "silu", "mul")


def _is_normed_sum(node: fx.Node) -> bool:
    """Whether a node adds to the residual stream and a norm reads the sum: its backward writes rows beside dx."""
    norms = (rms_norm, layer_norm)
    return op_of(node) == "add" and any(
        user.target in norms or op_of(user) in ("rms_norm", "layer_norm") for user in node.users
    )


def _sizes(group: Sequence[LinearSite]) -> tuple[int, int, int, str] | None:
    """(N of all together, K, tokens, device), None where a size is not known."""
    x = value_of(group[0].x)
    if x is None or x.device.type != "cuda":
        return None
    widths = [size_of(value_of(site.node).shape[-1]) for site in group]
    tokens = 1
    for size in x.shape[:-1]:
        tokens *= size_of(size)
    k = size_of(x.shape[-1])
    return (sum(widths), k, tokens, str(x.device)) if 0 not in (*widths, tokens, k) else None
