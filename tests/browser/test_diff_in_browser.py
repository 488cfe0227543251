"""The page of `shardproof diff` in a real browser: it opens, folds and fits a phone, and keeps nobody out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import compare_samples
import pytest
from browser_parts import complaints, sideways
from shardproof.compare.page import write_page

pytestmark = pytest.mark.browser

Visit = Callable[..., Any]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_page(compare_samples.comparison(), tmp_path / "diff.html")
    return tmp_path / "diff.html"


def unfolded(page: Any) -> Any:
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    return page


def test_the_first_difference_of_each_part_is_open(visit: Visit, written: Path) -> None:
    page = visit(written)
    folds = page.locator("details.found")
    assert [folds.nth(i).get_attribute("open") is not None for i in range(folds.count())].count(True) == 2
    assert "B has here what A has under" in page.inner_text("main")


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_nothing_keeps_anyone_out(visit: Visit, written: Path, scheme: str) -> None:
    assert complaints(unfolded(visit(written, color_scheme=scheme))) == []


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_of_the_window(visit: Visit, written: Path, width: int) -> None:
    assert sideways(unfolded(visit(written, viewport={"width": width, "height": 844}))) <= 0
