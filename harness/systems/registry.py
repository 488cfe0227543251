"""The systems shardproof knows. Plugins add theirs with `register`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.errors import UsageError
from harness.scenario import Scenario
from harness.systems.protocol import SystemInfo

_SYSTEMS: dict[str, SystemInfo] = {}


@dataclass(frozen=True)
class DeviceLimit:
    """The refusal of every device that a system does not run on; a `protocol.Refusal`."""

    system: str
    devices: tuple[str, ...]
    id: str = "device"

    @property
    def reason(self) -> str:
        """For the reader."""
        return f"{self.system} runs on {' and '.join(self.devices)} only"

    def refuses(self, scenario: Scenario) -> bool:
        """Whether the scenario asks for another device."""
        return scenario.device not in self.devices


def register(info: SystemInfo) -> SystemInfo:
    """Make a system known under its name, with the refusal of devices that it does not have; a later registration of
    the same name replaces the earlier one. Returns what was given."""
    limit = DeviceLimit(info.name, info.devices)

    def unsupported(scenario: Scenario) -> str | None:
        return limit.reason if limit.refuses(scenario) else info.unsupported(scenario)

    limits = (*info.limits, limit) if info.limits else ()
    _SYSTEMS[info.name] = replace(info, unsupported=unsupported, limits=limits)
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
