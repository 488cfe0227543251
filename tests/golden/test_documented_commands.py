"""Every command of the documents is run, or `commands.toml` says why it is not and which test comes nearest.

*Verifies*: that each command behind a `$` is in the table, and nothing else is; in CI, that those which need no ranks
end with the status that the table gives; nightly, that those with real ranks do, in a folder with a reader's files.
*Does not verify*: what a command prints, which the golden texts of the command line do; that what is left out works.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardproof.space.files import load_space
from shardproof.space.plan import make_plan

from tests.paths import PYTHONPATH

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
TABLE = tomllib.loads(Path(__file__).with_name("commands.toml").read_text("utf-8"))
LEFT_OUT = {command: (why, nearest) for why, listed in TABLE["left_out"].items() for command, nearest in listed.items()}

DEADLINE_S = 1200
KEPT = "reports/kept"
"""The run whose failure stands for every id."""

_LINE = re.compile(r"^\$ (.*)$", re.MULTILINE)
_REMARK = re.compile(r"\s+# .*$")
_ID = re.compile(r"\b(?:1a2b3c4d5e6f|bd5f62dde7bb|ID)\b")


def documented() -> Iterator[str]:
    """The commands of all pages, without remarks, those over several lines on one."""
    for page in PAGES:
        for line in _LINE.findall(page.read_text("utf-8").replace("\\\n", " ")):
            yield " ".join(_REMARK.sub("", line).split())


def words_of(command: str, ident: str = "") -> list[str]:
    """A command of ours as arguments; a placeholder is a failure of the run that is kept."""
    words = shlex.split(_ID.sub(ident, command))[1:]
    return [*words, "--out", KEPT] if ident and _ID.search(command) else words


def test_every_command_is_in_the_table() -> None:
    listed = {**TABLE["ci"], **TABLE["nightly"], **LEFT_OUT}
    assert sorted(set(documented()) - set(listed)) == []
    assert sorted(set(listed) - set(documented())) == []
    assert len(listed) == len(TABLE["ci"]) + len(TABLE["nightly"]) + len(LEFT_OUT)


def test_as_many_scenarios_as_the_page_on_gpus_says() -> None:
    told = re.search(r"shardproof run gpu .* (\d+) scenarios$", (ROOT / "docs/gpu.md").read_text("utf-8"), re.MULTILINE)
    assert told is not None
    assert int(told[1]) == len(make_plan([load_space("gpu")]).scenarios)


@pytest.mark.parametrize("command", LEFT_OUT)
def test_what_comes_nearest_is_there(command: str) -> None:
    assert (ROOT / LEFT_OUT[command][1]).exists()


def test_what_needs_no_ranks_runs() -> None:
    commands = list(TABLE["ci"])
    told = subprocess.run(
        [sys.executable, "-m", "tests.golden.command_outputs"],
        input=json.dumps([words_of(command) for command in commands]),
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    statuses = dict(zip(commands, json.loads(told.stdout), strict=True))
    assert {command: said[0] for command, said in statuses.items()} == TABLE["ci"], statuses
    assert [command for command, said in statuses.items() if not said[1]] == []


def shardproof(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "NO_COLOR": "1"}
    command = [sys.executable, "-m", "shardproof", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a reader of the documents has: a failing scenario, a run of it, checkpoints, our tests."""
    folder = tmp_path_factory.mktemp("desk")
    scenario = (ROOT / "scenarios/megatron-core/regressions/2777-swap.toml").read_text("utf-8")
    (folder / "my-bug.toml").write_text(scenario)
    (folder / "bug.toml").write_text(f"# Written by shardproof shrink\n{scenario}")  # which --toml may write again
    (folder / "tests").symlink_to(ROOT / "tests")
    (folder / "scenarios").mkdir()
    (folder / "scenarios/trainers").symlink_to(ROOT / "scenarios/trainers")
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs/diff.md").read_text("utf-8"), re.DOTALL)
    assert example
    subprocess.run([sys.executable, "-c", example[1]], cwd=folder, check=True)
    twenty_lines = re.search(r"```python\n(.*?)```", (ROOT / "docs/trainer.md").read_text("utf-8"), re.DOTALL)
    assert twenty_lines
    (folder / "my_trainer.py").write_text(twenty_lines[1])
    shutil.copytree(folder / "before", folder / "checkpoints/step-100")
    shutil.copy(folder / "after.pt", folder / "other.pt")
    for out in (KEPT, "reports/nightly", "reports/nightly"):  # a history needs two runs
        told = shardproof(folder, "run", "my-bug.toml", "-j", "1", "--out", out, "--json", f"{Path(out).name}.json")
        assert told.returncode == 1, told.stdout + told.stderr
    return folder


@pytest.fixture(scope="module")
def ident(desk: Path) -> str:
    """The id of the failure on the desk."""
    (result,) = json.loads((desk / "kept.json").read_text("utf-8"))["results"]
    return str(result["id"])


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.parametrize("command", {tuple(words_of(command, "ID")): command for command in TABLE["nightly"]}.values())
def test_what_needs_ranks_runs(desk: Path, ident: str, command: str) -> None:
    told = shardproof(desk, *words_of(command, ident))
    assert told.returncode == TABLE["nightly"][command], told.stdout + told.stderr
    assert told.stdout
