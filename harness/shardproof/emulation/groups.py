"""Destroys process groups that are no longer referenced, together with the threads that gloo keeps for each group.

A test suite for GPUs makes its groups anew for every test and forgets them. NCCL starts nothing before the first
collective of a group; gloo starts threads and connects all ranks at once, so that a suite of a thousand tests ends with
thousands of threads. A group is forgotten if nothing but torch's own tables refers to it. It is destroyed one look
later, when every rank has left the test that used it.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

KEPT, MANY = 8, 200
"""So many groups stay without a look at who needs them; from so many on, garbage in which some are held is collected,
which takes a third of a second."""


class Forgotten:
    """Destroys groups that were forgotten already when it last looked."""

    def __init__(self) -> None:
        self.before: set[str] = set()

    def destroy(self) -> int:
        """Destroy what was forgotten at the last look and still is; tells how many groups that were."""
        tables = distributed_c10d._world
        if not dist.is_initialized() or len(tables.pg_map) <= KEPT:
            return 0
        if len(tables.pg_map) > MANY:
            gc.collect()
        names = _forgotten()
        due = [group for group, name in tables.pg_names.items() if name in names & self.before]
        self.before = names - self.before
        for group in due:
            dist.destroy_process_group(group)
        return len(due)


def drop_all() -> None:
    """Destroy every group there is; those that cannot be are left.

    torch remembers on which mesh an operation's result was. One of the same shape that is made later counts as the same
    there, so that results would be on the one whose groups are gone.
    """
    if dist.is_initialized():
        with suppress(Exception):  # a group whose peers are gone may refuse
            dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def _forgotten() -> set[str]:
    """The names of groups that nothing refers to, neither by itself nor, as a mesh does, by its name. Never the group
    of all ranks."""
    tables = distributed_c10d._world
    names = {str(tables.pg_names[group]) for group in _unreferenced()}
    if not names:
        return names
    meshes = [thing for thing in gc.get_objects() if type(thing) is DeviceMesh]
    return names - {str(name) for mesh in meshes for name in getattr(mesh, "_dim_group_names", None) or ()}


def _unreferenced() -> list[dist.ProcessGroup]:
    """The groups to which nothing but torch's own tables refers, by their counts of references: a walk through
    everything in memory takes a tenth of a second for each group, and a suite has a hundred."""
    tables = distributed_c10d._world
    keys: list[Any] = [
        tables.pg_map, tables.pg_names, tables.pg_group_ranks, tables.pg_backend_config, tables.pg_to_tag,
        tables.pg_coalesce_state,
    ]  # fmt: skip
    tagged = Counter(id(group) for groups in tables.tags_to_pg.values() for group in groups)
    groups = list(tables.pg_names)
    found = []
    for group in groups:
        in_tables = sum(group in table for table in keys) + tagged[id(group)]
        # besides: `groups`, `group`, and the argument of getrefcount
        if group is not dist.group.WORLD and sys.getrefcount(group) == in_tables + 3:
            found.append(group)
    return found
