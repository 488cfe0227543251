"""What a trainer's crash says: the trainer's own line, the library's line that raised, the message, and its cause.

All of it is read from the message and the traceback that a rank sent, since the exception itself ended with its rank.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardproof.result import Failure
from shardproof.trainer.described import Described
from shardproof.wording.error_place import Place, frames_of

LONGEST = 300
"""Characters of a message that a sentence repeats."""

_OURS = f"{Path(__file__).parents[1]}/"
"""shardproof's own folder, whose emulated device stands between a library and torch."""

_STANDARD = re.compile(r"/lib/python\d[.\d]*/(?!site-packages/)|/site-packages/(typing_extensions|decorator)\.py$|^<")
"""Files of Python's own library, and of packages whose decorators stand between a caller and what it calls."""

_WRAPPER = re.compile(r"^_?(log_)?wrap|^inner$|^decorate_|^_call_impl$|^__call__$|^<")
"""Functions that stand between a caller and what it calls."""

MOST_CALLERS = 3
"""So many functions of a library are named, the one that raised first."""

_CAUSED = re.compile(r"^\s*The above exception was the direct cause of the following exception:\s*$", re.MULTILINE)
_CHAINED = re.compile(r"^\s*During handling of the above exception, another exception occurred:\s*$", re.MULTILINE)
_RAISED = re.compile(r"^(?:[\w.]+: .*|[A-Za-z_][\w.]*)$")
"""The line that ends a traceback: `RuntimeError: no such thing`, or the name alone."""

_OF_CPP = ("Exception raised from", "frame #", "C++ CapturedTraceback")
"""How lines begin in which torch tells where in C++ it raised."""


def raised_by(error: Failure, trainer: Described) -> str:
    """The innermost places of a library below the trainer's own in a traceback: torch calls what really raised, through
    a hook or an autograd function, so that its own frames are the last resort. What raises is often a wrapper, such as
    that of a collective, and the mistake is with who called it."""
    frames = list(frames_of(error))
    own = [number for number, (path, _) in enumerate(frames) if path == str(trainer.file)]
    below = _telling(frames[own[-1] + 1 :] if own else [])
    chosen = list[tuple[str, Place]]()
    for path, place in reversed([frame for frame in below if "/torch/" not in frame[0]] or below[-1:]):
        if not _WRAPPER.search(place.function) and place.function not in {each.function for _, each in chosen}:
            chosen.append((path, place))
    told = [f"{place.function} ({_line(path, place)})" for path, place in chosen[:MOST_CALLERS]]
    return f", raised by {', called by '.join(told)}" if told else ""


def method_of(error: Failure, trainer: Described) -> str:
    """The innermost place of the trainer's own file in a traceback, such as `load, my_trainer.py line 31`."""
    found = ""
    for line in error.traceback.splitlines():
        text = line.strip()
        place = re.fullmatch(rf'File "{re.escape(str(trainer.file))}", line (\d+),? in (\S+)', text)
        if place and not (found and error.type == "deadline"):  # a stack has the innermost first
            found = f"{place[2]} ({trainer.file.name}, line {place[1]})"
    return found


def message_of(error: Failure) -> str:
    """The message in one line of at most `LONGEST` characters, without what torch says of its C++."""
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    if error.type == "died":  # behind it, what another rank raised, and the rank's last line
        return "; ".join(lines[:3])
    told = next((n for n, line in enumerate(lines) if n and line.startswith(_OF_CPP)), len(lines))
    return textwrap.shorten(" ".join(lines[:told]), LONGEST, placeholder=" …")


def caused_by(error: Failure, trainer: Described) -> str:
    """The exception that the one in hand was raised from (`raise … from e`), with its place; empty where there is none,
    or where the message has it."""
    *_, cause, _ = ["", *_CAUSED.split(error.traceback)] if _CAUSED.search(error.traceback) else ["", ""]
    cause = _CHAINED.split(cause)[-1]
    raised = [line for line in cause.splitlines() if _RAISED.match(line) and not line.startswith(_OF_CPP)]
    if not raised:
        return ""
    name, _, message = raised[0].partition(": ")
    if message and message in error.message:
        return ""
    told = textwrap.shorten(": ".join(filter(None, (name.rpartition(".")[2], message))), LONGEST, placeholder=" …")
    first = replace(error, traceback=cause)
    places = _telling(list(frames_of(first)))[-1:]
    where = "".join(f" in {place.function} ({_line(path, place)})" for path, place in places)
    own = method_of(first, trainer)
    return f"; caused by {told}{where}{f', called in {own}' if own and where and own not in where else ''}"


def _telling(frames: Sequence[tuple[str, Place]]) -> list[tuple[str, Place]]:
    """The frames that are not of Python's own library, nor ours."""
    return [frame for frame in frames if not (_STANDARD.search(frame[0]) or frame[0].startswith(_OURS))]


def _line(path: str, place: Place) -> str:
    """A place by the last two parts of its path, such as `core/buffer.py, line 3`."""
    return f"{'/'.join(path.split('/')[-2:])}, line {place.line}"
