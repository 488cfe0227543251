"""Derives the verdict of one attempt from the ranks' reports and the judge's findings.

An attempt ends in one of these ways, the most severe of which is its verdict:

* a deadline passed: `hang`, with the place where each rank was;
* a rank raised or died: `crash`, with the error that speaks for all;
* the judge found differences: `mismatch`;
* the oracles disagree, or the error is one of ours: `unknown`.
"""

from __future__ import annotations

import base64
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardproof.errors import HarnessError, MisfitError
from shardproof.laboratory.misfits import on_head, reads_as_torch, without_reader_misfits
from shardproof.observe.stacks import FATAL, fatal_traceback_in
from shardproof.ownership import in_one_line
from shardproof.program import expand, sessions
from shardproof.protocol.system import System
from shardproof.result import ArmResult, FailedOp, Failure, Result, differences_from_json, explanations_from_json
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict, merge
from shardproof.world.job import JobOutcome, RankError

REFERENCE_NOT_COMPARED = (
    "reference not compared on cuda: numpy has no GPU kernels, and vouches for the twin's structure, not for its bits"
)

NO_EFFECT = "the planted fault had no effect: nothing that was observed is other than without it"
NEVER_STRUCK = "the planted fault never struck: what it strikes did not come"
NOTHING_IN_IT = "the planted fault never struck: what it strikes came, with nothing in it to strike"


@dataclass
class Attempt:
    """One attempt at a scenario: what its ranks reported, before it is judged. idle: it has a boundary fault, which
    found nothing to strike. event_occurred: the event that it strikes took place, with nothing in it to corrupt."""

    blob: bytes = b""
    outcomes: list[JobOutcome] = field(default_factory=list)
    judgement: dict[str, Any] = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    idle: bool = False
    event_occurred: bool = False


def result_of(scenario: Scenario, info: System, trial: Attempt, ran: Mapping[str, Any]) -> Result:
    """The verdict of one attempt: the most severe of what its ranks and its judge say. ran: fields of the result that
    say what really ran."""
    if info.judge_entry:
        return _of_arms(scenario, info, trial, ran)
    differences = differences_from_json(trial.judgement["differences"])
    explanations = explanations_from_json(trial.judgement["explanations"])
    distrust, misfit = trial.judgement["distrust"], ""
    verdict, failure = ranks_verdict(trial.outcomes)
    unfamiliar = trial.judgement.get("unfamiliar", ())
    on_some_head = any(on_head(info, ran.get(key, "")) for key in ("version", "loaded_by"))
    if not scenario.faults and (on_some_head or (unfamiliar and reads_as_torch(info))):
        misfit, differences = without_reader_misfits(unfamiliar, differences)
        explanations = explanations if differences or failure else ()
    if distrust:
        verdict = Verdict.UNKNOWN
    elif differences:
        verdict = merge([verdict, Verdict.MISMATCH])
    elif misfit and verdict is Verdict.PASS:
        verdict = Verdict.UNKNOWN
    return Result(
        scenario, info.name,
        verdict=verdict,
        failed_op=_failed_op(scenario, differences, failure),
        differences=differences,
        explanations=explanations,
        error=failure,
        courses=next((outcome.courses for outcome in trial.outcomes if not outcome.ok), ()),
        reason=distrust or misfit or _without_effect(trial),
        normalisations=differences_from_json(trial.judgement["normalisations"]),
        emulated=(*_emulated(scenario, info), *trial.judgement.get("emulated", ())),
        not_exercised=(*info.not_exercised(scenario), *_not_compared(scenario)),
        device="; ".join(trial.judgement.get("device", ())) or scenario.device,
        phases_s=trial.phases_s,
        elements=base64.b64decode(trial.judgement.get("elements", "")),
        **{"chosen": info.device_choices(scenario.device), **ran},
    )  # fmt: skip


def _of_arms(scenario: Scenario, info: System, trial: Attempt, ran: Mapping[str, Any]) -> Result:
    """The result of a system that is its own oracle: its judge says the verdict of each arm, and of all together."""
    judged = trial.judgement
    differences, verdict = differences_from_json(judged["differences"]), Verdict(judged["verdict"])
    arms = tuple(ArmResult(**{**arm, "notes": tuple(arm["notes"])}) for arm in judged["arms"])
    failing = {arm.name for arm in arms if Verdict(arm.verdict).is_failure}
    broken = (outcome for outcome in trial.outcomes if not outcome.ok)
    ended = zip(failures_of(scenario, trial.outcomes).items(), broken, strict=False)
    failure, courses = next(
        ((error, one.courses) for (name, error), one in ended
         if verdict.is_failure and name in failing and error.type != "Unsupported"),
        (None, ()),
    )  # fmt: skip
    ops = sessions(expand(scenario))
    unknown = next((arm.sentence for arm in arms if verdict is Verdict.UNKNOWN and arm.verdict == verdict.value), "")
    return Result(
        scenario, info.name, verdict=verdict, failed_op=_failed_op(scenario, differences, failure),
        differences=differences, error=failure, reason=judged["distrust"] or unknown or _without_effect(trial),
        arms=arms, state=tuple(judged["notes"]), courses=courses, device=scenario.device, phases_s=trial.phases_s,
        sessions={own[0].arm: tuple(op.kind for op in own) for own in ops},
        emulated=_emulated(scenario, info), **ran,
    )  # fmt: skip


def _emulated(scenario: Scenario, info: System) -> tuple[str, ...]:
    """What of a system is not the real thing on the scenario's device."""
    return info.emulated if scenario.device == "cpu" else ()


def failures_of(scenario: Scenario, outcomes: Sequence[JobOutcome]) -> dict[str, Failure]:
    """What ended each session of a scenario that failed, by the name that its operations have as their arm.

    Raises:
        HarnessError, MisfitError: as `ranks_verdict`.
    """
    names = [ops[0].arm for ops in sessions(expand(scenario))]
    found: dict[str, Failure] = {}
    for name, outcome in zip(names, outcomes, strict=False):
        failure = None if outcome.ok else ranks_verdict([outcome])[1]
        if failure is not None:
            found[name] = failure
    return found


def _without_effect(trial: Attempt) -> str:
    """The reason why a planted fault proves nothing, such as never having struck. Empty if the fault had an effect, or
    no fault was planted."""
    if trial.idle:
        return NOTHING_IN_IT if trial.event_occurred else NEVER_STRUCK
    return NO_EFFECT if trial.judgement.get("no_effect") else ""


def _not_compared(scenario: Scenario) -> tuple[str, ...]:
    """What no oracle could say of a scenario on this device, for the reader of its result."""
    return (REFERENCE_NOT_COMPARED,) if scenario.device == "cuda" and scenario.offload.fraction < 1 else ()


def ranks_verdict(outcomes: Sequence[JobOutcome]) -> tuple[Verdict, Failure | None]:
    """The verdict that the ranks' ends give, and the error that stands for it.

    Raises:
        HarnessError: a rank of ours could not start or could not record. MisfitError: our own code raised.
    """
    for outcome in outcomes:
        ours = next((e for e in outcome.errors if e.stage in ("record", "start")), None)
        if ours and ours.rank == outcome.first_failed:
            raise HarnessError(f"rank {ours.rank} failed in {ours.stage}: {ours.type}: {ours.message}")
        if outcome.timed_out:
            failure = _hung(outcome)
            return Verdict.HANG, failure
        first = _chosen_error(outcome)
        if first and first.ours:
            line = in_one_line(first.type, first.message, first.traceback)
            raise MisfitError(f"{line}\nrank {first.rank} in {first.op or 'start-up'}\n{first.traceback}")
        if first:
            said = (first.type, first.message, first.rank, first.traceback, first.op_index, first.planted)
            return Verdict.CRASH, Failure(*said)
        if outcome.died:
            rank, how = next((d for d in outcome.died if d[0] == outcome.first_failed), outcome.died[0])
            if outcome.shared_gpus and how in _BROKE:
                raise HarnessError(_SHARED.format(rank=rank, how=how))
            log = "".join(_end_of(path.with_suffix(".log")) for path in outcome.observations[rank : rank + 1])
            told = f"rank {rank} ended without a word: {how}{_raised_meanwhile(outcome)}{_last_words(log)}"
            return Verdict.CRASH, Failure("died", told, rank, fatal_traceback_in(log))
        if not outcome.ok:
            raise HarnessError(f"a session failed and no rank says why: {outcome}")
    return Verdict.PASS, None


def _raised_meanwhile(outcome: JobOutcome) -> str:
    """A line with what the lowest other rank raised of its own when one died: where collectives do not match, gloo ends
    the one and the other raises. Whether it comes to that is a matter of timing, so that the failure is the death."""
    own = [e for e in outcome.errors if not e.ours and not _ECHO.search(e.message)]
    return "".join(
        f"\nrank {e.rank} raised {in_one_line(e.type, e.message, e.traceback)}"
        for e in sorted(own, key=lambda e: e.rank)[:1]
    )


def _end_of(log: Path) -> str:
    """The end of a rank's log; empty where there is nothing, or no such file here."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - MOST_OF_A_LOG))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _last_words(log: str) -> str:
    """A line with the last that a rank printed before it died, such as what a C++ library says before it aborts; empty
    where there is nothing."""
    lines = log.partition(FATAL)[0].splitlines()
    told = [
        line.strip() for line in lines if line.strip() and not line.startswith(("frame #", "Exception raised from"))
    ]
    return f"\nit last printed: {textwrap.shorten(told[-1], 400)}" if told else ""


def refused_in(outcomes: Sequence[JobOutcome]) -> tuple[str, int] | None:
    """The text of the error that a library raised in an operation, and the operation; None where none did."""
    chosen = (_chosen_error(outcome) for outcome in outcomes if not outcome.timed_out)
    first = next((error for error in chosen if error is not None), None)
    if first is None or first.ours or first.op_index is None:
        return None
    return first.message, first.op_index


_BROKE = ("signal SIGSEGV", "signal SIGABRT", "signal SIGBUS")
_SHARED = (
    "rank {rank} ended without a word: {how}. Ranks share GPUs here, so that gloo carries their tensors through the "
    "host, which no training does and has broken ranks (docs/gpu.md); ask on a machine with a GPU for each rank"
)

MOST_OF_A_LOG = 16_384
"""Characters of a log that are looked at: what was printed last, and where the threads were."""

_ECHO = re.compile(r"Connection (closed|reset) by peer|Broken pipe|gloo.*(Timeout|timed out)|Timed out waiting")
"""What gloo says in a rank whose peer is gone: an echo of another rank's failure, not a failure of its own."""


def _chosen_error(outcome: JobOutcome) -> RankError | None:
    """The error that stands for a session.

    When an operation fails on several ranks, it is a matter of timing which of them reports first, and a signature must
    not depend on that. So of the ranks that raised something of their own in the operation of the first error, the
    lowest speaks.
    """
    first = next((e for e in outcome.errors if e.rank == outcome.first_failed), None)
    if first is None:
        return None
    own = [e for e in outcome.errors if e.op_index == first.op_index and not _ECHO.search(e.message)]
    return min(own, key=lambda e: e.rank, default=first)


def _hung(outcome: JobOutcome) -> Failure:
    """The failure of a deadline that passed: where each rank was, with the Python stacks of those still there."""
    places = sorted({f"{place.op or 'start-up'} ({place.stage})" for place in outcome.stuck})
    ranks = "; ".join(f"rank {p.rank} in {p.op or 'start-up'} ({p.stage})" for p in outcome.stuck)
    message = f"no end after {outcome.duration_s:.0f} s, in {', '.join(places)}\n{ranks}"
    op = outcome.stuck[0].op_index if outcome.stuck else None
    return Failure("deadline", message, None, outcome.stack, op)


def _failed_op(scenario: Scenario, differences: Sequence[Any], failure: Failure | None) -> FailedOp | None:
    candidates = [d.key.op for d in differences if d.key.op >= 0]
    if failure and failure.op is not None and failure.op >= 0:
        candidates.append(failure.op)
    if not candidates:
        return None
    return FailedOp(min(candidates), expand(scenario)[min(candidates)].kind)


ABORTED = "signal SIGABRT"
"""How a process ended that a C++ library, such as gloo, has ended."""


def same_failure(first: Result, second: Result) -> bool:
    """Whether the second attempt failed like the first.

    Two mismatches are the same if the same values differ, with the same wrong bits. Two errors are the same if they are
    the same error at the same operation: how far the other ranks got before it, and so what there was to compare, is a
    matter of timing. So it is, where collectives do not match, whether a rank raises before gloo ends one.
    """
    if first.error is None or second.error is None:
        return first.signature == second.signature and _bits(first) == _bits(second)
    if first.verdict is second.verdict is Verdict.CRASH and {"died"} < {first.error.type, second.error.type}:
        return ABORTED in f"{first.error.message}{second.error.message}"
    errors = (replace(result, differences=()).signature for result in (first, second))
    return len(set(errors)) == 1


def _bits(result: Result) -> set[tuple[object, str, str]]:
    """Which values differ, and what was found in their place. A race that corrupts something else every time is not
    the same failure twice."""
    return {(d.key, d.kind, d.observed_digest) for d in result.differences}
