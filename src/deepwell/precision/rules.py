"""One rule of a precision policy, and the order in which rules win. Pure, no torch.

Order of precedence, the one place where it is stated (`Rule.precedence` is this list as a sort key). Of the rules that
hold for a GEMM at a step, the one wins whose pattern belongs to the most specific class:

    1. a module path                            "model.layers.0", "*.mlp.down_proj"
    2. a position with a kind and part          "last 15% mlp.down"
    3. a position with a kind                   "last 15% mlp"
    4. a position                               "first 2 blocks"
    5. a kind with its part                     "mlp.down"
    6. a kind                                   "mlp"
    7. the default                              set_default

Within a class, a rule for some GEMMs or for some steps wins over one for all; one that is both wins over one that is
either. What is still equal is decided by order: the later rule wins.

One thing stands outside: head, router and embedding (and norms, which have no GEMM) take a format below 16 bits only
from a rule that names them: by kind ("head", "last 15% router"), or by a path that ends in their own name ("lm_head",
"*.mlp.gate"). A rule that merely covers them passes them by. So do rules pass by low-rank linears, such as LoRA's
adapters: those are named by such a path, or by a kind with its part ("attention.q_a").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepwell.errors import ConfigError
from deepwell.graph.ops import Linear, Op
from deepwell.precision.gemm_format import GEMMS, Precision, precision
from deepwell.precision.patterns import Selector, parse_pattern

PROTECTED_ROLES = ("head", "router", "embedding", "norm")
# A product this narrow waits for memory in 16 bits already: with 128 columns it does 128 flops for each byte that it
# reads of its wide side, and FP8 tensor cores would only add the quantization. Widths of small models are all narrow;
# the ratio tells them from a bottleneck.
_LOW_RANK, _RATIO = 128, 8
# With few heads as narrow as that, but multiplied with q, whose quantized input they share.
_MERGED_PARTS = ("k", "v", "kv")

Steps = tuple[int, int | None]
ALWAYS: Steps = (0, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`pattern` None is the default. `steps` is half-open, its end None where it stays for good."""

    pattern: str | None
    precision: Precision
    gemms: tuple[str, ...] = GEMMS
    steps: Steps = ALWAYS
    origin: str = field(default="", compare=False)  # where it came from, e.g. "recipe nvfp4"

    @property
    def selector(self) -> Selector:
        return Selector() if self.pattern is None else parse_pattern(self.pattern)

    @property
    def precedence(self) -> tuple[int, int]:
        """Sort key: a larger one wins, equal ones are decided by order."""
        return self.selector.specificity, (self.gemms != GEMMS) + (self.steps != ALWAYS)

    @property
    def target(self) -> tuple[Selector, tuple[str, ...], Steps]:
        """What the rule speaks of; a later rule with the same target replaces it."""
        return self.selector, self.gemms, self.steps

    def holds_at(self, step: int) -> bool:
        start, stop = self.steps
        return start <= step and (stop is None or step < stop)

    @property
    def label(self) -> str:
        """The rule without its format, as tables cite it: "'mlp' wgrad steps 0:1000"."""
        words = ["default" if self.pattern is None else repr(self.pattern)]
        if self.gemms != GEMMS:
            words.append("+".join(self.gemms))
        if self.steps != ALWAYS:
            words.append(f"steps {steps_text(self.steps)}")
        if self.origin:
            words.append(f"({self.origin})")
        return " ".join(words)

    def __str__(self) -> str:
        return f"{self.label} -> {self.precision}"

    def to_dict(self) -> dict[str, Any]:
        options, gemms = dict(self.precision.options), self.gemms != GEMMS and list(self.gemms)
        steps = self.steps != ALWAYS and list(self.steps)
        further = {"options": options, "gemms": gemms, "steps": steps, "origin": self.origin}
        said = {name: value for name, value in further.items() if value}
        return {"pattern": self.pattern, "format": self.precision.format, **said}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rule:
        if not isinstance(data, Mapping):
            raise ConfigError(f"a rule is a JSON object, got {type(data).__name__}")
        unknown = set(data) - {"pattern", "format", "options", "gemms", "steps", "origin"}
        if unknown or not {"pattern", "format"} <= set(data):
            raise ConfigError(f"rule {dict(data)!r} needs pattern and format; unknown: {sorted(unknown) or 'nothing'}")
        options, origin = data.get("options", {}), data.get("origin", "")
        if not isinstance(options, Mapping) or not isinstance(origin, str):
            raise ConfigError(f"rule {dict(data)!r}: options is an object and origin a text")
        return make_rule(
            data["pattern"], precision(data["format"], options), data.get("gemms"), data.get("steps"), origin
        )


def make_rule(pattern: str | None, asked: Precision, gemms: Any = None, steps: Any = None, origin: str = "") -> Rule:
    if pattern is not None:
        parse_pattern(pattern)
        pattern = pattern.strip()
    return Rule(pattern=pattern, precision=asked, gemms=read_gemms(gemms), steps=read_steps(steps), origin=origin)


def read_gemms(gemms: str | Iterable[str] | None) -> tuple[str, ...]:
    """Which of the three GEMMs, in their order; None means all."""
    if gemms is None:
        return GEMMS
    if not isinstance(gemms, (str, Iterable)):
        raise ConfigError(f"gemms is {gemms!r}; it takes names among {', '.join(GEMMS)}")
    names = (gemms,) if isinstance(gemms, str) else tuple(gemms)
    wrong = [name for name in names if name not in GEMMS]
    if wrong or not names:
        got = repr(wrong[0]) if wrong else "empty"
        raise ConfigError(f"gemms is {got}; it takes one or more of {', '.join(GEMMS)}")
    return tuple(name for name in GEMMS if name in names)


def read_steps(steps: Any) -> Steps:
    """A half-open range of steps from (start, stop), "start:stop", "start:" or ":stop"; None means all."""
    if steps is None:
        return ALWAYS
    if isinstance(steps, str):
        start_text, colon, stop_text = (piece.strip() for piece in steps.partition(":"))
        if not colon or not all(piece.isdecimal() or not piece for piece in (start_text, stop_text)):
            raise ConfigError(f"steps is {steps!r}; write 'start:stop', 'start:' or ':stop' with whole numbers from 0")
        pair: tuple[Any, ...] = (int(start_text or 0), int(stop_text) if stop_text else None)
    elif isinstance(steps, (tuple, list)):
        pair = tuple(steps)
    else:
        raise ConfigError(f"steps is a {type(steps).__name__}; pass (start, stop) or 'start:stop'")
    if len(pair) != 2:
        raise ConfigError(f"steps is {steps!r}; it has two ends: (start, stop), stop None for no end")
    start, stop = pair
    for end in (start, stop):
        is_whole = isinstance(end, int) and not isinstance(end, bool)
        if (end is None and end is start) or (end is not None and (not is_whole or end < 0)):
            raise ConfigError(f"steps is {steps!r}; its ends are whole numbers from 0, the second may be None")
    if stop is not None and stop <= start:
        raise ConfigError(f"steps is {steps!r}: it ends before it starts (the end is not included)")
    return start, stop


def steps_text(steps: Steps) -> str:
    start, stop = steps
    return f"{start}:{'' if stop is None else stop}"


def change_steps(rules: Iterable[Rule]) -> tuple[int, ...]:
    return tuple(sorted({end for rule in rules for end in rule.steps if end}))


def protection(op: Op) -> str:
    """What keeps an op from formats below 16 bits of rules that do not name it: its role, or its shape; or ""."""
    if op.role in PROTECTED_ROLES:
        return op.role
    if not isinstance(op, Linear) or (op.role == "attention" and op.part in _MERGED_PARTS):
        return ""
    rank = min(op.k, op.n)
    return f"low-rank (K={op.k}, N={op.n})" if rank <= _LOW_RANK and rank * _RATIO <= max(op.k, op.n) else ""


def is_named(selector: Selector, path: str, op: Op) -> bool:
    """Whether a pattern names a protected op itself; a kind names low-rank linears only together with a part."""
    is_broad = selector.path is None and selector.part is None and op.role not in PROTECTED_ROLES
    return not is_broad and selector.names(path, op.role)
