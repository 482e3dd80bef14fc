"""What tensor parallelism splits, and what it refuses, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import make_model
from torch import Tensor, nn

import deepwell as dw
from deepwell.bench import llama
from deepwell.errors import UnsupportedError
from deepwell.train.parallel.tensor import check_local, find_split, notes_on_blocks

LAYER = "model.layers.0"


def test_roles_come_from_the_ir() -> None:
    model = make_model("biased")
    split = find_split(dw.capture(model), model, 2)
    first = {name: dim for name, dim in split.shards.items() if name.startswith(LAYER)}
    columns = [f"self_attn.{p}_proj" for p in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    rows = ["self_attn.o_proj", "mlp.down_proj"]
    expected = {f"{LAYER}.{path}.{key}": 0 for path in columns for key in ("weight", "bias")}
    assert first == expected | {f"{LAYER}.{path}.weight": 1 for path in rows}
    assert split.norms[:2] == [f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm"]
    assert split.rows[:2] == [f"{LAYER}.{path}" for path in rows]
    assert set(split.row_biases) < set(split.copies)
    assert set(split.shards) | set(split.copies) == {n for n, _ in model.named_parameters() if ".layers." in n}
    with pytest.raises(
        UnsupportedError, match=r"tp 3 does not divide model\.layers\.0\.self_attn\.attention's 4 heads"
    ):
        find_split(dw.capture(model), model, 3)


def test_experts_stay_whole_and_the_mlp_beside_them_gathers_its_tokens() -> None:
    model = make_model("shared")
    split = find_split(dw.capture(model), model, 2)
    shared = f"{LAYER}.mlp.shared_expert"
    assert split.norms == [f"model.layers.{i}.input_layernorm" for i in range(2)]
    assert split.mlps[0] == shared and f"{shared}.down_proj" in split.rows
    assert {f"{LAYER}.mlp.gate.weight", f"{LAYER}.mlp.shared_expert_gate.weight"} < set(split.copies)
    known = set(split.shards) | set(split.copies)
    assert {n for n, _ in model.named_parameters() if ".layers." in n and ".experts." not in n} == known
    dense = make_model("glm")  # its first layer has no experts
    split = find_split(dw.capture(dense), dense, 2)
    assert split.norms[:2] == [f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm"]
    assert split.mlps == ["model.layers.1.mlp.shared_experts"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("phi3", r"model\.layers\.0\.self_attn\.qkv_proj holds qkv in one"),
        ("gpt2", r"transformer\.h\.0\.attn\.c_attn holds qkv in one"),
    ],
)
def test_models_that_cannot_be_split_are_refused_by_name(name: str, message: str) -> None:
    model = make_model(name)
    with pytest.raises(UnsupportedError, match=message):
        find_split(dw.capture(model), model, 2)


class NamedHeads(llama.LlamaAttention):
    """Attention that reshapes by its number of heads: half of the columns would make heads of half the width."""

    def forward(self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
        B, S, _ = x_BSD.shape
        heads = self.config.num_heads
        q, k, v = (p(x_BSD).view(B, S, heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(B, S, -1))


def test_a_model_that_names_its_heads_is_found_out() -> None:
    model: Any = make_model("plain")
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    engine = dw.compile(model, precision="mxfp8")
    split = find_split(engine.ir, model, 2)
    check_local(engine, split, 2)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert notes_on_blocks(engine, split, 2) == []
    (note,) = notes_on_blocks(engine, find_split(engine.ir, model, 4), 4)
    assert "layers.0.attention.q_proj" in note
    for layer in model.layers:
        layer.attention.__class__ = NamedHeads
    named = dw.compile(model, precision="bf16")
    with pytest.raises(UnsupportedError, match=r"would have 4 heads of 8 on a rank, not 2 of 16"):
        check_local(named, find_split(named.ir, model, 2), 2)


class ByItself(llama.LlamaLayer):
    """A layer whose linears read what no norm made."""

    def forward(self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention_norm(self.attention(x_BSD, cos_SC, sin_SC))
        return x_BSD + self.mlp_norm(self.mlp(x_BSD))


class Scaled(llama.LlamaLayer):
    """A layer with a parameter that no linear and no norm has."""

    gain: nn.Parameter

    def forward(self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
        return super().forward(x_BSD, cos_SC, sin_SC) * self.gain


def _as_scaled(layer: Any) -> None:
    layer.gain = nn.Parameter(torch.ones(()))
    layer.__class__ = Scaled


def _by_itself(layer: Any) -> None:
    layer.__class__ = ByItself


@pytest.mark.parametrize(
    ("change", "message"),
    [(_by_itself, r"layers\.0\.attention\.q_proj does not read a norm's output"), (_as_scaled, r"layers\.0\.gain")],
)
def test_layers_of_another_kind_are_refused(change: Callable[[Any], None], message: str) -> None:
    model: Any = make_model("plain")
    for layer in model.layers:
        change(layer)
    with pytest.raises(UnsupportedError, match=message):
        find_split(dw.capture(model), model, 2)
