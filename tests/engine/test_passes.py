"""Each pass fires where it should, leaves alone what it must, and changes no number that it should not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo_models
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.engine.passes.attention.rewrite import rewrite_attention
from deepwell.engine.passes.before_linear import rewrite_before_linears
from deepwell.engine.passes.fuse_quantize import fuse_quantize, fuse_recomputed_rows
from deepwell.engine.passes.linear import find_linears, rewrite_linears
from deepwell.engine.passes.rms_norm import rewrite_rms_norm
from deepwell.engine.passes.swiglu import rewrite_swiglu
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.attention.autograd import windowed_attention

FP8 = "fp8_row|fp8_row|fp8_row"

# ---- attention ----


def _qkv(heads: int = 4, kv_heads: int = 4, size: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, heads, size, 8), torch.randn(2, kv_heads, size, 8), torch.randn(2, kv_heads, size, 8)


def _attend(make_mask: Callable[[int], Tensor]) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make_mask(q.shape[2]))

    return attention


def _causal(size: int) -> Tensor:
    at = torch.arange(size)
    return (at[None, :] <= at[:, None])[None, None]


def _window(length: int) -> Callable[[int], Tensor]:
    def mask(size: int) -> Tensor:
        at = torch.arange(size)
        return ((at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - length))[None, None]

    return mask


def _additive(size: int, shut: float = float("-inf")) -> Tensor:
    return torch.zeros(1, 1, size, size).masked_fill(~_causal(size), shut)


MASKS = {
    "boolean": _causal,  # Hugging Face under compile builds it by hand
    "-inf": _additive,
    "triu": lambda n: torch.full((n, n), float("-inf")).triu(1),  # what papers' code does
    "lowest": lambda n: _additive(n, torch.finfo(torch.float32).min),  # older Hugging Face models
    "inverted": lambda n: (1.0 - _causal(n).float()) * torch.finfo(torch.float32).min,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
def test_a_causal_mask_is_dropped_for_is_causal(run_pass, mask, dynamic) -> None:
    # Sizes may be symbols from the second shape on.
    inputs = _qkv()
    got = run_pass(_attend(MASKS[mask]), rewrite_attention, *inputs, dynamic=dynamic)
    assert got.found == (1, 0, 0, 0)
    attention = next(node for node in got.graph.nodes if "attention" in str(node.target))
    assert attention.kwargs == {"is_causal": True} and len(attention.args) == 3
    torch.testing.assert_close(got.out, F.scaled_dot_product_attention(*inputs, is_causal=True))


@pytest.mark.parametrize(
    "mask",
    [
        _window(4),  # a sliding window cuts the triangle
        lambda n: torch.ones(1, 1, n, n, dtype=torch.bool),  # every token sees every other
        lambda n: _causal(n).logical_not().logical_or(torch.eye(n, dtype=torch.bool)),  # the upper triangle
        lambda n: _additive(n) + torch.arange(n)[None, None, None, :] * -0.5,  # ALiBi: a slope inside the triangle
        lambda n: torch.zeros(1, 1, n, n).masked_fill(~_causal(n), -1e4),  # a large score outweighs it
        lambda n: torch.zeros(1, 1, n, n).masked_fill(~_window(4)(n), float("-inf")),
        lambda n: _causal(n).float(),  # 1 is added to the lower triangle, and nothing is shut
    ],
    ids=["window", "full", "upper", "alibi", "weak", "additive window", "ones"],
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
def test_another_mask_stays(run_pass, mask, dynamic) -> None:
    inputs = _qkv()
    got = run_pass(_attend(mask), rewrite_attention, *inputs, dynamic=dynamic)
    assert got.found == (0, 0, 0, 0)
    assert_bitwise_equal(got.out, _attend(mask)(*inputs))


def test_a_window_longer_than_the_example_stays_where_the_size_is_open(run_pass) -> None:
    # At 12 tokens a window of 64 is a triangle; the same graph will run with 1000.
    inputs = _qkv()
    assert run_pass(_attend(_window(64)), rewrite_attention, *inputs, dynamic=True).found == (0, 0, 0, 0)
    torch._dynamo.reset()
    assert run_pass(_attend(_window(64)), rewrite_attention, *inputs, dynamic=False).found == (1, 0, 0, 0)


OPEN_ENDED = {
    "a float": lambda d, at: d < 16.0,
    "a product": lambda d, at: d * 0.05 < 1,
    "chunks": lambda d, at: (at >> 4)[:, None] == (at >> 4)[None],
    "random": lambda d, at: torch.rand(d.shape) < 2,
}


@pytest.mark.parametrize("ok", OPEN_ENDED)
def test_a_mask_that_is_causal_at_the_examples_size_alone_stays_where_the_size_is_open(run_pass, ok) -> None:
    def mask(size: int) -> Tensor:
        at = torch.arange(size)
        d = at[:, None] - at[None]
        return (d >= 0) & OPEN_ENDED[ok](d, at)

    assert run_pass(_attend(mask), rewrite_attention, *_qkv(), dynamic=True).found == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "mask",
    [
        lambda n: torch.ones(1, 1, dtype=torch.bool),  # one entry for all pairs: all open
        lambda n: torch.ones(n, 1, dtype=torch.bool),
        lambda n: torch.zeros(1, 1).triu(),
        lambda n: _causal(n) & (torch.rand(n, n) < 0.9),  # another one at the next call
        lambda n: _causal(n)[..., :, :].transpose(-1, -2),
        lambda n: (torch.arange(n)[None, :] <= torch.arange(n)[:, None] + 1)[None],  # one key too many
        lambda n: _causal(n).roll(1, -1),
    ],
    ids=["one entry", "a column", "one entry, upper", "random", "transposed", "shifted", "rolled"],
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
def test_what_is_nearly_causal_stays(run_pass, mask, dynamic) -> None:
    torch.manual_seed(0)
    inputs = _qkv()
    assert run_pass(_attend(mask), rewrite_attention, *inputs, dynamic=dynamic).found == (0, 0, 0, 0)


def _of_differences(d: Tensor) -> Tensor:
    return (d >= 0) & (d < 4)


WINDOWS = {
    "boolean": _window(4),
    "differences": lambda n: _of_differences(torch.arange(n)[:, None] - torch.arange(n)),
    "additive": lambda n: torch.zeros(1, 1, n, n).masked_fill(~_window(4)(n), float("-inf")),
    "tril and triu": lambda n: torch.ones(n, n, dtype=torch.bool).tril().triu(-3),
    "matrix": lambda n: _window(4)(n).flip(-1).flip(-1),  # known by its entries alone
}


@pytest.mark.parametrize("mask", WINDOWS)
def test_a_causal_window_goes_to_its_kernel(run_pass, monkeypatch, mask) -> None:
    # The kernel is a GPU's; the reference stands in for it here.
    monkeypatch.setattr("deepwell.engine.passes.attention.rewrite.why_not_flash", lambda *operands: "")
    inputs = _qkv(kv_heads=2)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=WINDOWS[mask](12), enable_gqa=True, scale=0.2)

    got = run_pass(attention, rewrite_attention, *inputs)
    assert got.found == (0, 0, 1, 0)
    assert "scaled_dot" not in str(got.graph) and got.graph.find_nodes(op="call_function", target=windowed_attention)
    torch.testing.assert_close(got.out, attention(*inputs))


def test_a_window_with_dropout_keeps_its_mask(run_pass, monkeypatch) -> None:
    monkeypatch.setattr("deepwell.engine.passes.attention.rewrite.why_not_flash", lambda *operands: "")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, _window(4)(12), 0.5)

    assert run_pass(attention, rewrite_attention, *_qkv()).found == (0, 0, 0, 0)


def test_a_padding_mask_from_outside_stays(run_pass) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=_causal(q.shape[2]) & keep[:, None, None, :])

    inputs = (*_qkv(), torch.ones(2, 12, dtype=torch.bool))
    assert run_pass(attention, rewrite_attention, *inputs).found == (0, 0, 0, 0)


def _written_afterwards(size: int) -> Tensor:
    mask = _causal(size)
    mask[..., 3] = False
    return mask


def _written_through_a_view(size: int) -> Tensor:
    mask = _causal(size)
    mask[0, 0].fill_diagonal_(True).logical_or_(torch.eye(size, dtype=torch.bool).flip(0))
    return mask


@pytest.mark.parametrize("mask", [_written_afterwards, _written_through_a_view])
def test_a_mask_that_is_written_into_stays(run_pass, mask) -> None:
    # The write is no edge of the graph; looking at edges alone, the mask is a triangle.
    inputs = _qkv()
    got = run_pass(_attend(mask), rewrite_attention, *inputs)
    assert got.found == (0, 0, 0, 0)
    assert_bitwise_equal(got.out, _attend(mask)(*inputs))


def _repeated(x: Tensor, times: int) -> Tensor:
    b, g, s, c = x.shape
    return x[:, :, None, :, :].expand(b, g, times, s, c).reshape(b, g * times, s, c)


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
def test_repeated_key_value_heads_are_kept_once(run_pass, dynamic) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, _repeated(k, 2), _repeated(v, 2), is_causal=True)

    inputs = _qkv(kv_heads=2)
    got = run_pass(attention, rewrite_attention, *inputs, dynamic=dynamic)
    assert got.found == (0, 1, 0, 0)
    assert "expand" not in got.names()
    torch.testing.assert_close(got.out, attention(*inputs))


def test_heads_repeated_in_another_order_or_on_one_side_stay(run_pass) -> None:
    # h0 h1 h0 h1 is not grouped-query attention's h0 h0 h1 h1.
    def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, g, s, c = k.shape
        k, v = (x[:, None].expand(b, 2, g, s, c).reshape(b, 2 * g, s, c) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    def key_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, _repeated(k, 2), torch.cat((v, v), dim=1))

    def swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, g, s, c = k.shape
        order = torch.tensor([1, 0])
        k, v = (x[:, order, None].expand(b, g, 2, s, c).reshape(b, 2 * g, s, c) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    inputs = _qkv(kv_heads=2)
    for function in (tiled, key_only, swapped):
        got = run_pass(function, rewrite_attention, *inputs)
        assert got.found == (0, 0, 0, 0)
        assert_bitwise_equal(got.out, function(*inputs))


def _written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
    scores = scores if mask is None else scores + mask
    return F.dropout(scores.softmax(dim=-1, dtype=torch.float32), 0.0).to(q.dtype) @ v


def _divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(_additive(q.shape[2]) + (q @ k.mT) / 3, -1) @ v


def _heads_repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _written(q, _repeated(k, 2), _repeated(v, 2), _additive(q.shape[2]))


@pytest.mark.parametrize(
    ("function", "kv_heads", "found"),
    [
        (_written, 4, (0, 0, 0, 1)),
        (_divided, 4, (1, 0, 0, 1)),
        (_heads_repeated, 2, (1, 1, 0, 1)),
        (lambda q, k, v: _written(q, k, v, torch.arange(12.0) * -0.5 + torch.zeros(12, 1)), 4, (0, 0, 0, 1)),  # ALiBi
    ],
    ids=["no mask", "divided", "repeated", "alibi"],
)
def test_attention_that_is_written_out_holds_no_scores(run_pass, function, kv_heads, found) -> None:
    inputs = _qkv(kv_heads=kv_heads)
    got = run_pass(function, rewrite_attention, *inputs)
    got.graph.eliminate_dead_code()
    assert got.found == found and "softmax" not in str(got.graph)
    torch.testing.assert_close(got.out, function(*inputs))


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: ((q @ k.mT).softmax(-2)) @ v,  # over queries
        lambda q, k, v: (p := (q @ k.mT).softmax(-1)) @ v + p.sum(),  # somebody reads the probabilities
        lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5) @ v,
        lambda q, k, v: (q @ k.mT).softmax(-1)[..., :-1] @ v[..., 1:, :],  # a key dropped, no sink
        lambda q, k, v: (q @ k).softmax(-1) @ v,  # no transposed operand
        lambda q, k, v: (3 / (q @ k.mT)).softmax(-1) @ v,
        lambda q, k, v: torch.add(q @ k.mT, _additive(12), alpha=0.5).softmax(-1) @ v,
        lambda q, k, v: (q @ k.mT).masked_fill(~_causal(12), -1.0).softmax(-1) @ v,
        lambda q, k, v: (q @ k.mT).relu().softmax(-1) @ v,
    ],
    ids=["queries", "read", "dropout", "dropped", "plain", "inverse", "alpha", "weak", "relu"],
)
def test_what_only_looks_like_attention_stays(run_pass, function) -> None:
    inputs = torch.randn(2, 4, 12, 12), torch.randn(2, 4, 12, 12), torch.randn(2, 4, 12, 12)
    torch.manual_seed(1)
    got = run_pass(function, rewrite_attention, *inputs)
    assert got.found == (0, 0, 0, 0)


def test_operands_written_before_the_last_product_stay(run_pass) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * 1
        probs = (q @ k.mT).softmax(-1)
        q.zero_()
        return probs @ v + q

    inputs = _qkv()
    got = run_pass(attention, rewrite_attention, *inputs)
    assert got.found == (0, 0, 0, 0)
    torch.testing.assert_close(got.out, attention(*inputs))


@pytest.mark.parametrize("window", [0, 5])
def test_attention_with_sinks_goes_to_its_kernel(run_pass, monkeypatch, window) -> None:
    # As Hugging Face writes GPT-OSS, all keys or a window; the reference stands in for the GPU's kernel.
    monkeypatch.setattr("deepwell.engine.passes.attention.written.why_not_flash", lambda *operands: "")

    def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        k, v = _repeated(k, 2), _repeated(v, 2)
        mask = torch.zeros(1, 1, 12, 12).masked_fill(~(_window(window) if window else _causal)(12), -torch.inf)
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.3 + mask
        column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        logits = torch.cat([scores, column], dim=-1)
        logits = logits - logits.max(dim=-1, keepdim=True).values
        return F.dropout(F.softmax(logits, dim=-1)[..., :-1], p=0.0) @ v

    inputs = (*_qkv(kv_heads=2), torch.randn(4))
    got = run_pass(attention, rewrite_attention, *inputs)
    got.graph.eliminate_dead_code()
    assert got.found == (0, 1, 0, 1) and "softmax" not in str(got.graph)
    torch.testing.assert_close(got.out, attention(*inputs))


# ---- RMSNorm ----


def _llama_norm(x: Tensor, w: Tensor) -> Tensor:
    h = x.to(torch.float32)
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _gemma_norm(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w.float())).type_as(x)


def _squared_norm(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return (w.float() * (h * torch.rsqrt(1e-6 + (h * h).mean(-1, keepdim=True)))).to(x.dtype)


def _torch_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (16,), w, 1e-6)


@pytest.mark.parametrize("norm", [_llama_norm, _gemma_norm, _squared_norm, _torch_norm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_is_found_in_every_spelling(run_pass, norm, dtype) -> None:
    x, w = torch.randn(3, 5, 16, dtype=dtype), torch.randn(16, dtype=dtype)
    got = run_pass(norm, rewrite_rms_norm, x, w)
    assert got.found == 1
    assert got.names()[-1] == "rms_norm"
    # The same roundings in the same places: at most the last bit of a sum in another order.
    torch.testing.assert_close(got.out, norm(x, w), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_without_eps_has_torchs_own(run_pass, dtype) -> None:
    # nn.RMSNorm(d) gives none. torch takes float32's also for bf16, 65536 times smaller: small rows tell them apart.
    x, w = (torch.randn(6, 32) * 1e-3).to(dtype), torch.randn(32).to(dtype)
    got = run_pass(lambda x, w: F.rms_norm(x, (32,), w), rewrite_rms_norm, x, w)
    assert got.found == 1
    torch.testing.assert_close(got.out, F.rms_norm(x, (32,), w))


def _norm_read_inside(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (x * r).to(x.dtype), r


def _norm_of_columns(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6)).to(x.dtype)


def _norm_of_cubes(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 9.0)).to(x.dtype)


def _norm_of_another(x: Tensor, w: Tensor) -> Tensor:
    return w * (x.cos() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _norm_without_weight(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (16,), None, 1e-6) + w


def _norm_with_alpha(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 0.5, alpha=2.0))).to(x.dtype)


@pytest.mark.parametrize(
    "norm",
    [
        _norm_read_inside, _norm_of_columns, _norm_of_cubes, _norm_of_another, _norm_without_weight, _norm_with_alpha,
    ],
)  # fmt: skip
def test_what_is_no_rms_norm_is_left_alone(run_pass, norm) -> None:
    x, w = torch.randn(3, 5, 16), torch.randn(16)
    got = run_pass(norm, rewrite_rms_norm, x, w)
    assert got.found == 0
    torch.testing.assert_close(got.out, norm(x, w))


def test_a_float64_norm_is_left_alone(run_pass) -> None:
    x, w = torch.randn(3, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    assert run_pass(_torch_norm, rewrite_rms_norm, x, w).found == 0


# ---- SwiGLU ----


@pytest.mark.parametrize("order", ["gate first", "up first"])
def test_swiglu_is_found_in_both_orders(run_pass, order) -> None:
    def function(g: Tensor, u: Tensor) -> Tensor:
        return F.silu(g) * u if order == "gate first" else u * F.silu(g)

    g, u = torch.randn(3, 5, 16), torch.randn(3, 5, 16)
    got = run_pass(function, rewrite_swiglu, g, u)
    assert got.found == 1
    torch.testing.assert_close(got.out, function(g, u))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_gated_gelu_is_found_too(run_pass, approximate) -> None:
    # Gemma's MLP.
    def function(g: Tensor, u: Tensor) -> Tensor:
        return F.gelu(g, approximate=approximate) * u

    g, u = torch.randn(3, 5, 16), torch.randn(3, 5, 16)
    got = run_pass(function, rewrite_swiglu, g, u)
    assert got.found == 1
    torch.testing.assert_close(got.out, function(g, u), rtol=1e-5, atol=1e-6)


def test_swiglu_of_two_halves_is_packed(run_pass) -> None:
    # Phi-3 and GLM make gate and up in one linear: no copy is needed to put them side by side.
    def function(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return up * F.silu(gate)

    x = torch.randn(3, 5, 32)
    got = run_pass(function, rewrite_swiglu, x)
    assert got.found == 1
    assert got.names() == ["swiglu_packed"]
    torch.testing.assert_close(got.out, function(x))


def test_halves_in_another_order_are_not_packed(run_pass) -> None:
    def function(x: Tensor) -> Tensor:
        up, gate = x.chunk(2, dim=-1)
        return up * F.silu(gate)

    x = torch.randn(3, 5, 32)
    got = run_pass(function, rewrite_swiglu, x)
    assert got.names()[-1] == "swiglu"
    torch.testing.assert_close(got.out, function(x))


def _silu_read_twice(g: Tensor, u: Tensor) -> Tensor:
    a = F.silu(g)
    return a * u + a


def _broadcast(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g) * u[:1]


def _times_number(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g) * 2.0 + u


def _into_up(g: Tensor, u: Tensor) -> Tensor:
    u = u + 0
    u *= F.silu(g)
    return u + 1


def _into_a_buffer(g: Tensor, u: Tensor) -> Tensor:
    buffer = torch.zeros_like(u)
    torch.mul(F.silu(g), u, out=buffer)
    return buffer


@pytest.mark.parametrize("function", [_silu_read_twice, _broadcast, _times_number, _into_up, _into_a_buffer])
def test_another_use_of_silu_is_left_alone(run_pass, function) -> None:
    g, u = torch.randn(3, 16), torch.randn(3, 16)
    got = run_pass(function, rewrite_swiglu, g, u)
    assert got.found == 0
    assert_bitwise_equal(got.out, function(g, u))


# ---- operands by name ----


def test_operands_given_by_name_are_found() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.Parameter(torch.ones(16)), nn.Parameter(torch.randn(16, 16))
            self.head = nn.Parameter(torch.randn(24, 16))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = F.rms_norm(input=x, normalized_shape=(16,), weight=self.norm, eps=1e-6)
            q = F.linear(input=x, weight=self.up)[:, None]
            x = F.scaled_dot_product_attention(query=q, key=q, value=q, attn_mask=_causal(q.shape[2]))[:, 0]
            x = torch.mul(input=F.silu(input=x), other=x)
            logits = F.linear(input=x, weight=self.head)
            return F.cross_entropy(input=logits.flatten(0, 1), target=y, ignore_index=-1)

    model, x, y = Named(), torch.randn(2, 5, 16), torch.randint(0, 24, (10,))
    options = BackendOptions(schemes={"up": FP8})
    compiled = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))
    torch.testing.assert_close(compiled(x, y), model(x, y), rtol=0.05, atol=0)
    fired = {name: count for name, count in options.counts.items() if count}
    expected = ("causal_mask", "cross_entropy", "rms_norm", "linear", "swiglu", "fused_quantize")
    assert fired == dict.fromkeys(expected, 1)


# ---- writes without readers ----


def test_what_is_written_in_place_survives_every_pass() -> None:
    # DeepSeek's router scatters into a mask, GPT-OSS adds biases in place: nobody reads what those calls return.
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept = torch.zeros_like(x)
            kept.scatter_(1, x.topk(2).indices, 1.0)
            kept[:, 0] = 2.0
            y = x * kept
            y.add_(1.0)
            y += 1.0
            return F.silu(y) * y

    options, x = BackendOptions(), torch.randn(5, 16)
    compiled = torch.compile(Writes(), backend=lambda graph, inputs: compile_graph(graph, inputs, options))
    torch.testing.assert_close(compiled(x), Writes()(x))
    assert options.counts["swiglu"] == 1


# ---- linears ----


def _sum_changed(x: Tensor, y: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    h = x + y
    h.mul_(2.0)
    return F.rms_norm(h, (32,), _W, 1.0), h


def _sum_masked(x: Tensor, y: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    h = x + y
    h[0] = 3.0
    return F.rms_norm(h, (32,), _W, 1.0), h


def _sum_changed_in_a_view(x: Tensor, y: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    h = x + y
    h.view(-1)[:40].zero_()
    return F.rms_norm(h, (32,), _W, 1.0), h


def _changed_inside_a_norm(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    x = x * 1
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    x.add_(1.0)
    return (_W * (x * r),)


def _changed_before_the_weight(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    x = x * 1
    n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    x.add_(1.0)
    return _W * n, x


def _changed_between_linears(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    x = x * 1
    q = F.linear(x, a)
    x.mul_(0.5)
    return q, F.linear(x, b)


def _gate_reused(x: Tensor, y: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    gate = x * 1
    act = F.silu(gate)
    gate.zero_()
    return act * y, gate


def _changed_inside_silu(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    x = x * 1
    s = torch.sigmoid(x)
    x.add_(3.0)
    return (x * s,)


def _hidden_changed_after_the_head(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    x = x * 1
    logits = F.linear(x, a)
    x.mul_(2.0)
    return F.cross_entropy(logits, torch.arange(6)), logits, x


_W = torch.randn(32)


@pytest.mark.parametrize(
    "function",
    [
        _sum_changed,
        _sum_masked,
        _sum_changed_in_a_view,
        _changed_inside_a_norm,
        _changed_before_the_weight,
        _changed_between_linears,
        _gate_reused,
        _changed_inside_silu,
        _hidden_changed_after_the_head,
    ],
)
@torch.no_grad()  # torch itself refuses the backward of most of them; evaluation it computes
def test_a_tensor_that_is_written_meanwhile_is_not_read_at_another_place(function) -> None:
    # A fused op stands where the last of its parts stood, or the first: what was written between them belongs to it.
    x, y, a, b = torch.randn(6, 32), torch.randn(6, 32), torch.randn(32, 32), torch.randn(32, 32)
    weights = {"a": a, "b": b}
    options = BackendOptions(schemes=dict.fromkeys(weights, "fp8_row|fp8_row|fp8_row"), parameters=weights.items)
    compiled = torch.compile(function, backend=lambda module, inputs: compile_graph(module, inputs, options))
    wanted = function(x.clone(), y.clone(), a, b)
    for got, ref in zip(compiled(x.clone(), y.clone(), a, b), wanted, strict=True):
        assert (got - ref).abs().max() <= 0.1 * ref.abs().max()  # FP8's rounding; a stale operand is far off


def _linears(schemes: dict[str, str], names: dict[str, tuple[str, ...]]) -> Callable[[Any], tuple[int, int]]:
    def rewrite(graph: Any) -> tuple[int, int]:
        placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
        weights = {name: names[key] for key in names for name in placeholders if name.strip("l_").startswith(key)}
        return rewrite_linears(graph, find_linears(graph, weights, schemes))

    return rewrite


SPELLINGS = {
    "linear": (lambda x, w, b: F.linear(x, w), (24, 16)),
    "bias": (lambda x, w, b: F.linear(x, w, bias=b), (24, 16)),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), (16, 24)),
    "matmul with T": (lambda x, w, b: x @ w.T, (24, 16)),
    "matmul with transpose": (lambda x, w, b: torch.matmul(x, w.transpose(0, 1)), (24, 16)),
    "matmul": (lambda x, w, b: x @ w, (16, 24)),
    "mm": (lambda x, w, b: torch.mm(x, mat2=w), (16, 24)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("scheme", [FP8, "emulate:mxfp8|emulate:mxfp8|emulate:mxfp8"], ids=["fp8", "mxfp8"])
def test_a_linear_is_found_in_every_spelling(run_pass, spelling, scheme) -> None:
    function, shape = SPELLINGS[spelling]
    x, w, b = torch.randn(32, 16), torch.randn(shape), torch.randn(24)
    got = run_pass(function, _linears({"fc": scheme}, {"w": ("fc.weight",)}), x, w, b)
    assert got.found == (1, 0)
    assert "low_precision_linear" in got.names()
    error = (got.out - function(x, w, b)).norm() / function(x, w, b).norm()
    assert 0 < error < 0.05  # quantized, and the right product


def test_linears_of_one_input_are_merged_with_their_biases(run_pass) -> None:
    def function(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, w1, b1), F.linear(x, w2, b2)

    inputs = (torch.randn(32, 16), torch.randn(24, 16), torch.randn(40, 16), torch.randn(24), torch.randn(40))
    rewrite = _linears({"q": FP8, "k": FP8}, {"w1": ("q.weight",), "w2": ("k.weight",)})
    got = run_pass(function, rewrite, *inputs)
    assert got.found == (2, 1)
    assert got.names().count("low_precision_linear") == 1
    for mine, theirs in zip(got.out, function(*inputs), strict=True):
        assert mine.shape == theirs.shape
        assert (mine - theirs).norm() / theirs.norm() < 0.05


@pytest.mark.parametrize("scheme", [FP8, "emulate:mxfp8|emulate:mxfp8|emulate:mxfp8"])
def test_a_linear_that_reads_a_linear_reads_the_one_in_its_place(run_pass, scheme) -> None:
    # LoRA's two factors; two of them from one input are merged, and what follows reads their parts.
    def function(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return F.linear(F.linear(x, a), b) + F.linear(F.linear(x, c), d)

    names = {name: (f"{name}.weight",) for name in "abcd"}
    inputs = [torch.randn(*shape) for shape in ((8, 32), (16, 32), (32, 16), (16, 32), (32, 16))]
    got = run_pass(function, _linears(dict.fromkeys("abcd", scheme), names), *inputs)
    assert got.found == (4, 1 if scheme == FP8 else 0)
    assert (got.out - function(*inputs)).norm() < 0.1 * function(*inputs).norm()


def test_emulated_linears_and_those_of_other_schemes_stay_apart(run_pass) -> None:
    # Two-level scales of a merged weight would not be those that each layer's format says.
    def function(x: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, w1), F.linear(x, w2)

    inputs = (torch.randn(32, 16), torch.randn(16, 16), torch.randn(32, 16))
    names = {"w1": ("q.weight",), "w2": ("k.weight",)}
    nvfp4 = "emulate:nvfp4|emulate:nvfp4|emulate:nvfp4"
    for schemes in ({"q": nvfp4, "k": nvfp4}, {"q": FP8, "k": "fp8_row|fp8_row|bf16"}):
        torch._dynamo.reset()
        assert run_pass(function, _linears(schemes, names), *inputs).found == (2, 0)


def test_a_linear_without_a_scheme_or_in_float64_stays(run_pass) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w)

    rewrite = _linears({"fc": FP8}, {"w": ("other.weight",)})
    x, w = torch.randn(8, 16), torch.randn(24, 16)
    assert run_pass(function, rewrite, x, w).found == (0, 0)
    torch._dynamo.reset()
    rewrite = _linears({"fc": FP8}, {"w": ("fc.weight",)})
    assert run_pass(function, rewrite, x.double(), w.double()).found == (0, 0)


def test_a_tied_weight_is_found_by_any_of_its_names(run_pass) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w)

    rewrite = _linears({"head": FP8}, {"w": ("embed.weight", "head.weight")})
    assert run_pass(function, rewrite, torch.randn(8, 16), torch.randn(24, 16)).found == (1, 0)


# ---- what comes before an FP8 linear ----


def _block(x: Tensor, w: Tensor, b: Tensor, fc: Tensor) -> Tensor:
    return F.linear(F.gelu(F.layer_norm(x, (16,), w, b)), fc)


@pytest.mark.parametrize(
    ("scheme", "dtype", "expected"),
    [
        (FP8, torch.bfloat16, (0, 1, 0)),  # the norm feeds the activation, not the linear
        ("emulate:mxfp8|emulate:mxfp8|emulate:mxfp8", torch.bfloat16, (0, 0, 0)),  # nothing to write FP8 rows for
        (None, torch.bfloat16, (0, 0, 0)),
        (FP8, torch.float64, (0, 0, 0)),
    ],
)
def test_an_activation_becomes_a_kernel_before_an_fp8_linear_only(run_pass, scheme, dtype, expected) -> None:
    def rewrite(graph: Any) -> tuple[int, int, int]:
        _linears({"fc": scheme} if scheme else {}, {"fc": ("fc.weight",)})(graph)
        return rewrite_before_linears(graph)

    inputs = [torch.randn(*shape, dtype=dtype) for shape in ((8, 16), (16,), (16,), (24, 16))]
    got = run_pass(_block, rewrite, *inputs)
    assert got.found == expected
    assert (got.out - _block(*inputs)).norm() < 0.06 * _block(*inputs).norm()


def test_a_layer_norm_becomes_a_kernel_before_an_fp8_linear(run_pass) -> None:
    def function(x: Tensor, w: Tensor, b: Tensor, fc: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x, (16,), w, b).view(-1, 16), fc)

    def rewrite(graph: Any) -> tuple[int, int, int]:
        _linears({"fc": FP8}, {"fc": ("fc.weight",)})(graph)
        return rewrite_before_linears(graph)

    inputs = [_bf16(2, 4, 16), _bf16(16), _bf16(16), _bf16(24, 16)]
    got = run_pass(function, rewrite, *inputs)
    assert got.found == (1, 0, 0)
    assert (got.out - function(*inputs)).norm() < 0.06 * function(*inputs).norm()


def _mlp(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, bias).view(-1, 48)), down)


def _mlp_relu(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, up, bias)), down)


def _mlp_tanh(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, bias), approximate="tanh"), down)


def _mlp_read_twice(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    hidden = F.linear(x, up, bias)
    return F.linear(F.gelu(hidden), down) + hidden.sum()


def _mlp_written_later(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    hidden = F.linear(x, up, bias)
    out = F.linear(F.relu(hidden), down)
    hidden.mul_(2)
    return out + hidden.sum()


@pytest.mark.parametrize(
    ("function", "scheme", "expected"),
    [
        (_mlp, FP8, (0, 1, 1)),
        (_mlp_relu, FP8, (0, 1, 1)),
        (_mlp_tanh, FP8, (0, 1, 1)),
        (_mlp_read_twice, FP8, (0, 1, 0)),  # somebody reads the sum with its bias
        (_mlp_written_later, FP8, (0, 0, 0)),  # relu keeps its result for the gradient, the kernel its input
        (_mlp, "bf16|fp8_row|fp8_row", (0, 1, 0)),  # the product itself is torch's, which adds the bias at no cost
    ],
)
def test_an_activation_takes_the_bias_of_the_linear_before_it(run_pass, function, scheme, expected) -> None:
    def rewrite(graph: Any) -> tuple[int, int, int]:
        _linears({"up": scheme, "down": FP8}, {"up": ("up.weight",), "down": ("down.weight",)})(graph)
        return rewrite_before_linears(graph)

    inputs = [t.requires_grad_() for t in (_bf16(2, 4, 16), _bf16(48, 16), _bf16(48), _bf16(16, 48))]
    got = run_pass(function, rewrite, *inputs)
    assert got.found == expected
    ref = function(*inputs)
    assert (got.out - ref).norm() < 0.08 * ref.norm()
    (grad,), (wanted,) = (torch.autograd.grad(out.square().sum(), inputs[:1]) for out in (got.out, ref))
    assert sqnr_db(wanted, grad) > 15


def _bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


# ---- quantization fused into its producer ----

ops = torch.ops.deepwell


def _normed_and_quantized(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y, rstd = ops.rms_norm(x, w, 1e-6, "llama")
    return (*ops.quantize_rows(y), rstd)


def _normed_and_quantized_twice(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y, rstd = ops.rms_norm(x, w, 1e-6, "llama")
    return (*ops.quantize_rows(y), *ops.quantize_rows(y.view(2, 4, 16).view(8, 16)), rstd)


def _normed_and_read(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y, _ = ops.rms_norm(x, w, 1e-6, "llama")
    return (*ops.quantize_rows(y), y)


def _gated(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return ops.quantize_rows(ops.swiglu(x, "silu"))


def _layer_normed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y, mean, rstd = ops.layer_norm(x, w, None, 1e-5)
    return (*ops.quantize_rows(y), mean, rstd)


def _activated(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (*ops.quantize_rows(ops.activation(x, "gelu")), *ops.quantize_rows(ops.activation_backward(x, x, "gelu")))


def _biased(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    dx, db = ops.bias_activation_backward(x, x, w, "gelu")
    return (*ops.quantize_rows(ops.bias_activation(x, w, "gelu")), *ops.quantize_rows(dx), db)


def _added_and_normed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y, total, rstd = ops.add_rms_norm(x, x, w, 1e-6, "llama")
    z, second, mean, _ = ops.add_layer_norm(x, total, w, w, 1e-5)
    return (*ops.quantize_rows(y), total, rstd, *ops.quantize_rows(z), second, mean)


def _gated_backward(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return ops.quantize_rows(ops.swiglu_backward(x[:, :8].contiguous(), x, "silu"))


def _norm_gradients(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    # As in a layer: the gradient of the stream goes on to the norm before, and as rows into the linear between them.
    rstd = x.float().square().mean(1)
    dx, dw = ops.rms_norm_backward(x, 2 * x, w, rstd, "llama", x)
    rows = ops.quantize_rows(dx.view(2, 4, 16).view(8, 16))
    d_first, dw_first, db_first = ops.layer_norm_backward(x, x, w, rstd, rstd, dx)
    return (*rows, dw, d_first, *ops.quantize_rows(d_first), dw_first, db_first)


def _norm_gradients_read_once(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    # A norm behind a linear (OLMo 2): nobody but the linear reads its gradient.
    rstd = x.float().square().mean(1)
    dx, dw = ops.rms_norm_backward(x, 2 * x, w, rstd, "torch")
    d_other, dw_other, db = ops.layer_norm_backward(x, x, w, rstd, rstd)
    return (*ops.quantize_rows(dx), dw, *ops.quantize_rows(d_other), dw_other, db)


@pytest.mark.parametrize(
    ("function", "fused", "left"),
    [
        (_norm_gradients, 2, 0),
        (_norm_gradients_read_once, 2, 0),
        (_normed_and_quantized, 1, 0),
        (_normed_and_quantized_twice, 1, 0),  # one quantization serves both
        (_normed_and_read, 0, 1),  # somebody wants the high-precision value as well
        (_gated, 1, 0),
        (_gated_backward, 1, 0),
        (_layer_normed, 1, 0),
        (_activated, 2, 0),
        (_biased, 2, 0),
        (_added_and_normed, 2, 0),
    ],
)
def test_a_quantization_goes_into_its_producer_unless_others_read_it(function, fused, left) -> None:
    x, w = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(16, dtype=torch.bfloat16)
    graph_module = make_fx(function, tracing_mode="fake")(x, w)
    assert fuse_quantize(graph_module.graph) == fused
    graph_module.graph.lint()
    graph_module.recompile()
    targets = [node.target for node in graph_module.graph.nodes]
    assert targets.count(ops.quantize_rows.default) == left
    for got, ref in zip(graph_module(x, w), function(x, w), strict=True):
        assert_bitwise_equal(got, ref)


# ---- values recomputed in the backward ----


def test_hidden_rows_are_made_again_where_their_gradient_is() -> None:
    def backward(dy: Tensor, gate_up: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        # As a compiler orders it: what the wgrad reads comes before the dgrad that h's gradient waits for.
        q_h, s_h = ops.swiglu_quantize(gate_up.view(8, 32), "silu")
        transposed = ops.wgrad_operands(*ops.quantize_rows(dy), q_h, s_h)
        dh = dy @ w
        q, s = ops.swiglu_backward_quantize(dh, gate_up, "silu")
        other = ops.swiglu_quantize(gate_up * 2, "silu")  # of other values: stays
        return (*transposed, q, s, *other)

    dy, gate_up, w = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((8, 24), (8, 32), (24, 16)))
    graph_module = make_fx(backward, tracing_mode="fake")(dy, gate_up, w)
    assert fuse_recomputed_rows(graph_module.graph) == 1
    graph_module.graph.lint()
    graph_module.recompile()
    targets = [node.target for node in graph_module.graph.nodes]
    assert targets.count(ops.swiglu_quantize.default) == 1
    assert targets.count(ops.swiglu_backward_quantize.default) == 0
    for got, ref in zip(graph_module(dy, gate_up, w), backward(dy, gate_up, w), strict=True):
        assert_bitwise_equal(got, ref)


def test_hidden_rows_that_their_gradient_waits_for_stay_apart() -> None:
    # A layer that is computed again as a whole makes its output from h, and the gradient comes through that output.
    def backward(dy: Tensor, gate_up: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q_h, s_h = ops.swiglu_quantize(gate_up, "silu")
        y = ops.fp8_gemm(q_h, s_h, *ops.quantize_rows(w), True)
        return ops.swiglu_backward_quantize((dy * y) @ w, gate_up, "silu")

    dy, gate_up, w = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((8, 24), (8, 32), (24, 16)))
    graph_module = make_fx(backward, tracing_mode="fake")(dy, gate_up, w)
    assert fuse_recomputed_rows(graph_module.graph) == 0
    graph_module.graph.lint()


@pytest.mark.usefixtures("cxx_compiler")
def test_a_checkpointed_model_compiles_in_fp8_with_inductor(batch) -> None:
    # Checkpointing marks what is recomputed, and so do we: two marks on one value left the partitioner without a way.
    model = zoo_models.tiny_model("llama", num_hidden_layers=1).bfloat16().train()
    model.config.use_cache = False
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    gradients = []
    for is_checkpointed in (False, True):
        torch._dynamo.reset()
        if is_checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        options = BackendOptions(schemes=dict.fromkeys(linears, FP8), use_inductor=is_checkpointed)
        compiled = torch.compile(model, backend=lambda graph, inputs, o=options: compile_graph(graph, inputs, o))
        compiled(**batch).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad(set_to_none=True)
    assert options.counts["linear"] == 7
    for again, once in zip(*reversed(gradients), strict=True):
        assert sqnr_db(once, again) > 30  # bf16: Inductor rounds what it fuses less often


@pytest.mark.usefixtures("cxx_compiler")
def test_fp8_copies_are_made_again_instead_of_kept(batch) -> None:
    # Inductor's partitioner reads the marks; the numbers must not change, the bytes that are kept must.
    model = zoo_models.tiny_model("llama", num_hidden_layers=1).bfloat16()
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    kept_bytes, all_bytes, gradients = [], [], []
    for recompute in ("nothing", "hidden", "copies"):
        torch._dynamo.reset()
        options = BackendOptions(schemes=dict.fromkeys(linears, FP8), use_inductor=True, recompute=recompute)
        compiled = torch.compile(model, backend=lambda graph, inputs, o=options: compile_graph(graph, inputs, o))
        kept: list[Tensor] = []

        def keep(tensor: Tensor, into: list[Tensor] = kept) -> Tensor:
            into.append(tensor)
            return tensor

        # What a cache gives back is not rewritten, nor counted.
        with torch._inductor.config.patch(force_disable_caches=True):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = compiled(**batch).loss
            loss.backward()
        kept_bytes.append(sum(t.nbytes for t in kept if t.dtype is torch.float8_e4m3fn and 74 in t.shape))
        all_bytes.append(sum(t.nbytes for t in kept))
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad(set_to_none=True)
        if recompute != "nothing":
            assert options.counts["recomputed"] > 0
            assert options.counts["fused_recompute"] == 1  # one layer, one MLP
    # Of the 74 tokens' FP8 copies, rows or columns: inputs of q, k, v, of o, of gate and up; hidden values.
    width, hidden = model.config.hidden_size, model.config.intermediate_size
    assert kept_bytes == [74 * (3 * width + hidden), 74 * 3 * width, 0]
    for i in (0, 1):  # and nothing is kept in their place
        assert all_bytes[i] - all_bytes[i + 1] >= kept_bytes[i] - kept_bytes[i + 1]
    for other in gradients[1:]:
        for again, once in zip(other, gradients[0], strict=True):
            assert_bitwise_equal(again, once)


# ---- Hugging Face architectures ----


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", {"causal_mask": 2, "kv_heads": 2, "cross_entropy": 1, "rms_norm": 5, "linear": 14, "swiglu": 2}),
        ("qwen3", {"causal_mask": 2, "kv_heads": 2, "cross_entropy": 1, "rms_norm": 9, "linear": 14, "swiglu": 2}),
        ("qwen2", {"causal_mask": 2, "kv_heads": 2, "cross_entropy": 1, "rms_norm": 5, "linear": 14, "swiglu": 2}),
        ("olmo2", {"causal_mask": 2, "kv_heads": 2, "cross_entropy": 1, "rms_norm": 9, "linear": 14, "swiglu": 2}),
        ("phi3", {"causal_mask": 2, "kv_heads": 2, "cross_entropy": 1, "rms_norm": 5, "linear": 8, "swiglu": 2}),
    ],
)
def test_every_pass_fires_on_published_architectures(model_type, expected, batch) -> None:
    # Two layers each, all linears but the head in FP8: what a Hopper GPU is given, run by the references.
    overrides = {"num_key_value_heads": 2} | ({"sliding_window": None} if model_type == "phi3" else {})
    model = zoo_models.tiny_model(model_type, **overrides).bfloat16()
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    options = BackendOptions(schemes=dict.fromkeys(linears, FP8))
    compiled = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))
    eager = model(**batch).loss
    loss = compiled(**batch).loss
    loss.backward()
    assert {name: options.counts[name] for name in expected} == expected
    # q, k, v and gate, up; Phi-3's are merged by the model itself.
    assert options.counts["merged_linear"] == (0 if model_type == "phi3" else 4)
    # In the forward the norms before the linears and SwiGLU, in the backward SwiGLU's gradient; OLMo 2 norms after.
    assert options.counts["fused_quantize"] >= (4 if model_type == "olmo2" else 7)
    assert options.rewritten == set(linears)
    assert abs(loss.item() - eager.item()) < 0.01 * eager.item()


@pytest.mark.parametrize("model_type", ["gpt_neox", "starcoder2", "gpt_bigcode"])
def test_layer_norm_and_gelu_models_are_fused_with_their_quantization(model_type, batch) -> None:
    model = zoo_models.tiny_model(model_type).bfloat16().eval()
    linears = [
        n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "head" not in n and "embed_out" not in n
    ]
    options = BackendOptions(schemes=dict.fromkeys(linears, FP8))
    compiled = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))
    eager, loss = model(**batch).loss, compiled(**batch).loss
    loss.backward()
    assert options.counts["layer_norm"] == 4 and options.counts["activation"] == 2
    # Four norms and two activations of the forward; the activations' gradients, which sum the biases' along.
    assert options.counts["bias_activation"] == 2 and options.counts["fused_quantize"] >= 8
    assert abs(loss.item() - eager.item()) < 0.01 * eager.item()


@pytest.mark.parametrize("model_type", ["gemma", "gemma2", "gemma3_text"])
def test_gated_gelu_models_fire_the_gated_pass(model_type, batch) -> None:
    model = zoo_models.tiny_model(model_type).bfloat16().eval()
    options = BackendOptions()
    loss = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))(**batch).loss
    assert options.counts["swiglu"] == model.config.num_hidden_layers
    assert abs(loss.item() - model(**batch).loss.item()) < 2**-8 * loss.item()


@pytest.mark.usefixtures("cxx_compiler")
def test_inductor_knows_every_op_beforehand() -> None:
    # Met unknown, an op is printed by torch 2.11 with all that leads to it, which takes hours for a deep model.
    from torch._inductor import lowering

    from deepwell.engine.inductor_ops import register_ops

    register_ops()
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("deepwell::")]
    assert len(names) > 20
    for name in names:
        assert getattr(ops, name.removeprefix("deepwell::")).default in lowering.lowerings, name
