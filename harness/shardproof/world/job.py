"""Requests to the world of ranks and its replies: plain data shared by the parent, the server and the ranks.

A `Job` is one session of a scenario. A `JobOutcome` says what became of its ranks, without judging it: which raised
what, which died, which had to be killed, and where they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shardproof.codec import from_plain, to_plain
from shardproof.observe.courses import RankCourse
from shardproof.program import Op, expand, sessions
from shardproof.scenario import Scenario
from shardproof.world.process import LONGEST_DEADLINE

STAGES = ("start", "construct", "op", "observe", "record", "done")

TRACEBACK_CHARACTERS = 12_000
BACKSTOP_S = 15.0  # a supervisor that has not answered this long after its deadline is killed itself


@dataclass(frozen=True)
class Job:
    """One session of a scenario, to be run by fresh ranks.

    * session: which of `program.sessions(expand(scenario))`.
    * directory: the scenario's folder; it exists, and receives `session{n}.rank{r}.obs` and `.log`.
    * deadline_s: seconds from the start of the job, after which its ranks are killed. Seconds in which a rank was
      ready to run and got no CPU do not count, up to `LONGEST_DEADLINE` times the deadline in all.
    * quiet: ranks observe after the session's last op only, to show that observing changes nothing.
    * cold: ranks remember nothing of earlier ones (`shardproof.world.shapes`).
    """

    scenario: Scenario
    session: int
    directory: Path
    deadline_s: float
    quiet: bool = False
    cold: bool = False

    @property
    def longest_s(self) -> float:
        """Seconds after which the ranks are killed whatever they waited for."""
        return self.deadline_s * LONGEST_DEADLINE

    @property
    def answered_s(self) -> float:
        """Seconds after which its server has given an answer, with or without its supervisor."""
        return self.longest_s + BACKSTOP_S

    @property
    def ops(self) -> list[Op]:
        return sessions(expand(self.scenario))[self.session]

    def observation(self, rank: int) -> Path:
        """Where a rank appends its observations: after each op, 8 bytes of length (little endian), then `pack`'s."""
        return self.directory / f"session{self.session}.rank{rank}.obs"

    def log(self, rank: int) -> Path:
        """The path of the file that collects stdout and stderr of a rank and its child processes."""
        return self.directory / f"session{self.session}.rank{rank}.log"

    @property
    def shapes(self) -> Path:
        """Where rank 0 writes down what it worked out from shapes alone."""
        return self.directory / f"session{self.session}.shapes"

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario.axis_values(only_changed=True),
            "session": self.session,
            "directory": str(self.directory),
            "deadline_s": self.deadline_s,
            "quiet": self.quiet,
            "cold": self.cold,
        }

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> Job:
        scenario = Scenario.from_axes(message["scenario"])
        where = Path(message["directory"])
        return cls(scenario, message["session"], where, message["deadline_s"], message["quiet"], message["cold"])


@dataclass(frozen=True)
class RankError:
    """An exception in a rank.

    * stage: `start` (process group), `construct`, `op` and `observe` (the system), or `record`: our own writing of the
      observation, which says nothing about the system.
    * op_index, op: -1 and "" before the first op.
    * errno: of an OSError, else None.
    * ours: whether it is shardproof's own (`shardproof.ownership`).
    * planted: whether a fault raised it, on purpose.
    """

    rank: int
    op_index: int
    op: str
    stage: str
    type: str
    message: str
    errno: int | None
    traceback: str
    ours: bool = False
    planted: bool = False


@dataclass(frozen=True)
class RankPlace:
    """Where in the program a rank was when it was killed. op_index, op: -1 and "" before the first op."""

    rank: int
    op_index: int
    op: str
    stage: str


@dataclass(frozen=True)
class JobOutcome:
    """What happened to a job's ranks.

    * errors: in the order in which they happened.
    * died: (rank, `signal SIGKILL` or `exit 7`) of ranks that ended by themselves without a word.
    * first_failed: the rank whose error or death came first; what the others report may follow from it.
    * timed_out: the deadline passed with no rank having failed before; a rank that waits for a failed one is not a
      hang.
    * stuck: where the ranks were that had to be killed, after a deadline or beside a failed rank.
    * strays: number of processes that ranks left behind and that were killed.
    * duration_s: from the fork to the last process's end.
    * cpu_s: user and system time of all its processes.
    * profile: (phase, seconds) in order, each of the rank that was slowest in it, for reports of where time goes.
    * observations: the observation files, one a rank.
    * stack: the Python stacks of the stuck ranks (`shardproof.observe.stacks`).
    * shared_gpus: some rank has died, and the ranks had less than one GPU each.
    * courses: of a job that failed, the course of each rank up to its end.
    """

    errors: tuple[RankError, ...]
    died: tuple[tuple[int, str], ...]
    first_failed: int | None
    timed_out: bool
    stuck: tuple[RankPlace, ...]
    strays: int
    duration_s: float
    cpu_s: float
    profile: tuple[tuple[str, float], ...]
    observations: tuple[Path, ...]
    stack: str = ""
    shared_gpus: bool = False
    courses: tuple[RankCourse, ...] = ()

    @property
    def ok(self) -> bool:
        return not (self.errors or self.died or self.timed_out)

    def to_json(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["errors"] = [vars(error) for error in self.errors]
        plain["stuck"] = [vars(place) for place in self.stuck]
        plain["observations"] = [str(path) for path in self.observations]
        plain["courses"] = to_plain(self.courses)
        return plain

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> JobOutcome:
        return cls(
            errors=tuple(RankError(**error) for error in message["errors"]),
            died=tuple((rank, how) for rank, how in message["died"]),
            first_failed=message["first_failed"],
            timed_out=message["timed_out"],
            stuck=tuple(RankPlace(**place) for place in message["stuck"]),
            strays=message["strays"],
            duration_s=message["duration_s"],
            cpu_s=message["cpu_s"],
            profile=tuple((phase, seconds) for phase, seconds in message["profile"]),
            observations=tuple(Path(path) for path in message["observations"]),
            stack=message["stack"],
            shared_gpus=message["shared_gpus"],
            courses=from_plain(tuple[RankCourse, ...], message["courses"]),
        )


def shortened(text: str, characters: int = TRACEBACK_CHARACTERS) -> str:
    """`text`, with its middle replaced by a count when it is longer: the start and the end of a traceback matter."""
    if len(text) <= characters:
        return text
    head, tail = characters // 4, characters * 3 // 4
    return f"{text[:head]}\n… {len(text) - head - tail} characters left out …\n{text[-tail:]}"
