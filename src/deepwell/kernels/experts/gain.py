"""Whether a block of experts is faster in FP8 than in bf16 here: measured, never guessed.

    fp8     tokens, weights and gradients quantized, FP8 products (`autograd.experts_in_fp8`)
    bf16    the same block by `chain.experts_chain`

Both run as the engine runs them, forward and backward, with each expert chosen as often. Quantizing the weights costs
the same for any number of tokens: few rows for each expert do not earn it. A block of more than `_MOST_NUMBERS` is
timed with fewer experts, and as many tokens for each, so that what is timed fits beside a model.
"""

# Shapes: T tokens, E experts, D width of a token, F hidden width of an expert, G = 2F where experts are gated, else F.

import math
import sys
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepwell.kernels.experts.activation import parse_activation
from deepwell.kernels.experts.mlp import run_experts
from deepwell.kernels.experts.reference import experts_mlp_ref
from deepwell.kernels.tune import timing
from deepwell.kernels.tune.candidate import Candidate, Choice
from deepwell.kernels.tune.choose import Rules, TimingSetup, choose
from deepwell.kernels.tune.gain import Gain
from deepwell.kernels.tune.problem import Problem
from deepwell.kernels.tune.sources import sources_hash
from deepwell.kernels.tune.verify import Case, some_rows

_RULES = Rules(budget_s=0.2)
# Of a block's numbers: rows rounded to bf16 between its products, and two products of FP8 operands.
FLOORS_DB = {"fp8": 18.0, "bf16": 30.0}
# Of both weights: 2 GiB in bf16, as much again for their gradients, and as much for FP8 values both ways.
_MOST_NUMBERS = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of experts as the engine meets it. `stored` says in which order its weights lie: "nk" or "kn"."""

    experts: int
    width: int
    ffn: int
    top_k: int
    activation: str
    biases: tuple[bool, bool] = (False, False)
    stored: str = "nk"

    @property
    def rows_out(self) -> int:
        """G, the columns of gate and up."""
        return self.ffn * (1 + parse_activation(self.activation).gated)

    def problem(self, tokens: int, device: str) -> Problem:
        details = f"{self.experts} experts top {self.top_k} {self.stored} {self.activation}"
        details += "".join(f" {name} bias" for name, has in zip(("up", "down"), self.biases, strict=True) if has)
        return Problem(
            op="experts",
            m=tokens,
            n=self.rows_out,
            k=self.width,
            precision="fp8",
            details=details,
            device=device,
        )


def experts_would_gain(block: Block, tokens: int, device: str) -> Gain:
    """Time a block both ways, once per shape, bucket of tokens and machine; then it is remembered.

    Raises OutOfMemoryError where memory is short.
    """
    choice = measure(block, tokens, device)
    if choice.skipped():
        raise torch.OutOfMemoryError(f"{choice.problem}: {choice.skipped()[0].reason}")
    found = {verdict.name: verdict for verdict in choice.verdicts}
    fp8_us, bf16_us = (found[name].us or math.inf for name in ("fp8", "bf16"))
    tokens = block.problem(tokens, device).bucket.m
    sizes = {"n": block.rows_out, "k": block.width, "tokens": tokens}
    return Gain(**sizes, fp8_us=fp8_us, bf16_us=bf16_us, rejected=found["fp8"].reason)


def measure(block: Block, tokens: int, device: str) -> Choice:
    """The choice between both ways, on any device."""
    problem = block.problem(tokens, device)
    fingerprint = sources_hash(sys.modules[__name__], timing)
    candidates = [
        Candidate(name=name, op=problem.op, precision=name, fn=_step, origin="vendor", fingerprint=fingerprint)
        for name in FLOORS_DB
    ]
    with torch.inference_mode(False):  # an engine may be called in it first, where nothing has gradients
        return choose(problem, candidates, partial(_setup, block, problem.bucket), rules=_RULES)


def _setup(block: Block, problem: Problem) -> TimingSetup:
    """Some tokens' outputs are compared with the reference's on the same operands."""
    given = operands(block, problem.m, problem.device)
    x, up, down, index, weight, *biases, _ = given
    picked = some_rows(x.shape[0], x.device)
    tokens = (x[picked], up, down, index[picked], weight[picked])
    how = parse_activation(block.activation)
    wanted = experts_mlp_ref(*tokens, biases=(biases[0], biases[1]), activation=how).float()

    def case(candidate: Candidate) -> Case:
        floor_db = FLOORS_DB[candidate.precision]
        return Case(
            label=problem.size, operands=(), wanted=wanted, floor_db=floor_db, rows=picked, shape=tuple(x.shape)
        )

    def call(candidate: Candidate, _: tuple[object, ...]) -> partial[Tensor]:
        return partial(candidate.fn, given, block.activation, candidate.precision)

    return TimingSetup(inputs=[()], call=call, case=case)


Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]


def operands(block: Block, tokens: int, device: str) -> Operands:
    """x, both weights as views [E, G, D] and [E, D, F], choices and their weights, biases, dy."""
    each = block.width * (block.rows_out + block.ffn)
    experts = max(min(block.experts, _MOST_NUMBERS // each), block.top_k)
    tokens = max(1, -(-tokens * experts // block.experts))

    generator = torch.Generator(device).manual_seed(0)  # a model's own numbers go on as if nothing had been measured

    def normal(*size: int, std: float = 1.0) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=std, generator=generator)

    def weights(n: int, k: int) -> Tensor:
        sizes = (n, k) if block.stored == "nk" else (k, n)
        stored = normal(experts, *sizes, std=k**-0.5)
        return stored if block.stored == "nk" else stored.transpose(1, 2)

    x, dy = normal(tokens, block.width), normal(tokens, block.width)
    up, down = weights(block.rows_out, block.width), weights(block.width, block.ffn)
    up_bias, down_bias = (
        normal(experts, size, std=0.1) if has else None
        for size, has in zip((block.rows_out, block.width), block.biases, strict=True)
    )
    # Neighbours choose neighbours, from one token to the next where the last one ended: each expert as often.
    index = torch.arange(tokens * block.top_k, device=device).view(tokens, block.top_k) % experts
    index = index[torch.randperm(tokens, device=device, generator=generator)]
    weight = torch.full((tokens, block.top_k), 1 / block.top_k, dtype=x.dtype, device=device)
    for leaf in (x, up, down, weight, up_bias, down_bias):
        if leaf is not None:
            leaf.requires_grad_()
    return x, up, down, index, weight, up_bias, down_bias, dy


def _step(given: Operands, activation: str, precision: str) -> Tensor:
    """Forward and backward; the output."""
    x, up, down, index, weight, *biases, dy = given
    leaves = [tensor for tensor in (x, up, down, weight, *biases) if tensor is not None]
    with torch.enable_grad():
        y = run_experts(x, up, down, index, weight, (biases[0], biases[1]), activation, precision)
        torch.autograd.grad(y, leaves, dy)
    return y.detach()
