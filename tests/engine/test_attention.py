"""Attention beyond plain causal in graphs: what goes to which kernel, and near misses that stay as they are."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import zoo_models
from torch import Tensor

from deepwell.engine.backend import compile_graph
from deepwell.engine.passes import pipeline
from deepwell.engine.passes.attention import flexible as flexible_pass
from deepwell.engine.passes.attention import narrow_values
from deepwell.engine.passes.attention.rewrite import rewrite_attention
from deepwell.engine.passes.work import BackendOptions
from deepwell.formats.metrics import assert_no_worse_than
from deepwell.kernels.attention import flex
from deepwell.kernels.tune.choose import proof_of
from deepwell.kernels.tune.problem import Problem

# ---- values narrower than keys ----


def _mla(heads: int = 4, kv_heads: int = 4, size: int = 12, width: int = 24, of_values: int = 16) -> list[Tensor]:
    sizes = ((heads, width), (kv_heads, width), (kv_heads, of_values))
    return [torch.randn(2, n, size, w).requires_grad_() for n, w in sizes]


@pytest.fixture
def measured(monkeypatch) -> list:
    """A CPU's tensors count as a GPU's, and the padded way as the fastest; the shapes that were asked for."""
    asked: list = []

    def fastest(shape, dtype, device):
        asked.append(shape)
        return "padded_flash"

    monkeypatch.setattr(narrow_values, "is_timed", lambda *operands: True)
    monkeypatch.setattr(narrow_values, "fastest_way", fastest)
    return asked


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_narrow_values_go_the_measured_way(run_pass, measured, kv_heads, dynamic) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)

    inputs = _mla(kv_heads=kv_heads)
    got = run_pass(attention, narrow_values.rewrite_narrow_values, *inputs, dynamic=dynamic)
    assert got.found == 1 and "scaled_dot_product_attention" not in got.names()
    assert measured[0] == narrow_values.NarrowShape(B=2, H=4, G=kv_heads, S=12, D=24, V=16)
    wanted = attention(*inputs)
    torch.testing.assert_close(got.out, wanted)
    grads = [torch.autograd.grad(out.square().sum(), inputs, retain_graph=True) for out in (got.out, wanted)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_mask_of_latent_attention_is_read_first(run_pass, measured) -> None:
    # As Hugging Face builds DeepSeek under compile: a mask of positions.
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(at[None, :] <= at[:, None])[None, None])

    def both(graph):
        return *rewrite_attention(graph), narrow_values.rewrite_narrow_values(graph)

    inputs = _mla()
    got = run_pass(attention, both, *inputs)
    assert got.found == (1, 0, 0, 0, 1)
    torch.testing.assert_close(got.out, attention(*inputs))


NEAR = {
    "all pairs": F.scaled_dot_product_attention,
    "a mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(12, 12).triu(3)),
    "dropout": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.5, True),
    "one width": lambda q, k, v: F.scaled_dot_product_attention(q, k, k * 2, is_causal=True),
    "wider values": lambda q, k, v: F.scaled_dot_product_attention(q, k, torch.cat((v, v), -1), is_causal=True),
    "fewer keys": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, :7], v[:, :, :7], is_causal=True),
    "one batch of keys": lambda q, k, v: F.scaled_dot_product_attention(q, k[:1], v[:1], is_causal=True),
    "one head of keys": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], is_causal=True),
}


@pytest.mark.parametrize("near", NEAR)
def test_what_is_no_causal_attention_with_narrow_values_stays(run_pass, measured, near) -> None:
    inputs = _mla()
    torch.manual_seed(1)
    got = run_pass(NEAR[near], narrow_values.rewrite_narrow_values, *inputs)
    torch.manual_seed(1)
    assert got.found == 0 and not measured
    torch.testing.assert_close(got.out, NEAR[near](*inputs))


def test_torchs_choice_stays_where_nothing_gains_or_nothing_is_measured(run_pass, monkeypatch) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    # On a CPU nothing is asked.
    monkeypatch.setattr(narrow_values, "fastest_way", lambda *given: pytest.fail("asked on a CPU"))
    assert run_pass(attention, narrow_values.rewrite_narrow_values, *_mla()).found == 0
    torch._dynamo.reset()
    monkeypatch.setattr(narrow_values, "is_timed", lambda *operands: True)
    monkeypatch.setattr(narrow_values, "fastest_way", lambda *given: "sdpa")
    assert run_pass(attention, narrow_values.rewrite_narrow_values, *_mla()).found == 0


def test_torchs_choice_stays_where_algorithms_are_deterministic(run_pass, measured) -> None:
    # cuDNN's backward is not.
    torch.use_deterministic_algorithms(True)
    try:
        got = run_pass(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            narrow_values.rewrite_narrow_values,
            *_mla(),
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert got.found == 0 and not measured


@pytest.mark.parametrize(
    ("dtype", "width", "is_measured"),
    [(torch.bfloat16, 16, True), (torch.float32, 16, False), (torch.bfloat16, "open", False)],
)
def test_only_what_can_be_timed_is_measured(dtype, width, is_measured) -> None:
    tensor = SimpleNamespace(is_cuda=True, dtype=dtype, shape=(2, 4, 12, width))
    assert narrow_values.is_timed(tensor, tensor, tensor) is is_measured


# ---- packed sequences ----


def _heads(batch: int = 2, heads: int = 4, kv_heads: int = 4, size: int = 12) -> list[Tensor]:
    return [torch.randn(batch, n, size, 8).requires_grad_() for n in (heads, kv_heads, kv_heads)]


@pytest.fixture
def flexible(monkeypatch) -> list:
    """A CPU's tensors count as a GPU's, and FlexAttention as faster; the shapes that were asked for."""
    asked: list = []
    monkeypatch.setattr(flexible_pass, "is_timed", lambda *operands: True)
    monkeypatch.setattr(flexible_pass, "gains", lambda shape, dtype, device: asked.append(shape) or True)
    return asked


def _triangle(size: int) -> Tensor:
    at = torch.arange(size)
    return at[None, :] <= at[:, None]


def _hugging_face(position_ids: Tensor) -> Tensor:
    """Its search for packed sequences, and the mask that it makes of it under compile."""
    number = (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch, size = position_ids.shape
    rows = torch.arange(batch)[:, None, None, None]
    q, k = torch.arange(size)[None, None, :, None], torch.arange(size)[None, None, None, :]
    return ((k <= q) & (number[rows, q] == number[rows, k])).expand(batch, -1, size, size)


def _starts(position_ids: Tensor) -> Tensor:
    number = (position_ids == 0).cumsum(1)
    return (number[:, :, None] == number[:, None, :])[:, None] & _triangle(position_ids.shape[1])


def _additive(position_ids: Tensor) -> Tensor:
    other = position_ids.unsqueeze(1).unsqueeze(-1) != position_ids[:, None, None]
    size = position_ids.shape[1]
    return torch.zeros(1, 1, size, size).masked_fill(other | ~_triangle(size), -torch.inf)


def _lower(position_ids: Tensor) -> Tensor:
    return (position_ids[:, None, :, None] == position_ids[:, None, None, :]).tril()


def _in_a_window(position_ids: Tensor) -> Tensor:
    at = torch.arange(position_ids.shape[1])
    return _hugging_face(position_ids) & (at[None, :] > at[:, None] - 4)


def _of_one_sequence(position_ids: Tensor) -> Tensor:
    number = (position_ids[0] == 0).cumsum(-1)
    return ((number[:, None] == number[None, :]) & _triangle(len(number)))[None, None]


PACKED = {
    "Hugging Face": _hugging_face,
    "starts": _starts,
    "additive": _additive,
    "tril": _lower,
    "window": _in_a_window,
    "one row": _of_one_sequence,
}


def _packed(make):
    def attention(q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make(position_ids), scale=0.3, enable_gqa=True)

    return attention


def _position_ids(batch: int, size: int = 12) -> Tensor:
    return (torch.arange(size) + torch.tensor([[0], [2]])[:batch]) % 5


@pytest.mark.parametrize("make", PACKED)
@pytest.mark.parametrize("batch", [1, 2])
def test_packed_sequences_go_to_flex_attention(run_pass, flexible, make, batch) -> None:
    inputs = [*_heads(batch, kv_heads=2), _position_ids(batch)]
    attention = _packed(PACKED[make])
    got = run_pass(attention, flexible_pass.rewrite_flexible, *inputs, dynamic=False)
    assert got.found == (1, 0) and "scaled_dot_product_attention" not in got.names()
    assert flexible[0].has_documents and (flexible[0].B, flexible[0].G) == (batch, 2)
    assert flexible[0].window == (4 if make == "window" else -1)
    wanted = attention(*inputs)
    torch.testing.assert_close(got.out, wanted)
    grads = [torch.autograd.grad(out.square().sum(), inputs[:3], retain_graph=True) for out in (got.out, wanted)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)


def _numbers(p: Tensor) -> Tensor:
    return (p == 0).cumsum(1)


def _alike(n: Tensor) -> Tensor:
    return n[:, None, :, None] == n[:, None, None, :]


def _taken(n: Tensor, first: int, step: int, shift: int) -> Tensor:
    """Numbers by positions, the keys' from rows `first + step * row`; from `shift` on."""
    rows, at = torch.arange(4)[:, None, None, None], torch.arange(12) + shift
    return n[rows, at[None, None, :, None]] == n[first + step * rows if step < 0 else rows, at[None, None, None, :]]


NOT_PACKED = {
    # a later document sees the earlier ones
    "not before": lambda p, n: (n[:, None, :, None] >= n[:, None, None, :]) & _triangle(12),
    "the others": lambda p, n: (n[:, None, :, None] != n[:, None, None, :]) & _triangle(12),
    "one document or a window": lambda p, n: (_alike(n) | torch.ones(12, 12).bool().triu(-2)) & _triangle(12),
    "no order": lambda p, n: _alike(n),
    "two numbers": lambda p, n: (n[:, None, :, None] == p[:, None, None, :]) & _triangle(12),
    "both along keys": lambda p, n: (n[:, None, None, :] == n[:, None, None, :]) & _triangle(12),
    "keys by queries of another": lambda p, n: (n[:, None, :, None] == n[None, :, None, :]) & _triangle(12),
    "heads, not sequences": lambda p, n: (n[:, :, None] == n[:, None, :])[None] & _triangle(12),
    "floats": lambda p, n: _alike(torch.where(p == 2, torch.nan, n.float())) & _triangle(12),
    "weak": lambda p, n: (
        torch.zeros(4, 1, 12, 12).masked_fill(~_alike(n), -1.0)
        + torch.zeros(12, 12).masked_fill(~_triangle(12), -torch.inf)
    ),
    "sequences exchanged": lambda p, n: _taken(n, 3, -1, 0) & _triangle(12),
    "shifted": lambda p, n: _taken(n, 0, 1, -1) & _triangle(12),
    "a part of the numbers": lambda p, n: _taken(torch.cat((n, n), 1), 0, 1, 0) & _triangle(12),
    "padding too": lambda p, n: _hugging_face(p) & (p != 3)[:, None, None, :],
    "written": lambda p, n: _hugging_face(p).clone().index_fill_(3, torch.tensor([0]), True),
    "numbers written": lambda p, n: _alike(n) & _triangle(12) & (torch.zeros_like(n.zero_())[:, None, None, :] == 0),
}


@pytest.mark.parametrize("near", NOT_PACKED)
def test_a_mask_that_only_looks_packed_stays(run_pass, flexible, near) -> None:
    inputs = [*_heads(4, size=12), torch.cat((_position_ids(2), _position_ids(2) + 1))]
    attention = _packed(lambda p: NOT_PACKED[near](p, _numbers(p)))
    got = run_pass(attention, flexible_pass.rewrite_flexible, *inputs, dynamic=False)
    assert got.found == (0, 0) and not flexible
    torch.testing.assert_close(got.out, attention(*inputs), equal_nan=True)


def test_packed_sequences_keep_their_mask_where_nothing_gains_or_sizes_are_open(
    run_pass, flexible, monkeypatch
) -> None:
    inputs = [*_heads(), _position_ids(2)]
    assert run_pass(_packed(_starts), flexible_pass.rewrite_flexible, *inputs, dynamic=True).found == (0, 0)
    torch._dynamo.reset()
    monkeypatch.setattr(flexible_pass, "gains", lambda *given: False)
    got = run_pass(_packed(_starts), flexible_pass.rewrite_flexible, *inputs, dynamic=False)
    assert got.found == (0, 0) and "scaled_dot_product_attention" in got.names()
    torch.testing.assert_close(got.out, _packed(_starts)(*inputs))


def test_documents_written_after_the_mask_stay(run_pass, flexible) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        number = (position_ids == 0).cumsum(1)
        mask = (number[:, None, :, None] == number[:, None, None, :]) & _triangle(12)
        number.zero_()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask) + number.sum()

    inputs = [*_heads(), _position_ids(2)]
    got = run_pass(attention, flexible_pass.rewrite_flexible, *inputs, dynamic=False)
    assert got.found == (0, 0)
    torch.testing.assert_close(got.out, attention(*inputs))


# ---- soft caps ----


def _repeated(x: Tensor, times: int) -> Tensor:
    b, g, s, c = x.shape
    return x[:, :, None, :, :].expand(b, g, times, s, c).reshape(b, g * times, s, c)


def _gemma(mask, cap: float = 2.0):
    """As Hugging Face writes Gemma 2."""

    def attention(q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        k, v = _repeated(k, 2), _repeated(v, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
        scores = scores / cap
        scores = torch.tanh(scores)
        scores = scores * cap
        scores = scores + torch.zeros(1, 1, 12, 12).masked_fill(~mask(position_ids), torch.finfo(q.dtype).min)
        probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(F.dropout(probs, 0.0, training=True), v)

    return attention


CAPPED = {
    "causal": lambda p: _triangle(12),
    "window": lambda p: _triangle(12) & (torch.arange(12)[None] > torch.arange(12)[:, None] - 4),
    "packed": _hugging_face,
}


@pytest.mark.parametrize("mask", CAPPED)
def test_a_soft_cap_goes_to_flex_attention(run_pass, flexible, mask) -> None:
    inputs = [*_heads(kv_heads=2), _position_ids(2)]
    attention = _gemma(CAPPED[mask])
    got = run_pass(attention, flexible_pass.rewrite_flexible, *inputs, dynamic=False)
    got.graph.eliminate_dead_code()
    assert got.found == (0, 1) and not {"softmax", "matmul", "reshape"} & set(got.names())
    assert (flexible[0].cap, flexible[0].G, flexible[0].window) == (2.0, 2, 4 if mask == "window" else -1)
    assert flexible[0].has_documents == (mask == "packed")
    wanted = attention(*inputs)
    torch.testing.assert_close(got.out, wanted)
    grads = [torch.autograd.grad(out.square().sum(), inputs[:3], retain_graph=True) for out in (got.out, wanted)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)


def _bent(bend):
    def attention(q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        mask = torch.zeros(12, 12).masked_fill(~_triangle(12), -torch.inf)
        return (bend(torch.matmul(q, k.transpose(2, 3)) * 0.3) + mask).softmax(-1) @ v

    return attention


NOT_CAPPED = {
    "two caps": lambda s: torch.tanh(s / 2.0) * 3.0,
    "sigmoid": lambda s: torch.sigmoid(s / 2.0) * 2.0,
    "inverse": lambda s: torch.tanh(2.0 / s) * 2.0,
    "no factor": lambda s: torch.tanh(s / 2.0),
    "times": lambda s: torch.tanh(s * 2.0) * 2.0,
    "rounded": lambda s: torch.tanh(torch.div(s, 2.0, rounding_mode="floor")) * 2.0,
    "negative": lambda s: torch.tanh(s / -2.0) * -2.0,
    "read twice": lambda s: (c := torch.tanh(s / 2.0) * 2.0) + c.mean(),
}


@pytest.mark.parametrize("near", NOT_CAPPED)
def test_what_only_looks_like_a_soft_cap_stays(run_pass, flexible, near) -> None:
    inputs = [*_heads(), _position_ids(2)]
    attention = _bent(NOT_CAPPED[near])
    got = run_pass(attention, flexible_pass.rewrite_flexible, *inputs, dynamic=False)
    assert got.found == (0, 0) and not flexible
    torch.testing.assert_close(got.out, attention(*inputs), equal_nan=True)


def test_a_soft_cap_is_no_attention_for_sdpa(run_pass) -> None:
    inputs = [*_heads(kv_heads=2), _position_ids(2)]
    assert run_pass(_gemma(CAPPED["causal"]), rewrite_attention, *inputs, dynamic=False).found == (0, 0, 0, 0)


@pytest.mark.parametrize("mask", CAPPED)
def test_inductor_compiles_flex_attention_inside_an_engines_graph(cxx_compiler, flexible, mask) -> None:
    # Forward alone: Inductor has no backward of it on a CPU. Several blocks, some of them skipped.
    options, size = BackendOptions(use_inductor=True), 300

    def attention(q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        at = torch.arange(size)
        is_open = at[None] <= at[:, None]
        if mask == "window":
            is_open = is_open & (at[None] > at[:, None] - 70)
        if mask == "packed":
            is_open = is_open & (position_ids[:, None, :, None] == position_ids[:, None, None, :])
        scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.3 / 2.0) * 2.0
        return (scores + torch.zeros(1, 1, size, size).masked_fill(~is_open, -torch.inf)).softmax(-1) @ v

    with torch.no_grad():
        inputs = [*(t * 1 for t in _heads(size=size)), (torch.arange(size) // 90).expand(2, -1)]
        compiled = torch.compile(attention, backend=lambda graph, given: compile_graph(graph, given, options))
        torch.testing.assert_close(compiled(*inputs), attention(*inputs))
    assert options.counts["soft_cap"] == 1


# ---- Hugging Face's models ----


def _all_levels(monkeypatch) -> None:
    """The pass runs also where Inductor does not: FlexAttention in eager mode is exact."""
    passes = tuple(replace(each, when="") if each.name == "packed soft_cap" else each for each in pipeline.PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_of_models_goes_the_measured_way(measured, model_type) -> None:
    model = zoo_models.tiny_model(model_type, use_cache=False).eval()
    ids = torch.randint(3, zoo_models.VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    options = BackendOptions()
    compiled = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))
    loss = compiled(input_ids=ids, labels=ids).loss
    assert options.counts["narrow_values"] == model.config.num_hidden_layers and measured[0].D > measured[0].V
    torch.testing.assert_close(loss, model(input_ids=ids, labels=ids).loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "overrides", "name"),
    [
        ("llama", {"use_cache": False}, "packed"),
        ("mistral", {"use_cache": False, "sliding_window": 6}, "packed"),
        ("gemma2", {"use_cache": False, "attn_implementation": "eager"}, "soft_cap"),
    ],
)
def test_models_run_in_flex_attention_with_the_same_gradients(
    monkeypatch, flexible, model_type, overrides, name
) -> None:
    _all_levels(monkeypatch)
    model = zoo_models.tiny_model(model_type, **overrides)
    ids = torch.randint(3, zoo_models.VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    position_ids = (torch.arange(40) + torch.tensor([[0], [5]])) % 17
    options = BackendOptions()
    compiled = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options), dynamic=False)
    results = []
    for run in (compiled, model):
        model.zero_grad()
        loss = run(input_ids=ids, position_ids=position_ids, labels=ids).loss
        loss.backward()
        results.append((loss.detach(), *(p.grad.clone() for p in model.parameters())))
    assert options.counts[name] == model.config.num_hidden_layers, options.counts
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model_type", "overrides", "name"),
    [
        ("llama", {"head_dim": 64}, "packed"),
        ("mistral", {"head_dim": 64, "sliding_window": 200}, "packed"),
        ("gemma2", {"head_dim": 64, "attn_implementation": "eager"}, "soft_cap"),
    ],
)
def test_models_train_with_flex_attention_on_a_gpu(monkeypatch, model_type, overrides, name) -> None:
    # Whether it gains is measured at real sizes; here it runs in any case, compiled by Inductor, if it is right.
    device = torch.device("cuda", 0)
    (candidate,) = (each for each in flex.built_in(flex.OP) if each.name == flex.FLEX)
    proof = proof_of(candidate, Problem(op=flex.OP, precision="bf16", device=str(device)))
    assert proof.is_passed, proof.reason
    monkeypatch.setattr(flexible_pass, "gains", lambda *given: True)
    model = zoo_models.tiny_model(model_type, use_cache=False, **overrides).to(device, torch.bfloat16)
    ids = torch.randint(3, zoo_models.VOCAB, (2, 512), generator=torch.Generator().manual_seed(0)).to(device)
    position_ids = ((torch.arange(512) + torch.tensor([[0], [5]])) % 170).to(device)
    options = BackendOptions(use_inductor=True)
    compiled = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options), dynamic=False)

    def gradient(run) -> Tensor:
        run.zero_grad()
        run(input_ids=ids, position_ids=position_ids, labels=ids).loss.backward()
        return torch.cat([p.grad.float().flatten() for p in model.parameters()])

    mine, theirs = gradient(compiled), gradient(model)
    assert options.counts[name] == model.config.num_hidden_layers, options.counts
    exact = gradient(model.float())
    assert_no_worse_than(mine, theirs, exact)


@pytest.mark.gpu
def test_latent_attention_trains_on_a_gpu_by_every_way(monkeypatch) -> None:
    for way in ("sdpa", "padded_flash"):
        torch._dynamo.reset()
        monkeypatch.setattr(narrow_values, "fastest_way", lambda *given, way=way: way)
        options = BackendOptions(use_inductor=True)
        sizes = ((8, 192), (8, 192), (8, 128))
        inputs = [torch.randn(2, n, 256, w, device="cuda", dtype=torch.bfloat16).requires_grad_() for n, w in sizes]

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        compiled = torch.compile(
            attention, backend=lambda graph, given, options=options: compile_graph(graph, given, options)
        )
        mine = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
        theirs = torch.autograd.grad(attention(*inputs).square().sum(), inputs)
        wide = [t.detach().double().requires_grad_() for t in inputs]
        exact = torch.autograd.grad(attention(*wide).square().sum(), wide)
        assert options.counts["narrow_values"] == (way != "sdpa")
        for got, own, ref in zip(mine, theirs, exact, strict=True):
            assert_no_worse_than(got, own, ref.float())
