"""The ranks of `megatron-core-defective`: Megatron-Core with the defect that the seed asks for (`defects.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from shardproof.observe.record import Record
from shardproof.program import Op
from shardproof.protocol.system import RankContext
from shardproof.scenario import Optimizer
from shardproof.systems.megatron_core.rank import Rank, library

from tests.conformance.megatron_core.defects import CUTS_ELSEWHERE, FORGETS, LOSES, OFFLOADS_NOTHING, REBINDS


class Defective(Rank):
    def __init__(self, context: RankContext) -> None:
        if context.scenario.seed == CUTS_ELSEWHERE:
            _cut_elsewhere()
        super().__init__(context)

    def load(self, op: Op) -> None:
        """Afterwards a parameter no longer lies in the memory that the optimizer writes to, or has lost its counts."""
        super().load(op)
        if self.scenario.seed == REBINDS:
            _, parameter = self._half()
            parameter.data = parameter.data.clone()
        if self.scenario.seed == FORGETS and self.context.rank == 1:
            for link in self.state.links:
                for group in link.optimizer.param_groups:
                    group.pop("step", None)

    def observe(self, op: Op) -> Iterable[Record]:
        """From the first step on the optimizer steps a parameter that is not the model's."""
        if self.scenario.seed == LOSES and op.kind == "step":
            name, parameter = self._half()
            place, _, last = name.rpartition(".")
            setattr(self.state.root.get_submodule(place), last, torch.nn.Parameter(parameter.data))
        return super().observe(op)

    def _optimizer(self, chunk: Any, ask: Optimizer) -> Any:
        """The optimizer, which leaves everything on the device that it was asked to offload."""
        asked = self.scenario
        if asked.seed == OFFLOADS_NOTHING:
            self.scenario = replace(asked, offload=replace(asked.offload, fraction=0.0))
        try:
            return super()._optimizer(chunk, ask)
        finally:
            self.scenario = asked

    def _half(self) -> tuple[str, torch.nn.Parameter]:
        """The first parameter in half precision."""
        return next((n, p) for n, p in self.state.root.named_parameters() if p.dtype.itemsize == 2)


def _cut_elsewhere() -> None:
    """Make Megatron-FSDP give the first rank a larger part of every bucket than it has to."""
    library()
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffers

    pad = buffers._pad
    buffers._pad = lambda elements, divisor: pad(elements, 2 * divisor)
