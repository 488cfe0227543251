"""Where results go: nothing that is not ours is lost, no link is followed, and one run at a time works in a folder."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from shardproof.cli.main import entry
from shardproof.errors import UsageError
from shardproof.export.job import MARK, require_own
from shardproof.folders import LOCK, at_work_in, folder_of, point_latest
from shardproof.report.publish import publish, require_publishable
from shardproof.store import DATABASE, Store
from shardproof.verdict import ExitStatus

from tests.paths import PYTHONPATH

TINY = ("--system", "reference", "--set", "mesh=1x1x1", "--set", "dtype=fp32", "--sample", "2", "-j", "1")
JSON, XML = '{"run": {\n "id": "1"}}', '<?xml version="1.0" encoding="utf-8"?>\n<testsuites name="shardproof" id="1"/>'
MINE = 'schema = 1\n[scenario]\nsystem = "reference"\n'


@pytest.fixture
def shardproof(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Run a command in an empty folder, expect a status, and return what it said on stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str, status: int = ExitStatus.USAGE) -> str:
        found = entry(list(words))
        said = capfd.readouterr()
        assert found == status, (found, said)
        assert "Traceback" not in said.err
        return said.err

    return call


# --- files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--json", "--junit"])
@pytest.mark.parametrize("content", [MINE, "{}", '{"results": []}', "x", "<testsuites/>"])
def test_what_is_not_ours_is_not_replaced(shardproof: Callable[..., str], option: str, content: str) -> None:
    Path("my.toml").write_text(content)
    said = shardproof("run", *TINY, option, "my.toml")
    assert "one that shardproof wrote" in said
    assert Path("my.toml").read_text() == content
    assert not Path("reports").exists()


@pytest.mark.parametrize(
    "content", ["", JSON, '{\n "written_by": "shardproof 0.1.0"}', XML, "# Written by shardproof\n"]
)
def test_what_is_ours_or_empty_is_replaced(tmp_path: Path, content: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(content)
    file.chmod(0o640)
    require_publishable(file, "--json", "--json run.json")
    publish(file, "new")
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_device_stays_one(tmp_path: Path) -> None:
    before = os.stat("/dev/null")
    publish(Path("/dev/null"), "text")
    assert os.stat("/dev/null") == before or stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_pipe_gets_the_text_and_one_without_a_reader_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="a writable place"):
        publish(pipe, "text")
    got: list[str] = []
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(end, True)
    with open(end, encoding="utf-8") as file:
        reader = threading.Thread(target=lambda: got.append(file.read()))
        publish(pipe, "text")
        reader.start()
        reader.join(5)
    assert got == ["text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    planted = f".shardproof-partial-{platform.node()}-planted"
    for name in (".index.html.partial", ".index.html.tmp", planted):
        (tmp_path / name).symlink_to(victim)
    publish(tmp_path / "index.html", "page")
    require_publishable(tmp_path / "index2.html", "--json", "")
    assert victim.read_text() == "precious"
    assert (tmp_path / planted).is_symlink()


def test_what_killed_processes_left_is_removed_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    mine = f".shardproof-partial-{platform.node()}-"
    names = _, held, elsewhere = f"{mine}left", f"{mine}held", ".shardproof-partial-another-host-left"
    for name in names:
        (tmp_path / name).write_text("<html>")
    os.mkfifo(tmp_path / f"{mine}pipe")
    with open(tmp_path / held) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        publish(tmp_path / "index.html", "page")
        assert {path.name for path in tmp_path.iterdir()} == {held, elsewhere, "index.html"}


def test_a_link_of_the_user_stays_and_leads_to_the_text(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    publish(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "text"
    (tmp_path / "other").symlink_to(tmp_path / "mine")
    (tmp_path / "mine").write_text(MINE)
    with pytest.raises(UsageError, match="would be lost"):
        publish(tmp_path / "other", "text")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UsageError):
        require_publishable(tmp_path / "loop", "--json", "")


def test_two_outputs_are_two_files(shardproof: Callable[..., str]) -> None:
    assert "another file than that of --json" in shardproof("run", *TINY, "--json", "x", "--junit", "./x")
    assert "another file than that of the run" in shardproof("run", *TINY, "--out", "o", "--json", f"o/{DATABASE}")
    assert "another file than that of the run" in shardproof("run", *TINY, "--out", "o", "--json", "o/index.html")


def test_a_page_of_another_program_is_not_replaced(shardproof: Callable[..., str]) -> None:
    Path("index.html").write_text("<html>mine</html>")
    assert "one that shardproof wrote" in shardproof("run", *TINY, "--out", ".")
    assert Path("index.html").read_text() == "<html>mine</html>"


def test_reports_replace_their_own(shardproof: Callable[..., str]) -> None:
    words = ("run", *TINY, "--json", "run.json", "--junit", "run.xml")
    shardproof(*words, status=ExitStatus.OK)
    shardproof(*words, status=ExitStatus.OK)
    shardproof("report", "reports/latest", "--json", "run.json", "--junit", "run.xml", status=ExitStatus.OK)
    assert json.loads(Path("run.json").read_text())["run"]["ended_at"]


# --- folders ------------------------------------------------------------------------------------------


def test_another_command_writes_over_nothing(shardproof: Callable[..., str]) -> None:
    shardproof("run", *TINY, status=ExitStatus.OK)
    first = Path("reports/latest").resolve()
    page = (first / "index.html").read_bytes()
    shardproof("run", *TINY, "--set", "model=short", status=ExitStatus.OK)
    second = Path("reports/latest").resolve()
    assert first != second
    assert (first / "index.html").read_bytes() == page
    shardproof("run", *TINY, status=ExitStatus.OK)
    assert Path("reports/latest").resolve() == first
    with Store(first / DATABASE) as store:
        assert len(store.runs()) == 2
    assert "another-folder" not in shardproof("explain", "0000", status=ExitStatus.USAGE)


def test_the_names_of_folders() -> None:
    def name(*names: str, systems: tuple[str, ...] = (), shard: str | None = None, **others: object) -> str:
        return str(folder_of(names, systems, shard, others))

    assert name() == "reports/smoke"
    assert name("nightly", seed=0, sample=None, set=()) == "reports/nightly"
    assert name("nightly", systems=("deepspeed@0.19.0",)) == "reports/nightly-deepspeed@0.19.0"
    assert name("my-bug.toml") == "reports/my-bug"
    assert name("regressions/x-1") == "reports/x-1"
    assert name("nightly", shard="1/4") == "reports/nightly-1of4"
    different = {
        name("a/bug.toml"),
        name("b/bug.toml"),
        name("bug.toml"),
        name("bug.toml", seed=1),
        name("bug", set=("a=b",)),
    }
    assert len(different) == 5
    for hostile in ("..", "../..", "\x1b[31m", "latest", "x" * 5000, "a b", ".toml", "é"):
        assert Path(name(hostile)).parent == Path("reports")
        assert Path(name(hostile)).name not in ("", ".", "..", "latest")
        assert len(name(hostile)) < 120
        assert name(hostile).isascii()


def test_what_stands_in_the_place_of_latest_stays(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "run").mkdir()
    point_latest(tmp_path / "run")
    assert not (tmp_path / "latest").is_symlink()
    (tmp_path / "latest").rmdir()
    (tmp_path / "latest").symlink_to("gone")
    point_latest(tmp_path / "run")
    assert os.readlink(tmp_path / "latest") == "run"
    assert sorted(os.listdir(tmp_path)) == ["latest", "run"]


def test_a_second_run_in_a_folder_is_refused_with_the_pid_of_the_first(
    shardproof: Callable[..., str], tmp_path: Path
) -> None:
    Path("out").mkdir()
    hold = (
        "import sys, pathlib; from shardproof.folders import at_work_in\n"
        "with at_work_in(pathlib.Path('out')):\n print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    ) as first:
        assert first.stdout
        first.stdout.readline()
        said = shardproof("run", *TINY, "--out", "out")
        assert f"process {first.pid} is at work in this one" in said
        assert not Path("out", DATABASE).exists()
        first.send_signal(signal.SIGKILL)
    shardproof("run", *TINY, "--out", "out", status=ExitStatus.OK)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / LOCK).symlink_to(tmp_path / "victim")
    with pytest.raises(UsageError, match="can be opened"), at_work_in(tmp_path):
        pass
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_run_that_was_killed_before_its_reports_writes_them(
    shardproof: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    words = ("run", *TINY, "--out", "out", "--json", "run.json")
    with monkeypatch.context() as patch:
        patch.setattr("shardproof.run.write_reports", killed)
        shardproof(*words, status=130)
    assert not Path("run.json").exists()
    assert "2 of 2 done" in shardproof(*words, status=ExitStatus.OK)
    with Store(Path("out") / DATABASE) as store:
        (only,) = store.runs()
    assert only.ended_at
    assert json.loads(Path("run.json").read_text())["run"]["ended_at"] == only.ended_at


def test_an_export_writes_over_nothing_but_an_export(shardproof: Callable[..., str], tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "repro.py").write_text("print('my own')")
    for place in (mine, mine / "repro.py"):
        said = shardproof("export", "regressions/torch-fsdp2-164929", "--folder", str(place))
        assert "a new folder, an empty one, or one that `shardproof export` wrote" in said
    assert (mine / "repro.py").read_text() == "print('my own')"
    (mine / MARK).touch()
    require_own(mine)
    require_own(tmp_path / "new")
