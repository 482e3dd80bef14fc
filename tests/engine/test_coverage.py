"""Every pass fires on at least three published architectures, counted as the report counts; a pass that does not fails.

All linears but the head in FP8, which is what a Hopper GPU is given, run by the references on a CPU. Two layers each.
"""

import logging
from collections.abc import Iterator
from functools import cache

import pytest
import torch
import zoo_models
from torch import nn

from deepwell.engine.backend import BackendOptions, compile_graph

transformers = pytest.importorskip("transformers")

FP8 = "fp8_row|fp8_row|fp8_row"
KV = {"num_key_value_heads": 2}
EAGER = {"attn_implementation": "eager"}
# How often each pass fires, at the least; what is not named need not.
EXPECTED: dict[str, tuple[dict[str, object], dict[str, int]]] = {
    "llama": (KV, {
        "causal_mask": 2, "kv_heads": 2, "cross_entropy": 1, "embedding": 1, "rms_norm": 5, "residual_norm": 4,
        "linear": 14, "merged_linear": 4, "rope": 4, "swiglu": 2, "fused_quantize": 8,
    }),
    "qwen3": (KV, {
        "causal_mask": 2, "kv_heads": 2, "cross_entropy": 1, "embedding": 1, "rms_norm": 9, "residual_norm": 4,
        "linear": 14, "merged_linear": 4, "qk_norm_rope": 2, "swiglu": 2, "fused_quantize": 8,
    }),
    "gemma3_text": (KV, {"rms_norm": 13, "residual_norm": 4, "merged_linear": 4, "qk_norm_rope": 2, "swiglu": 2}),
    "qwen3_moe": (KV, {"rms_norm": 9, "qk_norm_rope": 2}),
    "qwen2": (KV | EAGER, {
        "attention": 2, "causal_mask": 2, "kv_heads": 2, "rms_norm": 5, "residual_norm": 4, "merged_linear": 4,
        "rope": 4, "swiglu": 2,
    }),
    "gemma2": ({}, {"kv_heads": 2, "cross_entropy": 1, "rms_norm": 9, "residual_norm": 4, "swiglu": 2}),
    "gpt2": ({}, {
        "causal_mask": 2, "cross_entropy": 1, "embedding": 2, "gelu": 2, "layer_norm": 4, "activation": 2,
        "bias_activation": 2, "residual_norm": 3, "linear": 8, "fused_quantize": 8,
    }),
    "gpt_neox": (EAGER, {
        "attention": 2, "causal_mask": 2, "cross_entropy": 1, "embedding": 1, "layer_norm": 4, "activation": 2,
        "bias_activation": 2, "linear": 8, "residual_norm": 1, "fused_quantize": 8,
    }),
    "opt": ({}, {
        "causal_mask": 2, "cross_entropy": 1, "embedding": 2, "layer_norm": 4, "activation": 2, "bias_activation": 2,
        "linear": 12, "residual_norm": 4, "merged_linear": 2, "fused_quantize": 8,
    }),
    # Attention and MLP read one norm: fc1 is merged with q, k, v, and its bias with theirs.
    "phi": (EAGER, {
        "attention": 2, "cross_entropy": 1, "gelu": 2, "layer_norm": 2, "activation": 2, "merged_linear": 2,
        "linear": 12, "rope": 4,
    }),
    "gptj": ({}, {"cross_entropy": 1, "gelu": 2, "layer_norm": 2, "activation": 2, "bias_activation": 2, "linear": 12}),
}  # fmt: skip
# Passes that work on Inductor's joint graph alone, which these tests do not make; and experts, whose schemes are the
# binding's affair: tests/engine/test_experts.py counts them on Mixtral, Qwen3-MoE, OLMoE and GPT-OSS. Windows and other
# attention beyond plain causal, and routers, have a GPU's kernels: tests/engine/test_passes.py, test_attention.py and
# test_top_k.py.
ATTENTION = {"window", "narrow_values", "packed", "soft_cap"}
EXPERTS = {"experts", "fused_experts", "looped_experts", "plain_experts", "dense_experts"}
ELSEWHERE = {"recomputed", "top_k", *ATTENTION, *EXPERTS}


@cache
def _counts(model_type: str) -> tuple[dict[str, int], float, float]:
    """(how often each pass fired, the compiled loss, eager's) of a training step."""
    torch._dynamo.reset()
    overrides, _ = EXPECTED[model_type]
    model = zoo_models.tiny_model(model_type, **overrides).bfloat16().eval()
    ids = torch.randint(3, zoo_models.VOCAB, (2, 37), generator=torch.Generator().manual_seed(0))
    options = BackendOptions(schemes=dict.fromkeys(_linears(model), FP8))
    # As the engine does: what GPT-2 tells once is no reason to break its graph.
    with torch._dynamo.config.patch(ignore_logger_methods={getattr(logging.Logger, "warning_once", None)}):
        compiled = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, options))
        loss = compiled(input_ids=ids, labels=ids).loss
    loss.backward()
    return options.counts, loss.item(), model(input_ids=ids, labels=ids).loss.item()


def _linears(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if is_linear and "head" not in name and "embed_out" not in name:
            yield name


@pytest.mark.parametrize("model_type", EXPECTED)
def test_passes_fire_on_an_architecture_as_often_as_it_has_their_pattern(model_type) -> None:
    counts, loss, eager = _counts(model_type)
    expected = EXPECTED[model_type][1]
    assert {name: count for name, count in expected.items() if counts[name] < count} == {}, counts
    assert abs(loss - eager) < 0.01 * eager


def test_every_pass_fires_on_three_architectures() -> None:
    fired: dict[str, set[str]] = {}
    for model_type in EXPECTED:
        for name, count in _counts(model_type)[0].items():
            fired.setdefault(name, set()).update({model_type} if count else ())
    assert {name: sorted(where) for name, where in fired.items() if len(where) < 3 and name not in ELSEWHERE} == {}
