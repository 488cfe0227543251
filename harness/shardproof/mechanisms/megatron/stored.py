"""The values that Megatron-Core's own checkpoint formats must hold, for the systems that write them; `reader` reads
them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardproof.mechanisms.fused_adam_stored import IN_FP32, in_fp32, remainder
from shardproof.mechanisms.megatron.contract import MegatronContract
from shardproof.mechanisms.megatron.reader import read_megatron
from shardproof.mechanisms.megatron.vocabulary import VOCABULARY
from shardproof.models import model_spec
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import WRITTEN, Record
from shardproof.program import Op
from shardproof.readers.stored import TorchStored
from shardproof.scenario import Scenario

UNTIED = ("dp_zero", "plain")
"""Formats that store a tied parameter under each of its names. The others store it once, under its own."""

GATHERED = ("dp_zero", "dp_zero_gather_scatter", "fully_reshardable")
"""Formats that first gather all state into buffers of fp32, and so turn even integers into fp32 numbers."""


class MegatronStored(TorchStored):
    """Files of torch.save, or of `dist_checkpointing`.

    The distributed optimizer stores masters and moments in fp32, whatever dtype it keeps them in. A remainder (the low
    16 bits of a bf16 parameter's master) is stored as the integer that it is, except by formats that gather: those make
    an fp32 number of it.
    """

    vocabulary = VOCABULARY

    def __init__(self, contract: MegatronContract) -> None:
        self.contract = contract

    def read(self, path: Path, op: Op, scenario: Scenario) -> list[Record]:
        return read_megatron(path, op, scenario)

    def must_hold(self, live: Logical, op: Op, scenario: Scenario) -> Logical:
        kept = self.stored_values(live, op, scenario)
        if scenario.sharding != "zero1":
            return kept
        scales = {k.fqn: v for k, v in live.items() if k.role == "quant_scale"}
        half_away = {p.fqn for p in self.contract.parameters(scenario, op.mesh) if p.half_away}
        gathers = scenario.checkpoint.partition("+")[0] in GATHERED
        stored: Logical = {}
        for key, value in kept.items():
            if key.role == "master" and key.fqn in half_away:
                low = remainder(value)
                stored[key] = in_fp32(low) if gathers else low
            elif key.role in IN_FP32:
                stored[key] = in_fp32(value, scales.get(f"{key.fqn}.{key.role}"))
            else:
                stored[key] = value
        return stored

    def stored_values(self, live: Logical, op: Op, scenario: Scenario) -> Logical:
        """The values that a checkpoint keeps, with the count of steps, and without second names where the format
        stores a tied parameter once."""
        written = TorchStored.must_hold(self, live, op, scenario)
        count = np.int64(op.iteration).tobytes()
        written[Key(op.index, WRITTEN, "iteration", "iteration")] = Value("int64", (), count)
        if scenario.checkpoint.partition("+")[0] in UNTIED:
            return written
        aliases = {p.fqn for p in model_spec(scenario.model).params if p.spec.tied_to is not None}
        return {k: v for k, v in written.items() if k.role != "param" or k.fqn not in aliases}
