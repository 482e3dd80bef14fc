"""Brings a checkpoint into a live model and optimizer, whatever their layout, bit for bit."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepwell.artifacts.checkpoint.pieces import group_name, named_tensors, names_of
from deepwell.artifacts.checkpoint.reader import Reader, StoredTensor, requantize
from deepwell.artifacts.checkpoint.shards import box_of, is_dtensor, local_of
from deepwell.artifacts.checkpoint.state import TrainState
from deepwell.artifacts.checkpoint.team import is_distributed
from deepwell.errors import CheckpointError

_NAMED = 4  # names in a message


def load_checkpoint(
    path: Path | str, state: TrainState, *, verify: bool = True, round_moments: bool = False, process_group: Any = None
) -> dict[str, Any]:
    """Load weights and optimizer into the live ones, fill `state.rank_state` in place and return the saved meta.

    All ranks of the group call it, under any layout and number of ranks; every number comes back bit for bit. The
    optimizer's options are those that were saved. `rank_state` is that of the same rank, empty if there was none.
    `verify` compares the hashes of all files first, each rank some of them. FP8 moments have a scale per 128 elements
    of a rank's shard: where another layout cuts blocks elsewhere, an error says so, and `round_moments` accepts that
    they are rounded anew. Nothing is changed unless the whole checkpoint fits. Raises CheckpointError.
    """
    tensors, tied = named_tensors(state.model)
    names = {} if state.optimizer is None else names_of(state.optimizer, tensors)
    is_alone = not is_distributed(process_group)
    rank, world = (0, 1) if is_alone else (dist.get_rank(process_group), dist.get_world_size(process_group))
    problem, held = "", {*tensors, *tied}
    try:
        reader = Reader(Path(path))
        if verify:
            reader.verify(rank, world)
        _check_model(reader, tensors)
        _check_optimizer(reader, names, round_moments)
    except CheckpointError as error:
        if is_alone:
            raise
        problem = str(error)
    if not is_alone:  # all raise where one does
        said: list[Any] = [None] * world
        dist.all_gather_object(said, (problem, sorted(held)), group=process_group)
        for other, (text, _) in enumerate(said):
            if text:
                raise CheckpointError(text if text == problem else f"rank {other}: {text}")
        held = {name for _, names_there in said for name in names_there}
    _check_all_used(reader, held)
    with torch.no_grad():
        for name, tensor in tensors.items():
            entry = reader.model[reader.name_of(name)]
            # The tensor itself where it can be, so that who watches its version sees it change.
            target = local_of(tensor) if is_dtensor(tensor) else tensor
            target.copy_(reader.read(entry, box_of(tensor, name)))
    if state.optimizer is not None:
        _load_optimizer(reader, state.optimizer, names, round_moments)
    rank_state = _rank_state(reader, rank)
    state.rank_state.clear()
    state.rank_state.update(rank_state)
    return reader.opened.state


def _check_model(reader: Reader, tensors: dict[str, Tensor]) -> None:
    path = reader.opened.path
    missing = [name for name in tensors if reader.name_of(name) not in reader.model]
    if missing:
        raise CheckpointError(f"{path} has no {_list(missing)}; load it into the model that it was saved from")
    for name, tensor in tensors.items():
        entry = reader.model[reader.name_of(name)]
        if entry.shape != tuple(tensor.shape):
            raise CheckpointError(f"{path}: {name} has shape {entry.shape}, the model's is {tuple(tensor.shape)}")
        if entry.dtype != tensor.dtype:
            raise CheckpointError(
                f"{path}: {name} is {entry.dtype}, the model's is {tensor.dtype}; make the model in {entry.dtype}, or "
                "consolidate the checkpoint and use load_pretrained, which converts"
            )
        reader.parts(entry, box_of(tensor, name))


def _check_all_used(reader: Reader, held: set[str]) -> None:
    aliases: dict[str, set[str]] = {}
    for alias, name in reader.tied.items():
        aliases.setdefault(name, {name}).add(alias)
    unused = [name for name in reader.model if not aliases.get(name, {name}) & held]
    if unused:
        raise CheckpointError(f"{reader.opened.path} holds {_list(unused)}, which the model has no place for")


def _check_optimizer(reader: Reader, names: dict[Tensor, str], round_moments: bool) -> None:
    if not names:
        return
    if not reader.groups:
        raise CheckpointError(f"{reader.opened.path} was saved without an optimizer; load it with optimizer=None")
    for parameter, name in names.items():
        box = box_of(parameter, name)
        for key, entry in reader.optimizer.get(reader.name_of(name), {}).items():
            reader.parts(entry, box if _is_like(entry, key, parameter) or entry.block else entry.whole)
            if entry.block and not round_moments and reader.read_scales(entry, box) is None:
                parts = " and ".join(str(list(part.sizes)) for _, part in entry.parts[:2])
                raise CheckpointError(
                    f"{reader.opened.path}: {entry.name} has a scale per {entry.block} elements of shards {parts}, and "
                    f"this run's shard {list(box.sizes)} at {list(box.offsets)} cuts those blocks: resume with the "
                    "layout of the save, pass round_moments=True to round the moments anew, or train with bf16 moments"
                )


def _is_like(entry: StoredTensor, key: str, parameter: Tensor) -> bool:
    """Whether a state has a value for each element of its parameter, and is split as that is."""
    return entry.shape == tuple(parameter.shape) and key != "step"


def _load_optimizer(
    reader: Reader, optimizer: torch.optim.Optimizer, names: dict[Tensor, str], round_moments: bool
) -> None:
    """Give the optimizer its saved state and options through its own load_state_dict."""
    # A learning rate that is a tensor may be held by others, a compiled step for one: it stays that tensor.
    held = [{key: v for key, v in group.items() if isinstance(v, Tensor)} for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [_states(reader, parameter, names[parameter], round_moments) for parameter in parameters]
    numbers = iter(range(len(parameters)))
    groups = [
        {**group, **_options(reader, group, names), "params": [next(numbers) for _ in group["params"]]}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict({"state": {n: s for n, s in enumerate(states) if s}, "param_groups": groups})
    for group, tensors in zip(optimizer.param_groups, held, strict=True):
        for key, tensor in tensors.items():
            group[key] = tensor.fill_(float(group[key]))
    for parameter, state in zip(parameters, states, strict=True):
        for key, value in state.items():
            live = optimizer.state[parameter].get(key)
            # torch casts a state to its parameter's dtype; an optimizer that keeps another one gets what it had.
            if key != "step" and isinstance(live, Tensor) and live.dtype != value.dtype:
                optimizer.state[parameter][key] = value


def _states(reader: Reader, parameter: Tensor, name: str, round_moments: bool) -> dict[str, Any]:
    saved, box = reader.name_of(name), box_of(parameter, name)
    entries = reader.optimizer.get(saved, {})
    states: dict[str, Any] = dict(reader.values.get(saved, {}))
    for key, entry in entries.items():
        scales = entries.get(f"{key}_scales")
        if scales is not None and scales.block:
            # An FP8 moment and its scales belong to the shard, so they are plain tensors as adamw_dw keeps them.
            codes, found = reader.read(entry, box), reader.read_scales(scales, box)
            if found is None:
                assert round_moments
                spread = reader.spread_scales(scales, box)
                codes, found = requantize(codes, spread, scales.block, is_root=entry.stored.endswith("exp_avg_sq"))
            states[key], states[f"{key}_scales"] = _like(parameter, codes), found.to(parameter.device)
        elif _is_like(entry, key, parameter) and not entry.block:
            states[key] = _sharded_as(parameter, _like(parameter, reader.read(entry, box)))
        elif not entry.block:
            states[key] = reader.read(entry, entry.whole)
    return states


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """A value in the memory layout of the parameter's shard, on its device."""
    out = torch.empty_like(local_of(parameter), dtype=value.dtype, memory_format=torch.preserve_format)
    return out.copy_(value)


def _sharded_as(parameter: Tensor, local: Tensor) -> Tensor:
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _options(reader: Reader, group: dict[str, Any], names: dict[Tensor, str]) -> dict[str, Any]:
    """The saved options of a group: those of the group that its first parameter was in."""
    first = reader.name_of(names[group["params"][0]]) if group["params"] else ""
    for number, saved in enumerate(reader.groups):
        if first in saved["names"]:
            numbers = reader.optimizer.get(group_name(number), {})
            options = {**saved["options"], **{key: reader.read(e, e.whole).item() for key, e in numbers.items()}}
            pairs = {key for key, v in options.items() if isinstance(v, list) and isinstance(group.get(key), tuple)}
            return {key: tuple(v) if key in pairs else v for key, v in options.items()}
    return {}


def _rank_state(reader: Reader, rank: int) -> dict[str, Tensor]:
    file, prefix = f"ranks-{rank:05d}.safetensors", f"rank.{rank}."
    if file not in reader.opened.files:
        return {}
    try:
        with safe_open(str(reader.opened.path / file), framework="pt") as stored:
            return {key.removeprefix(prefix): stored.get_tensor(key) for key in stored.keys()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{reader.opened.path / file} cannot be read: {error}") from error


def _list(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more
