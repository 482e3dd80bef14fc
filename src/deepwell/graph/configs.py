"""Hugging Face configs to IR without torch, and the published model shapes by name.

`config_fields` writes down the decoder that transformers builds from the same config: the same module paths, the same
ops in execution order, the same edges. Families differ in a few facts (`_FAMILIES`); everything else is read from the
config. A model type that is not listed is read as a Llama-style decoder and the IR's notes say so.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from deepwell.errors import ConfigError
from deepwell.graph.config_writer import ConfigWriter, Experts, head_and_loss, model_fields, need
from deepwell.graph.configs_hybrid import hybrid_fields
from deepwell.graph.ops import BLOCK_INPUT, SEQ, Attention, Rope

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
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
        attention_bias=True, sinks=True, activation="clamped_swiglu", router="router", router_bias=True,
        expert_bias=True, experts_transposed=True,
    ),
}  # fmt: skip


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
_COUNTS_FROM_0 = ("n_shared_experts", "first_k_dense_replace", *_EXPERTS)
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
    if not _has_experts(config):
        return [False] * num_layers
    dense_first = config.get("first_k_dense_replace", 0) or 0
    every = _get(config, "decoder_sparse_step", "moe_layer_freq", default=1)
    only_dense = set(config.get("mlp_only_layers") or ())
    return [
        i >= dense_first and i not in only_dense and (i + 1 if "decoder_sparse_step" in config else i) % every == 0
        for i in range(num_layers)
    ]


# ---- writing the ops ----


def _mlp(
    w: ConfigWriter,
    path: str,
    source: str,
    sizes: tuple[int, int],
    *,
    function: str,
    role: str,
    gated: bool,
    bias: bool,
) -> str:
    """gate and up (or up alone) from `sizes[0]` to `sizes[1]`, the activation, down."""
    hidden, inner = sizes
    gate = [w.linear(f"{path}.gate_proj", f"{role}.gate", source, hidden, inner, bias=bias)] if gated else []
    up = w.linear(f"{path}.up_proj", f"{role}.up", source, hidden, inner, bias=bias)
    act = w.activation(path, role, *gate, up, function=function, width=inner, gated=gated)
    return w.linear(f"{path}.down_proj", f"{role}.down", act, inner, hidden, bias=bias)


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
    shared = {"q_heads": heads, "kv_heads": kv_heads}
    rope = w.op(Rope, "self_attn.rope", "attention", q, k, **shared, rotary_dim=rotary)
    sinks = (w.param("self_attn.sinks", heads),) if family.sinks else ()
    sizes = {**shared, "qk_dim": dim, "v_dim": dim}
    attn = w.op(Attention, "self_attn.attention", "attention", rope, v, params=sinks, **sizes, window=window)
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
    rope = w.op(Rope, "self_attn.rope", "attention", q, kv_a, q_heads=heads, kv_heads=1, rotary_dim=rot)
    kv = w.linear("self_attn.kv_b_proj", "attention.kv_b", latent, kv_rank, heads * (nope + v_dim))
    sizes = {"q_heads": heads, "kv_heads": heads, "qk_dim": nope + rot, "v_dim": v_dim}
    attn = w.op(Attention, "self_attn.attention", "attention", q, rope, kv, **sizes)
    return w.linear("self_attn.o_proj", "attention.o", attn, heads * v_dim, hidden, bias=bias)


def _moe(w: ConfigWriter, config: Mapping[str, Any], family: _Family, source: str) -> str:
    hidden = need(config, "hidden_size")
    asked = Experts(
        count=need(config, *_EXPERTS), top_k=need(config, "num_experts_per_tok", "experts_per_token"), width=hidden,
        inner=need(config, "moe_intermediate_size", "intermediate_size"), gated=True, bias=family.expert_bias,
        function=family.activation or _activation_name(config, "silu"), transposed=family.experts_transposed,
    )  # fmt: skip
    router = w.linear(f"mlp.{family.router}", "router", source, hidden, asked.count, bias=family.router_bias)
    chosen = w.top_k(router, asked.count, asked.top_k, family.scoring)
    out = w.experts("mlp.experts", source, chosen, asked)
    shared = config.get("n_shared_experts", 0) or 0
    if shared:
        sizes, how = (hidden, shared * asked.inner), {"function": asked.function, "role": "shared_experts"}
        side = _mlp(w, "mlp.shared_experts", source, sizes, **how, gated=True, bias=False)
        out = w.add("mlp.add", "shared_experts", out, side, width=hidden)
    return out


def _decoder(config: Mapping[str, Any], family: _Family, dtype: str, notes: tuple[str, ...]) -> dict[str, Any]:
    hidden, vocab = need(config, "hidden_size"), need(config, "vocab_size")
    num_layers = need(config, "num_hidden_layers")
    windows = _layer_windows(config, family, num_layers)
    stem, tail = ConfigWriter(dtype), ConfigWriter(dtype)
    stem.embedding("model.embed_tokens", vocab, hidden)
    normed = tail.norm("model.norm", BLOCK_INPUT, hidden, norm=family.norm)
    tied = "model.embed_tokens.weight" if config.get("tie_word_embeddings", family.tied) else None
    head_and_loss(tail, normed, hidden, vocab, tied)
    layers = list(zip(windows, _moe_layers(config, num_layers), strict=True))

    def write(w: ConfigWriter, kind: tuple[int | None, bool]) -> None:
        _decoder_block(w, config, family, *kind)

    fields = model_fields(config, stem, tail, "model.layers", layers, write)
    return {**fields, "max_positions": _get(config, "max_position_embeddings"), "notes": notes}


def _decoder_block(
    w: ConfigWriter, config: Mapping[str, Any], family: _Family, window: int | None, is_moe: bool
) -> None:
    hidden = need(config, "hidden_size")
    normed = w.norm("input_layernorm", BLOCK_INPUT, hidden, norm=family.norm)
    if family.mla:
        attended = _latent_attention(w, config, normed)
    else:
        attended = _attention(w, config, family, normed, window)
    stream = w.add("add", "residual", BLOCK_INPUT, attended, width=hidden)
    normed = w.norm("post_attention_layernorm", stream, hidden, norm=family.norm)
    if is_moe:
        out = _moe(w, config, family, normed)
    else:
        function = _activation_name(config, "silu" if family.gated else family.activation or "gelu")
        sizes, bias = (hidden, need(config, "intermediate_size")), bool(config.get("mlp_bias", False))
        out = _mlp(w, "mlp", normed, sizes, function=function, role="mlp", gated=family.gated, bias=bias)
    w.add("add_2", "residual", stream, out, width=hidden)


def _gpt2(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    hidden, vocab = need(config, "n_embd"), need(config, "vocab_size")
    heads, num_layers = need(config, "n_head"), need(config, "n_layer")
    positions = need(config, "n_positions", "n_ctx")
    inner = _get(config, "n_inner", default=4 * hidden)
    function = _activation_name(config, "gelu_new")

    stem, tail = ConfigWriter(dtype), ConfigWriter(dtype)
    wte = stem.embedding("transformer.wte", vocab, hidden)
    wpe = stem.embedding("transformer.wpe", positions, hidden, SEQ)
    stem.add("transformer.add", "embedding", wte, wpe, width=hidden)
    normed = tail.norm("transformer.ln_f", BLOCK_INPUT, hidden, norm="layer")
    tied = "transformer.wte.weight" if config.get("tie_word_embeddings", True) else None
    head_and_loss(tail, normed, hidden, vocab, tied)

    def write(w: ConfigWriter, _: None) -> None:
        how = {"bias": True, "conv1d": True}
        normed = w.norm("ln_1", BLOCK_INPUT, hidden, norm="layer")
        qkv = w.linear("attn.c_attn", "attention.qkv", normed, hidden, 3 * hidden, **how)
        sizes = {"q_heads": heads, "kv_heads": heads, "qk_dim": hidden // heads, "v_dim": hidden // heads}
        attn = w.op(Attention, "attn.attention", "attention", qkv, **sizes)
        out = w.linear("attn.c_proj", "attention.o", attn, hidden, hidden, **how)
        stream = w.add("add", "residual", BLOCK_INPUT, out, width=hidden)
        normed = w.norm("ln_2", stream, hidden, norm="layer")
        up = w.linear("mlp.c_fc", "mlp.up", normed, hidden, inner, **how)
        act = w.activation("mlp", "mlp", up, function=function, width=inner)
        out = w.linear("mlp.c_proj", "mlp.down", act, inner, hidden, **how)
        w.add("add_2", "residual", stream, out, width=hidden)

    fields = model_fields(config, stem, tail, "transformer.h", [None] * num_layers, write)
    return {**fields, "max_positions": positions}


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
    return bool(_get(config, *_EXPERTS, default=0))


def published_config(name: str) -> dict[str, Any]:
    """The Hugging Face config of a published model, e.g. "llama3-8b"; shipped with Deepwell, nothing is downloaded."""
    return _read_published(published_name(name))


def _read_published(name: str) -> dict[str, Any]:
    text = (resources.files("deepwell.graph") / "models" / f"{name}.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config
