"""What both oracles say of a scenario, for tests: the twin's prediction, and what the reference's ranks held."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from shardproof.faults.catalogue import planter_of
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Logical
from shardproof.observe.record import LIVE, Record, every_rank
from shardproof.oracle import twin
from shardproof.oracle.inputs import Inputs
from shardproof.oracle.reported import Reported
from shardproof.protocol.registry import contract_of
from shardproof.reference import system as reference
from shardproof.scenario import Scenario


def inputs_of(scenario: Scenario) -> Inputs:
    """What the scenario's contract lets an oracle know of it."""
    inputs, _ = contract_of(scenario).resolve(scenario)
    return inputs


def by_twin(scenario: Scenario, norms: Mapping[int, float] | None = None) -> Logical:
    """What every operation must leave, live. norms: the total norms that a system reported, by operation."""
    return twin.run(inputs_of(scenario), Reported(tuple((norms or {}).items())))


def records_of(
    scenario: Scenario,
    observe_ops: Collection[int] | None = None,
    install: Callable[[reference.Ranks], None] | None = None,
) -> list[Record]:
    """What every rank of the reference held, live and written, with the scenario's faults planted, or what `install`
    plants in their place."""
    inputs, placement = contract_of(scenario).resolve(scenario)
    held = reference.run(inputs, placement, observe_ops=observe_ops, install=install or planter_of(scenario.faults))
    return list(every_rank(held))


def by_reference(scenario: Scenario) -> Logical:
    """The live state of the reference's ranks, put together without a gap or a conflict."""
    logical, problems = assemble(record for record in records_of(scenario) if record.where == LIVE)
    assert problems == []
    return logical
