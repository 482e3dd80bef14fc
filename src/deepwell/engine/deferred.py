"""Logits that are computed when somebody looks at them.

A training step needs the loss, not the logits, yet models return both. With head and loss fused, the logits of
Llama-3 at 16k tokens would cost 4 GB and a GEMM for nobody. A `DeferredLogits` knows its shape, dtype and device;
the first torch function that touches its values computes the head's linear and what the model does to its logits,
differentiable as the model's own would be. It must be looked at before the weight changes: the logits of a weight that
is gone cannot be had.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from deepwell.errors import NumericsError

# Questions about a tensor that need no values.
_PROPERTIES = ("shape", "dtype", "device", "ndim", "is_cuda", "is_cpu", "is_meta", "layout", "nbytes", "itemsize")
_REQUIRES_GRAD: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_FACTS: set[Any] = {getattr(Tensor, name).__get__ for name in _PROPERTIES}
_FACTS |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.element_size}
_FACTS |= {Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device}

# One step of what a model does to its logits: ("mul" | "div", number), ("tanh", None), ("to", dtype).
Step = tuple[str, Any]
_STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": lambda z, number: z * number,
    "div": lambda z, number: z / number,
    "tanh": lambda z, _: torch.tanh(z),
    "to": lambda z, dtype: z.to(dtype),
    "contiguous": lambda z, _: z.contiguous(),
}


class DeferredLogits(torch.Tensor):
    """A stand-in for `F.linear(hidden, weight, bias)` with `steps` done to it."""

    _hidden: Tensor
    _parameters: tuple[Tensor, ...]
    _steps: Sequence[Step]
    _value: Tensor | None
    _made_with: list[tuple[int, int]]

    @staticmethod
    def __new__(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, steps: Sequence[Step] = ()
    ) -> "DeferredLogits":
        shape = (*hidden.shape[:-1], weight.shape[0])
        dtype = next((value for name, value in reversed(steps) if name == "to"), hidden.dtype)
        out = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        out._hidden, out._steps, out._value = hidden, steps, None
        out._parameters = (weight,) if bias is None else (weight, bias)
        out._made_with = [_state(parameter) for parameter in out._parameters]
        return out

    def materialize(self) -> Tensor:
        """The logits themselves, computed once. Raises NumericsError where the head's weight changed since."""
        if self._value is None:
            if [_state(parameter) for parameter in self._parameters] != self._made_with:
                raise NumericsError(
                    "these logits were not computed with the loss, and the head's weight has changed since: "
                    "read them before optimizer.step(), or compile with fuse_head=False"
                )
            value = F.linear(self._hidden, *self._parameters)
            for name, argument in self._steps:
                value = _STEPS[name](value, argument)
            self._value = value
        return self._value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func == _REQUIRES_GRAD and _is_asked_by_wrappers(args[0]):
            return False
        if func in _FACTS:
            return super().__torch_function__(func, types, args, kwargs)
        args, kwargs = torch.utils._pytree.tree_map_only(DeferredLogits, cls.materialize, (args, kwargs))
        return func(*args, **kwargs)

    # Code that goes past torch functions (C++ extensions, make_fx) meets the values as well.
    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.materialize().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _is_asked_by_wrappers(logits: DeferredLogits) -> bool:
    """Whether it may be FSDP2 that asks, as it does of every output, to hang a hook on those that say yes.

    Logits that nobody has looked at are in no graph yet. In one process they say what they would be.
    """
    return logits._value is None and torch.distributed.is_available() and torch.distributed.is_initialized()


def _state(weight: Tensor) -> tuple[int, int]:
    """What changes when a weight is written in place or its data is swapped."""
    version = 0 if weight.is_inference() else weight._version
    # torch's DDPOptimizer runs each bucket's compiled graph on fake tensors first, for the shapes.
    return version, 0 if is_fake(weight) else weight.data_ptr()
