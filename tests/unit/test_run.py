"""The whole flow by its command line: exit statuses, files, shards, and runs that are cut short and go on.

Runs in this process share one server, whose plugin `tests.unit.flow_faults` makes judges fail for certain seeds. What
needs a process of its own to interrupt, kill or starve starts `python -m shardproof`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shardproof.cli.main import entry
from shardproof.cluster import on_ray
from shardproof.cluster.node import Answer, NodeLaboratory, Work
from shardproof.laboratory import laboratory
from shardproof.report.progress import Progress
from shardproof.request import Request
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.store import DATABASE, Store, StoreFull
from shardproof.verdict import ExitStatus
from shardproof.world.server import ForkServer

from tests.paths import PYTHONPATH
from tests.unit import flow_system
from tests.unit.cluster_stub import StubCluster, StubSlot

ROOT = Path(__file__).parents[2]
DISAGREES = 104  # a seed, as in `flow_faults`
SMALL = ("--system", "reference", "--set", "model=short", "--set", "mesh=1x1x1,1x2x1", "--set", "program=train,restart")
RESULT_KEYS = {
    "id", "scenario", "system", "version", "verdict", "failed_op", "differences", "explanations", "error", "emulated",
    "duration_s", "known_issue",
}  # fmt: skip
DIFFERENCE_KEYS = {
    "name", "role", "kind", "ranks", "op_index", "mismatched", "total", "max_ulp", "expected_digest", "observed_digest",
}  # fmt: skip


class KeptServer:
    """A server that outlives the laboratories that use it."""

    def __init__(self, server: ForkServer) -> None:
        self.start, self.submit, self.call, self.close = server.start, server.submit, server.call, server.close

    def __enter__(self) -> KeptServer:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptServer]:
    with ForkServer(plugins=["tests.unit.flow_system", "tests.unit.flow_faults"], workers=2) as server:
        yield KeptServer(server)


@pytest.fixture
def shardproof(
    kept: KeptServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., int]:
    """The command line in this process, in an empty folder, two scenarios at once, on the kept server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(laboratory, "ForkServer", lambda **options: kept)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    return lambda *words: entry([str(word) for word in words])


def document(path: Path | str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(Path(path).read_text())
    return loaded


def verdicts(path: Path | str) -> dict[str, int]:
    return {verdict: n for verdict, n in document(path)["run"]["counts"].items() if n}


# --- exit statuses and files --------------------------------------------------------------------------


def test_a_run_that_passes(shardproof: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    words = ("run", *SMALL, "--sample", 6, "--out", "out", "--json", "deep/run.json", "--junit", "run.xml")
    assert shardproof(*words) == ExitStatus.OK
    shown = capfd.readouterr()
    assert "6 pass" in shown.out
    assert "report: out/index.html" in shown.out
    run, results = document("deep/run.json")["run"], document("deep/run.json")["results"]
    assert {"versions", "seed", "command", "counts"} <= run.keys()
    assert {"torch", "shardproof", "python"} <= run["versions"].keys()
    assert (verdicts("deep/run.json"), run["missing"]) == ({"pass": 6}, [])
    assert len(results) == 6
    for result in results:
        assert result.keys() >= RESULT_KEYS
        assert (result["verdict"], result["differences"], result["error"]) == ("pass", [], None)
    assert Path("out/index.html").is_file()
    assert Path("run.xml").read_text().count("<testcase") == 6
    with Store(Path("out") / DATABASE) as store:
        (found,) = store.runs()
        assert found.ended_at
        assert all(store.observation(found.id, result["id"]) is None for result in results), "pruned: they passed"


def test_a_run_that_fails(shardproof: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--system", "reference", "--set", "model=short", "--set", "mesh=1x2x1", "--set", "program=resume")
    assert shardproof("run", *words, "--sample", 1, "--fault", "no-op-load", "--json", "run.json") == ExitStatus.FAILURE
    assert "mismatch" in capfd.readouterr().out
    (result,) = document("run.json")["results"]
    assert result["verdict"] == "mismatch"
    assert result["failed_op"].keys() == {"index", "name"}
    assert result["scenario"]["faults"] == "no-op-load"
    assert result["differences"]
    assert all(difference.keys() >= DIFFERENCE_KEYS for difference in result["differences"])
    assert all(e.keys() >= {"mechanism", "confidence", "evidence", "bug_ids"} for e in result["explanations"])
    with Store(Path("reports/latest") / DATABASE) as store:
        assert store.observation(str(store.latest_run()), result["id"]), "a failure keeps its observation"
    assert shardproof("explain", result["id"][:6]) == ExitStatus.OK
    assert shardproof("explain", result["id"], "--toml") == ExitStatus.OK
    Path("bug.toml").write_text(capfd.readouterr().out.partition("schema")[2].join(["schema", ""]))
    assert shardproof("replay", result["id"], "--times", 2) == ExitStatus.FAILURE
    assert "mismatch: 2 of 2" in capfd.readouterr().out
    assert shardproof("run", "bug.toml", "--json", "again.json") == ExitStatus.FAILURE
    (again,) = document("again.json")["results"]
    assert again["differences"] == result["differences"]
    assert shardproof("report", "reports/bug") == ExitStatus.OK
    Path("reports/bug").rename("moved")
    capfd.readouterr()
    assert shardproof("report", "moved") == ExitStatus.OK
    assert f"shardproof replay {result['id']} --out moved\n" in capfd.readouterr().out, "where the run lies now"


def test_a_crash_names_its_error(shardproof: Callable[..., int]) -> None:
    Path("bug.toml").write_text(flow_system.ECHO.with_axes({"seed": "7"}).to_toml())
    assert shardproof("run", "bug.toml", "--set", "faults=", "--json", "run.json") == ExitStatus.OK
    assert verdicts("run.json") == {"pass": 1}


def test_oracles_that_disagree_are_the_harness_failing(shardproof: Callable[..., int]) -> None:
    words = ("run", *SMALL, "--set", f"seed=0,{DISAGREES}", "--sample", 6, "--json", "run.json")
    assert shardproof(*words) == ExitStatus.HARNESS
    assert verdicts("run.json").keys() == {"pass", "unknown"}
    unknown = [result for result in document("run.json")["results"] if result["verdict"] == "unknown"]
    assert all("twin and reference disagree" in result["reason"] for result in unknown)
    assert {result["scenario"]["seed"] for result in unknown} == {str(DISAGREES)}


def test_a_shard_without_scenarios_is_nothing_run(shardproof: Callable[..., int]) -> None:
    words = (*SMALL, "--sample", 1, "--shard")
    empty = next(i for i in range(1, 4) if entry(["plan", *map(str, words), f"{i}/3"]) != ExitStatus.OK)
    assert shardproof("run", *words, f"{empty}/3", "--json", "run.json") == ExitStatus.NOTHING_RUN
    assert document("run.json")["results"] == []


def test_shards_merge_into_the_unsharded_run(shardproof: Callable[..., int]) -> None:
    words = (*SMALL, "--sample", 9, "--json")
    parts = []
    assert shardproof("run", *words, "whole.json", "--out", "whole") == ExitStatus.OK
    for i in (1, 2, 3):
        assert shardproof("run", *words, f"{i}.json", "--shard", f"{i}/3") in (ExitStatus.OK, ExitStatus.NOTHING_RUN)
        parts.append(Path("reports/latest").resolve())
    assert [part.name[-5:] for part in parts] == ["-1of3", "-2of3", "-3of3"]
    assert shardproof("merge", *parts, "--out", "all", "--json", "all.json") == ExitStatus.OK
    assert results_but_times("all.json") == results_but_times("whole.json")
    assert document("all.json")["run"]["exclusions"] == document("whole.json")["run"]["exclusions"]


def results_but_times(path: str) -> dict[str, Any]:
    times = ("duration_s", "phases_s", "previous")
    return {r["id"]: {k: v for k, v in r.items() if k not in times} for r in document(path)["results"]}


def test_a_cluster_gives_the_same_results_and_is_gone_on_with_here(
    shardproof: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    laboratories = dict[StubSlot, NodeLaboratory]()

    def examine(slot: StubSlot, scenario: Scenario, work: Work) -> Answer:
        return laboratories[slot].examine(scenario, work)

    def ready(slot: StubSlot) -> str:
        laboratories[slot] = NodeLaboratory(slot.setting, slot.cpus)
        return laboratories[slot].ready()

    monkeypatch.setattr(on_ray, "require_ray", lambda: None)
    monkeypatch.setattr(on_ray, "RayCluster", lambda address, log: StubCluster(examine, {"a": 1, "b": 1}, ready=ready))
    words = ("run", *SMALL, "--set", f"seed=0,{DISAGREES}", "--sample", 8, "--out", "far", "--json", "far.json")
    cluster = ("--executor", "ray", "--ray-address", "10.0.0.7:6379")
    with monkeypatch.context() as patch:
        cut_short(patch, 3, KeyboardInterrupt)
        assert shardproof(*words, *cluster) == 130
    assert shardproof(*words) == ExitStatus.HARNESS, "an unknown result, as planted"
    assert ": 3 of 8 done" in capfd.readouterr().err
    shutil.move("far.json", "mixed.json")
    assert shardproof(*words, *cluster) == ExitStatus.HARNESS
    assert results_but_times("far.json") == results_but_times("mixed.json")
    for of_slot in laboratories.values():
        of_slot.close()
    assert len(laboratories) == 4, "two slots of each of two runs"


# --- cut short ----------------------------------------------------------------------------------------


def cut_short(monkeypatch: pytest.MonkeyPatch, after: int, error: type[BaseException]) -> None:
    """The run meets an error right before it would keep result number `after` + 1."""
    finished = Progress.finished

    def failing(self: Progress, result: Result) -> None:
        if self.tally.done == after:
            raise error
        finished(self, result)

    monkeypatch.setattr(Progress, "finished", failing)


def test_ctrl_c_keeps_results_and_the_same_command_goes_on(
    shardproof: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("run", *SMALL, "--sample", 8, "--out", "out", "--json", "run.json")
    with monkeypatch.context() as patch:
        cut_short(patch, 3, KeyboardInterrupt)
        assert shardproof(*words) == 130
    assert "the same command resumes the run" in capfd.readouterr().err
    assert (verdicts("run.json"), len(document("run.json")["run"]["missing"])) == ({"pass": 3}, 5)
    assert Path("out/index.html").is_file()
    kept = {result["id"]: result for result in document("run.json")["results"]}
    assert shardproof(*words) == ExitStatus.OK
    assert ": 3 of 8 done" in capfd.readouterr().err
    after = {result["id"]: result for result in document("run.json")["results"]}
    assert len(after) == 8
    assert {key: after[key] for key in kept} == kept, "what was kept did not run again"
    with Store(Path("out") / DATABASE) as store:
        assert len(store.runs()) == 1
    assert shardproof(*words) == ExitStatus.OK
    assert "resuming" not in capfd.readouterr().err, "a finished run is not resumed"


def test_a_run_to_which_its_command_had_added_scenarios_goes_on(
    shardproof: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("run", *SMALL, "--out", "out", "--sample", "3")
    with monkeypatch.context() as patch:
        cut_short(patch, 1, KeyboardInterrupt)
        assert shardproof(*words) == 130
    with Store(Path("out") / DATABASE) as store:
        (run,) = store.runs()
        first = store.planned(run.id)[0]
        store.plan(run.id, [replace(first, program="build step step")])
    assert shardproof(*words) == ExitStatus.OK
    assert ": 1 of 4 done" in capfd.readouterr().err
    with Store(Path("out") / DATABASE) as store:
        assert len(store.runs()) == 1
        assert len(store.results(run.id)) == 4


@pytest.mark.parametrize("change", ["plan", "versions"])
def test_another_plan_or_another_release_starts_anew(
    shardproof: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], change: str
) -> None:
    words = ["run", *SMALL, "--out", "out", "--sample", "3"]
    with monkeypatch.context() as patch:
        cut_short(patch, 1, KeyboardInterrupt)
        assert shardproof(*words) == 130
    if change == "plan":
        words[-1] = "4"
    else:
        monkeypatch.setattr(Request, "versions", lambda request: {"torch": "9.9"})
    assert shardproof(*words) == ExitStatus.OK
    assert "resuming" not in capfd.readouterr().err


def test_a_full_store_is_status_3_and_keeps_what_it_has(
    shardproof: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Full(StoreFull):
        def __init__(self) -> None:
            super().__init__("no space left")

    words = ("run", *SMALL, "--sample", 5, "--out", "out")
    with monkeypatch.context() as patch:
        cut_short(patch, 2, Full)
        assert shardproof(*words) == ExitStatus.HARNESS
    assert "no space left" in capfd.readouterr().err
    with Store(Path("out") / DATABASE) as store:
        assert len(store.results(str(store.latest_run()))) == 2
    assert shardproof(*words) == ExitStatus.OK
    assert ": 2 of 5 done" in capfd.readouterr().err


# --- processes that are interrupted, killed and starved -----------------------------------------------


def start(folder: Path, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shardproof", *map(str, words)],
        cwd=folder, env={**os.environ, "PYTHONPATH": PYTHONPATH}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def results_of(folder: Path) -> list[str]:
    """Ids of the results stored so far, read while another process writes."""
    if not (folder / DATABASE).exists():
        return []
    with closing(sqlite3.connect(f"file:{folder / DATABASE}?mode=ro", uri=True, timeout=10.0)) as connection:
        try:
            return [row[0] for row in connection.execute("SELECT scenario_id FROM results ORDER BY rowid")]
        except sqlite3.OperationalError:
            return []  # before its tables are there


def wait_for_results(process: subprocess.Popen[str], folder: Path, number: int) -> list[str]:
    deadline = time.monotonic() + 60.0
    while len(found := results_of(folder)) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child, *descendants(child)}
    return found


def alive(pids: Sequence[int] | set[int]) -> set[int]:
    """Those that still run; a zombie does not."""

    def runs(pid: int) -> bool:
        try:
            return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it may end between any two calls
            return False

    return {pid for pid in pids if runs(pid)}


def test_an_interrupted_and_then_killed_run_goes_on_without_repeating_anything(tmp_path: Path) -> None:
    words = ("run", *SMALL, "--set", "microbatches=1,2", "--sample", 300, "--out", "out", "--json", "run.json", "-j", 2)
    status, out, err = 0, "", ""
    for _ in range(8):  # a run may end before its interrupt arrives
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        first = start(tmp_path, *words)
        wait_for_results(first, tmp_path / "out", 1)
        os.killpg(first.pid, signal.SIGINT)  # as a terminal does: to everything in the foreground
        status, out, err = finish(first)
        if status:
            break
    assert (status, "Traceback" in err) == (130, False), err
    assert "report: out/index.html" in out
    kept = results_of(tmp_path / "out")
    planned = len(kept) + len(document(tmp_path / "run.json")["run"]["missing"])
    assert 1 <= len(kept) < planned

    second = start(tmp_path, *words)
    found = wait_for_results(second, tmp_path / "out", len(kept) + 5)
    assert found[: len(kept)] == kept
    family = descendants(second.pid)
    assert family
    second.kill()
    _, _, err = finish(second)
    assert f"{len(kept)} of {planned} done" in err
    deadline = time.monotonic() + 10.0
    while alive(family) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(family), "servers, workers or ranks outlive their parent"

    kept = results_of(tmp_path / "out")
    status, _, err = finish(start(tmp_path, *words))
    assert (status, f"{len(kept)} of {planned} done" in err) == (ExitStatus.OK, True), err
    found = results_of(tmp_path / "out")
    assert found[: len(kept)] == kept
    assert len(found) == len(set(found)) == planned
    assert verdicts(tmp_path / "run.json") == {"pass": planned}


def test_ranks_and_workers_get_the_plugins(tmp_path: Path) -> None:
    (tmp_path / "echo.toml").write_text(flow_system.ECHO.to_toml())
    plugins = ("--plugin", "tests.unit.flow_system", "--plugin", "tests.unit.flow_faults")
    words = ("run", "echo.toml", *plugins, "--set", "faults=", "--set", "faults=boundary.broken", "--json", "run.json")
    status, out, err = finish(start(tmp_path, *words))
    assert (status, err.count("Traceback")) == (ExitStatus.FAILURE, 0), (out, err)
    assert verdicts(tmp_path / "run.json") == {"pass": 1, "crash": 1}
    error = next(r["error"] for r in document(tmp_path / "run.json")["results"] if r["error"])
    assert (error["type"], error["message"], error["rank"]) == ("ZeroDivisionError", "always, on rank 0", 0)


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of 256 KiB."""
    folder = Path(tempfile.mkdtemp())
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
    folder.rmdir()


def test_a_results_disk_that_fills_is_status_3_and_the_run_goes_on_when_there_is_room(
    small_disk: Path, shardproof: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("run", *SMALL, "--set", "model=dense", "--sample", 20, "--out", small_disk, "--json", "run.json")
    assert shardproof(*words) == ExitStatus.HARNESS
    shown = capfd.readouterr().err
    assert "free some space and resume the run" in shown
    assert "Traceback" not in shown
    with Store(small_disk / DATABASE) as store:
        kept = [result.id for result in store.results(str(store.latest_run()))]
    assert 0 < len(kept) < 20
    assert shardproof("explain", kept[0], "--out", small_disk) == ExitStatus.OK, "readable while the disk is full"
    assert shardproof(*words) == ExitStatus.HARNESS, "no better a second time, and no worse"
    capfd.readouterr()
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    with Store(small_disk / DATABASE) as store:
        after = [result.id for result in store.results(str(store.latest_run()))]
    assert set(after) >= set(kept)
    kept = after
    assert shardproof(*words) == ExitStatus.OK
    assert f"{len(kept)} of 20 done" in capfd.readouterr().err
    assert verdicts("run.json") == {"pass": 20}
