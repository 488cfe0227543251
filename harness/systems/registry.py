"""The systems shardproof knows. Plugins add theirs with `register`."""

from __future__ import annotations

from harness.errors import UsageError
from harness.systems.protocol import SystemInfo

_SYSTEMS: dict[str, SystemInfo] = {}


def register(info: SystemInfo) -> SystemInfo:
    """Make a system known under its name; a later registration of the same name replaces the earlier one."""
    _SYSTEMS[info.name] = info
    return info


def system_info(name: str) -> SystemInfo:
    """The system of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in _SYSTEMS:
        raise UsageError.of("system", name, sorted(_SYSTEMS), "--system torch-fsdp2")
    return _SYSTEMS[name]


def all_systems() -> tuple[SystemInfo, ...]:
    """Every registered system, in the order of registration."""
    return tuple(_SYSTEMS.values())
