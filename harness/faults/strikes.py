"""Which scenarios of which systems must notice which boundary fault: each system's `canaries.toml`.

schema = 1
[axes]                                      # of every scenario below
mesh = "1x2x1"
program = "build step save step build load step"
[[strike]]
faults = ["boundary.skip-load", "boundary.kill-rank"]
[[strike]]
faults = ["boundary.replica-state"]
axes = { mesh = "2x1x1" }                   # what differs for these
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.errors import UsageError
from harness.faults.boundary import BOUNDARY
from harness.scenario import AXES, Scenario, load_toml
from harness.systems.protocol import System
from harness.systems.registry import all_systems
from harness.tables import Table, text_of


def strikes() -> list[Scenario]:
    """Every scenario with a boundary fault in it that the fault's verdict must come of, in the systems' order.

    Raises:
        UsageError: a system's file is malformed, or names a fault or an axis that there is not.
    """
    return [scenario for system in all_systems() for scenario in _strikes_of(system)]


def strikes_with(fault: str) -> list[Scenario]:
    """Those with one fault."""
    return [scenario for scenario in strikes() if scenario.faults == (fault,)]


def _strikes_of(system: System) -> list[Scenario]:
    file = system.folder.joinpath("canaries.toml")
    if not file.is_file():
        return []
    origin = f"{system.name}/canaries.toml"
    document = Table(load_toml(text_of(file, origin), origin), origin).only(("schema", "axes", "strike"))
    common = _axes(document)
    found: list[Scenario] = []
    for table in document.tables("strike"):
        table.only(("faults", "axes"), needed=("faults",))
        own = {**common, **_axes(table), "system": system.name}
        for fault in table.texts("faults"):
            if fault not in BOUNDARY:
                raise table.wrong("faults", fault, BOUNDARY, 'faults = ["boundary.kill-rank"]')
            found.append(Scenario().with_axes({**own, "faults": fault}))
    return found


def _axes(table: Table) -> Mapping[str, str]:
    axes = table.table("axes")
    for axis in axes.content:
        if axis not in AXES or axis in ("system", "faults"):
            raise UsageError.of(f"{axes.where}: axis", axis, AXES, 'axes = { mesh = "1x2x1" }')
    return {axis: axes.text(axis) for axis in axes.content}
