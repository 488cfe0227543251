"""The command line under a hostile user: every mistake is status 2 with one message that says what is allowed.

Nothing here starts a rank: where a command gets past its checks and would run, `shardproof.run.run` is replaced.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from shardproof.cli.main import READER_GONE, entry
from shardproof.report.model import Report
from shardproof.request import Outcome, Request
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.store import DATABASE, SCHEMA_VERSION, Store
from shardproof.verdict import ExitStatus, Verdict

from tests import report_samples
from tests.paths import PYTHONPATH

ROOT = Path(__file__).parents[3]
SCENARIO = 'schema = 1\n[scenario]\nsystem = "reference"\ncheckpoint = "sharded"\n'
TINY = ("--system", "reference", "--set", "mesh=1x1x1,1x2x1", "--sample", "3")


class Cli:
    """The command line in this process, in an empty folder; what it would run is kept, not run."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.requests: list[Request] = []
        self.out = self.err = ""

    def __call__(self, *arguments: str | Path) -> int:
        status = entry([str(argument) for argument in arguments])
        self.out, self.err = self._capsys.readouterr()
        return status

    def refuses(self, *arguments: str | Path) -> str:
        """The message of a refused command; nothing on stdout, no traceback, nothing run."""
        status = self(*arguments)
        assert status == ExitStatus.USAGE, (status, self.out, self.err)
        assert "Traceback" not in self.err
        assert self.out == ""
        assert not self.requests
        return self.err

    def refuses_in_three_parts(self, *arguments: str | Path) -> str:
        """The same; the message says what was given, what is allowed and a correct form, and may lead elsewhere."""
        message = self.refuses(*arguments)
        parts = all(part in message for part in ("given ", "; allowed: ", "; for example: "))
        assert parts or "; correct form: " in message, message
        assert message.partition("\ninstead: ")[0].rstrip("\n").count("\n") == 0, message
        assert message.count("\n") <= 2, message
        return message


@pytest.fixture
def shardproof(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.chdir(tmp_path)
    command = Cli(capsys)

    def record(request: Request) -> Outcome:
        command.requests.append(request)
        return Outcome(Report(report_samples.RUN, (passing(1),)), request.out / "index.html", interrupted=False)

    monkeypatch.setattr("shardproof.run.run", record)
    return command


def stored(folder: Path, *results: Result) -> Path:
    """A folder with a finished run."""
    folder.mkdir(parents=True, exist_ok=True)
    with Store(folder / DATABASE) as store:
        run_id = store.begin_run(["run"], 0, {})
        store.plan(run_id, [result.scenario for result in results])
        store.finished_many(run_id, results)
        store.end_run(run_id)
    return folder


def passing(seed: int) -> Result:
    return report_samples.passing(seed)


# --- selections ---------------------------------------------------------------------------------------

SELECTIONS: dict[str, tuple[str, ...]] = {
    "unknown axis": ("--set", "colour=red"),
    "unknown value": ("--set", "dtype=fp8"),
    "setting without a value": ("--set", "dtype"),
    "impossible mesh": ("--set", "mesh=0x1x1"),
    "mesh that is no mesh": ("--set", "mesh=two"),
    "unknown system": ("--system", "torch-fsdp3"),
    "unknown model": ("--set", "model=bert"),
    "illegal program": ("--set", "program=load build"),
    "unknown name": ("smokey",),
    "missing file": ("absent.toml",),
    "bad shard": ("--shard", "4/3"),
    "shard without parts": ("--shard", "1"),
    "zeroth shard": ("--shard", "0/3"),
    "bad strength": ("--strength", "0"),
    "strength in words": ("--strength", "most"),
    "unknown fault": ("--fault", "gremlins"),
    "fault that no system can show": ("--system", "torch-fsdp2", "--fault", "stale-masters"),
    "boundary fault in the reference": ("--system", "reference", "--fault", "boundary.kill-rank"),
    "missing plugin": ("--plugin", "no_such_module"),
    "empty plugin": ("--plugin", ""),
    "relative plugin": ("--plugin", ".rules"),
    "space that no system supports": ("--system", "reference", "--set", "checkpoint=dcp"),
}


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize("case", SELECTIONS)
def test_a_wrong_selection_is_refused(shardproof: Cli, command: str, case: str) -> None:
    shardproof.refuses_in_three_parts(command, *SELECTIONS[case])
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        ("--sample", "0"), ("--sample", "many"), ("--seed", "x"), ("-j", "0"), ("--deadline-s", "0"), ("--nope",),
        ("--executor", "cloud"), ("--device", "tpu"), ("--out",),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused(shardproof: Cli, options: tuple[str, ...]) -> None:
    message = shardproof.refuses("run", *options)
    assert options[0].lstrip("-") in message
    assert list(Path().iterdir()) == []


def test_a_wrong_command_is_refused(shardproof: Cli) -> None:
    assert "No such command 'rum'" in shardproof.refuses("rum")


@pytest.mark.parametrize(
    "text",
    [
        "schema = 1\n[scenario\n", "", "schema = 1\n[scenario]\ncolour = 1\n",
        "schema = 1\n[scenario]\nmesh = [1, 2, 1]\n",
        "schema = 7\n[scenario]\n", "schema = 1\nscenario = 3\n", "schema = 1\n[scenario]\nseed = 1e999\n",
        'schema = 1\n[scenario]\nsystem = "nobody"\n', "\x00", "schema = 1\n[scenario.mesh]\nx = 1\n",
        "schema = 1\n[[scenario]]\n[[scenario]]\nmicrobatches = 9\n",
    ],
)  # fmt: skip
def test_a_wrong_scenario_file_is_refused(shardproof: Cli, text: str) -> None:
    Path("bug.toml").write_text(text)
    message = shardproof.refuses("run", "bug.toml")
    assert "allowed: " in message or "correct form: " in message
    assert [path.name for path in Path().iterdir()] == ["bug.toml"]


def test_a_scenario_that_its_system_refuses_says_why(shardproof: Cli) -> None:
    Path("bug.toml").write_text(SCENARIO.replace("sharded", "dcp"))
    assert "reference has these values of checkpoint: gathered, " in shardproof.refuses_in_three_parts(
        "run", "bug.toml"
    )


def test_a_budget_that_would_be_exceeded_is_refused_by_run_and_shown_by_plan(shardproof: Cli) -> None:
    space = "schema = 1\n[space]\nbudget_s = 0.001\n[axes]\ncheckpoint = ['sharded']\n[system.reference]\n"
    Path("mine.toml").write_text(space)
    message = shardproof.refuses_in_three_parts("run", "mine.toml")
    assert "--shard 1/" in message
    assert "--sample" in message
    assert shardproof("plan", "mine.toml") == ExitStatus.OK


@pytest.mark.parametrize(
    ("plugin", "said"),
    [("raise RuntimeError('no licence')", "no licence"), ("def broken(:", "invalid syntax"),
     ("import nowhere_", "nowhere_"), ("raise SystemExit(0)", "SystemExit")],
)  # fmt: skip
def test_a_plugin_that_does_not_import_is_refused(
    shardproof: Cli, monkeypatch: pytest.MonkeyPatch, plugin: str, said: str
) -> None:
    monkeypatch.syspath_prepend(".")
    Path("bad_plugin_.py").write_text(plugin)
    assert said in shardproof.refuses_in_three_parts("list", "--plugin", "bad_plugin_")


def install(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a package with a plugin into the current folder, as pip leaves one."""
    info = Path("rules-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rules\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[shardproof.plugins]\nrules = {plugin}\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))


def test_an_installed_plugin_that_does_not_import_is_named(shardproof: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    install("no_such_package_.rules", monkeypatch)
    assert "no_such_package_.rules" in shardproof.refuses_in_three_parts("list")


def test_named_and_installed_plugins_go_to_the_ranks(shardproof: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    install("tests.report_samples:scenario", monkeypatch)
    assert shardproof("run", *TINY, "--plugin", "tests.unit.world_stub", "--out", "out") == ExitStatus.OK
    assert shardproof.requests[0].plugins == ("tests.report_samples", "tests.unit.world_stub")


def test_a_plugin_beside_the_user_is_found(tmp_path: Path) -> None:
    """As by `python -m shardproof` and by the ranks; the installed command has no current folder on its path."""
    (tmp_path / "my_rules_.py").write_text("print('my rules')")
    script = "import sys; sys.path = list(filter(None, sys.path)); "
    script += "from shardproof.cli.main import entry; entry(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", script, "list", "--plugin", "my_rules_"],
        cwd=tmp_path, env={"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("my rules\n")


# --- places to write to -------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nothing", "/dev/null"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(shardproof: Cli, out: str) -> None:
    Path("file").write_text("mine")
    assert "--out" in shardproof.refuses_in_three_parts("run", *TINY, "--out", out)
    assert Path("file").read_text() == "mine"


@pytest.mark.parametrize("option", ["--json", "--junit"])
@pytest.mark.parametrize("file", ["file/below.json", "/proc/nothing/x.json", "folder"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(shardproof: Cli, option: str, file: str) -> None:
    Path("file").write_text("mine")
    Path("folder").mkdir()
    assert option in shardproof.refuses_in_three_parts("run", *TINY, "--out", "out", option, file)
    assert Path("file").read_text() == "mine"


def test_an_interpreter_that_does_not_exist_is_refused(shardproof: Cli) -> None:
    assert "--python" in shardproof.refuses_in_three_parts("run", *TINY, "--python", "/nowhere/python")


def test_cuda_is_refused_while_no_system_runs_there(shardproof: Cli) -> None:
    assert "--device" in shardproof.refuses_in_three_parts("run", *TINY, "--device", "cuda")


# --- databases and runs -------------------------------------------------------------------------------


@contextmanager
def changed(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as connection, connection:
        yield connection


def text_file(path: Path) -> None:
    path.write_text("these are my notes\n" * 50)


def another_program(path: Path) -> None:
    with changed(path) as connection:
        connection.execute("CREATE TABLE mine (x)")


def newer(path: Path) -> None:
    stored(path.parent, passing(1))
    with changed(path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


def truncated(path: Path) -> None:
    stored(path.parent, *map(passing, range(40)))
    path.write_bytes(path.read_bytes()[:-3000])


def scribbled(path: Path) -> None:
    stored(path.parent, *map(passing, range(40)))
    content = bytearray(path.read_bytes())
    content[4096:12288] = b"\xa5" * 8192
    path.write_bytes(content)


def without_tables(path: Path) -> None:
    stored(path.parent)
    with changed(path) as connection:
        for table in ("results", "observations", "planned", "runs"):
            connection.execute(f"DROP TABLE {table}")


def with_foreign_content(path: Path) -> None:
    stored(path.parent, passing(1))
    with changed(path) as connection:
        connection.execute("UPDATE results SET content = '{\"half\": '")


DAMAGED: tuple[Callable[[Path], None], ...] = (
    text_file, another_program, newer, truncated, scribbled, without_tables, with_foreign_content,
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize(
    "command",
    [
        ("explain", "1a2b", "--out", "bad"), ("replay", "1a2b", "--out", "bad"), ("report", "bad"),
        ("merge", "bad", "--out", "all"),
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_database_is_refused_and_left_alone(
    shardproof: Cli, command: tuple[str, ...], damage: Callable[[Path], None]
) -> None:
    database = Path("bad") / DATABASE
    database.parent.mkdir()
    damage(database)
    before = database.read_bytes()
    command = tuple(passing(1).id if part == "1a2b" else part for part in command)
    message = shardproof.refuses_in_three_parts(*command)
    assert str(database) in message
    assert database.read_bytes() == before


@pytest.mark.parametrize("command", [("report", "bad"), ("merge", "good", "bad", "--out", "all")])
def test_a_folder_that_is_no_run_is_refused(shardproof: Cli, command: tuple[str, ...]) -> None:
    stored(Path("good"), passing(1))
    before = (Path("good") / DATABASE).read_bytes()
    assert "'bad'" in shardproof.refuses_in_three_parts(*command)
    Path("bad").mkdir()
    assert "'bad'" in shardproof.refuses_in_three_parts(*command)
    with Store(Path("bad") / DATABASE):
        pass  # a database without a run
    assert "'bad'" in shardproof.refuses_in_three_parts(*command)
    assert (Path("good") / DATABASE).read_bytes() == before


@pytest.mark.parametrize("command", ["explain", "replay"])
def test_an_unknown_or_ambiguous_id_is_refused(shardproof: Cli, command: str) -> None:
    assert "a run under reports/" in shardproof.refuses_in_three_parts(command, "1a2b")
    results = [passing(seed) for seed in range(20)]
    stored(Path("reports/mine"), *results)
    assert "the id of a result" in shardproof.refuses_in_three_parts(command, "fffffffffff")
    assert "a folder with a" in shardproof.refuses_in_three_parts(command, results[0].id, "--out", "nowhere")
    ids = sorted(result.id for result in results)
    shared = next(first[0] for first, second in pairwise(ids) if first[0] == second[0])
    assert next(one for one in ids if one[0] == shared) in shardproof.refuses_in_three_parts(command, shared)
    assert "1 to 12 hex digits" in shardproof.refuses(command, "1A")


def test_a_mistyped_regression_is_no_mistyped_id(shardproof: Cli) -> None:
    for command in ("export", "shrink"):
        assert "did you mean regressions/torch-fsdp2-164929" in shardproof.refuses(
            command, "regressions/torch-fsdp2-164929x"
        )


def test_explain_finds_the_newest_folder_and_survives_a_damaged_one(shardproof: Cli) -> None:
    result = passing(1)
    stored(Path("reports/sound"), result)
    Path("reports/damaged").mkdir()
    text_file(Path("reports/damaged") / DATABASE)
    assert shardproof("explain", result.id[:8], "--plugin", "colorsys") == ExitStatus.OK  # registers nothing
    assert result.id in shardproof.out
    assert shardproof("explain", result.id, "--toml") == ExitStatus.OK
    assert Scenario.from_toml(shardproof.out) == result.scenario


@pytest.mark.parametrize("result", [passing(1), report_samples.crash(), report_samples.mismatch()])
def test_explain_writes_the_page_of_any_result(shardproof: Cli, result: Result) -> None:
    folder = stored(Path("reports/mine"), passing(2), result)
    assert shardproof("explain", result.id, "--page") == ExitStatus.OK
    page = folder / "failures" / f"{result.id}.html"
    assert shardproof.out == f"{page}\n"
    assert result.id in page.read_text("utf-8")


def test_replay_of_a_scenario_whose_system_is_gone_is_refused(shardproof: Cli) -> None:
    gone = Result(Scenario(system="my-system"), "my-system", "1.0", Verdict.PASS)
    stored(Path("reports/mine"), gone)
    assert "my-system" in shardproof.refuses_in_three_parts("replay", gone.id)


def test_report_writes_every_file_again(shardproof: Cli) -> None:
    folder = stored(Path("mine"), passing(1), report_samples.crash())
    assert shardproof("report", folder, "--json", "a/run.json", "--junit", "a/run.xml") == ExitStatus.OK
    assert {v: n for v, n in json.loads(Path("a/run.json").read_text())["run"]["counts"].items() if n} == {
        "pass": 1,
        "crash": 1,
    }
    assert "<testsuites" in Path("a/run.xml").read_text()
    assert (folder / "index.html").is_file()


def test_merge_joins_parts_and_keeps_them(shardproof: Cli) -> None:
    parts = [stored(Path(f"part{i}"), passing(i), passing(i + 10)) for i in range(3)]
    before = [(part / DATABASE).read_bytes() for part in parts]
    assert shardproof("merge", *parts, "--out", "all", "--json", "all.json") == ExitStatus.OK
    assert json.loads(Path("all.json").read_text())["run"]["counts"]["pass"] == 6
    assert [(part / DATABASE).read_bytes() for part in parts] == before


def test_merge_with_an_unfinished_part_says_that_the_harness_failed(shardproof: Cli) -> None:
    with Store(stored(Path("part"), passing(1)) / DATABASE) as store:
        store.plan(store.begin_run(["run"], 0, {}), [passing(2).scenario])
    assert shardproof("merge", "part", "--out", "all") == ExitStatus.HARNESS


def part_of(folder: str, command: str, versions: dict[str, str], result: Result) -> Path:
    """A folder with a finished run of one scenario, as that command would have left it."""
    Path(folder).mkdir()
    with Store(Path(folder) / DATABASE) as store:
        run = store.begin_run(command.split(), 0, versions)
        store.plan(run, [result.scenario])
        store.finished(run, result)
        store.end_run(run)
    return Path(folder)


def test_merge_names_the_parts_of_a_shard_that_are_absent(shardproof: Cli) -> None:
    parts = [
        part_of("a1", "run nightly --shard 1/3 -j2 --out a1", {"torch": "2"}, passing(1)),
        part_of("a3", "run nightly --out a3 --shard=3/3", {"torch": "2"}, passing(2)),
        part_of("b", "run smoke --out b", {"torch": "2"}, passing(3)),
    ]
    assert shardproof("merge", *parts, "--out", "all") == ExitStatus.HARNESS
    assert shardproof.err == "shardproof: a part is absent: run nightly --shard 2/3\n"
    parts.append(part_of("a2", "run nightly --shard 2/3 --out a2", {"torch": "2"}, passing(4)))
    assert shardproof("merge", *parts, "--out", "all") == ExitStatus.OK


def test_merge_joins_releases_of_what_is_under_test_and_nothing_else(shardproof: Cli) -> None:
    parts = [
        part_of("a", "run smoke", {"torch": "2", "megatron-core": "0.15.3"}, passing(1)),
        part_of("b", "run smoke", {"torch": "2", "megatron-core": "0.16.1", "deepspeed": "0.19.8"}, passing(2)),
    ]
    assert shardproof("merge", *parts, "--out", "all") == ExitStatus.OK
    with Store(Path("all") / DATABASE) as store:
        found = store.run(store.latest_run() or "").versions
    assert found == {"torch": "2", "megatron-core": "0.15.3, 0.16.1", "deepspeed": "0.19.8"}
    other = part_of("c", "run smoke", {"torch": "3"}, passing(3))
    assert "versions of a part" in shardproof.refuses_in_three_parts(
        "merge", *map(str, parts), str(other), "--out", "x"
    )


# --- checkpoints --------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (Path("exploded"),)


def nothing(path: Path) -> None:
    pass


def empty_folder(path: Path) -> None:
    path.mkdir()


def binary_noise(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 16)


def bomb(path: Path) -> None:
    import pickle

    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(Bomb()))


def bomb_file(path: Path) -> None:
    import pickle

    path.write_bytes(pickle.dumps(Bomb()))


def bomb_archive(path: Path) -> None:
    import pickle
    import zipfile

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps(Bomb()))
        archive.writestr("x/byteorder", "little")


def half_archive(path: Path) -> None:
    bomb_archive(path)
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    "make", [nothing, empty_folder, binary_noise, bomb, bomb_file, bomb_archive, half_archive, text_file]
)
def test_inspect_refuses_what_is_no_sound_checkpoint_and_executes_nothing(
    shardproof: Cli, make: Callable[[Path], None]
) -> None:
    make(Path("checkpoint"))
    message = shardproof.refuses("inspect", "checkpoint")
    assert "checkpoint" in message
    assert "; allowed: " in message
    assert not Path("exploded").exists()


# --- statuses and failures of our own -----------------------------------------------------------------


def test_the_parts_of_a_shard_go_to_folders_of_their_own(shardproof: Cli) -> None:
    assert shardproof("run", *TINY, "--shard", "1/2") == ExitStatus.OK
    (request,) = shardproof.requests
    assert request.out.name.startswith("smoke-reference-")
    assert request.out.name.endswith("-1of2")


def test_known_issues_count_in_walks_only(shardproof: Cli) -> None:
    Path("bug.toml").write_text(SCENARIO)
    shardproof("run", *TINY)
    shardproof("run", "bug.toml")
    shardproof("run", "--system", "reference", "--set", "mesh=1x2x1", "--sample", "2", "--fault", "no-op-load")
    walk, file, fault = (request.known.issues for request in shardproof.requests)
    assert walk
    assert not file
    assert not fault


def test_a_failure_of_our_own_is_status_3(shardproof: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: Request) -> Outcome:
        raise KeyError("oops")

    monkeypatch.setattr("shardproof.run.run", broken)
    assert shardproof("run", *TINY) == ExitStatus.HARNESS
    assert "please report it" in shardproof.err


def test_ctrl_c_before_the_run_is_130(shardproof: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(names: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardproof.cli.listing.render_listing", interrupted)
    monkeypatch.setattr("shardproof.cli.main.load_plugins", interrupted)
    assert shardproof("list") == 130
    assert "Traceback" not in shardproof.err


@pytest.mark.parametrize(
    ("words", "stdout", "stderr", "status"),
    [
        ("list", "/dev/full", "pipe", ExitStatus.HARNESS),
        ("plan absent", "pipe", "/dev/full", ExitStatus.USAGE),
        ("list", "/dev/full", "/dev/full", ExitStatus.HARNESS),
        ("list", "closed", "pipe", READER_GONE),
    ],
)
def test_what_cannot_be_said_is_no_verdict(words: str, stdout: str, stderr: str, status: ExitStatus) -> None:
    """On a full disk, or into a pipe whose reader is gone: the status is none that says something of a library."""
    reads, writes = os.pipe()
    os.close(reads)
    streams = {"/dev/full": os.open("/dev/full", os.O_WRONLY), "closed": writes, "pipe": subprocess.PIPE}
    done = subprocess.run(
        [sys.executable, "-m", "shardproof", *words.split()], cwd=ROOT, check=False, text=True,
        stdout=streams[stdout], stderr=streams[stderr],
    )  # fmt: skip
    for each in ("/dev/full", "closed"):
        os.close(streams[each])
    assert done.returncode == status
    if stderr == "pipe":
        assert ("cannot write what there is to say" in done.stderr) == (stdout != "closed")
        assert "Traceback" not in done.stderr


# --- other ways in --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (("run", "--system", "accelerate"), "`shardproof trainer my_trainer.py`"),
        (("run", "--system", "accelerate"), "`shardproof diff A B`"),
        (("run", "--set", "optimizer=lion"), "`shardproof optimizer IMPORT.PATH`"),
        (("run", "mine.toml"), "`shardproof optimizer IMPORT.PATH`"),
        (("run", "train.py"), "`shardproof trainer my_trainer.py`"),
        (("trainer", "train.py"), "`shardproof trainer --command "),
        (("resilience", "orbax"), "`shardproof resilience my_trainer.py`"),
        (("diff", "train.py", "train.py"), "`shardproof trainer my_trainer.py`"),
    ],
)
def test_a_refusal_leads_to_the_command_that_takes_it(
    shardproof: Cli, tmp_path: Path, words: tuple[str, ...], way: str
) -> None:
    (tmp_path / "mine.toml").write_text('schema = 1\n[scenario]\nsystem = "reference"\noptimizer = "lion"\n')
    (tmp_path / "train.py").write_text("import torch\n")
    last = shardproof.refuses(*words).rstrip("\n").rpartition("\n")[2]
    assert last.startswith("instead: ")
    assert way in last


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--system", "torch-fsdp3"), ("run", "--set", "mesh=wide"), ("run", "--set", "system=reference"),
        ("inspect", "gone"), ("inspect", "empty"), ("inspect", "broken.pt"), ("diff", "broken.pt", "broken.pt"),
    ],
)  # fmt: skip
def test_what_another_command_would_not_take_either_leads_nowhere(
    shardproof: Cli, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.pt").write_bytes(b"PK\x03\x04")
    assert "instead: " not in shardproof.refuses(*words)


@pytest.mark.parametrize("command", ["replay", "shrink", "export"])
def test_a_stored_cell_of_a_trainer_is_run_again_with_the_file_that_its_run_had(shardproof: Cli, command: str) -> None:
    """`explain` needs no file; what runs the cell again prints where the run found it."""
    result = report_samples.cell()
    Path("t").mkdir()
    with Store(Path("t") / DATABASE) as store:
        run_id = store.begin_run(["trainer", "mine/my_trainer.py", "--set", "mesh=4"], 0, {})
        store.plan(run_id, [result.scenario])
        store.finished_many(run_id, [result])
        store.end_run(run_id)
    assert shardproof("explain", result.id, "--out", "t") == ExitStatus.OK
    told = shardproof.refuses_in_three_parts(command, result.id, "--out", "t")
    assert "for example: --plugin mine/my_trainer.py" in told
