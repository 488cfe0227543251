"""The arm `altered`: the ranks that load have another value of an axis than those that saved, and the trainer says
whose wins, or that `load` raises an error.

*Verifies*: settings that are found on the trainer. *Does not verify*: what the axis does besides.
"""

from __future__ import annotations

import re

from shardproof.diff import Difference
from shardproof.program import FIT
from shardproof.result import ArmResult
from shardproof.trainer import wording
from shardproof.trainer.arms import RESUMED, WHOLE, Session
from shardproof.trainer.described import REFUSE
from shardproof.trainer.every_mesh import BESIDE, OF_A_RANK, OF_MODULES, Name
from shardproof.trainer.judging import Judging
from shardproof.trainer.rounding import PARAMS, At
from shardproof.trainer.saved_and_loaded import that_load
from shardproof.trainer.telling import paragraphs
from shardproof.verdict import Verdict


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
        judging.not_compared(session.name, wording.NO_ALTERED_FIT)
        return
    own, other = judging.at(load - 1), judging.at(judging.loaded(resumed) - 1)
    if found := _loaded_otherwise(judging, own, judging.at(judging.loaded(resumed)), load):
        sentence = paragraphs(wording.loads_otherwise(found, axis), that_load(judging, load, found))
        judging.add(session.name, found, sentence)
        return
    changed = {key for key in own if key[0] not in (PARAMS, *OF_A_RANK) and own[key] != other.get(key)}
    if not changed:
        text = wording.nothing_altered(axis)
        judging.found.append(ArmResult(session.name, Verdict.UNKNOWN.value, text, ()))
        return
    kept, now = judging.at(judging.loaded(resumed)), judging.at(load)
    neither = {key for key in changed & now.keys() if now[key] not in (own[key], kept.get(key))}
    if neither == changed:
        judging.found.append(ArmResult(session.name, Verdict.UNKNOWN.value, wording.neither(neither, axis), ()))
        return
    wanted, told = own if wins == "run" else kept, changed - neither
    found = judging.compare(
        {key: wanted[key] for key in told if key in wanted},
        {key: now[key] for key in told if key in now},
        load,
    )
    notes = [wording.neither(neither, axis)] if neither else []
    judging.add(session.name, found, wording.of_altered(found, axis, wins), notes)


def _loaded_otherwise(judging: Judging, own: At, kept: At, load: int) -> list[Difference]:
    """What a load puts into modules, and beside their parameters, that is not what a load of a run with the same value
    puts there: another value of a setting changes no weights. A tensor that is none of a module's has the number of its
    place in a group for a name, which another order of groups changes, and is left out.

    Args:
        own: before the load. kept: after that of the run with the same value.
    """
    now, told = judging.at(load), list[Name]()
    for key in sorted(kept.keys() & now.keys()):
        alike = (kept[key].dtype, kept[key].shape) == (now[key].dtype, now[key].shape)
        loaded = key[0] in OF_MODULES or (key[0] in BESIDE and now[key] != own.get(key))
        if alike and loaded and key not in judging.transient and not _OF_PLACE.search(key[1]):
            told.append(key)
    found = judging.compare({key: kept[key] for key in told}, {key: now[key] for key in told}, load)
    judging.looked_at = 0  # which is no comparison of settings
    return found


_OF_PLACE = re.compile(r"(^|\.)group[0-9]+\.[0-9]+$")


def _refused(judging: Judging, session: Session) -> None:
    """Whether a load raises, as it is to of a checkpoint of another value of an axis."""
    error, axis = judging.failures.get(session.name), session.of
    raised = error is not None and error.type not in ("died", "killed", "deadline")
    if error is not None and raised and error.op in (session.first("load"), session.first(FIT)):
        judging.found.append(ArmResult(session.name, Verdict.PASS.value, "", (wording.refuses(axis, error),)))
    elif not judging.ended(session):
        told = wording.takes_what_it_should_refuse(axis)
        judging.found.append(ArmResult(session.name, Verdict.MISMATCH.value, told, ()))
