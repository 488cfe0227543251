"""Pages in a real Chromium, driven by Playwright.

The browser is the one that the system has (`chromium` of Debian, or `SHARDPROOF_CHROMIUM`); nothing is downloaded.
Playwright and axe-core, which looks for what keeps people out, come with `pip install -e '.[browser]'`. Where one of
the three is not there, these tests are skipped, and the end of the test run says which (`tests/conftest.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_parts import CHROMIUM, absent


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """One browser for all tests of a process."""
    if reason := absent():
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


Visit = Callable[..., Any]
"""`visit(path, fragment="", **context)`: Playwright's page, opened; `context` as `Browser.new_context` takes it."""


@pytest.fixture
def visit(chromium: Any) -> Iterator[Visit]:
    """Opens a file in a context of its own. After the test, no page may have said anything on its console, raised
    anything, or asked for anything but itself."""
    said: list[str] = []
    contexts = []

    def opened(path: Path, fragment: str = "", **context: Any) -> Any:
        contexts.append(chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **context}))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"raised: {error}"))
        page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("requestfailed", lambda request: said.append(f"asked for {request.url}"))
        page.goto(path.as_uri() + (f"#{fragment}" if fragment else ""))
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []
