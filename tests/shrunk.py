"""Known defects that the shrinker must bring down to a scenario of a few axes: the tables, and how starts are chosen.

The table has one entry a defect: the big scenario that it starts from, the simplest one that the shrinker must reach,
and how many scenarios it may try on the way. Entries of the reference are planted faults, those of a library are
entries of its `issues.toml`. The tables lie beside each system's conformance tests, in `shrunk.toml`; this module
writes them:

    python -m tests.shrunk reference torch-fsdp2

Nobody chooses a start by hand. The scenarios of the nightly walk that have at least `BIG` axes at no default are put
into an order that the digests of the defect and the scenario decide, and the first that fails is the start:

* of a planted fault, the first that it makes fail;
* of a library's defect, the first of those in its known issue's axes which fails as that issue says when every other
  defect is cured (`+cured:-ID`), so that nothing else can be what is shrunk.

Which defects of a library are taken is decided in the same way: the first few, by the digest of their ids, for which
`MOST_RUN` scenarios have shown a start. Of the faults, `frozen-state-dropped` needs an order of operations that no
program of the nightly has. Not taken are defects that hang, since every attempt costs a deadline there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import tomli_w
from shardproof.checks.canaries import CAUGHT
from shardproof.faults.catalogue import CATALOGUE
from shardproof.investigate.shrink import Shrunk, needed, shrink
from shardproof.issues.known_issues import KnownIssue, KnownIssues, known_issues_of
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.registry import system_named
from shardproof.protocol.system import System
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.space.files import load_space
from shardproof.space.plan import Selection, make_plan
from shardproof.tables import load_toml
from shardproof.versions import with_cures

BIG = 7
"""Axes that a start has at no default, at least. The median of the nightly's scenarios has seven or eight."""

MOST_RUN = 12
"""How many scenarios of a library are run in search of a start for one defect."""

MOST_SIMULATED = 400
"""How many scenarios of the reference are run in search of a start for one fault."""

OF_A_LIBRARY = 3
"""How many defects of each library are taken."""

LIMIT_S = {True: 60.0, False: 300.0}
"""Seconds that shrinking may take: on a system that runs in lockstep, and on one with real ranks."""

DEADLINE_S = 30.0
FOLDER = Path(__file__).parent / "conformance"


@dataclass(frozen=True)
class Case:
    """One defect, where shrinking starts, what it must come to, and how many scenarios it tries."""

    defect: str
    start: Scenario
    least: Scenario
    signature: str
    tried: int

    @property
    def axes(self) -> dict[str, str]:
        """The axes that the defect needs: those that are at no default."""
        return needed(self.least)


def table_of(system: System) -> Path:
    """Where the cases of a system lie."""
    return FOLDER / system.name.replace("-", "_") / "shrunk.toml"


def cases(systems: Iterable[System]) -> list[Case]:
    """Every case of these systems."""
    found = []
    for system in systems:
        file = table_of(system)
        if not file.is_file():
            continue
        for entry in load_toml(file.read_text("utf-8"), str(file))["case"]:
            start, least = (Scenario().with_axes(entry[key]) for key in ("start", "least"))
            found.append(Case(entry["defect"], start, least, entry["signature"], entry["tried"]))
    return found


def laboratory_of(system: System) -> Laboratory:
    """A laboratory that is warm for one system."""
    return Laboratory(jobs=1, deadline_s=DEADLINE_S, systems={system.name})


def shrunk(first: Result, laboratory: Laboratory) -> Shrunk:
    """What the command `shrink` makes of a failure, in the time that it may take."""
    limit_s = LIMIT_S[system_named(first.scenario.system).world == "lockstep"]
    return shrink(first, lambda s: laboratory.examine_one(s, confirm=False), laboratory.examine_one, limit_s)


def starts(system: System, laboratory: Laboratory) -> Iterator[tuple[str, Result]]:
    """Each defect's id, and the failure that shrinking starts from."""
    plan = make_plan([load_space("nightly")], Selection(systems=(system.name,)))
    big = [scenario for scenario in plan.supported if len(needed(scenario)) >= BIG]
    if system.world == "lockstep":
        yield from _planted(big, laboratory)
    else:
        yield from _known(system, big, laboratory)


def _planted(big: Sequence[Scenario], laboratory: Laboratory) -> Iterator[tuple[str, Result]]:
    for fault in CATALOGUE.values():
        for scenario in _drawn(fault.id, big)[:MOST_SIMULATED]:
            result = laboratory.examine_one(replace(scenario, faults=(fault.id,)), confirm=False)
            if result.verdict in CAUGHT:
                yield fault.id, result
                break
        else:
            print(f"{fault.id}: no start", file=sys.stderr, flush=True)


def _known(system: System, big: Sequence[Scenario], laboratory: Laboratory) -> Iterator[tuple[str, Result]]:
    issues = [issue for issue in known_issues_of(system) if issue.cure and not _hangs(issue)]
    found = 0
    for issue in sorted(issues, key=lambda issue: _digest(issue.id)):
        start = _start(issue, [scenario for scenario in big if issue.match.applies(scenario)], laboratory)
        print(f"{issue.id}: {start.scenario if start else 'no start'}", file=sys.stderr, flush=True)
        if start is None:
            continue
        yield issue.id, start
        found += 1
        if found == OF_A_LIBRARY:
            return


def _start(issue: KnownIssue, wide: Sequence[Scenario], laboratory: Laboratory) -> Result | None:
    """The first of some scenarios that fails as the issue says, with every other defect cured."""
    wide = list(dict.fromkeys(replace(s, version=with_cures("", f"-{issue.cure}")) for s in wide))
    for scenario in _drawn(issue.id, wide)[:MOST_RUN]:
        result = laboratory.examine_one(scenario)
        if KnownIssues((issue,)).match(result):
            return result
    return None


def _hangs(issue: KnownIssue) -> bool:
    return any(text.startswith("deadline") for text in issue.match.evidence)


def _drawn(defect: str, scenarios: Sequence[Scenario]) -> list[Scenario]:
    """The scenarios in an order that nobody chose."""
    return sorted(scenarios, key=lambda scenario: _digest(f"{defect} {scenario.id}"))


def _digest(text: str) -> bytes:
    return sha256(text.encode()).digest()


def main(names: Sequence[str]) -> None:
    """Choose the starts of some systems, shrink them, and write their tables."""
    for name in names:
        system = system_named(name)
        entries = []
        with laboratory_of(system) as laboratory:
            for defect, first in starts(system, laboratory):
                found = shrunk(first, laboratory)
                least = found.result.scenario
                print(f"{defect}: {found.tried} tried: {first.scenario} -> {least}", file=sys.stderr, flush=True)
                if not found.complete:
                    raise SystemExit(f"{defect}: the time was up before nothing simpler was left to try")
                entries.append(_entry(defect, first, found))
        head = "# What the shrinker must make of known defects. Written by `python -m tests.shrunk`, which says how.\n"
        table_of(system).write_text(head + tomli_w.dumps({"schema": 1, "case": entries}), "utf-8")


def _entry(defect: str, first: Result, found: Shrunk) -> dict[str, object]:
    least = found.result.scenario
    return {
        "defect": defect,
        "signature": first.signature,
        "tried": found.tried,
        "needs": sorted(needed(least)),
        "least": least.axis_values(only_changed=True),
        "start": first.scenario.axis_values(only_changed=True),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
