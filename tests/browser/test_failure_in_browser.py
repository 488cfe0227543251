"""The page of a failure in a real browser: pictures of elements, their bits, the keyboard, a phone.

*Verifies*: what only a script can show, for tensors of every dtype with the values that are easily lost, and that
nothing is kept from those who use a keyboard, a screen reader, a phone or no script at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
from browser_parts import complaints, sideways
from shardproof.report.html import render_failure
from shardproof.result import FailedOp, Failure, Result

pytestmark = pytest.mark.browser

Visit = Callable[..., Any]

LONG = "/very/" + "long" * 40 + "/path/" + "x" * 120 + ".pt"

COLOURS = """(canvas) => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
  for (let at = 0; at < pixels.length; at += 4) seen.add(`${pixels[at]} ${pixels[at + 1]} ${pixels[at + 2]}`);
  return seen.size;
}"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Result], Path]:
    def write(result: Result) -> Path:
        (tmp_path / "page.html").write_text(render_failure(samples.report(), result), "utf-8")
        return tmp_path / "page.html"

    return write


Written = Callable[[Result], Path]


def tensor(page: Any, role: str, operation: int = 0) -> Any:
    """A tensor's element on the page, opened with everything around it."""
    page.evaluate("document.querySelectorAll('.operation, .role, .tensor').forEach((one) => { one.open = true; })")
    page.wait_for_function("document.querySelectorAll('canvas').length >= 6")
    return page.locator(".operation").nth(operation).locator(".role", has=page.locator(f"summary b:text-is('{role}')"))


def test_the_first_diverging_tensor_is_open_and_drawn(visit: Visit, written: Written) -> None:
    page = visit(written(samples.pictured()))
    page.wait_for_selector("canvas")
    assert page.locator(".operation[open]").count() == 1
    assert page.locator(".role[open]").count() == 1
    assert page.locator(".tensor[open]").count() == 1
    assert page.locator("canvas").count() == 1
    assert page.evaluate(COLOURS, page.query_selector("canvas")) > 3
    assert "first to diverge" in page.inner_text(".operation[open] summary")


def test_every_view_is_another_picture(visit: Visit, written: Written) -> None:
    page = visit(written(samples.pictured()))
    of = tensor(page, "param")
    pictures = []
    for view in ("difference", "expected", "observed", "slider"):
        of.locator(f"label:text-is('{view}')").click()
        pictures.append(of.locator("canvas").evaluate("(canvas) => canvas.toDataURL()"))
    assert len(set(pictures)) == 4
    of.locator("input[type=range]").fill("100")
    assert of.locator("canvas").evaluate("(canvas) => canvas.toDataURL()") not in pictures[2:]
    assert of.locator(".legend").inner_text().split("\n")[:2] == ["rank 0", "rank 1"]


def test_the_keyboard_goes_through_the_elements(visit: Visit, written: Written) -> None:
    page = visit(written(samples.pictured()))
    of = tensor(page, "param")
    told = of.locator(".apart")
    assert told.inner_text().startswith("Element [0, 1]; 2130706432 ULP apart; 1 bit differs; held in memory by rank 0")
    of.locator(".grid").focus()
    for key, expected in (
        ("ArrowRight", "Element [0, 2]; equal"), ("ArrowDown", "Element [1, 2]; equal"),
        ("ArrowLeft", "Element [1, 1]; "), ("ArrowUp", "Element [0, 1]; "), ("n", "Element [1, 1]; 2 ULP"),
        ("n", "Element [3, 5]; "), ("n", "Element [3, 5]; "), ("p", "Element [1, 1]; "),
        ("Home", "Element [0, 0]; equal"), ("End", "Element [3, 5]; "),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert told.inner_text().startswith(expected), key


def test_a_click_chooses_an_element(visit: Visit, written: Written) -> None:
    page = visit(written(samples.pictured()))
    of = tensor(page, "param")
    of.locator("canvas").click(position={"x": 3 * 26 + 8, "y": 2 * 26 + 8})
    assert of.locator(".apart").inner_text().startswith("Element [2, 3]; equal; held in memory by rank 1")
    row = " ".join(of.locator(".bits tr").first.inner_text().split())
    assert row == "expected 01000001011100000000000000000000 15 0x41700000"


@pytest.mark.parametrize(
    ("role", "key", "row"),
    [
        ("param", "End", "observed 01111111100000000000000000000000 Infinity 0x7f800000 infinity"),
        ("exp_avg", "End", "observed 1000000000000000 -0 0x8000 negative zero"),
        ("exp_avg_sq", "n", "observed 0111111000000000 NaN 0x7e00 quiet NaN, payload 0x0"),
        ("quant", "End", "observed 01111110 448 0x7e"),
        ("counts", "n", "observed " + "11" + "0" * 62 + " -4611686018427387904 0xc000000000000000"),
        ("host", "Home", "observed 00000001 true 0x01"),
    ],
)
def test_bits_of_every_dtype(visit: Visit, written: Written, role: str, key: str, row: str) -> None:
    page = visit(written(samples.pictured()))
    of = tensor(page, role)
    of.locator(".grid").focus()
    page.keyboard.press(key)
    assert " ".join(of.locator(".bits tr.observed").inner_text().split()) == row


def test_what_only_one_side_has_is_shown(visit: Visit, written: Written) -> None:
    page = visit(written(samples.pictured()))
    step, master = tensor(page, "step", 1), tensor(page, "master", 1)
    assert step.locator("canvas").count() == 0
    assert "nothing" in step.locator(".bits tr.observed").inner_text()
    assert "nothing" in master.locator(".bits tr.expected").inner_text()
    assert master.locator("label").all_inner_texts() == ["difference", "observed"]
    assert "quiet NaN" in master.locator(".bits tr.observed").inner_text()


def test_what_follows_gets_its_histogram_when_it_is_opened(visit: Visit, written: Written) -> None:
    later = samples.pictured()
    first = replace(later.differences[0], key=later.differences[0].key._replace(op=7, fqn="before"))
    page = visit(written(replace(later, differences=(first, *later.differences))))
    of = tensor(page, "exp_avg", 1)
    assert of.locator(".ulps th").all_inner_texts() != []


def test_a_page_without_script_says_the_same(visit: Visit, written: Written) -> None:
    page = visit(written(samples.pictured()), java_script_enabled=False)
    assert page.locator(".tensor[open]").count() == 1
    assert "Element [3]; 208 ULP apart" in page.inner_text(".tensor[open]")
    assert "rank 0: [0:20]; rank 1: [20:40]" in page.inner_text(".tensor[open]")
    assert not page.is_visible(".script-only")


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_nobody_is_kept_out(visit: Visit, written: Written, scheme: str) -> None:
    page = visit(written(samples.pictured()), color_scheme=scheme)
    tensor(page, "param")
    assert complaints(page) == []
    page = visit(written(samples.crash()), color_scheme=scheme)
    assert complaints(page) == []


def test_dark_is_another_picture(visit: Visit, written: Written) -> None:
    path = written(samples.pictured())
    pictures = []
    for scheme in ("light", "dark"):
        page = visit(path, color_scheme=scheme)
        page.wait_for_selector("canvas")
        pictures.append(page.locator("canvas").first.evaluate("(canvas) => canvas.toDataURL()"))
    assert pictures[0] != pictures[1]


@pytest.mark.parametrize("width", [320, *(pytest.param(wide, marks=pytest.mark.nightly) for wide in (390, 1280))])
def test_nothing_sticks_out_of_the_window(visit: Visit, written: Written, width: int) -> None:
    """A crash with an unbroken path in its message was 647 pixels wide on a phone of 390."""
    error = Failure("builtins.FileNotFoundError", f"no such file: {LONG}", 0, f'  File "{LONG}", line 1, in f', 8)
    crash = replace(samples.crash(), error=error, failed_op=FailedOp(8, "load"))
    for result in (crash, samples.pictured("up." + "x" * 150), samples.mismatch()):
        page = visit(written(result), viewport={"width": width, "height": 900})
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        page.wait_for_timeout(100)
        assert sideways(page) <= 0, result.verdict


def test_hostile_names_stay_text(visit: Visit, written: Written) -> None:
    page = visit(written(samples.pictured(f"up.{samples.HOSTILE}<img src=x onerror=alert(2)>")))
    tensor(page, "param")
    assert page.locator("img").count() == 0
    assert samples.HOSTILE in page.inner_text(".tensor .name")


def test_a_command_is_copied(visit: Visit, written: Written) -> None:
    page = visit(written(samples.crash()), permissions=["clipboard-read", "clipboard-write"])
    page.click("button[data-copy=command-1]")
    page.wait_for_function("document.querySelector('button[data-copy=command-1]').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == samples.crash().replay


def test_a_link_to_folded_text_opens_it(visit: Visit, written: Written) -> None:
    page = visit(written(samples.crash()))
    page.click("a[href='#issue']")
    page.wait_for_selector("#issue[open]")  # the browser tells of the new target a moment after the click
    assert "## Observed behavior" in page.inner_text("#issue-text")
