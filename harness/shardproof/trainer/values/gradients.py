"""What optimizers had of each parameter when they stepped, as ranks say it (`shardproof.trainer.rank.gradients`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from shardproof.diff import as_numbers, numpy_dtype
from shardproof.observe.record import Record
from shardproof.observe.settings import SETTING
from shardproof.trainer.arms import GRADIENTS
from shardproof.trainer.values.every_mesh import Name, Values, without_rank
from shardproof.trainer.values.rounding import HALVES, PARAMS
from shardproof.trainer.values.telling import one_or_many

NONE, ZEROS, NOT_FINITE, GRADIENT = "none", "zeros", "not finite", "gradient"
FROZEN, STEPPED_FROZEN, UNSTEPPED = "frozen", "stepped although frozen", "in no group"

COPIES = ""
"""The name for all that optimizers step and no module has, such as copies in fp32."""

OfParameters = Mapping[str, str]
"""Name of a parameter, or `COPIES` → one of the words above, of the rank that has most: a gradient of zeros on one of
two ranks is none of zeros."""

LEAST_FIRST = (NONE, ZEROS, FROZEN, UNSTEPPED, GRADIENT, STEPPED_FROZEN, NOT_FINITE)

UNDONE = "so look at what undoes its step, or at whether they are too small to change anything"

PASSED_OVER = (
    "and no line changes these parameters, not even for a while: look at whether the optimizer passes them over, as "
    "where its step returns early, or whether what it adds is too small to change anything"
)
"""Stands in place of `UNDONE` where every line is known."""

_SUSPECTS = {
    NONE: "no gradient arrives (`.grad` is None when the optimizer steps)",
    ZEROS: "their gradients are all zeros when the optimizer steps",
    FROZEN: "they are frozen (`requires_grad` is False)",
    GRADIENT: f"gradients other than zero are there when the optimizer steps, {UNDONE}",
    NOT_FINITE: "their gradients are NaN or infinite, for which a loss scale skips a step",
    UNSTEPPED: "gradients other than zero reach them, and no param group of an optimizer that stepped has them: was it "
    "made before they were there, or were to train",
}


_COPIED = {
    NONE: "and no gradient arrives there (`.grad` is None): were modules replaced after the optimizer was built, or "
    "does nothing copy gradients to them",
    ZEROS: "whose gradients are all zeros: were modules replaced after the optimizer was built, or does nothing copy "
    "gradients to them",
    GRADIENT: "which have gradients other than zero, so look at what copies them back",
    NOT_FINITE: "whose gradients are NaN or infinite, for which a loss scale skips a step",
}


def gradients_by_op(records: Iterable[Record]) -> Mapping[int, OfParameters]:
    """Operation → parameter → the kind of gradient in the steps of the operation."""
    found: dict[int, list[OfParameters]] = {}
    for record in records:
        if record.role == GRADIENTS:
            found.setdefault(record.op, []).append(json.loads(record.data))
    return {op: together(each) for op, each in found.items()}


def together(every: Iterable[OfParameters]) -> OfParameters:
    """What several ranks or steps had of each parameter."""
    found: dict[str, str] = {}
    for each in every:
        for name, word in each.items():
            found[name] = max(found.get(name, word), word, key=LEAST_FIRST.index)
    return found


def why_still(names: Sequence[str], seen: OfParameters) -> str:
    """Why parameters do not move, by what optimizers had of them; empty where that is not one thing, or not known."""
    words = {seen.get(name, "") for name in names}
    if words == {""} and seen.get(COPIES):
        return f"the optimizer steps other tensors than these, {_COPIED[seen[COPIES]]}"
    return _SUSPECTS.get(min(words), "") if len(words) == 1 else ""


def why_each(names: Sequence[str], seen: OfParameters) -> str:
    """Why parameters do not move, each reason with those that it holds for; empty where no optimizer was seen."""
    if not any(word != UNSTEPPED for word in seen.values()):
        return ""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(seen.get(name, ""), []).append(name)
    if len(groups) == 1 and (why := why_still(names, seen)):
        return why
    told = [f"{_SUSPECTS.get(word) or NOBODY_STEPS} ({_few(each)})" for word, each in groups.items()]
    copies = _as_copies(groups.get(NONE, ()), groups.get(UNSTEPPED, ()))
    return "; ".join([*told, *copies]) if len(groups) > 1 else NOBODY_STEPS


_TAIL = re.compile(r"[._]?([a-z]+|[0-9]+)[._]?([a-z]+|[0-9]+)$", re.IGNORECASE)
"""The last two words of a name."""


def _as_copies(stepped: Sequence[str], reached: Sequence[str]) -> list[str]:
    """That parameters which an optimizer steps without gradients and others that have them and are not stepped have
    names that end alike, one by one, as copies have."""
    ends = [sorted(tuple(re.findall(r"[a-z]+|[0-9]+", name.lower())[-2:]) for name in each)
            for each in (stepped, reached)]  # fmt: skip
    if not stepped or ends[0] != ends[1] or len({*ends[0]}) != len(ends[0]):
        return []
    whose = [_TAIL.sub("", name) or name for name in (reached[0], stepped[0])]
    return [
        f"the names of the latter end as those of the former do: if `{whose[0]}` holds copies of `{whose[1]}`, the "
        "optimizer has the originals, and the loss goes through the copies"
    ]


NOBODY_STEPS = "no param group of an optimizer that stepped has them"


def _few(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


def reached_apart(first: OfParameters, own: OfParameters, names: tuple[str, str]) -> str:
    """A sentence about parameters that a gradient reaches in only one of two ways; empty where there are none.

    Args:
        first, own: of the same step. names: of the ways.
    """
    for mine, its, way, other in ((first, own, *names), (own, first, *names[::-1])):
        lacking = sorted(name for name in mine if name and mine[name] == GRADIENT and its.get(name) in (NONE, ZEROS))
        if lacking:
            what = "no gradient reaches" if its[lacking[0]] == NONE else "all gradients are zeros of"
            return (
                f"With {other} {what} {one_or_many(lacking)} and with {way} some other than zero come: look at what "
                "cuts the graph there, such as a `detach`, and at what the loss depends on; or, where none should "
                "come, at what lets it through."
            )
    return ""


def stepped_frozen(seen: OfParameters) -> list[str]:
    """The frozen parameters that an optimizer steps. Where it steps no other, gradients are the trainer's own, such as
    those that are computed without autograd."""
    trained = any(word in (GRADIENT, ZEROS, NOT_FINITE) for word in seen.values())
    return [name for name, word in seen.items() if name and word == STEPPED_FROZEN] if trained else []


def has_master(name: str, values: Values, seen: OfParameters) -> bool:
    """Whether a parameter in bf16 or fp16 is what one in fp32 rounds to that an optimizer steps and no module has.

    Args:
        values: after the step. seen: has the parameters of modules that a step saw.
    """
    own = values.get((PARAMS, name))
    if own is None or own.dtype not in HALVES:
        return False
    groups = (value for (role, key), value in values.items() if role == SETTING and key.endswith(".params"))
    masters = {one for value in groups for one in value.data.decode().split("\n") if one not in seen}
    wide = [
        value for (role, key), value in values.items()
        if role == PARAMS and value.dtype == "fp32" and without_rank(key) in masters
    ]  # fmt: skip
    dtype = numpy_dtype(own.dtype)
    return any(len(own.data) * 2 == len(one.data) and as_numbers(one).astype(dtype).tobytes() == own.data
               for one in wide)  # fmt: skip


def may_be_stepped(names: Iterable[Name], ways: Iterable[OfParameters]) -> bool:
    """Whether an optimizer may have had a gradient of what has one of these names: unless all are buffers, or all are
    parameters, and it is known that optimizers had none of them, nor stepped copies of any.

    Args:
        names: with their roles. ways: what optimizers had of each parameter in a step, in each of two ways.
    """
    seen, every = list(ways), list(names)
    if every and all(role == "buffer" for role, _ in every):
        return False
    known = all(role == PARAMS for role, _ in every) and all(own and COPIES not in own for own in seen)
    left = (NONE, FROZEN, UNSTEPPED)
    return not known or any(own.get(name, NONE) not in left for own in seen for _, name in every)


def are_frozen(names: Sequence[str], seen: OfParameters) -> bool:
    """Whether all of the named parameters are frozen."""
    return bool(names) and all(seen.get(name) in (FROZEN, STEPPED_FROZEN) for name in names)
