"""The precision policy: which format each GEMM of each layer uses at each step. Pure, no torch.

    policy = PrecisionPolicy()
    policy.set_default("mxfp8")
    policy.set_layer_precision("attention", "bf16")
    policy.set_layer_precision("last 15% mlp", "bf16", gemms="wgrad", steps="1000:")
    print(policy.explain(ir))

A policy names formats; how a machine runs them (natively, by a substitute, emulated) is the engine's business. The
words for layers are described in `deepwell.precision.patterns`, the order of precedence in `deepwell.precision.rules`,
what a format means for each GEMM in `deepwell.precision.gemm_format`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from deepwell.errors import ConfigError
from deepwell.hardware.codec import JsonValue, check_schema
from deepwell.precision.gemm_format import Precision, precision
from deepwell.precision.resolve import BASE, BUILT_IN, Resolution, Resolver
from deepwell.precision.rules import Rule, change_steps, make_rule

if TYPE_CHECKING:
    from deepwell.graph.ir import IR
    from deepwell.precision.explain import Explanation

SCHEMA = 1


class PrecisionPolicy(JsonValue):
    """Rules that give every GEMM its format. Open while it is built, closed by `freeze` (compiling does that).

    Equal policies hold equal rules in the same order; a frozen one can be hashed. Without any rule all is bf16.
    """

    def __init__(self, default: str | Precision | None = None) -> None:
        self._rules: list[Rule] = []
        self._is_frozen = False
        if default is not None:
            self.set_default(default)

    # ---- building ----

    def set_default(
        self,
        format: str | Precision,  # noqa: A002 - the word users know
        *,
        gemms: str | Iterable[str] | None = None,
        steps: Any = None,
        **options: bool | str,
    ) -> None:
        """The format of every linear layer that no other rule decides (see `set_layer_precision`)."""
        self._add(make_rule(None, precision(format, options), gemms, steps))

    def set_layer_precision(
        self,
        pattern: str,
        format: str | Precision,  # noqa: A002 - the word users know
        *,
        gemms: str | Iterable[str] | None = None,
        steps: Any = None,
        **options: bool | str,
    ) -> None:
        """Give the layers that `pattern` names a format, for some `gemms` ("fwd", "dgrad", "wgrad") and `steps`.

        Steps are half-open: (0, 1000), "0:1000", "1000:". Options are the format's own, e.g. `hadamard=False` for
        nvfp4. A rule for the same layers, GEMMs and steps replaces the earlier one. Raises ConfigError.
        """
        if pattern is None:
            raise ConfigError("pattern is None; name layers, or use set_default for all of them")
        self._add(make_rule(pattern, precision(format, options), gemms, steps))

    def _add(self, rule: Rule) -> None:
        if self._is_frozen:
            raise ConfigError(
                f"this policy is compiled in: the rule {str(rule)!r} would change nothing that runs; "
                "take policy.copy(), change that and compile again"
            )
        self._rules = [old for old in self._rules if old.target != rule.target]
        self._rules.append(rule)

    @classmethod
    def recipe(
        cls, name: str, *, forward_bf16_from: int | None = None, ends: str | None = None, **options: bool | str
    ) -> PrecisionPolicy:
        """A policy by name: "bf16", "fp8", "mxfp8" or "nvfp4"; what each does and why stands in `recipes`.

        `forward_bf16_from` and `ends` belong to nvfp4: the step from which the forward runs in bf16, and the format of
        the first 2 and the last 15% of blocks. Other options are the format's own.
        """
        from deepwell.precision.recipes import recipe_rules

        policy = cls()
        for rule in recipe_rules(name, forward_bf16_from=forward_bf16_from, ends=ends, options=options):
            policy._add(rule)
        return policy

    def copy(self) -> PrecisionPolicy:
        """An open policy with the same rules."""
        other = PrecisionPolicy()
        other._rules = list(self._rules)
        return other

    def freeze(self) -> PrecisionPolicy:
        """Close this policy for good and return it; setting anything afterwards is a ConfigError."""
        self._is_frozen = True
        return self

    @property
    def is_frozen(self) -> bool:
        return self._is_frozen

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules in the order they were set."""
        return tuple(self._rules)

    # ---- asking ----

    def resolve(self, ir: IR, step: int = 0) -> Resolution:
        """What every GEMM of every linear layer uses at a step, with the rule that decided.

        Raises ConfigError where a module path matches nothing; a kind the model lacks is a note.
        """
        resolver = Resolver(self._rules, ir)
        return Resolution(step=step, table=resolver.at(step), notes=tuple(resolver.notes))

    def explain(self, ir: IR, step: int | None = None) -> Explanation:
        """The same as a table to read, equal layers folded; without a step, for every span between changes."""
        from deepwell.precision.explain import explain

        return explain(self.rules, ir, step)

    def changes(self, ir: IR | None = None) -> tuple[int, ...]:
        """Steps at which a rule begins or ends; with an IR, only those at which some GEMM's format changes."""
        steps = change_steps(self._rules)
        if ir is None:
            return steps
        resolver = Resolver(self._rules, ir)
        before, found = _formats(resolver, 0), []
        for step in steps:
            now = _formats(resolver, step)
            if now != before:
                found.append(step)
            before = now
        return tuple(found)

    # ---- value ----

    def __eq__(self, other: object) -> bool:
        return self.rules == other.rules if isinstance(other, PrecisionPolicy) else NotImplemented

    def __hash__(self) -> int:
        if not self._is_frozen:
            raise TypeError("an open PrecisionPolicy cannot be hashed; freeze() it first")
        return hash(self.rules)

    def __repr__(self) -> str:
        return f"PrecisionPolicy({'; '.join(map(str, self._rules)) or 'bf16'}{', frozen' if self._is_frozen else ''})"

    def __str__(self) -> str:
        """The rules, those that win first."""
        ranked = sorted(enumerate(self._rules), key=lambda item: (item[1].precedence, item[0]), reverse=True)
        last = f"{BUILT_IN} -> {BASE.precision}"
        lines = [f"  {i}. {line}" for i, line in enumerate((*(str(rule) for _, rule in ranked), last), start=1)]
        return "\n".join([f"precision policy{' (compiled in)' if self._is_frozen else ''}, first match wins:", *lines])

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "rules": [rule.to_dict() for rule in self._rules]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrecisionPolicy:
        """The open policy that `to_dict` described. Raises ConfigError where it is none."""
        check_schema(data, SCHEMA, "precision policy")
        rules = data.get("rules")
        if not isinstance(rules, list):
            raise ConfigError(f"precision policy: rules is {type(rules).__name__}; it is a list of rules")
        policy = cls()
        for rule in rules:
            policy._add(Rule.from_dict(rule))
        return policy


def _formats(resolver: Resolver, step: int) -> dict[tuple[str, str], Precision]:
    table = resolver.at(step)
    return {(path, gemm): one.precision for path, row in table.items() for gemm, one in row.items()}
