"""Tensors that a model writes into in the middle of a pattern: passes see that they are no longer what was computed.

All levels of passes run, with FP8 linears and experts; outputs and gradients are eager's within FP8's precision.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepwell.engine.backend import BackendOptions, compile_graph
from deepwell.formats.metrics import sqnr_db

FP8 = "|".join(["fp8_row"] * 3)
GROUPED = "|".join(["grouped_fp8"] * 3)
Edit = Callable[[str, Tensor], None]


def nothing(place: str, tensor: Tensor) -> None:
    pass


def at(wanted: str) -> Edit:
    """Grow a tensor by half where the model is at one place."""

    def edit(place: str, tensor: Tensor) -> None:
        if place == wanted:
            tensor.mul_(1.5)

    return edit


def halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class Block(nn.Module):
    """A layer of Qwen3's kind. `edit` may write at each place."""

    schemes = dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), FP8)
    size = (2, 8, 32)

    def __init__(self) -> None:
        super().__init__()
        self.edit: Edit = nothing
        for name, size in {"n1": 32, "n2": 32, "qn": 16, "kn": 16}.items():
            setattr(self, name, nn.Parameter(torch.rand(size) + 0.5))
        widths = {"q": (32, 64), "k": (32, 32), "v": (32, 32), "o": (64, 32), "gate": (32, 48), "up": (32, 48)}
        for name, (k, n) in (widths | {"down": (48, 32)}).items():
            setattr(self, name, nn.Linear(k, n, bias=False))

    def norm(self, x: Tensor, weight: Tensor, place: str = "") -> Tensor:
        x32 = x.float()
        mean = x32.pow(2).mean(-1, keepdim=True)
        self.edit(f"{place} mean", mean)
        shifted = mean + 1e-6
        self.edit(f"{place} shifted", shifted)
        normed = x32 * torch.rsqrt(shifted)
        self.edit(f"{place} weight", weight.detach())
        return weight * normed.to(x.dtype)

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor, place: str = "") -> Tensor:
        self.edit(f"{place} normed", x)
        straight = x * cos
        self.edit(f"{place} straight", straight)
        return straight + halves(x) * sin

    def forward(self, x: Tensor) -> Tensor:
        edit, x = self.edit, x * 1
        angle = torch.arange(8.0)[:, None] * torch.arange(16)
        cos, sin = angle.cos()[None, None], angle.sin()[None, None]
        h = self.norm(x, self.n1, "first")
        q = self.q(h)
        edit("q", q)
        q, k, v = (y.view(2, 8, -1, 16) for y in (q, self.k(h), self.v(h)))
        q, k = self.norm(q, self.qn).transpose(1, 2), self.norm(k, self.kn).transpose(1, 2)
        edit("tables", sin)
        q, k, v = self.rotated(q, cos, sin, "q"), self.rotated(k, cos, sin), v.transpose(1, 2)
        grown = k[:, :, None]
        many, values = (y.expand(2, 2, 2, 8, 16).reshape(2, 4, 8, 16) for y in (grown, v[:, :, None]))
        edit("k that was repeated", grown)
        attended = F.scaled_dot_product_attention(q, many, values, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(2, 8, 64))
        h = self.norm(x, self.n2, "second")
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Experts(nn.Module):
    """Hugging Face's grouped experts, written out."""

    schemes = dict.fromkeys(("gate_up", "low"), GROUPED)
    size = (24, 32)

    def __init__(self) -> None:
        super().__init__()
        self.edit: Edit = nothing
        self.none, self.first = 4, 0  # rows of which experts are masked, where the order is counted from
        self.gate_up = nn.Parameter(torch.randn(4, 64, 32) / 5)
        self.low = nn.Parameter(torch.randn(4, 32, 32) / 5)
        self.router = nn.Parameter(torch.randn(4, 32))
        self.bfloat16()  # torch has no other grouped product in a graph

    def forward(self, x: Tensor) -> Tensor:
        edit, x = self.edit, x * 1
        weight, index = torch.topk(F.linear(x.detach(), self.router).softmax(-1), 2, dim=-1)
        weight, index = weight.reshape(-1), index.reshape(-1)
        experts, order = torch.sort(index)
        rows, weights = x[order // 2], weight[order]
        ends = torch.cumsum(torch.histc(experts.float(), bins=4, min=0, max=3), 0, dtype=torch.int32)
        masked = (experts >= self.none).unsqueeze(-1)
        rows.masked_fill_(masked, 0.0)
        edit("rows", rows)
        edit("weights", weights)
        h = torch._grouped_mm(rows, self.gate_up.transpose(-2, -1), offs=ends)
        edit("hidden", h)
        gate, up = h.masked_fill(masked, 0.0).chunk(2, -1)
        h = torch._grouped_mm(F.silu(gate) * up, self.low.transpose(-2, -1), offs=ends)
        edit("router", weight.detach())
        y = h.masked_fill(masked, 0.0) * weights.unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.size(0)) if not self.first else torch.arange(order.size(0) - 1, -1, -1)
        return y[inverse].view(24, 2, 32).sum(1)


def step(call: Callable[..., Tensor], model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output and all gradients."""
    model.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    out = call(leaf)
    (out * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).sum().backward()
    return {"out": out.detach(), "x": leaf.grad, **{name: p.grad for name, p in model.named_parameters()}}  # type: ignore[dict-item]


def compare(model: Any) -> dict[str, int]:
    """Assert that the compiled model computes what it says. Returns what passes counted."""
    x = torch.randn(model.size).to(next(model.parameters()).dtype)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = step(model, model, x)
    model.load_state_dict(start)
    options = BackendOptions(schemes=model.schemes, parameters=model.named_parameters)
    compiled = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))
    got = step(compiled, model, x)
    for name, value in wanted.items():
        assert sqnr_db(value.float(), got[name].float()) > 15, name
    return options.counts


def test_without_a_write_all_of_them_are_joined() -> None:
    counts = compare(Block())
    assert counts["qk_norm_rope"] == counts["residual_norm"] == counts["kv_heads"] == 1
    assert counts["merged_linear"] == 2 and counts["rms_norm"] == 4
    assert compare(Experts())["fused_experts"] == 1


@pytest.mark.parametrize(
    "place",
    [
        "first mean", "second shifted", "second weight", "q", "q normed", "q straight", "tables",
        "k that was repeated",
    ],
)  # fmt: skip
def test_a_block_is_computed_in_the_order_of_its_writes(place) -> None:
    model = Block()
    model.edit = at(place)
    compare(model)


@pytest.mark.parametrize("place", ["rows", "weights", "hidden", "router"])
def test_experts_are_computed_in_the_order_of_their_writes(place) -> None:
    model = Experts()
    model.edit = at(place)
    compare(model)


# Rows that are put back otherwise are multiplied and gated alike: that much is one op.
@pytest.mark.parametrize(("change", "fused"), [({"none": 2}, 0), ({"first": 1}, 1)], ids=str)
def test_experts_that_are_masked_or_put_back_otherwise_are_no_such_block(change, fused) -> None:
    model = Experts()
    vars(model).update(change)
    assert compare(model)["fused_experts"] == fused
