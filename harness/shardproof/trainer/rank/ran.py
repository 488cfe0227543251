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
import ctypes
import json
import sys
import sysconfig
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.observe.record import Record, whole
from shardproof.trainer.arms import RAN
from shardproof.trainer.base import Cell
from shardproof.trainer.lines_apart import BEGINS, ENDS, TENSOR, TOUCHES
from shardproof.trainer.rank.statements import Statement, statements_of

MOST = 800
"""Statements of an operation on one rank."""

LONGEST_S = 1.0
"""How long it may take to look at the statements of an operation, which then are no longer looked at."""

MOST_PARTS, MOST_TEXT, MOST_BYTES = 100, 80, 1 << 16
"""Of a container with those in it, of a text, of a tensor: what is larger is told by a digest, or not at all."""

LAMBDA = "<lambda>"
"""What Python calls the code of a lambda, whose names are looked up in the statement that it stands in."""

MOST_PARAMETERS = 200
"""Of more, nobody looks which statement changes them."""

_DYNAMO = torch._C._dynamo.eval_frame

_FOREIGN = (
    str(Path(__file__).parents[2]), str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"), sysconfig.get_path("platlib"),
)  # fmt: skip

Place = tuple[str, int, str]
"""The file of a statement, its first line, and that line's text."""

WRITTEN, MADE, CHANGED, CLEARED = "written", "made", "changed", "cleared"
"""What becomes of a parameter; of a gradient that was not there, that was, and that goes."""

_Seen = tuple[object, object]
"""By what a parameter and its gradient are told from what they are when they change."""

_Tracer = Callable[[FrameType, str, Any], Any]


class _Unknown(Exception):  # noqa: N818 (what cannot be looked up is no error)
    """Raised by a look-up of what is not there, or that only a call could tell."""


class Ran:
    """What ran since the latest record.

    told: at the begin of each statement its place and what it reads; at its end its place and what it made, if
    anything; in between lies what ran inside it, and that it touched gradients or parameters, with a digest of all.
    A value is [path, text, owner], where an owner is a number for the frame or the object that has the last name of a
    path. begun: how many statements. cut: whether later ones were not looked at. touched: place of a statement → what
    became of parameters and their gradients while it ran, and of which, by identity. parameters: those to look at.
    """

    def __init__(self, parameters: Callable[[], Mapping[int, ReferenceType[torch.Tensor]]] = dict) -> None:
        self.parameters = parameters
        self.touched: dict[Place, dict[str, list[int]]] = {}
        self.stack = list[_InFrame]()
        self.last = dict[int, _Seen]()
        self.told = list[tuple[Place, int, list[tuple[str, str, int]]]]()
        self.begun, self.cut, self.spent_s = 0, False, 0.0
        self.frames, self.foreign = 0, set[str]()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, statements are recorded; not where somebody traces already."""
        if sys.gettrace() is not None:
            yield
            return
        self.stack, self.last = [], self._seen()
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

    def record(self, op: int, rank: int, names: Mapping[int, str]) -> Record:
        """What ran as a record that is not compared; what follows begins anew.

        Args:
            names: of parameters, by identity.
        """
        touched = [
            [place, {what: [names[key] for key in keys if key in names] for what, keys in done.items()}]
            for place, done in self.touched.items()
        ]
        self.touched = {}
        places = list(dict.fromkeys(place for place, _, _ in self.told))
        number = {place: at for at, place in enumerate(places)}
        told = {"places": places, "touched": touched, "cut": self.cut,
                "ran": [[number[place], kind, values] for place, kind, values in self.told]}  # fmt: skip
        self.told, self.begun, self.cut, self.spent_s = [], 0, False, 0.0
        data = zlib.compress(json.dumps(told).encode(), 1)
        return whole(op, rank, RAN, "", "bytes", (len(data),), data)

    def called(self, frame: FrameType, event: str, arg: Any) -> _Tracer | None:
        """What Python calls whenever a function is called."""
        code = frame.f_code
        if self.cut or code.co_filename in self.foreign or (code.co_name[:1] == "<" and code.co_name != LAMBDA):
            return None
        compiles = _DYNAMO.set_eval_frame(None)
        try:
            return self._enter(code.co_filename, code.co_name == LAMBDA)
        finally:
            _DYNAMO.set_eval_frame(compiles)

    def _enter(self, file: str, inside_a_statement: bool) -> _Tracer | None:
        statements = _own_statements(file)
        if not statements:
            self.foreign.add(file)
            return None
        self.frames -= 1
        inside = _InFrame(self, Path(file).name, statements, self.frames, makes=not inside_a_statement)
        self.stack.append(inside)
        return inside.traced

    def end(self) -> None:
        """Look at no further statement of this operation."""
        self.cut = True
        sys.settrace(None)

    def look(self) -> None:
        """Tell what became of parameters since the latest look, as done by the statement that ran."""
        now = self._seen()
        place = next((each.place for each in reversed(self.stack) if each.place), None)
        if place and now != self.last:
            done = self.touched.setdefault(place, {})
            told = [(what, _digest(repr([_known(seen[at]) for seen in now.values()]).encode()), 0)
                    for at, what in enumerate(("parameters", "gradients"))
                    if any(seen[at] not in (None, self.last.get(key, seen)[at]) for key, seen in now.items())
                    ]  # fmt: skip
            self.told += [(place, TOUCHES, told)] if told else []
            for key, (weights, gradient) in now.items():
                before = self.last.get(key, (weights, gradient))
                if weights != before[0]:
                    done.setdefault(WRITTEN, []).append(key)
                if gradient != before[1]:
                    what = CLEARED if gradient is None else MADE if before[1] is None else CHANGED
                    done.setdefault(what, []).append(key)
        self.last = now

    def _seen(self) -> dict[int, _Seen]:
        known = self.parameters()
        held = ((key, reference()) for key, reference in known.items() if len(known) <= MOST_PARAMETERS)
        return {key: (_mark(one), _of_gradient(one.grad)) for key, one in held if one is not None}


class _InFrame:
    """The statements of one call. owner: a number that stands for its local names. makes: whether what a statement
    makes is looked at, which is not made yet where a lambda in it runs."""

    def __init__(self, ran: Ran, file: str, statements: Mapping[int, Statement], owner: int, *, makes: bool) -> None:
        self.ran, self.file, self.statements, self.owner, self.makes = ran, file, statements, owner, makes
        self.now: Statement | None = None

    @property
    def place(self) -> Place | None:
        return (self.file, self.now.line, self.now.text) if self.now else None

    def traced(self, frame: FrameType, event: str, arg: Any) -> _Tracer | None:
        begins, compiles = time.perf_counter(), _DYNAMO.set_eval_frame(None)
        try:
            self.ran.look()
            self._note(frame, event)
        except Exception:  # an object of the trainer's that cannot be looked at: nothing of ours may end its run
            self.ran.end()
        finally:
            _DYNAMO.set_eval_frame(compiles)
        self.ran.spent_s += time.perf_counter() - begins
        if self.ran.spent_s > LONGEST_S or self.ran.begun >= MOST:
            self.ran.end()
        if event == "return" and self in self.ran.stack:
            del self.ran.stack[self.ran.stack.index(self) :]
        return self.traced

    def _note(self, frame: FrameType, event: str) -> None:
        if event not in ("line", "return"):
            return
        following = self.statements.get(frame.f_lineno) if event == "line" else None
        if following is not None and following is self.now and following.last > following.line:
            return  # another line of the same
        if self.now is not None and self.place and self.now.makes and self.makes:
            self.ran.told.append((self.place, ENDS, self._values(self.now.makes, frame)))
        self.now = following
        if self.now is not None and self.place:
            self.ran.begun += 1
            self.ran.told.append((self.place, BEGINS, self._values(self.now.reads, frame)))

    def _values(self, paths: tuple[tuple[str, Any], ...], frame: FrameType) -> list[tuple[str, str, int]]:
        found, names = list[tuple[str, str, int]](), frame.f_locals if paths else {}
        for text, path in paths:
            try:
                value, owner = _looked_up(path, names, frame.f_globals, self.owner)
                said = told(value)
            except Exception:  # of a kind that has no text
                continue
            if said:
                found.append((text, said, owner))
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


_never_compile(Ran.called, _InFrame.traced)


@cache
def _own_statements(name: str) -> dict[int, Statement]:
    """The statements of a file; none of one that is not the trainer's own, or that cannot be read."""
    if name[:1] == "<" or name.startswith(_FOREIGN) or any(_is_installed(name, folder) for folder in sys.path):
        return {}
    try:
        return statements_of(Path(name).read_text())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return {}


def _is_installed(name: str, folder: str) -> bool:
    """Whether a file lies in a folder of `sys.path` in which a package manager has put packages."""
    return bool(folder) and name.startswith(folder + "/") and any(Path(folder).glob("*.dist-info"))


def _looked_up(path: ast.expr, names: Mapping[str, Any], globally: Mapping[str, Any], frame: int) -> tuple[Any, int]:
    """A value and the number of its owner.

    Raises:
        _Unknown: it is not there, or only a call could tell it.
    """
    match path:
        case ast.Name(id=name):
            if name in names:
                return names[name], frame
            if name in globally:
                return globally[name], id(globally)
        case ast.Attribute(value=held, attr=name):
            owner, _ = _looked_up(held, names, globally, frame)
            return _attribute(owner, name), id(owner)
        case ast.Subscript(value=held, slice=index):
            owner, _ = _looked_up(held, names, globally, frame)
            key = index.value if isinstance(index, ast.Constant) else _looked_up(index, names, globally, frame)[0]
            if type(owner) in (dict, OrderedDict, list, tuple) and type(key) in (int, str):
                return owner[key], id(owner)
    raise _Unknown


def _attribute(owner: Any, name: str) -> Any:
    if isinstance(owner, Cell) and name in owner.values:
        return owner.values[name]
    if isinstance(owner, torch.Tensor):
        if name == "data":
            return owner
        if name == "grad" and owner.is_leaf:
            return owner.grad
        raise _Unknown
    own = object.__getattribute__(owner, "__dict__")
    if name in own:
        return own[name]
    if isinstance(owner, nn.Module):
        for kind in ("_parameters", "_buffers", "_modules"):
            if name in own.get(kind, ()):
                return own[kind][name]
    for base in type(owner).__mro__:
        if name in vars(base) and type(vars(base)[name]) in (bool, int, float, str, tuple):
            return vars(base)[name]
    raise _Unknown


def told(value: Any) -> str:
    """The text of a plain value, of a container of such, or a digest of a tensor; empty of anything else."""
    return _told(value, iter(range(MOST_PARTS)))


def _told(value: Any, left: Iterator[int]) -> str:
    """The same. left: counts the parts that may still be looked at."""
    if value is None or type(value) in (bool, int, float, complex):
        return repr(value)
    if type(value) in (str, bytes):
        return _shortened(repr(value))
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, torch.Generator):
        return f"generator {_digest(bytes(value.get_state().tolist()))}"
    if type(value) not in (list, tuple, dict, OrderedDict, set, frozenset, deque):
        return ""
    texts = list[str]()
    for part in value.items() if isinstance(value, dict) else value:
        text = _told(part, left) if next(left, None) is not None else ""
        if not text:
            return ""
        texts.append(text)
    return _shortened(f"{type(value).__name__} [{', '.join(texts)}]")


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}… {_digest(text.encode())}"


def _of_tensor(value: torch.Tensor) -> str:
    """The number of a tensor with one element, or dtype, shape and digest; empty of what does not lie in memory as it
    is."""
    value = value._local_tensor if isinstance(value, DTensor) else value
    data = _bytes_of(value)
    if not data:
        return ""
    if value.numel() == 1 and value.dtype in _FORMATS:
        return f"{TENSOR}{np.frombuffer(data, _FORMATS[value.dtype])[0].item()!r}"
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} {_digest(data)}"


def _bytes_of(value: torch.Tensor) -> bytes:
    """The bytes of a tensor, read from memory without asking torch for anything that a hook or a mode could see; empty
    of what is no plain tensor, or too large."""
    if type(value) not in (torch.Tensor, nn.Parameter) or torch.compiler.is_compiling():
        return b""
    size, itemsize = value.numel(), value.element_size()
    within = value.untyped_storage().nbytes() >= (value.storage_offset() + size) * itemsize
    if value.device.type != "cpu" or not value.is_contiguous() or not 0 < size * itemsize <= MOST_BYTES or not within:
        return b""
    if torch._C._functorch.is_functorch_wrapped_tensor(value) or not value.data_ptr():
        return b""
    return ctypes.string_at(value.data_ptr(), size * itemsize)


def _of_gradient(value: torch.Tensor | None) -> object:
    """The same of a gradient, of which none and zeros are one."""
    mark = None if value is None else _mark(value)
    return None if mark == ZEROS else mark


ZEROS = "zeros"


def _known(mark: object) -> object:
    """What a mark says of the values alone: nothing, where they cannot be read."""
    return None if isinstance(mark, tuple) else mark


def _mark(value: torch.Tensor) -> object:
    """What changes when a tensor does: its bytes, as a checksum; where nobody can read them, how often torch has
    written it."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    data = _bytes_of(local)
    if not data:
        return ("version", local._version)
    return zlib.crc32(data) if data.strip(b"\0") else ZEROS


_FORMATS: dict[torch.dtype, type[np.generic]] = {
    torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16, torch.int64: np.int64,
    torch.int32: np.int32, torch.bool: np.bool_,
}  # fmt: skip


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=6).hexdigest()
