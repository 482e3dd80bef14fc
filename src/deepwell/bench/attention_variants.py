"""Attention beyond plain causal, for `deepwell bench attention`: sizes, the formula and the ways to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.kernels.attention.narrow_values import WAYS, narrow_values_attention

Attend = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kind of attention: sizes of q, k and v, what computes it exactly, and what is timed."""

    name: str
    sizes: tuple[tuple[int, ...], ...]
    ways: Mapping[str, Callable[[], Attend]]
    exact: Attend
    flops: float


def through_the_engine(attend: Attend) -> Attend:
    """What an engine makes of a model's attention."""
    from deepwell.engine.backend import compile_graph
    from deepwell.engine.passes.work import BackendOptions

    options = BackendOptions(use_inductor=torch.cuda.is_available())
    return torch.compile(attend, backend=lambda graph, example: compile_graph(graph, example, options))


def variants(B: int, H: int, G: int, S: int, D: int) -> Iterator[Variant]:
    """All variants at a shape: B batch, H query heads, G key-value heads, S sequence, D head width."""
    yield _narrow_values(B, H, S, D)


def _narrow_values(B: int, H: int, S: int, D: int) -> Variant:
    """Latent attention: keys half as wide again as values."""
    wide = D * 3 // 2
    ways: dict[str, Callable[[], Attend]] = {
        way: partial(partial, narrow_values_attention, scale=wide**-0.5, way=way) for way in WAYS
    }
    return Variant(
        name=f"values of {D}, keys of {wide}",
        sizes=((B, H, S, wide), (B, H, S, wide), (B, H, S, D)),
        ways={**ways, "Deepwell": partial(through_the_engine, _causal)},
        exact=_written,
        flops=B * H * S**2 * (4 * wide + 3 * D),
    )


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf).softmax(-1) @ v
