"""Decides which sequences of operations are legal programs, and which of them can reveal a load without effect.

`illegal` says what is wrong with a sequence: a load before any save, a step while the gradients of another one wait.
`idle_load` finds a load that restores what is there already, after which nothing differs whether it worked or not. For
example `build save load` is legal and shows nothing; `build save step load` shows something. `mended` adds what it
takes for a sequence to be both.

What decides is a number for the parameters, one for the optimizer's state and one for the learning-rate schedule
(`_State`): operations that change them give them other numbers, and equal numbers stand for equal values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace


def completion(words: Sequence[str]) -> tuple[str, ...]:
    """The operations that take up gradients which a program leaves waiting, and that end the save that it began."""
    progress = _Progress()
    for word in words:
        progress.does(word)
    due = _COMPLETES[progress.due][:1] if progress.due else ()
    return (*due, "finish_save") if progress.saving else due


def idle_load(words: Sequence[str]) -> int | None:
    """The position of the first load that restores a value already present in the live state, so that a load without
    effect would go unnoticed. None without such a load."""
    states = _States()
    for position, word in enumerate(words):
        read = states.read_by(word)
        if read is not None:
            match word:
                case "load_schedule_only":
                    idle = read.schedule == states.now.schedule
                case "load_optimizer_only" if read.optimizer == states.now.optimizer:
                    idle = True
                case _:
                    idle = not states.now.model.isdisjoint(read.model)
            if idle:
                return position
        states.does(position, word)
    return None


@dataclass(frozen=True)
class _State:
    """Numbers of what parameters, an optimizer and a schedule hold: other numbers, other values. Parameters have
    several, where a load of the optimizer alone leaves open whether it has restored them too.

    iteration: optimizer steps taken, by which gradients are drawn."""

    model: frozenset[int] = frozenset()
    optimizer: int = 0
    schedule: int = 0
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
            case "load_previous" | "load_previous_model":
                return self.saved[-2]
        return self.saved[-1] if word.startswith("load") else None

    def does(self, position: int, word: str) -> None:
        """Note an operation."""
        now, read = self.now, self.read_by(word)
        match word:
            case "build":  # the first has other hyperparameters than those that follow
                made = "later" if position else "first"
                self.now = _State(frozenset({self._number(position)}), self._number(made), self._number((word, made)))
            case "step" | "apply_gradients":
                optimizer = self._number(("step", now.optimizer, now.schedule, now.iteration))
                model = frozenset(self._number((optimizer, version)) for version in now.model)
                self.now = _State(model, optimizer, self._number(("scheduled", now.schedule)), now.iteration + 1)
            case "add_group":
                self.now = replace(now, optimizer=self._number((word, now.optimizer)))
            case "replace_params":
                self.now = replace(now, model=frozenset({self._number(position)}))
            case "save" | "begin_save":
                self.saved.append(now)
            case "keep":
                self.kept = now
            case "save_kept":
                self.saved.append(self.kept)
            case "load_model_only" | "load_previous_model" if read is not None:
                self.now = replace(now, model=read.model)
            case "load_schedule_only" if read is not None:
                self.now = replace(now, schedule=read.schedule)
            case "load_optimizer_only" if read is not None:
                self.now = replace(now, model=now.model | read.model, optimizer=read.optimizer)
            case _ if read is not None:
                self.now = read

    def _number(self, made_of: object) -> int:
        return self.numbers.setdefault(made_of, len(self.numbers))


@dataclass
class _Progress:
    """What has been done so far, as far as it decides what may follow. due: the operation whose gradients wait for an
    optimizer step; empty where none do. saving: a save has begun and is not over."""

    built: bool = False
    saves: int = 0
    kept: bool = False
    due: str = ""
    saving: bool = False

    def obstacle(self, word: str) -> tuple[str, tuple[str, ...]]:
        """Why an operation may not follow, and what must come before it; both empty where it may."""
        if self.saving and (word in _NOT_BESIDE_A_SAVE or word.startswith("load")):
            return "comes while a save is under way", ("finish_save",)
        if word in ("reshard", "restart", "build"):
            return "", ()
        if not self.built:
            return "comes before a build", ("build",)
        if self.due and word not in (*_BESIDE_GRADIENTS, *_COMPLETES[self.due]):
            return f"comes while gradients of {self.due} wait for their step", _COMPLETES[self.due][:1]
        if word == "apply_gradients" and not self.due:
            return "has no gradients to apply", ("compute_gradients",)
        if word.startswith("load") and not self.saves:
            return "comes before any save", ("step", "save", "build")
        if word in ("load_previous", "load_previous_model") and self.saves < 2:
            return "comes before a second save", ("step", "save", "step")
        if word == "finish_save" and not self.saving:
            return "has no save to wait for", ("begin_save", "step")
        if word in ("recall", "save_kept") and not self.kept:
            return "comes before anything is kept", ("keep", "step")
        return "", ()

    def does(self, word: str) -> None:
        """Note an operation."""
        match word:
            case "reshard" | "restart":
                self.built, self.kept, self.due = False, False, ""
            case "build":
                self.built, self.due = True, ""
            case "save" | "save_kept":
                self.saves += 1
            case "begin_save":
                self.saves, self.saving = self.saves + 1, True
            case "finish_save":
                self.saving = False
            case "keep":
                self.kept = True
            case "accumulate" | "compute_gradients":
                self.due = word
            case "step" | "apply_gradients":
                self.due = ""


_COMPLETES = {"accumulate": ("step", "compute_gradients"), "compute_gradients": ("apply_gradients",)}
"""Operation that leaves gradients waiting → those that may take them up, the plainest first."""

_BESIDE_GRADIENTS = ("save", "begin_save", "finish_save", "keep", "save_kept")
"""What may come while gradients wait: nothing of it touches them."""

_NOT_BESIDE_A_SAVE = ("reshard", "restart", "build", "save", "begin_save", "save_kept", "recall")
"""What does not come while a save is under way, beside every load: its checkpoint is not complete, or the ranks would
write two at once."""


def joined_at_loads(words: Sequence[str], joins: Collection[str]) -> Iterator[tuple[str, bool, bool]]:
    """Of each load: its word, whether one of the operations `joins` had come between the build and the save of what is
    loaded, and whether one has come since the build now. For example, `build save unfreeze step load` gives
    `("load", False, True)` for `unfreeze`."""
    joined, saved, kept = False, [False, False], False
    for word in words:
        if word in joins:
            joined = True
        match word:
            case "build":
                joined = False
            case "save" | "begin_save":
                saved.append(joined)
            case "keep":
                kept = joined
            case "save_kept":
                saved.append(kept)
            case "recall":
                yield word, kept, joined
            case "load" | "load_model_only" | "load_optimizer_only":
                yield word, saved[-1], joined
            case "load_previous" | "load_previous_model":
                yield word, saved[-2], joined


def mended(words: Sequence[str]) -> str:
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
        if able and (word.startswith("load") or word == "recall") and idle_load([*mended, word]) is not None:
            add("step")
        add(word)
    for word in completion(mended) if progress.saving else ():
        add(word)
    return " ".join(mended if progress.built else [*mended, "build"])


def illegal(words: tuple[str, ...]) -> str:
    """What is wrong with a sequence, after "program …: "; empty where it is legal."""
    progress = _Progress()
    for position, word in enumerate(words):
        if word == "build" and position and words[position - 1] == "build":
            return f"operation {position} (build) repeats the one before it"
        obstacle, _ = progress.obstacle(word)
        if obstacle:
            return f"operation {position} ({word}) {obstacle}"
        progress.does(word)
    if progress.saving:
        return "it ends while a save is under way"
    return "" if progress.built else "it ends without a build"
