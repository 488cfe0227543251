"""One trial: a folder is loaded in a process of its own, and what came out is compared with the known states.

Outcomes:

* `old`, `new`: exactly a state before the save, or the one that was being saved. Every name, type, shape and byte.
* `other`: exactly the state of another training run, whose files replaced all that was there.
* `error`: the library raised, so that nobody trains on. After a crash this means that the old state is lost, too.
* `silent`: the load succeeded, and what it gave is none of the known states.
* `hang`: it did not end before the deadline, and was killed. `crash`: the process ended without a word.

Of a save that is struck (`strikes`), the outcome is that of the load after it, with two exceptions:

* `lied`: the save raised nothing although it failed, and the folder does not give the new state.
* `missed`: the call that should have failed did not come. That says nothing.

*Verifies*: that equal states are equal bit by bit, by digests that the child takes of what the library gave it.
*Does not verify*: the child's word. It is a process of the library's, which could say anything; ours executes nothing
of the checkpoint and reads nothing of it but these digests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TrialOutcome = Literal[
    "old", "new", "other", "error", "silent", "lied", "hang", "crash", "missed", "resumed", "anew", "unsteady"
]
OUTCOMES: tuple[TrialOutcome, ...] = ("old", "new", "other", "error", "silent", "lied", "hang", "crash", "missed")

Digests = Mapping[str, str]
MOST_SHOWN = 4

LOAD, NOTHING = "what the load did", "the load changed nothing: all is as it was built"
"""A part that a driver may add to a state that was loaded, and what it is where the load did nothing."""


@dataclass(frozen=True)
class Known:
    """The states that a load may give, as digests of their parts. first: the one before the old one. unsteady: names of
    parts that differ from load to load of the same folder, and are not looked at."""

    old: Digests
    new: Digests
    other: Digests
    first: Digests = field(default_factory=dict)
    unsteady: Collection[str] = ()

    def steady(self, found: Digests) -> Digests:
        """A state without the parts that are unsteady."""
        return {name: digest for name, digest in found.items() if name not in self.unsteady}


@dataclass(frozen=True)
class TrialVerdict:
    """What a trial showed. why: in words."""

    outcome: TrialOutcome
    why: str = ""


def classify(answer: Mapping[str, Any], known: Known) -> TrialVerdict:
    """The verdict over a host's answer to a load."""
    match answer["ended"]:
        case "ok":
            found = known.steady(answer["found"])
            if known.first and found == known.first:
                return TrialVerdict("old", "the state of the save before")
            for outcome, state in (("new", known.new), ("old", known.old), ("other", known.other)):
                if found == state:
                    return TrialVerdict(outcome)  # type: ignore[arg-type]
            return TrialVerdict("silent", NOTHING if found.get(LOAD) == NOTHING else _mixture(found, known))
        case "error":
            return TrialVerdict("error", answer["why"])
        case "hang":
            return TrialVerdict("hang", "it did not end before the deadline")
        case _:
            return TrialVerdict("crash", answer["why"])


def _mixture(found: Digests, known: Known) -> str:
    """Of which states the parts are that tell the states apart."""
    groups: dict[str, list[str]] = {"old": [], "new": [], "other": [], "neither": [], "missing": []}
    for name in sorted({*found, *known.new}):
        if found.get(name) == known.new.get(name) == known.old.get(name):
            continue
        sides = [
            side for side in ("new", "old", "other") if name in found and found[name] == getattr(known, side).get(name)
        ]
        groups["missing" if name not in found else sides[0] if sides else "neither"].append(name)
    told = []
    for side, names in groups.items():
        if names:
            more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
            told.append(f"{side}: {', '.join(names[:MOST_SHOWN])}{more}")
    return "; ".join(told)
