"""The words a rule uses to name layers: module paths, kinds, positions. Pure, no torch.

    pattern  = path | [position] [kind]
    position = ("first" | "last") N ("blocks" | "layers") | ("first" | "last") P% ["blocks" | "layers"]
             | ("layers" | "blocks" | "layer" | "block") A[-B]
    kind     = role ["." part]                 "attention", "mlp.down", "shared experts", "shared_experts.up"
    path     = a module's full path; * ? [] as in file globs, * also spans dots; a path means everything under it

"last 15% mlp" is a position and a kind: both must hold. A pattern with a blank, or one that is a kind, is read as
words; everything else is a path. `path:` in front makes a path of anything. Counted layers are the model's repeated
blocks, from 0; a percentage is rounded up to whole blocks.
"""

import difflib
import fnmatch
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from deepwell.errors import ConfigError

# A projection may make several of q, k and v; of a low-rank pair the first is `_a`, the second `_b`.
_PROJECTIONS = ("q", "k", "v", "qk", "qv", "kv", "qkv", "o")
_ATTENTION_PARTS = tuple(name + end for end in ("", "_a", "_b") for name in _PROJECTIONS)
_MLP_PARTS = ("gate", "up", "gate_up", "down")

# Role -> its parts. The roles are those of `deepwell.graph.ops.Op`.
KINDS: dict[str, tuple[str, ...]] = {
    "attention": _ATTENTION_PARTS,
    "mlp": _MLP_PARTS,
    "experts": _MLP_PARTS,
    "shared_experts": _MLP_PARTS,
    "mixer": (),
    "router": (),
    "head": (),
    "embedding": (),
    "norm": (),
    "other": (),
}
_PLURALS = {"embeddings": "embedding", "norms": "norm", "routers": "router", "heads": "head", "expert": "experts"}
_ROLE = r"shared[ _]experts?|[a-z]+"
_KIND = re.compile(rf"(?P<role>{_ROLE})(?:\.(?P<part>[a-z_]+))?")
_UNIT = r"(?:blocks?|layers?)"
_POSITION = re.compile(
    rf"(?:(?P<end>first|last)\s+(?:(?P<percent>\d+(?:\.\d+)?)\s*%(?:\s+{_UNIT})?|(?P<count>\d+)\s+{_UNIT})"
    rf"|{_UNIT}\s+(?P<start>\d+)(?:\s*-\s*(?P<stop>\d+))?)(?:\s+|$)"
)
_GRAMMAR = "write e.g. 'first 2 blocks', 'last 15%', 'layers 0-3', 'last 15% mlp', 'attention.q' or a module path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    end: str | None = None  # "first" or "last"
    count: int | None = None
    percent: Fraction | None = None
    start: int | None = None
    stop: int | None = None  # inclusive, as people write it

    def layers(self, num_layers: int) -> tuple[range, str | None]:
        """The layers of a model with `num_layers`, and what had to be cut to fit."""
        if self.end is None:
            assert self.start is not None and self.stop is not None
            inside = range(min(self.start, num_layers), min(self.stop + 1, num_layers))
            cut = self.stop >= num_layers
        else:
            wanted = self.count
            if wanted is None:
                assert self.percent is not None
                wanted = -(-num_layers * self.percent // 100)
            cut = wanted > num_layers
            size = min(int(wanted), num_layers)
            inside = range(size) if self.end == "first" else range(num_layers - size, num_layers)
        if not cut:
            return inside, None
        return inside, f"the model has {num_layers} layers" + (
            ", none of these" if not inside else ", taken as far as it goes"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """A parsed pattern: a path alone, or a position and a kind of which either may be missing."""

    path: str | None = None
    position: Position | None = None
    role: str | None = None
    part: str | None = None

    @property
    def specificity(self) -> int:
        """Rank of the pattern's class; see the order of precedence in `deepwell.precision.policy`."""
        if self.path is not None:
            return 6
        kind = 0 if self.role is None else 1 if self.part is None else 2
        return kind + (3 if self.position is not None else 0)

    def matches_kind(self, role: str, part: str) -> bool:
        return self.role is None or (role == self.role and (self.part is None or part == self.part))

    def matches_path(self, path: str) -> bool:
        assert self.path is not None
        return _path_regex(self.path).fullmatch(path) is not None

    def names(self, path: str, role: str) -> bool:
        """Whether the pattern names this op itself, rather than covering it among others.

        A kind names its ops. A path names an op where it ends in the op's own name, without wildcards there.
        """
        if self.path is None:
            return self.role == role
        last = self.path.rsplit(".", 1)[-1]
        return last == path.rsplit(".", 1)[-1] and fnmatch.fnmatchcase(path, self.path)


@lru_cache(maxsize=1024)
def _path_regex(pattern: str) -> re.Pattern[str]:
    own = fnmatch.translate(pattern)
    return re.compile(f"(?:{own})|(?:{fnmatch.translate(pattern + '.*')})")


def kind_names() -> list[str]:
    return [*KINDS, *(f"{role}.{part}" for role, parts in KINDS.items() for part in parts)]


def parse_pattern(pattern: str) -> Selector:
    """Read a pattern. Raises ConfigError where words make no pattern; whether a path exists is the IR's to say."""
    if not isinstance(pattern, str):
        raise ConfigError(f"pattern must be a text, got {type(pattern).__name__}; {_GRAMMAR}")
    return _parse(pattern)


@lru_cache(maxsize=1024)
def _parse(pattern: str) -> Selector:
    text = pattern.strip()
    if text.startswith("path:"):
        text = text[len("path:") :].strip()
        if not text or re.search(r"\s", text):
            raise ConfigError(f"pattern {pattern!r}: after 'path:' comes one module path without blanks")
        return Selector(path=text)
    if not text:
        raise ConfigError(f"pattern is empty; {_GRAMMAR}; for all layers use set_default")
    words = re.sub(r"\s+", " ", text.lower())
    kind = _parse_kind(words)
    if kind is not None:
        return Selector(role=kind[0], part=kind[1])
    if " " not in words:
        return Selector(path=text)
    return _parse_words(pattern, words)


def _parse_kind(words: str) -> tuple[str, str | None] | None:
    found = _KIND.fullmatch(words)
    if found is None:
        return None
    role = found["role"].replace(" ", "_")
    role = "shared_experts" if role == "shared_expert" else _PLURALS.get(role, role)
    part = found["part"]
    if role not in KINDS or (part is not None and part not in KINDS[role]):
        return None
    return role, part


def _parse_words(pattern: str, words: str) -> Selector:
    found = _POSITION.match(words)
    if found is None:
        near = difflib.get_close_matches(words, ["shared experts", *KINDS], n=2)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ConfigError(f"pattern {pattern!r} is neither a module path nor a position and kind; {hint}{_GRAMMAR}")
    position = _position(pattern, found)
    rest = words[found.end() :].strip()
    if not rest:
        return Selector(position=position)
    kind = _parse_kind(rest)
    if kind is None:
        near = difflib.get_close_matches(rest, kind_names(), n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"kinds: {', '.join(KINDS)}"
        raise ConfigError(f"pattern {pattern!r}: after the position, {rest!r} is no kind; {hint}")
    return Selector(position=position, role=kind[0], part=kind[1])


def _position(pattern: str, found: re.Match[str]) -> Position:
    if found["start"] is not None:
        start = int(found["start"])
        stop = int(found["stop"]) if found["stop"] is not None else start
        if stop < start:
            raise ConfigError(f"pattern {pattern!r}: layers {start}-{stop} runs backwards; write layers {stop}-{start}")
        return Position(start=start, stop=stop)
    if found["percent"] is not None:
        percent = Fraction(found["percent"])
        if percent > 100:
            raise ConfigError(f"pattern {pattern!r}: {found['percent']}% is more than all layers")
        return Position(end=found["end"], percent=percent)
    return Position(end=found["end"], count=int(found["count"]))
