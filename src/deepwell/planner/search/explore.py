"""The search: from families of degrees to the best layouts, by bounds first and by simulation last. Pure.

    1. every family that the rules allow gets a bound: its time without recomputation and without waiting
    2. families are opened in the order of their bounds until no bound is near what was found; inside one, batches,
       schedules, sharding and recomputation are tried from the fastest on until one fits
    3. the best are simulated event by event and refined: layers per stage, layers to recompute, what to hide
    4. a family that was opened and never fits is a miss, with the gigabytes of its leanest form

Deterministic: no clocks, no randomness, ties are broken by what the layout says of itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from deepwell.hardware.codec import packaged_json
from deepwell.hardware.progress import bar
from deepwell.planner.cost import OVERLAPPED
from deepwell.planner.estimate import estimate
from deepwell.planner.estimate_values import Estimate
from deepwell.planner.layout import SHARDINGS, Layout, Recompute
from deepwell.planner.overlap import may_switch_off, switched
from deepwell.planner.schedule.actions import V_SHAPED
from deepwell.planner.schedule.simulate import bubble_floor
from deepwell.planner.search.space import (
    Family,
    Pipeline,
    Space,
    families,
    layout_of,
    micro_batches,
    pipelines,
    recomputes,
    shardings,
)

NEAR = 1.04  # what may be this much slower than the best is looked at closely
WIDE = 1.25  # and this much, until there are enough runners-up
RUNNERS_UP = 8
SIMULATED = 40  # layouts that are simulated at most
REOPENED = 3  # layouts of a family that is opened late
REFINED = 3  # of these, how many are refined

WORDS: dict[str, str] = packaged_json("deepwell.planner", "words.json")["parts"]

Progress = Callable[[str, int, int], None]


@contextmanager
def planning_bar(shown: bool | None) -> Iterator[Progress]:
    """What a search reports to: a phase, and how much of it is done."""
    with bar("planning", 1, shown=shown) as advance:
        yield lambda phase, done, total: advance(description=f"planning: {phase}", completed=done, total=max(1, total))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A layout with its estimate. `over_gib` is how much the fullest rank exceeds the limit, below 0 where it fits."""

    family: Family
    layout: Layout
    estimate: Estimate
    over_gib: float

    @property
    def fits(self) -> bool:
        return self.over_gib <= 0

    @property
    def key(self) -> tuple[float, float, str]:
        """Fastest first, then the leaner, then by name."""
        return (self.estimate.step_s, self.estimate.peak_gib, self.layout.to_json())


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyBound:
    """The least time that a family can take, and the layout that it was read from."""

    seconds: float
    scored: Scored


@dataclass(slots=True, kw_only=True)
class Found:
    """What a search found, best first."""

    ranked: list[Scored] = field(default_factory=list)  # simulated, the best of each family
    misses: list[Scored] = field(default_factory=list)  # the leanest of each family that does not fit, nearest first
    refused: list[str] = field(default_factory=list)  # the rules' reasons
    slower: list[FamilyBound] = field(default_factory=list)  # families that were not opened: even their bound is slower
    num_families: int = 0
    num_layouts: int = 0


class Explorer:
    """Prices layouts of one space and remembers what it priced."""

    def __init__(self, space: Space, progress: Progress | None = None, best: float = float("inf")) -> None:
        self.space = space
        self.progress = progress or (lambda phase, done, total: None)
        self.best = best  # seconds of the fastest that fits so far, or that is needed to be of use
        self.bar = float("inf")  # seconds beyond which a layout of the family that is open is not worth pricing
        self._priced: dict[tuple[Layout, bool], Estimate] = {}

    def price(self, family: Family, layout: Layout, *, simulate: bool = False) -> Scored:
        key = (layout, simulate)
        if key not in self._priced:
            space = self.space
            self._priced[key] = estimate(space.workload, space.hw, layout, space.stack, simulate=simulate)
        found = self._priced[key]
        limit = self.space.limit_gib
        over = found.peak_gib - limit if limit is not None else -float("inf")
        return Scored(family=family, layout=layout, estimate=found, over_gib=over)

    # ---- bounds ----

    def run(self) -> Found:
        found = Found()
        todo, found.refused = families(self.space)
        found.num_families = len(todo)
        opened = self._open(self._bounds(todo), found)
        found.ranked = self._simulate(opened)
        self._reopen(found)
        found.misses.sort(key=lambda s: (s.over_gib, s.key))
        found.num_layouts = len(self._priced)
        return found

    def first_fit(self) -> Scored | None:
        """Some layout that fits, in its leanest form, or None; the widest splits are tried first."""
        todo, _ = families(self.space)
        todo.sort(key=lambda f: (-f.tp * f.pp * f.ep, f))
        for family in todo:
            for batch in micro_batches(self.space, family)[:1]:
                for layout in self._lean_layouts(family, batch):
                    scored = self.price(family, layout)
                    if scored.fits:
                        return scored
        return None

    def _bounds(self, todo: list[Family]) -> list[FamilyBound]:
        bounds = []
        for i, family in enumerate(todo):
            self.progress("bounds", i, len(todo))
            # The largest micro-batch has the best GEMMs, and what it waits for is not counted.
            for batch in reversed(micro_batches(self.space, family)):
                scored = self._fastest(family, batch)
                if scored is not None:
                    bounds.append(FamilyBound(seconds=self._bound(family, batch, scored), scored=scored))
                    break
        bounds.sort(key=lambda b: (b.seconds, b.scored.family))
        return bounds

    def _fastest(self, family: Family, batch: int) -> Scored | None:
        """The family without recomputation, with the sharding that says least and the plainest schedule."""
        lines = pipelines(self.space, family, batch)
        if not lines:
            return None
        sharding, recompute = shardings(self.space, family)[0], recomputes(self.space)[0]
        layout = layout_of(self.space, family, batch, lines[0], sharding, recompute)
        return None if layout is None else self.price(family, layout)

    def _bound(self, family: Family, batch: int, scored: Scored) -> float:
        """The least that any schedule of the family may take: DualPipeV hides the experts' exchanges besides."""
        pairs = any(line.schedule == "dualpipev" for line in pipelines(self.space, family, batch))
        return _floor(scored, pairs=pairs)

    # ---- opening a family ----

    def _open(self, bounds: list[FamilyBound], found: Found) -> list[Scored]:
        opened: list[Scored] = []
        for i, bound in enumerate(bounds):
            self.progress("layouts", i, len(bounds))
            near = NEAR if len({s.family for s in opened}) >= RUNNERS_UP else WIDE
            if bound.seconds > self.best * near:
                found.slower.append(bound)
                continue
            # A family that is here for the sake of runners-up is held to its own bound, not to the best.
            self.bar = max(self.best * NEAR, bound.seconds * NEAR)
            mine = list(self._family(bound.scored.family))
            opened += mine
            miss = None if mine else self._leanest(bound.scored.family)
            if miss is not None and miss.fits:
                found.slower.append(bound)  # it fits, only nothing of it is near the bar
            elif miss is not None:
                found.misses.append(miss)
        opened.sort(key=lambda s: s.key)
        return opened

    def _reopen(self, found: Found) -> None:
        """Open what only the closed form of another family kept shut.

        The closed form is too kind to some schedules: where its best became slower when it was simulated, families with
        a bound below that may still win, so they are opened and simulated against it. So are those that were opened
        and had nothing near what the closed form promised of another.
        """
        while found.ranked:
            best = found.ranked[0].estimate.step_s
            near = [bound for bound in found.slower if bound.seconds < best]
            if not near:
                return
            found.slower = [bound for bound in found.slower if bound.seconds >= best]
            opened: list[Scored] = []
            for i, bound in enumerate(near):
                self.progress("second look", i, len(near))
                # The bar stays at what was simulated: closed forms may not lower it.
                self.best = self.bar = best
                mine = list(self._family(bound.scored.family))
                opened += sorted(mine, key=lambda s: s.key)[:REOPENED]
                miss = None if mine else self._leanest(bound.scored.family)
                if miss is not None and not miss.fits:
                    found.misses.append(miss)
            again = [self.price(one.family, one.layout, simulate=True) for one in sorted(opened, key=lambda s: s.key)]
            better = [self._refine(one) for one in again if one.fits and one.estimate.step_s < best * NEAR]
            found.ranked = _one_per_family(sorted((*found.ranked, *better), key=lambda s: s.key))

    def _family(self, family: Family) -> Iterator[Scored]:
        for batch in micro_batches(self.space, family):
            fastest = self._fastest(family, batch)
            if fastest is None or self._bound(family, batch, fastest) > self.bar:
                continue
            lean = (self.price(family, layout) for layout in self._lean_layouts(family, batch))
            if not fastest.fits and not any(scored.fits for scored in lean):
                return  # not even its leanest form fits, and a larger micro-batch holds more
            for line in self._lines(family, batch, fastest):
                for scored in self._fitting(family, batch, line):
                    self.best = min(self.best, scored.estimate.step_s)
                    self.bar = max(min(self.bar, scored.estimate.step_s * NEAR), self.best * NEAR)
                    yield scored

    def _lines(self, family: Family, batch: int, fastest: Scored) -> Iterator[Pipeline]:
        """Schedules in the order of what their bubbles promise, as long as that is near the best."""
        count = self.space.workload.global_batch // (family.dp * batch)
        promised = [
            (
                _floor(fastest, pairs=line.schedule == "dualpipev")
                * (1 + bubble_floor(line.schedule, family.pp, count, line.virtual_stages)),
                i,
                line,
            )
            for i, line in enumerate(pipelines(self.space, family, batch))
        ]
        for seconds, _, line in sorted(promised):
            if seconds <= self.bar:
                yield line

    def _fitting(self, family: Family, batch: int, line: Pipeline) -> Iterator[Scored]:
        """For each sharding the least recomputation that fits, unless that is too slow already."""
        ladder = recomputes(self.space, family.pp * line.virtual_stages)
        for sharding in shardings(self.space, family):
            # Down the ladder memory shrinks and time grows, so the first that fits is found by halving.
            low, high = 0, len(ladder)
            first: Scored | None = None
            while low < high:
                middle = (low + high) // 2
                layout = layout_of(self.space, family, batch, line, sharding, ladder[middle])
                if layout is None:
                    return
                scored = self.price(family, layout)
                if scored.fits:
                    first, high = scored, middle
                elif _floor(scored) > self.bar:
                    break  # what fits recomputes more, and is slower still
                else:
                    low = middle + 1
            if first is not None and _floor(first) <= self.bar:
                yield first
                if first.layout.recompute == ladder[0] and sharding.kind == "zero1":
                    return  # neither recomputation nor more sharding can gain anything

    def _leanest(self, family: Family) -> Scored | None:
        batches = micro_batches(self.space, family)
        scored = [self.price(family, layout) for layout in self._lean_layouts(family, batches[0])]
        return min(scored, key=lambda s: (s.over_gib, s.key), default=None)

    def _lean_layouts(self, family: Family, batch: int) -> Iterator[Layout]:
        """The forms of a family that need least memory: most sharding, most recomputation."""
        lines = pipelines(self.space, family, batch)
        ways = sorted(shardings(self.space, family), key=lambda s: (-SHARDINGS.index(s.kind), s.replicas))
        # What zero3 gathers of a layer with many experts may be more than its shards save: then zero2 is the leaner.
        ways = ways[:1] + [s for s in ways[1:] if s.kind == "zero2"][:1]
        # Split backwards hold the same on every rank, 1f1b most on the first: either may be the leaner.
        for sharding in ways:
            for line in lines[:1] + [p for p in lines[1:] if p.schedule in V_SHAPED][:1]:
                layout = layout_of(self.space, family, batch, line, sharding, recomputes(self.space)[-1])
                if layout is not None:
                    yield layout

    # ---- simulation and refinement ----

    def _simulate(self, opened: list[Scored]) -> list[Scored]:
        """The best of each family, simulated; the very best are refined.

        The closed form that opened them is too kind to split backwards with few microbatches, so layouts are simulated
        in its order until none that is left promises less than the best that was simulated.
        """
        simulated: list[Scored] = []
        chosen = _diverse(opened)
        for i, scored in enumerate(chosen[:SIMULATED]):
            self.progress("simulating", i, min(len(chosen), SIMULATED))
            is_new = all(s.family != scored.family for s in simulated)
            best = min((s.estimate.step_s for s in simulated), default=float("inf"))
            if scored.estimate.step_s > best and not (is_new and len(_one_per_family(simulated)) <= RUNNERS_UP):
                continue
            again = self.price(scored.family, scored.layout, simulate=True)
            if again.fits:
                simulated.append(again)
        simulated.sort(key=lambda s: s.key)
        refined = [self._refine(s) for s in _one_per_family(simulated)[:REFINED]]
        return _one_per_family(sorted((*refined, *simulated), key=lambda s: s.key))

    def _refine(self, scored: Scored) -> Scored:
        scored = self._fewer_recomputed(scored)
        scored = self._uneven_stages(scored)
        return self._without_overlap(scored)

    def _without_overlap(self, scored: Scored) -> Scored:
        """Hide nothing whose hiding costs more than it saves: what runs beside computation takes SMs from it."""
        best = scored
        for name in may_switch_off(scored.layout, self.space.stack, self.space.constraints.overlap):
            tried = self.price(scored.family, switched(best.layout, name, False), simulate=True)
            if tried.fits and tried.estimate.step_s < best.estimate.step_s * (1 - 1e-6):
                best = tried
        return best

    def _fewer_recomputed(self, scored: Scored) -> Scored:
        """Recompute only as many layers of each stage as memory asks for."""
        allowed = self.space.constraints.allowed("recompute")
        if scored.layout.recompute.kind == "none" or (allowed is not None and "block" not in allowed):
            return scored
        most = max(scored.layout.layers_of_stages(self.space.facts.num_layers))
        low, high = 1, most  # the least number of layers that fits lies in between
        best = scored
        while low <= high:
            middle = (low + high) // 2
            layout = replace(scored.layout, recompute=Recompute(kind="block", layers=middle))
            tried = self.price(scored.family, layout, simulate=True)
            if tried.fits:
                high = middle - 1
                best = min(best, tried, key=lambda s: s.key)
            else:
                low = middle + 1
        return best

    def _uneven_stages(self, scored: Scored) -> Scored:
        """Move single layers away from the stages with the embedding and the head while that makes the step shorter."""
        if scored.layout.pp == 1 or self.space.constraints.stage_layers is not None:
            return scored
        best = scored
        for _ in range(4):
            tried = [self.price(best.family, layout, simulate=True) for layout in self._moves(best.layout)]
            better = [s for s in tried if s.fits and s.estimate.step_s < best.estimate.step_s * (1 - 1e-6)]
            if not better:
                return best
            best = min(better, key=lambda s: s.key)
        return best

    def _moves(self, layout: Layout) -> Iterator[Layout]:
        layers = list(layout.layers_of_stages(self.space.facts.num_layers))
        last = len(layers) - 1
        smallest = min(range(1, last), key=lambda i: (layers[i], i)) if last > 1 else 0
        for giver, taker in ((last, smallest), (0, smallest), (last, 0), (0, last)):
            if giver != taker and layers[giver] > 1:
                moved = layers.copy()
                moved[giver] -= 1
                moved[taker] += 1
                yield replace(layout, stage_layers=tuple(moved))


def _floor(scored: Scored, *, pairs: bool = False) -> float:
    """Seconds without what the pipeline waits for; stragglers are a share of everything, so theirs goes with it.

    `pairs`: nor with what forwards hide that run beside backwards, all of the experts' exchanges at most.
    """
    seconds = scored.estimate.seconds
    step = scored.estimate.step_s
    waiting = seconds.get("bubble", 0.0) + seconds.get("pp", 0.0)
    if pairs:
        waiting += (1 - OVERLAPPED) * seconds.get("ep", 0.0)
    return step - waiting * step / max(step - seconds.get("straggler", 0.0), 1e-12)


def _one_per_family(ranked: list[Scored]) -> list[Scored]:
    best: dict[Family, Scored] = {}
    for scored in ranked:
        best.setdefault(scored.family, scored)
    return list(best.values())


def _diverse(opened: list[Scored]) -> list[Scored]:
    """The fastest by the closed form, of each family and schedule the first two."""
    taken: dict[tuple[Family, str], int] = {}
    found: list[Scored] = []
    for scored in opened:
        kind = (scored.family, scored.layout.schedule)
        taken[kind] = taken.get(kind, 0) + 1
        if taken[kind] <= 2:
            found.append(scored)
    return found
