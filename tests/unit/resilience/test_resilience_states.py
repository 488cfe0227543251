"""Crash states of hand-made traces: legal, complete where it is said so, and what the known cases must give."""

from __future__ import annotations

from itertools import combinations
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from shardproof.resilience.events import Call, Event, Trace
from shardproof.resilience.states import BLOCK, MOST_LOOSE, State, crash_states, states_called
from shardproof.resilience.steps import ALL, Data, Name, Steps, Sync

BASE = {"a": b"old"}


def states_of(*events: Event, base: dict[str, bytes | None] | None = None) -> list[State]:
    return list(crash_states(Trace(BASE if base is None else base, events)))


def trees(*events: Event, base: dict[str, bytes | None] | None = None) -> list[dict[str, bytes | None]]:
    return [dict(state.tree) for state in states_of(*events, base=base)]


def replaced(*syncs: str) -> list[Event]:
    """A file that is written beside the old one and renamed over it; with the syncs that are named."""
    file, folder = [Event("sync_file", "b")] * ("file" in syncs), [Event("sync_dir", "")] * ("folder" in syncs)
    return [Event("create", "b"), Event("write", "b", data=b"new"), *file, Event("rename", "b", "a"), *folder]


def test_a_file_written_in_place_may_be_old_empty_torn_or_new() -> None:
    found = trees(Event("truncate", "a"), Event("write", "a", data=b"news"))
    assert [tree["a"] for tree in found] == [b"old", b"", b"news", b"ne", b"\0\0\0\0"]


def test_a_synced_file_renamed_over_the_old_one_is_one_or_the_other() -> None:
    assert {tree["a"] for tree in trees(*replaced("file", "folder"))} == {b"old", b"new"}


def test_a_rename_may_survive_the_bytes_that_were_not_synced() -> None:
    assert {b"", b"\0\0\0", b"n"} <= {tree["a"] for tree in trees(*replaced("folder"))}


def test_what_a_sync_put_on_disk_is_in_every_later_state() -> None:
    events = [*replaced("file", "folder"), Event("write", "a", offset=3, data=b"er")]
    assert all(s.tree["a"] in (b"new", b"newer", b"newe", b"new\0\0") for s in states_of(*events) if s.crash >= 5)


def test_a_name_in_a_folder_that_was_not_synced_may_be_lost_though_the_file_was_synced() -> None:
    events = [Event("create", "c"), Event("write", "c", data=b"x"), Event("sync_file", "c")]
    assert BASE in [dict(s.tree) for s in states_of(*events) if s.crash == 3] or BASE in trees(*events)
    assert not any("c" not in s.tree for s in states_of(*events, Event("sync_dir", "")) if s.crash == 4)


def test_what_lies_in_a_folder_whose_name_is_lost_is_lost() -> None:
    events = [Event("mkdir", "d"), Event("create", "d/x"), Event("sync_dir", "d")]
    assert trees(*events) == [{"a": b"old"}, {"a": b"old", "d": None}, {"a": b"old", "d": None, "d/x": b""}]


def test_a_renamed_folder_takes_along_what_lies_in_it() -> None:
    events = [Event("mkdir", "n"), Event("create", "n/x"), Event("sync_dir", "n"), Event("rename", "n", "g")]
    last = Steps(Trace(BASE, (*events, Event("write", "g/x", data=b"1"))))
    assert last.result(dict.fromkeys((0, 1, 3, 4), ALL)) == {"a": b"old", "g": None, "g/x": b"1"}


def test_a_write_is_torn_at_its_first_block_its_half_and_before_its_last_block() -> None:
    data = bytes(range(1, 256)) * 100
    found = [s for s in states_of(Event("write", "a", data=data)) if s.kind == "torn"]
    assert [s.kept[0] for s in found] == [BLOCK, len(data) // 2, len(data) - BLOCK]


def test_labels_are_unique_and_the_same_for_equal_traces() -> None:
    first, second = ([s.label for s in states_of(*replaced())] for _ in range(2))
    assert first == second
    assert len(set(first)) == len(first)


EVENTS = st.sampled_from(
    [
        Event("write", "a", offset=0, data=b"AB"),
        Event("write", "a", offset=2, data=b"CD"), Event("truncate", "a"), Event("sync_file", "a"),
        Event("sync_dir", ""), Event("sync_all", ""),
    ]
)  # fmt: skip


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Up to six events on a file that is there, one that is made, and one that is renamed over the other."""
    events, there = [], False
    for _ in range(draw(st.integers(1, 6))):
        choices = [draw(EVENTS)]
        choices += (
            [Event("write", "b", data=b"xyz"), Event("sync_file", "b"), Event("unlink", "b"), Event("rename", "b", "a")]
            if there
            else [Event("create", "b")]
        )
        events.append(draw(st.sampled_from(choices)))
        there = there if events[-1].kind not in ("create", "unlink", "rename") else events[-1].kind == "create"
    return Trace(BASE, tuple(events))


def legal(steps: Steps, kept: dict[int, int], crash: int) -> bool:
    """Whether a set of steps may be all that is on disk, decided step by step and not as the builder does."""
    for index, step in enumerate(steps.steps[:crash]):
        if isinstance(step, Sync):
            for before in range(index):
                one = steps.steps[before]
                forced = step == Sync() or (
                    (isinstance(one, Data) and one.file == step.file) or (isinstance(one, Name) and step.folder == 0)
                )
                if forced and not isinstance(one, Sync) and kept.get(before) != ALL:
                    return False
    for index in kept:
        one = steps.steps[index]
        for before in range(index):
            other = steps.steps[before]
            if isinstance(one, Name) and isinstance(other, Name):
                needed = bool({slot for slot, _ in one.slots} & {slot for slot, _ in other.slots})
            else:
                needed = isinstance(one, Data) and isinstance(other, Data) and one.file == other.file
                needed = needed and isinstance(other, Data) and other.size is not None
            if needed and before not in kept:
                return False
    return True


@given(traces())
def test_every_state_is_reached_by_a_legal_set_of_steps(trace: Trace) -> None:
    steps = Steps(trace)
    for state in crash_states(trace):
        torn = state.crash + (state.kind == "torn")
        assert all(index < torn for index in state.kept)
        assert legal(steps, dict(state.kept), state.crash), state.label
        assert steps.result(state.kept) == state.tree


@given(traces())
def test_every_prefix_is_among_the_states(trace: Trace) -> None:
    steps = Steps(trace)
    found = [dict(state.tree) for state in crash_states(trace)]
    for crash in range(len(trace.events) + 1):
        kept = {i: ALL for i in range(crash) if not isinstance(steps.steps[i], Sync)}
        assert steps.result(kept) in found


@given(traces())
def test_short_traces_have_every_legal_state_at_their_end(trace: Trace) -> None:
    """With at most four loose steps, at most two missing or at most two there are all that there is."""
    steps = Steps(trace)
    end = len(steps.steps)
    changes = [i for i, step in enumerate(steps.steps) if not isinstance(step, Sync)]
    if len(changes) > 4:
        return
    found = [dict(state.tree) for state in crash_states(trace)]
    for size in range(len(changes) + 1):
        for some in combinations(changes, size):
            kept = dict.fromkeys(some, ALL)
            if legal(steps, kept, end):
                assert steps.result(kept) in found


@given(traces(), st.randoms())
def test_states_are_found_again_by_their_labels(trace: Trace, draw: Random) -> None:
    every = list(crash_states(trace))
    some = [state for state in every if draw.random() < 0.5]
    assert list(states_called({state.label for state in some}, trace)) == some


def test_a_long_save_has_a_bounded_number_of_states() -> None:
    """A save of 203 events had more states than fit into memory."""
    long = [Event("create", "b"), *(Event("write", "b", offset=n, data=bytes([n])) for n in range(200))]
    last = [state.label for state in crash_states(Trace({}, tuple(long[: MOST_LOOSE + 20])))]
    dropped = {label for label in last if label.startswith(f"reordered@{MOST_LOOSE + 20}-less-")}
    assert len(dropped) <= MOST_LOOSE * (MOST_LOOSE + 1) // 2
    assert not any(label.endswith("-less-5") for label in dropped), "an early one"


def of_ranks(*calls: tuple[str, int, int]) -> Trace:
    """A trace of writes to files of ranks: path, rank and stage of each."""
    events = tuple(Event("write", path, data=bytes([number + 1])) for number, (path, _, _) in enumerate(calls))
    base = {path: b"0" for path, _, _ in calls}
    return Trace(base, events, tuple(Call("write", path, 1, rank, stage) for path, rank, stage in calls))


def test_ranks_of_one_stage_are_apart_and_a_later_stage_has_all_of_the_earlier() -> None:
    trace = of_ranks(("a", 0, 1), ("b", 1, 1), ("c", 2, 1), ("m", 0, 2))
    found = {state.label: "".join(p for p, d in state.tree.items() if d != b"0") for state in crash_states(trace)}
    apart = {label: there for label, there in found.items() if label.startswith("apart@")}
    assert sorted(apart.values()) == ["ac", "b", "bc", "c"]  # beside the prefixes "", "a", "ab", "abc" and "abcm"
    assert apart["apart@0-with-1"] == "b"
    assert {there for there in found.values() if "m" in there} == {"abcm"} | {
        there for label, there in found.items() if "m" in there and label.startswith(("lost", "reordered"))
    }
