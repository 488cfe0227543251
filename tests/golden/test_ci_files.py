"""The files that CI runs and that others copy: their commands parse, and the nightly's matrix is whole.

*Verifies*: every `shardproof` command of a workflow against the command line; that each system is in the nightly, with
all its parts; the schemas of GitHub and GitLab, by check-jsonschema of the extra `test`; that nothing which is printed,
of ours or quoted from a library, is what launchers of clusters take for a broken node, and run again.
*Does not verify*: that a runner does what we think; what a library itself prints.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
from shardproof.cli.main import cli
from shardproof.errors import RETRIED, printable
from shardproof.protocol.releases import package_of
from shardproof.pytest.items import failure_message
from shardproof.report.failure_text import render_explained
from shardproof.report.text import render_brief, render_result, render_text
from shardproof.space.files import load_space, split_system
from shardproof.space.plan import parse_shard
from shardproof.world.interpreter import interpreter

from tests import report_samples as samples
from tests.conformance.built_in import BUILT_IN

ROOT = Path(__file__).parents[2]
WORKFLOWS = [*sorted((ROOT / ".github/workflows").glob("*.yml")), ROOT / "docs/ci/pull-request.yml"]
GITLAB = [ROOT / "docs/ci/gitlab-ci.yml", ROOT / "docs/ci/nightly-heads.gitlab-ci.yml"]
FILES = [*WORKFLOWS, *GITLAB, ROOT / "docs/ci/slurm.sh", ROOT / "docs/ci/slurm-heads.sh"]
VALUES = {
    "SYSTEM": "reference", "SHARD": "1/2", "SAMPLE": "60", "id": "1a2b", "SLURM_CPUS_PER_TASK": "4",
    "torch": (interpreter().release("torch") or "").partition("+")[0],
}  # fmt: skip
"""What stands in for variables; 1 for any other."""

_COMMAND = re.compile(r"(?:^|[\s/'])shardproof ((?:run|merge|export|claims|port|night) [^|<>'\n]*)")
_VARIABLE = re.compile(r"\$\{(\w+):-[^}]*\}|\$(\w+)")


def commands(path: Path) -> list[str]:
    """The command lines of a file, on one line each, with values for variables."""
    text = re.sub(r"\\\n\s*|\n\s+(?=--)", " ", path.read_text("utf-8"))
    text = re.sub(r"\$\{\w+:\+([^}]*)\}", r"\1", text)
    return [_VARIABLE.sub(lambda m: VALUES.get(m[1] or m[2], "1"), found) for found in _COMMAND.findall(text)]


CASES = [(path.name, command) for path in FILES for command in commands(path)]


@pytest.mark.parametrize(("file", "command"), CASES)
def test_a_command_of_ci_parses(file: str, command: str) -> None:
    name, *words = shlex.split(command.replace(" 2", ""))
    found = cli.get_command(click.Context(cli), name)
    assert found, file
    given = found.make_context(name, words).params
    for space in given.get("names") or ():
        split_system(space) if name == "claims" else load_space(space)
    for system in given.get("systems") or ():
        split_system(system)
    if given.get("shard"):
        parse_shard(given["shard"])


def test_there_is_something_to_check() -> None:
    assert {file for file, _ in CASES} >= {path.name for path in FILES} - {"ci.yml"}


def test_the_weekly_job_clones_every_library_from_where_its_numbers_are() -> None:
    text = (ROOT / ".github/workflows/weekly-claims.yml").read_text("utf-8")
    rows = dict(re.findall(r"- \{system: (\S+), repository: (\S+)\}", text))
    assert rows == {system.name: package_of(system).repository for system in BUILT_IN if system.package}


def test_the_nightly_has_every_system_with_all_its_parts() -> None:
    text = (ROOT / ".github/workflows/nightly.yml").read_text("utf-8")
    rows = re.findall(r"- \{system: (\S+), shard: (\d+)/(\d+),", text)
    parts: dict[str, set[int]] = {}
    for system, part, _ in rows:
        parts.setdefault(system, set()).add(int(part))
    assert {split_system(system)[0] for system in parts} == {system.name for system in BUILT_IN}
    assert [row for row in rows if parts[row[0]] != set(range(1, int(row[2]) + 1))] == []
    names = re.findall(r"artifact: ([\w.-]+)\}", text)
    assert len(set(names)) == len(names) == len(rows)


def test_the_nightly_on_heads_has_every_library_that_is_installed_from_a_clone() -> None:
    text = (ROOT / ".github/workflows/nightly-heads.yml").read_text("utf-8")
    systems = set(re.findall(r"- \{system: (\S+), repository: [\w-]+/[\w-]+\}", text))
    packaged = {system.name for system in BUILT_IN if system.package}
    assert systems == packaged - {"megatron-bridge"}, "Bridge's head needs that of Megatron-Core beside it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_secret_is_asked_for_and_no_value_of_an_event_reaches_a_shell(path: Path) -> None:
    text = path.read_text("utf-8")
    assert "secrets." not in text
    assert "pull_request_target" not in text
    assert "github.event" not in text


@pytest.mark.parametrize(
    ("schema", "paths"),
    [("github-workflows", WORKFLOWS), ("gitlab-ci", GITLAB)],
    ids=["github", "gitlab"],
)
def test_a_file_is_what_its_schema_says(schema: str, paths: list[Path]) -> None:
    pytest.importorskip("check_jsonschema")
    more = ["--data-transform", "gitlab-ci"] if schema == "gitlab-ci" else []
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *more, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


PHRASES = ["".join(parts) for parts in RETRIED]


def test_nothing_of_ours_reads_as_a_failure_of_the_machine() -> None:
    """Names of Python's exceptions aside, and patterns of what libraries say, which code needs and nothing prints."""
    sources = [path for kind in ("py", "j2", "toml") for path in (ROOT / "harness").rglob(f"*.{kind}")]
    texts = {path: re.sub(r'\br"[^"]*"', "", path.read_text("utf-8")).lower() for path in sources}
    phrases = [phrase.lower() for phrase in PHRASES if " " in phrase]
    assert [(path, phrase) for path, text in texts.items() for phrase in phrases if phrase in text] == []


@pytest.mark.parametrize("phrase", PHRASES)
def test_what_a_library_says_reads_as_no_failure_of_the_machine(phrase: str) -> None:
    crash = samples.crash()
    assert crash.error
    error = replace(crash.error, message=f"{phrase} (1 of 2)", traceback=f"Traceback:\n{phrase} (1 of 2)")
    result = replace(crash, error=error, reason=phrase)
    report = samples.report(result, replace(samples.unknown(), reason=phrase))
    shown = (
        printable(phrase), render_text(report), render_result(result), render_brief(result), failure_message(result),
        render_explained(result, report.issues),
    )  # fmt: skip
    assert all(phrase not in text for text in shown)
    words = phrase.replace(" ", "")
    assert all(words in text.replace(" ", "").replace("\N{NO-BREAK SPACE}", "").replace("\n", "") for text in shown)
