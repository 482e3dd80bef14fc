"""Hugging Face folders: what a sharded run saved is read by from_pretrained, and the other way round.

A folder is written from a checkpoint, one tensor at a time: the memory that is needed is that of the largest tensor,
and any layout can be exported, pipeline stages too, since only files are read.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from deepwell.artifacts.checkpoint.manifest import latest, step_of
from deepwell.artifacts.checkpoint.pieces import named_tensors
from deepwell.artifacts.checkpoint.pretrained_config import model_of
from deepwell.artifacts.checkpoint.reader import Reader
from deepwell.artifacts.checkpoint.saver import save_checkpoint
from deepwell.artifacts.checkpoint.shards import box_of, local_of
from deepwell.artifacts.checkpoint.state import TrainState
from deepwell.artifacts.checkpoint.team import is_distributed
from deepwell.artifacts.tensor_file import TensorSlot, as_bytes, header
from deepwell.errors import CheckpointError, ConfigError
from deepwell.files import whole_file, write_whole

MAX_SHARD_BYTES = 5_000_000_000
_INDEX = "model.safetensors.index.json"
_CONFIGS = ("config.json", "generation_config.json")
_WORK = ".saving"


def save_pretrained(
    model: nn.Module | TrainState,
    folder: Path | str,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    process_group: Any = None,
) -> Path:
    """Write a model, sharded or not, as a Hugging Face folder and return it. All ranks of the group call it.

    The folder gets config.json (of a model that has a configuration) and its weights as safetensors, in files of at
    most `max_shard_bytes` where a tensor is not larger. A tensor with two names is written once, as Hugging Face does.
    Raises ConfigError if the folder holds weights already.
    """
    folder = Path(folder)
    _check_empty(folder)
    source = model.model if isinstance(model, TrainState) else model
    path = save_checkpoint(folder / _WORK, TrainState(model=source, meta={"step": 0}), process_group=process_group)
    is_alone = not is_distributed(process_group)
    is_main = is_alone or dist.get_rank(process_group) == 0
    if not is_alone:
        dist.barrier(group=process_group)  # every rank has seen that the checkpoint is there, which rank 0 removes
    try:
        if is_main:
            consolidate(path, folder, max_shard_bytes=max_shard_bytes, verify=False)
    finally:
        if is_main:
            shutil.rmtree(folder / _WORK, ignore_errors=True)
        if not is_alone:
            dist.barrier(group=process_group)
    return folder


def consolidate(
    path: Path | str, folder: Path | str, *, max_shard_bytes: int = MAX_SHARD_BYTES, verify: bool = True
) -> Path:
    """Turn a checkpoint (or the last one of a run's folder) into a Hugging Face folder, one tensor at a time."""
    path, folder = find_checkpoint(path), Path(folder)
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes is {max_shard_bytes}; it must be positive")
    _check_empty(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _consolidate(Reader(path), folder, max_shard_bytes, verify)
    except OSError as error:
        raise CheckpointError(f"{folder} was not written: {error.strerror or error}") from error
    return folder


def _consolidate(reader: Reader, folder: Path, max_shard_bytes: int, verify: bool) -> None:
    if verify:
        reader.verify()
    shards: list[list[TensorSlot]] = [[]]
    used = 0
    for name, entry in reader.model.items():
        slot = TensorSlot(key=name, dtype=entry.dtype, shape=entry.shape)
        if shards[-1] and used + slot.nbytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(slot)
        used += slot.nbytes
    weight_map: dict[str, str] = {}
    for number, slots in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        with whole_file(folder / name, synced=True) as partial, partial.open("wb") as file:
            file.write(header(slots))
            for slot in slots:
                entry = reader.model[slot.key]
                file.write(as_bytes(reader.read(entry, entry.whole).contiguous()).numpy().data)
        weight_map |= {slot.key: name for slot in slots}
    if len(shards) > 1:
        total = sum(slot.nbytes for slots in shards for slot in slots)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_whole(folder / _INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    for name in _CONFIGS:
        if name in reader.opened.files:
            shutil.copyfile(reader.opened.path / name, folder / name)


def load_pretrained(model: nn.Module, folder: Path | str) -> nn.Module:
    """Load the safetensors of a Hugging Face folder into a plain or sharded model and return it.

    Each rank reads its own parts. Weights of another floating dtype are converted to the model's. A model of
    transformers whose files name weights otherwise (experts, one by one) is read by transformers itself, whole on every
    rank, and copied from there. Raises CheckpointError naming what is missing or does not fit.
    """
    folder = Path(folder)
    files = _weight_files(folder)
    tensors, tied = named_tensors(model)
    aliases: dict[str, list[str]] = {name: [name] for name in tensors}
    for alias, name in tied.items():
        aliases[name].append(alias)
    where = {name: next((files[n] for n in names if n in files), None) for name, names in aliases.items()}
    missing = [name for name, found in where.items() if found is None]
    stored: dict[str, Any] = _by_transformers(model, folder, missing) if missing else where
    with torch.no_grad():
        for name, tensor in tensors.items():
            _copy(stored[name], tensor, name, folder)
    return model


def _copy(stored: Any, tensor: Tensor, name: str, folder: Path) -> None:
    """Fill this rank's part from a tensor, or from one of a file that is not read yet."""
    shape = list(stored.shape if isinstance(stored, Tensor) else stored.get_shape())
    if shape != list(tensor.shape):
        raise CheckpointError(f"{folder}: {name} has shape {shape}, the model's is {list(tensor.shape)}")
    box = box_of(tensor, name)
    slices = tuple(slice(begin, begin + size) for begin, size in zip(box.offsets, box.sizes, strict=True))
    if box.numel:
        local_of(tensor).copy_(stored[slices])


def _weight_files(folder: Path) -> dict[str, Any]:
    """Each tensor of a folder's safetensors files, not read yet."""
    paths = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    index = folder / _INDEX
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            paths = [folder / Path(name).name for name in names]
        elif (folder / "model.safetensors").is_file():
            paths = [folder / "model.safetensors"]
        if not paths:
            raise CheckpointError(f"{folder} holds no safetensors files")
        found = {}
        for path in paths:
            file = safe_open(str(path), framework="pt")
            found.update({key: file.get_slice(key) for key in file.keys()})
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder}: its weights cannot be read: {error}") from error
    return found


def _by_transformers(model: nn.Module, folder: Path, missing: list[str]) -> dict[str, Tensor]:
    # FSDP2 makes a subclass of the model's class.
    kinds = (kind for kind in type(model_of(model)).__mro__ if not kind.__name__.startswith("FSDP"))
    kind = next((kind for kind in kinds if hasattr(kind, "from_pretrained")), None)
    if kind is None or not (folder / "config.json").is_file():
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{folder} has no {missing[0]}{more}, which the model needs")
    whole, loading = kind.from_pretrained(folder, dtype="auto", use_safetensors=True, output_loading_info=True)
    lacking = sorted(loading["missing_keys"])
    if lacking:
        raise CheckpointError(f"{folder} has no {lacking[0]}, which the model needs")
    return dict(whole.state_dict())


def find_checkpoint(path: Path | str) -> Path:
    """A checkpoint's folder itself, or the last one in the folder of a run. Raises CheckpointError if there is none."""
    path = Path(path)
    if (path / "manifest.json").is_file() or step_of(path) is not None:
        return path
    for folder in (path, path / "checkpoints"):
        found = latest(folder)
        if found is not None:
            return found
    raise CheckpointError(f"{path} is no checkpoint and holds none that is committed")


def _check_empty(folder: Path) -> None:
    found = next(iter(sorted(folder.glob("*.safetensors*"))), None) if folder.is_dir() else None
    if found is not None:
        raise ConfigError(f"{folder} holds {found.name} already; choose an empty folder")
