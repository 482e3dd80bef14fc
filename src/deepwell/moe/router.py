"""The router: which experts each token goes to, and with which weights. All of it is in fp32."""

# Shapes: T tokens, H their width, E experts, K choices a token.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepwell.kernels.experts.torch_ops import places_of_largest
from deepwell.kernels.gemm.torch_ops import ops
from deepwell.moe.config import MoEConfig
from deepwell.moe.losses import balance_loss, count_choices, inject, z_loss

# Behind the choices of each expert, a router's statistics of a step: see `ExpertLoad` in statistics.py.
EXTRA_STATISTICS = ("dropped", "tokens", "entropy", "balance_loss", "z_loss")
_TINY = torch.finfo(torch.float32).tiny


class Routing(NamedTuple):
    """What the router says. Negative choices take no part: padding, and what a limit on experts dropped."""

    index_TK: Tensor
    weight_TK: Tensor
    logits_TE: Tensor
    scores_TE: Tensor  # a probability for each expert, as the losses see it
    dense_TE: Tensor  # the weight that a token would have at each expert


class Router(nn.Module):
    """Scores tokens and chooses their experts. `weight` is [E, H], as in Hugging Face's routers.

    `load` is a leaf whose gradient collects the statistics of a step; `loss_scale` is what the model's loss is
    multiplied by before its backward.
    """

    load: Tensor
    seen: Tensor
    loss_scale: Tensor
    e_score_correction_bias: Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.bias = nn.Parameter(torch.empty(config.experts)) if config.router.logit_bias else None
        if config.router.bias_rate:
            self.register_buffer("e_score_correction_bias", torch.zeros(config.experts))
        self.register_buffer("load", torch.zeros(config.experts + len(EXTRA_STATISTICS)), persistent=False)
        self.register_buffer("seen", torch.zeros(config.experts + len(EXTRA_STATISTICS)), persistent=False)
        self.register_buffer("loss_scale", torch.ones(()), persistent=False)
        self.load.requires_grad_()
        self.group: Any = None  # of the ranks whose tokens are one batch, for the global scope
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A normal distribution of width 1 / sqrt(H); biases of zero."""
        nn.init.normal_(self.weight, std=self.config.hidden**-0.5)
        for bias in (self.bias, getattr(self, "e_score_correction_bias", None)):
            if bias is not None:
                nn.init.zeros_(bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Buffers move, but stay fp32: bf16 holds no count above 256, and a bias of 0.001 steps would stand still.

        Those that come from the meta device begin anew: no state_dict has them all, and nobody else would fill them.
        """
        before = {name: buffer.detach() for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            assert new is not None
            kept = new.detach() if new.dtype == old.dtype else old.to(new.device)
            if old.is_meta and not new.is_meta:
                kept = torch.full_like(kept, float(name == "loss_scale"), dtype=old.dtype, device=new.device)
            self._buffers[name] = kept.requires_grad_(name == "load")
        return self

    def forward(self, x_TH: Tensor, token_mask: Tensor | None = None) -> Routing:
        """`token_mask` [T] is True for tokens, False for padding, which no expert gets."""
        how = self.config.router
        if self.training and how.jitter:
            x_TH = x_TH * torch.empty_like(x_TH).uniform_(1 - how.jitter, 1 + how.jitter)
        logits_TE = router_logits(x_TH, self.weight)
        if self.bias is not None:
            logits_TE = logits_TE + self.bias.float()
        scores_TE = logits_TE.sigmoid() if how.scoring == "sigmoid" else logits_TE.softmax(-1)
        index_TK = self._choose(logits_TE, scores_TE, token_mask)
        dense_TE = self._weights(logits_TE, scores_TE, index_TK)
        weight_TK = dense_TE.gather(1, index_TK)
        if how.scoring == "sigmoid":
            scores_TE = scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=_TINY)
        if token_mask is not None:
            index_TK = index_TK.masked_fill(~token_mask.reshape(-1, 1), -1)
        return Routing(index_TK, weight_TK, logits_TE, scores_TE, dense_TE)

    @torch.no_grad()
    def _choose(self, logits_TE: Tensor, scores_TE: Tensor, token_mask: Tensor | None) -> Tensor:
        how, config = self.config.router, self.config
        scores = logits_TE if how.top_k_first else scores_TE
        if how.sinkhorn and self.training:
            scores = sinkhorn(logits_TE, how.sinkhorn, token_mask)
        elif how.bias_rate:
            scores = scores + self.e_score_correction_bias
        if how.groups > 1:
            grouped = scores.view(-1, how.groups, config.experts // how.groups)
            best = grouped.max(-1).values if how.group_score == "max" else _two_best(grouped)
            chosen = best.topk(how.top_groups, dim=-1).indices
            stays = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
            scores = grouped.masked_fill(~stays.unsqueeze(-1), -math.inf).view(-1, config.experts)
        return places_of_largest(scores, config.top_k)

    def _weights(self, logits_TE: Tensor, scores_TE: Tensor, index_TK: Tensor) -> Tensor:
        """[T, E]: what each expert's output is multiplied by if this token goes there."""
        how = self.config.router
        if how.top_k_first and how.scoring == "softmax":
            dense = (logits_TE - logits_TE.gather(1, index_TK).logsumexp(-1, keepdim=True)).exp()
        elif how.normalize and self.config.top_k > 1:
            dense = scores_TE / scores_TE.gather(1, index_TK).sum(-1, keepdim=True).clamp(min=_TINY)
        else:
            dense = scores_TE
        return dense * how.scale if how.scale != 1.0 else dense

    def settle(
        self, routing: Routing, weight: Tensor, dropped: Tensor, token_mask: Tensor | None, sequences: int
    ) -> Tensor:
        """The weights, with the losses' gradients behind them; counts the step's statistics in the backward.

        In evaluation, and where no gradient comes back, there is neither.
        """
        if not (self.training and weight.requires_grad):
            return weight
        how = self.config.router
        with torch.no_grad():
            counts_E = count_choices(routing.index_TK, self.config.experts)[0]
            mask = torch.ones_like(routing.logits_TE[:, 0]) if token_mask is None else token_mask.reshape(-1).float()
            tokens = mask.sum()
        loss, values = counts_E.new_zeros(()), {}
        for scope, coefficient in how.balance_loss.items():
            value = balance_loss(
                routing.scores_TE, routing.index_TK, token_mask, sequences=sequences if scope == "sequence" else 1,
                elsewhere=self._elsewhere(counts_E, tokens) if scope == "global" else None,
            )  # fmt: skip
            loss, values["balance_loss"] = loss + coefficient * value, value.detach()
        if how.z_loss:
            value = z_loss(routing.logits_TE, token_mask)
            loss, values["z_loss"] = loss + how.z_loss * value, value.detach()
        with torch.no_grad():
            entropy = -(routing.scores_TE * routing.scores_TE.clamp(min=_TINY).log()).sum(-1)
            values |= {"dropped": dropped, "tokens": tokens, "entropy": (entropy * mask).sum()}
            none = tokens.new_zeros(())
            # Losses are means: weighted by their tokens, so that those of micro-batches and ranks can be added up.
            weighted = ("balance_loss", "z_loss")
            extra = [values.get(n, none) * tokens if n in weighted else values[n] for n in EXTRA_STATISTICS]
            statistics = torch.cat([counts_E, torch.stack([value.float() for value in extra])])
        return inject(weight, loss * self.loss_scale, self.load, statistics)

    def _elsewhere(self, counts_E: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Choices and tokens of this step's earlier micro-batches, and of the other ranks."""
        own = torch.cat([counts_E, tokens.reshape(1)])
        counts, extra = self.seen.split([self.config.experts, len(EXTRA_STATISTICS)])
        total = own + torch.cat([counts, extra[EXTRA_STATISTICS.index("tokens")].reshape(1)])
        if self.group is not None:
            from torch.distributed import _functional_collectives as collectives

            total = collectives.all_reduce(total, "sum", self.group)
        others = total - own
        return others[:-1], others[-1]

    def extra_repr(self) -> str:
        return f"{self.config.hidden}, experts={self.config.experts}, top_k={self.config.top_k}, {self.config.router}"


def router_logits(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
    """`x @ weight.T` with exact products and sums in fp32; on a GPU, bf16 operands stay on its tensor cores."""
    if x_TH.is_cuda and x_TH.dtype == weight_EH.dtype == torch.bfloat16:
        return _LogitsInFp32.apply(x_TH, weight_EH)
    if not torch.is_autocast_enabled(x_TH.device.type):
        return F.linear(x_TH.float(), weight_EH.float())
    with torch.autocast(x_TH.device.type, enabled=False):
        return F.linear(x_TH.float(), weight_EH.float())


class _LogitsInFp32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        return ops.product_in_fp32(x_TH, weight_EH.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_TH, weight_EH = ctx.saved_tensors
        grad = grads[0].to(x_TH.dtype)
        return grad @ weight_EH, grad.t() @ x_TH


@torch.no_grad()
def sinkhorn(logits_TE: Tensor, iterations: int, token_mask: Tensor | None = None) -> Tensor:
    """Logs of a matrix near softmax(logits) whose columns add up alike and whose rows add up to one."""
    p = logits_TE
    for _ in range(iterations):
        live = p if token_mask is None else p.masked_fill(~token_mask.reshape(-1, 1), -math.inf)
        p = p - live.logsumexp(0, keepdim=True)
        p = p - p.logsumexp(1, keepdim=True)
    return p


def _two_best(grouped: Tensor) -> Tensor:
    return grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
