"""Has each rank of a save say, in the record of its system calls, which collectives it has made.

Every collective goes through a method of torch's `ProcessGroup`, whoever asks for it, but for those of
`torch.distributed._functional_collectives`, which DTensor makes: they are dispatched as operators. Both are met here,
and after each one the rank asks for a file that is not there, whose name says which collective of which group it was
(`shardproof.resilience.stages`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.resilience.stages import name_of

METHODS = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter",
)  # fmt: skip
"""Collectives of `ProcessGroup`, of several releases of torch."""

_FUNCTIONAL = "_c10d_functional"


@contextmanager
def marked(folder: Path) -> Iterator[None]:
    """While this block lasts, the collectives of this process are marked in a folder that is recorded."""
    made: Counter[tuple[int, ...]] = Counter()

    def mark(group: Any) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        made[ranks] += 1
        with suppress(OSError):
            os.rmdir(folder / name_of(ranks, made[ranks]))

    methods = [name for name in METHODS if hasattr(ProcessGroup, name)]
    changed = [mock.patch.object(ProcessGroup, name, _marking(getattr(ProcessGroup, name), mark)) for name in methods]
    try:
        for one in changed:
            one.start()
        with _Functional(mark):
            yield
    finally:
        for one in changed:
            one.stop()


def _marking(method: Callable[..., Any], mark: Callable[[Any], None]) -> Callable[..., Any]:
    @wraps(method)
    def made(self: Any, *given: Any, **named: Any) -> Any:
        found = method(self, *given, **named)
        mark(self)
        return found

    return made


class _Functional(TorchDispatchMode):
    """Marks the collectives that are operators: the last of their arguments that is a text names the group."""

    def __init__(self, mark: Callable[[Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mark = mark

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.namespace == _FUNCTIONAL and not func.__name__.startswith("wait"):
            names = [value for value in args if isinstance(value, str)]
            with suppress(Exception):  # a group that this release resolves in another way goes unmarked
                resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
                self.mark(resolve(names[-1]))
        return found
