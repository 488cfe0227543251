"""What of an observation means the same on every mesh, under names that are the same on every mesh."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardproof.observe.logical import Value
from shardproof.oracle.extra_state import EXTRA_STATE

Name = tuple[str, str]
"""Role, and name."""

Values = Mapping[Name, Value]
"""Name → value, after one operation."""

OF_A_RANK = ("rng",)
"""Roles that belong to a rank and mean nothing on another mesh."""

ROLES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "step": "step", "momentum_buffer": "momentum"}
"""What an optimizer keeps beside a parameter: the names that have a role of their own."""

STATE = "state"
"""The role of what it keeps under any other name."""

BESIDE = (*ROLES.values(), STATE)
"""Roles of what an optimizer keeps beside a parameter. What has another shape than the rank's piece of the parameter,
such as a running product of NAdam, each rank records as its own where the parameter is sharded."""


def of_lasting(role: str, name: str) -> str:
    """What lines call a tensor that an optimizer keeps beside a parameter, such as `exp_avg of w`."""
    return f"{role} of {name}" if role in BESIDE else without_rank(name)


_PASSING = frozenset({
    "batch", "batches", "loss", "losses", "output", "outputs", "input", "inputs", "logits", "labels", "metrics",
    "results",
})  # fmt: skip

_OF_DATA = re.compile(r"(.*(loader|sampler|dataset|batch|batches)|inputs?|labels|data)(_.*|\d*)")
"""Words for what a step takes its samples from, and for the samples."""

OF_MODULES = ("param", "buffer")
"""Roles of what modules hold."""

_LEADING = re.compile(r"^\*\.|(?<= )\*\.")
"""The beginning of a name in a pattern, which may have a role before it."""

_OWNED = re.compile(r"rank(?P<rank>\d+)\.(?P<name>.+)", re.DOTALL)


def of_every_mesh(values: Values) -> tuple[dict[tuple[str, str], Value], set[tuple[str, str]]]:
    """Values without those of one rank alone, and the names of what is left out because ranks have it differently.

    State of an optimizer that every rank with a piece of the parameter has alike counts as one value, under the name
    that it has where the parameter is whole.
    """
    found: dict[tuple[str, str], Value] = {}
    apart: set[tuple[str, str]] = set()
    for (role, name), value in values.items():
        own = _OWNED.fullmatch(name)
        if role in OF_A_RANK or (own and role not in BESIDE):
            continue
        key = (role, own["name"] if own else name)
        if found.setdefault(key, value) != value:
            apart.add(key)
    return {key: value for key, value in found.items() if key not in apart}, apart


def passes(path: str) -> bool:
    """Whether a tensor is, by a word of its path, one that a step makes and the next step makes anew, such as a loss:
    no checkpoint holds it, and a run that has just loaded has none. The scale of a loss is none of them."""
    words = re.split(r"[._]", path.lower())
    return not _PASSING.isdisjoint(words) and "scale" not in words


def is_of_data(name: Name) -> bool:
    """Whether a value is, by a word of its path, of what a step trains on: a loader's position, or a batch. Where it
    differs, all else that a step makes differs for that reason."""
    path = without_rank(name[1])
    return name[0] == EXTRA_STATE and any(map(_OF_DATA.fullmatch, path.lower().split(".")))


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name fits one of the glob patterns by which a trainer declares names. `*.` at the beginning of a name
    may stand for nothing, so that `*.experts.*` has a topmost `experts.0.weight` too."""
    return any(fnmatchcase(name, each) for pattern in patterns for each in (pattern, _LEADING.sub("", pattern)))


def is_transient(name: Name, patterns: Sequence[str]) -> bool:
    """Whether no checkpoint need hold a value: it is made anew by its name, or fits a pattern of `ROLE NAME`, with the
    rank before the name or without it."""
    made_anew = name[0] == EXTRA_STATE and passes(name[1])
    return made_anew or any(fits(f"{name[0]} {each}", patterns) for each in (name[1], without_rank(name[1])))


def of_ranks(values: Values) -> set[Name]:
    """The names of tensors and values of the trainer's own of which every rank has one for itself."""
    return {name for name in values if _own_of_a_rank(name)}


ALIKE_ROLES = (*OF_MODULES, *BESIDE)
"""What two ways to compute the same must agree in, beside further tensors of the trainer."""


@dataclass(frozen=True)
class Both:
    """What two ways to compute the same have.

    * one, other: what can be compared, of each.
    * left_out: state of an optimizer, and tensors of the trainer's own, that only one of the two has, or that has
      another shape in the other, such as what is kept for each piece of a tensor; and parameters of which every rank
      has its own, with their state.
    * settings: numbers and texts that are not the same in both. They may say which of the two ways it is.
    * drawn: random states that are not the same in both, as where one way draws more numbers than the other.
    """

    one: dict[Name, Value]
    other: dict[Name, Value]
    left_out: set[Name]
    settings: set[Name]
    drawn: set[Name]


def of_both(one: Values, other: Values) -> Both:
    """What two ways to compute the same can be compared in."""
    local, apart = _local(one) | _local(other), {name for name in {*one, *other} if one.get(name) != other.get(name)}
    drawn = {name for name in apart if name[0] in OF_A_RANK and name in one and name in other}
    common, common_too = _on_every_rank(one), _on_every_rank(other)
    (one, own), (other, own_too) = of_every_mesh(one), of_every_mesh(other)
    one, other = one | common, other | common_too
    every = {*one, *other, *own, *own_too}
    names = {name for name in every if name[0] in ALIKE_ROLES or _own_tensor(name, one) or _own_tensor(name, other)}
    left_out = {name for name in names if name[0] not in OF_MODULES and _shape(one, name) != _shape(other, name)}
    left_out |= {name for name in names if name[1] in local}
    kept = names - left_out
    settings = {name for name in every - names if one.get(name) != other.get(name)}
    settings |= {name for name in apart if (own_name := _own_of_a_rank(name)) and own_name not in names}
    one, other = ({name: value for name, value in way.items() if name in kept} for way in (one, other))
    return Both(one, other, left_out, settings, drawn)


def without_rank(name: str) -> str:
    """A name without the rank that a value is recorded for."""
    owned = _OWNED.fullmatch(name)
    return owned["name"] if owned else name


def rank_of(name: str) -> int:
    """The rank that a value is recorded for; -1 where it is recorded for all."""
    owned = _OWNED.fullmatch(name)
    return int(owned["rank"]) if owned else -1


def _on_every_rank(values: Values) -> dict[Name, Value]:
    """Tensors of the trainer's own, such as a list of losses, that every rank has for itself and all have alike."""
    found: dict[Name, set[Value]] = {}
    for name, value in values.items():
        if own := _own_of_a_rank(name):
            found.setdefault(own, set()).add(value)
    return {name: next(iter(every)) for name, every in found.items() if len(every) == 1}


def _own_of_a_rank(name: Name) -> Name | None:
    """The name on every rank of a tensor of the trainer's own that is recorded as one rank's; None for any other."""
    own = _OWNED.fullmatch(name[1])
    return (EXTRA_STATE, own["name"]) if own and name[0] == EXTRA_STATE else None


def _own_tensor(name: Name, values: Values) -> bool:
    """Whether a value is a tensor that a trainer keeps beside modules and optimizers, such as a moving average."""
    return name[0] == EXTRA_STATE and name in values and values[name].dtype != "utf8"


def _local(values: Values) -> set[str]:
    """The names of parameters of which every rank has one of its own."""
    found = (_OWNED.fullmatch(name) for role, name in values if role == "param")
    return {own["name"] for own in found if own}


def _shape(values: Values, name: Name) -> tuple[int, ...] | None:
    return values[name].shape if name in values else None
