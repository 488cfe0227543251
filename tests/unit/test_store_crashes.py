"""What a crash leaves of the results database: the same crash states that checkpoints get (`shardproof.resilience`).

A save of two results is recorded by strace, and every folder that a crash may leave by that record is loaded: the
process killed at each call, writes torn, what was not synced lost, or on disk in another order.

*Verifies*: that each of them opens as a sound database of one run with its whole plan; that no result is there without
its observation; that what had been stored before the save is there, and nothing that was never stored.
*Does not verify*: that the last commits outlive a power cut. They may not: the log is synced when SQLite copies it into
the database (`synchronous = NORMAL`), and what is lost with it runs again.
"""

from __future__ import annotations

import random
import shutil

import pytest
from shardproof.resilience.run import prepared
from shardproof.resilience.states import KINDS, crash_states, states_called

from tests.unit.store_stack import STORE

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

DEADLINE_S = 120.0
DRAWN = 60


def wrong_of(most: int | None) -> list[str]:
    """What is wrong with the crash states of the store, of all or of so many of each kind."""
    wrong = []
    with prepared(STORE, DEADLINE_S) as ready:
        trace, known, (lane,) = ready.source.trace, ready.known, ready.bench.lanes
        labels = [(state.label, state.kind) for state in crash_states(trace)]
        assert {kind for _, kind in labels} >= {kind for kind in KINDS if kind != "apart"}
        of_kind = [[label for label, kind in labels if kind == wanted] for wanted in KINDS]
        draw = random.Random(0)
        chosen = {label for every in of_kind for label in draw.sample(every, min(len(every), most or len(every)))}
        for state in states_called(chosen, trace):
            answer = lane.load(state.tree)
            if answer["ended"] != "ok":
                wrong.append(f"{state.label}: {answer}")
                continue
            found = answer["found"].items()
            if not known.old.items() <= found <= known.new.items():
                wrong.append(f"{state.label}: {len(found) - 1} results")
        print(f"{len(chosen)} of {len(labels)} crash states")
    return wrong


def test_no_crash_loses_what_was_stored_before() -> None:
    assert not wrong_of(DRAWN)


@pytest.mark.nightly
def test_no_crash_of_all_loses_what_was_stored_before() -> None:
    assert not wrong_of(None)
