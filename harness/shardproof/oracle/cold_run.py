"""The cold run: the state that ranks would have if every load did nothing. Explanations compare with it; no verdict
does.

It is worked out when somebody asks for a value that a load could have changed, and no further than to that operation:
up to the first load it is what the other run holds.

*Verifies* nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardproof.observe.logical import Key, Logical, Value
from shardproof.oracle.inputs import Inputs
from shardproof.oracle.reported import Reported
from shardproof.program import LOADS

_NO_MOMENTUM = "expected Tensor as element"
"""What torch's fused SGD says where a parameter has no momentum that others have."""


@dataclass
class ColdRun:
    """The values of the cold run of some inputs.

    Args:
        reported: what the system said of its steps (`shardproof.oracle.twin.run`).
        warm: the values of the run in which loads work.
    """

    inputs: Inputs
    reported: Reported
    warm: Logical
    _until: int = -1
    _values: Logical = field(default_factory=dict)

    def get(self, key: Key) -> Value | None:
        """The value of a key; None where there is none, and where torch cannot take the steps: fused SGD raises where
        some parameters have momentum and others, which a load would have given it, have none (torch/optim/sgd.py,
        2.13)."""
        operations = self.inputs.operations[: key.op + 1]
        first = next((op.index for op in operations if op.kind in LOADS), None)
        if first is None:
            return self.warm.get(key)
        if key.op > self._until:
            from shardproof.oracle import twin  # it loads torch

            self._until = key.op
            try:
                self._values = twin.run(replace(self.inputs, operations=operations), self.reported, cold_from=first)
            except TypeError as error:
                if _NO_MOMENTUM not in str(error):
                    raise
                self._values = {}
        return self._values.get(key)
