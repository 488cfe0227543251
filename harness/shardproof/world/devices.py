"""GPUs: which there are, which rank has which, and how ranks talk. Imports no torch: a process of its own is asked.

The same scenario runs on CPU ranks and on CUDA ranks. Where there are enough GPUs, each rank has one, and NCCL. Where
there are not, several ranks share a GPU and talk through gloo, which copies CUDA tensors through the host: NCCL refuses
two ranks on one device (`Duplicate GPU detected`). What was chosen is part of every result (`device`).

Ranks are forked, as on a CPU. CUDA does not survive a fork once it was initialised, so that a server for CUDA ranks
imports torch and ours and runs nothing, and each rank takes its device after the fork.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from dataclasses import dataclass
from functools import cache

from shardproof.errors import UsageError
from shardproof.scenario import Mesh
from shardproof.world.interpreter import SAFE_PATH

GLOO = "gloo"
NCCL = "cpu:gloo,cuda:nccl"
"""Backends of the process group. NCCL has no host tensors: those of CPU offload and of checkpoints go over gloo."""

PROBE_S = 120.0

_PROBE = """
import json, torch
usable = torch.version.cuda is not None and torch.cuda.is_available()
nccl = ".".join(map(str, torch.cuda.nccl.version())) if usable and torch.distributed.is_nccl_available() else ""
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if usable else []
print(json.dumps([torch.__version__, torch.version.cuda or "", nccl, names]))
"""


@dataclass(frozen=True)
class Gpus:
    """What CUDA ranks could run on here.

    * names: of each GPU that the ranks would see.
    * torch: release of their torch.
    * cuda: that it was built for; empty for a CPU build.
    * nccl: release; empty without.
    * driver: the newest CUDA that the driver runs; empty without one.
    * reason: why there is no GPU.
    """

    names: tuple[str, ...] = ()
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    driver: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Seat:
    """Where one rank computes. index: of its GPU; None on the CPU. backend: of the process group. note: for the reader,
    the same for every rank of a world; empty on the CPU."""

    index: int | None
    backend: str
    note: str


def seat(device: str, rank: int, mesh: Mesh, names: tuple[str, ...]) -> Seat:
    """The place of a rank of a mesh.

    NCCL is chosen where every rank has a GPU of its own and the data-parallel ranks are a power of two: it averages by
    multiplying each rank's gradient with 1/n, which is exact for no other n, and the exact grid would not be.

    Args:
        device: of the scenario. names: of the GPUs that this process sees.

    Raises:
        ValueError: `device` is cuda and there is no GPU.
    """
    if device != "cuda":
        return Seat(None, GLOO, "")
    if not names:
        raise ValueError("a rank on cuda sees no GPU")
    world, count = mesh.world, len(names)
    on = f"{min(world, count)} x {names[0]}"
    if count < world:
        why = f"{world} ranks share them: gloo through the host, since NCCL takes one rank a GPU"
        return Seat(rank % count, GLOO, f"{on}, {why}")
    if mesh.dp & (mesh.dp - 1):
        return Seat(rank, GLOO, f"{on}, gloo through the host: NCCL's average over {mesh.dp} ranks rounds")
    return Seat(rank, NCCL, f"{on}, one a rank, NCCL")


@cache
def gpus(python: str) -> Gpus:
    """What the interpreter `python` could run CUDA ranks on. Takes seconds where there is a driver, else nothing."""
    driver = _driver()
    if not driver:
        return Gpus(reason="no NVIDIA driver here: libcuda.so.1 cannot be loaded")
    environment = {**os.environ, **SAFE_PATH, "ATEN_CPU_CAPABILITY": "default"}
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], env=environment, capture_output=True, text=True, timeout=PROBE_S, check=True
        )
        torch, cuda, nccl, names = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return Gpus(driver=driver, reason=f"torch could not be asked for its GPUs: {error}")
    reason = "" if names else f"torch {torch} is a build without CUDA" if not cuda else "torch sees no GPU"
    return Gpus(tuple(names), torch, cuda, nccl, driver, reason)


def require_gpu(python: str) -> None:
    """Check that CUDA ranks can run here.

    Raises:
        UsageError: they cannot, and why.
    """
    found = gpus(python)
    if not found.names:
        raise UsageError.of("device", "cuda", f"cpu ({found.reason})", "--device cpu")


def _driver() -> str:
    """The newest CUDA that the driver can run, such as `13.0`; empty without a driver. Initialises nothing."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)):
        return "unknown"
    return f"{version.value // 1000}.{version.value % 1000 // 10}"
