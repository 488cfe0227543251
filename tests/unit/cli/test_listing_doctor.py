"""`list` and `doctor`: everything there is shows up, and what cannot run says why. Neither imports a library."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from shardproof.cli import doctor
from shardproof.cli.doctor import examine
from shardproof.cli.listing import render_listing
from shardproof.faults.boundary import BOUNDARY
from shardproof.faults.catalogue import CATALOGUE
from shardproof.laboratory import laboratory
from shardproof.models import zoo
from shardproof.program import PROGRAMS
from shardproof.protocol import registry
from shardproof.scenario import AXES
from shardproof.space.files import load_space, space_names
from shardproof.systems import reference
from shardproof.world.devices import Gpus
from shardproof.world.interpreter import Interpreter, interpreter
from shardproof.world.server import ForkServer

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    systems = {system.name: system for system in registry.all_systems()}
    monkeypatch.setattr(registry, "_SYSTEMS", systems)


def test_everything_is_listed() -> None:
    words = set(render_listing().split())
    for there_is in (registry._SYSTEMS, AXES, zoo(), PROGRAMS, space_names(), CATALOGUE, BOUNDARY):
        assert set(there_is) <= words


def test_every_switch_and_every_promise_is_listed() -> None:
    text = render_listing()
    for system in registry.all_systems():
        assert f"contract of {system.name}" in text
        assert all(word in text.split() for word in system.accepts.options)
        assert all(clause.promise in text and clause.source in text for clause in system.contract.clauses)


def test_what_is_listed_can_be_loaded() -> None:
    for name in space_names():
        assert load_space(name).walks or load_space(name).scenarios


def test_every_line_says_something_and_none_trails_off() -> None:
    for line in render_listing().splitlines():
        assert line == line.rstrip()
        assert "None" not in line
        assert "<" not in line


def test_the_doctor_says_what_is_ready_and_what_is_not() -> None:
    known = reference.SYSTEM
    registry.register(replace(known, name="absent", distributions=("no-such-distribution",)))
    registry.register(replace(known, name="broken", rank="no_such_module:Rank"))
    registry.register(replace(known, name="nested", rank="no_such_package.no_such_module:Rank"))
    registry.register(replace(known, name="pretender", emulated=("CUDA streams",)))
    said = examine()
    lines = {name: rest for name, _, rest in (line.strip().partition(" ") for line in said.splitlines())}
    assert lines["reference"].strip().startswith("ready: lockstep")
    assert "torch 2." in lines["torch-fsdp2"]
    assert "no-such-distribution not installed" in lines["absent"]
    assert f"cannot run: its module {known.home}.no_such_module does not exist" in lines["broken"]
    assert f"cannot run: its module {known.home}.no_such_package.no_such_module does not exist" in lines["nested"]
    assert "emulated: CUDA streams" in said
    assert "ready: forked processes can have a backward pass, temporary files" in said


def test_the_doctor_works_without_a_ram_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(laboratory, "RAM_DISK", tmp_path / "absent")
    assert doctor._scratch().startswith(f"{tempfile.gettempdir()} (")


def test_a_small_ram_disk_is_no_place_for_checkpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(laboratory, "RAM_DISK", Path("/proc/self"))  # as a mount that is read-only, for root too
    assert str(laboratory.scratch_folder()) == tempfile.gettempdir()
    monkeypatch.setattr(laboratory, "RAM_DISK", tmp_path)
    monkeypatch.setattr(laboratory, "RAM_DISK_BYTES", 0)
    assert laboratory.scratch_folder() == tmp_path
    monkeypatch.setattr(laboratory, "RAM_DISK_BYTES", 1 << 60)
    assert str(laboratory.scratch_folder()) == tempfile.gettempdir()


BUILDS = [
    ({}, (), "not installed"),
    ({"__version__": "2.13.0+cpu"}, (), "2.13.0+cpu, a CPU build"),
    ({"__version__": "2.13.0+cu130", "cuda": "13.0"}, (), "built for CUDA 13.0; no GPU here"),
    ({"__version__": "2.13.0+cu130", "cuda": "13.0"}, ("NVIDIA H100",), "or with --device cuda on the GPUs below"),
    ({"__version__": "2.13.0+rocm7", "hip": "7.0"}, (), "built for ROCm 7.0"),
]


@pytest.mark.parametrize(("build", "names", "said"), BUILDS, ids=["none", "cpu", "cuda", "gpu", "rocm"])
def test_the_doctor_says_which_build_of_torch_this_is(build: dict[str, str], names: tuple[str, ...], said: str) -> None:
    ranks = Interpreter(sys.executable, "3.11", "cpython-311", "linux-x86_64", {}, build)
    assert said in "\n".join(doctor._torch(ranks, Gpus(names)))


def test_the_doctor_has_tried_whether_ranks_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDPROOF_TAKES", "loopback")
    monkeypatch.setattr(doctor, "ForkServer", partial(ForkServer, plugins=["tests.unit.unfit_plugin"]))
    said = "\n".join(doctor._rehearsed(interpreter()))
    assert "ranks cannot run here: a process forked from the warm server cannot have gloo" in said


@pytest.mark.parametrize("command", ["list", "doctor", "--help", "plan"])
def test_torch_is_not_loaded(command: str) -> None:
    script = (
        "import sys; from shardproof.cli import doctor; from shardproof.cli.main import entry; "
        "doctor._rehearsed = lambda ranks: []; "
        "status = entry(sys.argv[1:]); assert 'torch' not in sys.modules; "
    )  # the rehearsal is a server of its own, which has other tests
    done = subprocess.run(
        [sys.executable, "-c", f"{script}sys.exit(status)", command],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_refusal_of_every_release_in_other_words_is_no_property_of_one() -> None:
    info = registry.system_named("megatron-core")
    refused = doctor._refused(info, ["0.13.1", "0.16.1"])
    assert "dp_reshardable and fully_reshardable came with 0.15" in refused["0.13.1"]
    assert refused["0.13.1"].count("fsdp_dtensor came with 0.14") == 1
    assert not [reason for reason in refused["0.16.1"] if "is for Megatron FSDP" in reason]
