"""Defects of a library, made in the ranks of Megatron-Core by a plugin; a scenario's seed says which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from harness.program import Op
from harness.scenario import Scenario
from harness.systems import megatron_core_rank as rank

REBINDS, LOSES, OFFLOADS_NOTHING, FORGETS = 101, 102, 103, 104

_load, _observe, _config = rank.MegatronRank.load, rank.MegatronRank.observe, rank._optimizer_config


def _half(system: rank.MegatronRank) -> tuple[str, torch.nn.Parameter]:
    return next((n, p) for n, p in system.state.root.named_parameters() if p.dtype.itemsize == 2)


def load(self: rank.MegatronRank, op: Op) -> None:
    """Afterwards a parameter no longer lies in the memory that the optimizer writes to, or has lost its counts."""
    _load(self, op)
    if self.scenario.seed == REBINDS:
        _, parameter = _half(self)
        parameter.data = parameter.data.clone()
    if self.scenario.seed == FORGETS and self.context.rank == 1:
        for link in self.state.links:
            for group in link.optimizer.param_groups:
                group.pop("step", None)


def observe(self: rank.MegatronRank, op: Op) -> Any:
    """From the first step on the optimizer steps a parameter that is not the model's."""
    if self.scenario.seed == LOSES and op.kind == "step":
        name, parameter = _half(self)
        place, _, last = name.rpartition(".")
        module = self.state.root.get_submodule(place)
        setattr(module, last, torch.nn.Parameter(parameter.data))
    return _observe(self, op)


def config(scenario: Scenario, ask: Any) -> dict[str, Any]:
    asked = replace(scenario.offload, fraction=0.0) if scenario.seed == OFFLOADS_NOTHING else scenario.offload
    return {**_config(scenario, ask), "optimizer_offload_fraction": asked.fraction}


rank.MegatronRank.load = load  # type: ignore[method-assign]
rank.MegatronRank.observe = observe  # type: ignore[method-assign]
rank._optimizer_config = config
