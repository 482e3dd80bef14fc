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
    found, ir, layout = plan.estimate, plan.workload.ir, plan.layout
    policy = plan.workload.policy if isinstance(plan.workload.policy, str) else plan.workload.main_format
    return {
        **_fields(plan, "model machine gpus machine_gpus goal accumulation limit_gib bubble gpu_seconds"),
        **_fields(plan.workload, "seq_len global_batch optimizer"),
        **_fields(found, "step_s error_band tier tokens_per_s_per_gpu mfu_bf16 mfu_weighted peak_gib"),
        **_fields(plan.searched, "families layouts"),
        "parameters": ir.num_params, "active_parameters": ir.active_params, "layers": ir.num_layers,
        "gpu": plan.hardware.gpus[0].name, "precision": policy, "stack": plan.stack.name,
        "layout": layout.describe(), "schedule": layout.schedule, "stage_layers": list(plan.stage_layers),
        "fits": plan.limit_gib is None or found.peak_gib <= plan.limit_gib,
        "tokens_per_s": found.tokens_per_s_per_gpu * plan.gpus,
        "hbm_gib": found.limit_gib,
        "exposed": sum(plan.exposed.values()) / plan.step_s,
    }  # fmt: skip


def _plans(plan: Plan) -> list[dict[str, Any]]:
    """The plan, the runners-up and what was rejected, in one list to filter."""
    first: tuple[Any, ...] = (plan, "plan", plan.mfu, sum(plan.exposed.values()) / plan.step_s, "the plan")
    others = [(one, "fits", one.mfu_bf16, one.exposed, one.why_not) for one in plan.runners_up]
    rows: list[dict[str, Any]] = [
        {
            "rank": rank, "kind": kind, "layout": one.layout.describe(), **_fields(one.layout, "schedule tp pp"),
            "step_s": one.step_s, "tokens": one.tokens_per_s_per_gpu, "mfu": mfu, "gib": one.peak_gib,
            "bubble": one.bubble, "exposed": exposed, "why": why,
        }
        for rank, (one, kind, mfu, exposed, why) in enumerate([first, *others], start=1)
    ]  # fmt: skip
    return rows + [{"kind": one.kind, "layout": one.family, "why": one.reason} for one in plan.rejected]


def _memory(plan: Plan) -> dict[str, Any]:
    stages = plan.estimate.memory
    kinds = dict.fromkeys(f"activations: {kind}" for stage in stages for kind, _ in stage.activations)
    names = {
        "weights": "params", "master weights": "master", "moments": "moments", "gradients": "grads",
        "quantized copies": "quantized_copies", **kinds, "logits": "logits", "communication buffers": "comm_buffers",
        "workspace": "workspace", "context and NCCL": "context", "fragmentation margin": "fragmentation",
    }  # fmt: skip
    parts: dict[str, list[float]] = {}
    for name, field in names.items():
        held = [dict(stage.activations).get(name.removeprefix("activations: "), 0.0) for stage in stages]
        sizes = [getattr(stage, field) for stage in stages] if field else held
        parts[name] = [round(size / GIB, 3) for size in sizes]
    return {
        "ranks": [stage.stage for stage in stages],
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
    groups = {
        **dict.fromkeys(_COMPUTE, "computation"),
        **dict.fromkeys(COMMUNICATION, "exposed communication"),
        "bubble": "waiting", "optimizer": "overhead", "host": "overhead", "straggler": "waiting",
    }  # fmt: skip
    seconds = {name: plan.estimate.seconds.get(name, 0.0) for name in groups}
    return {
        "step_s": plan.step_s,
        "parts": [
            {"name": name, "what": WORDS.get(name, name), "group": group, "seconds": seconds[name]}
            for name, group in groups.items()
            if seconds[name] > 0
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
    domain = plan.hardware.nvlink_domain
    return {
        "name": name, "size": size, "stride": stride, "span": (size - 1) * stride + 1,
        "inside_nvlink": size == 1 or plan.layout.gpus <= domain or domain % (size * stride) == 0,
        "gb_per_s": None if figure is None else figure.value,
        "exposed_s": plan.exposed.get(name, 0.0),
    }  # fmt: skip


def _precision(plan: Plan) -> dict[str, Any]:
    found = plan.precision.to_dict()
    span = found["spans"][0]
    return {"groups": span["groups"], "shares": span["shares"], "formats": found["formats"], "notes": found["notes"]}
