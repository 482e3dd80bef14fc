"""Hybrid decoders (Nemotron-H and its MoE children) from their config: one mixer per layer, by a pattern.

    M  Mamba-2      *  attention      E  experts, in a latent space where `moe_latent_size` is set      -  plain MLP

Every layer is norm, mixer, residual. The selective scan is written as the products of its chunked form (Dao and Gu,
arXiv:2405.21060, section 6), so that its flops count; elementwise parts of the scan are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepwell.errors import ConfigError
from deepwell.graph.blocks import Block, Layer
from deepwell.graph.config_writer import ConfigWriter, class_name, head_and_loss, in_order, need
from deepwell.graph.ops import (
    BATCH,
    BLOCK_INPUT,
    SEQ,
    TOKENS,
    Activation,
    Attention,
    Combine,
    Conv,
    Dispatch,
    Embedding,
    Extent,
    GroupedLinear,
    Matmul,
    Op,
    TopK,
)

_LETTERS = {"mamba": "M", "attention": "*", "moe": "E", "mlp": "-"}


def hybrid_pattern(config: Mapping[str, Any]) -> str:
    """One letter per layer, from `hybrid_override_pattern` or `layers_block_type`."""
    names = config.get("layers_block_type")
    pattern = config.get("hybrid_override_pattern") or "".join(_LETTERS.get(str(name), "?") for name in names or ())
    unknown = sorted(set(pattern) - set(_LETTERS.values()))
    if not pattern or unknown:
        got = f"the letters {' '.join(unknown)}" if unknown else "nothing"
        raise ConfigError(f"hybrid_override_pattern has {got}; its letters are M (Mamba), *, E (experts) and - (MLP)")
    layers = config.get("num_hidden_layers")
    if layers is not None and layers != len(pattern):
        raise ConfigError(f"hybrid_override_pattern has {len(pattern)} letters for num_hidden_layers {layers}")
    return pattern


def hybrid_fields(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The fields of the IR of a config of model_type nemotron_h."""
    pattern = hybrid_pattern(config)
    kinds = list(dict.fromkeys(pattern))
    hidden, vocab = need(config, "hidden_size"), need(config, "vocab_size")
    stem, tail = ConfigWriter(dtype), ConfigWriter(dtype)
    stem.emit(
        Embedding(
            name="model.embeddings", role="embedding", dtype=dtype, vocab=vocab, width=hidden,
            params=(stem.param("model.embeddings.weight", vocab, hidden),),
        )
    )  # fmt: skip
    normed = tail.norm("model.norm_f", BLOCK_INPUT, hidden)
    tied = "model.embeddings.weight" if config.get("tie_word_embeddings", False) else None
    head_and_loss(tail, normed, hidden, vocab, tied)
    return {
        "name": class_name(config),
        "dtype": dtype,
        "stem": tuple(stem.ops),
        "blocks": tuple(Block(ops=_layer(config, kind, dtype)) for kind in kinds),
        "layers": tuple(Layer(path=f"model.layers.{i}", block=kinds.index(kind)) for i, kind in enumerate(pattern)),
        "tail": tuple(tail.ops),
        "max_positions": config.get("max_position_embeddings"),
        "notes": ("hybrid decoder: the scan is written as the products of its chunked form",),
    }


def _layer(config: Mapping[str, Any], kind: str, dtype: str) -> tuple[Op, ...]:
    hidden = need(config, "hidden_size")
    w = ConfigWriter(dtype)
    normed = w.norm("norm", BLOCK_INPUT, hidden)
    write = {"M": _mamba, "*": _attention, "E": _experts, "-": _mlp}[kind]
    out = write(w, config, normed)
    w.add("add", "residual", BLOCK_INPUT, out, width=hidden)
    return tuple(w.ops)


def _mamba(w: ConfigWriter, config: Mapping[str, Any], source: str) -> str:
    hidden, heads = need(config, "hidden_size"), need(config, "mamba_num_heads")
    dim, state = need(config, "mamba_head_dim"), need(config, "ssm_state_size")
    groups, chunk = need(config, "n_groups"), int(config.get("chunk_size") or 128)
    inner = heads * dim
    channels = inner + 2 * groups * state
    mixed = w.linear("mixer.in_proj", "mixer.in", source, hidden, inner + channels + heads)
    window = need(config, "conv_kernel")
    conv = w.emit(
        Conv(
            name="mixer.conv1d", role="mixer", inputs=(mixed,), dtype=w.dtype, k=window, n=channels,
            params=(w.param("mixer.conv1d.weight", channels, window), w.param("mixer.conv1d.bias", channels)),
        )
    )  # fmt: skip

    def product(name: str, sources: tuple[str, ...], batch: int, n: int, k: int) -> str:
        return w.emit(
            Matmul(
                name=f"mixer.scan.{name}", role="mixer", inputs=sources, dtype=w.dtype,
                batch=BATCH.times(batch), m=SEQ, n=Extent(n), k=Extent(k),
            )
        )  # fmt: skip

    # Inside a chunk: C B^T and its product with x; between chunks: B^T x into the state and C times the state.
    scores = product("scores", (conv,), groups, chunk, state)
    inside = product("inside", (conv, scores), heads, dim, chunk)
    states = product("states", (conv,), heads, dim, state)
    across = product("across", (conv, states), heads, dim, state)
    summed = w.add("mixer.scan.add", "mixer", inside, across, width=inner)
    gated = w.emit(
        Activation(
            name="mixer.gate", role="mixer", inputs=in_order(w, mixed, summed), dtype=w.dtype, function="silu",
            width=inner, gated=True,
            params=tuple(w.param(f"mixer.{name}", heads) for name in ("A_log", "D", "dt_bias")),
        )
    )  # fmt: skip
    normed = w.norm("mixer.norm", gated, inner)
    return w.linear("mixer.out_proj", "mixer.out", normed, inner, hidden)


def _attention(w: ConfigWriter, config: Mapping[str, Any], source: str) -> str:
    hidden, heads = need(config, "hidden_size"), need(config, "num_attention_heads")
    kv_heads, dim = need(config, "num_key_value_heads"), int(config.get("head_dim") or hidden // heads)
    q = w.linear("mixer.q_proj", "attention.q", source, hidden, heads * dim)
    k = w.linear("mixer.k_proj", "attention.k", source, hidden, kv_heads * dim)
    v = w.linear("mixer.v_proj", "attention.v", source, hidden, kv_heads * dim)
    attended = w.emit(
        Attention(
            name="mixer.attention", role="attention", inputs=(q, k, v), dtype=w.dtype,
            q_heads=heads, kv_heads=kv_heads, qk_dim=dim, v_dim=dim,
        )
    )  # fmt: skip
    return w.linear("mixer.o_proj", "attention.o", attended, heads * dim, hidden)


def _plain_mlp(w: ConfigWriter, path: str, source: str, hidden: int, inner: int, role: str) -> str:
    up = w.linear(f"{path}.up_proj", f"{role}.up", source, hidden, inner)
    act = w.emit(Activation(name=f"{path}.act", role=role, inputs=(up,), dtype=w.dtype, function="relu2", width=inner))
    return w.linear(f"{path}.down_proj", f"{role}.down", act, inner, hidden)


def _mlp(w: ConfigWriter, config: Mapping[str, Any], source: str) -> str:
    return _plain_mlp(w, "mixer", source, need(config, "hidden_size"), need(config, "intermediate_size"), "mlp")


def _experts(w: ConfigWriter, config: Mapping[str, Any], source: str) -> str:
    hidden, experts = need(config, "hidden_size"), need(config, "n_routed_experts")
    top_k, inner = need(config, "num_experts_per_tok"), need(config, "moe_intermediate_size")
    latent = config.get("moe_latent_size")
    width = int(latent or hidden)
    routed = TOKENS.times(top_k)
    router = w.linear("mixer.gate", "router", source, hidden, experts)
    chosen = w.emit(
        TopK(
            name="mixer.gate.topk", role="router", inputs=(router,), dtype=w.dtype,
            experts=experts, top_k=top_k, scoring="sigmoid",
        )
    )  # fmt: skip
    inputs = w.linear("mixer.fc1_latent_proj", "mlp.latent_in", source, hidden, width) if latent else source
    rows = w.emit(
        Dispatch(
            name="mixer.experts.dispatch", role="experts", inputs=in_order(w, inputs, chosen), dtype=w.dtype,
            rows=routed, width=width,
        )
    )  # fmt: skip

    def grouped(part: str, source: str, k: int, n: int) -> str:
        name = f"mixer.experts.{part}_proj"
        return w.emit(
            GroupedLinear(
                name=name, role="experts", part=part, inputs=(source,), dtype=w.dtype, rows=routed,
                params=(w.param(name, experts, n, k),), experts=experts, k=k, n=n,
            )
        )  # fmt: skip

    up = grouped("up", rows, width, inner)
    act = w.emit(
        Activation(
            name="mixer.experts.act", role="experts", inputs=(up,), dtype=w.dtype, rows=routed,
            function="relu2", width=inner,
        )
    )  # fmt: skip
    down = grouped("down", act, inner, width)
    out = w.emit(
        Combine(
            name="mixer.experts.combine", role="experts", inputs=in_order(w, chosen, down), dtype=w.dtype,
            top_k=top_k, width=width,
        )
    )  # fmt: skip
    if latent:
        out = w.linear("mixer.fc2_latent_proj", "mlp.latent_out", out, width, hidden)
    shared = config.get("moe_shared_expert_intermediate_size")
    if shared:
        side = _plain_mlp(w, "mixer.shared_experts", source, hidden, int(shared), "shared_experts")
        out = w.add("mixer.add", "shared_experts", out, side, width=hidden)
    return out
