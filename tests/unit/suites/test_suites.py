"""Upstream's suites: lists of verdicts there and back, what differs, and a run over a clone of two small tests."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from shardproof.errors import UsageError
from shardproof.suites import ranks as runner
from shardproof.suites.declared import Reason, Suite, Upstream, upstream_of, upstreams
from shardproof.suites.verdicts import (
    FAILED,
    PASSED,
    SKIPPED,
    CommittedVerdicts,
    SuiteTestResult,
    differences,
    distinct_passing,
    of_ranks,
    text_of,
)
from shardproof.world import preflight

GOOD, BAD, NOT = SuiteTestResult(PASSED), SuiteTestResult(FAILED, "kernel: gemm"), SuiteTestResult(SKIPPED, "8 GPUs")
SEEN = {"a.py::alone": GOOD, "a.py::case[1]": GOOD, "a.py::case[2-x]": GOOD, "a.py::case[3]": BAD, "b.py::C::not": NOT}


def kept(seen: dict[str, SuiteTestResult] = SEEN) -> CommittedVerdicts:
    return CommittedVerdicts.read(text_of(seen, "heading"), "here")


def test_a_list_there_and_back() -> None:
    assert {test: kept().result_of(test) for test in SEEN} == SEEN
    assert [kept().count(outcome) for outcome in (PASSED, FAILED, SKIPPED)] == [3, 1, 1]
    assert kept().by_reason(FAILED) == {"kernel: gemm": 1}
    assert differences(kept(), SEEN) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"a.py::alone": BAD}, "a.py::alone: failed (kernel: gemm); expected passed"),
        (
            {"a.py::case[3]": SuiteTestResult(FAILED, "other")},
            "a.py::case[3]: failed (other); expected failed (kernel: gemm)",
        ),
        ({"a.py::case[3]": GOOD}, "a.py::case[3]: passed; expected failed (kernel: gemm)"),
        ({"c.py::new": GOOD}, "c.py::new: passed, and is not in the list"),
    ],
)
def test_a_difference_is_told(change: dict[str, SuiteTestResult], line: str) -> None:
    assert differences(kept(), SEEN | change) == [line]


def test_a_test_that_is_gone_is_told() -> None:
    seen = {test: verdict for test, verdict in SEEN.items() if test not in ("a.py::case[3]", "a.py::case[1]")}
    assert differences(kept(), seen) == [
        "a.py::case[3]: is in the list and was not collected", "a.py::case: 1 cases were collected; the list has 3",
    ]  # fmt: skip


def test_a_test_that_passes_at_two_numbers_of_ranks_counts_once() -> None:
    three = {f"a.py::case[{number}]": GOOD for number in range(3)}
    most, few = three | {"a.py::case[2]": BAD}, {**dict.fromkeys(three, BAD), "a.py::case[2]": GOOD}
    assert [distinct_passing([kept(seen)]) for seen in (three, most, few)] == [3, 2, 1]
    assert distinct_passing([kept(most), kept(most)]) == 2
    assert distinct_passing([kept(most), kept(few)]) == distinct_passing([kept(few), kept(three)]) == 3


def test_the_verdict_of_ranks() -> None:
    apart = SuiteTestResult(FAILED, "DistBackendError: closed")
    assert of_ranks([GOOD, NOT]) == GOOD
    assert of_ranks([GOOD, apart, BAD]) == BAD
    assert of_ranks([GOOD, apart]) == apart
    assert of_ranks([NOT, NOT]) == NOT
    gone, ranks = SuiteTestResult(FAILED, "FileNotFoundError: gone"), Reason("not divisible", "ranks", test="^a.py")
    seen = [gone, SuiteTestResult(FAILED, "RuntimeError: not divisible by 4")]
    assert of_ranks(seen, partial(ranks.explain, "a.py::case")) == SuiteTestResult(FAILED, "ranks")
    assert of_ranks(seen, partial(ranks.explain, "b.py::case")) == gone


@pytest.mark.parametrize("upstream", list(upstreams()), ids=lambda upstream: upstream.system)
def test_every_declared_list_is_there(upstream: Upstream) -> None:
    for suite in upstream.suites:
        for number in suite.ranks:
            found = CommittedVerdicts.read(upstream.verdicts_file(suite, number).read_text("utf-8"), suite.name)
            assert found.count(PASSED) + found.count(FAILED) + found.count(SKIPPED), suite.name


def test_what_is_not_declared_is_told() -> None:
    some = next(upstreams())
    with pytest.raises(UsageError, match="suite of"):
        some.suite("none")
    with pytest.raises(UsageError, match="system with suites"):
        upstream_of("reference")


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "test_a.py").write_text(
        "import os, pytest, torch\n"
        "def test_device(): assert torch.ones(1, device='cuda').is_cuda\n"
        "def test_dies(): os.kill(os.getpid(), 9)\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_last(n): raise NotImplementedError('gemm is not emulated') if n == 2 else pytest.skip('no GPU')\n"
    )
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "all")
    return folder


@pytest.fixture
def upstream(clone: Path, monkeypatch: pytest.MonkeyPatch) -> Upstream:
    """Suites of the clone's only commit, and the clone named as `--clone` does."""
    some = dataclasses.replace(next(upstreams()), libraries=(), beside=())
    monkeypatch.setenv(preflight.clone_variable_of(some.system), str(clone))
    return dataclasses.replace(
        some, commit=git(clone, "rev-parse", "HEAD"), reasons=(Reason(r"(\w+) is not", r"kernel: \1"),)
    )


def test_a_suite_runs_on_when_a_test_ends_its_process(upstream: Upstream, tmp_path: Path) -> None:
    suite = Suite("all", ("test_a.py",), (1,), "apex")
    where = runner.place(upstream, tmp_path)
    assert runner.verdicts(upstream, suite, 1, where, 100.0) == {
        "test_a.py::test_device": GOOD,
        "test_a.py::test_dies": SuiteTestResult(FAILED, "the process ended without a verdict"),
        "test_a.py::test_last[1]": SuiteTestResult(SKIPPED, "no GPU"),
        "test_a.py::test_last[2]": SuiteTestResult(FAILED, "kernel: gemm"),
    }


def test_the_files_are_those_of_the_declared_commit_whatever_the_clone_has(
    clone: Path, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = (clone / "test_a.py").read_text()
    (clone / ".gitattributes").write_text("test_a.py export-ignore\n")
    (clone / "test_a.py").write_text("")
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "another commit, which archives leave the file out of")
    (clone / "test_a.py").write_text("a change that nobody committed")
    assert (runner.place(upstream, tmp_path).files / "test_a.py").read_text() == declared
    assert git(clone, "status", "--porcelain") == "M test_a.py"
    bare = tmp_path / "bare"
    git(tmp_path, "clone", "-q", "--bare", str(clone), str(bare))
    monkeypatch.setenv(preflight.clone_variable_of(upstream.system), str(bare))
    (tmp_path / "again").mkdir()
    assert (runner.place(upstream, tmp_path / "again").files / "test_a.py").read_text() == declared


def test_a_clone_has_to_have_the_declared_commit(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="git fetch origin tag"):
        runner.place(dataclasses.replace(upstream, commit="0" * 40), tmp_path)
    monkeypatch.delenv(preflight.clone_variable_of(upstream.system))
    with pytest.raises(UsageError, match="--clone"):
        runner.place(upstream, tmp_path)


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardproof.suites", f"{next(upstreams()).system}/none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "suite of" in done.stderr) == (2, True)
