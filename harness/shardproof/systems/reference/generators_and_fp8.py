"""The expected values of the reference's state beside parameters and optimizer state: random generators, and fp8
weights.

The twin has neither ranks nor quantised weights. What both must be follows from the program and from what the twin says
of masters and parameters, and is worked out here from a scenario's operations, without the reference's code.

* A random generator's state is the seed of its rank's coordinate and the numbers drawn since. A forward draws as many
  as the first parameter of each module with dropout has elements; a load gives back what was drawn at the save, to
  streams that have as many coordinates as then; a build seeds anew.
* A weight in fp8 is made of its master, or of the parameter that is its own, at the build and by every step that is
  taken; a load gives back what was saved. Forwards read it, and not the parameter.

*Verifies* nothing by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import numpy.typing as npt

from shardproof.models import ModelSpec, model_spec
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE, NUMPY_NAME, WRITTEN
from shardproof.oracle.contract import Contract
from shardproof.oracle.generators import follow
from shardproof.program import NO_CHECKPOINT, TAKES, UPDATES, WRITES, Op, expand
from shardproof.scenario import Scenario

F32 = npt.NDArray[np.float32]

_MODELS_WEIGHT = ("load", "recall", "load_model_only")
"""Loads of what modules keep; the first two restore generators as well."""


def beside(truth: Logical, scenario: Scenario, contract: Contract) -> Logical:
    """The twin's prediction, with what ranks keep beside it, live and in what saves wrote."""
    model = model_spec(scenario.model)
    if not any(module.draws or module.quantised for module in model.modules):
        return truth
    ops = expand(scenario)
    expected = dict(truth)
    for stream in {module.draws for module in model.modules if module.draws}:
        each = sum(module.params[0].numel for module in model.modules if module.draws == stream)
        expected |= _stream(stream, each, scenario, ops)
    for fqn, recipe in _weights(model).items():
        expected |= _Weight(fqn, recipe, truth, scenario, contract).follow(ops)
    return expected


# -- random generators


def _stream(stream: str, each: int, scenario: Scenario, ops: tuple[Op, ...]) -> Logical:
    """One stream's states after every operation. each: numbers that a forward draws."""
    found: Logical = {}
    for op, places, at, saved in follow(stream, scenario, ops):
        states = [(drawn.seed, drawn.forwards * each) for drawn in places]
        for rank, place in enumerate(at):
            found[Key(op.index, LIVE, "rng", f"rank{rank}.{stream}")] = _int64(states[place])
        if saved:
            written = [(drawn.seed, drawn.forwards * each) for drawn in saved]
            found[Key(op.index, WRITTEN, "rng", f"rank0.{stream}")] = _int64(written)
    return found


def _int64(numbers: object) -> Value:
    values = np.array(numbers, np.int64)
    return Value("int64", values.shape, values.tobytes())


# -- weights in fp8

_LARGEST = np.float32(448)
_LENGTH = 4
"""How many magnitudes a history holds."""


def _weights(model: ModelSpec) -> dict[str, str]:
    """Name → recipe of the matrices that are kept in fp8 too."""
    return {
        named.fqn: named.module.quantised
        for named in model.unique_params
        if named.module.quantised and len(named.spec.shape) > 1
    }


@dataclass(frozen=True)
class _Stored:
    """A weight as it is kept. data: what its bytes say, before the inverse scale; history: of magnitudes."""

    data: F32
    inverse: np.float32
    history: tuple[float, ...]

    def read(self, dtype: str) -> bytes:
        """The dequantised weight in the compute dtype of the forward pass, as raw bytes."""
        return (self.data * self.inverse).astype(NUMPY_NAME[dtype]).tobytes()


@dataclass
class _Weight:
    """One weight over a program. saved: by the number of its checkpoint."""

    fqn: str
    recipe: str
    truth: Logical
    scenario: Scenario
    contract: Contract
    saved: dict[int, _Stored] = field(default_factory=dict)

    def follow(self, ops: tuple[Op, ...]) -> Logical:
        """Every value of it, live and written."""
        found: Logical = {}
        before: _Stored | None = None
        for op in ops:
            now = self._after(op, before)
            found |= self._values(now, op, LIVE)
            if op.kind in WRITES:
                found |= self._values(self.saved[op.checkpoint], op, WRITTEN)
            seen = Key(op.index, LIVE, "compute_param", self.fqn)
            if seen in self.truth and before is not None:
                found[seen] = self.truth[seen]._replace(data=before.read(self.truth[seen].dtype))
            before = now
        return found

    def _after(self, op: Op, before: _Stored | None) -> _Stored:
        if before is None or op.kind == "build":
            return self._made(op, (0.0,) * _LENGTH)
        if op.kind in UPDATES:
            return self._made(op, before.history)
        if op.kind in _MODELS_WEIGHT:
            return self.saved[op.checkpoint]
        if op.kind in TAKES:
            self.saved[op.checkpoint] = before
        elif op.kind == "save_kept":
            self.saved[op.checkpoint] = self.saved[NO_CHECKPOINT]
        return before

    def _made(self, op: Op, history: tuple[float, ...]) -> _Stored:
        """The weight quantised from what the optimizer has stepped."""
        keys = (Key(op.index, LIVE, role, self.fqn) for role in ("master", "param"))
        source = self.truth[next(key for key in keys if key in self.truth)]
        values = np.frombuffer(source.data, NUMPY_NAME[source.dtype]).astype(np.float32)
        amax = float(np.abs(values).max())
        greatest = np.float32(amax if self.recipe == "current" else max(history))
        scale = _LARGEST / greatest if 0 < greatest < np.inf else np.float32(1)
        data = np.clip(values * scale, -_LARGEST, _LARGEST).astype(ml_dtypes.float8_e4m3fn)
        return _Stored(data.astype(np.float32), np.float32(1) / scale, (*history[1:], amax))

    def _values(self, stored: _Stored, op: Op, where: str) -> Logical:
        shape = self.contract.parameter(self.scenario, self.fqn, op.mesh).shape
        data = stored.data.astype(ml_dtypes.float8_e4m3fn)
        scales, history = np.full(shape, stored.inverse, np.float32), np.array(stored.history, np.float32)
        return {
            Key(op.index, where, "quantised", self.fqn): Value("fp8e4m3", shape, data.tobytes()),
            Key(op.index, where, "quant_scale", f"{self.fqn}.quantised"): Value("fp32", shape, scales.tobytes()),
            Key(op.index, where, "quant_scale", f"{self.fqn}.amax_history"): Value(
                "fp32", history.shape, history.tobytes()
            ),
        }
