"""Every command that a command prints can be pasted as it is: it names options that there are, with values that fit.

*Verifies*: of real commands in a folder whose name has a blank, with results outside of `reports/`, that each line with
`shardproof …` in what they print is parsed by our own command line; that what names a stored result finds it.
*Does not verify*: what the printed commands do when they run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from shardproof.cli.main import cli

from tests.paths import PYTHONPATH

ROOT = Path(__file__).parents[3]
OUT = "my results"
PLUGIN = f"{ROOT / 'scenarios/trainers/expert_mesh.py'}"
FAILING = ("run", "smoke", "--system", "reference", "--fault", "no-op-load", "--sample", "2")

_PRINTED = re.compile(r"shardproof (?=[a-z])[^\n`|<]*")
_AFTER = re.compile(r"  +\S.*$")
"""What stands behind a command: two blanks and what it is for."""
STORED = ("explain", "replay", "shrink", "export")


def shardproof(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "NO_COLOR": "1"}
    command = [sys.executable, "-m", "shardproof", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def printed(text: str) -> list[str]:
    """The commands in what was printed, without what stands behind them."""
    return [_AFTER.sub("", found).rstrip(" .;") for found in _PRINTED.findall(text)]


def assert_pasted(command: str, folder: Path) -> None:
    """A shell and our command line take a command as it is, and a result that it names is found from the folder."""
    words = shlex.split(command)[1:]
    name, subcommand, rest = cli.resolve_command(click.Context(cli), words)
    assert name is not None, command
    assert subcommand is not None, command
    context = subcommand.make_context(name, rest, resilient_parsing=False)
    out, ident = context.params.get("out"), context.params.get("scenario_id") or context.params.get("name") or ""
    if name in STORED and re.fullmatch("[0-9a-f]{12}", ident):
        told = shardproof(folder, "explain", ident, *(["--out", str(out)] if out else []))
        assert told.returncode == 0, (command, told.stderr)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("my desk")
    done = shardproof(folder, *FAILING, "--out", OUT, "--json", "run.json", "--junit", "junit.xml")
    assert done.returncode == 1, done.stderr
    (folder / "run.txt").write_text(done.stdout, "utf-8")
    return folder


def test_what_a_run_prints_and_its_reports(desk: Path) -> None:
    texts = [(desk / name).read_text("utf-8") for name in ("run.txt", "junit.xml", f"{OUT}/summary.md")]
    for text in texts:
        commands = [command for command in printed(text) if " replay " in command]
        assert commands
        for command in commands:
            assert_pasted(command, desk)


def test_what_explain_prints(desk: Path) -> None:
    ident = failed(desk)
    told = shardproof(desk, "explain", ident, "--out", OUT)
    commands = [command for command in printed(told.stdout) if ident in command]
    assert {shlex.split(command)[1] for command in commands} == {"replay", "shrink"}
    for command in commands:
        assert_pasted(command, desk)


def test_results_that_were_moved_are_named_where_they_are(desk: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "results.sqlite").write_bytes((desk / OUT / "results.sqlite").read_bytes())
    told = shardproof(tmp_path, "explain", failed(desk), "--out", "elsewhere")
    assert "--out elsewhere" in told.stdout
    assert OUT not in told.stdout


def failed(desk: Path) -> str:
    results = json.loads((desk / "run.json").read_text("utf-8"))["results"]
    return str(next(result["id"] for result in results if result["verdict"] == "mismatch"))


def test_what_faults_prints(desk: Path) -> None:
    told = shardproof(desk, "faults", "--fault", "stale-masters", "--out", "my faults")
    commands = printed(told.stdout)
    assert told.returncode == 0, told.stderr
    assert commands
    for command in commands:
        assert_pasted(command, desk)


def test_what_export_prints_where_no_script_can_be_written(desk: Path) -> None:
    told = shardproof(desk, "export", failed(desk), "--out", OUT)
    assert told.returncode == 2
    for command in printed(told.stderr):
        assert_pasted(command, desk)


@pytest.mark.nightly
def test_what_explore_and_init_print(desk: Path) -> None:
    asked = ("--examples", "4", "--budget-s", "20", "--fault", "no-op-load", "--out", "what was found")
    for words in (("explore", "reference", *asked), ("init", "trainer", "my trainer.py")):
        told = shardproof(desk, *words)
        commands = printed(told.stdout)
        assert commands, told.stdout + told.stderr
        for command in commands:
            assert_pasted(command, desk)


@pytest.mark.parametrize("words", [("3949",), ("expert_mesh",), ("stateful",), ("frozen",), ("fp32",)])
def test_what_known_prints(words: tuple[str, ...], desk: Path) -> None:
    commands = printed(shardproof(desk, "known", *words).stdout)
    assert commands
    for command in commands:
        assert_pasted(command, desk)


def test_no_script_is_offered_that_export_refuses(desk: Path) -> None:
    told = shardproof(desk, "known", "accelerate-stateful-again").stdout
    assert "shardproof run " in told
    assert "shardproof export" not in told
