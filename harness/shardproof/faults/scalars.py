"""Faults in scalars: step counters, hyperparameters of param groups and who is in a group.

Each replaces seams of the reference by a mistake that a library made (`shardproof.faults.logical` has the tools).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardproof.faults.logical import nothing, override, to_bf16

if TYPE_CHECKING:
    from shardproof.reference.checkpoint import Content, Logical
    from shardproof.reference.system import Ranks


def initialising_build(ranks: Ranks) -> None:
    """Create the optimizer's state at the build by a step without gradients, which counts."""

    def build() -> None:
        original()
        session = ranks.session
        session.steps = {p.fqn: 1 for p in session.with_gradient}
        for shards in session.shards:
            shards.moments = {role: ranks.trainer.empty_moment(shards, role) for role in session.moment_roles}

    original = override(ranks.session, "build", build)


def step_of_one_dim(ranks: Ranks) -> None:
    """Save step counters as tensors of one dim, which a gather takes for something sharded."""

    def common() -> Content:
        content: Content = original()
        return {**content, "steps": {name: np.array([step], np.float32) for name, step in content["steps"].items()}}

    original = override(ranks.saver, "common", common)


def group_steps_not_saved(ranks: Ranks) -> None:
    """Restore the state of every parameter, but no counter: it was kept in the group, which is not saved."""

    def restore_optimizer(logical: Logical, common: Content) -> None:
        original(logical, {**common, "steps": dict.fromkeys(common["steps"], 0)})

    original = override(ranks.loader, "restore_optimizer", restore_optimizer)


def step_in_bf16(ranks: Ranks) -> None:
    """Count steps in bf16, in which 257 is 256."""

    def advance_step(name: str) -> None:
        original(name)
        ranks.session.steps[name] = int(to_bf16(np.array(ranks.session.steps[name])))

    original = override(ranks.trainer, "advance_step", advance_step)


def last_group_wins(ranks: Ranks) -> None:
    """Save the numbers of all groups under one key: those of the last are left."""

    def common() -> Content:
        content: Content = original()
        *_, last = content["groups"]
        groups = [{**group, "hyper": last["hyper"], "peak_lr": last["peak_lr"]} for group in content["groups"]]
        return {**content, "groups": groups}

    original = override(ranks.saver, "common", common)


def scalars_into_a_copy(ranks: Ranks) -> None:
    """Load everything that is no tensor into containers that the optimizer does not have."""
    override(ranks.loader, "restore_groups", nothing)


def rate_lost_in_a_save(ranks: Ranks) -> None:
    """Leave a learning rate of 0 behind, with which a save made the optimizer's state."""

    def save(form: str) -> Content:
        if not ranks.session.steps:
            for group in ranks.session.groups:
                group.hyper = replace(group.hyper, lr=0.0)
        content: Content = original(form)
        return content

    original = override(ranks.saver, "save", save)


def placeholder_in_the_group(ranks: Ranks) -> None:
    """Register an empty parameter for a bias that a module does not have."""

    def build() -> None:
        original()
        first = ranks.session.groups[0]
        first.names = (*first.names, f"{ranks.session.model.modules[0].path}.no_bias")

    original = override(ranks.session, "build", build)


def rates_of_groups_not_converted(ranks: Ranks) -> None:
    """Convert the default learning rate to a tensor, but not that of a group which has its own."""

    def update() -> None:
        rates = [group.hyper.lr for group in ranks.session.groups]
        for index, rate in enumerate(rates):
            if rate != rates[0]:
                raise TypeError(f"lr of group {index} is a float, {rate}; a tensor was expected")
        original()

    original = override(ranks.trainer, "update", update)


def remap_drops_names(ranks: Ranks) -> None:
    """Keep only names with the prefix of compiled modules in the map from old parameters to sharded ones."""

    def build() -> None:
        original()
        names = [p.fqn for p in ranks.session.catalogue.params]
        sharded = {name: name for name in names if name.startswith("_orig_mod.")}
        for group in ranks.session.groups:
            group.names = tuple(sharded[name] for name in group.names)

    original = override(ranks.session, "build", build)
