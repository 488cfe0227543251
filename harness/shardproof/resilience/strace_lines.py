"""The lines that `strace -f -y -xx` writes of system calls, and what a call names in them.

Texts stand in hexadecimal, and the path of a descriptor stands behind its number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

_UNFINISHED = re.compile(r"^(\d+) +(.*) <unfinished \.\.\.>$", re.DOTALL)
_RESUMED = re.compile(r"^(\d+) +<\.\.\. \w+ resumed>(.*)$", re.DOTALL)
_STARTS = re.compile(r"^\d+ +(clone3?|v?fork)\(")
TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_DESCRIPTOR = re.compile(r"^(-?\d+|AT_FDCWD)(?:<((?:\\x[0-9a-f]{2})*)>)?")


def join_interrupted(lines: Iterable[str]) -> list[str]:
    """Lines with the two halves of an interrupted call put together, where it ended; of a call that starts a process,
    where it began, since what it starts may be seen before it ends."""
    found: list[str] = []
    begun: dict[str, tuple[str, int]] = {}
    for line in lines:
        if half := _UNFINISHED.match(line):
            begun[half[1]] = (f"{half[1]} {half[2]}", len(found))
            found.append("")
        elif half := _RESUMED.match(line):
            first, place = begun.pop(half[1], (half[1], len(found)))
            if _STARTS.match(first):
                found[place] = first + half[2]
            else:
                found.append(first + half[2])
        else:
            found.append(line)
    return [line for line in found if line]


def number_of(given: str) -> int:
    """The descriptor that is a call's first argument."""
    found = _DESCRIPTOR.match(given)
    return int(found[1]) if found and found[1] != "AT_FDCWD" else -1


def path_of_descriptor(given: str) -> str:
    """The path of the descriptor that is a call's first argument."""
    found = _DESCRIPTOR.match(given)
    return os.fsdecode(unescaped(found[2] or "")) if found else ""


def paths_of(given: str) -> list[str]:
    """The absolute paths that a call names, each behind the descriptor of the folder that it is relative to, if any."""
    found = []
    for match in re.finditer(r'(?:(?:-?\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>, )?"((?:\\x[0-9a-f]{2})*)"', given):
        name = os.fsdecode(unescaped(match[2]))
        found.append(os.path.join(os.fsdecode(unescaped(match[1] or "")), name))
    return found


def unescaped(text: str) -> bytes:
    """The bytes that a text in hexadecimal stands for."""
    return bytes.fromhex(text.replace("\\x", ""))
