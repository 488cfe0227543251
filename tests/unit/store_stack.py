"""The results database as a stack: the harness's own store gets the crashes that it gives to checkpoints.

A state is what a run has after so many results. A save opens the database as `run` does, commits them one by one and
closes it; a load opens it and reads. (SQLite maps its index of the log, `-shm`, into memory, where strace sees no
write. It is gone after the close, so that the record explains the folder, and after a crash SQLite makes it anew.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from shardproof.resilience.stacks import Stack
from shardproof.store import DATABASE, Store

from tests import report_samples as samples

State = dict[str, str]
PLANNED = 6
BEGUN = "begun"


class ResultsDatabase:
    """Keeps one run of so many planned scenarios, and two results a generation."""

    def warm(self) -> None:
        """There is nothing to import that is not there."""

    def state(self, generation: int, run: int) -> State:
        results = [samples.passing(number) for number in range(2 * generation)]
        return {BEGUN: f"run {run}", **{result.id: _text(result.to_json()) for result in results}}

    def save(self, folder: Path, state: State, generation: int, run: int) -> None:
        planned = [samples.passing(number) for number in range(PLANNED)]
        with Store(folder / DATABASE) as store:
            latest = store.latest_run() or store.begin_run(
                [state[BEGUN]], 0, {}, planned=[result.scenario for result in planned]
            )
            kept = {result.id for result in store.results(latest)}
            for result in planned:
                if result.id in state and result.id not in kept:
                    store.observed(latest, result.id, result.id.encode() * 400)
                    store.finished(latest, result)

    def load(self, folder: Path) -> State:
        with Store(folder / DATABASE) as store:
            latest = store.latest_run()
            if latest is None:
                raise ValueError("no run")
            if len(store.planned(latest)) != PLANNED:
                raise AssertionError("a run without its plan")
            done = {result.id: _text(result.to_json()) for result in store.results(latest)}
            if any(store.observation(latest, key) != key.encode() * 400 for key in done):
                raise AssertionError("a result without its observation")
            return {BEGUN: store.run(latest).command[0], **done}

    def digests(self, state: State) -> Mapping[str, str]:
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in state.items()}


def _text(content: object) -> str:
    return json.dumps(content, sort_keys=True)


STORE = Stack("store", "the results database of `run`", "tests.unit.store_stack:ResultsDatabase")
