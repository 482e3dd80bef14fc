"""What a mixture-of-experts block is: its sizes, its router, its losses and its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from deepwell.errors import ConfigError
from deepwell.kernels.experts.mlp import schemes_of
from deepwell.kernels.experts.reference import ExpertActivation

SCOPES = ("batch", "sequence", "global")
# Products of floats may lie this much above the number meant: 1.1 times 20 rows are 22.
_ROUNDING = 1e-12
# Settings that must be one of a few words.
_WORDS = {
    "scoring": ("softmax", "sigmoid"),
    "group_score": ("top2", "max"),
    "drop": ("probability", "position"),
    "dispatch": ("bf16", "fp8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How tokens choose experts, and which losses keep the choice even.

    scoring:       "softmax" over all experts or "sigmoid" of each
    top_k_first:   choose by logits, then score the chosen ones alone (GPT-OSS)
    normalize:     the weights of a token add up to one (with top_k 1 they stay as they are: a constant would teach the
                   router nothing); then they are multiplied by `scale`
    groups:        experts are in so many groups, and a token chooses within `top_groups` of them, ranked by the
                   sum of their two best scores ("top2", DeepSeek-V3) or their best ("max", DeepSeek-V2)
    jitter:        the router's input is multiplied by random numbers between 1 - jitter and 1 + jitter in training
    sinkhorn:      so many iterations that even out the choice in training (weights stay those of the scores)
    bias_rate:     balancing without a loss: a bias of each expert, for the choice alone, rises or falls by this once
                   an optimizer step
    balance_loss:  coefficients by scope: "batch", "sequence", "global" (all ranks and micro-batches of a step)
    z_loss:        coefficient of the mean of logsumexp(logits)^2
    """

    scoring: str = "softmax"
    top_k_first: bool = False
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"
    jitter: float = 0.0
    sinkhorn: int = 0
    bias_rate: float = 0.0
    logit_bias: bool = False
    balance_loss: Mapping[str, float] = field(default_factory=dict)
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        _check_words(self)
        if not isinstance(self.balance_loss, Mapping):
            raise ConfigError(f"balance_loss is {self.balance_loss!r}; it must be coefficients by scope")
        for scope, coefficient in self.balance_loss.items():
            if scope not in SCOPES:
                raise ConfigError(f"balance_loss has the scope {scope!r}; known: {', '.join(SCOPES)}")
            _check_number(f"balance_loss of scope {scope!r}", coefficient)
        for name in ("groups", "top_groups"):
            _check_count(self, name, least=1)
        _check_count(self, "sinkhorn")
        for name in ("jitter", "bias_rate", "z_loss", "scale"):
            _check_number(name, getattr(self, name))
        if not self.scale:
            raise ConfigError("scale is 0; it must be positive")
        if self.top_groups > self.groups:
            raise ConfigError(f"top_groups is {self.top_groups}; it must be between 1 and groups, {self.groups}")
        if self.jitter >= 1:
            raise ConfigError(f"jitter is {self.jitter}; it must be at least 0 and below 1")
        if self.sinkhorn and self.bias_rate:
            raise ConfigError("sinkhorn and bias_rate both even out the choice; give one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Sizes and settings of one block.

    shared_ffn:       hidden width of the experts that every token meets (0: none), weighted by a sigmoid of their own
                      where `shared_gate`
    capacity_factor:  an expert takes at most this times the even share of choices, None all of them; those above are
                      dropped by "probability" (the least weights go) or "position" (the last tokens go)
    pad_to_capacity:  every expert computes exactly its capacity, so that all shapes are known
    round_to:         each expert's rows are rounded to the nearest multiple in training: the least weights go, or the
                      next tokens are taken
    dispatch:         what rows travel in between expert-parallel ranks
    """

    hidden: int
    ffn: int
    experts: int
    top_k: int
    router: RouterConfig
    activation: ExpertActivation
    bias: bool = False
    transposed: bool = False
    shared_ffn: int = 0
    shared_gate: bool = False
    capacity_factor: float | None = None
    drop: str = "probability"
    pad_to_capacity: bool = False
    round_to: int = 0
    precision: str = "bf16"
    dispatch: str = "bf16"

    def __post_init__(self) -> None:
        _check_words(self)
        schemes_of(str(self.precision))
        for name in ("hidden", "ffn", "experts", "top_k"):
            _check_count(self, name, least=1)
        for name in ("shared_ffn", "round_to"):
            _check_count(self, name)
        if self.top_k > self.experts:
            raise ConfigError(
                f"top_k is {self.top_k} and experts {self.experts}; a token chooses each one at most once"
            )
        each, rest = divmod(self.experts, self.router.groups)
        if rest or each * self.router.top_groups < self.top_k:
            raise ConfigError(
                f"groups is {self.router.groups} and top_groups {self.router.top_groups}: groups must divide the "
                f"{self.experts} experts, and the chosen ones must hold top_k, {self.top_k}, experts"
            )
        if self.capacity_factor is not None:
            _check_number("capacity_factor", self.capacity_factor)
            if not self.capacity_factor:
                raise ConfigError("capacity_factor is 0; it must be positive, or None to drop nothing")
        if self.pad_to_capacity and self.capacity_factor is None:
            raise ConfigError("pad_to_capacity needs a capacity_factor")
        if self.round_to and self.capacity_factor is not None:
            raise ConfigError("round_to and capacity_factor are two limits on the same rows; give one of them")
        if self.shared_gate and not self.shared_ffn:
            raise ConfigError("shared_gate needs shared_ffn, the width of the shared experts")

    def capacity(self, tokens: int) -> int | None:
        """Choices that one expert takes of so many tokens; None: all of them."""
        if self.capacity_factor is None:
            return None
        rows = tokens * self.top_k / self.experts * self.capacity_factor
        return min(tokens, max(1, math.ceil(rows * (1 - _ROUNDING))))


def _check_count(config: object, name: str, least: int = 0) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be an integer, at least {least}")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"{name} is {value!r}; it must be a number and not negative")


def _check_words(config: object) -> None:
    for name, words in _WORDS.items():
        value = getattr(config, name, words[0])
        if value not in words:
            raise ConfigError(f"{name} is {value!r}; it must be {' or '.join(map(repr, words))}")
