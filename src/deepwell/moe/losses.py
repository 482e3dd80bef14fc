"""The router's losses in fp32, and how their gradients reach it without passing through the model's loss.

    balance   E / (K n^2) * sum_e P_e c_e     P_e the probabilities of expert e added up over n tokens, c_e its
                                              choices; 1 where the load is even (Switch Transformer's for K = 1)
    z         mean over tokens of logsumexp(logits)^2

`inject` puts a loss's gradient where the router's weights pass: whoever calls the block need not collect losses, so
they are right under pipeline stages, activation checkpointing, gradient accumulation and torch.compile. Statistics
travel the same way, as the gradient of a leaf of their own: a backward runs once, whatever is recomputed for it.
"""

# Shapes: B sequences, S tokens of one, T = B * S, E experts, K choices a token.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def count_choices(index_TK: Tensor, experts: int, sequences: int = 1) -> Tensor:
    """[B, E] in fp32: how often each expert was chosen; negative choices count nowhere."""
    index = index_TK.reshape(sequences, -1)
    counts = torch.zeros(sequences, experts, dtype=torch.float32, device=index.device)
    return counts.scatter_add_(1, index.clamp(min=0), (index >= 0).float())


def balance_loss(
    scores_TE: Tensor,
    index_TK: Tensor,
    token_mask: Tensor | None = None,
    *,
    sequences: int = 1,
    elsewhere: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The mean over sequences of the load balancing loss; all tokens are one sequence by default.

    `token_mask` is True for tokens that count; choices of others must be negative. `elsewhere` has the choices [E] and
    the number of tokens of other ranks and micro-batches: load is then counted over all of them.
    """
    experts, top_k = scores_TE.shape[1], index_TK.shape[1]
    counts_BE = count_choices(index_TK, experts, sequences)
    if token_mask is None:
        tokens_B1 = torch.full((sequences, 1), scores_TE.shape[0] / sequences, device=scores_TE.device)
        sums_BE = scores_TE.view(sequences, -1, experts).sum(1)
    else:
        mask = token_mask.reshape(sequences, -1, 1).to(scores_TE.dtype)
        tokens_B1 = mask.sum(1)
        sums_BE = (scores_TE.view(sequences, -1, experts) * mask).sum(1)
    all_tokens = tokens_B1
    if elsewhere is not None:
        counts_BE, all_tokens = counts_BE + elsewhere[0], tokens_B1 + elsewhere[1]
    share_BE = counts_BE / (top_k * all_tokens).clamp(min=1)
    losses_B = experts * (share_BE * sums_BE / tokens_B1.clamp(min=1)).sum(1)
    return losses_B.sum() / (tokens_B1 > 0).sum().clamp(min=1)


def z_loss(logits_TE: Tensor, token_mask: Tensor | None = None) -> Tensor:
    """The mean over tokens of logsumexp(logits)^2."""
    squares_T = torch.logsumexp(logits_TE, dim=-1).square()
    if token_mask is None:
        return squares_T.sum() / max(1, squares_T.shape[0])
    mask = token_mask.reshape(-1).to(squares_T.dtype)
    return (squares_T * mask).sum() / mask.sum().clamp(min=1)


def inject(carrier: Tensor, loss: Tensor, leaf: Tensor, statistics: Tensor) -> Tensor:
    """`carrier` unchanged; its backward adds the gradient of `loss`, and `statistics` to the gradient of `leaf`."""
    return _Inject.apply(carrier, loss, leaf, statistics)


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, leaf: Tensor, statistics: Tensor) -> Tensor:
        ctx.save_for_backward(loss, statistics)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        loss, statistics = ctx.saved_tensors
        return grads[0], torch.ones_like(loss), statistics, None
