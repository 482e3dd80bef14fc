"""The model of a published run: a config from the row's columns and notes, or from a published shape by name. Pure.

Rows give layers, widths, heads and vocabulary; what they leave to notes (MLA ranks, dense first layers, shared
experts, sliding windows) is read there. Hybrid models are named only: `data/published_words.json` has their shapes.
"""

import functools
import json
import re
from dataclasses import replace
from typing import Any

from deepwell.errors import ConfigError
from deepwell.graph.configs import published_config, published_models
from deepwell.graph.ir import IR, Block, Layer
from deepwell.graph.ops import BLOCK_INPUT, Linear, Loss, Norm, Op, Param
from deepwell.hardware.codec import packaged_json
from deepwell.planner.published.record import Record

_WORDS = packaged_json("deepwell.planner", "data", "published_words.json")
# Whose attention or residual stream the vocabulary has no words for.
_UNREADABLE = {
    "deepseek-v4": "compressed sparse attention and hyper-connections have no ops in the IR, and the row has no shape",
}
# More is a mistake in the file, and would be built one by one.
_MOST_LAYERS, _MOST_EXPERTS = 10_000, 100_000
_GPT_LIKE = re.compile(r"^gpt|gpt3|bloom|mpt|mt-nlg|megatron", re.IGNORECASE)


def model_config(record: Record, pad_vocab: int = 1) -> dict[str, Any]:
    """A Hugging Face style config of the row's model. Raises ConfigError with the reason where there is none."""
    name = record.text("model").lower()
    for key, reason in _UNREADABLE.items():
        if key in name:
            raise ConfigError(f"model {record.text('model')}: {reason}")
    for key, config in _WORDS["models"].items():
        if name.startswith(key):
            return {**config, "architectures": [key]}
    published = name.replace("llama3.1", "llama3")
    if any(record.count(key) is None for key in ("hidden", "ffn", "vocab")) and published in published_models():
        return published_config(published)
    shape = _shape(record, name)
    vocab = -(-shape["vocab"] // pad_vocab) * pad_vocab
    base = {"architectures": [record.text("model")], "vocab_size": vocab, "num_hidden_layers": shape["layers"]}
    if record.count("experts"):
        return {**base, **_moe_config(record, shape, name)}
    notes = record.notes.lower()
    is_gpt = bool(_GPT_LIKE.search(name)) and "gpt-oss" not in name
    if is_gpt or ("gelu" in notes and "2-matrix" in notes):
        return {
            **base, "model_type": "gpt2", "n_embd": shape["hidden"], "n_head": shape["heads"],
            "n_layer": shape["layers"], "n_inner": shape["ffn"], "n_positions": record.count("seq_len") or 2048,
            "tie_word_embeddings": not _counts_an_own_head(record, shape, matrices=2, default=False),
        }  # fmt: skip
    squared_relu = "squared-relu" in notes or "nemotron" in name
    qk_norm = "qwen3" in name
    return {
        **base,
        "model_type": "nemotron" if squared_relu else ("qwen3" if qk_norm else "llama"),
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["ffn"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": _head_dim(record, shape),
        "max_position_embeddings": record.count("seq_len"),
        "tie_word_embeddings": not _counts_an_own_head(record, shape, matrices=2 if squared_relu else 3, default=True),
    }


def _counts_an_own_head(record: Record, shape: dict[str, int], *, matrices: int, default: bool) -> bool:
    """Whether head and embedding are two matrices, by which of the two counts is the row's `params_b`.

    Whole numbers of billions are names more than counts, and a vocabulary may have been swapped under them: there the
    family's default stands, or is left only where it is far off.
    """
    params = record.number("params_b")
    if params is None:
        return default
    hidden, head_dim = shape["hidden"], shape["hidden"] // shape["heads"]
    attention = 2 * hidden * head_dim * (shape["heads"] + shape["kv_heads"])
    tied = shape["layers"] * (attention + matrices * hidden * shape["ffn"]) + shape["vocab"] * hidden
    if not default:
        tied += (record.count("seq_len") or 0) * hidden  # the GPT family learns its positions
    own = tied + shape["vocab"] * hidden
    off_tied, off_own = abs(tied / (params * 1e9) - 1), abs(own / (params * 1e9) - 1)
    usual, other = (off_own, off_tied) if default else (off_tied, off_own)
    is_name = params == int(params)
    if is_name and default:
        return default
    return (not default) if other < usual and usual > (0.04 if is_name else 0.02) and other < 0.03 else default


def _shape(record: Record, name: str) -> dict[str, int]:
    known: dict[str, int] = next((shape for key, shape in _WORDS["dense"].items() if key in name), {})
    found = {key: record.count(key) or known.get(key) for key in ("layers", "hidden", "ffn", "heads", "vocab")}
    if found["hidden"] is None or found["vocab"] is None or found["ffn"] is None:
        raise ConfigError(f"model {record.text('model')}: its shape is neither in the row nor known here")
    hidden, vocab, ffn = found["hidden"], found["vocab"], found["ffn"]
    if found["layers"] is None:
        params = record.number("params_b")
        if params is None:
            raise ConfigError(f"model {record.text('model')}: neither layers nor parameters are in the row")
        each = 4 * hidden * hidden + 2 * hidden * ffn
        found["layers"] = max(1, round((params * 1e9 - vocab * hidden) / each))
    if found["heads"] is None:
        # The head count changes no GEMM; 128 wide is the usual head.
        found["heads"] = min((n for n in range(1, 257) if hidden % n == 0), key=lambda n: abs(hidden / n - 128))
    sizes = {key: int(value or 0) for key, value in found.items()}
    for key, most in (("layers", _MOST_LAYERS), ("experts", _MOST_EXPERTS), ("heads", sizes["hidden"])):
        count = sizes.get(key) or record.count(key) or 0
        if count > most:
            raise ConfigError(
                f"model {record.text('model')}: {key} is {count:,}, over {most:,}; is a column in the wrong place?"
            )
    return {**sizes, "kv_heads": record.count("kv_heads") or known.get("kv_heads") or sizes["heads"]}


def _head_dim(record: Record, shape: dict[str, int]) -> int:
    found = re.search(r"head_dim (\d+)", record.notes)
    if found:
        return int(found[1])
    return 128 if shape["hidden"] % shape["heads"] else shape["hidden"] // shape["heads"]


def _moe_config(record: Record, shape: dict[str, int], name: str) -> dict[str, Any]:
    notes = record.notes
    config: dict[str, Any] = {
        "hidden_size": shape["hidden"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": record.count("kv_heads") or shape["heads"],
        "moe_intermediate_size": shape["ffn"],
        "num_experts": record.count("experts"),
        "num_experts_per_tok": record.count("topk") or 2,
    }
    if "MLA" in notes or "kimi" in name or "deepseek-v3" in name:
        return {**config, **_mla(notes, name), **_shared_and_dense(notes, shape["ffn"])}
    if "gpt-oss" in name:
        return {**config, "model_type": "gpt_oss", "head_dim": 64, "sliding_window": 128}
    if "qwen3" in name:
        return {**config, "model_type": "qwen3_moe", "head_dim": _head_dim(record, shape)}
    kind = {"model_type": "mixtral", "hidden_act": "gelu" if "grok" in name else "silu", "sliding_window": None}
    return {**config, **kind, "head_dim": _head_dim(record, shape), **_shared_and_dense(notes, shape["ffn"])}


def _mla(notes: str, name: str) -> dict[str, Any]:
    """Ranks as the notes give them; those of DeepSeek-V3 where they are silent (Kimi-K2 and Moonlight share them)."""
    ranks = {"q_lora": 1536, "kv_lora": 512, "qk_nope": 128, "qk_rope": 64, "v": 128}
    found = dict(re.findall(r"(q_lora|kv_lora|qk_nope|qk_rope|\bv) (\d+)", notes))
    ranks.update({key: int(value) for key, value in found.items()})
    return {
        "model_type": "kimi_k2" if "kimi" in name else "deepseek_v3",
        "q_lora_rank": None if "no q_lora" in notes else ranks["q_lora"],
        "kv_lora_rank": ranks["kv_lora"],
        "qk_nope_head_dim": ranks["qk_nope"],
        "qk_rope_head_dim": ranks["qk_rope"],
        "v_head_dim": ranks["v"],
    }


def _shared_and_dense(notes: str, ffn: int) -> dict[str, Any]:
    config: dict[str, Any] = {}
    dense = re.search(r"first (?:(\d+) )?layers? dense ffn (\d+)", notes)
    if dense:
        config.update(first_k_dense_replace=int(dense[1] or 1), intermediate_size=int(dense[2]))
    width = re.search(r"shared (\d{3,})", notes)
    count = re.search(r"(\d+) shared experts?", notes)
    if width:
        config["n_shared_experts"] = max(1, int(width[1]) // ffn)
    elif count:
        config["n_shared_experts"] = int(count[1])
    return config


def predicts_more_tokens(record: Record) -> int:
    """Prediction heads that the run trained besides the next token's: from the notes, else none."""
    notes = record.notes
    if re.search(r"w/o MTP|no MTP", notes):
        return 0
    if "deepseek-v3" in record.text("model").lower():
        return 1 if re.search(r"MTP counted|w/ MTP|with MTP|-> MTP", notes) or "tmL" in notes else 0
    return 0


def build_ir(record: Record, pad_vocab: int = 1) -> IR:
    """The IR of the row's model; equal models share one object. Raises ConfigError with the reason."""
    config = model_config(record, pad_vocab)
    heads = config.get("num_nextn_predict_layers", 0) or predicts_more_tokens(record)
    return _cached_ir(json.dumps(config, sort_keys=True), heads)


@functools.lru_cache(maxsize=512)
def _cached_ir(config: str, extra_heads: int) -> IR:
    ir = IR.from_config(json.loads(config), dtype="bf16")
    return with_prediction_heads(ir, extra_heads) if extra_heads else ir


def with_prediction_heads(ir: IR, heads: int) -> IR:
    """`ir` with multi-token prediction (DeepSeek-V3 report, section 2.2): per head two norms, a projection of 2h to h,
    one more layer (attention and experts, of a hybrid two) and the shared output head with its loss once more."""
    hidden = next(op.width for op in reversed(ir.tail) if isinstance(op, Norm))
    kinds = _prediction_blocks(ir)
    lead = _prediction_lead(hidden, ir.dtype)
    reads = {BLOCK_INPUT: "mtp.eh_proj"}
    first = (replace(op, inputs=tuple(reads.get(e, e) for e in op.inputs)) for op in ir.blocks[kinds[0]].ops)
    blocks = (*ir.blocks, Block(ops=(*lead, *first)))
    layers = list(ir.layers)
    for head in range(heads):
        layers.append(Layer(path=f"mtp.{head}", block=len(blocks) - 1))
        layers += [Layer(path=f"mtp.{head}.{i}", block=kind) for i, kind in enumerate(kinds[1:])]
    tail = list(ir.tail)
    for head in range(heads):
        tail += [_again(op, f"mtp.{head}.") for op in ir.tail]
    return replace(ir, blocks=blocks, layers=tuple(layers), tail=tuple(tail))


def _prediction_blocks(ir: IR) -> tuple[int, ...]:
    """The blocks of one prediction head: the last decoder layer's, or attention and experts of a hybrid."""
    has = [{op.kind for op in block.ops} for block in ir.blocks]
    whole = [layer.block for layer in ir.layers if "attention" in has[layer.block] and "linear" in has[layer.block]]
    last = ir.layers[-1].block
    if "attention" in has[last]:
        return (last,)
    attention = whole[-1]
    experts = [layer.block for layer in ir.layers if "grouped_linear" in has[layer.block]]
    return (attention, experts[-1]) if experts else (attention,)


def _prediction_lead(hidden: int, dtype: str) -> tuple[Op, ...]:
    def norm(name: str) -> Norm:
        weight = Param(name=f"{name}.weight", shape=(hidden,), dtype=dtype)
        return Norm(
            name=name, role="norm", inputs=(BLOCK_INPUT,), params=(weight,), dtype=dtype, norm="rms", width=hidden
        )

    weight = Param(name="mtp.eh_proj.weight", shape=(hidden, 2 * hidden), dtype=dtype)
    project = Linear(
        name="mtp.eh_proj", role="mlp", part="mtp", inputs=("mtp.enorm", "mtp.hnorm"), params=(weight,), dtype=dtype,
        k=2 * hidden, n=hidden,
    )  # fmt: skip
    return norm("mtp.enorm"), norm("mtp.hnorm"), project


def _again(op: Op, prefix: str) -> Op:
    """An op of the tail for another head: its own name, the weights shared."""
    inputs = tuple(edge if edge.startswith("@") else prefix + edge for edge in op.inputs)
    params = tuple(replace(p, name=prefix + p.name, tied_to=p.tied_to or p.name) for p in op.params)
    if isinstance(op, Norm):
        params = tuple(replace(p, name=prefix + p.name) for p in op.params)
    assert isinstance(op, (Norm, Linear, Loss)), op
    return replace(op, name=prefix + op.name, inputs=inputs, params=params)
