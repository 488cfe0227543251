"""Python stacks of ranks that did not come to an end, as one text, and what can be read from it again.

Each rank writes its stack into its log when it is asked to (`faulthandler`), the innermost frame first. Ranks that
stand at one place share a stack in the text:

    ranks 0 and 1:
      File "…/torch/distributed/distributed_c10d.py", line 3251 in all_gather_object
      …
    ranks 2 and 3:
      File "…/torch/distributed/distributed_c10d.py", line 4976 in barrier
      …
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_BEGINS = re.compile(r"^(?:Current thread|Stack) .*\(most recent call first\).*\n", re.MULTILINE)
_THREADS = re.compile(r"^(?:Current thread|Thread) .*\(most recent call first\).*\n", re.MULTILINE)
FATAL = "Fatal Python error: "
"""How Python begins to tell where its threads are when a signal ends the process."""
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)\s*$')
_RANKS = re.compile(r"^ranks? (\d[\d, and]*):$")
_HARNESS = re.compile(r"/shardproof/world/rank\.py$")
"""The file of ours that calls a system's operations. Its frames and those that called it are the same on all ranks."""


@dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Wait:
    """Ranks that stood at one place. frames: the innermost first."""

    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]


def stack_in(log: str) -> str:
    """The last stack that a rank wrote into its log, down to the operation that it was in; empty for none."""
    begins = list(_BEGINS.finditer(log))
    kept: list[str] = []
    for line in log[begins[-1].end() :].splitlines() if begins else ():
        frame = _FRAME.match(line)
        if frame is None or (kept and _HARNESS.search(frame["file"])):
            break
        kept.append(line.strip())
    return "\n".join(kept)


def fatal_traceback_in(log: str) -> str:
    """The frames of a rank that a signal such as SIGABRT ended, from its log, in the order and form of a traceback,
    from the operation on; empty for none."""
    said = log.rpartition(FATAL)
    for frames in _threads_in(said[2]) if said[1] else ():
        ours = next((n for n, frame in enumerate(frames) if _HARNESS.search(frame.file)), None)
        if ours is not None:
            return "".join(f'  File "{f.file}", line {f.line}, in {f.function}\n' for f in reversed(frames[:ours]))
    return ""


def stacks_in(log: str) -> list[tuple[Frame, ...]]:
    """The stack of the main thread of every process that `faulthandler` wrote into a log when the process was aborted,
    the innermost frame first."""
    dumps = (_threads_in(dump) for dump in log.split(f"{FATAL}Aborted")[1:])
    return [threads[-1] for threads in dumps if threads]  # threads are told from the newest to the first


def _threads_in(dump: str) -> list[tuple[Frame, ...]]:
    """The stacks of a process' threads that run Python, the innermost frame first."""
    blocks = (itertools.takewhile(bool, map(_FRAME.match, block.splitlines())) for block in _THREADS.split(dump)[1:])
    threads = (tuple(Frame(f["file"], int(f["line"]), f["function"]) for f in block if f) for block in blocks)
    return [frames for frames in threads if frames]


def in_one_text(stacks: Mapping[int, str], characters: int) -> str:
    """The stacks of all ranks, each of them once; of long ones, as many of the innermost frames as have room.

    Args:
        stacks: rank → `stack_in` of its log.
        characters: the most that all stacks may have together.
    """
    alike: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        if stack:
            alike.setdefault(stack, []).append(rank)
    each = characters // max(1, len(alike))
    return "\n".join(
        f"{told_ranks(ranks)}:\n" + "\n".join(f"  {line}" for line in _innermost(stack, each))
        for stack, ranks in alike.items()
    )


def _innermost(stack: str, characters: int) -> list[str]:
    lines = stack.splitlines()
    room = characters
    for number, line in enumerate(lines):
        room -= len(line) + 3
        if room < 0 and number:
            return [*lines[:number], f"… {len(lines) - number} frames left out …"]
    return lines


def told_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words, such as `ranks 0, 1 and 3`."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def waits_in(text: str) -> tuple[Wait, ...]:
    """Where ranks stood, from a text of `in_one_text`; none for any other text."""
    found: list[tuple[tuple[int, ...], list[Frame]]] = []
    for line in text.splitlines():
        if of := _RANKS.match(line):
            found.append((tuple(map(int, re.findall(r"\d+", of[1]))), []))
        elif found and (frame := _FRAME.match(line)):
            found[-1][1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    return tuple(Wait(ranks, tuple(frames)) for ranks, frames in found if frames)
