"""The report's main page in a real browser: it runs its script, loads nothing, and nothing hostile runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
from browser_parts import sideways

from harness.report.html import write_html

pytestmark = pytest.mark.browser

Visit = Callable[..., Any]


@pytest.fixture
def index(tmp_path: Path) -> Path:
    return write_html(samples.report(), tmp_path / "report")


def test_the_script_runs_under_its_policy_and_hostile_text_does_not(visit: Visit, index: Path) -> None:
    page = visit(index)
    assert page.inner_text("#filter-count") == "10 of 10"
    assert samples.HOSTILE not in page.content()


@pytest.mark.parametrize("width", [420, 1360])
def test_nothing_sticks_out_of_the_window(visit: Visit, index: Path, width: int) -> None:
    """Wide tables scroll inside their own box, the page itself never sideways."""
    assert sideways(visit(index, viewport={"width": width, "height": 900})) <= 0


def test_it_paints_in_light_and_in_dark(visit: Visit, index: Path) -> None:
    light, dark = (visit(index, color_scheme=scheme).screenshot() for scheme in ("light", "dark"))
    assert light != dark
