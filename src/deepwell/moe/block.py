"""DeepwellMoE: a mixture-of-experts block to put in the place of a transformer's MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.errors import ConfigError
from deepwell.kernels.experts.reference import ExpertActivation
from deepwell.moe.capacity import ExpertRows, pad_to_capacity, rank_in_expert, round_rows
from deepwell.moe.config import MoEConfig, RouterConfig
from deepwell.moe.experts import DeepwellExperts
from deepwell.moe.router import Router, Routing


class DeepwellMoE(nn.Module):
    """Router, experts and, where there are some, shared experts. Tokens [..., hidden] in, tokens out.

    `activation` is a function's name ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2") or an
    ExpertActivation, for interleaved gates and clamps. `router` is a RouterConfig or a mapping of its fields (a
    `balance_loss` that is one number is of the batch scope). Other options are MoEConfig's. Nothing is dropped unless
    `capacity_factor` is given. Losses need no collecting: their gradients come with the block's own. Names in the
    state_dict are Hugging Face's: gate, experts, shared_experts.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        experts: int,
        top_k: int = 2,
        *,
        activation: str | ExpertActivation = "silu",
        gated: bool = True,
        router: RouterConfig | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(activation, ExpertActivation):
            activation = ExpertActivation(function=activation, gated=gated)
        elif not gated and activation.gated:
            raise ConfigError(f"gated is False and the activation has a gate: {activation!r}; say it in one of them")
        known = {name for name in MoEConfig.__dataclass_fields__ if name not in ("router", "activation")}
        if unknown := options.keys() - known:
            raise ConfigError(
                f"DeepwellMoE has no option {', '.join(sorted(unknown))}; options: {', '.join(sorted(known))}"
            )
        routing = router if isinstance(router, RouterConfig) else RouterConfig(**_router_fields(router))
        self.config = MoEConfig(
            hidden=hidden, ffn=ffn, experts=experts, top_k=top_k, router=routing, activation=activation, **options
        )
        self.gate = Router(self.config)
        self.experts = DeepwellExperts(self.config)
        self.shared_experts = SharedExperts(self.config) if self.config.shared_ffn else None
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False) if self.config.shared_gate else None

    def forward(self, hidden_states: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """`token_mask` is True for tokens, False for padding, which no expert computes and no loss counts."""
        if hidden_states.shape[-1:] != (self.config.hidden,):
            raise ConfigError(
                f"hidden_states is {tuple(hidden_states.shape)}; its last dimension must be hidden, "
                f"{self.config.hidden}"
            )
        if token_mask is not None and token_mask.shape != hidden_states.shape[:-1]:
            raise ConfigError(
                f"token_mask is {tuple(token_mask.shape)}; it must have a value for each token, "
                f"{tuple(hidden_states.shape[:-1])}"
            )
        x_TH = hidden_states.reshape(-1, self.config.hidden)
        sequences = hidden_states.shape[0] if hidden_states.dim() > 2 else 1
        mask = None if token_mask is None else token_mask.reshape(-1).bool()
        routing = self.gate(x_TH, mask)
        y_TH = self._routed(x_TH, routing, mask, max(1, sequences))
        return y_TH.view(hidden_states.shape)

    def _routed(self, x_TH: Tensor, routing: Routing, mask: Tensor | None, sequences: int) -> Tensor:
        config, index = self.config, routing.index_TK
        none = torch.zeros((), device=index.device)
        tokens = x_TH.shape[0]
        if config.round_to and self.training and tokens:
            rows = round_rows(routing, config.round_to, mask)
            weight = self.gate.settle(routing, rows.weight, none, mask, sequences)
            return self._with_shared(x_TH, self._by_rows(x_TH, rows._replace(weight=weight)))
        capacity = config.capacity(tokens)
        if not capacity:
            weight = self.gate.settle(routing, routing.weight_TK, none, mask, sequences)
            return self._by_choices(x_TH, index, weight)
        rank = rank_in_expert(index, routing.weight_TK, config.drop, config.experts)
        stays = (index >= 0) & (rank < capacity)
        dropped = ((index >= 0) & ~stays).sum()
        weight = self.gate.settle(routing, routing.weight_TK, dropped, mask, sequences)
        index = torch.where(stays, index, -1)
        if not config.pad_to_capacity:
            return self._by_choices(x_TH, index, weight)
        rows = pad_to_capacity(index, weight, rank, config.experts, capacity)
        return self._with_shared(x_TH, self._by_rows(x_TH, rows))

    def _by_choices(self, x_TH: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """The experts as they are; where tokens travel to them, the shared ones compute in the meantime."""
        exchange: Any = self.experts.forward
        if self.shared_experts is None or torch.compiler.is_compiling() or not hasattr(exchange, "run"):
            return self._with_shared(x_TH, self.experts(x_TH, index, weight))
        y_TH, shared = exchange.run(x_TH, index, weight, lambda: self._shared(x_TH))
        return y_TH + shared

    def _with_shared(self, x_TH: Tensor, y_TH: Tensor) -> Tensor:
        return y_TH if self.shared_experts is None else y_TH + self._shared(x_TH)

    def _by_rows(self, x_TH: Tensor, rows: ExpertRows) -> Tensor:
        """Rows that are laid out already: one expert each, added up by token."""
        y_RH = self.experts(x_TH[rows.token], rows.expert[:, None], rows.weight[:, None])
        total = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
        return total.index_add(0, rows.token, y_RH.float()).to(x_TH.dtype)

    def _shared(self, x_TH: Tensor) -> Tensor:
        assert self.shared_experts is not None
        y_TH = self.shared_experts(x_TH)
        return y_TH if self.shared_expert_gate is None else self.shared_expert_gate(x_TH).sigmoid() * y_TH


class SharedExperts(nn.Module):
    """The MLP that every token meets, with the experts' activation."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        width, self.activation = config.shared_ffn, config.activation
        if self.activation.gated:
            self.gate_proj = nn.Linear(config.hidden, width, bias=config.bias)
        self.up_proj = nn.Linear(config.hidden, width, bias=config.bias)
        self.down_proj = nn.Linear(width, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self.activation.gated:
            return self.down_proj(self.activation.of_rows(self.up_proj(x)))
        return self.down_proj(self.activation.gate(self.gate_proj(x), self.up_proj(x)))


def _router_fields(given: Any) -> dict[str, Any]:
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ConfigError(f"router is {given!r}; it must be a RouterConfig or a mapping of its fields")
    known = RouterConfig.__dataclass_fields__
    if unknown := given.keys() - known.keys():
        raise ConfigError(f"router has no field {', '.join(sorted(unknown))}; fields: {', '.join(known)}")
    fields = dict(given)
    if isinstance(fields.get("balance_loss"), (int, float)):
        fields["balance_loss"] = {"batch": float(fields["balance_loss"])}
    return fields
