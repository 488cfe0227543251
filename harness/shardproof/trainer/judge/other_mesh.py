"""The arm `other mesh M`: what ranks of another mesh have after the load of a checkpoint, and after their own steps.

*Verifies*: values that mean the same on both meshes, after the load; after steps, where gradients are exact. *Does not
verify*: what every rank has for itself, which a note names.
"""

from __future__ import annotations

from shardproof.diff import Difference
from shardproof.trainer.arms import CUT, RESUMED, WHOLE, Session
from shardproof.trainer.judge.harmless import counts_alone, harmless, of_loaders_elsewhere
from shardproof.trainer.judge.judging import Judging
from shardproof.trainer.values import wording
from shardproof.trainer.values.every_mesh import Name, of_every_mesh, of_ranks
from shardproof.trainer.values.notes import apart, counted_steps, of_each_rank, of_noise, of_one_mesh, rounding
from shardproof.trainer.values.rounding import beyond_rounding


def on_another_mesh(judging: Judging, session: Session) -> None:
    """Judge the session of one of the meshes."""
    if WHOLE in judging.failures or judging.ended(session):
        return
    load = judging.loaded(session)
    if load < 0 and not judging.exact:
        judging.not_compared(session.name, wording.FIT_ELSEWHERE)
        return
    pairs = [(judging.saved, load)] if load >= 0 else []
    pairs += judging.in_turn(session, judging.whole) if judging.exact else ()
    found, farthest = list[Difference](), 0.0
    left_out, loaders, counts, noise = set[Name](), set[Name](), set[Name](), set[str]()
    resumed = judging.named(RESUMED)
    if resumed is not None and not {RESUMED, CUT} & judging.failures.keys():
        loaders |= harmless(judging, resumed, judging.whole)[0]
    start = of_every_mesh(judging.at(judging.saved))[0] if load >= 0 else {}
    for there, here in pairs:
        (expected, own), (observed, own_too) = of_every_mesh(judging.at(there)), of_every_mesh(judging.at(here))
        left_out |= own | own_too
        loaders |= of_loaders_elsewhere(expected, observed)
        counts |= counts_alone([(expected, observed)])
        if found := judging.compare(expected, observed, here, own | own_too | judging.transient | loaders | counts):
            wrong, share, tiny = beyond_rounding(found, start, expected, observed)
            found, farthest = (found if here == load or judging.element_by_element else wrong), max(farthest, share)
            noise |= set[str]() if found else tiny
        if found:
            break
    notes = [*([] if judging.exact else [wording.INEXACT]), *([apart(left_out)] if left_out else [])]
    owned = of_ranks(judging.at(load if load >= 0 else session.ops[-1].index))
    notes += [*([of_each_rank(owned)] if owned else []), *([of_one_mesh(loaders)] if loaders else [])]
    notes += [counted_steps(counts)] if counts else []
    notes += [rounding(farthest)] if farthest and not found else []
    notes += [of_noise(noise)] if noise else []
    at_load = any(difference.key.op == load for difference in found)
    judging.add(session.name, found, wording.of_mesh(found, session.of, at_load=at_load), notes)
