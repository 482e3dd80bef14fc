"""Rotary embedding becomes one op in every spelling, q, k, v of one linear one op; no number gets worse."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo_models
from torch import Tensor, nn

from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.engine.passes import pipeline
from deepwell.engine.passes.rope import rewrite_rope
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than

FP8 = "fp8_row|fp8_row|fp8_row"
B, S, H, D = 2, 7, 4, 16


def _tables(width: int = D, *, interleaved: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(S).float(), 10.0 ** -(torch.arange(0, width, 2).float() / width))
    angle = angle.repeat_interleave(2, dim=1) if interleaved else angle.repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def _chunked(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), -1)


def _interleaved(x: Tensor) -> Tensor:
    return torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), dim=-1).flatten(-2)


def _partial(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([rotated * cos + _half(rotated) * sin, rest], dim=-1)


def _in_float(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    high = x.float()
    return (high * cos + _half(high) * sin).to(dtype=x.dtype)


# ---- one tensor ----


@pytest.mark.parametrize(
    ("rotate", "tables"),
    [
        (lambda x, c, s: x * c + _half(x) * s, _tables()),
        (lambda x, c, s: s * _chunked(x) + c * x, _tables()),
        (lambda x, c, s: x * c[None, None] + _half(x) * s[None, None], _tables()),
        (lambda x, c, s: x * c.unsqueeze(0).unsqueeze(1) + _half(x) * s.unsqueeze(0).unsqueeze(1), _tables()),
        (lambda x, c, s: x * c + _interleaved(x) * s, _tables(interleaved=True)),
        (_partial, _tables(4)),
        (_in_float, _tables()),
    ],
    ids=["slices", "chunks and order", "indexed tables", "unsqueezed tables", "interleaved", "partial", "in float32"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_open", [False, True], ids=["fixed", "symbolic"])
def test_a_rotation_becomes_one_op(run_pass, rotate, tables, dtype, is_open) -> None:
    x = torch.randn(B, H, S, D).to(dtype)
    cos, sin = (table if rotate is _in_float else table.to(dtype) for table in tables)
    if is_open:
        _open_lengths((x, 2), (cos, 0), (sin, 0))
    got = run_pass(rotate, rewrite_rope, x, cos, sin)
    assert got.found == (1, 0)
    assert [name for name in got.names() if name in ("rope", "mul", "cat", "stack", "add")] == ["rope"]
    exact = rotate(x.double(), cos.double(), sin.double()) if rotate is not _in_float else _exact(x, cos, sin)
    assert_no_worse_than(got.out, rotate(x, cos, sin), exact)
    assert got.out.dtype is dtype


def _open_lengths(*tensors: tuple[Tensor, int]) -> None:
    """Let a length be a symbol, as Dynamo does from the second length on."""
    for tensor, dim in tensors:
        torch._dynamo.mark_dynamic(tensor, dim)


def _exact(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.double() * cos.double() + _half(x.double()) * sin.double()


def test_heads_may_come_after_positions(run_pass) -> None:
    # GPT-J rotates [B, S, H, D] before it transposes.
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[None, :, None, :], sin[None, :, None, :]
        return x * cos + _half(x) * sin

    inputs = (torch.randn(B, S, H, D), *_tables())
    got = run_pass(rotate, rewrite_rope, *inputs)
    assert got.found == (1, 0)
    torch.testing.assert_close(got.out, rotate(*inputs))


@pytest.mark.parametrize(
    "rotate",
    [
        lambda x, c, s: x * c + torch.cat((x[..., 8:], -x[..., :8]), dim=-1) * s,  # the other way round
        lambda x, c, s: x * c + torch.cat((-x[..., 10:], x[..., :10]), dim=-1) * s,  # not in the middle
        lambda x, c, s: x * c + _half(x + 1) * s,  # of another tensor
        lambda x, c, s: x * c - _half(x) * s,  # backwards
        lambda x, c, s: x * c[:, :1] + _half(x) * s,  # tables of different shapes
        lambda x, c, s: x * c + torch.cat((-x[..., 8:], x[..., :8]), dim=-2).reshape(x.shape) * s,  # along positions
        lambda x, c, s: x.double() * c + _half(x.double()) * s,  # no kernel for float64
        lambda x, c, s: x * c.expand(H, S, D) + _half(x) * s.expand(H, S, D),  # a table for every head
    ],
)
def test_what_only_looks_like_a_rotation_stays(run_pass, rotate) -> None:
    inputs = (torch.randn(B, H, S, D), *_tables())
    got = run_pass(rotate, rewrite_rope, *inputs)
    assert got.found == (0, 0)
    assert_bitwise_equal(got.out, rotate(*inputs))


def test_tables_that_learn_stay(run_pass) -> None:
    cos, sin = (table.requires_grad_() for table in _tables())
    got = run_pass(lambda x, c, s: x * c + _half(x) * s, rewrite_rope, torch.randn(B, H, S, D), cos, sin)
    assert got.found == (0, 0)


# ---- q, k and v of one linear ----


def _rotated_three(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cos[None].unsqueeze(1), sin[None].unsqueeze(1)
    return q * cos + _half(q) * sin, k * cos + _half(k) * sin, v


def _blocks(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = F.linear(x, w).split([H * D, 2 * D, 2 * D], dim=-1)
    return _rotated_three(*(part.view(*x.shape[:2], -1, D).transpose(1, 2) for part in (q, k, v)), cos, sin)


def _sliced(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    qkv = F.linear(x, w)
    parts = qkv[..., : H * D], qkv[..., H * D : (H + 2) * D], qkv[..., (H + 2) * D :]
    return _rotated_three(*(part.reshape(*x.shape[:2], -1, D).permute(0, 2, 1, 3) for part in parts), cos, sin)


def _by_heads(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = F.linear(x, w).view(*x.shape[:2], -1, 3 * D).transpose(1, 2).chunk(3, dim=-1)
    return _rotated_three(q, k, v, cos, sin)


@pytest.mark.parametrize(("function", "heads"), [(_blocks, 8), (_sliced, 8), (_by_heads, 12)])
@pytest.mark.parametrize("is_open", [False, True], ids=["fixed", "symbolic"])
def test_q_k_and_v_of_one_linear_become_one_op(run_pass, function, heads, is_open) -> None:
    inputs = (torch.randn(B, S, 24), torch.randn(heads * D, 24), *_tables())
    if is_open:
        _open_lengths((inputs[0], 1), (inputs[2], 0), (inputs[3], 0))
    got = run_pass(function, rewrite_rope, *inputs)
    assert got.found == (2, 1)
    assert {"rope_qkv"} == {name for name in got.names() if "rope" in name or name in ("mul", "cat", "chunk")}
    for mine, ref in zip(got.out, function(*inputs), strict=True):
        torch.testing.assert_close(mine, ref)


def _wider(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v, _ = F.linear(x, w).split([H * D, 2 * D, 2 * D, 2 * D], dim=-1)
    return _rotated_three(*(part.view(B, S, -1, D).transpose(1, 2) for part in (q, k, v)), cos, sin)


def _another_order(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    v, q, k = F.linear(x, w).split([2 * D, 4 * D, 4 * D], dim=-1)
    return _rotated_three(*(part.view(B, S, -1, D).transpose(1, 2) for part in (q, k, v)), cos, sin)


def _written_between(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    qkv = F.linear(x, w)
    q, k, v = (part.view(B, S, -1, D).transpose(1, 2) for part in qkv.split([4 * D, 2 * D, 4 * D], dim=-1))
    qkv[..., :3].mul_(2)
    return _rotated_three(q, k, v, cos, sin)


@pytest.mark.parametrize("function", [_wider, _another_order, _written_between])
def test_q_and_k_are_rotated_each_by_itself_where_the_rows_hold_something_else(run_pass, function) -> None:
    inputs = (torch.randn(B, S, 24), torch.randn(10 * D, 24), *_tables())
    got = run_pass(function, rewrite_rope, *inputs)
    assert got.found == (2, 0)
    assert [name for name in got.names() if "rope" in name] == ["rope", "rope"]
    for mine, ref in zip(got.out, function(*inputs), strict=True):
        torch.testing.assert_close(mine, ref)


def test_rotations_without_merged_rows_stay_on_request(run_pass) -> None:
    inputs = (torch.randn(B, S, 24), torch.randn(10 * D, 24), *_tables())
    got = run_pass(_another_order, lambda graph: rewrite_rope(graph, alone=False), *inputs)
    assert got.found == (0, 0)
    for mine, ref in zip(got.out, _another_order(*inputs), strict=True):
        assert_bitwise_equal(mine, ref)


# ---- models ----


def _compiled(model: nn.Module, options: BackendOptions) -> Callable[..., Any]:
    return torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))


def _fp8_options(model: nn.Module) -> BackendOptions:
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.endswith(("head", "embed_out"))]
    return BackendOptions(schemes=dict.fromkeys(names, FP8), parameters=model.named_parameters)


@pytest.mark.parametrize(
    ("model_type", "at_once", "backward"),
    [
        ("llama", 1, "rope_qkv_backward_rows"),
        ("mistral", 1, "rope_qkv_backward_rows"),
        ("qwen2", 1, "rope_qkv_backward_beside"),  # its bias reads the gradient in high precision
        ("persimmon", 0, "rope"),  # LayerNorms of q's and k's heads lie between
        ("phi3", 1, "rope_qkv_backward_rows"),  # one linear in the model itself
        ("gpt_neox", 1, "rope_qkv_backward_beside"),  # q, k, v of a head side by side, a quarter rotated; with bias
        ("stablelm", 1, "rope_qkv_backward_rows"),  # a quarter rotated
        ("cohere", 1, "rope_qkv_backward"),  # interleaved, in float32; merged with the MLP's linears
        ("gptj", 1, "rope_qkv_backward_rows"),  # interleaved, heads behind positions, tables made twice
    ],
)
def test_the_pass_fires_on_published_architectures(model_type, at_once, backward, batch, monkeypatch) -> None:
    one_layer = {"num_hidden_layers": 1} | ({"layer_types": ["full_attention"]} if "qwen" in model_type else {})
    model = zoo_models.tiny_model(model_type, **one_layer).bfloat16()
    options, graphs = _fp8_options(model), _seen_graphs(monkeypatch)
    loss = _compiled(model, options)(**batch).loss
    loss.backward()
    assert (options.counts["rope"], options.counts["rope_qkv"]) == (2, at_once)
    called = [str(node.target) for graph in graphs for node in graph.nodes]
    rotations = [name.split(".")[1] for name in called if name.startswith("deepwell.rope")]
    forward = ["rope_qkv"] if at_once else ["rope", "rope"]
    assert rotations == forward + ([backward] if at_once else [backward, backward])
    assert abs(loss.item() - model(**batch).loss.item()) < 0.01 * loss.item()


def _seen_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The forward and backward graphs as they are after the last pass."""
    seen: list[Any] = []
    fuse = pipeline.fuse_quantize

    def fuse_and_keep(graph: Any) -> int:
        seen.append(graph)
        return fuse(graph)

    monkeypatch.setattr(pipeline, "PASSES", pipeline.swapped("fused_quantize", fuse_and_keep))
    return seen


def test_the_gradient_of_the_merged_rows_is_never_written_in_bf16(batch, monkeypatch) -> None:
    # dgrad and wgrad both want codes: what attention's backward gives becomes FP8 rows at once.
    model = zoo_models.tiny_model("llama", num_hidden_layers=1, intermediate_size=80).bfloat16()
    graphs = _seen_graphs(monkeypatch)
    _compiled(model, _fp8_options(model))(**batch).loss.backward()
    merged_width = sum(getattr(model.model.layers[0].self_attn, f"{x}_proj").out_features for x in "qkv")
    high = [
        node
        for node in graphs[-1].nodes
        if isinstance(value := node.meta.get("val"), Tensor)
        and value.shape[-1:] == (merged_width,)
        and value.dtype is torch.bfloat16
    ]
    assert not high


def _gradients(model: nn.Module, run: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    model.zero_grad(set_to_none=True)
    out = run(**batch)
    out.loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "cohere"])
def test_gradients_of_a_model_are_no_worse_than_eagers(model_type, batch) -> None:
    model = zoo_models.tiny_model(model_type).bfloat16()
    options = BackendOptions()
    mine = _gradients(model, _compiled(model, options), batch)
    own = _gradients(model, model, batch)
    exact = zoo_models.tiny_model(model_type)
    exact.load_state_dict(model.state_dict())
    assert options.counts["rope"] == 4
    assert_no_worse_than(mine, own, _gradients(exact, exact, batch))


def test_fp8_gradients_are_as_good_with_the_pass_as_without(batch, monkeypatch) -> None:
    model = zoo_models.tiny_model("llama").bfloat16()
    exact = zoo_models.tiny_model("llama")
    exact.load_state_dict(model.state_dict())
    with_pass = _gradients(model, _compiled(model, _fp8_options(model)), batch)
    torch._dynamo.reset()
    monkeypatch.setattr(pipeline, "PASSES", pipeline.swapped("rope rope_qkv", lambda graph: (0, 0)))
    without = _gradients(model, _compiled(model, _fp8_options(model)), batch)
    assert not torch.equal(with_pass, without)
    assert_no_worse_than(with_pass, without, _gradients(exact, exact, batch), factor=1.1)


def test_the_recipes_llama_is_rotated_at_once_at_every_length() -> None:
    # One table for all layers, sliced to the length: [S, D] in bf16.
    sys.path.append(str(Path(__file__).resolve().parents[2] / "recipes"))
    import llama

    config = llama.LlamaConfig(
        width=64, num_heads=4, num_kv_heads=2, hidden=96, num_layers=2, vocab=64, max_positions=64
    )
    model = llama.Llama(config).init_weights().bfloat16()
    options = _fp8_options(model)
    run = _compiled(model, options)
    for length in (20, 24, 28):
        tokens = torch.randint(0, 64, (2, length))
        loss = run(tokens, tokens)
        loss.backward()
        assert abs(loss.item() - model(tokens, tokens).item()) < 0.01 * loss.item()
    assert options.graphs == 2  # the first length, then any
    assert (options.counts["rope"], options.counts["rope_qkv"]) == (8, 4)


def test_rotations_under_activation_checkpointing_are_found(batch) -> None:
    model = zoo_models.tiny_model("llama", num_hidden_layers=1).bfloat16().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    options = _fp8_options(model)
    loss = _compiled(model, options)(**batch).loss
    loss.backward()
    assert (options.counts["rope"], options.counts["rope_qkv"]) == (2, 1)


@pytest.mark.slow
def test_inductor_compiles_the_ops_both_ways(batch, cxx_compiler) -> None:
    model = zoo_models.tiny_model("llama", num_hidden_layers=1).bfloat16()
    eagerly = _gradients(model, _compiled(model, _fp8_options(model)), batch)
    torch._dynamo.reset()
    options = _fp8_options(model)
    options.use_inductor = True
    compiled = _gradients(model, _compiled(model, options), batch)
    assert options.counts["rope_qkv"] == 1  # a graph from Inductor's cache counts no fused quantization
    error = (compiled.float() - eagerly.float()).norm() / eagerly.float().norm()
    assert error < 0.03  # what is left to Inductor rounds elsewhere
