"""See the grouped products of a model that runs eagerly: which expert weight meets which rows.

Experts' weights are parameters, not modules, so no hook sees them. While this mode is on, each grouped product whose
weight is one of those given, or batch of products, one for each expert, is reported with its operands after it ran.
It runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from deepwell.graph.fx import is_grouped_product
from deepwell.kernels.experts.autograd import even_ends

_BATCHED = {"bmm", "matmul", "__matmul__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedCall:
    """One product: rows of group e, which ends at `offs[e]`, times expert e of a parameter stored [E, N, K] or, where
    `is_kn`, [E, K, N]."""

    path: str
    x_SK: Tensor
    weight: Tensor
    offs: Tensor
    is_kn: bool


class GroupedCalls(TorchFunctionMode):
    """Reports calls to `seen(call, result)`. `weights` maps the paths of experts to their parameters."""

    def __init__(self, weights: Mapping[str, Tensor], seen: Callable[[GroupedCall, Tensor], None]) -> None:
        super().__init__()
        self._paths = {id(weight): path for path, weight in weights.items()}
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_batch = getattr(func, "__name__", "") in _BATCHED
        is_product = bool(self._paths) and (is_batch or is_grouped_product(func))
        call = self._call(args, kwargs or {}) if is_product else None
        if call is not None:
            self._seen(call, out)
        return out

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GroupedCall | None:
        given = [*args, *(kwargs[name] for name in ("input", "mat1", "weight", "mat2", "offs") if name in kwargs)]
        tensors = [value for value in given if isinstance(value, Tensor)][:3]
        dims = [tensor.dim() for tensor in tensors]
        if dims == [3, 3] and tensors[0].shape[0] == tensors[1].shape[0]:
            x, right, offs = tensors[0].flatten(0, 1), tensors[1], even_ends(tensors[0])
        elif dims == [2, 3, 1]:
            x, right, offs = tensors
        else:
            return None
        stored = right._base if right._is_view() else right
        path = self._paths.get(id(stored))
        if path is None or stored is None or right.data_ptr() != stored.data_ptr():
            return None
        transposed = stored.transpose(1, 2)
        is_kn = (right.shape, right.stride()) == (stored.shape, stored.stride())
        if not is_kn and (right.shape, right.stride()) != (transposed.shape, transposed.stride()):
            return None
        return GroupedCall(path=path, x_SK=x, weight=stored, offs=offs, is_kn=is_kn)
