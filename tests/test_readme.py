"""The code in README.md and docs/*.md runs as it is printed.

The ```python blocks of a file run in order in one process, in an empty folder. A block that cannot run here is
preceded by a comment that says why:

    <!-- not run: needs eight GPUs -->
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from warm import run_python

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!--\s*not run:(.*?)-->\s*$", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    code: str
    line: int  # of the first line of code, from 1
    reason: str | None  # why it is not run; None where it is


def python_blocks(text: str) -> list[Block]:
    """The ```python blocks of a Markdown text, in order."""
    blocks = []
    for match in FENCE.finditer(text):
        if match[1] != "python":
            continue
        note = NOT_RUN.search(text[: match.start()].rstrip())
        line = text.count("\n", 0, match.start(2)) + 1
        blocks.append(Block(code=match[2], line=line, reason=note[1].strip() if note else None))
    return blocks


def as_script(blocks: list[Block]) -> str:
    """The blocks that run, each on the lines where the page has it, so that a traceback names the page's line."""
    lines: list[str] = []
    for block in blocks:
        if block.reason is None:
            lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.is_file()]


def test_blocks_are_found_with_their_lines_and_reasons() -> None:
    page = "Text\n\n```python\na = 1\n```\n\n<!-- not run: needs a GPU -->\n```python\nb = 2\n```\n```bash\nls\n```\n"
    assert python_blocks(page) == [
        Block(code="a = 1\n", line=4, reason=None),
        Block(code="b = 2\n", line=9, reason="needs a GPU"),
    ]
    assert as_script(python_blocks(page)) == "\n\n\na = 1\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_that_is_not_run_says_why(page: Path) -> None:
    silent = [block.line for block in python_blocks(page.read_text(encoding="utf-8")) if block.reason == ""]
    assert not silent, f"{page.name}: give a reason after 'not run:' before lines {silent}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_as_printed(page: Path, tmp_path: Path) -> None:
    blocks = [block for block in python_blocks(page.read_text(encoding="utf-8")) if block.reason is None]
    if not blocks:
        pytest.skip(f"{page.name} has no python to run")
    for package in ("accelerate", "datasets", "peft"):
        if any(f"from {package} import" in block.code for block in blocks):
            pytest.importorskip(package)  # a GPU host may lack it
    script = tmp_path / f"{page.stem}.py"
    script.write_text(as_script(blocks), encoding="utf-8")
    # Files that the page's code writes land in an empty folder of their own.
    folder = tmp_path / "here"
    folder.mkdir()
    run = run_python(script, cwd=folder)
    assert run.returncode == 0, f"{page.name} (line numbers as in the page)\n{run.stderr[-4000:]}"


def test_the_readme_exists_and_shows_code() -> None:
    if not (ROOT / "README.md").is_file():
        pytest.skip("README.md is not written yet")
    assert any(block.reason is None for block in python_blocks((ROOT / "README.md").read_text(encoding="utf-8")))
