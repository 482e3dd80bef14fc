"""Rules against a model: which rule decides each GEMM of each layer at a step, and what there is to say about it. Pure.

Only linear layers (grouped ones included) have formats to decide. Softmax attention, norms, embeddings and pointwise
ops keep the model's dtype whatever a policy says; a rule that names one of them gets a note, not silence.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deepwell.errors import ConfigError
from deepwell.graph.ir import IR, Site
from deepwell.graph.ops import GEMM_KINDS, GroupedLinear, Linear
from deepwell.precision.gemm_format import GEMMS, GemmFormat, Precision, precision
from deepwell.precision.patterns import kind_names
from deepwell.precision.rules import Rule, is_named, protection

# What holds where no rule does, and how tables cite it.
BASE = Rule(pattern=None, precision=precision("bf16"))
BUILT_IN = "built in"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The format of one GEMM, the rule that decided, and what the shape makes of it."""

    gemm: str
    precision: Precision
    rule: str
    reason: str = ""

    @property
    def format(self) -> str:
        return self.precision.format

    @property
    def gemm_format(self) -> GemmFormat:
        """Storage, rounding and Hadamard of both operands."""
        return self.precision.gemm(self.gemm)

    def __str__(self) -> str:
        return f"{self.precision} by {self.rule}" + (f"; {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution(Mapping[str, Mapping[str, Decision]]):
    """{path of a linear layer: {"fwd", "dgrad", "wgrad": Decision}} at one step, with notes on the rules."""

    step: int
    table: Mapping[str, Mapping[str, Decision]] = field(repr=False)
    notes: tuple[str, ...] = ()

    def __getitem__(self, path: str) -> Mapping[str, Decision]:
        return self.table[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


class Resolver:
    """Rules matched against one IR, once; `at` answers for any step. Raises ConfigError where a path names nothing."""

    def __init__(self, rules: Sequence[Rule], ir: IR) -> None:
        self.ir = ir
        self.sites = [site for site in ir.sites() if site.op.kind in GEMM_KINDS]
        self.notes: list[str] = []
        self.deciding: set[int] = set()
        # Winners first: the sort is stable, so reversing puts the later of equal rules in front.
        order = sorted(enumerate(rules), key=lambda item: (item[1].precedence, item[0]), reverse=True)
        self._ranked = [(index, rule, self._matched(rule)) for index, rule in order]
        self._ranked.append((-1, BASE, {site.path for site in self.sites}))
        self._decisions: dict[tuple[int, str, str | int], Decision] = {}

    def at(self, step: int) -> dict[str, dict[str, Decision]]:
        """The decisions of every linear layer at a step."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"step is {step!r}; it is a whole number from 0")
        holding = [item for item in self._ranked if item[1].holds_at(step)]
        found: dict[str, dict[str, Decision]] = {}
        for site in self.sites:
            for gemm in GEMMS:
                # The built-in rule holds for every linear layer at every step.
                index, rule = next((i, rule) for i, rule, paths in holding if gemm in rule.gemms and site.path in paths)
                self.deciding.add(index)
                found.setdefault(site.path, {})[gemm] = self._decision(index, rule, site, gemm)
        return found

    def _decision(self, index: int, rule: Rule, site: Site, gemm: str) -> Decision:
        op = site.op
        assert isinstance(op, (Linear, GroupedLinear))
        length = {"fwd": op.k, "dgrad": op.n}.get(gemm, 0)  # wgrad contracts over tokens, which are not known here
        alignment = rule.precision.gemm(gemm).k_alignment
        excess = length % alignment if rule.precision.is_low else 0
        protected = protection(op) if index < 0 else ""
        key = (index, gemm, protected or (length if excess else 0))
        if key not in self._decisions:
            reason = f"contraction of {length} padded to {length - excess + alignment}" if excess else ""
            if protected:
                why = "" if protected == op.role else f"{protected}: "
                reason = f"{why}high precision unless a rule names it"
            cited = rule.label if index >= 0 else BUILT_IN
            self._decisions[key] = Decision(gemm=gemm, precision=rule.precision, rule=cited, reason=reason)
        return self._decisions[key]

    # ---- matching ----

    def _matched(self, rule: Rule) -> set[str]:
        """Paths of the linear layers that a rule may decide."""
        selector = rule.selector
        if selector.path is not None:
            covered = self._covered_by_path(rule)
        else:
            layers: range | None = None
            if selector.position is not None:
                layers, cut = selector.position.layers(self.ir.num_layers)
                if cut:
                    self._note(rule, cut)
                elif not layers:
                    self._note(rule, "selects no layer")
            covered = [
                site
                for site in self.sites
                if selector.matches_kind(site.op.role, site.op.part) and (layers is None or site.layer in layers)
            ]
            if not covered and (layers is None or layers):
                self._note(rule, self._why_nothing(rule))
        if not rule.precision.is_low:
            return {site.path for site in covered}
        kept = [site for site in covered if protection(site.op) and not is_named(selector, site.path, site.op)]
        if kept and selector.path is not None:
            passed = ", ".join(dict.fromkeys(_general(site.path) for site in kept))
            why = protection(kept[0].op)
            self._note(rule, f"passes by {passed}: {why} keeps high precision unless a rule names it")
        passed_by = {site.path for site in kept}
        return {site.path for site in covered if site.path not in passed_by}

    def _covered_by_path(self, rule: Rule) -> list[Site]:
        selector = rule.selector
        covered = [site for site in self.sites if selector.matches_path(site.path)]
        if covered:
            return covered
        others = [site for site in self.ir.sites() if selector.matches_path(site.path)]
        if not others:
            raise ConfigError(_no_such_path(rule, self.ir))
        reasons = {"attention": "softmax attention is no linear layer", "conv": "a convolution is no linear layer"}
        kinds = dict.fromkeys(reasons.get(site.op.kind, f"{site.op.kind} has no GEMM") for site in others)
        self._note(rule, f"{', '.join(kinds)}; it stays {self.ir.dtype}")
        return covered

    def _why_nothing(self, rule: Rule) -> str:
        """Why a kind, at its position, has no linear layer in this model."""
        selector = rule.selector
        role = (selector.role or "linear layer").replace("_", " ")
        same_role = [site for site in self.ir.sites() if site.op.role == selector.role]
        if not same_role:
            present = dict.fromkeys(site.op.role.replace("_", " ") for site in self.sites)
            return f"the model has no {role}; nothing to do (it has {', '.join(present)})"
        parts = dict.fromkeys(site.op.part for site in same_role if site.op.kind in GEMM_KINDS and site.op.part)
        if selector.part is not None and parts and selector.part not in parts:
            return f"the model's {role} has no part {selector.part}; nothing to do (it has {', '.join(parts)})"
        if not any(site.op.kind in GEMM_KINDS for site in same_role):
            return f"{role} has no GEMM; it stays {self.ir.dtype}"
        return f"no {role} at this position; nothing to do"

    def _note(self, rule: Rule, text: str) -> None:
        self.notes.append(f"{rule.label}: {text}")


def _general(path: str) -> str:
    """The path with its layer numbers as stars, so that near misses and notes do not repeat every layer."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _no_such_path(rule: Rule, ir: IR) -> str:
    assert rule.selector.path is not None
    wanted = rule.selector.path
    general = _general(wanted)
    known: dict[str, None] = {}
    for site in ir.sites():
        pieces = _general(site.path).split(".")
        known.update(dict.fromkeys(".".join(pieces[:n]) for n in range(1, len(pieces) + 1)))
    message = f"pattern {rule.pattern!r} matches no module of {ir.name}"
    if general in known:
        return f"{message}: its layers are numbered 0 to {ir.num_layers - 1}"
    # A pattern that starts with a star is compared with the same number of last pieces.
    dots, tails = wanted.count("."), known
    if wanted.startswith("*") and dots:
        tails = dict.fromkeys("*." + ".".join(path.split(".")[-dots:]) for path in known)
    near = difflib.get_close_matches(general, list(tails), n=4, cutoff=0.6)
    near = near or difflib.get_close_matches(general, [*known, *kind_names()], n=4, cutoff=0.5)
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", wanted)
    if len(numbers) == 1:
        near = [path.replace(".*", f".{numbers[0]}", 1) for path in near]
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return f"{message}{hint}. Print the IR for all paths; kinds such as 'attention' or 'mlp' need no path"
