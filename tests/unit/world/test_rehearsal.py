"""The rehearsal: what ranks need and a machine refuses is said before the first scenario, with a remedy, as
`unknown`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shardproof.errors import HarnessError, NotImportableError, sentence_of
from shardproof.scenario import Mesh, Scenario
from shardproof.world import rehearsal
from shardproof.world.job import Job
from shardproof.world.rehearsal import NEEDS, UnfitError, prove
from shardproof.world.server import ForkServer

ROOT = Path(__file__).parents[3]
SCENARIO = Scenario(system="stub", mesh=Mesh(1, 2, 1), program="build step")

LACKING = [
    ("backward", "cannot have a backward pass: RuntimeError: Unable to handle autograd", "--python PATH"),
    ("temporary", "cannot have temporary files: FileNotFoundError", "TMPDIR"),
    ("semaphores", r"cannot have shared memory: OSError: \[Errno 38\]", "--shm-size"),
    ("loopback", "cannot have gloo between two ranks: .*no-such-interface", "ip link set lo up"),
    ("life", "cannot have a backward pass: the process ended without a word", "--plugin"),
]


IN_CI = ("backward", "loopback")
"""What may be lacking and is tried in each run of the tests; nightly tries all."""


@pytest.mark.parametrize(
    ("taken", "said", "remedy"),
    [pytest.param(*row, id=row[0], marks=[] if row[0] in IN_CI else pytest.mark.nightly) for row in LACKING],
)
def test_what_is_lacking_is_said_with_its_remedy(tmp_path: Path, taken: str, said: str, remedy: str) -> None:
    plugins = ["tests.unit.world_stub", "tests.unit.unfit_plugin"]
    with ForkServer(path_prefix=[ROOT], plugins=plugins, env={"SHARDPROOF_TAKES": taken}) as server:
        with pytest.raises(HarnessError, match=said) as raised:
            server.submit(Job(SCENARIO, 0, tmp_path, 30)).result(timeout=90)
        assert str(raised.value).startswith("ranks cannot run here: ")
        assert remedy in str(raised.value)
        first = server.pid
        with pytest.raises(HarnessError, match=said):
            server.submit(Job(SCENARIO, 0, tmp_path, 30)).result(timeout=10)
        with pytest.raises(HarnessError, match=said):
            server.call("tests.unit.world_stub:echo", b"", 10)
        assert server.pid == first  # what the server says of itself is believed: no second start for each scenario


def test_a_library_that_raises_on_import_is_named_with_the_package_that_refuses_it(tmp_path: Path) -> None:
    """And a library that raises while it is called is not taken for one that cannot be imported."""
    site = tmp_path / "site-packages"
    for name, text in (
        ("fussy", "def tune(key):\n    raise ValueError(f'no such key: {key}\\nand more')\n"),
        ("tuned", "import fussy\nfussy.tune('S')\n"),
    ):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(text)
    metadata = site / "fussy-3.9.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: fussy\nVersion: 3.9.0\n")
    importing = ForkServer(path_prefix=[site], plugins=["tuned"], ranks=False)
    with importing as server, pytest.raises(NotImportableError) as raised:
        server.call("tests.unit.world_stub:echo", b"", 60)
    first = sentence_of(raised.value, "tuned 0.7.0").splitlines()[0]
    assert first == "tuned 0.7.0 cannot be imported with fussy 3.9.0: ValueError: no such key: S"
    calling = ForkServer(path_prefix=[site], warm_up=["fussy:tune"], plugins=["fussy"])
    with calling as server, pytest.raises(HarnessError, match="while a server warmed up") as other:
        server.call("tests.unit.world_stub:echo", b"", 60)
    assert not isinstance(other.value, NotImportableError)


def test_a_child_that_never_ends_is_named_and_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rehearsal, "PATIENCE_S", 1.0)
    stuck = rehearsal.Need("patience", lambda seat: __import__("time").sleep(600), "Remedy: wait.")
    monkeypatch.setattr(rehearsal, "NEEDS", (NEEDS[1], stuck))
    with pytest.raises(UnfitError, match=r"cannot have patience: it did not end within 1 s\nRemedy: wait\."):
        prove("cpu", tmp_path)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "NEEDS", NEEDS[1:2])
    with pytest.raises(UnfitError, match="cannot have temporary files"):
        prove("cpu", tmp_path / "absent")


def test_a_run_on_an_unfit_machine_is_unknown_and_ends_with_status_3(tmp_path: Path) -> None:
    space = tmp_path / "two.toml"
    space.write_text('schema = 1\n[space]\n[axes]\nmodel = ["dense", "tied"]\n[system.torch-fsdp2.axes]\nseed = [0]\n')
    done = subprocess.run(
        [sys.executable, "-m", "shardproof", "run", str(space), "--plugin", "tests.unit.unfit_plugin",
         "--out", str(tmp_path / "out"), "--json", str(tmp_path / "run.json")],
        cwd=ROOT, env={**os.environ, "SHARDPROOF_TAKES": "backward"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    found = json.loads((tmp_path / "run.json").read_text())
    assert [result["verdict"] for result in found["results"]] == ["unknown", "unknown"]
    assert "cannot have a backward pass" in done.stdout
    assert "Remedy: " in done.stdout
