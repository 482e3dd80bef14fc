"""Nothing fits: the nearest miss in words, and what would make it fit. Pure."""

from dataclasses import replace

from deepwell.errors import ConfigError, DeepwellError, PlanError
from deepwell.planner.estimate import estimate
from deepwell.planner.estimate_values import GIB
from deepwell.planner.executable import why_not_executable
from deepwell.planner.layout import Layout, Offload
from deepwell.planner.search.explore import Explorer, Found, Scored
from deepwell.planner.search.space import Space, make_space
from deepwell.planner.workload import OPTIMIZERS, Workload

_MOST_GPUS = 1 << 20


def over_text(space: Space, scored: Scored) -> str:
    """ "9.3 GiB over on stage 0 in warm-up (activations 41.0, weights 12.1 GiB)": the rank that binds and why."""
    fullest = max(scored.estimate.memory, key=lambda stage: stage.device)
    held = {
        "activations": fullest.activation_bytes,
        "weights": fullest.params + fullest.quantized_copies,
        "gradients": fullest.grads,
        "optimizer state": fullest.master + fullest.moments,
        "logits": fullest.logits,
        "gathered weights": fullest.comm_buffers,
        "working set": fullest.workspace,
    }
    largest = sorted(held, key=lambda name: -held[name])[:2]
    filled = ", ".join(f"{name} {held[name] / GIB:.1f}" for name in largest)
    is_piped = scored.layout.pp > 1
    where = f"on stage {fullest.stage}" if is_piped else "on every rank"
    when = {"activations": " in warm-up" if is_piped else "", "logits": " at the loss"}.get(largest[0], "")
    return f"{scored.over_gib:.1f} GiB over {where}{when} ({filled} GiB)"


def no_fit(space: Space, found: Found) -> DeepwellError:
    """The error to raise where no layout fits, or where no layout is even possible."""
    if not found.misses:
        reasons = "; ".join(found.refused) or "no layout divides batch, GPUs and layers"
        return ConfigError(
            f"no layout of {space.hw.num_gpus} GPUs is possible with constraints {space.constraints.describe()}: "
            f"{reasons}"
        )
    nearest = found.misses[0]
    limit = space.limit_gib or 0.0
    message = (
        f"nothing fits: the nearest is {nearest.layout.describe()} on {space.hw.name}, which needs "
        f"{nearest.estimate.peak_gib:.1f} of {limit:.1f} GiB, {over_text(space, nearest)}"
    )
    remedies = list(_remedies(space, nearest))
    if remedies:
        message += ". It would fit with: " + "; or ".join(remedies)
    return PlanError(message)


def _remedies(space: Space, nearest: Scored) -> list[str]:
    found = []
    limit = space.limit_gib or 0.0
    if space.constraints.max_memory is not None and (space.hw.memory_bytes or 0) / GIB > nearest.estimate.peak_gib:
        found.append(f"max_memory of at least {nearest.estimate.peak_gib:.0f} GiB")
    if space.constraints.counts or space.constraints.names:
        open_degrees = replace(space.constraints, counts=(), names=(), stage_layers=None)
        wider = make_space(space.workload, space.hw, space.stack, open_degrees)
        other = Explorer(wider).first_fit() if wider.constraints != space.constraints else None
        if other is not None:
            found.append(f"other constraints, e.g. {other.layout.describe()}")
    found += _cheaper_state(space, nearest, limit)
    found += _shorter_sequence(space, nearest, limit)
    found += _more_gpus(space)
    return found


def _fits(space: Space, workload: Workload, layout: Layout, limit: float) -> bool:
    return estimate(workload, space.hw, layout, space.stack, simulate=False).peak_gib <= limit


def _cheaper_state(space: Space, nearest: Scored, limit: float) -> list[str]:
    found = []
    now = OPTIMIZERS[space.workload.optimizer]
    for name in ("adamw_bf16_moments", "adamw_8bit"):
        smaller = OPTIMIZERS[name].master + OPTIMIZERS[name].moments < now.master + now.moments
        if smaller and _fits(space, replace(space.workload, optimizer=name), nearest.layout, limit):
            found.append(f"optimizer={name!r}")
            break
    offloaded = replace(nearest.layout, offload=Offload(optimizer=1.0))
    can_offload = not why_not_executable(offloaded, space.workload, space.stack)
    if not nearest.layout.offload.optimizer and can_offload and _fits(space, space.workload, offloaded, limit):
        found.append("offload=True (optimizer state in host memory)")
    both = replace(nearest.layout, offload=Offload(optimizer=1.0, activations=1.0))
    is_other = nearest.layout.offload != both.offload and not why_not_executable(both, space.workload, space.stack)
    if not found and is_other and _fits(space, space.workload, both, limit):
        found.append("offload='both' (optimizer state and activations in host memory)")
    return found


def _shorter_sequence(space: Space, nearest: Scored, limit: float) -> list[str]:
    length = space.workload.seq_len
    while length % 2 == 0 and length > 256:
        length //= 2
        work = replace(space.workload, seq_len=length)
        if length % (nearest.layout.cp * nearest.layout.tp) == 0 and _fits(space, work, nearest.layout, limit):
            return [f"seq_len {length:,}"]
    return []


def _more_gpus(space: Space) -> list[str]:
    """The least doubling of the machine on which something fits the same constraints; the search itself answers."""
    hw = space.hw
    if hw.kind == "cpu":
        return []
    others = tuple(one for one in space.constraints.counts if one[0] != "gpus")
    fixed = replace(space.constraints, counts=others)
    for _ in range(6):
        hw = replace(hw, num_nodes=hw.num_nodes * 2, name=f"{hw.num_gpus * 2} GPUs")
        if hw.num_gpus > _MOST_GPUS:
            return []
        bigger = make_space(space.workload, hw, space.stack, fixed)
        if Explorer(bigger).first_fit() is not None:
            return [f"{hw.num_gpus:,} GPUs"]
    return []
