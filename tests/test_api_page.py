"""docs/api.md is what docs/make_api.py writes from the code of today, and leaves no public name out."""

import importlib.util
from pathlib import Path

import deepwell
import deepwell.kernels

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_is_of_this_code_and_complete() -> None:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None and spec.loader is not None
    make_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_api)
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert text == make_api.page(), "run: python docs/make_api.py"
    for name in [*deepwell.__all__, *(f"kernels.{name}" for name in deepwell.kernels.__all__)]:
        assert name.startswith("_") or f"## deepwell.{name}\n" in text


def test_every_page_of_the_documentation_is_in_its_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md")
    assert [page for page in pages if f"({page})" not in index] == []
