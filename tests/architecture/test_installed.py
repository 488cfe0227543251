"""shardproof as others install it: a wheel, in an environment of its own, beside somebody's own `harness` and `tests`.

*Verifies*: that the wheel holds every module, template and scenario file; that an installed shardproof meets no package
of the repository that it tests, whatever that is called; that commands, pytest and a plugin work there.
*Does not verify*: that the dependencies can be installed, since they are those of this environment.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TAKEN = ("harness", "scenarios", "tests")
"""Names that we use at the top of our own repository, and others in theirs."""

TEST = """
from shardproof.pytest import scenarios

from harness import THEIRS


def test_of_their_own():
    assert THEIRS == "theirs"


@scenarios(system="reference", model="dense", program="resume")
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(): ...
"""
PLUGIN = """
from shardproof.plugins import register_program

register_program("save_three_times", "build step save save save")
"""


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git tracks, so that leftovers of a build are not in it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        if name.startswith(("harness/", "scenarios/", "pyproject.toml", "README.md", "LICENSE")):
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "source" / name)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet",
         "--disable-pip-version-check", "--wheel-dir", folder, folder / "source"], check=True,
    )  # fmt: skip
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, and finds its dependencies in the one of these tests."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check",
         "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", wheel], check=True,
    )  # fmt: skip
    return folder / "bin" / "python"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Somebody's repository, with packages of our names."""
    for name in TAKEN:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('THEIRS = "theirs"\n')
    (tmp_path / "tests" / "test_theirs.py").write_text(TEST)
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    return tmp_path


def said_by(repository: Path, *command: str | Path) -> str:
    """What a command says in the repository; it ends with 0, and none of ours is taken for theirs."""
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_holds_every_module_template_and_scenario(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    ours = [name.removeprefix("harness/") for name in tracked() if name.startswith("harness/")]
    ours += [f"shardproof/{name}" for name in tracked() if name.startswith("scenarios/")]
    assert set(ours) <= held
    assert {name.partition("/")[0] for name in held} == {"shardproof", "shardproof-0.1.0.dist-info"}


def test_their_pytest_runs_and_a_decorated_test_with_it(python: Path, repository: Path) -> None:
    said = said_by(repository, python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert "2 passed" in said, said


def test_their_pytest_runs_where_nobody_asks_for_us(python: Path, repository: Path) -> None:
    (repository / "tests" / "test_theirs.py").write_text("from harness import THEIRS\ndef test(): assert THEIRS\n")
    assert "1 passed" in said_by(repository, python, "-m", "pytest", "-q", "-p", "no:cacheprovider")


def test_commands_work_beside_their_packages(python: Path, repository: Path) -> None:
    said = said_by(repository, python.parent / "shardproof", "run", "smoke", "--system", "reference")
    assert "pass" in said
    assert "torch-fsdp2" in said_by(repository, python, "-m", "shardproof", "list")


def test_a_plugin_beside_their_packages_is_found(python: Path, repository: Path) -> None:
    said = said_by(repository, python.parent / "shardproof", "list", "--plugin", "my_plugin")
    assert "save_three_times" in said
    program = ["--set", "program=save_three_times", "--set", "model=dense", "--sample", "1"]
    command = ["run", "smoke", "--system", "reference", "--plugin", "my_plugin", *program]
    assert "1 pass" in " ".join(said_by(repository, python.parent / "shardproof", *command).split())


@pytest.mark.nightly
def test_a_shipped_trainer_refuses_an_arm_and_not_the_cell(python: Path, repository: Path) -> None:
    """An installed trainer lies inside of the package: what it raises is no error of shardproof's for that."""
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    plain = {"mesh": 2, "optimizer": "torch.optim.AdamW", "model": "optimizer_layers", "dtype": "fp32", "groups": "one"}
    axes = {**plain, "apart": "false", "lr": "number", "halved": "false", "way": "sharded", "offload": "true"}
    cell = [word for axis, value in axes.items() for word in ("--set", f"{axis}={value}")]
    file = site / "shardproof" / "scenarios" / "trainers" / "optimizers.py"
    said = said_by(repository, python.parent / "shardproof", "trainer", file, *cell)
    assert "alike way: only sharded parameters are offloaded" in said
