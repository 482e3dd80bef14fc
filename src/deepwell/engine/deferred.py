"""Logits that are computed when somebody looks at them.

A training step needs the loss, not the logits, yet models return both. With head and loss fused, the logits of
Llama-3 at 16k tokens would cost 4 GB and a GEMM for nobody. A `DeferredLogits` knows its shape, dtype and device, and
is part of autograd's graph from the start; only its values wait. The first op that reads them computes the head's
linear, and what the model does to its logits, below autograd: it does not matter where they are read first.

    hidden ──► _Logits ──► logits ──► whatever reads them
       │                     ▲
       └──► fused loss ──► _Loss ──► loss

Backward, the loss' gradient takes the way of the fused kernels. Where somebody watches the gradient of the logits (a
hook, `retain_grad`, `torch.autograd.grad`), `_Loss` computes what the loss contributes to it and sends it through the
logits. `_Logits` subtracts it again from what arrives, since hidden states and weights have it from the fused kernels
already: there, what a hook changed and what other readers of the logits added go on.

The values must be read before the weight changes, and a fingerprint of its content says whether it has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_iter, tree_map_only

from deepwell.errors import NumericsError
from deepwell.kernels.head.fingerprint import fingerprint

# One step of what a model does to its logits: ("mul" | "div", number), ("tanh", None), ("to", dtype).
Step = tuple[str, Any]
_STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": lambda z, number: z * number,
    "div": lambda z, number: z / number,
    "tanh": lambda z, _: torch.tanh(z),
    "to": lambda z, dtype: z.to(dtype),
    "contiguous": lambda z, _: z.contiguous(),
}
# What asks for the gradient of logits.
_WATCHING: set[Any] = {Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad}
_WATCHING |= {vars(torch._C.TensorBase)["grad_fn"].__get__}
# What goes past torch's dispatcher to a tensor's memory.
_MEMORY: set[Any] = {Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage}
_MEMORY |= {Tensor.__array__, Tensor.__dlpack__, Tensor.share_memory_, Tensor.__reduce_ex__, Tensor.__deepcopy__}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLoss:
    """What a model does to its logits before it returns them, and from there to its loss."""

    steps: tuple[Step, ...] = ()
    later: tuple[Step, ...] = ()  # between the returned logits and the cross entropy
    ignore_index: int = -100
    reduction: str = "mean"


class _Watch:
    """Whether somebody watches the gradient of logits, and what the loss contributed to it in this backward."""

    def __init__(self) -> None:
        self.is_on = False
        self.logits: weakref.ref[Tensor] | None = None
        self.from_loss: Tensor | None = None

    def __bool__(self) -> bool:
        logits = None if self.logits is None else self.logits()
        # `backward(inputs=[logits])` retains their gradient without a word to anybody.
        return self.is_on or (logits is not None and logits.retains_grad)


class DeferredLogits(torch.Tensor):
    """A stand-in for `F.linear(hidden, weight, bias)` with `steps` done to it."""

    _hidden: Tensor
    _parameters: tuple[Tensor, ...]
    _steps: Sequence[Step]
    _value: Tensor | None
    _watch: _Watch
    _made_with: Tensor

    @staticmethod
    def __new__(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, steps: Sequence[Step] = ()
    ) -> DeferredLogits:
        shape = (*hidden.shape[:-1], weight.shape[0])
        dtype = next((value for name, value in reversed(steps) if name == "to"), hidden.dtype)
        out = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        out._hidden, out._steps, out._value, out._watch = hidden.detach(), steps, None, _Watch()
        out._parameters = (weight,) if bias is None else (weight, bias)
        out._made_with = _content(out._parameters)
        return out

    def materialize(self) -> Tensor:
        """The values, computed once, without a gradient. Raises NumericsError where the head's weight changed since."""
        if self._value is None:
            # Those of the call, whatever is in force where they are read.
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                now = _content(self._parameters)
                if now.shape != self._made_with.shape or not torch.equal(now, self._made_with):
                    raise NumericsError(
                        "these logits were not computed with the loss, and the head's weight has changed since: "
                        "read them before optimizer.step(), or compile with fuse_head=False"
                    )
                self._value = _values(self._hidden, self._parameters, self._steps)[-1]
        return self._value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _WATCHING and not _is_of_a_wrapper(func, args):
                for logits in tree_iter((args, kwargs)):
                    if isinstance(logits, DeferredLogits):
                        logits._watch.is_on = True
            if func in _MEMORY:
                args, kwargs = tree_map_only(DeferredLogits, torch.ops.aten.alias.default, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain, named = tree_map_only(DeferredLogits, cls.materialize, (args, kwargs or {}))
        out = func(*plain, **named)
        # An op that writes into the logits returns them.
        return args[0] if func._schema.is_mutable and isinstance(args[0], DeferredLogits) else out

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return torch.ops.aten.alias.default(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.ops.aten.alias.default(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def defer(
    operands: tuple[Tensor, Tensor, Tensor | None], loss: Tensor, target: Tensor, factor: Any, how: HeadLoss
) -> tuple[Tensor, Tensor]:
    """(logits, loss) of a fused head. `operands` are hidden states, weight and bias; the loss is `factor` times the
    cross entropy, plus what does not depend on the logits."""
    logits = _Logits.apply(*operands, how)
    if loss.requires_grad:
        loss = _Loss.apply(loss, logits, operands, target, factor, how)
    return logits, loss


class _Logits(torch.autograd.Function):
    """Deferred logits, with the gradients of their operands."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, how: HeadLoss) -> Tensor:
        out = DeferredLogits(hidden, weight, bias, how.steps)
        ctx.save_for_backward(hidden, weight, bias)
        out._watch.logits = weakref.ref(out)
        ctx.watch, ctx.steps = out._watch, how.steps
        ctx.set_materialize_grads(False)  # where nobody reads the logits there is none
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad, counted = grads[0], ctx.watch.from_loss
        ctx.watch.from_loss = None
        if grad is None:
            return None, None, None, None
        grad = grad if counted is None else grad - counted
        hidden, weight, bias = ctx.saved_tensors
        parameters = (weight,) if bias is None else (weight, bias)
        # Only a tanh needs values.
        needs_values = any(name == "tanh" for name, _ in ctx.steps)
        values = _values(hidden, parameters, ctx.steps) if needs_values else []
        for number, (name, argument) in reversed([*enumerate(ctx.steps)]):
            if name == "tanh":
                grad = grad * (1 - values[number + 1].square())
            elif name == "to":
                before = [dtype for step, dtype in ctx.steps[:number] if step == "to"]
                grad = grad.to(before[-1] if before else hidden.dtype)
            else:
                grad = _STEPS[name](grad, argument)
        rows, needs = grad.reshape(-1, grad.shape[-1]), ctx.needs_input_grad
        return (
            grad @ weight if needs[0] else None,
            rows.T @ hidden.reshape(-1, hidden.shape[-1]) if needs[1] else None,
            rows.sum(0) if bias is not None and needs[2] else None,
            None,
        )


class _Loss(torch.autograd.Function):
    """The loss as it is. Backward it also gives the logits their gradient, where somebody watches it."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, logits: DeferredLogits, operands: Any, target: Tensor, factor: Any, how: HeadLoss
    ) -> Tensor:
        given = factor if isinstance(factor, Tensor) else None
        ctx.save_for_backward(*operands, target, given)
        ctx.watch, ctx.how, ctx.factor = logits._watch, how, None if given is not None else factor
        ctx.set_materialize_grads(False)
        return loss.clone()  # not a view, which nobody could write into

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (grad,) = grads
        if grad is None or not ctx.watch or not ctx.needs_input_grad[1]:
            return grad, None, None, None, None, None
        hidden, weight, bias, target, given = ctx.saved_tensors
        how, parameters = ctx.how, (weight,) if bias is None else (weight, bias)
        with torch.no_grad():
            logits = _values(hidden, parameters, how.steps)[-1]
        with torch.enable_grad():
            later = logits.requires_grad_()
            for name, argument in how.later:
                later = _STEPS[name](later, argument)
            rows = later.reshape(-1, later.shape[-1])
            loss = F.cross_entropy(rows, target, ignore_index=how.ignore_index, reduction=how.reduction)
        factor = ctx.factor if given is None else given
        # A factor or summand of several numbers makes as many losses of one.
        (found,) = torch.autograd.grad(loss, logits, (grad * factor).sum().to(loss.dtype))
        # A hook may write into the gradient that it gets.
        ctx.watch.from_loss = found.clone()
        return grad, found, None, None, None, None


def _values(hidden: Tensor, parameters: Sequence[Tensor], steps: Sequence[Step]) -> list[Tensor]:
    """The linear's result, and that of each step."""
    found = [F.linear(hidden, *parameters)]
    for name, argument in steps:
        found.append(_STEPS[name](found[-1], argument))
    return found


def _content(parameters: Sequence[Tensor]) -> Tensor:
    """What changes when a weight does: by an op, a fused optimizer, through `.data`, or as its memory is freed."""
    # torch's DDPOptimizer runs each bucket's compiled graph on fake tensors first, for the shapes.
    if any(is_fake(p) for p in parameters):
        return torch.zeros(0, dtype=torch.int64)
    with torch.inference_mode(False):
        if any(p.numel() and not p.untyped_storage().size() for p in parameters):
            return torch.zeros(0, dtype=torch.int64)
        return torch.cat([fingerprint(p) for p in parameters])


def _is_of_a_wrapper(func: Any, args: tuple) -> bool:
    """Whether it is FSDP2 that hangs a hook on a model's outputs: it waits for the backward, not for a gradient."""
    owner = getattr(args[1], "__self__", None) if func == Tensor.register_hook and len(args) > 1 else None
    return type(owner).__module__.startswith("torch.distributed.")
