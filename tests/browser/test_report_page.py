"""The report's main page in a real browser: what a reader clicks, types and presses; nothing hostile runs, nothing is
loaded, and axe-core has nothing against it. `visit` fails a test in which a page says anything on its console."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
from browser_parts import complaints, sideways
from shardproof.report import index_page
from shardproof.report.history import History, Night, Trace
from shardproof.report.html import render_index, write_html
from shardproof.report.publish import publish

pytestmark = pytest.mark.browser

Visit = Callable[..., Any]

PHONE = {"viewport": {"width": 390, "height": 844}}


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """The page of ten results of every kind, with the pages of its failures beside it."""
    return write_html(samples.report(), tmp_path / "report")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of ten thousand results."""
    return publish(tmp_path_factory.mktemp("large") / "index.html", render_index(samples.many()))


def shown(page: Any) -> str:
    return str(page.inner_text("#shown"))


def wait_for_shown(page: Any, text: str) -> None:
    """Wait until the page says so; it follows its address a moment after the address has changed."""
    page.wait_for_selector(f"#shown:text-is('{text}')")


def pick(page: Any, name: str, *values: str) -> None:
    """Choose values of a filter."""
    page.click(f"[id='by-{name}'] summary")
    for value in values:
        page.check(f"[id='by-{name}'] input[value='{value}']")
    page.keyboard.press("Escape")


def test_it_opens_and_nothing_hostile_runs(visit: Visit, index: Path) -> None:
    page = visit(index)
    assert shown(page) == "10 of 10 results"
    assert samples.HOSTILE not in page.content()
    assert page.locator("#body tr[data-at]").count() == 10


def test_every_id_of_a_failure_leads_to_its_page(visit: Visit, index: Path) -> None:
    page = visit(index, "standing=new")
    links = page.locator("#body .c-id a")
    assert links.count() == 3
    links.first.click()
    assert "/failures/" in page.url
    page.go_back()
    wait_for_shown(page, "3 of 10 results")


def test_a_tile_filters_and_the_address_says_so(visit: Visit, index: Path) -> None:
    page = visit(index)
    page.click(".tile.known")
    assert page.url.endswith("#standing=known")
    assert shown(page) == "1 of 10 results"
    page.click("#chips button")
    assert shown(page) == "10 of 10 results"
    assert "#" not in page.url
    page.go_back()
    wait_for_shown(page, "1 of 10 results")


def test_a_view_can_be_sent(visit: Visit, large: Path) -> None:
    """What is chosen on one page opens on another one as it was."""
    page = visit(large)
    page.click("text=More filters")
    pick(page, "mesh", "2x2x1", "1x8x1")
    pick(page, "standing", "known")
    page.select_option("#view-x", "program")
    page.select_option("#view-colour", "share")
    page.click("#heads .c-seconds button")
    page.fill("#q", "crash -sgd")
    page.wait_for_selector("#chips >> text=words: crash -sgd")
    other = visit(large, page.url.partition("#")[2])
    for part in ("#shown", "#chips", "#matrix", "#heads"):
        assert other.inner_html(part) == page.inner_html(part), part
    ids = [each.locator("#body .c-id").all_inner_texts()[:10] for each in (page, other)]
    assert ids[0] == ids[1]
    assert "program" in other.inner_text("#matrix-title")


def test_a_filter_takes_several_values(visit: Visit, large: Path) -> None:
    """A row has any of them; each has a chip of its own, and the address says all."""
    page = visit(large, "mesh=1x8x1")
    alone = int(shown(page).split()[0].replace(",", ""))
    page.click("[id='by-mesh'] summary")
    page.check("[id='by-mesh'] input[value='2x2x1']")
    both = int(shown(page).split()[0].replace(",", ""))
    assert both > alone
    assert page.url.endswith("#mesh=1x8x1&mesh=2x2x1")
    assert page.inner_text("[id='by-mesh'] summary") == "2 of 6"
    assert page.locator("#chips li").all_inner_texts() == ["mesh: 1x8x1", "mesh: 2x2x1", "Clear all"]
    page.click("[aria-label='Remove the filter mesh: 1x8x1']")
    assert int(shown(page).split()[0].replace(",", "")) == both - alone
    assert not page.is_visible("[id='by-mesh'] .values"), "a click elsewhere closes it"
    pick(page, "mesh", "1x8x1")
    page.click("[id='by-mesh'] summary")
    page.click("[id='by-mesh'] button:text-is('any')")
    assert shown(page) == "10,000 of 10,000 results"
    assert "#" not in page.url


def test_a_filter_obeys_the_keyboard(visit: Visit, large: Path) -> None:
    page = visit(large)
    page.focus("[id='by-system'] summary")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    page.keyboard.press("End")
    page.keyboard.press("Space")
    assert page.evaluate("document.activeElement.type") == "checkbox"
    assert page.locator("#chips li").count() == 3
    assert page.inner_text("[id='by-system'] summary") == "2 of 3"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    assert not page.is_visible("[id='by-system'] .values")
    page.focus("#matrix button[tabindex='0']")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+Enter")
    assert page.locator("#matrix button[aria-pressed=true]").count() == 2


def test_words_filter_after_a_pause(visit: Visit, large: Path) -> None:
    page = visit(large)
    page.locator("#q").press_sequentially("crash mesh=1x8x1", delay=5)
    page.wait_for_selector("#chips >> text=words: crash mesh=1x8x1")
    found = int(shown(page).split()[0])
    assert 0 < found < 200
    assert set(page.locator("#body .c-verdict").all_inner_texts()) <= {"new crash", "known crash"}
    page.fill("#q", "no such word")
    page.wait_for_selector("#shown >> text=0 of 10,000 results")


def test_columns_sort_both_ways_and_back(visit: Visit, index: Path) -> None:
    page = visit(index)
    head = page.locator("#heads .c-seconds")
    unsorted = page.locator("#body .c-seconds").all_inner_texts()
    page.click("#heads .c-seconds button")
    assert head.get_attribute("aria-sort") == "ascending"
    seconds = [float(text) for text in page.locator("#body .c-seconds").all_inner_texts()]
    assert seconds == sorted(seconds)
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    seconds = [float(text) for text in page.locator("#body .c-seconds").all_inner_texts()]
    assert seconds == sorted(seconds, reverse=True)
    page.keyboard.press("Enter")
    assert page.locator("#body .c-seconds").all_inner_texts() == unsorted


def test_the_matrix_shows_counts_and_filters(visit: Visit, large: Path) -> None:
    page = visit(large)
    cell = page.locator("#matrix button[data-x='1x8x1'][data-y='bf16']")
    told = cell.get_attribute("aria-label")
    assert told.startswith("dtype bf16, mesh 1x8x1: ")
    cell.hover()
    assert page.inner_text("#cell-told") == told
    total = int(cell.inner_text().rpartition("/")[2])
    cell.click()
    assert shown(page) == f"{total} of 10,000 results"
    assert "mesh=1x8x1" in page.url
    assert cell.get_attribute("aria-pressed") == "true"
    cell.click()
    assert shown(page) == "10,000 of 10,000 results"


def test_the_matrix_obeys_the_keyboard(visit: Visit, large: Path) -> None:
    page = visit(large)
    page.locator("#matrix button[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    at = page.evaluate("({...document.activeElement.dataset})")
    assert page.inner_text("#cell-told") == page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("Enter")
    assert page.locator("#chips li").count() == 3
    assert page.evaluate("({...document.activeElement.dataset})") == at, "the focus stays where it was"
    page.keyboard.press("Enter")
    assert shown(page) == "10,000 of 10,000 results"


@pytest.mark.parametrize("colour", ["standing", "verdict", "share"])
def test_the_matrix_takes_any_two_columns(visit: Visit, index: Path, colour: str) -> None:
    page = visit(index, f"x=verdict&y=standing&colour={colour}")
    assert page.inner_text("#matrix-title") == "Failures by standing and verdict"
    assert page.locator("#matrix button").count() == 6
    assert complaints(page) == []


def test_only_rows_that_can_be_seen_are_in_the_document(visit: Visit, large: Path) -> None:
    page = visit(large)
    assert page.locator("#body tr[data-at]").count() < 80
    page.evaluate("document.getElementById('rows').scrollTop = 1e6")
    page.wait_for_selector("#body tr[data-at='9999']")
    assert page.locator("#body tr[data-at]").count() < 80
    assert page.get_attribute("#rows table", "aria-rowcount") == "10001"


def test_rows_obey_the_keyboard(visit: Visit, index: Path) -> None:
    page = visit(index, "standing=new")
    page.focus("#rows")
    page.keyboard.press("End")
    assert page.locator("#body tr.chosen").get_attribute("data-at") == "2"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    assert page.locator("#body tr.chosen").get_attribute("data-at") == "0"
    assert samples.mismatch().id in page.inner_text("#detail")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/failures/{samples.mismatch().id}.html")


def test_a_link_to_a_cause_holds_and_unfolds_what_is_known(visit: Visit, index: Path) -> None:
    (cause,) = [cluster.id for cluster in samples.report().clusters() if cluster.known_issue]
    page = visit(index, f"cause-{cause}")
    assert page.is_visible("text=Loading after unfreezing hangs. state_dict.py")
    page.click(".known-causes .num a")
    assert page.url.endswith("#issue=torch-fsdp2-1")
    wait_for_shown(page, "1 of 10 results")
    assert shown(visit(index, f"cause={cause}")) == "1 of 10 results"


def test_a_failure_without_a_page_is_no_link(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_page, "PAGES", 50)
    many = samples.report(*(samples.mismatch(seed=str(n)) for n in range(60)))
    page = visit(write_html(many, tmp_path))
    page.evaluate("document.getElementById('rows').scrollTop = 1e6")
    page.wait_for_selector("#body tr[data-at='59']")
    assert page.locator("#body tr:not(.space) .c-id:not(:has(a))").count() > 0
    page.locator("#body tr:not(.space):has(.c-id:not(:has(a))) .c-scenario").first.click()
    assert "shardproof explain" in page.inner_text("#detail code")


def test_the_row_of_a_single_result_says_what_ran(visit: Visit, tmp_path: Path) -> None:
    """Then no axis varies, and a row of the axes that vary would say nothing."""
    result = samples.mismatch()
    page = visit(write_html(samples.report(result), tmp_path))
    assert page.inner_text("#body .c-scenario") == str(result.scenario).removeprefix("system=torch-fsdp2 ")
    assert page.inner_text("#explore h2") == "The one result"


@pytest.mark.parametrize("fragment", ["", "standing=new", "q=crash"])
def test_nothing_sticks_out_of_a_phone(visit: Visit, index: Path, large: Path, fragment: str) -> None:
    """Wide tables scroll inside their own box, the page itself never sideways."""
    for path in (index, large):
        page = visit(path, fragment, **PHONE)
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert sideways(page) <= 0


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_nothing_keeps_anyone_out(visit: Visit, index: Path, large: Path, scheme: str) -> None:
    for path in (index, large):
        page = visit(path, color_scheme=scheme)
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        page.locator("#body tr[data-at] .c-scenario").first.click()
        assert complaints(page) == []


def test_it_paints_in_light_and_in_dark(visit: Visit, index: Path) -> None:
    light, dark = (visit(index, color_scheme=scheme).screenshot() for scheme in ("light", "dark"))
    assert light != dark


def test_causes_can_be_read_without_script(visit: Visit, index: Path) -> None:
    page = visit(index, java_script_enabled=False)
    assert page.is_visible("#new article")
    assert page.is_visible("#explore noscript p")
    assert not page.is_visible("#explorer")


def test_the_history_of_a_folder_is_for_everybody(visit: Visit, tmp_path: Path) -> None:
    nights = [Night(f"run-{n}", f"2026-01-{n + 1:02}", n % 3, 2, 9) for n in range(30)]
    traces = [Trace("x" * 300, "", "flaky", (*(n % 2 for n in range(29)), None)), Trace("s", "y-1", "fixed", (1,) * 30)]
    report = replace(samples.report(), history=History(tuple(nights), tuple(traces)))
    page = visit(write_html(report, tmp_path), color_scheme="dark", **PHONE)
    assert sideways(page) <= 0
    assert complaints(page) == []
    assert page.locator("#history tbody tr").count() == 2
