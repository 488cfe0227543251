"""The worker processes of a stack, and the folder in which their trials lie.

A *bench* starts one host (`rank.host`), which imports the stack's library once and forks itself into as many *lanes* as
trials are made side by side. A lane does one thing at a time, in a child of its own: save a state, load a folder. All
of these are descendants of the host, which adopts those that lose their parent. So a bench that ends, or whose own
process is killed, ends all of them: the kernel tells the host, and the host kills what it has and removes the folder.

*Does not verify*: that a library keeps to its folder. What it writes elsewhere, below /tmp or /dev/shm, stays there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from shardproof.errors import HarnessError
from shardproof.resilience.call_faults import LOAD_CALLS
from shardproof.resilience.events import Call, Trace, Tree, tree_of, write_tree
from shardproof.resilience.stacks import Stack
from shardproof.resilience.trace import attached, calls_of, lines_of, read_trace
from shardproof.resilience.trial import Digests
from shardproof.world import cure_import_hook
from shardproof.world.server import NO_GPU

_END_S = 20.0
"""Seconds that a host has to end its descendants, before it is killed itself."""


class HostError(HarnessError):
    """A process of ours that should have served ended, or could not save what it should have saved."""


@dataclass
class Bench:
    """A stack's host and the folder in which its trials lie. Leaving the block ends the one and removes the other.

    Attributes:
        deadline_s: seconds that a save or a load may take.
        path: folders that come first where the host looks for libraries.
        jobs: how many lanes there are.
        cured: files of the library that are imported with another text (`shardproof.issues.cures.Cured.sources`).
    """

    stack: Stack
    deadline_s: float
    path: Sequence[Path] = ()
    jobs: int = 1
    cured: Mapping[str, str] = field(default_factory=dict)
    root: Path = field(init=False)
    lanes: list[Lane] = field(init=False, default_factory=list)

    def __enter__(self) -> Self:
        self.root = Path(tempfile.mkdtemp(prefix="shardproof-resilience-"))
        ends = [(os.pipe(), os.pipe()) for _ in range(self.jobs)]
        theirs = [(asked[0], answers[1]) for asked, answers in ends]
        with (self.root / "host.log").open("wb") as log:
            self._host = subprocess.Popen(
                [
                    sys.executable, "-m", "shardproof.resilience.rank.host", self.stack.driver,
                    json.dumps(dict(self.stack.options)), str(self.root), json.dumps(theirs), str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=self._environment(),
                start_new_session=True, pass_fds=[number for two in theirs for number in two],
            )  # fmt: skip
        for number, (asked, answers) in enumerate(ends):
            os.close(asked[0])
            os.close(answers[1])
            self.lanes.append(Lane(self, number, os.fdopen(asked[1], "w"), os.fdopen(answers[0], "r")))
        try:
            for lane in self.lanes:
                lane.hear()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._host.terminate()  # it kills its descendants first, and removes the folder
        try:
            self._host.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._host.kill()
            self._host.wait()
        for lane in self.lanes:
            lane.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        places = [*map(str, self.path), str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"}
        own = {"TMPDIR": str(self.root), "PYTHONPATH": os.pathsep.join(filter(None, places))}
        if self.cured:
            file = self.root / "cured.json"
            file.write_text(json.dumps(dict(self.cured)), "utf-8")
            own[cure_import_hook.VARIABLE] = str(file)
        return {**os.environ, **threads, **NO_GPU, **own}

    def ended(self) -> HostError:
        """The error of a host that does not answer."""
        log = (self.root / "host.log") if self.root.exists() else None
        lines = log.read_text("utf-8", "replace").strip().splitlines() if log and log.exists() else []
        return HostError(f"the process of stack {self.stack.name} ended: {lines[-1] if lines else 'it said nothing'}")


class Lane:
    """The parent's end of one worker process of a bench: sends requests to save or load, and reads the answers."""

    def __init__(self, bench: Bench, number: int, asks: IO[str], hears: IO[str]) -> None:
        self.bench, self.number = bench, number
        self._asks, self._hears = asks, hears

    def save(self, folder: Path, generation: int, run: int) -> Digests:
        """Have the stack save a state; what it saved.

        Raises:
            HostError: the save failed.
        """
        return self.saved(self.ask({"do": "save", "folder": str(folder), "generation": generation, "run": run}))

    def record(self, folder: Path, generation: int, run: int) -> tuple[Digests, Trace]:
        """Have the stack save a state while every change of the folder is recorded; what it saved, and the record.

        Raises:
            TraceError: it cannot be recorded. HostError: the save failed.
        """
        base, record = tree_of(folder), self.bench.root / "record.strace"
        asked = {"do": "save", "folder": str(folder), "generation": generation, "run": run}
        with attached(self.begun(asked), record):
            known = self.saved(self.ask({"do": "go"}))
        return known, read_trace(record, folder, base, self.bench.stack.ranks)

    def load(self, tree: Tree) -> Mapping[str, Any]:
        """Have the stack load a folder that holds this; the host's answer."""
        folder = self.folder(tree)
        try:
            return self.ask({"do": "load", "folder": str(folder)})
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def record_load(self, tree: Tree) -> tuple[Mapping[str, Any], list[Call]]:
        """As `load`; also gives the calls that it made on the folder."""
        folder, record = self.folder(tree), self.bench.root / "load.strace"
        with attached(self.begun({"do": "load", "folder": str(folder)}), record, calls=LOAD_CALLS):
            answer = self.ask({"do": "go"})
        return answer, calls_of(lines_of(record), folder, self.bench.stack.ranks)

    def folder(self, tree: Tree) -> Path:
        """A folder of this lane that holds this, in the place of the one before."""
        folder = self.bench.root / f"trial-{self.number}"
        shutil.rmtree(folder, ignore_errors=True)
        write_tree(tree, folder)
        return folder

    def begun(self, asked: Mapping[str, Any]) -> int:
        """The number of a child that will do something, or of the rank that is asked for among those that it forks. It
        stands still right before it does; `go` lets it go on."""
        ready = self.ask({**asked, "wait": True})
        if "pid" not in ready:
            raise HostError(f"stack {self.bench.stack.name} ended before it began: {ready.get('why', ready['ended'])}")
        return int(ready["pid"])

    def saved(self, answer: Mapping[str, Any]) -> Digests:
        """The digests of a saved state, taken from the answer to a save.

        Raises:
            HostError: the save failed.
        """
        if answer["ended"] != "ok":
            why = answer.get("why", answer["ended"])
            raise HostError(f"stack {self.bench.stack.name} cannot save: {why}")
        found: Digests = answer["found"]
        return found

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request."""
        try:
            self._asks.write(
                json.dumps({"deadline_s": self.bench.deadline_s, "wait": False, "rank": None, **asked}) + "\n"
            )
            self._asks.flush()
        except (BrokenPipeError, ValueError):
            raise self.bench.ended() from None
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next answer."""
        line = self._hears.readline()
        if not line:
            raise self.bench.ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let go of the pipes."""
        for end in (self._asks, self._hears):
            with suppress(BrokenPipeError):  # what had not been asked yet
                end.close()
