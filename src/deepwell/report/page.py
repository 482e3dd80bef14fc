"""What the pages share: one HTML file with its style, its script, the charting library and the data inside it.

Charts are drawn by Apache ECharts (Apache-2.0; `vendor/` holds it with its licence). Nothing is loaded from anywhere.
"""

import json
from importlib import resources
from typing import Any

from deepwell import __version__


def render_page(name: str, data: Any, **values: Any) -> str:
    """The page of `name`.html.jinja, `name`.css and `name`.js; its script finds `data` as DATA."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.FunctionLoader(_read)
    )
    return environment.get_template(f"{name}.html.jinja").render(
        version=__version__,
        style=_read("page.css") + _read(f"{name}.css"),
        library=_read("vendor/echarts.min.js"),
        script=_read("page.js") + _read(f"{name}.js"),
        data=inside_script(data),
        **values,
    )


def inside_script(data: Any) -> str:
    """JSON that can stand inside a script element: no tag can close it early."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _read(name: str) -> str:
    return (resources.files("deepwell.report") / name).read_text(encoding="utf-8")
