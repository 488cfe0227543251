"""What the arms `resumed` and `used` say of a load after which a trainer has another state than the one that was saved.

Beside the two values of what differs there is what the trainer held before the load, and what the run held at earlier
moments. So it can be told what a wrong value is:

    a fresh trainer's    what the load left as it was
    older                what the run that saved had some steps before the save
    added up             a count to which the load added the one that was saved, where it should have replaced it

Wrong parameters come first, since nothing else weighs as much.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardproof.diff import Difference, as_numbers
from shardproof.observe.logical import Value
from shardproof.result import Failure
from shardproof.trainer.arms import Session
from shardproof.trainer.data.given import UNKNOWN
from shardproof.trainer.judge.unsteady import is_garbage, largest
from shardproof.trainer.values.every_mesh import BESIDE, STATE, Name, Values
from shardproof.trainer.values.exchanged import exchanged
from shardproof.trainer.values.rounding import FLOATS
from shardproof.trainer.values.streams import of_streams
from shardproof.trainer.values.wording import called, differ, first_in_a_step, first_of, is_raised, listed

AGAIN = "The learning-rate schedule starts again from the beginning"

STARTS_AGAIN = {
    "scheduler": AGAIN,
    "scaler": "The loss scale starts again from its first value",
    "rng": "Random numbers are drawn from the state of a fresh process",
}
"""Role of what a load leaves as it is → what that means to a run, where nothing else is wrong."""


DERIVED = frozenset({"_last_lr", "_step_count", "base_lrs", "_get_lr_called_within_step"})
"""What a schedule of torch keeps beside its place: where nothing else of it is wrong, it goes on from where it was."""

UNWRITTEN = (
    "Some of what is there are numbers that no training comes to, as memory holds that nobody wrote: look at a buffer "
    "that the load or what wrote the checkpoint took (`torch.empty`) and did not fill."
)

WRITTEN_LATE = "Look at a save that goes on after it has returned, and at tensors that it takes without a copy."

FEW = 2
"""So few numbers may be those of an earlier moment by chance."""

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum")
MOST_NAMES = 3
"""So many names are in a sentence."""

TINIEST = 1e-30
"""What is smaller, and not zero, is no sum of steps. The bits of whole numbers and addresses are such numbers."""


@dataclass(frozen=True)
class Loaded:
    """The moments around a load.

    * saved: what should be there. before, after: what the trainer holds right before the load and right after it.
    * earlier: what the run that saved held before the save, the latest moment first, with words for the moment.
    * free: what may be anything right after a load. later: what the run held after each step behind the save.
    * begun: the seed that the process which loads was begun with; -1 of none.
    """

    saved: Values
    before: Values
    after: Values
    earlier: Sequence[tuple[str, Values]] = ()
    free: Collection[Name] = field(default_factory=set)
    later: Sequence[tuple[str, Values]] = ()
    begun: int = -1

    def left_alone(self, found: Sequence[Difference]) -> bool:
        """Whether all of these values, or their absence, are what they were before the load."""
        return all(self.before.get(name) == self.after.get(name) for name in _names(found))

    def restores_nothing(self, found: Sequence[Difference]) -> bool:
        """Whether parameters, and all else that a load should change, are as they were before it."""
        every = {*self.saved, *self.before} - {*self.free}
        due = {name for name in every if self.saved.get(name) != self.before.get(name)}
        restored = any(self.after.get(name) == self.saved.get(name) for name in due)
        return self.left_alone(found) and not restored and any(one.key.role == "param" for one in found)

    def emptied(self) -> set[Name]:
        """The moments of the optimizer, if all that were other than zero at the save are zeros after the load."""
        due = {name for name, value in self.saved.items() if name[0] in MOMENTS and any(value.data)}
        zeros = {name for name in due if name in self.after and not any(self.after[name].data)}
        return due if due == zeros else set()

    def moment_of(self, found: Sequence[Difference], moments: Sequence[tuple[str, Values]]) -> str:
        """The first moment at which the run had all values that differ after the load; empty without such a one."""
        return next(
            (moment for moment, values in moments
             if all(values.get(name) == self.after.get(name) for name in _names(found))),
            "",
        )  # fmt: skip


def of_resumed(
    found: Sequence[Difference], loaded: Loaded, *, after_load: bool, disagreed: Collection[Name] = (), data: str = "",
    step: int = -1, random: Sequence[Difference] = (),
) -> str:  # fmt: skip
    """What a resumed run has lost.

    Args:
        after_load: whether it differs right after the load already. disagreed: what ranks that should have
            the same do not have alike then, so that it was compared as one rank has it. data: which other data the
            step was given, as a sentence (`shardproof.trainer.data.given`). step: the number of the step; -1 of none.
            random: the random states that differ right after the load, where later data are told first.
    """
    if not found:
        return ""
    if not after_load and disagreed:
        names = ", ".join(called(*name) for name in sorted(disagreed)[:MOST_NAMES])
        more = f" and {len(disagreed) - MOST_NAMES} more" if len(disagreed) > MOST_NAMES else ""
        return (
            f"The load leaves ranks apart ({names}{more}), as `ranks agree` tells, and after a step {differ(found)} "
            f"from the run that went on without a break: look at what only some ranks load. {first_of(found)}"
        )
    if not after_load:
        unseen = not loaded.after  # a trainer with fit is observed after steps alone
        equal = "After the load all that is compared is equal, but after a step"
        when = f"After {'a step' if step < 0 else f'step {step}'} of the resumed run" if unseen or random else equal
        if random:
            when = f"{when} {differ(found)} from the run that went on without a break."
            unrestored = _not_restored(random, loaded)
            return (
                f"{unrestored} {when} {data.replace(UNKNOWN, '.')}"
                if UNKNOWN in data
                else f"{when} {data} {unrestored}"
            )
        return f"{when} {differ(found)} from the run that went on without a break. {data or first_in_a_step(found)}"
    found = sorted(found, key=lambda one: one.key.role != "param")
    if loaded.restores_nothing(found):
        what = f"Right after the load everything that `load` should restore is a fresh trainer's: {_in_order(found)}."
        return f"{what} {first_of(found)}"
    if emptied := loaded.emptied():
        others = [one for one in found if (one.key.role, one.key.fqn) not in emptied and one.key.role != "step"]
        told = [_wrong(others, loaded)] if others else []
        return " ".join(
            [*told, _emptied(emptied)] if others and others[0].key.role == "param" else [_emptied(emptied), *told]
        )
    kept = {role for role, _ in loaded.after} & set(BESIDE)
    lost = [] if kept else [one for one in found if one.kind == "missing" and one.key.role in BESIDE]
    others = [one for one in found if one not in lost]
    told = [_lost(lost)] if lost else []
    if others:
        told.insert(0 if others[0].key.role == "param" else len(told), _wrong(others, loaded))
    return " ".join(told)


def _not_restored(random: Sequence[Difference], loaded: Loaded) -> str:
    """That random states are not what they were at the save, before a step is given other data."""
    names = _of_generators(random)
    lost = f"`load` does not restore {names}; what is there is a fresh trainer's"
    lost = lost if loaded.left_alone(random) else f"right after the load {names} {_differ(random)} already"
    where = of_streams(random, loaded.saved, loaded.after, loaded.begun)
    drawn = f"What is drawn from {'it' if len(random) == 1 else 'them'}, such as an order of samples, is another one."
    return " ".join(filter(None, (f"{STARTS_AGAIN['rng']}: {lost}.", where, drawn)))


def _of_generators(random: Sequence[Difference]) -> str:
    names = sorted({one.key.fqn for one in random})
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"rng of {', '.join(names[:MOST_NAMES])}{more}"


def _differ(found: Sequence[Difference]) -> str:
    return "differs" if len(_names(found)) == 1 else "differ"


def _emptied(names: Collection[Name]) -> str:
    """All moments of the optimizer are zeros."""
    roles, params = ", ".join(sorted({role for role, _ in names})), {name for _, name in names}
    return (
        f"After the resume the optimizer starts again: `load` restored no optimizer state ({roles} of {len(params)} "
        "parameters are zeros, as `get_optimizer_state_dict` makes them, or a step without gradients)."
    )


def _lost(lost: Sequence[Difference]) -> str:
    """All state of the optimizer is missing."""
    what, params = ", ".join(sorted({_state_name(one) for one in lost})), sorted({_parameter(one) for one in lost})
    whose = f"{len(params)} parameters" if len(params) > 1 else params[0]
    again = (
        "" if {one.key.role for one in lost} == {STATE} else "After the resume the optimizer starts again at step 1: "
    )
    return f"{again}`load` restored no optimizer state ({what} of {whose} {'are' if len(lost) > 1 else 'is'} missing)."


def _wrong(found: Sequence[Difference], loaded: Loaded) -> str:
    """What is wrong right after a load, and what it is instead."""
    if loaded.left_alone(found):
        places = {one.key.fqn.rpartition(".")[2] for one in found}
        told = places - DERIVED and {one.key.role for one in found}
        again = next((text for role, text in STARTS_AGAIN.items() if told == {role}), "")
        none = all(one.kind == "missing" for one in found)
        there = "as in a fresh trainer, nothing is there" if none else "what is there is a fresh trainer's"
        restored = f"`load` does not restore {_in_order(found)}; {there}."
        return f"{again}: {restored} {first_of(found)}" if again else f"{restored} {first_of(found)}"
    be = "is" if len(_names(found)) == 1 else "are"
    of_params = any(one.key.role == "param" for one in found)
    if of_params and (moment := loaded.moment_of(found, loaded.later)):
        newer = f"`load` gives a newer state: {_in_order(found)} {be} what the run had {moment}, behind the save."
        return f"{newer} {first_of(found)} {WRITTEN_LATE}"
    few = len(found) <= FEW and not any(one.key.role == "param" for one in found)  # numbers that a period repeats
    if not few and (moment := loaded.moment_of(found, loaded.earlier)):
        older = f"`load` gives an older state: {_in_order(found)} {be} what the run had {moment}, before the save."
        return f"{older} {first_of(found)}"
    what = f"Right after the load {_in_order(found)} {_differ(found)} from the run that went on without a break."
    groups = exchanged(found, loaded.saved, loaded.after)
    what = f"{what} {groups}" if groups else what
    unwritten = any(is_unwritten(loaded.saved.get(name), loaded.after.get(name)) for name in _names(found))
    return f"{what} {first_of(found)}{f' {UNWRITTEN}' if unwritten else ''}"


def is_unwritten(expected: Value | None, observed: Value | None) -> bool:
    """Whether a tensor of floats has values that training does not come to: NaN, far too large, or next to nothing."""
    if expected is None or observed is None or not largest(expected) or observed.dtype not in FLOATS:
        return False
    if is_garbage([observed], expected):
        return True
    sizes = [np.abs(as_numbers(value).astype(np.float64)) for value in (expected, observed)]
    tiny = [((size > 0) & (size < TINIEST)).any() for size in sizes]
    return bool(tiny[1] and not tiny[0])


def of_used(
    found: Sequence[Difference], had: Values, saved: Values, after: Values, data: str = "",
    random: Sequence[Difference] = (),
) -> str:  # fmt: skip
    """What a load into a trainer that has stepped leaves behind.

    Args:
        had, after: what it held right before the load and right after it. saved: what a fresh trainer has loaded.
        data, random: as for `of_resumed`.
    """
    if not found:
        return ""
    if random:
        return (
            f"A trainer that has stepped before it loads is left with something of its own: {_of_generators(random)} "
            f"{_differ(random)} after the load, and what is drawn, such as an order of samples, is another one. So "
            f"{differ(found)} from a fresh one that loads. {data.replace(UNKNOWN, '.')}"
        )
    told = (
        f"A trainer that has stepped before it loads is left with something of its own: {differ(found)} from a "
        f"fresh one that loads. {data or first_in_a_step(found, 'in the fresh one')}"
    )
    added = next(filter(None, (_added(name, had, saved, after) for name in _names(found))), "")
    return f"{told} {added}" if added else told


def of_second_load(found: Sequence[Difference], first: Values, second: Values, step: int) -> str:
    """What a second load in one process gives, of a folder that was written again since the first.

    Args:
        found: what is not as it was saved last. first, second: what there was after either load. step: the number of
            the last step before the first save.
    """
    what = f"{differ(found)} from what was saved. {first_of(found)}"
    if any(first.get(name) != second.get(name) for name in _names(found)):
        return f"After a second load in the same process, of a folder that was written again since the first, {what}"
    return (
        f"The second load in the same process gave what the first had loaded (the state after step {step}), though the "
        f"folder was written again since: something keeps the file's old content, such as a cache by its name. {what}"
    )


def refusal(used: Session, error: Failure | None, folder: Path) -> str:
    """That a trainer does not save into a folder which has a checkpoint, or removes it as an old one, as any trainer
    may; empty for any other end of the session. folder: into which it saves twice."""
    again, loaded = ([op.index for op in used.ops if op.kind == kind][-1:] for kind in ("save", "load"))
    removed = error is not None and [error.op] == loaded and not any(path.is_file() for path in folder.rglob("*"))
    if error is None or ([error.op] != again and not removed) or not is_raised(error):
        return ""
    return (
        "a second load in the same process was not compared, since `save` refuses or removes a folder that has a "
        f"checkpoint ({error.type})"
    )


def _added(name: Name, had: Values, saved: Values, after: Values) -> str:
    """That a count is the sum of what was there and what was loaded; empty where it is not."""
    there, loaded, comes_to = (_count(name, values) for values in (had, saved, after))
    if not there or not loaded or comes_to != there + loaded:
        return ""
    return (
        f"{name[1]} is {comes_to} = {there} + {loaded}: the load adds what a fresh trainer has after it to the count "
        "that was there already, in place of setting it."
    )


def _count(name: Name, values: Values) -> int | None:
    """A whole number that is recorded as a line of type and value, such as `int 3`."""
    value = values.get(name)
    text = value.data.decode() if value is not None and value.dtype == "utf8" else ""
    kind, _, number = text.partition(" ")
    return int(number) if kind == "int" and number.isdecimal() else None


def _in_order(found: Sequence[Difference]) -> str:
    """The values that differ, parameters by themselves and first."""
    parts = [[one for one in found if (one.key.role == "param") == first] for first in (True, False)]
    return ", ".join(listed(part) for part in parts if part)


def _names(found: Sequence[Difference]) -> list[Name]:
    return list(dict.fromkeys((one.key.role, one.key.fqn) for one in found))


def _parameter(difference: Difference) -> str:
    name = difference.key.fqn
    return name.rpartition(".")[0] if difference.key.role == "state" else name


def _state_name(difference: Difference) -> str:
    return difference.key.fqn.rpartition(".")[2] if difference.key.role == "state" else difference.key.role
