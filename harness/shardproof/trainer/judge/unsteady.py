"""What is said of a trainer that is not deterministic: what its two runs differ in, and what that comes with.

One cell tells that two of its runs differ, and can only guess why. Several cells tell more: where the same trainer is
deterministic with another value of one axis, what differs comes with this cell's value, and a guess is not needed.

*Does not verify*: that the cell of the other value would not differ in a third run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite

import numpy as np

from shardproof.diff import Difference, as_numbers
from shardproof.observe.logical import Value
from shardproof.result import ArmResult, Result
from shardproof.trainer.arms import TWICE
from shardproof.trainer.cells import values_of
from shardproof.trainer.described import Described
from shardproof.trainer.values.every_mesh import BESIDE, Name
from shardproof.trainer.values.rounding import FLOATS
from shardproof.trainer.values.telling import paragraphs
from shardproof.verdict import Verdict

HUGE = 1e6
"""How many times the largest value of a tensor that one step leaves may be what it was before."""

ORDER = (
    "an order that differs from run to run is the likely reason, such as of threads or of a hash, or memory "
    "that is read before it is written, or data that is no function of the index"
)
UNWRITTEN = (
    "some of these values are NaN, or larger than a step makes them: memory that nobody wrote, which holds other "
    "numbers in each run, is the likely reason, such as that of `torch.empty`"
)


def likely(
    found: Iterable[Difference], kind: str, runs: Sequence[Mapping[Name, Value]], before: Mapping[Name, Value]
) -> str:
    """The likely reason why two runs differ.

    Args:
        found: what differs. kind: of the operation. runs: what both hold after it. before: what
            one of them held before.
    """
    keys = {(d.key.role, d.key.fqn) for d in found}
    roles = {role for role, _ in keys}
    if kind in ("build", "fit") or "rng" in roles:
        return (
            "a generator that `build` does not seed from cell.seed, or an order that differs from run to run, such as "
            "that of a set, is the likely reason"
        )
    if any(is_garbage([run.get(key) for run in runs], before.get(key)) for key in keys):
        return UNWRITTEN
    if roles <= {"param", *BESIDE, "grad"}:
        return ORDER
    return "something that counts time, addresses or processes is the likely reason"


def is_garbage(values: Sequence[Value | None], before: Value | None) -> bool:
    """Whether a value of two runs is one that training does not come to, by what it was before, or else by the smaller
    of both."""
    sizes = [largest(value) for value in values]
    known = min(filter(isfinite, sizes), default=0.0) if before is None else largest(before)
    return isfinite(known) and known > 0 and any(not size <= HUGE * known for size in sizes)


def largest(value: Value | None) -> float:
    """The largest absolute value of a tensor of floats, NaN where one is; 0 of anything else."""
    if value is None or value.dtype not in FLOATS or not value.data:
        return 0.0
    return float(np.abs(as_numbers(value).astype(np.float64)).max())


def compared(trainer: Described, results: Sequence[Result]) -> list[Result]:
    """The results, where those that are not deterministic say with which values of axes that comes."""
    steady = [_place(trainer, result) for result in results if _twice(result) == Verdict.PASS.value]
    return [_told(result, _comes_with(_place(trainer, result), steady)) for result in results]


Place = tuple[tuple[str, str], ...]


def _place(trainer: Described, result: Result) -> Place:
    """A cell's values of all axes, and what else it ran with."""
    scenario = result.scenario
    others = ("version", result.version), ("program", str(scenario.program)), ("device", scenario.device)
    return (*others, *sorted(values_of(trainer, scenario).items()))


def _twice(result: Result) -> str:
    return next((arm.verdict for arm in result.arms if arm.name == TWICE), "")


def _comes_with(place: Place, steady: Iterable[Place]) -> str:
    """A sentence on the axes of which another value is deterministic; empty where there is none."""
    with_this, with_that = dict[str, str](), dict[str, str]()
    for other in steady:
        apart = [(mine, theirs) for mine, theirs in zip(place, other, strict=True) if mine != theirs]
        if len(apart) == 1:
            (axis, mine), (_, theirs) = apart[0]
            with_this[axis], with_that[axis] = f"{axis}={mine}", f"{axis}={theirs}"
    if not with_this:
        return ""
    together = " together" if len(with_this) > 1 else ""
    return (
        f"With {' or with '.join(with_that.values())}, and all else alike, it is deterministic, so that what differs "
        f"comes with {' and '.join(with_this.values())}{together}."
    )


def _told(result: Result, sentence: str) -> Result:
    """A result whose arm `twice` has a sentence more, and no guess that it makes idle."""
    if not sentence or result.verdict is not Verdict.NONDETERMINISTIC:
        return result

    def arm_told(arm: ArmResult) -> ArmResult:
        if arm.name != TWICE or arm.verdict != Verdict.NONDETERMINISTIC.value:
            return arm
        first, *more = arm.sentence.replace(f"; {ORDER}", "").split("\n")
        return replace(arm, sentence=paragraphs(f"{first} {sentence}", *more))

    return replace(result, arms=tuple(map(arm_told, result.arms)))
