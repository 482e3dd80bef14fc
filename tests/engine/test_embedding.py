"""An embedding that learns gets a gradient added up in a fixed order; every other stays as it was."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo_models
from torch import Tensor

import deepwell as dw
from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.engine.passes.embedding import rewrite_embedding
from deepwell.engine.times.ops import measure_calls
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than
from deepwell.kernels.head.autograd import embedding

V, D = 20, 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _weight(dtype: torch.dtype = torch.float32, *, learns: bool = True) -> Tensor:
    return torch.randn(V, D).to(dtype).requires_grad_(learns)


def _index(*shape: int) -> Tensor:
    return torch.randint(0, V, shape)


# ---- what is found ----


@pytest.mark.parametrize(
    ("lookup", "padding_idx"),
    [
        (F.embedding, -1),
        (lambda i, w: F.embedding(input=i, weight=w, padding_idx=3), 3),
        (lambda i, w: F.embedding(i, w, -2), V - 2),  # counted from the end
        (lambda i, w: F.embedding(i, w, 0, None, 2.0, False, False), 0),  # as nn.Embedding calls it
        (lambda i, w: torch.embedding(w, i), -1),
        (lambda i, w: torch.embedding(w, i, 5), 5),
        (lambda i, w: torch.embedding(w, i, -2), -1),  # none: here nothing is counted from the end
        (lambda i, w: torch.ops.aten.embedding(w, i, 4), 4),
        (lambda i, w: torch.ops.aten.embedding.default(w, i), -1),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_lookup_becomes_one_op(run_pass, lookup, padding_idx, dtype) -> None:
    index, weight = _index(3, 7), _weight(dtype)
    got = run_pass(lookup, rewrite_embedding, index, weight)
    assert got.found == 1
    (node,) = [node for node in got.graph.nodes if node.op == "call_function"]
    assert node.target is embedding and node.args[2] == padding_idx
    assert_bitwise_equal(got.out.detach(), lookup(index, weight).detach())


@pytest.mark.parametrize(
    "lookup",
    [
        lambda i, w: F.embedding(i, w, scale_grad_by_freq=True),
        lambda i, w: F.embedding(i, w, sparse=True),
        lambda i, w: torch.embedding(w, i, -1, True),
        lambda i, w: F.embedding(i, w.double()),  # no kernel for float64
        lambda i, w: F.embedding(i, w.detach()),  # learns nothing
        lambda i, w: w[i],  # no embedding
    ],
)
def test_a_lookup_with_another_gradient_stays(run_pass, lookup) -> None:
    index, weight = _index(3, 7), _weight()
    got = run_pass(lookup, rewrite_embedding, index, weight)
    assert got.found == 0
    assert_bitwise_equal(got.out.detach(), lookup(index, weight).detach())


def test_rows_that_are_renormed_stay(run_pass) -> None:
    # The lookup writes into the weight.
    weight = _weight(learns=False)
    got = run_pass(lambda i, w: F.embedding(i, w, max_norm=1.0), rewrite_embedding, _index(5), weight.clone())
    assert got.found == 0


def test_a_frozen_weight_stays(run_pass) -> None:
    assert run_pass(F.embedding, rewrite_embedding, _index(3, 7), _weight(learns=False)).found == 0


# ---- gradients ----


def _compiled(function: Any, options: BackendOptions, **how: Any) -> Any:
    return torch.compile(function, backend=lambda graph, inputs: compile_graph(graph, inputs, options), **how)


def _check_gradient(shape: tuple[int, ...], index_dtype: torch.dtype, dtype: torch.dtype, *, inductor: bool) -> None:
    # Whole numbers: every sum is exact, whatever its order, so eager's gradient has the same bits.
    index, weight, options = _index(*shape).to(index_dtype), _weight(dtype), BackendOptions(use_inductor=inductor)
    grad = torch.randint(-2, 3, (*shape, D)).to(dtype)
    made, expected = (
        torch.autograd.grad(lookup(index, weight, 3), weight, grad)[0]
        for lookup in (_compiled(F.embedding, options), F.embedding)
    )
    assert options.counts["embedding"] == 1
    assert_bitwise_equal(made, expected)


@pytest.mark.parametrize("shape", [(), (9,), (2, 5, 3), (0, 4)], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_eagers(shape, index_dtype, dtype) -> None:
    _check_gradient(shape, index_dtype, dtype, inductor=False)


@pytest.mark.parametrize("shape", [(2, 5, 3), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_through_inductor_are_eagers(cxx_compiler, shape, dtype) -> None:
    _check_gradient(shape, torch.int64, dtype, inductor=True)


def test_lengths_may_change(cxx_compiler) -> None:
    options, weight = BackendOptions(use_inductor=True), _weight()
    lookup = _compiled(lambda i, w: F.embedding(i, w).square(), options, dynamic=True)
    for length in (4, 9, 33):
        index = _index(2, length)
        made, expected = (
            torch.autograd.grad(f(index, weight).sum(), weight)[0]
            for f in (lookup, lambda i, w: F.embedding(i, w).square())
        )
        torch.testing.assert_close(made, expected)
    assert options.graphs == 1


def test_gradients_of_a_tied_head_and_of_the_embedding_add_up() -> None:
    def loss(index: Tensor, weight: Tensor) -> Tensor:
        return F.linear(F.embedding(index, weight), weight).square().sum()

    index, weight, options = _index(2, 9), _weight(), BackendOptions()
    made, expected = (torch.autograd.grad(f(index, weight), weight)[0] for f in (_compiled(loss, options), loss))
    assert options.counts["embedding"] == 1
    torch.testing.assert_close(made, expected)


def test_the_backward_is_one_op_that_is_recorded_and_can_be_timed() -> None:
    options, weight = BackendOptions(), _weight(torch.bfloat16)
    _compiled(F.embedding, options)(_index(2, 9), weight, 3).sum().backward()
    (call,) = options.calls
    assert (call.name, call.shape) == ("embedding_backward", f"18x{D}")
    (row,) = measure_calls(options.calls)
    assert row.how == "measured" and row.us > 0


# ---- models ----


@pytest.mark.parametrize(
    ("model_type", "tied", "names"),
    [
        ("llama", False, ["model.embed_tokens.weight"]),
        ("llama", True, ["model.embed_tokens.weight"]),
        ("gpt2", True, ["transformer.wte.weight", "transformer.wpe.weight"]),  # positions are an embedding too
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_models_have_eagers_gradients_within_rounding(batch, model_type, tied, names, dtype) -> None:
    # Against the model in float64 with the same weights.
    pytest.importorskip("transformers")
    model = zoo_models.tiny_model(model_type, tie_word_embeddings=tied).to(dtype).eval()
    exact, eager = (zoo_models.tiny_model(model_type, tie_word_embeddings=tied).eval() for _ in range(2))
    exact.double().load_state_dict(model.state_dict())
    eager.to(dtype).load_state_dict(model.state_dict())
    options = BackendOptions(fuse_head=False)
    with torch._dynamo.config.patch(ignore_logger_methods={getattr(logging.Logger, "warning_once", None)}):
        _compiled(model, options)(**batch).loss.backward()
    for other in (exact, eager):
        other(**batch).loss.backward()
    assert options.counts["embedding"] == len(names)
    for name in names:
        ours, theirs, true = (dict(m.named_parameters())[name].grad for m in (model, eager, exact))
        assert_no_worse_than(ours, theirs, true)


def test_a_frozen_embedding_has_no_backward_and_other_gradients_stay(batch) -> None:
    pytest.importorskip("transformers")
    model = zoo_models.tiny_model("llama", tie_word_embeddings=False).eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    options = BackendOptions()
    _compiled(model, options)(**batch).loss.backward()
    assert options.counts["embedding"] == 0
    assert not [call for call in options.calls if call.name == "embedding_backward"]
    assert model.model.embed_tokens.weight.grad is None and model.lm_head.weight.grad is not None


def test_the_report_counts_embeddings(batch) -> None:
    pytest.importorskip("transformers")
    engine = dw.compile(zoo_models.tiny_model("llama").bfloat16(), precision="bf16")
    engine(**batch).loss.backward()
    assert engine.report().passes["embedding"] == 1


def test_a_checkpointed_lookup_is_found_in_its_region() -> None:
    # The region is a graph of its own inside the captured one.
    def loss(index: Tensor, weight: Tensor) -> Tensor:
        looked = torch.utils.checkpoint.checkpoint(
            lambda i, w: F.embedding(i, w).tanh(), index, weight, use_reentrant=False
        )
        return looked.square().sum()

    index, weight, options = _index(2, 9), _weight(), BackendOptions()
    made, expected = (torch.autograd.grad(f(index, weight), weight)[0] for f in (_compiled(loss, options), loss))
    assert options.counts["embedding"] == 1
    torch.testing.assert_close(made, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_training_twice_gives_the_same_gradient_on_a_gpu(cuda_graphs) -> None:
    weight = torch.randn(1000, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
    options = BackendOptions(use_inductor=True, cuda_graphs=cuda_graphs)
    lookup = _compiled(lambda i, w: F.embedding(i, w, 3).square(), options)
    index = torch.randint(0, 20, (4, 700), device="cuda")
    made = []
    for _ in range(4):
        lookup(index, weight).sum().backward()
        made.append(weight.grad.clone())
        weight.grad = None
    assert options.counts["embedding"] == 1
    for other in made[1:]:
        assert_bitwise_equal(other, made[0])
    # 2 w is a bf16 number: fp32 sums of at most 200 of it are all but exact, and rounded once.
    exact_weight = weight.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(F.embedding(index, exact_weight, 3).square().sum(), exact_weight)
    torch.testing.assert_close(made[0].double(), exact, rtol=1.01 * 2**-8, atol=0)
