"""What tests in a browser need, what of it is not there, and what they ask of every page."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("SHARDPROOF_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


def absent() -> str:
    """Why no test can run in a browser here; empty if they can."""
    if CHROMIUM is None:
        return "Chromium is not installed (apt install chromium)"
    for package in ("playwright", "axe_playwright_python"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (pip install -e '.[browser]')"
    return ""


def _axe_source() -> str:
    """The script of axe-core."""
    spec = importlib.util.find_spec("axe_playwright_python")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("axe.min.js").read_text("utf-8")


def sideways(page: Any) -> int:
    """How many pixels a page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def complaints(page: Any) -> list[str]:
    """What axe-core finds wrong, a line each: the rule, why, and the first element."""
    page.evaluate(_axe_source())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{item['id']}: {item['help']}: {item['nodes'][0]['html'][:200]} ({item['nodes'][0]['failureSummary'][:300]})"
        for item in found["violations"]
    ]
