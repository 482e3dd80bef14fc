"""What this rank writes: its parts of the model's and the optimizer's tensors, each with its place in the whole."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepwell.artifacts.checkpoint.shards import BLOCK, Box, box_of, is_dtensor, local_of
from deepwell.artifacts.checkpoint.state import TrainState
from deepwell.errors import ConfigError, UnsupportedError

# What wrappers put into the names of parameters.
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor of one file. `name` is a tensor of the model; `key` the state of it that an optimizer holds, or ""."""

    file: str  # model, optimizer or ranks
    name: str
    key: str = ""
    tensor: Tensor
    box: Box
    is_part: bool = True  # of the tensor that is named, split as that is; else something there is once of it
    block: int = 0  # of scales: how many elements of the box share one, in the order of its memory
    changes: bool = False  # by a forward, not only by the optimizer

    @property
    def stored(self) -> str:
        """Its name in the file."""
        return f"state.{self.name}.{self.key}" if self.key else self.name

    @property
    def unit(self) -> str:
        """What one rank writes as a whole: a part of a weight with its moments, or what there is once of a weight."""
        return f"{self.name}@{','.join(map(str, self.box.offsets))}" if self.is_part else f"{self.name}@"


def contents_of(state: TrainState, rank: int) -> tuple[list[Piece], dict[str, Any]]:
    """All that this rank holds of a state, before it is decided who writes what: its tensors, and what is none.

    "tied" has further names of tensors with the first, "values" what an optimizer keeps of a parameter that is no
    tensor, "groups" its options with the names of their parameters. Raises UnsupportedError naming what a checkpoint
    cannot hold.
    """
    tensors, tied = named_tensors(state.model)
    fixed = {id(p) for p in state.model.parameters()}
    pieces = [_piece("model", name, tensor, changes=id(tensor) not in fixed) for name, tensor in tensors.items()]
    values: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    if state.optimizer is not None:
        names = names_of(state.optimizer, tensors)
        for parameter, name in names.items():
            if not box_of(parameter, name).numel and parameter.numel():
                continue  # a rank without rows has counted no steps for them either
            for key, value in state.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    pieces.append(_state_piece(parameter, name, key, value))
                else:
                    values.setdefault(name, {})[key] = _json(value, f"the optimizer's {key} of {name}")
        for number, group in enumerate(state.optimizer.param_groups):
            options = {}
            for key, value in group.items():
                if isinstance(value, Tensor):
                    pieces.append(_piece("optimizer", group_name(number), value, key=key, is_part=False, changes=True))
                elif key not in {"params", "param_names"}:
                    options[key] = _json(value, f"the optimizer's option {key}")
            groups.append({"names": [names[parameter] for parameter in group["params"]], "options": options})
    pieces += [_piece("ranks", f"rank.{rank}.{key}", value, changes=True) for key, value in state.rank_state.items()]
    return pieces, {"tied": tied, "values": values, "groups": groups}


def named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A model's state by name, each tensor once, and the further names of those that have several.

    `state_dict` is asked because FSDP2 brings parameters that are still gathered back to their shards for it.
    """
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    for raw, value in model.state_dict(keep_vars=True).items():
        name = _WRAPPERS.sub("", raw)
        if not isinstance(value, Tensor):
            raise UnsupportedError(f"{name} of the model's state is a {type(value).__name__}; only tensors are saved")
        if first.setdefault(id(value), name) == name:
            tensors[name] = value
        else:
            tied[name] = first[id(value)]
    return tensors, tied


def names_of(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> dict[Tensor, str]:
    """The model's name of each of an optimizer's parameters."""
    by_id = {id(tensor): name for name, tensor in tensors.items()}
    names = {}
    for number, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in by_id:
                raise ConfigError(
                    f"optimizer.param_groups[{number}]['params'][{i}] {tuple(parameter.shape)} is not a parameter of "
                    "the model; build the optimizer after the model is wrapped, from model.parameters()"
                )
            names[parameter] = by_id[id(parameter)]
    return names


def group_name(number: int) -> str:
    """What options that are tensors are filed under; reading their value here would wait for the device."""
    return f"param_groups.{number}"


def units_of(state: TrainState) -> dict[str, int]:
    """What this rank could write, with its bytes: its part of each weight, and what there is once of each parameter."""
    pieces, facts = contents_of(state, 0)
    units: dict[str, int] = {}
    for piece in pieces:
        if piece.file == "model" and (piece.box.numel or not math.prod(piece.box.whole)):  # some ranks have no rows
            units[piece.unit] = piece.box.numel * piece.tensor.element_size()
            units.setdefault(f"{piece.name}@", 0)  # its step count, which may not be there yet
    return units | {f"{group_name(number)}@": 0 for number in range(len(facts["groups"]))}


def _piece(file: str, name: str, tensor: Tensor, key: str = "", **facts: Any) -> Piece:
    """A tensor that has its own place."""
    what = f"the optimizer's {key} of {name}" if key else name
    return Piece(file=file, name=name, key=key, tensor=local_of(tensor), box=box_of(tensor, what), **facts)


def _state_piece(parameter: Tensor, name: str, key: str, value: Tensor) -> Piece:
    """A state's place: that of its parameter where it has one value per element, else the whole of itself."""
    box, local, what = box_of(parameter, name), local_of(parameter), f"the optimizer's {key} of {name}"
    if key.endswith("_scales") and value.numel() == -(-local.numel() // BLOCK) and not is_dtensor(value):
        if not local.is_contiguous():
            raise UnsupportedError(f"{what}: FP8 moments of a weight that is not contiguous cannot be saved")
        return Piece(file="optimizer", name=name, key=key, tensor=value, box=box, block=BLOCK)
    if is_dtensor(value) and value.dim():
        if value.shape != parameter.shape:
            raise UnsupportedError(f"{what} is a DTensor of shape {tuple(value.shape)}, unlike its parameter's")
        return _piece("optimizer", name, value, key)
    if key != "step" and value.shape == local.shape:
        return Piece(file="optimizer", name=name, key=key, tensor=value, box=box)
    if is_dtensor(parameter) and value.numel() != 1:
        raise UnsupportedError(f"{what} has shape {tuple(value.shape)}; how it is split over ranks is not known")
    return _piece("optimizer", name, value, key, is_part=False)


def _json(value: Any, what: str) -> Any:
    try:
        return json.loads(json.dumps(value))
    except TypeError as error:
        raise UnsupportedError(f"{what} is a {type(value).__name__}, which JSON cannot hold") from error
