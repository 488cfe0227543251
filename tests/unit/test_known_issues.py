"""Known issues: strict in what they accept, narrow in what they match."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import report_samples as samples

from harness.diff import Difference
from harness.errors import UsageError
from harness.known_issues import KnownIssues, load_known_issues
from harness.observe.logical import Key
from harness.result import Failure, Result
from harness.verdict import Verdict

ENTRY = """
[[issue]]
id = "{id}"
what = "State is cast on load."
system = "torch-fsdp2"
library_line = "state_dict.py:612 (2.13.0)"
since = "2.4.0"
upstream = ""
scenario = "one.toml"
[issue.match]
{match}
"""

MISMATCH = """
op = "load"
evidence = ["exp_avg dtype", "param bits", "written step missing"]
axes = { offload = "cpu*", dtype = ["bf16", "mixed*"] }
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    (tmp_path / "one.toml").write_text("schema = 1\n[scenario]\n")

    def of(*matches: str, text: str | None = None) -> Path:
        entries = (ENTRY.format(id=f"issue-{n}", match=match) for n, match in enumerate(matches))
        path = tmp_path / "known_issues.toml"
        path.write_text("schema = 1\n" + "".join(entries) if text is None else text)
        return path

    return of


def test_a_result_that_agrees_in_everything_is_known(write: Write) -> None:
    assert load_known_issues(write(MISMATCH)).match(samples.mismatch()) == "issue-0"


def test_what_was_seen_under_emulation_only_is_so_until_every_entry_is_confirmed(write: Write) -> None:
    seen = replace(samples.mismatch(), emulated=("CUDA device",))
    assert KnownIssues().emulated_only(seen)
    assert not KnownIssues().emulated_only(replace(seen, emulated=()))
    assert not KnownIssues().emulated_only(replace(seen, verdict=Verdict.PASS, differences=()))
    assert not KnownIssues().emulated_only(replace(seen, scenario=replace(seen.scenario, faults=("boundary.x",))))
    assert load_known_issues(write(MISMATCH)).emulated_only(seen)
    entry = ENTRY.replace("[issue.match]", 'confirmed_on_gpu = "H200, torch 2.13.0+cu130"\n[issue.match]')
    text = "schema = 1\n" + entry.format(id="one", match=MISMATCH)
    confirmed = load_known_issues(write(text=text))
    assert confirmed.issues[0].confirmed_on_gpu.startswith("H200")
    assert not confirmed.emulated_only(seen)
    assert not confirmed.emulated_only(replace(seen, known_issue="one"))
    error = Failure("KeyError", "another", 0, op=3)
    assert confirmed.emulated_only(replace(seen, verdict=Verdict.CRASH, error=error))


def test_what_is_shipped_loads() -> None:
    load_known_issues(Path(__file__).parents[2] / "scenarios" / "known_issues.toml")


EXTRA = Difference(Key(8, "live", "master", "x"), "bits")


@pytest.mark.parametrize(
    "other",
    [
        replace(samples.mismatch(), system="megatron-core"),
        replace(samples.mismatch(), verdict=Verdict.NONDETERMINISTIC),
        replace(samples.mismatch(), differences=(*samples.mismatch().differences, EXTRA)),
        replace(samples.mismatch(), differences=()),
        replace(samples.mismatch(), scenario=samples.scenario(dtype="fp32", offload="cpu")),
        replace(samples.mismatch(), scenario=samples.scenario(dtype="bf16", offload="none")),
        replace(samples.mismatch(), error=Failure("RuntimeError", "and a crash on top")),
        replace(samples.mismatch(), verdict=Verdict.PASS),
        replace(samples.mismatch(), verdict=Verdict.UNKNOWN),
    ],
)
def test_whatever_differs_makes_it_new(write: Write, other: Result) -> None:
    assert load_known_issues(write(MISMATCH)).match(other) is None


def test_a_crash_matches_by_its_message_with_numbers_masked(write: Write) -> None:
    issues = load_known_issues(write('op = "save"\nevidence = ["RuntimeError: size of tensor a (N) must match*"]'))
    assert issues.match(samples.crash()) == "issue-0"
    other = replace(samples.crash(), error=Failure("ValueError", "size of tensor a (3) must match"))
    assert issues.match(other) is None


def test_a_hang_matches_by_its_deadline(write: Write) -> None:
    issues = load_known_issues(write('op = "load"\nevidence = ["deadline: *"]\naxes = { program = "unfreeze" }'))
    assert issues.match(samples.hang()) == "issue-0"
    assert issues.match(replace(samples.hang(), scenario=samples.scenario(program="resume"))) is None


def test_two_known_defects_in_one_scenario_are_known_under_both(write: Write) -> None:
    both = replace(samples.mismatch(), error=Failure("KeyError", "lost", op=samples.mismatch().failed_op.index))
    issues = load_known_issues(write(MISMATCH, 'op = "load"\nevidence = ["KeyError: *"]'))
    assert issues.match(both) == "issue-0+issue-1"
    assert [issue.id for issue in issues.of("issue-0+issue-1")] == ["issue-0", "issue-1"]
    assert load_known_issues(write(MISMATCH)).match(both) is None


def test_the_first_entry_wins_and_lookups_work(write: Write) -> None:
    issues = load_known_issues(write(MISMATCH, MISMATCH))
    assert issues.match(samples.mismatch()) == "issue-0"
    assert [issue.since for issue in issues.of("issue-1")] == ["2.4.0"]
    assert issues.of("issue-9") == []
    assert KnownIssues().match(samples.mismatch()) is None


GOOD = ENTRY.format(id="a", match=MISMATCH)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("schema = 1\n[[issue]\n", "malformed TOML"),
        ("schema = 2\n", "schema: given 2"),
        ("schema = 1\nissues = []\n", "unknown \\['issues'\\]"),
        ("schema = 1\nissue = 3\n", "tables \\[\\[issue\\]\\]"),
        ("schema = 1\n[[issue]]\nid = 'a'\n", "missing \\['what'"),
        ("schema = 1\n" + GOOD + GOOD, "each id once"),
        ("schema = 1\n" + GOOD.replace("one.toml", "absent.toml"), "absent.toml"),
        ("schema = 1\n" + GOOD.replace('since = "2.4.0"', "since = 2.4"), "since: given 2.4"),
        ("schema = 1\n" + GOOD.replace('what = "State is cast on load."', 'what = ""'), "what: given ''"),
        ("schema = 1\n" + GOOD.replace('upstream = ""', 'upstream = "javascript:alert(1)"'), "https"),
        ("schema = 1\n" + GOOD.replace('op = "load"', 'op = "lod"'), "op: given 'lod'; allowed: build"),
        ("schema = 1\n" + GOOD.replace('op = "load"', 'op = "load"\nop_index = 3'), "unknown \\['op_index'\\]"),
        ("schema = 1\n" + GOOD.replace("offload =", "ofload ="), "given 'ofload'"),
        ("schema = 1\n" + GOOD.replace('"cpu*"', '"gpu"'), "offload: given 'gpu'"),
        ("schema = 1\n" + GOOD.replace('"cpu*"', "3"), "a list of texts"),
        (
            "schema = 1\n" + GOOD.replace('axes = { offload = "cpu*", dtype = ["bf16", "mixed*"] }', "axes = 3"),
            "a table",
        ),
        ("schema = 1\n" + ENTRY.format(id="a", match='op = "load"'), "missing"),
        ("schema = 1\n" + ENTRY.format(id="a", match='op="load"\nevidence=["*"]'), "say something"),
        ("schema = 1\n" + GOOD.replace("[issue.match]", "match = 3\n[issue.x]"), "unknown \\['x'\\]"),
    ],
)
def test_a_malformed_file_is_a_usage_error_that_names_the_place(write: Write, text: str, says: str) -> None:
    path = write(text=text)
    with pytest.raises(UsageError, match=says) as refused:
        load_known_issues(path)
    assert "known_issues.toml" in str(refused.value)


def test_an_unreadable_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="readable"):
        load_known_issues(tmp_path / "absent.toml")
    (tmp_path / "latin1.toml").write_bytes(b"schema = 1 # \xff")
    with pytest.raises(UsageError, match="readable"):
        load_known_issues(tmp_path / "latin1.toml")
