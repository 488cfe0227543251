"""The functions by which a plugin adds its own models, programs and faults. They are public API and stay stable.

A plugin is a module that `--plugin my_package.my_plugin` names, or an installed package's entry point. It is imported
in the parent, in every worker and in every rank, and calls these functions at its top level, so that all of them know
the same. docs/plugins.md lists everything else that a plugin may use.

    from shardproof.plugins import register_fault, register_model, register_program

    register_program("save_twice", "build step save save")
    register_fault(Fault("mine", (), "what goes wrong", ({"program": "save_twice", "checkpoint": "sharded"},), plant))

`docs/adding-a-fault.md` has a whole one.
"""

from __future__ import annotations

from shardproof.diagnosis.rules.engine import register as register_rule
from shardproof.errors import UsageError
from shardproof.faults.boundary import BOUNDARY, BoundaryFault
from shardproof.faults.catalogue import CATALOGUE, Fault, mechanisms
from shardproof.models import ModelSpec, zoo
from shardproof.program import provide
from shardproof.protocol.registry import register as register_system

__all__ = [
    "register_boundary_fault",
    "register_fault",
    "register_model",
    "register_program",
    "register_rule",
    "register_system",
]


def register_fault(fault: Fault) -> Fault:
    """Add a logical fault: `run --fault`, `faults` and `list` know it from then on.

    Raises:
        UsageError: another fault has that id, it names no scenario, or its mechanism is none that there is.
    """
    if CATALOGUE.get(fault.id, fault) != fault or fault.id.startswith("boundary."):
        raise UsageError.of("fault", fault.id, "an id that no other fault has", "my-fault")
    if not fault.scenario_axes:
        raise UsageError.of(f"fault {fault.id}: scenario_axes", (), "at least one", '({"mesh": "1x2x1"},)')
    if fault.mechanism and fault.mechanism not in mechanisms():
        raise UsageError.of(f"fault {fault.id}: mechanism", fault.mechanism, mechanisms(), "stale-copy")
    CATALOGUE[fault.id] = fault
    return fault


def register_boundary_fault(fault: BoundaryFault) -> BoundaryFault:
    """Add a fault of real ranks: `run --fault` knows it from then on, for every system.

    Raises:
        UsageError: another fault has that id, or its id does not begin with `boundary.`.
    """
    if not fault.id.startswith("boundary.") or BOUNDARY.get(fault.id, fault) != fault:
        raise UsageError.of("fault", fault.id, "an id `boundary.…` that no other fault has", "boundary.of-mine")
    BOUNDARY[fault.id] = fault
    return fault


def register_model(model: ModelSpec) -> ModelSpec:
    """Add a model: scenarios of every system that takes any model may name it from then on.

    Raises:
        UsageError: another model has that name.
    """
    known = zoo()
    if known.get(model.name, model) != model:
        raise UsageError.of("model", model.name, "a name that no other model has", "my_model")
    known[model.name] = model
    return model


def register_program(name: str, program: str) -> str:
    """Have a program known by a name.

    Args:
        program: its operations, separated by spaces.

    Raises:
        UsageError: an illegal sequence, or a name that another program has.
    """
    provide(name, program)
    return name
