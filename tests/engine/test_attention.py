"""Attention beyond plain causal in graphs: what goes to which kernel, and near misses that stay as they are."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.engine.passes.attention import narrow_values
from deepwell.engine.passes.attention.rewrite import rewrite_attention

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

    monkeypatch.setattr(narrow_values, "_is_measured", lambda *operands: True)
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
    monkeypatch.setattr(narrow_values, "_is_measured", lambda *operands: True)
    monkeypatch.setattr(narrow_values, "fastest_way", lambda *given: "sdpa")
    assert run_pass(attention, narrow_values.rewrite_narrow_values, *_mla()).found == 0


@pytest.mark.parametrize(
    ("dtype", "width", "is_measured"),
    [(torch.bfloat16, 16, True), (torch.float32, 16, False), (torch.bfloat16, "open", False)],
)
def test_only_what_can_be_timed_is_measured(dtype, width, is_measured) -> None:
    tensor = SimpleNamespace(is_cuda=True, dtype=dtype, shape=(2, 4, 12, width))
    assert narrow_values._is_measured(tensor, tensor, tensor) is is_measured
