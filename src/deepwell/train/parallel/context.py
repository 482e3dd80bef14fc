"""Context parallelism: each rank reads a part of every sequence, and attention sees all of it.

    ulysses      heads and sequence change places around attention: each rank attends whole sequences with some heads
    allgather    each rank gathers all keys and values and attends with its own queries

Both are attention functions of Hugging Face's interface with fixed sizes, so their collectives lie in the layers'
compiled regions. Ulysses sends less and keeps the causal mask implicit; it needs as many heads as ranks. Labels are
shifted before sequences are split. A ring is not executed: it gives the numbers of both others, which stand in for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from deepwell.engine.engine import Engine
from deepwell.errors import UnsupportedError
from deepwell.graph.ir import IR
from deepwell.graph.ops import Attention
from deepwell.train.parallel.mesh import Meshes

_NUMBERS = itertools.count()
# What attention functions are given for some families: scores that are more than a softmax of products.
_EXTRAS = ("softcap", "s_aux", "position_bias")
_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


def choose_kind(ir: IR, kind: str, cp: int, tp: int = 1) -> tuple[str, str]:
    """(the kind that runs, a note where it is not the one that was asked for). A rank of `tp` has its part of heads."""
    sites = [op for ops, _ in ir.parts() for op in ops if isinstance(op, Attention)]
    if not sites:
        raise UnsupportedError(f"cp: {ir.name} has layers without attention; leave cp at 1")
    heads = [(op.q_heads // tp, op.kv_heads // tp) for op in sites]
    fits = all(q % cp == 0 and q % math.lcm(kv, cp) == 0 for q, kv in heads)
    if kind == "allgather" or not fits:
        runs, why = "allgather", f"{heads[0][0]} heads and {heads[0][1]} key-value heads do not divide by it"
    else:
        runs, why = "ulysses", "it sends less and gives the same numbers"
    return runs, "" if runs == kind else f"context parallelism over {cp} ranks: {runs} stands in for {kind}: {why}"


def spread_attention(engine: Engine, meshes: Meshes, notes: list[str]) -> None:
    """Have a model's attention see all parts of the sequence; what is not as asked for is added to `notes`.

    Call it before the engine's first call. Raises UnsupportedError where a model has no attention to replace.
    """
    model, cp = engine.deepwell.model, meshes.layout.cp
    if not hasattr(model, "set_attn_implementation") or not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedError(
            f"cp: {engine.deepwell.ir.name} does not take its attention from Hugging Face's attention interface; "
            "leave cp at 1"
        )
    if getattr(getattr(model, "config", None), "attn_logit_softcapping", None) is not None:
        raise UnsupportedError(f"cp: the attention of {engine.deepwell.ir.name} caps its scores; leave cp at 1")
    for op in (op for ops, _ in engine.deepwell.ir.parts() for op in ops):
        if op.role == "mixer":
            raise UnsupportedError(f"cp: {engine.deepwell.ir.name} mixes tokens by {op.name} as well; leave cp at 1")
        if isinstance(op, Attention) and (not op.causal or op.params):
            what = "sinks" if op.params else "no causal mask"
            raise UnsupportedError(f"cp: the attention of {engine.deepwell.ir.name} has {what}; leave cp at 1")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kind, note = choose_kind(engine.deepwell.ir, meshes.layout.context_parallel_kind, cp, meshes.layout.tp)
    mesh = meshes.ranks["cp"]
    how: tuple[Any, int, int] = (mesh.get_group().group_name, cp, mesh.get_local_rank())
    name = f"deepwell_{kind}_{next(_NUMBERS)}"
    ALL_ATTENTION_FUNCTIONS.register(name, ulysses(*how) if kind == "ulysses" else allgather(*how))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, lambda *_, **__: None)  # attention knows its mask by itself
    model.set_attn_implementation(name)
    notes += [note] if note else []


# ---- attention functions ----


def ulysses(group: Any, cp: int, rank: int) -> Callable[..., tuple[Tensor, None]]:
    """An attention function that exchanges a part of the sequence for a part of the heads, and back."""

    # B batch, H heads, S tokens of this rank, D width of a head.
    def to_heads(x: Tensor) -> Tensor:
        B, H, S, D = x.shape
        if H % cp:
            x, H = x.repeat_interleave(math.lcm(H, cp) // H, dim=1), math.lcm(H, cp)
        x = x.view(B, cp, H // cp, S, D).permute(1, 0, 2, 3, 4).contiguous()
        x = collectives.all_to_all_single_autograd(x, None, None, group)
        return x.permute(1, 2, 0, 3, 4).reshape(B, H // cp, cp * S, D)

    def to_tokens(x: Tensor) -> Tensor:
        B, H, S, D = x.shape
        x = x.view(B, H, cp, S // cp, D).permute(2, 0, 1, 3, 4).contiguous()
        x = collectives.all_to_all_single_autograd(x, None, None, group)
        return x.permute(1, 0, 2, 3, 4).reshape(B, cp * H, S // cp, D)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **how: Any
    ) -> tuple[Tensor, None]:
        _check_known(how)
        q, k, v = to_heads(query), to_heads(key), to_heads(value)
        window = how.get("sliding_window")
        mask = None if window is None or window >= q.shape[2] else _visible(q.shape[2], k.shape[2], 0, window, q.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=how.get("dropout", 0.0), is_causal=mask is None,
            scale=how.get("scaling"), enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return to_tokens(out).transpose(1, 2).contiguous(), None

    return attend


def allgather(group: Any, cp: int, rank: int) -> Callable[..., tuple[Tensor, None]]:
    """An attention function that gathers keys and values along the sequence."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **how: Any
    ) -> tuple[Tensor, None]:
        _check_known(how)
        k, v = (_gather(x.contiguous(), 2, group) for x in (key, value))
        S = query.shape[2]
        mask = _visible(S, cp * S, rank * S, how.get("sliding_window"), query.device)
        out = F.scaled_dot_product_attention(
            query, k, v, attn_mask=mask, dropout_p=how.get("dropout", 0.0), scale=how.get("scaling"),
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    return attend


def _visible(queries: int, keys: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys], True where a query, the first of which is number `first`, sees a key."""
    q = torch.arange(queries, device=device)[:, None] + first
    k = torch.arange(keys, device=device)[None, :]
    seen = k <= q
    return seen if window is None else seen & (k > q - window)


def _check_known(how: dict[str, Any]) -> None:
    for name in _EXTRAS:
        if how.get(name) is not None:
            raise UnsupportedError(f"cp: this model's attention has {name}, which is not executed; leave cp at 1")
