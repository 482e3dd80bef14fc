"""Attention beyond plain causal, for `deepwell bench attention`: sizes, the formula and the kernels for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from deepwell.kernels.attention.flash import NO_WINDOW
from deepwell.kernels.attention.flex import NO_CAP, as_written, compiled, flex_attention, flex_attention_ref
from deepwell.kernels.attention.narrow_values import WAYS, narrow_values_attention

Attend = Callable[..., Tensor]
_CAP = 50.0


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
    documents = (torch.arange(S) + torch.arange(B)[:, None] * S // 16) // max(1, S // 4)
    yield _flexible("packed", (B, H, G, S, D), documents, NO_WINDOW, NO_CAP)
    yield _flexible(f"packed, window {S // 8}", (B, H, G, S, D), documents, S // 8, NO_CAP)
    # As Gemma 2: one sequence, for all scores are held where the cap is written out.
    wide = (1, max(G, H // 2), G, S, 2 * D)
    yield _flexible("soft cap", wide, None, NO_WINDOW, _CAP)
    yield _flexible(f"soft cap, window {S // 2}", wide, None, S // 2, _CAP)


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


def _flexible(
    name: str, sizes: tuple[int, int, int, int, int], documents: Tensor | None, window: int, cap: float
) -> Variant:
    """Documents, a window or a soft cap, written out with a mask of all pairs, by FlexAttention, and by the engine."""
    B, H, G, S, D = sizes
    scale = D**-0.5

    def place(q: Tensor) -> Tensor | None:
        return None if documents is None else documents.to(q.device)

    def mask_of(q: Tensor, numbers: Tensor | None) -> Tensor:
        at = torch.arange(S, device=q.device)
        is_open = at[None, :] <= at[:, None]
        if window != NO_WINDOW:
            is_open = is_open & (at[None, :] > at[:, None] - window)
        is_open = is_open[None, None]
        if numbers is not None:
            is_open = is_open & (numbers[:, None, :, None] == numbers[:, None, None, :])
        return (
            is_open
            if cap == NO_CAP
            else torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~is_open, torch.finfo(q.dtype).min)
        )

    def lazily(make: Callable[[Tensor, Tensor, Tensor], Attend]) -> Callable[[], Attend]:
        """What is compiled for operands, when they come."""

        def start() -> Attend:
            made: list[Attend] = []

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                if not made:
                    made.append(make(q, k, v))
                return made[0](q, k, v)

            return attend

        return start

    def written(q: Tensor, k: Tensor, v: Tensor) -> Attend:
        return compiled(as_written, [q, k, v], (mask_of(q, place(q)), scale, cap), by_inductor=q.is_cuda)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Attend:
        return compiled(flex_attention, [q, k, v], (place(q), scale, window, cap), by_inductor=q.is_cuda)

    def engine(q: Tensor, k: Tensor, v: Tensor) -> Attend:
        numbers = place(q)
        return through_the_engine(lambda q, k, v: as_written(q, k, v, mask_of(q, numbers), scale, cap))

    at = torch.arange(S)
    first = at * 0 if documents is None else torch.searchsorted(documents[0].contiguous(), documents[0].contiguous())
    seen = (at - first + 1) if window == NO_WINDOW else (at - first + 1).clamp(max=window)
    return Variant(
        name=name,
        sizes=((B, H, S, D), (B, G, S, D), (B, G, S, D)),
        ways={"as written": lazily(written), "flex": lazily(flex), "Deepwell": lazily(engine)},
        exact=lambda q, k, v: flex_attention_ref(
            q, k, v, None if documents is None else documents[:1].to(q.device), scale, window, cap
        ),
        flops=14.0 * B * H * D * float(seen.sum()),
    )


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf).softmax(-1) @ v
