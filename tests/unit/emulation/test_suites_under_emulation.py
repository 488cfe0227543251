"""A suite that was written for GPUs, in small, under the plugin: one rank and two, each a pytest process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from shardproof.emulation.rank_barrier import free_port

from tests.paths import PYTHONPATH

ROOT = Path(__file__).parents[3]

CONFTEST = """
import torch
assert torch.cuda.is_available()  # suites ask while they are collected
"""

SUITE = """
import os

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from apex.optimizers import FusedAdam
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

RANK, RANKS = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
THREADS = []


@triton.jit
def kernel(x, BLOCK: tl.constexpr):
    pass


@pytest.fixture
def groups():
    if not dist.is_initialized():
        where = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
        torch.cuda.set_device(RANK % torch.cuda.device_count())
        dist.init_process_group("nccl", init_method=where, rank=RANK, world_size=RANKS)


def test_own_device():
    torch.cuda.set_device(RANK)
    assert torch.cuda.current_device() == RANK
    assert torch.ones(1, device="cuda").device == torch.device(RANK)
    assert torch.cuda.device_count() == RANKS
    assert torch.version.cuda and torch.cuda.memory.mem_get_info()[0] > 0


def test_kernels():
    FusedAdam([torch.nn.Parameter(torch.ones(2, device="cuda"))])
    with pytest.raises(NotImplementedError, match="kernel is compiled by triton.jit"):
        kernel[(1,)](torch.ones(2), BLOCK=2)


def test_autocast_is_refused():
    with torch.autocast("cuda", enabled=False):
        pass
    with torch.autocast("cuda", dtype=torch.bfloat16):
        torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")


def test_nccl(groups):
    whole = torch.full((2,), RANK + 1.0, device="cuda")
    dist.all_reduce(whole, group=dist.new_group(list(range(RANKS)), backend="nccl"))
    assert whole.tolist() == [RANKS * (RANKS + 1) / 2] * 2
    mesh = init_device_mesh("cuda", (RANKS,))
    dist.all_reduce(whole, group=mesh.get_group())


def test_gathers_of_several_sizes(groups):
    own = torch.full((RANK, 2), 1.0 * RANK, device="cuda")
    gathered = [torch.zeros(rank, 2, device="cuda") for rank in range(RANKS)]
    dist.all_gather(gathered, own)
    assert [part.tolist() for part in gathered] == [[[1.0 * rank] * 2] * rank for rank in range(RANKS)]
    if RANKS > 1:
        with pytest.raises(ValueError, match="number of elements"):
            dist.all_gather([torch.zeros(rank, 2) for rank in range(RANKS)], torch.zeros(7))


def test_workers_are_on_the_device():
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    worker = context.Process(target=on_device, args=(queue,))
    worker.start()
    worker.join()
    assert queue.get() == RANK


def on_device(queue):
    torch.cuda.set_device(RANK)
    queue.put(torch.ones(1, device="cuda").get_device())


@pytest.mark.parametrize("number", range(6))
def test_groups_are_forgotten(groups, number):
    for _ in range(6):
        dist.new_group(list(range(RANKS)))
    THREADS.append(len(os.listdir("/proc/self/task")))
    assert max(THREADS[3:], default=0) <= max(THREADS[:3])


def test_groups_share_a_device(groups):
    def loops():
        names = [open(f"/proc/self/task/{one}/comm").read().strip() for one in os.listdir("/proc/self/task")]
        return names.count("gloo_tcp_loop")

    before = loops()
    made = [dist.new_group(list(range(RANKS))) for _ in range(3)]
    assert loops() == before == 1
    for number, group in enumerate(made):
        whole = torch.full((2,), number + 1.0, device="cuda")
        dist.all_reduce(whole, group=group)
        assert whole.tolist() == [RANKS * (number + 1.0)] * 2


def sharded():
    # a tensor over a mesh of all ranks, and whether an operation leaves it on that mesh
    mesh = init_device_mesh("cuda", (RANKS,))
    result = DTensor.from_local(torch.ones(1, device="cuda"), mesh, [Shard(0)]).detach()
    return result, result.device_mesh is mesh


@pytest.mark.skipif(RANKS == 1, reason="one rank")
def test_one_rank_fails(groups):
    assert sharded()[1]
    assert RANK == 0
    dist.barrier()


def test_ranks_start_afresh(groups):
    whole = torch.ones(1, device="cuda")
    dist.all_reduce(whole)
    assert whole.item() == RANKS
    tensor, own = sharded()  # not on the mesh of the test before, whose groups are gone
    assert own
    assert tensor.full_tensor().tolist() == [1] * RANKS
"""


def run(folder: Path, ranks: int, options: Sequence[str] = ()) -> list[dict[str, str]]:
    """Outcomes of the suite by test, one dictionary a rank."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_suite.py").write_text(SUITE)
    environment = {
        **os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "SHARDPROOF_MEETING": f"127.0.0.1:{free_port()}",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "shardproof.emulation.pytest_plugin", "-p", "no:cacheprovider",
        "-c", os.devnull, "--rootdir", ".", "--emulate-group-limit-s", "200",
        "--emulate-hang-up-s", "2",
    ]  # fmt: skip
    running = []
    for rank in range(ranks):
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        more = ["--emulate-verdicts", f"verdicts-{rank}", *options]
        running.append(subprocess.Popen([*command, *more], cwd=folder, env=own, stdout=subprocess.DEVNULL))
    for process in running:
        process.wait(timeout=180)
    return [outcomes(folder / f"verdicts-{rank}") for rank in range(ranks)]


def outcomes(file: Path) -> dict[str, str]:
    """The outcome of each test, with the reason of a failure behind it."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert lines[-1]["event"] == "end"
    ended = [line for line in lines if "outcome" in line]
    return {line["test"].partition("::")[2]: f"{line['outcome']} {line['why']}".strip() for line in ended}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_suite_for_gpus_runs(tmp_path: Path, ranks: int) -> None:
    for seen in run(tmp_path, ranks):
        refused = seen.pop("test_autocast_is_refused")
        assert refused.startswith("failed NotImplementedError: torch.autocast('cuda') is not emulated")
        apart = seen.pop("test_one_rank_fails")
        assert apart.partition(" ")[0] == ("skipped" if ranks == 1 else "failed")
        assert "Timed out" not in apart
        assert set(seen.values()) == {"passed"}, seen
        assert len(seen) == 13
