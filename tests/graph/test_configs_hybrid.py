"""Hybrid decoders from their configs: parameters, active parameters and flops of published shapes; refusals."""

import pytest

from deepwell.errors import ConfigError
from deepwell.graph.ir import IR

# NVIDIA-Nemotron-3-Nano-30B-A3B: 31.6B parameters, 3.6B of them active with the embeddings.
NANO = {
    "model_type": "nemotron_h", "hidden_size": 2688, "vocab_size": 131072, "mamba_num_heads": 64, "mamba_head_dim": 64,
    "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "n_routed_experts": 128, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
}  # fmt: skip


def test_published_hybrid_has_its_published_parameters():
    ir = IR.from_config(NANO, dtype="bf16")
    ir.check()
    assert ir.num_layers == 52 and len(ir.blocks) == 3
    assert ir.num_params == pytest.approx(31.6e9, rel=0.002)
    assert ir.active_params == pytest.approx(3.6e9, rel=0.01)
    assert IR.from_json(ir.to_json()) == ir


def test_the_scan_counts_as_the_products_of_its_chunks():
    config = {**NANO, "hybrid_override_pattern": "M"}
    (block,) = IR.from_config(config, dtype="bf16").blocks
    work = IR.from_config(config).workload(batch=2, seq_len=1024)
    scan = sum(op.flops(work) for op in block.ops if op.kind == "matmul")
    # Per token: scores 8 groups x 128 x 128, inside 64 heads x 64 x 128, states and across 64 x 64 x 128 each, twice.
    assert scan == 2 * 2 * 1024 * (8 * 128 * 128 + 3 * 64 * 64 * 128)


def test_experts_of_a_latent_space_are_narrower_and_their_shared_expert_is_not():
    config = {**NANO, "hybrid_override_pattern": "E", "moe_latent_size": 1024}
    (block,) = IR.from_config(config, dtype="bf16").blocks
    found = {op.name: op for op in block.ops}
    assert (found["mixer.experts.up_proj"].k, found["mixer.experts.down_proj"].n) == (1024, 1024)
    assert found["mixer.shared_experts.up_proj"].k == 2688
    assert found["mixer.experts.dispatch"].width == 1024  # what travels between GPUs


def test_the_layer_list_of_newer_configs_says_the_same_as_the_pattern():
    rest = {key: value for key, value in NANO.items() if key != "hybrid_override_pattern"}
    rest["intermediate_size"] = 5376
    names = ["mamba", "moe", "attention", "mlp"]
    assert IR.from_config({**rest, "layers_block_type": names}) == IR.from_config(
        {**rest, "hybrid_override_pattern": "ME*-"}
    )


@pytest.mark.parametrize(
    ("changes", "piece"),
    [
        ({"hybrid_override_pattern": "MXE"}, "X"),
        ({"hybrid_override_pattern": ""}, "nothing"),
        ({"hybrid_override_pattern": "ME", "num_hidden_layers": 3}, "num_hidden_layers 3"),
        ({"mamba_num_heads": None}, "mamba_num_heads"),
    ],
)
def test_bad_hybrid_configs_are_refused_by_field(changes, piece):
    with pytest.raises(ConfigError, match=piece):
        IR.from_config({**NANO, **changes})


def test_squared_relu_decoders_have_two_matrices_and_layer_norms():
    # Nemotron-4 15B: 15.6B parameters.
    config = {
        "model_type": "nemotron", "hidden_size": 6144, "vocab_size": 256000, "num_hidden_layers": 32,
        "num_attention_heads": 48, "num_key_value_heads": 8, "intermediate_size": 24576,
    }  # fmt: skip
    ir = IR.from_config(config, dtype="bf16")
    assert ir.num_params == pytest.approx(15.6e9, rel=0.005)
    names = [op.name for op in ir.blocks[0].ops]
    assert "mlp.gate_proj" not in names and "mlp.up_proj" in names
    assert {op.norm for op in ir.blocks[0].ops if op.kind == "norm"} == {"layer"}
