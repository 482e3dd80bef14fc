"""The parameters of a live model as the IR counts them: who owns a tied one, and in which words its dtype is named."""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepwell.graph.ops import Op, Param

_NAMES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "int64", torch.int32: "int32", torch.int8: "int8", torch.uint8: "int8", torch.bool: "bool",
}  # fmt: skip
_BY_SIZE = {1: "fp8", 2: "fp16", 4: "int32", 8: "fp64"}


def dtype_name(dtype: torch.dtype) -> str:
    """The IR's word for a dtype; one that it has no word for is named by its size."""
    return _NAMES.get(dtype) or _BY_SIZE.get(dtype.itemsize, "fp64")


def model_dtype(model: nn.Module) -> str:
    """The dtype that most of the parameters have; fp32 for a model without any."""
    counts: Counter[str] = Counter()
    for parameter in model.parameters():
        counts[dtype_name(parameter.dtype)] += parameter.numel()
    return counts.most_common(1)[0][0] if counts else "fp32"


def positions(model: nn.Module) -> int | None:
    """Positions that the model was made for, as its config says."""
    config: Any = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


class Parameters:
    """Names and storage of all parameters; counts each storage once, at the first op that names its owner."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = dict(model.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        for name, tensor in self._tensors.items():
            first.setdefault(id(tensor), name)
        self._owner = {name: first[id(tensor)] for name, tensor in self._tensors.items()}
        self._counted: set[str] = set()
        self._orphans: set[str] = set()

    def name_all(self, names: set[str]) -> None:
        """Tell which names ops will use: a storage whose owner none of them names belongs to the first that uses it."""
        self._orphans = {self._owner[name] for name in names} - names

    def owner(self, name: str) -> str:
        return self._owner[name]

    def owners(self) -> list[str]:
        return [name for name, owner in self._owner.items() if name == owner]

    def param(self, name: str, layer: str, relative: str) -> Param:
        """The parameter as an op of `layer` holds it: tied where another name owns it or an op before took it."""
        tensor = self._tensors[name]
        owner = self._owner[name]
        is_owned = (owner == name or owner in self._orphans) and owner not in self._counted
        if is_owned:
            self._counted.add(owner)
        return Param(
            name=relative,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            tied_to=None if is_owned else owner,
        )

    def retied(self, ops: tuple[Op, ...], source: str, path: str) -> tuple[Op, ...]:
        """The ops of the layer at `source` as those of the layer at `path`: ties follow the parameters there."""
        result: list[Op] = []
        for op in ops:
            params: list[Param] = []
            for param in op.params:
                full = f"{path}.{param.name}"
                if full not in self._tensors:  # a parameter from outside of the layers: tied for everyone
                    params.append(replace(param, tied_to=param.tied_to or param.name))
                    continue
                again = param.tied_to == f"{source}.{param.name}"  # used twice in one layer
                owner = self._owner[full]
                is_orphan = param.tied_to is None and owner.startswith(f"{path}.")
                is_owned = (owner == full or is_orphan) and not again
                params.append(replace(param, tied_to=None if is_owned else owner))
            result.append(replace(op, params=tuple(params)) if params != list(op.params) else op)
        return tuple(result)
