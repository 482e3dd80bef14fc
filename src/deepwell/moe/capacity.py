"""Limits on how many rows an expert computes: dropping, padding and rounding. All shapes are known on the host."""

# Shapes: T tokens, K choices a token, S = T * K, E experts, C capacity of each, R rows after rounding.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepwell.moe.router import Routing


class ExpertRows(NamedTuple):
    """Rows of experts laid one behind the other: whose token each is (0 where none), its expert (-1), its weight."""

    token: Tensor
    expert: Tensor
    weight: Tensor


def rank_in_expert(index_TK: Tensor, weight_TK: Tensor, policy: str, experts: int) -> Tensor:
    """[T, K]: the place of each choice among those of its expert, by weight or by position; T * K where it has none."""
    index = index_TK.reshape(-1)
    last = torch.where(index < 0, experts, index)
    if policy == "probability":
        by_weight = weight_TK.detach().reshape(-1).argsort(descending=True, stable=True)
        order = by_weight[last[by_weight].argsort(stable=True)]
    else:
        order = last.argsort(stable=True)
    in_order = last[order]
    places = torch.arange(order.shape[0], device=order.device)
    rank = places - torch.searchsorted(in_order, in_order)
    rank = torch.where(in_order < experts, rank, order.shape[0])
    return torch.empty_like(rank).scatter_(0, order, rank).view_as(index_TK)


def pad_to_capacity(index_TK: Tensor, weight_TK: Tensor, rank_TK: Tensor, experts: int, capacity: int) -> ExpertRows:
    """Exactly `capacity` rows for each expert; `rank_TK` must be below it where a choice is not negative."""
    slot = torch.where(index_TK >= 0, index_TK * capacity + rank_TK, experts * capacity).reshape(-1)
    choice = torch.full((experts * capacity + 1,), -1, dtype=torch.int64, device=slot.device)
    choice = choice.scatter_(0, slot, torch.arange(slot.shape[0], device=slot.device))[:-1]
    has_one = choice >= 0
    choice = choice.clamp(min=0)
    expert = torch.arange(experts, device=slot.device).repeat_interleave(capacity, output_size=experts * capacity)
    weight = weight_TK.reshape(-1)[choice] * has_one
    return ExpertRows(choice // index_TK.shape[1] * has_one, expert, weight)


def round_rows(routing: Routing, multiple: int, token_mask: Tensor | None = None) -> ExpertRows:
    """Each expert's rows rounded to the nearest multiple: those with the least weights go, or the next ones come in."""
    tokens, experts = routing.dense_TE.shape
    chosen = torch.zeros_like(routing.dense_TE, dtype=torch.bool)
    chosen = torch.cat([chosen, chosen[:, :1]], 1)
    chosen = chosen.scatter_(1, routing.index_TK.where(routing.index_TK >= 0, experts), True)[:, :-1]
    key = routing.dense_TE.detach()
    key = key + chosen * (1 + key.max())
    most = torch.tensor(tokens, device=key.device)
    if token_mask is not None:
        key = key.masked_fill(~token_mask.reshape(-1, 1), -1.0)
        most = token_mask.sum()
    counts = chosen.sum(0)
    counts = torch.minimum((counts + multiple // 2) // multiple, most // multiple) * multiple
    order_TE = key.argsort(dim=0, descending=True, stable=True)
    ends = counts.cumsum(0)
    rows = tokens * routing.index_TK.shape[1] + experts * (multiple // 2)
    place = torch.arange(rows, device=key.device)
    expert = torch.searchsorted(ends, place, right=True)
    has_one = expert < experts
    expert = expert.clamp(max=experts - 1)
    within = place - (ends - counts)[expert]
    token = order_TE[within.clamp(0, tokens - 1), expert] * has_one
    weight = routing.dense_TE[token, expert] * has_one
    return ExpertRows(token, torch.where(has_one, expert, -1), weight)
