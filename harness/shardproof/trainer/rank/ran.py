"""Which statements of a trainer's own files run in an operation, in order, and what each reads and makes: numbers,
texts and what holds them, and digests of tensors.

Nothing is called that could change anything: names are looked up in frames and in `__dict__`, and bytes of tensors are
read from memory. A file of the trainer's own is one that is neither Python's, torch's, ours, nor part of an installed
package.

*Does not see* other threads than the main one; what `torch.compile` made of a function; anything where a debugger or a
measurement of coverage traces the process already; statements behind the first `MOST` of an operation, or behind those
that took `LONGEST_S` to look at.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from shardproof.observe.record import Record, whole
from shardproof.trainer.arms import RAN
from shardproof.trainer.lines.statements import (
    BEGINS,
    BUFFERS,
    CALLS,
    CHANGED,
    CLEARED,
    DECIDES,
    ENDS,
    GOES_ON,
    HOLDS,
    LASTING,
    MADE,
    MOST_OUTLINES,
    NO_PLACE,
    RESULT,
    RETURNS,
    TOUCHES,
    WRITTEN,
)  # fmt: skip
from shardproof.trainer.rank.collectives import begun_collectives
from shardproof.trainer.rank.dropped import Dropped
from shardproof.trainer.rank.flows import Flows
from shardproof.trainer.rank.groups import Groups
from shardproof.trainer.rank.lasting import Lasting
from shardproof.trainer.rank.lengths import size_of
from shardproof.trainer.rank.looked_up import MOST_BEHIND, behind, called, digest, looked_up, told
from shardproof.trainer.rank.marks import known, mark_of, of_gradient
from shardproof.trainer.rank.outlines import outline_of
from shardproof.trainer.rank.put_back import PutBack
from shardproof.trainer.rank.raised import Raised
from shardproof.trainer.rank.state_calls import NAMES, StateCalls, audited
from shardproof.trainer.rank.statements import Statement, own_settings, own_statements
from shardproof.trainer.rank.unread import Made
from shardproof.trainer.step.measured import Size, factor_between

MOST = 2000
"""Statements of an operation on one rank."""

LONGEST_S = 1.0
"""How long it may take to look at the statements of an operation, which then are no longer looked at."""

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR

LAMBDA = "<lambda>"
"""What Python calls the code of a lambda, whose names are looked up in the statement that it stands in."""

NEAR_FACTOR = 1e-4
"""How far two ways to measure by which number a gradient was multiplied may be apart."""

LEAST_ELEMENTS = 4
"""Of a gradient; with fewer, a sum looks like a multiple."""

MOST_FACTORS = 2
"""Of numbers by which a statement has multiplied gradients; with more, it has done something else to them."""

MOST_PARAMETERS = 200
"""Of more, nobody looks which statement changes them."""

MOST_RESULTS = 4
"""Tensors in a tuple that a call comes to."""

_DYNAMO = torch._C._dynamo.eval_frame

Place = tuple[str, int, str]
"""The file of a statement, its first line, and that line's text."""

_Seen = tuple[object, object]
"""By what a parameter and its gradient are told from what they are when they change."""

_Tracer = Callable[[FrameType, str, Any], Any]


class Ran:
    """What ran since the latest record.

    told: at the begin of each statement its place and what it reads; at its end its place and what it made, if
    anything; in between lies what ran inside it, and that it touched gradients or parameters, with a digest of all.
    A value is [path, text, owner], where an owner is a number for the frame or the object that has the last name of a
    path. begun: how many statements. cut: whether later ones were not looked at. touched: place of a statement → what
    became of parameters and their gradients while it ran, and of which, by identity. scaled: place of a statement → by
    which numbers it has multiplied gradients. collectives: place of a statement → which began while it ran, each time:
    their groups, and which of a group's they are. parameters: those to look at. state_calls: is told of calls that ask
    for a state, or give one. outlines: text of a tensor → its numbers in outline. buffers: those to look at, by name.
    rebuffered: place of a statement → the buffers that it has written, each time. files: of which something ran →
    whether a record has their settings. useless: place of a statement → the local name that it makes and who reads it,
    the lines of
    a loop's body, and what it calls for nothing.
    """

    def __init__(
        self,
        parameters: Callable[[], Mapping[int, Callable[[], torch.Tensor | None]]] = dict,
        state_calls: StateCalls | None = None,
        buffers: Callable[[], Mapping[str, Callable[[], torch.Tensor | None]]] = dict,
    ) -> None:
        self.parameters, self.state_calls = parameters, state_calls
        self.buffers = buffers
        self._of_buffers = dict[str, object]()
        self.rebuffered: dict[Place, list[str]] = {}
        self.groups, self.put_back, self.lasting, self.raised = Groups(self._touch), PutBack(), Lasting(), Raised()
        self.touched: dict[Place, dict[str, list[int]]] = {}
        self.collectives: dict[Place, list[set[tuple[str, int]]]] = {}
        self._begun = dict[str, int]()
        self.scaled: dict[Place, set[float]] = {}
        self._sizes = dict[int, Size]()
        self.stack = list[_InFrame]()
        self.last = dict[int, _Seen]()
        self.told = list[tuple[Place, int, list[tuple[str, str, int]]]]()
        self.begun, self.cut, self.spent_s = 0, False, 0.0
        self.frames, self.foreign, self.files = 0, set[str](), dict[str, bool]()
        self.outlines = dict[str, str]()
        self.flows = Flows(self.outline)
        self.compounds = dict[Place, tuple[int, bool]]()
        self.useless = dict[Place, tuple[Made | None, tuple[int, int], Dropped | None]]()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, statements are recorded; not where somebody traces already."""
        if sys.gettrace() is not None:
            yield
            return
        self.stack, self.last, self._begun = [], self._seen(), begun_collectives()
        self._of_buffers = self._seen_buffers()
        self.groups.begin()
        self.lasting.begin()
        if self.last and not self.told:
            self.told.append((NO_PLACE, TOUCHES, [("parameters", self._digest_of(0), 0)]))
        sys.settrace(self.called)
        try:
            yield
        finally:
            sys.settrace(None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is recorded: what a trainer is asked for is no part of what it does."""
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            yield
        finally:
            sys.settrace(tracer)

    def record(
        self, op: int, rank: int, names: Mapping[int, str], reductions: Collection[tuple[str, int]] = ()
    ) -> Record:
        """What ran as a record that is not compared; what follows begins anew.

        Args:
            names: of parameters, by identity. reductions: those collectives that reduce, as in `collectives`.
        """
        done_by = {
            place: {what: [names[key] for key in keys if key in names] for what, keys in done.items()}
            for place, done in self.touched.items()
        }
        for place, own in self.rebuffered.items():
            done_by.setdefault(place, {})[BUFFERS] = own
        for place, own in self.lasting.taken().items():
            done_by.setdefault(place, {})[LASTING] = own
        times = {place: [len(own.intersection(reductions)) for own in each] for place, each in self.collectives.items()}
        reduced = [[place, often] for place, often in times.items() if any(often)]
        scaled = [[place, sorted(factors)] for place, factors in self.scaled.items() if len(factors) <= MOST_FACTORS]
        back = self.put_back.taken(op, {key: weights for key, (weights, _) in self.last.items()}, names)
        self.touched, self.collectives, self.scaled, self.rebuffered = {}, {}, {}, {}
        places = list(dict.fromkeys(place for place, _, _ in self.told))
        number = {place: at for at, place in enumerate(places)}
        touched = [[place, done_by[place]] for place in sorted(done_by, key=lambda one: number.get(one, 0))]
        ran = [[number[place], kind, values] for place, kind, values in self.told]
        compounds = [[place, *each] for place, each in self.compounds.items()]
        useless = [[place, *each] for place, each in self.useless.items()]
        new = [file for file, is_told in sorted(self.files.items()) if not is_told]
        settings = {Path(file).name: of_file for file in new if (of_file := own_settings(file))}
        told = {"places": places, "compounds": compounds, "useless": useless,
                "settings": {file: [[*each.given.items()], sorted(each.read), each.whole]
                             for file, each in settings.items()},
                "touched": touched, "reduced": reduced, "scaled": scaled,
                "back": back, "caught": self.raised.taken(), "cut": self.cut, "ran": ran, "flowed": self.flows.taken(),
                "outlines": self.outlines, **self.groups.taken()}  # fmt: skip
        self.told, self.begun, self.cut, self.spent_s, self.outlines = [], 0, False, 0.0, {}
        self.compounds, self.useless, self.files = {}, {}, dict.fromkeys(self.files, True)
        data = zlib.compress(json.dumps(told).encode(), 1)
        return whole(op, rank, RAN, "", "bytes", (len(data),), data)

    def called(self, frame: FrameType, event: str, arg: Any) -> _Tracer | None:
        """What Python calls whenever a function is called."""
        code = frame.f_code
        states = self.state_calls is not None and code.co_name in NAMES
        foreign = code.co_filename in self.foreign or (code.co_name[:1] == "<" and code.co_name != LAMBDA)
        if not states and (self.cut or foreign):
            return None
        compiles = _DYNAMO.set_eval_frame(None)
        try:
            if self.state_calls is not None and states:
                self.state_calls.called(frame)
            return None if self.cut or foreign else self._enter(code)
        finally:
            _DYNAMO.set_eval_frame(compiles)

    def _enter(self, code: CodeType) -> _Tracer | None:
        file = code.co_filename
        statements = own_statements(file)
        if not statements:
            self.foreign.add(file)
            return None
        self.files.setdefault(file, False)
        self.frames -= 1
        inside = _InFrame(self, Path(file).name, statements, self.frames)
        inside.makes = code.co_name != LAMBDA
        if code.co_flags & _GENERATORS or (self.stack and self.stack[-1].goes_on):
            inside.goes_on = GOES_ON
        caller = next((each.place for each in reversed(self.stack) if each.place), None)
        self.told.append((caller or NO_PLACE, CALLS, []))
        self.stack.append(inside)
        return inside.traced

    def outline(self, text: str, value: object) -> None:
        """Keep the outline of a tensor, by the text that tells it."""
        if type(value) in (torch.Tensor, nn.Parameter, np.ndarray) and text not in self.outlines:
            assert isinstance(value, (torch.Tensor, np.ndarray))
            if len(self.outlines) < MOST_OUTLINES and (outline := outline_of(value)):
                self.outlines[text] = outline

    def end(self) -> None:
        """Look at no further statement of this operation."""
        self.cut = True
        if self.state_calls:
            self.state_calls.cut()
        sys.settrace(None)

    def _touch(self, place: Place, what: str, text: str) -> None:
        """Tell what a statement has touched that stands under a name of its own."""
        self.told.append((place, TOUCHES, [(what, text, 0)]))

    def look(self) -> None:
        """Tell what became of parameters since the latest look, as done by the statement that ran."""
        before, self.last = self.last, self._seen()
        now = self.last
        place = next((each.place for each in reversed(self.stack) if each.place), None)
        begun = begun_collectives()
        if place in self.collectives and begun != self._begun:
            new = ((group, at) for group, last in begun.items() for at in range(self._begun.get(group, 0), last))
            self.collectives[place][-1] |= {(group, at + 1) for group, at in new}
        self._begun = begun
        if place:
            self.groups.look(place)
            self.lasting.look(place)
            self._look_at_buffers(place)
        if place and now != before:
            done = self.touched.setdefault(place, {})
            told = [(what, self._digest_of(at), 0) for at, what in enumerate(("parameters", "gradients"))
                    if any(seen[at] not in (None, before.get(key, seen)[at]) for key, seen in now.items())]  # fmt: skip
            self.told += [(place, TOUCHES, told)] if told else []
            for key, (weights, gradient) in now.items():
                was = before.get(key, (weights, gradient))
                if weights != was[0]:
                    done.setdefault(WRITTEN, []).append(key)
                    self.put_back.look(key, weights, place)
                if gradient != was[1]:
                    self._size(key, place, new=was[1] is None)
                    what = CLEARED if gradient is None else MADE if was[1] is None else CHANGED
                    done.setdefault(what, []).append(key)

    def _look_at_buffers(self, place: Place) -> None:
        """Tell that a statement has written buffers."""
        before, self._of_buffers = self._of_buffers, self._seen_buffers()
        written = [name for name, mark in self._of_buffers.items() if mark != before.get(name, mark)]
        if written:
            self.rebuffered.setdefault(place, []).extend(written)
            self._touch(place, BUFFERS, digest(repr([*self._of_buffers.values()]).encode()))

    def _size(self, key: int, place: Place, *, new: bool) -> None:
        """Keep how long a gradient is now, and by which number a statement has multiplied it, if it has."""
        parameter = self.parameters()[key]()
        before, now = self._sizes.pop(key, None), size_of(parameter.grad) if parameter is not None else None
        if now is None:
            return
        self._sizes[key] = now
        factor = factor_between(before, now, NEAR_FACTOR) if before and not new else None
        few = parameter is None or parameter.numel() < LEAST_ELEMENTS
        if factor is not None and abs(factor - 1) > NEAR_FACTOR and not few:
            self.scaled.setdefault(place, set()).add(float(f"{factor:.5g}"))

    def _digest_of(self, at: int) -> str:
        """A digest of all parameters that were seen last, or of all of their gradients. at: 0 or 1."""
        return digest(repr([known(seen[at]) for seen in self.last.values()]).encode())

    def _seen_buffers(self) -> dict[str, object]:
        every = self.buffers()
        held = ((name, there()) for name, there in every.items() if len(every) <= MOST_PARAMETERS)
        return {name: known(mark_of(one)) for name, one in held if one is not None}

    def _seen(self) -> dict[int, _Seen]:
        every = self.parameters()
        held = ((key, reference()) for key, reference in every.items() if len(every) <= MOST_PARAMETERS)
        return {key: (mark_of(one), of_gradient(one.grad)) for key, one in held if one is not None}


class _InFrame:
    """The statements of one call. owner: a number that stands for its local names. makes: whether what a statement
    makes is looked at, which is not made yet where a lambda in it runs. goes_on: `GOES_ON` of a generator. turns: line
    of a loop → the identities of what it assigned to latest. raised: whether the statement has met an exception."""

    makes, goes_on, raised = True, 0, False

    def __init__(self, ran: Ran, file: str, statements: Mapping[int, Statement], owner: int) -> None:
        self.ran, self.file, self.statements, self.owner = ran, file, statements, owner
        self.now: Statement | None = None
        self.turns = dict[int, list[int]]()
        self.read = list[tuple[str, str, int]]()

    @property
    def place(self) -> Place | None:
        inside = "" if self.makes else "a lambda in "
        return (self.file, self.now.line, f"{inside}{self.now.text}") if self.now else None

    def traced(self, frame: FrameType, event: str, arg: Any) -> _Tracer | None:
        begins, compiles = time.perf_counter(), _DYNAMO.set_eval_frame(None)
        try:
            self.ran.look()
            self._note(frame, event, arg)
        except Exception:  # an object of the trainer's that cannot be looked at: nothing of ours may end its run
            self.ran.end()
        finally:
            _DYNAMO.set_eval_frame(compiles)
        self.ran.spent_s += time.perf_counter() - begins
        if self.ran.spent_s > LONGEST_S or self.ran.begun >= MOST:
            self.ran.end()
        if event == "return" and self in self.ran.stack:
            del self.ran.stack[self.ran.stack.index(self) :]
            self.ran.told.append((NO_PLACE, RETURNS, []))
        return self.traced

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("line", "return"):
            if event == "exception":
                self.raised = True
                self.ran.raised.met(arg, self.place)
            return
        following = self.statements.get(frame.f_lineno) if event == "line" else None
        if following is not None and following is self.now and following.last > following.line:
            return  # another line of the same
        if self.now is not None and self.place and self.now.body[0] and not self.raised:
            holds = event == "line" and self.now.body[0] <= frame.f_lineno <= self.now.body[1]
            self.ran.told.append((self.place, DECIDES + self.goes_on, [(HOLDS, repr(holds), self.owner)]))
        self.raised = False
        returns = event == "return" and self.makes and self.now is not None and self.now.text.startswith("return ")
        if returns and self.place:
            if results := self._results(arg):
                self.ran.told.append((self.place, ENDS + self.goes_on, results))
        elif self.now is not None and self.now.text.startswith("for ") and self._has_ended(self.now, frame):
            pass
        elif self.now is not None and self.place and self.makes and (self.now.makes or self.now.may_change):
            changed = [one for one in self._values(self.now.may_change, frame) if one not in self.read]
            made = self._values(self.now.makes, frame, follow=True)
            if self.now.makes or changed:
                self.ran.told.append((self.place, ENDS + self.goes_on, [*made, *changed]))
        self.now = following
        if self.now is not None and self.place:
            self.ran.begun += 1
            self.ran.raised.goes_on(self.place)
            self.ran.collectives.setdefault(self.place, []).append(set())
            if self.now.end:
                self.ran.compounds[self.place] = self.now.end, self.now.jumps
            if self.now.made or self.now.loop[0] or self.now.dropped:
                self.ran.useless[self.place] = self.now.made, self.now.loop, self.now.dropped
            self.read = self._read(self.now.reads, frame)
            self.ran.told.append((self.place, BEGINS + self.goes_on, self.read))

    def _has_ended(self, head: Statement, frame: FrameType) -> bool:
        """Whether a loop is left, after which what it assigned to is the last once more."""
        held = list[int]()
        for _, path in head.makes:
            with suppress(Exception):  # what is not there, or only a call could tell
                held.append(id(looked_up(path, frame.f_locals, frame.f_globals, self.owner)[0]))
        ended = bool(held) and self.turns.get(head.line) == held
        self.turns[head.line] = [] if ended else held
        return ended

    def _results(self, returned: Any) -> list[tuple[str, str, int]]:
        """The tensors that a call comes to, each as [path, text, owner]."""
        several = type(returned) is tuple and len(returned) <= MOST_RESULTS
        found = list[tuple[str, str, int]]()
        for number, value in enumerate(returned if several else (returned,)):
            said = told(value) if isinstance(value, torch.Tensor) else ""
            if said:
                self.ran.outline(said, value)
                path = f"{RESULT}{f' {number + 1}' * several}"
                if self.place:
                    self.ran.flows.follow(value, self.place, path)
                found.append((path, said, self.owner))
        return found

    def _values(
        self, paths: tuple[tuple[str, ast.expr], ...], frame: FrameType, *, follow: bool = False
    ) -> list[tuple[str, str, int]]:
        """Return the values that have a text, each as [path, text, owner].

        Args:
            follow: whether the gradients that arrive at these values are looked at.
        """
        found, names = list[tuple[str, str, int]](), frame.f_locals if paths else {}
        for text, path in paths:
            with suppress(Exception):  # of a kind that has no text
                value, owner = looked_up(path, names, frame.f_globals, self.owner)
                if isinstance(value, torch.optim.Optimizer):
                    self.ran.groups.meet(value, self.place)
                if said := told(value):
                    self.ran.outline(said, value)
                    found.append((called(text, path, names, frame.f_globals, self.owner), said, owner))
                    if follow and self.place:
                        self.ran.flows.follow(value, self.place, found[-1][0])
        return found

    def _read(self, paths: tuple[tuple[str, ast.expr], ...], frame: FrameType) -> list[tuple[str, str, int]]:
        """What a statement reads: of a path that only a call could tell to its end, what its begin has; of an object,
        what it has behind it."""
        found = self._values(paths, frame)
        seen = {text for text, _, _ in found}
        for text, path in paths:
            begin: ast.expr = path
            while isinstance(begin, ast.Subscript):
                begin = begin.value
            while text not in seen and isinstance(begin, (ast.Name, ast.Attribute)):
                with suppress(Exception):
                    value, owner = looked_up(begin, frame.f_locals, frame.f_globals, self.owner)
                    name, said = ast.unparse(begin), told(value)
                    found += [(name, said, owner)] if said else islice(behind(value, name), MOST_BEHIND)
                    break
                if not isinstance(begin, ast.Attribute):
                    break
                begin = begin.value
        return found


def _never_compile(*functions: Callable[..., Any]) -> None:
    """Have `torch.compile` leave functions alone that are called in the midst of what it compiles."""
    dynamo: Any = _DYNAMO
    for function in functions:
        if hasattr(dynamo, "set_code_exec_strategy"):
            skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT)
            dynamo.set_code_exec_strategy(function.__code__, skip)
        elif hasattr(dynamo, "skip_code"):
            dynamo.skip_code(function.__code__)


_never_compile(Ran.called, _InFrame.traced, audited)
