"""What the lines of a save and a load, and whose state they ask for or give, say of what is wrong after them."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.diff import Difference
from shardproof.observe.logical import Value
from shardproof.observe.settings import SETTING
from shardproof.trainer.arms import FIRST, RESUMED, Session
from shardproof.trainer.judge.after_load import AGAIN
from shardproof.trainer.judge.judging import Judging
from shardproof.trainer.lines.lines_apart import wrote_before
from shardproof.trainer.lines.lines_of_state import never_holds, of_setting, that_assign, that_decide, that_seeds
from shardproof.trainer.lines.statements import Moment, last_word
from shardproof.trainer.values.counted import plain_number
from shardproof.trainer.values.every_mesh import OF_A_RANK, OF_MODULES
from shardproof.trainer.values.rounding import PARAMS, At
from shardproof.trainer.values.state_calls import Calls, joined, no_longer_one, not_opened, opens_none, whose_state


def that_set(judging: Judging, op: int, found: Sequence[Difference], what: str) -> str:
    """Which of the trainer's own lines set what differs in an operation. what: `load` or `save`."""
    params = [one.key.fqn for one in found if one.key.role in OF_MODULES]
    values = judging.at(op)
    plain = {one.key.fqn: plain_number(values, (one.key.role, one.key.fqn)).rpartition(" ")[2] for one in found
             if one.key.role not in OF_MODULES}  # fmt: skip
    return judging.explained(lambda: of_setting(judging.ran.get(op, {}), plain, params, what))


def that_load(judging: Judging, load: int, found: Sequence[Difference]) -> str:
    """Which of the trainer's own lines set, in a load, what is wrong right after it; empty where a save has spoilt what
    it is held against."""
    if judging.save_changes:
        return ""
    told = that_set(judging, load, found, "load")
    before = judging.explained(lambda: _wrote_before(judging, load, found)) if told else ""
    random = any(one.key.role in OF_A_RANK for one in found)
    seeds = judging.explained(lambda: that_seeds(judging.ran.get(load, {}), "load")) if random else ""
    return " ".join(filter(None, (told, before, seeds)))


def _wrote_before(judging: Judging, load: int, found: Sequence[Difference]) -> str:
    """What a line that writes wrong parameters in a load reads otherwise than in the step before the save."""
    wrong = {one.key.fqn for one in found if one.key.role == PARAMS}
    resumed = judging.named(RESUMED)
    if not wrong or resumed is None or judging.loaded(resumed) != load:
        return ""
    before, loads = ([Moment(op, judging.ran.get(op.index, {})) for op in session.ops if op.index <= last]
                     for session, last in ((judging.whole, judging.saved), (resumed, load)))  # fmt: skip
    return wrote_before(wrong, (before, loads), ("the run that saves", "the load"), 0)


def that_left_out(judging: Judging, op: int) -> str:
    """Which conditions of the trainer's own never held in a save that left something out. op: the save."""
    return judging.explained(lambda: never_holds(judging.ran.get(op, {}), "save"))


def whose(judging: Judging, resumed: Session, found: Sequence[Difference], *, at_load: bool) -> str:
    """Whose state was saved and loaded, which objects are no longer one, and which files were not opened, where that
    may be the mistake; empty where nothing differs."""
    return judging.explained(lambda: _whose(judging, resumed, found, at_load=at_load)) if found else ""


def _whose(judging: Judging, resumed: Session, found: Sequence[Difference], *, at_load: bool) -> str:
    loads = judging.loaded(resumed)
    two, paths = no_longer_one(_calls(judging, judging.whole, judging.saved), _calls(judging, resumed, loads))
    if two:
        by = that_assign(judging.ran.get(loads, {}), paths)
        return f"{two[0].upper()}{two[1:]}{f'; in `load` {by} assigns it' if by else ''}."
    steps, save = (_calls(judging, judging.whole, judging.saved, kind) for kind in ("step", "save"))
    load = _calls(judging, resumed, resumed.ops[-1].index, "load")
    told = whose_state(steps, save, load, found, at_load=at_load)
    moments = (("save", judging.whole.first("save")), ("load", loads))
    decide = [that_decide(judging.ran.get(op, {}), kind) for kind, op in moments] if told else []
    never = [never_holds(judging.ran.get(op, {}), kind) for kind, op in moments]
    seen = at_load and not judging.save_changes
    left = not_opened(load, judging.directory / f"checkpoint{FIRST}") if seen else ""
    return " ".join(filter(None, (told, *decide, left, *never)))


def never_looked(judging: Judging, resumed: Session) -> bool:
    """Whether a load is known to have opened none of the checkpoint's files."""
    load = _calls(judging, resumed, resumed.ops[-1].index, "load")
    return opens_none(load, judging.directory / f"checkpoint{FIRST}")


def with_rates(told: str, judging: Judging, resumed: Session, found: Sequence[Difference]) -> str:
    """What is told of a load after which a schedule alone counts otherwise, with that param groups have the right rates
    all the same, there and after every step, if they have."""
    if not found or any(one.key.role != "scheduler" for one in found):
        return told
    steps = {op.iteration: op.index for op in judging.whole.ops if op.kind == "step"}
    moments = [(judging.saved, judging.loaded(resumed))]
    moments += [(steps[op.iteration], op.index) for op in resumed.ops if op.kind == "step" and op.iteration in steps]
    rates = [[_rates(judging.at(op)) for op in both] for both in moments]
    if not all(mine and mine == its for mine, its in rates):
        return told
    told = told.replace(AGAIN, "What the learning-rate schedule counts starts again, and its rates go on", 1)
    own = sorted({one.key.fqn.partition(".")[0] for one in found})
    return (
        f"{told} The learning rates are right there, and after the {len(moments) - 1} steps behind it: where a load "
        f"builds the schedule anew out of the steps that are done, leave {' and '.join(own)} out of `state()`."
    )


def _rates(values: At) -> dict[str, Value]:
    """The learning rates of param groups."""
    return {name: value for (role, name), value in values.items() if role == SETTING and last_word(name) == "lr"}


def _calls(judging: Judging, session: Session, last: int, kind: str = "") -> Calls:
    """Whose state a session asked for or gave until an operation. kind: of the operations; empty for all."""
    ops = (op for op in session.ops if op.index <= last and (not kind or op.kind == kind))
    return joined(judging.state_calls.get(op.index, {}) for op in ops)
