"""What lies beside a scenario file, or is named in it, runs only if the user has named it himself.

A scenario file may come by mail, with anything beside it. The traps here are modules of the names that shardproof, its
servers, ranks and pip import; each leaves a mark and ends its process.

*Verifies*: the installed command's way to start (the current folder is not on its `sys.path`); `python -m shardproof`
puts it there, as Python does for every module, before anything of ours runs. *Does not verify*: that a working tree or
a plugin which the user does name is harmless; its code runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shardproof.errors import UsageError
from shardproof.space.files import load_space
from shardproof.verdict import ExitStatus
from shardproof.world.interpreter import SAFE_PATH

from tests.paths import PYTHONPATH

ROOT = Path(__file__).parents[3]
TRAPS = (
    "json",
    "random",
    "socket",
    "sqlite3",
    "numpy",
    "torch",
    "shardproof",
    "harness",
    "scenarios",
    "pip",
    "apex",
    "my_rules",
)
SCENARIO = """
schema = 1
[scenario]
system = "{system}"
program = "train"
"""


@pytest.fixture
def mailed(tmp_path: Path) -> Path:
    """A folder with a scenario file and traps beside it."""
    for name in TRAPS:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\nraise SystemExit(9)\n"
        )
    (tmp_path / "bug.toml").write_text(SCENARIO.format(system="reference"))
    return tmp_path


def shardproof(folder: Path, *words: str) -> tuple[int, str]:
    """The command as it is installed, in a folder; its status and what it said."""
    environment = {**os.environ, **SAFE_PATH, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-m", "shardproof", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_modules_beside_a_scenario_file_do_not_run(mailed: Path) -> None:
    status, said = shardproof(mailed, "run", "bug.toml", "--out", "out")
    assert not (mailed / "ran").exists(), (mailed / "ran").read_text()
    assert status == ExitStatus.OK, said


def test_a_plugin_beside_it_runs_where_it_is_named_and_only_then(mailed: Path) -> None:
    status, said = shardproof(mailed, "plan", "bug.toml", "--plugin", "my_rules")
    assert (status, "a module that imports" in said) == (ExitStatus.USAGE, True), said
    assert (mailed / "ran").read_text() == "my_rules ", "the trap would have run"


@pytest.mark.parametrize("version", ["path:tree", "path:/tree+cured"])
def test_a_file_cannot_name_a_working_tree(tmp_path: Path, version: str) -> None:
    file = tmp_path / "bug.toml"
    file.write_text(SCENARIO.format(system="megatron-core") + f'version = "{version}"\n')
    space = load_space(str(file))
    with pytest.raises(UsageError, match="named on the command line, since its code runs"):
        space.on_systems([])
    (axes,) = space.on_systems(["megatron-core@path:mine"]).stated
    assert axes["version"] == "path:mine"


@pytest.mark.parametrize("command", ["run", "plan", "shrink", "export", "sweep"])
def test_no_command_takes_a_tree_from_a_file(tmp_path: Path, command: str) -> None:
    (tmp_path / "bug.toml").write_text(SCENARIO.format(system="megatron-core") + 'version = "path:tree"\n')
    (tmp_path / "tree").mkdir()
    status, said = shardproof(tmp_path, command, "bug.toml")
    assert (status, "its code runs" in said) == (ExitStatus.USAGE, True), said


@pytest.mark.parametrize("name", ["../my_rules", "my_rules;json", "my_rules.py", "", "os.system('true')", ".my_rules"])
def test_what_is_no_name_of_a_module_is_no_plugin(mailed: Path, name: str) -> None:
    status, said = shardproof(mailed, "plan", "bug.toml", "--plugin", name)
    assert (status, "Traceback" in said) == (ExitStatus.USAGE, False), said
