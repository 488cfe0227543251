"""Sweeps that join into one table: what came and went, whether `issues.toml` says the same, and the page of it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import report_samples as samples
from shardproof.investigate.sweep_folder import DATABASE, Keeper, joined
from shardproof.issues.findings import Finding
from shardproof.issues.known_issues import KnownIssue, Pattern, bound_of
from shardproof.issues.upstream_evidence import Novelty
from shardproof.report.defect_lifetimes import Entry, contradictions, describe_lifetime, others
from shardproof.report.releases_page import render_releases, tables, write_releases
from shardproof.result import Failure, Result
from shardproof.scenario import Scenario
from shardproof.store import Store
from shardproof.verdict import Verdict

RELEASES = ("1.0", "1.1", "1.2", "2.0")


def row(states: str, versions: Sequence[str] = RELEASES) -> dict[str, Result]:
    """Results by letters: P pass, F the failure that the entry describes, G another, S unsupported, `-` not tried."""
    base = Result(samples.scenario(), "a", "", Verdict.PASS)
    shown = {
        "P": base,
        "F": replace(base, verdict=Verdict.CRASH, error=Failure("E", "boom", op=0)),
        "G": replace(base, verdict=Verdict.CRASH, error=Failure("E", "other", op=0)),
        "S": replace(base, verdict=Verdict.UNSUPPORTED, reason="not in this release"),
    }
    return {version: shown[state] for version, state in zip(versions, states, strict=True) if state != "-"}


def entry(since: str, fixed: str = "", releases: dict[str, str] | None = None, *, behind: bool = False) -> Entry:
    finding = Finding(
        "a-1", "a", "It goes boom.", "a.py:1", since, ("crash",), ("1",), Novelty("boom", "default", "a step"), fixed,
        "", "", "",
        ("a-0",) if behind else (), "", MappingProxyType(releases or {}),
    )  # fmt: skip
    issue = KnownIssue("a-1", "It goes boom.", "a", "a.py:1", since, "", "regressions/1.toml",
                       Pattern(("build",), ("E: boom*",), {"version": ("never",)}))  # fmt: skip
    return Entry(finding, None if behind else issue)


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ("PPFF", "came with 1.2"), ("FFPP", "went with 1.2"), ("PFFP", "came with 1.1, went with 2.0"),
        ("P-FF", "came after 1.0, with 1.2 at the latest"), ("FSSP", "went after 1.0, with 2.0 at the latest"),
        ("FFGF", "fails on all 4 releases that say anything"), ("-P--", "passes on 1.1"),
        ("SS--", "no release says anything"),
    ],
)  # fmt: skip
def test_when_it_came_and_went(states: str, said: str) -> None:
    assert describe_lifetime(row(states), RELEASES) == said


@pytest.mark.parametrize(
    ("text", "version", "exact"),
    [
        ("0.15.0", "0.15.0", True), ("0.13.0 or earlier", "0.13.0", False),
        ("0.16.1, older not tried", "0.16.1", False), ("0.5.0, by pull request 2419", "0.5.0", True),
        ("2.14.1 (2.14.0 was not run)", "2.14.1", False),
        ("some_v0.18.2", "0.18.2", True), ("0.19.2, by pull request 8056 (0.19.4 was run)", "0.19.4", False),
        ("0.15.2, by its source; 0.19.0 was run", "0.19.0", False),
    ],
)  # fmt: skip
def test_texts_that_name_a_release(text: str, version: str, exact: bool) -> None:
    found = bound_of(text)
    assert found is not None
    assert (str(found.version), found.exact, found.comparable) == (version, exact, True)


@pytest.mark.parametrize("text", ["", "0.16.1, with 4423 repaired", "Other 2.10.0 or earlier", "2.1.0; not in 2.2.0"])
def test_texts_that_say_more_are_not_compared(text: str) -> None:
    found = bound_of(text)
    assert found is None or not found.comparable


@pytest.mark.parametrize(
    ("states", "known", "said"),
    [
        ("PFFP", entry("1.1", "2.0"), []),
        ("FFFP", entry("1.1", "2.0"), ["fails on 1.0, but issues.toml says since 1.1"]),
        ("FFFP", entry("1.1 or earlier", "2.0"), []),
        ("PFFF", entry("1.1", "2.0"), ["fails on 2.0, but issues.toml says fixed in 2.0"]),
        ("PPPF", entry("1.1"), ["passes on 1.1, 1.2, but issues.toml says since 1.1, not fixed"]),
        ("PPFF", entry("1.1"), ["passes on 1.1, but issues.toml says since 1.1, not fixed"]),
        ("PFPP", entry("1.1", "2.0"), ["passes on 1.2, but issues.toml says since 1.1, fixed in 2.0"]),
        ("PFPP", entry("1.1", "2.0 (1.2 was not run)"), []),
        ("PFPP", entry("1.1", "1.2, by pull request 7 (2.0 was run)"), []),
        ("PFPF", entry("1.1", "1.2, by pull request 7 (2.0 was run)"),
         ["fails on 2.0, but issues.toml says fixed in 1.2, by pull request 7 (2.0 was run)"]),
        ("FPPP", entry("1.0, with something else"), []),
        ("PPPP", entry("1.1", "core, some day"), []),
        ("GFFP", entry("1.1", "2.0"), []),
        ("SFSP", entry("1.1", "2.0", {"1.0": "crash", "1.1": "mismatch (a and b)", "2.0": "pass"}),
         ["crash on 1.1, but issues.toml lists mismatch there"]),
        ("FPFP", entry("1.1", behind=True), []),
    ],
)  # fmt: skip
def test_what_contradicts_the_entry(states: str, known: Entry, said: list[str]) -> None:
    assert list(contradictions(row(states), known)) == said


def test_only_plain_releases_are_compared() -> None:
    versions = ("1.1+cured", "path:/x", "git:abc", "1.1+cured:2")
    assert contradictions(row("PPPP", versions), entry("1.0")) == ()
    assert describe_lifetime(row("PFPF", versions), RELEASES) == "no release says anything"


def test_another_failure_is_told_and_contradicts_nothing() -> None:
    assert others(row("GFPG"), entry("1.1", "1.2")) == ("1.0", "2.0")


# --- the folder, and its page ---------------------------------------------------------------------------------


SCENARIO = replace(samples.mismatch().scenario, version="")


def keep(folder: Path, name: str, scenario: Scenario, results: dict[str, Result]) -> frozenset[str]:
    """Store what a command found, and write the page."""
    with Keeper(folder, {scenario: name}, list(results)) as keeper:
        for version, result in results.items():
            keeper(replace(result, scenario=replace(scenario, version=version), version=version))
        write_releases(keeper.store, folder, samples.ISSUES, keeper.fresh)
        return keeper.fresh


def test_regressions_are_in_the_order_of_a_person(tmp_path: Path) -> None:
    for n in (10, 9):
        keep(tmp_path, f"bug-{n}.toml", replace(SCENARIO, seed=n), {"2.11.0": samples.passing()})
    with Store(tmp_path / DATABASE) as store:
        (table,) = tables(joined(store))
    assert [line.name for line in table.lines] == ["bug-9.toml", "bug-10.toml"]


def test_sweeps_of_one_folder_join(tmp_path: Path) -> None:
    passed, failed = samples.passing(), samples.mismatch()
    keep(tmp_path, "bug.toml", SCENARIO, {"2.10.0": passed, "2.11.0": failed})
    other = replace(SCENARIO, seed=5)
    keep(tmp_path, "second.toml", other, {"2.11.0": samples.crash()})
    keep(tmp_path, "../bug.toml", SCENARIO, {"2.11.0": passed, "2.12.0": samples.unsupported()})
    with Store(tmp_path / DATABASE) as store:
        rows = joined(store)
        ended = [run.ended_at is not None for run in store.runs()]
    assert ended == [True] * 3
    (table,) = tables(rows)
    assert table.columns == ("2.10.0", "2.11.0", "2.12.0")
    shown = {line.name: [cell.result.verdict.value if cell else "" for cell in line.cells] for line in table.lines}
    assert shown == {"../bug.toml": ["pass", "pass", "unsupported"], "second.toml": ["", "crash", ""]}
    assert [line.agreement for line in table.lines] == ["no entry", "no entry"]
    assert len(list((tmp_path / "failures").iterdir())) == 2
    page = (tmp_path / "releases.html").read_text("utf-8")
    assert f'href="failures/{replace(other, version="2.11.0").id}.html"' in page
    assert samples.HOSTILE not in page


def test_a_page_of_a_failure_leads_back_and_is_kept(tmp_path: Path) -> None:
    (name,) = keep(tmp_path, "bug.toml", SCENARIO, {"2.11.0": samples.mismatch()})
    page = tmp_path / "failures" / f"{name}.html"
    assert 'href="../releases.html">← all releases<' in page.read_text("utf-8")
    page.write_text("")
    keep(tmp_path, "another.toml", replace(SCENARIO, seed=5), {"2.11.0": samples.passing()})
    assert page.read_text("utf-8") == "", "a failure of another sweep is not written again"
    keep(tmp_path, "bug.toml", SCENARIO, {"2.11.0": samples.mismatch()})
    assert page.read_text("utf-8")


def test_columns_are_releases_by_age_then_trees(tmp_path: Path) -> None:
    asked = ["git:0123456789abcdef0123", "2.9.0", "path:/a/tree", "2.10.0", "2.10.0+cured"]
    keep(tmp_path, "bug.toml", SCENARIO, {version: samples.passing() for version in asked})
    with Store(tmp_path / DATABASE) as store:
        found = tables(joined(store))
    assert found[0].columns == ("2.9.0", "2.10.0", "2.10.0+cured", "git:0123456789abcdef0123", "path:/a/tree")
    page = render_releases(found)
    assert ">git:0123456789ab<" in page
    assert ">path:…/tree<" in page


def test_a_system_has_a_table_of_its_own(tmp_path: Path) -> None:
    keep(tmp_path, "bug.toml", SCENARIO, {"2.11.0": samples.passing()})
    other = Scenario().with_axes({"system": "megatron-core", "program": "train"})
    keep(tmp_path, "bug.toml", other, {"0.16.1": samples.passing(system="megatron-core")})
    with Store(tmp_path / DATABASE) as store:
        assert [(table.system, table.columns) for table in tables(joined(store))] == [
            ("megatron-core", ("0.16.1",)), ("torch-fsdp2", ("2.11.0",)),
        ]  # fmt: skip


def test_a_regression_is_held_against_its_entry(tmp_path: Path) -> None:
    """Of a shipped entry: since 2.10.0 or earlier, fixed in no release."""
    from shardproof.space.files import load_space

    (regression,) = load_space("regressions/torch-fsdp2-164929").scenarios
    scenario = replace(regression, version="")
    with Keeper(tmp_path, {scenario: "x.toml"}, ["2.14.0"]) as keeper:
        keeper(replace(samples.passing(), scenario=replace(scenario, version="2.14.0"), version="2.14.0"))
        page, against = write_releases(keeper.store, tmp_path, samples.ISSUES, keeper.fresh)
    (said,) = against
    assert said.startswith("regressions/torch-fsdp2-164929: passes on 2.14.0, but issues.toml says since 2.1")
    text = page.read_text("utf-8")
    assert "1 regression on 1 release; 1 contradicts issues.toml" in text
    assert ">contradicts<" in text
