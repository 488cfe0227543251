"""Bad input, found by hand and drawn by Hypothesis: status 2, one message, no traceback, and soon.

*Verifies*: for scenario files, options, plug-ins, interpreters and databases, that whatever is in them either is taken
or is refused with what was given and what is allowed; that no message holds a character which a terminal obeys, or
repeats thousands of characters. *Does not verify*: that what is taken is what the user meant.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shardproof.cli.main import entry
from shardproof.errors import MOST_GIVEN, MOST_OF_A_LINE, UsageError, printable
from shardproof.models import ZOO
from shardproof.program import operations
from shardproof.report.model import Report
from shardproof.request import Outcome, Request
from shardproof.scenario import AXES, Scenario
from shardproof.store import DATABASE, Store
from shardproof.verdict import ExitStatus
from shardproof.world import interpreter as interpreters

from tests import report_samples
from tests.effort import examples

SOON_S = 5.0
HEAD = 'schema = 1\n[scenario]\nsystem = "reference"\n'
DRAWN = settings(
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)


def said(*words: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command in this process, which must be done soon."""
    out, err = io.StringIO(), io.StringIO()
    began = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = entry(list(words))
    assert time.process_time() - began < SOON_S, words
    shown = out.getvalue() + err.getvalue()
    assert "Traceback" not in shown, shown
    assert not re.search("[^\n\t\x20-\x7e\xa0-\U0010ffff]", shown), repr(shown)
    return status, out.getvalue(), err.getvalue()


def refused(*words: str) -> str:
    status, out, err = said(*words)
    assert (status, out) == (ExitStatus.USAGE, ""), (words, out, err)
    assert max(map(len, err.splitlines())) <= MOST_OF_A_LINE + 100
    return err


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder; what would run does not."""
    monkeypatch.chdir(tmp_path)

    def record(request: Request) -> Outcome:
        return Outcome(Report(report_samples.RUN, ()), request.out / "index.html", interrupted=False)

    monkeypatch.setattr("shardproof.run.run", record)


# --- scenario files -----------------------------------------------------------------------------------

DEEP = "[" * 3000
FILES: dict[str, str | bytes] = {
    "deep lists": f"schema = 1\nx = {DEEP}",
    "lists in lists": f"{HEAD}model = {'[' * 60}{']' * 60}",
    "deep tables": f"schema = 1\n[{'.'.join('a' * 900)}]\n",
    "many digits": f"schema = {'9' * 5000}",
    "many digits of an axis": f"{HEAD}seed = {'9' * 5000}",
    "hexadecimal without end": f"{HEAD}seed = 0x{'f' * 6000}",
    "a seed of 65 bits": f"{HEAD}seed = {2**64}",
    "a seed of 65 bits as text": f'{HEAD}seed = "{2**64}"',
    "schema that is true": "schema = true\n[scenario]\n",
    "schema that is a float": "schema = 1.0\n[scenario]\n",
    "budget that is nan": "schema = 1\n[space]\n[system.reference]\nbudget_s = nan\n",
    "budget without end": "schema = 1\n[space]\n[system.reference]\nbudget_s = inf\n",
    "shrinking that is nan": "schema = 1\n[space]\n[system.reference]\nshrink_s = nan\n",
    "no text": b"\xff\xfe\x00",
    "other digits": f'{HEAD}mesh = "１x２x１"',
    "other digits of a number": f'{HEAD}microbatches = "２"',
    "other digits of the optimizer": f'{HEAD}optimizer = "adamw/lr=０.５"',
    "underscores": f'{HEAD}seed = "1_0"',
    "a fault twice": f'{HEAD}faults = "no-op-load,no-op-load"',
    "build build": f'{HEAD}program = "build build step"',
    "control characters": f'{HEAD}model = "\\u001b[31mred"',
    "control characters of options": f'{HEAD}options = "\\u001b]0;title\\u0007"',
    "control characters of a version": f'{HEAD}version = "\\u009b1m"',
    "long value": f'{HEAD}model = "{"m" * 5000}"',
    "a date": f"{HEAD}model = 1979-05-27",
    "a large file": f"{HEAD}# {'x' * (1 << 20)}",
    "a mesh of many digits": f'{HEAD}mesh = "{"9" * 5000}x1x1"',
    **{
        f"optimizer {wrong}": f'{HEAD}optimizer = "adamw/{wrong}"'
        for wrong in ("lr=nan", "lr=inf", "lr=-1", "lr=1e999", "beta1=2", "beta2=1", "beta1=-0.5", "eps=-1", "clip=-1",
                      "clip=nan", "weight_decay=-1", "loss_scale=nan", "loss_scale=inf", "lr=", "lr=0x1p3")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_refused(case: str) -> None:
    content = FILES[case]
    Path("bad.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused("run", "bad.toml")
    assert len(message) < 2000
    refused("plan", "bad.toml")


def test_a_pipe_a_device_and_a_folder_are_no_scenario_files() -> None:
    os.mkfifo("pipe.toml")
    Path("device.toml").symlink_to("/dev/zero")
    Path("folder.toml").mkdir()
    Path("loop.toml").symlink_to("loop.toml")
    for name in ("pipe.toml", "device.toml", "folder.toml", "loop.toml"):
        for command in (("run",), ("plan",), ("shrink",), ("export",), ("sweep",)):
            refused(*command, name)


AXIS_VALUES = st.one_of(
    st.text(max_size=20),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.sampled_from(
        ["dense", "1x2x1", "bf16", "cpu=0.5", "adamw/lr=1", "twice", "zero1", "grow", "2", "build step save"]
    ),
    st.lists(st.text(max_size=3), max_size=2),
)


def _toml(value: object) -> str:
    if isinstance(value, float):
        return {"inf": "inf", "-inf": "-inf", "nan": "nan"}.get(repr(value), repr(value))
    return json.dumps(value)


@DRAWN
@given(st.dictionaries(st.sampled_from([*AXES, "colour"]), AXIS_VALUES, max_size=4))
def test_any_scenario_is_taken_or_refused(axes: dict[str, object]) -> None:
    lines = "".join(f"{axis} = {_toml(value)}\n" for axis, value in axes.items())
    Path("drawn.toml").write_text(f"schema = 1\n[scenario]\n{lines}", "utf-8", errors="surrogatepass")
    assert said("plan", "drawn.toml")[0] in (ExitStatus.OK, ExitStatus.USAGE)


@DRAWN
@given(st.one_of(st.text(max_size=200), st.binary(max_size=200)))
def test_any_content_of_a_file_is_taken_or_refused(content: str | bytes) -> None:
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    Path("drawn.toml").write_bytes(b"schema = 1\n[scenario]\n" + data)
    assert said("plan", "drawn.toml")[0] in (ExitStatus.OK, ExitStatus.USAGE)


# --- options ------------------------------------------------------------------------------------------

LONG = "n" * 5000
WORDS: dict[str, tuple[str, ...]] = {
    "explain nothing": ("explain", ""),
    "replay nothing": ("replay", ""),
    "export nothing": ("export", ""),
    "a long id": ("explain", LONG),
    "an id that is a pattern": ("explain", "%"),
    "a large seed": ("run", "--seed", str(2**63)),
    "a huge seed": ("run", "--seed", "9" * 5000),
    "other digits": ("run", "--seed", "１２"),
    "an underscore": ("run", "--seed", "1_2"),
    "a sample without end": ("run", "--sample", str(10**30)),
    "jobs without end": ("run", "-j", str(10**30)),
    "times without end": ("replay", "1a2b", "--times", str(10**30)),
    "a deadline without end": ("run", "--deadline-s", "inf"),
    "a deadline beyond all clocks": ("run", "--deadline-s", "1e308"),
    "a deadline that is nan": ("run", "--deadline-s", "nan"),
    "a limit that is nan": ("shrink", "1a2b", "--limit-s", "nan"),
    "a long name": ("run", LONG),
    "a long file": ("run", f"{LONG}.toml"),
    "a long path": ("run", "a/" * 3000 + "x.toml"),
    "a long folder": ("run", "--out", LONG),
    "a long output": ("run", "--json", LONG),
    "a long run": ("report", LONG),
    "a long checkpoint": ("inspect", LONG),
    "a long interpreter": ("run", "--python", f"/{LONG}"),
    "a long axis": ("run", "--set", f"{LONG}=1"),
    "a long value": ("run", "--set", f"model={LONG}"),
    "a long system": ("run", "--system", LONG),
    "a long fault": ("run", "--fault", LONG),
    "a long plug-in": ("run", "--plugin", LONG),
    "a long strength": ("run", "--strength", "9" * 5000),
    "a long shard": ("run", "--shard", f"{'9' * 5000}/2"),
    "a long option": ("run", f"--{LONG}"),
    "a long command": (LONG,),
    "a surrogate": ("run", "--out", "\udcff"),
    "a surrogate of a file": ("run", "\udcff.toml"),
    "colour": ("run", "\x1b[31mred.toml"),
    "colour of an option": ("run", "--\x1b[31mred"),
    "colour of a system": ("run", "--system", "\x1b[31mred"),
    "a fault twice": ("run", "--system", "reference", "--fault", "no-op-load", "--fault", "no-op-load"),
    "shard in other digits": ("run", "--shard", "１/２"),
    "strength in other digits": ("run", "--strength", "２"),
    "worlds in other digits": ("run", "--set", "mesh=world<=２"),
    "all versions of nothing": ("sweep", "regressions/torch-fsdp2-164929", "--versions", ".."),
    **{
        f"nothing for {option}": ("run", option, "")
        for option in ("--system", "--set", "--strength", "--sample", "--seed", "--fault", "--shard", "--plugin",
                       "--out", "--python", "--torch", "--clone", "--json", "--junit", "--device", "-j", "--deadline-s")
    },
    "nothing behind an equals sign": ("run", "--shard="),
    "no name": ("run", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", WORDS)
def test_bad_words_are_refused(case: str) -> None:
    message = refused(*WORDS[case])
    assert len(message) < 3000
    assert "n" * (2 * MOST_GIVEN + 1) not in message
    assert os.listdir() == []


@DRAWN
@given(
    st.sampled_from(["--system", "--set", "--strength", "--sample", "--seed", "--fault", "--shard", "--plugin"]),
    st.text(max_size=30),
)
def test_any_option_is_taken_or_refused(option: str, value: str) -> None:
    if "\0" in value or value.startswith("-"):
        return
    status, _, _ = said("plan", "--system", "reference", "--set", "mesh=1x1x1", option, value)
    assert status in (ExitStatus.OK, ExitStatus.USAGE, ExitStatus.NOTHING_RUN)


@given(st.text())
def test_what_is_printed_is_obeyed_by_no_terminal(text: str) -> None:
    shown = printable(text)
    assert all(character.isprintable() or character in "\n\t" for character in shown)
    shown.encode()
    if text.isprintable() and len(text) <= MOST_OF_A_LINE:
        assert shown == text


def test_a_number_too_large_to_print_is_told() -> None:
    assert "int too large to print" in str(UsageError.of("x", 10**6000, "less", "1"))


def test_what_a_program_may_not_be() -> None:
    with pytest.raises(UsageError, match="repeats the one before it"):
        operations("build build")
    assert operations("build step build")


# --- plug-ins and interpreters ------------------------------------------------------------------------

PLUGINS = {
    "base": "class Out(BaseException): pass\nraise Out('gone')",
    "generator": "raise GeneratorExit",
    "exit": "import sys; sys.exit(0)",
    "none": "from shardproof.models import ZOO\nZOO['dense'] = None",
    "other": "from shardproof.models import ZOO\nZOO['dense'] = ZOO['twins']",
    "long": "raise ValueError('x' * 100000)",
    "colour": "raise ValueError('\\x1b[31m')",
}


@pytest.mark.parametrize("case", PLUGINS)
def test_a_broken_plugin_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = ZOO["dense"]
    monkeypatch.syspath_prepend(os.getcwd())
    Path(f"plugin_{case}.py").write_text(PLUGINS[case])
    try:
        assert "a module that imports" in refused("plan", "--plugin", f"plugin_{case}")
    finally:
        ZOO["dense"] = dense


ANSWERS = {
    "nothing": "exit 0",
    "no JSON": "echo hello",
    "a list": "echo '[]'",
    "an empty table": "echo '{}'",
    "wrong types": """echo '{"python":3,"tag":[],"platform":null,"installed":1,"torch_build":{},"site":""}'""",
    "no release": """echo '{"python":"x","tag":"","platform":"","installed":{},"torch_build":{},"site":""}'""",
    "an error": "echo broken >&2; exit 3",
    "output without end": "exec yes",
    "errors without end": "exec yes >&2",
    "no end": "sleep 1000",
    "no end of what it starts": "sleep 1000 & sleep 1000",
    "deep JSON": "python3 -c \"print('[' * 100000)\"",
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_interpreter_that_answers_nonsense_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreters, "ASK_S", 1.0)
    program = Path("python").resolve()
    program.write_text(f"#!/bin/sh\n{ANSWERS[case]}\n")
    program.chmod(0o755)
    began = time.monotonic()
    assert "a Python interpreter that runs" in refused("run", "--python", str(program)) or case == "no release"
    assert time.monotonic() - began < 4 * SOON_S


# --- databases ----------------------------------------------------------------------------------------


@pytest.fixture
def kept() -> Callable[[str, Any], None]:
    """A folder with a run; called with a column and a value, writes the value into every row."""
    folder = Path("reports/mine")
    folder.mkdir(parents=True)
    result = report_samples.passing(1)
    with Store(folder / DATABASE) as store:
        run_id = store.begin_run(["run"], 0, {"torch": "2"})
        store.plan(run_id, [result.scenario])
        store.finished(run_id, result)
        store.end_run(run_id)

    def edit(column: str, value: Any) -> None:
        table, _, name = column.partition(".")
        with closing(sqlite3.connect(folder / DATABASE)) as connection, connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            with contextlib.suppress(sqlite3.IntegrityError):
                connection.execute(f"UPDATE {table} SET {name} = ?", (value,))

    return edit


COLUMNS = [
    "runs.started_at", "runs.ended_at", "runs.command", "runs.seed", "runs.versions", "runs.exclusions",
    "planned.scenario", "results.content", "results.verdict",
]  # fmt: skip
VALUES = [
    b"\xff", "", "null", "[]", "{}", "1", '"x"', "nonsense", "[" * 100_000, '{"a": 1}', "[1]", 7, 1.5, "9" * 5000,
    '{"mesh": "0x0x0"}', '{"mesh": 3}', "\x1b[31m",
]  # fmt: skip


def _asked(*, merged: bool = False) -> None:
    shown = report_samples.passing(1).id
    words = [("report", "reports/mine"), ("explain", shown), ("explain", shown, "--toml")]
    for each in [("merge", "reports/mine", "--out", "all")] if merged else words:
        status, out, _ = said(*each)
        assert status in (ExitStatus.OK, ExitStatus.USAGE) or "not finished" in out, each


def _edits() -> Iterator[Any]:
    """Columns, each with a third of the values, so that each value meets three columns; at night with all of them."""
    for number, column in enumerate(COLUMNS):
        yield pytest.param(column, VALUES[number % 3 :: 3], id=column)
        yield pytest.param(column, VALUES, id=f"{column}-all", marks=pytest.mark.nightly)


@pytest.mark.parametrize(("column", "values"), list(_edits()))
def test_an_edited_database_is_taken_or_refused(
    kept: Callable[[str, Any], None], column: str, values: list[Any]
) -> None:
    for number, value in enumerate(values):
        kept(column, value)
        _asked(merged=number % 4 == 3)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
RESULT = report_samples.passing(1).to_json()


@settings(DRAWN, max_examples=examples(10))
@given(st.sampled_from(sorted(RESULT)), JSON_VALUES)
def test_an_edited_result_is_taken_or_refused(key: str, value: object) -> None:
    folder = Path("reports/mine")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DATABASE).unlink(missing_ok=True)
    result = report_samples.passing(1)
    with Store(folder / DATABASE) as store:
        run_id = store.begin_run(["run"], 0, {"torch": "2"})
        store.plan(run_id, [result.scenario])
        store.finished(run_id, result)
        store.end_run(run_id)
    with closing(sqlite3.connect(folder / DATABASE)) as connection, connection:
        connection.execute("UPDATE results SET content = ?", (json.dumps({**RESULT, key: value}),))
    _asked()


def test_a_scenario_with_what_a_terminal_obeys_is_none() -> None:
    for axis in ("model", "version", "checkpoint", "program", "options", "faults"):
        with pytest.raises(UsageError):
            Scenario().with_axes({axis: "\x1b[2J"})
