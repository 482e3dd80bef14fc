"""The plan as one HTML page: offline, self-contained, the charting library inside it.

    Path("plan.html").write_text(plan_page(plan))

Charts are drawn by Apache ECharts (Apache-2.0; `vendor/` holds it with its licence), which travels inside the page:
nothing is loaded from anywhere.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from deepwell import __version__
from deepwell.planner.plan import Plan
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
    import jinja2

    folder = resources.files("deepwell.report")

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    data = page_data(plan)
    return environment.from_string(read("plan_page.html.jinja")).render(
        title=f"{plan.model} on {plan.machine}",
        version=__version__,
        verdict=data["verdict"],
        notes=data["notes"],
        panels=_PANELS,
        style=read("plan_page.css"),
        library=read("vendor/echarts.min.js"),
        script=read("plan_page.js"),
        data=_inside_script(data),
    )


def _inside_script(data: Any) -> str:
    """JSON that can stand inside a script element: no tag can close it early."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
