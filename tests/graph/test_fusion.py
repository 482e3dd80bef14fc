"""Fusion sites: found from ops and edges, one entry per block with the layers that have it."""

import pytest

from deepwell.graph.configs import published_config, published_models
from deepwell.graph.fusion import FusionSite
from deepwell.graph.ir import IR, Block, Layer
from deepwell.graph.ops import Activation, Add, Linear, Norm, Op


def published(name: str) -> IR:
    return IR.from_config(published_config(name))


def found(ir: IR, kind: str) -> list[tuple[tuple[str, ...], int | None, int]]:
    return [(site.ops, site.block, site.count) for site in ir.fusion_sites() if site.kind == kind]


def test_llama_has_the_sites_that_a_person_would_list() -> None:
    ir = published("llama3-8b")
    q, k, v = (f"self_attn.{part}_proj" for part in "qkv")
    gate, up = "mlp.gate_proj", "mlp.up_proj"
    assert found(ir, "qkv") == [((q, k, v), 0, 32)]
    assert found(ir, "gate_up") == [((gate, up), 0, 32)]
    assert found(ir, "linear_swiglu") == [((gate, up, "mlp.act"), 0, 32)]
    assert found(ir, "norm_linear") == [
        (("input_layernorm", q, k, v), 0, 32),
        (("post_attention_layernorm", gate, up), 0, 32),
        (("model.norm", "lm_head"), None, 1),
    ]
    # The sum at a layer's end and the next layer's norm; the first layer's norm reads the embedding instead.
    assert found(ir, "residual_norm") == [
        (("@in", "input_layernorm"), 0, 31),
        (("add", "post_attention_layernorm"), 0, 32),
        (("@in", "model.norm"), None, 1),
    ]
    assert found(ir, "softmax_attention") == [(("self_attn.attention",), 0, 32)]
    assert found(ir, "head_cross_entropy") == [(("lm_head", "loss"), None, 1)]
    assert found(ir, "linear_gelu") == []


def test_gpt2_fuses_gelu_and_has_no_qkv_left_to_fuse() -> None:
    ir = published("gpt2")
    assert found(ir, "linear_gelu") == [(("mlp.c_fc", "mlp.act"), 0, 12)]
    assert found(ir, "qkv") == [] and found(ir, "gate_up") == []
    # Token and position embeddings are a sum too, so even the first layer's norm follows one.
    assert found(ir, "residual_norm")[0] == (("@in", "ln_1"), 0, 12)


def test_experts_with_a_fused_gate_and_up_have_a_swiglu_site_but_no_gate_up_site() -> None:
    ir = published("mixtral-8x7b")
    assert found(ir, "linear_swiglu") == [(("mlp.experts.gate_up_proj", "mlp.experts.act"), 0, 32)]
    assert found(ir, "gate_up") == []


def test_latent_attention_fuses_its_two_down_projections() -> None:
    ir = published("deepseek-v3")
    both = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
    assert found(ir, "qkv") == [(both, 0, 3), (both, 1, 58)]
    assert (("self_attn.q_a_layernorm", "self_attn.q_b_proj"), 1, 58) in found(ir, "norm_linear")
    # Dense layers and shared experts; the routed experts are stored fused.
    assert found(ir, "gate_up") == [
        (("mlp.gate_proj", "mlp.up_proj"), 0, 3),
        (("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"), 1, 58),
    ]
    assert sum(count for _, _, count in found(ir, "linear_swiglu")) == 3 + 58 + 58


def test_norms_of_heads_feed_no_linear_layer() -> None:
    ir = published("qwen3-30b-a3b")
    assert not any("self_attn.q_norm" in ops for ops, _, _ in found(ir, "norm_linear"))


@pytest.mark.parametrize("name", published_models())
def test_sites_name_ops_of_their_block_and_count_its_layers(name: str) -> None:
    ir = published(name)
    for site in ir.fusion_sites():
        group = ir.stem + ir.tail if site.block is None else ir.blocks[site.block].ops
        assert set(site.ops) <= {op.name for op in group} | {"@in"}
        assert 1 <= site.count <= (1 if site.block is None else ir.count(site.block))


def one_block(*ops: Op) -> IR:
    return IR(name="M", dtype="bf16", stem=(), blocks=(Block(ops=ops),), layers=(Layer(path="m", block=0),), tail=())


def test_projections_of_different_inputs_do_not_fuse() -> None:
    # Cross attention: queries from one stream, keys and values from another.
    ir = one_block(
        Linear(name="q", role="attention", part="q", inputs=("@in",), k=8, n=8),
        Norm(name="memory", role="norm", inputs=("@in",), norm="rms", width=8),
        Linear(name="k", role="attention", part="k", inputs=("memory",), k=8, n=8),
        Linear(name="v", role="attention", part="v", inputs=("memory",), k=8, n=8),
    )
    assert found(ir, "qkv") == [(("k", "v"), 0, 1)]


def test_values_from_earlier_stages_are_not_taken_for_one_value() -> None:
    ir = one_block(
        Linear(name="k", role="attention", part="k", inputs=("@earlier",), k=8, n=8),
        Linear(name="v", role="attention", part="v", inputs=("@earlier",), k=8, n=8),
    )
    assert found(ir, "qkv") == []


def test_an_activation_of_a_sum_is_no_epilogue() -> None:
    ir = one_block(
        Linear(name="up", role="mlp", inputs=("@in",), k=8, n=8),
        Add(name="add", role="mlp", inputs=("@in", "up"), width=8),
        Activation(name="act", role="mlp", inputs=("add",), function="gelu", width=8),
    )
    assert found(ir, "linear_gelu") == []


def test_a_gate_and_an_up_of_different_inputs_stay_two_gemms() -> None:
    ir = one_block(
        Norm(name="norm", role="norm", inputs=("@in",), norm="rms", width=8),
        Linear(name="gate", role="mlp", part="gate", inputs=("norm",), k=8, n=8),
        Linear(name="up", role="mlp", part="up", inputs=("@in",), k=8, n=8),
        Activation(name="act", role="mlp", inputs=("gate", "up"), function="silu", width=8, gated=True),
    )
    assert found(ir, "gate_up") == []
    assert found(ir, "linear_swiglu") == [(("gate", "up", "act"), 0, 1)]


def test_another_activation_has_its_own_kind() -> None:
    ir = one_block(
        Linear(name="up", role="mlp", inputs=("@in",), k=8, n=8),
        Activation(name="act", role="mlp", inputs=("up",), function="relu", width=8),
    )
    assert found(ir, "linear_activation") == [(("up", "act"), 0, 1)]


def test_a_site_prints() -> None:
    site = FusionSite(kind="qkv", ops=("q", "k"), block=0, count=2)
    assert str(site) == "qkv in block 0 (2x): q + k"


def test_an_empty_model_has_no_sites() -> None:
    assert IR(name="M", dtype="bf16", stem=(), blocks=(), layers=(), tail=()).fusion_sites() == ()
