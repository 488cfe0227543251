"""A system's plain scenario, and which boundary faults must be noticed in it: its `conformance.toml`.

    schema = 1
    [axes]                                      # of a small, plain scenario of the system, that passes
    mesh = "1x2x1"
    program = "build step save step build load step"
    [[strike]]                                  # faults that every CI run plants; each must come to its verdict
    faults = ["boundary.skip-load", "boundary.kill-rank"]
    [[strike]]
    faults = ["boundary.replica-state"]
    axes = { mesh = "2x1x1" }                   # what differs for these

The conformance kit (`shardproof.checks.conformance`) works on the plain scenario, and scenario files that leave an axis
out have its value from there where the system refuses the common default (`shardproof.space.defaults`). The canaries
(`shardproof.checks.canaries`) work on the strikes. A system without such a file has a plain scenario of two ranks, and
no strikes.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardproof.errors import UsageError
from shardproof.faults.boundary import BOUNDARY, boundary_fault
from shardproof.protocol.registry import all_systems
from shardproof.protocol.system import System
from shardproof.scenario import AXES, Scenario
from shardproof.tables import Table, load_toml

_PLAIN = {"mesh": "1x2x1", "program": "build step save step build load step"}
"""Axes of a system's plain scenario; the format of its checkpoints is the first that it accepts."""


def plain_scenario(system: System) -> Scenario:
    """A small scenario of a system: that of its file, or two ranks that save and load.

    Raises:
        UsageError: the file is malformed.
    """
    return Scenario.from_axes({**_common(system, _document(system)), "system": system.name})


def strikes() -> list[Scenario]:
    """Every scenario with a boundary fault that a system names, in the systems' order.

    Raises:
        UsageError: a system's file is malformed, or names a fault or an axis that there is not.
    """
    return [scenario for system in all_systems() for scenario in _strikes_of(system)]


def struck_scenario(system: System, fault: str) -> Scenario:
    """The scenario in which a boundary fault strikes a system: the first that its file names for it, or for the same
    fault at another event, or else its plain one.

    Raises:
        UsageError: the file is malformed.
    """
    kept = {scenario.faults[0]: scenario for scenario in reversed(_strikes_of(system))}  # the first of each wins
    found = kept.get(fault) or kept.get(fault.partition("@")[0]) or plain_scenario(system)
    return found.with_axes({"faults": fault})


def _strikes_of(system: System) -> list[Scenario]:
    document = _document(system)
    common = _common(system, document)
    found: list[Scenario] = []
    for table in document.tables("strike"):
        table.only(("faults", "axes"), needed=("faults",))
        own = {**common, **_axes(table), "system": system.name}
        for fault in table.texts("faults"):
            if fault.partition("@")[0] not in BOUNDARY:
                raise table.wrong("faults", fault, BOUNDARY, 'faults = ["boundary.kill-rank"]')
            boundary_fault(fault)
            found.append(Scenario.from_axes({**own, "faults": fault}))
    return found


def _document(system: System) -> Table:
    """The content of a system's file; an empty table where it has none."""
    file = system.folder.joinpath("conformance.toml")
    origin = f"{system.name}/conformance.toml"
    content = load_toml(file.read_text("utf-8"), origin) if file.is_file() else {}
    return Table(content, origin).only(("schema", "axes", "strike"))


def _common(system: System, document: Table) -> Mapping[str, str]:
    return {"checkpoint": system.accepts.plainest_checkpoint, **_PLAIN, **_axes(document)}


def _axes(table: Table) -> Mapping[str, str]:
    axes = table.table("axes")
    for axis in axes.content:
        if axis not in AXES or axis in ("system", "faults"):
            raise UsageError.of(f"{axes.where}: axis", axis, AXES, 'axes = { mesh = "1x2x1" }')
    return {axis: axes.text(axis) for axis in axes.content}
