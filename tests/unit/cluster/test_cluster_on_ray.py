"""Runs on a real Ray cluster of two nodes on this machine.

*Verifies*: what `test_cluster.py` shows of threads, of Ray's own nodes and actors, by the command line: a node that is
killed, two runs at once, plugins, releases, errors of the node's code, Ctrl-C; and that results are those of this
machine.
*Does not verify*: several machines: all nodes share one file system and one address.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.paths import PYTHONPATH

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.real,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: extra `ray`"),
]
DENSE = ("--system", "torch-fsdp2", "--set", "model=dense")


class Nodes:
    """The cluster, and the command line that runs on it."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the cluster; a pipe would fill)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.ray_nodes"],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip
        self.address = self._said()

    def _said(self) -> str:
        """The next line of the cluster's process that is ours."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("lost") or re.fullmatch(r"[0-9.]+:[0-9]+", line.strip()):
                return line.strip()
        self._process.communicate()
        with self._errors:
            self._errors.seek(0)
            raise AssertionError(f"the cluster is gone: {self._errors.read()[-4000:]}")

    def lose_one(self) -> None:
        """Kill everything of a node, and put another in its place."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._said() == "lost"

    def close(self) -> None:
        self._process.communicate()
        self._errors.close()

    def start(self, folder: Path, *words: object, **environment: str) -> subprocess.Popen[str]:
        folder.mkdir(exist_ok=True)
        address = ("--executor", "ray", "--ray-address", self.address)
        return subprocess.Popen(
            [sys.executable, "-m", "shardproof", "run", *map(str, words), *address, "--json", "run.json", "--out",
            "out"], cwd=folder, env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment}, text=True,
            start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, folder: Path, *words: object, **environment: str) -> tuple[int, str, str]:
        return ended(self.start(folder, *words, **environment))


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=900)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


def document(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return loaded


def results(folder: Path) -> dict[str, Any]:
    """What a run says of each scenario, but for times. Nothing planned is missing, and nothing is there twice."""
    found = document(folder)
    assert found["run"]["missing"] == []
    assert len({result["id"] for result in found["results"]}) == len(found["results"])
    times = ("duration_s", "phases_s", "previous", "restarted")
    return {r["id"]: {key: value for key, value in r.items() if key not in times} for r in found["results"]}


def stored(folder: Path) -> int:
    from tests.unit.test_run import results_of

    return len(results_of(folder / "out"))


def wait_for(process: subprocess.Popen[str], folder: Path, number: int) -> None:
    deadline = time.monotonic() + 600.0
    while stored(folder) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_results_are_those_of_this_machine(nodes: Nodes, tmp_path: Path) -> None:
    words = ("nightly", "--system", "torch-fsdp2", "--system", "reference", "--sample", 12, "--seed", 3)
    status, out, err = nodes.run(tmp_path / "far", *words)
    near = tmp_path / "near"
    near.mkdir()
    local = subprocess.run(
        [sys.executable, "-m", "shardproof", "run", *map(str, words), "-j", "1", "--json", "run.json", "--out", "out"],
        cwd=near, env={**os.environ, "PYTHONPATH": PYTHONPATH}, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert (status, local.returncode) == (0, 0), (out, err, local.stdout, local.stderr)
    assert results(tmp_path / "far") == results(near)
    assert out.splitlines()[-3:-1] == local.stdout.splitlines()[-3:-1], "nothing of Ray's stands in the output"


def test_a_node_that_is_killed_in_the_middle_loses_nothing(nodes: Nodes, tmp_path: Path) -> None:
    words = (*DENSE, "--set", "program=resume", "--set", "mesh=1x2x1", "--set", "seed=1,2,3,4,5,6", "--sample", 10)
    process = nodes.start(tmp_path, *words)
    wait_for(process, tmp_path, 2)
    nodes.lose_one()
    status, out, err = ended(process)
    assert status == 0, (out, err)
    found = results(tmp_path)
    assert len(found) == 10
    assert {result["verdict"] for result in found.values()} == {"pass"}
    assert "of the cluster was lost: " in err
    restarted = [result["restarted"] for result in document(tmp_path)["results"] if result["restarted"]]
    assert restarted
    assert all(why.startswith("node ") for why in restarted)


def test_two_runs_on_one_cluster_do_not_mix(nodes: Nodes, tmp_path: Path) -> None:
    words = (*DENSE, "--set", "program=train", "--set", "mesh=1x2x1", "-j", 1, "--sample", 3)
    first = nodes.start(tmp_path / "first", *words, "--set", "seed=11,12,13")
    second = nodes.start(tmp_path / "second", *words, "--set", "seed=21,22,23")
    said = [ended(process) for process in (first, second)]
    assert [status for status, _, _ in said] == [0, 0], said
    for name, ten in (("first", "1"), ("second", "2")):
        found = results(tmp_path / name).values()
        assert len(found) == 3
        assert {result["scenario"]["seed"][0] for result in found} == {ten}


def test_ctrl_c_keeps_results_and_frees_the_cluster(nodes: Nodes, tmp_path: Path) -> None:
    words = (*DENSE, "--set", "program=train", "--set", "mesh=1x2x1", "--set", "seed=31,32,33,34,35,36", "--sample", 6)
    process = nodes.start(tmp_path, *words)
    wait_for(process, tmp_path, 1)
    os.killpg(process.pid, signal.SIGINT)
    status, out, err = ended(process)
    assert (status, "Traceback" in err) == (130, False), (out, err)
    kept = len(document(tmp_path)["results"])
    assert 1 <= kept < 6
    status, out, err = nodes.run(tmp_path, *words)
    assert (status, f"{kept} of 6 done" in err) == (0, True), (out, err)
    assert len(results(tmp_path)) == 6


LICENSED = """
import os
if "LICENCE" not in os.environ:
    raise RuntimeError("no licence on this machine")
"""
FAILING = """
from shardproof.cluster import node
whole = node.attributed_by
def attributed_by(laboratory, scenario, known, observed):
    if scenario.seed == 42:
        raise ValueError("seed 42 on a node")
    return whole(laboratory, scenario, known, observed)
node.attributed_by = attributed_by
"""


def test_a_plugin_runs_on_nodes_and_one_that_does_not_import_there_is_refused(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "my_echo_.py").write_text("import tests.unit.flow_system\n")
    (tmp_path / "bug.toml").write_text('schema = 1\n[scenario]\nsystem = "echo"\nprogram = "train"\nmodel = "short"\n')
    status, out, err = nodes.run(tmp_path, "bug.toml", "--plugin", "my_echo_")
    assert (status, "1 pass" in out) == (0, True), (out, err)
    (tmp_path / "licensed_.py").write_text(LICENSED)
    status, out, err = nodes.run(tmp_path, "--system", "reference", "--sample", 1, "--plugin", "licensed_", LICENCE="1")
    assert (status, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("shardproof: --executor ray: no node can run this; ")
    assert "--plugin: given 'licensed_'" in last
    assert "no licence on this machine" in last


def test_an_error_of_the_nodes_code_is_unknown(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "failing_.py").write_text(FAILING)
    words = ("--system", "reference", "--set", "model=short", "--set", "program=train", "--set", "seed=41,42")
    status, out, err = nodes.run(tmp_path, *words, "--sample", 20, "--plugin", "failing_")
    assert status == 3, (out, err)
    found = results(tmp_path).values()
    assert {(r["scenario"]["seed"], r["verdict"]) for r in found} == {("41", "pass"), ("42", "unknown")}
    assert all("seed 42 on a node" in r["reason"] for r in found if r["verdict"] == "unknown")


RELEASES = {
    "release": ("--system", "megatron-core@0.15.3", "--set", "model=dense", "--set", "program=train", "--sample", 2),
    "torch": (*DENSE, "--set", "program=train", "--sample", 2, "--torch", "2.14.1"),
}


@pytest.mark.parametrize("words", RELEASES.values(), ids=RELEASES)
def test_releases_are_installed_where_scenarios_run(nodes: Nodes, tmp_path: Path, words: tuple[object, ...]) -> None:
    status, out, err = nodes.run(tmp_path, *words)
    assert status in (0, 1), (out, err)
    found = results(tmp_path).values()
    assert len(found) == 2
    assert {result["verdict"] for result in found} <= {"pass", "mismatch", "crash"}
    assert all("0.15.3" in r["version"] or "2.14.1" in r["version"] for r in found)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "nobody.invalid:6379"])
def test_an_address_without_a_cluster_is_refused(address: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardproof", "run", "--executor", "ray", "--ray-address", address],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": PYTHONPATH}, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--ray-address: given '{address}'; allowed: that of a running Ray cluster" in done.stderr
