"""Counts the outcomes of all trials, as a document for files and as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardproof.resilience.events import Trace, describe
from shardproof.resilience.planned_trials import FinishedTrial, family_of
from shardproof.resilience.run import StackResult
from shardproof.resilience.trial import OUTCOMES
from shardproof.verdict import ExitStatus

Document = Mapping[str, Any]

WRONG = ("silent", "lied", "hang", "crash", "anew")
"""Outcomes that no stack should have."""
WRONG_OF_COMMANDS = (*WRONG, "error")
"""Those that no command should have: one that ends with an error in the folder that a kill leaves does not go on,
however often it is started again. Of a load an error is none, since nobody trains on with what it gave."""
TOLD_OF_COMMANDS = (*WRONG_OF_COMMANDS, "unsteady")
"""Outcomes of a command that are told in words."""
MOST_KEPT = 25
"""So many trials with such an outcome are kept in words, for each stack, spread over the kinds."""


def document_of(found: Sequence[StackResult], trials: int, seed: int) -> dict[str, Any]:
    """The results as a document of types that both TOML and JSON can represent."""
    return {"seed": seed, "trials": trials, "stack": [_stack(one) for one in found]}


def _stack(found: StackResult) -> dict[str, Any]:
    counts: dict[str, dict[str, dict[str, Any]]] = {}
    for one in found.tried:
        cell = counts.setdefault(one.kind, {}).setdefault(one.outcome, {"count": 0, "trial": one.label})
        cell["count"] += 1
    wrong: list[dict[str, str]] = []
    told = WRONG if found.outcomes is OUTCOMES else TOLD_OF_COMMANDS
    for kind, outcome in sorted({(one.kind, one.outcome) for one in found.tried if one.outcome in told}):
        of_cell = [one for one in found.tried if (one.kind, one.outcome) == (kind, outcome)]
        wrong += [{"trial": one.label, "outcome": one.outcome, "what": one.what, "why": one.why} for one in of_cell[:3]]
    return {
        "name": found.stack.name, "doc": found.stack.doc, "events": found.steps, "syncs": found.syncs,
        "crash_states": found.counts.states, "strikes": found.counts.strikes, "trials": len(found.tried),
        "planned": found.planned, "kind": counts, "wrong": wrong[:MOST_KEPT],
        **({"outcomes": list(found.outcomes)} if found.outcomes is not OUTCOMES else {}),
        **({"note": found.note} if found.note else {}), **({"words": found.stack.words} if found.stack.words else {}),
    }  # fmt: skip


def total(stack: Document, outcomes: Sequence[str], family: str | None = None) -> int:
    """How many trials of a stack had one of these outcomes, of one family of kinds or (None) of all."""
    return sum(
        cell["count"]
        for kind, cells in stack["kind"].items()
        if family is None or family_of(kind) == family
        for outcome, cell in cells.items()
        if outcome in outcomes
    )


def exit_status(document: Document) -> ExitStatus:
    """Whether any stack mixed states silently, hung or crashed, or a command did not go on."""
    if not any(stack["trials"] for stack in document["stack"]):
        return ExitStatus.NOTHING_RUN
    return ExitStatus.FAILURE if any(total(stack, wrong_of(stack)) for stack in document["stack"]) else ExitStatus.OK


def wrong_of(stack: Document) -> Sequence[str]:
    """The outcomes that a stack or a command should not have."""
    return WRONG_OF_COMMANDS if "outcomes" in stack else WRONG


def replay_of(stack: Document, trial: str, document: Document) -> str:
    """The command that makes a trial again."""
    return f"shardproof resilience {stack.get('words', stack['name'])} --trial {trial} --seed {document['seed']}"


def render(document: Document) -> str:
    """The scorecard as text."""
    return "\n".join(line for stack in document["stack"] for line in _lines(stack, document)) + _sum(document)


def _lines(stack: Document, document: Document) -> Iterator[str]:
    yield f"{stack['name']}: {stack['doc']}"
    synced = f"{stack['syncs']} of them syncs" if stack["syncs"] else "no sync"
    of = f" of {stack['planned']}" if stack["trials"] < stack["planned"] else ""
    strikes = f", {stack['strikes']} strikes" if "outcomes" not in stack else ""
    states = f"{stack['crash_states']} crash states{strikes}; {stack['trials']}{of} trials"
    outcomes = stack.get("outcomes", OUTCOMES)
    yield f"  {stack['events']} events of a save, {synced}; {states}"
    if "note" in stack:
        yield f"  {stack['note']}"
    yield f"  {'':<18}{''.join(f'{outcome:>{_width(outcome)}}' for outcome in outcomes)}"
    for kind, cells in stack["kind"].items():
        numbers = {outcome: cells.get(outcome, {}).get("count", ".") for outcome in outcomes}
        yield f"  {kind:<18}{''.join(f'{number:>{_width(outcome)}}' for outcome, number in numbers.items())}"
    seen = set()
    for one in stack["wrong"]:
        if one["outcome"] not in seen:
            seen.add(one["outcome"])
            yield f"  {one['outcome']}: {one['what']}" + (f" ({one['why']})" if one["why"] else "")
            yield f"    {replay_of(stack, one['trial'], document)}"
    yield ""


def _width(outcome: str) -> int:
    return max(8, len(outcome) + 1)


def _sum(document: Document) -> str:
    trials = sum(stack["trials"] for stack in document["stack"])
    every = dict.fromkeys(outcome for stack in document["stack"] for outcome in stack.get("outcomes", OUTCOMES))
    counted = {outcome: sum(total(stack, (outcome,)) for stack in document["stack"]) for outcome in every}
    return f"{trials} trials: " + ", ".join(f"{count} {outcome}" for outcome, count in counted.items() if count) + "\n"


def render_trial(tried: FinishedTrial, trace: Trace) -> str:
    """One trial as text, with the record that it was worked out of."""
    lines = [f"{tried.label}: {tried.outcome}", f"  {tried.what}", *([f"  {tried.why}"] if tried.why else [])]
    return "\n".join(lines) + "\n\nwhat the save did:\n" + describe(trace)
