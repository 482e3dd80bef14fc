"""Hugging Face configs to IR: published parameter counts to the last one, flops by the closed formula, bad configs."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepwell.errors import ConfigError
from deepwell.graph.configs import published_config, published_models, published_name
from deepwell.graph.ir import IR
from deepwell.graph.ops import Activation, Attention, Embedding, GroupedLinear, Linear, Norm, TopK

# What the published checkpoints hold, tied weights once.
PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-120b": 116_829_156_672,
    "gpt2": 124_439_808,
    "gpt3-175b": 174_604_259_328,  # the paper rounds to 174,600 million in its table of sizes
    "gpt-oss-20b": 20_914_757_184,
    "kimi-k2": 1_026_408_209_408,  # without the router's correction bias, which is no parameter here
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-235b-a22b": 235_093_634_560,
}
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 128,
}


@pytest.mark.parametrize("name", published_models())
def test_parameter_counts_are_exact(name: str) -> None:
    assert IR.from_config(published_config(name)).num_params == PARAMETERS[name]


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [
        ("Llama-3 8B", "llama3-8b"),  # as people write it, with dash and blank
        ("Llama-3-70B", "llama3-70b"),
        ("llama_3_405b", "llama3-405b"),
        ("Mixtral 8x7B", "mixtral-8x7b"),
        ("DeepSeek-V3", "deepseek-v3"),
        ("deepseek_v3", "deepseek-v3"),
        ("deepseek", "deepseek-v3"),  # the start of a name is enough where one model has it
        ("Kimi-K2", "kimi-k2"),
        ("GPT-3", "gpt3-175b"),
        ("gpt2", "gpt2"),
        ("gpt_oss_20b", "gpt-oss-20b"),
        ("Qwen3.30B.A3B", "qwen3-30b-a3b"),
        *((name, name) for name in published_models()),  # a full name is itself, also where another begins like it
    ],
)
def test_a_published_model_is_found_however_it_is_spelled(spelled: str, meant: str) -> None:
    assert published_name(spelled) == meant
    assert published_config(spelled) == published_config(meant)


@pytest.mark.parametrize(
    ("spelled", "choices"),
    [
        ("Llama-3", "llama3-405b or llama3-70b or llama3-8b"),
        ("mixtral", "mixtral-8x22b or mixtral-8x7b"),
        ("Qwen3 MoE", "qwen3-235b-a22b or qwen3-30b-a3b"),
        ("Qwen3 dense", "qwen3-14b or qwen3-32b or qwen3-8b"),
        ("GPT-OSS", "gpt-oss-120b or gpt-oss-20b"),
    ],
)
def test_a_family_of_published_models_names_its_choices(spelled: str, choices: str) -> None:
    with pytest.raises(ConfigError, match=f"may be {choices}; name one"):
        published_name(spelled)


@pytest.mark.parametrize("name", ["llama3-7", "8b", "", "moe", "llama99"])
def test_half_a_word_of_a_published_name_is_no_model(name: str) -> None:
    with pytest.raises(ConfigError, match="no published model"):
        published_name(name)


# ---- flops by the closed formula, written from the config alone ----


def attention_weights(c: dict[str, Any]) -> int:
    h, heads = c["hidden_size"], c["num_attention_heads"]
    if "kv_lora_rank" in c:
        nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        queries = h * c["q_lora_rank"] + c["q_lora_rank"] * heads * (nope + rope)
        keys = h * (c["kv_lora_rank"] + rope) + c["kv_lora_rank"] * heads * (nope + v)
        return queries + keys + heads * v * h
    dim = c.get("head_dim") or h // heads
    return 2 * h * heads * dim + 2 * h * c["num_key_value_heads"] * dim


def ffn_weights(c: dict[str, Any], layer: int) -> int:
    h = c["hidden_size"]
    experts = c.get("num_local_experts") or c.get("num_experts") or c.get("n_routed_experts") or 0
    if not experts or layer < c.get("first_k_dense_replace", 0):
        return 3 * h * c["intermediate_size"]
    inner = c.get("moe_intermediate_size") or c["intermediate_size"]
    chosen = c["num_experts_per_tok"] + c.get("n_shared_experts", 0)
    return h * experts + 3 * h * inner * chosen


def attention_flops(c: dict[str, Any], layer: int, seq_len: int) -> float:
    """Two products over the keys that a token sees on average; gpt-oss alternates windows with full attention."""
    heads = c["num_attention_heads"]
    if "kv_lora_rank" in c:
        dims = c["qk_nope_head_dim"] + c["qk_rope_head_dim"] + c["v_head_dim"]
    else:
        dims = 2 * (c.get("head_dim") or c["hidden_size"] // heads)
    keys = (seq_len + 1) / 2
    if c["model_type"] == "gpt_oss" and layer % 2 == 0:
        w = min(c["sliding_window"], seq_len)
        keys = (w * (w + 1) / 2 + (seq_len - w) * w) / seq_len
    return 2 * heads * dims * keys


def closed_formula(c: dict[str, Any], seq_len: int) -> float:
    """2 N per token for the weights a token meets, embeddings left out, and attention on top."""
    if c["model_type"] == "gpt2":
        h = c["n_embd"]
        layers = c["n_layer"] * (2 * 12 * h * h + 2 * 2 * h * (seq_len + 1) / 2)
        return layers + 2 * h * c["vocab_size"]
    total = 2.0 * c["hidden_size"] * c["vocab_size"]
    for layer in range(c["num_hidden_layers"]):
        total += 2 * (attention_weights(c) + ffn_weights(c, layer)) + attention_flops(c, layer, seq_len)
    return total


@pytest.mark.parametrize("seq_len", [128, 1024, 32_768])
@pytest.mark.parametrize("name", published_models())
def test_flops_per_token_follow_the_closed_formula(name: str, seq_len: int) -> None:
    config = published_config(name)
    # The promise is 0.5%; both sides count the same products, so only float division may differ.
    assert IR.from_config(config).flops_per_token(seq_len) == pytest.approx(closed_formula(config, seq_len), rel=1e-12)


def test_active_parameters_are_the_published_ones() -> None:
    # Mixtral's paper speaks of 13B active, Qwen3's card of 3.3B, DeepSeek-V3's report of 37B, gpt-oss's card of 5.1B
    # for 120B, which leaves the embedding out; compared to the digits that they print.
    active = {name: IR.from_config(published_config(name)).active_params for name in PARAMETERS}
    assert round(active["mixtral-8x7b"] / 1e9) == 13
    assert int(active["qwen3-30b-a3b"] / 1e8) == 33
    assert int(active["deepseek-v3"] / 1e9) == 37
    assert int(active["kimi-k2"] / 1e9) == 32  # the card says 32B
    assert round(active["qwen3-235b-a22b"] / 1e9) == 22
    gpt_oss = active["gpt-oss-120b"] - 201_088 * 2_880
    assert round(gpt_oss / 1e9, 1) == 5.1
    assert active["llama3-8b"] == PARAMETERS["llama3-8b"]


# ---- what the families do ----


def ops_of(ir: IR, layer: int) -> dict[str, Any]:
    return {op.name: op for op in ir.blocks[ir.layers[layer].block].ops}


def test_deepseek_is_dense_first_and_routes_by_sigmoid() -> None:
    ir = IR.from_config(published_config("deepseek-v3"))
    assert [layer.block for layer in ir.layers] == [0] * 3 + [1] * 58
    assert "mlp.gate_proj" in ops_of(ir, 2)
    moe = ops_of(ir, 3)
    assert (moe["mlp.gate.topk"].top_k, moe["mlp.gate.topk"].scoring) == (8, "sigmoid")
    assert moe["mlp.shared_experts.up_proj"].n == 2048
    assert (moe["self_attn.attention"].qk_dim, moe["self_attn.attention"].v_dim) == (192, 128)


def test_gpt_oss_alternates_windows_and_has_sinks_and_biases() -> None:
    ir = IR.from_config(published_config("gpt-oss-120b"))
    windows = [ops_of(ir, i)["self_attn.attention"].window for i in range(4)]
    assert windows == [128, None, 128, None]
    ops = ops_of(ir, 0)
    assert [p.name for p in ops["self_attn.attention"].params] == ["self_attn.sinks"]
    assert ops["mlp.router"].bias and ops["mlp.experts.gate_up_proj"].bias
    assert ops["mlp.experts.gate_up_proj"].params[0].shape == (128, 2880, 5760)  # stored inputs first


def test_qwen3_norms_its_heads() -> None:
    ops = ops_of(IR.from_config(published_config("qwen3-30b-a3b")), 0)
    assert isinstance(ops["self_attn.q_norm"], Norm)
    assert ops["self_attn.q_norm"].width == 128 and ops["self_attn.q_norm"].rows.factor == 32
    assert ops["self_attn.k_norm"].rows.factor == 4


def test_gpt2_stores_fused_projections_inputs_first_and_ties_its_head() -> None:
    ir = IR.from_config(published_config("gpt2"))
    ops = ops_of(ir, 0)
    assert ops["attn.c_attn"].part == "qkv" and ops["attn.c_attn"].params[0].shape == (768, 2304)
    assert isinstance(ops["mlp.act"], Activation) and not ops["mlp.act"].gated
    assert sum(isinstance(op, Embedding) for op in ir.stem) == 2


def test_qwen2_has_biases_on_qkv_alone() -> None:
    ops = ops_of(IR.from_config({**TINY, "model_type": "qwen2"}), 0)
    assert [ops[f"self_attn.{p}_proj"].bias for p in "qkvo"] == [True, True, True, False]


def test_every_second_layer_may_be_sparse() -> None:
    config = {
        **TINY, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "decoder_sparse_step": 2, "num_hidden_layers": 6, "mlp_only_layers": [5],
    }  # fmt: skip
    ir = IR.from_config(config)
    # Layers count from 1 for the step, and layer 5 is dense by name.
    sparse = [any(isinstance(op, GroupedLinear) for op in ops_of(ir, i).values()) for i in range(6)]
    assert sparse == [False, True, False, True, False, False]


def test_the_language_part_of_a_multimodal_config_is_read() -> None:
    assert IR.from_config({"model_type": "llava", "text_config": TINY}) == IR.from_config(TINY)


def test_a_dtype_that_is_given_wins() -> None:
    assert IR.from_config({**TINY, "dtype": "bfloat16"}).dtype == "bf16"
    assert IR.from_config({**TINY, "torch_dtype": "bfloat16"}).dtype == "bf16"
    assert IR.from_config(TINY).dtype == "fp32"  # what transformers builds where the config is silent
    assert IR.from_config({**TINY, "dtype": "bfloat16"}, dtype="fp16").dtype == "fp16"


@settings(max_examples=40)
@given(
    heads=st.sampled_from([1, 2, 4, 6]),
    groups=st.sampled_from([1, 2]),
    dim=st.sampled_from([8, 16]),
    inner=st.integers(1, 200),
    layers=st.integers(1, 5),
    vocab=st.integers(1, 500),
    tied=st.booleans(),
)
def test_any_llama_has_the_parameters_of_its_sizes(
    *, heads: int, groups: int, dim: int, inner: int, layers: int, vocab: int, tied: bool
) -> None:
    hidden, q_heads = 32, heads * groups
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "head_dim": dim, "vocab_size": vocab,
        "num_attention_heads": q_heads, "num_key_value_heads": heads, "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    ir = IR.from_config(config)
    layer = 2 * hidden * q_heads * dim + 2 * hidden * heads * dim + 3 * hidden * inner + 2 * hidden
    assert ir.num_params == layers * layer + hidden + (1 if tied else 2) * vocab * hidden
    assert IR.from_json(ir.to_json()) == ir
    ir.check()


# ---- unknown and bad configs ----


def test_an_unknown_model_type_is_read_as_a_llama_and_says_so() -> None:
    ir = IR.from_config({**TINY, "model_type": "marvin"})
    assert ir == IR.from_config(TINY)
    assert len(ir.notes) == 1 and "marvin" in ir.notes[0] and "Llama" in ir.notes[0]
    assert "marvin" in str(ir)
    assert IR.from_config(TINY).notes == ()


@pytest.mark.parametrize(
    "field", ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
)
def test_a_missing_field_is_named(field: str) -> None:
    config = {key: value for key, value in TINY.items() if key != field}
    with pytest.raises(ConfigError, match=field):
        IR.from_config(config)


@pytest.mark.parametrize("value", ["64", 0, -3, 2.5, [64]])
def test_a_field_of_the_wrong_kind_is_named_with_its_value(value: Any) -> None:
    with pytest.raises(ConfigError, match="intermediate_size"):
        IR.from_config({**TINY, "intermediate_size": value})


def test_heads_must_divide_into_groups() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads 3"):
        IR.from_config({**TINY, "num_key_value_heads": 3})


def test_layer_types_must_count_the_layers() -> None:
    with pytest.raises(ConfigError, match="2 entries for 3 layers"):
        IR.from_config({**TINY, "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]})


@pytest.mark.parametrize("config", [None, "llama3-8b", 7])
def test_a_config_that_is_no_dict_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="config"):
        IR.from_config(config)


@pytest.mark.parametrize("field", ["num_key_value_heads", "head_dim", "max_position_embeddings", "layer_types"])
def test_an_optional_field_of_the_wrong_kind_is_named(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        str(IR.from_config({**TINY, field: -1 if field == "layer_types" else "x"}))


def test_an_unknown_published_name_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match="llama3-8b"):
        published_config("lama3-8b")


def test_published_configs_are_fresh_copies() -> None:
    published_config("gpt2")["n_layer"] = 1
    assert published_config("GPT2")["n_layer"] == 12


def test_the_vocabulary_covers_every_published_model() -> None:
    kinds = {type(site.op) for name in PARAMETERS for site in IR.from_config(published_config(name)).sites()}
    assert {Linear, GroupedLinear, Attention, TopK, Norm, Activation, Embedding} <= kinds
