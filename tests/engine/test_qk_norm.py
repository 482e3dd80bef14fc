"""Norms of q's and k's heads join their rotation where both are of one linear's rows, and nowhere else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo_models
from compared import check_all
from torch import Tensor, nn

from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.engine.passes import pipeline
from deepwell.engine.passes.qk_norm_rope import rewrite_qk_norm_rope
from deepwell.engine.passes.rms_norm import rewrite_rms_norm
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than, sqnr_db
from deepwell.graph.fx import mark_changed
from deepwell.kernels.rope.autograd import qk_norm_rope

FP8 = "fp8_row|fp8_row|fp8_row"
B, S, H, K, D = 2, 7, 4, 2, 16


def _norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    x32 = x.float()
    return w * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def _heads(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    rows = F.linear(x, w)
    q, k, v = rows[..., : H * D], rows[..., H * D : (H + K) * D], rows[..., (H + K) * D :]
    return tuple(t.view(B, S, -1, D) for t in (q, k, v))


def _qwen3(x: Tensor, w: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _heads(x, w)
    q, k = _norm(q, wq).transpose(1, 2), _norm(k, wk).transpose(1, 2)
    return _rope(q, cos, sin), _rope(k, cos, sin), v.transpose(1, 2)


def _gemma3(x: Tensor, w: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (t.transpose(1, 2) for t in _heads(x, w))
    return _rope(_norm(q, wq), cos, sin), _rope(_norm(k, 1 + wk), cos, sin), v


def _read_twice(x: Tensor, w: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _heads(x, w)
    q, k = _norm(q, wq).transpose(1, 2), _norm(k, wk).transpose(1, 2)
    return _rope(q, cos, sin), _rope(k, cos, sin), v.transpose(1, 2), 2 * q


def _another_eps(x: Tensor, w: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _heads(x, w)
    q, k = _norm(q, wq, 1e-5).transpose(1, 2), _norm(k, wk).transpose(1, 2)
    return _rope(q, cos, sin), _rope(k, cos, sin), v.transpose(1, 2)


def _a_part_of_each_head(x: Tensor, w: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _heads(x, w)
    q, k = _norm(q, wq).transpose(1, 2), _norm(k, wk).transpose(1, 2)
    cos, sin = cos[..., :8], sin[..., :8]
    q, k = (torch.cat((_rope(t[..., :8], cos, sin), t[..., 8:]), dim=-1) for t in (q, k))
    return q, k, v.transpose(1, 2)


def _one_norm(x: Tensor, w: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _heads(x, w)
    q, k = _norm(q, wq).transpose(1, 2), k.transpose(1, 2)
    return _rope(q, cos, sin), _rope(k, cos, sin), v.transpose(1, 2)


# ---- one norm of all heads: q and k by columns of the weight's [H * D] and [K * D] ----


def _apart(x: Tensor) -> Tensor:
    return x.view(B, S, -1, D).transpose(1, 2)


def _olmo2(x: Tensor, w: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return _plain(F.linear(x, w), wq, wk, cos, sin)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        *((_qwen3, 1), (_gemma3, 1), (_read_twice, 1), (_another_eps, 0), (_a_part_of_each_head, 0), (_one_norm, 0)),
        (_olmo2, 1),
    ],
)
def test_norm_and_rotation_of_one_linears_rows_become_one_op(run_pass, function, found) -> None:
    angle = torch.outer(torch.arange(S).float(), 10.0 ** -(torch.arange(0, D, 2).float() / D)).repeat(1, 2)
    weights = [1 + torch.randn(heads * D if function is _olmo2 else D) * 0.2 for heads in (H, K)]
    tensors = [torch.randn(B, S, 24), torch.randn((H + 2 * K) * D, 24) * 0.2, *weights]
    inputs = [t.bfloat16() for t in (*tensors, angle.cos(), angle.sin())]

    def rewrite(graph: Any) -> int:
        mark_changed(graph)
        assert rewrite_rms_norm(graph) == (1 if function is _one_norm else 2)
        return rewrite_qk_norm_rope(graph)

    got = run_pass(function, rewrite, *inputs)
    assert got.found == found
    own, exact = function(*inputs), function(*(t.double() for t in inputs))
    for mine, torchs, ref in zip(got.out, own, exact, strict=True):
        assert_no_worse_than(mine, torchs, ref)


# ---- near misses of the joined op, with gradients ----


def _three(rows: Tensor, heads: tuple[int, ...] = (H, K, K)) -> list[Tensor]:
    return list(rows.split([n * D for n in heads], dim=-1))


def _by_tokens(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, turn: Any = _rope) -> tuple[Tensor, ...]:
    return turn(_apart(q), cos, sin), turn(_apart(k), cos, sin), _apart(v)


def _plain(rows: Tensor, wq: Tensor, wk: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _three(rows)
    return _by_tokens(_norm(q, wq), _norm(k, wk), v, *tables)


def _in_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def _torch_norm(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return (w * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


def _k_first(rows: Tensor, wq: Tensor, wk: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    k, q, v = _three(rows, (K, H, K))
    return _by_tokens(_norm(q, wq), _norm(k, wk), v, *tables)


def _v_first(rows: Tensor, wq: Tensor, wk: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    v, q, k = _three(rows, (K, H, K))
    return _by_tokens(_norm(q, wq), _norm(k, wk), v, *tables)


def _overlapping(rows: Tensor, wq: Tensor, wk: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    q, _, v = _three(rows)
    return _by_tokens(_norm(q, wq), _norm(rows[..., D : (1 + K) * D], wk), v, *tables)


def _columns_of_heads(rows: Tensor, wq: Tensor, wk: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _three(rows)
    q, k = (_norm(x, w).view(B, S, D, -1).transpose(-1, -2).transpose(1, 2) for x, w in ((q, wq), (k, wk)))
    return _rope(q, *tables), _rope(k, *tables), _apart(v)


def _not_transposed(rows: Tensor, wq: Tensor, wk: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _three(rows)
    return _rope(_norm(q, wq).view(B, H, S, D), *tables), _rope(_norm(k, wk).view(B, K, S, D), *tables), _apart(v)


def _by_heads(rows: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """As many tokens as heads, and a row of the tables for each head."""
    parts = _three(rows.repeat(1, 1, 3)[..., : 3 * S * D], (S, S, S))
    q, k = (_norm(x, w[:1].expand(S * D)).view(B, S, S, D) for x, w in zip(parts, (wq, wk), strict=False))
    return _rope(q, cos, sin), _rope(k, cos, sin), parts[2].view(B, S, S, D)


def _each_by_heads(rows: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (x.view(B, S, S, D) for x in _three(rows.repeat(1, 1, 3)[..., : 3 * S * D], (S, S, S)))
    return _rope(_norm(q, wq[:D]), cos, sin), _rope(_norm(k, wk[:D]), cos, sin), v


def _transposed_back(rows: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    parts = _three(rows.repeat(1, 1, 3)[..., : 3 * S * D], (S, S, S))
    q, k, v = (x.view(B, S, S, D).transpose(1, 2) for x in parts)
    q, k = _norm(q, wq[:D]).transpose(1, 2), _norm(k, wk[:D]).transpose(1, 2)
    return _rope(q, cos, sin), _rope(k, cos, sin), v


def _other_tables(rows: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, _, v = _plain(rows, wq, wk, cos, sin)
    return q, _rope(_apart(_norm(_three(rows)[1], wk)), cos * 1, sin), v


def _with(norm_q: Any = _norm, norm_k: Any = _norm, norm_v: Any = None, turn_q: Any = _rope) -> Any:
    def run(rows: Tensor, wq: Tensor, wk: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
        q, k, v = _three(rows)
        q, k = _apart(norm_q(q, wq)), _apart(norm_k(k, wk))
        return turn_q(q, *tables), _rope(k, *tables), _apart(v if norm_v is None else norm_v(v, wk))

    return run


def _one_norm_of_all(rows: Tensor, wq: Tensor, wk: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    return _by_tokens(*_three(_norm(rows, torch.cat([wq, wk, wk]))), *tables)


def _narrow_heads(rows: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _three(rows)
    q, k, v = (x.view(B, S, -1, D // 2).transpose(1, 2) for x in (_norm(q, wq), _norm(k, wk), v))
    cos, sin = cos[:, : D // 2], sin[:, : D // 2]
    return _rope(q, cos, sin), _rope(k, cos, sin), v


def _one_sequence(rows: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _three(rows)
    q, k, v = (x.reshape(1, B * S, -1, D).transpose(1, 2) for x in (_norm(q, wq), _norm(k, wk), v))
    cos, sin = torch.cat([cos, cos]), torch.cat([sin, sin])
    return _rope(q, cos, sin), _rope(k, cos, sin), v


def _k_by_head(rows: Tensor, wq: Tensor, wk: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _three(rows)
    k = _norm(k.view(B, S, K, D), wk[:D]).transpose(1, 2)
    return _rope(_apart(_norm(q, wq)), *tables), _rope(k, *tables), _apart(v)


def _two_heads_together(rows: Tensor, wq: Tensor, wk: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _three(rows)
    q = _norm(q.view(B, S, H // 2, 2 * D), wq[: 2 * D]).view(B, S, H * D)
    return _by_tokens(q, _norm(k, wk), v, *tables)


def _every_second_column(rows: Tensor, wq: Tensor, wk: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    q, k = (rows[..., start : H * D : 2].repeat(1, 1, 2)[..., : H * D] for start in (0, 1))
    return _by_tokens(_norm(q, wq), _norm(k[..., : K * D], wk), rows, *tables)


def _q_without_gradient(rows: Tensor, wq: Tensor, wk: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _plain(rows, wq, wk, *tables)
    return q.detach() * k.repeat(1, H // K, 1, 1), v


def _k_without_gradient(rows: Tensor, wq: Tensor, wk: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    q, k, v = _plain(rows, wq, wk, *tables)
    return q * k.repeat(1, H // K, 1, 1).detach(), v


def _read_before(rows: Tensor, wq: Tensor, wk: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    normed = _norm(_three(rows)[0], wq)
    q, k, v = _plain(rows, wq, wk, *tables)
    return q, k, v, normed.sum(-1)


# How often the op is found; where it is not, it would compute something else.
ALIKE = {
    "as OLMo 2": (_plain, 1),
    "k before q": (_k_first, 1),
    "narrow heads": (_narrow_heads, 1),
    "q without a gradient": (_q_without_gradient, 1),
    "k without a gradient": (_k_without_gradient, 1),
    "a weight in fp32": (_with(lambda x, w: _torch_norm(x, w.float()), _torch_norm), 1),
    "a norm that is read": (_read_before, 1),
    "k by head": (_k_by_head, 0),
    "two heads together": (_two_heads_together, 0),
    "every second column": (_every_second_column, 0),
    "a write behind the norm": (_with(lambda x, w: _norm(x, w).mul_(2)), 0),
    "v before q": (_v_first, 0),
    "columns of both": (_overlapping, 0),
    "columns of heads": (_columns_of_heads, 0),
    "tokens as heads": (_not_transposed, 0),
    "tables of heads": (_by_heads, 0),
    "tables of heads, each with a norm": (_each_by_heads, 0),
    "heads transposed back": (_transposed_back, 0),
    "other tables for k": (_other_tables, 0),
    "a dropout": (_with(lambda x, w: F.dropout(_norm(x, w), 0.4)), 0),
    "a sum before the norm": (_with(lambda x, w: _norm(x + 1, w)), 0),
    "another eps": (_with(lambda x, w: _norm(x, w, 1e-3)), 0),
    "another rounding": (_with(_torch_norm), 0),
    "another rotation": (_with(turn_q=_in_pairs), 0),
    "a norm of v": (_with(norm_v=_norm), 0),
    "one norm of q, k and v": (_one_norm_of_all, 0),
    "one sequence of all": (_one_sequence, 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_looks_like_norms_of_all_heads_is_computed_as_written(dtype) -> None:
    g = torch.Generator().manual_seed(0)
    shapes = ((B, S, (H + 2 * K) * D), (H * D,), (K * D,), (S, D), (S, D))
    rows, wq, wk, cos, sin = (torch.randn(shape, generator=g) for shape in shapes)
    inputs = [rows.requires_grad_(), (1 + wq / 5).requires_grad_(), (1 + wk / 5).requires_grad_(), cos, sin]
    counts = check_all({name: (function, inputs) for name, (function, _) in ALIKE.items()}, dtype)
    assert counts["qk_norm_rope"] == sum(count for _, count in ALIKE.values())


@pytest.mark.parametrize("is_whole", [False, True], ids=["each", "whole"])
def test_the_ops_gradients_are_no_worse_than_torchs(is_whole) -> None:
    angle = torch.outer(torch.arange(S).float(), 10.0 ** -(torch.arange(0, D, 2).float() / D)).repeat(1, 2)
    weights = [1 + torch.randn(heads * D if is_whole else D) * 0.2 for heads in (H, K)]
    made = [torch.randn(B, S, (H + 2 * K) * D), *weights]
    grads = [torch.randn(B, h, S, D).bfloat16() for h in (H, K, K)]

    def run(function: Callable[..., Any], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.bfloat16().to(dtype).requires_grad_() for t in made]
        out = function(*leaves, *(t.bfloat16().to(dtype) for t in (angle.cos(), angle.sin())))
        return torch.autograd.grad(out, leaves, [g.to(dtype) for g in grads])

    def by_torch(rows: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q, k, v = rows.split([H * D, K * D, K * D], dim=-1)
        if is_whole:
            q, k = _norm(q, wq), _norm(k, wk)
        q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (q, k, v))
        q, k = (q, k) if is_whole else (_norm(q, wq), _norm(k, wk))
        return _rope(q, cos, sin), _rope(k, cos, sin), v

    def by_op(rows: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        three = qk_norm_rope(rows, (wq, wk), cos, sin, (H, K, K), 1e-6, "llama", "half")
        return tuple(t.transpose(1, 2) for t in three)

    mine, own, exact = run(by_op, torch.bfloat16), run(by_torch, torch.bfloat16), run(by_torch, torch.float64)
    for triple in zip(mine, own, exact, strict=True):
        assert_no_worse_than(*triple)


@pytest.mark.parametrize(("model_type", "found"), [("qwen3", 1), ("gemma3_text", 1), ("olmo2", 1), ("persimmon", 0)])
def test_models_train_with_the_numbers_they_had(model_type, found, batch, monkeypatch) -> None:
    one_layer = {"num_hidden_layers": 1, "num_key_value_heads": 2}
    one_layer |= {} if model_type in ("olmo2", "persimmon") else {"layer_types": ["full_attention"]}
    model = zoo_models.tiny_model(model_type, **one_layer).bfloat16().eval()
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    runs = []
    for is_joined in (True, False):
        torch._dynamo.reset()
        if not is_joined:
            monkeypatch.setattr(pipeline, "PASSES", pipeline.swapped("qk_norm_rope", lambda graph: 0))
        options = BackendOptions(schemes=dict.fromkeys(linears, FP8))
        run = torch.compile(model, backend=lambda graph, inputs, o=options: compile_graph(graph, inputs, o))
        loss = run(**batch).loss
        loss.backward()
        runs.append((loss.detach(), [p.grad for p in model.parameters()], options.counts))
        model.zero_grad(set_to_none=True)
    (loss, grads, counts), (loss_apart, grads_apart, apart) = runs
    assert counts["qk_norm_rope"] == found and counts["rope"] == 2 * (1 - found) and apart["rope"] == 2
    # The gradient of the merged rows is written as FP8 rows at once: one quantization less by itself.
    assert counts["fused_quantize"] == apart["fused_quantize"] + found
    assert_bitwise_equal(loss, loss_apart)  # on a CPU both are references
    for mine, theirs in zip(grads, grads_apart, strict=True):
        assert sqnr_db(theirs, mine) > 60


@pytest.mark.parametrize(
    ("name", "fp8"), [("", False), ("_quantize", True), ("_beside", True)], ids=["plain", "rows", "beside"]
)
@pytest.mark.parametrize("is_whole", [False, True], ids=["each", "whole"])
def test_an_ops_fake_has_the_shapes_and_dtypes_of_its_result(name, fp8, is_whole) -> None:
    ops = torch.ops.deepwell
    rows = torch.randn(B, S, (H + 2 * K) * D).bfloat16()
    w_q, w_k = (torch.randn(heads * D if is_whole else D).bfloat16() for heads in (H, K))
    tables = [torch.randn(S, D)] * 2
    inputs = (rows, w_q, w_k, *tables, [H, K, K], 1e-6, "llama", "half")
    utils = ("test_faketensor",)
    torch.library.opcheck(ops.qk_norm_rope.default, inputs, test_utils=utils)
    q, k, v, rstd_q, rstd_k = ops.qk_norm_rope(*inputs)
    backward = getattr(ops, f"qk_norm_rope_backward{name}").default
    out = backward(q, k, v, rows, w_q, w_k, rstd_q, rstd_k, *tables, "half")
    assert any(t.dtype is torch.float8_e4m3fn for t in out) == fp8
    torch.library.opcheck(backward, (q, k, v, rows, w_q, w_k, rstd_q, rstd_k, *tables, "half"), test_utils=utils)
