"""Process groups that nobody needs any more are destroyed, with the threads that gloo keeps for each.

A test suite for GPUs makes its groups anew for every test and forgets them. NCCL starts nothing before the first
collective of a group; gloo starts threads and connects all ranks at once, so that a suite of a thousand tests ends with
thousands of threads. A group is forgotten if nothing but torch's own tables refers to it. It is destroyed one look
later, when every rank has left the test that used it.
"""

from __future__ import annotations

import gc
from contextlib import suppress

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

KEPT = 8
"""So many groups stay without a look at who needs them, which takes a walk through everything in memory."""


class Forgotten:
    """Destroys groups that were forgotten already when it last looked."""

    def __init__(self) -> None:
        self.before: set[str] = set()

    def destroy(self) -> int:
        """Destroy what was forgotten at the last look and still is; tells how many groups that were."""
        tables = distributed_c10d._world
        if not dist.is_initialized() or len(tables.pg_map) <= KEPT:
            return 0
        gc.collect()
        names = _forgotten()
        due = [group for group, name in tables.pg_names.items() if name in names & self.before]
        self.before = names - self.before
        for group in due:
            dist.destroy_process_group(group)
        return len(due)


def drop_all() -> None:
    """Destroy every group there is; those that cannot be are left."""
    if dist.is_initialized():
        with suppress(Exception):  # a group whose peers are gone may refuse
            dist.destroy_process_group()


def _forgotten() -> set[str]:
    """The names of groups that nothing refers to, neither by itself nor, as a mesh does, by its name. Never the group
    of all ranks."""
    tables = distributed_c10d._world
    known = {
        id(table)
        for table in (
            tables.pg_map, tables.pg_names, tables.pg_group_ranks, tables.pg_backend_config, tables.pg_to_tag,
            tables.pg_coalesce_state, *tables.tags_to_pg.values(),
        )
    }  # fmt: skip
    meshes = [thing for thing in gc.get_objects() if type(thing) is DeviceMesh]
    named = {str(name) for mesh in meshes for name in getattr(mesh, "_dim_group_names", None) or ()}
    found: set[str] = set()
    for name in set(tables.pg_names.values()) - named:
        group = next(group for group, own in tables.pg_names.items() if own == name)
        if group is not dist.group.WORLD and all(id(holder) in known for holder in gc.get_referrers(group)):
            found.add(name)
    return found
