"""Whose `state_dict` a save asks for and to whom a load gives one, beside what hangs on the trainer and what steps; and
which files of a checkpoint a load does not open.

*Verifies*: that the methods were called so, and that no code of Python's opened such a file. *Does not verify*: that
nothing else saves or restores the same, as by reading `param_groups` or assigning to an attribute.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Self

from shardproof.diff import Difference
from shardproof.observe.record import Record
from shardproof.observe.settings import SETTING
from shardproof.trainer.arms import STATE_CALLS
from shardproof.trainer.values.every_mesh import BESIDE, OF_MODULES

ASKED, GIVEN, STEPPED = "asked", "given", "stepped"

MODULE, OPTIMIZER, SCHEDULER, SCALER = "module", "optimizer", "scheduler", "scaler"
"""Kinds of objects, as a look at a trainer tells them."""

_NATIVE = {".safetensors", ".h5", ".hdf5", ".parquet", ".arrow", ".so", ".zarr"}
"""Endings of files that are read by code which is not Python's."""

MOST_FILES = 3


class Owner(NamedTuple):
    """What a method was called of. path: where it hangs on the trainer after the operation; empty where it does not.
    class_name, kind: what it is. number: by which it is known in the operations of a session; 0 if it is not."""

    path: str
    class_name: str
    kind: str
    number: int

    def told(self) -> str:
        """As a sentence has it."""
        return f"`{self.path}` ({self.class_name})" if self.path else f"{_a(self.class_name)} {NOT_THERE}"


NOT_THERE = "that is not found on the trainer afterwards"


class Calls(NamedTuple):
    """Of one or several operations. there: the optimizers, schedulers and scalers on the trainer after the latest.
    opened: files, below the folder in which the checkpoints lie. cut: whether some calls were not seen. paths: path of
    a module, an optimizer or a scheduler → the number of the object there after the latest. steps: path of an optimizer
    → how many of its parameters are those of modules then, and how many it has."""

    asked: tuple[Owner, ...] = ()
    given: tuple[Owner, ...] = ()
    stepped: tuple[Owner, ...] = ()
    there: tuple[Owner, ...] = ()
    opened: frozenset[str] = frozenset()
    cut: bool = False
    paths: Mapping[str, int] = MappingProxyType({})
    steps: Mapping[str, tuple[int, int]] = MappingProxyType({})

    @classmethod
    def of(cls, data: bytes) -> Self:
        """What a rank recorded."""
        said = json.loads(data)
        asked, given, stepped = (
            tuple(Owner(*one) for one in said["calls"].get(what, ())) for what in (ASKED, GIVEN, STEPPED)
        )
        there = tuple(Owner(*one) for one in said["there"])
        return cls(asked, given, stepped, there, frozenset(said["opened"]), said["cut"], said["paths"], said["steps"])

    def beside(self, other: Calls) -> Calls:
        """Both together, of another rank or a later operation."""
        asked, given, stepped = (
            tuple(dict.fromkeys((*mine, *its))) for mine, its in zip(self[:3], other[:3], strict=True)
        )
        there = other.there or self.there
        opened, cut = self.opened | other.opened, self.cut or other.cut
        return Calls(asked, given, stepped, there, opened, cut, other.paths or self.paths, other.steps or self.steps)


OfRanks = Mapping[int, Calls]
"""Rank → its calls in an operation."""


def state_calls_by_op(records: Iterable[Record]) -> dict[int, dict[int, Calls]]:
    """Operation → rank → whose state was asked for or given."""
    found: dict[int, dict[int, Calls]] = {}
    for record in records:
        if record.role == STATE_CALLS:
            found.setdefault(record.op, {})[record.rank] = Calls.of(record.data)
    return found


def joined(calls: Iterable[OfRanks]) -> Calls:
    """The calls of all ranks in some operations together, in the order of the operations."""
    found = Calls()
    for ranks in calls:
        for rank in sorted(ranks):
            found = found.beside(ranks[rank])
    return found


def whose_state(steps: Calls, save: Calls, load: Calls, found: Sequence[Difference], *, at_load: bool) -> str:
    """What of the save and the load fits to what is wrong in a resumed run; empty where nothing is out of the way.

    Args:
        steps, save: of the run that saves. load: of the one that is resumed. found: what is wrong there. at_load:
            whether it is right after the load.
    """
    if steps.cut or save.cut or load.cut or not (save.asked or load.given):
        return ""
    told = list[str]()
    for kind in dict.fromkeys(kind for one in found if (kind := _kind_of(one))):
        asked, given, there = (_of(kind, calls) for calls in (save.asked, load.given, save.there))
        idle = _never_stepped(asked, steps.stepped) if kind == OPTIMIZER else ""
        if idle:
            told.append(idle)
        elif kind == OPTIMIZER and not any(one.key.role in BESIDE for one in found):
            continue  # its moments are restored, by hand perhaps
        elif at_load and (asked or given):
            told += _not_given(asked, given)
        elif at_load and there:
            others = [one for one in save.asked if one.path]
            alone = f", but {_all(others)} alone" if others else ""
            told.append(f"`save` does not ask {_all(there)} for a `state_dict`{alone}")
    return f"{'; '.join(told)}." if told else ""


def _not_given(asked: Sequence[Owner], given: Sequence[Owner]) -> list[str]:
    """A sentence about objects that a save asks for their state and to which the load gives none, with the objects that
    the load gives a state instead."""
    lacking = [one for one in asked if one.path and one.path not in {each.path for each in given}]
    instead = [one for one in given if one.path not in {each.path for each in asked}]
    if not lacking:
        return []
    others = f" gives one to {_all(instead)}, another object, and none" if instead else " gives none"
    return [f"`save` asks {_all(lacking)} for a `state_dict`, and `load`{others} to {_it(lacking)}"]


def _never_stepped(asked: Sequence[Owner], stepped: Sequence[Owner]) -> str:
    """That a save asks an optimizer which has not stepped, where another one has that it does not ask."""
    numbers = {one.number for one in stepped}
    idle = [one for one in asked if one.number not in numbers and one.number]
    steps = [one for one in stepped if one.number not in {each.number for each in asked} and one.number]
    if not idle or not steps or any(one.number in numbers for one in asked):
        return ""
    told = f"`save` asks {_all(idle)} for a `state_dict`, which has not stepped; what steps is {_all(steps)}"
    return f"{told}, another object, which it does not ask"


def no_longer_one(save: Calls, load: Calls) -> tuple[str, list[str]]:
    """A sentence about objects that hang at two places when a run saves, and that are two objects after the load, or
    about an optimizer whose parameters are then no longer those of modules; and the paths it speaks of. Empty where
    there are none.

    Args:
        save: of the run that saves, until then. load: of the one that is resumed, until its load.
    """
    by_number: dict[int, list[str]] = {}
    for path, number in save.paths.items():
        if number:
            by_number.setdefault(number, []).append(path)
    for paths in by_number.values():
        now = {path: load.paths[path] for path in sorted(paths, key=len) if path in load.paths}
        first, *others = now or [""]
        other = next((path for path in others if now[path] != now[first]), None)
        if other:
            told = f"`{first}` and `{other}` are one object when the run saves, and two after `load`"
            return told, [first, other]
    for path, (known, every) in save.steps.items():
        after = load.steps.get(path, (known, every))
        if known == every > 0 == after[0] and after[1]:
            told = f"after `load` the {after[1]} parameters of `{path}` are those of no module that is found any more"
            return f"{told}: the modules, or their parameters, are other objects than it was built for", [path]
    return "", []


def not_opened(load: Calls, folder: Path) -> str:
    """The files of a checkpoint that a load does not open; empty where it opens all, or where what it opens may be read
    by code that is not Python's."""
    prefix = f"{folder.name}/"
    opened = {path.removeprefix(prefix) for path in load.opened if path.startswith(prefix)}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in _NATIVE)
    left = [name for name in (str(path.relative_to(folder)) for path in files) if name not in opened]
    if not left or (not opened and not opens_none(load, folder)):
        return ""
    more = f" and {len(left) - MOST_FILES} more" if len(left) > MOST_FILES else ""
    if not opened:
        return f"`load` opens none of the checkpoint's files, which are {', '.join(left[:MOST_FILES])}{more}."
    return f"Of the checkpoint's files `load` does not open {', '.join(left[:MOST_FILES])}{more}."


def opens_none(load: Calls, folder: Path) -> bool:
    """Whether a load is known to open no file of a checkpoint: all are such as Python's own code opens."""
    opened = any(path.startswith(f"{folder.name}/") for path in load.opened)
    files = [path for path in folder.rglob("*") if path.is_file()]
    return bool(load.paths and files) and not (opened or load.cut) and all(path.suffix in _OF_TORCH for path in files)


_OF_TORCH = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".json", ".distcp")


def _kind_of(difference: Difference) -> str:
    """The kind of objects that hold what differs; empty of what hangs elsewhere."""
    role = difference.key.role
    if role in (SCHEDULER, SCALER):
        return role
    if role in BESIDE or role in (SETTING, "step"):
        return OPTIMIZER
    return MODULE if role in OF_MODULES else ""


def _of(kind: str, owners: Iterable[Owner]) -> list[Owner]:
    return [one for one in owners if one.kind == kind]


def _all(owners: Sequence[Owner]) -> str:
    texts = list(dict.fromkeys(one.told() for one in owners))
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def _it(owners: Sequence[Owner]) -> str:
    return "it" if len(owners) == 1 else "them"


def _a(name: str) -> str:
    return f"an {name}" if name[:1] in "AEIOU" else f"a {name}"
