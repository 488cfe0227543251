"""What is recorded of a save, damage, verdicts, and the whole command; the reference's files refuse what is not theirs.

*Verifies*: in CI everything but the stacks of torch and safetensors, which the nightly tests try, each a little.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardproof.cli.main import entry
from shardproof.errors import UsageError
from shardproof.folders import LOCK
from shardproof.resilience import scorecard
from shardproof.resilience.corruptions import KINDS, Folders, damaged
from shardproof.resilience.events import Event, Trace, tree_of, write_tree
from shardproof.resilience.planned_trials import Counts, FinishedTrial, family_of
from shardproof.resilience.run import ResilienceRequest, StackResult, try_stacks
from shardproof.resilience.stack_cures import stacks_named
from shardproof.resilience.stacks import Stack, all_stacks
from shardproof.resilience.trace import TraceError, recorded_of, require_complete, require_strace
from shardproof.resilience.trial import Known, classify
from shardproof.verdict import ExitStatus

traced = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def quoted(text: str) -> str:
    return '"' + "".join(f"\\x{byte:02x}" for byte in text.encode()) + '"'


def at(number: int, path: str) -> str:
    return f"{number}<{quoted(path)[1:-1]}>"


def read(*lines: str, base: dict[str, bytes | None] | None = None) -> list[str]:
    return [str(event) for _, event, _ in recorded_of(lines, Path("/ck"), base or {})]


def test_writes_go_where_the_descriptor_stands() -> None:
    assert read(
        f"1 openat(AT_FDCWD<{quoted('/ck')[1:-1]}>, {quoted('a')}, O_WRONLY|O_CREAT|O_TRUNC, 0666) = {at(3, '/ck/a')}",
        f"1 write({at(3, '/ck/a')}, {quoted('12345')}, 5) = 5",
        f"1 lseek({at(3, '/ck/a')}, 2, SEEK_SET) = 2",
        f"1 writev({at(3, '/ck/a')}, [{{iov_base={quoted('xy')}}}, {{iov_base={quoted('z')}}}], 2) = 3",
        f"1 pwrite64({at(3, '/ck/a')}, {quoted('p')}, 1, 9) = 1",
        f"1 fsync({at(3, '/ck/a')}) = 0",
        f"1 close({at(3, '/ck/a')}) = 0",
    ) == ["create a", "write a 0+5", "write a 2+3", "write a 9+1", "sync_file a"]


def test_a_file_that_is_copied_into_the_folder_is_written_there(tmp_path: Path) -> None:
    source = tmp_path / "script.py"
    source.write_bytes(b"0123456789")
    assert read(
        f"1 openat(AT_FDCWD<>, {quoted('/ck/a')}, O_WRONLY|O_CREAT|O_TRUNC, 0666) = {at(3, '/ck/a')}",
        f"1 sendfile({at(3, '/ck/a')}, {at(4, str(source))}, [0] => [6], 6) = 6",
        f"1 sendfile({at(3, '/ck/a')}, {at(4, str(source))}, [6] => [10], 6) = 4",
        f"1 sendfile({at(3, '/ck/a')}, {at(4, str(source))}, [10], 6) = 0",
    ) == ["create a", "write a 0+6", "write a 6+4"]


def test_a_file_of_the_folder_that_is_copied_is_written_as_it_was_then() -> None:
    lines = (
        f"1 openat(AT_FDCWD<>, {quoted('/ck/b')}, O_WRONLY) = {at(4, '/ck/b')}",
        f"1 pwrite64({at(4, '/ck/b')}, {quoted('X')}, 1, 7) = 1",
        f"1 openat(AT_FDCWD<>, {quoted('/ck/a')}, O_WRONLY|O_CREAT|O_TRUNC, 0666) = {at(3, '/ck/a')}",
        f"1 sendfile({at(3, '/ck/a')}, {at(5, '/ck/b')}, [0] => [8], 9) = 8",
        f"1 ftruncate({at(4, '/ck/b')}, 2) = 0",
        f"1 ftruncate({at(4, '/ck/b')}, 3) = 0",
        f"1 sendfile({at(3, '/ck/a')}, {at(5, '/ck/b')}, [0] => [3], 9) = 3",
    )
    events = [event for _, event, _ in recorded_of(lines, Path("/ck"), {"b": b"12345"})]
    assert [(str(event), event.data) for event in events if event.path == "a" and event.data] == [
        ("write a 0+8", b"12345\0\0X"),
        ("write a 8+3", b"12\0"),
    ]


def test_a_copy_from_a_file_that_the_record_does_not_name_is_refused() -> None:
    with pytest.raises(TraceError, match="sendfile"):
        read(
            f"1 openat(AT_FDCWD<>, {quoted('/ck/a')}, O_WRONLY|O_CREAT|O_TRUNC, 0666) = {at(3, '/ck/a')}",
            f"1 sendfile({at(3, '/ck/a')}, {at(4, '/ck/b')}, NULL, 6) = 6",
        )


def test_a_thread_writes_through_the_descriptor_that_another_opened() -> None:
    assert read(
        "1 clone3({flags=CLONE_VM|CLONE_FILES|CLONE_THREAD} => {parent_tid=[2]}, 88) = 2",
        f"1 openat(AT_FDCWD<>, {quoted('/ck/a')}, O_WRONLY|O_APPEND) = {at(3, '/ck/a')}",
        f"2 write({at(3, '/ck/a')},  <unfinished ...>",
        "1 fsync(9<\\x2f\\x78>) = 0",
        f"2 <... write resumed>{quoted('more')}, 4) = 4",
        base={"a": b"123"},
    ) == ["write a 3+4"]


def test_names_and_syncs_of_folders() -> None:
    assert read(
        f"1 mkdir({quoted('/ck/new')}, 0777) = 0",
        f"1 openat(AT_FDCWD<>, {quoted('/ck/new/x')}, O_RDWR|O_CREAT, 0666) = {at(3, '/ck/new/x')}",
        f"1 openat(AT_FDCWD<>, {quoted('/ck/new')}, O_RDONLY|O_DIRECTORY) = {at(4, '/ck/new')}",
        f"1 fsync({at(4, '/ck/new')}) = 0",
        f"1 rename({quoted('/ck/new')}, {quoted('/ck/new')}) = 0",
        f"1 rename({quoted('/ck/new')}, {quoted('/ck/gen')}) = 0",
        f"1 write({at(3, '/ck/gen/x')}, {quoted('1')}, 1) = 1",
        f"1 fsync({at(5, '/ck')}) = 0",
        f"1 unlinkat({at(4, '/ck/gen')}, {quoted('x')}, 0) = 0",
        f"1 unlinkat(AT_FDCWD<>, {quoted('/ck/gen')}, AT_REMOVEDIR) = 0",
        f"1 unlink({quoted('/ck/none')}) = -1 ENOENT (No such file or directory)",
    ) == [
        "mkdir new", "create new/x", "sync_dir new", "rename new to gen", "write gen/x 0+1", "sync_dir .",
        "unlink gen/x", "rmdir gen",
    ]  # fmt: skip


def test_a_record_that_does_not_explain_the_folder_is_refused() -> None:
    trace = Trace({}, (Event("create", "a"), Event("write", "a", data=b"1")))
    require_complete(trace, {"a": b"1"})
    with pytest.raises(TraceError, match="does not explain 'a'"):
        require_complete(trace, {"a": b"12"})
    with pytest.raises(TraceError, match="copy_file_range"):
        read(f"1 copy_file_range({at(3, '/ck/a')}, NULL, {at(4, '/ck/b')}, NULL, 9, 0) = 9")


def test_without_strace_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="apt-get install strace"):
        require_strace()


FOLDERS = Folders(
    new={"x": bytes(range(256)) * 20, "y": b"new" * 700, "m": b"new metadata", "d": None},
    old={"x": bytes(5120), "y": b"old" * 700, "m": b"old metadata", "d": None},
    other={"x": bytes(5121), "y": b"its" * 700, "m": b"its metadata", "d": None},
)


@settings(max_examples=4)
@given(st.integers(0, 10**6))
def test_damage_is_the_same_for_a_seed_and_always_changes_something(seed: int) -> None:
    first, second = ([(d.label, d.tree) for d in damaged(FOLDERS, seed, 40)] for _ in range(2))
    assert first == second
    assert all(tree != FOLDERS.new for _, tree in first)
    assert {label.rpartition("-")[0] for label, _ in first} == set(KINDS)


def test_damage_of_one_file_has_no_swaps_and_ends() -> None:
    one = Folders({"a": b"n"}, {"a": b"o"}, {"a": b"x"})
    found = list(damaged(one, 0, 2_000))
    assert "swapped" not in {damage.kind for damage in found}
    assert len({json.dumps(list(map(str, damage.tree.values()))) for damage in found}) == len(found)


KNOWN = Known(
    old={"w": "1", "b": "1", "s": "0"}, new={"w": "2", "b": "2", "s": "0"}, other={"w": "3", "b": "3", "s": "0"}
)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ({"ended": "ok", "found": KNOWN.old}, "old"), ({"ended": "ok", "found": KNOWN.new}, "new"),
        ({"ended": "ok", "found": KNOWN.other}, "other"), ({"ended": "error", "why": "EOFError: "}, "error"),
        ({"ended": "hang"}, "hang"), ({"ended": "crash", "why": "killed by SIGSEGV"}, "crash"),
        ({"ended": "ok", "found": {}}, "silent"), ({"ended": "ok", "found": {**KNOWN.new, "more": "1"}}, "silent"),
    ],
)  # fmt: skip
def test_outcomes(answer: dict[str, object], outcome: str) -> None:
    assert classify(answer, KNOWN).outcome == outcome


def test_a_mixture_says_which_parts_are_of_which_state() -> None:
    assert classify({"ended": "ok", "found": {"w": "1", "b": "2", "s": "0"}}, KNOWN).why == "old: w; new: b"
    assert classify({"ended": "ok", "found": {"w": "9", "s": "0"}}, KNOWN).why == "neither: w; missing: b"


def test_the_scorecard_counts_and_has_a_command_for_each_cell() -> None:
    stack = Stack("s", "a stack", "m:a")
    tried = [
        FinishedTrial("killed@1", "killed", "", "old", ""),
        FinishedTrial("zeroed-0", "zeroed", "z", "silent", "w"),
    ]
    counts = Counts(5, 6)
    document = scorecard.document_of([StackResult(stack, 3, 1, counts, 2, tried)], 2, 7)
    text = scorecard.render(document)
    assert "shardproof resilience s --trial zeroed-0 --seed 7" in text
    assert text.endswith("2 trials: 1 old, 1 silent\n")
    assert scorecard.exit_status(document) == ExitStatus.FAILURE
    fine = scorecard.document_of([StackResult(stack, 3, 1, counts, 1, tried[:1])], 1, 7)
    assert scorecard.exit_status(fine) == ExitStatus.OK
    assert scorecard.exit_status(scorecard.document_of([], 1, 7)) == ExitStatus.NOTHING_RUN


def test_an_unknown_stack_is_told_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="dcp-files"):
        stacks_named(("nothing",))


def test_a_tree_is_written_and_read_as_it_is(tmp_path: Path) -> None:
    tree = {"d": None, "d/e": b"1", "f": b""}
    write_tree(tree, tmp_path / "t")
    assert tree_of(tmp_path / "t") == tree


def children() -> set[str]:
    """The processes that this one has; tests before this one may have left a server to the next."""
    stats = [text for path in Path("/proc").glob("[0-9]*/stat") for text in (_text(path),) if text]
    return {text.split()[0] for text in stats if text.rpartition(")")[2].split()[1] == str(os.getpid())}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""  # it has ended since


@traced
def test_the_reference_survives_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    before = children()
    out, document = tmp_path / "out", tmp_path / "found.json"
    asked = ["resilience", "reference", "--trials", "40", "--out", str(out), "--json", str(document)]
    assert entry(asked) == ExitStatus.OK, capsys.readouterr().out
    found = json.loads(document.read_text("utf-8"))["stack"][0]
    assert found["trials"] == 40
    assert found["syncs"] >= 5
    written = ["resilience.html", "resilience.toml", "resilience.txt", "trials.jsonl"]
    assert sorted(path.name for path in out.iterdir() if path.name != LOCK) == written
    assert list((tmp_path / "scratch").iterdir()) == []
    assert children() <= before


@traced
@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(set(all_stacks()) - {"reference"}))
def test_a_stack_can_be_tried(name: str) -> None:
    (found,) = try_stacks(ResilienceRequest([all_stacks()[name]], 80, 0, 120.0, 2)).found
    assert len(found.tried) == 80 or len(found.tried) >= found.counts.states + found.counts.strikes
    assert {"new", "error"} <= {one.outcome for one in found.tried}
    assert not [one for one in found.tried if one.outcome in ("hang", "crash")]


@traced
@pytest.mark.nightly
def test_ten_thousand_trials_of_the_reference_are_none_of_them_silent() -> None:
    (found,) = try_stacks(ResilienceRequest([all_stacks()["reference"]], 10_500, 0, 120.0, 2)).found
    assert len(found.tried) >= 10_000
    assert not [one for one in found.tried if one.outcome not in ("old", "new", "other", "error")]
    assert all(one.outcome in ("old", "new") for one in found.tried if family_of(one.kind) == "crash")
