"""Limits the size of a world, and checks that free memory and process limits suffice before any rank is started.

A typo in a mesh must not ask for terabytes, and 64 ranks on two cores come to nothing but a machine that does not
answer. So a world has a stated bound, which is raised with `--max-world` by those who have the machine for it. Within
the bound, the memory and the processes of all ranks that will run at once are compared with what is free.

*Verifies*: the number of ranks, free memory, the limits of processes of the user and of the container.
*Does not verify*: that a library takes no more than `RANK_BYTES`; disks; GPUs' memory.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path

from shardproof.errors import UsageError
from shardproof.program import meshes
from shardproof.protocol.registry import system_named
from shardproof.scenario import Scenario

MAX_WORLD = 16
"""Ranks that are processes: twice the largest world that a shipped walk has."""

MAX_LOCKSTEP_WORLD = 256
"""Ranks of a system that simulates all of them in one process."""

PLAUSIBLE_WORLD = 1024
"""Beyond this a mesh is a slip of the keyboard, and what is proposed is another mesh."""

VARIABLE = "SHARDPROOF_MAX_WORLD"
"""Where `--max-world` is kept, for both kinds of ranks, and for every place that asks."""

RANK_BYTES = 48 << 20
"""What a rank of a tiny model may have of its own, beside what it shares with its server: twice the 18 to 24 MB of
private memory that eight ranks of FSDP2 have."""

PROCESSES_A_RANK = 2
"""A rank, and a process of the library's own, such as a manager or a writer of checkpoints."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def max_world(lockstep: bool) -> int:
    """The bound: `--max-world`, else the default of the kind of ranks."""
    given = os.environ.get(VARIABLE, "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return MAX_LOCKSTEP_WORLD if lockstep else MAX_WORLD


def require_world(scenario: Scenario) -> None:
    """Check that no mesh of a scenario is larger than the bound.

    Raises:
        UsageError: one is, with the bound and how to raise it.
    """
    largest = max(meshes(scenario), key=lambda mesh: mesh.world)
    bound = max_world(is_lockstep(scenario))
    if largest.world > bound:
        what = "simulated ranks" if is_lockstep(scenario) else "ranks, each a process"
        raise UsageError.of(
            f"mesh of {scenario.system}",
            f"{largest} ({largest.world} ranks)",
            f"worlds of up to {bound} {what}; --max-world raises the bound, where the machine has room",
            f"--max-world {largest.world}" if largest.world <= PLAUSIBLE_WORLD else "--set mesh=1x2x1",
        )


def require_worlds(scenarios: Iterable[Scenario]) -> None:
    """`require_world` for many scenarios that share a few meshes and relations.

    Raises:
        UsageError: one of them is too large.
    """
    different = {(s.system, id(s.mesh), s.load): s for s in scenarios}
    for scenario in different.values():
        require_world(scenario)


def require_room(scenarios: Iterable[Scenario], at_once: int) -> None:
    """Check that there are memory and processes for the largest worlds that will run at once.

    Args:
        at_once: how many scenarios.

    Raises:
        UsageError: there are not, with what is free and what helps.
    """
    worlds = sorted((world_of(s) for s in scenarios if not is_lockstep(s)), reverse=True)
    ranks = sum(worlds[:at_once])
    if not ranks:
        return
    form = "-j 1, or --set mesh=1x2x1"
    free = free_bytes()
    if free is not None and ranks * RANK_BYTES > free:
        allowed = f"what {free >> 20} MiB of free memory hold, at {RANK_BYTES >> 20} MiB a rank"
        raise UsageError.of("ranks at once", ranks, allowed, form)
    left = free_processes()
    if left is not None and ranks * PROCESSES_A_RANK > left:
        allowed = f"what {left} more processes allow, at {PROCESSES_A_RANK} a rank (`ulimit -u`, pids.max)"
        raise UsageError.of("ranks at once", ranks, allowed, form)


def world_of(scenario: Scenario) -> int:
    """Ranks of the largest mesh that a scenario's program runs on."""
    return max(mesh.world for mesh in meshes(scenario))


def is_lockstep(scenario: Scenario) -> bool:
    """Whether a scenario's ranks are simulated in one process."""
    return system_named(scenario.system).world == "lockstep"


def free_bytes() -> int | None:
    """Memory that processes can still have, of the machine and of this container; None where nothing says."""
    found = []
    try:
        lines = _MEMINFO.read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    limit, used = _number("memory.max"), _number("memory.current")
    if limit is not None and used is not None:
        found.append(limit - used + (_reclaimable() or 0))
    return min(found, default=None)


def free_processes() -> int | None:
    """Processes that can still be started in this container and by this user; None where nothing limits them.

    The user's limit counts the threads of all his processes, which only the kernel knows; what is seen in /proc of it
    is enough to tell a limit of a hundred from one of thousands. Root has none.
    """
    found = []
    limit, used = _number("pids.max"), _number("pids.current")
    if limit is not None and used is not None:
        found.append(limit - used)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        found.append(soft - _own_processes())
    return min(found, default=None)


def _own_processes() -> int:
    own = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            own += folder.stat().st_uid == os.geteuid()
        except OSError:
            continue
    return own


def _reclaimable() -> int | None:
    """File pages that count as used and that the kernel gives back on demand."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), None)


def _number(name: str) -> int | None:
    """A number of this container's control group; None where it has no limit or no such file."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
