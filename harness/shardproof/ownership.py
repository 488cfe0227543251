"""Decides whose fault an exception is: the library's, which makes the verdict `crash`, or shardproof's own, which makes
it `unknown`.

An error belongs to whoever owns the innermost frame of its traceback. Three kinds of code are looked at:

* Files of this package, and of the package of a plugin's system, are ours. A `KeyError` of our own rank code says
  nothing about the library, and no more does one of a fault that does not fit the library. An error that a fault raises
  on purpose carries the mark of `planted`: it is nobody's mistake.
* The emulation (`harness/shardproof/emulation`) stands in for a device and for a library's kernels. It refuses some
  calls on purpose, as the real device does, and marks the error with `refused`. It passes most calls on to torch
  through `hand_on`. In both cases the error is its caller's, so that the emulation's frames are passed over. For
  example, `tensor.add_(other)` of tensors on two devices, called by Megatron, raises in
  `harness/shardproof/emulation/functions.py` and is Megatron's. An `AttributeError` in the emulation's own arithmetic
  carries no mark and is ours. Where the emulation lacks a part of the device, the library's call ends in `torch.cuda`,
  which looks for a real one: that is ours too (`asked_of_device`).
* Everything else is the library's, or that of something it uses. So are the trainers that ship with shardproof, as a
  user's trainer is: what one raises, such as `Unsupported`, is its answer. In a source tree they lie outside of the
  package, and in an installed one below it.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from traceback import FrameSummary, extract_tb, format_exception_only, format_list
from types import ModuleType
from typing import Any, TypeVar

from shardproof.errors import CANNOT_IMPORT
from shardproof.tables import SHIPPED

E = TypeVar("E", bound=BaseException)
R = TypeVar("R")

_MARK, _PLANTED = "shardproof_refusal", "shardproof_planted"
_HERE = Path(__file__).parent
_CALLED = re.compile(r"([A-Za-z_][\w.]*)\(\) (got|missing|takes)\b")
_OURS = re.compile(rf'File "{re.escape(str(_HERE.parent))}/([^"]+)", line (\d+), in (\S+)')
_SITE, _TORCH_CUDA = "site-packages/", "/torch/cuda/"

LIBRARY = r"site-packages/(?!shardproof/)"
"""What stands before the name of a library's file in the path of a frame. An installed shardproof lies there, too, and
its emulated device has frames between those of a library and of torch."""

_MOST_CHARACTERS = 300
_EMULATION = str(_HERE / "emulation") + "/"
_DEVICE = tuple(f"{_EMULATION}{name}.py" for name in ("functions", "memory", "symbols", "cuda", "cpu_for_cuda"))
"""The files that stand between Python and torch as the device does. What the emulated kernels ask of torch is our
own doing, and passes through none of them."""


def refused(error: E) -> E:
    """Mark an error that the emulation raises because the real thing would: `raise refused(RuntimeError(…))`."""
    setattr(error, _MARK, True)
    return error


def planted(error: E) -> E:
    """Mark an error that a fault raises on purpose: `raise planted(RuntimeError(…))`."""
    setattr(error, _PLANTED, True)
    return error


def is_planted(error: BaseException) -> bool:
    """Whether a fault raised this very error; not one that a library raises because of it."""
    return getattr(error, _PLANTED, False)


def hand_on(function: Callable[..., R], *args: Any, **named: Any) -> R:
    """Call what the emulation passes on to torch. An error with no frame further in than this one came out of the
    call itself."""
    return function(*args, **named)


def folders_of(home: str) -> tuple[str, ...]:
    """The folders whose files are ours: this package, and the package `home` of a system.

    A plugin that is a single module has no folder. Its code stands for the library then, as that of a test's stub does.
    """
    spec = importlib.util.find_spec(home)
    places = spec.submodule_search_locations if spec else None
    return (f"{_HERE}/", *(f"{Path(place)}/" for place in places or ()))


def is_ours(error: BaseException, frames: Sequence[FrameSummary], folders: Sequence[str]) -> bool:
    """Whether an error is shardproof's own.

    Args:
        error: what was raised; it carries the mark of `refused` or `planted`, also after it was pickled.
        frames: of its traceback, outermost first. folders: see `folders_of`.
    """
    if is_planted(error):
        return False
    inner_first = list(reversed(frames))
    if getattr(error, _MARK, False):
        inner_first = _outside(inner_first, (_EMULATION,))
    elif inner_first and _hands_on(inner_first[0]):
        inner_first = _outside(inner_first, _DEVICE)
    if not inner_first:
        return False
    file = inner_first[0].filename
    return file.startswith(tuple(folders)) and not file.startswith(f"{SHIPPED}/")


def asked_of_device(frames: Sequence[FrameSummary]) -> str:
    """The place of a library that asks for a part of the device which the emulation does not have, and which torch
    therefore looks for in the real one; empty for an error that did not come out of `torch.cuda`.

    Args:
        frames: of the traceback, outermost first, of an error on an emulated device.
    """
    if not frames or _TORCH_CUDA not in frames[-1].filename:
        return ""
    caller = next((frame for frame in reversed(frames) if _TORCH_CUDA not in frame.filename), frames[-1])
    return f"{Path(caller.filename).as_posix().rpartition(_SITE)[2]}, {caller.name}"


def in_one_line(kind: str, message: str, traceback: str) -> str:
    """An error that our own code raised, with the place of ours that does not fit; no rank, operation or address, so
    that it reads alike in every scenario.

    Args:
        kind: name of the exception. traceback: as text, outermost frame first.
    """
    first = message.strip().split("\n", 1)[0] or "no message"
    first = re.sub(rf"\(?/[^\s)]*{_SITE}", "(", first) if _SITE in first else first
    place = _OURS.findall(traceback)
    where = f", in {place[-1][0]}, line {place[-1][1]}, {place[-1][2]}" if place else ""
    return f"{kind}: {first[:_MOST_CHARACTERS]}{where}"


def of_users_file(error: BaseException) -> str:
    """For an error of a file that the user wrote, raised while it was being imported: which file cannot be imported and
    the place in the user's own modules, and below it the traceback from there on; empty for any other error."""
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(str(_HERE) + "/")]
    own = [n for n, frame in enumerate(frames) if not _INSTALLED.search(frame.filename)]
    if not own or any(frame.name == "<module>" for frame in frames[own[-1] + 1 :]):
        return ""  # what the file imports is what cannot be imported
    place = (frames[own[-1]].filename, frames[own[-1]].lineno)
    said = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        place, said = (error.filename, error.lineno), error.msg
    line = f"{type(error).__name__} in {Path(place[0]).name}, line {place[1]}: {said.strip().partition(chr(10))[0]}"
    shown = [*format_list(frames[own[0] :]), *format_exception_only(error)]
    return f"{Path(frames[own[0]].filename).name} {CANNOT_IMPORT}: {line}\n{''.join(shown)}"


_INSTALLED = re.compile(r"site-packages/|/lib/python\d[.\d]*/|^<")
"""Files that no user wrote: of packages, of Python itself, and what has no file."""


def with_callable(message: str, modules: Mapping[str, Any] | None = None) -> str:
    """The message of a `TypeError` about a call's arguments, and behind it where the library defines what was called.

    Python names the function and not its file: `get_optimizer() got an unexpected keyword argument 'lr'`.

    Args:
        modules: name → module, among which the function is looked for; those that are imported without.
    """
    called = _CALLED.match(message)
    if called is None:
        return message
    imported = sys.modules if modules is None else modules
    for module in [one for one in imported.values() if isinstance(one, ModuleType)]:
        file = getattr(module, "__file__", None) or ""
        found: Any = vars(module)
        for name in called[1].removesuffix(".__init__").split("."):
            found = found.get(name) if isinstance(found, dict) else getattr(found, name, None)
        if _SITE in file and getattr(found, "__module__", None) == module.__name__:
            return f"{message} (it is in {Path(file).as_posix().rpartition(_SITE)[2]})"
    return message


def _hands_on(frame: FrameSummary) -> bool:
    return frame.filename == __file__ and frame.name == hand_on.__name__


def _outside(inner_first: list[FrameSummary], places: tuple[str, ...]) -> list[FrameSummary]:
    """The frames that are left, from the innermost one that lies in none of `places`."""
    for index, frame in enumerate(inner_first):
        if not frame.filename.startswith(places) and not _hands_on(frame):
            return inner_first[index:]
    return []
