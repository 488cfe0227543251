"""The documentation site in a real Chromium, light and dark, on a desk and on a phone.

*Verifies*: what axe-core finds wrong, and that no page is wider than its window, of one page of each kind.
*Does not verify*: links and navigation, which tests/golden/test_site.py does; the search.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser_parts import complaints, sideways

from tests.golden.test_site import built

pytestmark = [pytest.mark.browser, pytest.mark.nightly]

PAGES = ("index", "tutorial", "report", "cures", "deepspeed", "cluster", "findings")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built"))


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_keeps_nobody_out(chromium: Any, site: Path, name: str, scheme: str, width: int) -> None:
    context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    page = context.new_page()
    page.goto((site / f"{name}.html").as_uri())
    assert complaints(page) == []
    assert sideways(page) == 0
    context.close()
