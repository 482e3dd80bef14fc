"""The experts of a block: weights in Hugging Face's layout, computed by `experts_mlp`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepwell.kernels.experts.mlp import experts_mlp
from deepwell.moe.config import MoEConfig
from deepwell.moe.hugging_face import weights_of


class DeepwellExperts(nn.Module):
    """`gate_up_proj` [E, 2F, H] (or `up_proj` [E, F, H]) and `down_proj` [E, H, F]; both transposed as GPT-OSS has them
    where the config says so. Hugging Face's experts have the same names, attributes and arguments."""

    gate_up_proj: nn.Parameter
    up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter
    up_proj_bias: nn.Parameter
    down_proj_bias: nn.Parameter

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        how = config.activation
        self.moe_config, self.num_experts = config, config.experts
        self.has_gate, self.has_bias = how.gated, config.bias
        self.is_transposed, self.is_concatenated = config.transposed, not how.interleaved
        first = "gate_up_proj" if how.gated else "up_proj"
        for name, n, k in (
            (first, config.ffn * (1 + how.gated), config.hidden),
            ("down_proj", config.hidden, config.ffn),
        ):
            shape = (k, n) if config.transposed else (n, k)
            self.register_parameter(name, nn.Parameter(torch.empty(config.experts, *shape)))
            if config.bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(config.experts, n)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal distributions of width 1 / sqrt(fan in); biases of zero."""
        for name, parameter in self.named_parameters(recurse=False):
            fan_in = self.moe_config.ffn if name.startswith("down") else self.moe_config.hidden
            nn.init.zeros_(parameter) if name.endswith("_bias") else nn.init.normal_(parameter, std=fan_in**-0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens [T, H], their choices and weights [T, K]: tokens."""
        w_gate_up, w_down, biases = weights_of(self)
        if hasattr(w_down, "to_local"):  # spread over ranks
            w_gate_up, w_down = w_gate_up.to_local(), w_down.to_local()
            biases = tuple(None if bias is None else bias.to_local() for bias in biases)
        return experts_mlp(
            hidden_states, w_gate_up, w_down, top_k_index, top_k_weights, biases=biases,
            activation=self.moe_config.activation, precision=self.moe_config.precision,
        )  # fmt: skip

    def extra_repr(self) -> str:
        config = self.moe_config
        return f"{config.hidden} -> {config.ffn}, experts={config.experts}, {config.activation}"
