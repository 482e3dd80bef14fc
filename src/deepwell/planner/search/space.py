"""The search space: every family of degrees that the rules allow, and what can be varied inside one. Pure.

A family fixes tp, pp, cp, ep, etp (and so dp) on a number of GPUs. Inside it vary micro-batch, schedule with virtual
stages, sharding and recomputation. Constraints narrow any of them; a degree that the user names is taken although a
rule of thumb (not a law) speaks against it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from deepwell.errors import ConfigError
from deepwell.hardware.model import Hardware
from deepwell.planner.estimate_values import GIB
from deepwell.planner.executable import (
    CONTEXT_KINDS,
    check_constraints,
    facts_of,
    is_executed_here,
    why_not_away,
    why_not_context,
    why_not_count,
    why_not_etp,
    why_not_executable,
    why_not_graphs,
    why_not_in_host_memory,
    why_not_schedule,
    why_not_sequence,
    why_not_split,
)
from deepwell.planner.layout import Layout, Overlap, Recompute
from deepwell.planner.schedule.actions import SPLIT_BACKWARD, why_not
from deepwell.planner.schedule.split import balanced_layers
from deepwell.planner.search.constraints import COUNTS, OFFLOADS, Constraints
from deepwell.planner.stack import Stack
from deepwell.planner.validity import (
    REPLICATES_KV,
    ModelFacts,
    why_not_cp,
    why_not_ep,
    why_not_layout,
    why_not_tp,
)
from deepwell.planner.workload import Workload

MAX_MICRO_BATCH = 16
MAX_STAGES_PER_RANK = 12
RESERVE = 0.03  # of a GPU's memory, left free: a plan that is right to the last megabyte is wrong half the time


Refuse = Callable[[str], object]  # keeps the reason of a rule that spoke against some degree


class Family(NamedTuple):
    """Degrees that hang together; everything else varies inside."""

    gpus: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    def describe(self) -> str:
        words = [f"TP{self.tp}", f"PP{self.pp}", f"CP{self.cp}", f"EP{self.ep}", f"ETP{self.etp}"]
        shown = [w for w in words if not w.endswith("P1")]
        return " ".join([*(shown or ["pure"]), f"DP{self.dp}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may be searched: the problem, the rules' facts and the constraints."""

    workload: Workload
    hw: Hardware
    stack: Stack
    facts: ModelFacts
    constraints: Constraints

    @property
    def is_executed_here(self) -> bool:
        """Whether Deepwell's own trainer runs the plan: then only what it executes is searched."""
        return is_executed_here(self.stack)

    @property
    def schedules(self) -> tuple[str, ...]:
        """The pipeline schedules that may be used, plain 1F1B first."""
        named: tuple[str, ...] = self.constraints.allowed("schedule") or ("1f1b", "interleaved", *SPLIT_BACKWARD)
        return tuple(name for name in named if not (self.is_executed_here and why_not_schedule(name)))

    @property
    def limit_gib(self) -> float | None:
        """What a rank may fill: max_memory if given, else all but a small reserve; None where nobody knows."""
        asked, whole = self.constraints.max_memory, self.hw.memory_bytes
        if whole is None:
            return asked
        return (1 - RESERVE) * whole / GIB if asked is None else min(asked, whole / GIB)


# What an engine runs, where that is less than the planner knows: see `planner/export`.
_ENGINES: dict[str, dict[str, tuple[Any, ...]]] = {
    "megatron": {"schedule": ("1f1b", "interleaved"), "sharding": ("ddp", "zero1")},
    "torchtitan": {
        "schedule": ("1f1b", "interleaved", "zbv", "dualpipev"),
        "sharding": ("zero2", "zero3"),
        "recompute": ("none", "selective", "full"),
        "etp": (1,),
    },
}
_ENGINES |= {"nemo": _ENGINES["megatron"], "megatron-bridge": _ENGINES["megatron"]}


def make_space(workload: Workload, hw: Hardware, stack: Stack, constraints: Constraints) -> Space:
    """The space of a problem: what the engine cannot run is left out; Deepwell's trainer also refuses it by name."""
    check_constraints(constraints, stack)
    counts, names = dict(constraints.counts), dict(constraints.names)
    for name, values in _ENGINES.get(stack.name, {}).items():
        (counts if name in COUNTS else names).setdefault(name, values)
    given = constraints.stage_layers
    if isinstance(given, tuple) and sum(given) != workload.ir.num_layers:
        layers = workload.ir.num_layers
        raise ConfigError(f"stage_layers adds up to {sum(given)}; {workload.ir.name} has {layers} layers")
    narrowed = replace(constraints, counts=tuple(sorted(counts.items())), names=tuple(sorted(names.items())))
    return Space(workload=workload, hw=hw, stack=stack, facts=facts_of(workload), constraints=narrowed)


# ---- families ----


def divisors(n: int) -> list[int]:
    low = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def families(space: Space) -> tuple[list[Family], list[str]]:
    """The families that the rules allow, and the reasons of the refusals, each once."""
    found: list[Family] = []
    refused: dict[str, None] = {}
    refuse: Refuse = refused.setdefault
    gpus, layers = space.hw.num_gpus, space.facts.num_layers
    for tp in _tps(space, gpus, refuse):
        left = gpus // tp
        for pp in _choices(space, "pp", divisors(left), left, refuse):
            if pp > max(1, layers):
                refuse(f"PP {pp}: {layers} layers")
                continue
            for cp in _cps(space, left // pp, tp, refuse):
                dp = gpus // (tp * pp * cp)
                if _dp_works(space, dp, refuse):
                    experts = _experts(space, tp, dp * cp * tp, refuse)
                    found += [Family(gpus, tp, pp, cp, ep, etp) for ep, etp in experts]
    return _executable(space, found, refuse) if space.is_executed_here else found, list(refused)


def _executable(space: Space, found: list[Family], refuse: Refuse) -> list[Family]:
    """What is left of families under constraints that the trainer does not execute with so many GPUs."""
    given, gpus = space.constraints, space.hw.num_gpus
    if any(family.pp > 1 for family in found):
        for schedule in given.allowed("schedule") or SPLIT_BACKWARD:
            if why_not_schedule(schedule):
                refuse(why_not_schedule(schedule))
    # On one GPU nothing is sharded, whatever its sharding is called.
    alone = why_not_in_host_memory(Layout(dp=1, offload=OFFLOADS[given.offload or "none"])) if gpus == 1 else ""
    reason = why_not_graphs(given.cuda_graphs, gpus) or alone
    if reason:
        refuse(reason)
    return [] if reason else found


def _choices(space: Space, name: str, usual: Iterable[int], total: int, refuse: Refuse) -> Iterator[int]:
    """The values of a degree to try: the user's, or the usual ones; only those that divide what is left."""
    given = space.constraints.allowed(name)
    for value in given if given is not None else usual:
        if total % value:
            if given is not None:
                refuse(f"{name.upper()} {value}: {total} GPUs do not divide")
            continue
        yield value


def _tps(space: Space, gpus: int, refuse: Refuse) -> Iterator[int]:
    named = space.constraints.allowed("tp") is not None
    # Beyond 16 every published run pays more for the collectives than it gains; name a degree to try it.
    usual = [d for d in divisors(gpus) if d <= 16]
    for tp in _choices(space, "tp", usual, gpus, refuse):
        reason = why_not_tp(space.facts, tp, space.hw, replicates_kv=space.stack.name in REPLICATES_KV)
        reason = "" if named and "NVLink" in reason else reason
        if not reason and space.is_executed_here:
            is_split = space.constraints.sequence_parallel is not False
            reason = why_not_split(space.workload, space.facts, tp)
            reason = reason or why_not_sequence(space.workload, tp, is_split=is_split)
        if reason:
            refuse(reason)
        else:
            yield tp


def _cps(space: Space, left: int, tp: int, refuse: Refuse) -> Iterator[int]:
    seq_len = space.workload.seq_len
    # Below 2,048 tokens of a sequence per rank no published run splits further; name a degree to try it.
    usual = [d for d in divisors(left) if d == 1 or seq_len // d >= 2048]
    for cp in _choices(space, "cp", usual, left, refuse):
        kind = context_kind(space, cp, tp)
        if space.is_executed_here:
            reason = why_not_context(space.workload, space.facts, cp, kind, tp)
        else:
            reason = why_not_cp(space.facts, cp, seq_len, kind)
        if reason:
            refuse(reason)
        else:
            yield cp


def context_kind(space: Space, cp: int, tp: int = 1) -> str:
    """How a sequence is spread: as asked for, else by Ulysses where heads allow it, or a ring for other engines.

    Heads are those that `tp` leaves a rank.
    """
    asked = space.constraints.context_parallel_kind
    if asked is not None or cp == 1 or not space.is_executed_here:
        return asked or "ring"
    # Gathered keys need a mask that is a tensor, which no kernel skips by.
    kinds = [kind for kind in CONTEXT_KINDS if not why_not_context(space.workload, space.facts, cp, kind, tp)]
    return (kinds or CONTEXT_KINDS)[0]


def _dp_works(space: Space, dp: int, refuse: Refuse) -> bool:
    allowed = space.constraints.allowed("dp")
    if allowed is not None and dp not in allowed:
        return False
    copies = space.constraints.allowed("dp_replicate")
    if copies is not None and all(dp % r for r in copies):
        refuse(f"HSDP {', '.join(map(str, copies))}: DP {dp} does not divide")
        return False
    batch = space.workload.global_batch
    if batch % dp:
        refuse(f"DP {dp}: a global batch of {batch:,} does not divide")
        return False
    sizes = space.constraints.allowed("micro_batch")
    if sizes is not None and all((batch // dp) % size for size in sizes):
        refuse(f"MBS {', '.join(map(str, sizes))}: the {batch // dp:,} sequences of each of DP {dp} do not divide")
        return False
    return True


def _experts(space: Space, tp: int, stage_gpus: int, refuse: Refuse) -> Iterator[tuple[int, int]]:
    facts = space.facts
    most = max(facts.experts, default=1)
    eps = space.constraints.allowed("ep") or [d for d in divisors(stage_gpus) if d <= most and most % d == 0]
    # Inside an expert the split follows the dense layers' (etp = tp) or there is none; both are what engines offer.
    etps = space.constraints.allowed("etp") or ([1, tp] if facts.is_moe and tp > 1 else [1])
    if space.is_executed_here:
        for etp in etps:
            if why_not_etp(etp):
                refuse(why_not_etp(etp))
        etps = [etp for etp in etps if not why_not_etp(etp)]
    is_named = any(space.constraints.allowed(name) for name in ("ep", "etp"))
    for ep in eps:
        for etp in etps:
            reason = why_not_ep(facts, ep, etp)
            if reason:
                refuse(reason)
            elif not stage_gpus % (ep * etp):
                yield ep, etp
            elif is_named:  # that a product of degrees does not divide is arithmetic, and news only to who asked for it
                refuse(f"EP {ep} x ETP {etp}: {stage_gpus} GPUs per stage")


# ---- inside a family ----


def micro_batches(space: Space, family: Family) -> list[int]:
    """Micro-batch sizes that divide what each data-parallel rank gets in a step."""
    each = space.workload.global_batch // family.dp
    allowed = space.constraints.allowed("micro_batch")
    usual = [1 << i for i in range(MAX_MICRO_BATCH.bit_length()) if 1 << i <= MAX_MICRO_BATCH]
    return [m for m in (allowed or usual) if m <= each and each % m == 0]


class Pipeline(NamedTuple):
    schedule: str
    virtual_stages: int


def _interleavings(space: Space, pp: int, most: int) -> list[int]:
    """Stages per rank worth trying: two, and the middle and the largest of those that split the layers evenly."""
    even = [v for v in range(2, most + 1) if space.facts.num_layers % (v * pp) == 0]
    return sorted({*([2] if most >= 2 else []), *even[-1:], *even[len(even) // 2 : len(even) // 2 + 1]})


def pipelines(space: Space, family: Family, micro_batch: int) -> list[Pipeline]:
    """Schedules with virtual stages that run with this family's microbatches, plain 1F1B first."""
    if family.pp == 1:
        return [Pipeline("1f1b", 1)] if _stages_fit(space, 1) else []
    stages = space.constraints.allowed("virtual_stages")
    count = space.workload.global_batch // (family.dp * micro_batch)
    most = min(MAX_STAGES_PER_RANK, space.facts.num_layers // family.pp)
    found = []
    for schedule in space.schedules:
        if schedule in ("gpipe", "1f1b"):
            tried: Iterable[int] = (1,)
        elif schedule in ("zbv", "dualpipev"):
            tried = (2,)
        elif schedule == "zero_bubble":
            tried = (1, 2)
        else:
            tried = _interleavings(space, family.pp, most) if stages is None else stages
        for v in tried:
            # Interleaving in rounds that are longer than pp is torch's alone; whole rounds run everywhere.
            whole = schedule not in ("interleaved", "zero_bubble") or count % family.pp == 0
            fits = v <= max(1, most) and whole and not why_not(schedule, family.pp, count, v)
            fits = fits and _stages_fit(space, family.pp * v)
            fits = fits and not (space.is_executed_here and why_not_count(schedule, family.pp, count))
            if fits and (stages is None or v in stages):
                found.append(Pipeline(schedule, v))
    return found


def _stages_fit(space: Space, stages: int) -> bool:
    given = space.constraints.stage_layers
    return not isinstance(given, tuple) or len(given) == stages


class Sharding(NamedTuple):
    kind: str
    replicas: int  # copies of each shard (HSDP); 1: all of dp holds one copy


def shardings(space: Space, family: Family) -> list[Sharding]:
    """Cheapest in communication first."""
    allowed = space.constraints.allowed("sharding")
    # Under tensor parallelism Deepwell shards embedding and head over tp as well: there is always something to shard.
    has_ends = space.is_executed_here and family.tp > 1
    if family.dp * family.cp == 1 and not has_ends:
        return [Sharding((allowed or ("ddp",))[0], 1)]
    replicas = space.constraints.allowed("dp_replicate")
    kinds = [s for s in ("zero1", "zero2", "zero3", "ddp") if (s in allowed if allowed else s != "ddp")]
    if allowed is None and space.is_executed_here and family.pp > 1:
        # A stage keeps weights and gradients whole until its last backward: the others would be zero1, or slower.
        kinds = ["zero1"]
    if replicas is not None:
        return [Sharding(kind, r) for kind in kinds for r in replicas if family.dp % r == 0]
    # Copies that keep each set of shards inside one NVLink domain, or inside eight of them (HSDP).
    inner = max(1, space.hw.nvlink_domain // (family.tp * family.cp))
    copies = [family.dp // n for n in (inner, 8 * inner) if 1 < n < family.dp and family.dp % n == 0]
    return [Sharding(kind, r) for kind in kinds for r in ([1, *copies] if kind == "zero3" else [1])]


def recomputes(space: Space, stages: int = 1) -> list[Recompute]:
    """Least work first, for a model in so many stages. The best is refined to the layer (`block`)."""
    found = _allowed_recomputes(space, stages)
    if not space.is_executed_here:
        return found
    offload = OFFLOADS[space.constraints.offload or "none"]
    return [r for r in found if not why_not_away(offload, r)] or found


def _allowed_recomputes(space: Space, stages: int) -> list[Recompute]:
    allowed = space.constraints.allowed("recompute")
    ladder = _block_ladder(space, stages) if space.is_executed_here else _module_ladder(space)
    if allowed is None:
        return ladder
    if space.is_executed_here and "selective" in allowed:
        ladder.insert(1, Recompute(kind="selective", modules=("core_attn",)))
    if "block" in allowed and "full" not in allowed:
        # By doubling up to all layers of the longest stage.
        most = max(1, space.facts.num_layers)
        steps = [1 << i for i in range(most.bit_length()) if 1 << i < most]
        kept = [r for r in ladder if r.kind in allowed and r.kind != "block"]
        return kept + [Recompute(kind="block", layers=layers) for layers in (*steps, most)]
    return [r for r in ladder if r.kind in allowed]


def _block_ladder(space: Space, stages: int) -> list[Recompute]:
    """Whole layers by quarters of a stage: Deepwell's trainer recomputes nothing smaller."""
    most = -(-max(1, space.facts.num_layers) // stages)
    quarters = dict.fromkeys(most * i // 4 for i in (1, 2, 3))
    blocks = [Recompute(kind="block", layers=layers) for layers in quarters if 0 < layers < most]
    return [Recompute(), *blocks, Recompute(kind="full")]


def _module_ladder(space: Space) -> list[Recompute]:
    cheap: tuple[str, ...] = ("layernorm", "moe_act") if space.facts.is_moe else ("layernorm",)
    if space.facts.is_latent:
        cheap = (*cheap, "mla_up_proj")
    return [
        Recompute(),
        Recompute(kind="selective", modules=cheap),
        Recompute(kind="selective", modules=(*cheap, "mlp", *(("moe",) if space.facts.is_moe else ()))),
        Recompute(kind="full"),
    ]


def layout_of(
    space: Space, family: Family, micro_batch: int, pipeline: Pipeline, sharding: Sharding, recompute: Recompute
) -> Layout | None:
    given = space.constraints
    sp, layers = given.sequence_parallel, given.stage_layers
    if layers is None:
        layers = balanced_layers(space.workload, pipeline.schedule, family.pp, pipeline.virtual_stages)
    tokens = space.workload.seq_len % (family.tp * family.cp) == 0
    layout = Layout(
        dp=family.dp, tp=family.tp, pp=family.pp, cp=family.cp, ep=family.ep, etp=family.etp,
        sharding=cast(Any, sharding.kind), dp_replicate=sharding.replicas,
        schedule=cast(Any, pipeline.schedule), virtual_stages=pipeline.virtual_stages,
        stage_layers=layers if isinstance(layers, tuple) else None,  # None: even
        sequence_parallel=(family.tp > 1 and tokens) if sp is None else sp and family.tp > 1,
        micro_batch=micro_batch, recompute=recompute, cuda_graphs=given.cuda_graphs,
        offload=OFFLOADS[given.offload or "none"], overlap=given.overlap or Overlap(),
        context_parallel_kind=cast(Any, context_kind(space, family.cp, family.tp)),
    )  # fmt: skip
    facts, work = space.facts, space.workload
    reason = why_not_layout(facts, layout, work.seq_len, work.global_batch)
    return None if reason or why_not_executable(layout, work, space.stack) else layout
