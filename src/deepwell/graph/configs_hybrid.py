"""Hybrid decoders (Nemotron-H and its MoE children) from their config: one mixer per layer, by a pattern.

    M  Mamba-2      *  attention      E  experts, in a latent space where `moe_latent_size` is set      -  plain MLP

Every layer is norm, mixer, residual. The selective scan is written as the products of its chunked form (Dao and Gu,
arXiv:2405.21060, section 6), so that its flops count; elementwise parts of the scan are not.
"""

from collections.abc import Mapping
from typing import Any

from deepwell.errors import ConfigError
from deepwell.graph.config_writer import ConfigWriter, Experts, head_and_loss, model_fields, need
from deepwell.graph.ops import BATCH, BLOCK_INPUT, SEQ, Activation, Attention, Conv, Extent, Matmul

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
    hidden, vocab = need(config, "hidden_size"), need(config, "vocab_size")
    stem, tail = ConfigWriter(dtype), ConfigWriter(dtype)
    stem.embedding("model.embeddings", vocab, hidden)
    normed = tail.norm("model.norm_f", BLOCK_INPUT, hidden)
    tied = "model.embeddings.weight" if config.get("tie_word_embeddings", False) else None
    head_and_loss(tail, normed, hidden, vocab, tied)

    def write(w: ConfigWriter, kind: str) -> None:
        normed = w.norm("norm", BLOCK_INPUT, hidden)
        out = {"M": _mamba, "*": _attention, "E": _experts, "-": _mlp}[kind](w, config, normed)
        w.add("add", "residual", BLOCK_INPUT, out, width=hidden)

    fields = model_fields(config, stem, tail, "model.layers", hybrid_pattern(config), write)
    notes = ("hybrid decoder: the scan is written as the products of its chunked form",)
    return {**fields, "max_positions": config.get("max_position_embeddings"), "notes": notes}


def _mamba(w: ConfigWriter, config: Mapping[str, Any], source: str) -> str:
    hidden, heads = need(config, "hidden_size"), need(config, "mamba_num_heads")
    dim, state = need(config, "mamba_head_dim"), need(config, "ssm_state_size")
    groups, chunk = need(config, "n_groups"), int(config.get("chunk_size") or 128)
    inner = heads * dim
    channels = inner + 2 * groups * state
    mixed = w.linear("mixer.in_proj", "mixer.in", source, hidden, inner + channels + heads)
    window = need(config, "conv_kernel")
    kernel = (w.param("mixer.conv1d.weight", channels, window), w.param("mixer.conv1d.bias", channels))
    conv = w.op(Conv, "mixer.conv1d", "mixer", mixed, k=window, n=channels, params=kernel)

    def product(name: str, sources: tuple[str, ...], batch: int, n: int, k: int) -> str:
        sizes = {"batch": BATCH.times(batch), "m": SEQ, "n": Extent(n), "k": Extent(k)}
        return w.op(Matmul, f"mixer.scan.{name}", "mixer", *sources, **sizes)

    # Inside a chunk: C B^T and its product with x; between chunks: B^T x into the state and C times the state.
    scores = product("scores", (conv,), groups, chunk, state)
    inside = product("inside", (conv, scores), heads, dim, chunk)
    states = product("states", (conv,), heads, dim, state)
    across = product("across", (conv, states), heads, dim, state)
    summed = w.add("mixer.scan.add", "mixer", inside, across, width=inner)
    params = tuple(w.param(f"mixer.{name}", heads) for name in ("A_log", "D", "dt_bias"))
    how = {"function": "silu", "width": inner, "gated": True, "params": params}
    gated = w.op(Activation, "mixer.gate", "mixer", mixed, summed, **how)
    normed = w.norm("mixer.norm", gated, inner)
    return w.linear("mixer.out_proj", "mixer.out", normed, inner, hidden)


def _attention(w: ConfigWriter, config: Mapping[str, Any], source: str) -> str:
    hidden, heads = need(config, "hidden_size"), need(config, "num_attention_heads")
    kv_heads, dim = need(config, "num_key_value_heads"), int(config.get("head_dim") or hidden // heads)
    q = w.linear("mixer.q_proj", "attention.q", source, hidden, heads * dim)
    k = w.linear("mixer.k_proj", "attention.k", source, hidden, kv_heads * dim)
    v = w.linear("mixer.v_proj", "attention.v", source, hidden, kv_heads * dim)
    sizes = {"q_heads": heads, "kv_heads": kv_heads, "qk_dim": dim, "v_dim": dim}
    attended = w.op(Attention, "mixer.attention", "attention", q, k, v, **sizes)
    return w.linear("mixer.o_proj", "attention.o", attended, heads * dim, hidden)


def _plain_mlp(w: ConfigWriter, path: str, source: str, hidden: int, inner: int, role: str) -> str:
    up = w.linear(f"{path}.up_proj", f"{role}.up", source, hidden, inner)
    act = w.activation(path, role, up, function="relu2", width=inner)
    return w.linear(f"{path}.down_proj", f"{role}.down", act, inner, hidden)


def _mlp(w: ConfigWriter, config: Mapping[str, Any], source: str) -> str:
    return _plain_mlp(w, "mixer", source, need(config, "hidden_size"), need(config, "intermediate_size"), "mlp")


def _experts(w: ConfigWriter, config: Mapping[str, Any], source: str) -> str:
    hidden, latent = need(config, "hidden_size"), config.get("moe_latent_size")
    asked = Experts(
        count=need(config, "n_routed_experts"), top_k=need(config, "num_experts_per_tok"),
        width=int(latent or hidden), inner=need(config, "moe_intermediate_size"), function="relu2",
    )  # fmt: skip
    router = w.linear("mixer.gate", "router", source, hidden, asked.count)
    chosen = w.top_k(router, asked.count, asked.top_k, "sigmoid")
    inputs = w.linear("mixer.fc1_latent_proj", "mlp.latent_in", source, hidden, asked.width) if latent else source
    out = w.experts("mixer.experts", inputs, chosen, asked)
    if latent:
        out = w.linear("mixer.fc2_latent_proj", "mlp.latent_out", out, asked.width, hidden)
    shared = config.get("moe_shared_expert_intermediate_size")
    if shared:
        side = _plain_mlp(w, "mixer.shared_experts", source, hidden, int(shared), "shared_experts")
        out = w.add("mixer.add", "shared_experts", out, side, width=hidden)
    return out
