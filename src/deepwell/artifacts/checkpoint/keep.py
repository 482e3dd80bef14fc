"""Which checkpoints stay: the last few, and every n-th step for ever. And what a killed run left is put in order."""

import re
import shutil
from pathlib import Path

from deepwell.artifacts.checkpoint.manifest import list_checkpoints, step_of
from deepwell.errors import ConfigError
from deepwell.files import rename_synced

# The names of what is under way: being written (tmp), being replaced (old), being deleted (gone), given up (failed).
_UNDER_WAY = re.compile(r"\.(step-\d{8,})\.[0-9a-f]{12}-[\d-]+\.(tmp|old|gone|failed)")


def check_keep(keep_last: int, keep_every: int | None) -> None:
    """Raise ConfigError for numbers that would keep nothing."""
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1 on")


def prune(folder: Path, saved: Path, save_id: str, keep_last: int, keep_every: int | None) -> None:
    """Delete the checkpoints that need not stay.

    Only committed and whole checkpoints are counted and deleted: anything else in the folder is not ours to judge. The
    newest and the one that was just saved always stay.
    """
    for path in list_checkpoints(folder)[:-keep_last]:
        step = step_of(path)
        if path == saved or path.name.startswith(".") or (keep_every and step is not None and step % keep_every == 0):
            continue
        # Under another name first: half deleted, it must not look like a checkpoint.
        gone = folder / f".{path.name}.{save_id}.gone"
        rename_synced(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


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
        elif match[2] == "old" and not path.with_name(match[1]).exists():
            rename_synced(path, path.with_name(match[1]))
        else:
            shutil.rmtree(path, ignore_errors=True)
