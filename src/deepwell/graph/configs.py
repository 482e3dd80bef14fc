"""Hugging Face configs to IR without torch, and the published model shapes by name.

`config_fields` writes down the decoder that transformers builds from the same config: the same module paths, the same
ops in execution order, the same edges. Families differ in a few facts (`_FAMILIES`); everything else is read from the
config. A model type that is not listed is read as a Llama-style decoder and the IR's notes say so.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from deepwell.errors import ConfigError
from deepwell.graph.blocks import Block, Layer
from deepwell.graph.config_writer import ConfigWriter, class_name, head_and_loss, in_order, need
from deepwell.graph.configs_hybrid import hybrid_fields
from deepwell.graph.ops import (
    BLOCK_INPUT,
    SEQ,
    TOKENS,
    Activation,
    Attention,
    Combine,
    Dispatch,
    Embedding,
    GroupedLinear,
    Op,
    Rope,
    TopK,
)

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a model type does that its config does not say. `None` bias means the config's `attention_bias` decides."""

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    attention_bias: bool = False  # default where the config is silent
    qk_norm: bool = False
    tied: bool = False  # default where the config is silent
    sinks: bool = False
    mla: bool = False
    activation: str | None = None  # the experts' own gate, where the config's hidden_act is not used
    router: str = "gate"
    router_bias: bool = False
    expert_bias: bool = False
    experts_transposed: bool = False
    scoring: str = "softmax"
    norm: str = "rms"
    gated: bool = True  # gate and up before the MLP's down, or up alone
    window_by_default: bool = False  # sliding_window holds for every layer unless layer_types says otherwise


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(qkv_bias=False, o_bias=False, window_by_default=True),
    "qwen2": _Family(qkv_bias=True, o_bias=False),
    "qwen3": _Family(qk_norm=True),
    "nemotron": _Family(norm="layer", gated=False, activation="relu2"),
    "mixtral": _Family(qkv_bias=False, o_bias=False, window_by_default=True),
    "qwen3_moe": _Family(qk_norm=True),
    "deepseek_v3": _Family(mla=True, scoring="sigmoid"),
    "kimi_k2": _Family(mla=True, scoring="sigmoid"),
    "gpt_oss": _Family(
        attention_bias=True,
        sinks=True,
        activation="clamped_swiglu",
        router="router",
        router_bias=True,
        expert_bias=True,
        experts_transposed=True,
    ),
}


def config_fields(config: Mapping[str, Any], dtype: str | None = None) -> dict[str, Any]:
    """The fields of the IR of a Hugging Face config dict; `dtype` overrides the config's own."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"config is a {type(config).__name__}; pass the dict of a Hugging Face config.json")
    text = config.get("text_config")
    if "hidden_size" not in config and "n_embd" not in config and isinstance(text, Mapping):
        config = {**text, "architectures": config.get("architectures")}  # the language part of a multimodal config
    _check_optional(config)
    model_type = config.get("model_type", "")
    dtype = dtype or _DTYPES.get(str(config.get("dtype", config.get("torch_dtype", "float32"))), "fp32")
    if model_type == "gpt2":
        return _gpt2(config, dtype)
    if model_type == "nemotron_h":
        return hybrid_fields(config, dtype)
    notes: tuple[str, ...] = ()
    family = _FAMILIES.get(model_type)
    if family is None:
        family = _Family(qk_norm=bool(config.get("use_qk_norm", False)), mla="kv_lora_rank" in config)
        notes = (f"model_type {model_type!r} is not known: read as a Llama-style decoder from its config",)
    return _decoder(config, family, dtype, notes)


# ---- reading the config ----

# Fields that have a default, by what may stand there.
_COUNTS = (
    "num_key_value_heads", "head_dim", "max_position_embeddings", "n_inner", "n_ctx", "q_lora_rank", "sliding_window",
    "decoder_sparse_step", "moe_layer_freq",
)  # fmt: skip
_COUNTS_FROM_0 = (
    "n_shared_experts", "first_k_dense_replace", "num_local_experts", "num_experts", "n_routed_experts",
)  # fmt: skip
_TEXTS = ("model_type", "hidden_act", "hidden_activation", "activation_function")
_LISTS = ("architectures", "layer_types", "mlp_only_layers")


def _check_optional(config: Mapping[str, Any]) -> None:
    """Refuse an optional field whose value is of the wrong kind, before arithmetic does so without its name."""
    for name in (*_COUNTS, *_COUNTS_FROM_0):
        value, least = config.get(name), int(name in _COUNTS)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigError(f"config field {name} is {value!r}; it must be a whole number of at least {least}")
    for name in _TEXTS:
        if config.get(name) is not None and not isinstance(config[name], str):
            raise ConfigError(f"config field {name} is {config[name]!r}; it must be a text")
    for name in _LISTS:
        if config.get(name) is not None and not isinstance(config[name], (list, tuple)):
            raise ConfigError(f"config field {name} is {config[name]!r}; it must be a list")


def _get(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), default)


def _activation_name(config: Mapping[str, Any], default: str) -> str:
    name = _get(config, "hidden_act", "hidden_activation", "activation_function", default=default)
    return _ACTIVATIONS.get(name, name)


def _layer_windows(config: Mapping[str, Any], family: _Family, num_layers: int) -> list[int | None]:
    window = config.get("sliding_window")
    types = config.get("layer_types")
    if types is None and config.get("model_type") == "gpt_oss":
        types = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(num_layers)]
    if types is not None:
        if len(types) != num_layers:
            raise ConfigError(f"config field layer_types has {len(types)} entries for {num_layers} layers")
        return [window if kind == "sliding_attention" else None for kind in types]
    everywhere = family.window_by_default or config.get("use_sliding_window", False)
    return [window if everywhere else None] * num_layers


def _moe_layers(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    experts = _get(config, "num_local_experts", "num_experts", "n_routed_experts", default=0)
    if not experts:
        return [False] * num_layers
    dense_first = config.get("first_k_dense_replace", 0) or 0
    every = _get(config, "decoder_sparse_step", "moe_layer_freq", default=1)
    only_dense = set(config.get("mlp_only_layers") or ())
    return [
        i >= dense_first and i not in only_dense and (i + 1 if "decoder_sparse_step" in config else i) % every == 0
        for i in range(num_layers)
    ]


# ---- writing the ops ----


def _gated_mlp(
    w: ConfigWriter, path: str, source: str, *, hidden: int, inner: int, function: str, role: str, bias: bool = False
) -> str:
    gate = w.linear(f"{path}.gate_proj", f"{role}.gate", source, hidden, inner, bias=bias)
    up = w.linear(f"{path}.up_proj", f"{role}.up", source, hidden, inner, bias=bias)
    act = w.emit(
        Activation(
            name=f"{path}.act", role=role, inputs=(gate, up), dtype=w.dtype, function=function, width=inner, gated=True
        )
    )
    return w.linear(f"{path}.down_proj", f"{role}.down", act, inner, hidden, bias=bias)


def _plain_mlp(w: ConfigWriter, config: Mapping[str, Any], family: _Family, source: str) -> str:
    hidden, inner, bias = need(config, "hidden_size"), need(config, "intermediate_size"), bool(config.get("mlp_bias"))
    function = _activation_name(config, family.activation or "gelu")
    up = w.linear("mlp.up_proj", "mlp.up", source, hidden, inner, bias=bias)
    act = w.emit(Activation(name="mlp.act", role="mlp", inputs=(up,), dtype=w.dtype, function=function, width=inner))
    return w.linear("mlp.down_proj", "mlp.down", act, inner, hidden, bias=bias)


def _attention(w: ConfigWriter, config: Mapping[str, Any], family: _Family, source: str, window: int | None) -> str:
    hidden = need(config, "hidden_size")
    heads = need(config, "num_attention_heads")
    kv_heads = _get(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(f"config has {heads} attention heads, no multiple of num_key_value_heads {kv_heads}")
    dim = _get(config, "head_dim", default=hidden // heads)
    given = config.get("attention_bias", family.attention_bias)
    qkv_bias = given if family.qkv_bias is None else family.qkv_bias
    o_bias = given if family.o_bias is None else family.o_bias
    q = w.linear("self_attn.q_proj", "attention.q", source, hidden, heads * dim, bias=qkv_bias)
    if family.qk_norm:
        q = w.norm("self_attn.q_norm", q, dim, per_token=heads)
    k = w.linear("self_attn.k_proj", "attention.k", source, hidden, kv_heads * dim, bias=qkv_bias)
    if family.qk_norm:
        k = w.norm("self_attn.k_norm", k, dim, per_token=kv_heads)
    v = w.linear("self_attn.v_proj", "attention.v", source, hidden, kv_heads * dim, bias=qkv_bias)
    rotary = int(dim * _get(config, "partial_rotary_factor", default=1))
    rope = w.emit(
        Rope(
            name="self_attn.rope", role="attention", inputs=in_order(w, q, k), dtype=w.dtype,
            q_heads=heads, kv_heads=kv_heads, rotary_dim=rotary,
        )
    )  # fmt: skip
    attn = w.emit(
        Attention(
            name="self_attn.attention", role="attention", inputs=in_order(w, rope, v), dtype=w.dtype,
            params=(w.param("self_attn.sinks", heads),) if family.sinks else (),
            q_heads=heads, kv_heads=kv_heads, qk_dim=dim, v_dim=dim, window=window,
        )
    )  # fmt: skip
    return w.linear("self_attn.o_proj", "attention.o", attn, heads * dim, hidden, bias=o_bias)


def _latent_attention(w: ConfigWriter, config: Mapping[str, Any], source: str) -> str:
    """DeepSeek's multi-head latent attention: queries and keys/values through low-rank latents."""
    hidden, heads = need(config, "hidden_size"), need(config, "num_attention_heads")
    nope, rot = need(config, "qk_nope_head_dim"), need(config, "qk_rope_head_dim")
    v_dim, kv_rank = need(config, "v_head_dim"), need(config, "kv_lora_rank")
    q_rank, bias = config.get("q_lora_rank"), config.get("attention_bias", False)
    if q_rank is None:
        q = w.linear("self_attn.q_proj", "attention.q", source, hidden, heads * (nope + rot))
    else:
        q = w.linear("self_attn.q_a_proj", "attention.q_a", source, hidden, q_rank, bias=bias)
        q = w.norm("self_attn.q_a_layernorm", q, q_rank)
        q = w.linear("self_attn.q_b_proj", "attention.q_b", q, q_rank, heads * (nope + rot))
    kv_a = w.linear("self_attn.kv_a_proj_with_mqa", "attention.kv_a", source, hidden, kv_rank + rot, bias=bias)
    latent = w.norm("self_attn.kv_a_layernorm", kv_a, kv_rank)
    rope = w.emit(
        Rope(
            name="self_attn.rope", role="attention", inputs=in_order(w, q, kv_a), dtype=w.dtype,
            q_heads=heads, kv_heads=1, rotary_dim=rot,
        )
    )  # fmt: skip
    kv = w.linear("self_attn.kv_b_proj", "attention.kv_b", latent, kv_rank, heads * (nope + v_dim))
    attn = w.emit(
        Attention(
            name="self_attn.attention", role="attention", inputs=in_order(w, q, rope, kv), dtype=w.dtype,
            q_heads=heads, kv_heads=heads, qk_dim=nope + rot, v_dim=v_dim,
        )
    )  # fmt: skip
    return w.linear("self_attn.o_proj", "attention.o", attn, heads * v_dim, hidden, bias=bias)


def _moe(w: ConfigWriter, config: Mapping[str, Any], family: _Family, source: str) -> str:
    hidden = need(config, "hidden_size")
    experts = need(config, "num_local_experts", "num_experts", "n_routed_experts")
    top_k = need(config, "num_experts_per_tok", "experts_per_token")
    inner = need(config, "moe_intermediate_size", "intermediate_size")
    function = family.activation or _activation_name(config, "silu")
    routed = TOKENS.times(top_k)
    router = w.linear(f"mlp.{family.router}", "router", source, hidden, experts, bias=family.router_bias)
    chosen = w.emit(
        TopK(
            name=f"{router}.topk", role="router", inputs=(router,), dtype=w.dtype,
            experts=experts, top_k=top_k, scoring=family.scoring,
        )
    )  # fmt: skip
    rows = w.emit(
        Dispatch(
            name="mlp.experts.dispatch", role="experts", inputs=in_order(w, source, chosen), dtype=w.dtype,
            rows=routed, width=hidden,
        )
    )  # fmt: skip

    def grouped(name: str, part: str, source: str, k: int, n: int) -> str:
        params = [w.param(name, experts, *((k, n) if family.experts_transposed else (n, k)))]
        if family.expert_bias:
            params.append(w.param(f"{name}_bias", experts, n))
        return w.emit(
            GroupedLinear(
                name=name, role="experts", part=part, inputs=(source,), params=tuple(params), dtype=w.dtype,
                rows=routed, experts=experts, k=k, n=n, bias=family.expert_bias,
            )
        )  # fmt: skip

    gate_up = grouped("mlp.experts.gate_up_proj", "gate_up", rows, hidden, 2 * inner)
    act = w.emit(
        Activation(
            name="mlp.experts.act", role="experts", inputs=(gate_up,), dtype=w.dtype, rows=routed,
            function=function, width=inner, gated=True,
        )
    )  # fmt: skip
    down = grouped("mlp.experts.down_proj", "down", act, inner, hidden)
    out = w.emit(
        Combine(
            name="mlp.experts.combine", role="experts", inputs=in_order(w, chosen, down), dtype=w.dtype,
            top_k=top_k, width=hidden,
        )
    )  # fmt: skip
    shared = config.get("n_shared_experts", 0) or 0
    if shared:
        side = _gated_mlp(
            w,
            "mlp.shared_experts",
            source,
            hidden=hidden,
            inner=shared * inner,
            function=function,
            role="shared_experts",
        )
        out = w.add("mlp.add", "shared_experts", out, side, width=hidden)
    return out


def _decoder(config: Mapping[str, Any], family: _Family, dtype: str, notes: tuple[str, ...]) -> dict[str, Any]:
    hidden, vocab = need(config, "hidden_size"), need(config, "vocab_size")
    num_layers = need(config, "num_hidden_layers")
    windows = _layer_windows(config, family, num_layers)
    kinds = list(zip(windows, _moe_layers(config, num_layers), strict=True))
    distinct = list(dict.fromkeys(kinds))
    blocks = tuple(Block(ops=_decoder_block(config, family, dtype, *kind)) for kind in distinct)
    layers = tuple(Layer(path=f"model.layers.{i}", block=distinct.index(kind)) for i, kind in enumerate(kinds))

    stem, tail = ConfigWriter(dtype), ConfigWriter(dtype)
    stem.emit(
        Embedding(
            name="model.embed_tokens", role="embedding", dtype=dtype, vocab=vocab, width=hidden,
            params=(stem.param("model.embed_tokens.weight", vocab, hidden),),
        )
    )  # fmt: skip
    normed = tail.norm("model.norm", BLOCK_INPUT, hidden, norm=family.norm)
    tied = "model.embed_tokens.weight" if config.get("tie_word_embeddings", family.tied) else None
    head_and_loss(tail, normed, hidden, vocab, tied)
    return {
        "name": class_name(config),
        "dtype": dtype,
        "stem": tuple(stem.ops),
        "blocks": blocks,
        "layers": layers,
        "tail": tuple(tail.ops),
        "max_positions": _get(config, "max_position_embeddings"),
        "notes": notes,
    }


def _decoder_block(
    config: Mapping[str, Any], family: _Family, dtype: str, window: int | None, is_moe: bool
) -> tuple[Op, ...]:
    hidden = need(config, "hidden_size")
    w = ConfigWriter(dtype)
    normed = w.norm("input_layernorm", BLOCK_INPUT, hidden, norm=family.norm)
    if family.mla:
        attended = _latent_attention(w, config, normed)
    else:
        attended = _attention(w, config, family, normed, window)
    stream = w.add("add", "residual", BLOCK_INPUT, attended, width=hidden)
    normed = w.norm("post_attention_layernorm", stream, hidden, norm=family.norm)
    if is_moe:
        out = _moe(w, config, family, normed)
    elif not family.gated:
        out = _plain_mlp(w, config, family, normed)
    else:
        inner, bias = need(config, "intermediate_size"), bool(config.get("mlp_bias", False))
        out = _gated_mlp(
            w,
            "mlp",
            normed,
            hidden=hidden,
            inner=inner,
            function=_activation_name(config, "silu"),
            role="mlp",
            bias=bias,
        )
    w.add("add_2", "residual", stream, out, width=hidden)
    return tuple(w.ops)


def _gpt2(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    hidden, vocab = need(config, "n_embd"), need(config, "vocab_size")
    heads, num_layers = need(config, "n_head"), need(config, "n_layer")
    positions = need(config, "n_positions", "n_ctx")
    inner = _get(config, "n_inner", default=4 * hidden)
    function = _activation_name(config, "gelu_new")

    stem = ConfigWriter(dtype)
    wte = stem.emit(
        Embedding(
            name="transformer.wte", role="embedding", dtype=dtype, vocab=vocab, width=hidden,
            params=(stem.param("transformer.wte.weight", vocab, hidden),),
        )
    )  # fmt: skip
    wpe = stem.emit(
        Embedding(
            name="transformer.wpe", role="embedding", dtype=dtype, vocab=positions, width=hidden, rows=SEQ,
            params=(stem.param("transformer.wpe.weight", positions, hidden),),
        )
    )  # fmt: skip
    stem.add("transformer.add", "embedding", wte, wpe, width=hidden)

    w = ConfigWriter(dtype)
    normed = w.norm("ln_1", BLOCK_INPUT, hidden, norm="layer")
    qkv = w.linear("attn.c_attn", "attention.qkv", normed, hidden, 3 * hidden, bias=True, conv1d=True)
    dim = hidden // heads
    attn = w.emit(
        Attention(
            name="attn.attention", role="attention", inputs=(qkv,), dtype=dtype,
            q_heads=heads, kv_heads=heads, qk_dim=dim, v_dim=dim,
        )
    )  # fmt: skip
    out = w.linear("attn.c_proj", "attention.o", attn, hidden, hidden, bias=True, conv1d=True)
    stream = w.add("add", "residual", BLOCK_INPUT, out, width=hidden)
    normed = w.norm("ln_2", stream, hidden, norm="layer")
    up = w.linear("mlp.c_fc", "mlp.up", normed, hidden, inner, bias=True, conv1d=True)
    act = w.emit(Activation(name="mlp.act", role="mlp", inputs=(up,), dtype=dtype, function=function, width=inner))
    out = w.linear("mlp.c_proj", "mlp.down", act, inner, hidden, bias=True, conv1d=True)
    w.add("add_2", "residual", stream, out, width=hidden)

    tail = ConfigWriter(dtype)
    normed = tail.norm("transformer.ln_f", BLOCK_INPUT, hidden, norm="layer")
    tied = "transformer.wte.weight" if config.get("tie_word_embeddings", True) else None
    head_and_loss(tail, normed, hidden, vocab, tied)
    return {
        "name": class_name(config),
        "dtype": dtype,
        "stem": tuple(stem.ops),
        "blocks": (Block(ops=tuple(w.ops)),),
        "layers": tuple(Layer(path=f"transformer.h.{i}", block=0) for i in range(num_layers)),
        "tail": tuple(tail.ops),
        "max_positions": positions,
    }


# ---- published models by name ----


def published_models() -> tuple[str, ...]:
    """Names that `published_config` knows."""
    folder = resources.files("deepwell.graph") / "models"
    return tuple(sorted(entry.name[: -len(".json")] for entry in folder.iterdir() if entry.name.endswith(".json")))


def published_name(name: str) -> str:
    """The published model that `name` means, however it is spelled: "Llama-3 8B", "deepseek_v3", "gpt3".

    The start of a name is enough where one model has it; "moe" or "dense" at its end picks among those of a family.
    Raises ConfigError with the choices where several are meant, and with the nearest names where none is.
    """
    known = published_models()
    wanted = _letters(name)
    meant = [one for one in known if _letters(one) == wanted] or [one for one in known if wanted in _starts(one)]
    for kind in ("moe", "dense"):
        if not meant and wanted.endswith(kind):
            family = [one for one in known if wanted[: -len(kind)] in _starts(one)]
            meant = [one for one in family if _has_experts(_read_published(one)) == (kind == "moe")]
    if not meant:
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4) or known
        raise ConfigError(f"no published model {name!r}; nearest: {', '.join(near)}")
    if len(meant) > 1:
        raise ConfigError(f"published model {name!r} may be {' or '.join(meant)}; name one of them")
    return meant[0]


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _starts(name: str) -> set[str]:
    """What a name may be cut down to: "qwen3-30b-a3b" to "qwen", "qwen3" and "qwen330b"."""
    head, *rest = name.split("-")
    family = head.rstrip("0123456789")
    return {family, *("".join((head, *rest[:count])) for count in range(len(rest) + 1))}


def _has_experts(config: Mapping[str, Any]) -> bool:
    return bool(_get(config, "num_local_experts", "num_experts", "n_routed_experts", default=0))


def published_config(name: str) -> dict[str, Any]:
    """The Hugging Face config of a published model, e.g. "llama3-8b"; shipped with Deepwell, nothing is downloaded."""
    return _read_published(published_name(name))


def _read_published(name: str) -> dict[str, Any]:
    text = (resources.files("deepwell.graph") / "models" / f"{name}.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config
