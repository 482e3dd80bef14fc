"""Which linears the graphs of a call multiplied: the report names calls that run others, or none.

Dynamo may leave a function to Python that it compiled before: a hook that breaks the graph, a mode of torch's that is
on, a forward that was replaced. Nothing fails then, and the model runs as it was written.
"""

from __future__ import annotations

import threading

# As many kinds of calls as are remembered.
_MOST_KINDS = 256


class Calls:
    """What the calls of an engine ran in the formats that it is compiled for.

    `count` calls; of them `bare` ran no graph; `missed` has, by path, how many met no product of a linear that others
    met.
    """

    def __init__(self) -> None:
        self.count = self.bare = 0
        self.missed: dict[str, int] = {}
        self._threads = threading.local()
        self._kinds: dict[frozenset[int], frozenset[str]] = {}  # by the sets of paths that graphs ran
        self._sets: dict[int, frozenset[str]] = {}

    def begin(self) -> None:
        self._threads.ran = set()

    def ran(self, paths: frozenset[str]) -> None:
        """A graph runs for these paths; in a thread of the backward, which computes layers again, nobody asks."""
        self._sets.setdefault(id(paths), paths)
        ran = getattr(self._threads, "ran", None)
        if ran is not None:
            ran.add(id(paths))

    def end(self, known: set[str]) -> tuple[bool, frozenset[str]]:
        """Whether this thread's call ran a graph, and which of the known paths its graphs did not have."""
        ran, self._threads.ran = self._threads.ran, None
        if ran is None:  # a hook called the engine within this call, and that call ended the record
            return True, frozenset()
        key = frozenset(ran)
        met = self._kinds.get(key)
        if met is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            met = self._kinds[key] = frozenset().union(*(self._sets[i] for i in key))
        missed = frozenset(known - met)
        self.count += 1
        self.bare += not key
        if key:
            for path in missed:
                self.missed[path] = self.missed.get(path, 0) + 1
        return bool(key), missed
