"""What the plan's page shows, as plain data: one object per panel, each of which can be copied as JSON."""

from typing import Any

from deepwell.planner.estimate_values import GIB
from deepwell.planner.plan import Plan
from deepwell.planner.plan_values import COMMUNICATION
from deepwell.planner.schedule.simulate import Event, Timeline
from deepwell.planner.schedule.trace import plan_timeline
from deepwell.planner.search.explore import WORDS

MAX_EVENTS = 6000  # of the pipeline that are drawn; of longer ones both ends are
MAX_GPUS = 144  # of the topology that are drawn
_COMPUTE = ("gemm_fwd", "gemm_dgrad", "gemm_wgrad", "attention", "pointwise", "quantize", "recompute", "loss")


def page_data(plan: Plan) -> dict[str, Any]:
    """Every panel of the page."""
    return {
        "verdict": _verdict(plan),
        "plans": _plans(plan),
        "memory": _memory(plan),
        "pipeline": _pipeline(plan),
        "time": _time(plan),
        "topology": _topology(plan),
        "precision": _precision(plan),
        "sensitivity": plan.sensitivity().to_dict(),
        "kernels": [str(choice) for choice in plan.kernels],
        "notes": {"warnings": list(plan.warnings), "notes": [*plan.notes, *plan.estimate.notes]},
        "plan": plan.to_dict(),
    }


def _fields(value: Any, names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names.split()}


def _verdict(plan: Plan) -> dict[str, Any]:
    found, ir = plan.estimate, plan.workload.ir
    policy = plan.workload.policy if isinstance(plan.workload.policy, str) else plan.workload.main_format
    return {
        **_fields(plan, "model machine gpus machine_gpus goal accumulation limit_gib bubble gpu_seconds"),
        **_fields(plan.workload, "seq_len global_batch optimizer"),
        **_fields(found, "step_s error_band tier tokens_per_s_per_gpu mfu_bf16 mfu_weighted peak_gib"),
        **_fields(plan.searched, "families layouts"),
        "parameters": ir.num_params,
        "active_parameters": ir.active_params,
        "layers": ir.num_layers,
        "gpu": plan.hardware.gpus[0].name,
        "precision": policy,
        "stack": plan.stack.name,
        "layout": plan.layout.describe(),
        "schedule": plan.layout.schedule,
        "stage_layers": list(plan.stage_layers),
        "fits": plan.limit_gib is None or found.peak_gib <= plan.limit_gib,
        "tokens_per_s": found.tokens_per_s_per_gpu * plan.gpus,
        "hbm_gib": found.limit_gib,
        "exposed": sum(plan.exposed.values()) / plan.step_s,
    }


def _plans(plan: Plan) -> list[dict[str, Any]]:
    """The plan, the runners-up and what was rejected, in one list to filter."""
    layout = plan.layout
    rows: list[dict[str, Any]] = [
        {
            "rank": 1, "kind": "plan", "layout": layout.describe(), "schedule": layout.schedule,
            "tp": layout.tp, "pp": layout.pp, "step_s": plan.step_s, "tokens": plan.tokens_per_s_per_gpu,
            "mfu": plan.mfu, "gib": plan.peak_gib, "bubble": plan.bubble,
            "exposed": sum(plan.exposed.values()) / plan.step_s, "why": "the plan",
        }
    ]  # fmt: skip
    for place, one in enumerate(plan.runners_up, start=2):
        rows.append(
            {
                "rank": place, "kind": "fits", "layout": one.layout.describe(), "schedule": one.layout.schedule,
                "tp": one.layout.tp, "pp": one.layout.pp, "step_s": one.step_s, "tokens": one.tokens_per_s_per_gpu,
                "mfu": one.mfu_bf16, "gib": one.peak_gib, "bubble": one.bubble, "exposed": one.exposed,
                "why": one.why_not,
            }
        )  # fmt: skip
    rows += [{"kind": one.kind, "layout": one.family, "why": one.reason} for one in plan.rejected]
    return rows


def _memory(plan: Plan) -> dict[str, Any]:
    parts: dict[str, list[float]] = {}

    def put(name: str, size: float) -> None:
        parts.setdefault(name, []).append(round(size / GIB, 3))

    kinds = list(dict.fromkeys(kind for stage in plan.estimate.memory for kind, _ in stage.activations))
    for stage in plan.estimate.memory:
        put("weights", stage.params)
        put("master weights", stage.master)
        put("moments", stage.moments)
        put("gradients", stage.grads)
        put("quantized copies", stage.quantized_copies)
        held = dict(stage.activations)
        for kind in kinds:
            put(f"activations: {kind}", held.get(kind, 0.0))
        put("logits", stage.logits)
        put("communication buffers", stage.comm_buffers)
        put("workspace", stage.workspace)
        put("context and NCCL", stage.context)
        put("fragmentation margin", stage.fragmentation)
    return {
        "ranks": [stage.stage for stage in plan.estimate.memory],
        "parts": {name: sizes for name, sizes in parts.items() if any(size > 0.0005 for size in sizes)},
        "limit_gib": plan.limit_gib,
        "hbm_gib": plan.estimate.limit_gib or None,
        "peak_gib": plan.estimate.peak_gib,
    }


def _pipeline(plan: Plan) -> dict[str, Any]:
    timeline = plan_timeline(plan)
    events, skipped = _shortened(timeline)
    return {
        "schedule": timeline.schedule,
        "ranks": plan.layout.pp,
        "stages": plan.layout.num_stages,
        "microbatches": plan.accumulation,
        "makespan_ms": 1000 * timeline.makespan,
        "bubble": timeline.bubble,
        "in_flight": list(timeline.in_flight),
        "skipped_ms": 1000 * skipped,
        "events": [
            [e.rank, e.kind, e.stage, e.microbatch, round(1000 * e.start, 4), round(1000 * e.end, 4)] for e in events
        ],
    }


def _shortened(timeline: Timeline) -> tuple[list[Event], float]:
    """The events to draw, and the seconds cut out of the steady state between warm-up and the end."""
    if len(timeline.events) <= MAX_EVENTS:
        return list(timeline.events), 0.0
    share = MAX_EVENTS / len(timeline.events) / 2
    head, tail = share * timeline.makespan, (1 - share) * timeline.makespan
    cut = tail - head
    first = [e for e in timeline.events if e.end <= head]
    last = [e._replace(start=e.start - cut, end=e.end - cut) for e in timeline.events if e.start >= tail]
    return first + last, cut


def _time(plan: Plan) -> dict[str, Any]:
    seconds = plan.estimate.seconds
    known = (*_COMPUTE, *COMMUNICATION, "bubble", "optimizer", "host", "straggler")
    groups = {
        **dict.fromkeys(_COMPUTE, "computation"),
        **dict.fromkeys(COMMUNICATION, "exposed communication"),
        "bubble": "waiting",
        "straggler": "waiting",
    }
    return {
        "step_s": plan.step_s,
        "parts": [
            {
                "name": name,
                "what": WORDS.get(name, name),
                "group": groups.get(name, "overhead"),
                "seconds": seconds[name],
            }
            for name in known
            if seconds.get(name, 0.0) > 0
        ],
    }


def _topology(plan: Plan) -> dict[str, Any]:
    layout, hw = plan.layout, plan.hardware
    inner = {"tp": 1, "cp": layout.tp, "dp": layout.tp * layout.cp, "pp": layout.tp * layout.cp * layout.dp}
    axes = [_axis(plan, name, getattr(layout, name), stride) for name, stride in inner.items()]
    if layout.ep > 1:
        axes.append(_axis(plan, "ep", layout.ep, layout.etp))
    return {
        "gpus": layout.gpus,
        **_fields(hw, "gpus_per_node num_nodes nvlink_domain"),
        **_fields(hw.fabric, "nvlink_gb_per_s nic_gb_per_s"),
        "drawn": min(layout.gpus, max(MAX_GPUS // hw.nvlink_domain, 1) * hw.nvlink_domain),
        "degrees": _fields(layout, "tp cp dp pp ep"),
        "axes": axes,
    }


def _axis(plan: Plan, name: str, size: int, stride: int) -> dict[str, Any]:
    figure = plan.hardware.group_gb_per_s(size, stride) if size > 1 else None
    span = (size - 1) * stride + 1
    domain = plan.hardware.nvlink_domain
    inside = size == 1 or plan.layout.gpus <= domain or domain % (size * stride) == 0
    return {
        "name": name,
        "size": size,
        "stride": stride,
        "span": span,
        "inside_nvlink": inside,
        "gb_per_s": None if figure is None else figure.value,
        "exposed_s": plan.exposed.get(name, 0.0),
    }


def _precision(plan: Plan) -> dict[str, Any]:
    found = plan.precision.to_dict()
    span = found["spans"][0]
    return {"groups": span["groups"], "shares": span["shares"], "formats": found["formats"], "notes": found["notes"]}
