"""What two arms have of one tensor, for whoever asks what made the difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardproof.diff import Difference
from shardproof.observe.logical import Value
from shardproof.oracle.extra_state import EXTRA_STATE
from shardproof.trainer.values.every_mesh import ALIKE_ROLES, Name
from shardproof.trainer.values.rounding import FLOATS


@dataclass(frozen=True)
class Pair:
    """A tensor with its expected and its observed value, and the value before the operation, which may be None."""

    name: Name
    expected: Value
    observed: Value
    before: Value | None


@dataclass(frozen=True)
class Between:
    """Two moments that were compared.

    * before: what there was before both. ranks: how many ranks the arm has. loaded: whether a load is between.
    * against: what the expected moment is of, such as `offload=none`, where nobody knows which of the two is right.
    * settings: of param groups, after the operation.
    * step: the number of the step that the operation is; -1 of another one. earlier: how many steps of the same session
      that changed a parameter came before it, after each of which the two were equal.
    * rates: by which factor the learning rates of two ways are apart; 0 where they are alike, or it is not one factor.
    * stepped: of each of two ways, name of a parameter → the number of its param group, and the learning rate with
      which an optimizer stepped it.
    * rates_differ: whether learning rates of two ways are not alike, by one factor or by several.
    * ratio: of the two values of the axis, of two ways; 0 where they are no numbers.
    * seed: that the session of the observed moment was begun with, as its `cell.seed`; -1 if nobody knows it.
    * known: whether it is told already what makes another value first.
    * gradients: name of a parameter → what the optimizer had of it in the observed moment's step.
    """

    expected: Mapping[Name, Value]
    observed: Mapping[Name, Value]
    before: Mapping[Name, Value]
    ranks: int
    against: str = ""
    settings: Mapping[Name, Value] = field(default_factory=dict)
    step: int = -1
    earlier: int = 0
    known: bool = False
    gradients: Mapping[str, str] = field(default_factory=dict)
    loaded: bool = False
    rates: float = 0.0
    ratio: float = 0.0
    rates_differ: bool = False
    stepped: tuple[Mapping[str, tuple[int, float]], Mapping[str, tuple[int, float]]] = ({}, {})
    seed: int = -1

    def moved(self, role: str) -> list[str]:
        """The names of what has that role and should have changed, in the model's order."""
        values = ((name, value) for name, value in self.expected.items() if name[0] == role)
        return [name[1] for name, value in values if any(value.data) and value != self.before.get(name)]

    def pair(self, difference: Difference) -> Pair | None:
        """The two values of a tensor of floats that differ in their bits; None for any other difference."""
        name = difference.key.role, difference.key.fqn
        one, other = self.expected.get(name), self.observed.get(name)
        if difference.kind != "bits" or name[0] not in (*ALIKE_ROLES, EXTRA_STATE) or one is None or other is None:
            return None
        alike = (one.dtype, one.shape) == (other.dtype, other.shape) and one.dtype in FLOATS
        before = self.before.get(name, self.before.get((name[0], f"rank0.{name[1]}")))  # what every rank has alike
        return Pair(name, one, other, before) if alike else None
