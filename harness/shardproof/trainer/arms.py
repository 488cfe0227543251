"""Arms: the runs that a trainer's cell is driven through, as operations in sessions of fresh ranks.

    session            its operations, with two steps before the save and two after it
    uninterrupted      build  step 0  step 1  save  step 2  step 3
    twice              the same once more
    unsaved            build  step 0  step 1  step 2  step 3
    resumed            build, from another seed  load  save  step 2  save  step 3
    second resume      build, from another seed  load, of what `resumed` saved after step 2  step 3
    used               build, from another seed  step 7  load  step 2  step 3  save  load  step 4  save  load, the last
                       four in one folder
    other mesh M       as resumed, on the mesh M, for each other mesh of the trainer's axis `mesh`, and on one rank
    altered AXIS       as resumed, with another value of an axis that the trainer calls `altered`
    alike AXIS         as unsaved, with the first value of an axis that the trainer calls `alike`, in cells of another

A trainer with `fit` has one operation more in front, in which all of the session happens; the operations behind it are
the moments at which it was observed:

    uninterrupted      fit, until 4 with checkpoints  step 0 … step 3
    twice, unsaved     the same once more; the same without checkpoints
    cut                fit, until 2 with checkpoints  step 0  step 1
    resumed            fit, from another seed, until 4, from the checkpoint of `cut`  step 2  step 3
    stopped            the same until 3 with checkpoints  step 2
    second resume      fit, from another seed, until 4, from the checkpoint of `stopped`  step 3

A program is the word `arms`; behind it may stand the numbers of steps, and which sessions there are: `arms 1 1
resumed`. The uninterrupted session is always there. With no steps after the save, as in `arms 4 0`, there is no save,
and no session that needs one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from shardproof.errors import UsageError
from shardproof.program import ARMS, FIT, NO_CHECKPOINT, Op
from shardproof.protocol.registry import system_named
from shardproof.result import ALIKE as ALIKE
from shardproof.scenario import Mesh, Scenario
from shardproof.trainer.base import world_of
from shardproof.trainer.cells import MESH_AXIS, mesh_of, values_of
from shardproof.trainer.described import Described

WHOLE, TWICE, UNSAVED, CUT, RESUMED, USED = "uninterrupted", "twice", "unsaved", "cut", "resumed", "used"
STOPPED, SECOND_RESUME = "stopped", "second resume"
TRAINS = "trains"
KEYS, ENDS, READS, COPIES = "keys", "ends", "reads", "copies"
"""What lines begin with that a cell says of keys which a load did not take, of where its steps end, and of what becomes
of the value of an axis."""
TOO_SELDOM = "fit called self.updated() too seldom"
"""What is said of a `fit` that makes fewer updates than it is asked for."""
OTHER, ALTERED = "other mesh", "altered"
SESSIONS = (WHOLE, TWICE, UNSAVED, CUT, RESUMED, STOPPED, SECOND_RESUME, USED, OTHER, ALTERED, ALIKE)
"""Names of sessions, the last three with a mesh or an axis behind them."""

STEPS_ALONE = (WHOLE, TWICE, ALIKE)
"""Those that need no save."""

FIRST, SECOND, AGAIN, ANEW, LATER = 0, 1, 2, 3, 4
"""Numbers of checkpoints: of the uninterrupted session, of its repetition, of what is saved again after a load, of the
folder that `used` writes and loads, and then once more, and of what a resumed run saves after its first step."""

NOTE, TOLD, TIED, CALLS, GIVEN, GRADIENTS, SHARED, PLAIN, COLLECTIVES, MEASURED, RAN, STATE_CALLS = NO_STATE = (
    "note", "told", "tied", "calls", "given", "gradients", "shared", "plain", "collectives", "measured", "ran",
    "state calls",
)  # fmt: skip
"""Roles of what ranks say beside the state, which is no state: sentences for the reader, and what the twin needs, both
of rank 0; whether two names are one parameter; what modules came to in a step; what models were given in it; what
optimizers had of each parameter when they stepped; which parameters have several names; plain numbers, of rank 0; which
collectives a rank took part in; what a step did to gradients; which statements of its own files ran; which objects were
asked for their state, or given one."""

AT_THE_END = "at the end"
"""The `where` of what is recorded when `fit` has returned."""

ONE, TWO, NOT_HERE = "one", "two", "not here"
"""What a rank has under two names that must be one parameter; `not here` where it has not both of them."""


@dataclass(frozen=True)
class Session:
    """One session of a cell. name: of `SESSIONS`, with what distinguishes it behind. ops: its operations."""

    name: str
    ops: tuple[Op, ...]

    @property
    def kind(self) -> str:
        """The kind of session: its name without a mesh or an axis."""
        return next(name for name in SESSIONS if self.name.startswith(name))

    @property
    def of(self) -> str:
        """The mesh or the axis behind the name; empty for the other sessions."""
        return self.name.removeprefix(self.kind).strip()

    def first(self, kind: str) -> int:
        """The index of the first operation of a kind; -1 where there is none."""
        return next((op.index for op in self.ops if op.kind == kind), -1)


def seed_of(scenario: Scenario, first: Op) -> int:
    """The `cell.seed` of a session. first: the first of its operations."""
    return (scenario.seed * 1000 + first.init_seed) % 2**32  # which every generator takes


def expand(scenario: Scenario) -> tuple[Op, ...]:
    """All operations of a trainer's scenario.

    Raises:
        UsageError: the program is none of a trainer's, or the system is none.
    """
    return tuple(op for session in sessions_of(scenario) for op in session.ops)


def trainer_of(scenario: Scenario) -> Described:
    """The trainer of a scenario.

    Raises:
        UsageError: its system is no trainer.
    """
    found = getattr(system_named(scenario.system), "trainer", None)
    if not isinstance(found, Described):
        form = f"shardproof trainer FILE.py; shardproof run FILE.toml --system {scenario.system}"
        raise UsageError.of("program", scenario.program, f"operations: {scenario.system} is no trainer", form)
    return found


def sessions_of(scenario: Scenario) -> tuple[Session, ...]:
    """The sessions of a trainer's scenario.

    Raises:
        UsageError: as `expand`.
    """
    return _sessions(scenario, trainer_of(scenario))


@lru_cache(maxsize=1024)
def _sessions(scenario: Scenario, trainer: Described) -> tuple[Session, ...]:
    before, after, wanted = program_of(trainer, scenario.program)
    mesh, drafts = mesh_of(trainer, scenario), _fitting if trainer.fits else _stepwise
    found: list[Session] = []
    for name, where, kinds in drafts(trainer, mesh, before, after):
        session = Session(name, ())
        if wanted and session.kind not in wanted and session.kind != WHOLE:
            continue
        if session.kind == ALTERED and values_of(trainer, scenario).get(session.of) is None:
            continue
        if session.kind == ALIKE and values_of(trainer, scenario)[session.of] == trainer.axes[session.of][0]:
            continue
        if not after and session.kind not in STEPS_ALONE:
            continue
        start, on = sum(len(each.ops) for each in found), Mesh(1, world_of(where), 1)
        ops = [
            replace(op, index=start + at, session=len(found), mesh=on, arm=name)
            for at, op in enumerate(kinds)
        ]  # fmt: skip
        found.append(replace(session, ops=tuple(ops)))
    return tuple(found)


def program_of(trainer: Described, program: str) -> tuple[int, int, frozenset[str]]:
    """Steps before the save, steps after it, and the kinds of sessions; none of them for all.

    Raises:
        UsageError: it has another form.
    """
    word, *rest = program.split()
    before, after = trainer.steps
    kinds = {_joined(name): name for name in SESSIONS}
    allowed = f"`{ARMS}`, then two numbers of steps, from 1 and from 0 on, then some of: {', '.join(kinds)}"
    if rest and rest[0].isdecimal():
        if len(rest) < 2 or not all(text.isdecimal() and int(text) <= 100 for text in rest[:2]) or not int(rest[0]):
            raise UsageError.of("program", program, allowed, f"{ARMS} 1 1 resumed")
        before, after, rest = int(rest[0]), int(rest[1]), rest[2:]
    if after and not trainer.saves:
        form = f"{ARMS} {before} 0"
        raise UsageError.of("program", program, "0 steps after the save: the trainer has no save and no load", form)
    if not after:
        kinds = {_joined(name): name for name in STEPS_ALONE}
        allowed = f"with no steps after the save, which means no save: {', '.join(kinds)}"
    if word != ARMS or not set(rest) <= kinds.keys():
        raise UsageError.of("program", program, allowed, f"{ARMS} 1 1 resumed")
    wanted = frozenset(kinds[text] for text in rest)
    if wanted & {USED, ALTERED, SECOND_RESUME}:
        wanted |= {RESUMED}  # which they are compared with
    if SECOND_RESUME in wanted and trainer.fits:
        wanted |= {STOPPED}  # whose checkpoint it loads
    if wanted & {RESUMED, STOPPED, OTHER, ALTERED} and trainer.fits:
        wanted |= {CUT}  # whose checkpoint they load
    return before, after, wanted


def later_save(before: int, after: int) -> int:
    """After how many steps a resumed run saves for the second resume: as many again as came before the first save, so
    that checkpoints at the ends of epochs alone can be had, or one more where that would leave no step to see it by."""
    return 2 * before if before < after else before + 1


def _joined(name: str) -> str:
    return name.replace(" ", "-")


_Draft = tuple[str, str, list[Op]]
"""A session's name, its mesh, and its operations."""


def _op(kind: str, iteration: int = 0, seed: int = 0, checkpoint: int = NO_CHECKPOINT, taken: int = -1) -> Op:
    return Op(0, kind, "", 0, Mesh(), iteration, seed, checkpoint, taken)


def _steps(start: int, end: int) -> list[Op]:
    return [_op("step", index) for index in range(start, end)]


def _stepwise(trainer: Described, mesh: str, before: int, after: int) -> Iterator[_Draft]:
    end = before + after
    early, late = _steps(0, before), _steps(before, end)
    fresh, load = _op("build", seed=1), _op("load", before, checkpoint=FIRST)
    for name, number in ((WHOLE, FIRST), (TWICE, SECOND)):
        save = [_op("save", before, checkpoint=number)] if late else []
        yield name, mesh, [_op("build"), *early, *save, *late]
    yield UNSAVED, mesh, [_op("build"), *early, *late]
    for axis in trainer.alike:
        yield f"{ALIKE} {axis}", _first(trainer, axis, mesh), [_op("build"), *early, *late]
    if not late:
        return
    later = later_save(before, after)
    soon, rest = late[: later - before], late[later - before :]
    on = [_op("save", later, checkpoint=LATER), *rest] if rest else []
    yield RESUMED, mesh, [fresh, load, _op("save", before, checkpoint=AGAIN), *soon, *on]
    if on:
        yield SECOND_RESUME, mesh, [_op("build", seed=2), _op("load", later, checkpoint=LATER), *rest]
    anew = [_op(kind, at, checkpoint=ANEW) for at in (end, end + 1) for kind in ("save", "load")]
    yield USED, mesh, [fresh, _op("step", end + 3), load, *late, *anew[:2], _op("step", end), *anew[2:]]
    for other in _other_meshes(trainer, mesh):
        yield f"{OTHER} {other}", other, [fresh, load, *late]
    for axis in trainer.altered:
        yield f"{ALTERED} {axis}", mesh, [fresh, load, late[0]]


def _fitting(trainer: Described, mesh: str, before: int, after: int) -> Iterator[_Draft]:
    end = before + after
    every, late = _steps(0, end), _steps(before, end)
    yield WHOLE, mesh, [_op(FIT, end, checkpoint=FIRST if after else NO_CHECKPOINT), *every]
    yield TWICE, mesh, [_op(FIT, end, checkpoint=SECOND if after else NO_CHECKPOINT), *every]
    yield UNSAVED, mesh, [_op(FIT, end), *every]
    for axis in trainer.alike:
        yield f"{ALIKE} {axis}", _first(trainer, axis, mesh), [_op(FIT, end), *every]
    if not after:
        return
    yield CUT, mesh, [_op(FIT, before, checkpoint=AGAIN), *_steps(0, before)]
    resumed = [_op(FIT, end, 1, taken=AGAIN), *late]
    yield RESUMED, mesh, resumed
    later = later_save(before, after)
    soon, rest = late[: later - before], late[later - before :]
    if rest:
        yield STOPPED, mesh, [_op(FIT, later, 1, checkpoint=LATER, taken=AGAIN), *soon]
        yield SECOND_RESUME, mesh, [_op(FIT, end, 2, taken=LATER), *rest]
    for other in _other_meshes(trainer, mesh):
        yield f"{OTHER} {other}", other, resumed
    for axis in trainer.altered:
        yield f"{ALTERED} {axis}", mesh, [_op(FIT, before + 1, 1, taken=AGAIN), late[0]]


def _first(trainer: Described, axis: str, mesh: str) -> str:
    """The mesh of the way with the first value of an axis: another one than the cell's, if that is the axis."""
    return trainer.axes[axis][0] if axis == MESH_AXIS else mesh


def _other_meshes(trainer: Described, mesh: str) -> list[str]:
    """The other meshes of the trainer, and one rank."""
    return [other for other in dict.fromkeys((*trainer.axes.get(MESH_AXIS, ()), "1")) if other != mesh]
