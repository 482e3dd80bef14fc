"""The plan as one HTML page: offline, self-contained, the charting library inside it.

Path("plan.html").write_text(plan_page(plan))
"""

from deepwell.planner.plan import Plan
from deepwell.report.page import render_page
from deepwell.report.plan_data import page_data

_PANELS = (
    ("plans", "Ranked plans", "What was chosen, what else fits and what fell out, with the reason."),
    ("memory", "Memory per pipeline rank", "One GPU of each rank at its peak, against its HBM."),
    ("pipeline", "Pipeline", "Every forward and backward of the simulated step."),
    ("time", "Where the step goes", "Computation, communication that nothing hides, waiting."),
    ("topology", "Topology", "Which axis of the mesh stays inside NVLink and which crosses the network."),
    ("precision", "Precision map", "The format of each GEMM and the rule that decided."),
    ("sensitivity", "Sensitivity", "One step of each degree, less memory, a slower network."),
    ("kernels", "Kernels", "Configurations from the catalog; the registry measures on the device."),
)


def plan_page(plan: Plan) -> str:
    """The whole page as text."""
    data = page_data(plan)
    return render_page(
        "plan_page",
        data,
        title=f"{plan.model} on {plan.machine}",
        verdict=data["verdict"],
        notes=data["notes"],
        panels=_PANELS,
    )
