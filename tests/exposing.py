"""For each logical fault a scenario that exposes it, found by a search, and the record of what is said of each.

    python -m tests.exposing              search for every fault that has no scenarios of its own, and write both files
    python -m tests.exposing ID ...       say what becomes of these faults, and write nothing
    python -m tests.exposing --wide N     plant each fault in N scenarios of the walk, drawn at random, and write down
                                          how often it is explained rightly: rules are made by looking at the scenarios
                                          that were found, which says nothing yet of others

Candidates are the scenarios of the reference's nightly walk that meet a fault's conditions, the plainest first. Where
the walk has none (a model or a program that it does not have), they are made of the conditions themselves.

*Verifies*: that what is found differs from the twin, or ends the run; that its control passes.
*Does not verify*: that no plainer scenario would do.
"""

from __future__ import annotations

import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read by torch when its first kernel runs

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

from shardproof.faults.catalogue import CATALOGUE, Fault, mechanisms
from shardproof.faults.confusion_table import confusion, confusion_lines
from shardproof.laboratory.judge import ResolvedScenario, run_reference
from shardproof.program import operations
from shardproof.protocol.registry import system_named
from shardproof.scenario import Scenario
from shardproof.space.constraints import impossible
from shardproof.space.files import load_space
from shardproof.space.plan import Selection, make_plan

ROOT = Path(__file__).parents[1]
DOES = "does"
"""The condition that is about operations, not about an axis."""

FOUND = ROOT / "scenarios" / "reference" / "exposing.toml"
RECORD = ROOT / "tests" / "golden" / "faults.toml"
WIDE = RECORD.with_name("faults_wide.toml")
DRAWS = {"wide": "wide", "unseen": "third"}
"""Of the scenarios drawn at random the name of each draw, and its seed. The misses of the second are never looked at.
Those of the seed that it had before were, when rules were made; so it has another."""

TRIES = 60
"""How many candidates are tried for a fault."""

PLAIN = {"mesh": ("1x2x1", "1x4x1", "2x2x1", "1x2x2", "1x3x1"), "checkpoint": ("sharded", "gathered")}
"""Values of axes that conditions leave open, where candidates are made of the conditions."""


@dataclass(frozen=True)
class Said:
    """What became of a fault in one scenario. verdict: `mismatch`, `pass`, `no effect`, `unknown`, or `crash: TYPE`.
    mechanisms: of the explanations, best first."""

    verdict: str
    mechanisms: tuple[str, ...] = ()

    @property
    def noticed(self) -> bool:
        return self.verdict == "mismatch" or self.verdict.startswith("crash")


def can_show(fault: Fault, scenario: Scenario) -> bool:
    """Whether a scenario meets the conditions under which a fault shows."""
    conditions = dict(fault.shows or {})
    does = conditions.pop(DOES, ())
    return set(does) <= set(operations(scenario.program)) and all(
        any(fnmatchcase(scenario.axis_text(axis), pattern) for pattern in patterns)
        for axis, patterns in conditions.items()
    )


def said(scenario: Scenario) -> Said:
    """Plants a scenario's faults in the reference, here, and judges what it held."""
    found, _, notes = run_reference(ResolvedScenario.from_scenario(scenario))
    explained = tuple(e.mechanism for e in found.explanations)
    if found.distrust:
        return Said("unknown")
    if crash := notes.get("crash"):
        return Said(f"crash: {crash['type']}", explained)
    if found.differences:
        return Said("mismatch", explained)
    return Said("no effect" if notes.get("no_effect") else "pass")


@cache
def _walked() -> tuple[Scenario, ...]:
    """The reference's part of the nightly plan, the plainest scenario first."""
    plan = make_plan([load_space("nightly")], Selection(systems=("reference",)))
    return tuple(sorted(plan.supported, key=_plainness))


def _plainness(scenario: Scenario) -> tuple[int, int, str]:
    return len(scenario.axis_values(only_changed=True)), scenario.mesh.world, scenario.id


def _made(fault: Fault) -> Iterator[Scenario]:
    """Scenarios of the conditions themselves; a pattern stands for the values of the walk that it matches."""
    values: dict[str, Sequence[str]] = dict(PLAIN)
    for axis, patterns in (fault.shows or {}).items():
        if axis == DOES:
            continue
        known = dict.fromkeys(s.axis_text(axis) for s in _walked())
        values[axis] = [v for p in patterns for v in ([k for k in known if fnmatchcase(k, p)] or [p])]
    for chosen in product(*values.values()):
        scenario = Scenario.from_axes(dict(zip(values, chosen, strict=True)))
        if system_named("reference").refusal(scenario) is None and impossible(scenario) is None:
            yield scenario


def search(fault: Fault) -> tuple[Scenario | None, int, str]:
    """The first candidate that exposes a fault, how many were tried, and where it is from."""
    tried = 0
    walked = (s for s in _walked() if can_show(fault, s))
    for origin, candidates in (("walk", walked), ("conditions", _made(fault))):
        for scenario in islice(candidates, TRIES):
            tried += 1
            if said(replace(scenario, faults=(fault.id,))).noticed and said(scenario).verdict == "pass":
                return scenario, tried, origin
    return None, tried, "nowhere"


def record_of(fault: Fault) -> dict[str, Any]:
    """What the record says of a fault: its verdicts, and whether its mechanism is named first, or among three."""
    answers = [said(Scenario.from_axes({**axes, "faults": fault.id})) for axes in fault.scenario_axes]
    right = set(mechanisms()[fault.mechanism])
    named = {first: all(right & set(a.mechanisms[:first]) for a in answers) for first in (1, 3)}
    explained = {"top1": named[1], "top3": named[3]} if right else {}
    return {
        "verdict": [a.verdict for a in answers],
        **explained,
        "said": [a.mechanisms[0] if a.mechanisms else "" for a in answers],
    }


def drawn(fault: Fault, count: int, seed: str) -> Iterator[Said]:
    """What is said of a fault in scenarios of the walk in which it shows, drawn at random; the seed is a text.

    A fault with scenarios of its own has no conditions, and where it ends a run it was planted where it cannot be.
    """
    candidates = [s for s in _walked() if can_show(fault, s)]
    random.Random(f"{seed} {fault.id}").shuffle(candidates)
    shown = (said(replace(s, faults=(fault.id,))) for s in candidates[: 5 * count])
    kept = (found for found in shown if found.noticed and (fault.shows is not None or found.verdict == "mismatch"))
    return islice(kept, count)


def wide(count: int) -> None:
    """Plant every fault that can be explained in some scenarios each, print how often it is, and write that down; once
    more in scenarios of another draw, whose misses nobody looks at when rules are made."""
    import tomli_w

    figures: dict[str, Any] = {"each": count}
    for draw, seed in DRAWS.items():
        answers = [
            (fault.mechanism, found)
            for fault in CATALOGUE.values()
            if mechanisms()[fault.mechanism]
            for found in drawn(fault, count, seed)
        ]
        right = [sum(bool({*mechanisms()[m]} & {*found.mechanisms[:n]}) for m, found in answers) for n in (1, 3)]
        rows = confusion((mechanism, found.mechanisms[0] if found.mechanisms else "") for mechanism, found in answers)
        print(f"{len(answers)} scenarios: {right[0]} right in the first explanation, {right[1]} in the first three")
        print("\n".join(confusion_lines(rows)))
        said_of = {row.mechanism: row.said for row in rows}
        figures[draw] = {"scenarios": len(answers), "top1": right[0], "top3": right[1], "said": said_of}
    WIDE.write_text(tomli_w.dumps(figures), "utf-8")


def main(names: Sequence[str]) -> int:
    """Search, report, and write both files if every fault was asked for."""
    import tomli_w

    if names[:1] == ["--wide"]:
        wide(int(names[1]))
        return 0
    found: dict[str, dict[str, str]] = {}
    missed = []
    for fault in CATALOGUE.values():
        if fault.shows is None or (names and fault.id not in names):
            continue
        scenario, tried, origin = search(fault)
        if scenario is None:
            missed.append(fault.id)
            print(f"{fault.id}: NOT FOUND after {tried}", flush=True)
            continue
        axes = {axis: scenario.axis_text(axis) for axis in scenario.axis_values(only_changed=True)}
        found[fault.id] = axes
        print(f"{fault.id}: {tried} tried, of the {origin}: {axes}", flush=True)
    if not names:
        every = (replace(f, scenario_axes=(found[f.id],)) if f.id in found else f for f in CATALOGUE.values())
        RECORD.write_text(tomli_w.dumps({fault.id: record_of(fault) for fault in every}), "utf-8")
        head = FOUND.read_text("utf-8").partition("schema")[0]
        FOUND.write_text(head + tomli_w.dumps({"schema": 1, "fault": found}), "utf-8")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
