"""One trial: a folder is loaded in a process of its own, and what came out is compared with the known states.

Outcomes:

* `old`, `new`: exactly a state before the save, or the one that was being saved. Every name, type, shape and byte.
* `other`: exactly the state of another training run, whose files replaced all that was there.
* `error`: the library raised, so that nobody trains on. After a crash this means that the old state is lost, too.
* `silent`: the load succeeded, and what it gave is none of the known states.
* `hang`: it did not end before the deadline, and was killed. `crash`: the process ended without a word.

*Verifies*: that equal states are equal bit by bit, by digests that the child takes of what the library gave it.
*Does not verify*: the child's word. It is a process of the library's, which could say anything; ours executes nothing
of the checkpoint and reads nothing of it but these digests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from harness.errors import HarnessError
from harness.resilience.events import Trace, Tree, tree_of, write_tree
from harness.resilience.stacks import Stack
from harness.resilience.trace import attached, read_trace

Outcome = Literal["old", "new", "other", "error", "silent", "hang", "crash"]
OUTCOMES: tuple[Outcome, ...] = ("old", "new", "other", "error", "silent", "hang", "crash")

Digests = Mapping[str, str]
MOST_SHOWN = 4
_START_S = 300.0


class HostError(HarnessError):
    """A process of ours that should have served ended, or could not save what it should have saved."""


@dataclass(frozen=True)
class Known:
    """The states that a load may give, as digests of their parts. first: the one before the old one."""

    old: Digests
    new: Digests
    other: Digests
    first: Digests = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What a trial showed. why: in words."""

    outcome: Outcome
    why: str = ""


def classify(answer: Mapping[str, Any], known: Known) -> Verdict:
    """The verdict over a host's answer to a load."""
    match answer["ended"]:
        case "ok":
            found: Digests = answer["found"]
            if known.first and found == known.first:
                return Verdict("old", "the state of the save before")
            for outcome, state in (("new", known.new), ("old", known.old), ("other", known.other)):
                if found == state:
                    return Verdict(outcome)  # type: ignore[arg-type]
            return Verdict("silent", _mixture(found, known))
        case "error":
            return Verdict("error", answer["why"])
        case "hang":
            return Verdict("hang", "it did not end before the deadline")
        case _:
            return Verdict("crash", answer["why"])


def _mixture(found: Digests, known: Known) -> str:
    """Of which states the parts are that tell the states apart."""
    groups: dict[str, list[str]] = {"old": [], "new": [], "other": [], "neither": [], "missing": []}
    for name in sorted({*found, *known.new}):
        if found.get(name) == known.new.get(name) == known.old.get(name):
            continue
        sides = [
            side for side in ("new", "old", "other") if name in found and found[name] == getattr(known, side).get(name)
        ]
        groups["missing" if name not in found else sides[0] if sides else "neither"].append(name)
    told = []
    for side, names in groups.items():
        if names:
            more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
            told.append(f"{side}: {', '.join(names[:MOST_SHOWN])}{more}")
    return "; ".join(told)


@dataclass
class Bench:
    """A stack's host process and the folder in which its trials lie. Leaving the block ends the one and removes the
    other.

    Attributes:
        deadline_s: seconds that a save or a load may take.
        path: folders that come first where the host looks for libraries.
    """

    stack: Stack
    deadline_s: float
    path: Sequence[Path] = ()
    root: Path = field(init=False)

    def __enter__(self) -> Self:
        self.root = Path(tempfile.mkdtemp(prefix="shardproof-resilience-"))
        places = [*map(str, self.path), str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"}
        options = json.dumps(dict(self.stack.options))
        self._log = (self.root / "host.log").open("wb")
        self._host = subprocess.Popen(
            [sys.executable, "-m", "harness.resilience.rank.host", self.stack.driver, options, str(self.root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd="/",
            env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, places))}, start_new_session=True,
        )  # fmt: skip
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._host.stdin is not None
        assert self._host.stdout is not None
        self._host.kill()
        self._host.wait()
        self._host.stdin.close()
        self._host.stdout.close()
        self._log.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def save(self, folder: Path, generation: int, run: int) -> Digests:
        """Have the stack save a state; what it saved."""
        return self._saved(self._ask({"do": "save", "folder": str(folder), "generation": generation, "run": run}))

    def record(self, folder: Path, generation: int, run: int) -> tuple[Digests, Trace]:
        """Have the stack save a state while every change of the folder is recorded; what it saved, and the record.

        Raises:
            TraceError: it cannot be recorded. HostError: the save failed.
        """
        base, record = tree_of(folder), self.root / "record.strace"
        asked = {"do": "save", "folder": str(folder), "generation": generation, "run": run}
        ready = self._ask({**asked, "wait": True})
        if "pid" not in ready:
            raise HostError(f"stack {self.stack.name} ended before its save began")
        with attached(ready["pid"], record):
            known = self._saved(self._ask({"do": "go"}))
        return known, read_trace(record, folder, base)

    def load(self, tree: Tree) -> Mapping[str, Any]:
        """Have the stack load a folder that holds this; the host's answer."""
        folder = self.root / "trial"
        write_tree(tree, folder)
        try:
            return self._ask({"do": "load", "folder": str(folder)})
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _saved(self, answer: Mapping[str, Any]) -> Digests:
        if answer["ended"] != "ok":
            raise HostError(f"stack {self.stack.name} cannot save: {answer.get('why', answer['ended'])}")
        found: Digests = answer["found"]
        return found

    def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        assert self._host.stdin is not None
        try:
            self._host.stdin.write(json.dumps({"deadline_s": self.deadline_s, "wait": False, **asked}) + "\n")
            self._host.stdin.flush()
        except BrokenPipeError:
            pass
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._host.stdout is not None
        line = self._host.stdout.readline()
        if not line:
            log = (self.root / "host.log").read_text("utf-8", "replace").strip().splitlines()
            raise HostError(f"the process of stack {self.stack.name} ended: {log[-1] if log else 'it said nothing'}")
        answer: dict[str, Any] = json.loads(line)
        return answer
