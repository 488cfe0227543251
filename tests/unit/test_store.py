"""The results database: nothing is lost, nothing of others is touched."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import report_samples as samples
from shardproof.errors import HarnessError, UsageError
from shardproof.merge import merge_runs, read_parts
from shardproof.store import DATABASE, SCHEMA_VERSION, Store, StoreFull
from shardproof.verdict import Verdict


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.sqlite"


def test_plan_results_and_resume(path: Path) -> None:
    results = samples.every_kind()
    with Store(path) as store:
        run = store.begin_run(["shardproof", "run"], 7, {"torch": "2.13.0"}, {"world above 8": 3})
        store.plan(run, [r.scenario for r in results])
        assert store.unfinished(run) == [r.scenario for r in results]
        store.finished_many(run, reversed(results[:4]))
    with Store(path) as store:
        assert store.latest_run() == run
        assert store.run(run).ended_at is None
        assert store.run(run).exclusions == {"world above 8": 3}
        assert store.planned(run) == [r.scenario for r in results]
        assert store.results(run) == list(results[:4])
        assert store.unfinished(run) == [r.scenario for r in results[4:]]
        for result in results[4:]:
            store.finished(run, result)
        store.end_run(run)
        assert store.results(run) == list(results)
        assert store.unfinished(run) == []
        assert store.run(run).ended_at is not None


def test_a_run_that_has_ended_goes_on_with_another_plan(path: Path) -> None:
    first, second, third = samples.every_kind()[:3]
    with Store(path) as store:
        run = store.begin_run([], 0, {}, planned=[first.scenario, second.scenario])
        store.finished_many(run, [first, second])
        store.observed(run, second.id, b"seen")
        store.end_run(run)
        store.replan(run, [first.scenario, third.scenario])
        assert (store.latest_run(), store.run(run).ended_at) == (run, None)
        assert store.planned(run) == [first.scenario, third.scenario]
        assert (store.results(run), store.unfinished(run)) == ([first], [third.scenario])
        store.finished(run, third)
        assert store.results(run) == [first, third]


def test_an_empty_database_has_no_run(path: Path) -> None:
    with Store(path) as store:
        assert store.latest_run() is None
        assert store.runs() == []
        with pytest.raises(UsageError, match="none: the database has no run"):
            store.run("20260101")


def test_planning_and_finishing_twice_is_once(path: Path) -> None:
    result = samples.passing()
    with Store(path) as store:
        run = store.begin_run([], 0, {})
        store.plan(run, [result.scenario, result.scenario])
        store.finished(run, replace(result, verdict=Verdict.UNKNOWN))
        store.finished(run, result)
        assert store.planned(run) == [result.scenario]
        assert store.results(run) == [result]


def test_observations_survive_and_prune_keeps_failures(path: Path) -> None:
    good, bad = samples.passing(), samples.crash()
    with Store(path) as store:
        run = store.begin_run([], 0, {})
        store.observed(run, good.id, b"good" * 100)
        store.observed_many(run, [(bad.id, b"bad" * 100)])
        assert store.observation(run, good.id) == b"good" * 100
        store.finished_many(run, [good, bad])
        assert store.prune(run) == 1
        assert store.observation(run, good.id) is None
        assert store.observation(run, bad.id) == b"bad" * 100
        assert store.observation(run, "missing") is None


@pytest.mark.parametrize("content", [b"garbage", "other"])
def test_a_damaged_observation_is_an_error_not_data(path: Path, content: bytes | str) -> None:
    with Store(path) as store:
        run = store.begin_run([], 0, {})
        store.observed_many(run, [("one", b"first"), ("two", b"second")])
    connection = sqlite3.connect(path)
    if content == "other":
        connection.execute(
            "UPDATE observations SET content = (SELECT content FROM observations WHERE scenario_id='two')"
        )
    else:
        connection.execute("UPDATE observations SET content = ?", (content,))
    connection.commit()
    connection.close()
    with Store(path) as store, pytest.raises(HarnessError, match="one"):
        store.observation(run, "one")


def test_a_result_is_found_by_the_start_of_its_id(path: Path) -> None:
    results = [samples.passing(n) for n in range(40)]
    with Store(path) as store:
        for seconds in (1.0, 2.0):
            run = store.begin_run([], 0, {})
            store.finished_many(run, [replace(r, duration_s=seconds) for r in results])
        assert store.result(results[0].id) == replace(results[0], duration_s=2.0)
        assert store.result(results[0].id[:8]).id == results[0].id
        for wrong in ("", "zzzz", "%"):
            with pytest.raises(UsageError, match="replay"):
                store.result(wrong)


def test_history_passes_over_what_says_nothing(path: Path) -> None:
    crash = samples.crash()
    verdicts = [crash, replace(crash, verdict=Verdict.UNKNOWN), replace(crash, verdict=Verdict.UNSUPPORTED)]
    with Store(path) as store:
        runs = []
        for result in verdicts:
            runs.append(store.begin_run([], 0, {}))
            store.plan(runs[-1], [crash.scenario])
            store.finished(runs[-1], result)
        last = store.begin_run([], 0, {})
        store.plan(last, [crash.scenario, samples.passing().scenario])
        assert list(store.before(last)) == [crash.id]
        assert store.before(last)[crash.id].run_id == runs[0]
        assert store.before(last)[crash.id].signature == crash.signature
        assert store.before(runs[0]) == {}


def _foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE precious (x)")
    connection.commit()
    connection.close()


def _newer(path: Path) -> None:
    Store(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()


def _damaged(path: Path) -> None:
    with Store(path) as store:
        run = store.begin_run([], 0, {})
        store.finished_many(run, [samples.passing(n) for n in range(200)])
    content = bytearray(path.read_bytes())
    content[4096 * 3 :] = bytes(len(content) - 4096 * 3)
    path.write_bytes(content)


def _truncated(path: Path) -> None:
    _damaged(path)
    path.write_bytes(path.read_bytes()[: 4096 * 2 + 100])


@pytest.mark.parametrize(
    "spoil",
    [_foreign, _newer, _damaged, _truncated, lambda path: path.write_text("not a database, but precious " * 99)],
)
def test_a_file_that_is_not_a_sound_database_of_ours_is_refused_and_kept(path: Path, spoil: object) -> None:
    spoil(path)  # type: ignore[operator]
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"results database.*allowed.*for example") as refused:
        Store(path)
    assert str(path) in str(refused.value)
    assert path.read_bytes() == before


def test_a_folder_or_an_impossible_place_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "absent" / "results.sqlite", tmp_path / "file" / "results.sqlite"):
        with pytest.raises(UsageError, match="results database"):
            Store(place)


def test_an_empty_file_becomes_a_database(path: Path) -> None:
    path.touch()
    with Store(path) as store:
        run = store.begin_run([], 0, {})
        store.finished(run, samples.passing(0))
    with Store(path) as store:
        assert store.latest_run() == run
        assert store.results(run) == [samples.passing(0)]


def test_a_full_disk_keeps_what_was_committed(path: Path) -> None:
    with Store(path) as store:
        run = store.begin_run([], 0, {})
        store.finished(run, samples.passing(0))
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages + 3}")

        def fill() -> None:
            for n in range(1, 1000):
                store.observed(run, str(n), bytes(range(256)) * n)
                store.finished(run, samples.passing(n))

        with pytest.raises(StoreFull, match="free some space"):
            fill()
        kept = store.results(run)
        assert kept
    with Store(path) as store:
        assert store.results(run) == kept


def test_many_threads_write_at_once(path: Path) -> None:
    with Store(path) as store:
        run = store.begin_run([], 0, {})

        def work(first: int) -> None:
            for n in range(first, first + 50):
                store.observed(run, samples.passing(n).id, b"x" * n)
                store.finished(run, samples.passing(n))

        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 50, 100, 150)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.results(run)) == 200


def test_a_killed_process_loses_nothing_that_was_committed(path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from shardproof.store import Store; import report_samples as s\n"
        "store = Store(Path(sys.argv[1])); run = store.begin_run([], 0, {})\n"
        "store.plan(run, [s.passing(n).scenario for n in range(3)]); store.finished(run, s.passing(0)); os._exit(9)"
    )
    root, tests = Path(__file__).parents[2], Path(__file__).parents[1]
    command = [sys.executable, "-c", script, str(path)]
    dead = subprocess.run(command, env={"PYTHONPATH": f"{root}:{root / 'harness'}:{tests}"}, cwd=root, check=False)
    assert dead.returncode == 9
    with Store(path) as store:
        run = store.latest_run()
        assert run is not None
        assert store.results(run) == [samples.passing(0)]
        assert len(store.unfinished(run)) == 2


def test_two_thousand_small_results_a_second(path: Path) -> None:
    results = [samples.passing(n) for n in range(1000)]
    with Store(path) as store:
        run = store.begin_run([], 0, {})
        began = time.process_time()
        for result in results:
            store.finished(run, result)
        assert time.process_time() - began < 0.5


def test_elements_stay_with_their_result(path: Path) -> None:
    with Store(path) as store:
        run = store.begin_run([], 0, {})
        store.finished_many(run, [replace(samples.mismatch(), elements=b"bits"), samples.crash()])
        assert [result.elements for result in store.results(run)] == [b"bits", b""]
        assert store.result(samples.mismatch().id).elements == b"bits"
        store.finished(run, samples.mismatch())
        assert store.result(samples.mismatch().id).elements == b""


def test_a_file_from_before_elements_were_kept_is_read(path: Path) -> None:
    with Store(path) as store:
        run = store.begin_run([], 0, {})
        store.finished(run, samples.mismatch())
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE elements")
    with Store(path) as store:
        assert store.results(run) == [samples.mismatch()]


def test_elements_go_through_a_merge(tmp_path: Path) -> None:
    kept = replace(samples.mismatch(), elements=b"bits")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    with Store(tmp_path / "a" / DATABASE) as store:
        run = store.begin_run(["run"], 0, {})
        store.plan(run, [kept.scenario])
        store.finished(run, kept)
    report = merge_runs(read_parts([tmp_path / "a" / DATABASE]), tmp_path / "b" / DATABASE, samples.ISSUES)
    assert [result.elements for result in report.results] == [b"bits"]
