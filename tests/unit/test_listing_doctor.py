"""`list` and `doctor`: everything there is shows up, and what cannot run says why. Neither imports a library."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness import doctor
from harness.doctor import examine
from harness.faults.boundary import BOUNDARY
from harness.faults.catalogue import CATALOGUE
from harness.listing import render_listing
from harness.models import ZOO
from harness.program import PROGRAMS
from harness.reference.info import INFO
from harness.scenario import AXES
from harness.space.files import load_space, space_names
from harness.systems import registry

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SYSTEMS", dict(registry._SYSTEMS))


def test_everything_is_listed() -> None:
    words = set(render_listing().split())
    for there_is in (registry._SYSTEMS, AXES, ZOO, PROGRAMS, space_names(), CATALOGUE, BOUNDARY):
        assert set(there_is) <= words


def test_what_is_listed_can_be_loaded() -> None:
    for name in space_names():
        assert load_space(name).walks or load_space(name).scenarios


def test_every_line_says_something_and_none_trails_off() -> None:
    for line in render_listing().splitlines():
        assert line == line.rstrip()
        assert "None" not in line
        assert "<" not in line


def test_the_doctor_says_what_is_ready_and_what_is_not() -> None:
    registry.register(replace(INFO, name="absent", distributions=("no-such-distribution",)))
    registry.register(replace(INFO, name="broken", entry="no_such_module:Rank"))
    registry.register(replace(INFO, name="nested", entry="no_such_package.no_such_module:Rank"))
    registry.register(replace(INFO, name="pretender", emulated=("CUDA streams",)))
    lines = {name: rest for name, _, rest in (line.strip().partition(" ") for line in examine().splitlines())}
    assert lines["reference"].strip().startswith("ready: lockstep")
    assert "torch 2." in lines["torch-fsdp2"]
    assert "no-such-distribution not installed" in lines["absent"]
    assert "cannot run: its module no_such_module does not exist" in lines["broken"]
    assert "cannot run: its module no_such_package.no_such_module does not exist" in lines["nested"]
    assert "emulated: CUDA streams" in examine()


def test_the_doctor_works_without_a_ram_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "RAM_DISK", tmp_path / "absent")
    assert "GiB free" in examine()


@pytest.mark.parametrize("command", ["list", "doctor", "--help", "plan"])
def test_torch_is_not_loaded(command: str) -> None:
    script = (
        "import sys; from harness.cli import entry; status = entry(sys.argv[1:]); assert 'torch' not in sys.modules; "
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{script}sys.exit(status)", command],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
