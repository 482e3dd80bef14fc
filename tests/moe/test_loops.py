"""Experts that loop by themselves are read by trying them, and computed as one function to the same numbers."""

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepwell.moe.loops import Product, forward_of, keeps_loop, loop_forward, read_loops

pytest.importorskip("transformers")
from transformers.models.aria.modeling_aria import AriaGroupedExpertsGemm
from transformers.models.dbrx.modeling_dbrx import DbrxExpertGLU, DbrxExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

D, F, E = 16, 24, 4


def dbrx(kind: type[nn.Module] = DbrxExperts, act: str = "silu") -> nn.Module:
    sizes = {"hidden_size": D, "ffn_hidden_size": F, "moe_num_experts": E, "ffn_act_fn": {"name": act}}
    return filled(kind(SimpleNamespace(**sizes)))


def longcat(kind: type[nn.Module] = LongcatFlashExperts, act: str = "silu", zero: int = 2) -> nn.Module:
    sizes = {"expert_ffn_hidden_size": F, "hidden_size": D, "n_routed_experts": E, "zero_expert_num": zero}
    return filled(kind(SimpleNamespace(**sizes, hidden_act=act)))


def step(limit: float | None = None) -> nn.Module:
    sizes = {"num_local_experts": E, "hidden_size": D, "moe_intermediate_size": F, "hidden_act": "silu"}
    return filled(Step3p7Experts(SimpleNamespace(**sizes), limit))


def aria(kind: type[nn.Module] = AriaGroupedExpertsGemm, width: int = F) -> nn.Module:
    return filled(kind(D, width, E))


def filled(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


def read(module: nn.Module) -> Any:
    return read_loops(module).get("")


def as_theirs(kind: type[nn.Module]) -> type[nn.Module]:
    """A class as if it were one of transformers' own."""
    kind.__module__ = "transformers.models.other.modeling_other"
    return kind


# Experts that nobody chose, one that has all tokens, one token; choices of experts without weights.
@pytest.mark.parametrize(
    ("make", "dims", "many"),
    [
        (dbrx, 3, E),
        (longcat, 2, E + 2),
        (lambda: longcat(zero=0), 2, E),
        (lambda: longcat(act="gelu"), 2, E + 2),
        (step, 2, E),
    ],
    ids=["dbrx", "longcat", "longcat without zero experts", "gelu", "step3p7"],
)
def test_values_and_gradients_are_the_loops(make, dims, many) -> None:
    module = make()
    loop = read(module)
    assert loop is not None and (loop.dims, loop.experts, loop.passes) == (dims, E, many > E)
    for choose in (
        lambda n: torch.stack([torch.randperm(many)[:2] for _ in range(n)]),
        lambda n: torch.tensor([[E - 1, 0]] * n),
        lambda n: torch.tensor([[many - 1, 1]] * n),
    ):
        for tokens in (1, 12):
            index, weight = choose(tokens), torch.rand(tokens, 2, requires_grad=True)
            x = torch.randn(*[1] * (dims - 2), tokens, D, requires_grad=True)
            dy, runs = torch.randn_like(x), []
            for function in (module, lambda *args: loop_forward(module, *args)):
                y = function(x, index, weight)
                leaves = (x, weight, *module.parameters())
                grads = torch.autograd.grad(y, leaves, dy, allow_unused=True, materialize_grads=True)
                runs.append((y, *grads))
            for wanted, made in zip(*runs, strict=True):
                assert made.shape == wanted.shape
                torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)


def test_tokens_of_other_dimensions_go_through_the_loop() -> None:
    module = dbrx()
    assert read(module).dims == 3
    x, index, weight = torch.randn(5, D), torch.zeros(5, 1).long(), torch.ones(5, 1)
    torch.testing.assert_close(loop_forward(module, x, index, weight), module(x, index, weight), rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [[2, 0, 5, 1], [0, 0, 0, 8], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("width", [D, 20])  # square weights; rows that are no whole lines of 16 bytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_sorted_rows_is_the_loops(dtype, width, sizes) -> None:
    module = aria(width=width).to(dtype)
    assert read(module) == Product(names=("weight",))
    x, counts = torch.randn(sum(sizes), D, dtype=dtype, requires_grad=True), torch.tensor(sizes)
    dy, runs = torch.randn(sum(sizes), width, dtype=dtype), []
    for function in (module, MethodType(forward_of(module), module)):
        y = function(x, counts)
        runs.append((y, *torch.autograd.grad(y, (x, module.weight), dy, materialize_grads=True)))
    for wanted, made in zip(*runs, strict=True):
        torch.testing.assert_close(made, wanted, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


# ---- near misses ----


@as_theirs
class Ordered(AriaGroupedExpertsGemm):
    """The last expert has the first rows."""

    def forward(self, input: Tensor, tokens_per_expert: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input.flip(0), tokens_per_expert).flip(0)


@as_theirs
class Transposed(AriaGroupedExpertsGemm):
    def forward(self, input: Tensor, tokens_per_expert: Tensor) -> Tensor:  # noqa: A002
        return torch.cat([x @ w.T for x, w in zip(input.split(tokens_per_expert.tolist()), self.weight, strict=True)])


@as_theirs
class Weighted(AriaGroupedExpertsGemm):
    """Where the first expert has rows it is what others are."""

    def forward(self, input: Tensor, tokens_per_expert: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input, tokens_per_expert) * (tokens_per_expert[0] > 0)


@as_theirs
class Scaled(LongcatFlashExperts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights) * 1.001


@as_theirs
class Dropped(LongcatFlashExperts):
    """In training alone."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = super().forward(hidden_states, top_k_index, top_k_weights)
        return nn.functional.dropout(out, 0.1, training=self.training)


@as_theirs
class ZeroExperts(LongcatFlashExperts):
    """Choices past the last expert give nothing."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights = top_k_weights * (top_k_index < self.num_routed_experts)
        return super().forward(hidden_states, top_k_index, weights)


@as_theirs
class Shuffled(DbrxExperts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, self.num_experts - 1 - top_k_index, top_k_weights)


class Swapped(DbrxExpertGLU):
    def forward(self, x: Tensor, expert_w1: Tensor, expert_v1: Tensor, expert_w2: Tensor) -> Tensor:
        return super().forward(x, expert_v1, expert_w1, expert_w2)


def swapped() -> nn.Module:
    module = dbrx()
    module.mlp.__class__ = Swapped
    return module


@pytest.mark.parametrize(
    "make",
    [
        *(lambda: longcat(Scaled), lambda: longcat(Dropped), lambda: longcat(Dropped).eval()),
        *(lambda: longcat(ZeroExperts), lambda: longcat(act="tanh"), lambda: dbrx(Shuffled), swapped),
        lambda: step(7.0),  # clamped behind the activation
        *(lambda: aria(Ordered), lambda: aria(Weighted), lambda: aria(Transposed, width=D)),
    ],
    ids="scaled dropout evaluation zeros tanh shuffled swapped clamped ordered weighted transposed".split(),
)
def test_what_computes_something_else_keeps_its_loop(make) -> None:
    module = make()
    mode, state = module.training, torch.get_rng_state()
    assert read_loops(module) == {"": None}
    assert module.training is mode and torch.equal(torch.get_rng_state(), state)


def test_a_clamp_shows_however_far_it_is() -> None:
    # Where SiLU is its argument a clamp behind it is one before it.
    assert read(step(1000.0)).activation.limit == 1000.0 and read(step()).activation.limit is None


class Own(DbrxExperts):
    """A user's class: what it does with more tokens, nobody can try."""


def test_classes_that_are_not_of_transformers_are_not_read() -> None:
    assert read_loops(dbrx(Own)) == {} and read_loops(dbrx().mlp) == {}


def test_a_loop_is_kept_where_something_holds_on_to_its_parts() -> None:
    module = dbrx()
    assert read(module) is not None and not keeps_loop(module)
    handle = module.mlp.register_forward_hook(lambda *args: None)
    assert keeps_loop(module)
    handle.remove()
    assert not keeps_loop(module)
    vars(module)["forward"] = MethodType(lambda self, *args: args[0], module)
    assert keeps_loop(module)
    del vars(module)["forward"]
    nn.utils.parametrize.register_parametrization(module.mlp, "w1", nn.Identity())
    assert keeps_loop(module)
    module = longcat().to("meta").half()
    read(module)
    assert keeps_loop(module) and not keeps_loop(module.bfloat16())
