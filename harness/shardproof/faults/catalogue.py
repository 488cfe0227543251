"""The catalogue of logical faults: deliberate defects of the reference, each the mechanism of a real bug.

`scenarios/reference/faults.toml` lists them, one table a fault:

    [[fault]]
    id = "stale-masters"
    bugs = ["DS-762"]                        # public bugs whose mechanism it is
    doc = "masters keep the initial weights after a model-only load"
    mechanism = "stale-copy"                 # of the file's table, which says what explains it
    plants = "logical:stale_masters"         # the function, in `harness/shardproof/faults/`
    shows = { sharding = "zero1", program = ["model_only", "model_only_late"], dtype = "*/master=fp32" }

`shows` are the conditions under which it can show at all: of each axis the values, or patterns of them, and with `does`
an operation that the program must have. A search over
the nightly walk finds a scenario that exposes the fault (`tests/exposing.py`) and writes it into `exposing.toml` beside
the list; every night it searches anew. Where `scenarios` are given in its place, each of these must expose it. The
canaries plant every fault in its scenarios in every CI: one that goes undetected fails the run. A plugin adds its own
with `shardproof.plugins.register_fault`. Imports no torch, and what plants a fault only where it is planted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from shardproof.entry import resolve
from shardproof.errors import UsageError
from shardproof.scenario import Scenario
from shardproof.tables import SHIPPED, Table, load_toml

if TYPE_CHECKING:
    from shardproof.reference.system import Ranks

LIST, FOUND = "faults.toml", "exposing.toml"

FOLDER = SHIPPED / Scenario().system
"""Where both files lie: beside the walks of the system that faults are planted in."""


@dataclass(frozen=True)
class Fault:
    """One deliberate defect.

    * bug_ids: the public bugs whose mechanism it is, ids of the bug corpus; empty for the demotion canaries and for
      mistakes that only self-written training loops make.
    * doc: what goes wrong.
    * scenario_axes: axes of scenarios each of which exposes it, in text form.
    * install: plants it in the ranks of one build.
    * mechanism: what is wrong with the state, a name of `mechanisms()`; empty where nobody has said.
    * shows: the conditions under which it can show: axis → values, or patterns of them; `does` → operations. None where
      scenarios are given by hand.
    """

    id: str
    bug_ids: tuple[str, ...]
    doc: str
    scenario_axes: tuple[Mapping[str, str], ...] = field(hash=False)
    install: Callable[[Ranks], None] = field(repr=False)
    mechanism: str = ""
    shows: Mapping[str, tuple[str, ...]] | None = field(default=None, hash=False)


@cache
def mechanisms() -> dict[str, tuple[str, ...]]:
    """What may be wrong with the state → the mechanisms of `shardproof.diagnosis` that say so."""
    table = _document(LIST).table("mechanisms")
    return {name: table.texts(name) for name in table.content}


def _document(name: str) -> Table:
    return Table(load_toml((FOLDER / name).read_text("utf-8"), f"{Scenario().system}/{name}"), name)


def _faults() -> tuple[Fault, ...]:
    document = _document(LIST).only(("schema", "mechanisms", "fault"))
    found = _document(FOUND).only(("schema", "fault")).table("fault")
    return tuple(_fault(table, found) for table in document.tables("fault"))


def _fault(table: Table, found: Table) -> Fault:
    keys = ("id", "bugs", "doc", "mechanism", "plants", "stage", "scenarios", "shows")
    table.only(keys, needed=("id", "doc", "mechanism", "plants"))
    name = table.text("id")
    chosen = tuple(_axes(scenario) for scenario in table.tables("scenarios"))
    shows = table.table("shows")
    return Fault(
        name,
        table.texts("bugs"),
        table.text("doc"),
        chosen or ((_axes(found.table(name)),) if name in found else ()),
        _planter(f"shardproof.faults.{table.text('plants')}", table.text("stage")),
        table.text("mechanism"),
        None if chosen else {axis: shows.texts(axis) for axis in shows.content},
    )


def _axes(table: Table) -> Mapping[str, str]:
    return {axis: table.text(axis) for axis in table.content}


def _planter(entry: str, stage: str) -> Callable[[Ranks], None]:
    """What plants a fault, imported where it does. stage: what a function that makes planters is given."""

    def plant(ranks: Ranks) -> None:
        function = resolve(entry)
        (function(stage) if stage else function)(ranks)

    return plant


CATALOGUE: dict[str, Fault] = {fault.id: fault for fault in _faults()}


def planter_of(faults: Collection[str]) -> Callable[[Ranks], None] | None:
    """What plants several faults in the ranks of a build; None where there is none to plant.

    Args:
        faults: ids.

    Raises:
        UsageError: one that the catalogue does not have.
    """
    unknown = [fault for fault in faults if fault not in CATALOGUE]
    if unknown:
        raise UsageError.of("faults", ",".join(unknown), CATALOGUE, "--set faults=no-op-load")

    def plant(ranks: Ranks) -> None:
        for fault in faults:
            CATALOGUE[fault].install(ranks)

    return plant if faults else None


def scenarios_of(fault: Fault) -> tuple[Scenario, ...]:
    """The scenarios that expose a fault, with the fault in them."""
    return tuple(Scenario.from_axes({**axes, "faults": fault.id}) for axes in fault.scenario_axes)
