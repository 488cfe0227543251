"""Checkpoints in torch's own formats: distributed ones, and one file of torch.save with `model`, `optim` and `extra`.

`TorchStored` is what a system's `stored.py` gives as it is (FSDP2), or derives from to say what its library stores
otherwise (Megatron-Core's flat buffers, Automodel's model files).
"""

from __future__ import annotations

from pathlib import Path

from shardproof.models import model_spec
from shardproof.observe.logical import Logical
from shardproof.observe.record import Record
from shardproof.program import Op
from shardproof.readers.checkpoint import expected_written, read_checkpoint
from shardproof.readers.vocabulary import Vocabulary
from shardproof.scenario import Scenario


class TorchStored:
    """Reads checkpoints in torch's own formats, and states their required content: every role that outlives a step, and
    no further keys."""

    vocabulary = Vocabulary()

    def read(self, path: Path, op: Op, scenario: Scenario) -> list[Record]:
        """The `written` records of a checkpoint.

        Raises:
            CheckpointError: missing, truncated, foreign, inconsistent or hostile.
        """
        return read_checkpoint(path, op.index, model_spec(scenario.model))

    def must_hold(self, live: Logical, op: Op, scenario: Scenario) -> Logical:
        """What the checkpoint of the save `op` must hold, from the oracle's live values after it."""
        return expected_written(live, model_spec(scenario.model), flat=self.flattens(scenario))

    def flattens(self, scenario: Scenario) -> bool:
        """Whether each parameter has its own copy of its group's numbers (flatten_optimizer_state_dict)."""
        return "flatten" in scenario.checkpoint.split("+")[1:]
