"""Programs: the operations of a scenario, their legal sequences, and their static expansion.

`expand` turns a scenario into a tuple of `Op`. Every argument that a rank needs is decided there, once: which iteration
a step is, which seed a build initialises from, which checkpoint a load reads, which session and mesh it runs on.
Systems, reference and twin execute the same plan, and cannot disagree on it. For example, `build step save reshard
build load step` on mesh 1x2x1 with `load=grow` becomes

    index  kind   session  mesh   iteration  init_seed  checkpoint
    0      build  0        1x2x1  0          0
    1      step   0        1x2x1  0          0
    2      save   0        1x2x1  1          0          0
    3      build  1        1x4x1  0          1
    4      load   1        1x4x1  1          1          0
    5      step   1        1x4x1  1          1

The load restores the iteration, so that the step after it draws the gradient that an uninterrupted run would draw.

A *session* is one set of fresh ranks. `reshard` goes to the load mesh, in the same ranks when the mesh does not change;
`restart` always goes to fresh ranks on the load mesh. Everything in memory is gone after either, and the next operation
is a `build`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardproof.entry import resolve
from shardproof.errors import UsageError
from shardproof.scenario import Mesh, Scenario, mesh_literal
from shardproof.sequences import idle_load, illegal, mended

KINDS = (
    "build",  # construct model and optimizer; parameters from the next initialisation seed
    "step",  # all microbatches, gradient reduction, optimizer step
    "overflow",  # a step one of whose gradients is infinite on one rank: must be skipped (needs a loss scale)
    "accumulate",  # the first microbatch of a step, without synchronising: the next operation that steps has the others
    "compute_gradients",  # a step without its optimizer step: all microbatches, and the reduction
    "apply_gradients",  # the optimizer step that is still due
    "save",  # write a checkpoint of model, optimizer and schedule
    "begin_save",  # begin an asynchronous save: its checkpoint has the state of this moment
    "finish_save",  # wait until the save that was begun is over
    "keep",  # keep a copy of the state dicts in memory
    "save_kept",  # write the state dicts that were kept in memory
    "load",  # read the latest checkpoint into the model and optimizer that exist now
    "load_previous",  # read the checkpoint before the latest one; a `load` in the plan
    "load_model_only",  # read only the parameters and buffers of the latest checkpoint
    "load_previous_model",  # the same of the checkpoint before the latest one; a `load_model_only` in the plan
    "load_optimizer_only",  # read only the optimizer's state and param groups
    "load_schedule_only",  # read only what the learning-rate schedule keeps
    "recall",  # load the state dicts that were kept in memory
    "replace_params",  # give the parameters other values in place, as pretrained weights are copied in
    "reload_params",  # refresh optimizer-owned master copies from the model's parameters
    "unfreeze",  # make the parameters that the model marks `later` trainable
    "add_group",  # the same, and give them to the optimizer in a group of their own, which it has not had until then
    "reshard",
    "restart",
)

SHOWS_IN = {
    "step": ("accumulate", "compute_gradients", "apply_gradients"),
    "save": ("keep", "save_kept", "begin_save"),
    "load": ("load_optimizer_only", "recall"),
}
"""An operation → others that call the same of a library: what a defect does to the one, it does to them."""

PROGRAMS: dict[str, str] = {
    # Three arms: uninterrupted (the step after save), cold (build, step), resumed (build, load, step).
    "resume": "build step step save step reshard build step build load step",
    # Load into an optimizer that has never stepped and save before the first step ever.
    "save_first": "build save step reshard build load step step",
    # Load over live state: the optimizer exists, has stepped, and its gradients are stale.
    "load_after_step": "build step save step reshard build step load step",
    # Weights only, then training: the optimizer must start from the loaded weights.
    "model_only": "build step step save reshard build load_model_only reload_params step step",
    # Weights only over an optimizer that has already stepped.
    "model_only_late": "build step save reshard build step load_model_only reload_params step",
    # A second generation: what was loaded is saved and loaded again.
    "twice": "build step save reshard build load step save build load step",
    # Roll back to the checkpoint in the same objects.
    "rollback": "build step save step step load step",
    # Roll back to the state before the first step ever, as after a range test of learning rates.
    "rewind": "build save step step load step",
    # In fresh processes even on the same mesh.
    "restart": "build step save restart build step build load step",
    # Parameters that become trainable after the first save.
    "unfreeze": "build step unfreeze step save step reshard build unfreeze load step",
    # An overflowing step in the middle must leave no trace but a smaller scale.
    "overflow": "build step overflow step save step reshard build load step",
    # Overflows in a row.
    "overflows": "build step overflow overflow step save step reshard build load step",
    # Two saves with nothing between them: the second must not see a trace of the first.
    "save_twice": "build step save save step reshard build step load step",
    # Not the latest of two checkpoints.
    "previous": "build step save step save step reshard build load_previous step",
    # The model alone of the checkpoint before the latest one, as when fine-tuning starts from an earlier one.
    "previous_model": "build step save step save step reshard build load_previous_model reload_params step",
    # The optimizer's state alone, under other weights.
    "optimizer_only": "build step step save reshard build step load_optimizer_only step",
    # The learning-rate schedule alone: the optimizer goes on from the rates that its groups have.
    "schedule_only": "build step step save reshard build step load_schedule_only step step",
    # Other weights in an optimizer that was built, and has stepped, on those before: masters must follow them.
    "replace": "build replace_params reload_params step replace_params reload_params step save reshard build load step",
    # State dicts that are kept in memory while training goes on, and written later.
    "save_kept": "build step keep step save_kept step reshard build load step",
    # An asynchronous save with two steps before it is over: its checkpoint has nothing of them.
    "async_steps": "build step begin_save step step finish_save step reshard build load step",
    # A save while gradients wait for the optimizer's step: they are no part of it, and must still be there after it.
    "pending": "build step compute_gradients save apply_gradients reshard build load step step",
    # The same before the first step ever, when the optimizer has no state yet.
    "pending_first": "build compute_gradients save apply_gradients reshard build load step step",
    # A save in the middle of gradient accumulation (needs two microbatches).
    "accumulation": "build step accumulate save step reshard build load step",
    # Back twice to one state that is kept in memory, as after a loss that spiked.
    "recall": "build step keep step recall step step recall step",
    # A group that the optimizer is given after its first step, as fine-tuning layer by layer does.
    "add_group": "build step add_group step save step reshard build add_group load step",
    # No checkpoint at all.
    "train": "build step step step",
}

STEPS = ("step", "overflow", "accumulate", "compute_gradients", "apply_gradients")
"""Operations that make or use gradients."""

FORWARDS = ("step", "overflow", "accumulate", "compute_gradients")
"""Those of them that run forwards, which see parameters in their compute dtype."""

UPDATES = ("step", "apply_gradients")
"""Those of them in which the optimizer steps."""

JOINS = ("unfreeze", "add_group")
"""The ways in which parameters that are trained later join."""

KIND_OF = {"load_previous": "load", "load_previous_model": "load_model_only"}
"""Words of a program that are another kind of operation in its plan: they read the checkpoint before the latest."""

LOADS = ("load", "load_model_only", "load_optimizer_only", "load_schedule_only", "recall")
"""Kinds of operations that restore what was saved, or a part of it."""

WRITES = ("save", "save_kept", "finish_save")
"""Kinds of operations after which a checkpoint is complete."""

TAKES = ("save", "keep", "begin_save")
"""Kinds of operations that take the state as it is, to be written or loaded, and change nothing."""


FIT = "fit"
"""The operation of a trainer that owns its loop, in which all of a session happens. No program names it."""

ARMS = "arms"
"""The first word of a trainer's programs, which are no list of operations: `shardproof.trainer.arms` expands them."""

_OF_ARMS = ("build", "step", "save", "load")
_EXPANSION = "shardproof.trainer.arms:expand"


_provided: dict[str, str] = {}


NO_CHECKPOINT = -1
"""The number of what is kept in memory, and of operations without a checkpoint."""


@dataclass(frozen=True)
class Op:
    """One operation with every argument resolved.

    * index: position in the program.
    * kind: one of `KINDS`.
    * arm: `main`, `uninterrupted`, `cold` or `resumed`, for readers.
    * session, mesh: which fresh ranks run it.
    * iteration: optimizer steps taken before it on this trajectory (a load restores the saved count).
    * init_seed: number of the build that initialised the model, so that two builds never start equal.
    * checkpoint: number of the checkpoint a save writes or a load reads.
    * taken: of one that completes a checkpoint, the operation after which the state was as the checkpoint has it.
    """

    index: int
    kind: str
    arm: str
    session: int
    mesh: Mesh
    iteration: int
    init_seed: int
    checkpoint: int = NO_CHECKPOINT
    taken: int = -1


def provide(name: str, program: str) -> None:
    """Have a program known by a name, such as that of a plugin.

    Args:
        program: its operations, separated by spaces.

    Raises:
        UsageError: an illegal sequence, or a name that another program has.
    """
    known = named_programs()
    if known.get(name, program) != program:
        raise UsageError.of(f"program {name!r}", program, [known[name]], "another name")
    operations(program)
    _provided[name] = program


def named_programs() -> dict[str, str]:
    """Every program that has a name: `PROGRAMS`, and those of plugins."""
    return {**_provided, **PROGRAMS}


def load_mesh(scenario: Scenario) -> Mesh | None:
    """The mesh that a scenario's load phase runs on; None where the relation has no answer for its mesh.

    same: the saving mesh. grow: twice dp_shard. shrink: dp_shard halved (rounded down). indivisible: a
    dp_shard that neither divides nor is divided by the saving one (2→3, 4→3, 3→2 …). tp_change: tp 1↔2.
    No relation leaves world 8.
    """
    return related_mesh(scenario.mesh, scenario.load)


@lru_cache(maxsize=1024)
def related_mesh(mesh: Mesh, load: str) -> Mesh | None:
    """`load_mesh` of a mesh and a relation."""
    shard = mesh.dp_shard
    match load:
        case "same":
            return mesh
        case "grow":
            grown = replace(mesh, dp_shard=shard * 2)
        case "shrink":
            if shard < 2:
                return None
            grown = replace(mesh, dp_shard=shard // 2)
        case "indivisible":
            other = next((n for n in (3, 2, 4, 5) if n % shard and shard % n), None)
            if other is None:
                return None
            grown = replace(mesh, dp_shard=other)
        case "tp_change":
            grown = replace(mesh, tp=2 if mesh.tp == 1 else 1)
        case literal:
            return mesh_literal(literal)
    return grown if grown.world <= 8 else None


def meshes(scenario: Scenario) -> tuple[Mesh, ...]:
    """Every mesh that the scenario's program runs on."""
    if scenario.fact("program", is_arms):
        return tuple(dict.fromkeys(op.mesh for op in expand(scenario)))
    target = load_mesh(scenario) if moves(scenario) else None
    return (scenario.mesh, target) if target else (scenario.mesh,)


def moves(scenario: Scenario) -> bool:
    """Whether the program goes to the load mesh."""
    return does(scenario, "reshard", "restart")


def changes(scenario: Scenario) -> bool:
    """Whether the ranks that load have another dtype policy, model, optimizer, options or release than those that
    save. Most rules ask, so the values that are known cost no call."""
    known = vars(scenario)
    for axis in LOAD_AXES:
        if axis not in known:
            if scenario.fact(axis, is_other):
                return True
        elif known[axis] not in _SAME:
            return True
    return False


LOAD_AXES = ("load_dtype", "load_model", "load_optimizer", "load_options", "load_version")
"""The axes that are those of the ranks that load."""

_SAME = (None, "same")
"""What such an axis is where those ranks have what the saving ranks had."""


def is_other(value: object) -> bool:
    """Whether the value of such an axis is another one than the saving ranks'."""
    return value not in _SAME


@lru_cache(maxsize=4096)
def is_arms(program: str) -> bool:
    """Whether a program is that of a trainer: its arms."""
    return program.split(" ", 1)[0] == ARMS


def does(scenario: Scenario, *kinds: str) -> bool:
    """Whether the program has an operation of one of these kinds."""
    return scenario.fact("program", _one_of(kinds))


@lru_cache(maxsize=4096)
def kinds_of(program: str) -> frozenset[str]:
    """The kinds of operations that a program has."""
    return frozenset(KIND_OF.get(word, word) for word in operations(program))


@lru_cache(maxsize=256)
def _one_of(kinds: tuple[str, ...]) -> Callable[[str], bool]:
    return lru_cache(maxsize=4096)(lambda program: not kinds_of(program).isdisjoint(kinds))


@lru_cache(maxsize=4096)
def operations(program: str) -> tuple[str, ...]:
    """The operation names of a program given by name or spelled out.

    Raises:
        UsageError: an unknown name or an illegal sequence.
    """
    if is_arms(program):
        return _OF_ARMS
    words = tuple((PROGRAMS.get(program) or _provided.get(program, program)).split())
    unknown = [w for w in words if w not in KINDS]
    if unknown and len(words) > 1:
        raise UsageError.of(f"program {program!r}: operation", unknown[0], KINDS, "build step save")
    if unknown or not words:
        raise UsageError.of("program", program, (*named_programs(), f"or operations of: {' '.join(KINDS)}"), "resume")
    problem = illegal(words)
    if problem:
        raise UsageError(f"program {program!r}: {problem}; correct form: {mended(words)!r}")
    return words


BLIND = "a load that does nothing would pass"
"""What is wrong with a program, or a scenario, in which a load restores what is there."""


def require_telling(program: str) -> None:
    """Check that every load of a program that somebody asks for restores something that is not there already: a load
    that does nothing would pass, and nothing would be learned.

    A system may be run on such a program all the same: what a shrinker leaves of a load that crashes needs no step. A
    trainer's arms begin each load with another seed, so that theirs restore something.

    Raises:
        UsageError: a load restores what is there, with a program in which it does not.
    """
    if is_arms(program):
        return
    words = operations(program)
    idle = idle_load(words)
    if idle is not None:
        problem = f"operation {idle} ({words[idle]}) finds what it restores: {BLIND}"
        raise UsageError(f"program {program!r}: {problem}; correct form: {mended(words)!r}")


def is_telling(words: Sequence[str]) -> bool:
    """Whether operations are a legal program in which no load restores what is there already."""
    return not illegal(tuple(words)) and idle_load(words) is None


def expand(scenario: Scenario) -> tuple[Op, ...]:
    """The scenario's program with all arguments resolved; `reshard` and `restart` leave no Op of their own.

    Raises:
        UsageError: an illegal program, or a load relation that has no answer for the scenario's mesh.
    """
    if is_arms(scenario.program):
        found: tuple[Op, ...] = resolve(_EXPANSION)(scenario)
        return found
    words = operations(scenario.program)
    target = load_mesh(scenario)
    if target is None and {"reshard", "restart"} & set(words):
        raise UsageError.of(
            "load", scenario.load, f"a relation that mesh {scenario.mesh} can follow within world 8", "same"
        )
    ops: list[Op] = []
    session, mesh, iteration, builds = 0, scenario.mesh, 0, 0
    saved: list[int] = []  # the iteration of each checkpoint
    kept = begun = taken = 0  # the iteration that is in memory; the operations that took it, and what is being saved
    arm = "main"
    for word in words:
        match word:
            case "reshard" | "restart":
                assert target is not None
                session += word == "restart" or target != mesh or changes(scenario)
                mesh = target
                continue
            case "build":
                builds, iteration = builds + 1, 0
                arm = "cold" if saved else "main"
            case "save" | "begin_save":
                saved.append(iteration)
                begun = len(ops)
            case "save_kept":
                saved.append(kept)
            case "keep":
                kept, taken = iteration, len(ops)
            case "load" | "load_previous":
                iteration, arm = saved[-1 if word == "load" else -2], "resumed"
            case "recall":
                iteration, arm = kept, "resumed"
            case "load_model_only" | "load_previous_model" | "load_optimizer_only" | "load_schedule_only":
                arm = "resumed"
        op = Op(len(ops), KIND_OF.get(word, word), arm, session, mesh, iteration, builds - 1)
        if word in (*WRITES, "begin_save") or word.startswith("load"):
            op = replace(op, checkpoint=len(saved) - (2 if word in KIND_OF else 1))
        if word in WRITES:
            op = replace(op, taken=taken if word == "save_kept" else begun)
        ops.append(op)
        if word in ("step", "apply_gradients"):
            iteration += 1
        elif word in ("save", "begin_save") and arm == "main":
            arm = "uninterrupted"
    return tuple(ops)


def seed_of_replaced(index: int) -> int:
    """The number by which the values are drawn that operation `index`, a `replace_params`, gives the parameters; no
    build has it (`Op.init_seed`)."""
    return 1000 + index


def sessions(ops: Sequence[Op]) -> list[list[Op]]:
    """The operations of each session, in order."""
    grouped: dict[int, list[Op]] = {}
    for op in ops:
        grouped.setdefault(op.session, []).append(op)
    return list(grouped.values())
