"""Emulated products on a GPU go through bf16: the pass, on graphs of fake GPU tensors."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from deepwell.engine.passes.emulated_products import emulate_in_bf16
from deepwell.kernels.gemm.torch_ops import ops


def graph_of(lhs: tuple[str, str, bool], rhs: tuple[str, str, bool], device: str) -> torch.fx.GraphModule:
    def product(x: Tensor, w: Tensor) -> Tensor:
        return (ops.round_to(x, *lhs) @ ops.round_to(w, *rhs).T).to(torch.bfloat16)

    with FakeTensorMode():
        x, w = (torch.empty(n, 64, dtype=torch.bfloat16, device=device) for n in (32, 48))
        return make_fx(product)(x, w)


@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [
        (("mxfp8", "nearest", False), ("mxfp8", "nearest", False)),
        (("nvfp4", "stochastic", True), ("nvfp4", "nearest", True)),
        (("nvfp4", "nearest", False), ("nvfp4_16x16", "nearest", False)),
    ],
)
def test_what_bf16_holds_goes_through_it_on_a_gpu(lhs, rhs) -> None:
    made = graph_of(lhs, rhs, "cuda")
    assert emulate_in_bf16(made.graph) == 1
    made.graph.lint()
    (node,) = (node for node in made.graph.nodes if node.target is ops.emulated_mm.default)
    assert node.args[2:] == (*lhs, *rhs[:2])
    assert not any(node.target is ops.round_to.default for node in made.graph.nodes)


@pytest.mark.parametrize(
    ("lhs", "rhs", "device"),
    [
        (("mxfp8", "nearest", False), ("mxfp8", "nearest", False), "cpu"),  # the formats' reference stays
        (("fp8_e4m3_row", "nearest", False), ("mxfp8", "nearest", False), "cuda"),  # scales of 24 bits
        (("nvfp4", "nearest", True), ("nvfp4", "nearest", False), "cuda"),  # the transform would not cancel
    ],
)
def test_other_products_stay(lhs, rhs, device) -> None:
    made = graph_of(lhs, rhs, device)
    assert emulate_in_bf16(made.graph) == 0
    assert sum(node.target is ops.round_to.default for node in made.graph.nodes) == 2
