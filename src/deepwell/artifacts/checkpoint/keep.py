"""Which checkpoints stay: the last few, and every n-th step for ever. And what a killed run left is put in order."""

import re
from pathlib import Path

from deepwell.artifacts.checkpoint.files import remove_folder, rename_folder
from deepwell.artifacts.checkpoint.manifest import list_checkpoints, step_of
from deepwell.errors import ConfigError

# The names of what is under way: being written (tmp), being replaced (old), being deleted (gone), given up (failed).
_UNDER_WAY = re.compile(r"\.(step-\d{8,})\.[0-9a-f]{12}-[\d-]+\.(tmp|old|gone|failed)")


def check_keep(keep_last: int, keep_every: int | None) -> None:
    """Raise ConfigError for numbers that would keep nothing."""
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1 on")


def prune(folder: Path, saved: Path, save_id: str, keep_last: int, keep_every: int | None) -> list[Path]:
    """Delete the checkpoints that need not stay; returns what they were called.

    Only committed and whole checkpoints are counted and deleted: anything else in the folder is not ours to judge. The
    newest and the one that was just saved always stay.
    """
    found = list_checkpoints(folder)
    removed = []
    for path in found[:-keep_last]:
        step = step_of(path)
        if path == saved or path.name.startswith(".") or (keep_every and step is not None and step % keep_every == 0):
            continue
        # Under another name first: half deleted, it must not look like a checkpoint.
        gone = folder / f".{path.name}.{save_id}.gone"
        rename_folder(path, gone)
        remove_folder(gone)
        removed.append(path)
    return removed


def tidy(folder: Path, token: str) -> None:
    """Remove what saves that were killed left, and give a checkpoint that was renamed to `.old` its name back.

    What the saves of `token` are writing is not touched.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _UNDER_WAY.fullmatch(path.name)
        if match is None or f".{token}-" in path.name:
            continue
        if path.is_file():
            path.unlink()
            continue
        name = path.with_name(match[1])
        if match[2] == "old" and not name.exists():
            rename_folder(path, name)
        else:
            remove_folder(path)
