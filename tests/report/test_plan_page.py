"""The plan's page: self-contained, and in a real headless Chromium it renders, filters and reports no error."""

import functools
import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deepwell.planner.plan import Plan
from deepwell.planner.search.autoplan import autoplan
from deepwell.report.plan_data import MAX_EVENTS, page_data
from deepwell.report.plan_page import plan_page

PANELS = ("plans", "memory", "pipeline", "time", "topology", "precision", "sensitivity", "kernels")
CHROMIUM = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)
browser = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: `apt install chromium` brings one"),
]


@functools.cache
def planned() -> Plan:
    return autoplan("mixtral-8x7b", "2x8xH100", seq_len=4096, global_batch=256, pp=2)


@functools.cache
def page() -> str:
    return plan_page(planned())


# ---- without a browser ----


def test_the_page_loads_nothing_from_anywhere() -> None:
    text = page()
    outside = re.findall(r"""(?:src|href)=["'](?!data:)([^"']+)["']""", text.split("<script>")[0])
    assert not outside
    assert "@import" not in text.split("</style>")[0]
    own = text.rsplit("<script>", 1)[1]
    assert "fetch(" not in own
    assert "http" not in own
    assert "Apache License 2.0" in text


def test_no_text_of_a_plan_can_leave_its_place() -> None:
    # A model's name comes from a file; it may hold what closes a script or opens a tag.
    ir = planned().workload.ir
    bad = "</script><img src=x onerror=alert(1)>"
    from dataclasses import replace

    plan = replace(planned(), model=bad, workload=replace(planned().workload, ir=replace(ir, name=bad)))
    text = plan_page(plan)
    assert bad not in text
    assert html.escape(bad) in text


def test_the_data_holds_every_panel_and_the_whole_plan() -> None:
    data = json.loads(json.dumps(page_data(planned())))
    assert set(PANELS) <= set(data)
    assert Plan.from_dict(data["plan"]) == planned()
    assert data["verdict"]["fits"] is True
    assert sum(part["seconds"] for part in data["time"]["parts"]) == pytest.approx(planned().step_s, rel=1e-3)
    stages = data["memory"]
    for i in range(len(stages["ranks"])):
        total = sum(sizes[i] for sizes in stages["parts"].values())
        assert total == pytest.approx(planned().estimate.memory[i].device / 2**30, abs=0.05)
    sizes = {axis["name"]: axis["size"] for axis in data["topology"]["axes"]}
    assert sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"] == planned().gpus


def test_long_pipelines_are_drawn_at_both_ends() -> None:
    plan = autoplan("llama3-8b", "8xH100", seq_len=1024, global_batch=8192, pp=8, micro_batch=1, schedule="1f1b")
    drawn = page_data(plan)["pipeline"]
    assert len(drawn["events"]) <= MAX_EVENTS
    assert drawn["skipped_ms"] > 0
    kinds = [event[1] for event in sorted(drawn["events"], key=lambda e: e[4])]
    assert kinds[0] == "F"
    assert kinds[-1] == "B"


# ---- in Chromium ----


def opened(tmp_path: Path, script: str = "", address: str = "", name: str = "plan.html") -> tuple[str, str]:
    """The page's DOM after it ran (and `script` after it), and what the console said."""
    # The library holds a closing tag of its own, in a text: the last one is the page's.
    head, _, tail = page().rpartition("</body>")
    extra = f"<script>{script}</script>" if script else ""
    (tmp_path / "plan.html").write_text(f"{head}{extra}</body>{tail}", encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,2400", "--virtual-time-budget=4000",
        "--allow-file-access-from-files", "--enable-logging=stderr", "--v=0", "--dump-dom",
        f"{(tmp_path / name).as_uri()}{address}",
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    console = "\n".join(line for line in run.stderr.splitlines() if "CONSOLE" in line)
    return run.stdout, console


def rows(dom: str) -> list[str]:
    body = re.search(r'<tbody id="plan-rows">(.*?)</tbody>', dom, re.DOTALL)
    assert body
    return re.findall(r"<tr.*?</tr>", body[1], re.DOTALL)


class TestInChromium:
    pytestmark = browser

    def test_it_renders_without_a_word_on_the_console(self, tmp_path: Path) -> None:
        dom, console = opened(tmp_path)
        assert console == ""
        assert 'data-ready="yes"' in dom
        assert dom.count("<canvas") >= 5
        assert planned().layout.describe() in dom
        for panel in PANELS:
            assert re.search(rf'id="{panel}">\s*<', dom), f"{panel} is empty"
        assert rows(dom)

    def test_an_error_in_the_page_would_be_seen(self, tmp_path: Path) -> None:
        # The check itself: a page that throws must not pass for one that does not.
        _, console = opened(tmp_path, "undefinedFunction();")
        assert "undefinedFunction" in console

    def test_typing_and_ticking_filters_the_plans(self, tmp_path: Path) -> None:
        script = """
          const box = document.getElementById("filter-text");
          box.value = "slower";
          box.dispatchEvent(new Event("input"));
          const tick = document.getElementById("kind-plan");
          tick.click();
        """
        dom, console = opened(tmp_path, script)
        assert console == ""
        everything, _ = opened(tmp_path)
        assert 0 < len(rows(dom)) <= len(rows(everything))
        assert all("slower" in row for row in rows(dom))
        assert not any('class="plan"' in row for row in rows(dom))

    def test_a_filter_in_the_address_holds_when_the_page_opens(self, tmp_path: Path) -> None:
        dom, console = opened(tmp_path, address="#kinds=plan")
        assert console == ""
        assert len(rows(dom)) == 1
        assert 'class="plan"' in rows(dom)[0]

    def test_a_panel_is_copied_as_json(self, tmp_path: Path) -> None:
        script = """
          let copied = "";
          Object.defineProperty(navigator, "clipboard", { value: { writeText: async (text) => { copied = text; } } });
          document.querySelector('button.copy[data-panel="memory"]').click();
          setTimeout(() => { document.body.dataset.copied = copied; }, 50);
        """
        dom, console = opened(tmp_path, script)
        assert console == ""
        copied = re.search(r'data-copied="([^"]*)"', dom)
        assert copied
        assert json.loads(html.unescape(copied[1]))["ranks"] == [0, 1]

    def test_nothing_is_wider_than_a_phone(self, tmp_path: Path) -> None:
        # Chromium's window has a least width, so the page sits in a frame as wide as a phone.
        (tmp_path / "phone.html").write_text(
            """<iframe src="plan.html" style="width: 390px; height: 3000px; border: 0"></iframe><script>
              setTimeout(() => {
                const page = document.querySelector("iframe").contentDocument.documentElement;
                document.body.dataset.width = page.scrollWidth;
                document.body.dataset.ready = page.dataset.ready;
              }, 2500);
            </script>""",
            encoding="utf-8",
        )
        dom, console = opened(tmp_path, name="phone.html")
        assert console == ""
        assert 'data-ready="yes"' in dom
        width = re.search(r'data-width="(\d+)"', dom)
        assert width
        assert int(width[1]) <= 390
