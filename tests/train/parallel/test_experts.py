"""Expert parallelism without processes: which modules hold experts, and what is refused."""

from __future__ import annotations

import pytest
from cases import make_model

import deepwell as dw
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.train.parallel.experts import find_experts


def test_experts_are_found_by_what_they_are() -> None:
    model = make_model("moe")
    ir = dw.capture(model)
    assert find_experts(ir, model) == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    model.model.layers._modules.pop("0")  # a stage has some of the layers
    assert find_experts(ir, model) == ("model.layers.1.mlp.experts",)
    model.model.layers._modules.pop("1")
    assert find_experts(ir, model) == ()


def test_models_without_experts_of_the_interface_are_refused() -> None:
    model = make_model("llama")
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
        find_experts(dw.capture(model), model)
    model = make_model("moe")
    ir = dw.capture(model)
    for layer in model.model.layers:
        del layer.mlp.experts.has_gate
    with pytest.raises(UnsupportedError, match=r"Qwen3MoeExperts at model\.layers\.0.* not of Hugging Face's experts"):
        find_experts(ir, model)
