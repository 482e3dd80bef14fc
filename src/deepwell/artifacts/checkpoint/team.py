"""Which rank writes what, agreed once; after that ranks meet only in the checkpoint's temporary folder.

Every rank writes its own files and then one small report of them. Rank 0 commits when all reports are there. A rank
that fails says so in its report; one that dies is missed after a time. No collective runs during a save, so nothing
races with those of training, and a rank that is killed at any moment leaves nobody waiting for ever. The folder must
be one that all ranks see.
"""

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from deepwell.errors import CheckpointError

# How often a rank looks for what it waits for; and how long it looks on when this process is about to end.
_FIRST_LOOK_S, _LONGEST_LOOK_S, _AT_EXIT_S, _HURRY_S = 0.005, 0.25, 5.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """A rank among those that save together. `token` names their saves; `mine` holds the units that it writes."""

    rank: int
    world: int
    token: str
    mine: frozenset[str]
    known: frozenset[str]
    in_a_hurry: threading.Event = field(default_factory=threading.Event)  # other ranks may be gone: wait a little only

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def writes(self, unit: str) -> bool:
        """Whether this rank writes a unit. Raises CheckpointError for one that was not there when ranks agreed."""
        if unit not in self.known:
            raise CheckpointError(f"{unit.partition('@')[0]} came after the first save; make a new Saver for it")
        return unit in self.mine


def agree(units: Mapping[str, int], group: Any = None) -> Team:
    """Agree with all ranks on who writes what: a collective. `units` are those this rank holds, with their bytes.

    What several ranks hold is written by the one that has least to write so far.
    """
    token = secrets.token_hex(6)
    known = frozenset(units)
    if not is_distributed(group):
        return Team(rank=0, world=1, token=token, mine=known, known=known)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    names = {_short(unit): unit for unit in units}
    said: list[Any] = [None] * world
    dist.all_gather_object(said, (token, {short: units[unit] for short, unit in names.items()}), group=group)
    holders: dict[int, list[int]] = {}
    for holder, (_, held) in enumerate(said):
        for short in held:
            holders.setdefault(short, []).append(holder)
    load = [0] * world
    mine = set()
    # Large ones first, and among equals those that only one rank holds: what is left to choose evens out.
    for short in sorted(holders, key=lambda s: (-said[holders[s][0]][1][s], len(holders[s]), s)):
        owner = min(holders[short], key=lambda r: (load[r], r))
        load[owner] += said[owner][1][short]
        if owner == rank:
            mine.add(names[short])
    return Team(rank=rank, world=world, token=said[0][0], mine=frozenset(mine), known=known)


def is_distributed(group: Any = None) -> bool:
    """Whether there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def wait_for(found: Callable[[], bool], timeout_s: float, in_a_hurry: threading.Event | None = None) -> bool:
    """Look until something is found; False after `timeout_s`, or a few seconds after the program's end began.

    So it is too where somebody is `in_a_hurry`.
    """
    deadline, pause = time.monotonic() + timeout_s, _FIRST_LOOK_S
    is_ending = False
    while not found():
        hurry = in_a_hurry is not None and in_a_hurry.is_set()
        if not is_ending and (hurry or not threading.main_thread().is_alive()):
            is_ending, deadline = True, min(deadline, time.monotonic() + (_HURRY_S if hurry else _AT_EXIT_S))
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_LOOK_S)
    return True


def _short(unit: str) -> int:
    """64 bits of a unit's name: thousands of ranks tell each other what they hold."""
    return int.from_bytes(hashlib.sha256(unit.encode()).digest()[:8], "little")
