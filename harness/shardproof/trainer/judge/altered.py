"""The arm `altered`: the ranks that load have another value of an axis than those that saved, and the trainer says
whose wins, or that `load` raises an error.

*Verifies*: settings that are found on the trainer. *Does not verify*: what the axis does besides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shardproof.diff import Difference
from shardproof.program import FIT
from shardproof.result import ArmResult, Failure
from shardproof.trainer.arms import RESUMED, WHOLE, Session
from shardproof.trainer.described import REFUSE, RUN
from shardproof.trainer.judge.judging import Judging
from shardproof.trainer.judge.saved_and_loaded import that_load
from shardproof.trainer.values.every_mesh import BESIDE, OF_A_RANK, OF_MODULES, Name
from shardproof.trainer.values.rounding import PARAMS, At
from shardproof.trainer.values.telling import paragraphs
from shardproof.trainer.values.wording import called, differ, first_of, is_raised
from shardproof.verdict import Verdict

NO_ALTERED_FIT = "a trainer with fit is observed after steps only, so that the moment of the load is not seen"


def altered(judging: Judging, session: Session) -> None:
    """Who wins where the ranks that load have another value of an axis."""
    axis, resumed = session.of, judging.named(RESUMED)
    if resumed is None or {WHOLE, RESUMED} & judging.failures.keys():
        return
    load, wins = judging.loaded(session), judging.trainer.altered[axis]
    if wins == REFUSE:
        _refused(judging, session)
        return
    if judging.ended(session):
        return
    if load < 0:
        judging.not_compared(session.name, NO_ALTERED_FIT)
        return
    loaded = judging.loaded(resumed)
    (other, kept), (own, now) = ((judging.at(op - 1), judging.at(op)) for op in (loaded, load))
    if found := _loaded_otherwise(judging, (other, kept), (own, now), load):
        sentence = paragraphs(loads_otherwise(found, axis), that_load(judging, load, found))
        judging.add(session.name, found, sentence)
        return
    changed = {key for key in own if key[0] not in (PARAMS, *OF_A_RANK) and own[key] != other.get(key)}
    if not changed:
        text = nothing_altered(axis)
        judging.found.append(ArmResult(session.name, Verdict.UNKNOWN.value, text, ()))
        return
    odd = {key for key in changed & now.keys() if now[key] not in (own[key], kept.get(key))}
    if odd == changed:
        judging.found.append(ArmResult(session.name, Verdict.UNKNOWN.value, neither(odd, axis), ()))
        return
    wanted, told = own if wins == RUN else kept, changed - odd
    found = judging.compare(
        {key: wanted[key] for key in told if key in wanted},
        {key: now[key] for key in told if key in now},
        load,
    )
    of_place = sorted(key for key in now if key[0] in (PARAMS, *BESIDE) and _OF_PLACE.search(key[1]))
    notes = [*([neither(odd, axis)] if odd else []), *([by_their_place(of_place)] if of_place else [])]
    judging.add(session.name, found, of_altered(found, axis, wins), notes)


def _loaded_otherwise(
    judging: Judging, of_resumed: tuple[At, At], of_altered: tuple[At, At], load: int
) -> list[Difference]:
    """What a load puts into modules, and beside their parameters, that is not what a load of a run with the same value
    puts there: another value of a setting changes no weights. A tensor that is none of a module's has the number of its
    place in a group for a name, which another order of groups changes, and is left out. So is what neither load
    changes, as what `build` makes of the setting, and a buffer that is another one before the load already.

    Args:
        of_resumed, of_altered: before the load and after it, of the run with the same value and of the other one.
    """
    (other, kept), (own, now) = of_resumed, of_altered

    def is_loaded(key: Name) -> bool:
        changed = now[key] != own.get(key)
        if key[0] in BESIDE:
            return changed
        begun_alike = key[0] == PARAMS or own.get(key) == other.get(key)
        return key[0] in OF_MODULES and begun_alike and (changed or kept[key] != other.get(key))

    both = (key for key in kept.keys() & now.keys() if key not in judging.transient and not _OF_PLACE.search(key[1]))
    same = (key for key in both if (kept[key].dtype, kept[key].shape) == (now[key].dtype, now[key].shape))
    told = sorted(filter(is_loaded, same))
    found = judging.compare({key: kept[key] for key in told}, {key: now[key] for key in told}, load)
    judging.looked_at = 0  # which is no comparison of settings
    return found


_OF_PLACE = re.compile(r"(^|\.)group[0-9]+\.[0-9]+$")


def _refused(judging: Judging, session: Session) -> None:
    """Whether a load raises, as it is to of a checkpoint of another value of an axis."""
    error, axis = judging.failures.get(session.name), session.of
    if error is not None and is_raised(error) and error.op in (session.first("load"), session.first(FIT)):
        judging.found.append(ArmResult(session.name, Verdict.PASS.value, "", (refuses(axis, error),)))
    elif not judging.ended(session):
        told = takes_what_it_should_refuse(axis)
        judging.found.append(ArmResult(session.name, Verdict.MISMATCH.value, told, ()))


def of_altered(found: Sequence[Difference], axis: str, wins: str) -> str:
    """Which setting won, and should not have."""
    loser = "checkpoint" if wins == "run" else "run"
    if not found:
        return ""
    return f"The {wins}'s {axis} is declared to win, and the {loser}'s came out: {differ(found)}. {first_of(found)}"


def loads_otherwise(found: Sequence[Difference], axis: str) -> str:
    """A load by a run with another value of an axis that puts other weights into the model."""
    return (
        f"A run with another {axis} loads other weights or state than a run with the same one does: {differ(found)}. "
        f"{first_of(found)} Where that is right, `transient` names what a load may leave as it likes."
    )


def takes_what_it_should_refuse(axis: str) -> str:
    """A load that is to raise an error, and does not."""
    return (
        f"`load` takes a checkpoint of a run with another {axis} without an error, though `altered` says that it "
        "refuses one: look at what it compares, and whether that is in the checkpoint."
    )


def by_their_place(keys: Sequence[Name]) -> str:
    """A note on tensors of an optimizer that no module has, which have no name by which to find them."""
    return (
        "not compared, since it is called by its place in a param group, which the axis may change: "
        f"{len(keys)} values, such as {called(*keys[0])}"
    )


def refuses(axis: str, error: Failure) -> str:
    """A note on the error with which a load refuses a checkpoint, as it is to."""
    return f"`load` refuses a checkpoint of a run with another {axis}: {error.type}: {error.message.splitlines()[0]}"


def nothing_altered(axis: str) -> str:
    """An altered axis without an effect."""
    return f"Another value of {axis} changes no setting that was found, so that nobody can say which of the two won."


def neither(keys: Iterable[tuple[str, str]], axis: str) -> str:
    """Settings that are of neither side after the load, such as a rate that a schedule computed anew."""
    names = ", ".join(f"{role} of {name}" for role, name in sorted(keys)[:4])
    return f"{names}: neither the run's nor the checkpoint's after the load, which does not tell whose {axis} won"
