"""Tiny Hugging Face causal language models, one for each class of the auto mapping, built from config classes alone.

A config is shrunk by what its fields are called (SMALL), nested configs too; OVERRIDES holds what a single architecture
needs beyond that. Nothing is downloaded.
"""

from typing import Any

import torch

VOCAB = 131
# Small value -> fields that get it, for the spellings that configs use; sizes differ so that a mix-up changes a shape.
FIELDS: tuple[tuple[int, str], ...] = (
    # width
    (64,
     "hidden_size d_model n_embd dim emb_dim embedding_size input_embedding_size word_embed_proj_dim "
     "model_dim embedding_dim dim_model output_embedding_size"),
    # feed-forward
    (96,
     "intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dim_ff d_inner dff "
     "feed_forward_size block_ff_dim dense_intermediate_size feed_forward_proj_size"),
    (80, "intermediate_size_mlp"),
    (64, "attention_hidden_size"),
    # depth
    (2,
     "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers "
     "num_decoder_layers num_blocks"),
    (0, "num_nextn_predict_layers num_mtp_layers"),
    # heads
    (4,
     "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
     "num_encoder_attention_heads num_decoder_attention_heads"),
    (2, "num_kv_heads num_key_value_heads"),
    (16, "head_dim d_head dim_head attention_head_size kv_channels global_head_dim"),
    # positions and vocabulary
    (128,
     "max_position_embeddings n_positions max_target_positions max_seq_len n_ctx max_sequence_length "
     "position_embedding_size"),
    (VOCAB, "vocab_size vocab_size_per_layer_input"),
    (16, "sliding_window attention_window_size sliding_window_size attention_chunk_size"),
    # mixture of experts
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts ffn_num_experts"),
    (2, "num_experts_per_tok moe_topk moe_k top_k_experts moe_top_k num_selected_experts"),
    (32,
     "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
     "shared_intermediate_size moe_shared_expert_intermediate_size moe_ffn_hidden_size "
     "expert_intermediate_size"),
    (1,
     "n_group topk_group first_k_dense_replace n_shared_experts num_shared_experts moe_num_shared_experts "
     "num_dense_layers moe_layer_start_index"),
    # latent attention
    (24, "q_lora_rank qk_head_dim"),
    (16, "kv_lora_rank qk_nope_head_dim v_head_dim index_head_dim o_lora_rank"),
    (8, "qk_rope_head_dim index_topk"),
    (4, "index_n_heads"),
    (2, "o_groups"),
    # state space and linear attention
    (16,
     "state_size ssm_state_size mamba_d_state chunk_size mamba_chunk_size linear_key_head_dim "
     "linear_value_head_dim"),
    (32, "mamba_d_head mamba_head_dim mamba_headdim"),
    (4, "mamba_n_heads mamba_num_heads time_step_rank mamba_dt_rank linear_num_value_heads"),
    (128, "mamba_d_ssm"),
    (1, "mamba_n_groups n_groups n_mamba_heads"),
    (64, "lru_width conv_dim conv_dim_out"),
    (2, "linear_num_key_heads"),
    # the rest
    (8, "hidden_size_per_layer_input laurel_rank patch_size"),
    (2, "altup_num_inputs eos_token_id num_codebooks bottleneck_reduction_factor depth"),
    (0, "num_kv_shared_layers pad_token_id"),
    (4, "adapter_rank num_buckets lora_rank"),
    (1, "bos_token_id decoder_start_token_id"),
    (16, "image_size num_conv_pos_embeddings"),
    (32, "projection_dim vision_output_dim"),
    (3, "num_channels"),
    (64, "max_source_positions"),
)  # fmt: skip
SMALL: dict[str, Any] = {name: value for value, names in FIELDS for name in names.split()}
# Of some vision and audio models lists with an entry for each stage, which stay as they are.
BY_STAGE = ("num_attention_heads", "num_heads", "conv_dim", "patch_size", "image_size", "depth", "hidden_size")
# What one architecture needs beyond SMALL: fields that its own checks or its forward want set together.
OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {
        "encoder_hash_byte_group_size": [3, 4], "encoder_hash_byte_group_vocab": 64, "patch_size": 4,
        "encoder_config": {"hidden_size_global": 128}, "decoder_config": {"hidden_size_global": 128},
        "global_config": {"hidden_size": 128, "head_dim": 32}, "patcher_config": {},
    },
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
        "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    }},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "ffn_config": {}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma4_assistant": {"backbone_hidden_size": 48, "text_config": ("gemma4_text", {
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 2,
        "global_head_dim": 16,
    })},
    "gemma4_unified_assistant": {"backbone_hidden_size": 48, "text_config": ("gemma4_unified_text", {
        "num_kv_shared_layers": 2, "global_head_dim": 16,
    })},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "inkling_text": {"n_shared_experts": 2},
    "kimi_linear": {"num_experts_per_token": 2, "linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2, "num_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
        "indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 8,
    },
    "reformer": {
        "is_decoder": True, "attn_layers": ("local", "lsh"), "axial_pos_shape": (8, 8), "axial_pos_embds_dim": (16, 48),
        "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16, "num_buckets": 8, "num_hidden_layers": 2,
        # It seeds its dropout from the clock: without dropout and with a fixed hash two runs of it are alike.
        "hash_seed": 0, "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 32, "pronunciation_vocab_size": 50, "shape_embed_dim": 32, "shape_vocab_size": 50,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1, "attention_hidden_size": 128,
        "attention_head_dim": 32, "layers_block_type": None,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "n_mamba_heads": 4,
        "mamba_headdim": 32, "num_query_groups": 4, "attention_hidden_size": 128, "attention_head_dim": 32,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip


def model_types() -> dict[str, str]:
    """Model type -> class name, one entry for each distinct class of the causal-LM auto mapping."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    chosen: dict[str, str] = {}
    for model_type, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if class_name not in chosen.values():
            chosen[model_type] = class_name
    return chosen


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A config of `model_type` with every size small; of the text part where the class takes that."""
    config = shrunk(model_class(model_type).config_class, OVERRIDES.get(model_type, {}) | overrides)
    if (
        model_type == "gemma3n"
    ):  # its vision tower comes from a library that text needs not; a small one of the same interface
        siglip = {"vocab_size": 8, "vocab_offset": VOCAB, "rms_norm_eps": 1e-6}
        object.__setattr__(config, "vision_config", shrunk(_config_class("siglip_vision_model"), siglip))
    return config


def _config_class(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def model_class(model_type: str) -> Any:
    """The causal-LM class of `model_type`."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def shrunk(config_class: type, overrides: dict[str, Any]) -> Any:
    """A config of that class with every size small and these fields as given; nested configs too."""
    # A pair stands for a nested config of another type: (model type, its overrides).
    overrides = {k: shrunk(_config_class(v[0]), v[1]) if _is_nested_pair(v) else v for k, v in overrides.items()}
    nested = {name: value for name, value in overrides.items() if name in getattr(config_class, "sub_configs", {})}
    default = config_class(**{name: value for name, value in nested.items() if not isinstance(value, dict)})
    values = vars(default)
    # A field that the default leaves at None or 0 is a feature switched off; giving it a size would switch it on. The
    # size of a head is the exception: None means "derive it", and some models derive it in the wrong place.
    kept = {name for name, value in values.items() if value or name == "head_dim" or name.endswith("token_id")}
    kept -= {name for name in BY_STAGE if isinstance(values.get(name), (list, tuple))}
    small = {name: value for name, value in SMALL.items() if name in kept}
    if "qk_rope_head_dim" in small and "head_dim" in small:
        small["head_dim"] = small["qk_rope_head_dim"]  # these name the rotary part so
    for heads in ("num_key_value_heads", "num_kv_heads"):
        if heads in small and values[heads] == values.get("num_attention_heads"):
            small[heads] = small["num_attention_heads"]
    for name in getattr(config_class, "sub_configs", {}):
        value = values.get(name)
        if value is not None and name not in overrides:
            small[name] = shrunk(type(value), {})
        elif isinstance(overrides.get(name), dict):
            small[name] = shrunk(type(value), overrides[name])
    small |= _layer_kinds(values, small)
    return config_class(**(small | {k: v for k, v in overrides.items() if k not in nested or not isinstance(v, dict)}))


def _is_nested_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], dict)


def _layer_kinds(values: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Per-layer lists cut to the first layer of each kind, and the depth that goes with them."""
    field_name = "layer_types" if values.get("layer_types") else "layers_block_type"
    kinds = values.get(field_name)
    depth = next((field for field in ("num_hidden_layers", "n_layer", "num_layers") if field in small), None)
    if not kinds or depth is None:
        return {}
    chosen = list(dict.fromkeys(kinds)) if len(set(kinds)) > 1 else list(kinds[:2])
    return {field_name: chosen, depth: len(chosen)}


def tiny_model(model_type: str, *, device: str = "cpu", seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """The causal-LM class of `model_type` on a tiny config with random weights, in training mode."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, **overrides)
    with torch.device(device):
        return model_class(model_type)._from_config(config).train()


def example_inputs(model_type: str, model: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """Inputs for the few models that token ids alone do not satisfy; None for the rest."""
    generator = torch.Generator().manual_seed(0)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(3, VOCAB, shape, generator=generator)

    if model_type == "reformer":  # trains on the product of its axial shape only
        return {"input_ids": tokens(2, 64), "labels": tokens(2, 64)}
    if model_type in ("musicgen", "musicgen_melody"):  # one row of ids for each codebook
        return {
            "input_ids": tokens(2 * model.config.num_codebooks, 37),
            "labels": tokens(2, 37, model.config.num_codebooks),
        }
    if model_type == "git":
        return {
            "input_ids": tokens(2, 37),
            "labels": tokens(2, 37),
            "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        }
    if model_type in ("gemma4_assistant", "gemma4_unified_assistant"):  # reads the main model's hidden states and keys
        return _assistant_inputs(model, generator)
    return None


def _assistant_inputs(model: torch.nn.Module, generator: torch.Generator) -> dict[str, Any]:
    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    text = model.config.get_text_config()
    shared = {kind: (noise(2, 2, 37, 16), noise(2, 2, 37, 16)) for kind in text.layer_types}
    return {
        "inputs_embeds": noise(2, 5, 2 * model.config.backbone_hidden_size),
        "position_ids": torch.arange(32, 37).expand(2, 5).contiguous(),
        "shared_kv_states": shared,
    }
