"""The reader of FX nodes: one name for the spellings of an op, its arguments by torch's names, and who writes where."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from deepwell.graph.fx import Writes, argument, arguments, linear_parts, memory_of, op_of, transposed, written_by


def nodes(function: Callable[..., Any], *inputs: Tensor) -> list[fx.Node]:
    """The calls that Dynamo captures."""
    seen: list[fx.Node] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        seen.extend(node for node in module.graph.nodes if node.op.startswith("call"))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return seen


X, W = torch.randn(4, 6), torch.randn(6, 6)
# (what is called, its op, some of its arguments)
CALLS: list[tuple[Callable[..., Any], str, dict[str, Any]]] = [
    (lambda x, w: x + 1, "add", {"other": 1}),
    (lambda x, w: torch.add(x, 1, alpha=2), "add", {"other": 1, "alpha": 2}),
    (lambda x, w: x.add_(1), "add_", {"other": 1}),
    (lambda x, w: torch.square(x), "pow", {"exponent": 2}),
    (lambda x, w: torch.rsub(x, 1), "sub", {"input": 1}),
    (lambda x, w: torch.rsub(x, other=1), "sub", {"input": 1}),
    (lambda x, w: torch.div(x, 2, rounding_mode="floor"), "div", {"rounding_mode": "floor"}),
    (lambda x, w: F.relu(x, True), "relu_", {}),
    (lambda x, w: F.relu(x), "relu", {}),
    (lambda x, w: torch.mm(x, mat2=w), "matmul", {}),
    (lambda x, w: x.mean(axis=-1, keepdim=True), "mean", {"dim": -1, "keepdim": True}),
    (lambda x, w: x.swapaxes(0, 1), "transpose", {"dim0": 0, "dim1": 1}),
    (lambda x, w: x.permute(1, 0), "permute", {"dims": (1, 0)}),
    (lambda x, w: x.split_with_sizes([2, 4], 1)[0], "split", {"sizes": [2, 4], "dim": 1}),
    (lambda x, w: x.clamp_min(0.5), "clamp", {"min": 0.5}),
    (lambda x, w: x.half(), "to", {}),
    (lambda x, w: x.to(torch.bfloat16), "to", {}),
    (lambda x, w: x.type_as(w), "to", {}),
    (lambda x, w: x.to(torch.int32), "convert", {}),
    (lambda x, w: x.long(), "convert", {}),
    (lambda x, w: x.bool(), "convert", {}),
    (lambda x, w: x.view(torch.int32), "view_dtype", {}),
    (lambda x, w: F.embedding(x.long(), w, -2)[0, 0], "embedding", {"padding_idx": -2}),
    (lambda x, w: torch.embedding(w, x.long(), -2)[0, 0], "embedding", {"padding_idx": None}),
]


@pytest.mark.parametrize(("call", "op", "given"), CALLS)
def test_a_call_has_one_name_and_its_arguments_by_torchs_names(call, op, given) -> None:
    x = X.abs().clone()
    found = [node for node in nodes(call, x, W) if op_of(node) == op]
    assert len(found) == 1
    assert {name: arguments(found[0])[name] for name in given} == given


def test_a_lookup_names_index_and_weight_in_either_order() -> None:
    for call in (F.embedding, lambda i, w: torch.embedding(w, i)):
        (node,) = nodes(call, torch.arange(3), W)
        index, weight = argument(node, "input"), argument(node, "weight")
        assert index.meta["example_value"].dtype is torch.int64
        assert weight.meta["example_value"].shape == W.shape


def test_aten_reads_like_dynamo() -> None:
    graph = make_fx(lambda x, w: torch.addmm(x[0], x, w).to(torch.float16))(X, W).graph
    ops = [op_of(node) for node in graph.nodes if node.op == "call_function"]
    assert ops[-2:] == ["addmm", "to"]


def test_an_op_of_another_library_is_not_torchs() -> None:
    @torch.library.custom_op("deepwell_test::add", mutates_args=())
    def add(x: Tensor) -> Tensor:
        return x - 1

    add.register_fake(torch.empty_like)
    (node,) = nodes(torch.ops.deepwell_test.add, X)
    assert op_of(node) == "deepwell_test::add"


def test_a_scaled_addmm_is_no_linear() -> None:
    def parts(call: Callable[..., Tensor]) -> Any:
        return linear_parts(nodes(call, X, W)[-1])

    assert parts(lambda x, w: torch.addmm(w[0], x, w)) is not None
    assert parts(lambda x, w: torch.addmm(w[0], x, w, beta=2)) is None
    assert parts(lambda x, w: torch.addmm(w[0], x, w, alpha=0.5)) is None
    assert parts(lambda x, w: torch.matmul(x, w, out=torch.empty(4, 6))) is None


def test_a_matrix_is_transposed_in_each_spelling() -> None:
    for call in (
        lambda w: w.T,
        lambda w: w.mT,
        lambda w: w.t(),
        lambda w: w.transpose(-1, -2),
        lambda w: w.swapdims(0, 1),
    ):
        assert transposed(nodes(call, W)[-1]) is not None
    assert transposed(nodes(lambda w: w.transpose(0, 0), W)[-1]) is None


def set_row(x: Tensor, y: Tensor) -> None:
    x[0] = y[0]


WRITES = [
    lambda x, y: x.mul_(2),
    operator.iadd,
    set_row,
    lambda x, y: F.silu(x, inplace=True),
    lambda x, y: F.leaky_relu(x, 0.1, True),
    lambda x, y: F.dropout(x, 0.5, True, True),
    lambda x, y: torch.add(y, y, out=x),
    lambda x, y: x.view(-1)[1:].zero_(),
    lambda x, y: F.embedding(y.long(), x, max_norm=1.0),
]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_seen_through_views(write) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x, y = x + 0, y.abs() + 0
        write(x, y)
        return x.sum() + y.sum()

    found = nodes(function, X.clone(), X.clone())
    graph, x, y = found[0].graph, found[0], found[2]
    writes = Writes(graph)
    assert op_of(y) == "add"
    assert writes.between(x, x)
    assert not writes.between(y, y)
    assert {memory_of(target) for node in found for target in written_by(node)} == {memory_of(x)}
