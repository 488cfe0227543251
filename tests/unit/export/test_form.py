"""The form of an issue: upstream's headings, titles that are whole, places of promises, and what is said of software.

*Verifies*: every system's `issue_form.toml` and every entry's title; the text of one form. *Does not verify*: that
upstream's template is still the same.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from importlib.resources.abc import Traversable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from shardproof.errors import UsageError
from shardproof.export.case import FailureCase
from shardproof.export.description import FailureDescription, describe_known_issues, describe_unknown
from shardproof.export.form import OPTIONAL, PARTS, PLAIN, Form, FormSection, form_of
from shardproof.export.issue import (
    _cure,
    _emulated,
    _gone,
    _of_ranks,
    _on_main,
    _place,
    _promise,
    _public,
    _regression,
    _since,
)
from shardproof.export.newest import not_asked, on_newest, was_run_on_main
from shardproof.export.script import Draft
from shardproof.export.software import Software, software_of
from shardproof.issues.findings import TITLE_CHARACTERS, Finding, section_of
from shardproof.issues.known_issues import known_issues_of
from shardproof.issues.on_main import OnMain
from shardproof.issues.upstream_evidence import sentences_about, thread_of
from shardproof.protocol.registry import system_named
from shardproof.protocol.system import System
from shardproof.result import FailedOp, Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict

from tests.conformance.built_in import BUILT_IN

FINDINGS = [(system, finding) for system in BUILT_IN for finding in section_of(system).findings]
OURS = [f for _, f in FINDINGS if not f.cause and f.novelty.on_a_release and not f.novelty.upstream]
FAILED = Result(Scenario(system="deepspeed"), "deepspeed", "0.19.0", Verdict.MISMATCH, failed_op=FailedOp(3, "step"))


def test_every_finding_has_a_whole_title_that_fits() -> None:
    for system, finding in FINDINGS:
        told, prefix = describe_known_issues(system, finding.id), form_of(system).prefix
        assert told is not None
        title = told.heading(prefix)
        assert len(title) <= TITLE_CHARACTERS, (finding.id, title)
        whole = {text.rstrip(".") for text in (finding.title, told.title, finding.novelty.harm)}
        assert title.removeprefix(prefix) in whole, (finding.id, title)


def test_the_text_of_another_face_can_be_read_without_its_cause() -> None:
    told = [describe_known_issues(system, finding.id) for system, finding in FINDINGS]
    assert not [one for one in told if one and one.heading().startswith("The same")]
    assert not [one for one in told if one and one.what.startswith("The same")]


@pytest.mark.parametrize(
    ("title", "heading"),
    [
        ("Loading changed moments", "Loading changed moments"),
        ("Loading changed the moments of 4 parameters" + ": a, b, c and more" * 4, None),
        ("x" * 200, "deepspeed 0.19.0: mismatch at the step"),
        ("Saving: Tensor(…), and what follows of it " + "x" * 90, "deepspeed 0.19.0: mismatch at the step"),
    ],
)
def test_a_failure_that_nothing_describes_has_a_whole_title(title: str, heading: str | None) -> None:
    found = describe_unknown(FAILED, title).heading("[BUG] ")
    assert len(found) <= TITLE_CHARACTERS
    assert "…" not in found
    assert title.startswith(found.removeprefix("[BUG] ")) if heading is None else found == f"[BUG] {heading}"


@pytest.mark.parametrize("system", BUILT_IN, ids=lambda system: system.name)
def test_the_form_of_a_system_holds_every_part_once(system: System) -> None:
    form = form_of(system)
    held = [part for section in form.sections for part in section.holds]
    assert sorted({*held, *OPTIONAL}) == sorted(PARTS)
    assert bool(form.template) == (form.sections is not PLAIN)
    assert not system.emulated or form.stand_in.endswith(".")


def test_a_section_of_several_parts_says_which_is_which() -> None:
    form = Form((FormSection("Versions", ("versions", "emulated")), FormSection("Docker", text="None."), PLAIN[0]))
    parts = {"versions": "* torch 2.13.0", "emulated": "Nothing."}
    assert form.fill(parts) == "## Versions\n\n* torch 2.13.0\n\n### Emulated\n\nNothing.\n\n## Docker\n\nNone."


@pytest.mark.parametrize(
    "text",
    [
        '[[section]]\nheading = "Bug"\nholds = "bug"\n',
        '[[section]]\nheading = "Bug"\nholds = ["bug", "nothing"]\n',
        "headings = []\n",
    ],
    ids=["a part is nowhere", "no such part", "no such key"],
)
def test_a_form_that_is_wrong_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "issue_form.toml").write_text(f"schema = 1\n{text}", "utf-8")
    system = cast(System, SimpleNamespace(name="own", folder=cast(Traversable, tmp_path)))
    with pytest.raises(UsageError, match=r"own/issue_form\.toml"):
        form_of(system)


def test_what_several_ranks_say_alike_stands_once() -> None:
    said = ["rank 3: no", "rank 0: no", "rank 1: yes", "a line", "a line"]
    assert _of_ranks("\n".join(said)) == "ranks 0, 3: no\nrank 1: yes\na line"


def test_a_place_of_a_promise_has_the_release_of_its_own_library() -> None:
    assert _place("lib/muon.py, Muon", "1.2", "2.13.0") == "The library documents it at `Muon` in `lib/muon.py` (1.2)."
    assert _place("torch/a.py, load", "1.2", "2.13.0") == "torch documents it at `load` in `torch/a.py` (2.13.0)."
    assert _place("", "1.2", "2.13.0") == ""


def test_git_can_read_the_diff_of_every_issue(tmp_path: Path) -> None:
    told = [describe_known_issues(system, finding.id) for system, finding in FINDINGS]
    patches = {one.cure: "\n\n".join(_cure(one, "It:", "a/b")) for one in told if one and one.patch and not one.instead}
    assert len(patches) > 100
    for cure, text in patches.items():
        (tmp_path / cure).write_text(text.partition("```diff\n")[2].partition("\n```")[0] + "\n", "utf-8")
    git = subprocess.run(["git", "apply", "--numstat", *patches], cwd=tmp_path, capture_output=True, text=True)
    assert git.returncode == 0, git.stderr
    assert all("git apply --directory=a/b" in text for text in patches.values())


def test_a_diff_of_torch_is_told_as_such_in_an_issue_for_another_library() -> None:
    told = [(system, describe_known_issues(system, finding.id)) for system, finding in FINDINGS]
    text = {(system.is_torch, one.cure): " ".join(_cure(one, "It:", "")) for system, one in told if one and one.patch}
    foreign = {cure for (is_torch, cure), said in text.items() if "one to torch" in said and not is_torch}
    assert "int16-gather" in foreign
    assert not any("one to torch" in said for (is_torch, _), said in text.items() if is_torch)
    assert not any("megatron" in cure for cure in foreign)


def test_what_is_near_a_defect_is_told_by_the_sentences_that_name_it() -> None:
    detail = "Stage 2 differs (`x-12`). Pull request 12 guards it. Seen on 0.3.1 and 0.12."
    assert sentences_about("https://github.com/a/b/pull/12", detail) == "Pull request 12 guards it."


def test_an_issue_and_a_pull_request_of_one_number_are_one_thread() -> None:
    assert (
        thread_of("https://github.com/a/b/issues/12") == thread_of("https://github.com/a/b/pull/12/files") == "a/b#12"
    )
    assert thread_of("https://github.com/a/c/pull/12") == "a/c#12"
    assert thread_of("https://example.org/12") == "https://example.org/12"


def test_all_that_is_near_a_defect_is_told_and_nothing_is_public_and_near_at_once() -> None:
    for system, finding in FINDINGS:
        told = describe_known_issues(system, finding.id)
        assert told is not None
        near = [line for line in _public(told).splitlines() if line.startswith("Near it, ")]
        novelty, public = finding.novelty, thread_of(told.upstream)
        threads = {thread_of(address) for address in _addresses(near)}
        assert not told.upstream or public not in threads, finding.id
        known = {thread_of(address) for address in (novelty.upstream, *novelty.also) if address}
        assert not known & {thread_of(address) for address in novelty.related}, finding.id
        own = {thread_of(address) for address in novelty.related}
        beyond = {public, *map(thread_of, told.cause.novelty.also if told.cause else ())}
        assert own - beyond <= threads, finding.id


def test_a_cause_that_is_ours_says_how_each_thread_near_it_differs() -> None:
    """A maintainer reads "near it, and not the same", and asks why."""
    bare = {
        (finding.id, address)
        for finding in OURS
        for address in finding.novelty.related
        if not sentences_about(address, finding.detail)
    }
    assert not bare


UNREAD = ("torch-fsdp2",)
"""Systems whose main branch nobody could read here: no snapshot of the repository is small enough to be brought."""


def test_a_cause_that_is_ours_says_whether_it_stands_on_main() -> None:
    silent = {f.system for f in OURS if f.on_main is None and not was_run_on_main(f.releases)}
    assert silent == set(UNREAD)


def test_what_was_read_of_main_is_told() -> None:
    read = OnMain("edaa722126", "2026-08-22", "0.19.6", "deepspeed/a.py:12", stands=True)
    finding = replace(FINDINGS[0][1], on_main=read, releases={"0.19.0": "crash"})
    told = FailureDescription("A title", finding=finding)
    assert _on_main(told, replace(FAILED, version="0.19.8+cured")) == (
        "On the main branch the lines stand unchanged: `deepspeed/a.py:12` at commit `edaa722126` of 2026-08-22, which "
        "calls itself 0.19.6 (read, not run). That commit is older than 0.19.8."
    )
    assert "read, not run" not in _on_main(
        replace(told, finding=replace(finding, releases={"main, 1": "fails"})), FAILED
    )
    assert not _on_main(FailureDescription("A title"), FAILED)
    assert "main branch" not in not_asked(FAILED, {}, read).text
    face = replace(finding, on_main=None)
    assert replace(told, finding=face, cause=finding).on_main == read
    assert replace(told, finding=replace(face, library_line="b.py:1"), cause=finding).on_main is None


@pytest.mark.parametrize(
    ("since", "sentence"),
    [
        ("0.13.0 or earlier", "It stands in 0.13.0 already; earlier releases were not looked at."),
        ("0.16.1, older not tried", "It stands in 0.16.1 already; earlier releases were not looked at."),
        ("0.19.8", "The first release that has it is 0.19.8."),
        ("0.4.0; not in 0.5.0", "First release that is known to have it: 0.4.0; not in 0.5.0."),
        ("0.6.0, by its source; 0.19.0 was run", "By its source, 0.6.0 is the first release in which the lines stand; "
         "the oldest on which a run showed it is 0.19.0."),
        ("0.4.0, by its source; 0.4.0 was run", "By its source, 0.4.0 is the first release in which the lines stand; "
         "the oldest on which a run showed it is that one."),
    ],
)  # fmt: skip
def test_a_first_release_is_called_so_only_where_it_is_known(since: str, sentence: str) -> None:
    told = FailureDescription("A title", finding=replace(FINDINGS[0][1], since=since, releases={}))
    assert _since(told) == sentence


def test_a_thread_of_which_an_entry_says_nothing_is_told_by_its_address() -> None:
    near = "https://github.com/a/b/pull/12"
    finding = FINDINGS[0][1]
    alone = replace(finding, detail="", novelty=replace(finding.novelty, upstream="", also=(), related=(near,)))
    text = _public(FailureDescription("A title", finding=alone, cause=alone))
    assert text.splitlines()[-1] == f"Near it, and not the same: {near}."


def _addresses(lines: list[str]) -> list[str]:
    return [word.rstrip(".") for line in lines for word in line.split() if word.startswith("https://")]


def test_what_can_be_sent_says_what_is_expected_and_how_each_thread_near_it_differs() -> None:
    for _, finding in FINDINGS:
        if finding.novelty.ready:
            assert finding.expected, finding.id
            bare = [a for a in finding.novelty.related if not sentences_about(a, finding.detail)]
            assert not bare, finding.id


def test_every_finding_that_is_ours_has_a_title_of_its_own() -> None:
    ours = [
        finding
        for system, finding in FINDINGS
        if (told := describe_known_issues(system, finding.id)) and not told.upstream
    ]
    assert ours
    assert [finding.id for finding in ours if not finding.title] == []


STAND_IN_ADAM = ("megatron-core", "megatron-bridge")
"""Systems whose `gpu_on_cpu.py` has a class FusedAdam in the place of TransformerEngine's own."""


def test_what_a_stand_in_has_done_is_not_told_as_the_library_s_own() -> None:
    """An error that gloo raises in NCCL's place, or a defect of a class that the shim replaces: its entry says what of
    it a GPU has."""
    errors = {issue.id: issue.match.evidence for system in BUILT_IN for issue in known_issues_of(system)}
    by_id = {finding.id: finding for _, finding in FINDINGS}

    def needs_a_word(system: System, finding: Finding) -> bool:
        if not system.emulated or finding.confirmed or finding.novelty.upstream:
            return False
        lines = (finding.library_line, by_id[finding.cause].library_line if finding.cause else "")
        raised = [e for e in errors.get(finding.id, ()) if "distributed_c10d.py" in e and "closed by peer" not in e]
        return bool(raised) or (system.name in STAND_IN_ADAM and any("fused_adam.py" in line for line in lines))

    concerned = [finding for system, finding in FINDINGS if needs_a_word(system, finding)]
    assert len(concerned) > 3
    assert [finding.id for finding in concerned if not finding.emulation] == []


def test_a_text_about_what_is_repaired_begins_with_that() -> None:
    first = next(iter(FINDINGS))[1]
    assert _gone(FailureDescription("A title", finding=replace(first, fixed="0.19.8"))) == (
        "Repaired in 0.19.8: not to be filed."
    )
    assert _gone(FailureDescription("A title", finding=replace(first, fixed=""))) == ""
    assert _gone(FailureDescription("A title")) == ""


def test_releases_that_an_entry_records_are_told_and_count_as_tried() -> None:
    recorded = {"0.19.8": "crash (`5976`)", "main, d98e8a6": "fails"}
    assert not_asked(FAILED, recorded).text == "Seen on deepspeed 0.19.0."
    assert not_asked(FAILED, {"0.19.8": "crash"}).text.endswith("Not tried for this issue: the main branch.")
    finding = FINDINGS[0][1]
    told = FailureDescription("A title", finding=replace(finding, since="0.19.0", releases=recorded))
    assert _since(told).endswith("that were tried: 0.19.8: crash; main, d98e8a6: fails.")


def test_a_newer_release_is_asked_where_the_caller_wants_it() -> None:
    asked: list[str] = []
    newest = replace(FAILED, version="0.19.8")

    def examined(scenario: Scenario) -> Result:
        asked.append(scenario.version)
        return replace(FAILED, version=scenario.version)

    assert not_asked(FAILED).text.endswith("Not tried for this issue: a newer release and the main branch.")
    found = on_newest(FAILED, examined, cloned=False)
    assert found is not None
    assert asked == ["0.19.8"]
    assert found.text == (
        "Seen on deepspeed 0.19.0. Still there on the newest release, deepspeed 0.19.8: the same run fails at the same "
        "call."
    )
    commit = on_newest(newest, lambda scenario: replace(FAILED, version="0.19.6+git.edaa722"), cloned=True)
    assert commit is not None
    assert "of the clone that was tried, deepspeed 0.19.6+git.edaa722, which is older than that release" in commit.text
    assert on_newest(newest, examined, cloned=False) is None
    assert "the newest release for Python 3.11 that we know of on PyPI" in not_asked(newest).text


def test_software_is_what_is_imported_required_absent_and_unsupported(tmp_path: Path) -> None:
    for name, release, more in (
        ("deepspeed", "0.19.0", "Requires-Dist: torch>=2.0\nRequires-Dist: hjson\nRequires-Dist: ninja\n"
         "Requires-Dist: einops<0.5\nRequires-Dist: triton; extra == 'cuda'\n"),
        ("hjson", "3.1", ""), ("einops", "0.8", ""), ("safetensors", "0.8.0", ""), ("numpy", "2.0", ""),
    ):  # fmt: skip
        folder = tmp_path / f"{name}-{release}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n{more}", "utf-8")
        (folder / "top_level.txt").write_text(f"{name}\n", "utf-8")
    script = ["import sys\nimport deepspeed\n", "from safetensors.torch import save_file\n"]
    outside = ("torch 2.13.0: upstream tested with 2.10",)
    result = replace(FAILED, outside_support=outside)
    found = software_of(system_named("deepspeed"), result, "3.11.7", {"torch": "2.13.0"}, [tmp_path], script)
    assert list(found.versions.items()) == [
        ("deepspeed", "0.19.0"), ("torch", "2.13.0"), ("numpy", "2.0"), ("safetensors", "0.8.0"),
    ]  # fmt: skip
    assert (found.required, found.absent) == ({"hjson": "3.1", "einops": "0.8"}, ("ninja",))
    assert found.outside == (*outside, "einops 0.8: upstream asks for <0.5")
    assert "* not installed, though deepspeed requires it: ninja" in found.text()
    assert found.text().endswith("does not vouch for this combination: " + "; ".join(found.outside) + ".")
    assert Software("3.11", {"torch": "2.13.0"}).text() == "* torch 2.13.0\n* Python 3.11 on Linux"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lib/a.py:3 (1.0), step", "Python, which ran as the library has it. No GPU has shown it yet."),
        ("lib/adam.cu (1.0), kernel", "It matters here"),
        ("", "No GPU has shown the failure yet."),
    ],
)
def test_what_was_emulated_says_whether_it_matters(line: str, said: str) -> None:
    told, form = FailureDescription("A title", line=line), Form(stand_in="It stands in.")
    draft = Draft("", "", {}, shims={"gpu_on_cpu.py": ""})
    text = _emulated(draft, FAILED, told, form)
    assert said in text
    assert "It stands in." in text
    assert _emulated(replace(draft, shims={}), FAILED, told, form).startswith("Nothing was emulated")


def test_an_entry_says_what_emulation_means_and_what_is_expected_better_than_a_rule() -> None:
    finding = replace(FINDINGS[0][1], emulation="In part.", expected="Weights stay.")
    told = FailureDescription("A title", line="lib/a.py:3 (1.0), step", finding=finding)
    form, draft = Form(stand_in="It stands in."), Draft("", "", {}, shims={"gpu_on_cpu.py": ""})
    assert _emulated(draft, FAILED, told, form).endswith("It stands in. In part.")
    focus = SimpleNamespace(op=SimpleNamespace(kind="step"), difference=None)
    case = cast("FailureCase", SimpleNamespace(focus=focus, result=FAILED))
    assert _promise(case, draft, told, Software("3.11", {})).startswith("Weights stay.")


def test_what_a_script_told_the_library_is_said_where_no_kernel_is_emulated() -> None:
    form = Form(told={"has_fp16": "It says that the CPU has fp16.", "no_kernel": "It does without a kernel."})
    draft = Draft("", "", {"start": "lib.has_fp16 = True"})
    assert _emulated(draft, FAILED, FailureDescription("A title"), form) == (
        "No kernel was emulated. It says that the CPU has fp16."
    )


def test_a_regression_is_claimed_where_the_release_before_was_run() -> None:
    since = {finding.since: describe_known_issues(system, finding.id) for system, finding in FINDINGS}
    answers = {text: _regression(told) for text, told in since.items() if told}
    assert answers["0.19.0 or earlier"] == "Not sure"
    assert all(text.startswith(("Yes: ", "Not sure")) for text in answers.values())
