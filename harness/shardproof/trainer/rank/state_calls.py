"""Which objects an operation asks for their `state_dict`, to which it gives one, which optimizers step, and which files
of a checkpoint it opens to read.

Calls are seen by what traces lines (`shardproof.trainer.rank.ran`), and files by an audit hook of Python's. Nothing of
the trainer's is called or replaced.

*Does not see* what runs outside of Python, such as the reader of safetensors, and calls behind the place where `ran`
stopped to look.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path, PurePath
from types import FrameType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from shardproof.observe.record import Record, whole
from shardproof.trainer.arms import STATE_CALLS
from shardproof.trainer.rank.kinds import MODULE, OPTIMIZER, SCALER, SCHEDULER, kind_of
from shardproof.trainer.rank.walk import DEEPEST_AGAIN, Walk
from shardproof.trainer.values.state_calls import ASKED, GIVEN, STEPPED

NAMES = {"state_dict": ASKED, "load_state_dict": GIVEN, "step": STEPPED}
"""Names of functions, and what a call of one does with its `self`."""

_DEEPEST = 8
"""How far up one looks for the module whose `state_dict` asks the modules in it for theirs."""


class StateCalls:
    """What was called and opened since the latest record. directory: in which the checkpoints lie."""

    def __init__(self, directory: Path) -> None:
        self._directory = f"{os.path.realpath(directory)}/"
        self._called = dict[tuple[str, int], object]()
        self._opened = dict[str, None]()
        self._cut = False
        self._numbers = dict[int, tuple[ReferenceType[object], int]]()
        self._next = count(1)

    def called(self, frame: FrameType) -> None:
        """Note a call of one of `NAMES`, where it is a method of something that has a state."""
        owner = frame.f_locals.get("self")
        what = NAMES[frame.f_code.co_name]
        steps = what == STEPPED
        if owner is None or (steps and not issubclass(type(owner), torch.optim.Optimizer)) or _is_inner(frame, owner):
            return
        self._called.setdefault((what, id(owner)), owner)

    def _number(self, owner: object) -> int:
        """By which an object is known in later records; 0 where nobody can refer to it without holding it."""
        known, number = self._numbers.get(id(owner), (None, 0))
        if known is None or known() is not owner:
            try:
                known, number = ref(owner), next(self._next)
            except TypeError:
                return 0
            self._numbers[id(owner)] = known, number
        return number

    def cut(self) -> None:
        """Note that later calls are not seen."""
        self._cut = True

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, files that are opened to read are noted."""
        if not _hooked:
            _hooked.append(True)
            sys.addaudithook(audited)
        _reading.append(self)
        try:
            yield
        finally:
            _reading.remove(self)

    def opens(self, path: str) -> None:
        """Note a file, if it is one of a checkpoint."""
        whole_path = os.path.realpath(path)
        if whole_path.startswith(self._directory):
            self._opened[whole_path.removeprefix(self._directory)] = None

    def record(self, op: int, rank: int, way: Walk, trainer: object = None, parameters: Collection[int] = ()) -> Record:
        """What there was as a record that is not compared; what follows begins anew.

        Args:
            way: what hangs on the trainer. parameters: those of its modules, by identity.
        """
        hangs = {id(each.value): each for each in way.met}
        calls: dict[str, list[tuple[str, str, str, int]]] = {}
        for (what, key), owner in self._called.items():
            path = hangs[key].path if key in hangs else ""
            if owner is not trainer:
                one = path, type(owner).__name__, kind_of(owner, path), self._number(owner)
                calls.setdefault(what, []).append(one)
        told = {
            "calls": calls,
            "there": [(each.path, type(each.value).__name__, each.kind, self._number(each.value))
                      for each in hangs.values() if each.kind in _KINDS],
            "paths": {path: self._number(each.value) for each in hangs.values()
                      if each.kind in (MODULE, *_KINDS) and each.depth <= DEEPEST_AGAIN
                      for path in (each.path, *way.again.get(id(each.value), ())[:MOST_AGAIN])},
            "steps": {each.path: _of_modules(each.value, parameters) for each in hangs.values()
                      if isinstance(each.value, torch.optim.Optimizer)},
            "opened": list(self._opened), "cut": self._cut,
        }  # fmt: skip
        self._called, self._opened, self._cut = {}, {}, False
        data = json.dumps(told).encode()
        return whole(op, rank, STATE_CALLS, "", "utf8", (len(data),), data)


MOST_AGAIN = 4
"""Further paths of one object that are noted."""


def _of_modules(optimizer: torch.optim.Optimizer, parameters: Collection[int]) -> tuple[int, int]:
    """How many of an optimizer's parameters are those of modules, and how many it has."""
    own = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    return sum(key in parameters for key in own), len(own)


_KINDS = (OPTIMIZER, SCHEDULER, SCALER)
"""Kinds of which all that hang on a trainer are told, called or not."""

_hooked: list[bool] = []
"""Has an entry once the hook is there, which nothing can take away again."""

_reading: list[StateCalls] = []


def audited(event: str, args: tuple[Any, ...]) -> None:
    """What Python calls at each event that it tells of; of the opening of a file, its path, mode and flags."""
    if event != "open" or not _reading:
        return
    path, mode, flags = args
    reads = mode.startswith("r") if isinstance(mode, str) else not flags & (os.O_WRONLY | os.O_RDWR)
    if reads and isinstance(path, (str, PurePath)):
        for each in _reading:
            each.opens(str(path))


def _is_inner(frame: FrameType, owner: object) -> bool:
    """Whether a module is asked by one that it is a part of."""
    above = frame.f_back
    for _ in range(_DEEPEST if issubclass(type(owner), nn.Module) else 0):
        if above is None:
            return False
        if above.f_code.co_name == frame.f_code.co_name:
            asks = above.f_locals.get("self")
            return asks is not owner and issubclass(type(asks), nn.Module)
        above = above.f_back
    return False
