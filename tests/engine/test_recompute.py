"""What the backward makes again: which values of a joint graph have the mark, and that no bit of a gradient changes."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from deepwell.engine.passes.recompute import WHAT, backward_nodes, mark_recomputed, save_readers_of_written
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.activation.autograd import swiglu_packed
from deepwell.kernels.gemm.linear import low_precision_linear
from deepwell.kernels.norm.autograd import rms_norm

FP8 = "fp8_row|fp8_row|fp8_row"
SHAPES = ((32, 64), (64,), (96, 64), (64, 48))


def mlp(x: Tensor, gain: Tensor, up: Tensor, down: Tensor, between: Callable[[Tensor], Tensor] = lambda h: h) -> Tensor:
    rows = rms_norm(x, gain, 1e-6, "torch")
    hidden = swiglu_packed(low_precision_linear(rows, [up], None, FP8), "silu")
    return low_precision_linear(between(hidden), [down], None, FP8)


def step(
    function: Callable[..., Any], what: str, before: Callable[[fx.Graph], None] = lambda graph: None, learns: int = 0
) -> Any:
    """(result and gradients, joint graph with its marks) of one step whose backward makes `what` again.

    Inputs before the one of number `learns` learn nothing.
    """
    seen: list[fx.Graph] = []

    def partition(module: fx.GraphModule, *operands: Any, **how: Any) -> Any:
        before(module.graph)
        mark_recomputed(module.graph, what)
        seen.append(module.graph)
        return min_cut_rematerialization_partition(module, *operands, **how)

    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]
    for leaf in leaves[learns:]:
        leaf.requires_grad_()
    # As Inductor has them, writes into inputs that learn nothing are in the graph.
    how = {"partition_fn": partition, "keep_inference_input_mutations": True}
    out = aot_function(function, fw_compiler=lambda graph, _: graph.forward, **how)(*leaves)
    out.float().square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves[learns:])], seen[0]


def marked(graph: fx.Graph) -> Counter[str]:
    """How many calls of each of Deepwell's ops have the mark."""
    calls = [n for n in graph.nodes if n.meta.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE]
    return Counter(str(n.target).split(".")[1] for n in calls if str(n.target).startswith("deepwell"))


@pytest.mark.parametrize(
    ("what", "ops"),
    [
        ("nothing", {}),
        ("hidden", {"swiglu": 1, "quantize_rows": 1}),
        # The rows of the gradients are the backward's own.
        ("copies", {"swiglu": 1, "quantize_rows": 2, "rms_norm": 1}),
    ],
)
def test_marks_are_on_what_was_asked_for_and_change_no_bit(what, ops) -> None:
    results, graph = step(mlp, what)
    assert marked(graph) == ops
    for got, wanted in zip(results, step(mlp, "nothing")[0], strict=True):
        assert_bitwise_equal(got, wanted)


BETWEEN = {
    "the same rows": (lambda h: h.view(2, 16, 48), 1),
    "other rows": (lambda h: h.view(16, 2, 48).transpose(0, 1).reshape(32, 48), 0),
    "a dropout": (lambda h: F.dropout(h, 0.0) * 2, 0),
    "a sum": (lambda h: h + 1, 0),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_only_rows_of_hidden_values_themselves_are_made_again(name) -> None:
    between, count = BETWEEN[name]
    function = partial(mlp, between=between)
    results, graph = step(function, "hidden")
    assert marked(graph)["quantize_rows"] == count
    for got, wanted in zip(results, step(function, "nothing")[0], strict=True):
        assert_bitwise_equal(got, wanted)


def test_what_the_model_checkpoints_keeps_its_marks() -> None:
    def checkpoint(graph: fx.Graph) -> None:
        for node in graph.nodes:
            if "swiglu" in str(node.target) and node not in backward_nodes(graph):
                node.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 7}

    _, graph = step(mlp, "copies", checkpoint)
    (node,) = (n for n in graph.nodes if n.meta.get("ac_graph_id") == 7)
    assert node.meta["recompute"] == CheckpointPolicy.PREFER_RECOMPUTE
    assert "swiglu" not in marked(graph)


@pytest.mark.parametrize("what", WHAT)
def test_nothing_of_the_backward_is_marked(what) -> None:
    _, graph = step(mlp, what)
    assert not any("recompute" in node.meta for node in backward_nodes(graph))


def _then_written(x: Tensor, gain: Tensor, up: Tensor, down: Tensor) -> Tensor:
    out = mlp(x.view(4, 8, 64).view(32, 64), gain, up, down)
    x.mul_(2)
    gain.add_(1)
    return out


def _plain_then_written(x: Tensor, gain: Tensor, up: Tensor, down: Tensor) -> Tensor:
    out = x.sin().cos() * up[:32]
    x.mul_(2)
    return out + 0 * down.sum()


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("function", [_then_written, _plain_then_written])
def test_what_reads_an_input_that_is_written_later_is_kept(function, what) -> None:
    """The partitioner would have it recomputed of the input as the graph leaves it."""
    pure = {_then_written: mlp, _plain_then_written: lambda x, gain, up, down: x.sin().cos() * up[:32] + 0 * down.sum()}
    results, _ = step(function, what, save_readers_of_written, learns=2)
    for got, wanted in zip(results, step(pure[function], "nothing", learns=2)[0], strict=True):
        assert_bitwise_equal(got, wanted)
