"""What a scenario's save wrote, and what it had to write: the reader and the expectation that fit its system."""

from __future__ import annotations

from pathlib import Path

from harness.models import model_spec
from harness.observe.logical import Logical
from harness.observe.record import Record
from harness.program import Op
from harness.readers.checkpoint import expected_written, read_checkpoint
from harness.scenario import Scenario


def read_written(path: Path, op: Op, scenario: Scenario) -> list[Record]:
    """The `written` records of the checkpoint that the save `op` of a scenario left at `path`.

    Raises:
        CheckpointError: missing, truncated, foreign, inconsistent or hostile.
    """
    return read_checkpoint(path, op.index, model_spec(scenario.model))


def must_be_written(live: Logical, op: Op, scenario: Scenario) -> Logical:
    """What the checkpoint of the save `op` must hold, from the oracle's live values after it."""
    return expected_written(live, scenario, model_spec(scenario.model))
