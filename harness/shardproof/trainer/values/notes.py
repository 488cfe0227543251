"""What the arms of a trainer did not compare or could not see, in sentences that stand beside a verdict, a pass too."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from shardproof.observe.logical import Value
from shardproof.trainer.values.rates import ZERO, rates_in
from shardproof.trainer.values.rounding import FLOATS, HALF, HALF_OF_PARAMS, PARAMS, ROUNDING, ULPS
from shardproof.trainer.values.telling import one_or_many
from shardproof.trainer.values.wording import ROUNDED, called

OF_BEFORE = ", of the parameters from before the model was sharded"
"""What is told of an optimizer that steps other parameters than the model has, after its number of groups."""

MADE_TOO_EARLY = (
    "The optimizer steps other parameters than the model has: sharding, as by `fully_shard`, put new ones in their "
    "place; make the optimizer after it."
)


def apart(keys: Iterable[tuple[str, str]]) -> str:
    """State of an optimizer that every rank keeps differently, so that another mesh has nothing to compare with."""
    names = in_short(sorted(name for _, name in keys))
    return f"not compared, since the ranks of one mesh have it differently: {names}"


def on_ranks_apart(keys: Iterable[tuple[str, str]]) -> str:
    """What ranks have differently, so that the copies of some of them are in no comparison."""
    return (
        f"not compared, since ranks have it differently: {_few(keys)}; only the copy that most ranks have is compared"
    )


def of_noise(names: Iterable[str], followed: Collection[tuple[str, str]] = ()) -> str:
    """Parameters whose gradient is zero but for rounding in both ways, so that nothing made of it is compared.

    Args:
        followed: what is not alike from a later step on, and may follow from these parameters.
    """
    told = (
        "not compared, since the gradient is zero but for rounding in both ways, and what an optimizer makes of that "
        f"is noise: {_few([(PARAMS, name) for name in names])}"
    )
    behind = f"; nor what is alike before it moves, and may follow from it: {_few(followed)}"
    return told + (f"{behind}; without these parameters, as by `bias=False`, it is" if followed else "")


def shared_out_by_hand(keys: Iterable[tuple[str, str]]) -> str:
    """Lists of parameters that ranks have differently, since the optimizer of each rank steps parameters of its own."""
    return f"each rank's optimizer steps parameters of its own, and none has one of another rank's: {_few(keys)}"


END_NOT_SEEN = "what there is when `fit` has returned is not compared: it could not be looked at any more"


def idle(keys: Iterable[tuple[str, str]]) -> str:
    """Generators that are not compared."""
    names = in_short(sorted(name for _, name in keys))
    return f"not compared, since nothing is drawn from them after the save, or every step seeds them anew: {names}"


def without_effect(keys: Iterable[tuple[str, str]]) -> str:
    """Random states that differ between two runs, while all compared values of later steps are equal."""
    return (
        f"not alike, and not compared, since all that later steps make is the same: {_few(keys)}; each `iter` of a "
        "DataLoader draws a seed, and a model that draws random numbers, as dropout does, would get others"
    )


def never_drawn(keys: Iterable[tuple[str, str]]) -> str:
    """Random states that differ between two runs, of which no model draws anything, and whose data are the same."""
    return f"not alike, and no cause, since the models draw nothing and are given the same data: {_few(keys)}"


def differ_already(keys: Iterable[tuple[str, str]]) -> str:
    """What two sessions differ in before a step that is given other data, which is told first."""
    return f"not alike before that already: {_few(keys)}"


def of_loaders(keys: Iterable[tuple[str, str]]) -> str:
    """Parts of a loader that one run has and the other has not, or that are alike only after a step."""
    return (
        f"not compared, since the model is given the same in every step: {_few(keys)}, which one of the runs has "
        "alone, or which each step sets"
    )


def of_each_step(keys: Iterable[tuple[str, str]]) -> str:
    """Tensors that only one of two sessions has right after a load, and that each step makes alike in both."""
    return f"not compared right after the load, since each step makes it anew: {_few(keys)}"


def of_one_mesh(keys: Iterable[tuple[str, str]]) -> str:
    """Parts of a loader that one mesh has and the other has not, or that steps set."""
    return f"not compared, since one of the two meshes has it alone, or each step sets it: {_few(keys)}"


def counted_steps(keys: Iterable[tuple[str, str]]) -> str:
    """Counts of a schedule's calls that differ where its rates and its place do not."""
    return f"not compared, since torch warns by it and does nothing else, and the schedule is the same: {_few(keys)}"


def of_one_way(keys: Iterable[tuple[str, str]], ranks: int = 2) -> str:
    """What only one of two ways has, or has in this shape. ranks: the most that either of them has."""
    own = "every rank has its own, or " * (ranks > 1)
    return f"not compared, since {own}only one of the two ways has it under this name and in this shape: {_few(keys)}"


def taken_for_settings(keys: Iterable[tuple[str, str]]) -> str:
    """Numbers and texts in which two ways to compute the same are not alike."""
    return f"not alike, and taken for settings that say which way it is: {_few(keys)}"


def left_by_a_save(keys: Iterable[tuple[str, str]]) -> str:
    """What of a trainer's own a save makes that nothing else does."""
    return f"not compared, since it is there in a run that saves alone: {_few(keys)}"


def as_counts(names: Sequence[str]) -> str:
    """A sentence on whole numbers that two ways have in the ratio of the axis' values."""
    return (
        f"{', '.join(names)}: apart by the ratio of the axis' two values, which is right of a count of micro-batches, "
        "and wrong of a count of updates."
    )


def drawn_otherwise(keys: Iterable[tuple[str, str]]) -> str:
    """Random states in which two ways to compute the same are not alike."""
    return f"not alike, and not compared, since one way may draw more numbers than the other: {_few(keys)}"


def of_each_rank(keys: Iterable[tuple[str, str]]) -> str:
    """What another mesh has nothing to compare with, since every rank has it for itself."""
    return f"not compared, since every rank has its own: {_few(keys)}"


def not_loaded(keys: Iterable[tuple[str, str]]) -> str:
    """What is compared after steps, and not right after a load."""
    return f"not compared right after the load, since no checkpoint need hold it: {_few(keys)}"


def matches_nothing(declared: str, pattern: str, names: Iterable[str]) -> str:
    """That a pattern of `transient` or `local` fits no name of what was looked at. names: those that there are."""
    known = sorted(names)
    near = difflib.get_close_matches(pattern.replace("*", ""), known, 2, 0.5) or known[:2]
    such = f"; names are such as {' and '.join(f'`{name}`' for name in near)}" if near else ""
    return f"{declared}: `{pattern}` is the name of nothing that was looked at{such}"


def rounding(share: float, *, half: bool = False) -> str:
    """Two ways to compute the same that are apart by what another order of sums makes. half: in bf16 or fp16."""
    at_most = f"up to {share:.1g} of the largest change so far" if np.isfinite(share) else (
        f"up to {ULPS} units in the last place where nothing had changed before"
    )  # fmt: skip
    counts = f"; what counts as rounding is {as_rounding(half=True)}" if half else ""
    return f"{ROUNDED}: what differs is apart by no more than another order of sums makes, {at_most}{counts}"


def as_rounding(*, half: bool) -> str:
    """What counts as rounding, in words."""
    if not half:
        return f"{ROUNDING:.1g} of it, or {ULPS} units in the last place"
    return (
        f"that of bf16: {HALF:.2g} of a tensor in the root mean square, and {HALF_OF_PARAMS:.2g} of a parameter's "
        "change, since Adam turns a tiny gradient into a whole step"
    )


def _few(keys: Iterable[tuple[str, str]], most: int = 4) -> str:
    """The first names of some values, and how many more there are."""
    return in_short([called(*key) for key in sorted(keys)], most)


def in_short(names: Sequence[str], most: int = 4) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nothing_trains(steps: int, last: Mapping[tuple[str, str], Value], why: str) -> str:
    """No parameter has moved in the whole run.

    Args:
        last: what there was after the last step, settings of param groups among it. why: what optimizers had of the
            parameters when they stepped; empty where that is not one thing.
    """
    told = _rates_or(last, why) or (
        "The optimizer may step other tensors than the model computes with, as one that was made before `fully_shard`, "
        "or after a forward that left gathered parameters in place; or no gradient reaches it."
    )
    return f"No parameter has changed in {_often(steps)}, so that no arm could see a wrong update. {told}"


def nothing_moves(steps: int, names: Sequence[str]) -> str:
    """Nothing that could be trained has moved in the whole run of a trainer without parameters of modules."""
    few = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
    return (
        f"no parameter of a module was found, and no tensor of floats has changed in {_often(steps)} ({few}): "
        "if these are what is trained, look at the gradients that an update is given, and at what becomes of its result"
    )


def own_tensors_move(names: Sequence[str]) -> str:
    """The parameters of modules stay, and the trainer's own tensors move, as of `torch.func.functional_call`."""
    few = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
    return (
        f"no parameter of a module changes, and tensors of the trainer's own do, without torch's optimizers ({few}): "
        "if these are what is trained, a module that is only their template need not be in `state()`"
    )


def nothing_trains_later(steps: int, last: Mapping[tuple[str, str], Value], why: str) -> str:
    """No parameter has moved after the save. last, why: see `nothing_trains`."""
    times = "the step" if steps == 1 else f"the {steps} steps"
    told = _rates_or(last, why) or "No gradient may reach them, or a loss scale may skip these steps."
    return f"No parameter changes in {times} after the save, so that no arm could see what a load loses. {told}"


def _often(steps: int) -> str:
    return "a step" if steps == 1 else f"{steps} steps"


def _rates_or(last: Mapping[tuple[str, str], Value], why: str) -> str:
    """That every learning rate is zero, or else why parameters stay, as a sentence; empty where neither is known."""
    rates = rates_in(last)
    if rates and rates <= ZERO:
        return "Every learning rate is zero there."
    return f"{why[0].upper()}{why[1:]}." if why else ""


def never_moved(names: Sequence[str], number: int, why: str) -> str:
    """Parameters are the same after the last step as after the build. why: what optimizers had of them; empty where
    that is not one thing, or where none has them."""
    cause = why or (
        "no optimizer steps them, they are frozen, no gradient reaches them, or, in a dtype of few bits, each update "
        "is rounded away"
    )
    return (
        f"{len(names)} of {number} parameters never change, so that a wrong update of them could not be seen: "
        f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}; {cause}"
    )


def step_at_rate_zero(step: int, rate: str) -> str:
    """A step that changes no parameter, since the rate is zero. rate: as it is written."""
    return (
        f"step {step} changes no parameter, since the learning rate is {rate} in it: right of a warm-up that begins at "
        "zero, and otherwise a schedule that is built or stepped wrongly"
    )


def schedule_stands_still(rates: str, steps: int, program: str = "") -> str:
    """A note on a schedule that changes no rate in the whole run. program: a longer one, if there is one to try."""
    how = f"`--program '{program}'` may try it" if program else "`steps` can be more, or the milestone sooner"
    return (
        f"the learning rate is {rates} in each of the {steps} steps, though there is a schedule: what it does later, "
        f"as at a milestone, was not tried; {how}"
    )


def rate_put_back(step: int, set_to: str, used: str) -> str:
    """A note on a step that begins with another learning rate than its optimizer steps with.

    Args:
        set_to, used: the rates that were set before the step, and those that it steps with, as texts.
    """
    return (
        f"step {step} begins with a learning rate of {set_to} and steps with {used}, where others step with what they "
        "begin with: what the step before has set, as a schedule does, is lost there, as where an optimizer or a "
        "schedule is made anew"
    )


def schedule_goes_on(steps: int, program: str) -> str:
    """A note on a learning rate that moves, and that may do something else later. program: with more steps."""
    return (
        f"the learning rate moves in the {steps} steps that were run: what it does later, as at the end of a warm-up "
        f"or at a restart, was not tried; `--program '{program}'` may try it"
    )


def stays_zero(values: Sequence[Value | None]) -> bool:
    """Whether a tensor of floats is zero after the build and after each step."""
    first, *others = values
    zero = first is not None and first.dtype in FLOATS and bool(first.data) and not any(first.data)
    return zero and all(value == first for value in others)


def buffers_stay_zero(names: Sequence[str]) -> str:
    """A note on buffers of zeros, such as a bias that was to balance the load of experts and that no step has moved."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    many = "buffers are" if len(names) > 1 else "buffer is"
    return f"{len(names)} {many} zero and stay{'s' * (len(names) == 1)} so: {', '.join(names[:3])}{more}"


AS_NAN = "as NaN or infinity, so that no arm could see what else goes wrong"


def no_numbers(names: Sequence[str], first: str) -> str:
    """Parameters that end as NaN or infinity. first: where the first one is, as a sentence; empty where unknown."""
    which = f"{names[0]} ends" if len(names) == 1 else f"{len(names)} parameters end, such as {names[0]},"
    asked = "a division by a norm or by a count that is zero, a loss scale, memory that is read before it is written?"
    told = first or f"Where does the first one come from: {asked}"
    return f"{which} {AS_NAN}. {told}"


def schedule_runs_on(step: int, scale: tuple[str, str]) -> str:
    """A skipped step in which a schedule moves on. scale: before and after it."""
    return (
        f"in step {step} no parameter changed while the loss scale fell from {scale[0]} to {scale[1]}, as after an "
        "overflow, and the learning-rate schedule moved on all the same: it runs ahead of the updates by every step "
        "that is skipped"
    )


def frozen_is_stepped(names: Sequence[str], step: int, *, copies: bool) -> str:
    """An optimizer changes parameters that are frozen. copies: it steps fp32 copies of them."""
    why = (
        "the optimizer steps copies of them in fp32, as weight decay or moments do without a gradient, and these are "
        "written back"
    ) if copies else "a gradient from before may still be in `.grad`, and the optimizer takes it"  # fmt: skip
    return f"{_are(names)} frozen (`requires_grad` is False), and {_change(names)} in step {step}: {why}."


def declared_frozen_moves(names: Sequence[str], step: int, *, trainable: bool) -> str:
    """Parameters change that the trainer calls `frozen`. trainable: whether `requires_grad` is True of one."""
    why = (
        f"`requires_grad` is True of {'it' if len(names) == 1 else 'them'}, so look at what sets it, such as a wrapper "
        "or the load of an adapter, at what puts another parameter in its place, and at which the optimizer is given"
    ) if trainable else (
        "`requires_grad` is False, so look at a gradient from before in `.grad`, and at copies that the optimizer steps"
    )  # fmt: skip
    return f"{_are(names)} called `frozen`, and {_change(names)} in step {step}: {why}."


def uncounted(names: Sequence[str], steps: int) -> str:
    """An optimizer's counts of steps stay what they are, though the parameters move."""
    return (
        f"The optimizer never counts its steps: its `step` of {one_or_many(names)} is the same after each of {steps} "
        "steps that change it. What depends on the count, such as the bias correction of Adam, stays that of the first "
        "step."
    )


def frozen_left_out(names: Sequence[str]) -> str:
    """Frozen parameters are in no file, and every build makes them alike, as the base of a LoRA model."""
    which = f"{len(names)} frozen parameters" if len(names) > 1 else "a frozen parameter"
    return (
        f"`save` leaves {which} out of the checkpoint, which two builds with other seeds make alike: "
        f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
    )


def frozen_at_random(names: Sequence[str]) -> str:
    """Frozen parameters that each build makes otherwise, while it makes others alike, as from a file."""
    return (
        f"{_are(names)} frozen, and each build makes {'it' if len(names) == 1 else 'them'} otherwise, as from random "
        f"numbers, while it makes other frozen ones alike: neither pretrained nor trained ({', '.join(names[:4])})"
    )


def rounded_from_saved(keys: Sequence[tuple[str, str]]) -> str:
    """Values are in no file, and are rounded from others that are, as parameters from their fp32 masters."""
    which = f"{len(keys)} values" if len(keys) > 1 else "a value"
    return (
        f"`save` leaves {which} out of the checkpoint that are rounded from values of more bits which it has, as those "
        f"of a model are from its masters: {', '.join(name for _, name in keys[:3])}{', …' if len(keys) > 3 else ''}; "
        "whether `load` makes them anew, the arm `resumed` tells"
    )


def frozen_moves(names: Sequence[str], step: int) -> str:
    """Frozen parameters change, and no optimizer was seen to step them."""
    return (
        f"{_are(names)} frozen (`requires_grad` is False), and {_change(names)} in step {step}: right of an average or "
        "a copy of other parameters; otherwise an optimizer may step copies of them, as with weight decay, which are "
        "written back"
    )


def _are(names: Sequence[str]) -> str:
    return f"{one_or_many(names)} {'is' if len(names) == 1 else 'are'}"


def _change(names: Sequence[str]) -> str:
    return "changes" if len(names) == 1 else "change"
