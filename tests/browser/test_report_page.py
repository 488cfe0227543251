"""The report page in a real browser: it runs its script, loads nothing, and nothing hostile runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import report_samples as samples

from harness.report.html import write_html

CHROMIUM = shutil.which("chromium")

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--enable-logging=stderr",
)  # fmt: skip


def browse(tmp_path: Path, url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return write_html(samples.report(), tmp_path / "report")


def test_the_script_runs_under_its_policy_and_hostile_text_does_not(tmp_path: Path, page: Path) -> None:
    shown = browse(tmp_path, page.as_uri(), "--dump-dom")
    assert '<span id="filter-count" class="soft" role="status">10 of 10</span>' in shown.stdout
    assert '<button type="button" data-copy="cause-1-replay">Copy</button>' in shown.stdout
    assert "Content Security Policy" not in shown.stderr
    assert "Uncaught" not in shown.stderr
    assert samples.HOSTILE not in shown.stdout


@pytest.mark.parametrize("width", [420, 1360])
def test_nothing_sticks_out_of_the_window(tmp_path: Path, page: Path, width: int) -> None:
    """Wide tables scroll inside their own box, the page itself never sideways."""
    probe = tmp_path / "report" / "probe.html"
    probe.write_text(
        f'<iframe id="f" src="index.html" width="{width}" height="900"></iframe><p id="out"></p><script>'
        'document.getElementById("f").onload = (e) => { const d = e.target.contentDocument.documentElement;'
        ' document.getElementById("out").textContent = `${d.scrollWidth} <= ${d.clientWidth}`; };</script>'
    )
    shown = browse(
        tmp_path, probe.as_uri(), "--dump-dom", "--allow-file-access-from-files", "--virtual-time-budget=5000"
    ).stdout
    found = shown.split('<p id="out">')[1].split("</p>")[0].split(" &lt;= ")
    assert int(found[0]) <= int(found[1])


def test_it_paints_in_light_and_in_dark(tmp_path: Path, page: Path) -> None:
    pictures = []
    for scheme in ("1", "0"):
        picture = tmp_path / f"{scheme}.png"
        browse(
            tmp_path, page.as_uri(), f"--screenshot={picture}", "--window-size=1200,800",
            f"--blink-settings=preferredColorScheme={scheme}",
        )  # fmt: skip
        pictures.append(picture.read_bytes())
    assert pictures[0] != pictures[1]
