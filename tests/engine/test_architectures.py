"""Published architectures become engines and train a step: biases, Conv1D, LayerNorm, GELU, tied heads, experts.

bf16 weights, as models are trained. Under the bf16 policy the loss is eager's within bf16's precision; under mxfp8
within 0.2%, which random tiny models keep by a factor of five (the largest seen: 0.04%, OPT and GLM-4).
"""

import pytest
import torch
import zoo_models
from torch import nn

import deepwell as dw

transformers = pytest.importorskip("transformers")

MXFP8_BOUND = 2e-3
# Linears that leave bf16; head and routers never do, experts are counted apart (test_experts.py). Layers that are alike
# are compiled once: what one leaves to the next test_coverage.py sees, in two.
ONE_LAYER = {
    "llama": 7, "olmo2": 7, "granite": 7, "gemma": 7, "phi3": 4, "gpt2": 4, "bloom": 4, "falcon": 4, "starcoder2": 6,
    "nemotron": 6, "cohere": 7, "mixtral": 4,
}  # fmt: skip
# Low-rank ones stay: DeepSeek's kv_b, of rank 16 in so small a model, and gates of one column.
TWO_LAYERS = {"gemma2": 14, "gpt_oss": 8, "deepseek_v3": 14, "qwen3_next": 12}
# The first six train in test_coverage.py too.
SLOW = {
    "qwen2": 14, "qwen3": 14, "phi": 12, "gpt_neox": 8, "gptj": 12, "opt": 12,
    "mistral": 14, "olmo": 14, "stablelm": 14, "gpt_bigcode": 8, "qwen3_moe": 8, "gemma3_text": 14, "smollm3": 14,
    "glm4": 12, "helium": 14, "olmoe": 8, "mpt": 8, "persimmon": 8, "codegen": 8, "gpt_neo": 12, "exaone4": 14,
    "ministral": 14,
}  # fmt: skip


def _without_dropout(model: nn.Module) -> nn.Module:
    """In training mode, two runs of which are alike."""
    for module in model.modules():
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def without_gradient(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}


def _step(engine: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """(loss before, loss after) one step of gradient descent."""
    loss = engine(**batch).loss
    loss.backward()
    with torch.no_grad():
        for p in engine.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.05)
        after = engine.deepwell.model(**batch).loss
    return loss.item(), after.item()


@pytest.mark.parametrize(
    "model_type", [*ONE_LAYER, *TWO_LAYERS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_an_architecture_compiles_and_trains_a_step(model_type, batch) -> None:
    layers = {"num_hidden_layers": 1} if model_type in ONE_LAYER else {}
    model = _without_dropout(zoo_models.tiny_model(model_type, **layers).bfloat16())
    start = {name: value.clone() for name, value in model.state_dict().items()}
    reference = model(**batch).loss
    reference.backward()
    eager, eager_without = reference.item(), without_gradient(model)
    ir = dw.capture(model)
    losses, reports = {}, {}
    for precision in ("bf16", "mxfp8"):
        model.load_state_dict(start)
        model.zero_grad(set_to_none=True)
        engine = dw.compile(ir, precision=precision)
        losses[precision] = _step(engine, batch)
        reports[precision] = engine.report()
    assert abs(losses["bf16"][0] - eager) <= 2**-8 * eager
    assert abs(losses["mxfp8"][0] - eager) <= MXFP8_BOUND * eager
    assert losses["mxfp8"][0] != losses["bf16"][0]  # something was quantized
    assert all(after < before for before, after in losses.values())
    assert without_gradient(model) == eager_without
    assert reports["mxfp8"].passes["linear"] >= (ONE_LAYER | TWO_LAYERS | SLOW)[model_type]
    assert not any("not met" in note for note in reports["mxfp8"].notes)
