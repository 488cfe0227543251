"""TransformerEngine's checkpoints: torch's, with FusedAdam's state dict in them."""

from __future__ import annotations

import numpy as np

from shardproof.mechanisms.fused_adam_stored import IN_FP32, in_fp32, remainder
from shardproof.observe.logical import Logical, Value
from shardproof.observe.record import WRITTEN
from shardproof.program import Op
from shardproof.readers.stored import TorchStored
from shardproof.scenario import Scenario
from shardproof.systems.transformer_engine.contract import CONTRACT
from shardproof.systems.transformer_engine.vocabulary import VOCABULARY


class TransformerEngineStored(TorchStored):
    """FusedAdam counts steps in the param group, and has no count of a parameter's own. Its state dict has moments
    and masters in fp32. Beside the bytes of a quantised parameter lies the inverse of its scale."""

    vocabulary = VOCABULARY

    def must_hold(self, live: Logical, op: Op, scenario: Scenario) -> Logical:
        written = super().must_hold(live, op, scenario)
        if not CONTRACT.fused(scenario):
            return written
        scales = {k.fqn: v for k, v in live.items() if k.role == "quant_scale"}
        kept = {k: v for k, v in live.items() if k.role == "quant_scale" and k.fqn.endswith(".param")}
        written |= {k._replace(where=WRITTEN): v for k, v in kept.items()}
        return self._as_state_dict(written, scales, op, scenario)

    def _as_state_dict(self, written: Logical, scales: dict[str, Value], op: Op, scenario: Scenario) -> Logical:
        """The oracle's values as FusedAdam's state dict stores them: moments and masters in fp32, a remainder as it is,
        and the steps as a number of each group (of each parameter where groups are flattened).

        scales: of what is scaled, by `{parameter}.{role}`.
        """
        stored: Logical = {}
        flat = self.flattens(scenario)
        groups = {
            fqn: key.fqn.partition(".")[0]
            for key, value in written.items()
            if key.role == "hyperparameter" and key.fqn.endswith(".params")
            for fqn in value.data.decode().split("\n")
        }
        if not flat:
            stored |= _counts_of_empty_groups(written)
        half_away = {p.fqn for p in CONTRACT.parameters(scenario, op.mesh) if p.half_away}
        for key, value in written.items():
            if key.role == "step":
                number = np.frombuffer(value.data, np.float32).astype(np.float64).tobytes()
                owner = key.fqn if flat else groups[key.fqn]
                stored[key._replace(role="hyperparameter", fqn=f"{owner}.step")] = Value("fp64", (), number)
            elif key.role == "master" and key.fqn in half_away:
                stored[key] = remainder(value)
            elif key.role in IN_FP32:
                stored[key] = in_fp32(value, scales.get(f"{key.fqn}.{key.role}"))
            else:
                stored[key] = value
        return stored


def _counts_of_empty_groups(written: Logical) -> Logical:
    """The steps of each group without a parameter, which are those of the others: who is given parameters later, or on
    another rank, goes on from this count (pull request 3318)."""
    counts = [value for key, value in written.items() if key.role == "step"]
    if not counts:
        return {}
    most = max(float(np.frombuffer(value.data, np.float32)[0]) for value in counts)
    return {
        key._replace(fqn=f"{key.fqn.removesuffix('.params')}.step"): Value("fp64", (), np.float64(most).tobytes())
        for key, value in written.items()
        if key.role == "hyperparameter" and key.fqn.endswith(".params") and not value.data
    }


STORED = TransformerEngineStored()
