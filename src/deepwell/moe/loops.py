"""Hugging Face's experts that loop by themselves, as `experts_mlp` or as one grouped product.

    (hidden_states, top_k_index, top_k_weights)   the experts interface (DBRX, LongCat-Flash, Step-3.7)
    (input, tokens_per_expert)                    a product of rows sorted by expert (Aria)

Such a forward asks nobody how to run: it waits for the host at every block, and no graph holds it. How the weights lie,
what is between the products and what choices past the last expert give is found by trying: a few tokens go through the
module's own forward with made-up weights in fp64, and what takes its place must give the same. A module that gives
something else keeps its loop.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.kernels.experts.mlp import experts_mlp
from deepwell.kernels.experts.reference import ExpertActivation, GateUp
from deepwell.moe.hugging_face import activations_of, chooses_experts

_LOOP = "_deepwell_loop"  # on a module, what was found out about it
_OF_EXPERTS = ("self", "hidden_states", "top_k_index", "top_k_weights")
_OF_PRODUCT = ("self", "input", "tokens_per_expert")
_SCALES = (0.5, 3.0, 12.0, 40.0)  # of the tokens that are tried
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """How a module's loop over its experts computes.

    `names` are its parameters': gate and up in one and down, [E, N, K] each; or gate, up and down, [E * F, H] each.
    """

    names: tuple[str, ...]
    experts: int  # that have weights
    passes: bool  # a choice past them gives the token as it is
    dims: int  # of hidden_states
    activation: ExpertActivation

    def weights(self, get: Callable[[str], Tensor]) -> tuple[GateUp, Tensor]:
        """([E, 2F, H] or both halves of it, [E, H, F]) as views."""
        parts = [get(name) for name in self.names]
        if len(parts) == 2:
            return parts[0][: self.experts], parts[1]
        gate, up, down = (part.view(self.experts, -1, part.shape[-1]) for part in parts)
        return (gate, up), down.transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """That a module multiplies rows sorted by expert with its one parameter, [E, K, N]."""

    names: tuple[str]


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """What takes the place of the forward of a module of which something is known."""
    return loop_forward if isinstance(vars(module)[_LOOP], Loop) else product_forward


def loop_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    """The forward of a module with a `Loop`."""
    loop: Loop = self.__dict__[_LOOP]
    if hidden_states.dim() != loop.dims:
        return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
    w_gate_up, w_down = loop.weights(lambda name: functools.reduce(getattr, name.split("."), self))
    return _computed(loop, w_gate_up, w_down, hidden_states, top_k_index, top_k_weights)


def _computed(loop: Loop, w_gate_up: GateUp, w_down: Tensor, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    x = hidden.reshape(-1, hidden.shape[-1]).to(w_down.dtype)  # under autocast a norm may have made it another one
    index, weight = index.reshape(len(x), -1), weight.reshape(len(x), -1)
    y = experts_mlp(x, w_gate_up, w_down, index, weight, activation=loop.activation)
    if loop.passes:
        y = y + (x * (weight * (index >= loop.experts)).sum(1, keepdim=True)).to(x.dtype)
    return y.view(hidden.shape).to(hidden.dtype)


def product_forward(self: Any, rows: Tensor, tokens_per_expert: Any) -> Any:
    """The forward of a module with a `Product`."""
    weight = getattr(self, self.__dict__[_LOOP].names[0])
    if not isinstance(tokens_per_expert, Tensor) or rows.dim() != 2 or rows.dtype != weight.dtype:
        return type(self).forward(self, rows, tokens_per_expert)
    return _multiplied(weight, rows, tokens_per_expert)


def _multiplied(w_EKN: Tensor, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
    ends = torch.cumsum(tokens_per_expert.to(rows.device), 0).to(torch.int32)
    if w_EKN.dtype == torch.bfloat16 and all(size % 8 == 0 for size in w_EKN.shape[1:]):
        return torch._grouped_mm(rows, w_EKN, offs=ends)
    return torch.ops.transformers.grouped_mm_fallback(rows, w_EKN, ends)  # the engine's passes know it


def read_loops(model: nn.Module) -> dict[str, Loop | Product | None]:
    """By path, what is known of each module with such a loop; None where trying it told nothing."""
    known: dict[Any, Loop | Product | None] = {}
    found = {}
    for path, module in model.named_modules():
        if not _may_loop(module):
            continue
        if _LOOP not in module.__dict__:
            key = _key(module)
            if key not in known:
                known[key] = _read(module)
            module.__dict__[_LOOP] = known[key]
        found[path] = module.__dict__[_LOOP]
    return found


def keeps_loop(module: nn.Module) -> bool:
    """Whether a module that could be replaced is called as it is: something else holds on to its parts by now."""
    inner = [other for other in module.modules() if other is not module]
    is_hooked = "forward" in vars(module) or any(getattr(other, name) for other in inner for name in _HOOKS)
    # On a GPU grouped products of other dtypes than bf16 wait for the host too.
    is_slow = any(p.device.type != "cpu" and p.dtype != torch.bfloat16 for p in module.parameters())
    return is_hooked or is_slow or set(_shapes(module)) != set(vars(module)[_LOOP].names)


def _may_loop(module: nn.Module) -> bool:
    """Whether a module of transformers' own has the arguments of such a loop and does not ask how to run."""
    is_theirs = type(module).__module__.startswith("transformers.models.") and not chooses_experts(module)
    return is_theirs and _arguments(module) in (_OF_EXPERTS, _OF_PRODUCT)


def _arguments(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(type(module).forward).parameters)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def _key(module: nn.Module) -> Any:
    """What a module's forward may depend on: modules of equal keys compute alike."""
    parts: list[Any] = list(_shapes(module).items())
    for name, inner in module.named_modules():
        told = [(k, repr(v)) for k, v in vars(inner).items() if isinstance(v, bool | int | float | str) or callable(v)]
        parts += [(name, type(inner), tuple(told))]
    return tuple(parts)


# ---- trying a module ----


@torch.no_grad()
def _read(module: nn.Module) -> Loop | Product | None:
    weights = {name: _made_up(shape, seed) for seed, (name, shape) in enumerate(_shapes(module).items(), 1)}
    if _arguments(module) == _OF_PRODUCT:
        return _tried_product(module, weights)
    layouts = list(_layouts(module))
    return next((loop for layout in layouts if (loop := _tried(module, layout, weights)) is not None), None)


def _tried_product(module: nn.Module, weights: Mapping[str, Tensor]) -> Product | None:
    """Whether a module multiplies rows of the first and the last expert, None where it does something else."""
    if [weight.dim() for weight in weights.values()] != [3]:
        return None
    ((name, weight),) = weights.items()
    for first, last in ((3, 2), (0, 4)):
        sizes = torch.zeros(len(weight), dtype=torch.int64, device="cpu")
        sizes[0] += first
        sizes[-1] += last
        given = (_made_up((first + last, weight.shape[1]), 0), sizes)
        if not _are_equal(_multiplied(weight, *given), _called(module, weights, given)):
            return None
    return Product(names=(name,))


def _are_equal(made: Tensor, wanted: Tensor | None) -> bool:
    """Whether all numbers are, by the largest of their row."""
    if wanted is None or made.shape != wanted.shape:
        return False
    unit = wanted.abs().amax(-1, keepdim=True)
    return torch.allclose(made / unit, wanted / unit, rtol=0, atol=1e-10)


def _layouts(module: nn.Module) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """(names of the weights, experts that have weights, experts that can be chosen) that the shapes allow."""
    shapes = _shapes(module)
    names, sizes = tuple(shapes), tuple(shapes.values())
    if [len(size) for size in sizes] == [3, 3]:
        (many, rows, width), (experts, out, ffn) = sizes
        if rows == 2 * ffn and out == width and experts <= many:
            yield names, experts, many
    if [len(size) for size in sizes] == [2, 2, 2] and len(set(sizes)) == 1:
        experts = getattr(module, "num_experts", 0)
        if isinstance(experts, int) and experts > 0 and sizes[0][0] % experts == 0:
            yield names, experts, experts


def _tried(module: nn.Module, layout: tuple[tuple[str, ...], int, int], weights: Mapping[str, Tensor]) -> Loop | None:
    """What a module with this layout computes, None where it is nothing that is known."""
    names, experts, many = layout
    generator = torch.Generator().manual_seed(len(weights) + 1)
    # A clamp shows by rows that reach it.
    numbers = [abs(v) for v in vars(module).values() if isinstance(v, float) and math.isfinite(v)]
    scales = torch.tensor([*_SCALES, max(300.0, *(10 * v for v in numbers), 0.0)], dtype=torch.float64, device="cpu")
    x = _made_up((len(scales), weights[names[0]].shape[-1]), 0) * scales[:, None]
    first, last, past = 0, experts - 1, many - 1
    pairs = [[first, last], [last, first], [last, past], [past, first], [first, last]]
    index = torch.tensor(pairs, device="cpu")
    weight = torch.rand(index.shape, dtype=torch.float64, generator=generator, device="cpu")
    for dims in (2, 3):
        given = (x.view(*[1] * (dims - 2), *x.shape), index, weight)
        wanted = _called(module, weights, given)
        for how in activations_of(module, has_gate=True) if wanted is not None else ():
            loop = Loop(names=names, experts=experts, passes=many > experts, dims=dims, activation=how)
            if _are_equal(_computed(loop, *loop.weights(weights.__getitem__), *given), wanted):
                return loop
    return None


def _called(module: nn.Module, weights: Mapping[str, Tensor], given: tuple[Tensor, ...]) -> Tensor | None:
    """What the module's forward gives in training, None where it does not take such tokens."""
    modes = [(inner, inner.training) for inner in module.modules()]
    try:
        module.train()
        with torch.random.fork_rng(devices=[]):
            made = torch.func.functional_call(module, dict(weights), given)
    except (RuntimeError, IndexError, ValueError):
        return None
    finally:
        for inner, mode in modes:
            inner.training = mode
    return made if isinstance(made, Tensor) else None


def _made_up(shape: Sequence[int], seed: int) -> Tensor:
    """Numbers for a weight, of a width of 1 / sqrt(columns): windows of few, since a real one may be of any size."""
    strides = (1009, 3, 1)[-len(shape) :]
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    numbers = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), device="cpu")
    return (numbers / shape[-1] ** 0.5).as_strided(tuple(shape), strides)
