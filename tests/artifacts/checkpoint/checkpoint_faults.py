"""Run by test_checkpoint_saver.py: saves in processes that are killed at every call that writes, or run out of room."""

import json
import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from deepwell import files
from deepwell.artifacts.checkpoint import Saver, TrainState, latest, load, save_checkpoint, verify

CALLS = ("open", "write", "fsync")
PATH_CALLS = ("mkdir", "rename", "unlink")


def count_calls(act: Any) -> None:
    """Call `act` before every call of the checkpoint's that changes the disk."""
    real = SimpleNamespace(**{name: getattr(os, name) for name in dir(os) if not name.startswith("__")})

    def watched(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            act()
            return function(*args, **kwargs)

        return call

    files.os = SimpleNamespace(**{**vars(real), **{name: watched(getattr(real, name)) for name in CALLS}})  # type: ignore[attr-defined]
    for name in PATH_CALLS:
        setattr(Path, name, watched(getattr(Path, name)))


def state(step: int) -> TrainState:
    net = nn.Linear(8, 8)
    with torch.no_grad():
        net.weight.fill_(float(step))
        net.bias.fill_(float(step))
    return TrainState(model=net, meta={"step": step, "loss": 0.5})


def killed_at(folder: Path, step: int, call: int) -> bool:
    """Save in a process that dies before its `call`-th call; whether it died."""
    child = os.fork()
    if child == 0:
        left = call

        def act() -> None:
            nonlocal left
            if left == 0:
                os._exit(9)
            left -= 1

        count_calls(act)
        save_checkpoint(folder, state(step))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def main(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"killed": 0, "new": 0, "old": 0}
    save_checkpoint(folder, state(1))
    for step in (2, 1):  # a new step, and one that is there already
        call = 0
        while killed_at(folder / "", step, call):
            path = latest(folder)
            assert path is not None
            verify(path)
            value = float(load(path).weights()["weight"][0, 0])
            assert value == load(path).step, (call, path)
            assert load(path).step in {1, 2}
            found["killed"] += 1
            found["new" if load(path).step == step else "old"] += 1
            call += 1
        with Saver(folder, keep_last=5) as saver:  # puts in order what the killed ones left
            saver.save(state(step))
        (event,) = saver.poll()
        assert event.committed and not event.error, event
    found["left"] = sorted(path.name for path in folder.iterdir())

    # No room: files may not grow beyond what the header needs.
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
    with Saver(folder) as saver:
        saver.save(state(3))
    (event,) = saver.poll()
    found["full"] = {"committed": event.committed, "error": event.error}
    found["after"] = sorted(path.name for path in folder.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save_checkpoint(folder, state(3))
    found["again"] = str(latest(folder))
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
