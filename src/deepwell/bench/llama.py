"""A Llama-style decoder in plain PyTorch: RMSNorm, RoPE, grouped-query attention, SwiGLU, untied head, cross entropy.

The model that the demo captures, the benchmarks time and `validate parity` trains; nothing in it knows of Deepwell, but
for the experts, where it has some.
"""

# Shapes: B batch, S sequence, D width, H query heads, G key-value heads, C head width, F hidden width, V vocabulary.

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepwell.moe.block import DeepwellMoE


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    width: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    num_layers: int
    vocab: int
    max_positions: int = 8192
    rope_theta: float = 500_000.0
    # How many layers, counted from the first, keep only their input and run again in the backward.
    checkpointed_layers: int = 0
    # Of each layer's MLP, `hidden` wide each (0: a single MLP), and how many of them a token meets.
    experts: int = 0
    top_k: int = 2

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads


# Byte-level, 3.5M parameters: trains and captures in seconds on two CPU cores.
TINY = LlamaConfig(width=256, num_heads=8, num_kv_heads=4, hidden=768, num_layers=4, vocab=256, max_positions=1024)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        return F.rms_norm(x_BSD, self.weight.shape, self.weight, self.eps)


def rope_tables(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, each half of the head rotated by the same angle."""
    half = torch.arange(0, config.head_width, 2, dtype=torch.float32) / config.head_width
    position = torch.arange(config.max_positions, dtype=torch.float32)
    angle_SC = torch.outer(position, config.rope_theta**-half).repeat(1, 2)
    return angle_SC.cos(), angle_SC.sin()


def rotate(x_BHSC: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
    first, second = x_BHSC.chunk(2, dim=-1)
    return x_BHSC * cos_SC + torch.cat((-second, first), dim=-1) * sin_SC


class LlamaAttention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        kv_width = config.num_kv_heads * config.head_width
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, kv_width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
        B, S, _ = x_BSD.shape
        q_BHSC, k_BGSC, v_BGSC = (
            proj(x_BSD).view(B, S, -1, self.config.head_width).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_BHSC, k_BGSC = rotate(q_BHSC, cos_SC, sin_SC), rotate(k_BGSC, cos_SC, sin_SC)
        out_BHSC = F.scaled_dot_product_attention(q_BHSC, k_BGSC, v_BGSC, is_causal=True, enable_gqa=True)
        return self.o_proj(out_BHSC.transpose(1, 2).reshape(B, S, -1))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))


class LlamaLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = LlamaAttention(config)
        self.mlp_norm = RMSNorm(config.width)
        # Dropless experts whose load a loss evens out, as published models of this size are trained.
        sizes = (config.width, config.hidden, config.experts, config.top_k)
        balance = {"balance_loss": {"batch": 0.01}}
        self.mlp = DeepwellMoE(*sizes, router=balance) if config.experts else MLP(config)

    def forward(self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_SC, sin_SC)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class Llama(nn.Module):
    """Returns the mean cross entropy where targets are given, the logits where they are not."""

    cos_SC: Tensor
    sin_SC: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        cos_SC, sin_SC = rope_tables(config)
        self.register_buffer("cos_SC", cos_SC, persistent=False)
        self.register_buffer("sin_SC", sin_SC, persistent=False)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> "Llama":
        """Normal weights of deviation 0.02, projections back into the residual stream scaled down with depth."""
        generator = torch.Generator(device=self.head.weight.device).manual_seed(seed)
        residual = 0.02 / (2 * self.config.num_layers) ** 0.5
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                deviation = residual if name.removesuffix(".weight").endswith(("o_proj", "down_proj")) else 0.02
                weight.normal_(0.0, deviation, generator=generator)
        return self

    def hidden_states(self, tokens_BS: Tensor) -> Tensor:
        S = tokens_BS.shape[1]
        x_BSD = self.embed(tokens_BS)
        cos_SC, sin_SC = self.cos_SC[:S].to(x_BSD.dtype), self.sin_SC[:S].to(x_BSD.dtype)
        for number, layer in enumerate(self.layers):
            if number < self.config.checkpointed_layers and torch.is_grad_enabled():
                x_BSD = checkpoint(layer, x_BSD, cos_SC, sin_SC, use_reentrant=False)
            else:
                x_BSD = layer(x_BSD, cos_SC, sin_SC)
        return self.norm(x_BSD)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        logits_BSV = self.head(self.hidden_states(tokens_BS))
        if targets_BS is None:
            return logits_BSV
        return F.cross_entropy(logits_BSV.float().flatten(0, 1), targets_BS.flatten())
