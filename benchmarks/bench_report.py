"""The report of 10,000 results with 500 failures, beside pytest-html's of the same results.

    python -m benchmarks.bench_report

Counted: CPU seconds to write it, bytes of its main page. Measured in Chromium: milliseconds from the start of the
navigation until the page's scripts have run, and what a choice of a filter and a word take until they are laid out. Of
each the median of five. pytest-html reports a suite of as many tests that do nothing, with as many failures, so its CPU
seconds are those of the whole run less those of the same run without the report. What is not installed is left out, and
said.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

import report_samples as samples  # noqa: E402
from browser_parts import CHROMIUM, absent  # noqa: E402
from shardproof.report.html import write_html  # noqa: E402

RUNS = 5

SUITE = """
    import pytest

    @pytest.mark.parametrize("n", range({total}))
    def test_scenario(n):
        assert n >= {failures}, "torch-fsdp2 mismatch: load: exp_avg dtype, param bits"
"""


TIMED = (
    "(text) => { const began = performance.now(); ACT; document.body.offsetHeight; return performance.now() - began }"
)
"""A script that measures another one, and the layout that it causes."""

OUR_STEPS = {
    "filter": (
        "choose('standing', text ? text.split(' ') : [])",
        ("known", "pass new", "new", "unsupported known pass", ""),
    ),
    "words": ("state.q = text; changed(false)", ("crash", "mesh=1x8x1", "bf16 sgd", "-pass", "twice cpu")),
}
THEIR_STEPS = {
    "filter": (
        "document.querySelector(`input[data-test-result=${text}]`).click()", ("passed", "passed", "failed", "failed"),
    )
}  # fmt: skip
"""What is measured → the body of a script, and the texts with which it runs."""


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
        _ours(ours)
        known = _theirs(theirs)
        if reason := absent():
            print(f"not measured in a browser: {reason}")
            return
        _in_browser("shardproof", ours / "index.html", OUR_STEPS)
        if known:
            _in_browser("pytest-html", theirs / "report.html", THEIR_STEPS)


def _ours(folder: Path) -> None:
    report = samples.many()
    began = time.process_time()
    page = write_html(report, folder)
    took = time.process_time() - began
    pages = len(list((folder / "failures").iterdir()))
    print(f"shardproof   write {took:5.2f} CPU s, main page {page.stat().st_size / 1e6:.2f} MB, {pages} failure pages")


def _theirs(folder: Path) -> bool:
    """Whether pytest-html could be measured."""
    if find_spec("pytest_html") is None:
        print("pytest-html  not installed (pip install pytest-html)")
        return False
    folder.mkdir()
    (folder / "test_many.py").write_text(textwrap.dedent(SUITE).format(total=10_000, failures=500))
    plain = _pytest(folder)
    page = folder / "report.html"
    took = _pytest(folder, f"--html={page}", "--self-contained-html") - plain
    print(f"pytest-html  write {took:5.2f} CPU s, main page {page.stat().st_size / 1e6:.2f} MB")
    return True


def _pytest(folder: Path, *options: str) -> float:
    """CPU seconds of a run of the suite."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *options, "test_many.py"]
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _in_browser(name: str, path: Path, steps: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    """Measure one page. steps: what is measured → the body of a script, and the texts with which it runs."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        waited, worked = zip(*(_opened(browser, path) for _ in range(RUNS)), strict=True)
        told = [f"open {statistics.median(waited):.0f} ms ({statistics.median(worked):.0f} of CPU)"]
        page = browser.new_page()
        page.set_default_timeout(0)
        page.goto(path.as_uri())
        for what, (script, texts) in steps.items():
            page.evaluate(TIMED.replace("ACT", script), texts[-1])  # once, so that everything is compiled
            taken = [float(page.evaluate(TIMED.replace("ACT", script), text)) for text in texts]
            told.append(f"{what} {statistics.median(taken):.0f} ms (worst {max(taken):.0f})")
        browser.close()
    print(f"{name:<12} {', '.join(told)}")


def _opened(browser: Any, path: Path) -> tuple[float, float]:
    """Milliseconds from the start of the navigation until its scripts have run, and those that the page's thread
    worked, which a busy machine does not change."""
    page = browser.new_page()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(path.as_uri(), timeout=0)
    ended = float(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
    metrics = {item["name"]: item["value"] for item in session.send("Performance.getMetrics")["metrics"]}
    page.close()
    return ended, 1000 * float(metrics["TaskDuration"])


if __name__ == "__main__":
    main()
