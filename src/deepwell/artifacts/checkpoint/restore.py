"""Brings a checkpoint into a live model and optimizer, whatever their layout, bit for bit."""

from collections.abc import Callable, Iterable
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
    with Reader(Path(path)) as reader:
        tensors, tied = named_tensors(state.model)
        names = {} if state.optimizer is None else names_of(state.optimizer, tensors)
        rank, world = 0, 1
        if is_distributed(process_group):
            rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)

        def check() -> None:
            if verify:
                reader.verify(rank, world)
            _check_model(reader, tensors)
            _check_optimizer(reader, names, round_moments)

        held = _agree_on(check, {*tensors, *tied}, process_group)
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


def _agree_on(check: Callable[[], None], names: set[str], group: Any) -> set[str]:
    """Run a check on every rank; all raise where one does. Returns the names that any rank holds."""
    problem = ""
    try:
        check()
    except CheckpointError as error:
        if not is_distributed(group):
            raise
        problem = str(error)
    if not is_distributed(group):
        return names
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (problem, sorted(names)), group=group)
    for rank, (text, _) in enumerate(said):
        if text:
            raise CheckpointError(text if text == problem else f"rank {rank}: {text}")
    return {name for _, held in said for name in held}


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
        for entry in reader.optimizer.get(reader.name_of(name), {}).values():
            box = box_of(parameter, name)
            if entry.block and not round_moments and reader.read_scales(entry, box) is None:
                parts = " and ".join(str(list(part.sizes)) for _, part in entry.parts[:2])
                raise CheckpointError(
                    f"{reader.opened.path}: {entry.name} has a scale per {entry.block} elements of shards {parts}, and "
                    f"this run's shard {list(box.sizes)} at {list(box.offsets)} cuts those blocks: resume with the "
                    "layout of the save, pass round_moments=True to round the moments anew, or train with bf16 moments"
                )


def _load_optimizer(
    reader: Reader, optimizer: torch.optim.Optimizer, names: dict[Tensor, str], round_moments: bool
) -> None:
    """Give the optimizer its saved state and options through its own load_state_dict."""
    loaded: dict[int, dict[str, Any]] = {}
    groups = []
    number = 0
    # A learning rate that is a tensor may be held by others, a compiled step for one: it stays that tensor.
    held = [{key: v for key, v in group.items() if isinstance(v, Tensor)} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        ids = []
        for parameter in group["params"]:
            found = _states(reader, parameter, names[parameter], round_moments)
            if found:
                loaded[number] = found
            ids.append(number)
            number += 1
        groups.append({**group, **_options(reader, group, names), "params": ids})
    optimizer.load_state_dict({"state": loaded, "param_groups": groups})
    for group, tensors in zip(optimizer.param_groups, held, strict=True):
        for key, tensor in tensors.items():
            group[key] = tensor.fill_(float(group[key]))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        for key, value in loaded.get(number, {}).items():
            live = optimizer.state[parameter].get(key)
            # torch casts a state to its parameter's dtype; an optimizer that keeps another one gets what it had.
            if key != "step" and isinstance(live, Tensor) and live.dtype != value.dtype:
                optimizer.state[parameter][key] = value


def _states(reader: Reader, parameter: Tensor, name: str, round_moments: bool) -> dict[str, Any]:
    saved = reader.name_of(name)
    entries = reader.optimizer.get(saved, {})
    states: dict[str, Any] = dict(reader.values.get(saved, {}))
    for key, entry in entries.items():
        if entry.block:
            continue
        scales = entries.get(f"{key}_scales")
        if scales is not None and scales.block:
            states[key], states[f"{key}_scales"] = _moment(reader, entry, scales, parameter, name, round_moments)
        elif entry.shape == tuple(parameter.shape) and key != "step":
            local = _like(parameter, reader.read(entry, box_of(parameter, name)))
            states[key] = _sharded_as(parameter, local)
        else:
            states[key] = reader.read(entry, entry.whole)
    return states


def _moment(
    reader: Reader, entry: StoredTensor, scales: StoredTensor, parameter: Tensor, name: str, round_moments: bool
) -> tuple[Tensor, Tensor]:
    """An FP8 moment and its scales; both belong to the shard, so they are plain tensors as adamw_dw keeps them."""
    box = box_of(parameter, name)
    codes, found = reader.read(entry, box), reader.read_scales(scales, box)
    if found is None:
        assert round_moments
        spread = reader.spread_scales(scales, box)
        codes, found = requantize(codes, spread, scales.block, is_root=entry.stored.endswith("exp_avg_sq"))
    return _like(parameter, codes), found.to(parameter.device)


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
            return {key: tuple(v) if isinstance(group.get(key), tuple) else v for key, v in options.items()}
    return {}


def _rank_state(reader: Reader, rank: int) -> dict[str, Tensor]:
    file = f"ranks-{rank:05d}.safetensors"
    if file not in reader.opened.files:
        return {}
    prefix = f"rank.{rank}."
    try:
        with safe_open(str(reader.opened.path / file), framework="pt") as stored:
            return {key.removeprefix(prefix): stored.get_tensor(key) for key in stored.keys()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{reader.opened.path / file} cannot be read: {error}") from error


def _list(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more
