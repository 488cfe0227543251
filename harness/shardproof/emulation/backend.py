"""Maps the backend name `nccl` to gloo, so that process groups created for NCCL run on a CPU.

What only NCCL has goes with the name: `device_id`, which binds a group to a GPU, and options of its communicators.
A suite written for GPUs creates its groups so, and needs no change here.

*Does not emulate* anything of NCCL beyond what `collectives` does; `get_backend` says `gloo`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from shardproof.emulation.used_symbols import touch
from shardproof.ownership import hand_on

SYMBOL = "backend nccl (gloo)"


def of_cpu(backend: Any) -> Any:
    """The backend that a process group really gets; for example gloo for `nccl` and for `cpu:gloo,cuda:nccl`."""
    if not isinstance(backend, str) or "nccl" not in backend.lower():
        return backend
    touch(SYMBOL)
    return "gloo"


def _mapped(function: Callable[..., Any], backend: int, timeout: int, limit: timedelta) -> Callable[..., Any]:
    """`function` with its backend mapped and its timeout at most that. backend, timeout: positions of arguments."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        given = list(args)
        if len(given) > backend:
            given[backend] = of_cpu(given[backend])
        elif "backend" in named:
            named["backend"] = of_cpu(named["backend"])
        if len(given) > timeout:
            given[timeout] = min(given[timeout] or limit, limit)
        else:
            named["timeout"] = min(named.get("timeout") or limit, limit)
        named.pop("device_id", None)
        named.pop("pg_options", None)
        return hand_on(function, *given, **named)

    return call


def _on_one_device() -> type:
    """gloo's groups, all of which use one network device.

    torch gives each group a device of its own, a thread that wakes up a hundred times a second for as long as the group
    lives. Eight ranks of `parallel_state` with forty groups each keep two cores busy with that alone. The device is
    made with the first group, since its thread would not outlive a fork. Its groups connect when they are made, and not
    when they first communicate (TORCH_GLOO_LAZY_INIT): several groups of one device that do so wait for each other
    forever, as torch 2.13 was seen to do.
    """
    gloo: Any = distributed_c10d.ProcessGroupGloo
    devices: dict[int, Any] = {}

    class Sharing(gloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            device = devices.get(os.getpid()) or devices.setdefault(
                os.getpid(), gloo.create_default_device(lazy_init=False)
            )
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    return Sharing


@contextmanager
def gloo_for_nccl(limit_s: float) -> Iterator[None]:
    """Until the end of the block, `init_process_group` and `new_group` give gloo to whoever asks for NCCL.

    limit_s: how long a collective waits at most for another rank, whatever a group's creator asks for.
    """
    created = {"init_process_group": (0, 2), "new_group": (2, 1)}
    limit = timedelta(seconds=limit_s)
    mapped = {name: _mapped(getattr(distributed_c10d, name), *places, limit) for name, places in created.items()}
    answers: dict[str, Callable[..., Any]] = {"is_nccl_available": lambda: True}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(distributed_c10d, "ProcessGroupGloo", _on_one_device()))
        for owner in (dist, distributed_c10d, device_mesh):
            for name, function in (mapped | answers).items():
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, function))
        yield
