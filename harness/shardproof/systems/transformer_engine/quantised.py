"""What a matrix that is stored in fp8e4m3 must be: the values that the twin steps, cast as the contract says.

Twin and reference know nothing of quantised storage: they step masters. This turns what they say of a parameter into
stored bytes and a scale afterwards, with numpy's arithmetic and ml_dtypes' cast, and so without any code of the
emulated extension, which does the same on the ranks.

*Verifies* nothing by itself. *Does not know* how an emulated extension casts, blocks with scales of their own, or what
a parameter is whose master has no value (after a load of the model alone).

Source: transformer_engine/common/recipe/recipe_common.cuh, compute_scale_from_amax (2.10 to 2.20.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from shardproof.models import NamedParam, model_spec
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE, NUMPY_NAME
from shardproof.oracle.contract import Contract
from shardproof.program import expand
from shardproof.scenario import Scenario
from shardproof.systems.transformer_engine.switches import FP8_CURRENT, is_quantised

SCALE = "param"
"""What follows a parameter's name in that of its inverse scale: `up.weight.param`, of the role `quant_scale`."""

_LARGEST = np.float32(448)
_ONE = np.float32(1)


@dataclass(frozen=True)
class _Stored:
    """A matrix as it is stored. data: in fp8e4m3. inverse: of its scale, with which what is read is multiplied."""

    data: npt.NDArray[np.float32]
    inverse: np.float32

    def read(self, dtype: str) -> bytes:
        """The values in the dtype that a forward computes in."""
        return (self.data * self.inverse).astype(NUMPY_NAME[dtype]).tobytes()


def quantised(truth: Logical, scenario: Scenario, contract: Contract) -> Logical:
    """The twin's prediction, with matrices as they are stored and as a forward reads them."""
    params = [p for p in model_spec(scenario.model).unique_params if is_quantised(scenario, p.spec)]
    if not params:
        return truth
    found = dict(truth)
    for param in params:
        before: _Stored | None = None
        for op in expand(scenario):
            master = truth[Key(op.index, LIVE, "master", param.fqn)]
            now = _stored(np.frombuffer(master.data, np.float32), current=FP8_CURRENT in scenario.options)
            found |= _values(param, now, op.index)
            seen = Key(op.index, LIVE, "compute_param", param.fqn)
            if seen in truth and before is not None:
                compute = contract.stages(scenario, param.spec, op.mesh).compute
                found[seen] = Value(compute, param.spec.shape, before.read(compute))
            before = now
    return found


def _values(param: NamedParam, stored: _Stored, op: int) -> Logical:
    shape = param.spec.shape
    scales = np.full(shape, stored.inverse, np.float32)
    return {
        Key(op, LIVE, "param", param.fqn): Value(
            "fp8e4m3", shape, stored.data.astype(ml_dtypes.float8_e4m3fn).tobytes()
        ),
        Key(op, LIVE, "quant_scale", f"{param.fqn}.{SCALE}"): Value("fp32", shape, scales.tobytes()),
    }


def _stored(master: npt.NDArray[np.float32], *, current: bool) -> _Stored:
    scale = _LARGEST / np.abs(master).max() if current and master.any() else _ONE
    scaled = np.clip(master * scale, -_LARGEST, _LARGEST)
    return _Stored(scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32), _ONE / scale)
