"""GPUs without one: which rank gets which, what is said where there is none, and the path of a rank to its device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.cli.main import entry
from shardproof.errors import UsageError
from shardproof.laboratory.laboratory import Laboratory
from shardproof.laboratory.run_verdict import REFERENCE_NOT_COMPARED, Attempt, result_of
from shardproof.protocol.registry import system_named
from shardproof.scenario import Mesh, Scenario
from shardproof.verdict import ExitStatus, Verdict
from shardproof.world import devices
from shardproof.world.devices import GLOO, NCCL, Gpus, Seat, gpus, seat
from shardproof.world.job import Job
from shardproof.world.observations import read_observations
from shardproof.world.server import CUDA_DETERMINISM, DETERMINISM, NO_GPU, ForkServer

ROOT = Path(__file__).parents[3]
ON_GPU = Scenario(system="torch-fsdp2", device="cuda", mesh=Mesh(1, 2, 1), program="train")


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(devices, "_driver", lambda: "")
    gpus.cache_clear()
    yield
    gpus.cache_clear()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(devices, "_driver", lambda: "13.0")
    gpus.cache_clear()
    yield
    gpus.cache_clear()


@pytest.mark.parametrize(
    ("mesh", "count", "indices", "backend"),
    [
        ((1, 1, 1), 1, [0], NCCL),
        ((1, 2, 1), 1, [0, 0], GLOO),  # NCCL refuses two ranks on one device
        ((1, 2, 1), 2, [0, 1], NCCL),
        ((2, 2, 2), 8, [0, 1, 2, 3, 4, 5, 6, 7], NCCL),
        ((1, 4, 1), 3, [0, 1, 2, 0], GLOO),
        ((1, 3, 1), 4, [0, 1, 2], GLOO),  # an average over three ranks rounds in NCCL
        ((1, 2, 3), 8, [0, 1, 2, 3, 4, 5], NCCL),  # tensor parallelism averages nothing
    ],
)  # fmt: skip
def test_ranks_get_gpus_and_a_backend(mesh: tuple[int, int, int], count: int, indices: list[int], backend: str) -> None:
    where = Mesh(*mesh)
    seats = [seat("cuda", rank, where, ("H200",) * count) for rank in range(where.world)]
    assert [each.index for each in seats] == indices
    assert {each.backend for each in seats} == {backend}
    (note,) = {each.note for each in seats}
    assert note.startswith(f"{min(count, where.world)} x H200, ")
    assert ("NCCL" if backend == NCCL else "gloo") in note


def test_a_cpu_rank_has_no_gpu_whatever_there_is() -> None:
    assert seat("cpu", 1, Mesh(1, 2, 1), ("H200",)) == Seat(None, GLOO, "")


def test_a_gpu_rank_that_sees_no_gpu_says_so() -> None:
    with pytest.raises(ValueError, match="sees no GPU"):
        seat("cuda", 0, Mesh(1, 1, 1), ())


def test_without_a_driver_nothing_is_started(no_driver: None) -> None:
    assert gpus("/nowhere/python") == Gpus(reason="no NVIDIA driver here: libcuda.so.1 cannot be loaded")
    with pytest.raises(UsageError, match=r"given 'cuda'; allowed: cpu \(no NVIDIA driver here"):
        devices.require_gpu("/nowhere/python")


def test_an_interpreter_that_cannot_be_asked_has_no_gpu(driver: None) -> None:
    assert "could not be asked" in gpus("/nowhere/python").reason
    assert gpus("/bin/true").driver == "13.0"


def test_a_torch_without_cuda_has_no_gpu(driver: None) -> None:
    found = gpus(sys.executable)
    if found.cuda:
        pytest.skip("this torch is built for CUDA")
    assert found.names == ()
    assert found.reason == f"torch {found.torch} is a build without CUDA"


@pytest.mark.parametrize("words", [("--device", "cuda"), ("--set", "device=cuda", "--system", "torch-fsdp2")])
def test_the_command_line_refuses_before_anything_runs(
    no_driver: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple
) -> None:  # type: ignore[type-arg]
    monkeypatch.chdir(tmp_path)
    assert entry(["run", "--sample", "2", *words]) == ExitStatus.USAGE
    message = capsys.readouterr().err
    assert "given 'cuda'; allowed: cpu (no NVIDIA driver here" in message
    assert message.endswith("for example: --device cpu\n")
    assert list(tmp_path.iterdir()) == []


def test_the_device_is_a_part_of_a_scenarios_identity() -> None:
    on_cpu = replace(ON_GPU, device="cpu")
    assert on_cpu.id != ON_GPU.id
    assert "device" not in on_cpu.axis_values(only_changed=True)
    with pytest.raises(UsageError, match="device: given 'tpu'; allowed: cpu, cuda"):
        Scenario().with_axes({"device": "tpu"})


def test_a_system_refuses_devices_that_it_does_not_have() -> None:
    assert system_named("torch-fsdp2").refusal(ON_GPU) is None
    assert (
        system_named("reference").refusal(replace(ON_GPU, system="reference"))
        == "reference has these values of device: cpu"
    )
    assert system_named("torch-fsdp2").accepts.devices == ("cpu", "cuda")
    assert system_named("reference").accepts.devices == ("cpu",)


def test_a_result_says_where_it_ran_and_what_the_oracle_left_open() -> None:
    judged = {"differences": [], "normalisations": [], "explanations": [], "distrust": ""}
    info = replace(system_named("torch-fsdp2"), emulated=("CUDA device",))
    ran = {"version": "2.13.0"}
    on_gpu = result_of(ON_GPU, info, Attempt(judgement={**judged, "device": ["1 x H200, NCCL"]}), ran)
    assert (on_gpu.device, on_gpu.emulated) == ("1 x H200, NCCL", ())
    assert on_gpu.not_exercised == (REFERENCE_NOT_COMPARED,)
    assert on_gpu.verdict is Verdict.PASS
    offloaded = result_of(ON_GPU.with_axes({"offload": "cpu"}), info, Attempt(judgement=judged), ran)
    assert offloaded.not_exercised == ()  # stepped by the CPU's kernels, which the reference knows
    on_cpu = result_of(replace(ON_GPU, device="cpu"), info, Attempt(judgement=judged), ran)
    assert (on_cpu.device, on_cpu.emulated, on_cpu.not_exercised) == ("cpu", ("CUDA device",), ())


def test_only_servers_for_gpus_see_them() -> None:
    assert DETERMINISM["CUDA_VISIBLE_DEVICES"] == ""
    assert not NO_GPU.keys() & CUDA_DETERMINISM.keys()
    assert CUDA_DETERMINISM["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


@pytest.mark.parametrize(("world", "takes"), [(1, [[0]]), (3, [[0], [1], [0]])])
def test_a_rank_takes_its_device_after_the_fork(tmp_path: Path, world: int, takes: list[list[int]]) -> None:
    scenario = replace(ON_GPU, system="gpu-stub", mesh=Mesh(1, world, 1), program="build")
    plugin = "tests.unit.gpu_stub"
    with ForkServer(
        path_prefix=[ROOT], plugins=[plugin], warm_up=[f"{plugin}:pretend"], workers=0, device="cuda"
    ) as server:
        outcome = server.submit(Job(scenario, 0, tmp_path, 30.0)).result(timeout=60)
    if world == 1:  # one GPU a rank: NCCL, which a CPU build has not
        assert not outcome.ok
        assert outcome.errors[0].stage == "start"
        return
    assert outcome.ok
    for rank, path in enumerate(outcome.observations):
        found = {(r.role, r.fqn): r.data for r in read_observations(path)}
        assert found["extra_state", "seat"].decode() == f"{takes[rank]} {world} gloo"
        assert found["device", "note"].decode().startswith("2 x Stub GPU, 3 ranks share them: gloo")
        assert len(found["rng", "cuda"]) == 16


@pytest.mark.real
def test_ranks_without_a_gpu_are_the_harness_failing_and_never_a_verdict() -> None:
    with Laboratory(jobs=1, deadline_s=60.0) as laboratory:
        result = laboratory.examine_one(ON_GPU)
    if result.verdict is Verdict.PASS:
        pytest.skip("there is a GPU here")
    assert result.verdict is Verdict.UNKNOWN
    assert "a process forked from the warm server cannot have a backward pass" in result.reason
