"""Checkpoints: a run's state as safetensors and JSON, written completely or not at all, read into any layout."""

from deepwell.artifacts.checkpoint.hf import consolidate, find_checkpoint, load_pretrained, save_pretrained
from deepwell.artifacts.checkpoint.manifest import latest, list_checkpoints, read_meta, verify
from deepwell.artifacts.checkpoint.public import Checkpoint, load, save
from deepwell.artifacts.checkpoint.restore import load_checkpoint
from deepwell.artifacts.checkpoint.saver import Saver, save_checkpoint
from deepwell.artifacts.checkpoint.state import SaveEvent, TrainState

__all__ = [
    "Checkpoint",
    "SaveEvent",
    "Saver",
    "TrainState",
    "consolidate",
    "find_checkpoint",
    "latest",
    "list_checkpoints",
    "load",
    "load_checkpoint",
    "load_pretrained",
    "read_meta",
    "save",
    "save_checkpoint",
    "save_pretrained",
    "verify",
]
