"""Faults that strike while a checkpoint is saved or loaded: which there are, what they come to, and that they struck.

*Verifies*: on recorded lines, and on stacks of plain files, one of which swallows errors.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from shardproof.resilience.call_fault_runs import judged, struck
from shardproof.resilience.call_faults import SLOW_S, Strike, load_strikes_of, strikes_of
from shardproof.resilience.events import Call, Event, Trace
from shardproof.resilience.planned_trials import DISK, FAMILIES, family_of
from shardproof.resilience.run import NEW, OWN, ResilienceRequest, prepared, try_stacks
from shardproof.resilience.stacks import all_stacks
from shardproof.resilience.trace import calls_of, read_trace, recorded_of
from shardproof.resilience.trial import TrialVerdict

from tests import plain_stack

traced = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
PLAIN, _, SILENT = plain_stack.STACKS


def quoted(text: str) -> str:
    return '"' + "".join(f"\\x{byte:02x}" for byte in text.encode()) + '"'


def at(number: int, path: str) -> str:
    return f"{number}<{quoted(path)[1:-1]}>"


LINES = (
    "1 clone3({flags=CLONE_VM}, 88) = 2",
    f"1 openat(AT_FDCWD<>, {quoted('/ck/a')}, O_WRONLY|O_CREAT|O_TRUNC, 0666) = {at(3, '/ck/a')}",
    f"2 write({at(9, '/elsewhere')}, {quoted('1')}, 1) = 1",
    f"1 write({at(3, '/ck/a')}, {quoted('/ck/b')}, 5) = 5",
    f"1 write({at(3, '/ck/a')}, {quoted('67')}, 2) = 2",
    f"1 fsync({at(3, '/ck/a')}) = 0",
    f"1 rename({quoted('/ck/a')}, {quoted('/ck/b')}) = 0",
    f"1 unlinkat({at(4, '/ck')}, {quoted('b')}, 0) = 0",
)


def test_a_call_is_found_again_by_its_path_and_number() -> None:
    calls = [call for *_, call in recorded_of(LINES, Path("/ck"), {})]
    assert [(call.name, call.path, call.nth) for call in calls] == [
        ("openat", "a", 1), ("write", "a", 1), ("write", "a", 2), ("fsync", "a", 1), ("rename", "a", 1),
        ("unlinkat", "", 1),
    ]  # fmt: skip
    assert len(calls_of(LINES, Path("/ck"))) == len(calls)


def trace_of(*pairs: tuple[Event, Call]) -> Trace:
    return Trace({}, tuple(event for event, _ in pairs), tuple(call for _, call in pairs))


WRITTEN = trace_of(
    (Event("create", "a"), Call("openat", "a", 1)), (Event("write", "a", data=b"x" * 100), Call("write", "a", 1)),
    (Event("sync_file", "a"), Call("fsync", "a", 1)), (Event("write", "b", data=b"x" * 10), Call("write", "b", 1, 1)),
    (Event("rename", "a", "c"), Call("rename", "a", 1)),
)  # fmt: skip


def test_each_call_gets_the_errors_that_it_may_give() -> None:
    labels = [strike.label for strike in strikes_of(WRITTEN, 1)]
    assert labels == [
        "ENOSPC@0", "ENOSPC@1", "ENOSPC@2", "ENOSPC@3", "ENOSPC@4", "EIO@0", "EIO@1", "EIO@2", "EIO@3", "EIO@4",
        "EACCES@0", "EACCES@4", "short@1", "slow@0", "slow@1", "slow@2", "slow@3", "slow@4",
    ]  # fmt: skip
    ranks = [strike for strike in strikes_of(WRITTEN, 2) if family_of(strike.kind) == "ranks"]
    assert Counter(strike.kind for strike in ranks) == {"killed-rank": 5, "stopped-rank": 5}
    assert ranks[3].what == "rank 1 killed before event 3, write b 0+10"


def test_strace_and_the_kernel_are_told() -> None:
    strikes = (*strikes_of(WRITTEN, 1), *strikes_of(WRITTEN, 2), *load_strikes_of([Call("read", "a", 7)]))
    told = {strike.label: strike for strike in strikes}
    assert told["EIO@1"].injected == "write:error=EIO:when=1"
    assert told["slow@4"].injected == f"rename:delay_enter={int(SLOW_S * 1e6)}:when=1"
    assert told["killed-rank@2"].injected == "fsync:signal=SIGKILL:when=1"
    assert told["load-EIO@0"].injected == "read:error=EIO:when=7"
    assert told["load-EIO@0"].of_load
    assert (told["short@1"].injected, told["short@1"].most) == ("", 50)
    assert not [strike for strike in strikes_of(WRITTEN, 2) if strike.kind == "short"]
    assert "short@3" not in told  # byte 5 of b would have been byte 5 of a before


def test_every_kind_is_of_one_family() -> None:
    kinds = [kind for kinds in FAMILIES.values() for kind in kinds]
    assert len(kinds) == len(set(kinds))
    assert [family_of(kind) for kind in DISK] == ["disk"] * len(DISK)


OK, HUNG, DIED = {"ended": "ok"}, {"ended": "hang"}, {"ended": "crash"}
RAISED = {"ended": "error", "why": "OSError: no"}


@pytest.mark.parametrize(
    ("kind", "call", "said", "gives", "outcome"),
    [
        ("EIO", "write", RAISED, "old", "old"), ("EIO", "write", RAISED, "silent", "silent"),
        ("EIO", "write", OK, "new", "new"), ("EIO", "write", OK, "old", "lied"), ("EIO", "write", OK, "error", "lied"),
        ("EIO", "fsync", OK, "new", "lied"), ("slow", "fsync", OK, "new", "new"), ("EIO", "write", HUNG, "old", "hang"),
        ("ENOSPC", "write", DIED, "new", "crash"), ("stopped-rank", "write", HUNG, "error", "error"),
        ("killed-rank", "write", RAISED, "silent", "silent"),
    ],
)  # fmt: skip
def test_what_a_struck_save_comes_to(kind: str, call: str, said: dict[str, str], gives: str, outcome: str) -> None:
    strike = Strike("x@1", kind, Call(call, "a", 1), "")
    answer = {"why": "killed by SIGSEGV", **said}
    verdict = judged(strike, answer, TrialVerdict(gives))  # type: ignore[arg-type]
    assert verdict.outcome == outcome
    assert "the save" in verdict.why


@traced
def test_a_stack_that_swallows_errors_is_said_to_lie_and_a_call_that_does_not_come_to_be_missed() -> None:
    with prepared(SILENT, 30.0) as ready:
        lane, folders = ready.bench.lanes[0], ready.source.folders

        def outcome(strike: Strike) -> str:
            return struck(lane, strike, folders.old, folders.new, ready.known, NEW, OWN).outcome

        strikes = {strike.label: strike for strike in strikes_of(ready.source.trace, 1)}
        assert outcome(strikes["ENOSPC@1"]) == "lied"
        assert outcome(strikes["EIO@6"]) == "lied"
        assert outcome(strikes["short@1"]) == "lied"
        assert outcome(strikes["slow@1"]) == "new"
        assert outcome(Strike("EIO@1", "EIO", Call("write", "a.new", 99), "")) == "missed"


@traced
@pytest.mark.nightly
def test_every_strike_at_a_stack_that_raises_is_made_and_none_of_them_is_missed_or_lied_about() -> None:
    (found,) = try_stacks(ResilienceRequest([PLAIN], 400, 0, 30.0, 2)).found
    kinds = Counter(one.kind for one in found.tried if family_of(one.kind) in ("disk", "ranks"))
    assert set(kinds) == {*DISK, "load-killed-rank"}
    assert sum(kinds.values()) == found.counts.strikes
    assert not [one for one in found.tried if one.outcome in ("lied", "missed", "hang", "crash")]


RANKS = (
    f"1 mkdir({quoted('/elsewhere')}, 0777) = 0",
    "1 clone(child_stack=NULL, flags=CLONE_CHILD_SETTID|SIGCHLD) = 2",
    "1 clone(child_stack=NULL, flags=CLONE_CHILD_SETTID|SIGCHLD <unfinished ...>",
    f"3 openat(AT_FDCWD<>, {quoted('/ck/r1')}, O_WRONLY|O_CREAT, 0666) = {at(3, '/ck/r1')}",
    "1 <... clone resumed>, child_tidptr=0x1) = 3",
    "3 clone3({flags=CLONE_VM|CLONE_FILES|CLONE_THREAD} => {parent_tid=[4]}, 88) = 4",
    f"2 rmdir({quoted('/ck/.shardproof-stage-1')}) = -1 ENOENT (No such file or directory)",
    f"4 write({at(3, '/ck/r1')}, {quoted('1')}, 1) = 1",
    f"2 mkdir({quoted('/ck/r0')}, 0777) = 0",
)


def test_a_record_of_several_ranks_knows_who_did_what_and_in_which_stage() -> None:
    calls = [call for *_, call in recorded_of(RANKS, Path("/ck"), {}, 2)]
    assert [(call.path, call.rank, call.stage) for call in calls] == [("r1", 1, 0), ("r1", 1, 0), ("r0", 0, 1)]
    assert {call.rank for *_, call in recorded_of(RANKS, Path("/ck"), {})} == {0}


def test_what_several_ranks_read_alike_is_struck_once_and_on_each_of_them_alone() -> None:
    calls = [Call("read", "m", 1, 0), Call("read", "m", 1, 1), Call("read", "r1", 1, 1)]
    strikes = list(load_strikes_of(calls))
    assert [strike.call for strike in strikes if strike.kind == "load-EIO"] == [calls[0], calls[2]]
    ranks = [strike for strike in strikes if family_of(strike.kind) == "ranks"]
    assert Counter(strike.kind for strike in ranks) == {
        "load-killed-rank": 3, "load-stopped-rank": 3, "load-EIO-rank": 2,
    }  # fmt: skip
    assert (
        ranks[1].what
        == "while it is loaded, read of m, call 1 on it of rank 1, is not made: the rank is killed before it"
    )
    assert ranks[-1].injected == "read:error=EIO:when=1"
    alone = [strike.kind for strike in load_strikes_of(calls[:1])]
    assert alone == ["load-EIO", "load-slow", "load-killed-rank"]


def opened(thread: int, path: str) -> str:
    return f"{thread} openat(AT_FDCWD<>, {quoted(path)}, O_WRONLY|O_CREAT, 0666) = {at(3, path)}"


@pytest.mark.parametrize("ranks", [["a", "b"], ["b", "a"]])
def test_the_order_in_which_ranks_load_is_not_that_of_their_calls(ranks: list[str]) -> None:
    forks = [f"1 fork() = {number}" for number in (2, 3)]
    own = {"a": opened(2, "/ck/a"), "b": opened(3, "/ck/b")}
    calls = calls_of([*forks, *(own[name] for name in ranks)], Path("/ck"), 2)
    assert [(call.path, call.rank) for call in calls] == [("a", 0), ("b", 1)]


def events_of(tmp_path: Path, lines: list[str], *paths: str) -> list[str]:
    folder, record = tmp_path / "ck", tmp_path / "record"
    folder.mkdir()
    for path in paths:
        (folder / path).touch()
    place = "".join(f"\\x{byte:02x}" for byte in str(folder.resolve()).encode())
    record.write_text("\n".join(line.replace("\\x2f\\x63\\x6b", place) for line in lines) + "\n")
    return [str(event) for event in read_trace(record, folder, {}, 1).events]


@pytest.mark.parametrize("order", [(2, 3), (3, 2)])
def test_what_helpers_do_side_by_side_is_told_one_after_the_other(tmp_path: Path, order: tuple[int, int]) -> None:
    """Two processes that write a file each, between two changes of the one that has forked them."""
    own = {2: opened(2, "/ck/z"), 3: opened(3, "/ck/y")}
    lines = [opened(1, "/ck/b"), "1 fork() = 2", "1 fork() = 3", *(own[number] for number in order), opened(1, "/ck/a")]
    assert events_of(tmp_path, lines, "a", "b", "y", "z") == ["create b", "create z", "create y", "create a"]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_threads_of_a_stage_are_told_by_the_names_that_they_change(tmp_path: Path, order: tuple[int, int]) -> None:
    """Which of two threads takes which file is chance, too."""
    marked = [f"1 rmdir({quoted(f'/ck/.shardproof-stage-{stage}')}) = -1 ENOENT (No such file)" for stage in (1, 2)]
    side = [opened(thread, path) for thread, path in zip(order, ("/ck/c", "/ck/b"), strict=True)]
    lines = ["1 clone3({flags=CLONE_THREAD|CLONE_FILES}, 88) = 2", marked[0], *side, marked[1], opened(1, "/ck/a")]
    assert events_of(tmp_path, lines, "a", "b", "c") == ["create b", "create c", "create a"]


@traced
@pytest.mark.nightly
def test_one_rank_of_a_load_is_struck_alone_and_the_folder_loads_after_it() -> None:
    with prepared(all_stacks()["dcp-2-ranks"], 60.0) as ready:
        lane, folders = ready.bench.lanes[0], ready.source.folders
        strikes = {strike.kind: strike for strike in load_strikes_of(ready.source.loads) if strike.call.rank == 1}
        for kind, said in {"load-killed-rank": "rank 1: it was", "load-EIO-rank": "Input/output error"}.items():
            verdict = struck(lane, strikes[kind], folders.old, folders.new, ready.known, NEW, OWN)
            assert verdict.outcome == "new"
            assert said in verdict.why
