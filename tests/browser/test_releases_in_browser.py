"""The page of sweeps in a real browser: cells lead to failures, heads stay in sight, nobody is kept out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
from browser_parts import complaints, sideways
from shardproof.investigate.sweep_folder import Keeper
from shardproof.report.releases_page import write_releases
from shardproof.result import Result
from shardproof.space.files import load_space

pytestmark = pytest.mark.browser

Visit = Callable[..., Any]

VERSIONS = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.0", "2.15.0", "git:0123456789abcdef")
REGRESSION = "regressions/torch-fsdp2-164929"


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of twelve scenarios on seven versions, with every verdict, a regression that contradicts its entry, and
    a name that is long and hostile."""
    folder = tmp_path_factory.mktemp("sweeps")
    (scenario,) = load_space(REGRESSION).scenarios
    kinds = samples.every_kind()
    named = {replace(scenario, version=""): REGRESSION}
    for n in range(1, 11):
        named[replace(samples.scenario(system="torch-fsdp2"), seed=n)] = f"bug-{n}.toml"
    named[replace(samples.scenario(system="torch-fsdp2"), seed=12)] = f"{samples.HOSTILE}{'long' * 40}.toml"
    with Keeper(folder, named, VERSIONS) as keeper:
        for n, one in enumerate(named):
            for at, version in enumerate(VERSIONS[: 7 - n % 3]):
                keeper(shown(kinds[(n + at // 3) % len(kinds)], replace(one, version=version)))
        return write_releases(keeper.store, folder, samples.ISSUES, keeper.fresh)[0]


def shown(result: Result, scenario: Any) -> Result:
    return replace(result, scenario=scenario, system=scenario.system, version=scenario.version)


def test_a_failure_is_one_click_away_and_leads_back(visit: Visit, releases: Path) -> None:
    page = visit(releases)
    assert "12 regressions on 7 releases; 1 contradicts issues.toml" in page.inner_text("h1")
    page.locator(".releases a.mismatch").first.click()
    page.wait_for_url("**/failures/*.html")
    page.click("text=all releases")
    page.wait_for_url("**/releases.html")


def test_a_cell_says_its_verdict_without_colour(visit: Visit, releases: Path) -> None:
    page = visit(releases)
    words = {text.split()[1] for text in page.locator(".releases td .badge").all_inner_texts()}
    assert words >= {"pass", "mismatch", "crash", "hang", "unsupported", "unknown"}
    assert page.locator(".contradiction li").first.inner_text().startswith(f"{REGRESSION} passes on")


def test_names_and_releases_stay_in_sight(visit: Visit, releases: Path) -> None:
    page = visit(releases, viewport={"width": 700, "height": 500})
    page.locator(".releases").focus()
    page.evaluate("document.querySelector('.releases').scrollTo(1e4, 1e4)")
    box = page.locator(".releases").bounding_box()
    head, name = (page.locator(f".releases {part}").last.bounding_box() for part in ("thead th", "tbody th"))
    assert abs(head["y"] - box["y"]) < 3
    assert abs(name["x"] - box["x"]) < 3


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_nothing_keeps_anyone_out(visit: Visit, releases: Path, scheme: str) -> None:
    assert complaints(visit(releases, color_scheme=scheme)) == []


@pytest.mark.parametrize("width", [320, pytest.param(1280, marks=pytest.mark.nightly)])
def test_nothing_sticks_out_of_the_window(visit: Visit, releases: Path, width: int) -> None:
    page = visit(releases, viewport={"width": width, "height": 844})
    assert sideways(page) <= 0
    assert samples.HOSTILE in page.inner_text("main"), "as text"
