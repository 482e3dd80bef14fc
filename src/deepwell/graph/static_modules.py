"""What single modules say about themselves: their ops by class, parameters and name, for the static walk."""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from deepwell.graph.lift.extents import Sizes
from deepwell.graph.lift.site import joined, parent
from deepwell.graph.ops import (
    TOKENS,
    Activation,
    Attention,
    Combine,
    Conv,
    Dispatch,
    Embedding,
    Extent,
    GroupedLinear,
    Linear,
    Norm,
    Op,
    Other,
    Rope,
    TopK,
)

Found = list[tuple[Op, list[str]]]  # ops with the full names of their parameters

# Last word of a linear's path -> part; the first that fits.
_ATTENTION_PARTS = (
    (r"q_a(_proj)?|wq_a", "q_a"), (r"q_b(_proj)?|wq_b", "q_b"), (r"kv_a\w*|wkv_a", "kv_a"), (r"kv_b\w*|wkv_b", "kv_b"),
    (r"qkv\w*|query_key_value|c_attn|Wqkv|in_proj\w*|att_proj|W_pack", "qkv"), (r"kv(_proj)?", "kv"),
    (r"q(_proj|uery|_lin)?|wq", "q"), (r"k(_proj|ey|_lin)?|wk", "k"), (r"v(_proj|alue|_lin)?|wv", "v"),
    (r"o(_proj|ut_proj|ut_lin|ut)?|wo|dense|c_proj|attn_out", "o"),
)  # fmt: skip
_MLP_PARTS = (
    (r"gate_up\w*|gate_and_up\w*|Wi", "gate_up"), (r"gate(_proj)?|w1|wi_0|linear_1?", "gate"),
    (r"up(_proj)?|w3|wi_1|fc1|c_fc|dense_h_to_4h|fc_in|lin1|linear1|wi|intermediate\w*", "up"),
    (r"down(_proj)?|w2|wo|fc2|c_proj|dense_4h_to_h|fc_out|lin2|linear2|linear_v", "down"),
)  # fmt: skip
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_k")
_FUNCTIONS = {
    "silu": "silu", "swish": "silu", "newgelu": "gelu_tanh", "pytorchgelutanh": "gelu_tanh", "quickgelu": "quick_gelu",
    "gelu": "gelu", "relusquared": "relu2", "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh", "mish": "mish",
}  # fmt: skip


class ModuleContext:
    """What the readers of single modules must know about the whole model."""

    def __init__(self, model: nn.Module, sizes: Sizes) -> None:
        self.model = model
        self.sizes = sizes
        self.config: Any = getattr(model, "config", None)
        self.modules = dict(model.named_modules())
        self.has_rotary = any("rotary" in type(m).__name__.lower() for m in self.modules.values())
        self.is_causal = "causallm" in type(model).__name__.lower() or bool(getattr(self.config, "is_decoder", False))
        tables = [m for m in self.modules.values() if _is_embedding(m)]
        self.vocabularies = {_shape(m)[0] for m in tables}
        self.hidden = self._hidden(tables)
        self.experts = {p for p, m in self.modules.items() if _stacks(m)}
        self.attentions = {p for p, m in self.modules.items() if _is_attention(m)}

    def _hidden(self, tables: list[nn.Module]) -> int | None:
        value = getattr(self.config, "hidden_size", None)
        if isinstance(value, int):
            return value
        return _shape(tables[0])[1] if tables else None

    def setting(self, module: nn.Module, names: Sequence[str]) -> int | None:
        """A whole number that the module, else the config, holds under one of these names."""
        for holder in (module, getattr(module, "config", None), self.config):
            for name in names:
                value = getattr(holder, name, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None

    def attention_of(self, path: str) -> str | None:
        """The innermost attention module that a path stands in."""
        inside = [a for a in self.attentions if path.startswith(a + ".")]
        return max(inside, key=len, default=None)

    def top_k(self, path: str) -> int:
        for holder in (path, parent(path)):
            if holder in self.modules:
                found = self.setting(self.modules[holder], _TOP_K)
                if found:
                    return found
        return 1

    def rows(self, shape: tuple[int, ...] | None) -> Extent:
        return TOKENS if shape is None or len(shape) < 2 else self.sizes.rows(shape[:-1])


# ---- what a module is ----


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _shape(module: nn.Module) -> tuple[int, ...]:
    """The shape of the module's weight."""
    return tuple(int(size) for size in _own(module)["weight"].shape)


def _name(module: nn.Module) -> str:
    return type(module).__name__.lower()


def _is_embedding(module: nn.Module) -> bool:
    weight = _own(module).get("weight")
    return (
        weight is not None and weight.dim() == 2 and (isinstance(module, nn.Embedding) or "embedding" in _name(module))
    )


def _is_linear(module: nn.Module) -> bool:
    weight = _own(module).get("weight")
    return weight is not None and weight.dim() == 2 and not _is_embedding(module)


def _stacks(module: nn.Module) -> list[str]:
    """Names of the 3-D parameters that hold one matrix per expert."""
    if isinstance(module, (nn.modules.conv._ConvNd, ParametrizationList)):  # the norm of a convolution's weight
        return []
    return [name for name, p in _own(module).items() if p.dim() == 3 and p.shape[0] > 1]


def _is_attention(module: nn.Module) -> bool:
    words = _name(module)
    if not ("attention" in words or "attn" in words) or isinstance(module, nn.MultiheadAttention):
        return False
    parts = {_part(name, _ATTENTION_PARTS) for name, child in module.named_children() if _is_linear(child)}
    return bool(parts & {"q", "qkv", "kv", "q_a", "q_b", "k"})


def _part(name: str, table: Sequence[tuple[str, str]]) -> str:
    return next((part for pattern, part in table if re.fullmatch(pattern, name)), "")


# ---- reading ----


def read_module(facts: ModuleContext, path: str, module: nn.Module, shape: tuple[int, ...] | None) -> Found:
    """The ops of one module, its children not included, in execution order."""
    own = [joined(path, name) for name in _own(module)]
    if isinstance(module, nn.MultiheadAttention):
        return _multihead(facts, path, module, own)
    if _is_embedding(module):
        vocab, width = _shape(module)
        rows = TOKENS if shape is None else facts.sizes.rows(shape)
        return [(Embedding(name=path, role="embedding", vocab=vocab, width=width, rows=rows), own)]
    if isinstance(module, nn.modules.conv._ConvNd):
        weight = module.weight
        k = int(weight[0].numel())
        return [(Conv(name=path, role="mixer" if "mixer" in path else "other", k=k, n=module.out_channels), own)]
    if "norm" in _name(module) and own and all(p.dim() == 1 for p in _own(module).values()):
        return [_norm(facts, path, module, own, shape)]
    if _stacks(module):
        return _experts(facts, path, module, own)
    if _is_linear(module):
        return _linear(facts, path, module, own, shape)
    if _is_activation(module):
        return _activation(facts, path, module)
    if own:
        return [(Other(name=path or "parameters", role="other", function=type(module).__name__), own)]
    return []


def _norm(
    facts: ModuleContext, path: str, module: nn.Module, own: list[str], shape: tuple[int, ...] | None
) -> tuple[Op, list[str]]:
    width = next(iter(_own(module).values())).numel()
    words = _name(module)
    kind = "rms" if "rms" in words else "batch" if "batch" in words else "group" if "group" in words else "layer"
    return Norm(name=path, role="norm", norm=kind, width=width, rows=facts.rows(shape)), own


def _linear(facts: ModuleContext, path: str, module: nn.Module, own: list[str], shape: tuple[int, ...] | None) -> Found:
    n, k = _shape(module)
    if "conv1d" in _name(module):  # GPT-2 stores it the other way round
        n, k = k, n
    role, part = _place(facts, path, n)
    rows = facts.rows(shape)
    linear = Linear(name=path, role=role, part=part, k=k, n=n, bias="bias" in _own(module), rows=rows)
    found: Found = [(linear, own)]
    if role == "router":
        found.append((TopK(name=f"{path}.topk", role="router", experts=n, top_k=facts.top_k(path)), []))
    attention = facts.attention_of(path)
    if part == "o" and attention is not None:
        return [*_attention(facts, attention), *found]
    return found


def _place(facts: ModuleContext, path: str, n: int) -> tuple[str, str]:
    """Role and part of a linear by where it stands and what it is called."""
    last = path.rpartition(".")[2]
    if facts.attention_of(path) is not None:
        return "attention", _part(last, _ATTENTION_PARTS)
    holder = parent(path)
    beside_experts = any(parent(e) == holder or e == holder for e in facts.experts)
    if beside_experts and last in ("gate", "router", "router_proj", "classifier", "wg"):
        return "router", ""
    if n in facts.vocabularies and last in ("lm_head", "embed_out", "output", "head", "decoder", "output_layer", "cls"):
        return "head", ""
    if "mixer" in path or "mamba" in path or "linear_attn" in path:
        return "mixer", ""
    part = _part(last, _MLP_PARTS)
    if part:
        shared = "shared" in path or any(holder.startswith(parent(e) + ".") for e in facts.experts if parent(e))
        return "shared_experts" if shared and facts.experts else "mlp", part
    return "other", ""


def _attention(facts: ModuleContext, path: str) -> Found:
    module = facts.modules[path]
    widths = {
        _part(name, _ATTENTION_PARTS): _shape(child) for name, child in module.named_children() if _is_linear(child)
    }
    heads = facts.setting(module, _HEADS) or 1
    q_width = next((widths[p][0] for p in ("q", "q_b") if p in widths), None)
    fused = min(widths["qkv"]) if q_width is None and "qkv" in widths else None
    dim = facts.setting(module, ("head_dim", "qk_head_dim")) or (q_width or fused or facts.hidden or heads) // heads
    if q_width is not None:
        dim = q_width // heads or dim
    kv_heads = facts.setting(module, _KV_HEADS) or heads
    v_dim = facts.setting(module, ("v_head_dim",)) if "kv_b" in widths else None
    if "k" in widths and widths["k"][0] % dim == 0:
        kv_heads = widths["k"][0] // dim
    window = getattr(module, "sliding_window", None)
    found: Found = []
    if facts.has_rotary:
        rotary = facts.setting(module, ("qk_rope_head_dim", "rotary_ndims")) or dim
        found.append(
            (Rope(name=f"{path}.rope", role="attention", q_heads=heads, kv_heads=kv_heads, rotary_dim=rotary), [])
        )
    causal = bool(getattr(module, "is_causal", facts.is_causal))
    op = Attention(
        name=f"{path}.attention", role="attention", q_heads=heads, kv_heads=kv_heads, qk_dim=dim, v_dim=v_dim or dim,
        causal=causal, window=window if isinstance(window, int) else None,
    )  # fmt: skip
    return [*found, (op, [])]


def _multihead(facts: ModuleContext, path: str, module: nn.MultiheadAttention, own: list[str]) -> Found:
    """torch's own attention: the projection in front is a parameter of the module, the one behind a child."""
    width, heads = module.embed_dim, module.num_heads
    projections: Found = []
    for name in own:
        shape = tuple(map(int, module.get_parameter(name.rpartition(".")[2]).shape))
        if len(shape) == 2:
            part = "qkv" if shape[0] == 3 * width else name.rpartition(".")[2][0]
            bias = [n for n in own if n.endswith("in_proj_bias")] if not projections else []
            linear = Linear(name=name, role="attention", part=part, k=shape[1], n=shape[0], bias=bool(bias))
            projections.append((linear, [name, *bias]))
    taken = {n for _, names in projections for n in names}
    attention = Attention(
        name=joined(path, "attention"), role="attention", q_heads=heads, kv_heads=heads, qk_dim=width // heads,
        v_dim=width // heads, causal=facts.is_causal,
    )  # fmt: skip
    return [*projections, (attention, [n for n in own if n not in taken])]


def _experts(facts: ModuleContext, path: str, module: nn.Module, own: list[str]) -> Found:
    stacks = _stacks(module)
    top_k = facts.top_k(path)
    rows = TOKENS.times(top_k)
    hidden = facts.hidden
    found: Found = []
    biases = {n for n in own if n.endswith("_bias") and n[: -len("_bias")] in own}
    taken: set[str] = set()
    for i, name in enumerate(stacks):
        experts, a, b = map(int, _own(module)[name].shape)
        is_last = i == len(stacks) - 1 and len(stacks) > 1
        # One side of each matrix is the hidden width; where both are, the stored order [experts, out, in] decides.
        k, n = (b, a) if hidden is None or (a == hidden if is_last else b == hidden) else (a, b)
        full = joined(path, name)
        params = [full, *([f"{full}_bias"] if f"{full}_bias" in biases else [])]
        taken.update(params)
        part = "down" if is_last else _part(name, _MLP_PARTS) or ("gate_up" if len(stacks) == 2 else "")
        found.append(
            (
                GroupedLinear(
                    name=full, role="experts", part=part, experts=experts, k=k, n=n, bias=len(params) > 1, rows=rows
                ),
                params,
            )
        )
    first, last = found[0][0], found[-1][0]
    assert isinstance(first, GroupedLinear) and isinstance(last, GroupedLinear)
    act = Activation(
        name=joined(path, "act"), role="experts", function=_config_function(facts), width=last.k, gated=True, rows=rows
    )
    dispatch = Dispatch(name=joined(path, "dispatch"), role="experts", rows=rows, width=first.k)
    combine = Combine(name=joined(path, "combine"), role="experts", top_k=top_k, width=last.n)
    rest = [n for n in own if n not in taken]
    other: Found = [(Other(name=path, role="experts", function=type(module).__name__), rest)] if rest else []
    return [(dispatch, []), *found[:-1], (act, []), found[-1], (combine, []), *other]


# ---- activations ----


def _is_activation(module: nn.Module) -> bool:
    is_torch = type(module).__module__ == "torch.nn.modules.activation" and "Softmax" not in type(module).__name__
    return (is_torch or _name(module).endswith("activation")) and not isinstance(module, nn.MultiheadAttention)


def _function(module: nn.Module) -> str:
    if isinstance(module, nn.GELU):
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    words = _name(module).removesuffix("activation")
    return _FUNCTIONS.get(words, words)


def _config_function(facts: ModuleContext) -> str:
    name = getattr(facts.config, "hidden_act", None)
    return _FUNCTIONS.get(str(name).replace("_", ""), str(name)) if isinstance(name, str) else "silu"


def _activation(facts: ModuleContext, path: str, module: nn.Module) -> Found:
    """A function module: its width is that of the linear behind it."""
    holder = parent(path)
    if holder in facts.experts:
        return []  # the experts' own, already written with them
    siblings = {name: child for name, child in facts.modules[holder].named_children() if _is_linear(child)}
    parts = {_part(name, _MLP_PARTS): child for name, child in siblings.items()}
    down = parts.get("down")
    if down is not None:
        width = _shape(down)[0 if "conv1d" in _name(down) else 1]
    else:
        before = list(siblings.values())
        width = _shape(before[0])[0] if before else 1
    gated = "gate_up" in parts or ("gate" in parts and "up" in parts)
    role, _ = _place(facts, joined(holder, next((n for n in siblings if _part(n, _MLP_PARTS)), "act")), 0)
    op = Activation(name=joined(holder, "act"), role=role, function=_function(module), width=width, gated=gated)
    return [(op, [joined(path, name) for name in _own(module)])]
