"""A router's choices on a GPU: the pass, on graphs of fake GPU tensors, and what it leaves alone."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from deepwell.engine.passes.top_k import rewrite_top_k
from deepwell.kernels.experts.torch_ops import ops


def graph_of(run, shape=(2, 512, 128), *, dtype=torch.float32, device="cuda") -> torch.fx.GraphModule:
    with FakeTensorMode():
        return make_fx(run)(torch.empty(shape, dtype=dtype, device=device))


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.topk(8),
        lambda x: x.topk(8, dim=2, sorted=False),
        lambda x: torch.topk(x.softmax(-1), 8, -1, True, True)[1],
        lambda x: x.transpose(1, 2).topk(8),  # rows that are not dense
    ],
)
def test_the_largest_of_rows_are_found_in_registers(run) -> None:
    made = graph_of(run)
    before = [node.meta["val"] for node in made.graph.nodes if node.target is torch.ops.aten.topk.default]
    assert rewrite_top_k(made.graph) == 1
    made.graph.lint()
    (node,) = (node for node in made.graph.nodes if node.target is ops.top_k.default)
    shapes = ops.top_k(node.args[0].meta["val"], 8)
    assert [(value.shape, value.dtype) for value in shapes] == [(value.shape, value.dtype) for value in before[0]]
    assert node.args[1] == 8


@pytest.mark.parametrize(
    ("run", "how"),
    [
        (lambda x: x.topk(8, largest=False), {}),
        (lambda x: x.topk(8, dim=1), {}),
        (lambda x: x.topk(8, dim=-2), {}),
        (lambda x: x.topk(8, dim=0), {"shape": (512, 128)}),
        (lambda x: x.topk(0), {}),
        (lambda x: x.topk(1), {"shape": ()}),
        (lambda x: x.kthvalue(8), {}),
        (lambda x: x.sort(descending=True), {}),
        (lambda x: x.topk(17), {}),
        (lambda x: x.topk(8), {"shape": (64, 1025)}),
        (lambda x: x.topk(8), {"shape": (4, 128)}),
        (lambda x: x.topk(8), {"dtype": torch.float64}),
        (lambda x: x.topk(8), {"dtype": torch.int64}),
        (lambda x: x.topk(8), {"device": "cpu"}),
    ],
)
def test_near_misses_are_left_alone(run, how) -> None:
    assert rewrite_top_k(graph_of(run, **how).graph) == 0


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_of_an_open_number_or_width_are_left_alone(axis) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        sizes = [4096, 128]
        sizes[axis] = mode.shape_env.create_unbacked_symint()
        x.meta["val"] = torch.empty(sizes, device="cuda")
    graph.output(graph.call_function(torch.ops.aten.topk.default, (x, 8)))
    assert rewrite_top_k(graph) == 0


def test_the_op_gives_what_torch_gives() -> None:
    x = torch.randn(3, 7, 32)
    for made, wanted in zip(ops.top_k(x, 4), x.topk(4), strict=True):
        assert torch.equal(made, wanted)
