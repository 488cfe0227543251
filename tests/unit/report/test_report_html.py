"""The HTML page: self-contained, escaped, complete, small."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import compare_samples
import pytest
import report_samples as samples
from shardproof.compare.page import page_of
from shardproof.issues.known_issues import KnownIssues, known_issues_of
from shardproof.protocol.registry import system_named
from shardproof.report import index_page
from shardproof.report.html import render_failure, render_index, write_html
from shardproof.report.index_page import PAGES_A_CAUSE
from shardproof.report.text import render_text
from shardproof.result import Result
from shardproof.verdict import Verdict

VOID = {"meta", "link", "input", "br"}


class Page(HTMLParser):
    """Collects tags and attributes and checks that elements nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag, f"</{tag}> does not close the innermost element"


PAGES = {
    "index": lambda: render_index(samples.report()),
    "mismatch": lambda: render_failure(samples.report(), samples.mismatch()),
    "pictured": lambda: render_failure(samples.report(), samples.pictured(f"up.{samples.HOSTILE}")),
    "crash": lambda: render_failure(samples.report(), samples.crash()),
    "hang": lambda: render_failure(samples.report(), samples.hang()),
    "unknown": lambda: render_failure(samples.report(), samples.unknown()),
    "diff": lambda: page_of(compare_samples.comparison()),
}


@pytest.fixture(params=PAGES)
def text(request: pytest.FixtureRequest) -> str:
    return PAGES[request.param]()


def test_elements_nest_and_ids_are_unique(text: str) -> None:
    ids = [attrs["id"] for _, attrs in Page(text).tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_hostile_text_is_escaped_everywhere(text: str) -> None:
    assert samples.HOSTILE not in text
    scripts = [attrs.get("type") for tag, attrs in Page(text).tags if tag == "script"]
    assert scripts in ([None], ["application/json", None])


def test_nothing_is_loaded_from_anywhere(text: str) -> None:
    for tag, attrs in Page(text).tags:
        assert "src" not in attrs
        assert tag not in ("link", "iframe", "object", "embed", "img")
        assert not any(name.startswith("on") or name == "style" for name in attrs)
    assert "@import" not in text
    assert "url(" not in text


def test_the_policy_admits_exactly_the_inline_style_and_script(text: str) -> None:
    policy = next(a["content"] for t, a in Page(text).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_links_inside_the_index_lead_somewhere() -> None:
    page = Page(render_index(samples.report()))
    ids = {attrs.get("id") for _, attrs in page.tags}
    for tag, attrs in page.tags:
        place = (attrs["href"] or "") if tag == "a" else ""
        if place.startswith("#") and "=" not in place:
            assert place[1:] in ids


def test_links_to_pages_lead_to_files(tmp_path: Path) -> None:
    index = write_html(samples.report(), tmp_path)
    linked = [a["href"] or "" for t, a in Page(index.read_text()).tags if t == "a"]
    pages = [link for link in linked if link.startswith("failures/")]
    assert pages
    assert all((tmp_path / page).is_file() for page in pages)


def test_the_index_says_everything_a_reader_needs() -> None:
    text = render_index(samples.report())
    for needed in (
        "<b>torch-fsdp2</b> 2.13.0</span>", "1/3: of three scenarios one fails",
        "Not all could be judged, since the harness failed", "3 pass, 3 new, 1 known",
        "shardproof replay " + samples.mismatch().id,
        samples.mismatch().signature, "MLM-1842", "Megatron-LM #1842",
        "Loading after unfreezing hangs.", "https://github.com/pytorch/pytorch/issues/1",
        "FSDP2 offloads all of a unit or nothing", "world above 8", "Planned, without a verdict: 1",
        "emulated: CUDA streams", "emulated only: not seen on a GPU yet",
        "shardproof run nightly", "<dt>torch</dt><dd>2.13.0</dd>", "exp_avg: zeros",
    ):  # fmt: skip
        assert needed in text, needed


def test_a_failure_page_has_its_evidence() -> None:
    text = render_failure(samples.report(), samples.mismatch())
    for needed in (
        "uninterrupted", "cold", "resumed", "8 load ✗", "written", "ranks 0, 1", "dtype bf16 instead",
        "wrong_dtype", "Megatron-LM #1842", "512-1023", "0x3f000001", "a" * 16,
    ):  # fmt: skip
        assert needed in text, needed
    crash = render_failure(samples.report(), samples.crash())
    for needed in ("on rank 5", "in operation 3", "state_dict.py", "second line"):
        assert needed in crash, needed


@pytest.mark.parametrize(
    ("results", "banner", "look"),
    [
        ([samples.passing()], "The one scenario that ran passes", "pass"),
        ([samples.passing(), samples.passing(1)], "All 2 scenarios that ran pass", "pass"),
        ([samples.passing(), samples.hang()], "Nothing new: 1 of 2 scenarios fail, with known defects", "known"),
        ([samples.passing(), samples.crash()], "1 new failure with 1 cause", "new"),
        ([samples.unsupported()], "Nothing was run", "unknown"),
        ([samples.unknown(), samples.crash()], "Not all could be judged, since the harness failed", "unknown"),
    ],
)
def test_the_headline_is_honest(results: list, banner: str, look: str) -> None:  # type: ignore[type-arg]
    text = render_index(replace(samples.report(*results), missing=()))
    assert f'<h1 class="is-{look}">{banner}</h1>' in text


def test_a_run_of_a_cured_library_says_which_one_was_cured_and_leads_to_the_list() -> None:
    cured = replace(samples.passing(), version="0.16.1+cured", cured=("2777", "5077"))
    text = render_index(replace(samples.report(cured), missing=()))
    link = f'<a href="#cured">2 known defects of {cured.system} 0.16.1 cured</a>'
    assert f"The one scenario that ran passes, with {link}</h1>" in text
    assert 'id="cured"' in text
    known = replace(samples.report(cured, samples.hang()), missing=())
    assert f"1 of 2 scenarios fail, with known defects; {link}</h1>" in render_index(known)
    assert f"1 pass, 1 known; 2 known defects of {cured.system} 0.16.1 cured" in render_text(known)
    assert "cured" not in render_index(replace(samples.report(samples.passing()), missing=())).split("</header>")[0]


def test_an_exit_of_0_in_spite_of_failures_says_why() -> None:
    known = replace(samples.report(samples.passing(), samples.hang()), missing=())
    assert "Exit status 0 in spite of 1 failure: it is a defect that is known, and nothing new failed." in render_index(
        known
    )
    assert "in spite" not in render_index(replace(samples.report(samples.crash(), samples.hang()), missing=()))
    assert "in spite" not in render_index(samples.report(samples.passing(), samples.hang()))  # one did not finish


def test_a_run_that_lost_scenarios_is_not_shown_as_a_success() -> None:
    assert "1 planned scenario without a verdict" in render_index(samples.report(samples.passing()))


def test_an_empty_run_renders() -> None:
    assert "Nothing was run" in render_index(replace(samples.report(), results=(), missing=()))


def test_ten_thousand_results_with_five_hundred_failures_stay_below_a_megabyte() -> None:
    page = render_index(samples.many())
    assert len(page.encode()) < 1_000_000
    assert page.count("<tr") < 100, "results are columns, not rows"


def test_a_cause_has_so_many_pages_and_says_how_to_get_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_page, "PAGES", PAGES_A_CAUSE)
    index = write_html(samples.report(*(samples.mismatch(seed=str(n)) for n in range(PAGES_A_CAUSE + 7))), tmp_path)
    assert len(list((tmp_path / "failures").iterdir())) == PAGES_A_CAUSE
    assert "7 more have no page: <code>shardproof explain ID --page</code>" in index.read_text()


def test_a_program_that_does_not_expand_still_has_a_page() -> None:
    broken = replace(samples.crash(), scenario=samples.scenario(program="load"), verdict=Verdict.CRASH)
    assert "shardproof replay" in render_failure(samples.report(), broken)


def test_a_failure_page_speaks_to_the_maintainers() -> None:
    golden = Path(__file__).parents[2] / "golden" / "exports" / "torch-fsdp2-164929.json"
    result = Result.from_json(json.loads(golden.read_text("utf-8")))
    report = replace(samples.report(), issues=KnownIssues(known_issues_of(system_named("torch-fsdp2"))))
    page = html.unescape(render_failure(report, result))
    for told in (
        "fully_shard(model, mesh=mesh)",
        "dcp.save(state_dicts(model, optimizer), checkpoint_id=CHECKPOINT)",
        "state_dict.py:629 (2.13.0), _init_optim_state",
        'href="https://github.com/pytorch/pytorch/issues/164929"',
        "The first real update uses the bias correction of the second one",
        "Saving created moments of 7 parameters that must not exist",
        "shardproof export 077f9c987f63",
        "+    for param in optim.state.keys() - known:",
    ):
        assert told in page, told


def test_a_failure_page_says_why_there_are_no_calls() -> None:
    page = render_failure(samples.report(), replace(samples.crash(), system="reference"))
    assert "Without the library's calls: reference has no scripts yet" in html.unescape(page)
