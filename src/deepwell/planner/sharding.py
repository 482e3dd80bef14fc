"""What a data-parallel rank holds of weights and gradients, and how often they are gathered and reduced. Pure.

    rules = state_rules(layout, stack)                     whole or sharded, gathered and reduced how often

Deepwell's trainer runs on FSDP2 (switch `data_parallel: fsdp2`), where

    ddp      everything whole; gradients reduced once, in the last micro-batch
    zero1    weights gathered once a step; gradients whole until the last micro-batch, then reduced once
    zero2    weights gathered once a step; gradients reduced in every micro-batch and kept as shards
    zero3    weights gathered in every forward and again in every backward; gradients as under zero2
    with pp  a stage keeps weights and gradients whole until its last backward and reduces after it, whatever the kind:
             torch's pipeline stages are so

Copies (HSDP) agree on their shards once a step. Embedding, final norm and head are FSDP2's root group.

Other stacks keep what their names mean there: gradients under zero2 are shards that are reduced once a step.
"""

from dataclasses import dataclass
from typing import NamedTuple

from deepwell.planner.layout import Layout
from deepwell.planner.stack import Stack

REDUCE_BYTES = {"fp32": 4.0, "bf16": 2.0}


class Parts(NamedTuple):
    """One figure for each set of weights that has its own ranks."""

    dense: float
    expert: float
    ends: float = 0.0  # embedding, final norm and head, where they are a group of their own (FSDP2's root)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRules:
    whole_weights: bool  # all of them at once, not only the layers that run
    keeps_shards: bool  # beside whole weights stand the shards that they were gathered from
    whole_grads: bool
    gathers_each: bool  # in every micro-batch, forward and backward; else once a step
    reduces_each: bool  # in every micro-batch; else once a step
    hides_reduce: bool  # reduction may run beside the backward


def is_fsdp2(stack: Stack) -> bool:
    return stack.switch("data_parallel") == "fsdp2"


def state_rules(layout: Layout, stack: Stack) -> StateRules:
    kind = layout.sharding
    if not is_fsdp2(stack):
        each = kind == "zero3"
        return StateRules(
            whole_weights=not each, keeps_shards=False, whole_grads=kind in ("ddp", "zero1"), gathers_each=each,
            reduces_each=each and stack.switch("reduce_each", "on") == "on", hides_reduce=True,
        )  # fmt: skip
    is_piped = layout.pp > 1
    return StateRules(
        whole_weights=kind != "zero3" or is_piped,
        keeps_shards=_is_sharded(layout),
        whole_grads=kind in ("ddp", "zero1") or is_piped,
        gathers_each=kind == "zero3",
        reduces_each=kind in ("zero2", "zero3") and not is_piped,
        hides_reduce=not is_piped,
    )


def _is_sharded(layout: Layout) -> bool:
    """Whether FSDP2 is in the model: DDP proper is plain data parallelism alone, elsewhere `ddp` is shards of one."""
    if layout.pp > 1:
        return layout.dp * layout.cp > 1
    return layout.tp * layout.cp * layout.ep > 1 or (layout.dp > 1 and layout.sharding != "ddp")


def splits_ends(layout: Layout, stack: Stack) -> bool:
    """Whether embedding, final norm and head are whole weights with their tokens split over tp, not tensor-parallel."""
    return layout.tp > 1 and is_fsdp2(stack)


def shards(layout: Layout, stack: Stack) -> Parts:
    """Ranks over which each set of weights (its optimizer state, where weights are whole) is spread."""
    copies = layout.dp_replicate
    dense = 1 if layout.sharding == "ddp" else layout.dp * layout.cp // copies
    if is_fsdp2(stack):
        # Experts whose tokens are spread are groups of their own, without copies; so are the ends', over tp as well.
        expert = layout.expert_dp if layout.ep > 1 or layout.tp > 1 else dense
        return Parts(dense, expert, 1 if layout.sharding == "ddp" else dense * layout.tp)
    expert = layout.expert_dp // copies if layout.expert_dp % copies == 0 else layout.expert_dp
    return Parts(dense, 1 if layout.sharding == "ddp" else max(1, expert), dense)
