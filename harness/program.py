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
from dataclasses import dataclass, field, replace
from functools import lru_cache

from harness.errors import UsageError
from harness.scenario import Mesh, Scenario, mesh_literal

KINDS = (
    "build",  # construct model and optimizer; parameters from the next initialisation seed
    "step",  # all microbatches, gradient reduction, optimizer step
    "overflow",  # a step one of whose gradients is infinite on one rank: must be skipped (needs a loss scale)
    "accumulate",  # the first microbatch of a step, without synchronising: the next operation that steps has the others
    "compute_gradients",  # a step without its optimizer step: all microbatches, and the reduction
    "apply_gradients",  # the optimizer step that is still due
    "save",  # write a checkpoint of model, optimizer and schedule
    "keep",  # keep a copy of the state dicts in memory
    "load",  # read the latest checkpoint into the model and optimizer that exist now
    "load_previous",  # read the checkpoint before the latest one; a `load` in the plan
    "load_model_only",  # read only the parameters and buffers of the latest checkpoint
    "load_optimizer_only",  # read only the optimizer's state and param groups
    "recall",  # load the state dicts that were kept in memory
    "reload_params",  # refresh optimizer-owned master copies from the model's parameters
    "unfreeze",  # make the parameters that the model marks `later` trainable
    "add_group",  # the same, and give them to the optimizer in a group of their own, which it has not had until then
    "reshard",
    "restart",
)

SHOWS_IN = {
    "step": ("accumulate", "compute_gradients", "apply_gradients"),
    "save": ("keep",),
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
    # The optimizer's state alone, under other weights.
    "optimizer_only": "build step step save reshard build step load_optimizer_only step",
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

KIND_OF = {"load_previous": "load"}
"""Words of a program that are another kind of operation in its plan."""

LOADS = ("load", "load_model_only", "load_optimizer_only", "recall")
"""Kinds of operations that restore what was saved, or a part of it."""


_provided: dict[str, str] = {}


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
    """

    index: int
    kind: str
    arm: str
    session: int
    mesh: Mesh
    iteration: int
    init_seed: int
    checkpoint: int = -1


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
    return _load_mesh(scenario.mesh, scenario.load)


@lru_cache(maxsize=1024)
def _load_mesh(mesh: Mesh, load: str) -> Mesh | None:
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
    target = load_mesh(scenario) if moves(scenario) else None
    return (scenario.mesh, target) if target else (scenario.mesh,)


def moves(scenario: Scenario) -> bool:
    """Whether the program goes to the load mesh."""
    return does(scenario, "reshard", "restart")


def changes(scenario: Scenario) -> bool:
    """Whether the ranks that load have another dtype policy or release than those that save."""
    return scenario.load_dtype is not None or scenario.load_version != "same"


def does(scenario: Scenario, *kinds: str) -> bool:
    """Whether the program has an operation of one of these kinds."""
    return scenario.fact("program", _one_of(kinds))


def kinds_of(program: str) -> frozenset[str]:
    """The kinds of operations that a program has."""
    return frozenset(KIND_OF.get(word, word) for word in operations(program))


@lru_cache(maxsize=256)
def _one_of(kinds: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda program: not kinds_of(program).isdisjoint(kinds)


@lru_cache(maxsize=4096)
def operations(program: str) -> tuple[str, ...]:
    """The operation names of a program given by name or spelled out.

    Raises:
        UsageError: an unknown name or an illegal sequence.
    """
    words = tuple((PROGRAMS.get(program) or _provided.get(program, program)).split())
    unknown = [w for w in words if w not in KINDS]
    if unknown or not words:
        raise UsageError.of("program", program, (*named_programs(), f"or operations of: {' '.join(KINDS)}"), "resume")
    problem = _illegal(words)
    if problem:
        raise UsageError(f"program {program!r}: {problem}; correct form: {_mended(words)!r}")
    return words


BLIND = "a load that does nothing would pass"
"""What is wrong with a program, or a scenario, in which a load restores what is there."""


def require_telling(program: str) -> None:
    """Check that every load of a program that somebody asks for restores something that is not there already: a load
    that does nothing would pass, and nothing would be learned.

    A system may be run on such a program all the same: what a shrinker leaves of a load that crashes needs no step.

    Raises:
        UsageError: a load restores what is there, with a program in which it does not.
    """
    words = operations(program)
    idle = _idle_load(words)
    if idle is not None:
        problem = f"operation {idle} ({words[idle]}) finds what it restores: {BLIND}"
        raise UsageError(f"program {program!r}: {problem}; correct form: {_mended(words)!r}")


def is_telling(words: Sequence[str]) -> bool:
    """Whether operations are a legal program in which no load restores what is there already."""
    return not _illegal(tuple(words)) and _idle_load(words) is None


def completion(words: Sequence[str]) -> tuple[str, ...]:
    """The operations that take up gradients which a program leaves waiting."""
    progress = _Progress()
    for word in words:
        progress.does(word)
    return _COMPLETES[progress.due][:1] if progress.due else ()


def expand(scenario: Scenario) -> tuple[Op, ...]:
    """The scenario's program with all arguments resolved; `reshard` and `restart` leave no Op of their own.

    Raises:
        UsageError: an illegal program, or a load relation that has no answer for the scenario's mesh.
    """
    words = operations(scenario.program)
    target = load_mesh(scenario)
    if target is None and {"reshard", "restart"} & set(words):
        raise UsageError.of(
            "load", scenario.load, f"a relation that mesh {scenario.mesh} can follow within world 8", "same"
        )
    ops: list[Op] = []
    session, mesh, iteration, builds, kept = 0, scenario.mesh, 0, 0, 0
    saved: list[int] = []  # the iteration of each checkpoint
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
            case "save":
                saved.append(iteration)
            case "keep":
                kept = iteration
            case "load" | "load_previous":
                iteration, arm = saved[-1 if word == "load" else -2], "resumed"
            case "recall":
                iteration, arm = kept, "resumed"
            case "load_model_only" | "load_optimizer_only":
                arm = "resumed"
        op = Op(len(ops), KIND_OF.get(word, word), arm, session, mesh, iteration, builds - 1)
        if word == "save" or word.startswith("load"):
            op = replace(op, checkpoint=len(saved) - (2 if word == "load_previous" else 1))
        ops.append(op)
        if word in ("step", "apply_gradients"):
            iteration += 1
        elif word == "save" and arm == "main":
            arm = "uninterrupted"
    return tuple(ops)


def sessions(ops: Sequence[Op]) -> list[list[Op]]:
    """The operations of each session, in order."""
    grouped: dict[int, list[Op]] = {}
    for op in ops:
        grouped.setdefault(op.session, []).append(op)
    return list(grouped.values())


def _idle_load(words: Sequence[str]) -> int | None:
    """The first load of parameters that are there already, or of an optimizer that has what it would get; None where
    there is none."""
    states = _States()
    for position, word in enumerate(words):
        read = states.read_by(word)
        if read is not None:
            of_optimizer_alone = word == "load_optimizer_only" and read.optimizer == states.now.optimizer
            if of_optimizer_alone or not states.now.model.isdisjoint(read.model):
                return position
        states.does(position, word)
    return None


@dataclass(frozen=True)
class _State:
    """Numbers of what parameters and an optimizer hold: other numbers, other values. Parameters have several, where a
    load of the optimizer alone leaves open whether it has restored them too.

    iteration: optimizer steps taken, by which gradients are drawn."""

    model: frozenset[int] = frozenset()
    optimizer: int = 0
    iteration: int = 0


@dataclass
class _States:
    """The live state, that of each checkpoint, and the one that is kept.

    A step from equal states gives equal states: after `load_previous`, it makes again what it made the first time.
    Gradients depend on the iteration and not on the parameters, and so may the optimizer's state.
    """

    now: _State = _State()
    kept: _State = _State()
    saved: list[_State] = field(default_factory=list)
    numbers: dict[object, int] = field(default_factory=dict)

    def read_by(self, word: str) -> _State | None:
        """What a load reads; None, of another operation."""
        match word:
            case "recall":
                return self.kept
            case "load_previous":
                return self.saved[-2]
        return self.saved[-1] if word.startswith("load") else None

    def does(self, position: int, word: str) -> None:
        """Note an operation."""
        now, read = self.now, self.read_by(word)
        match word:
            case "build":  # the first has other hyperparameters than those that follow
                self.now = _State(frozenset({self._number(position)}), self._number("later" if position else "first"))
            case "step" | "apply_gradients":
                optimizer = self._number(("step", now.optimizer, now.iteration))
                model = frozenset(self._number((optimizer, version)) for version in now.model)
                self.now = _State(model, optimizer, now.iteration + 1)
            case "add_group":
                self.now = replace(now, optimizer=self._number((word, now.optimizer)))
            case "save":
                self.saved.append(now)
            case "keep":
                self.kept = now
            case "load_model_only" if read is not None:
                self.now = replace(now, model=read.model)
            case "load_optimizer_only" if read is not None:
                self.now = replace(now, model=now.model | read.model, optimizer=read.optimizer)
            case _ if read is not None:
                self.now = read

    def _number(self, made_of: object) -> int:
        return self.numbers.setdefault(made_of, len(self.numbers))


@dataclass
class _Progress:
    """What has been done so far, as far as it decides what may follow. due: the operation whose gradients wait for an
    optimizer step; empty where none do."""

    built: bool = False
    saves: int = 0
    kept: bool = False
    due: str = ""

    def obstacle(self, word: str) -> tuple[str, tuple[str, ...]]:
        """Why an operation may not follow, and what must come before it; both empty where it may."""
        if word in ("reshard", "restart", "build"):
            return "", ()
        if not self.built:
            return "comes before a build", ("build",)
        if self.due and word not in ("save", "keep", *_COMPLETES[self.due]):
            return f"comes while gradients of {self.due} wait for their step", _COMPLETES[self.due][:1]
        if word == "apply_gradients" and not self.due:
            return "has no gradients to apply", ("compute_gradients",)
        if word.startswith("load") and not self.saves:
            return "comes before any save", ("step", "save", "build")
        if word == "load_previous" and self.saves < 2:
            return "comes before a second save", ("step", "save", "step")
        if word == "recall" and not self.kept:
            return "comes before anything is kept", ("keep", "step")
        return "", ()

    def does(self, word: str) -> None:
        """Note an operation."""
        match word:
            case "reshard" | "restart":
                self.built, self.kept, self.due = False, False, ""
            case "build":
                self.built, self.due = True, ""
            case "save":
                self.saves += 1
            case "keep":
                self.kept = True
            case "accumulate" | "compute_gradients":
                self.due = word
            case "step" | "apply_gradients":
                self.due = ""


_COMPLETES = {"accumulate": ("step", "compute_gradients"), "compute_gradients": ("apply_gradients",)}
"""Operation that leaves gradients waiting → those that may take them up, the plainest first."""


def _mended(words: Sequence[str]) -> str:
    """The program with what it takes to be legal, and to tell something: a build before the first operation, a save
    before a load, a step before a load that would find its checkpoint's state."""
    mended: list[str] = []
    progress = _Progress()

    def add(word: str) -> None:
        while missing := progress.obstacle(word)[1]:
            for each in missing:
                add(each)
        if mended[-1:] != ["build"] or word != "build":
            progress.does(word)
            mended.append(word)

    for word in words:
        able = not progress.obstacle(word)[0]
        if able and (word.startswith("load") or word == "recall") and _idle_load([*mended, word]) is not None:
            add("step")
        add(word)
    return " ".join(mended if progress.built else [*mended, "build"])


def _illegal(words: tuple[str, ...]) -> str:
    progress = _Progress()
    for position, word in enumerate(words):
        if word == "build" and position and words[position - 1] == "build":
            return f"operation {position} (build) repeats the one before it"
        obstacle, _ = progress.obstacle(word)
        if obstacle:
            return f"operation {position} ({word}) {obstacle}"
        progress.does(word)
    return "" if progress.built else "it ends without a build"
