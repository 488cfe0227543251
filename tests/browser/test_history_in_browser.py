"""The page of a folder's history in a real browser: figure and lanes can be read by everybody, on a phone too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
from browser_parts import complaints, sideways
from shardproof.report.history import History, Night, Trace
from shardproof.report.html import write_history

pytestmark = pytest.mark.browser

Visit = Callable[..., Any]


@pytest.fixture
def page_of_thirty_nights(tmp_path: Path) -> Path:
    nights = tuple(Night(f"run-{n}", f"2026-01-{n + 1:02} 03:00", n % 3, 2, 9) for n in range(30))
    shown = {
        "new": (*(None,) * 29, 3), "flaky": tuple(n % 2 for n in range(30)), "recurring": (12,) * 30,
        "fixed": (*(1,) * 20, *(0,) * 10), "not run": (*(1,) * 29, None),
    }  # fmt: skip
    traces = [Trace(f"{samples.HOSTILE} {state} {'x' * 300}", "", state, lane) for state, lane in shown.items()]
    traces.append(Trace("known", "torch-fsdp2-1", "recurring", (1,) * 30, "1a2b3c4d5e6f"))
    return write_history(History(nights, tuple(traces)), tmp_path)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_it_is_for_everybody(visit: Visit, page_of_thirty_nights: Path, scheme: str) -> None:
    page = visit(page_of_thirty_nights, color_scheme=scheme, viewport={"width": 390, "height": 844})
    page.click("summary")
    assert sideways(page) <= 0
    assert complaints(page) == []
    assert page.locator("#nights tbody tr").count() == 30
    assert page.locator(".past tbody tr").count() == 6
    assert samples.HOSTILE in page.inner_text("#new"), "as text"
    page.click("nav >> text=Fixed")
    assert page.url.endswith("#fixed")
